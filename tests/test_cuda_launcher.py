"""What the driver is told of a launch; a driver that writes it down stands in for the real one."""

from __future__ import annotations

import sys
from ctypes import c_void_p, string_at
from types import ModuleType, SimpleNamespace

import cuda.bindings.nvrtc  # noqa: F401 - it looks into the real driver's module
import pytest
import torch

from chairlift.cuda_kernels.compiler import CompiledSource, KernelUsage
from chairlift.cuda_kernels.kernel_cache import KernelCache
from chairlift.cuda_kernels.launcher import CudaError, CudaLauncher, Launch
from chairlift.cuda_kernels.params import SiluMulParams

KERNEL = "silu_mul<float>"


class Driver(ModuleType):
    """The calls of ``cuda.bindings.driver`` that a launcher makes."""

    CUkernel = CUfunction = int
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared bytes"
    )

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.launches, self.attributes, self.status = [], [], 0

    def cuDeviceGet(self, index):  # noqa: N802 - the driver's name
        return 0, f"device {index}"

    def cuKernelSetAttribute(self, *arguments):  # noqa: N802
        self.attributes.append(arguments)
        return (0,)

    def cuLaunchKernel(self, *arguments):  # noqa: N802
        *rest, pointers, extra = arguments
        struct = string_at(c_void_p.from_address(pointers).value, 24)
        self.launches.append((*rest, struct, extra))
        return (self.status,)

    def cuGetErrorString(self, status):  # noqa: N802
        return 0, f"error {status}".encode()


class ObjectCode:
    """One cubin, whose kernels have the handle 77."""

    @staticmethod
    def from_cubin(cubin):
        assert cubin == b"cubin of sm_90"
        return ObjectCode()

    def get_kernel(self, name):
        assert name == f"symbol of {KERNEL}"
        return SimpleNamespace(handle=77)


def compile_with(name, text, instantiations, architecture):
    (kernel,) = instantiations
    return CompiledSource(
        f"cubin of {architecture}".encode(),
        {kernel: f"symbol of {kernel}"},
        {kernel: KernelUsage(32, 0, 0, 1_000)},
    )


@pytest.fixture
def driver(monkeypatch):
    driver, core = Driver(), ModuleType("cuda.core")
    core.ObjectCode = ObjectCode
    monkeypatch.setattr("cuda.bindings.driver", driver, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a device")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(shared_memory_per_block_optin=200_000),
    )
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=1_000 + index)
    )
    return driver


@pytest.fixture
def launcher(driver, tmp_path):
    return CudaLauncher(3, KernelCache(tmp_path, compile_with))


def test_a_launch_has_the_grid_the_stream_and_the_struct(driver, launcher):
    params = SiluMulParams(16, 32, 8)
    launcher.launch(Launch(KERNEL, (4, 5, 6), 256, params, 2_048))
    launcher.launch(Launch(KERNEL, (1, 1, 1), 256, params))
    first, second = driver.launches
    assert first == (77, 4, 5, 6, 256, 1, 1, 2_048, 1_003, bytes(params), 0)
    assert second[7] == 0
    # Loaded once, with all the dynamic shared memory that the device leaves it.
    assert driver.attributes == [("dynamic shared bytes", 199_000, 77, "device 3")]


def test_nothing_is_launched_for_nothing(driver, launcher):
    launcher.launch(Launch(KERNEL, (4, 0, 1), 256, SiluMulParams()))
    assert not driver.launches


def test_what_the_driver_refuses_is_an_error(driver, launcher):
    driver.status = 701
    with pytest.raises(CudaError, match=r"launching silu_mul<float> .* \(1, 1, 1\): error 701"):
        launcher.launch(Launch(KERNEL, (1, 1, 1), 256, SiluMulParams()))


def test_kernels_are_loaded_beforehand(driver, launcher, monkeypatch):
    launcher.load([KERNEL])
    monkeypatch.setattr(launcher, "_cache", None)  # nothing is compiled any more
    launcher.launch(Launch(KERNEL, (1, 1, 1), 256, SiluMulParams()))
    assert len(driver.launches) == 1


def test_a_device_that_is_too_old_is_refused(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(CudaError, match=r"compute capability 7\.5; the kernels need 8\.0"):
        CudaLauncher(0, KernelCache(tmp_path, compile_with))


def test_packages_that_are_missing_are_named(driver, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(CudaError, match=r"pip install 'chairlift\[cuda\]'"):
        CudaLauncher(0, KernelCache(tmp_path, compile_with))

"""A CUDA device made of g++ and fibers (see emulator/emulator.h): compiles, keeps memory, launches.

A compilation is kept in the temporary folder under the hash of all that went into it.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

import torch

from chairlift.cuda_kernels.catalogue import SOURCES, header_names, read_source

HEADERS = Path(__file__).parent / "emulator"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-clobbered",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-fsanitize=bounds-strict,alignment,signed-integer-overflow,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)


class EmulatorError(Exception):
    """A kernel did what no kernel may do; the message says what and where."""


class Order(IntEnum):
    FORWARD = 0
    REVERSE = 1
    RANDOM = 2


@dataclass(frozen=True)
class Schedule:
    """In which order blocks and threads run, and which end of each buffer is at a guard."""

    order: Order
    at_end: bool
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.order.name.lower()}{self.seed or ''}"


SCHEDULES = (
    Schedule(Order.FORWARD, at_end=True),
    Schedule(Order.REVERSE, at_end=False),
    Schedule(Order.RANDOM, at_end=True, seed=1),
)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("order", ctypes.c_uint),
        ("placement", ctypes.c_uint),
        ("seed", ctypes.c_ulonglong),
    )


class KernelLibrary:
    """Kernels of one source, compiled for the CPU."""

    def __init__(self, text: str, instantiations: Sequence[str]) -> None:
        self.kernels = {name: number for number, name in enumerate(instantiations)}
        self._library = ctypes.CDLL(str(_build(text, instantiations)))
        self._library.emulator_allocate.restype = ctypes.c_void_p
        self._library.emulator_allocate.argtypes = (
            ctypes.c_char_p,
            ctypes.c_ulonglong,
            ctypes.c_uint,
            ctypes.c_int,
        )
        self._library.emulator_launch.restype = ctypes.c_char_p
        self._library.emulator_launch.argtypes = (
            ctypes.c_uint,
            ctypes.POINTER(_Launch),
            ctypes.c_void_p,
            ctypes.c_ulonglong,
        )

    def allocate(self, name: str, size: int, at_end: bool, fill: bool) -> int:
        address = self._library.emulator_allocate(name.encode(), size, at_end, fill)
        if not address:
            raise MemoryError(f"cannot map {size} bytes for {name}")
        return address

    def free_all(self) -> None:
        self._library.emulator_free_all()

    def launch(self, kernel: str, launch: _Launch, params: ctypes.Structure) -> None:
        message = self._library.emulator_launch(
            self.kernels[kernel],
            ctypes.byref(launch),
            ctypes.addressof(params),
            ctypes.sizeof(params),
        )
        if message is not None:
            raise EmulatorError(message.decode())


@cache
def library_of(source: str, instantiations: tuple[str, ...]) -> KernelLibrary:
    """Compile kernels of a file of ``cuda/``."""
    return KernelLibrary(SOURCES[source].text(), instantiations)


def _build(text: str, instantiations: Sequence[str]) -> Path:
    table = ", ".join(f"EMULATED_KERNEL({name})" for name in instantiations)
    program = f'#include "emulator.h"\n{text}\nEMULATED_KERNELS({table})\n'
    digest = hashlib.sha256("\0".join((program, *FLAGS)).encode())
    for path in sorted(HEADERS.iterdir()):
        digest.update(path.read_bytes())
    for name in header_names():
        digest.update(read_source(name).encode())
    folder = Path(tempfile.gettempdir()) / f"chairlift-emulator-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EmulatorError(f"{folder} belongs to somebody else")
    target = folder / f"{digest.hexdigest()[:32]}.so"
    if target.exists():
        return target
    compiler = shutil.which("g++")
    if compiler is None:
        raise EmulatorError("g++ is missing: the kernels' tests on the CPU need it")
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        as_file(files("chairlift") / "cuda") as headers,
    ):
        output = Path(scratch) / "kernels.so"
        source = Path(scratch) / "kernels.cpp"
        source.write_text(program, encoding="utf-8")
        command = [compiler, *FLAGS, f"-I{HEADERS}", f"-I{headers}", str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulatorError(done.stderr)
        output.replace(target)  # at once, whoever else compiles the same
    return target


class EmulatedDevice:
    """Memory and launches under one schedule. As a context it gives its memory back."""

    def __init__(self, library: KernelLibrary, schedule: Schedule) -> None:
        self._library = library
        self._schedule = schedule

    def __enter__(self) -> EmulatedDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.free_all()

    def allocate(self, name: str, size: int) -> int:
        """Reserve ``size`` bytes that nobody has touched, be they more than the memory there is."""
        return self._library.allocate(name, size, self._schedule.at_end, fill=False)

    def upload(self, name: str, tensor: torch.Tensor) -> int:
        """Copy a tensor into guarded memory; returns its address there."""
        tensor = tensor.contiguous()
        address = self._library.allocate(name, tensor.nbytes, self._schedule.at_end, fill=True)
        self.write(address, tensor)
        return address

    def write(self, address: int, tensor: torch.Tensor) -> None:
        """Copy a tensor to an address of the device."""
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)

    def download(self, address: int, like: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of that shape and type back."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
        return tensor

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel to its end; raises :class:`EmulatorError` for what it must not do."""
        schedule = self._schedule
        launch = _Launch(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            schedule.order,
            schedule.at_end,
            schedule.seed,
        )
        self._library.launch(kernel, launch, params)


def on_every_schedule(
    library: KernelLibrary,
    run: Callable[[EmulatedDevice], dict[str, torch.Tensor]],
    schedules: Sequence[Schedule] = SCHEDULES,
) -> dict[str, torch.Tensor]:
    """Run under each schedule and return the outputs; they must be the same to the last bit."""
    first: dict[str, torch.Tensor] | None = None
    for schedule in schedules:
        with EmulatedDevice(library, schedule) as device:
            outputs = run(device)
        if first is None:
            first = outputs
            continue
        for name, output in outputs.items():
            ours, theirs = (t.contiguous().view(torch.uint8) for t in (first[name], output))
            if not torch.equal(ours, theirs):
                raise EmulatorError(
                    f"{name} depends on the schedule: {schedules[0]} and {schedule} differ"
                )
    assert first is not None
    return first

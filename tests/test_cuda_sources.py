"""The CUDA sources travel inside the package and compile, without a GPU and without nvcc."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import pytest

from chairlift.cuda_kernels.catalogue import SOURCES
from chairlift.cuda_kernels.compiler import (
    CudaCompileError,
    KernelUsage,
    compile_source,
    read_usage,
)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MAX_STATIC_SHARED = 48 << 10


def test_the_package_has_all_of_them():
    checkout = Path(__file__).parents[1] / "cuda"
    if not checkout.is_dir():
        pytest.skip("the tests are not in a checkout")
    wanted = {path.name: path.read_text(encoding="utf-8") for path in checkout.iterdir()}
    package = (files("chairlift") / "cuda").iterdir()
    assert {entry.name: entry.read_text(encoding="utf-8") for entry in package} == wanted
    assert {f"{name}.cu" for name in SOURCES} == {name for name in wanted if name.endswith(".cu")}


def test_assembly_by_hand_is_in_one_header():
    for entry in (files("chairlift") / "cuda").iterdir():
        has_assembly = "asm" in entry.read_text(encoding="utf-8").replace("asm.", "")
        assert has_assembly == (entry.name == "ptx.cuh"), entry.name


@pytest.fixture(scope="module")
def compiled():
    """Every instantiation for every architecture; NVRTC works beside the interpreter."""
    work = [(source, arch) for arch in ARCHITECTURES for source in SOURCES.values()]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(
            lambda item: compile_source(
                item[0].name, item[0].text(), item[0].instantiations, item[1]
            ),
            work,
        )
        return dict(zip(((source.name, arch) for source, arch in work), results, strict=True))


def test_every_instantiation_compiles(compiled, print_at_end):
    """And the table of what each takes is printed at the end of the run."""
    lines = [f"{'kernel':44}" + "".join(f"{arch:>28}" for arch in ARCHITECTURES)]
    for source in SOURCES.values():
        for expression in source.instantiations:
            cells = []
            for arch in ARCHITECTURES:
                result = compiled[source.name, arch]
                assert result.symbols[expression].encode() in result.cubin
                usage = result.usage[expression]
                cells.append(
                    f"{usage.registers} regs {usage.spilled_bytes} spilled {usage.shared_bytes} B"
                )
            lines.append(f"{expression:44}" + "".join(f"{cell:>28}" for cell in cells))
    print_at_end("What each CUDA kernel takes", lines)
    assert len(lines) > 50


def test_decode_does_not_spill(compiled):
    checked = 0
    for arch in ARCHITECTURES:
        for expression, usage in compiled["paged_attention_decode", arch].usage.items():
            assert usage.spilled_bytes == 0, f"{expression} for {arch}: {usage}"
            assert usage.stack_bytes == 0, f"{expression} for {arch}: {usage}"
            checked += 1
    assert checked == len(ARCHITECTURES) * 38


def test_static_shared_memory_fits_every_device(compiled):
    for (name, arch), result in compiled.items():
        for expression, usage in result.usage.items():
            assert usage.shared_bytes <= MAX_STATIC_SHARED, (name, arch, expression)


def test_usage_is_read_from_the_log():
    log = """
ptxas info    : Compiling entry function '_Z1k' for 'sm_90'
ptxas info    : Function properties for _Z1k
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compiling entry function '_Z1j' for 'sm_90'
ptxas info    : Used 10 registers
"""
    assert read_usage(log) == {
        "_Z1k": KernelUsage(72, 20, 16, 512),
        "_Z1j": KernelUsage(10, 0, 0, 0),
    }


def test_what_does_not_compile_says_why():
    text = SOURCES["block_copy"].text() + "\nthis is not CUDA"
    with pytest.raises(
        CudaCompileError, match=r"(?s)block_copy\.cu does not compile for sm_90.*this is not CUDA"
    ):
        compile_source("block_copy", text, (), "sm_90")


def test_structs_that_differ_from_pythons_do_not_compile():
    text = (
        SOURCES["block_copy"]
        .text()
        .replace("long long block_bytes;", "int block_bytes, more, most;")
    )
    with pytest.raises(CudaCompileError, match="size of BlockCopyParams"):
        compile_source("block_copy", text, (), "sm_90")

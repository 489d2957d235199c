"""The CUDA sources travel inside the package and compile, without a GPU and without nvcc."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

SOURCES = sorted(
    entry.name for entry in (files("chairlift") / "cuda").iterdir() if entry.name.endswith(".cu")
)


def test_there_are_sources():
    assert "block_copy.cu" in SOURCES


def test_the_package_has_all_of_them():
    checkout = Path(__file__).parents[1] / "cuda"
    if not checkout.is_dir():
        pytest.skip("the tests are not in a checkout")
    wanted = {path.name: path.read_text(encoding="utf-8") for path in checkout.iterdir()}
    package = (files("chairlift") / "cuda").iterdir()
    assert {entry.name: entry.read_text(encoding="utf-8") for entry in package} == wanted


def compile_source(text: str, architecture: str) -> tuple[bool, str]:
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    # NVRTC writes into the object; Python shares the ones of a single byte.
    log = b" " * max(size, 2)
    nvrtc.nvrtcGetProgramLog(program, log)
    return status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_compiles(name, architecture):
    text = (files("chairlift") / "cuda" / name).read_text(encoding="utf-8")
    compiled, log = compile_source(text, architecture)
    assert compiled, log
    compiled, log = compile_source(text + "\nthis is not CUDA", architecture)
    assert not compiled
    assert "kernel.cu" in log

"""Compiled kernels on disk: real NVRTC, several processes, damage, folders nobody can write."""

from __future__ import annotations

import logging
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chairlift.cuda_kernels import kernel_cache
from chairlift.cuda_kernels.catalogue import SOURCES, source_of
from chairlift.cuda_kernels.compiler import CudaCompileError, compile_source
from chairlift.cuda_kernels.kernel_cache import KernelCache

KERNEL = "silu_mul<float>"
ARCH = "sm_90"


def same_kernels(one, other):
    """Machine code differs in the names that NVRTC makes up for what is private to a source."""
    codes = len(one.cubin), len(other.cubin)
    return (one.symbols, one.usage) == (other.symbols, other.usage) and codes[0] == codes[1]


class Compiler:
    """NVRTC, and a file that gets a byte for each compilation, whichever process it is in."""

    def __init__(self, tally: Path) -> None:
        self.tally = tally

    def __call__(self, name, text, instantiations, architecture):
        with self.tally.open("ab") as file:
            file.write(b"x")
        return compile_source(name, text, instantiations, architecture)

    @property
    def count(self) -> int:
        return self.tally.stat().st_size if self.tally.exists() else 0


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path / "tally")


@pytest.fixture
def cache(tmp_path, compiler):
    return KernelCache(tmp_path / "kernels", compiler)


def entries(cache: KernelCache) -> list[str]:
    return sorted(path.name for path in cache._folder.iterdir())


def test_a_kernel_is_compiled_once(cache, compiler):
    first = cache.get(KERNEL, ARCH)
    assert first.symbols[KERNEL].encode() in first.cubin
    assert first.usage[KERNEL].registers > 0
    again = KernelCache(cache._folder, compiler)
    assert again.get(KERNEL, ARCH) == first
    assert compiler.count == 1
    assert entries(cache) == [cache.path_of(KERNEL, ARCH).name]  # no lock, nothing half written


def test_architectures_and_instantiations_are_different_entries(cache, compiler):
    results = [
        cache.get(kernel, arch) for kernel in (KERNEL, "silu_mul<Half>") for arch in (ARCH, "sm_80")
    ]
    assert compiler.count == 4
    assert len({result.cubin for result in results}) == 4


@pytest.mark.parametrize("of", ["silu_mul.cu", "device.cuh"])
def test_a_changed_source_or_header_is_compiled_again(cache, compiler, monkeypatch, of):
    old = cache.get(KERNEL, ARCH)
    read = kernel_cache.read_source

    def changed(name):
        return read(name) + ("\n__device__ int more;\n" if name == of else "")

    for module in ("catalogue", "kernel_cache", "compiler"):
        monkeypatch.setattr(f"chairlift.cuda_kernels.{module}.read_source", changed)
    new = cache.get(KERNEL, ARCH)
    assert compiler.count == 2
    assert new.cubin != old.cubin
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("changed", ["NVRTC 1.0", "--other"])
def test_another_compiler_or_option_is_another_entry(cache, monkeypatch, changed):
    before = cache.path_of(KERNEL, ARCH)
    monkeypatch.setattr(kernel_cache, "toolchain", lambda: (changed,))
    assert cache.path_of(KERNEL, ARCH) != before


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "name"])
def test_a_damaged_entry_is_compiled_again(cache, compiler, caplog, damage):
    good = cache.get(KERNEL, ARCH)
    path = cache.path_of(KERNEL, ARCH)
    entry = bytearray(path.read_bytes())
    if damage == "flipped":
        entry[-1] ^= 1
    elif damage == "name":
        entry[45] ^= 1
    path.write_bytes(entry[: {"cut": len(entry) // 2, "empty": 0}.get(damage)])
    with caplog.at_level(logging.WARNING, "chairlift"):
        found = cache.get(KERNEL, ARCH)
    assert same_kernels(found, good)
    assert "is damaged" in caplog.text
    assert compiler.count == 2
    assert cache.get(KERNEL, ARCH) == found
    assert compiler.count == 2


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, compiler, caplog):
    file = tmp_path / "file"
    file.touch()
    cache = KernelCache(file / "kernels", compiler)  # below a file: root cannot write there either
    with caplog.at_level(logging.WARNING, "chairlift"):
        results = [cache.get(KERNEL, ARCH) for _ in range(2)]
    assert same_kernels(*results)
    assert caplog.text.count("compiled kernels cannot be kept") == 1


def test_an_entry_that_cannot_be_written_is_still_used(cache, monkeypatch, caplog):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert cache.get(KERNEL, ARCH).cubin
    assert "No space left on device" in caplog.text
    assert entries(cache) == []


def test_what_does_not_compile_is_not_kept(cache, monkeypatch):
    def refuse(*_):
        raise CudaCompileError("no")

    monkeypatch.setattr(cache, "_compile", refuse)
    with pytest.raises(CudaCompileError):
        cache.get(KERNEL, ARCH)
    assert entries(cache) == []


def test_a_kernel_that_there_is_not(cache):
    with pytest.raises(KeyError):
        cache.get("silu_mul<double>", ARCH)


def test_every_kernel_has_its_source():
    for source in SOURCES.values():
        for kernel in source.instantiations:
            assert source_of(kernel) is source


def first_use(folder, tally, begin, results):
    begin.wait(60)
    found = KernelCache(folder, Compiler(tally)).get(KERNEL, ARCH)
    results.put((os.getpid(), found.cubin))


def test_processes_that_come_at_once_compile_once(tmp_path, compiler):
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    folder = tmp_path / "kernels"
    processes = [
        context.Process(target=first_use, args=(folder, compiler.tally, begin, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    begin.set()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({pid for pid, _ in found}) == 4
    assert len({cubin for _, cubin in found}) == 1
    assert compiler.count == 1


def test_threads_that_come_at_once_compile_once(cache, compiler):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cache.get(KERNEL, ARCH), range(8)))
    assert all(each == found[0] for each in found)
    assert compiler.count == 1


def test_a_process_that_died_while_it_compiled_holds_nobody_up(cache, compiler):
    """The lock file it left is nobody's."""
    path = cache.path_of(KERNEL, ARCH)
    path.parent.mkdir()
    path.with_suffix(".lock").touch()
    assert cache.get(KERNEL, ARCH).cubin
    assert compiler.count == 1


def test_several_at_once(cache, compiler):
    kernels = [KERNEL, "silu_mul<Half>", "block_copy"]
    found = cache.get_all(kernels, ARCH)
    assert list(found) == kernels
    assert compiler.count == 3

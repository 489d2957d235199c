"""Compiled kernels on disk: each is compiled once for a source, a compiler and an architecture.

An entry is named by a hash of everything that went into it, so nothing is ever out of date, and
begins with a hash of its content, so a damaged one is compiled again. It appears by one rename: no
process reads half of it. Who comes while another compiles the same kernel waits for that one; the
system lets go of the lock of a process that dies. Where the folder cannot be written, kernels are
compiled at every start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from chairlift.cuda_kernels.catalogue import header_names, read_source, source_of
from chairlift.cuda_kernels.compiler import (
    CompiledSource,
    KernelUsage,
    compile_source,
    toolchain,
)

logger = logging.getLogger("chairlift")

_FORMAT = 1
"""Of an entry: raise it when its bytes mean something else."""
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8

Compile = Callable[[str, str, Sequence[str], str], CompiledSource]
"""As :func:`chairlift.cuda_kernels.compiler.compile_source`."""


class KernelCache:
    """The kernels of one folder; used from any number of threads and processes at once."""

    def __init__(self, folder: Path | None = None, compile_with: Compile = compile_source) -> None:
        """Use ``folder``; None: ``kernels`` in the user's cache. It is made when first needed."""
        if folder is None:
            from chairlift.default_model import cache_directory  # noqa: PLC0415  # it needs the hub

            folder = cache_directory() / "kernels"
        self._folder = folder
        self._compile = compile_with
        self._is_writable = True

    def get(self, kernel: str, architecture: str) -> CompiledSource:
        """Return one kernel, by its C++ name expression, for an architecture (``"sm_90"``).

        Raises:
            KeyError: no source has it.
            CudaCompileError: it does not compile.
        """
        path = self.path_of(kernel, architecture)
        with self._held(path):
            found = _read(path)
            if found is None:
                source = source_of(kernel)
                found = self._compile(source.name, source.text(), (kernel,), architecture)
                self._write(path, found)
        return found

    def get_all(self, kernels: Iterable[str], architecture: str) -> dict[str, CompiledSource]:
        """Return several kernels, compiled side by side: NVRTC works beside the interpreter."""
        names = list(kernels)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda kernel: self.get(kernel, architecture), names)
            return dict(zip(names, found, strict=True))

    def path_of(self, kernel: str, architecture: str) -> Path:
        """Where an entry is kept."""
        parts = [str(_FORMAT), kernel, architecture, *toolchain(), source_of(kernel).text()]
        for header in header_names():
            parts += [header, read_source(header)]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.kernel"

    @contextmanager
    def _held(self, path: Path) -> Iterator[None]:
        """Keep others from compiling the same, unless the entry is there or cannot be kept."""
        if path.exists() or not self._is_writable:
            yield
            return
        lock = path.with_suffix(".lock")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        except OSError as error:
            self._give_up(error)
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Whoever waits for this file goes on with the entry, and so does who makes another.
                lock.unlink(missing_ok=True)

    def _write(self, path: Path, compiled: CompiledSource) -> None:
        if not self._is_writable:
            return
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                whole = Path(scratch, path.name)
                whole.write_bytes(_encode(compiled))
                whole.replace(path)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_writable = False
        logger.warning(
            "compiled kernels cannot be kept in %s (%s): they are compiled at every start; set "
            "CHAIRLIFT_CACHE to a directory that can be written",
            self._folder,
            error.strerror or error,
        )


def _encode(compiled: CompiledSource) -> bytes:
    """Digest of the rest, length of the names, names, machine code."""
    usage = {name: asdict(usage) for name, usage in compiled.usage.items()}
    names = json.dumps({"symbols": compiled.symbols, "usage": usage}).encode()
    content = len(names).to_bytes(_LENGTH_BYTES, "little") + names + compiled.cubin
    return hashlib.sha256(content).digest() + content


def _read(path: Path) -> CompiledSource | None:
    """Return an entry; None where it is not there or damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    content = entry[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != entry[:_DIGEST_BYTES]:
        logger.warning("the compiled kernel %s is damaged, and compiled again", path)
        return None
    begin = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    names = json.loads(content[_LENGTH_BYTES:begin])
    return CompiledSource(
        cubin=content[begin:],
        symbols=names["symbols"],
        usage={name: KernelUsage(**usage) for name, usage in names["usage"].items()},
    )

"""Sharing PyTorch's thread pool with the Rust kernels.

On Linux PyTorch's operators run on OpenMP's pool, whose idle workers spin for a while; a second
pool would fight them for the cores. The OpenMP library that PyTorch has loaded is found among the
process's mappings and its ``GOMP_parallel`` handed to the kernels. Elsewhere, or with
``CHAIRLIFT_KERNEL_POOL=threads``, they use a small pool of their own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

import torch

from chairlift import _core

_OPENMP_LIBRARY = re.compile(r"/(libgomp|libiomp5|libomp)\b[^/]*\.so[^/]*$")


@functools.cache
def share_openmp_pool() -> str:
    """Hand PyTorch's pool to the kernels, once; returns the name of the pool in use."""
    if os.environ.get("CHAIRLIFT_KERNEL_POOL") != "threads":
        for path in _loaded_openmp_libraries():
            try:
                parallel = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):  # cannot be loaded by its path, or lacks the name
                continue
            address = ctypes.cast(parallel, ctypes.c_void_p).value
            if address is not None:
                _core.use_openmp(address)
                break
    return _core.kernel_pool()


def _loaded_openmp_libraries(mappings: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the OpenMP libraries mapped into this process, PyTorch's own first."""
    try:
        maps = mappings.read_text(encoding="utf-8")
    except OSError:
        return []
    columns = (line.split(maxsplit=5) for line in maps.splitlines())
    mapped = {c[5].removesuffix(" (deleted)") for c in columns if len(c) == 6}
    paths = {path for path in mapped if _OPENMP_LIBRARY.search(path)}
    torch_home = str(Path(torch.__file__).parent.parent)
    return sorted(paths, key=lambda path: (not path.startswith(torch_home), path))

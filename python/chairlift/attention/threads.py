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
            parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if parallel is None:
                continue
            address = ctypes.cast(parallel, ctypes.c_void_p).value
            if address is not None:
                _core.use_openmp(address)
                break
    return _core.kernel_pool()


def _loaded_openmp_libraries() -> list[str]:
    """Paths of the OpenMP libraries mapped into this process, PyTorch's own first."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    columns = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = {c[5] for c in columns if len(c) == 6 and _OPENMP_LIBRARY.search(c[5])}
    torch_home = str(Path(torch.__file__).parent.parent)
    return sorted(paths, key=lambda path: (not path.startswith(torch_home), path))

"""Running models on a CUDA device: the executor behind ``device="cuda"``, and its parts."""

from __future__ import annotations

from chairlift.gpu.executor import CudaExecutor, CudaExecutorConfig

__all__ = ["CudaExecutor", "CudaExecutorConfig"]

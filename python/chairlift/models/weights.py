"""Reading a model's tensors from safetensors, one at a time and each exactly once.

The files are mapped, not read: a tensor's bytes are touched when it is taken, and converted
straight into the tensor that will be kept. Parts of a fused weight (q, k, v; gate, up) are copied
into their rows of it. So loading needs the finished model plus one layer, never a second copy of
the whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError, safe_open

from chairlift.errors import ModelFileError, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers of old checkpoints that follow from the configuration."""


class _TensorFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """The tensors of a model directory, each to be taken once by its name."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Open the safetensors of ``directory``; what is taken is converted and put on ``device``.

        Raises:
            ModelFileError: a file is missing, truncated or malformed.
        """
        self._directory = directory
        self._dtype = dtype
        self.device = torch.device(device)
        self._sources: dict[str, _TensorFile] = {}  # name -> open file that holds it
        for path in _files(directory):
            file = _open(path)
            self._sources.update(dict.fromkeys(file.keys(), file))
        self._left = {name for name in self._sources if not _IGNORED.fullmatch(name)}

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the tensor ``name``, converted to the model's dtype.

        Raises:
            WeightsError: it is missing, or its shape is not ``shape``.
        """
        return self._copy([name], [shape])

    def take_rows(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        """Return the tensors ``names``, of ``rows`` rows each, one below the other."""
        return self._copy(names, [(count, columns) for count in rows])

    def take_entries(self, names: Sequence[str], counts: Sequence[int]) -> Tensor:
        """Return the vectors ``names``, of ``counts`` entries each, one after the other."""
        return self._copy(names, [(count,) for count in counts])

    def take_scale(self, names: Sequence[str]) -> float:
        """Return the scale that the checkpoint has under one of ``names``; 1 if under none.

        Raises:
            WeightsError: it is not one number above 0.
        """
        name = next((name for name in names if name in self._sources), None)
        if name is None:
            return 1.0
        tensor = self._sources[name].get_tensor(name)
        scale = float(tensor) if tensor.numel() == 1 else math.nan
        if not 0 < scale < math.inf:
            shown = scale if tensor.numel() == 1 else f"of shape {list(tensor.shape)}"
            raise WeightsError(
                f"tensor {name} of {self._directory} is {shown}; a scale is one number above 0"
            )
        self._left.discard(name)
        return scale

    def ignore(self, name: str) -> None:
        """Leave ``name`` out on purpose."""
        self._left.discard(name)

    def check_all_taken(self) -> None:
        """Raise :class:`WeightsError` if the checkpoint holds tensors that nothing asked for."""
        if self._left:
            raise WeightsError(
                f"{self._directory} holds {len(self._left)} tensors that its config.json has no "
                f"place for ({_some(self._left)}); check that config.json belongs to these weights"
            )

    def _copy(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        rows = sum(shape[0] for shape in shapes)
        whole = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self.device)
        begin = 0
        for name, shape in zip(names, shapes, strict=True):
            whole[begin : begin + shape[0]].copy_(self._source(name, shape))
            begin += shape[0]
        return whole

    def _source(self, name: str, shape: Sequence[int]) -> Tensor:
        file = self._sources.get(name)
        if file is None:
            raise WeightsError(
                f"{self._directory} has no tensor {name} (of shape {list(shape)}); check that "
                "config.json belongs to these weights and that all files were fetched"
            )
        tensor = file.get_tensor(name)
        if list(tensor.shape) != list(shape):
            raise WeightsError(
                f"tensor {name} of {self._directory} has shape {list(tensor.shape)}, but "
                f"config.json asks for {list(shape)}; check that it belongs to these weights"
            )
        if not tensor.is_floating_point():
            raise WeightsError(
                f"tensor {name} of {self._directory} is of type {tensor.dtype}; only checkpoints "
                "in floating point are supported"
            )
        self._left.discard(name)
        return tensor


def _files(directory: Path) -> list[Path]:
    """Find the single file, or the shards that the index names."""
    index = directory / _INDEX
    if not index.is_file():
        single = directory / _SINGLE
        if single.is_file():
            return [single]
        others = [
            path.name for kind in ("*.bin", "*.pth", "*.gguf") for path in directory.glob(kind)
        ]
        hint = f" (it has {_some(others)})" if others else ""
        raise ModelFileError(
            f"{directory} has neither {_SINGLE} nor {_INDEX}{hint}; give a model in safetensors "
            "format"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFileError(f"{index} cannot be read ({error}); fetch it again") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelFileError(
            f"{directory} lacks {len(missing)} of the {len(names)} files that {_INDEX} names "
            f"({_some(missing)}); fetch them again"
        )
    return [directory / name for name in names]


def _open(path: Path) -> _TensorFile:
    try:
        file: _TensorFile = safe_open(path, framework="pt")
        return file
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelFileError(
            f"{path} of {size:,} bytes is truncated or not a safetensors file ({error}); fetch it "
            "again"
        ) from error


def _some(names: Sequence[str] | set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")

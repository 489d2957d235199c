"""The CUDA sampling kernels as a sampler, on the emulated device."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass, field

import numpy as np
import torch
from emulated_attention import TYPE_NAMES
from emulated_device import SCHEDULES, EmulatedDevice, Schedule, library_of

from chairlift.cuda_kernels.catalogue import (
    EDIT_THREADS,
    EDIT_TOKENS,
    LOGPROBS_THREADS,
    MAX_LISTED,
    RESET_THREADS,
    RESET_TOKENS,
    SAMPLE_THREADS,
)
from chairlift.cuda_kernels.params import (
    LogitEditsParams,
    LogprobsParams,
    SampleParams,
    SamplingResetParams,
    SamplingRow,
)
from chairlift.executor import STATUS_FAILED, RaggedLogprobs, RowResets
from chairlift.sampler import SamplerOutput


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that nobody has written: not-a-number, or -1."""
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    return torch.full((size,), 255, dtype=torch.uint8).view(dtype).view(*shape)


def padded(array: np.ndarray) -> torch.Tensor:
    """``[N, ...]`` and one entry more of -1, as where a captured graph is larger than the step."""
    return torch.tensor(
        np.concatenate((array, np.full_like(array, -1, shape=(1, *array.shape[1:]))))
    )


@dataclass
class EmulatedSampler:
    """Rows that keep their state between steps, under one schedule."""

    max_rows: int
    vocab_size: int
    schedule: Schedule = SCHEDULES[0]
    state: dict[str, torch.Tensor] = field(init=False)
    """What the kernels keep on the device."""
    last_tokens: torch.Tensor = field(init=False)
    num_best: np.ndarray = field(init=False)
    """[max_rows] log-probabilities that each row wants; the host's to know."""

    def __post_init__(self) -> None:
        rows, listed = self.max_rows, (self.max_rows, MAX_LISTED)
        self.state = {
            "row_params": poisoned(rows, sizeof(SamplingRow), dtype=torch.uint8),
            "row_counts": poisoned(rows, self.vocab_size, dtype=torch.int32),
            "row_bias_ids": poisoned(*listed, dtype=torch.int32),
            "row_bias_values": poisoned(*listed, dtype=torch.float32),
            "row_suppressed_ids": poisoned(*listed, dtype=torch.int32),
        }
        self.last_tokens = poisoned(rows, dtype=torch.int32)
        self.num_best = np.full(rows, -1)

    def _upload_state(self, device: EmulatedDevice, struct: type) -> dict[str, int]:
        wanted = {name for name, _ in struct._fields_}
        return {name: device.upload(name, t) for name, t in self.state.items() if name in wanted}

    def _download_state(self, device: EmulatedDevice, addresses: dict[str, int]) -> None:
        for name in addresses.keys() & self.state.keys():
            self.state[name] = device.download(addresses[name], self.state[name])

    def reset(self, resets: RowResets) -> None:
        """Give rows new parameters and histories."""
        self.num_best[resets.rows] = resets.ints[:, 3]
        arrays = {
            "rows": padded(resets.rows),
            "floats": padded(resets.floats),
            "ints": padded(resets.ints),
            **{
                name: torch.tensor(getattr(resets, name))
                for name in (
                    "id_ranges",
                    "bias_ranges",
                    "suppressed_ranges",
                    "ids",
                    "bias_ids",
                    "bias_values",
                    "suppressed_ids",
                )
            },
        }
        library = library_of("sampling_reset", ("sampling_reset",))
        with EmulatedDevice(library, self.schedule) as device:
            addresses = self._upload_state(device, SamplingResetParams)
            uploaded = {name: device.upload(name, array) for name, array in arrays.items()}
            device.launch(
                "sampling_reset",
                (len(resets.rows) + 1, -(-self.vocab_size // RESET_TOKENS), 1),
                RESET_THREADS,
                SamplingResetParams(**addresses, **uploaded, vocab_size=self.vocab_size),
            )
            self._download_state(device, addresses)

    def sample(
        self,
        logits: torch.Tensor,
        sample_rows: np.ndarray,
        output_indices: np.ndarray,
        logits_rows: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Edit, sample and tell log-probabilities, as one step does."""
        count, kernel = len(sample_rows), f"<{TYPE_NAMES[logits.dtype]}>"
        inputs = {
            "logits": logits,
            "sample_rows": padded(sample_rows),
            "output_indices": padded(output_indices),
        }
        if logits_rows is not None:
            inputs["logits_rows"] = padded(logits_rows)
        edited = self._edit(inputs, "logit_edits" + kernel)
        token_ids = poisoned(count + 1, dtype=torch.int32)
        statuses = poisoned(count + 1, dtype=torch.uint8)
        library = library_of("sample", ("sample" + kernel,))
        with EmulatedDevice(library, self.schedule) as device:
            addresses = self._upload_state(device, SampleParams)
            outputs = {
                "token_ids": device.upload("token_ids", token_ids),
                "statuses": device.upload("statuses", statuses),
                "last_tokens": device.upload("last_tokens", self.last_tokens),
            }
            uploaded = {name: device.upload(name, array) for name, array in inputs.items()}
            device.launch(
                "sample" + kernel,
                (count + 1, 1, 1),
                SAMPLE_THREADS,
                SampleParams(
                    **addresses,
                    **outputs,
                    **uploaded,
                    edited=device.upload("edited", edited),
                    vocab_size=self.vocab_size,
                ),
            )
            self._download_state(device, addresses)
            token_ids = device.download(outputs["token_ids"], token_ids)
            statuses = device.download(outputs["statuses"], statuses)
            self.last_tokens = device.download(outputs["last_tokens"], self.last_tokens)
        assert (token_ids[-1], statuses[-1]) == (-1, 255)  # padding is not written
        num_best = self.num_best[sample_rows].astype(np.int32)
        found, failed = tell_logprobs(
            logits,
            token_ids[:-1].numpy(),
            num_best,
            logits_rows=logits_rows,
            schedule=self.schedule,
        )
        statuses[:-1][torch.tensor(failed)] = STATUS_FAILED
        wants = (num_best >= 0).any()
        return SamplerOutput(
            token_ids[:-1].numpy(), statuses[:-1].numpy(), found if wants else None
        )

    def _edit(self, inputs: dict[str, torch.Tensor], kernel: str) -> torch.Tensor:
        samples = len(inputs["sample_rows"])
        edited = poisoned(samples, self.vocab_size, dtype=torch.float32)
        with EmulatedDevice(library_of("logit_edits", (kernel,)), self.schedule) as device:
            addresses = self._upload_state(device, LogitEditsParams)
            uploaded = {name: device.upload(name, array) for name, array in inputs.items()}
            address = device.upload("edited", edited)
            device.launch(
                kernel,
                (samples, -(-self.vocab_size // EDIT_TOKENS), 1),
                EDIT_THREADS,
                LogitEditsParams(
                    **addresses, **uploaded, edited=address, vocab_size=self.vocab_size
                ),
            )
            return device.download(address, edited)


def tell_logprobs(
    logits: torch.Tensor,
    token_ids: np.ndarray,
    num_best: np.ndarray,
    *,
    logits_rows: np.ndarray | None = None,
    schedule: Schedule = SCHEDULES[0],
) -> tuple[RaggedLogprobs, np.ndarray]:
    """Log-probabilities of ``[R]`` tokens and of the best ones; also ``[R]`` which rows failed."""
    rows, vocab_size = len(token_ids), logits.shape[1]
    stride = 1 + min(int(num_best.max(initial=0)), vocab_size)
    outputs = {
        "out_ids": poisoned(rows, stride, dtype=torch.int32),
        "out_values": poisoned(rows, stride, dtype=torch.float32),
        "statuses": torch.zeros(rows, dtype=torch.uint8),
    }
    inputs = {
        "logits": logits,
        "token_ids": torch.tensor(token_ids),
        "num_best": torch.tensor(num_best),
    }
    if logits_rows is not None:
        inputs["logits_rows"] = torch.tensor(logits_rows)
    kernel = f"logprobs<{TYPE_NAMES[logits.dtype]}>"
    with EmulatedDevice(library_of("logprobs", (kernel,)), schedule) as device:
        addresses = {name: device.upload(name, t) for name, t in (outputs | inputs).items()}
        device.launch(
            kernel,
            (rows, 1, 1),
            LOGPROBS_THREADS,
            LogprobsParams(**addresses, vocab_size=vocab_size, stride=stride),
        )
        for name, tensor in outputs.items():
            outputs[name] = device.download(addresses[name], tensor)
    failed = outputs["statuses"].numpy() != 0
    told = np.where(failed | (num_best < 0), 0, 1 + np.minimum(num_best, vocab_size))
    is_told = np.arange(stride) < told[:, None]
    ids, values = outputs["out_ids"].numpy(), outputs["out_values"].numpy()
    assert (ids[~is_told] == -1).all()  # nothing else is written
    offsets = np.concatenate(([0], np.cumsum(told))).astype(np.int32)
    return RaggedLogprobs(offsets, ids[is_told], values[is_told]), failed

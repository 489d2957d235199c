"""The PyTorch executor: a step plan in, sampled tokens out, on the CPU.

Holds what lives as long as the engine and is not the scheduler's: the weights, the KV blocks, the
sampler's rows. A step is: copy blocks, reset rows, forward, score the wanted tokens, sample.
Adapters, masks and blocks on the host are refused.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.attention import get_backend
from chairlift.errors import ModelError
from chairlift.executor import (
    STATUS_FAILED,
    STATUS_OK,
    BlockingExecutor,
    StepResult,
    check_supported,
)
from chairlift.kv_cache import KvCache, kv_bytes_per_block, size_kv_pool
from chairlift.models.config import ModelConfig
from chairlift.models.llama import LlamaModel
from chairlift.models.weights import Checkpoint
from chairlift.prompt_scores import score_prompt
from chairlift.sampler import Sampler, SamplerOutput

if TYPE_CHECKING:
    from chairlift.executor import Int32Array, StepPlan, UInt8Array

logger = logging.getLogger("chairlift")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm


@dataclass(frozen=True, slots=True)
class TorchExecutorConfig:
    """What a :class:`TorchExecutor` is made from."""

    model_dir: Path
    """A directory in Hugging Face's format (see :func:`chairlift.hub.resolve_model`)."""
    dtype: str = "auto"
    """``float32``, ``bfloat16``, or ``auto``: bfloat16 where the CPU computes in it natively."""
    max_num_seqs: int = 256
    """Rows: sequences that can run at once."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None: as many as the model and the KV pool allow."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    """Size of the KV pool in blocks; wins over ``kv_cache_memory``."""
    kv_cache_memory: int | None = None
    """Size of the KV pool in bytes; None: a share of the memory that is available."""
    attention_backend: str = "cpu"
    num_threads: int | None = None
    """Threads of torch in this process; None: torch's own choice."""


class TorchExecutor(BlockingExecutor):
    """Runs steps of one model in this process."""

    def __init__(self, config: TorchExecutorConfig) -> None:
        """Load the model and reserve its KV pool.

        Raises:
            ModelError: the model cannot be loaded, ``max_model_len`` is beyond its positions, the
                dtype is unknown, or the KV pool holds nothing.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.model_config = ModelConfig.from_directory(config.model_dir)
        self.dtype = resolve_dtype(config.dtype)
        longest = longest_sequence(self.model_config, config.max_model_len)
        start = time.perf_counter()
        with torch.inference_mode():
            weights = Checkpoint(config.model_dir, self.dtype)
            self._model = LlamaModel(self.model_config, weights, longest)
        logger.info(
            "loaded %s in %s, %.1f s",
            config.model_dir,
            str(self.dtype).removeprefix("torch."),
            time.perf_counter() - start,
        )
        self.kv_pool = size_kv_pool(
            bytes_per_block=kv_bytes_per_block(self.model_config, config.block_size, self.dtype),
            block_size=config.block_size,
            max_model_len=longest,
            num_blocks=config.num_kv_blocks,
            memory_bytes=config.kv_cache_memory,
        )
        if self.kv_pool.max_model_len < longest:
            logger.warning(
                "max_model_len is lowered from %d to the %d tokens that the KV cache holds; give "
                "it more memory for longer sequences",
                longest,
                self.kv_pool.max_model_len,
            )
        logger.info("%s", self.kv_pool)
        with torch.inference_mode():
            self._cache = KvCache(self.model_config, self.kv_pool, self.dtype)
        self._backend = get_backend(config.attention_backend)
        self._sampler = Sampler(config.max_num_seqs, self.model_config.vocab_size)
        self._last_tokens = np.zeros(config.max_num_seqs, dtype=np.int32)  # [rows]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that this executor takes."""
        return self.kv_pool.max_model_len

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the whole step."""
        check_supported(plan)
        with torch.inference_mode():
            if len(plan.block_copies):
                self._cache.copy_blocks(plan.block_copies)
            if len(plan.resets.rows):
                self._sampler.reset(plan.resets)
            hidden = self._model.forward(
                torch.from_numpy(self._input_ids(plan)),
                scored_tokens(plan),
                self._cache.layers,
                self._backend,
                self._backend.prepare(plan),
            )
            statuses = np.full(len(plan.rows), STATUS_OK, dtype=np.uint8)
            count = len(plan.sample_rows)
            prompt_logprobs = None
            if len(plan.score_indices):
                prompt_logprobs, failed = score_prompt(
                    plan, hidden[count:], self._model.score, self.model_config.vocab_size
                )
                mark_failed(statuses, plan, plan.score_indices[failed])
                hidden = hidden[:count]
            if not count:
                return StepResult(np.empty(0, dtype=np.int32), statuses, None, prompt_logprobs)
            sampled = self._sample(self._model.score(hidden), plan)
        self._last_tokens[plan.sample_rows] = sampled.token_ids
        mark_failed(statuses, plan, plan.logits_indices[sampled.statuses.nonzero()])
        return StepResult(sampled.token_ids, statuses, sampled.logprobs, prompt_logprobs)

    def _sample(self, logits: torch.Tensor, plan: StepPlan) -> SamplerOutput:
        """Sample from ``logits [S, vocab]``; on its own so that tests can look at the margins."""
        return self._sampler.sample(logits, plan.sample_rows, plan.sample_output_indices)

    def _input_ids(self, plan: StepPlan) -> Int32Array:
        """Return a copy of the token ids, with those that only this side knows filled in."""
        token_ids = plan.token_ids.copy()
        sampled_here = plan.token_sources.nonzero()[0]
        if len(sampled_here):
            sequences = np.searchsorted(plan.query_start_loc, sampled_here, side="right") - 1
            token_ids[sampled_here] = self._last_tokens[plan.rows[sequences]]
        return token_ids


def resolve_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name; ``auto`` is bfloat16 where the CPU has it natively.

    Raises:
        ModelError: the name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if _has_native_bf16() else torch.float32
    try:
        return _DTYPES[name]
    except KeyError:
        raise ModelError(f"unknown dtype {name!r}; known are auto, {', '.join(_DTYPES)}") from None


def _has_native_bf16() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _NATIVE_BF16_FLAGS.isdisjoint(flags.split())


def longest_sequence(config: ModelConfig, wanted: int | None) -> int:
    """Return ``max_model_len`` for what the user wants and the model can; say where they differ."""
    if wanted is not None and not 1 <= wanted <= config.max_position:
        raise ModelError(
            f"max_model_len {wanted} is not within the model's {config.max_position} positions; "
            "leave it out, or lower it"
        )
    longest = min(wanted or config.max_position, config.max_model_len)
    if longest < (wanted or config.max_position):
        logger.warning(
            "max_model_len is lowered from %d to %d, the model's sliding window, which is not "
            "implemented: up to there the results are exact",
            wanted or config.max_position,
            longest,
        )
    return longest


def scored_tokens(plan: StepPlan) -> torch.Tensor | None:
    """Return the indices of the tokens to score: ``[S]`` to sample from, then ``[P]`` of prompts.

    None stands for all, in order.
    """
    indices = plan.logits_indices
    if len(plan.score_indices):
        indices = np.concatenate((indices, plan.score_indices))
    elif np.array_equal(indices, np.arange(len(plan.token_ids))):
        return None
    return torch.from_numpy(indices.astype(np.int64))


def mark_failed(statuses: UInt8Array, plan: StepPlan, tokens: Int32Array) -> None:
    """Mark the sequences that these query tokens belong to."""
    if len(tokens):
        statuses[np.searchsorted(plan.query_start_loc, tokens, side="right") - 1] = STATUS_FAILED

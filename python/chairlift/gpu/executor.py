"""The CUDA executor: a step plan in, sampled tokens out, with everything else on the device.

A step is launched without waiting: copies of the plan, block copies, forward, sampling, one copy of
the tokens back; :meth:`CudaExecutor.collect` waits for that once. Steps of decodes alone are
replayed as CUDA graphs, padded to the next larger one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.cuda_kernels import ops
from chairlift.cuda_kernels.catalogue import HEAD_DIMS
from chairlift.cuda_kernels.kernels import cache_types
from chairlift.cuda_kernels.work import CHUNK_TOKENS
from chairlift.errors import ModelError, UnsupportedModelError
from chairlift.executor import LOCATION_HOST, STATUS_OK, StepResult, check_supported
from chairlift.gpu.attention import CudaBackend, CudaOps, StepWork, cut_step, kernels_of
from chairlift.gpu.device import CudaDevice, Device, Event, Graph
from chairlift.gpu.graphs import GraphLadder, GraphShape, GraphUse
from chairlift.gpu.host_blocks import HostBlocks, num_host_blocks
from chairlift.gpu.logprobs import PromptScores
from chairlift.gpu.memory import kv_memory, partial_bytes_per_block
from chairlift.gpu.pinning import PlanPinning
from chairlift.gpu.plan_buffers import PlanBuffers, PlanLimits, host_view
from chairlift.gpu.profiling import profiling_plan
from chairlift.gpu.sampling import DeviceSampler
from chairlift.kv_cache import KvCache, KvPoolSize, kv_bytes_per_block, size_kv_pool
from chairlift.models.config import ModelConfig
from chairlift.models.llama import LlamaModel
from chairlift.models.weights import Checkpoint
from chairlift.torch_executor import longest_sequence, mark_failed, scored_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from chairlift.executor import Int32Array, RaggedLogprobs, StepPlan
    from chairlift.gpu.attention import DeviceStep
    from chairlift.sampler import SamplerOutput

logger = logging.getLogger("chairlift")

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_FP8_CACHES = ("fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaExecutorConfig:
    """What a :class:`CudaExecutor` is made from."""

    model_dir: Path
    """A directory in Hugging Face's format (see :func:`chairlift.hub.resolve_model`)."""
    dtype: str = "auto"
    """``bfloat16`` (``auto``), ``float16`` or ``float32``."""
    kv_cache_dtype: str = "auto"
    """That of the model (``auto``), or ``fp8``, which is ``fp8_e4m3``."""
    max_num_seqs: int = 256
    """Rows: sequences that can run at once."""
    max_num_batched_tokens: int = 2_048
    """Tokens of a step at most."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None: as many as the model and the KV pool allow."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    """Size of the KV pool in blocks; wins over ``kv_cache_memory``."""
    kv_cache_memory: int | None = None
    """Size of the KV pool in bytes; None: what ``gpu_memory_utilization`` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that may be used."""
    kv_host_memory: int = 0
    """Size in bytes of the pool of KV blocks on the host, the second tier; 0: there is none."""
    enforce_eager: bool = False
    """Whether decodes are launched one by one, without CUDA graphs."""
    chunk_tokens: int = CHUNK_TOKENS
    """Keys that decode attention takes at once; results depend on it in their rounding."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    plan: StepPlan
    done: Event
    sampled: Callable[[], SamplerOutput] | None
    scored: Callable[[], tuple[RaggedLogprobs, NDArray[np.bool_]]] | None
    graph_rows: int
    """Of the graph that was replayed; 0: none was."""


class CudaExecutor:
    """Runs steps of one model on one device."""

    launches_ahead = True
    """With two steps in flight the next is launched before this one is collected."""

    def __init__(
        self,
        config: CudaExecutorConfig,
        device: Device | None = None,
        weights: Checkpoint | None = None,
    ) -> None:
        """Load the model, measure a step, reserve the KV pool, capture the graphs.

        ``device`` is torch's current one if none is given, ``weights`` those of the directory.

        Raises:
            ConfigError: there is no CUDA device.
            ModelError: the model cannot be loaded, or its memory holds no KV pool.
        """
        self._config = config
        self._device = CudaDevice() if device is None else device
        self.model_config = ModelConfig.from_directory(config.model_dir)
        if self.model_config.head_dim not in HEAD_DIMS:
            raise UnsupportedModelError(
                f"{config.model_dir} has heads of {self.model_config.head_dim} values; the CUDA "
                f"kernels are for {HEAD_DIMS}"
            )
        self.dtype = _resolve_dtype(config.dtype)
        self.cache_dtype = _resolve_cache_dtype(config.kv_cache_dtype, self.dtype)
        longest = longest_sequence(self.model_config, config.max_model_len)
        self._pinning = PlanPinning(self._device)
        self._backend = CudaBackend(config.chunk_tokens)
        self._in_flight: list[_Step] = []
        self._graphs: dict[GraphShape, Graph] = {}
        self.graph_use = GraphUse()
        self._host_blocks: HostBlocks | None = None
        with self._device.active(), torch.inference_mode():
            start = time.perf_counter()
            self._device.load(kernels_of(self.model_config, self.dtype, self.cache_dtype))
            logger.info("CUDA kernels are ready, %.1f s", time.perf_counter() - start)
            start = time.perf_counter()
            if weights is None:
                weights = Checkpoint(config.model_dir, self.dtype, self._device.torch_device)
            self._model = LlamaModel(self.model_config, weights, longest, CudaOps)
            logger.info(
                "loaded %s in %s on %s, %.1f s",
                config.model_dir,
                str(self.dtype).removeprefix("torch."),
                self._device.name,
                time.perf_counter() - start,
            )
            self._buffers = PlanBuffers(
                PlanLimits(
                    tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
                    sequences=config.max_num_seqs,
                    blocks_per_sequence=-(-longest // config.block_size),
                    chunks_per_sequence=-(-longest // config.chunk_tokens),
                ),
                self._device,
            )
            self._sampler = DeviceSampler(
                config.max_num_seqs, self.model_config.vocab_size, self._device
            )
            self._prompt_scores = PromptScores(self.model_config.vocab_size, self._device)
            self.kv_pool = self._size_pool(longest)
            logger.info("%s", self.kv_pool)
            self._reserve(self.kv_pool)
            self._reserve_host_blocks(config.kv_host_memory)
            self._capture()

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that this executor takes."""
        return self.kv_pool.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Rows that there are."""
        return self._config.max_num_seqs

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.kv_pool.num_blocks

    @property
    def num_host_kv_blocks(self) -> int:
        """Blocks of the pool on the host."""
        return 0 if self._host_blocks is None else len(self._host_blocks.caches[0])

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.kv_pool.block_size

    @property
    def vocab_size(self) -> int:
        """Tokens that are scored."""
        return self.model_config.vocab_size

    def launch(self, plan: StepPlan) -> None:
        """See :class:`chairlift.executor.Executor`."""
        check_supported(plan, has_host_blocks=self._host_blocks is not None)
        with self._device.active(), torch.inference_mode():
            self._pinning.see(plan)
            self._sampler.reset(plan.resets)
            self._in_flight.append(self._run(plan))

    def collect(self) -> StepResult:
        """See :class:`chairlift.executor.Executor`."""
        if not self._in_flight:
            raise RuntimeError("collect() without launch()")
        step = self._in_flight.pop(0)
        step.done.synchronize()
        plan = step.plan
        statuses = np.full(len(plan.rows), STATUS_OK, dtype=np.uint8)
        prompt_logprobs = None
        if step.scored is not None:
            prompt_logprobs, failed = step.scored()
            mark_failed(statuses, plan, plan.score_indices[failed])
        if step.sampled is None:
            return StepResult(np.empty(0, dtype=np.int32), statuses, None, prompt_logprobs)
        sampled = step.sampled()
        mark_failed(statuses, plan, plan.logits_indices[sampled.statuses.nonzero()])
        return StepResult(
            sampled.token_ids,
            statuses,
            sampled.logprobs,
            prompt_logprobs,
            graph_rows=step.graph_rows,
        )

    def _run(self, plan: StepPlan) -> _Step:
        """Launch a step."""
        work = self._cut(plan)
        shape = self._choose_graph(plan, work)
        indexed = scored_tokens(plan)
        sources, source_rows = _tokens_from_rows(plan)
        step, (rows, indices, to, of) = self._buffers.send(
            plan,
            work,
            shape=shape,
            more=(plan.sample_rows, _int32(indexed), sources, source_rows),
        )
        if len(plan.block_copies):
            self._copy_blocks(plan)
        if len(to):
            step.token_ids[to] = self._sampler.last_tokens[of]
        count = len(plan.sample_rows)
        if shape is None:
            hidden = self._forward(step, None if indexed is None else indices)
        else:
            graph = self._graphs[shape]
            graph.replay()
            hidden = graph.output
        scored = None
        if len(plan.score_indices):
            scored = self._prompt_scores.score(plan, hidden[count:], self._model.score)
        sampled = None
        if count:
            sampled = self._sampler.sample(self._model.score(hidden[:count]), plan, rows)
        done = self._device.event()
        done.record()
        graph_rows = 0 if shape is None else shape.sequences
        return _Step(plan, done, sampled, scored, graph_rows)

    def _copy_blocks(self, plan: StepPlan) -> None:
        """Launch a step's block copies: those to the host, then the others, which may write what
        those read."""
        copies, locations = (
            host_view(array).to(self._device.torch_device, non_blocking=True)
            for array in (plan.block_copies, plan.block_copy_locations)
        )
        to_host = np.count_nonzero(plan.block_copy_locations[:, 1] == LOCATION_HOST)
        host_caches = [] if self._host_blocks is None else self._host_blocks.caches
        for part in (slice(to_host), slice(to_host, None)):
            if len(copies[part]):
                ops.block_copy(
                    self._cache_addresses,
                    copies[part],
                    locations[part],
                    self._flat_caches,
                    host_caches,
                )

    def _cut(self, plan: StepPlan) -> StepWork:
        return cut_step(
            plan,
            group=self.model_config.num_heads // self.model_config.num_kv_heads,
            chunk_tokens=self._config.chunk_tokens,
        )

    def _choose_graph(self, plan: StepPlan, work: StepWork) -> GraphShape | None:
        """Return the graph that a step of decodes alone is padded to, and count it."""
        count = plan.num_decodes
        is_plain = (
            not plan.num_prefills
            and not len(plan.score_indices)
            and np.array_equal(plan.logits_indices, np.arange(count))
        )
        if not is_plain or not self._graphs:
            return None
        (cut,) = work.decode
        shape = self._ladder.choose(count, len(cut.items), is_split=len(cut.splits) > 0)
        if shape is None:
            self.graph_use.eager += 1
            return None
        self.graph_use.replays += 1
        self.graph_use.sequences += count
        self.graph_use.padding += shape.sequences - count
        return shape

    def _size_pool(self, longest: int) -> KvPoolSize:
        """Size the KV pool, where it was not chosen, by what the largest step leaves."""
        config = self._config
        bytes_per_block = kv_bytes_per_block(self.model_config, config.block_size, self.cache_dtype)
        memory_bytes = config.kv_cache_memory
        if config.num_kv_blocks is None and memory_bytes is None:
            step_bytes = self._device.peak_bytes(
                lambda: self._profile(config.max_num_batched_tokens, longest)
            )
            if not config.enforce_eager:  # graphs have memory of their own
                step_bytes += self._device.peak_bytes(
                    lambda: self._profile(config.max_num_seqs, longest=1)
                )
            left = kv_memory(self._device.memory(), config.gpu_memory_utilization, step_bytes)
            partials = partial_bytes_per_block(self.model_config, config.block_size)
            memory_bytes = left * bytes_per_block // (bytes_per_block + partials)
        size = size_kv_pool(
            bytes_per_block=bytes_per_block,
            block_size=config.block_size,
            max_model_len=longest,
            num_blocks=config.num_kv_blocks,
            memory_bytes=memory_bytes,
        )
        if size.max_model_len < longest:
            logger.warning(
                "max_model_len is lowered from %d to the %d tokens that the KV cache holds; give "
                "it more memory for longer sequences",
                longest,
                size.max_model_len,
            )
        return size

    def _profile(self, tokens: int, longest: int) -> None:
        """Run a step of prompts of ``longest`` tokens, on a pool of one block.

        The block is read and never written.
        """
        config = self._config
        self._reserve(KvPoolSize(1, config.block_size, 0, longest))
        plan = profiling_plan(
            tokens=tokens,
            samples=config.max_num_seqs,
            max_model_len=longest,
            block_size=config.block_size,
        )
        self._run(plan).done.synchronize()

    def _reserve(self, size: KvPoolSize) -> None:
        device = self._device.torch_device
        self._cache = KvCache(self.model_config, size, self.cache_dtype, device)
        self._flat_caches = [cache for layer in self._cache.layers for cache in layer]
        self._cache_addresses = self._addresses(self._flat_caches)

    def _reserve_host_blocks(self, memory_bytes: int) -> None:
        """Reserve the second tier, if there is one."""
        pool = self.kv_pool
        num_blocks = num_host_blocks(memory_bytes, pool.bytes_per_block)
        if not num_blocks:
            return
        start = time.perf_counter()
        self._host_blocks = HostBlocks(num_blocks, self._flat_caches, self._device)
        caches = (*self._flat_caches, *self._host_blocks.caches)
        self._cache_addresses = self._addresses(caches)
        logger.info(
            "KV blocks on the host: %.0f MiB, %s blocks of %d = %s tokens, %.1f s",
            num_blocks * pool.bytes_per_block / 2**20,
            f"{num_blocks:,}",
            pool.block_size,
            f"{num_blocks * pool.block_size:,}",
            time.perf_counter() - start,
        )

    def _addresses(self, caches: Sequence[Tensor]) -> Tensor:
        addresses = [cache.data_ptr() for cache in caches]
        return torch.tensor(addresses, device=self._device.torch_device)

    def _capture(self) -> None:
        """Capture the graphs, the largest first, so that the others fit into its memory."""
        config, pool = self._config, self.kv_pool
        self._ladder = GraphLadder(
            max_num_seqs=config.max_num_seqs,
            max_chunks=-(-pool.max_model_len // config.chunk_tokens),
            most_items=pool.num_tokens // config.chunk_tokens + config.max_num_seqs,
        )
        if config.enforce_eager:
            return
        start = time.perf_counter()
        for shape in sorted(self._ladder.shapes, reverse=True):
            self._buffers.clear_padding(shape)
            step = self._buffers.padded_step(shape)
            self._graphs[shape] = self._device.capture(partial(self._forward, step, None))
        logger.info(
            "captured %d CUDA graphs in %.1f s", len(self._graphs), time.perf_counter() - start
        )

    def _forward(self, step: DeviceStep, scored: Tensor | None) -> Tensor:
        """Hidden states ``[S, hidden]`` of the tokens ``scored``; None: of all.

        Graphs end here: the logits of all of them together would take gigabytes.
        """
        return self._model.forward(step.token_ids, scored, self._cache.layers, self._backend, step)


def _resolve_dtype(name: str) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise ModelError(f"unknown dtype {name!r}; known are {', '.join(_DTYPES)}") from None


def _resolve_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return dtype
    if name not in _FP8_CACHES:
        raise ModelError(
            f"unknown kv_cache_dtype {name!r}; known are auto, {', '.join(_FP8_CACHES)}"
        )
    if torch.float8_e4m3fn not in cache_types(dtype):
        raise ModelError(
            f"kv_cache_dtype is {name!r}, which needs a model of 16 bits, but dtype is float32"
        )
    return torch.float8_e4m3fn


def _int32(indices: Tensor | None) -> Int32Array:
    if indices is None:
        return np.empty(0, dtype=np.int32)
    return indices.numpy().astype(np.int32)


def _tokens_from_rows(plan: StepPlan) -> tuple[Int32Array, Int32Array]:
    """Tokens that are the last ones sampled for rows, and those rows: ``[K]`` each."""
    tokens = plan.token_sources.nonzero()[0]
    sequences = np.searchsorted(plan.query_start_loc, tokens, side="right") - 1
    return tokens.astype(np.int32), plan.rows[sequences]

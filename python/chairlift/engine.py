"""The engine: executor, scheduler thread, executor thread, and what clients need of it.

:class:`~chairlift.LLM` and :class:`~chairlift.AsyncEngine` are two ways to talk to an
:class:`Engine`; both go through its ``client``. :class:`LocalEngine` is one in this process,
:class:`chairlift.engine_process.ProcessEngine` one in a process of its own.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from chairlift import _core, cost_model
from chairlift.config_file import load_config, naming
from chairlift.cost_model import CostKey
from chairlift.engine_args import (
    DEFAULT_MAX_MODEL_LEN,
    ConfigSource,
    EngineArgs,
    check_args,
    core_settings,
)
from chairlift.errors import ConfigError, InvalidRequestError
from chairlift.flight_log import recording
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from chairlift.config import Config
    from chairlift.executor import Executor
    from chairlift.prompts import ParsedPrompt
    from chairlift.request_args import RequestArgs
    from chairlift.tokenizer import TokenTableData

logger = logging.getLogger("chairlift")

_DEFAULT_NUM_KV_BLOCKS = 4_096
_JOIN_TIMEOUT_S = 10.0
"""How long a shutdown waits for the step that is running."""
_LAST_JOIN_TIMEOUT_S = 0.5
"""The same for an engine that has ended: a step that it gave up was waited for long enough."""
_SPIN_COUNT = "10000"
"""Rounds that libgomp's threads spin for the next parallel region before they sleep. Its own
300,000 take the core from whoever it waits for, where others need the same cores; these outlast the
gaps between the operations of a step."""


class TokenizerLike(Protocol):
    """What an engine needs of a tokenizer; :class:`chairlift.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an output."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with what the tokenizer's own rules add."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def token_table(self, vocab_size: int = 0) -> TokenTableData:
        """Bytes of every token, ``vocab_size`` at least."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of a chat."""


@dataclass(frozen=True, slots=True)
class CoreVocabulary:
    """``chairlift_core::Vocabulary``: token bytes, and the tokens that end an output."""

    token_bytes: bytes
    token_offsets: NDArray[np.int64]
    special: NDArray[np.uint8]
    eos_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Parts:
    """An executor and the numbers it brings along."""

    executor: Executor
    tokenizer: TokenizerLike
    vocab_size: int
    num_kv_blocks: int
    max_model_len: int
    num_host_kv_blocks: int = 0
    """Blocks of the second tier."""
    eos_token_ids: Sequence[int] = ()
    """The model's own, beside the tokenizer's."""
    cost_key: CostKey | None = None
    """What iterations' time depends on; None for an executor that nobody knows."""


class Engine:
    """An engine, wherever it runs, and the one client of it."""

    tokenizer: TokenizerLike
    client: _core.EngineClient

    def __init__(self, args: EngineArgs) -> None:
        """Check what is known before a model is loaded.

        Raises:
            ConfigError: the settings cannot work.
        """
        check_args(args)
        self.args = args
        self.config = args.config
        """What it runs with now; a reload changes the policy."""
        self._seeds = random.Random(args.seed)

    @property
    def limits(self) -> Mapping[str, int]:
        """The numbers the engine runs with, after validation."""
        return self.client.limits

    @property
    def end_reason(self) -> str | None:
        """Why the engine has ended; None while it runs."""
        return self.client.end_reason

    def prepare(
        self,
        prompt: ParsedPrompt,
        token_ids: list[int],
        params: SamplingParams,
        args: RequestArgs | None = None,
    ) -> tuple[_core.Request, int]:
        """Make a request of its parts; returns it with the seed it will use.

        Without ``args`` it is of the default tenant and class.

        Raises:
            InvalidRequestError: a parameter cannot be used.
        """
        longest = self.args.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > longest:
                raise InvalidRequestError(
                    f"{name} is {wanted}, but the engine gives {longest} at most; raise its option "
                    "max_logprobs",
                    code="invalid_parameter",
                )
        seed = params.seed
        if seed is None or seed < 0:
            seed = self._seeds.getrandbits(63)
        request = _core.Request(token_ids, params, args, seed=seed, cache_salt=prompt.cache_salt)
        return request, seed

    def reload(self, source: ConfigSource) -> None:
        """Go over to the classes' numbers, tenants, weights and quotas of another configuration.

        No request is lost. What a running engine cannot change must be as it was: the ``[engine]``
        table, names and levels of the classes, and how the queue shares, prices, orders and joins.

        Raises:
            ConfigError: the configuration cannot work, or not here; nothing has changed.
            EngineDeadError: the engine has ended.
        """
        config = self.check_reload(source)
        with naming(source):
            self.client.reload(self.args.over(config.policy))
        self.config = config

    def check_reload(self, source: ConfigSource) -> Config:
        """Read a configuration and check what can be checked without the engine.

        Raises:
            ConfigError: it cannot work, or not here.
        """
        config = load_config(source)
        old: Mapping[str, object] = {**self.config.engine}
        new: Mapping[str, object] = {**config.engine}
        with naming(source):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    raise ConfigError(
                        f"engine.{name} is {_said(new, name)}; it must be {_said(old, name)}, as "
                        "when the engine was started: restart it to change that"
                    )
        return config

    def decode_token(self, token: int) -> str:
        """Text of one token, by itself."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def shutdown(self) -> None:
        """End live requests as aborted, and the engine; idempotent, from any thread."""
        raise NotImplementedError


class LocalEngine(Engine):
    """An engine that runs in threads of this process."""

    cost_key: CostKey | None
    """What its iterations' time depends on; None for an executor that nobody knows."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model (unless an executor is given) and start both threads.

        Raises:
            ConfigError: the settings cannot work.
            ModelError: the model cannot be loaded.
        """
        super().__init__(args)
        self._thread = _ExecutorThread(args)
        try:
            parts = self._thread.parts()
            self.tokenizer = parts.tokenizer
            self.cost_key = parts.cost_key
            kept = parts.cost_key if args.cost_model_cache else None
            settings = core_settings(
                args,
                max_model_len=parts.max_model_len,
                num_kv_blocks=parts.num_kv_blocks,
                num_host_kv_blocks=parts.num_host_kv_blocks,
                vocab_size=parts.vocab_size,
                cost_model=None if kept is None else cost_model.load(kept),
            )
            self.core = _core.EngineCore(
                settings,
                _vocabulary(parts),
                step_timeout=args.step_timeout or None,
                record=recording(args, settings),
            )
        except BaseException:
            self._thread.run_steps(None)
            raise
        self.client = self.core.client
        _say_limits(self.limits)
        self._thread.run_steps(self.core)
        self._finalizer = weakref.finalize(self, _stop, self.core, self.client, self._thread, kept)

    def shutdown(self) -> None:
        """End live requests as aborted and stop both threads; idempotent, from any thread.

        A step that is running is waited for, but not for longer than ten seconds.
        """
        self._finalizer()


def load_executor(spec: str, args: EngineArgs) -> Executor:
    """Make the executor that ``module:Class`` names.

    The class's ``from_engine_args(args)`` is called if it has one, else the class without
    arguments. An executor may say what it has in the optional attributes ``vocab_size``,
    ``num_kv_blocks``, ``block_size``, ``max_model_len``, ``max_num_seqs`` and ``tokenizer``; an
    argument may ask for less than that, not for more. One that keeps KV blocks on the host says how
    many in ``num_host_kv_blocks``; ``args.kv_host_memory`` is what they may take.

    Raises:
        ConfigError: there is no such class.
    """
    module_name, _, class_name = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"executor {spec!r} cannot be loaded: {error}; give module:Class"
        ) from error
    make: Callable[[EngineArgs], Executor] | None = getattr(factory, "from_engine_args", None)
    return cast("Executor", factory()) if make is None else make(args)


def _given_parts(args: EngineArgs, given: Executor | str) -> _Parts:
    """Describe a user's executor by its optional attributes and the arguments."""
    executor = load_executor(given, args) if isinstance(given, str) else given
    for call in ("launch", "collect"):
        if not callable(getattr(executor, call, None)):
            raise ConfigError(f"the executor {type(executor).__name__} has no method {call}()")
    block_size = getattr(executor, "block_size", args.block_size)
    if block_size != args.block_size:
        raise ConfigError(
            f"block_size is {args.block_size}, but the executor's is {block_size}; make them equal"
        )
    for name in ("num_kv_blocks", "max_model_len", "max_num_seqs"):
        own, wanted = getattr(executor, name, None), getattr(args, name)
        if own is not None and wanted is not None and wanted > own:
            raise ConfigError(f"{name} is {wanted}, but the executor has {own}; lower {name}")
    num_host_kv_blocks = int(getattr(executor, "num_host_kv_blocks", 0))
    if args.kv_host_memory and not num_host_kv_blocks:
        raise ConfigError(
            f"kv_host_memory is {args.kv_host_memory}, but the executor {type(executor).__name__} "
            "keeps no blocks on the host (it has no num_host_kv_blocks); leave it out"
        )
    tokenizer = _tokenizer(args, getattr(executor, "tokenizer", None))
    num_kv_blocks, max_model_len = args.num_kv_blocks, args.max_model_len
    if num_kv_blocks is None:
        num_kv_blocks = int(getattr(executor, "num_kv_blocks", _DEFAULT_NUM_KV_BLOCKS))
    if max_model_len is None:
        max_model_len = int(getattr(executor, "max_model_len", DEFAULT_MAX_MODEL_LEN))
    return _Parts(
        executor=executor,
        tokenizer=tokenizer,
        vocab_size=getattr(executor, "vocab_size", tokenizer.vocab_size),
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
        num_host_kv_blocks=num_host_kv_blocks,
    )


def _model_parts(args: EngineArgs) -> _Parts:
    """Load the model into the executor of its device."""
    return _cuda_parts(args) if args.device == "cuda" else _torch_parts(args)


def _cuda_parts(args: EngineArgs) -> _Parts:
    """Load the model into the CUDA executor."""
    from chairlift.cuda_kernels.catalogue import MAX_LISTED  # noqa: PLC0415
    from chairlift.gpu import CudaExecutor, CudaExecutorConfig  # noqa: PLC0415  # torch is heavy
    from chairlift.gpu.device import CudaDevice  # noqa: PLC0415
    from chairlift.hub import resolve_model  # noqa: PLC0415

    device = CudaDevice()  # before a model is fetched for nothing
    if args.max_logprobs > MAX_LISTED:
        raise ConfigError(
            f"max_logprobs is {args.max_logprobs}; it must be at most {MAX_LISTED} on a CUDA device"
        )
    directory = resolve_model(args.model, revision=args.revision)
    executor = CudaExecutor(
        CudaExecutorConfig(
            model_dir=directory,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            block_size=args.block_size,
            num_kv_blocks=args.num_kv_blocks,
            kv_cache_memory=args.kv_cache_memory,
            kv_host_memory=args.kv_host_memory,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enforce_eager=args.enforce_eager,
        ),
        device,
    )
    return _Parts(
        executor=executor,
        tokenizer=_tokenizer(args, own=None),
        vocab_size=executor.vocab_size,
        num_kv_blocks=executor.num_kv_blocks,
        max_model_len=executor.max_model_len,
        num_host_kv_blocks=executor.num_host_kv_blocks,
        eos_token_ids=executor.model_config.eos_token_ids,
        cost_key=CostKey(
            model=str(directory),
            device=device.name,
            dtype=" ".join(map(str, dict.fromkeys((executor.dtype, executor.cache_dtype)))),
            threads=0,
        ),
    )


def _torch_parts(args: EngineArgs) -> _Parts:
    """Load the model into the PyTorch executor on the CPU."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    import torch  # noqa: PLC0415  # torch is heavy

    from chairlift.attention import backend_names  # noqa: PLC0415  # torch is heavy
    from chairlift.hub import resolve_model  # noqa: PLC0415
    from chairlift.tokenizer import Tokenizer  # noqa: PLC0415
    from chairlift.torch_executor import (  # noqa: PLC0415
        TorchExecutor,
        TorchExecutorConfig,
        resolve_dtype,
    )

    if args.attention_backend not in backend_names():
        raise ConfigError(
            f"attention_backend is {args.attention_backend!r}; known are "
            f"{', '.join(backend_names())}"
        )
    if args.kv_host_memory:
        logger.info(
            "kv_host_memory does nothing on the CPU, where all KV blocks are in host memory; "
            "kv_cache_memory is their size"
        )
    directory = resolve_model(args.model, revision=args.revision)
    _check_kv_memory(args, directory)
    tokenizer = (
        Tokenizer.from_directory(directory)
        if args.tokenizer is None
        else _tokenizer(args, own=None)
    )
    executor = TorchExecutor(
        TorchExecutorConfig(
            model_dir=directory,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            block_size=args.block_size,
            num_kv_blocks=args.num_kv_blocks,
            kv_cache_memory=args.kv_cache_memory,
            attention_backend=args.attention_backend,
            num_threads=args.num_threads,
        )
    )
    return _Parts(
        executor=executor,
        tokenizer=tokenizer,
        vocab_size=executor.model_config.vocab_size,
        num_kv_blocks=executor.kv_pool.num_blocks,
        max_model_len=executor.max_model_len,
        eos_token_ids=executor.model_config.eos_token_ids,
        cost_key=CostKey.on_this_cpu(
            model=str(directory),
            dtype=str(resolve_dtype(args.dtype)),
            threads=torch.get_num_threads(),
        ),
    )


def _check_kv_memory(args: EngineArgs, directory: Path) -> None:
    """Refuse a KV pool that is larger than the memory, before the weights are read."""
    from chairlift.host_memory import available_memory  # noqa: PLC0415
    from chairlift.kv_cache import kv_bytes_per_block  # noqa: PLC0415
    from chairlift.models.config import ModelConfig  # noqa: PLC0415
    from chairlift.torch_executor import resolve_dtype  # noqa: PLC0415

    if args.num_kv_blocks is not None:
        config, dtype = ModelConfig.from_directory(directory), resolve_dtype(args.dtype)
        wanted = args.num_kv_blocks * kv_bytes_per_block(config, args.block_size, dtype)
        name = "num_kv_blocks"
    elif args.kv_cache_memory is not None:
        wanted, name = args.kv_cache_memory, "kv_cache_memory"
    else:
        return
    available = available_memory()
    if wanted > available:
        raise ConfigError(
            f"{name} is {getattr(args, name)}: the KV pool would take {wanted:,} bytes, but "
            f"{available:,} are available; lower {name}"
        )


def _tokenizer(args: EngineArgs, own: TokenizerLike | None) -> TokenizerLike:
    """Return the tokenizer that was given, else the executor's own, else the model's."""
    if args.tokenizer is None and own is not None:
        return own
    if args.tokenizer is not None and not isinstance(args.tokenizer, str):
        return args.tokenizer
    from chairlift.hub import resolve_model  # noqa: PLC0415
    from chairlift.tokenizer import Tokenizer  # noqa: PLC0415

    if args.tokenizer is not None:
        return Tokenizer.from_directory(args.tokenizer)
    return Tokenizer.from_directory(resolve_model(args.model, revision=args.revision))


def _said(options: Mapping[str, object], name: str) -> str:
    return repr(options[name]) if name in options else "left out"


def _vocabulary(parts: _Parts) -> CoreVocabulary:
    table = parts.tokenizer.token_table(parts.vocab_size)
    # Each may know tokens that the other does not: a tokenizer of its own comes without the model's
    # generation_config.json. A tokenizer must not have more tokens than the model scores.
    eos = dict.fromkeys([*parts.tokenizer.eos_token_ids, *parts.eos_token_ids])
    known = [token for token in eos if token < parts.vocab_size]
    return CoreVocabulary(table.bytes, table.offsets, table.special, known)


def _say_limits(limits: Mapping[str, int]) -> None:
    longest, wanted = limits["max_model_len"], limits["requested_max_model_len"]
    if longest < wanted:
        logger.warning(
            "max_model_len is lowered from %d to %d, which is what %d blocks of %d tokens hold; "
            "raise num_kv_blocks or kv_cache_memory for longer sequences",
            wanted,
            longest,
            limits["num_kv_blocks"],
            limits["block_size"],
        )


class _ExecutorThread(threading.Thread):
    """Makes the executor and then runs its steps, all on one thread.

    OpenMP gives every thread that computes a team of workers, and lets them wait by spinning only
    as long as all teams together fit the cores. A model that was loaded on another thread would
    leave a second team behind, and every parallel region of a step would pay for a wake-up:
    measured on two cores, 30 instead of 18 ms for a step of one sequence.

    The thread knows the core and the executor, not the engine: dropping the engine ends it.
    """

    def __init__(self, args: EngineArgs) -> None:
        super().__init__(name="chairlift-executor", daemon=True)
        self._args = args
        self._parts: Future[_Parts] = Future()
        self._core: Future[_core.EngineCore | None] = Future()
        self.start()

    def parts(self) -> _Parts:
        """Wait for the executor; raises what making it raised."""
        return self._parts.result()

    def run_steps(self, core: _core.EngineCore | None) -> None:
        """Let the thread spend its life on the core's steps; None ends it."""
        self._core.set_result(core)

    def run(self) -> None:
        """Make the executor, wait for the core, run; what ends that ends the engine."""
        args = self._args
        try:
            parts = (
                _model_parts(args) if args.executor is None else _given_parts(args, args.executor)
            )
        except BaseException as error:
            self._parts.set_exception(error)
            return
        self._parts.set_result(parts)
        core = self._core.result()
        if core is None:
            return
        try:
            core.run_executor(parts.executor)
        except BaseException:
            logger.critical("the executor thread has died, and the engine with it", exc_info=True)


def _stop(
    core: _core.EngineCore,
    client: _core.EngineClient,
    thread: threading.Thread,
    cost_key: CostKey | None,
) -> None:
    has_ended = client.end_reason is not None
    core.shutdown()
    if cost_key is not None:
        cost_model.save(cost_key, core.learned())
    if thread is threading.current_thread():
        return  # collected while a step runs: the thread ends after it
    patience = _LAST_JOIN_TIMEOUT_S if has_ended else _JOIN_TIMEOUT_S
    thread.join(patience)
    if thread.is_alive():
        logger.warning(
            "the executor's step is still running %.0f s after the shutdown; its thread is left "
            "behind",
            patience,
        )


def check_params(params: object) -> SamplingParams:
    """Return the parameters, or the default ones for None.

    Raises:
        InvalidRequestError: it is something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams, not {kind}", code="invalid_parameter"
        )
    return params

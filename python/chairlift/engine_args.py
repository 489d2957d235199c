"""What can be chosen about an engine, and the checks before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

from chairlift import _core
from chairlift.config import Config, Duration, PolicyConfig, shown
from chairlift.errors import ConfigError
from chairlift.host_memory import available_memory

if TYPE_CHECKING:
    from chairlift.cost_model import CostCoefficients
    from chairlift.engine import TokenizerLike
    from chairlift.executor import Executor

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_MODEL_LEN = 8_192
_MOST_KV_BLOCKS = 2**26
"""The core's MAX_KV_BLOCKS: what stands for a pool whose size is not known yet."""
_DEVICES = ("cpu", "cuda")
_KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
_KINDS = {"str": str, "int": int, "bool": bool, "float": float}
_POSITIVE = ("kv_cache_memory", "num_threads", "record_limit")
_LARGEST = {
    "kv_cache_memory": 2**63 - 1,
    "kv_host_memory": 2**63 - 1,
    "max_queued_tokens": 2**63 - 1,
    "seed": 2**63 - 1,
    "record_limit": 2**63 - 1,
}

ConfigSource = Config | str | PathLike[str]
"""A configuration, or the path of its file."""


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of ``LLM`` and ``AsyncEngine``; :class:`EngineArgs` explains them."""

    config: ConfigSource | None
    tokenizer: TokenizerLike | str | None
    executor: Executor | str | None
    revision: str | None
    device: str
    dtype: str
    kv_cache_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    long_prefill_token_threshold: int | None
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory: int | None
    kv_host_memory: int
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_prefix_caching: bool
    watermark_blocks: int | None
    max_queued_requests: int
    max_queued_tokens: int | None
    max_in_flight_steps: int
    step_timeout: int
    attention_backend: str
    num_threads: int | None
    max_logprobs: int
    seed: int
    record: str | PathLike[str] | None
    record_limit: int
    iteration_target: Duration | None
    cost_model_cache: bool


class EngineTable(EngineOptions, total=False):
    """The same with the model: what :attr:`chairlift.Config.engine` may have, but ``config``."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Everything that can be chosen about an engine."""

    model: str = DEFAULT_MODEL
    """A local Hugging Face directory, ``smollm2-135m``, or a hub id."""
    config: Config = field(default_factory=Config)
    """Where what was not given came from, with the classes and tenants."""
    tokenizer: TokenizerLike | str | None = None
    """A tokenizer or a directory that has one; None: the model's (or the executor's own)."""
    executor: Executor | str | None = None
    """An executor, or ``module:Class`` (see :func:`chairlift.engine.load_executor`); None: PyTorch
    on ``device``."""
    revision: str | None = None
    """Revision of a hub id."""
    device: str = "cpu"
    """``cpu``, or ``cuda``: torch's current CUDA device."""
    dtype: str = "auto"
    """``float32``, ``bfloat16``, ``float16`` (on CUDA), or ``auto``: what the device computes
    natively."""
    kv_cache_dtype: str = "auto"
    """``auto``: that of the model; ``fp8`` or ``fp8_e4m3``, which are the same: 8 bits a number, on
    CUDA, for models of 16 bits."""
    max_num_seqs: int = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: int = 2_048
    """Token budget of one iteration."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together; None: the model's own."""
    long_prefill_token_threshold: int | None = None
    """Longest prefill chunk of one sequence in one iteration; None: the token budget."""
    block_size: int = 16
    """Tokens a KV block holds."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool; None: from ``kv_cache_memory``."""
    kv_cache_memory: int | None = None
    """Bytes of the KV pool; None: a share of the memory that is available."""
    kv_host_memory: int = 0
    """Bytes of host memory for KV blocks that a device has no room for (the second tier); 0: none.
    On the CPU there is nothing to gain by it: all blocks are in host memory."""
    gpu_memory_utilization: float = 0.9
    """Share of a CUDA device's memory that may be used; the KV pool gets what weights and the
    largest step leave of it."""
    enforce_eager: bool = False
    """Whether a CUDA device is given every kernel by itself, without CUDA graphs."""
    enable_prefix_caching: bool = True
    """Whether KV blocks are found again by their content."""
    watermark_blocks: int | None = None
    """Blocks that a newcomer leaves free while others run; None: one in a hundred."""
    max_queued_requests: int = 4_096
    """Most requests that wait; beyond it a submission is refused."""
    max_queued_tokens: int | None = None
    """Most prompt tokens that wait; None: no bound."""
    max_in_flight_steps: int = 1
    """Most steps that the executor has at once, 1 or 2: with 2 the next step is planned and handed
    over before the results of this one are known (run-ahead)."""
    step_timeout: int = 300
    """Seconds after which a step that has not come back ends the engine; 0: never."""
    attention_backend: str = "cpu"
    """``cpu`` (the Rust kernel) or ``reference`` (plain PyTorch); a CUDA device has its own."""
    num_threads: int | None = None
    """Threads of the forward pass; None: PyTorch's own choice."""
    max_logprobs: int = 20
    """Most candidates per position that a request may ask for, of output or prompt."""
    seed: int = 0
    """Where the seeds of requests without one are drawn from."""
    record: str | PathLike[str] | None = None
    """File of the flight log: all that the engine is told and decides, prompts included, for
    ``chairlift replay`` and ``chairlift explain``; None: nothing is recorded."""
    record_limit: int = 2**30
    """Bytes of the log: half for its beginning, half for its newest segments."""
    iteration_target: Duration | None = None
    """Target of every iteration in which somebody decodes, over that of the configuration's
    ``[pace]``, also after a reload; None: what that says."""
    cost_model_cache: bool = True
    """Whether what is learned of iterations' time is kept in the cache for the next start."""

    @property
    def policy(self) -> PolicyConfig:
        """The configuration's policy, with what was given over it."""
        return self.over(self.config.policy)

    def over(self, policy: PolicyConfig) -> PolicyConfig:
        """Put what was given over a policy."""
        if self.iteration_target is None:
            return policy
        pace = replace(policy.pace, iteration_target=self.iteration_target)
        return replace(policy, pace=pace)


_NOT_IN_A_FILE = ("config", "iteration_target")
ENGINE_KEYS = tuple(item.name for item in fields(EngineArgs) if item.name not in _NOT_IN_A_FILE)
"""What ``[engine]`` of a file may have."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """``chairlift_core::config::Settings``, field by field."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int | None
    block_size: int
    num_kv_blocks: int
    num_host_kv_blocks: int
    enable_prefix_caching: bool
    watermark_blocks: int | None
    max_queued_requests: int
    max_queued_tokens: int | None
    policy: PolicyConfig
    vocab_size: int
    max_in_flight_steps: int
    cost_model: CostCoefficients | None = None


def check_args(args: EngineArgs) -> None:
    """Check everything that is known before a model is loaded.

    Types are those of the fields. Ranges are the core's, which is asked with placeholders for what
    only the model decides, and asked again when that is known.

    Raises:
        ConfigError: the settings cannot work.
    """
    for option in fields(args):
        value = getattr(args, option.name)
        name, _, optional = str(option.type).partition(" | ")
        kind = _KINDS.get(name)
        if kind is None or optional not in ("", "None") or (optional and value is None):
            continue  # an object: whoever uses it checks it
        if kind is int:
            _check_integer(option.name, value, low=int(option.name in _POSITIVE))
        elif kind is float:
            _check_share(option.name, value)
        elif not isinstance(value, kind):
            wanted = "True or False" if kind is bool else "a string"
            raise ConfigError(f"{option.name} is {shown(value)}; it must be {wanted}")
    for name, known in (("device", _DEVICES), ("kv_cache_dtype", _KV_CACHE_DTYPES)):
        if getattr(args, name) not in known:
            raise ConfigError(
                f"{name} is {shown(getattr(args, name))}; known are {', '.join(known)}"
            )
    if args.kv_cache_dtype != "auto" and args.device == "cpu" and args.executor is None:
        raise ConfigError(
            f"kv_cache_dtype is {args.kv_cache_dtype!r}, but device is 'cpu', which keeps keys and "
            "values in the model's dtype; leave it out, or use device='cuda'"
        )
    if not isinstance(args.record, str | PathLike | None):
        raise ConfigError(f"record is {shown(args.record)}; it must be the path of a file")
    _check_host_memory(args)
    for name, method in (("tokenizer", "token_table"), ("executor", "launch")):
        value = getattr(args, name)
        if not (value is None or isinstance(value, str) or hasattr(value, method)):
            raise ConfigError(f"{name} is {shown(value)}; it must be a string or have {method}()")
    _core.check_settings(
        core_settings(
            args,
            max_model_len=(
                DEFAULT_MAX_MODEL_LEN if args.max_model_len is None else args.max_model_len
            ),
            num_kv_blocks=_MOST_KV_BLOCKS if args.num_kv_blocks is None else args.num_kv_blocks,
            vocab_size=1,
        )
    )


def _check_host_memory(args: EngineArgs) -> None:
    wanted = args.kv_host_memory
    if not wanted:
        return
    if not args.enable_prefix_caching:
        raise ConfigError(
            f"kv_host_memory is {wanted}, but enable_prefix_caching is False, and blocks on the "
            "host are found by it: switch it on, or leave kv_host_memory out"
        )
    available = available_memory()
    if wanted > available:
        raise ConfigError(
            f"kv_host_memory is {wanted:,} bytes, but {available:,} are available; lower it"
        )


def core_settings(
    args: EngineArgs,
    *,
    max_model_len: int,
    num_kv_blocks: int,
    vocab_size: int,
    num_host_kv_blocks: int = 0,
    cost_model: CostCoefficients | None = None,
) -> CoreSettings:
    """Make the core's settings of the arguments and what only the model decides.

    Raises:
        ConfigError: a number does not fit.
    """
    settings = CoreSettings(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        block_size=args.block_size,
        num_kv_blocks=num_kv_blocks,
        num_host_kv_blocks=num_host_kv_blocks,
        enable_prefix_caching=args.enable_prefix_caching,
        watermark_blocks=args.watermark_blocks,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        policy=args.policy,
        vocab_size=vocab_size,
        max_in_flight_steps=args.max_in_flight_steps,
        cost_model=cost_model,
    )
    for name in ("max_model_len", "num_kv_blocks", "num_host_kv_blocks", "vocab_size"):
        _check_integer(name, getattr(settings, name), low=0)
    return settings


def _check_share(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {shown(value)}; it must be above 0 and 1 at most")


def _check_integer(name: str, value: object, *, low: int) -> None:
    high = _LARGEST.get(name, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}")

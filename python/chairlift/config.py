"""Settings as values: classes, tenants, the waiting queue, API keys, and the engine's own options.

The dataclasses mirror the core's policy field by field (``rust/core/src/config/policy.rs``), with
durations in seconds. Types are checked here, when a value is made, so that a file
(:mod:`chairlift.config_file`) and a program are told the same. Names and ranges are checked by the
core alone. Every message begins with the dotted path of the key.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

    from _typeshed import DataclassInstance

    from chairlift.engine_args import EngineTable

T = TypeVar("T")

Count = int
"""An integer from 0, of requests or sequences."""
Tokens = int
"""An integer from 0, of tokens."""
Tokens32 = int
"""The same, of tokens of one iteration."""
KeyHash = str
"""``sha256:`` and 64 hexadecimal digits. Kept in lower case."""
Duration = float | str
"""Seconds, or text such as ``"250ms"``, ``"2s"`` or ``"5m"``. Kept as seconds."""
OnTimeout = Literal["expire", "promote"]
OnDoomed = Literal["keep", "relegate", "drop"]
Sharing = Literal["fcfs", "fair"]
MemoryAdmission = Literal["optimistic", "reserve", "forecast"]
Backfill = Literal["easy", "off", "unprotected"]
Order = Literal["arrival", "shortest", "footprint", "deadline", "prefix"]

DURATION_UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
"""Microseconds of each unit that text may name."""
_LONGEST_S = 366 * 24 * 3_600
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig:
    """A class of requests: what they were promised."""

    level: int = 0
    """Strict tier: a higher level goes first, always."""
    weight: float = 1.0
    """Share of service among the classes of its level."""
    max_queued_requests: Count | None = None
    """Most requests of the class at the door and waiting; None: no bound of its own."""
    max_queued_tokens: Tokens | None = None
    """Most prompt tokens of the class waiting; None: no bound of its own."""
    max_queue_time: Duration | None = None
    """Longest wait until a request is first scheduled; None: no bound."""
    on_timeout: OnTimeout = "expire"
    """What happens then: ``expire`` ends it with an error, ``promote`` puts it ahead of all."""
    ttft_target: Duration | None = None
    """Target of the time to first token: what will miss it is refused; None: no target."""
    tpot_target: Duration | None = None
    """Target of the mean time per output token; None: no target."""
    on_doomed: OnDoomed = "keep"
    """What happens to a waiting request that will certainly miss its deadline or TTFT target: it
    keeps its place (``keep``), goes behind everything else (``relegate``), or ends (``drop``)."""
    may_be_shed: bool = False
    """Whether waiting requests may be given up under overload."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant: its share and its bounds."""

    weight: float = 1.0
    """Share of service among the tenants of a class."""
    default_class: str | None = None
    """Class of its requests that name none; None: the first class."""
    best_class: str | None = None
    """Class whose level its requests never exceed; None: no bound."""
    max_running: Count | None = None
    """Most answers that run at once; None: no bound of its own."""
    max_queued: Count | None = None
    """Most requests at the door and waiting; None: no bound of its own."""
    tokens_per_second: Tokens | None = None
    """Prompt and output tokens a second, on average; None: no quota."""
    burst_tokens: Tokens | None = None
    """Tokens that may be used at once after a pause; None: one second's worth."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceConfig:
    """What a token costs where service is priced in tokens; the defaults are VTC's (OSDI'24)."""

    input: float = 1.0
    """A prompt token that is computed."""
    cached: float = 0.1
    """A prompt token that the prefix cache has."""
    output: float = 2.0
    """An output token."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """A batch is formed when it is full or its oldest request has waited. A baseline."""

    size: Count
    """Answers that make a full batch."""
    delay: Duration
    """Longest wait for a full batch."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SheddingConfig:
    """Overload: when waiting requests of classes that may be shed are given up, and until when."""

    above: Duration
    """Predicted time to serve all that waits above which shedding begins."""
    below: Duration
    """The same, below which it ends."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How KV memory is handed out."""

    admission: MemoryAdmission = "optimistic"
    """``optimistic``: when its tokens fit now; what grows later may preempt. ``reserve``: when
    everything that it and all that run may grow to (``max_tokens``) fits; nobody is preempted for
    memory. ``forecast``: when the future peak of all fits, by what was learned of lengths."""
    overflow: float = 0.05
    """Share of admissions, during whose life somebody may be preempted for memory, that
    ``forecast`` aims at; more than 0, at most 0.5."""
    backfill: Backfill = "easy"
    """Who may be admitted while the first of the queue does not fit: ``easy``: whoever fits without
    moving the time at which the first will; ``off``: nobody; ``unprotected``: whoever fits (a
    baseline: the first can wait for ever)."""
    backfill_candidates: Count = 16
    """Most waiting requests behind the first that are looked at in an iteration."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceConfig:
    """How long iterations may take while output is being written."""

    governor: bool = True
    """Whether prefill is cut, and admission held, so that iterations keep their target."""
    iteration_target: Duration | None = None
    """Target of every iteration in which somebody decodes; None: that of the classes in it."""
    min_prefill_tokens: Tokens32 | None = None
    """Prefill tokens that every iteration may have whatever its target; None: one block."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


Price = PriceConfig | Literal["device_time"]
"""What service costs: so much for each token, or microseconds of the iteration."""
Join = Literal["continuous", "static"] | JoinConfig
"""When newcomers may join: at every iteration, when nobody runs (a baseline), or by window."""
Classes = Mapping[str, ClassConfig]
Tenants = Mapping[str, TenantConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """An API key of the server: who its requests belong to. The key itself is nowhere."""

    hash: KeyHash
    """``sha256:`` and the key's SHA-256 in hexadecimal; ``chairlift key`` makes a pair."""
    tenant: str = "default"
    """The tenant of its requests."""
    default_class: str | None = None
    """Class of its requests that name none; None: the tenant's default."""
    best_class: str | None = None
    """Class whose level its requests never exceed; None: no bound but the tenant's."""
    admin: bool = False
    """Whether it may use the endpoints under ``/admin``."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)


Keys = Mapping[str, KeyConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Classes, tenants, and how the waiting queue treats them.

    Mappings may have tables (plain dictionaries) for values; all are copied.
    """

    classes: Classes = field(default_factory=lambda: {"default": ClassConfig()})
    """The classes by name; the first is that of requests and tenants that name none."""
    tenants: Tenants = field(default_factory=dict)
    """Tenants with settings of their own, by name."""
    default_tenant: TenantConfig = field(default_factory=TenantConfig)
    """Settings of every other tenant."""
    shedding: SheddingConfig | None = None
    """Overload control; None: nothing is shed."""
    pace: PaceConfig = field(default_factory=PaceConfig)
    """How long iterations may take."""
    sharing: Sharing = "fcfs"
    """How classes of a level, tenants of a class and users of a tenant share: ``fcfs``: first come,
    first served; ``fair``: who had the least service for its weight is next."""
    price: Price = field(default_factory=PriceConfig)
    """What service costs, for ``fair``."""
    charge_predicted_output: bool = False
    """Whether the predicted output is charged at admission and trued up at the end."""
    order: Order = "arrival"
    """Who is next among the requests of one user: the oldest, the one with the fewest predicted
    tokens, with the least predicted memory over time, the earliest deadline, or (of the oldest few)
    the longest cached prefix."""
    ageing: float = 0.01
    """How far a token that the engine processed since a request's arrival moves it forward, in
    predicted tokens; for ``shortest`` and ``footprint``."""
    max_level_wait: Duration | None = None
    """Longest wait behind higher levels until a request is first scheduled: some iterations before
    it is promoted; None: no bound."""
    join: Join = "continuous"
    """When newcomers may join those that run."""
    preempt_to_admit: bool = True
    """Whether a request of a strictly higher level may preempt to be admitted."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """How KV memory is handed out."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self, in_queue=QUEUE_KEYS)


TABLES = ("classes", "tenants", "default_tenant", "shedding", "memory", "pace")
"""Fields of the policy that are tables of their own in a file; all others stand in ``[queue]``."""
QUEUE_KEYS = tuple(item.name for item in fields(PolicyConfig) if item.name not in TABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What ``chairlift.toml`` holds: options of the engine, and the policy."""

    engine: EngineTable = field(default_factory=lambda: cast("EngineTable", {}))
    """Keyword arguments of ``LLM`` and ``AsyncEngine``; those given there win."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    keys: Keys = field(default_factory=dict)
    """API keys of ``chairlift serve``, by a name that stands for the key in messages."""

    def __post_init__(self) -> None:
        """Check types."""
        _settle(self)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Config:
        """Read and check a TOML file.

        Raises:
            ConfigError: it cannot be read, or something in it cannot work; says where.
        """
        from chairlift.config_file import read_config  # noqa: PLC0415  # it needs this module

        return read_config(path)


class _KindError(ValueError):
    """A value is not of the right kind; its message is what would be."""


class _SecretKindError(_KindError):
    """The same of a value that may be a secret in the wrong place: it is not shown."""


def _settle(config: DataclassInstance, in_queue: Collection[str] = ()) -> None:
    """Check every field of a frozen dataclass by its annotation; give it the form it is kept in."""
    for option in fields(config):
        value = getattr(config, option.name)
        kind, _, optional = str(option.type).partition(" | ")
        if optional and value is None:
            continue
        key = f"queue.{option.name}" if option.name in in_queue else option.name
        try:
            kept = _KINDS[kind](value)
        except _SecretKindError as wanted:
            raise ConfigError(f"{key} must be {wanted}") from None
        except _KindError as wanted:
            raise ConfigError(f"{key} is {shown(value)}; it must be {wanted}") from None
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from None
        object.__setattr__(config, option.name, kept)


def shown(value: object) -> str:
    """A value as a message shows it: never more than 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # of an integer with thousands of digits
        return "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_keys(table: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse keys that there are not.

    Raises:
        ConfigError: names the key, and the one that was probably meant.
    """
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(f"{key} is no setting; {hint}known are {', '.join(sorted(known))}")


def seconds(value: object) -> float:
    """Seconds of a duration: a number, or text such as ``250ms``.

    Raises:
        ValueError: it is none; says what would be.
    """
    length = -1.0
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", value.strip(), re.ASCII)
        if match is not None and match[2] in DURATION_UNITS:
            length = float(match[1]) * DURATION_UNITS[match[2]] / 1e6
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        length = value
    if not 0 <= length <= _LONGEST_S:
        raise _KindError(
            'a duration of at most 366 days: seconds, or text such as "250ms", "2s" or "5m" (units '
            f"{', '.join(DURATION_UNITS)})"
        )
    return float(length)


def _integer(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _KindError(f"an integer from {low} to {high}")
        return value

    return read


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _KindError("a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _KindError("a finite number")
    return number


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _KindError("true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _KindError("a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _KindError("text without lone surrogates") from None
    return value


def _key_hash(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"sha256:[0-9A-Fa-f]{64}", value):
        raise _SecretKindError('"sha256:" and 64 hexadecimal digits; chairlift key prints one')
    return value.lower()


def _table(cls: type[T], error: type[_KindError] = _KindError) -> Callable[[object], T]:
    """One of ``cls``, or a table of its fields."""

    def read(value: object) -> T:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise error("a table")
        options = fields(cls)  # type: ignore[arg-type]
        known = [item.name for item in options]
        check_keys(value, known)
        needed = [item.name for item in options if item.default is item.default_factory is MISSING]
        missing = [name for name in needed if name not in value]
        if missing:
            raise error(f"a table of {' and '.join(needed)}; {', '.join(missing)} is missing")
        return cls(**value)

    return read


def _named(
    cls: type[T], error_kind: type[_KindError] = _KindError
) -> Callable[[object], dict[str, T]]:
    """A table of tables by name."""
    read_one = _table(cls, error_kind)

    def read(value: object) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise error_kind("a table of tables")
        kept = {}
        for name, entry in value.items():
            _text(name)
            try:
                kept[name] = read_one(entry)
            except _SecretKindError as wanted:
                raise ConfigError(f"{name} must be {wanted}") from None
            except _KindError as wanted:
                raise ConfigError(f"{name} is {shown(entry)}; it must be {wanted}") from None
            except ConfigError as error:
                raise ConfigError(f"{name}.{error}") from None
        return kept

    return read


def _text_or(cls: type[T]) -> Callable[[object], str | T]:
    """A name that the core knows, or a table."""
    read_table = _table(cls)

    def read(value: object) -> str | T:
        return _text(value) if isinstance(value, str) else read_table(value)

    return read


def _options(value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise _KindError("a table")
    return dict(value)


_KINDS: dict[str, Callable[[object], object]] = {
    "int": _integer(-_INT32_MAX - 1, _INT32_MAX),
    "Count": _integer(0, _INT32_MAX),
    "Tokens": _integer(0, _INT64_MAX),
    "Tokens32": _integer(0, _INT32_MAX),
    "float": _number,
    "bool": _boolean,
    "str": _text,
    "Duration": seconds,
    "KeyHash": _key_hash,
    # Choices are the core's to know.
    "OnTimeout": _text,
    "OnDoomed": _text,
    "Sharing": _text,
    "Backfill": _text,
    "Order": _text,
    "MemoryAdmission": _text,
    "Price": _text_or(PriceConfig),
    "Join": _text_or(JoinConfig),
    "Classes": _named(ClassConfig),
    "Tenants": _named(TenantConfig),
    "Keys": _named(KeyConfig, _SecretKindError),
    "TenantConfig": _table(TenantConfig),
    "SheddingConfig": _table(SheddingConfig),
    "MemoryConfig": _table(MemoryConfig),
    "PaceConfig": _table(PaceConfig),
    "EngineTable": _options,
    "PolicyConfig": _table(PolicyConfig),
}
"""How a value of each annotation is read."""

"""The flight log: what an engine was told and decided, written down, read again.

``EngineArgs.record`` names the file. :class:`FlightLog` reads one: :meth:`~FlightLog.replay` lets
all of it happen again, :meth:`~FlightLog.explain` tells the story of one request,
:meth:`~FlightLog.measure` says what the run was asked for and what it measured, which
:mod:`chairlift.prediction` simulates under other settings.

The log has the scheduler's inputs, so it holds every prompt and every answer as token ids. Only its
owner can read it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import Any

from chairlift import _core
from chairlift.config import QUEUE_KEYS, TABLES, PolicyConfig, check_keys, shown
from chairlift.cost_model import CostCoefficients
from chairlift.engine_args import CoreSettings, EngineArgs
from chairlift.errors import ConfigError

Progress = Callable[[int, float], object]
"""Called now and then with the steps so far and the share of the file that was read."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Where an engine is recorded."""

    path: str
    limit: int
    """Bytes of all files."""
    about: str
    """What the log says of the engine, as JSON."""


def recording(args: EngineArgs, settings: CoreSettings) -> Recording | None:
    """Describe the recording that the arguments ask for; None: there is none."""
    if args.record is None:
        return None
    about = {"model": args.model, "settings": asdict(settings)}
    return Recording(fspath(args.record), args.record_limit, json.dumps(about))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference between a log and its replay."""

    step: int
    at_s: float
    call: str
    field: str
    logged: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Replay:
    """How a replay went."""

    steps: int
    records: int
    bytes: int
    cut_off_bytes: int
    """Bytes at the end that are no whole record: the engine was cut off while it wrote."""
    end_s: float
    """The engine's clock at the last record."""
    stopped: str | None
    """Why the recording ended before the engine did."""
    later_segments: list[int]
    """Segments behind a gap: what lay between was let go, so they cannot be replayed."""
    mismatch: Mismatch | None
    message: str | None
    """The mismatch, told."""

    @classmethod
    def of(cls, report: dict[str, Any]) -> Replay:
        """Make one of what the core says."""
        mismatch = report.pop("mismatch")
        return cls(**report, mismatch=None if mismatch is None else Mismatch(**mismatch))


@dataclass(frozen=True, slots=True)
class Explanation:
    """A request's story, or that there is none."""

    replay: Replay
    is_heard: bool
    """Whether it is from a part that cannot be replayed: what the log says by itself."""
    num_requests: int
    """Requests that the log had up to the story's end."""
    examples: list[int]
    """The first of them."""
    story: dict[str, Any] | None
    """As the core's ``Story``: times in microseconds of the engine's clock."""


class FlightLog:
    """A log on disk."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Read its header.

        Raises:
            ConfigError: there is none, or another build wrote it.
        """
        self.path = fspath(path)
        self._log = _core.FlightLog(self.path)
        about = json.loads(self._log.about)
        self.model: str = about["model"]
        """The model that was served."""
        self._settings: dict[str, Any] = about["settings"]

    @property
    def package(self) -> str:
        """Version of chairlift that wrote it."""
        return self._log.package

    def settings(self, changes: Sequence[str] = ()) -> CoreSettings:
        """Return the engine's settings when it started, with changes such as ``max_num_seqs=64``.

        A key is an option of the engine (``max_num_seqs``) or of the configuration
        (``queue.order``, ``classes.NAME.weight``, ``tenants.NAME.max_running``,
        ``shedding.above``, ``memory.admission``, ``pace.governor``); a value is TOML, or text.

        Raises:
            ConfigError: a change cannot be.
        """
        settings: dict[str, Any] = json.loads(json.dumps(self._settings))
        policy: dict[str, Any] = settings.pop("policy")
        costs: dict[str, float] | None = settings.pop("cost_model")
        for change in changes:
            key, sign, text = change.partition("=")
            if not sign:
                raise ConfigError(f"{change} is no change; write KEY=VALUE, as max_num_seqs=64")
            _change(settings, policy, key.strip(), _value(text.strip()))
        made = CoreSettings(
            **settings,
            policy=PolicyConfig(**policy),
            cost_model=None if costs is None else CostCoefficients(**costs),
        )
        _core.check_settings(made)
        return made

    def replay(
        self, settings: CoreSettings | None = None, *, progress: Progress | None = None
    ) -> Replay:
        """Let all of it happen again, on other settings if given, to the first difference.

        Raises:
            ConfigError: the log is damaged.
        """
        return Replay.of(json.loads(self._log.replay(settings, progress)))

    def explain(self, request: int, *, progress: Progress | None = None) -> Explanation:
        """Tell one request's story.

        Raises:
            ConfigError: the log is damaged.
        """
        told = json.loads(self._log.explain(request, progress))
        return Explanation(
            replay=Replay.of(told["report"]),
            is_heard=told["is_heard"],
            num_requests=told["num_requests"],
            examples=told["examples"],
            story=told["story"],
        )

    def measure(self, *, progress: Progress | None = None) -> _core.RecordedRun:
        """Replay all of it and keep what it measured.

        Raises:
            ConfigError: the log is damaged.
        """
        return self._log.measure(progress)


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _change(settings: dict[str, Any], policy: dict[str, Any], key: str, value: object) -> None:
    first, *path = key.split(".")
    if not path and first not in TABLES:
        name = first.replace("-", "_")
        check_keys({name: value}, settings)
        if isinstance(value, str | float):
            raise ConfigError(f"{name} is {shown(value)}; it must be an integer, true or false")
        settings[name] = value
        return
    if first == "queue" and path:
        check_keys({path[0]: value}, QUEUE_KEYS)
    elif first in TABLES:
        path = [first, *path]
    else:
        tables = ", ".join(("queue", *TABLES))
        raise ConfigError(f"{key} is no setting; known are the engine's options and {tables}")
    table = policy
    for name in path[:-1]:
        inner = table.get(name)
        if not isinstance(inner, dict):
            inner = table[name] = {}
        table = inner
    table[path[-1]] = value

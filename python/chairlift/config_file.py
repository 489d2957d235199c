"""``chairlift.toml``: read, checked, merged with keyword arguments, and written.

Every error begins with the file's name and the dotted path of the key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

from chairlift import _core
from chairlift.config import (
    DURATION_UNITS,
    QUEUE_KEYS,
    TABLES,
    Config,
    JoinConfig,
    PolicyConfig,
    PriceConfig,
    check_keys,
    shown,
)
from chairlift.engine_args import (
    ENGINE_KEYS,
    ConfigSource,
    EngineArgs,
    EngineOptions,
    EngineTable,
    check_args,
)
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def read_config(path: str | PathLike[str]) -> Config:
    """Read and check a file.

    Raises:
        ConfigError: it cannot be read, is no TOML, or something in it cannot work.
    """
    with naming(path):
        try:
            with open(path, "rb") as file:
                document = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"it cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"it is no UTF-8 text: {error.reason} at {error.start}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"it is no TOML: {error}") from error
        check_keys(document, ("engine", "queue", "keys", *TABLES))
        queue = _table(document, "queue")
        with _inside("queue"):
            check_keys(queue, QUEUE_KEYS)
        tables = {name: document[name] for name in TABLES if name in document}
        config = Config(
            engine=cast("EngineTable", _table(document, "engine")),
            policy=PolicyConfig(**queue, **tables),
            keys=document.get("keys", {}),
        )
        check_config(config)
    return config


def load_config(source: ConfigSource | None) -> Config:
    """Return a checked configuration: an object, a file's, or for None the defaults.

    Raises:
        ConfigError: something in it cannot work.
    """
    if isinstance(source, (str, PathLike)):
        return read_config(source)
    config = Config() if source is None else source
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise ConfigError(f"config is of type {kind}; it must be a Config or the path of a file")
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Check a configuration by itself, with the defaults for what it leaves out.

    Raises:
        ConfigError: something in it cannot work.
    """
    _core.check_policy(config.policy)
    classes = config.policy.classes
    for name, key in config.keys.items():
        for option, wanted in (
            ("default_class", key.default_class),
            ("best_class", key.best_class),
        ):
            if wanted is not None and wanted not in classes:
                raise ConfigError(
                    f"keys.{name}.{option} is {shown(wanted)}; it must be one of the classes, "
                    f"{', '.join(classes)}"
                )
    with _inside("engine"):
        check_keys(config.engine, ENGINE_KEYS)
        check_args(_args(config, {}))


def engine_args(model: str | None, options: EngineOptions) -> EngineArgs:
    """Settle an engine's options: what is given wins over the configuration, that over defaults.

    Raises:
        ConfigError: something in the configuration cannot work.
    """
    given = dict(options)
    config = load_config(options.get("config"))
    if model is not None:
        given["model"] = model
    return _args(config, given)


def to_toml(config: Config) -> str:
    """Write the effective settings, defaults included, as a file that reads back as the same.

    Raises:
        ConfigError: an option is an object that no file can hold.
    """
    args = _args(config, {})
    policy = config.policy
    lines = ["[engine]"]
    for name in ENGINE_KEYS:
        with _inside("engine"):
            lines.append(_line(name, getattr(args, name)))
    lines += ["", "[queue]"]
    lines += [
        _line(item.name, getattr(policy, item.name), str(item.type))
        for item in fields(policy)
        if item.name in QUEUE_KEYS
    ]
    for name, settings in policy.classes.items():
        lines += ["", f"[classes.{_key(name)}]", *_lines(settings)]
    lines += ["", "[default_tenant]", *_lines(policy.default_tenant)]
    for name, tenant in policy.tenants.items():
        lines += ["", f"[tenants.{_key(name)}]", *_lines(tenant)]
    if policy.shedding is not None:
        lines += ["", "[shedding]", *_lines(policy.shedding)]
    lines += ["", "[memory]", *_lines(policy.memory)]
    for name, key in config.keys.items():
        lines += ["", f"[keys.{_key(name)}]", *_lines(key)]
    return "\n".join(lines) + "\n"


@contextmanager
def naming(source: ConfigSource) -> Iterator[None]:
    """Begin the message of every :class:`ConfigError` with the file's name, if it is a file."""
    try:
        yield
    except ConfigError as error:
        if isinstance(source, Config):
            raise
        raise ConfigError(f"{fspath(source)}: {error}") from error.__cause__


@contextmanager
def _inside(table: str) -> Iterator[None]:
    """Begin the message of every :class:`ConfigError`, which is a key, with its table."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{table}.{error}") from None


def _args(config: Config, given: Mapping[str, Any]) -> EngineArgs:
    return EngineArgs(**{**config.engine, **given, "config": config})


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} is {shown(table)}; it must be a table")
    return table


def _lines(settings: DataclassInstance) -> list[str]:
    return [
        _line(item.name, getattr(settings, item.name), str(item.type)) for item in fields(settings)
    ]


def _line(key: str, value: object, kind: str = "") -> str:
    return f"# {key} is not set" if value is None else f"{key} = {_value(key, value, kind)}"


def _value(key: str, value: object, kind: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if kind.startswith("Duration"):
        return _duration(cast("float", value))
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (PriceConfig, JoinConfig)):
        return f"{{ {', '.join(_lines(value))} }}"
    raise ConfigError(f"{key} is {shown(value)}; it must be text to be written to a file")


def _duration(length: float) -> str:
    """Text of a duration in the largest unit that divides it, to the microsecond."""
    microseconds = round(length * 1e6)
    for unit, size in reversed(DURATION_UNITS.items()):
        if microseconds % size == 0 and microseconds >= size:
            return f'"{microseconds // size}{unit}"'
    return '"0s"'


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for one character that JSON leaves alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Flags that choose an engine, for every command that starts one. Names are vLLM's where they mean
the same; the defaults are those of :class:`chairlift.engine_args.EngineArgs`."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

from chairlift.config import seconds
from chairlift.engine_args import DEFAULT_MODEL, EngineArgs, EngineOptions

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def add_engine_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags, and return their group; :func:`engine_options` reads them back."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        metavar="DIR_OR_NAME",
        help=f"a Hugging Face directory, a hub id, or {DEFAULT_MODEL} (the default)",
    )
    # Flags that are not given are left out, so that the defaults are written once.
    flag = _Adder(group)
    flag(
        "--config",
        metavar="FILE",
        help="a chairlift.toml: options, classes and tenants; flags win over it",
    )
    flag("--tokenizer", metavar="DIR", help="a directory with another tokenizer")
    flag("--revision", help="revision of a hub id")
    flag("--device", choices=["cpu", "cuda"], help="where the model runs")
    flag(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="precision of the model; float16 on CUDA alone",
    )
    flag(
        "--kv-cache-dtype",
        choices=["auto", "fp8", "fp8_e4m3"],
        help="precision of the KV cache; fp8 (e4m3) on CUDA alone",
    )
    flag("--max-model-len", type=int, metavar="N", help="longest prompt and output together")
    flag("--max-num-seqs", type=int, metavar="N", help="most sequences that run at once")
    flag("--max-num-batched-tokens", type=int, metavar="N", help="token budget of one iteration")
    flag(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        help="longest prefill chunk of one sequence",
    )
    flag("--block-size", type=int, metavar="N", help="tokens a KV block holds")
    flag("--num-kv-blocks", type=int, metavar="N", help="blocks of the KV pool")
    flag(
        "--kv-cache-memory",
        type=memory_size,
        metavar="SIZE",
        help="size of the KV pool instead, such as 512M or 4G",
    )
    flag(
        "--kv-host-memory",
        type=memory_size,
        metavar="SIZE",
        help="host memory for KV blocks that a CUDA device has no room for",
    )
    flag(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of a CUDA device's memory that may be used",
    )
    flag(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="no CUDA graphs",
    )
    flag(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="find KV blocks again by their content",
    )
    flag(
        "--watermark-blocks",
        type=int,
        metavar="N",
        help="blocks that a newcomer leaves free while others run (one in a hundred)",
    )
    flag("--max-queued-requests", type=int, metavar="N", help="most requests that wait")
    flag("--max-queued-tokens", type=int, metavar="N", help="most prompt tokens that wait")
    flag(
        "--max-in-flight-steps",
        type=int,
        metavar="N",
        help="most steps at once; with 2 the next is planned before the results of this one",
    )
    flag(
        "--step-timeout",
        type=int,
        metavar="N",
        help="seconds after which a step that has not come back ends the engine",
    )
    flag(
        "--iteration-target",
        type=_duration,
        metavar="TIME",
        help="longest iteration while somebody decodes, such as 50ms; prefill gets what is left",
    )
    flag(
        "--cost-model-cache",
        action=argparse.BooleanOptionalAction,
        help="keep what is learned of iterations' time for the next start",
    )
    flag("--attention-backend", choices=["cpu", "reference"], help="attention kernels")
    flag("--num-threads", type=int, metavar="N", help="threads of the forward pass")
    flag("--max-logprobs", type=int, metavar="N", help="most log-probabilities per position")
    flag(
        "--record",
        metavar="FILE",
        help="write a flight log, prompts included, for chairlift replay and chairlift explain",
    )
    flag(
        "--record-limit",
        type=memory_size,
        metavar="SIZE",
        help="size of the flight log: its beginning and its newest segments",
    )
    flag("--executor", metavar="MODULE:CLASS", help="an executor of your own")
    return group


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the flags that were given, as keyword arguments of an engine."""
    names = EngineOptions.__optional_keys__
    options: EngineOptions = {}
    for name, value in vars(args).items():
        if name in names:
            options[name] = value  # type: ignore[literal-required]
    return options


def memory_size(text: str) -> int:
    """Bytes of a size such as ``512M`` or ``4G`` (powers of 1,024)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write one such as 512M or 4G")
    return int(match[1]) * _UNITS[match[2].upper()]


def _duration(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as wanted:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None


class _Adder:
    """Adds flags that leave no trace where they are not given; their help tells the default."""

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group
        self._defaults = {item.name: item.default for item in fields(EngineArgs)}

    def __call__(self, name: str, *, help: str, **options: object) -> None:
        default = self._defaults.get(name.removeprefix("--").replace("-", "_"))
        if isinstance(default, bool):
            help += " (yes)" if default else " (no)"
        elif isinstance(default, int | float | str):
            help += f" ({default})"
        self._group.add_argument(
            name,
            default=argparse.SUPPRESS,
            help=help,
            **options,  # type: ignore[arg-type]
        )

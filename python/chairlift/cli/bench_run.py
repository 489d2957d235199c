"""What ``chairlift bench`` does: the workload of its flags, the run, the report."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import uvloop
from tqdm import tqdm

from chairlift.bench.client import Client, Outcome
from chairlift.bench.lengths import parse_length
from chairlift.bench.load import Load, LoadResult
from chairlift.bench.report import has_broken, parse_limits, summarise
from chairlift.bench.table import table
from chairlift.bench.tenants import TenantMix, parse_tenant, read_mix
from chairlift.bench.trace import TraceRow, read_trace
from chairlift.bench.workload import Request, Workload, until
from chairlift.errors import ConfigError

_DEFAULT_REQUESTS = 100
_DEFAULT_CONCURRENCY = 8
_WARMUP_CONCURRENCY = 8
_INTERRUPTED = 130
_OPEN_FILES = 65_536


def run_bench(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status.

    Raises:
        ConfigError: the flags do not go together, or a file cannot be used.
        ServerUnreachableError: there is no server, or it does not let us in.
    """
    _check(args)
    limits = parse_limits(args.goodput)
    workload = _workload(args, _read_trace(args))
    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result, model = runner.run(_load(args, workload))
    if result.is_interrupted and not result.outcomes:
        return _INTERRUPTED
    summary = {**_settings(args, model), **summarise(result, limits)}
    _write(summary, args.json)
    if result.is_interrupted:
        return _INTERRUPTED
    return 1 if has_broken(result) else 0


def _check(args: argparse.Namespace) -> None:
    for flag, mode in (("rate", "poisson"), ("burstiness", "poisson"), ("concurrency", "closed")):
        if getattr(args, flag) is not None and args.mode != mode:
            raise ConfigError(f"--{flag} is of --mode {mode}, but the mode is {args.mode}")
    for flag in ("rate", "burstiness", "concurrency", "num_requests", "duration", "timeout"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value:g}; it must be above 0")
    for flag in ("warmup", "retry", "seed"):
        if getattr(args, flag) < 0:
            raise ConfigError(f"--{flag} is {getattr(args, flag)}; it must be at least 0")
    if args.mode == "trace" and args.trace is None:
        raise ConfigError("--mode trace needs --trace FILE")
    if not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url is {args.base_url!r}; it must begin with http://")


def _read_trace(args: argparse.Namespace) -> list[TraceRow]:
    if args.trace is None:
        return []
    return read_trace(
        args.trace,
        time_scale=args.time_scale,
        length_scale=args.length_scale,
        most=args.num_requests,
    )


def _workload(args: argparse.Namespace, trace: list[TraceRow]) -> Workload:
    tenants = [parse_tenant(text) for text in args.tenant]
    if args.tenants is not None:
        tenants += read_mix(args.tenants)
    try:
        extra_body = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(extra_body, dict):
        raise ConfigError("--extra-body is no JSON object")
    return Workload(
        endpoint=args.endpoint,
        input_tokens=parse_length(args.input_tokens),
        output_tokens=parse_length(args.output_tokens),
        trace=trace,
        length_scale=args.length_scale,
        mix=TenantMix(tenants),
        tenant_header=args.tenant_header,
        is_text=args.text,
        vocab_size=args.vocab_size,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=extra_body,
        seed=args.seed,
    )


async def _load(args: argparse.Namespace, workload: Workload) -> tuple[LoadResult, str]:
    client = Client(
        args.base_url,
        endpoint=args.endpoint,
        api_key=args.api_key,
        timeout_s=args.timeout,
        num_retries=args.retry,
        must_have_all=args.ignore_eos,
    )
    async with client:
        names = await client.models()
        if args.model is None and not names:
            raise ConfigError(f"{args.base_url} tells no models; give --model NAME")
        model = args.model or names[0]
        if args.warmup:
            warmup = Load(client, lambda _: None)
            requests = islice(workload.warmup(model), args.warmup)
            result = await warmup.closed_loop(requests, min(args.warmup, _WARMUP_CONCURRENCY))
            if result.is_interrupted:
                return LoadResult(is_interrupted=True), model
        return await _measure(args, client, workload, model), model


async def _measure(
    args: argparse.Namespace, client: Client, workload: Workload, model: str
) -> LoadResult:
    num_requests = _num_requests(args, workload)
    with tqdm(
        total=num_requests, unit="request", file=sys.stderr, disable=None, dynamic_ncols=True
    ) as progress:
        num_failures = 0

        def show(outcome: Outcome) -> None:
            nonlocal num_failures
            progress.update()
            if outcome.failure is not None:
                num_failures += 1
                progress.set_postfix_str(f"{num_failures} without an answer", refresh=False)

        load = Load(client, show)
        if args.mode == "closed":
            requests = islice(workload.closed(model), num_requests)
            concurrency = args.concurrency or _DEFAULT_CONCURRENCY
            return await load.closed_loop(requests, concurrency, args.duration)
        requests = islice(until(_timed(args, workload, model), args.duration), num_requests)
        return await load.open_loop(requests)


def _timed(args: argparse.Namespace, workload: Workload, model: str) -> Iterator[Request]:
    if args.mode == "trace":
        return workload.replay(model)
    rate = math.inf if args.rate is None else args.rate
    return workload.poisson(model, rate, args.burstiness or 1.0)


def _num_requests(args: argparse.Namespace, workload: Workload) -> int | None:
    """How many are sent at most; None: the duration decides."""
    if args.mode == "trace":
        end = math.inf if args.duration is None else float(args.duration)
        return sum((row.arrival_s or 0.0) < end for row in workload.trace)
    if args.num_requests is not None:
        return int(args.num_requests)
    is_spread = args.mode == "closed" or args.rate not in (None, math.inf)
    return None if args.duration is not None and is_spread else _DEFAULT_REQUESTS


def _settings(args: argparse.Namespace, model: str) -> dict[str, object]:
    """What was asked for, without a key."""
    names = [
        "base_url",
        "endpoint",
        "mode",
        *(["rate", "burstiness"] if args.mode == "poisson" else []),
        *(["concurrency"] if args.mode == "closed" else []),
        *(["trace", "time_scale", "length_scale"] if args.trace is not None else []),
        *(["input_tokens", "output_tokens"] if args.trace is None else []),
        "num_requests",
        "duration",
        "warmup",
        "retry",
        "seed",
    ]
    values = {name: getattr(args, name) for name in names}
    if values.get("rate") in (None, math.inf) and args.mode == "poisson":
        values["rate"] = "inf"
    if args.trace is not None:
        values["trace"] = args.trace.name
    return {"settings": {"model": model, **values}}


def _write(summary: Mapping[str, object], json_file: str | None) -> None:
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    sys.stdout.write(table(summary))
    if json_file is not None:
        try:
            Path(json_file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{json_file} cannot be written: {error.strerror}") from None


def _allow_many_connections() -> None:
    """Each stream is an open file; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""``chairlift replay``: a flight log, lived again, or simulated under other settings."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from chairlift.flight_log import FlightLog, Replay
from chairlift.prediction import MEASURES, Outcome, Prediction, predict

_LABELS = {"queue_time_s": "queue time", "ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "replay",
        help="let a flight log happen again, or see what other settings would have done",
        description="Feed a flight log (--record of serve and generate) through the scheduler: "
        "every plan must come out bit for bit, or the first step and field that differ are told "
        "and the status is 1. With --predict the requests of the log are served by the simulator "
        "instead, with the recorded settings and with the changes of --set, beside what was "
        "measured.",
    )
    parser.add_argument("log", metavar="LOG", help="the file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="KEY=VALUE",
        help="change a setting, such as max_num_seqs=64, queue.order=shortest or "
        "classes.batch.weight=2; may be repeated. Without --predict: tells the first decision that "
        "would have been another one",
    )
    parser.add_argument("--predict", action="store_true", help="simulate instead")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulator (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    log = FlightLog(args.log)
    settings = log.settings(args.changes) if args.changes else None
    with _Progress() as progress:
        if args.predict:
            prediction = predict(log, settings, seed=args.seed, progress=progress)
        else:
            replay = log.replay(settings, progress=progress)
    if args.predict:
        _write(args, lambda: _as_json(prediction), lambda: _predicted(prediction, args.changes))
        return 0
    rate = replay.steps / max(progress.seconds, 1e-9)
    _write(args, lambda: asdict(replay) | {"steps_per_s": rate}, lambda: _replayed(replay, rate))
    return 0 if replay.mismatch is None else 1


class _Progress:
    """A line on standard error while it takes long, if that is a terminal."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> _Progress:
        self._since = time.perf_counter()
        return self

    def __call__(self, steps: int, share: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{steps:,} steps, {share:.0%}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._since
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _write(
    args: argparse.Namespace,
    as_json: Callable[[], Mapping[str, Any]],
    as_text: Callable[[], str],
) -> None:
    text = json.dumps(finite(as_json()), indent=2, allow_nan=False) if args.json else as_text()
    print(text)


def finite(value: Any) -> Any:  # noqa: ANN401  # JSON has no type of its own
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _replayed(replay: Replay, rate: float) -> str:
    lines = [
        f"{replay.steps:,} steps in {replay.records:,} records over {replay.end_s:,.1f} s, "
        f"replayed at {rate:,.0f} steps/s",
        *notes(replay),
    ]
    if replay.mismatch is None:
        lines.append("every plan came out bit for bit")
    else:
        lines.append(f"first difference: {replay.message}")
        if "digest" in replay.mismatch.logged + replay.mismatch.replayed:
            lines.append("(of arrays the log has only a digest, so their values cannot be shown)")
    return "\n".join(lines)


def notes(replay: Replay) -> list[str]:
    """What is to be known of a log that is not all there."""
    lines = []
    if replay.cut_off_bytes:
        lines.append(
            f"the log was cut off: its last {replay.cut_off_bytes} bytes are no whole record and "
            "were left out"
        )
    if replay.stopped is not None:
        lines.append(f"the recording ended before the engine did: {replay.stopped}")
    if replay.later_segments:
        numbers = ", ".join(f".{number}" for number in replay.later_segments)
        lines.append(
            "the log reached its limit: what came after this was let go, but for its last "
            f"segments ({numbers}), which chairlift explain reads"
        )
    return lines


def _as_json(prediction: Prediction) -> dict[str, Any]:
    return asdict(prediction)


def _predicted(prediction: Prediction, changes: list[str]) -> str:
    fit, profile = prediction.fit, prediction.fit.profile
    lines = [
        f"cost of an iteration, fitted to {fit.steps:,} steps: mean error "
        f"{fit.mean_abs_error:.1%}, of their sum {fit.total_error:+.1%}",
        f"  {profile.t0_s * 1e3:.3f} ms + {profile.t_seq_s * 1e6:.1f} us a sequence + "
        f"{profile.t_tok_s * 1e6:.1f} us a token (at least {profile.t_w_s * 1e3:.2f} ms) + "
        f"{profile.t_ctx_s * 1e9:.1f} ns a token of context + {profile.t_pair_s * 1e9:.2f} ns a "
        "pair",
        *notes(prediction.replay),
    ]
    if prediction.guessed:
        lines.append(
            f"{prediction.guessed} answers did not come to their own end; their length is a guess "
            "(the median of their class)"
        )
    if prediction.reloads:
        lines.append(
            f"{prediction.reloads} reloads are not simulated: the first policy is in force "
            "throughout"
        )
    columns = {"measured": prediction.measured, "simulated as recorded": prediction.recorded}
    if prediction.changed is not None:
        columns[", ".join(changes)] = prediction.changed
    return "\n".join([*lines, "", *_table(columns)])


def _table(columns: Mapping[str, Outcome]) -> list[str]:
    rows = [["", *columns]]
    outcomes = list(columns.values())
    rows.append(["finished", *(f"{each.finished:,} of {each.requests:,}" for each in outcomes)])
    rows.append(["output tokens/s", *(f"{each.tokens_per_s:,.1f}" for each in outcomes)])
    rows.append(["span", *(f"{each.span_s:,.1f} s" for each in outcomes)])
    rows.append(["preemptions", *(f"{each.preemptions:,}" for each in outcomes)])
    for name in MEASURES:
        for quantile in ("p50", "p95", "p99"):
            values = (each.quantiles[name][quantile] for each in outcomes)
            shown = ("-" if math.isnan(value) else f"{value * 1e3:,.1f} ms" for value in values)
            rows.append([f"{_LABELS[name]} {quantile}", *shown])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

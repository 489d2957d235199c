"""``chairlift calibrate``: measure what iterations cost here, and keep it for the next start."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from chairlift.calibration import Calibration, Log, calibrate, groups, lines
from chairlift.cli.engine_flags import add_engine_flags, engine_options
from chairlift.config_file import engine_args
from chairlift.cost_model import save
from chairlift.engine import LocalEngine


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "calibrate",
        help="measure what iterations cost on this machine",
        description="Run iterations of many shapes (decodes, prefill, both) on the real engine, "
        "fit the cost model to them, print the fit and its error on shapes that were held out, and "
        "keep it in the cache, where the next engine of the same model, device and dtype finds it.",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="times each shape is run (1)"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="also write a cost profile for the simulator"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-save", action="store_true", help="do not keep the fit")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and order (0)")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    options = engine_options(args)
    # What is measured must not be cut short by what was measured before, or found in a cache.
    options["cost_model_cache"] = False
    options["enable_prefix_caching"] = False
    options.pop("seed", None)
    engine = LocalEngine(engine_args(args.model, options))
    try:
        limits = dict(engine.limits)
        chosen = groups(limits, rounds=max(args.rounds, 1), seed=args.seed)
        with tqdm(total=len(chosen), unit="group", disable=None, file=sys.stderr) as bar:
            found = calibrate(engine, chosen, seed=args.seed, progress=lambda _group: bar.update())
    finally:
        engine.shutdown()
    kept = None
    if engine.cost_key is not None and not args.no_save:
        kept = save(engine.cost_key, found.learned)
    if args.profile is not None:
        profile = found.costs.profile(
            noise_sigma=min(_log(found).sigma(found.costs), 1.0),
            num_kv_blocks=limits["num_kv_blocks"],
        )
        args.profile.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(_content(found, kept), indent=2))
    else:
        print("\n".join(lines(found)))
        print(f"kept in {kept}" if kept is not None else "not kept")
    return 0


def _log(found: Calibration) -> Log:
    return found.held_out if len(found.held_out.time_us) else found.fitted


def _content(found: Calibration, kept: Path | None) -> dict[str, object]:
    held_out = found.held_out
    return {
        "coefficients": asdict(found.costs),
        "iterations": len(found.fitted.time_us),
        "error": found.fitted.error(found.costs),
        "held_out_iterations": len(held_out.time_us),
        "held_out_error": held_out.error(found.costs) if len(held_out.time_us) else None,
        "prediction_error": found.learned["mean_error"],
        "kept": None if kept is None else str(kept),
    }

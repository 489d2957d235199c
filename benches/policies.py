"""Experiments on scheduling policies, in the simulator, on a serving trace.

    python benches/policies.py --experiment head-of-line --trace azure2023_conv.csv.gz --load 0.7
    python benches/policies.py --experiment priority --trace azure2023_conv.csv.gz \\
        --batch lengths_sharegpt8k.csv.gz --load 0.3 --out docs

Prints a table, or JSON; ``--out`` also draws its pictures into DIR/pictures and puts its section
into DIR/policies.md. Exits with 1 where something does not hold that must be shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from chairlift.errors import ConfigError
from simulation.bench import PROFILES, Bench, read_profile
from simulation.experiments import EXPERIMENTS
from simulation.pictures import PicturesError, draw
from simulation.report import write_section
from simulation.traces import TraceError, read_trace


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", choices=EXPERIMENTS, required=True)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="gzip CSV")
    parser.add_argument(
        "--batch", type=Path, metavar="FILE", help="requests that can wait (default: the trace)"
    )
    parser.add_argument(
        "--also",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a further trace, for memory; may be given several times",
    )
    parser.add_argument(
        "--profile",
        default="gpu-8b",
        metavar="NAME",
        help=f"{', '.join(PROFILES)}, or a JSON file of costs and num_kv_blocks",
    )
    parser.add_argument("--load", type=float, default=1.0, metavar="X", help="of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of each trace")
    parser.add_argument(
        "--divide", type=int, default=1, metavar="N", help="divide lengths, for a small model"
    )
    parser.add_argument(
        "--iterations", type=int, default=10_000, metavar="N", help="of backlogged tenants"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2_048, metavar="N")
    parser.add_argument(
        "--max-tokens", type=int, default=1_024, metavar="N", help="or the true length, if larger"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write pictures and section there")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def bench(args: argparse.Namespace) -> Bench:
    """Read what the arguments name."""
    paths = [args.trace, args.trace if args.batch is None else args.batch, *args.also]
    trace, batch, *also = (
        read_trace(path).first(args.requests).divided(args.divide) for path in paths
    )
    return Bench(
        profile=read_profile(args.profile),
        trace=trace,
        batch=batch,
        also=tuple(also),
        load=args.load,
        seed=args.seed,
        iterations=args.iterations,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_tokens=args.max_tokens,
        divided_by=args.divide,
        quiet=args.quiet,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment."""
    args = parser().parse_args(arguments)
    try:
        report = EXPERIMENTS[args.experiment](bench(args))
        if args.out is not None:
            for picture in report.pictures:
                draw(picture, args.out / "pictures")
            write_section(args.out / "policies.md", report, "pictures")
    except (TraceError, ConfigError, PicturesError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.json() if args.json else report.text(), end="\n" if args.json else "")
    return 0 if all(check.holds for check in report.checks) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

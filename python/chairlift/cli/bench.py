"""``chairlift bench``: load for an OpenAI-compatible server, and the figures of its answers."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8000"

_DESCRIPTION = """\
Load a server and measure its answers. Any OpenAI-compatible URL will do.

  chairlift bench --rate 4 --num-requests 200                 open loop: a Poisson process
  chairlift bench --rate inf --num-requests 64                all at once
  chairlift bench --mode closed --concurrency 32 --duration 60
  chairlift bench --mode trace --trace azure.csv.gz --length-scale 8 --duration 120
  chairlift bench --rate 8 --tenant acme=3,class=interactive --tenant crawl=1,key=sk-2 \\
      --goodput ttft:500 tpot:50 --json -

Requests that are refused (429, 503, 504) are counted and not sent again unless --retry says so. A
stream that breaks off, lacks its finish reason, usage or [DONE], or has another number of tokens
than was asked for, has failed. Exit status: 0, or 1 if a stream failed or no request succeeded at
all, 130 after Ctrl-C (which prints the figures of what has ended).
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "bench",
        help="load a server and measure its answers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_tenant_flags(parser.add_argument_group("tenants and classes"))
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="KIND:MS",
        help="limits that a request must keep: ttft:500 tpot:50 e2e:2000",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write the figures there; - is standard output, no table"
    )
    parser.set_defaults(run=run)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", default=DEFAULT_URL, metavar="URL", help=DEFAULT_URL)
    group.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    group.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="of one request (default 900)"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mode", choices=["poisson", "closed", "trace"], default="poisson")
    group.add_argument(
        "--rate",
        "--request-rate",
        type=float,
        metavar="R",
        help="poisson: requests a second; inf (the default) is all at once",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="poisson: shape of the gaps; less than 1 is burstier (default 1)",
    )
    group.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=int,
        metavar="N",
        help="closed: requests under way (default 8)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV or CSV.gz with arrival_s, input_tokens, output_tokens and optionally tenant (or "
        "client, or class) and prefix_hashes; in other modes only its lengths are used",
    )
    group.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="multiplies arrival times"
    )
    group.add_argument(
        "--length-scale", type=float, default=1.0, metavar="X", help="divides lengths"
    )
    group.add_argument(
        "--num-requests",
        "--num-prompts",
        type=int,
        metavar="N",
        help="most requests (default 100; no bound with --duration or a trace)",
    )
    group.add_argument(
        "--duration", type=float, metavar="S", help="send none after so many seconds"
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="requests before, not measured"
    )
    group.add_argument(
        "--retry",
        type=int,
        default=0,
        metavar="N",
        help="send again after 429 or 503, at most so often, when Retry-After says",
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-tokens",
        default="128",
        metavar="LENGTH",
        help="of a prompt: 128, 16-512, or lognormal:MU,SIGMA,MOST (default 128)",
    )
    group.add_argument(
        "--output-tokens", default="64", metavar="LENGTH", help="of an answer (default 64)"
    )
    group.add_argument(
        "--text",
        action="store_true",
        help="prompts are words (about a token each), not random ids; chat prompts always are",
    )
    group.add_argument(
        "--vocab-size", type=int, default=30_000, metavar="N", help="bound of random ids (30000)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length, and fail those that are not",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T")
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="more fields of every request"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything drawn")


def _add_tenant_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME=WEIGHT[,class=C][,key=K]",
        help="sends its share of the requests; may be repeated",
    )
    group.add_argument(
        "--tenants",
        type=Path,
        metavar="FILE",
        help="the same as TOML or JSON: [tenants.NAME] with weight, class, key",
    )
    group.add_argument(
        "--tenant-header", metavar="NAME", help="header that carries the tenant's name"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from chairlift.cli.bench_run import run_bench  # noqa: PLC0415 - aiohttp is slow to import

    return run_bench(args)

"""The ``chairlift`` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from chairlift.cli import bench, calibrate, chat, config, explain, generate, replay, serve
from chairlift.errors import ChairliftError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 after an error, 130 after Ctrl-C.

    ``config check`` returns 2 for a file that cannot work, as argparse does for wrong usage.
    """
    args = _parser().parse_args(argv)
    if getattr(args, "executor", None) is not None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script's own directory is there instead
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        status: int = args.run(args)
    except ChairliftError as error:
        print(f"chairlift: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chairlift",
        description="Serve language models with continuous batching scheduled at every iteration.",
        epilog="chairlift COMMAND --help tells a command's flags. To begin: chairlift serve",
    )
    parser.add_argument("--version", action="version", version=f"chairlift {version('chairlift')}")
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    serve.add_command(commands)
    generate.add_command(commands)
    chat.add_command(commands)
    bench.add_command(commands)
    calibrate.add_command(commands)
    config.add_command(commands)
    replay.add_command(commands)
    explain.add_command(commands)
    serve.add_key_command(commands)
    return parser

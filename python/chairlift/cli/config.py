"""``chairlift config check``: what a ``chairlift.toml`` comes to, or what is wrong with it."""

from __future__ import annotations

import argparse
import sys

from chairlift.config import Config
from chairlift.config_file import to_toml
from chairlift.errors import ConfigError


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser("config", help="check a configuration file")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="print the effective settings",
        description="Print the effective settings of a file, defaults included, as TOML that reads "
        "back as the same. Exit status: 0, or 2 if the file cannot work.",
    )
    check.add_argument("file", metavar="FILE", help="such as chairlift.toml")
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    try:
        text = to_toml(Config.from_file(args.file))
    except ConfigError as error:
        print(f"chairlift: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0

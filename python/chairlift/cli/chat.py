"""``chairlift chat``: a conversation in the terminal, or of the lines of a pipe."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chairlift.async_engine import AsyncEngine
from chairlift.cli.chat_session import COMMANDS, ChatSession, Message, TerminalInput
from chairlift.cli.engine_flags import add_engine_flags, engine_options
from chairlift.cli.sampling_flags import add_sampling_flags, sampling_params
from chairlift.engine_args import DEFAULT_MODEL
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.cli.chat_backend import ChatBackend


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Talk to a model: that of a server (--url), or one loaded here. Where the "
        "input is no terminal,\neach line is a turn, and the answers go to standard output.\n\n"
        + COMMANDS,
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", help="such as http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    add_sampling_flags(parser, max_tokens=512, temperature=0.7, seed=None)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import uvloop  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        backend = runner.run(_open(args))
        session = ChatSession(
            # Ctrl-C cancels what the runner runs, and only that.
            lambda messages, on_text: runner.run(_answer(backend, messages, on_text)),
            args.system,
        )
        try:
            if sys.stdin.isatty():
                return session.talk(TerminalInput(sys.stdin), backend.model)
            return session.answer_lines(sys.stdin)
        finally:
            runner.run(backend.close())


async def _answer(
    backend: ChatBackend, messages: Sequence[Message], on_text: Callable[[str], None]
) -> str | None:
    return await backend.answer(messages, on_text)


async def _open(args: argparse.Namespace) -> ChatBackend:
    from chairlift.cli.chat_backend import EngineBackend, ServerBackend  # noqa: PLC0415 - slow

    params = replace(sampling_params(args), seed=args.seed)
    options = engine_options(args)
    if args.seed is None:
        options.pop("seed", None)
    if args.url is not None:
        if given := sorted(options.keys() - {"seed"}):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"with --url the server has chosen the engine; leave out {flags}")
        return await ServerBackend.connect(args.url, args.model, params, api_key=args.api_key)
    engine = AsyncEngine(args.model, **options)
    return EngineBackend(engine, args.model or DEFAULT_MODEL, params)

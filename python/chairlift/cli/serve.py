"""``chairlift serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

from chairlift.cli.engine_flags import add_engine_flags, engine_options, memory_size
from chairlift.config import seconds
from chairlift.config_file import engine_args, load_config
from chairlift.engine_args import DEFAULT_MODEL
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.async_engine import AsyncEngine
    from chairlift.server.settings import ServerSettings

KEY_VARIABLE = "CHAIRLIFT_API_KEY"
_THREADS_MAY_TAKE_S = 0.5
"""How long threads may take to end when all else has ended."""
_EPILOG = """\
TIME is seconds or text such as 250ms or 2m; SIZE is bytes or text such as 512M.
SIGTERM drains, a second one exits at once; SIGHUP reads the configuration again.

examples:
  chairlift serve
  chairlift serve ./my-model --port 9000 --api-key sk-mine
  chairlift serve --config chairlift.toml     # tenants, classes and their keys

docs/serving.md tells the endpoints, fields and errors."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's clients expect it",
        description=f"Serve a model over HTTP as OpenAI's API: without MODEL, {DEFAULT_MODEL}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="chairlift serve [MODEL] [--host HOST] [--port N] [--api-key KEY] [--config FILE] "
        "[FLAG ...]",
    )
    parser.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face directory or a hub id; the same as --model",
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (127.0.0.1: this machine only; 0.0.0.0: everybody)",
    )
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port (8000); 0 picks a free one"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use; the first is the one in answers (the model's name)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"a key with all rights; may be repeated (or ${KEY_VARIABLE}). Keys of tenants stand "
        "in the configuration",
    )
    group.add_argument(
        "--trust-tenant-header",
        metavar="NAME",
        help="a header that names the tenant: only behind a gateway that sets it",
    )
    group.add_argument(
        "--root-path", default="", metavar="PATH", help="prefix that a proxy in front cuts off"
    )
    group.add_argument(
        "--disable-fastapi-docs", action="store_true", help="no /docs, no /openapi.json"
    )
    _add_limits(parser.add_argument_group("limits of the server"))
    logs = parser.add_argument_group("logs")
    logs.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line of JSON for each request, to stderr (yes)",
    )
    logs.add_argument(
        "--log-prompts", action="store_true", help="with the prompts, which may be private (no)"
    )
    logs.add_argument(
        "--uvicorn-log-level",
        default="warning",
        choices=["critical", "error", "warning", "info", "debug"],
        help="log level of the HTTP server (warning)",
    )
    engine = add_engine_flags(parser)
    engine.add_argument(
        "--seed",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="where the seeds of requests without one come from (0)",
    )
    engine.add_argument(
        "--isolation",
        choices=["process", "thread"],
        default="process",
        help="where the engine runs: in a process of its own, or in threads of the server's "
        "(process)",
    )
    parser.set_defaults(run=run)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    for name, default, about in (
        ("--queue-timeout", None, "longest wait, for classes that name none (no bound)"),
        ("--request-timeout", None, "longest time from a request to its end (no bound)"),
        (
            "--slow-reader-timeout",
            60.0,
            "a client that does not read or send for so long is dropped (60s)",
        ),
        ("--shutdown-grace", 30.0, "how long a drain lets requests go on (30s)"),
        ("--stall-timeout", 60.0, "a step that takes longer makes /health fail (60s)"),
    ):
        group.add_argument(name, type=duration, default=default, metavar="TIME", help=about)
    group.add_argument(
        "--max-request-bytes",
        type=memory_size,
        default=16 * 2**20,
        metavar="SIZE",
        help="longest body of a request (16M)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import uvloop  # noqa: PLC0415

    from chairlift.server.lifecycle import Lifecycle, bind  # noqa: PLC0415  # loads FastAPI
    from chairlift.server.logs import logs_in_background  # noqa: PLC0415

    if args.model_name is not None:
        if args.model is not None and args.model != args.model_name:
            raise ConfigError(f"MODEL is {args.model_name!r} and --model {args.model!r}; give one")
        args.model = args.model_name
    settings = server_settings(args)
    options = engine_options(args)
    options["config"] = settings.config

    def make_engine() -> AsyncEngine:
        from chairlift.async_engine import AsyncEngine  # noqa: PLC0415

        return AsyncEngine(args.model, isolation=args.isolation, **options)

    sock = bind(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    print(f"loading {settings.model}; {url}/ready tells when it is done", file=sys.stderr)

    def say_ready(engine: AsyncEngine) -> None:
        limits = engine.limits
        print(
            f"serving {settings.served_model_names[0]} at {url} "
            f"({limits['max_num_seqs']} sequences of up to {limits['max_model_len']} tokens"
            f"{'' if _has_keys(settings) else ', open to everybody who can reach it'})",
            flush=True,
        )

    async def serve() -> int:
        lifecycle = Lifecycle(
            settings, make_engine, on_ready=say_ready, log_level=args.uvicorn_log_level
        )
        return await lifecycle.run(sock)

    with (
        sock,
        logs_in_background(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        code = runner.run(serve())
        leaving = _leave_soon(code)
    leaving.cancel()
    return code


def _leave_soon(code: int) -> threading.Timer:
    """Leave all the same if a thread still works on what nobody waits for any more."""
    timer = threading.Timer(_THREADS_MAY_TAKE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Make the settings of the flags, the environment and the configuration.

    Raises:
        ConfigError: the configuration cannot work.
    """
    from chairlift.server.settings import ServerSettings, effective_config  # noqa: PLC0415

    source = getattr(args, "config", None)
    config = effective_config(load_config(source), args.queue_timeout)
    options = engine_options(args)
    options["config"] = config
    model = engine_args(args.model, options).model
    names = args.served_model_name or [model_name(model)]
    keys = list(args.api_key or ())
    if os.environ.get(KEY_VARIABLE):
        keys.append(os.environ[KEY_VARIABLE])
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty; leave --api-key out to serve without keys")
    header = args.trust_tenant_header
    if header is not None and not re.fullmatch(r"[A-Za-z0-9-]{1,64}", header):
        raise ConfigError("--trust-tenant-header must be a header's name: letters, digits, '-'")
    return ServerSettings(
        model=model,
        served_model_names=tuple(names),
        config=config,
        config_source=source,
        queue_timeout=args.queue_timeout,
        api_keys=tuple(keys),
        trust_tenant_header=header,
        log_requests=args.log_requests,
        log_prompts=args.log_prompts,
        max_request_bytes=args.max_request_bytes,
        request_timeout=args.request_timeout,
        slow_reader_timeout=args.slow_reader_timeout,
        shutdown_grace=args.shutdown_grace,
        stall_timeout=args.stall_timeout,
        root_path=args.root_path,
        serve_docs=not args.disable_fastapi_docs,
    )


def model_name(model: str) -> str:
    """What a model is called: a directory by its last part, anything else by itself."""
    return os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model


def duration(text: str) -> float:
    """Seconds of a flag: a number, or text such as ``250ms`` or ``2m``."""
    try:
        return seconds(float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text)
    except ValueError as wanted:
        raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}") from None


def _has_keys(settings: ServerSettings) -> bool:
    return bool(settings.api_keys or settings.config.keys)


def add_key_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``chairlift key``."""
    parser = commands.add_parser(
        "key",
        help="make an API key and its hash for the configuration",
        description="Print a new random API key, and the table that lets it in. The key is nowhere "
        "else: give it to its user and forget it.",
    )
    parser.add_argument("--name", default="NAME", help="what the configuration calls the key")
    parser.set_defaults(run=print_key)


def print_key(args: argparse.Namespace) -> int:
    """Run ``chairlift key``."""
    from chairlift.server.tenants import hash_key, new_key  # noqa: PLC0415

    key = new_key()
    print(key)
    print(f'\n[keys.{args.name}]\nhash = "{hash_key(key)}"', file=sys.stdout)
    return 0

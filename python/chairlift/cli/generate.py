"""``chairlift generate``: a few prompts, served at once, streamed to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from chairlift.async_engine import AsyncEngine
from chairlift.cli.engine_flags import add_engine_flags, engine_options
from chairlift.cli.live import Answer, LiveView, print_answers, print_table
from chairlift.errors import ChairliftError, TokenizerError
from chairlift.sampling import SamplingParams

EXAMPLES = (
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a chairlift in the snow.",
    "List three things to pack for a day of skiing.",
    "What is 17 + 25? Answer with the number only.",
    "Write a Python function that reverses a string.",
    "Name the capital of France and one thing to see there.",
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts and show how the engine did",
        description="Serve all prompts at once through the engine, stream the text, and end with a "
        "table of latencies and throughput.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: a few examples")
    parser.add_argument(
        "--examples", action="store_true", help="serve the examples beside the prompts"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is: no chat template"
    )
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=96, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    group.add_argument("--seed", type=int, default=0, help="of everything that is sampled")
    group.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import uvloop  # noqa: PLC0415

    prompts = [*args.prompts, *(EXAMPLES if args.examples or not args.prompts else ())]
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(args, prompts, params))


async def _serve(args: argparse.Namespace, prompts: Sequence[str], params: SamplingParams) -> int:
    async with AsyncExitStack() as stack:
        # The event loop has nothing to do while the model loads.
        engine = AsyncEngine(args.model, **engine_options(args))
        await stack.enter_async_context(engine)
        answers = [Answer(prompt) for prompt in prompts]
        view = LiveView(answers, sys.stdout)
        async with asyncio.TaskGroup() as tasks:
            for answer in answers:
                tasks.create_task(_answer(engine, answer, params, view, raw=args.raw))
        view.close()
        print_answers(answers, sys.stdout)
        print_table(answers, (await engine.metrics()), sys.stdout)
    return 1 if any(answer.error for answer in answers) else 0


async def _answer(
    engine: AsyncEngine, answer: Answer, params: SamplingParams, view: LiveView, *, raw: bool
) -> None:
    """Stream one prompt into its answer; an error of its own is shown there."""
    try:
        stream = engine.generate(_prompt(engine, answer.prompt, raw=raw), params)
        async for delta in stream:
            answer.text += delta.text
            answer.num_tokens += len(delta.token_ids)
            answer.finish_reason = delta.finish_reason or answer.finish_reason
            view.update()
        answer.stats = stream.stats
    except ChairliftError as error:
        answer.error = str(error)


def _prompt(engine: AsyncEngine, text: str, *, raw: bool) -> str | list[int]:
    if raw:
        return text
    try:
        return engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    except TokenizerError as error:
        if error.code != "no_chat_template":
            raise
        return text

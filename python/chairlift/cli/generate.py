"""``chairlift generate``: a few prompts, served at once, streamed to the terminal; or a file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from chairlift.async_engine import AsyncEngine
from chairlift.cli.engine_flags import add_engine_flags, engine_options
from chairlift.cli.generate_files import FileRun, as_user, generate_file
from chairlift.cli.live import Answer, LiveView, print_answers, print_table
from chairlift.cli.sampling_flags import add_sampling_flags, sampling_params
from chairlift.errors import ChairliftError, ConfigError
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
        help="answer prompts, or a file of them",
        description="Serve all prompts at once through the engine, stream the text, and end with a "
        "table of latencies and throughput. With --input, answer a file of prompts instead, one "
        "line each: a string, an object with 'prompt' or 'messages' (beside them 'id' and sampling "
        "parameters of its own), or a line of an OpenAI batch file. Answers are written as they "
        "end, so their order may differ: 'index' is the line's number, from 0. A bad line gets an "
        "error and the run goes on. The same command again does what is left.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: a few examples")
    parser.add_argument(
        "--examples", action="store_true", help="serve the examples beside the prompts"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is: no chat template"
    )
    group = parser.add_argument_group("files")
    group.add_argument("--input", type=Path, metavar="FILE", help="prompts, as JSON Lines")
    group.add_argument("--output", type=Path, metavar="FILE", help="where the answers go")
    group.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="most requests in the engine at once (default: twice --max-num-seqs)",
    )
    add_sampling_flags(parser, max_tokens=96, temperature=0.0)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import uvloop  # noqa: PLC0415

    params = sampling_params(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if any(each is not None for each in (args.input, args.output, args.window)):
            return runner.run(_serve_file(args, params))
        prompts = [*args.prompts, *(EXAMPLES if args.examples or not args.prompts else ())]
        return runner.run(_serve(args, prompts, params))


async def _serve_file(args: argparse.Namespace, params: SamplingParams) -> int:
    if args.input is None or args.output is None:
        raise ConfigError("a file of prompts needs both --input and --output")
    if args.prompts or args.examples:
        raise ConfigError("--input takes no prompts beside it: put them into the file")
    file_run = FileRun(
        input=args.input,
        output=args.output,
        params=params,
        seed=args.seed,
        is_raw=args.raw,
        window=args.window,
    )
    file_run.check()
    return await generate_file(file_run, args.model, engine_options(args))


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
        prompt = answer.prompt if raw else as_user(engine.tokenizer, answer.prompt)
        stream = engine.generate(prompt, params)
        async for delta in stream:
            answer.text += delta.text
            answer.num_tokens += len(delta.token_ids)
            answer.finish_reason = delta.finish_reason or answer.finish_reason
            view.update()
        answer.stats = stream.stats
    except ChairliftError as error:
        answer.error = str(error)

"""``chairlift generate --input``: a file of prompts through the engine, a window at a time.

Memory is bounded by the window: the input is read as places become free, and answers are written
as they end. Answers do not depend on the window, on their order or on interruptions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tqdm import tqdm

from chairlift.async_engine import AsyncEngine
from chairlift.cli.prompt_files import AnswerFile, BadLine, PromptLine, read_prompts
from chairlift.engine_args import EngineOptions
from chairlift.errors import (
    ChairliftError,
    ConfigError,
    EngineDeadError,
    TokenizerError,
    TryLaterError,
)
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.engine import TokenizerLike
    from chairlift.prompts import Prompt

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_MOST_REFUSALS = 100
"""A request that is refused more often gets an error; it has waited for minutes by then."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """What is to be done with a file of prompts."""

    input: Path
    output: Path
    params: SamplingParams
    seed: int
    is_raw: bool
    """Whether text prompts are continued without a chat template."""
    window: int | None
    """Most requests in the engine at once; None: twice what runs at once."""

    def check(self) -> None:
        """Check what can be known before a model is loaded.

        Raises:
            ConfigError: the files cannot be used.
        """
        if self.window is not None and self.window < 1:
            raise ConfigError(f"--window is {self.window}; it must be at least 1")
        if not self.input.is_file():
            raise ConfigError(f"{self.input} is no file")
        if self.output.exists() and self.input.samefile(self.output):
            raise ConfigError(f"{self.output} is the input as well; choose another --output")


async def generate_file(run: FileRun, model: str | None, options: EngineOptions) -> int:
    """Answer every line that has no answer yet; returns the exit status.

    Raises:
        ConfigError: the files or the engine's settings cannot be used.
        EngineDeadError: the engine ended on the way; the same command goes on from there.
    """
    with ExitStack() as files:
        answers = files.enter_context(AnswerFile(run.output))
        before = answers.num_answers + answers.num_errors
        source, num_lines = _open(run.input, files)
        lines = read_prompts(source, run.params, seed=run.seed, is_raw=run.is_raw)
        left = dropwhile(answers.has, lines)
        first = next(left, None)
        try:
            if first is not None:  # else no model is needed
                progress = files.enter_context(_progress(num_lines, before))
                async with AsyncExitStack() as stack:
                    # The event loop has nothing to do while the model loads.
                    engine = AsyncEngine(model, **options)
                    await stack.enter_async_context(engine)
                    server = _FileServer(engine, answers, progress, run.window)
                    await server.serve(chain([first], left))
        except (asyncio.CancelledError, EngineDeadError):
            _say(answers, before, "stopped; the same command goes on")
            raise
    _say(answers, before, "done")
    return 1 if answers.num_errors else 0


def _progress(num_lines: int, before: int) -> tqdm[None]:
    return tqdm(
        total=num_lines,
        initial=before,
        unit="line",
        file=sys.stderr,
        disable=None,
        dynamic_ncols=True,
    )


def _open(path: Path, files: ExitStack) -> tuple[Iterator[bytes], int]:
    try:
        source = files.enter_context(path.open("rb"))
        num_lines = sum(chunk.count(b"\n") for chunk in _chunks(source))
        source.seek(0)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return iter(source), num_lines


def _chunks(source: BinaryIO) -> Iterator[bytes]:
    return takewhile(bool, iter(lambda: source.read(_CHUNK_BYTES), None))


def _say(answers: AnswerFile, before: int, state: str) -> None:
    written = answers.num_answers + answers.num_errors - before
    text = f"{state}: {written:,} lines written to {answers.path}"
    if before:
        text += f", {before:,} were there"
    text += f"; {answers.num_answers:,} answers, {answers.num_errors:,} errors in all"
    # Not over a progress bar.
    tqdm.write(text, file=sys.stderr)


class _FileServer:
    """Keeps a window of requests in the engine and writes their answers."""

    def __init__(
        self, engine: AsyncEngine, answers: AnswerFile, progress: tqdm[None], window: int | None
    ) -> None:
        self._engine = engine
        self._answers = answers
        self._progress = progress
        limits = engine.limits
        running, waiting = limits["max_num_seqs"], limits["max_queued_requests"]
        # As many wait as run, so that the engine always has a next one.
        self._window = window if window is not None else running + min(running, waiting)

    async def serve(self, lines: Iterator[PromptLine | BadLine]) -> None:
        """Answer them all."""
        places = asyncio.Semaphore(self._window)
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in lines:
                    if self._answers.has(line):
                        continue
                    if isinstance(line, BadLine):
                        self._write(line, _error(line.error))
                        continue
                    await places.acquire()
                    task = tasks.create_task(self._answer(line))
                    task.add_done_callback(lambda _: places.release())
        except* ChairliftError as group:
            raise _first(group) from None

    def _write(self, line: PromptLine | BadLine, answer: dict[str, object]) -> None:
        self._answers.write(line, answer)
        self._progress.update()

    async def _answer(self, line: PromptLine) -> None:
        """Write the answer to one line, or its error; what ends the engine is raised."""
        pause = _FIRST_PAUSE_S
        for refusal in range(_MOST_REFUSALS + 1):
            try:
                answer = await self._generate(line)
                break
            except EngineDeadError:
                raise
            except TryLaterError as error:
                if refusal == _MOST_REFUSALS:
                    answer = _error(error)
                    break
                await asyncio.sleep(min(error.retry_after or pause, _LONGEST_PAUSE_S))
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            except ChairliftError as error:
                answer = _error(error)
                break
        self._write(line, answer)

    async def _generate(self, line: PromptLine) -> dict[str, object]:
        text: list[str] = []
        finish_reason = None
        stream = self._engine.generate(self._prompt(line), line.params)
        async for delta in stream:
            text.append(delta.text)
            finish_reason = delta.finish_reason or finish_reason
        stats = stream.stats
        if stats is None or finish_reason in (None, "abort"):
            raise EngineDeadError("the engine was shut down before the answer ended")
        return {
            "text": "".join(text),
            "finish_reason": finish_reason,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_output_tokens": stats.num_output_tokens,
        }

    def _prompt(self, line: PromptLine) -> Prompt:
        if line.messages is not None:
            return {"messages": line.messages}
        if isinstance(line.prompt, str) and not line.is_raw:
            return as_user(self._engine.tokenizer, line.prompt)
        return line.prompt or []


def as_user(tokenizer: TokenizerLike, text: str) -> str | list[int]:
    """Make a prompt of what a user says; where there is no chat template, the text itself."""
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    except TokenizerError as error:
        if error.code != "no_chat_template":
            raise
        return text


def _error(error: ChairliftError) -> dict[str, object]:
    return {"error": {"code": error.code, "message": str(error)}}


def _first(group: BaseExceptionGroup[ChairliftError]) -> ChairliftError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, ChairliftError):
        raise TypeError(f"{error!r} is no error of Chairlift's") from error
    return error

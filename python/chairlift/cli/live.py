"""What ``chairlift generate`` shows: answers growing side by side, then whole, then a table."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from chairlift.outputs import RequestStats

_REDRAW_S = 0.05
_PROMPT_COLUMNS = 28


@dataclass(slots=True)
class Answer:
    """A prompt and what has come of it."""

    prompt: str
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    stats: RequestStats | None = None
    error: str | None = None


class LiveView:
    """One line for each answer, redrawn in place as they grow.

    Where the output is no terminal, the first answer is streamed as it is, alone.
    """

    def __init__(self, answers: Sequence[Answer], out: TextIO) -> None:
        """Show ``answers`` on ``out``."""
        self._answers = answers
        self._out = out
        self._in_place = out.isatty()
        self._drawn_lines = 0
        self._drawn_at = 0.0
        self._streamed = 0

    def update(self) -> None:
        """Some answer has grown."""
        if not self._in_place:
            self._stream()
        elif time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw()

    def close(self) -> None:
        """All have ended: what was drawn gives way to the whole answers."""
        if self._in_place:
            self._erase()
        elif self._streamed:
            self._out.write("\n\n")

    def _stream(self) -> None:
        text = self._answers[0].text
        if not self._streamed and text:
            self._out.write(f"[streaming 1 of {len(self._answers)}] ")
        self._out.write(text[self._streamed :])
        self._out.flush()
        self._streamed = len(text)

    def _draw(self) -> None:
        self._erase()
        columns, rows = shutil.get_terminal_size()
        shown = self._answers[: max(rows - 1, 1)]
        for answer in shown:
            mark = "\N{CHECK MARK}" if answer.finish_reason else "\N{BLACK RIGHT-POINTING TRIANGLE}"
            prompt = _clip(answer.prompt, _PROMPT_COLUMNS)
            room = max(columns - _PROMPT_COLUMNS - 5, 10)
            tail = _flat(answer.text)[-room:]
            self._out.write(f"{mark} {prompt:<{_PROMPT_COLUMNS}}  {tail}\n")
        self._out.flush()
        self._drawn_lines = len(shown)
        self._drawn_at = time.monotonic()

    def _erase(self) -> None:
        if self._drawn_lines:
            self._out.write(f"\x1b[{self._drawn_lines}A\x1b[J")
            self._drawn_lines = 0


def print_answers(answers: Sequence[Answer], out: TextIO) -> None:
    """Print every prompt with its whole answer."""
    for number, answer in enumerate(answers, start=1):
        out.write(f"[{number}] {answer.prompt}\n")
        if answer.error is not None:
            out.write(f"error: {answer.error}\n\n")
            continue
        more = " ..." if answer.finish_reason == "length" else ""
        out.write(f"{answer.text.strip()}{more}\n\n")


def print_table(answers: Sequence[Answer], metrics: Mapping[str, int], out: TextIO) -> None:
    """Print latencies of the requests and what the engine did, one figure a line."""
    stats = [answer.stats for answer in answers if answer.stats is not None]
    if not stats:
        return
    start = min(stat.arrival_time for stat in stats)
    seconds = max(stat.finished_time for stat in stats) - start
    output_tokens = sum(stat.num_output_tokens for stat in stats)
    prompt_tokens = sum(stat.num_prompt_tokens for stat in stats)
    iterations = max(metrics["iterations"], 1)
    rows = [
        ("requests", f"{len(stats)} of {len(answers)}"),
        ("prompt tokens", f"{prompt_tokens:,}"),
        ("output tokens", f"{output_tokens:,}"),
        ("TTFT, median / worst", _milliseconds(stats, lambda stat: stat.ttft)),
        ("TPOT, median / worst", _milliseconds(stats, lambda stat: stat.tpot)),
        ("output tokens/s, all together", f"{output_tokens / seconds:,.1f}"),
        ("iterations", f"{metrics['iterations']:,}"),
        ("mean batch size", f"{metrics['scheduled_sequences'] / iterations:.2f}"),
        ("preemptions", f"{metrics['preemptions']:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        out.write(f"{name:<{width}}  {value:>17}\n")


def _milliseconds(
    stats: Sequence[RequestStats], value: Callable[[RequestStats], float | None]
) -> str:
    values = [seconds * 1e3 for stat in stats if (seconds := value(stat)) is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):,.1f} / {max(values):,.1f} ms"


def _flat(text: str) -> str:
    """One line, without anything that moves the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def _clip(text: str, columns: int) -> str:
    flat = _flat(text)
    return flat if len(flat) <= columns else f"{flat[: columns - 1]}\N{HORIZONTAL ELLIPSIS}"

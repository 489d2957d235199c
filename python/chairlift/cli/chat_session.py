"""A conversation: its history, its commands, and what is shown of it.

Answers go to standard output, everything else to standard error. What goes wrong costs one turn,
which is taken back from the history, so that the conversation can go on.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TextIO

from chairlift.errors import ChairliftError, ContextLengthError, ServerUnreachableError

COMMANDS = """\
/reset          forget the conversation
/system TEXT    give it a system prompt; without TEXT, take it away
/help           this list
/quit           leave, as Ctrl-D does
Ctrl-C stops an answer. Text that is pasted may have several lines.
"""
Message = Mapping[str, str]
AnswerFunction = Callable[[Sequence[Message], Callable[[str], None]], str | None]
"""Answers messages, handing the text over as it comes; returns the finish reason."""

_PROMPT = "> "
_PASTE_PAUSE_S = 0.05
"""Lines that follow one another faster were pasted."""


class InputSource(Protocol):
    """Where turns come from."""

    def read(self) -> str | None:
        """Return the next turn; None is the end."""


class TerminalInput:
    """Turns typed into a terminal, with line editing where there is readline."""

    def __init__(self, stdin: TextIO) -> None:
        """Read from ``stdin``, which is the terminal."""
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - input() uses it from then on
        self._stdin = stdin

    def read(self) -> str | None:
        """Return what was typed or pasted, up to the Enter that nothing follows at once."""
        try:
            lines = [input(_PROMPT)]
        except EOFError:
            return None
        while select.select([self._stdin], [], [], _PASTE_PAUSE_S)[0]:
            try:
                lines.append(input())
            except EOFError:
                break
        return "\n".join(lines)


@dataclass(slots=True)
class _Turn:
    """What has come of one answer."""

    text: str = ""
    is_cut: bool = False
    """Whether the user stopped it."""


class ChatSession:
    """One conversation."""

    def __init__(self, answer: AnswerFunction, system: str | None = None) -> None:
        """Begin with an empty history; ``answer`` may raise ``KeyboardInterrupt``."""
        self._answer = answer
        self._system = system
        self.history: list[Message] = []
        """Turns of both sides, without the system prompt."""

    def talk(self, source: InputSource, model: str) -> int:
        """Talk in a terminal until the user leaves."""
        _note(f"{model}. /help lists the commands; Ctrl-D leaves.")
        while True:
            try:
                text = source.read()
            except KeyboardInterrupt:
                _note("\n(Ctrl-D leaves)")
                continue
            if text is None:
                _note("")
                return 0
            if not text.strip():
                continue
            if text.startswith("/") and "\n" not in text:
                if self._command(text):
                    return 0
                continue
            try:
                self._turn(text, _printable)
            except ChairliftError as error:
                _note(f"error: {error}")

    def answer_lines(self, lines: Iterable[str]) -> int:
        """Answer each line; returns 1 if one had no answer. An unreachable server is the end."""
        status = 0
        for line in lines:
            text = line.rstrip("\r\n")
            if not text.strip():
                continue
            if text.startswith("/"):
                if self._command(text):
                    break
                continue
            try:
                if self._turn(text, str).is_cut:
                    return 130
            except ServerUnreachableError:
                raise
            except ChairliftError as error:
                _note(f"error: {error}")
                status = 1
        return status

    def _turn(self, text: str, shown: Callable[[str], str]) -> _Turn:
        """Ask and show the answer; both join the history if there is any of it."""
        turn = _Turn()

        def take(piece: str) -> None:
            turn.text += piece
            sys.stdout.write(shown(piece))
            sys.stdout.flush()

        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": text}
        finish_reason = None
        try:
            finish_reason = self._answer([*system, *self.history, question], take)
        except KeyboardInterrupt:
            turn.is_cut = True
        except ContextLengthError as error:
            raise ContextLengthError(
                f"{error}. The conversation does not fit any more: /reset begins a new one, or ask "
                "with less text"
            ) from None
        finally:
            if turn.text:
                sys.stdout.write("\n")
                sys.stdout.flush()
        if turn.text or not turn.is_cut:
            self.history += [question, {"role": "assistant", "content": turn.text}]
        if turn.is_cut:
            _note("(stopped)")
        elif finish_reason == "length":
            _note("(cut: --max-tokens or the end of the context; say 'go on' for more)")
        return turn

    def _command(self, text: str) -> bool:
        """Do what a line with a slash says; returns whether to leave."""
        name, _, argument = text.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return True
        if name == "/reset":
            self.history.clear()
            _note("(forgotten)")
        elif name == "/system":
            self._system = argument.strip() or None
            _note("(system prompt set)" if self._system else "(no system prompt)")
        elif name == "/help":
            _note(COMMANDS.rstrip("\n"))
        else:
            _note(f"{name} is no command; /help lists them. A space before it says it to the model")
        return False


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """Nothing that moves the cursor but line breaks and tabs."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")

"""``chairlift chat``: with a server and with an engine, in a pipe and in a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from chairlift.cli import main
from chairlift.testing import ScriptedExecutor
from fake_server import Behaviour, FakeServer

SCRIPTED = ["--executor", "chairlift.testing:ScriptedExecutor"]


def say(monkeypatch, capsys, text, *flags):
    """Run the command on the lines of ``text``; returns its exit status and output."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    status = main(["chat", *flags])
    return status, capsys.readouterr()


def server_with(**behaviour):
    return FakeServer(lambda number, body: Behaviour(**{"words": ("un ", "deux "), **behaviour}))


def expected(prompt, num_tokens):
    return bytes(ScriptedExecutor().expected(prompt, num_tokens)).decode()


def test_an_engine_answers_each_line_with_what_was_said_before(monkeypatch, capsys):
    flags = ["--max-tokens", "5", "--system", "be", *SCRIPTED]
    status, said = say(monkeypatch, capsys, "one\n\ntwo\n", *flags)
    first = expected("system: be\nuser: one\nassistant: ", 5)
    history = f"system: be\nuser: one\nassistant: {first}\nuser: two\nassistant: "
    assert said.out == f"{first}\n{expected(history, 5)}\n"
    assert status == 0


def test_a_server_is_sent_the_history_and_the_sampling(monkeypatch, capsys):
    with server_with(num_tokens=3, finish_reason="stop", cut_bytes=True) as server:
        flags = ["--url", server.url, "--api-key", "sk-1", "--top-k", "7", "--stop", "END"]
        status, said = say(monkeypatch, capsys, "one\ntwo\n", *flags, "--system", "be kind")
    assert status == 0
    assert said.out == "un deux un \nun deux un \n"
    (first, headers), (second, _) = server.requests
    assert first["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
    ]
    assert [each["content"] for each in second["messages"]] == [
        "be kind",
        "one",
        "un deux un ",
        "two",
    ]
    assert (first["model"], first["top_k"], first["stop"]) == ("fake-model", 7, ["END"])
    assert "min_p" not in first, "what is the default is not sent: not every server knows it"
    assert headers["Authorization"] == "Bearer sk-1"


def test_commands(monkeypatch, capsys):
    with server_with(num_tokens=1) as server:
        text = "one\n/reset\ntwo\n/system s\nthree\n/system\n/nothing\nfour\n /reset\n/quit\nlost\n"
        status, said = say(monkeypatch, capsys, text, "--url", server.url)
    assert status == 0
    sent = [[each["content"] for each in body["messages"]] for body, _ in server.requests]
    assert sent == [
        ["one"],
        ["two"],
        ["s", "two", "un ", "three"],
        ["two", "un ", "three", "un ", "four"],
        ["two", "un ", "three", "un ", "four", "un ", " /reset"],
    ]
    assert "/nothing is no command" in said.err
    assert "(cut: --max-tokens" in said.err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"status": 400, "code": "context_length_exceeded", "message": "9 tokens, 8 fit"},
            "9 tokens, 8 fit. The conversation does not fit any more: /reset begins a new one",
        ),
        (
            {"status": 429, "code": "queue_full", "message": "full", "retry_after": "3"},
            "the server refused: full (try again in 3 s)",
        ),
        ({"status": 400, "message": "bad"}, "the server answered 400: bad"),
        ({"status": 500, "message": "oh"}, "the server answered 500: oh"),
        ({"error_after": 1, "message": "engine ended"}, "engine ended"),
        ({"has_done": False}, "the answer broke off"),
        ({"break_after": 1}, "the connection to http://127.0.0.1"),
    ],
)
def test_a_failed_turn_is_told_and_taken_back(fault, message, monkeypatch, capsys):
    def behave(number, body):
        return Behaviour(**fault) if number == 0 else Behaviour(num_tokens=1, words=("fine",))

    with FakeServer(behave) as server:
        status, said = say(monkeypatch, capsys, "one\ntwo\n", "--url", server.url)
        assert status == 1
        assert message in said.err
        if "break_after" in fault:
            return  # a connection that fails ends a pipe
        assert said.out.endswith("fine\n")
        assert [each["content"] for each in server.requests[1][0]["messages"]] == ["two"]


def test_a_context_that_is_full_says_how_to_go_on(monkeypatch, capsys):
    flags = ["--max-model-len", "48", "--max-tokens", "8", *SCRIPTED]
    status, said = say(monkeypatch, capsys, f"hi\n{'x' * 20}\n/reset\nhi\n", *flags)
    assert status == 1
    assert "context length is 48 tokens" in said.err
    assert "/reset begins a new one" in said.err
    answers = said.out.splitlines()
    assert len(answers) == 2
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1: connection"),
        (["--url", "http://x", "--max-num-seqs", "4"], "leave out --max-num-seqs"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_clear_sentence(flags, message, monkeypatch, capsys):
    status, said = say(monkeypatch, capsys, "x\n", *flags)
    assert status == 1
    assert message in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


class SlowExecutor(ScriptedExecutor):
    """Takes its time over a long answer."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(block_size=args.block_size, step_time=0.02)


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *flags):
        self._ours, theirs = pty.openpty()
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        command = [sys.executable, "-c", "from chairlift.cli import main; raise SystemExit(main())"]
        self.process = subprocess.Popen(
            [*command, "chat", *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "PYTHONPATH": path, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def wait_for(self, text):
        """Read until ``text`` is there; returns what came with it, and forgets it."""
        self._read_until(lambda: text in self.seen, text)
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_text(self, length):
        """Read until there are so many letters of an answer."""
        self._read_until(lambda: re.search(rf"[a-z]{{{length}}}", self.seen), f"{length} letters")

    def interrupt_prompt(self, text):
        """Send Ctrl-C until ``text`` is there: one that comes just as the prompt is drawn is only
        seen with the next key."""
        self._read_until(lambda: text in self.seen, text, signal_every=0.5)
        self.wait_for(text)

    def _read_until(self, is_there, what, signal_every=None):
        deadline = time.monotonic() + 120
        while not is_there():
            if signal_every is not None:
                self.process.send_signal(signal.SIGINT)
            left = deadline - time.monotonic()
            assert left > 0, f"no {what!r} in {self.seen!r}"
            if select.select([self._ours], [], [], signal_every or left)[0]:
                try:
                    self.seen += os.read(self._ours, 4096).decode()
                except OSError:
                    raise AssertionError(f"ended without {what!r}: {self.seen!r}") from None

    def type(self, text):
        os.write(self._ours, text.encode())


def test_a_terminal():
    def behave(number, body):
        if number == 1:
            return Behaviour(first_s=0.0, gap_s=600.0, words=("begun",), num_tokens=2)
        return Behaviour(num_tokens=1, words=("hel\x1b[2Jlo",))

    with FakeServer(behave) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("first\r")
        assert "\x1b[2J" not in terminal.wait_for("lo\r\n"), "a model must not move the cursor"
        terminal.wait_for("> ")
        terminal.type("second\r")
        terminal.wait_for("begun")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("(stopped)")
        terminal.wait_for("> ")
        terminal.interrupt_prompt("(Ctrl-D leaves)")
        terminal.wait_for("> ")
        # A paste: as readline marks it, and as a terminal that does not mark it sends it.
        terminal.type("\x1b[200~three\nlines\nat once\x1b[201~\r")
        terminal.wait_for("lo\r\n")
        terminal.wait_for("> ")
        terminal.type("two\rlines\r")
        terminal.wait_for("lo\r\n")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(120) == 0
    sent = [[each["content"] for each in body["messages"]] for body, _ in server.requests]
    assert [each[-1] for each in sent] == ["first", "second", "three\nlines\nat once", "two\nlines"]
    assert sent[2][2:4] == ["second", "begun"], "what was said before the stop stays"


def test_ctrl_c_stops_an_answer_of_the_engine_and_not_the_engine():
    executor = f"{__name__}:SlowExecutor"
    with Terminal("--executor", executor, "--max-tokens", "3000") as terminal:
        for word in ("first", "second"):
            terminal.wait_for("> ")
            terminal.type(f"{word}\r")
            terminal.wait_for(f"{word}\r\n")
            terminal.wait_for_text(5)
            # As a terminal does: to every process of the group.
            os.killpg(terminal.process.pid, signal.SIGINT)
            terminal.wait_for("(stopped)")
        terminal.wait_for("> ")
        terminal.type("/quit\r")
        assert terminal.process.wait(120) == 0

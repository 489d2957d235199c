"""The ``chairlift`` command, on the scripted executor: real parsing, real engine, no model."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.cli import main
from chairlift.cli.engine_flags import add_engine_flags, memory_size
from chairlift.cli.generate import EXAMPLES
from chairlift.cli.live import Answer, LiveView
from chairlift.engine_args import ENGINE_KEYS

SCRIPTED = ["--executor", "chairlift.testing:ScriptedExecutor"]


def test_generate_answers_every_prompt_and_ends_with_the_table(capsys):
    assert main(["generate", "one", "two", "--max-tokens", "5", *SCRIPTED]) == 0
    out = capsys.readouterr().out
    for number, prompt in ((1, "one"), (2, "two")):
        answer = re.search(rf"^\[{number}\] {prompt}\n([a-z]+) \.\.\.$", out, re.MULTILINE)
        assert answer is not None, out
        assert len(answer[1]) == 5
    table = dict(re.findall(r"^(\w[\w ,/]*?) {2,}(\S.*)$", out, re.MULTILINE))
    assert table["requests"] == "2 of 2"
    assert table["output tokens"] == "10"
    # The second prompt may arrive while the first one is running, at the latest after it.
    iterations = int(table["iterations"])
    assert 5 <= iterations <= 10
    assert table["mean batch size"] == f"{10 / iterations:.2f}"
    assert {"TTFT, median / worst", "TPOT, median / worst"} <= table.keys()


def test_the_examples_join_a_prompt(capsys):
    assert main(["generate", "--examples", "mine", "--max-tokens", "1", *SCRIPTED]) == 0
    out = capsys.readouterr().out
    for number, prompt in enumerate(("mine", *EXAMPLES), start=1):
        assert f"[{number}] {prompt}\n" in out


def test_a_refused_prompt_is_told_beside_the_others(capsys):
    long = "x" * 100
    flags = ["--max-model-len", "64", "--max-tokens", "2", "--raw", *SCRIPTED]
    assert main(["generate", "short", long, *flags]) == 1
    out = capsys.readouterr().out
    assert "error: the prompt is too long: it has 100 tokens" in out
    assert "requests" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature is -1; it must be from 0 to 2"),
        (["--temperature", "nan"], "temperature is nan; it must be a finite number"),
        (["--max-num-seqs", "5000"], "max_num_seqs (5000) is above max_num_batched_tokens"),
        (["--block-size", "0"], "block_size is 0"),
        (["--max-logprobs", "-1"], "max_logprobs is -1"),
        (["--executor", "nowhere:Nothing"], "executor 'nowhere:Nothing' cannot be loaded"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_clear_sentence(flags, message, capsys):
    executor = [] if {"--executor", "--model", "--block-size"} & set(flags) else SCRIPTED
    assert main(["generate", "x", *executor, *flags]) == 1
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 << 20), ("4G", 4 << 30), ("1GiB", 1 << 30), ("100", 100)]
)
def test_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "4T", "-1G", "1.5G"])
def test_a_size_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="512M"):
        memory_size(text)


def test_every_option_has_a_flag():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    flags = {action.dest for action in parser._actions}
    assert set(ENGINE_KEYS) - flags == {"seed"}, "each command has a --seed of its own"


def test_the_live_view_redraws_in_place_and_leaves_nothing():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    answers = [Answer("first"), Answer("second\nline", text="grow\x1b[2Jing")]
    view = LiveView(answers, out)
    view.update()
    assert "second line" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue(), "a model must not move the cursor"
    view.close()
    assert out.getvalue().endswith("\x1b[2A\x1b[J")


def test_the_installed_command_starts():
    command = Path(sys.executable).with_name("chairlift")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"chairlift \d+\.\d+\.\d+\n", done.stdout)


def test_an_executor_in_the_current_directory(tmp_path):
    (tmp_path / "my_exec.py").write_text(
        "from chairlift.testing import ScriptedExecutor\n\nclass Exec(ScriptedExecutor): pass\n"
    )
    command = Path(sys.executable).with_name("chairlift")
    flags = ["--executor", "my_exec:Exec", "--max-tokens", "3"]
    done = subprocess.run(
        [command, "generate", "x", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "requests" in done.stdout


def test_help_does_not_load_torch():
    code = "import sys, chairlift.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

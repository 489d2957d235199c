"""``chairlift generate --input``: every line is answered once, whatever goes wrong on the way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift.cli import main
from chairlift.testing import ScriptedExecutor

SCRIPTED = ["--executor", "chairlift.testing:ScriptedExecutor"]


class SlowExecutor(ScriptedExecutor):
    """Gives the test time to interrupt."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(num_kv_blocks=512, block_size=args.block_size, step_time=0.05)


class FailingExecutor(ScriptedExecutor):
    """Fails on one prompt only."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(num_kv_blocks=512, block_size=args.block_size, fail_rows={"bad": 1})


@pytest.fixture
def files(tmp_path):
    return tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


def generate(files, *flags, executor=None):
    source, target = files
    chosen = ["--executor", executor] if executor else SCRIPTED
    return main(["generate", "--input", str(source), "--output", str(target), *flags, *chosen])


def answers(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    by_index = {record["index"]: record for record in records}
    assert len(by_index) == len(records), "a line was answered twice"
    return by_index


def expected(prompt, num_tokens):
    return bytes(ScriptedExecutor().expected(prompt, num_tokens)).decode()


def test_every_form_of_a_line_is_answered(files):
    write_lines(
        files[0],
        [
            '"a string"',
            '{"id": "own", "prompt": "text", "max_tokens": 2}',
            '{"id": 7, "messages": [{"role": "user", "content": "text"}]}',
            '{"prompt": [1, 2, 3]}',
            '{"custom_id": "c", "method": "POST", "url": "/v1/completions", '
            '"body": {"model": "m", "prompt": "raw", "max_tokens": 3}}',
            '{"custom_id": "d", "method": "POST", "url": "/v1/chat/completions", '
            '"body": {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1, '
            '"tools": [], "logprobs": false, "response_format": {"type": "text"}}}',
        ],
    )
    assert generate(files, "--max-tokens", "5") == 0
    found = answers(files[1])
    assert [found[i].get("id") for i in range(6)] == [None, "own", 7, None, "c", "d"]
    templated = "user: {}\nassistant: ".format
    prompts = [templated("a string"), templated("text"), templated("text"), [1, 2, 3], "raw"]
    for index, (prompt, count) in enumerate(zip(prompts, [5, 2, 5, 5, 3], strict=True)):
        assert found[index]["text"] == expected(prompt, count)
        assert found[index]["num_prompt_tokens"] == len(prompt)
        assert found[index]["num_output_tokens"] == count
        assert found[index]["finish_reason"] == "length"
    assert len(found[5]["text"]) == 1


def test_raw_uses_no_template(files):
    write_lines(files[0], ['"text"'])
    assert generate(files, "--raw", "--max-tokens", "4") == 0
    assert answers(files[1])[0]["text"] == expected("text", 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("3", "a string or an object"),
        ("{}", "'prompt' or 'messages'"),
        ('{"prompt": "x", "messages": []}', "not both"),
        ('{"prompt": 3}', "neither a string nor a list"),
        ('{"prompt": ["text"]}', "token ids"),
        ('{"prompt": []}', "empty"),
        ('{"messages": "hi"}', "no list of objects"),
        ('{"body": 3}', "'body' is no object"),
        ('{"prompt": "x", "n": 2}', "n is 2"),
        ('{"prompt": "x", "tools": [{}]}', "'tools' is not supported"),
        ('{"prompt": "x", "logprobs": 0}', "'logprobs' is not supported"),
        ('{"prompt": "x", "response_format": {"type": "json_object"}}', "'response_format' is not"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot'"),
        ('{"prompt": "x", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        (json.dumps({"prompt": "x" * 100}), "context length is 64 tokens"),
    ],
)
def test_a_bad_line_gets_an_error_and_the_others_go_on(files, line, message, capsys):
    write_lines(files[0], ['"before"', line, "", '"after"'])
    assert generate(files, "--max-model-len", "64") == 1
    found = answers(files[1])
    assert found.keys() == {0, 1, 3}, "the blank line has a number, but no answer"
    assert message in found[1]["error"]["message"]
    assert "error" not in found[0]
    assert "error" not in found[3]
    assert "2 answers, 1 errors" in capsys.readouterr().err


def test_a_request_that_fails_is_an_error_of_its_line(files):
    write_lines(files[0], ['"good"', '"bad"', '"good"'])
    name = f"{__name__}:FailingExecutor"
    assert generate(files, "--raw", "--max-tokens", "4", executor=name) == 1
    found = answers(files[1])
    assert found[1]["error"]["code"] == "request_failed"
    assert found[0]["text"] == found[2]["text"] == expected("good", 4)


def test_a_second_run_does_what_is_left_and_a_torn_line_again(files, capsys):
    write_lines(files[0], [f'"prompt {i}"' for i in range(20)])
    assert generate(files) == 0
    whole = answers(files[1])
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(lines[:11]) + lines[11][:25])
    kept = b"".join(lines[:11])
    capsys.readouterr()
    assert generate(files) == 0
    assert "9 lines written" in capsys.readouterr().err
    assert files[1].read_bytes().startswith(kept), "what was there stays as it was"
    assert answers(files[1]) == whole


def test_an_input_that_has_grown(files):
    write_lines(files[0], ['"one"'])
    assert generate(files) == 0
    write_lines(files[0], ['"one"', '"two"'])
    assert generate(files) == 0
    assert answers(files[1]).keys() == {0, 1}


def test_no_engine_is_started_where_nothing_is_left(files):
    write_lines(files[0], ['"one"', "", '"two"'])
    assert generate(files) == 0
    assert generate(files, executor="nowhere:Nothing") == 0, "it would have been an error"


def test_an_old_error_still_counts(files):
    write_lines(files[0], ["{torn", '"one"'])
    assert generate(files) == 1
    assert generate(files) == 1
    assert len(answers(files[1])) == 2


def test_answers_do_not_depend_on_the_window(files, tmp_path):
    write_lines(files[0], [f'"prompt {i}"' for i in range(40)])
    assert generate(files, "--window", "1") == 0
    other = files[0], tmp_path / "other.jsonl"
    assert generate(other, "--window", "40", "--max-num-seqs", "3") == 0
    assert answers(files[1]) == answers(other[1])


def test_each_line_has_a_seed_of_its_own(files):
    lines = ['"same"', '"same"', '{"prompt": "same", "seed": 10}']
    write_lines(files[0], lines)
    name = f"{__name__}:SeedExecutor"
    assert generate(files, "--seed", "10", "--max-tokens", "1", executor=name) == 0
    found = answers(files[1])
    assert [found[i]["text"] for i in range(3)] == ["k", "l", "k"]


class SeedExecutor(ScriptedExecutor):
    """Answers with the letter of the seed."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(block_size=args.block_size, default=lambda sample: 97 + sample.seed % 26)


def test_a_full_queue_is_waited_for(files):
    write_lines(files[0], [f'"prompt {i}"' for i in range(30)])
    flags = ["--max-num-seqs", "1", "--max-queued-requests", "1", "--window", "8"]
    assert generate(files, *flags, "--max-tokens", "2") == 0
    assert len(answers(files[1])) == 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"notes of mine\n", "line that is no answer"),
        (b'{"other": 1}\n', "line that is no answer"),
        (b"notes of mine", "line that is no answer"),
        (b'{"index": 0, "id": "z", "text": ""}\n', "answers another file"),
    ],
)
def test_a_file_of_another_kind_is_left_alone(files, content, message, capsys):
    write_lines(files[0], ['"one"'])
    files[1].write_bytes(content)
    assert generate(files) == 1
    assert message in capsys.readouterr().err
    assert files[1].read_bytes() == content


def test_wrong_use_is_one_clear_sentence(files, capsys):
    source, target = map(str, files)
    for flags, message in [
        (["--input", source, "--output", target], "is no file"),
        (["--output", target], "needs both"),
        (["--window", "3", "prompt"], "needs both"),
        (["--input", __file__, "--output", __file__], "is the input as well"),
        (["--input", __file__, "--output", target, "--window", "0"], "--window is 0"),
        (["--input", __file__, "--output", target, "prompt"], "no prompts beside it"),
        (["--input", __file__, "--output", "/no/such/place/x"], "cannot be written"),
    ]:
        assert main(["generate", *flags, *SCRIPTED]) == 1
        assert message in capsys.readouterr().err


def test_two_runs_do_not_write_one_file(files, capsys):
    write_lines(files[0], ['"one"'])
    with open(files[1], "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert generate(files) == 1
    assert "another run" in capsys.readouterr().err


def interrupted(process, target, end):
    """End a run when it has written some lines; returns what it said."""
    deadline = time.monotonic() + 120
    while not (target.exists() and target.read_bytes().count(b"\n") >= 8):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if end == "kill -9 of the engine":
        (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    return process.communicate(timeout=120)[1]


@pytest.mark.parametrize("end", ["Ctrl-C", "kill -9", "kill -9 of the engine"])
def test_an_interrupted_run_goes_on_where_it_stopped(files, end):
    write_lines(files[0], [f'"prompt {i}"' for i in range(60)])
    command = [sys.executable, "-c", "from chairlift.cli import main; raise SystemExit(main())"]
    command += ["generate", "--input", str(files[0]), "--output", str(files[1])]
    command += ["--executor", f"{__name__}:SlowExecutor", "--max-tokens", "4", "--window", "4"]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            error = interrupted(process, files[1], end)
        finally:
            process.kill()
    some = files[1].read_bytes().count(b"\n")
    assert 8 <= some < 60, "the run was interrupted on the way"
    if end != "kill -9":
        assert process.returncode == (130 if end == "Ctrl-C" else 1)
        assert "the same command goes on" in error
        assert "Traceback" not in error
    assert generate(files, "--max-tokens", "4") == 0
    found = answers(files[1])
    assert found.keys() == set(range(60))
    for index in range(60):
        assert found[index]["text"] == expected(f"user: prompt {index}\nassistant: ", 4)

"""The flight recorder on real engines: recorded, replayed, explained, predicted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import chairlift.engine
from chairlift import LLM, AsyncEngine, SamplingParams, cost_model
from chairlift.cli import main
from chairlift.config import Config, PolicyConfig
from chairlift.cost_model import CostCoefficients, CostKey
from chairlift.errors import ConfigError
from chairlift.flight_log import FlightLog
from chairlift.prediction import fit_profile, predict
from chairlift.testing import ScriptedExecutor

ROOT = Path(__file__).parent.parent
CLASSES = {"interactive": {"level": 1}, "batch": {}}


def record_busy_run(path, steps_in_flight):
    """Three long batch requests fill the pool; interactive ones preempt them; one is aborted."""
    executor = ScriptedExecutor(
        num_kv_blocks=12, block_size=16, step_time=0.001, launches_ahead=steps_in_flight > 1
    )
    config = Config(policy=PolicyConfig(classes=CLASSES, sharing="fair"))

    async def ask(engine, name, tokens, patience=60.0, **options):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        try:
            async with asyncio.timeout(patience):
                async for _ in engine.generate(name * 24, params, **options):
                    pass
        except TimeoutError:
            return "aborted"
        return "finished"

    async def run():
        async with AsyncEngine(
            executor=executor,
            isolation="thread",
            config=config,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            max_in_flight_steps=steps_in_flight,
            record=path,
        ) as engine:
            batch = [
                asyncio.create_task(ask(engine, name, 64, request_class="batch", tenant=name))
                for name in "abc"
            ]
            await asyncio.sleep(0.03)
            quick = [
                asyncio.create_task(ask(engine, name, 8, request_class="interactive"))
                for name in "xyz"
            ]
            gone = asyncio.create_task(ask(engine, "g", 100, 0.02, request_class="batch"))
            ends = await asyncio.gather(*batch, *quick, gone)
            await engine.reload(config)
            return ends, await engine.metrics()

    return asyncio.run(run())


@pytest.fixture(scope="module", params=[1, 2], ids=["1-step", "2-steps"])
def busy(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("flight") / "busy.log"
    ends, metrics = record_busy_run(path, request.param)
    assert ends == ["finished"] * 6 + ["aborted"]
    assert metrics["preemptions"] > 0
    return path, metrics


def test_a_run_with_aborts_and_preemptions_replays_bit_for_bit(busy, capsys):
    path, metrics = busy
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{metrics['iterations']:,} steps in " in out
    assert "every plan came out bit for bit" in out

    assert main(["replay", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == metrics["iterations"]
    assert told["mismatch"] is None
    assert told["cut_off_bytes"] == 0
    assert told["stopped"] is None


def test_a_changed_policy_is_caught(busy, capsys):
    path, _ = busy
    assert main(["replay", str(path), "--set", "max_num_seqs=1"]) == 1
    out = capsys.readouterr().out
    found = re.search(r"first difference: step (\d+), schedule at \S+ s: (\w+) differs: (.*)", out)
    assert found is not None, out
    assert found[2] == "num_seqs"
    assert found[3].startswith("the log has 2") or found[3].startswith("the log has 3"), out


def test_a_log_that_was_cut_off_is_good_up_to_there(busy, tmp_path, capsys):
    path, metrics = busy
    cut = tmp_path / "cut.log"
    cut.write_bytes(path.read_bytes()[:-11])
    assert main(["replay", str(cut)]) == 0
    out = capsys.readouterr().out
    assert "the log was cut off" in out
    assert "every plan came out bit for bit" in out
    assert FlightLog(cut).replay().steps <= metrics["iterations"]


def test_what_is_no_log_or_of_another_version_is_told(busy, tmp_path, capsys):
    path, _ = busy
    other = bytearray(path.read_bytes()[:4096])
    other[8] += 1
    for name, content, message in (
        ("empty", b"", "nothing was recorded"),
        ("text", b"hello, world", "is no flight log"),
        ("other", bytes(other), "its format is 2; this version of chairlift reads 1"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        assert main(["replay", str(file)]) == 1
        assert message in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_explain_tells_of_the_preemption(busy, capsys):
    path, _ = busy
    run = FlightLog(path).measure()
    requests = json.loads(run.measures())["requests"]
    preempted = [r for r in requests if r["stats"] and r["stats"]["num_preemptions"]]
    request = preempted[0]
    assert main(["explain", str(path), str(request["id"])]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"request {request['id']}: tenant {request['tenant']}, class batch, 24 ")
    lines = [line.partition(" s  ")[2] for line in out.splitlines() if " s  " in line]
    order = ["submitted: ", "scheduled first, in step ", "first token", "preempted in step "]
    order += ["runs again in step ", "ended: length"]
    places = [next(at for at, line in enumerate(lines) if line.startswith(o)) for o in order]
    assert places == sorted(places), out
    assert "says nothing for " in out
    assert f"{request['stats']['num_preemptions']} preemptions" in out

    assert main(["explain", str(path), str(request["id"]), "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    waited = sum(request["stats"]["waits"].values())
    spans = [span for span in story["waits"] if span["to_us"] <= request["stats"]["finished"]]
    assert sum(span["to_us"] - span["from_us"] for span in spans) == waited


def test_explain_lists_requests_and_refuses_unknown_ones(busy, capsys):
    path, _ = busy
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.startswith("7 requests, the slowest first\n")
    assert main(["explain", str(path), "123456"]) == 1
    assert re.search(r"has no request 123456; it has 7, such as \d+, ", capsys.readouterr().err)


def test_predict_simulates_the_recorded_requests(busy, capsys):
    path, metrics = busy
    log = FlightLog(path)
    prediction = predict(log, log.settings(["max_num_seqs=1"]))
    assert prediction.measured.finished == 6
    assert prediction.guessed == 1, "the one that was aborted"
    assert prediction.recorded.finished >= 6
    assert prediction.measured.output_tokens == metrics["output_tokens"]
    # One row instead of four: everybody behind the first waits longer.
    assert prediction.changed is not None
    changed, recorded = prediction.changed.quantiles, prediction.recorded.quantiles
    assert changed["queue_time_s"]["p95"] > 2 * recorded["queue_time_s"]["p95"]

    flags = ["--predict", "--set", "max_num_seqs=1", "--set", "queue.order=shortest"]
    assert main(["replay", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert "measured  simulated as recorded  max_num_seqs=1, queue.order=shortest" in out
    assert "TTFT p50" in out
    assert main(["replay", str(path), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"]["requests"] == 7


def test_an_engine_that_began_with_a_kept_cost_model_is_replayed_and_predicted(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    key = CostKey(model="m", device="d", dtype="float32", threads=1)
    kept = CostCoefficients(**{each.name: 5.0 for each in dataclasses.fields(CostCoefficients)})
    cost_model.save(key, dataclasses.asdict(kept) | {"num_observations": 1_000, "mean_error": 0.1})
    given_parts = chairlift.engine._given_parts

    def known_parts(*args):
        return dataclasses.replace(given_parts(*args), cost_key=key)

    monkeypatch.setattr(chairlift.engine, "_given_parts", known_parts)
    path = tmp_path / "kept.log"
    with LLM(executor=ScriptedExecutor(), record=path) as llm:
        llm.generate(["one", "two"], SamplingParams(max_tokens=20, ignore_eos=True))
    log = FlightLog(path)
    assert log.settings().cost_model == kept
    assert log.replay(log.settings()).mismatch is None
    changed = log.settings(["max_num_seqs=1", "memory.admission=reserve", "pace.governor=false"])
    assert (changed.cost_model, changed.policy.memory.admission) == (kept, "reserve")
    assert predict(log, changed).recorded.finished == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_num_seqs", "is no change; write KEY=VALUE"),
        ("max_nom_seqs=4", "did you mean max_num_seqs?"),
        ("cost_model=3", "cost_model is no setting"),
        ("max_num_seqs=many", "must be an integer"),
        ("queue.ordre=shortest", "did you mean order?"),
        ("queue.order=shortestt", "queue.order"),
        ("colour.red=1", "colour.red is no setting"),
        ("classes.batch.weight=-1", "classes.batch.weight"),
    ],
)
def test_a_change_that_cannot_be_is_told(busy, change, message):
    path, _ = busy
    with pytest.raises(ConfigError, match=re.escape(message)):
        FlightLog(path).settings([change])


def test_the_fit_finds_the_cost_of_made_up_steps():
    random = np.random.default_rng(5)
    steps = []
    for _ in range(500):
        sequences, context = int(random.integers(1, 33)), int(random.integers(0, 20_000))
        prefill = int(random.choice([0, 0, 0, 100, 400]))
        tokens, pairs = sequences + prefill, prefill * 50.0 + prefill**2 / 2
        copies = int(random.choice([0, 0, 0, 10, 40]))
        us = 2_000 + 50 * sequences + 30 * max(tokens, 64) + 0.02 * context + 0.004 * pairs
        us += 60 * copies
        steps.append(
            {
                "sequences": sequences,
                "tokens": tokens,
                "decode_context": context,
                "prefill_pairs": pairs,
                "copies": copies,
                "duration_us": us * random.lognormal(0, 0.02),
                "gap_us": 10,
            }
        )
    fit = fit_profile(steps)
    assert fit.mean_abs_error < 0.025
    assert abs(fit.total_error) < 0.01
    assert fit.profile.t_tok_s == pytest.approx(30e-6, rel=0.1)
    assert fit.profile.t_w_s == pytest.approx(64 * 30e-6, rel=0.1)
    assert fit.profile.t_copy_s == pytest.approx(60e-6, rel=0.1)
    without_copies = fit_profile([step | {"copies": 0} for step in steps])
    assert without_copies.profile.t_copy_s == 0
    with pytest.raises(ConfigError, match="the log has 3 steps"):
        fit_profile(steps[:3])


def test_steps_tell_the_copies_from_and_to_the_host(tmp_path):
    """More prompts than the executor has blocks for, twice: the second time the host has them."""
    executor = ScriptedExecutor(num_kv_blocks=8, num_host_kv_blocks=64)
    texts = [f"{index} of the prompts that leave the blocks that they had" for index in range(6)]
    path = tmp_path / "host.log"
    with LLM(executor=executor, max_model_len=128, record=path) as llm:
        for _ in range(2):
            llm.generate(texts, SamplingParams(max_tokens=2, ignore_eos=True))
        assert llm.metrics()["restored_tokens"] > 0
    steps = json.loads(FlightLog(path).measure().measures())["steps"]
    assert [step["copies"] for step in steps] == [step.num_copies for step in executor.steps]


def test_the_limit_keeps_the_beginning_and_the_newest(tmp_path, caplog, capsys):
    path = tmp_path / "small.log"
    (tmp_path / "small.log.9").write_text("of an earlier engine")
    with LLM(executor=ScriptedExecutor(), record=path, record_limit=40_000) as llm:
        for _ in range(30):
            llm.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True))
    segments = sorted(int(each.suffix[1:]) for each in tmp_path.glob("small.log.*"))
    assert len(segments) == 2
    assert segments[0] > 1, "the first segment was let go"
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 60_000
    assert "the log goes on in" in caplog.text
    replay = FlightLog(path).replay()
    assert replay.mismatch is None
    assert replay.stopped is None
    assert replay.later_segments == segments
    assert 10 < replay.steps < 30 * 40
    assert main(["replay", str(path)]) == 0
    assert "the log reached its limit" in capsys.readouterr().out
    # The last request is in the newest segments: told, not replayed.
    last = f"{path}.{segments[0]}"
    assert main(["replay", last]) == 1
    assert "only what begins with the engine can be replayed" in capsys.readouterr().err
    for file in (path, last):
        assert main(["explain", str(file), "30"]) == 0
        out = capsys.readouterr().out
        assert "this part of the log cannot be replayed" in out
        assert "40 output tokens, 0 preemptions" in out


def test_a_log_of_several_segments_replays_as_long_as_all_are_there(tmp_path):
    path = tmp_path / "parts.log"
    with LLM(executor=ScriptedExecutor(), record=path, record_limit=200_000) as llm:
        while not Path(f"{path}.2").exists():
            llm.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True))
        steps = llm.metrics()["iterations"]
    assert not Path(f"{path}.3").exists()
    replay = FlightLog(path).replay()
    assert (replay.mismatch, replay.later_segments) == (None, [])
    assert replay.steps == steps


def test_an_older_log_is_kept_beside_the_new_one(tmp_path):
    path = tmp_path / "again.log"
    for prompt in ("first", "second"):
        with LLM(executor=ScriptedExecutor(), record=str(path)) as llm:
            llm.generate(prompt, SamplingParams(max_tokens=len(prompt)))
    assert FlightLog(path).replay().steps == 6
    assert FlightLog(f"{path}.old").replay().steps == 5


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="which cannot be written"):
        LLM(executor=ScriptedExecutor(), record=tmp_path / "none" / "x.log")
    with pytest.raises(ConfigError, match="record is 3; it must be the path of a file"):
        LLM(executor=ScriptedExecutor(), record=3)


def test_generate_records(tmp_path, capsys):
    path = tmp_path / "generate.log"
    flags = ["--executor", "chairlift.testing:ScriptedExecutor", "--record", str(path)]
    assert main(["generate", "one", "two", "--max-tokens", "5", *flags]) == 0
    capsys.readouterr()
    assert main(["replay", str(path)]) == 0
    assert "every plan came out bit for bit" in capsys.readouterr().out


def test_a_short_recorded_run_under_every_policy(tmp_path):
    command = [sys.executable, "benches/recorded_run.py", "--out", str(tmp_path)]
    command += ["--executor", "chairlift.testing:ScriptedExecutor", "--minutes", "0.1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("bit for bit at") == 14, run.stdout

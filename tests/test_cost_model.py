"""What is learned of iterations' time: kept for the next engine, fitted on purpose, and used."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import numpy as np
import pytest

from chairlift import (
    LLM,
    ClassConfig,
    Config,
    ConfigError,
    PaceConfig,
    PolicyConfig,
    SamplingParams,
    _core,
    cost_model,
)
from chairlift.calibration import Log, groups
from chairlift.cli import main
from chairlift.config_file import engine_args
from chairlift.cost_model import CostCoefficients, CostKey
from chairlift.engine_args import EngineArgs
from chairlift.testing import ByteTokenizer, ScriptedExecutor

TRUTH = CostCoefficients(
    t0_us=2_000,
    t_seq_us=60,
    t_weights_us=5_100,
    t_tok_us=30,
    t_ctx_us=0.1,
    t_pair_us=0.003,
    t_sample_us=40,
    t_copy_us=100,
    most_tokens=2_000,
)
KEY = CostKey(model="m", device="d", dtype="float32", threads=2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    return tmp_path


def learned(**changes):
    return {**asdict(TRUTH), "num_observations": 1_000, "mean_error": 0.03, **changes}


def test_what_was_kept_is_found_by_the_same_kind_of_engine_only():
    assert cost_model.load(KEY) is None
    assert cost_model.save(KEY, learned()) == KEY.path()
    assert cost_model.load(KEY) == TRUTH
    assert cost_model.load(replace(KEY, dtype="bfloat16")) is None
    assert cost_model.load(replace(KEY, threads=1)) is None


def test_too_little_is_not_kept():
    assert cost_model.save(KEY, None) is None
    assert cost_model.save(KEY, learned(num_observations=10)) is None
    assert not KEY.path().exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: "no JSON",
        lambda content: "[]",
        lambda content: json.dumps({**content, "version": 0}),
        lambda content: json.dumps({**content, "key": {}}),
        lambda content: json.dumps({**content, "coefficients": {"t0_us": 1}}),
        lambda content: json.dumps({**content, "coefficients": {**asdict(TRUTH), "t0_us": -1}}),
        lambda content: json.dumps({**content, "coefficients": {**asdict(TRUTH), "t0_us": "x"}}),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_warning(spoil, caplog):
    path = cost_model.save(KEY, learned())
    path.write_text(spoil(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert cost_model.load(KEY) is None
    assert "is ignored" in caplog.text


def test_a_fit_of_a_log_predicts_shapes_that_it_has_not_seen():
    rng = np.random.default_rng(5)

    def shapes(count):
        decodes = rng.integers(1, 64, count)
        chunk = np.where(rng.random(count) < 0.5, 0, rng.integers(2, 1_500, count))
        before = rng.integers(0, 4_000, count)
        columns = [
            decodes + (chunk > 0),
            decodes + chunk,
            decodes * rng.integers(10, 3_000, count),
            chunk * (before + chunk / 2),
            decodes,
            np.where(rng.random(count) < 0.7, 0, rng.integers(0, 100, count)),
        ]
        return np.stack(columns, axis=1).astype(np.float64)

    fitted, held_out = shapes(4_000), shapes(500)
    noise = np.exp(0.03 * rng.standard_normal(len(fitted)))
    found = _core.fit_cost_model(fitted.ravel(), TRUTH.predict_us(fitted) * noise)
    assert found is not None
    costs = CostCoefficients.of(found)
    assert Log(shapes=held_out, time_us=TRUTH.predict_us(held_out)).error(costs) < 0.02
    assert _core.fit_cost_model(fitted[:5].ravel(), np.ones(5)) is None
    with pytest.raises(ConfigError, match="5 numbers are no 2 shapes"):
        _core.fit_cost_model(np.ones(5), np.ones(2))


def test_a_file_from_before_there_was_a_host_tier_is_read():
    path = cost_model.save(KEY, learned())
    content = json.loads(path.read_text())
    del content["coefficients"]["t_copy_us"]
    path.write_text(json.dumps(content))
    loaded = cost_model.load(KEY)
    assert loaded == replace(CostCoefficients.of(learned()), t_copy_us=0.0)


def test_calibration_fits_what_the_engine_holds_and_repeats():
    limits = {
        "max_model_len": 512,
        "num_kv_blocks": 100,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
    }
    chosen = groups(limits, rounds=1, seed=3)
    assert chosen == groups(limits, rounds=1, seed=3)
    assert any(group.is_held_out for group in chosen)
    assert len(chosen) > 10
    for group in chosen:
        assert len(group.lengths) <= 8
        assert all(sum(length) <= 512 for length in group.lengths)
        assert sum(map(sum, group.lengths)) <= 1_600


def test_calibrate_tells_the_fit_and_writes_a_profile(capsys, tmp_path):
    path = tmp_path / "profile.json"
    command = ["calibrate", "--executor", "chairlift.testing:ScriptedExecutor", "--rounds", "1"]
    assert main([*command, "--json", "--profile", str(path)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["iterations"] > 100
    assert content["held_out_iterations"] > 20
    assert content["prediction_error"] > 0
    assert content["kept"] is None, "nobody knows what this executor's time depends on"
    profile = json.loads(path.read_text())
    assert profile["t_tok_s"] == pytest.approx(content["coefficients"]["t_tok_us"] / 1e6)
    assert main(command) == 0
    assert "of predictions made as they came" in capsys.readouterr().out


def engine(**options):
    options = {"tokenizer": ByteTokenizer(), "max_model_len": 512, "num_kv_blocks": 512, **options}
    return LLM(executor=ScriptedExecutor(), **options)


def test_the_engine_tells_what_it_learned_and_how_well_it_predicts():
    with engine() as llm:
        client = llm._engine.client
        assert client.cost_model() is None, "nothing has run"
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        llm.generate(["a prompt"] * 4, params, use_tqdm=False)
        found = client.cost_model()
        assert found["num_observations"] >= 60
        assert found["most_tokens"] >= 4
        pace = llm.metrics()["pace"]
        assert 0 < pace["p50"] <= pace["p95"] <= pace["p99"]
        assert pace["mean"] > 0
        assert pace["gap"] > 0
        assert pace["padded_rows"] == 0
        assert pace["prediction_error"] > 0
        assert pace["explained_share"] <= 1
        assert pace["slowdown"] > 0
        assert 0 < pace["p50_ratio"] <= pace["p95_ratio"]
        shapes = client.iterations()["shape"]
        assert shapes.shape[1] == 6
        assert shapes[-1][0] == 4
    assert llm._engine.core.learned()["num_observations"] == found["num_observations"]


def test_the_flag_outlives_a_reload():
    args = engine_args(None, {"iteration_target": "25ms"})
    assert args.policy.pace == PaceConfig(iteration_target=0.025)
    other = PolicyConfig(pace=PaceConfig(iteration_target=1, min_prefill_tokens=5))
    assert args.over(other).pace == PaceConfig(iteration_target=0.025, min_prefill_tokens=5)
    assert EngineArgs(config=Config(policy=other)).policy == other


def test_a_target_is_reloaded_into_a_running_engine():
    classes = {"default": ClassConfig(tpot_target=0.05)}
    with engine(config=Config(policy=PolicyConfig(classes=classes))) as llm:
        policy = PolicyConfig(classes=classes, pace=PaceConfig(iteration_target="1ms"))
        llm.reload(Config(policy=policy))
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        outputs = llm.generate(["a prompt" * 10] * 6, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 50 for output in outputs)
        with pytest.raises(ConfigError, match=r"pace\.iteration_target is 0"):
            llm.reload(Config(policy=PolicyConfig(pace=PaceConfig(iteration_target=0))))

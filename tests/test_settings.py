"""Engine options: what cannot work is a ``ConfigError`` before anything is loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from chairlift import LLM, AsyncEngine, SamplingParams
from chairlift.attention import AttentionError, AttentionParams
from chairlift.engine import LocalEngine
from chairlift.engine_args import EngineArgs
from chairlift.errors import ChairliftError, ConfigError, InvalidRequestError
from chairlift.sampler import Sampler, SamplerError
from chairlift.testing import ByteTokenizer, ScriptedExecutor

NOWHERE = "/no/such/model"
"""Looking for it would be a ModelNotFoundError."""


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_num_seqs", -1, "max_num_seqs is -1"),
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("max_num_seqs", 5_000, r"max_num_seqs \(5000\) is above max_num_batched_tokens \(2048\)"),
        ("max_num_seqs", True, "max_num_seqs is True"),
        ("max_num_batched_tokens", "many", "max_num_batched_tokens is 'many'"),
        ("max_model_len", 0, "max_model_len is 0"),
        ("max_model_len", 2**31, f"max_model_len is {2**31}"),
        ("long_prefill_token_threshold", 0, "long_prefill_token_threshold is 0"),
        ("block_size", 0, "block_size is 0"),
        ("block_size", "16", "block_size is '16'; it must be an integer"),
        ("block_size", None, "block_size is None"),
        ("num_kv_blocks", 0, "num_kv_blocks is 0"),
        ("num_kv_blocks", -5, "num_kv_blocks is -5"),
        ("num_kv_blocks", 10.0, "num_kv_blocks is 10.0"),
        ("kv_cache_memory", 0, "kv_cache_memory is 0; it must be an integer from 1"),
        ("kv_cache_memory", "4G", "kv_cache_memory is '4G'"),
        ("kv_host_memory", -1, "kv_host_memory is -1; it must be an integer from 0"),
        ("kv_host_memory", None, "kv_host_memory is None; it must be an integer"),
        (
            "kv_host_memory",
            2**60,
            r"kv_host_memory is 1,1\d\d,[\d,]+ bytes, but [\d,]+ are available",
        ),
        ("enable_prefix_caching", 1, "enable_prefix_caching is 1; it must be True or False"),
        ("watermark_blocks", -1, "watermark_blocks is -1"),
        ("max_queued_requests", 0, "max_queued_requests is 0"),
        ("max_in_flight_steps", 0, "max_in_flight_steps is 0; it must be at least 1"),
        ("max_in_flight_steps", 3, "max_in_flight_steps is 3; it must be at most 2"),
        ("max_in_flight_steps", "1", "max_in_flight_steps is '1'; it must be an integer"),
        ("attention_backend", "magic", "attention_backend is 'magic'; known are cpu, reference"),
        ("attention_backend", None, "attention_backend is None; it must be a string"),
        ("num_threads", 0, "num_threads is 0"),
        ("max_logprobs", -1, "max_logprobs is -1"),
        ("seed", None, "seed is None"),
        ("dtype", 32, "dtype is 32; it must be a string"),
        ("kv_cache_dtype", "int8", "kv_cache_dtype is 'int8'; known are auto, fp8, fp8_e4m3"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype is 'fp8', but device is 'cpu', which keeps"),
        ("revision", 1, "revision is 1; it must be a string"),
        ("device", "tpu", "device is 'tpu'; known are cpu, cuda"),
        ("device", 0, "device is 0; it must be a string"),
        ("gpu_memory_utilization", 0, "gpu_memory_utilization is 0; it must be above 0"),
        ("gpu_memory_utilization", 1.01, "gpu_memory_utilization is 1.01; it must be above 0"),
        ("gpu_memory_utilization", "half", "gpu_memory_utilization is 'half'"),
        ("gpu_memory_utilization", True, "gpu_memory_utilization is True"),
        ("enforce_eager", None, "enforce_eager is None; it must be True or False"),
    ],
)
@pytest.mark.parametrize("engine", [LLM, AsyncEngine])
def test_an_option_is_refused_before_the_model_is_looked_for(engine, option, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        engine(NOWHERE, **{option: value})
    assert "\n" not in str(caught.value)


def test_blocks_on_the_host_need_the_prefix_cache():
    with pytest.raises(ConfigError, match="kv_host_memory is 1024, but enable_prefix_caching is"):
        LLM(NOWHERE, kv_host_memory=1024, enable_prefix_caching=False)


def test_an_executor_without_blocks_on_the_host_is_not_given_memory_for_them():
    with pytest.raises(ConfigError, match="ScriptedExecutor keeps no blocks on the host"):
        LLM(executor=ScriptedExecutor(), kv_host_memory=1 << 20)


def test_a_device_that_is_not_there_is_refused_before_the_model_is_looked_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="device is 'cuda', but there is no CUDA device"
    ) as caught:
        LLM(NOWHERE, device="cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"num_kv_blocks": 60_000_000}, {"kv_cache_memory": 2**50}])
def test_a_pool_beyond_the_memory_is_refused_before_the_weights_are_read(tmp_path, option):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"the KV pool would take [\d,]+ bytes, but [\d,]+ are"):
        LLM(str(tmp_path), **option)


def test_errors_of_the_parts_are_chairlifts():
    with pytest.raises(AttentionError, match="head_dim 7") as attention:
        AttentionParams(1, 1, 7, 1.0, None)
    with pytest.raises(SamplerError) as sampler:
        Sampler(-1, 100)
    for caught in (attention.value, sampler.value):
        assert isinstance(caught, ChairliftError)
        assert isinstance(caught, ValueError)
        assert caught.code != ChairliftError.code


@pytest.mark.parametrize(
    ("option", "own", "wanted"),
    [("num_kv_blocks", 64, 65), ("max_model_len", 100, 101), ("max_num_seqs", 4, 5)],
)
def test_an_argument_above_the_executors_own_is_refused(option, own, wanted):
    executor = ScriptedExecutor(num_kv_blocks=64)
    executor.max_model_len, executor.max_num_seqs = 100, 4
    options = {"max_num_seqs": 4}
    with pytest.raises(ConfigError, match=f"{option} is {wanted}, but the executor has {own}"):
        LLM(executor=executor, **(options | {option: wanted}))
    for fits in (own, own - 1):
        with LLM(executor=executor, **(options | {option: fits})) as llm:
            assert llm.limits[option] == fits


def test_end_tokens_are_the_tokenizers_and_the_models(monkeypatch, tmp_path):
    """A tokenizer of its own has no generation_config.json beside it."""

    class Model(ScriptedExecutor):
        def __init__(self, _config):
            super().__init__(default=lambda sample: 97 + sample.output_index)
            self.model_config = SimpleNamespace(vocab_size=258, eos_token_ids=(99, 257, 5_000))
            self.kv_pool = SimpleNamespace(num_blocks=512)
            self.max_model_len = 512

    monkeypatch.setattr("chairlift.torch_executor.TorchExecutor", Model)
    with LLM(str(tmp_path), tokenizer=ByteTokenizer()) as llm:
        (result,) = llm.generate("x", SamplingParams(max_tokens=9), use_tqdm=False)
    assert result.outputs[0].token_ids == [97, 98, 99]
    assert result.outputs[0].finish_reason == "stop"


def test_max_logprobs_is_an_option():
    engine = LocalEngine(EngineArgs(executor=ScriptedExecutor(), max_logprobs=3))
    engine.shutdown()
    prompt = SimpleNamespace(cache_salt=None)
    engine.prepare(prompt, [1], SamplingParams(logprobs=3))
    with pytest.raises(InvalidRequestError, match="logprobs is 4, but the engine gives 3"):
        engine.prepare(prompt, [1], SamplingParams(logprobs=4))

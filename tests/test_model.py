"""The decoder against transformers: the default model, and every family on tiny checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
from copy import deepcopy

import pytest
import torch
import transformers

from chairlift.errors import ModelError
from chairlift.executor import STATUS_FAILED, STATUS_OK
from chairlift.host_memory import available_memory
from chairlift.kv_cache import size_kv_pool
from chairlift.models import linear
from chairlift.models.config import ModelConfig
from chairlift.torch_executor import TorchExecutor, TorchExecutorConfig, resolve_dtype
from plans import blocks_needed, generate, make_plan, place, run_step
from prompts import LONG_PROMPTS, PROMPTS, SHORT_PROMPTS

BLOCK = 16
CLOSE = 1e-3  # of two logits: nearer than this, rounding may decide between them


def load(directory, **settings):
    settings = {"dtype": "float32", "num_kv_blocks": 300, "max_num_seqs": 32, **settings}
    return TorchExecutor(TorchExecutorConfig(directory, **settings))


@pytest.fixture(scope="module")
def executor(model_directory):
    return load(model_directory)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer):
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def all_logits(executor, ids):
    """Score every token of one prompt, with the executor's own model and cache."""
    sequences = place([ids], max_tokens=0, block_size=BLOCK)
    backend = executor._backend
    with torch.inference_mode():
        metadata = backend.prepare(make_plan(sequences, block_size=BLOCK))
        layers = executor._cache.layers
        model = executor._model
        return model.score(model.forward(torch.tensor(ids), None, layers, backend, metadata))


def divergences(model, prompt, output):
    """Compare greedy ``output`` with a transformers model, teacher-forced.

    One forward pass over prompt and output gives what greedy generation would choose after each
    prefix; if every choice is ours, generation would have given our tokens. Returns, where it is
    not, the position and how much better its choice is.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    gaps = logits.max(dim=1).values - chosen
    return [(position, gap) for position, gap in enumerate(gaps.tolist()) if gap > 0]


def assert_greedy(model, prompt, output, name):
    for position, gap in divergences(model, prompt, output):
        print(f"{name}: token {position} differs where the two best are {gap:.1e} apart")
        assert gap <= CLOSE, f"{name}: token {position} is not the best by {gap}"


def test_logits_of_the_default_model_agree_with_transformers(executor, original_model, prompt_ids):
    for ids in [*prompt_ids[:3], *prompt_ids[8:14], prompt_ids[-1]]:
        with torch.inference_mode():
            wanted = original_model(torch.tensor([ids])).logits[0]
        got = all_logits(executor, ids)
        assert (got - wanted).abs().max() <= 1e-3


def generate_with_transformers(model, prompt, max_tokens):
    """Return greedy tokens and the logits ``[max_tokens, vocab]`` that each was chosen from."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max_tokens,
            eos_token_id=model.config.vocab_size,  # none, so that every output has its full length
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)


def test_greedy_tokens_are_those_of_transformers_generate(executor, original_model, prompt_ids):
    """All 64 tokens of all 20 prompts.

    One prompt may part from transformers, where rounding decides: at logits within ``CLOSE``.
    """
    assert len(PROMPTS) == 20
    assert sum(len(ids) > 600 for ids in prompt_ids) == len(LONG_PROMPTS) == 3
    outputs = generate(executor, prompt_ids, max_tokens=64, block_size=BLOCK)
    parted = 0
    for prompt, ids, output in zip(PROMPTS, prompt_ids, outputs, strict=True):
        wanted, logits = generate_with_transformers(original_model, ids, 64)
        assert len(output) == len(wanted) == 64
        if output == wanted:
            continue
        parted += 1
        at = next(i for i in range(64) if output[i] != wanted[i])
        best, second = logits[at].topk(2).values.tolist()
        print(
            f"{prompt[:30]!r} parts at token {at}, where the two best are {best - second:.1e} apart"
        )
        assert best - second <= CLOSE
        assert logits[at, output[at]] == second
    assert parted <= 1


def test_the_default_model_continues_as_it_should(executor, tokenizer):
    prompt = tokenizer.encode("The capital of France is").ids
    [output] = generate(executor, [prompt], max_tokens=8, block_size=BLOCK)
    assert tokenizer.decode(output).startswith(" Paris.\n\nThe answer is:")


def test_tokens_do_not_depend_on_chunks_or_on_the_batch(executor, prompt_ids):
    ids = [*prompt_ids[:6], prompt_ids[-2][:150]]
    together = generate(executor, ids, max_tokens=12, block_size=BLOCK)
    alone = [generate(executor, [i], max_tokens=12, block_size=BLOCK)[0] for i in ids]
    assert alone == together
    for chunk in (1, 16, 50):
        outputs = generate(executor, ids, max_tokens=12, block_size=BLOCK, chunk=chunk)
        assert outputs == together


def test_tokens_left_on_the_device_are_filled_in(executor, prompt_ids):
    ids = prompt_ids[:5]
    given = generate(executor, ids, max_tokens=8, block_size=BLOCK)
    remembered = generate(executor, ids, max_tokens=8, block_size=BLOCK, on_device=True)
    assert remembered == given


def test_copied_blocks_are_read_in_place_of_the_originals(executor, prompt_ids):
    [sequence] = sequences = place([prompt_ids[0]], max_tokens=8, block_size=BLOCK)
    twin = dataclasses.replace(sequence, token_ids=list(sequence.token_ids))
    for _ in range(4):
        run_step(executor, sequences, make_plan(sequences, block_size=BLOCK))
    twin.token_ids, twin.num_computed = list(sequence.token_ids), sequence.num_computed
    twin.num_prompt = sequence.num_prompt
    twin.blocks = [block + 100 for block in sequence.blocks]
    copies = tuple(zip(sequence.blocks, twin.blocks, strict=True))
    for index in range(4):
        run_step(executor, sequences, make_plan(sequences, block_size=BLOCK))
        plan = make_plan([twin], block_size=BLOCK, copies=copies if index == 0 else ())
        run_step(executor, [twin], plan)
    assert twin.output_ids == sequence.output_ids


def test_a_step_that_samples_nothing(executor, prompt_ids):
    sequences = place([prompt_ids[-1]], max_tokens=1, block_size=BLOCK)
    result = run_step(executor, sequences, make_plan(sequences, block_size=BLOCK, chunk=64))
    assert len(result.token_ids) == 0
    assert result.statuses.tolist() == [STATUS_OK]


def test_a_failed_sample_fails_its_own_sequence(model_directory, prompt_ids, monkeypatch):
    executor = load(model_directory, num_kv_blocks=8)
    sequences = place([ids[:7] for ids in prompt_ids[:3]], max_tokens=2, block_size=BLOCK)
    prefill = make_plan(sequences, block_size=BLOCK)
    run_step(executor, sequences, prefill)
    decode = make_plan(sequences, block_size=BLOCK)
    score = executor._model.score

    def spoil_second(*arguments):
        logits = score(*arguments)
        logits[1] = torch.nan
        return logits

    monkeypatch.setattr(executor._model, "score", spoil_second)
    for plan in (prefill, decode):
        executor.launch(plan)
        assert executor.collect().statuses.tolist() == [STATUS_OK, STATUS_FAILED, STATUS_OK]


def test_bfloat16_follows_float32(model_directory, executor, original_model, prompt_ids, tokenizer):
    narrow = load(model_directory, dtype="bfloat16")
    ids = [tokenizer.encode("The capital of France is").ids, prompt_ids[4], prompt_ids[6]]
    wide = generate(executor, ids, max_tokens=3, block_size=BLOCK)
    assert generate(narrow, ids, max_tokens=3, block_size=BLOCK) == wide
    exact = all_logits(executor, prompt_ids[9])
    with torch.inference_mode():
        theirs = deepcopy(original_model).bfloat16()(torch.tensor([prompt_ids[9]])).logits[0]
    our_error = (all_logits(narrow, prompt_ids[9]).float() - exact).abs().mean()
    their_error = (theirs.float() - exact).abs().mean()
    assert our_error < 1.5 * their_error  # the rounding is bfloat16's, not ours


def test_weights_are_packed_once_and_fall_back(monkeypatch):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16)
    wanted = x @ weight.T + bias
    torch.testing.assert_close(linear.make_linear(weight, bias)(x), wanted)
    monkeypatch.setattr(linear, "_onednn_operators", lambda dtype: None)
    torch.testing.assert_close(linear.make_linear(weight, bias)(x), wanted)


TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}
FAMILIES = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40,
                               "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip


def tiny_model(family):
    """A random model whose biases and norms matter too."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**TINY, **settings})
    torch.manual_seed(len(family))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=FAMILIES)
def tiny(request, tmp_path):
    model = tiny_model(request.param)
    sharded = request.param in ("llama3", "mistral", "qwen2", "qwen3-tied")
    model.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    return model, tmp_path


def test_families_agree_with_transformers(tiny):
    model, directory = tiny
    executor = load(directory, num_kv_blocks=64)
    longest = executor.max_model_len
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 160, (length,), generator=generator).tolist() for length in (1, 9, 28)
    ]
    if longest > 100:
        prompts.append(torch.randint(3, 160, (90,), generator=generator).tolist())
    outputs = generate(executor, prompts, max_tokens=12, block_size=BLOCK)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(prompt) + len(output) <= longest
        assert_greedy(model, prompt, output, directory.name)
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + output])).logits[0]
        got = all_logits(executor, prompt + output)
        assert (got - wanted).abs().max() <= 1e-4


def test_half_precision_checkpoints_are_converted(tmp_path):
    tiny_model("qwen3").to(torch.float16).save_pretrained(tmp_path)
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = list(range(3, 20))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0]
    assert (all_logits(load(tmp_path), prompt) - wanted).abs().max() <= 1e-4


def test_older_configurations_read_the_same(tmp_path):
    """Before transformers 5, rope was said by ``rope_theta`` and ``rope_scaling``."""
    tiny_model("llama3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    new = ModelConfig.from_directory(tmp_path)
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope
    path.write_text(json.dumps(values))
    old = ModelConfig.from_directory(tmp_path)
    assert old == new
    assert old.rope.kind == "llama3"


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window"])
def test_a_sliding_window_caps_the_length_and_says_so(family, tmp_path, caplog):
    tiny_model(family).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="chairlift"):
        executor = load(tmp_path, num_kv_blocks=64)
    assert executor.max_model_len == 40
    [said] = [r.getMessage() for r in caplog.records]
    assert "max_model_len is lowered from 512 to 40, the model's sliding window" in said


def test_a_window_that_does_not_matter_is_not_mentioned(tmp_path, caplog):
    tiny_model("mistral-window").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="chairlift"):
        assert load(tmp_path, num_kv_blocks=64, max_model_len=40).max_model_len == 40
    assert not caplog.records
    tiny_model("qwen2").save_pretrained(tmp_path)
    assert ModelConfig.from_directory(tmp_path).sliding_window is None


def test_the_pool_is_reported_and_caps_the_length(tmp_path, caplog):
    tiny_model("llama2").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="chairlift"):
        executor = load(tmp_path, num_kv_blocks=10)
    assert executor.max_model_len == 160
    said = [record.getMessage() for record in caplog.records]
    assert "max_model_len is lowered from 512 to the 160 tokens that the KV cache holds" in said[1]
    assert "10 blocks of 16 = 160 tokens, 1 concurrent requests of the full 160" in said[2]
    # K and V, 3 layers, 2 heads of 16 dimensions, 16 tokens, 4 bytes
    assert executor.kv_pool.bytes_per_block == 2 * 3 * 2 * 16 * 16 * 4
    by_memory = load(tmp_path, num_kv_blocks=None, kv_cache_memory=1 << 20)
    assert by_memory.kv_pool.num_blocks == (1 << 20) // by_memory.kv_pool.bytes_per_block
    assert by_memory.kv_pool.full_length_requests == by_memory.kv_pool.num_blocks // 32


def test_the_default_pool_is_a_share_of_the_memory():
    settings = {"block_size": 16, "max_model_len": 100}
    size = size_kv_pool(bytes_per_block=1 << 20, **settings)
    assert 0 < size.num_bytes <= min(4 << 30, available_memory() // 2)
    with pytest.raises(ModelError, match="holds no block of 1,048,576 bytes; give it more memory"):
        size_kv_pool(bytes_per_block=1 << 20, memory_bytes=1000, **settings)


def test_settings_that_cannot_be(tmp_path):
    tiny_model("llama2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="max_model_len 513 is not within the model's 512"):
        load(tmp_path, max_model_len=513)
    with pytest.raises(ModelError, match="unknown dtype 'int4'; known are auto, float32, bfloat16"):
        load(tmp_path, dtype="int4")
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)


def test_all_eos_tokens_are_known(tmp_path):
    tiny_model("llama2").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    config = ModelConfig.from_directory(tmp_path)
    assert config.eos_token_ids == (5, 7, 2)


def test_the_prompts_fit(prompt_ids):
    sequences = place(prompt_ids, max_tokens=64, block_size=BLOCK)
    assert blocks_needed(sequences) <= 300
    assert len(SHORT_PROMPTS) + len(LONG_PROMPTS) == len(set(PROMPTS)) == 20

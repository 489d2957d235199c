"""The CUDA executor from plan to tokens on the emulator, against the executor of the CPU."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import numpy as np
import pytest
import torch
import transformers
from cpu_device import CpuDevice
from emulated_launcher import EmulatedLauncher, emulate
from tiny_model import BLOCK, VOCAB, block_bytes, engine_on, on_cpu, on_cuda

from chairlift import LLM, SamplingParams, prompt_scores
from chairlift.errors import ConfigError, UnsupportedModelError, UnsupportedStepError
from chairlift.executor import STATUS_FAILED, STATUS_OK
from chairlift.gpu import CudaExecutor, CudaExecutorConfig
from chairlift.testing import ByteTokenizer
from plans import generate, make_plan, place, run_step

pytestmark = pytest.mark.usefixtures("launcher")


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return generate(on_cpu(tiny), prompts, max_tokens=12, block_size=BLOCK)


@pytest.mark.parametrize("options", [{}, {"chunk": 7}, {"on_device": True}], ids=str)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_greedy_tokens_are_those_of_the_cpu(tiny, prompts, expected, enforce_eager, options):
    device, launcher = CpuDevice(), EmulatedLauncher(guards=False)
    emulate(launcher)
    executor = on_cuda(tiny, device, enforce_eager=enforce_eager, max_num_batched_tokens=256)
    found = generate(executor, prompts, max_tokens=12, block_size=BLOCK, **options)
    assert found == expected
    assert {launch.kernel for launch in launcher.launched} <= set(device.loaded)
    use, replayed = executor.graph_use, [graph for graph in device.graphs if graph.replays]
    if enforce_eager:
        assert not device.graphs
        assert use.replays == 0
        return
    # Contexts are on both sides of a chunk: all are cut, and padding was there.
    assert use.replays == sum(graph.replays for graph in replayed) > 0
    assert use.padding > 0
    assert use.eager == 0


def test_steps_of_short_contexts_take_graphs_without_a_combination(tiny, prompts, launcher):
    executor = on_cuda(tiny)
    launcher.launched.clear()
    generate(executor, [prompts[0], prompts[1]], max_tokens=6, block_size=BLOCK)
    combined = [one for one in launcher.launched if "combine" in one.kernel]
    assert executor.graph_use.replays == 5
    assert executor.graph_use.padding == 0
    assert all(0 in launch.grid for launch in combined)


def test_a_padded_step_writes_nothing_but_its_own_slots(tiny, prompts):
    """Five sequences in a graph of eight: the others' last slots are left as they were."""
    executor = on_cuda(tiny, max_num_batched_tokens=256)
    sequences = place(prompts, max_tokens=8, block_size=BLOCK)
    run_step(executor, sequences, make_plan(sequences, block_size=BLOCK))
    run_step(executor, sequences, make_plan(sequences, block_size=BLOCK))
    running = sequences[:3]
    before = [cache.clone() for cache in executor._flat_caches]
    plan = make_plan(running, block_size=BLOCK)
    run_step(executor, running, plan)
    assert executor.graph_use.padding > 0
    written = torch.tensor(plan.slot_mapping)
    for old, new in zip(before, executor._flat_caches, strict=True):
        changed = (old != new).any(dim=-1).any(dim=1).flatten().nonzero().flatten()
        assert set(changed.tolist()) == set(written.tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_with_and_without_graphs(tiny, prompts, launcher, dtype):
    """The prefill kernel, and the sampler's types."""
    tokens = {}
    for enforce_eager in (False, True):
        executor = on_cuda(
            tiny, dtype=dtype, enforce_eager=enforce_eager, max_num_batched_tokens=256
        )
        tokens[enforce_eager] = generate(executor, prompts, max_tokens=8, block_size=BLOCK)
    assert tokens[True] == tokens[False]
    assert {launch.kernel for launch in launcher.launched} <= set(executor._device.loaded)
    assert any("prefill" in launch.kernel for launch in launcher.launched)
    wanted = generate(on_cpu(tiny), prompts, max_tokens=8, block_size=BLOCK)
    same = sum(a == b for a, b in zip(tokens[True], wanted, strict=True))
    assert same >= 3  # rounding may turn a choice, and all that follows it


@pytest.mark.parametrize("steps", [1, 2])
def test_every_sampling_parameter_goes_through_the_engine(tiny, steps):
    """Greedy and sampled, penalties, biases and log-probabilities, mixed in one batch."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias={7: 50.0}, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.7, n=3, seed=5, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.0, n=1, max_tokens=3, min_tokens=2),
    ]
    texts = [f"prompt {index} of the batch" + " and more" * index for index in range(len(params))]
    results = []
    for executor in (on_cpu(tiny), on_cuda(tiny)):
        with engine_on(executor, num_kv_blocks=40, max_in_flight_steps=steps) as llm:
            results.append(llm.generate(texts, params, use_tqdm=False))
    for ours, theirs in zip(*results, strict=True):
        assert ours.error is None
        assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in theirs.outputs]
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
        if theirs.prompt_logprobs is not None:
            told = [list(entry) for entry in ours.prompt_logprobs[1:]]
            assert told == [list(entry) for entry in theirs.prompt_logprobs[1:]]
    assert executor.graph_use.replays > 0


@pytest.mark.parametrize("steps", [1, 2])
def test_the_engine_runs_out_of_memory_and_preempts(tiny, steps):
    """As few blocks as one sequence needs and some: tokens are as on the CPU."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    texts = [f"{index} asks for more than there is" for index in range(4)]
    tokens = []
    for executor in (on_cpu(tiny), on_cuda(tiny)):
        with engine_on(executor, num_kv_blocks=16, max_in_flight_steps=steps) as llm:
            outputs = llm.generate(texts, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            metrics = llm.metrics()
            assert metrics["preemptions"] > 0
    assert tokens[0] == tokens[1]
    use = executor.graph_use
    assert metrics["graph_steps"] == use.replays > 0
    assert metrics["graph_rows"] == use.sequences + use.padding
    assert metrics["graph_padded_rows"] == use.padding > 0


def test_an_engine_on_cuda_is_made_of_its_options(tiny, monkeypatch, caplog):
    device = CpuDevice(total=64 << 20, used=8 << 20, peak=4 << 20)
    monkeypatch.setattr("chairlift.gpu.device.CudaDevice", lambda: device)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    options = {"tokenizer": ByteTokenizer(), "dtype": "float32", "max_num_seqs": 4}
    options["kv_host_memory"] = 1 << 20
    with (
        caplog.at_level("INFO", "chairlift"),
        LLM(str(tiny), **options, num_kv_blocks=40, block_size=BLOCK) as llm,
    ):
        (wanted,) = llm.generate("hello", params, use_tqdm=False)
        assert llm.limits["num_host_kv_blocks"] == 0
    assert caplog.text.count("kv_host_memory does nothing on the CPU") == 1
    with (
        caplog.at_level("INFO", "chairlift"),
        LLM(
            str(tiny),
            **options,
            device="cuda",
            max_num_batched_tokens=32,
            gpu_memory_utilization=0.25,
            enforce_eager=True,
            block_size=BLOCK,
        ) as llm,
    ):
        (found,) = llm.generate("hello", params, use_tqdm=False)
        limits = llm.limits
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert device.profiled == 1
    assert not device.graphs
    assert 0.9 * (4 << 20) < limits["num_kv_blocks"] * block_bytes(torch.float32) <= 4 << 20
    assert limits["num_host_kv_blocks"] == (1 << 20) // block_bytes(torch.float32)
    assert "KV blocks on the host: 1 MiB, 128 blocks of 8 = 1,024 tokens" in caplog.text
    assert "in float32 on the emulator" in caplog.text


def test_plan_memory_is_pinned_once(tiny):
    device = CpuDevice()
    executor = on_cuda(tiny, device)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with engine_on(executor) as llm:
        llm.generate("hello", params, use_tqdm=False)
        first = list(device.pinned)
        llm.generate("hello again", params, use_tqdm=False)
    assert first
    assert device.pinned == first
    assert all(address % 4096 == 0 and size % 4096 == 0 for address, size in first)
    ends = sorted((address, address + size) for address, size in first)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    assert not device.unpinned
    del executor, llm
    gc.collect()
    assert device.unpinned == [address for address, _ in first]


def test_plans_made_by_hand_are_not_pinned(tiny, prompts):
    device = CpuDevice()
    generate(on_cuda(tiny, device), prompts[:2], max_tokens=3, block_size=BLOCK)
    assert not device.pinned


def test_two_steps_in_flight(tiny, prompts, expected):
    """The second is launched before the first is collected; its tokens come from the device."""
    executor = on_cuda(tiny)
    (sequence,) = place(prompts[1:2], max_tokens=4, block_size=BLOCK)
    executor.launch(make_plan([sequence], block_size=BLOCK, step=1))
    sequence.num_computed = len(sequence.token_ids)
    sequence.token_ids.append(0)  # whatever it is
    executor.launch(make_plan([sequence], block_size=BLOCK, on_device=True, step=2))
    tokens = [executor.collect().token_ids.tolist() for _ in range(2)]
    assert tokens == [[token] for token in expected[1][:2]]
    with pytest.raises(RuntimeError, match="without launch"):
        executor.collect()


def test_a_row_of_nan_fails_alone(tiny, prompts):
    executor = on_cuda(tiny)
    sequences = place(prompts[:3], max_tokens=4, block_size=BLOCK)
    run_step(executor, sequences, make_plan(sequences, block_size=BLOCK))
    with torch.inference_mode():
        for cache in executor._flat_caches:
            cache[sequences[1].blocks[0]] = float("nan")
    executor.launch(make_plan(sequences, block_size=BLOCK))
    result = executor.collect()
    by_row = dict(zip([0, 1, 2], result.statuses.tolist(), strict=True))
    assert by_row == {0: STATUS_OK, 1: STATUS_FAILED, 2: STATUS_OK}


def test_prompts_are_scored_slice_by_slice(tiny, prompts, launcher, monkeypatch):
    """As by the CPU; the launch does not wait, and a prompt that is not sound fails alone."""
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", 7 * 4 * VOCAB)
    results, executors = [], (on_cpu(tiny), on_cuda(tiny, max_num_batched_tokens=256))
    for executor in executors:
        sequences = place(prompts, max_tokens=4, block_size=BLOCK)
        plan = make_plan(sequences, block_size=BLOCK, chunk=50, num_best=3)
        results.append(run_step(executor, sequences, plan).prompt_logprobs)
    wanted, found = results
    assert found.offsets.tolist() == wanted.offsets.tolist()
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert np.allclose(found.values, wanted.values, atol=1e-4)
    scored = [launch.grid[0] for launch in launcher.launched if "logprobs" in launch.kernel]
    assert sum(scored) == len(plan.score_indices) > 100
    assert max(scored) == 4  # as many as are in 7, and begin at a multiple of 16 bytes

    spoilt = next(s for s in sequences if s.num_prompt == 90)
    with torch.inference_mode():
        for cache in executor._flat_caches:
            cache[spoilt.blocks[0]] = float("nan")
    plan = make_plan(sequences, block_size=BLOCK, num_best=3)
    executor.launch(plan)
    result = executor.collect()
    assert plan.rows[result.statuses == STATUS_FAILED].tolist() == [spoilt.row]
    assert len(result.prompt_logprobs.offsets) == len(plan.score_indices) + 1


def test_blocks_are_copied_before_the_forward_pass(tiny, prompts, expected):
    executor = on_cuda(tiny)
    (sequence,) = place(prompts[2:3], max_tokens=12, block_size=BLOCK)
    run_step(executor, [sequence], make_plan([sequence], block_size=BLOCK))
    moved = [block + 20 for block in sequence.blocks]
    copies = tuple(zip(sequence.blocks, moved, strict=True))
    sequence.blocks = moved
    run_step(executor, [sequence], make_plan([sequence], block_size=BLOCK, copies=copies))
    run_step(executor, [sequence], make_plan([sequence], block_size=BLOCK))
    assert sequence.output_ids == expected[2][:3]


@pytest.mark.parametrize(("enforce_eager", "steps"), [(True, 1), (False, 2)])
def test_the_pool_takes_what_the_largest_step_leaves(tiny, enforce_eager, steps):
    block_bytes = 2 * 2 * 1 * 64 * BLOCK * 4
    device = CpuDevice(total=1_000 * block_bytes, used=200 * block_bytes, peak=100 * block_bytes)
    executor = on_cuda(
        tiny,
        device,
        num_kv_blocks=None,
        gpu_memory_utilization=0.5,
        enforce_eager=enforce_eager,
    )
    assert device.profiled == steps  # with graphs, a step of decodes besides
    # 500 may be used, 200 are; a block pays its share of a chunk's partial results besides.
    left = 300 - 100 * steps
    assert 0.75 * left < executor.num_kv_blocks < left
    assert executor.max_model_len == 160


def test_a_device_that_is_full_says_what_has_its_memory(tiny):
    device = CpuDevice(total=1 << 30, used=900 << 20, peak=50 << 20)
    with pytest.raises(
        Exception, match=r"no device memory is left .* allows 922 MiB; the model and"
    ):
        on_cuda(tiny, device, num_kv_blocks=None)


def test_what_it_cannot_run_is_refused(tiny, prompts):
    executor = on_cuda(tiny)
    (sequence,) = place(prompts[3:4], max_tokens=4, block_size=BLOCK)
    plan = make_plan([sequence], block_size=BLOCK)
    with pytest.raises(UnsupportedStepError, match="masks the logits"):
        executor.launch(dataclasses.replace(plan, mask_rows=np.array([0], np.int32)))
    many = dataclasses.replace(plan, token_ids=np.zeros(65, np.int32))
    with pytest.raises(UnsupportedStepError, match="65 token_ids; this executor has room for 64"):
        executor.launch(many)
    run_step(executor, [sequence], plan)  # and it goes on


def test_more_rows_than_it_has_are_refused(tiny):
    limits = {"max_num_seqs": 9, "block_size": BLOCK}
    with pytest.raises(ConfigError, match="max_num_seqs is 9, but the executor has 8"):
        LLM(executor=on_cuda(tiny, enforce_eager=True), tokenizer=ByteTokenizer(), **limits)


def test_head_sizes_without_kernels_are_refused(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="heads of 8 values; the CUDA kernels are for"):
        on_cuda(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_one_clear_error(tiny):
    with pytest.raises(ConfigError, match="device is 'cuda', but there is no CUDA device"):
        CudaExecutor(CudaExecutorConfig(model_dir=tiny))

"""The CUDA executor's KV caches beside the plain one: blocks on the host, and numbers of 8 bits."""

from __future__ import annotations

import gc

import pytest
import torch
from cpu_device import CpuDevice
from safetensors.torch import load_file, save_file
from tiny_model import BLOCK, LAYERS, block_bytes, engine_on, on_cuda

from chairlift import SamplingParams
from chairlift.attention.reference import ReferenceBackend
from chairlift.errors import ModelError, UnsupportedStepError, WeightsError
from chairlift.executor import LOCATION_DEVICE as HERE
from chairlift.executor import LOCATION_HOST as HOST
from chairlift.kv_cache import KvCache
from chairlift.torch_executor import TorchExecutor, TorchExecutorConfig
from plans import generate, make_plan, place, run_step

pytestmark = pytest.mark.usefixtures("launcher")


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")]
)
def test_blocks_go_to_the_host_and_come_back(tiny, prompts, dtype, kv_cache_dtype):
    """A sequence's blocks leave for the host, are overwritten, and return elsewhere: same tokens.

    One of them leaves and is written by a block that returns in the same step.
    """
    device = CpuDevice()
    kept = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else getattr(torch, dtype)
    executor = on_cuda(
        tiny,
        device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_host_memory=10 * block_bytes(kept) + 5,
    )
    assert executor.num_host_kv_blocks == 10
    wanted = generate(executor, prompts[2:3], max_tokens=6, block_size=BLOCK)[0]
    (sequence,) = place(prompts[2:3], max_tokens=6, block_size=BLOCK)
    run_step(executor, [sequence], make_plan([sequence], block_size=BLOCK))
    first, second, *rest = sequence.blocks
    # The prompt is 16 tokens long: two blocks, full.
    copies, locations = ((first, 4), (second, 7)), ((HERE, HOST),) * 2
    run_step(
        executor,
        [sequence],
        make_plan([sequence], block_size=BLOCK, copies=copies, copy_locations=locations),
    )
    with torch.inference_mode():
        for cache in executor._flat_caches:
            cache.view(torch.uint8)[[first, second]] = 7
    # The first returns into the second's place, whose garbage leaves for the host before.
    sequence.blocks = [second, 20, *rest]
    copies = ((second, 9), (4, second), (7, 20))
    locations = ((HERE, HOST), (HOST, HERE), (HOST, HERE))
    run_step(
        executor,
        [sequence],
        make_plan([sequence], block_size=BLOCK, copies=copies, copy_locations=locations),
    )
    while len(sequence.output_ids) < 6:
        run_step(executor, [sequence], make_plan([sequence], block_size=BLOCK))
    assert sequence.output_ids == wanted
    for cache in executor._host_blocks.caches:
        assert (cache[9].view(torch.uint8) == 7).all()
    addresses = [address for address, _ in device.pinned]
    del executor
    gc.collect()
    assert device.unpinned == addresses


def test_both_directions_of_a_step_are_two_launches(tiny, prompts, launcher):
    executor = on_cuda(tiny, kv_host_memory=1 << 20)
    (sequence,) = place(prompts[2:3], max_tokens=4, block_size=BLOCK)
    launcher.launched.clear()
    plan = make_plan(
        [sequence],
        block_size=BLOCK,
        copies=((30, 1), (31, 2), (32, 3), (5, 30), (33, 34)),
        copy_locations=(*((HERE, HOST),) * 3, (HOST, HERE), (HERE, HERE)),
    )
    run_step(executor, [sequence], plan)
    grids = [launch.grid for launch in launcher.launched if launch.kernel == "block_copy"]
    assert grids == [(3, 4, 1), (2, 4, 1)]


def test_without_blocks_on_the_host_none_are_copied_there(tiny, prompts):
    executor = on_cuda(tiny)
    assert executor.num_host_kv_blocks == 0
    (sequence,) = place(prompts[2:3], max_tokens=4, block_size=BLOCK)
    plan = make_plan([sequence], block_size=BLOCK, copies=((1, 2),), copy_locations=((HERE, HOST),))
    with pytest.raises(UnsupportedStepError, match="copies blocks to or from the host"):
        executor.launch(plan)


def test_memory_of_the_host_that_holds_no_block_or_cannot_be_pinned(tiny):
    with pytest.raises(ModelError, match=r"kv_host_memory is 100 bytes, but one block takes 8,192"):
        on_cuda(tiny, kv_host_memory=100)

    class Unpinnable(CpuDevice):
        def pin(self, address, num_bytes):
            raise RuntimeError("out of luck")

    with pytest.raises(ModelError, match=r"cannot be pinned for KV blocks .out of luck.; lower"):
        on_cuda(tiny, Unpinnable(), kv_host_memory=1 << 20)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "auto"), ("bfloat16", "fp8")])
def test_prefixes_come_back_from_the_host(tiny, launcher, dtype, kv_cache_dtype, steps):
    """Prompts that the device's pool cannot hold all of, twice: the second time the host has them.

    The tokens are those of an engine without blocks on the host, which computes them again.
    """
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    texts = [f"{index} of the prompts that leave the device's blocks" for index in range(6)]
    tokens = []
    for kv_host_memory in (0, 1 << 20):
        executor = on_cuda(
            tiny,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            num_kv_blocks=20,
            kv_host_memory=kv_host_memory,
        )
        with engine_on(executor, max_in_flight_steps=steps) as llm:
            for _ in range(2):
                results = llm.generate(texts, params, use_tqdm=False)
                tokens.append([result.outputs[0].token_ids for result in results])
            metrics = llm.metrics()
        copies = [launch for launch in launcher.launched if launch.kernel == "block_copy"]
        assert bool(copies) == bool(kv_host_memory)
    assert metrics["offloaded_blocks"] > 0
    assert metrics["restored_tokens"] > 0
    assert tokens == [tokens[0]] * 4


def on_cpu_with_fp8(directory):
    """The CPU's executor with the reference's attention, which takes any cache."""
    limits = {"block_size": BLOCK, "num_kv_blocks": 40, "max_num_seqs": 8}
    executor = TorchExecutor(
        TorchExecutorConfig(directory, "bfloat16", attention_backend="reference", **limits)
    )
    assert isinstance(executor._backend, ReferenceBackend)
    with torch.inference_mode():
        executor._cache = KvCache(executor.model_config, executor.kv_pool, torch.float8_e4m3fn)
    return executor


@pytest.fixture(scope="module")
def scaled(tiny, tmp_path_factory):
    """The same model, whose checkpoint has scales for caches of 8 bits, under either name."""
    directory = tmp_path_factory.mktemp("scaled")
    for path in tiny.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.0625])
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(2.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("has_scales", [False, True])
def test_tokens_with_a_cache_of_8_bits(request, prompts, launcher, has_scales):
    """With graphs and without, and nearly always those of the reference on such a cache."""
    directory = request.getfixturevalue("scaled" if has_scales else "tiny")
    tokens = []
    for enforce_eager in (False, True):
        executor = on_cuda(
            directory,
            dtype="bfloat16",
            kv_cache_dtype="fp8",
            enforce_eager=enforce_eager,
            max_num_batched_tokens=256,
        )
        assert {cache.dtype for cache in executor._flat_caches} == {torch.float8_e4m3fn}
        tokens.append(generate(executor, prompts, max_tokens=8, block_size=BLOCK))
    assert tokens[0] == tokens[1]
    assert executor.kv_pool.bytes_per_block == block_bytes(torch.float8_e4m3fn)
    launched = {launch.kernel for launch in launcher.launched}
    assert launched <= set(executor._device.loaded)
    assert sum("Fp8" in kernel for kernel in launched) == 3
    wanted = generate(on_cpu_with_fp8(directory), prompts, max_tokens=8, block_size=BLOCK)
    same = sum(a == b for a, b in zip(tokens[0], wanted, strict=True))
    assert same >= 3  # rounding may turn a choice, and all that follows it


def test_scales_are_the_checkpoints(tiny, scaled, prompts):
    """What is kept is the value over its scale: these are powers of two, so nearly exactly."""
    kept = []
    for directory in (tiny, scaled):
        executor = on_cuda(
            directory, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=256
        )
        sequences = place(prompts[3:4], max_tokens=2, block_size=BLOCK)
        run_step(executor, sequences, make_plan(sequences, block_size=BLOCK))
        kept.append([cache[:7].float() for cache in executor._flat_caches])
    (keys, values, *_), (scaled_keys, scaled_values, *_) = kept
    assert keys.abs().max() > 0.5
    # Smallest numbers are multiples of 2^-9, times the larger scale.
    assert torch.allclose(0.5 * scaled_keys, keys, rtol=0, atol=2**-10)
    assert torch.allclose(0.0625 * scaled_values, values, rtol=0, atol=2**-10)
    params = [layer.attention for layer in executor._model._layers]
    scales = [(layer.k_scale, layer.v_scale) for layer in params]
    assert scales == [(0.5, 0.0625), (2.0, 1.0)]
    assert len(params) == LAYERS


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(0.0), r"k_scale of .* is 0.0; a scale is one number above 0"),
        (torch.tensor(float("nan")), "k_scale of .* is nan"),
        (torch.tensor([1.0, 2.0]), r"k_scale of .* is of shape \[2\]"),
    ],
)
def test_a_scale_that_is_none_is_refused(scaled, tmp_path, scale, message):
    for path in scaled.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        on_cuda(tmp_path, dtype="bfloat16", kv_cache_dtype="fp8")


def test_a_cache_of_8_bits_needs_a_model_of_16(tiny):
    with pytest.raises(ModelError, match="kv_cache_dtype is 'fp8', which needs a model of 16 bits"):
        on_cuda(tiny, dtype="float32", kv_cache_dtype="fp8")
    with pytest.raises(ModelError, match="unknown kv_cache_dtype 'int8'; known are auto, fp8"):
        on_cuda(tiny, dtype="bfloat16", kv_cache_dtype="int8")

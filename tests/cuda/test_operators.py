"""torch's operators: checks, structs and launches as on a device, on the emulator; and tracing."""

from __future__ import annotations

import re

import pytest
import torch
from emulated_attention import EmulatedBackend
from emulated_device import SCHEDULES, Order, Schedule
from emulated_launcher import EmulatedLauncher, emulate
from test_arguments import VALID
from torch._subclasses import FakeTensorMode

from attention_table import CASES, CHUNK, FP8_CASES, PREFILL_CASES, TOLERANCES
from chairlift.attention import get_backend
from chairlift.attention.reference import rms_norm
from chairlift.cuda_kernels import ops
from chairlift.cuda_kernels.arguments import KernelArgumentError
from operator_backend import OperatorBackend

TABLE = CASES[::9] + PREFILL_CASES[::3]


@pytest.fixture(params=SCHEDULES, ids=str)
def launcher(request):
    launcher = EmulatedLauncher(request.param)
    emulate(launcher)
    yield launcher
    emulate(None)
    launcher.free_all()


def randn(*shape, dtype=torch.float32, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm(launcher):
    x, residual = (launcher.guard(randn(5, 72, seed=seed)) for seed in (1, 2))
    weight = launcher.guard(randn(72))
    wanted_sum = x + residual
    out = ops.rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, wanted_sum)
    assert torch.allclose(out, rms_norm(wanted_sum, weight, 1e-5), rtol=1e-5, atol=1e-6)
    alone = ops.rms_norm(x, None, weight, 1e-5)
    assert torch.allclose(alone, rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [8, 1032, 2056])  # a block of the grid takes 1,024 of float32
def test_silu_mul(launcher, width):
    x = launcher.guard(randn(3, 2 * width))
    gate, up = x.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    assert torch.allclose(ops.silu_mul(x), wanted, rtol=1e-5, atol=1e-6)


def test_block_copy(launcher):
    caches = [launcher.guard(randn(7, 2, 3, 8, seed=seed)) for seed in range(4)]
    host_caches = [launcher.guard(randn(2, 2, 3, 8, seed=9 + seed)) for seed in range(4)]
    moves = torch.tensor([[0, 3], [5, 1], [0, 6], [2, 0], [1, 4]], dtype=torch.int32)
    places = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 1], [1, 0]], dtype=torch.uint8)
    copies, locations = launcher.guard(moves), launcher.guard(places)
    everything = [*caches, *host_caches]
    addresses = launcher.guard(torch.tensor([cache.data_ptr() for cache in everything]))
    wanted = [cache.clone() for cache in everything]
    for cache, host_cache in zip(wanted[:4], wanted[4:], strict=True):
        cache[[3, 1, 6]] = cache[[0, 5, 0]]
        host_cache[0], cache[4] = cache[2], host_cache[1]
    ops.block_copy(addresses, copies, locations, caches, host_caches)
    for cache, expected in zip(everything, wanted, strict=True):
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[case.name for case in TABLE])
def test_attention_agrees_with_the_reference(number):
    """A part of the table that the kernels alone are held to, all the way through the operators."""
    case = TABLE[number]
    launcher = EmulatedLauncher(SCHEDULES[number % 3])
    emulate(launcher)
    try:
        worlds = case.world(), case.world()
        is_prefill = case.name.startswith("prefill")
        backend = OperatorBackend(launcher.guard, CHUNK, prefill=is_prefill)
        worlds[0]._implementation, worlds[1]._implementation = backend, get_backend("reference")
        found, expected = (torch.cat(world.step(case.work)).float() for world in worlds)
        assert (found - expected).abs().max().item() <= TOLERANCES[case.shape.dtype]
        for name in ("k_cache", "v_cache"):
            ours, theirs = (getattr(world, name) for world in worlds)
            assert torch.equal(ours.isnan(), theirs.isnan())
    finally:
        emulate(None)
        launcher.free_all()


@pytest.mark.parametrize("number", range(0, len(FP8_CASES), 7))
def test_caches_of_8_bits_go_through_the_operators(number):
    """As the kernels alone, to the last bit; those are held to the reference."""
    case = FP8_CASES[number]
    launcher = EmulatedLauncher(SCHEDULES[number % 3])
    emulate(launcher)
    try:
        worlds = case.world(), case.world()
        is_prefill = max(queries for _, queries in case.sequences) > 4
        worlds[0]._implementation = OperatorBackend(launcher.guard, CHUNK, prefill=is_prefill)
        worlds[1]._implementation = EmulatedBackend(SCHEDULES[0], CHUNK, is_prefill)
        found, expected = (torch.cat(world.step(case.work)) for world in worlds)
        assert torch.equal(found, expected)
        for name in ("k_cache", "v_cache"):
            ours, theirs = (getattr(world, name).view(torch.uint8) for world in worlds)
            assert torch.equal(ours, theirs)
        assert all("Fp8" in one.kernel or "combine" in one.kernel for one in launcher.launched)
    finally:
        emulate(None)
        launcher.free_all()


def on(device: str, arguments: dict) -> list:
    """Arguments whose tensors are there; blocks of the host stay on the host of a device."""

    def move(value, device):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return [move(each, device) for each in value] if isinstance(value, list) else value

    host = "cpu" if device == "cuda" else device
    return [
        move(value, host if name == "host_caches" else device) for name, value in arguments.items()
    ]


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_meta_tensors_get_shapes_and_checks(name):
    operator = getattr(torch.ops.chairlift, name)
    arguments = VALID[name]()
    result = operator(*on("meta", arguments))
    widths = {"rms_norm": (3, 16), "silu_mul": (3, 16), "kv_cache_write": (3, 4 * 64)}
    assert (result is None) == (name not in widths)
    if result is not None:
        assert result.is_meta
        assert tuple(result.shape) == widths[name]
        assert result.dtype == torch.float16
    first = next(iter(arguments))
    wrong = arguments | {first: arguments[first][..., None]}
    with pytest.raises(KernelArgumentError, match=re.escape(f"{name}: {first} has shape")):
        operator(*on("meta", wrong))


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_fake_cuda_tensors_are_traced_without_a_device(name):
    with FakeTensorMode():
        result = getattr(torch.ops.chairlift, name)(*on("cuda", VALID[name]()))
        if result is not None:
            assert result.device.type == "cuda"


def attention_arguments():
    rows = (torch.zeros(1, 2 * 64), randn(1, 2 * 64))
    caches = (randn(2, 1, 40, 64), randn(2, 1, 40, 64, seed=4))
    lists = ([0, 1], [70], [0, 2], [1, 0])
    return (*rows, *caches, *(torch.tensor(each, dtype=torch.int32) for each in lists))


def decode_arguments():
    items = torch.tensor([[0, 0, 0], [0, 1, 1]], dtype=torch.int32)
    splits = torch.tensor([[0, 0, 2]], dtype=torch.int32)
    return items, splits, 2, 64, 1, 0.1, 0.0, 0


def block_copy_arguments():
    caches = [randn(3, 1, 4, 8, seed=seed) for seed in range(4)]
    addresses = torch.tensor([cache.data_ptr() for cache in caches])
    copies = torch.tensor([[0, 2]], dtype=torch.int32)
    return addresses, copies, torch.tensor([[0, 1]], dtype=torch.uint8), caches[:2], caches[2:]


OPCHECKED = {
    "rms_norm": lambda: (randn(3, 16), randn(3, 16, seed=4), randn(16, seed=5), 1e-5),
    "silu_mul": lambda: (randn(3, 32),),
    "kv_cache_write": lambda: (
        randn(3, 4 * 64),
        *(torch.zeros(5, 1, 16, 64) for _ in range(2)),
        torch.tensor([1, 17, 33]),
        torch.tensor([1, 2, 0], dtype=torch.int32),
        *(randn(9, 32) for _ in range(2)),
        *(randn(64) for _ in range(2)),
        1e-5,
    ),
    "paged_attention_decode": lambda: (*attention_arguments(), *decode_arguments()),
    "paged_attention_prefill": lambda: (
        *(a.half() if a.is_floating_point() else a for a in attention_arguments()),
        torch.tensor([[0, 0]], dtype=torch.int32),
        *(0.1, 0.0, 0),
    ),
    "block_copy": block_copy_arguments,
    # A row of zeros is greedy and has no edits.
    **{name: VALID[name] for name in ("sampling_reset", "logit_edits", "sample", "logprobs")},
}


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_torch_finds_nothing_wrong_with_the_operators(name):
    """What they write, return and alias is what their schemas say, and they can be traced."""
    emulate(EmulatedLauncher(Schedule(Order.FORWARD, at_end=True), guards=False))
    try:
        # Blocks are copied between addresses, of which torch's own copies of the caches have none.
        tests = ("test_schema", "test_faketensor") if name == "block_copy" else None
        more = {} if tests is None else {"test_utils": tests}
        arguments = OPCHECKED[name]()
        if isinstance(arguments, dict):
            arguments = tuple(arguments.values())
        torch.library.opcheck(ops.OPERATORS[name], arguments, **more)
    finally:
        emulate(None)

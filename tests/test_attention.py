"""The CPU kernel against its specification, and the invariance that batching relies on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_cases import Shape, World
from attention_table import CASES, FP8_CASES, PREFILL_CASES
from attention_table import TOLERANCES as TABLE_TOLERANCES
from chairlift import _core
from chairlift.attention import AttentionError, AttentionParams, get_backend
from fp8_reference import OnItsCache

F32, BF16 = torch.float32, torch.bfloat16

TOLERANCES = {
    # Sums of up to 700 products of unit normals in another order: a few units in the last place.
    (F32, F32): 2e-5,
    # Keys that the two sides round to neighbouring bfloat16 values shift a score by up to 2^-8.
    (F32, BF16): 1e-2,
    # And the outputs themselves are rounded: one unit of bfloat16 is 2^-7 between 1 and 2.
    (BF16, F32): 1e-2,
    (BF16, BF16): 2e-2,
}

SHAPES = (
    [
        Shape(head_dim=head_dim, kv_heads=2, group=group, block_size=block_size)
        for head_dim, group, block_size in itertools.product(
            (64, 80, 96, 128), range(1, 9), (8, 16, 32)
        )
    ]
    + [
        Shape(head_dim=head_dim, group=group, dtype=dtype, cache_dtype=cache_dtype, norms=norms)
        for head_dim, group, norms in ((64, 3, False), (80, 1, True), (128, 4, True))
        for dtype, cache_dtype in itertools.product((F32, BF16), repeat=2)
    ]
    + [
        Shape(
            head_dim=head_dim,
            group=5,
            kv_heads=1,
            block_size=block_size,
            rotary=rotary,
            norms=norms,
        )
        for head_dim, block_size, rotary, norms in (
            (8, 1, 1.0, False),
            (24, 7, 0.0, True),
            (72, 5, 0.5, False),
            (256, 64, 0.25, True),
        )
    ]
)

LENGTHS = [1, 5, 64, 65, 130, 300, 17, 257]
"""Around tile (64) and segment (256) boundaries."""
STEPS = [
    [(2, 63), (3, 64), (4, 100), (5, 256), (6, 3), (7, 255)],
    # Decodes first, then chunks after a context, then whole prompts.
    [(2, 1), (3, 1), (7, 1), (4, 30), (5, 44), (6, 14), (0, 1), (1, 5)],
    [(7, 1)],
]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    error = (found.float() - expected.float()).abs().max().item() if found.numel() else 0.0
    assert error <= tolerance, f"{what}: max error {error:.2e} > {tolerance:.0e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_agrees_with_reference(shape):
    seed = 7
    worlds = [World(shape, LENGTHS, seed, backend) for backend in ("cpu", "reference")]
    tolerance = TOLERANCES[shape.dtype, shape.cache_dtype]
    for number, work in enumerate(STEPS):
        found, expected = (world.step(work) for world in worlds)
        for (index, count), a, b in zip(work, found, expected, strict=True):
            what = f"seed {seed}, step {number}, sequence {index} ({count} tokens)"
            assert_close(a, b, tolerance, what)
    ours, theirs = ((world.k_cache, world.v_cache) for world in worlds)
    for a, b in zip(ours, theirs, strict=True):
        # The same slots are written, and nothing else.
        assert torch.equal(a.isnan(), b.isnan())
        assert_close(a.nan_to_num(), b.nan_to_num(), tolerance, f"seed {seed}, cache")


@pytest.mark.parametrize("seed", range(8))
def test_kernel_agrees_with_reference_on_random_steps(seed):
    rng = np.random.default_rng(seed)
    shape = Shape(
        head_dim=int(rng.choice([64, 80, 96, 128])),
        kv_heads=int(rng.integers(1, 4)),
        group=int(rng.integers(1, 9)),
        block_size=int(rng.choice([8, 16, 32, 13])),
        norms=bool(rng.integers(2)),
    )
    lengths = rng.integers(1, 600, size=int(rng.integers(1, 5))).tolist()
    steps = random_steps(rng, lengths)
    found = World(shape, lengths, seed).run(steps)
    expected = World(shape, lengths, seed, "reference").run(steps)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(a, b, TOLERANCES[F32, F32], f"seed {seed}, {shape}, sequence {index}")


def random_steps(rng: np.random.Generator, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Cut all sequences into chunks of random sizes and mix them into steps, decodes first."""
    left = list(lengths)
    steps = []
    while any(left):
        work = []
        for index in rng.permutation(len(left)).tolist():
            if left[index] and (rng.random() < 0.7 or not work):
                largest = int(rng.choice([1, 1, 20, 300]))
                count = min(left[index], int(rng.integers(1, largest + 1)))
                left[index] -= count
                work.append((index, count))
        steps.append(sorted(work, key=lambda item: item[1] != 1))
    return steps


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(dtype=BF16, cache_dtype=BF16),
        Shape(head_dim=80, group=4, kv_heads=1, block_size=8, norms=True),
        Shape(head_dim=128, group=8, kv_heads=2, dtype=BF16, cache_dtype=F32),
    ],
    ids=str,
)
def test_rows_do_not_depend_on_batch_chunks_or_threads(shape):
    lengths = [540, 33, 256, 1]
    alone = []
    for index, length in enumerate(lengths):
        alone.append(World(shape, lengths, 3).run([[(index, length)]])[index])
    everything = list(enumerate(lengths))
    ways = {"all at once": [everything]}
    for chunk in (16, 64, 100):
        ways[f"chunks of {chunk}"] = [
            [(i, min(chunk, n - at)) for i, n in everything if at < n]
            for at in range(0, max(lengths), chunk)
        ]
    for seed in range(3):
        ways[f"random {seed}"] = random_steps(np.random.default_rng(seed), lengths)
    # The last 40 tokens one by one, beside others that do the same.
    ways["decoding"] = [[(i, n - min(40, n - 1)) for i, n in everything if n > 1]]
    ways["decoding"] += [
        [(i, 1) for i, n in everything if at < max(1, min(40, n - 1))] for at in range(40)
    ]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for way, steps in ways.items():
                outputs = World(shape, lengths, 3).run(steps)
                for index, (a, b) in enumerate(zip(outputs, alone, strict=True)):
                    assert torch.equal(a, b), f"{way}, {count} threads, sequence {index}"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("instruction_set", ["avx2", "scalar"])
@pytest.mark.parametrize("cache_dtype", [F32, BF16])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_other_instruction_sets_agree_with_reference(instruction_set, cache_dtype, head_dim):
    """Paths that this machine would not take by itself; older ones and Arm do."""
    shape = Shape(head_dim=head_dim, dtype=cache_dtype, cache_dtype=cache_dtype, norms=True)
    lengths = [65, 300]
    steps = [[(0, 65), (1, 270)]] + [[(1, 1)] for _ in range(30)]
    expected = World(shape, lengths, 9, "reference").run(steps)
    _core.limit_instruction_set(instruction_set)
    try:
        found = World(shape, lengths, 9).run(steps)
        at_once = World(shape, lengths, 9).run([[(0, 65), (1, 300)]])
    finally:
        _core.limit_instruction_set("best")
    for a, b, c in zip(found, expected, at_once, strict=True):
        assert_close(a, b, TOLERANCES[cache_dtype, cache_dtype], f"seed 9, {instruction_set}")
        assert torch.equal(a, c)


def test_rows_do_not_depend_on_block_size_or_placement():
    lengths = [300, 65]
    outputs = []
    for block_size in (8, 16, 32, 40):
        world = World(Shape(block_size=block_size), lengths, 5)
        for sequence in world.sequences:
            # The pool's size changes what the generator draws; the inputs shall not change.
            generator = torch.Generator().manual_seed(len(sequence.qkv))
            sequence.qkv = torch.randn(sequence.qkv.shape, generator=generator)
        outputs.append(torch.cat(world.run([[(0, 300), (1, 65)]])))
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


def test_nan_stays_in_its_sequence():
    world = World(Shape(), [100, 100], 1)
    world.sequences[0].qkv[50] = float("nan")
    clean = World(Shape(), [100, 100], 1)
    poisoned, expected = (w.run([[(0, 100), (1, 100)]]) for w in (world, clean))
    assert poisoned[0][50:].isnan().all()
    assert torch.equal(poisoned[1], expected[1])


def test_large_scores_do_not_overflow():
    world = World(Shape(), [70], 2)
    world.sequences[0].qkv[:, : 12 * 64] *= 1e4
    reference = World(Shape(), [70], 2, "reference")
    reference.sequences[0].qkv[:, : 12 * 64] *= 1e4
    found, expected = (w.run([[(0, 70)]])[0] for w in (world, reference))
    assert_close(found, expected, 1e-4, "one-hot weights")


def test_an_empty_step_is_legal():
    world = World(Shape(), [3], 1)
    metadata = world._implementation.prepare(world.plan([]))
    qkv = torch.empty(0, world.params.qkv_width)
    out = world._implementation.forward(qkv, world.k_cache, world.v_cache, metadata, world.params)
    assert out.shape == (0, 9 * 64)


class TestRefusals:
    """Every argument that does not fit is refused with its numbers, before anything is written."""

    @pytest.fixture
    def world(self):
        return World(Shape(), [20, 5], 1)

    def forward(self, world, **changes):
        metadata = world._implementation.prepare(world.plan([(0, 20), (1, 5)]))
        arguments = {
            "qkv": torch.cat([sequence.qkv for sequence in world.sequences]),
            "k_cache": world.k_cache,
            "v_cache": world.v_cache,
            "metadata": metadata,
            "params": world.params,
        }
        world._implementation.forward(**(arguments | changes))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"qkv": torch.zeros(24, 960)}, r"\(24, 960\).*\[25, 960\]"),
            ({"qkv": torch.zeros(25, 961)}, r"\(25, 961\)"),
            ({"qkv": torch.zeros(25, 960, dtype=torch.float64)}, "float64"),
            ({"qkv": torch.zeros(25, 960).half()}, "queries of float16 and caches of float32"),
            ({"qkv": torch.zeros(960, 25).T}, "contiguous"),
            ({"k_cache": torch.zeros(6, 3, 16, 65)}, r"65\)"),
            ({"k_cache": torch.zeros(6, 3, 16, 64, dtype=BF16)}, "both caches"),
            ({"v_cache": torch.zeros(5, 3, 16, 64)}, "differs"),
            ({"v_cache": torch.zeros(6, 3, 64, 16).transpose(2, 3)}, "contiguous"),
        ],
    )
    def test_tensors(self, world, change, message):
        with pytest.raises(AttentionError, match=message):
            self.forward(world, **change)
        assert world.k_cache.isnan().all()

    def test_a_small_cache(self, world):
        small = torch.zeros(1, 3, 16, 64)
        with pytest.raises(AttentionError, match="beyond the cache of 1 blocks"):
            self.forward(world, k_cache=small, v_cache=small.clone())

    def test_positions_beyond_the_tables(self, world):
        cos, sin = (table[:10].contiguous() for table in world.params.cos_sin)
        params = AttentionParams(9, 3, 64, 0.125, (cos, sin))
        with pytest.raises(AttentionError, match="position 19 is beyond"):
            self.forward(world, params=params)

    def test_metadata_of_another_backend(self, world):
        metadata = get_backend("reference").prepare(world.plan([(0, 20), (1, 5)]))
        with pytest.raises(AttentionError, match="another"):
            self.forward(world, metadata=metadata)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"num_heads": 8},
            {"num_kv_heads": 0},
            {"head_dim": 20},
            {"cos_sin": (torch.zeros(4, 32), torch.zeros(4, 31))},
            {"cos_sin": (torch.zeros(4, 33), torch.zeros(4, 33))},
            {"cos_sin": (torch.zeros(4, 32, dtype=BF16), torch.zeros(4, 32, dtype=BF16))},
            {"q_norm": torch.zeros(63)},
        ],
        ids=str,
    )
    def test_params(self, arguments):
        good = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "scale": 1.0, "cos_sin": None}
        AttentionParams(**good)
        with pytest.raises(AttentionError):
            AttentionParams(**(good | arguments))

    def test_contradictory_plan(self, world):
        plan = world.plan([(0, 20)])
        plan.seq_lens = np.array([19], np.int32)
        with pytest.raises(AttentionError, match="20 query tokens but a context of 19"):
            world._implementation.prepare(plan)

    def test_unknown_backend(self):
        with pytest.raises(AttentionError, match="known are cpu, reference"):
            get_backend("flash")


def test_the_kernels_share_torchs_threads():
    assert _core.kernel_pool() == "openmp"


class TestTable:
    """The table that the CUDA kernels are proven on."""

    cases = CASES + PREFILL_CASES

    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_kernel_agrees_with_reference(self, case):
        worlds = [case.world(), case.world()]
        worlds[1]._implementation = get_backend("reference")
        found, expected = (torch.cat(world.step(case.work)) for world in worlds)
        tolerance = TABLE_TOLERANCES[case.shape.dtype]
        assert_close(found, expected, tolerance, case.name)
        for a, b in zip(*((world.k_cache, world.v_cache) for world in worlds), strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert_close(a.nan_to_num(), b.nan_to_num(), tolerance, f"{case.name}, cache")

    @pytest.mark.parametrize("case", FP8_CASES, ids=[case.name for case in FP8_CASES])
    def test_caches_of_8_bits_agree_with_reference(self, case):
        worlds, backend = (case.world(), case.world()), OnItsCache()
        found = torch.cat(worlds[0].step(case.work))
        backend.caches = worlds[0].k_cache, worlds[0].v_cache
        worlds[1]._implementation = backend
        expected = torch.cat(worlds[1].step(case.work))
        assert_close(found, expected, TABLE_TOLERANCES[case.shape.dtype], case.name)

    @pytest.mark.parametrize("window", [1, 40, 64, 100, 300])
    def test_rows_with_a_window_do_not_depend_on_chunks_or_threads(self, window):
        """Windows that begin in every place of a tile and leave whole segments behind."""
        lengths = [700, 90]
        shape = Shape(head_dim=64, kv_heads=1, group=3)
        ways = [
            [[(0, 700)], [(1, 90)]],
            [[(1, 64), (0, 300)], [(1, 26), (0, 400)]],
            [[(0, 690), (1, 80)], *[[(0, 1), (1, 1)]] * 10],
        ]
        results = []
        threads = torch.get_num_threads()
        try:
            for number, steps in enumerate(ways):
                torch.set_num_threads(1 + number)
                world = World(shape, lengths, 6)
                world.params = replace(world.params, window=window, soft_cap=3.0)
                results.append(world.run(steps))
        finally:
            torch.set_num_threads(threads)
        reference = World(shape, lengths, 6, "reference")
        reference.params = replace(reference.params, window=window, soft_cap=3.0)
        for found, expected in zip(results[0], reference.run(ways[0]), strict=True):
            assert_close(found, expected, TOLERANCES[F32, F32], f"window {window}")
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b)

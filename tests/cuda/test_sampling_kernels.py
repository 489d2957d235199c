"""The sampling kernels on the emulated device against the reference sampler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_device import SCHEDULES, EmulatedDevice, KernelLibrary, Schedule
from emulated_sampler import EmulatedSampler, tell_logprobs

from chairlift.executor import STATUS_FAILED, STATUS_OK
from chairlift.sampler.reference import ReferenceRow, philox, sample
from sampling_cases import NEAR, check_logprobs, random_row, resets

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VOCAB_SIZES = (1, 2, 17, 64, 100, 1000, 5003)


class Samplers:
    """One sampler for each schedule; what they say must be the same to the last bit."""

    def __init__(self, rows: list[ReferenceRow], vocab_size: int, schedules=SCHEDULES) -> None:
        self.samplers = [EmulatedSampler(len(rows), vocab_size, each) for each in schedules]
        self.reset(dict(enumerate(rows)))

    def reset(self, rows: dict[int, ReferenceRow]) -> None:
        for sampler in self.samplers:
            sampler.reset(resets(rows))

    def sample(self, logits: torch.Tensor, index: int = 0, rows=None, logits_rows=None):
        numbers = np.array(range(len(logits)) if rows is None else rows, np.int32)
        indices = np.full(len(numbers), index, np.int32)
        outputs = [s.sample(logits, numbers, indices, logits_rows) for s in self.samplers]
        for other in outputs[1:]:
            assert (other.token_ids == outputs[0].token_ids).all()
            assert (other.statuses == outputs[0].statuses).all()
            if outputs[0].logprobs is not None:
                for name in ("offsets", "token_ids", "values"):
                    ours, theirs = (getattr(o.logprobs, name) for o in (outputs[0], other))
                    assert np.array_equal(ours, theirs)
        for sampler in self.samplers:
            assert sampler.last_tokens[numbers].tolist() == outputs[0].token_ids.tolist()
        return outputs[0]


@pytest.mark.parametrize("seed", range(14))
def test_kernels_agree_with_the_reference(seed):
    """Six steps of eight rows of all kinds, in another order each time."""
    rng = np.random.default_rng(seed)
    vocab_size = VOCAB_SIZES[seed % len(VOCAB_SIZES)]
    rows = [random_row(rng, vocab_size) for _ in range(8)]
    samplers = Samplers(rows, vocab_size)
    decided = 0
    for step in range(6):
        logits = torch.tensor(rng.normal(0, rng.choice([0.3, 2, 8]), (8, vocab_size)))
        logits = logits.to(rng.choice(DTYPES))
        order = rng.permutation(8).tolist()
        output = samplers.sample(logits, step, order)
        for i, number in enumerate(order):
            where = f"seed {seed}, step {step}, row {number}: {rows[number]}"
            expected = sample(logits[i].double().numpy(), rows[number], step)
            assert expected is not None, where
            assert output.statuses[i] == STATUS_OK, where
            found = int(output.token_ids[i])
            if min(expected.margin, expected.cut_margin) > NEAR:
                decided += 1
                assert found == expected.token_id, where
                check_logprobs(output.logprobs, i, expected.logprobs, where)
            rows[number].output_ids.append(found)
    assert decided >= 16  # of 48: most samples were clear cut


@pytest.mark.parametrize(
    "row",
    [
        ReferenceRow(temperature=0.7, top_k=20, top_p=0.8),
        ReferenceRow(temperature=1.0, top_p=0.95),
        ReferenceRow(temperature=1.0),
        ReferenceRow(temperature=1.5, min_p=0.02),
        ReferenceRow(logprobs=20),
    ],
    ids=str,
)
def test_a_large_vocabulary(row):
    vocab_size = 70_001
    rng = np.random.default_rng(8)
    logits = torch.tensor(rng.normal(0, 2.5, (4, vocab_size))).bfloat16()
    rows = [replace(row, seed=seed) for seed in range(4)]
    output = Samplers(rows, vocab_size, SCHEDULES[1:2]).sample(logits)
    decided = 0
    for i, each in enumerate(rows):
        expected = sample(logits[i].double().numpy(), each, 0)
        # Of so many tokens one is always near the cut, but none of them wins.
        if expected.margin > NEAR:
            decided += 1
            assert output.token_ids[i] == expected.token_id
            check_logprobs(output.logprobs, i, expected.logprobs, str(i))
    assert decided >= 2


@pytest.mark.parametrize("row", [{"top_p": 0.01}, {"top_p": 0.3, "min_p": 0.2}, {"top_k": 3}])
def test_cuts_that_leave_little_of_flat_logits(row):
    """Where most of the weight is cut, the first winners are not among those that stay."""
    logits = torch.tensor(np.random.default_rng(1).normal(0, 0.1, (1, 3000))).float()
    tokens = []
    for seed in range(40):
        each = ReferenceRow(temperature=1.0, seed=seed, **row)
        found = Samplers([each], 3000, SCHEDULES[seed % 3 :][:1]).sample(logits).token_ids[0]
        expected = sample(logits[0].double().numpy(), each, 0)
        if min(expected.margin, expected.cut_margin) > 1e-6:
            assert found == expected.token_id, seed
            tokens.append(int(found))
    assert len(tokens) > 20
    assert len(set(tokens)) >= 3


class TestNoise:
    BODY = """
#include "noise.cuh"
struct Params { const unsigned* in; float* noise; unsigned* words; };
__global__ void noise(const Params params) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    params.noise[i] = gumbel(params.in[i]);
    const Stream stream{(0x89abcdefull << 32) + 17, 3, 77};
    params.words[i] = philox(stream, noise_block(i)).words[noise_word(i)];
}
"""

    def test_noise_follows_the_formula(self):
        import ctypes  # noqa: PLC0415

        class Params(ctypes.Structure):
            _fields_ = tuple((name, ctypes.c_void_p) for name in ("in_", "noise", "words"))

        rng = np.random.default_rng(3)
        edges = [0, 1, 2, 2**16, 2**24 - 1, 2**24, 2**31, 2**32 - 2, 2**32 - 1]
        bits = np.concatenate((edges, rng.integers(0, 2**32, 4096 - len(edges)))).astype(np.uint32)
        like = torch.tensor(bits.view(np.int32))
        with EmulatedDevice(KernelLibrary(self.BODY, ["noise"]), SCHEDULES[0]) as device:
            noise, words = (device.upload(name, like) for name in ("noise", "words"))
            params = Params(device.upload("in", like), noise, words)
            device.launch("noise", (4, 1, 1), 1024, params)
            found = device.download(noise, like).view(torch.float32).double().numpy()
            words = device.download(words, like).numpy().view(np.uint32)
        exact = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))
        # Where 1 - v has few bits left the noise is far below zero, and its token never wins.
        above = exact > -1.5
        assert above.sum() > 3900
        np.testing.assert_allclose(found[above], exact[above], atol=2e-6, rtol=2e-7)
        assert ((found[~above] < -1.49) & (found[~above] > -3.2)).all()
        assert found.max() < 22.9
        ids = np.arange(4096)
        blocks = (ids // 64 * 16 + ids % 16).astype(np.uint64)
        of_blocks = philox(blocks, 77, 3, (0x89ABCDEF << 32) + 17)
        assert (words == of_blocks[ids // 16 % 4, ids]).all()


class TestIndependence:
    vocab_size = 3000
    kinds = (
        ReferenceRow(temperature=1.0, seed=11),
        ReferenceRow(temperature=0.9, top_k=40, seed=11),
        ReferenceRow(temperature=1.5, top_p=0.9, seed=12),
        ReferenceRow(temperature=0.8, min_p=0.05, seed=13, repetition_penalty=1.2),
        ReferenceRow(frequency_penalty=0.5, presence_penalty=0.3, logprobs=2),
    )

    @pytest.fixture
    def logits(self):
        generator = torch.Generator().manual_seed(4)
        return torch.randn(len(self.kinds), self.vocab_size, generator=generator) * 3

    def samplers(self, rows):
        return Samplers(list(rows), self.vocab_size, SCHEDULES[:1])

    def test_of_the_batch(self, logits):
        together = self.samplers(self.kinds).sample(logits)
        for i, row in enumerate(self.kinds):
            alone = self.samplers([row]).sample(logits[i : i + 1])
            assert alone.token_ids[0] == together.token_ids[i]

    def test_of_preemption(self, logits):
        """A row that is reset with its ids so far goes on as if nothing had happened."""
        steady = self.samplers(self.kinds)
        outputs = [steady.sample(logits.roll(step, 1), step).token_ids for step in range(6)]
        for pause in (1, 3, 5):
            rows = [
                replace(row, output_ids=[int(o[i]) for o in outputs[:pause]])
                for i, row in enumerate(self.kinds)
            ]
            resumed = self.samplers(rows)
            for step in range(pause, 6):
                assert (resumed.sample(logits.roll(step, 1), step).token_ids == outputs[step]).all()

    def test_of_who_had_the_row_before(self, logits):
        first = ReferenceRow(
            frequency_penalty=2.0,
            prompt_ids=[1, 2, 2],
            output_ids=[5],
            bias=dict.fromkeys(range(300), 50.0),
            min_tokens=9,
            suppressed_ids=list(range(400)),
        )
        used = self.samplers([first] * len(self.kinds))
        used.sample(logits)
        used.reset(dict(enumerate(self.kinds)))
        fresh = self.samplers(self.kinds)
        for step in range(3):
            ours, theirs = (s.sample(logits.roll(step, 1), step) for s in (used, fresh))
            assert (ours.token_ids == theirs.token_ids).all()

    def test_children_share_a_row_of_logits(self, logits):
        rows = [ReferenceRow(temperature=1.0, seed=3, child=child) for child in range(5)]
        shared = self.samplers(rows).sample(
            logits[:2], rows=range(5), logits_rows=np.array([1, 1, 1, 1, 0], np.int32)
        )
        apart = self.samplers(rows).sample(logits[[1, 1, 1, 1, 0]])
        assert (shared.token_ids == apart.token_ids).all()
        assert len(set(shared.token_ids.tolist())) > 2


def one(row: ReferenceRow, logits: list[float], index: int = 0, schedules=SCHEDULES[:1]) -> int:
    """The token of a single sample."""
    output = Samplers([row], len(logits), schedules).sample(torch.tensor([logits]), index)
    assert output.statuses[0] == STATUS_OK
    return int(output.token_ids[0])


class TestEdges:
    def test_greedy_ties_go_to_the_lowest_id(self):
        assert one(ReferenceRow(), [0.0, 2.0, 1.0, 2.0], schedules=SCHEDULES) == 1
        assert one(ReferenceRow(), [0.0, -0.0]) == 0
        assert one(ReferenceRow(), [-0.0, 0.0]) == 0

    def test_tiny_temperatures_are_greedy(self):
        for temperature in (1e-6, 1e-30, 9e-6):
            assert one(ReferenceRow(temperature=temperature), [1.0, 1.000001, 0.5]) == 1

    def test_top_k_of_one_and_tiny_top_p_take_the_best(self):
        for seed, cut in itertools.product(
            range(5), ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0})
        ):
            row = ReferenceRow(temperature=5.0, seed=seed, **cut)
            assert one(row, [0.0, 0.1, 0.3, 0.2]) == 2

    def test_top_k_above_the_vocabulary_keeps_all(self):
        logits = np.linspace(0, 1, 50).tolist()
        for seed in range(5):
            token = one(ReferenceRow(temperature=1.0, seed=seed), logits)
            for top_k in (50, 10**9, 2**40):
                assert token == one(ReferenceRow(temperature=1, seed=seed, top_k=top_k), logits)

    def test_ties_at_the_cut_go_to_the_lowest_ids(self):
        logits = [1.0] * 3000
        drawn = {one(ReferenceRow(temperature=1, seed=s, top_k=3), logits) for s in range(40)}
        assert drawn == {0, 1, 2}
        drawn = {one(ReferenceRow(temperature=1, seed=s, top_p=0.00099), logits) for s in range(40)}
        assert drawn == {0, 1, 2}

    def test_extreme_temperatures(self):
        for temperature in (1.1e-5, 1.0, 1e30):
            row = ReferenceRow(temperature=temperature, seed=3)
            assert one(row, [3e38, -3e38, 2.9e38]) in (0, 1, 2)

    def test_logits_of_minus_infinity_are_never_drawn(self):
        logits = [float("-inf")] * 200
        logits[150], logits[77] = 1.0, 0.5
        for seed, cut in itertools.product(range(8), ({}, {"top_k": 5}, {"top_p": 0.99999})):
            row = ReferenceRow(temperature=9.0, seed=seed, logprobs=3, **cut)
            assert one(row, logits) in (77, 150)

    def test_min_tokens_suppresses_until_enough(self):
        row = ReferenceRow(min_tokens=2, suppressed_ids=[1])
        assert [one(row, [0.5, 2.0, 1.0], index) for index in range(4)] == [2, 2, 1, 1]

    def test_bias_can_force_and_forbid(self):
        assert one(ReferenceRow(bias={2: 100.0}), [3.0, 2.0, -50.0]) == 2
        assert one(ReferenceRow(bias={0: -np.inf}), [3.0, 2.0, 1.0]) == 1

    def test_edits_follow_their_order(self):
        """As the CPU's sampler in its own test: bias, suppression, repetition, the other two."""
        row = ReferenceRow(
            repetition_penalty=2.0,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            min_tokens=2,
            prompt_ids=[0, 1],
            output_ids=[1, 2, 2],
            bias={0: 3.0, 4: 1.0},
            suppressed_ids=[4],
        )
        sampler = Samplers([row], 5, SCHEDULES[:1]).samplers[0]
        inputs = {
            "logits": torch.tensor([[-1.0, -1.0, 4.0, 4.0, 4.0]]),
            "sample_rows": torch.tensor([0], dtype=torch.int32),
            "output_indices": torch.tensor([1], dtype=torch.int32),
        }
        edited = sampler._edit(inputs, "logit_edits<float>")[0].tolist()
        assert edited == [1.0, -2.75, 1.0, 4.0, -np.inf]

    def test_prompt_counts_for_repetition_only(self):
        logits = [2.0, 1.5]
        assert one(ReferenceRow(repetition_penalty=2.0, prompt_ids=[0]), logits) == 1
        assert one(ReferenceRow(presence_penalty=2.0, prompt_ids=[0]), logits) == 0
        assert one(ReferenceRow(frequency_penalty=2.0, prompt_ids=[0]), logits) == 0

    def test_history_counts_sampled_tokens_on_the_device(self):
        """Across the border of the parts of the vocabulary that blocks edit and reset."""
        logits = torch.full((1, 9000), -10.0)
        logits[0, [4095, 4096, 8192]] = torch.tensor([2.0, 1.5, 1.2])
        samplers = Samplers([ReferenceRow(frequency_penalty=0.6)], 9000)
        tokens = [int(samplers.sample(logits, step).token_ids[0]) for step in range(6)]
        assert tokens == [4095, 4096, 4095, 8192, 4096, 4095]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), None])
    def test_a_bad_row_fails_alone(self, dtype, bad):
        rows = [
            ReferenceRow(frequency_penalty=1.0),
            ReferenceRow(temperature=1.0, seed=1, logprobs=2),
            ReferenceRow(temperature=1.0, seed=2, top_p=0.9),
        ]
        logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
        clean = Samplers(rows, 500, SCHEDULES[:1]).sample(logits)
        assert (clean.statuses == STATUS_OK).all()
        for victim in range(3):
            broken = logits.clone()
            if bad is None:
                broken[victim] = float("-inf")
            else:
                broken[victim, 321] = bad
            samplers = Samplers(rows, 500, SCHEDULES[:1])
            output = samplers.sample(broken)
            healthy = [i for i in range(3) if i != victim]
            assert output.statuses[victim] == STATUS_FAILED
            assert output.token_ids[victim] == 0
            assert (output.statuses[healthy] == STATUS_OK).all()
            assert (output.token_ids[healthy] == clean.token_ids[healthy]).all()
            counted = samplers.samplers[0].state["row_counts"][0].sum()
            assert counted == (victim != 0)

    def test_everything_suppressed_fails_the_row(self):
        samplers = Samplers([ReferenceRow(min_tokens=1, suppressed_ids=[0, 1])], 2)
        assert samplers.sample(torch.zeros(1, 2)).statuses[0] == STATUS_FAILED
        assert samplers.sample(torch.zeros(1, 2), 1).statuses[0] == STATUS_OK

    def test_logprobs_are_of_the_raw_logits(self):
        row = ReferenceRow(temperature=0.5, bias={0: 50.0}, logprobs=3, top_k=1)
        output = Samplers([row], 4).sample(torch.tensor([[0.0, 1.0, 2.0, 1.0]]))
        check_logprobs(
            output.logprobs,
            0,
            [(i, i % 2 + 2 * (i == 2) - np.log(1 + 2 * np.e + np.e**2)) for i in (0, 2, 1, 3)],
            "raw",
        )

    def test_a_row_whose_nan_is_edited_away_fails_where_logprobs_are_wanted(self):
        logits = torch.tensor([[float("nan"), 1.0, 2.0]])
        row = ReferenceRow(min_tokens=1, suppressed_ids=[0])
        for logprobs, status in ((-1, STATUS_OK), (1, STATUS_FAILED)):
            output = Samplers([replace(row, logprobs=logprobs)], 3).sample(logits)
            assert output.statuses[0] == status


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_of_given_tokens(schedule: Schedule, dtype):
    """As prompts are scored: other rows of logits than tokens, some of which want nothing."""
    rng = np.random.default_rng(2)
    logits = torch.tensor(rng.normal(0, 4, (4, 3001))).to(dtype)
    logits[0] = logits[0].round()  # ties
    rows = np.array([0, 3, 0, 1, 2, 0], np.int32)
    tokens = rng.integers(0, 3001, 6).astype(np.int32)
    num_best = np.array([7, 0, -1, 1, 900, 64], np.int32)
    found, failed = tell_logprobs(logits, tokens, num_best, logits_rows=rows, schedule=schedule)
    assert not failed.any()
    for i, row in enumerate(rows):
        values = logits[row].double().numpy()
        values = values - np.log(np.exp(values).sum())
        order = np.lexsort((np.arange(3001), -values))[: max(num_best[i], 0)]
        ids = [int(tokens[i]), *order.tolist()] if num_best[i] >= 0 else []
        check_logprobs(found, i, [(t, values[t]) for t in ids], f"row {i}")

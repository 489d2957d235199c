"""The sampler against its specification, its distribution, and what must never change a draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chairlift import _core
from chairlift.executor import STATUS_FAILED, STATUS_OK
from chairlift.sampler import Sampler, SamplerError
from chairlift.sampler.reference import ReferenceRow, philox, sample
from sampling_cases import NEAR, check_logprobs, random_row, resets


def make(rows: list[ReferenceRow], vocab_size: int) -> Sampler:
    sampler = Sampler(len(rows), vocab_size)
    sampler.reset(resets(dict(enumerate(rows))))
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, index: int = 0, rows: list[int] | None = None):
    rows = list(range(len(logits))) if rows is None else rows
    indices = np.full(len(rows), index, np.int32)
    return sampler.sample(logits, np.array(rows, np.int32), indices)


def one(row: ReferenceRow, logits: list[float], index: int = 0) -> int:
    """The token of a single sample."""
    output = draw(make([row], len(logits)), torch.tensor([logits]), index)
    assert output.statuses[0] == STATUS_OK
    return int(output.token_ids[0])


@pytest.fixture(params=["best", "avx2", "scalar"])
def instruction_set(request):
    _core.limit_instruction_set(request.param)
    yield request.param
    _core.limit_instruction_set("best")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("instruction_set")
def test_sampler_agrees_with_reference(seed):
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([1, 2, 17, 64, 100, 1000, 5003]))
    rows = [random_row(rng, vocab_size) for _ in range(8)]
    sampler = make(rows, vocab_size)
    decided = 0
    for step in range(6):
        logits = torch.tensor(rng.normal(0, rng.choice([0.3, 2, 8]), (8, vocab_size)))
        logits = logits.to(rng.choice([torch.float32, torch.bfloat16]))
        before = logits.clone()
        order = rng.permutation(8).tolist()
        margins = np.empty(8, np.float32)
        indices = np.full(8, step, np.int32)
        output = sampler.sample(logits, np.array(order, np.int32), indices, margins=margins)
        assert torch.equal(logits, before)
        for i, number in enumerate(order):
            where = f"seed {seed}, step {step}, row {number}: {rows[number]}"
            expected = sample(logits[i].double().numpy(), rows[number], step)
            assert expected is not None, where
            found = int(output.token_ids[i])
            if min(expected.margin, expected.cut_margin) > NEAR:
                decided += 1
                assert found == expected.token_id, where
                if rows[number].temperature == 0 or expected.margin < np.inf:
                    assert margins[i] == pytest.approx(expected.margin, abs=NEAR), where
                check_logprobs(output.logprobs, i, expected.logprobs, where)
            rows[number].output_ids.append(found)
    assert decided >= 16  # of 48: most samples were clear cut


@pytest.mark.parametrize(
    "row",
    [
        ReferenceRow(temperature=1.0),
        ReferenceRow(temperature=0.7, top_k=6),
        ReferenceRow(temperature=1.3, top_p=0.8),
        ReferenceRow(temperature=1.0, min_p=0.1),
    ],
    ids=["all", "top-k", "top-p", "min-p"],
)
def test_frequencies_follow_the_distribution(row):
    """Chi-square over 40,000 draws, of several seeds, children and output indices."""
    vocab_size, draws = 80, 40_000
    logits = np.sin(np.arange(vocab_size) * 1.7) * 3
    rows = [
        ReferenceRow(**{**vars(row), "seed": 1000 + seed, "child": seed % 3}) for seed in range(40)
    ]
    sampler = make(rows, vocab_size)
    batch = torch.tensor(np.tile(logits, (40, 1)), dtype=torch.float32)
    counts = np.zeros(vocab_size)
    for index in range(draws // 40):
        np.add.at(counts, draw(sampler, batch, index).token_ids, 1)

    probabilities = np.exp((logits - logits.max()) / row.temperature)
    order = np.argsort(-probabilities)
    keep = np.ones(vocab_size, bool)
    if row.top_k:
        keep[order[row.top_k :]] = False
    if row.min_p:
        keep &= probabilities >= row.min_p
    if row.top_p < 1:
        total = probabilities.sum()
        keep[order] &= np.cumsum(probabilities[order]) - probabilities[order] < row.top_p * total
    assert counts[~keep].sum() == 0
    expected = np.where(keep, probabilities, 0)
    expected *= draws / expected.sum()
    enough = expected >= 5
    chi_square = ((counts[enough] - expected[enough]) ** 2 / expected[enough]).sum()
    freedom = enough.sum() - 1
    # Mean plus five standard deviations of the chi-square distribution; the draws are fixed.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_philox_gives_the_authors_known_answers():
    zero = np.zeros(1, np.uint64)
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(zero, 0, 0, 0)[:, 0].tolist() == expected


class TestIndependence:
    """A draw depends on its own logits, parameters, history, seed and output index alone."""

    vocab_size = 3000
    kinds = (
        ReferenceRow(temperature=1.0, seed=11),
        ReferenceRow(temperature=0.9, top_k=40, seed=11),
        ReferenceRow(temperature=1.5, top_p=0.9, seed=12),
        ReferenceRow(temperature=0.8, min_p=0.05, seed=13, repetition_penalty=1.2),
        ReferenceRow(),
    )

    @pytest.fixture
    def logits(self):
        generator = torch.Generator().manual_seed(4)
        return torch.randn(len(self.kinds), self.vocab_size, generator=generator) * 3

    def test_of_the_batch_and_the_threads(self, logits):
        threads = torch.get_num_threads()
        together = []
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                sampler = make(list(self.kinds) * 20, self.vocab_size)
                tokens = draw(sampler, logits.repeat(20, 1)).token_ids
                together.append(tokens.reshape(20, -1))
        finally:
            torch.set_num_threads(threads)
        for i, row in enumerate(self.kinds):
            alone = draw(make([row], self.vocab_size), logits[i : i + 1]).token_ids[0]
            assert all((tokens[:, i] == alone).all() for tokens in together), row

    def test_of_preemption(self, logits):
        """A row that is reset with its ids so far goes on as if nothing had happened."""
        steady = make(list(self.kinds), self.vocab_size)
        outputs = [draw(steady, logits.roll(step, 1), step).token_ids for step in range(8)]
        for pause in range(1, 8):
            rows = [
                ReferenceRow(**{**vars(row), "output_ids": [int(o[i]) for o in outputs[:pause]]})
                for i, row in enumerate(self.kinds)
            ]
            resumed = make(rows, self.vocab_size)
            for step in range(pause, 8):
                tokens = draw(resumed, logits.roll(step, 1), step).token_ids
                assert (tokens == outputs[step]).all()

    def test_but_on_seed_child_and_index(self, logits):
        row = self.kinds[0]
        changes = [{}, {"seed": 12}, {"seed": 11 + 2**32}, {"child": 1}]
        rows = [ReferenceRow(**{**vars(row), **change}) for change in changes]
        sampler = make(rows, self.vocab_size)
        flat = torch.zeros(len(rows), self.vocab_size)
        tokens = [draw(sampler, flat, index).token_ids.tolist() for index in range(3)]
        assert len({token for row in tokens for token in row}) == 12

    def test_of_the_dtype(self, logits):
        rounded = logits.bfloat16()
        narrow = draw(make(list(self.kinds), self.vocab_size), rounded)
        wide = draw(make(list(self.kinds), self.vocab_size), rounded.float())
        assert (narrow.token_ids == wide.token_ids).all()


class TestEdges:
    def test_greedy_ties_go_to_the_lowest_id(self):
        assert one(ReferenceRow(), [0.0, 2.0, 1.0, 2.0]) == 1
        assert one(ReferenceRow(), [0.0, -0.0]) == 0

    def test_tiny_temperatures_are_greedy(self):
        """C02."""
        for temperature in (1e-6, 1e-30, 9e-6):
            assert one(ReferenceRow(temperature=temperature), [1.0, 1.000001, 0.5]) == 1

    def test_top_k_of_one_and_tiny_top_p_take_the_best(self):
        for seed in range(20):
            for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
                row = ReferenceRow(temperature=5.0, seed=seed, **cut)
                assert one(row, [0.0, 0.1, 0.3, 0.2]) == 2

    def test_top_k_above_the_vocabulary_keeps_all(self):
        logits = np.linspace(0, 1, 50).tolist()
        for seed in range(20):
            token = one(ReferenceRow(temperature=1.0, seed=seed), logits)
            assert token == one(ReferenceRow(temperature=1.0, seed=seed, top_k=10**9), logits)

    def test_ties_at_the_cut_go_to_the_lowest_ids(self):
        drawn = {one(ReferenceRow(temperature=1, seed=s, top_k=3), [1.0] * 40) for s in range(200)}
        assert drawn == {0, 1, 2}

    def test_min_tokens_suppresses_until_enough(self):
        row = ReferenceRow(min_tokens=2, suppressed_ids=[1])
        tokens = [one(row, [0.5, 2.0, 1.0], index) for index in range(4)]
        assert tokens == [2, 2, 1, 1]

    def test_bias_can_force_and_forbid(self):
        assert one(ReferenceRow(bias={2: 100.0}), [3.0, 2.0, -50.0]) == 2
        assert one(ReferenceRow(bias={0: -np.inf}), [3.0, 2.0, 1.0]) == 1

    def test_history_counts_sampled_tokens(self):
        sampler = make([ReferenceRow(frequency_penalty=0.6)], 3)
        logits = torch.tensor([[2.0, 1.5, 0.0]])
        tokens = [int(draw(sampler, logits, step).token_ids[0]) for step in range(5)]
        assert tokens == [0, 1, 0, 1, 0]

    def test_prompt_counts_for_repetition_only(self):
        logits = [2.0, 1.5]
        assert one(ReferenceRow(repetition_penalty=2.0, prompt_ids=[0]), logits) == 1
        assert one(ReferenceRow(presence_penalty=2.0, prompt_ids=[0]), logits) == 0
        assert one(ReferenceRow(frequency_penalty=2.0, prompt_ids=[0]), logits) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
    def test_a_bad_row_fails_alone(self, dtype, bad):
        rows = [
            ReferenceRow(),
            ReferenceRow(temperature=1.0, seed=1, logprobs=2),
            ReferenceRow(temperature=1.0, seed=2, top_p=0.9),
        ]
        logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
        clean = draw(make(rows, 500), logits)
        assert (clean.statuses == STATUS_OK).all()
        for victim in range(3):
            poisoned = logits.clone()
            if bad is None:
                poisoned[victim] = float("-inf")
            else:
                poisoned[victim, 321] = bad
            output = draw(make(rows, 500), poisoned)
            healthy = [i for i in range(3) if i != victim]
            assert output.statuses[victim] == STATUS_FAILED
            assert (output.statuses[healthy] == STATUS_OK).all()
            assert (output.token_ids[healthy] == clean.token_ids[healthy]).all()

    def test_everything_suppressed_fails_the_row(self):
        sampler = make([ReferenceRow(min_tokens=1, suppressed_ids=[0, 1])], 2)
        assert draw(sampler, torch.zeros(1, 2)).statuses[0] == STATUS_FAILED
        assert draw(sampler, torch.zeros(1, 2), 1).statuses[0] == STATUS_OK

    def test_logprobs_are_of_the_raw_logits(self):
        row = ReferenceRow(temperature=0.5, bias={0: 50.0}, logprobs=3, top_k=1)
        output = draw(make([row], 4), torch.tensor([[0.0, 1.0, 2.0, 1.0]]))
        assert output.logprobs is not None
        assert output.logprobs.offsets.tolist() == [0, 4]
        assert output.logprobs.token_ids.tolist() == [0, 2, 1, 3]
        total = np.log(np.exp([0.0, 1.0, 2.0, 1.0]).sum())
        expected = np.array([0.0, 2.0, 1.0, 1.0]) - total
        np.testing.assert_allclose(output.logprobs.values, expected, atol=1e-6)

    def test_extreme_temperatures(self):
        logits = [3e38, -3e38, 2.9e38]
        for temperature in (1.1e-5, 1.0, 1e30):
            assert one(ReferenceRow(temperature=temperature, seed=3), logits) in (0, 1, 2)

    def test_no_samples(self):
        output = draw(make([ReferenceRow()], 7), torch.empty(0, 7))
        assert len(output.token_ids) == len(output.statuses) == 0
        assert output.logprobs is None


class TestRefusals:
    def test_logits(self):
        sampler = make([ReferenceRow()], 8)
        for logits in (
            torch.zeros(1, 7),
            torch.zeros(2, 8),
            torch.zeros(1, 8, dtype=torch.float16),
            torch.zeros(8, 2).T[:1],
        ):
            with pytest.raises(SamplerError, match="logits"):
                draw(sampler, logits, rows=[0])

    def test_rows(self):
        sampler = make([ReferenceRow()], 8)
        with pytest.raises(SamplerError, match="row 1 is not below max_rows 1"):
            draw(sampler, torch.zeros(1, 8), rows=[1])

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (ReferenceRow(temperature=-1.0), "temperature -1"),
            (ReferenceRow(top_p=0.0), "top_p 0"),
            (ReferenceRow(repetition_penalty=0.0), "repetition"),
            (ReferenceRow(bias={8: 1.0}), "token id 8 in bias_ids is not below vocab_size 8"),
            (ReferenceRow(prompt_ids=[-1]), "token id -1 in ids"),
        ],
        ids=str,
    )
    def test_resets(self, row, message):
        sampler = make([ReferenceRow(bias={5: 9.0})], 8)
        with pytest.raises(SamplerError, match=message):
            sampler.reset(resets({0: row}))
        assert draw(sampler, torch.zeros(1, 8)).token_ids[0] == 5

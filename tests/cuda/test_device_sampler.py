"""The sampler of the CUDA executor, on the emulator, against that of the CPU."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from cpu_device import CpuDevice
from emulated_launcher import EmulatedLauncher, emulate

from chairlift.gpu.sampling import DeviceSampler
from chairlift.sampler import Sampler, SamplerError
from chairlift.sampler.reference import ReferenceRow
from sampling_cases import resets

VOCAB = 300
ROWS = [
    ReferenceRow(logprobs=3),
    ReferenceRow(temperature=1.0, seed=4, frequency_penalty=0.7, prompt_ids=[1, 2, 3]),
    ReferenceRow(temperature=0.8, top_k=20, top_p=0.8, seed=5, logprobs=0),
    ReferenceRow(repetition_penalty=1.7, presence_penalty=0.4, prompt_ids=[9], output_ids=[8, 8]),
    ReferenceRow(temperature=1.3, min_p=0.1, seed=6, bias={7: 2.0}),
    ReferenceRow(min_tokens=3, suppressed_ids=[11, 12]),
]


@pytest.fixture(autouse=True)
def launcher():
    launcher = EmulatedLauncher(guards=False)
    emulate(launcher)
    yield launcher
    emulate(None)


def plan_of(step: int, rows: list[int]):
    """What a sampler reads of a plan."""
    return types.SimpleNamespace(
        step=step,
        sample_rows=np.array(rows, np.int32),
        sample_output_indices=np.full(len(rows), step, np.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_those_of_the_cpu_with_two_steps_in_flight(dtype):
    """A step is launched before the tokens of the one before are read; penalties know them."""
    ours, theirs = DeviceSampler(len(ROWS), VOCAB, CpuDevice()), Sampler(len(ROWS), VOCAB)
    for sampler in (ours, theirs):
        sampler.reset(resets(dict(enumerate(ROWS))))
    rng, waiting, found, expected = np.random.default_rng(3), [], [], []
    for step in range(7):
        rows = rng.permutation(len(ROWS)).tolist()
        logits = torch.tensor(rng.normal(0, 3, (len(rows), VOCAB))).to(dtype)
        plan = plan_of(step, rows)
        waiting.append(ours.sample(logits, plan, torch.tensor(rows, dtype=torch.int32)))
        expected.append(theirs.sample(logits, plan.sample_rows, plan.sample_output_indices))
        tokens = ours.last_tokens[torch.tensor(rows)]
        assert tokens.tolist() == expected[-1].token_ids.tolist()
        if step:
            found.append(waiting.pop(0)())
    found.append(waiting.pop(0)())
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert not one.statuses.any()
        assert one.logprobs.offsets.tolist() == other.logprobs.offsets.tolist()
        assert one.logprobs.token_ids.tolist() == other.logprobs.token_ids.tolist()
        assert np.allclose(one.logprobs.values, other.logprobs.values, atol=4e-6)


def test_rows_that_nobody_reset_are_greedy():
    """The first of equals; what cannot be sampled from fails, and only that."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [0.0, 3.0, 1.0, 3.0],
            [0.0, nan, 1.0, 3.0],
            [0.0, inf, 1.0, 3.0],
            [-inf, -inf, -inf, -inf],
            [-inf, -2.0, -inf, -9.0],
        ]
    )
    plan = plan_of(0, [5, 1, 2, 3, 4])
    ours = DeviceSampler(8, 4, CpuDevice())
    found = ours.sample(logits, plan, torch.tensor(plan.sample_rows))()
    wanted = Sampler(8, 4).sample(logits, plan.sample_rows, plan.sample_output_indices)
    assert found.token_ids.tolist() == wanted.token_ids.tolist() == [1, 0, 0, 0, 1]
    assert found.statuses.tolist() == wanted.statuses.tolist() == [0, 1, 1, 1, 0]
    assert found.logprobs is wanted.logprobs is None
    assert ours.last_tokens[5] == 1


def test_failed_samples_have_no_logprobs():
    sampler = DeviceSampler(2, VOCAB, CpuDevice())
    sampler.reset(resets({0: ReferenceRow(logprobs=2), 1: ReferenceRow(logprobs=1)}))
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = float("nan")
    output = sampler.sample(logits, plan_of(0, [0, 1]), torch.tensor([0, 1], dtype=torch.int32))()
    assert output.statuses.tolist() == [1, 0]
    assert output.token_ids.tolist() == [0, 0]
    assert output.logprobs.offsets.tolist() == [0, 0, 2]


def test_edits_and_logprobs_are_launched_where_they_are_asked_for(launcher):
    sampler = DeviceSampler(2, VOCAB, CpuDevice())
    sampler.reset(resets({1: ReferenceRow(bias={3: 9.0}, logprobs=0)}))
    rows = torch.tensor([0], dtype=torch.int32)
    launcher.launched.clear()
    assert sampler.sample(torch.ones(1, VOCAB), plan_of(0, [0]), rows)().logprobs is None
    assert [launch.kernel for launch in launcher.launched] == ["sample<float>"]
    launcher.launched.clear()
    output = sampler.sample(torch.ones(1, VOCAB), plan_of(0, [1]), rows + 1)()
    assert output.token_ids.tolist() == [3]
    kernels = [launch.kernel for launch in launcher.launched]
    assert kernels == ["logit_edits<float>", "sample<float>", "logprobs<float>"]


def test_resets_that_no_row_can_have_change_nothing():
    sampler = DeviceSampler(1, VOCAB, CpuDevice())
    sampler.reset(resets({0: ReferenceRow(bias={5: 9.0})}))
    with pytest.raises(SamplerError, match="temperature -1"):
        sampler.reset(resets({0: ReferenceRow(temperature=-1.0)}))
    rows = torch.tensor([0], dtype=torch.int32)
    assert sampler.sample(torch.zeros(1, VOCAB), plan_of(0, [0]), rows)().token_ids[0] == 5

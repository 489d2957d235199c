"""The simulator as Python sees it: arrays in, arrays out, and a way to stop it."""

from __future__ import annotations

import signal
from dataclasses import replace

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.simulation import GPU_8B, Options, Workload, capacity, simulate
from simulations import EXACT, settings


def crowd(count=300):
    random = np.random.default_rng(5)
    return Workload.of(
        np.cumsum(random.exponential(0.05, count)),
        random.integers(1, 300, count),
        random.integers(1, 200, count),
        tenant=random.integers(0, 2, count),
        tenants=("a", "b"),
    )


def test_a_scenario_computed_by_hand():
    workload = Workload.of([0, 0.002, 0.020], [3, 2, 1], [2, 1, 1])
    small = settings(max_num_seqs=2, max_num_batched_tokens=4)
    result = simulate(small, EXACT, workload, Options(keep_gaps=True))
    np.testing.assert_allclose(result.first_token_s, [0.004545, 0.009965, 0.0236])
    np.testing.assert_allclose(result.finished_s, [0.009965, 0.009965, 0.0236])
    np.testing.assert_allclose(result.iteration_s, [0.004545, 0.005420, 0.0036])
    assert result.prefill_tokens.tolist() == [3, 2, 0]
    assert result.ended("stop").all()
    assert result.gap_request.tolist() == [0]
    np.testing.assert_allclose(result.gap_s, [0.005420], rtol=1e-6)
    assert np.isnan(result.predicted_ttft_s[0])  # nothing was measured yet
    assert result.end_s == pytest.approx(0.0236)


def test_the_same_seed_gives_the_same_result():
    options = Options(seed=3, abort_share=0.1, keep_gaps=True, service_interval=20)
    limits = settings(max_num_seqs=16, max_num_batched_tokens=256, num_kv_blocks=100)
    first = simulate(limits, GPU_8B, crowd(), options)
    second = simulate(limits, GPU_8B, crowd(), options)
    for name in first.__slots__:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), name)
    assert first.ended("abort").any()
    assert first.preemptions.any()
    other = simulate(limits, GPU_8B, crowd(), replace(options, seed=4))
    assert first.end_s != other.end_s


def test_a_machine_has_slow_seconds():
    # One answer: iterations follow each other without a gap.
    alone = Workload.of([0.0], [1], [2_000])
    noisy = replace(EXACT, noise_sigma=0.1)

    def logs(seed=1, **noise):
        result = simulate(settings(), replace(noisy, **noise), alone, Options(seed=seed))
        return np.log(result.iteration_s / exact.iteration_s)

    exact = simulate(settings(), EXACT, alone)
    own = logs()
    assert own.std() == pytest.approx(0.1, rel=0.05)
    np.testing.assert_array_equal(own, logs(slow_s=20.0))
    lasting = logs(slow_sigma=0.3, slow_s=20.0) - own
    assert np.abs(lasting).max() > 0.3
    assert np.abs(np.diff(lasting)).max() < 0.2  # from an iteration of 0.2 s at most to the next
    np.testing.assert_array_equal(lasting, logs(slow_sigma=0.3, slow_s=20.0) - own)
    assert (lasting != logs(seed=2, slow_sigma=0.3, slow_s=20.0) - logs(seed=2)).any()
    with pytest.raises(ConfigError, match=r"profile\.slow_sigma is -1; it must be from 0 to 1"):
        logs(slow_sigma=-1.0)


def test_a_machine_is_as_slow_as_it_was():
    alone = Workload.of([0.0], [1], [100])
    plain = simulate(settings(), EXACT, alone)
    recorded = [(0.1, 2.0), (0.3, 0.5)]
    unsteady = replace(EXACT, slow_sigma=0.5, slow_s=1.0)
    slow = simulate(settings(), unsteady, alone, Options(slowness=recorded))
    stretch = np.searchsorted([start for start, _ in recorded], slow.iteration_start_s, "right")
    assert set(stretch) == {0, 1, 2}
    factor = np.array([1.0, 2.0, 0.5])[stretch]
    np.testing.assert_allclose(slow.iteration_s, factor * plain.iteration_s, atol=1.1e-6)
    for wrong, message in [
        ([(-1.0, 1.0)], "stretch 0 of the slowness: start_s is -1; it must be from 0 to 1e9"),
        ([(2.0, 1.0), (1.0, 1.0)], "stretch 1 of the slowness: start_us is 1000000; it must be "),
        ([(0.0, 1.0), (1.0, 0.0)], "stretch 1 of the slowness: factor is 0; it must be above 0"),
    ]:
        with pytest.raises(ConfigError, match=message) as refused:
            simulate(settings(), EXACT, alone, Options(slowness=wrong))
        assert refused.value.code == "invalid_slowness"


def test_service_goes_to_tenants():
    workload = crowd()
    options = Options(service_interval=10, gap_weights=[1.0, 1.0])
    result = simulate(settings(max_num_seqs=4), GPU_8B, workload, options)
    assert result.priced_tokens.shape == (len(result.service_at_s), 2)
    cost = workload.input_tokens + 2 * workload.output_tokens
    np.testing.assert_allclose(result.priced_tokens[-1], np.bincount(workload.tenant, cost))
    assert result.device_s[-1].sum() == pytest.approx(result.iteration_s.sum())
    assert result.max_gap is not None
    assert 0 < result.max_gap < result.priced_tokens[-1].max()


def test_prefixes_are_found_again():
    workload = replace(
        Workload.of([0, 1], [40, 40], [2, 2]),
        prefix_offsets=np.array([0, 2, 4], dtype=np.int32),
        prefix_hashes=np.array([8, 9, 8, 10], dtype=np.int32),
        prefix_block_tokens=32,
    )
    result = simulate(settings(enable_prefix_caching=True), GPU_8B, workload)
    assert result.cached_tokens.tolist() == [0, 32]


def test_blocks_on_the_host_need_not_be_computed_again():
    profile = replace(GPU_8B, t_copy_s=50e-6)
    tight = settings(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_kv_blocks=100,
        enable_prefix_caching=True,
    )
    without = simulate(tight, profile, crowd())
    tiered = simulate(replace(tight, num_host_kv_blocks=400), profile, crowd())
    assert 5 * tiered.recomputed_tokens < without.recomputed_tokens
    with pytest.raises(ConfigError, match="num_host_kv_blocks is 400"):
        simulate(settings(num_host_kv_blocks=400), profile, crowd())


def test_breaking_off_leaves_requests_unfinished():
    result = simulate(settings(), GPU_8B, crowd(), Options(max_iterations=50))
    assert len(result.iteration_s) == 50
    unfinished = result.ended("unfinished")
    assert 0 < unfinished.sum() < 300
    np.testing.assert_array_equal(np.isnan(result.finished_s), unfinished)


def test_capacity_is_the_rate_at_which_a_burst_is_served():
    constant = replace(EXACT, t0_s=0.01, t_seq_s=0, t_w_s=0, t_tok_s=0, t_ctx_s=0, t_pair_s=0)
    workload = Workload.of(np.arange(100.0), np.full(100, 8), np.full(100, 2))
    assert capacity(settings(max_num_seqs=1), constant, workload) == pytest.approx(50)
    assert capacity(settings(), constant, Workload.of([], [], [])) is None


def long_one():
    count = 20_000
    return Workload.of(np.zeros(count), np.full(count, 100), np.full(count, 1_000))


def test_progress_is_reported_and_may_end_it():
    reports = []

    def report(over):
        reports.append(over)
        if len(reports) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        simulate(settings(max_num_seqs=64), GPU_8B, long_one(), progress=report)
    assert reports == sorted(reports)


def test_a_signal_ends_it():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(settings(max_num_seqs=64), GPU_8B, long_one())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload.of([0], [1, 2], [1]), "input_tokens has 2 entries; it must have 1"),
        (Workload.of([0], [-1], [1]), r"input_tokens\[0\] is -1; it must be at least 0"),
        (Workload.of([0], [1], [0]), "output_tokens is 0; it must be at least 1"),
        (Workload.of([np.nan], [1], [1]), "arrival_s has NaN; it must be from 0 to 1e9 seconds"),
        (Workload.of([2, 1], [1, 1], [1, 1]), "request 1 .* arrival_us is 1000000"),
        (Workload.of([0], [1], [1], tenant=[1]), "tenant is 1; it must be below their number, 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(workload, message):
    with pytest.raises(ConfigError, match=message) as caught:
        simulate(settings(), GPU_8B, workload)
    assert caught.value.code == "invalid_workload"


def test_time_never_runs_backwards():
    with pytest.raises(ConfigError, match=r"profile\.t_tok_s is -1") as caught:
        simulate(settings(), replace(GPU_8B, t_tok_s=-1), crowd(1))
    assert caught.value.code == "invalid_profile"

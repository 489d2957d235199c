"""Fair queuing: service by weight while all are backlogged, and the VTC bound at every iteration.

The backlogged tenants have short requests that are all there from the start, and 64 of them run at
once; what is compared is the service that the simulator itself counts, not the engine's books.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chairlift.config import ClassConfig, PolicyConfig, Price, PriceConfig, TenantConfig
from chairlift.simulation import Floats, Options, Workload
from simulation.bench import ABORT_SHARE, Bench, Run
from simulation.measures import jain, throughput
from simulation.pictures import Picture, Series
from simulation.report import Cell, Check, Report, Table, engine_tables, state_of
from simulation.traces import Trace

ROWS = 64
INPUT, OUTPUT = (32, 96), (8, 24)
"""Shortest and longest of the backlogged tenants' requests."""
PRICES: dict[str, Price] = {"tokens": PriceConfig(), "device time": "device_time"}
WEIGHTS = ((1.0, 1.0), (1.0, 3.0))
EQUALS = 8
TENANTS_OF_A_TRACE = 4
"""Where a trace names no clients, its requests are dealt out to so many by chance."""


def run(bench: Bench) -> Report:
    """Run backlogged tenants, classes and a newcomer, then the trace."""
    shares = [
        _by_weight(bench, name, price, weights, classes=classes)
        for name, price in PRICES.items()
        for weights in WEIGHTS
        for classes in (False, True)
    ]
    equals = _equals(bench)
    newcomer, came_s = _newcomer(bench, shares[0].run)
    trace = _with_tenants(bench.trace, bench.seed)
    fair, fcfs = _on_trace(bench, trace)
    runs = [*(share.run for share in shares), equals, newcomer, fair, fcfs]
    report = Report(
        "fairness",
        "Fairness",
        state_of(
            bench,
            fair,
            backlogged=(
                f"{ROWS} rows, {bench.iterations:,} iterations, prompts of {INPUT[0]} "
                f"to {INPUT[1]} and answers of {OUTPUT[0]} to {OUTPUT[1]} tokens"
            ),
        ),
    )
    rows: list[list[Cell]] = [
        [share.run.label, share.price, *share.service, f"{share.error:.2%}"] for share in shares
    ]
    header = ("tenants", "price", "service of the first", "of the second", "off the weights")
    report.tables.append(Table("Backlogged throughout (tokens, or seconds)", header, rows))
    for name in PRICES:
        worst = max(share.error for share in shares if share.price == name)
        claim = f"service in {name} is within 1 % of the weights of tenants and of classes"
        report.checks.append(Check(claim, f"{worst:.2%}", worst <= 0.01))
    index = jain(equals.result.priced_tokens[-1])
    claim = f"Jain index of {EQUALS} backlogged equals is at least 0.99"
    report.checks.append(Check(claim, f"{index:.4f}", index >= 0.99))
    _check_newcomer(report, newcomer, came_s)
    _check_trace(report, bench, trace, fair, fcfs)
    report.tables += engine_tables(runs)
    report.pictures.append(_picture(newcomer, came_s))
    return report


class _Share:
    """How two backlogged tenants shared."""

    def __init__(self, run: Run, price: str, weights: Sequence[float]) -> None:
        self.run, self.price = run, price
        result = run.result
        self.service: Floats = (
            result.priced_tokens[-1] if price == "tokens" else result.device_s[-1]
        )
        per_weight = self.service / np.array(weights)
        self.error = float(np.ptp(per_weight) / per_weight.mean())
        """Largest difference in service for its weight, of the mean."""


def _by_weight(
    bench: Bench, price_name: str, price: Price, weights: Sequence[float], *, classes: bool
) -> _Share:
    names = ("first", "second")
    if classes:
        policy = PolicyConfig(
            sharing="fair",
            price=price,
            classes={
                name: ClassConfig(weight=weight)
                for name, weight in zip(names, weights, strict=True)
            },
        )
    else:
        policy = _fair(price, dict(zip(names, weights, strict=True)))
    workload = _backlog(bench, names)
    if classes:
        workload = replace(workload, request_class=workload.tenant)
    kind = "classes" if classes else "tenants"
    label = f"{kind} {weights[0]:g}:{weights[1]:g}, {price_name}"
    served = _run_backlogged(bench, label, policy, workload)
    return _Share(served, price_name, weights)


def _fair(price: Price, weights: dict[str, float]) -> PolicyConfig:
    tenants = {name: TenantConfig(weight=weight) for name, weight in weights.items()}
    return PolicyConfig(sharing="fair", price=price, tenants=tenants)


def _backlog(bench: Bench, tenants: Sequence[str]) -> Workload:
    """Give each tenant more requests than all iterations can serve, all at time 0."""
    random = np.random.default_rng(bench.seed)
    served = bench.iterations * ROWS // OUTPUT[0]
    count = ROWS + served // 2
    total = count * len(tenants)
    return Workload.of(
        np.zeros(total),
        random.integers(INPUT[0], INPUT[1] + 1, total),
        random.integers(OUTPUT[0], OUTPUT[1] + 1, total),
        tenant=np.tile(np.arange(len(tenants)), count),
        tenants=tenants,
    )


def _run_backlogged(bench: Bench, label: str, policy: PolicyConfig, workload: Workload) -> Run:
    options = Options(
        max_iterations=bench.iterations, service_interval=max(1, bench.iterations // 200)
    )
    served = bench.run(label, policy, workload, options, max_num_seqs=ROWS)
    left = np.bincount(workload.tenant[served.result.ended("unfinished")])
    if len(left) < len(workload.tenants) or left.min() <= ROWS:
        raise RuntimeError(f"{label}: a tenant ran out of requests, so it was not backlogged")
    return served


def _equals(bench: Bench) -> Run:
    """Tenants of the same weight whose requests are of different lengths."""
    workload = _backlog(bench, [f"tenant {at}" for at in range(EQUALS)])
    factor = 1 + workload.tenant / EQUALS
    workload = replace(workload, input_tokens=(workload.input_tokens * factor).astype(np.int32))
    return _run_backlogged(bench, f"{EQUALS} equals", _fair(PriceConfig(), {}), workload)


def _newcomer(bench: Bench, before: Run) -> tuple[Run, float]:
    """Let a third tenant come half-way; returns when."""
    workload = _backlog(bench, ("first", "second", "newcomer"))
    came_s = float(before.result.iteration_start_s[bench.iterations // 2])
    arrivals = np.where(workload.tenant == 2, came_s, 0.0)
    order = np.argsort(arrivals, kind="stable")
    workload = replace(
        workload,
        arrival_s=arrivals[order],
        input_tokens=workload.input_tokens[order],
        output_tokens=workload.output_tokens[order],
        tenant=workload.tenant[order],
    )
    return _run_backlogged(bench, "newcomer", _fair(PriceConfig(), {}), workload), came_s


def _with_tenants(trace: Trace, seed: int) -> Trace:
    if trace.tenant is not None and len(trace.tenants) > 1:
        return trace
    dealt = np.random.default_rng(seed).integers(0, TENANTS_OF_A_TRACE, len(trace))
    names = tuple(f"tenant {at}" for at in range(TENANTS_OF_A_TRACE))
    return replace(trace, tenant=dealt.astype(np.int32), tenants=names)


def _on_trace(bench: Bench, trace: Trace) -> tuple[Run, Run]:
    workload = bench.at_load(bench.load, trace)
    options = Options(
        abort_share=ABORT_SHARE, keep_gaps=True, gap_weights=[1.0] * len(trace.tenants)
    )
    fair = bench.run("trace, fair", _fair(PriceConfig(), {}), workload, options)
    return fair, bench.run("trace, fcfs", PolicyConfig(), workload, options)


def _check_newcomer(report: Report, newcomer: Run, came_s: float) -> None:
    result = newcomer.result
    at = int(np.searchsorted(result.service_at_s, came_s))
    since = result.priced_tokens[-1] - result.priced_tokens[at]
    off = float(since[2] / since[:2].mean() - 1)
    claim = "a newcomer is neither credited nor punished: within 2 % of the others from then on"
    report.checks.append(Check(claim, f"{off:+.2%}", abs(off) <= 0.02))


def _check_trace(report: Report, bench: Bench, trace: Trace, fair: Run, fcfs: Run) -> None:
    price = PriceConfig()
    pool_tokens = bench.profile.num_kv_blocks * fair.settings.block_size
    longest = int(trace.input_tokens.max())
    bound = 2 * max(price.input * longest, price.output * pool_tokens)
    gap, gap_fcfs = fair.result.max_gap or 0.0, fcfs.result.max_gap or 0.0
    claim = f"the gap of backlogged tenants never exceeds the VTC bound of {bound:,.0f} tokens"
    value = f"{gap:,.0f} over {len(trace.tenants)} tenants (fcfs: {gap_fcfs:,.0f})"
    report.checks.append(Check(claim, value, gap <= bound))
    ratio = throughput(fair) / throughput(fcfs)
    claim = "throughput is within 1 % of FCFS"
    report.checks.append(Check(claim, f"{ratio:.2%} of it", abs(ratio - 1) <= 0.01))


def _picture(newcomer: Run, came_s: float) -> Picture:
    result = newcomer.result
    series = [
        Series(name, result.service_at_s, result.priced_tokens[:, at])
        for at, name in enumerate(newcomer.workload.tenants)
    ]
    return Picture(
        name="fairness",
        title=f"Two backlogged tenants, and a newcomer at {came_s:.0f} s",
        x_label="time in s",
        y_label="priced tokens received",
        series=series,
    )

"""The conditions of an experiment: what is simulated, on what, under which limits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from chairlift.config import Config, PolicyConfig
from chairlift.engine_args import CoreSettings, EngineArgs, core_settings
from chairlift.simulation import (
    GPU_8B,
    GPU_8B_BLOCKS,
    GPU_8B_SMALL_BLOCKS,
    CostProfile,
    Options,
    Simulation,
    Workload,
    capacity,
    simulate,
)
from simulation.traces import Trace

ABORT_SHARE = 0.01
"""Requests that their client gives up."""
PROFILES = {
    "gpu-8b": (GPU_8B, GPU_8B_BLOCKS),
    "gpu-8b-small": (GPU_8B, GPU_8B_SMALL_BLOCKS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What iterations cost, and the KV pool."""

    name: str
    cost: CostProfile
    num_kv_blocks: int


def read_profile(name: str) -> Profile:
    """Look up a profile by name, or read a JSON file of ``CostProfile``'s fields and the pool.

    Raises:
        ValueError: there is no such profile, or the file does not have exactly those fields.
    """
    if name in PROFILES:
        cost, num_kv_blocks = PROFILES[name]
        return Profile(name=name, cost=cost, num_kv_blocks=num_kv_blocks)
    path = Path(name)
    if not path.exists():
        known = ", ".join(PROFILES)
        raise ValueError(f"there is no profile {name}; the profiles are {known}, or a JSON file")
    values = json.loads(path.read_text(encoding="utf-8"))
    wanted = {item.name for item in fields(CostProfile)} | {"num_kv_blocks"}
    if isinstance(values, dict):
        for later in ("t_sample_s", "t_copy_s", "slow_sigma", "slow_s"):
            values.setdefault(later, 0.0)  # profiles from before there was one
    if not isinstance(values, dict) or values.keys() != wanted:
        raise ValueError(f"{path}: the keys must be {', '.join(sorted(wanted))}")
    num_kv_blocks = values.pop("num_kv_blocks")
    return Profile(name=path.stem, cost=CostProfile(**values), num_kv_blocks=num_kv_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation, and what it was of."""

    label: str
    settings: CoreSettings
    workload: Workload
    result: Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything that the runs of an experiment have in common."""

    profile: Profile
    trace: Trace
    batch: Trace
    """Requests of the class that can wait, where an experiment has one."""
    load: float
    seed: int
    also: tuple[Trace, ...] = ()
    """Further traces, where an experiment compares several."""
    iterations: int = 10_000
    """Of an experiment that runs for so long, not to the end of a trace."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    max_tokens: int = 1_024
    divided_by: int = 1
    """Factor by which the traces' lengths were divided, to be told."""
    quiet: bool = False
    _capacities: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def settings(self, policy: PolicyConfig, *workloads: Workload) -> CoreSettings:
        """Limits under which every request of the workloads fits."""
        longest = max(
            int((w.input_tokens + np.maximum(w.output_tokens, self.max_tokens)).max())
            for w in workloads
        )
        args = EngineArgs(
            config=Config(policy=policy),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=any(w.prefix_offsets is not None for w in workloads),
            max_queued_requests=1_000_000,
        )
        return core_settings(
            args,
            max_model_len=longest + 1,
            num_kv_blocks=self.profile.num_kv_blocks,
            vocab_size=1,  # the simulator has a vocabulary of its own
        )

    def capacity(self, trace: Trace) -> float:
        """Requests a second that continuous FCFS serves of the trace's first 4,000."""
        key = (trace.name, self.max_num_seqs, self.max_num_batched_tokens)
        if key not in self._capacities:
            workload = trace.at_once()
            settings = self.settings(PolicyConfig(), workload)
            options = Options(seed=self.seed, max_tokens=self.max_tokens)
            with self._progress(f"capacity of {trace.name}", min(len(trace), 4_000)) as progress:
                rate = capacity(
                    settings, self.profile.cost, workload, options, progress=progress.report
                )
            self._capacities[key] = rate or 0.0
        return self._capacities[key]

    def on(self, profile: Profile) -> Bench:
        """Change the profile, and with it the capacities."""
        return replace(self, profile=profile, _capacities={})

    def at_load(self, load: float, trace: Trace | None = None) -> Workload:
        """Scale the arrivals to ``load`` times the capacity."""
        trace = trace or self.trace
        return trace.at_rate(load * self.capacity(trace), self.seed)

    def run(
        self,
        label: str,
        policy: PolicyConfig,
        workload: Workload,
        options: Options | None = None,
        **limits: int,
    ) -> Run:
        """Simulate, with aborts and gaps unless ``options`` say otherwise."""
        options = options or Options(abort_share=ABORT_SHARE, keep_gaps=True)
        options = replace(options, seed=self.seed, max_tokens=self.max_tokens)
        settings = replace(self.settings(policy, workload), **limits)
        with self._progress(label, len(workload)) as progress:
            result = simulate(
                settings, self.profile.cost, workload, options, progress=progress.report
            )
        return Run(label=label, settings=settings, workload=workload, result=result)

    def _progress(self, label: str, total: int) -> _Progress:
        return _Progress(label, total, quiet=self.quiet)


@dataclass(slots=True)
class _Progress:
    """A line on stderr that says how far a simulation is."""

    label: str
    total: int
    quiet: bool
    _start: float = 0.0
    _write: Callable[[str], object] = sys.stderr.write

    def __enter__(self) -> _Progress:
        self._start = time.perf_counter()
        return self

    def report(self, over: int) -> None:
        if not self.quiet and sys.stderr.isatty():
            self._write(f"\r{self.label}: {over} of {self.total} requests\x1b[K")

    def __exit__(self, *_exception: object) -> None:
        if not self.quiet:
            took = time.perf_counter() - self._start
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            self._write(f"{clear}{self.label}: {self.total} requests in {took:.1f} s\n")

"""Record live engines under every policy, and check that each log replays bit for bit.

    python benches/recorded_run.py --minutes 10 --out /tmp/flight

Several engines run one after the other, each with other rules for the queue, a pool that is too
small, tenants, classes, aborts, deadlines, shared prefixes, and a reload half-way. The minutes are
shared out among them. Prints a line for each log; the status is 1 if one does not replay, or if
what should happen never did.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chairlift import AsyncEngine, SamplingParams
from chairlift.config import Config, PolicyConfig
from chairlift.engine_args import EngineOptions
from chairlift.errors import ChairliftError
from chairlift.flight_log import FlightLog

CLASSES = {
    "interactive": {"level": 1, "max_queue_time": "1500ms", "on_timeout": "promote"},
    "batch": {"weight": 2, "max_queue_time": "20s", "may_be_shed": True, "on_doomed": "relegate"},
    "spare": {"ttft_target": "8s"},
}
TENANTS = {
    "ann": {"weight": 2},
    "bob": {"max_running": 4},
    "cy": {"tokens_per_second": 2_000, "default_class": "batch"},
}
WINDOW = {"size": 4, "delay": "100ms"}
QUEUES: dict[str, dict[str, object]] = {
    "fcfs": {"sharing": "fcfs"},
    "fair": {"sharing": "fair"},
    "fair-device-time": {"sharing": "fair", "price": "device_time"},
    "prepaid": {"sharing": "fair", "charge_predicted_output": True, "order": "shortest"},
    "footprint": {"order": "footprint", "max_level_wait": "3s"},
    "deadline": {"order": "deadline"},
    "prefix": {"sharing": "fair", "order": "prefix"},
    "static": {"join": "static"},
    "window": {"join": WINDOW},
    "shedding": {"sharing": "fair", "shedding": {"above": "2s", "below": "1s"}},
    "reserve": {"sharing": "fair", "memory": {"admission": "reserve"}},
    "forecast": {"sharing": "fair", "memory": {"admission": "forecast", "overflow": 0.1}},
    "strict": {"memory": {"backfill": "off"}},
    "governed": {"sharing": "fair", "pace": {"iteration_target": "150ms"}},
}
"""Rules by name, beside classes and tenants; what is not said is the default."""


@dataclass(slots=True)
class Counts:
    """What the clients of one engine saw."""

    finished: int = 0
    aborted: int = 0
    refused: int = 0


def config(queue: dict[str, object], *, is_reloaded: bool = False) -> Config:
    """Make a configuration; a reload changes a weight and a quota."""
    tenants = {name: dict(tenant) for name, tenant in TENANTS.items()}
    if is_reloaded:
        tenants["ann"]["weight"] = 1
        tenants["cy"]["tokens_per_second"] = 4_000
    options = {"classes": CLASSES, "tenants": tenants, **queue}
    return Config(policy=PolicyConfig(**options))  # type: ignore[arg-type]


class Crowd:
    """Clients that ask again as soon as they have their answer, or have given it up."""

    def __init__(self, engine: AsyncEngine, seed: int, end: float) -> None:
        """Ask ``engine`` until ``end``, on the clock of ``time.monotonic()``."""
        self.counts = Counts()
        self._engine = engine
        self._random = random.Random(seed)
        self._end = end
        self._shared = [self._random.randrange(3, 250) for _ in range(48)]

    async def run(self, clients: int) -> None:
        """Let so many ask at once."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._ask_on())

    async def _ask_on(self) -> None:
        while time.monotonic() < self._end:
            await self._ask()
            await asyncio.sleep(self._random.expovariate(20))

    async def _ask(self) -> None:
        draw = self._random
        own = [draw.randrange(3, 250) for _ in range(draw.randint(4, 120))]
        prompt = self._shared + own if draw.random() < 0.4 else own
        params = SamplingParams(
            n=2 if draw.random() < 0.1 else 1,
            temperature=1.0,
            max_tokens=draw.randint(4, 96),
            ignore_eos=draw.random() < 0.8,
            logprobs=2 if draw.random() < 0.1 else None,
            prompt_logprobs=1 if draw.random() < 0.05 else None,
        )
        patience = draw.expovariate(0.5) if draw.random() < 0.25 else 60.0
        stream = self._engine.generate(
            {"prompt_token_ids": prompt},
            params,
            tenant=draw.choice(["ann", "bob", "cy", "somebody"]),
            request_class=draw.choice([None, *CLASSES]),
            user=draw.choice([None, "one", "two"]),
            priority=draw.choice([0, 0, 1]),
            deadline=draw.choice([None, None, 5.0]),
        )
        try:
            async with asyncio.timeout(patience):
                async for _ in stream:
                    pass
            self.counts.finished += 1
        except TimeoutError:
            self.counts.aborted += 1
        except ChairliftError:
            self.counts.refused += 1


async def record(
    queue: dict[str, object], path: Path, seconds: float, args: argparse.Namespace
) -> tuple[Counts, int]:
    """Run one engine and record it; returns what clients saw, and preemptions."""
    options: EngineOptions = {
        "config": config(queue),
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "num_kv_blocks": args.num_kv_blocks,
        "max_queued_requests": 64,
        "record": path,
    }
    if args.executor is not None:
        options["executor"] = args.executor
    async with AsyncEngine(args.model, **options) as engine:
        begin = time.monotonic()
        crowd = Crowd(engine, args.seed, begin + seconds)
        running = asyncio.create_task(crowd.run(args.clients))
        await asyncio.sleep(seconds / 2)
        await engine.reload(config(queue, is_reloaded=True))
        await running
        metrics = await engine.metrics()
    return crowd.counts, metrics["preemptions"]


def main() -> int:
    """Record, replay, print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of all engines together (10)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--model", help="as of chairlift generate")
    parser.add_argument("--executor", help="as of chairlift generate")
    parser.add_argument("--only", nargs="+", choices=sorted(QUEUES), help="some of the rules")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--num-kv-blocks", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.only or list(QUEUES)
    seconds = args.minutes * 60 / len(names)
    all_same, preemptions, aborted = True, 0, 0
    print(
        "rules             steps  records  bytes/step  finished  aborted  refused  preempted"
        "  replay"
    )
    for name in names:
        path = args.out / f"{name}.log"
        counts, preempted = asyncio.run(record(QUEUES[name], path, seconds, args))
        since = time.perf_counter()
        replay = FlightLog(path).replay()
        rate = replay.steps / (time.perf_counter() - since)
        is_whole = replay.stopped is None and not replay.cut_off_bytes
        same = replay.mismatch is None and is_whole
        all_same &= same
        preemptions += preempted
        aborted += counts.aborted
        told = "bit for bit" if same else replay.message or replay.stopped or "cut off"
        print(
            f"{name:<16} {replay.steps:6} {replay.records:8} "
            f"{path.stat().st_size / max(replay.steps, 1):11.0f} {counts.finished:9} "
            f"{counts.aborted:8} {counts.refused:8} {preempted:10}  {told} at {rate:,.0f} steps/s",
            flush=True,
        )
    if not preemptions or not aborted:
        print(f"{preemptions} preemptions and {aborted} aborts: this shows little", file=sys.stderr)
        return 1
    return 0 if all_same else 1


if __name__ == "__main__":
    raise SystemExit(main())

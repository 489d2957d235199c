"""When requests are sent: at times fixed in advance, or as soon as an answer ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from chairlift.bench.client import Client, Outcome
from chairlift.bench.workload import Request

_PREPARED = 256
"""Requests whose bodies are made before the clock of an open loop starts."""
_UNREACHABLE_PAUSE_S = 0.1
"""What a closed loop waits for after no reply at all came: a server that is gone is not polled."""


@dataclass(slots=True)
class LoadResult:
    """What came of a run, also of one that was interrupted."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_unfinished: int = 0
    """Requests that were under way when it was interrupted."""
    started_at: float = 0.0
    is_interrupted: bool = False

    @property
    def seconds(self) -> float:
        """From the start to the last end."""
        return max((outcome.ended_at for outcome in self.outcomes), default=0.0) - self.started_at


class Load:
    """Sends requests and keeps their outcomes."""

    def __init__(self, client: Client, on_outcome: Callable[[Outcome], None]) -> None:
        """``on_outcome`` is called as each ends."""
        self._client = client
        self._on_outcome = on_outcome
        self.result = LoadResult()

    async def open_loop(self, requests: Iterator[Request]) -> LoadResult:
        """Send each at its own time, whether or not earlier ones have ended."""
        requests = itertools.chain(list(itertools.islice(requests, _PREPARED)), requests)
        return await self._run(lambda tasks: self._send_on_time(requests, tasks))

    async def closed_loop(
        self, requests: Iterator[Request], concurrency: int, duration_s: float | None = None
    ) -> LoadResult:
        """Keep ``concurrency`` under way; none is sent after the duration."""
        return await self._run(
            lambda tasks: self._send_by_workers(requests, tasks, concurrency, duration_s)
        )

    async def _run(self, sender: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> LoadResult:
        self.result = LoadResult(started_at=time.perf_counter())
        try:
            async with asyncio.TaskGroup() as tasks:
                await sender(tasks)
        except asyncio.CancelledError:
            self.result.is_interrupted = True
        return self.result

    async def _send_on_time(self, requests: Iterator[Request], tasks: asyncio.TaskGroup) -> None:
        start = self.result.started_at
        for request in requests:
            due = None if request.send_at_s is None else start + request.send_at_s
            # Gives way to the streams also where the next one is overdue.
            await asyncio.sleep(0.0 if due is None else max(0.0, due - time.perf_counter()))
            tasks.create_task(self._send(request, due))

    async def _send_by_workers(
        self,
        requests: Iterator[Request],
        tasks: asyncio.TaskGroup,
        concurrency: int,
        duration_s: float | None,
    ) -> None:
        end = None if duration_s is None else self.result.started_at + duration_s

        async def work() -> None:
            for request in requests:  # shared: each takes the next one
                outcome = await self._send(request, None)
                if outcome.failure is not None and outcome.failure.status is None:
                    await asyncio.sleep(_UNREACHABLE_PAUSE_S)
                if end is not None and time.perf_counter() >= end:
                    return

        for _ in range(concurrency):
            tasks.create_task(work())

    async def _send(self, request: Request, due: float | None) -> Outcome:
        lateness = None if due is None else max(0.0, time.perf_counter() - due)
        try:
            outcome = await self._client.send(request, lateness)
        except asyncio.CancelledError:
            self.result.num_unfinished += 1
            raise
        self.result.outcomes.append(outcome)
        self._on_outcome(outcome)
        return outcome

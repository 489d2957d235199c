"""How late the event loop is: what every stream and every probe waits for at least."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field

LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the buckets, in seconds; the last has none."""
_EVERY_S = 0.05


@dataclass(slots=True)
class LoopLag:
    """How often the loop came how much later than it was asked to."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LAG_BOUNDS) + 1))
    total: float = 0.0
    """Sum of all, in seconds."""

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(LAG_BOUNDS, seconds)] += 1
        self.total += seconds

    async def watch(self) -> None:
        """Look now and again, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.observe(max(loop.time() - due, 0.0))

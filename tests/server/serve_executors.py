"""Executors for servers that are processes of their own."""

from __future__ import annotations

import time

from chairlift.testing import ScriptedExecutor


class Slow(ScriptedExecutor):
    """A hundred steps a second."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(step_time=0.01, num_kv_blocks=1_024)


class Dying(ScriptedExecutor):
    """Ends the engine in its thirtieth step."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(step_time=0.01, raise_at_steps=[30], error=SystemExit("an inner secret"))


class Endless(ScriptedExecutor):
    """Is never ready."""

    @classmethod
    def from_engine_args(cls, args):
        time.sleep(3_600)

"""Executors for servers that are processes of their own."""

from __future__ import annotations

import time
from collections import deque

from chairlift.testing import ByteTokenizer, ScriptedExecutor


class Slow(ScriptedExecutor):
    """A hundred steps a second."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(step_time=0.01, num_kv_blocks=1_024)


class Quick(ScriptedExecutor):
    """As fast as it goes, and remembers nothing."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(num_kv_blocks=args.num_kv_blocks, steps=deque(maxlen=1))


class Dying(ScriptedExecutor):
    """Ends the engine in its thirtieth step."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(step_time=0.01, raise_at_steps=[30], error=SystemExit("an inner secret"))


class Failing(ScriptedExecutor):
    """Raises in its thirtieth step, and fails at the sixth token of what begins with ``bad``."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(
            step_time=0.01,
            num_kv_blocks=1_024,
            raise_at_steps=[30],
            fail_rows={"bad": 5},
            error=RuntimeError("an inner secret"),
        )


class Hanging(Slow):
    """Does not come back from the first step that has four decodes."""

    def execute(self, plan):
        if plan.num_decodes == 4:
            time.sleep(3_600)
        return super().execute(plan)


class Sleepy(ByteTokenizer):
    """Does not come back from a long text."""

    def encode(self, text, add_special_tokens=True):
        if len(text) > 1_000:
            time.sleep(3_600)
        return super().encode(text, add_special_tokens)


class Tokenising(Slow):
    """Has such a tokenizer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tokenizer = Sleepy()


class Endless(ScriptedExecutor):
    """Is never ready."""

    @classmethod
    def from_engine_args(cls, args):
        time.sleep(3_600)

"""Executors for servers that are processes of their own."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

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
    """Raises in a step of two decodes, and fails at the sixth token of what begins with ``bad``."""

    @classmethod
    def from_engine_args(cls, args):
        return cls(step_time=0.01, num_kv_blocks=1_024, fail_rows={"bad": 5})

    def execute(self, plan):
        if plan.num_decodes == 2:
            raise RuntimeError("an inner secret")
        return super().execute(plan)


class Hanging(Slow):
    """Does not come back from a step that is run when the file ``$SIGN`` is there."""

    def execute(self, plan):
        if has_sign():
            time.sleep(3_600)
        return super().execute(plan)


class Braked(Slow):
    """Slow until the file ``$SIGN`` is there, then as fast as it goes."""

    def execute(self, plan):
        if has_sign():
            self.step_time = 0.0
        return super().execute(plan)


def has_sign():
    """Whether the test has given its sign."""
    return Path(os.environ["SIGN"]).exists()


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

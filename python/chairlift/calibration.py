"""Calibration: iterations of many shapes on the real engine, and a fit of what they took.

Requests with random prompts are served in groups that make the engine run decodes, prefill and both
together. Each iteration's shape and time come from the engine's own log. Some of the mixed groups
are held out of the fit and tell its error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift import _core
from chairlift.cost_model import CostCoefficients, Shapes
from chairlift.engine import LocalEngine
from chairlift.errors import ModelError
from chairlift.prompts import ParsedPrompt
from chairlift.sampling import SamplingParams

_DECODES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (16, 256, 1_024)
_CHUNKS = (16, 48, 128, 256, 512, 1_024, 2_048)
_MIXED = (6, 12, 24)
_STREAMS = (12, 24, 48)
"""Requests that come one after the other, as they do in life, not all at once."""
_GAP = 2
"""Iterations between two of them."""
_MOST_PROMPT_TOKENS = 8_192
"""Of a group of decodes: its prefill is not what it is there for."""
_STEPS = 12
"""Output tokens of each answer in a group of decodes."""
_SPARE = 32
"""Tokens of the longest sequence that are left for output."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are served together: prompt and output lengths."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    is_held_out: bool = False
    gap: int = 0
    """Iterations after which the next one comes; 0: all come at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Iterations: ``[I, 6]`` shapes (as :data:`chairlift.cost_model.Shapes`) and their times."""

    shapes: Shapes
    time_us: Floats  # [I]

    def error(self, costs: CostCoefficients) -> float:
        """Mean absolute error of predictions, relative to the measured time."""
        return float(np.abs(costs.predict_us(self.shapes) / self.time_us - 1).mean())

    def sigma(self, costs: CostCoefficients) -> float:
        """Standard deviation of the logarithm of measured over predicted time."""
        return float(np.log(self.time_us / costs.predict_us(self.shapes)).std())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration found."""

    learned: dict[str, Any]
    """Coefficients, and how many iterations they are from, as the core says it."""
    costs: CostCoefficients
    fitted: Log
    held_out: Log


def groups(limits: dict[str, int], *, rounds: int, seed: int) -> list[Group]:
    """Choose what is served, in a random order, the held-out groups at the end.

    ``limits`` are those of the engine: nothing is longer or more than it holds.
    """
    chance = random.Random(seed)
    longest = limits["max_model_len"] - _SPARE
    pool = limits["num_kv_blocks"] * limits["block_size"]
    made, held_out = [], []
    for _ in range(rounds):
        made += [
            Group(f"decode {count} after {context}", ((context, _STEPS),) * count)
            for count in _DECODES
            for context in _CONTEXTS
            if count * context <= _MOST_PROMPT_TOKENS
        ]
        made += [Group(f"prefill {chunk}", ((chunk, 1),)) for chunk in _CHUNKS]
        made.append(Group("prefill in chunks", ((3 * limits["max_num_batched_tokens"], 1),)))
        made += [Group(f"mixed {count}", _mix(count, chance)) for count in _MIXED * 2]
        made += [Group(f"stream {count}", _mix(count, chance), gap=_GAP) for count in _STREAMS]
        held_out += [Group(f"mixed {count}", _mix(count, chance), True) for count in (3, 9, 18)]
        held_out.append(Group("stream 30", _mix(30, chance), True, gap=_GAP))
    chance.shuffle(made)
    fitting = []
    for group in [*made, *held_out]:
        lengths = tuple((min(prompt, longest), output) for prompt, output in group.lengths)
        lengths = lengths[: limits["max_num_seqs"]]
        if lengths and sum(map(sum, lengths)) + 16 * len(lengths) <= pool:
            fitting.append(replace(group, lengths=lengths))
    return fitting


def _mix(count: int, chance: random.Random) -> tuple[tuple[int, int], ...]:
    """Short and long prompts and outputs, so that some decode while others are computed."""
    return tuple((int(16 * 2 ** chance.uniform(0, 6)), chance.randint(4, 28)) for _ in range(count))


def calibrate(
    engine: LocalEngine, chosen: list[Group], *, seed: int, progress: Callable[[Group], object]
) -> Calibration:
    """Serve the groups and fit what their iterations took.

    Raises:
        ModelError: there were too few iterations to learn from.
    """
    logs: dict[bool, list[Log]] = {False: [], True: []}
    chance = random.Random(seed)
    _serve(engine, Group("warm-up", ((64, 4), (16, 4))), chance)
    for group in chosen:
        since = _last_step(engine)
        _serve(engine, group, chance)
        logs[group.is_held_out].append(_read(engine, since))
        progress(group)
    fitted, held_out = (_joined(logs[key]) for key in (False, True))
    learned = _core.fit_cost_model(np.ascontiguousarray(fitted.shapes).ravel(), fitted.time_us)
    if learned is None:
        raise ModelError(
            f"{len(fitted.time_us)} iterations are too few to learn from; the engine's limits "
            "leave room for too little"
        )
    costs = CostCoefficients.of(learned)
    return Calibration(learned=learned, costs=costs, fitted=fitted, held_out=held_out)


def _serve(engine: LocalEngine, group: Group, chance: random.Random) -> None:
    """Serve a group to its end."""
    vocab_size = engine.tokenizer.vocab_size
    wanted = set()
    for prompt_tokens, output_tokens in group.lengths:
        tokens = [chance.randrange(vocab_size // 4, vocab_size) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        parsed = ParsedPrompt(token_ids=tokens)
        request, _ = engine.prepare(parsed, tokens, params)
        wanted.add(engine.client.submit(request))
        for _ in range(group.gap):
            if wanted:
                wanted -= _ended(engine)
    while wanted:
        wanted -= _ended(engine)


def _ended(engine: LocalEngine) -> set[int]:
    """Wait for an iteration; which requests ended with it."""
    batch = engine.client.wait(None)
    if batch is None:
        raise ModelError(f"the engine ended: {engine.end_reason}")
    return {ended.request_id for ended in batch.ended()}


def _last_step(engine: LocalEngine) -> int:
    steps = engine.client.iterations()["step"]
    return int(steps[-1]) if len(steps) else 0


def _read(engine: LocalEngine, since: int) -> Log:
    log = engine.client.iterations(since)
    return Log(shapes=log["shape"], time_us=np.maximum(log["duration"] * 1e6, 1.0))


def _joined(logs: list[Log]) -> Log:
    return Log(
        shapes=np.concatenate([np.empty((0, 6)), *(log.shapes for log in logs)]),
        time_us=np.concatenate([np.empty(0), *(log.time_us for log in logs)]),
    )


def lines(calibration: Calibration) -> Iterator[str]:
    """Tell the fit and its errors."""
    costs, learned = calibration.costs, calibration.learned
    terms = {
        "every iteration": costs.t0_us,
        "a sequence": costs.t_seq_us,
        "reading the weights": costs.t_weights_us,
        "a token": costs.t_tok_us,
        "1,000 tokens of a decode's context": 1e3 * costs.t_ctx_us,
        "a million pairs of prefill": 1e6 * costs.t_pair_us,
        "a sample": costs.t_sample_us,
    }
    if costs.t_copy_us:
        terms["a block copied from or to the host"] = costs.t_copy_us
    width = max(map(len, terms))
    yield f"{learned['num_observations']} iterations fitted, in microseconds:"
    for name, value in terms.items():
        yield f"  {name:<{width}}  {value:12,.1f}"
    yield f"mean absolute error: {calibration.fitted.error(costs):.1%} of those fitted"
    held_out = calibration.held_out
    if len(held_out.time_us):
        yield (
            f"mean absolute error: {held_out.error(costs):.1%} of {len(held_out.time_us)} held out "
            "(mixed shapes)"
        )
    yield (
        f"mean absolute error: {learned['mean_error']:.1%} of predictions made as they came, which "
        "follow how fast the machine is at the moment"
    )

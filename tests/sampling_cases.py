"""Rows for the tests of samplers: at random, laid out as the scheduler does, and their checks."""

from __future__ import annotations

import numpy as np

from chairlift.executor import RaggedLogprobs, RowResets
from chairlift.sampler.reference import ReferenceRow

NEAR = 1e-4
"""Scores this close may come out in another order: they are float32 here, float64 there."""


def resets(rows: dict[int, ReferenceRow]) -> RowResets:
    """Lay out rows as the scheduler does."""
    ids, bias_ids, bias_values, suppressed = [], [], [], []
    id_ranges, bias_ranges, suppressed_ranges = [], [], []
    for row in rows.values():
        id_ranges.append((len(ids), len(ids) + len(row.prompt_ids) + len(row.output_ids)))
        ids += [*row.prompt_ids, *row.output_ids]
        bias_ranges.append((len(bias_ids), len(bias_ids) + len(row.bias)))
        bias_ids += row.bias.keys()
        bias_values += row.bias.values()
        suppressed_ranges.append((len(suppressed), len(suppressed) + len(row.suppressed_ids)))
        suppressed += row.suppressed_ids
    floats = [
        (
            r.temperature,
            r.top_p,
            r.min_p,
            r.repetition_penalty,
            r.presence_penalty,
            r.frequency_penalty,
        )
        for r in rows.values()
    ]
    ints = [
        (
            r.top_k,
            np.uint64(r.seed).astype(np.int64),
            r.child,
            r.logprobs,
            len(r.prompt_ids),
            r.min_tokens,
        )
        for r in rows.values()
    ]
    return RowResets(
        rows=np.array(list(rows), np.int32),
        floats=np.array(floats, np.float32).reshape(-1, 6),
        ints=np.array(ints, np.int64).reshape(-1, 6),
        id_ranges=np.array(id_ranges, np.int32).reshape(-1, 2),
        bias_ranges=np.array(bias_ranges, np.int32).reshape(-1, 2),
        suppressed_ranges=np.array(suppressed_ranges, np.int32).reshape(-1, 2),
        ids=np.array(ids, np.int32),
        bias_ids=np.array(bias_ids, np.int32),
        bias_values=np.array(bias_values, np.float32),
        suppressed_ids=np.array(suppressed, np.int32),
    )


def random_row(rng: np.random.Generator, vocab_size: int) -> ReferenceRow:
    def maybe(chance, value, otherwise):
        return value() if rng.random() < chance else otherwise

    def ids(most):
        return rng.integers(0, vocab_size, size=int(rng.integers(0, most))).tolist()

    def f32(value):
        return float(np.float32(value))

    return ReferenceRow(
        temperature=f32(maybe(0.8, lambda: rng.uniform(0.05, 2.5), 0.0)),
        top_p=f32(maybe(0.5, lambda: rng.uniform(0.01, 1.0), 1.0)),
        min_p=f32(maybe(0.3, lambda: rng.uniform(0.0, 0.5), 0.0)),
        repetition_penalty=f32(maybe(0.3, lambda: rng.uniform(0.5, 2.0), 1.0)),
        presence_penalty=f32(maybe(0.3, lambda: rng.uniform(-2, 2), 0.0)),
        frequency_penalty=f32(maybe(0.3, lambda: rng.uniform(-2, 2), 0.0)),
        top_k=maybe(0.5, lambda: int(rng.integers(1, vocab_size + 10)), 0),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        child=int(rng.integers(0, 5)),
        logprobs=maybe(0.3, lambda: int(rng.integers(0, 25)), -1),
        min_tokens=maybe(0.3, lambda: int(rng.integers(1, 6)), 0),
        prompt_ids=ids(20),
        output_ids=ids(20),
        bias={i: f32(rng.normal(0, 5)) for i in ids(4)},
        suppressed_ids=sorted(set(ids(4)))[: vocab_size - 1],
    )


def check_logprobs(
    found: RaggedLogprobs | None, i: int, expected: list[tuple[int, float]], where: str
) -> None:
    if found is None:
        assert not expected, where
        return
    entries = slice(found.offsets[i], found.offsets[i + 1])
    ids, values = found.token_ids[entries], found.values[entries]
    assert ids.tolist() == [token_id for token_id, _ in expected], where
    np.testing.assert_allclose(values, [v for _, v in expected], atol=2e-6, rtol=2e-6)

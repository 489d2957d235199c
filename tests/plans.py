"""Step plans made by hand, to drive an executor without the scheduler.

Each sequence gets its own contiguous run of blocks; rows are the sequences in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from chairlift.executor import RowResets, StepPlan


@dataclass
class Sequence:
    """One sequence as the scheduler would keep it."""

    row: int
    token_ids: list[int]
    blocks: list[int]
    num_prompt: int = field(init=False)
    num_computed: int = 0

    def __post_init__(self):
        self.num_prompt = len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


def place(prompts: list[list[int]], *, max_tokens: int, block_size: int) -> list[Sequence]:
    """Give each prompt a row, and blocks for all the tokens it will have."""
    sequences, free = [], 0
    for row, prompt in enumerate(prompts):
        count = -(-(len(prompt) + max_tokens) // block_size)
        sequences.append(Sequence(row, list(prompt), list(range(free, free + count))))
        free += count
    return sequences


def blocks_needed(sequences: list[Sequence]) -> int:
    return sum(len(sequence.blocks) for sequence in sequences)


def greedy_resets(rows: list[int]) -> RowResets:
    count = len(rows)
    floats = np.zeros((count, 6), dtype=np.float32)
    floats[:, 1] = floats[:, 3] = 1.0  # top_p, repetition penalty
    ints = np.zeros((count, 6), dtype=np.int64)
    ints[:, 3] = -1  # no logprobs
    ranges = np.zeros((count, 2), dtype=np.int32)
    ids = np.empty(0, dtype=np.int32)
    values = np.empty(0, dtype=np.float32)
    return RowResets(
        np.array(rows, dtype=np.int32), floats, ints, ranges, ranges, ranges, ids, ids, values, ids
    )


def make_plan(
    sequences: list[Sequence],
    *,
    block_size: int,
    chunk: int = 1 << 30,
    copies: tuple[tuple[int, int], ...] = (),
    copy_locations: tuple[tuple[int, int], ...] | None = None,
    on_device: bool = False,
    num_best: int | None = None,
    step: int = 1,
) -> StepPlan:
    """Schedule every sequence for its next ``chunk`` tokens; sample those that get their last.

    ``copies`` are within the device unless ``copy_locations`` says otherwise. ``on_device`` leaves
    the ids of decode tokens to the executor's memory of them; with ``num_best`` all prompt tokens
    are scored.
    """
    order = sorted(sequences, key=lambda s: len(s.token_ids) - s.num_computed > 1)  # decodes first
    counts = [min(chunk, len(s.token_ids) - s.num_computed) for s in order]
    tokens, sources, positions, slots, scored, sampled = [], [], [], [], [], []
    for sequence, count in zip(order, counts, strict=True):
        begin = sequence.num_computed
        decode = begin >= sequence.num_prompt
        for position in range(begin, begin + count):
            hide = on_device and decode
            tokens.append(0 if hide else sequence.token_ids[position])
            sources.append(int(hide))
            positions.append(position)
            block = sequence.blocks[position // block_size]
            slots.append(block * block_size + position % block_size)
        if begin + count == len(sequence.token_ids):
            scored.append(len(tokens) - 1)
            sampled.append(sequence)
    num_decodes = sum(count == 1 for count in counts)
    used = [-(-(s.num_computed + c) // block_size) for s, c in zip(order, counts, strict=True)]
    return StepPlan(
        step=step,
        num_decodes=num_decodes,
        num_prefills=len(order) - num_decodes,
        rows=_int32(s.row for s in order),
        adapter_ids=_int32(-1 for _ in order),
        query_start_loc=_offsets(counts),
        seq_lens=_int32(s.num_computed + c for s, c in zip(order, counts, strict=True)),
        token_ids=_int32(tokens),
        token_sources=_frozen(np.array(sources, dtype=np.uint8)),
        positions=_int32(positions),
        slot_mapping=_frozen(np.array(slots, dtype=np.int64)),
        block_table_offsets=_offsets(used),
        block_ids=_int32(b for s, n in zip(order, used, strict=True) for b in s.blocks[:n]),
        logits_indices=_int32(scored),
        sample_rows=_int32(s.row for s in sampled),
        sample_output_indices=_int32(len(s.output_ids) for s in sampled),
        mask_rows=_int32([]),
        **_scores(order, counts, num_best),
        block_copies=_frozen(np.array(copies, dtype=np.int32).reshape(-1, 2)),
        block_copy_locations=_frozen(
            np.array(copy_locations or [(0, 0)] * len(copies), dtype=np.uint8).reshape(-1, 2)
        ),
        resets=greedy_resets([s.row for s in order if s.num_computed == 0]),
    )


def run_step(executor, sequences: list[Sequence], plan: StepPlan):
    """Run ``plan`` and advance the sequences by it."""
    executor.launch(plan)
    result = executor.collect()
    assert not result.statuses.any()
    by_row = {sequence.row: sequence for sequence in sequences}
    for row, context in zip(plan.rows, plan.seq_lens, strict=True):
        by_row[int(row)].num_computed = int(context)
    for row, token in zip(plan.sample_rows, result.token_ids, strict=True):
        by_row[int(row)].token_ids.append(int(token))
    return result


def generate(executor, prompts: list[list[int]], *, max_tokens: int, block_size: int, **options):
    """Run all prompts together, greedily, to ``max_tokens`` each; return their output ids."""
    sequences = place(prompts, max_tokens=max_tokens, block_size=block_size)
    while running := [s for s in sequences if len(s.output_ids) < max_tokens]:
        run_step(executor, running, make_plan(running, block_size=block_size, **options))
    return [sequence.output_ids for sequence in sequences]


def _scores(order, counts, num_best):
    """Score every prompt token that a chunk predicts."""
    indices, targets, begin = [], [], 0
    for sequence, count in zip(order, counts, strict=True):
        if num_best is not None:
            last = min(sequence.num_computed + count, sequence.num_prompt - 1)
            for position in range(sequence.num_computed, last):
                indices.append(begin + position - sequence.num_computed)
                targets.append(sequence.token_ids[position + 1])
        begin += count
    return {
        "score_indices": _int32(indices),
        "score_token_ids": _int32(targets),
        "score_num_best": _int32(num_best for _ in indices),
    }


def _frozen(array):
    array.flags.writeable = False  # as the scheduler's own arrays are
    return array


def _int32(values):
    return _frozen(np.array(list(values), dtype=np.int32))


def _offsets(counts):
    return _frozen(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))

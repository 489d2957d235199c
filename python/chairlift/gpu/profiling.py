"""The step by which a device's memory is measured."""

from __future__ import annotations

import numpy as np

from chairlift.executor import NO_ADAPTER, RowResets, StepPlan


def profiling_plan(*, tokens: int, samples: int, max_model_len: int, block_size: int) -> StepPlan:
    """Plan a step that takes the most memory: a full budget of prefill, and every row sampled.

    All its blocks are block 0, and no token is written to it.
    """
    tokens = min(tokens, samples * max_model_len)
    lengths = np.full(-(-tokens // max_model_len), max_model_len)
    lengths[-1] = tokens - max_model_len * (len(lengths) - 1)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    tables = np.concatenate(([0], np.cumsum(-(-lengths // block_size))))
    none, no_floats = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    pairs = np.empty((0, 2), dtype=np.int32)
    return StepPlan(
        step=0,
        num_decodes=0,
        num_prefills=len(lengths),
        rows=np.arange(len(lengths), dtype=np.int32),
        adapter_ids=np.full(len(lengths), NO_ADAPTER, dtype=np.int32),
        query_start_loc=starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        token_ids=np.zeros(tokens, dtype=np.int32),
        token_sources=np.zeros(tokens, dtype=np.uint8),
        positions=(np.arange(tokens) % max_model_len).astype(np.int32),
        slot_mapping=np.full(tokens, -1, dtype=np.int64),
        block_table_offsets=tables.astype(np.int32),
        block_ids=np.zeros(tables[-1], dtype=np.int32),
        logits_indices=(np.arange(samples) % tokens).astype(np.int32),
        sample_rows=np.arange(samples, dtype=np.int32),
        sample_output_indices=np.zeros(samples, dtype=np.int32),
        mask_rows=none,
        score_indices=none,
        score_token_ids=none,
        score_num_best=none,
        block_copies=pairs,
        block_copy_locations=np.empty((0, 2), dtype=np.uint8),
        resets=RowResets(
            none,
            np.empty((0, 6), dtype=np.float32),
            np.empty((0, 6), dtype=np.int64),
            pairs,
            pairs,
            pairs,
            none,
            none,
            no_floats,
            none,
        ),
    )

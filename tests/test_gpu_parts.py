"""What the CUDA executor is made of, as far as no device is needed."""

from __future__ import annotations

import dataclasses
from mmap import PAGESIZE

import numpy as np
import pytest
import torch

from chairlift.errors import ModelError, UnsupportedStepError
from chairlift.gpu.attention import cut_step, padded
from chairlift.gpu.device import DeviceMemory
from chairlift.gpu.graphs import GraphLadder, GraphUse
from chairlift.gpu.memory import kv_memory
from chairlift.gpu.pinning import new_ranges
from chairlift.gpu.plan_buffers import ListBuffer
from chairlift.gpu.profiling import profiling_plan
from chairlift.gpu.sampling import rows_with_edits
from plans import greedy_resets, make_plan, place


class Host:
    """As much of a device as buffers need."""

    torch_device = torch.device("cpu")

    def host_tensor(self, size, dtype):
        return torch.zeros(size, dtype=dtype)


class TestGraphLadder:
    def test_every_step_gets_the_smallest_graph_that_it_fits(self):
        ladder = GraphLadder(max_num_seqs=200, max_chunks=32, most_items=1_000)
        rng = np.random.default_rng(0)
        for _ in range(2_000):
            sequences = int(rng.integers(1, 201))
            chunks = rng.integers(1, rng.choice([2, 4, 9]), sequences)
            items, is_split = int(chunks.sum()), bool((chunks > 1).any())
            shape = ladder.choose(sequences, items, is_split=is_split)
            assert (shape is None) == (items > 1_000)
            if shape is None:
                continue
            assert shape.sequences >= sequences
            assert shape.items >= items
            assert shape.is_split == is_split
            fitting = [
                other
                for other in ladder.shapes
                if other.sequences >= sequences
                and other.items >= items
                and other.is_split == is_split
            ]
            assert shape == min(fitting)

    @pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 9, 64, 100, 256, 1_000])
    def test_padding_is_a_quarter_at_most(self, largest):
        ladder = GraphLadder(max_num_seqs=largest, max_chunks=1, most_items=10_000)
        rungs = [shape.sequences for shape in ladder.shapes]
        assert rungs == sorted(set(rungs))
        assert rungs[-1] == largest
        for sequences in range(1, largest + 1):
            rung = ladder.choose(sequences, sequences, is_split=False).sequences
            assert rung <= max(8, 1.25 * sequences + 8)
            assert sequences < 40 or rung <= 1.25 * sequences

    def test_there_are_not_too_many(self):
        ladder = GraphLadder(max_num_seqs=256, max_chunks=512, most_items=4_000)
        assert len(ladder.shapes) < 120
        assert len(set(ladder.shapes)) == len(ladder.shapes)

    def test_a_model_of_one_chunk_has_nothing_to_combine(self):
        ladder = GraphLadder(max_num_seqs=16, max_chunks=1, most_items=1_000)
        assert not any(shape.is_split for shape in ladder.shapes)

    def test_more_sequences_than_there_are_rows_get_none(self):
        ladder = GraphLadder(max_num_seqs=4, max_chunks=2, most_items=100)
        assert ladder.choose(5, 5, is_split=False) is None

    def test_padding_is_told(self):
        use = GraphUse(replays=10, eager=2, sequences=75, padding=25)
        assert str(use) == (
            "10 decode steps replayed (25.0% of their rows padding), 2 launched one by one"
        )
        assert "0.0%" in str(GraphUse())


class TestMemory:
    def test_what_is_left_is_for_blocks(self):
        memory = DeviceMemory(total=1_000, free=600)
        assert kv_memory(memory, 0.9, 100) == 900 - 400 - 100

    @pytest.mark.parametrize("step_bytes", [500, 501, 10_000])
    def test_nothing_left_is_an_error(self, step_bytes):
        with pytest.raises(ModelError, match="no device memory is left for the KV cache"):
            kv_memory(DeviceMemory(1_000, 600), 0.9, step_bytes)


class TestPinning:
    @staticmethod
    def arrays(*places):
        """Arrays at (offset, size) of one page-aligned piece of memory."""
        memory = np.zeros(20 * PAGESIZE, np.uint8)
        skip = -memory.__array_interface__["data"][0] % PAGESIZE
        memory = memory[skip:]
        first = memory.__array_interface__["data"][0] // PAGESIZE
        return first, [memory[begin : begin + size] for begin, size in places]

    def test_ranges_are_whole_pages_and_meet_nowhere(self):
        first, arrays = self.arrays((10, 20), (PAGESIZE - 1, 2), (5 * PAGESIZE, PAGESIZE))
        known = set()
        assert new_ranges(arrays, known) == [(first, first + 2), (first + 5, first + 6)]
        assert known == {first, first + 1, first + 5}

    def test_pages_are_pinned_once_whoever_else_is_on_them(self):
        first, (one, other) = self.arrays((0, 2 * PAGESIZE), (PAGESIZE, 2 * PAGESIZE))
        known = set()
        assert new_ranges([one], known) == [(first, first + 2)]
        assert new_ranges([other], known) == [(first + 2, first + 3)]
        assert new_ranges([one, other], known) == []

    def test_an_empty_array_has_no_page(self):
        assert new_ranges([np.empty(0)], set()) == []


class TestCutting:
    def plan(self):
        """Two decodes, then a chunk of 70 after 30 and one of 3."""
        sequences = place([[1], [1] * 100, [1] * 100, [1] * 3], max_tokens=9, block_size=16)
        sequences[1].num_computed = 99
        sequences[2].num_computed = 30
        return make_plan(sequences, block_size=16)

    def test_decodes_are_cut_along_keys_and_chunks_into_tiles(self):
        work = cut_step(self.plan(), group=2, chunk_tokens=64)
        (decode,) = work.decode
        assert set(decode.items[:, 0].tolist()) == {0, 1}
        assert decode.max_query_tokens == 1
        assert sorted(map(tuple, work.prefill.tolist())) == [(2, 0), (2, 1), (2, 2), (3, 0)]

    def test_lists_are_padded_with_nobody(self):
        entries = np.arange(6, dtype=np.int32).reshape(2, 3)
        assert padded(entries, 2) is entries
        assert padded(entries, 4).tolist() == [[0, 1, 2], [3, 4, 5], [-1] * 3, [-1] * 3]


class TestListBuffer:
    def test_lists_keep_their_places(self):
        buffer = ListBuffer(100, Host())
        lists = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([7, 8], np.int32)]
        sent = buffer.send(1, lists)
        views = buffer.views([(2, 3), (2,)])
        for one, other, wanted in zip(sent, views, lists, strict=True):
            assert one.data_ptr() == other.data_ptr()
            assert one.tolist() == wanted.tolist()

    def test_the_next_step_does_not_touch_what_may_not_be_copied_yet(self):
        buffer = ListBuffer(10, Host())
        buffer.send(1, [np.array([1, 2], np.int32)])
        buffer.send(2, [np.array([3, 4], np.int32)])
        assert sorted(host[:2].tolist() for host in buffer._hosts) == [[1, 2], [3, 4]]

    def test_more_than_fits_is_refused(self):
        with pytest.raises(UnsupportedStepError, match="more than 3 entries"):
            ListBuffer(3, Host()).send(1, [np.zeros((2, 2), np.int32)])


@pytest.mark.parametrize(
    ("tokens", "longest", "lengths"),
    [(100, 1_000, [100]), (100, 40, [40, 40, 20]), (80, 40, [40, 40]), (1_000, 40, [40] * 4)],
)
def test_the_profiled_step_is_as_large_as_a_step_can_be(tokens, longest, lengths):
    """But no larger than the longest sequence, and four of them."""
    plan = profiling_plan(tokens=tokens, samples=4, max_model_len=longest, block_size=16)
    assert plan.seq_lens.tolist() == lengths
    assert np.diff(plan.query_start_loc).tolist() == lengths
    assert len(plan.token_ids) == len(plan.positions) == sum(lengths)
    assert plan.positions.max() == max(lengths) - 1
    assert np.diff(plan.block_table_offsets).tolist() == [-(-n // 16) for n in lengths]
    assert len(plan.block_ids) == plan.block_table_offsets[-1]
    assert not plan.block_ids.any()
    assert (plan.slot_mapping < 0).all()
    assert len(plan.logits_indices) == len(plan.sample_rows) == 4
    assert plan.logits_indices.max() < len(plan.token_ids)


@pytest.mark.parametrize(
    ("array", "column", "value"),
    [
        ("floats", 3, 1.1),
        ("floats", 4, 0.2),
        ("floats", 5, -0.2),
        ("bias_ranges", 1, 1),
        ("suppressed_ranges", 1, 2),
    ],
)
def test_rows_whose_logits_are_edited_are_known(array, column, value):
    resets = greedy_resets([4, 5])
    assert rows_with_edits(resets).tolist() == [False, False]
    changed = getattr(resets, array).copy()
    changed[1, column] = value
    resets = dataclasses.replace(resets, **{array: changed})
    assert rows_with_edits(resets).tolist() == [False, True]

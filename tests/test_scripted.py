"""The scripted executor is a specification: it must notice what is wrong, and say what is right."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from chairlift.errors import UnsupportedStepError
from chairlift.executor import RowResets, StepPlan, check_supported
from chairlift.testing import ByteTokenizer, PlanError, ScriptedExecutor, check_plan


def i32(*values):
    return np.array(values, dtype=np.int32)


def resets(*rows):
    count = len(rows)
    ints = np.zeros((count, 6), dtype=np.int64)
    ints[:, 3] = -1
    empty = np.zeros((count, 2), dtype=np.int32)
    return RowResets(
        rows=i32(*rows),
        floats=np.zeros((count, 6), dtype=np.float32),
        ints=ints,
        id_ranges=empty,
        bias_ranges=empty,
        suppressed_ranges=empty,
        ids=i32(),
        bias_ids=i32(),
        bias_values=np.zeros(0, dtype=np.float32),
        suppressed_ids=i32(),
    )


def nothing_more(num_seqs, copies=()):
    """The arrays of what a step may have beside its sequences and samples: block copies."""
    return {
        "adapter_ids": np.full(num_seqs, -1, dtype=np.int32),
        "mask_rows": i32(),
        "score_indices": i32(),
        "score_token_ids": i32(),
        "score_num_best": i32(),
        "block_copies": np.array(copies, dtype=np.int32).reshape(-1, 2),
        "block_copy_locations": np.zeros((len(copies), 2), dtype=np.uint8),
    }


def two_sequences():
    """A decode at position 5 (blocks 3, 1) and a prefill of three tokens (block 2), blocks of 4."""
    return StepPlan(
        step=1,
        num_decodes=1,
        num_prefills=1,
        rows=i32(4, 2),
        query_start_loc=i32(0, 1, 4),
        seq_lens=i32(6, 3),
        token_ids=i32(10, 20, 21, 22),
        token_sources=np.zeros(4, dtype=np.uint8),
        positions=i32(5, 0, 1, 2),
        slot_mapping=np.array([5, 8, 9, 10], dtype=np.int64),
        block_table_offsets=i32(0, 2, 3),
        block_ids=i32(3, 1, 2),
        logits_indices=i32(0, 3),
        sample_rows=i32(4, 2),
        sample_output_indices=i32(1, 0),
        **nothing_more(2),
        resets=resets(),
    )


def test_a_right_plan_passes():
    check_plan(two_sequences(), block_size=4, num_kv_blocks=4)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("num_decodes", 2, "counts"),
        ("rows", i32(4, 4), "share a row"),
        ("sample_rows", i32(4, 4), "sampled twice"),
        ("positions", i32(4, 0, 1, 2), "positions"),
        ("slot_mapping", np.array([5, 8, 9, 11], dtype=np.int64), "disagree"),
        ("slot_mapping", np.array([5, 8, 9, 9], dtype=np.int64), "share a slot"),
        ("block_ids", i32(3, 7, 2), "beyond the pool"),
        ("block_table_offsets", i32(0, 1, 3), "short"),
        ("query_start_loc", i32(0, 2, 4), "decode has several"),
        ("query_start_loc", i32(0, 4, 4), "no token"),
        ("query_start_loc", i32(0, 1, 3), "query_start_loc"),
        ("logits_indices", i32(0, 1), "last token"),
        ("logits_indices", i32(0, 9), "of no token"),
        ("seq_lens", i32(6), "seq_lens"),
        ("sample_output_indices", i32(1), "sample_output_indices"),
        ("adapter_ids", i32(-1), "adapter_ids"),
        ("mask_rows", i32(3), "masked but not sampled"),
        ("score_token_ids", i32(21), "score_token_ids"),
        ("score_num_best", i32(0), "score_num_best"),
        ("score_indices", i32(1, 9), "of no token"),
        ("score_indices", i32(2, 1), "order"),
        ("score_indices", i32(2, 3), "wrong token"),
        ("block_copies", i32(0, 2), "block_copy_locations"),
        ("block_copies", i32([0, 9], [0, 3]), "beyond the pool"),
        ("block_copies", i32([0, 2], [2, 3]), "depends on another"),
        ("block_copies", i32([0, 2], [1, 2]), "depends on another"),
    ],
)
def test_a_wrong_plan_is_noticed(field, value, complaint):
    right = dataclasses.replace(
        two_sequences(),
        score_indices=i32(1, 2),
        score_token_ids=i32(21, 22),
        score_num_best=i32(0, 3),
        block_copies=i32([0, 2], [0, 3]),
        block_copy_locations=np.zeros((2, 2), dtype=np.uint8),
    )
    check_plan(right, block_size=4, num_kv_blocks=4)
    plan = dataclasses.replace(right, **{field: value})
    with pytest.raises(PlanError, match=complaint):
        check_plan(plan, block_size=4, num_kv_blocks=4)


@pytest.mark.parametrize(
    ("copies", "locations", "complaint"),
    [
        ([[0, 0], [1, 0]], [[0, 1], [1, 0]], None),  # what goes to the host makes room
        ([[0, 0], [0, 2]], [[1, 0], [1, 0]], None),  # two from one block
        ([[1, 0], [0, 0]], [[1, 0], [0, 1]], "come first"),
        ([[0, 0], [1, 0]], [[0, 1], [0, 1]], "depends on another"),
        ([[0, 7], [7, 0]], [[0, 1], [1, 0]], "depends on another"),
        ([[0, 1]], [[1, 1]], "from host to host"),
        ([[9, 1]], [[0, 1]], "beyond the pool"),
    ],
)
def test_copies_from_and_to_the_host(copies, locations, complaint):
    plan = dataclasses.replace(
        two_sequences(),
        block_copies=i32(*copies),
        block_copy_locations=np.array(locations, dtype=np.uint8),
    )
    if complaint is None:
        check_plan(plan, block_size=4, num_kv_blocks=4)
        return
    with pytest.raises(PlanError, match=complaint):
        check_plan(plan, block_size=4, num_kv_blocks=4)


def prefill(tokens, block_ids, row=0):
    """A whole prompt in one chunk, blocks of 4."""
    count = len(tokens)
    positions = np.arange(count, dtype=np.int32)
    blocks = np.array(block_ids, dtype=np.int64)
    return StepPlan(
        step=1,
        num_decodes=0,
        num_prefills=1,
        rows=i32(row),
        query_start_loc=i32(0, count),
        seq_lens=i32(count),
        token_ids=i32(*tokens),
        token_sources=np.zeros(count, dtype=np.uint8),
        positions=positions,
        slot_mapping=blocks[positions // 4] * 4 + positions % 4,
        block_table_offsets=i32(0, len(block_ids)),
        block_ids=i32(*block_ids),
        logits_indices=i32(count - 1),
        sample_rows=i32(row),
        sample_output_indices=i32(0),
        **nothing_more(1),
        resets=resets(row),
    )


def decode(token, position, block_ids, output_index, *, copies=()):
    slot = block_ids[position // 4] * 4 + position % 4
    return StepPlan(
        step=2,
        num_decodes=1,
        num_prefills=0,
        rows=i32(0),
        query_start_loc=i32(0, 1),
        seq_lens=i32(position + 1),
        token_ids=i32(token),
        token_sources=np.zeros(1, dtype=np.uint8),
        positions=i32(position),
        slot_mapping=np.array([slot], dtype=np.int64),
        block_table_offsets=i32(0, len(block_ids)),
        block_ids=i32(*block_ids),
        logits_indices=i32(0),
        sample_rows=i32(0),
        sample_output_indices=i32(output_index),
        **nothing_more(1, copies),
        resets=resets(),
    )


def small(**options):
    return ScriptedExecutor(block_size=4, num_kv_blocks=8, **options)


def run(executor, plan):
    executor.launch(plan)
    return executor.collect()


def test_the_longest_header_gives_the_script():
    executor = small(scripts={"a": "short", "ab": "LONG", (1, 2): [7]})
    assert run(executor, prefill(b"abc", [0])).token_ids.tolist() == [ord("L")]
    assert run(executor, prefill(b"axc", [1])).token_ids.tolist() == [ord("s")]
    assert run(executor, prefill([1, 2, 3], [2])).token_ids.tolist() == [7]
    assert executor.expected("abc", 9) == [*b"LONG", executor.eos_token_id]


def test_the_pool_is_read_back_through_the_block_table():
    executor = small()
    prompt = list(b"abcdef")
    first = int(run(executor, prefill(prompt, [5, 2])).token_ids[0])
    second = int(run(executor, decode(first, 6, [5, 2], 1)).token_ids[0])
    assert [first, second] == executor.expected(prompt, 2)
    # The same decode through a wrong table: other content, or none.
    run(executor, prefill(b"abcx", [7], row=1))
    assert int(run(executor, decode(first, 6, [7, 2], 1)).token_ids[0]) != second
    with pytest.raises(PlanError, match="never written"):
        run(executor, decode(first, 6, [0, 2], 1))


def test_a_wrong_output_token_is_noticed():
    executor = small(scripts={"ab": "xyz"})
    run(executor, prefill(b"ab", [0]))
    with pytest.raises(PlanError, match="was sampled"):
        run(executor, decode(ord("q"), 2, [0], 1))


def test_block_copies_come_before_the_writes():
    executor = small()
    prompt = list(b"abc")
    first = int(run(executor, prefill(prompt, [0])).token_ids[0])
    copied = run(executor, decode(first, 3, [6], 1, copies=[(0, 6)]))
    assert int(copied.token_ids[0]) == executor.expected(prompt, 2)[1]


def beyond(plan, what):
    """The plan with something that a plain executor does not do."""
    changes = {
        "host": {
            "block_copies": i32([0, 6], [1, 7]),
            "block_copy_locations": np.array([[0, 0], [1, 0]], dtype=np.uint8),
        },
        "masks": {"mask_rows": plan.sample_rows},
        "adapters": {"adapter_ids": i32(3)},
    }
    return dataclasses.replace(plan, **changes[what])


@pytest.mark.parametrize("what", ["host", "masks", "adapters"])
def test_what_a_plain_executor_cannot_do_is_refused(what):
    with pytest.raises(UnsupportedStepError, match=f"step 1 .*{what}"):
        check_supported(beyond(prefill(b"abc", [0]), what))


@pytest.mark.parametrize("what", ["masks", "adapters"])
def test_what_it_cannot_do_is_refused(what):
    executor = small()
    with pytest.raises(UnsupportedStepError, match=f"step 1 .*{what}"):
        run(executor, beyond(prefill(b"abc", [0]), what))


def test_blocks_go_to_the_host_and_come_back():
    executor = small()
    prompt = list(b"abcd")
    first = int(run(executor, prefill(prompt, [0])).token_ids[0])
    # Its block goes to block 5 of the host, and is taken by somebody else in that step.
    taken = dataclasses.replace(
        prefill(b"wxyz", [0], row=1),
        block_copies=i32([0, 5]),
        block_copy_locations=np.array([[0, 1]], dtype=np.uint8),
    )
    run(executor, taken)
    back = decode(first, 4, [3, 2], 1, copies=[(5, 3)])
    back.block_copy_locations[:, 0] = 1
    assert int(run(executor, back).token_ids[0]) == executor.expected(prompt, 2)[1]


def test_what_steps_had_in_them_is_kept():
    executor = small()
    run(executor, prefill(b"abc", [0]))
    (summary,) = executor.steps
    assert (summary.num_prefills, summary.num_tokens, summary.num_resets) == (1, 3, 1)


def test_byte_tokenizer_table_agrees_with_decode():
    tokenizer = ByteTokenizer()
    table = tokenizer.token_table(300)
    assert len(table.special) == 300
    for token in range(300):
        raw = table.bytes[table.offsets[token] : table.offsets[token + 1]]
        if token < 256:
            assert raw == bytes([token])
        elif token < 258:
            assert raw.decode() == tokenizer.decode([token], skip_special_tokens=False)
            assert table.special[token]
        else:
            assert raw == b""
    assert tokenizer.decode(tokenizer.encode("grüß dich 👋")) == "grüß dich 👋"


def test_a_step_stands_still_by_its_number_and_each_needs_a_release():
    executor = small(hold_at_steps=[1, 3])
    plan = prefill(b"abc", [0])
    done = []

    def execute():
        for step in (1, 2, 3, 4):
            run(executor, dataclasses.replace(plan, step=step))
            done.append(step)

    thread = threading.Thread(target=execute)
    thread.start()
    for before in ([], [1, 2]):
        executor.wait_held()
        assert done == before
        executor.release()
    thread.join(60)
    assert done == [1, 2, 3, 4]
    with pytest.raises(TimeoutError):
        executor.wait_held(0.0)

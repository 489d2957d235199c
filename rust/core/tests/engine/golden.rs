//! Golden plans: a handful of fixed scenarios, written out. A change of any decision shows here.

use std::fmt::Write;

use chairlift_core::config::Settings;
use chairlift_core::iteration::plan::StepPlan;

use super::harness::{Harness, request};

/// The plan as text: one line a sequence, `row: positions -> slots | blocks`, samples marked `*`.
fn render(plan: &StepPlan) -> String {
    let mut text = format!("step {}, {} decodes", plan.step, plan.num_decodes);
    for [source, destination] in &plan.block_copies {
        let _ = write!(text, ", copy {source}>{destination}");
    }
    if !plan.resets.rows.is_empty() {
        let _ = write!(text, ", reset {:?}", plan.resets.rows);
    }
    for at in 0..plan.num_seqs() {
        let tokens = plan.query_start_loc[at] as usize..plan.query_start_loc[at + 1] as usize;
        let blocks =
            plan.block_table_offsets[at] as usize..plan.block_table_offsets[at + 1] as usize;
        let samples = plan
            .logits_indices
            .iter()
            .filter(|&&token| token as usize == tokens.end - 1)
            .count();
        let _ = write!(
            text,
            "\n  {}: {}..{} -> {:?} | {:?}{}",
            plan.rows[at],
            plan.positions[tokens.start],
            plan.seq_lens[at],
            &plan.slot_mapping[tokens],
            &plan.block_ids[blocks],
            " *".repeat(samples),
        );
    }
    text
}

fn settings() -> Settings {
    Settings {
        max_num_seqs: 3,
        max_num_batched_tokens: 8,
        max_model_len: 16,
        block_size: 2,
        num_kv_blocks: 8,
        watermark_blocks: Some(0),
        vocab_size: 100,
        ..Settings::default()
    }
}

/// Runs to the end and renders every plan.
fn plans(harness: &mut Harness) -> String {
    let mut plans = Vec::new();
    while harness.schedule() {
        plans.push(render(&harness.plan));
        harness.commit();
    }
    plans.join("\n")
}

#[test]
fn two_prompts_are_chunked_and_decode_together() {
    let mut harness = Harness::new(settings());
    harness.submit(request(1, vec![1, 2, 3, 4, 5], 2));
    harness.submit(request(2, vec![6, 7, 8, 9], 2));
    assert_eq!(
        plans(&mut harness),
        "\
step 1, 0 decodes, reset [0, 1]
  0: 0..5 -> [0, 1, 2, 3, 4] | [0, 1, 2] *
  1: 0..3 -> [6, 7, 8] | [3, 4]
step 2, 2 decodes
  0: 5..6 -> [5] | [0, 1, 2] *
  1: 3..4 -> [9] | [3, 4] *
step 3, 1 decodes
  1: 4..5 -> [10] | [3, 4, 5] *"
    );
}

#[test]
fn a_shared_prefix_is_computed_once() {
    let mut harness = Harness::new(settings());
    harness.submit(request(1, vec![1, 2, 3, 4, 5], 1));
    harness.step();
    harness.submit(request(2, vec![1, 2, 3, 4, 9], 1));
    assert_eq!(
        plans(&mut harness),
        "\
step 2, 1 decodes, reset [0]
  0: 4..5 -> [4] | [0, 1, 2] *"
    );
}

#[test]
fn siblings_fork_and_copy_the_open_block() {
    let mut harness = Harness::new(settings());
    let mut new = request(1, vec![1, 2, 3], 2);
    new.sampling.n = 2;
    harness.submit(new);
    assert_eq!(
        plans(&mut harness),
        "\
step 1, 0 decodes, reset [0, 1]
  0: 0..3 -> [0, 1, 2] | [0, 1] * *
step 2, 2 decodes, copy 1>2
  0: 3..4 -> [5] | [0, 2] *
  1: 3..4 -> [3] | [0, 1] *"
    );
}

#[test]
fn the_newest_gives_way_when_memory_runs_out() {
    let mut harness = Harness::new(Settings {
        enable_prefix_caching: false,
        num_kv_blocks: 5,
        max_model_len: 10,
        ..settings()
    });
    harness.submit(request(1, vec![1, 2, 3], 5));
    harness.submit(request(2, vec![4, 5, 6], 3));
    assert_eq!(
        plans(&mut harness),
        "\
step 1, 0 decodes, reset [0, 1]
  0: 0..3 -> [0, 1, 2] | [0, 1] *
  1: 0..3 -> [4, 5, 6] | [2, 3] *
step 2, 2 decodes
  0: 3..4 -> [3] | [0, 1] *
  1: 3..4 -> [7] | [2, 3] *
step 3, 1 decodes
  0: 4..5 -> [8] | [0, 1, 4] *
step 4, 1 decodes
  0: 5..6 -> [9] | [0, 1, 4] *
step 5, 1 decodes
  0: 6..7 -> [4] | [0, 1, 4, 2] *
step 6, 0 decodes, reset [0]
  0: 0..5 -> [0, 1, 2, 3, 8] | [0, 1, 4] *"
    );
}

//! Digests of what an engine decides and says: 64 bits for each array of a plan and for each batch of
//! outputs.
//!
//! They guard against accidents, not against forgery, so they are `XXH3` (Collet), which reads several
//! bytes a cycle; what they cost is mostly the block tables, which are whole in every plan. The memory is
//! read as it lies, so a log is replayed on a machine of the same byte order (all that we support are
//! little-endian).

use bytemuck::cast_slice;
use twox_hash::XxHash3_64;

use crate::iteration::plan::{RowResets, StepPlan};
use crate::output::{Event, Output, OutputBatch, Span};

/// Arrays of a plan.
const FIELDS: usize = 29;

/// An array of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanField {
    /// Its name, as in [`StepPlan`].
    pub name: &'static str,
    /// Its digest in the log; `None`: it was empty.
    pub logged: Option<u64>,
    /// Its digest now.
    pub replayed: Option<u64>,
}

/// What a log says of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlanDigest {
    /// Number of the step.
    pub step: u64,
    /// See [`StepPlan::num_decodes`].
    pub num_decodes: u32,
    /// Sequences in it.
    pub num_seqs: u32,
    /// Tokens in it.
    pub num_tokens: u32,
    /// Which arrays are not empty, the first in the lowest bit.
    present: u32,
    /// A digest for each of them.
    digests: Vec<[u8; 8]>,
}

impl PlanDigest {
    /// Digests a plan; keeps the memory.
    pub(crate) fn set(&mut self, plan: &StepPlan) {
        self.step = plan.step;
        self.num_decodes = plan.num_decodes as u32;
        self.num_seqs = plan.num_seqs() as u32;
        self.num_tokens = plan.num_tokens() as u32;
        self.present = 0;
        self.digests.clear();
        for (at, (_, bytes)) in arrays(plan).into_iter().enumerate() {
            if !bytes.is_empty() {
                self.present |= 1 << at;
                self.digests.push(XxHash3_64::oneshot(bytes).to_le_bytes());
            }
        }
    }

    /// The counts in which two plans may differ, by name: of this one, and of the other.
    pub fn counts(&self, other: &Self) -> [(&'static str, u64, u64); 4] {
        let of = |digest: &Self| {
            let PlanDigest {
                step,
                num_decodes,
                num_seqs,
                num_tokens,
                ..
            } = digest;
            [
                *step,
                (*num_seqs).into(),
                (*num_tokens).into(),
                (*num_decodes).into(),
            ]
        };
        let ([step, seqs, tokens, decodes], others) = (of(self), of(other));
        [
            ("step", step, others[0]),
            ("num_seqs", seqs, others[1]),
            ("num_tokens", tokens, others[2]),
            ("num_decodes", decodes, others[3]),
        ]
    }

    /// The first array that differs in the plan that `replayed` digests.
    pub fn first_difference(&self, replayed: &Self) -> Option<PlanField> {
        let names = arrays(&StepPlan::default()).map(|(name, _)| name);
        let fields = names.into_iter().enumerate().map(|(at, name)| PlanField {
            name,
            logged: self.digest(at),
            replayed: replayed.digest(at),
        });
        fields
            .into_iter()
            .find(|field| field.logged != field.replayed)
    }

    fn digest(&self, at: usize) -> Option<u64> {
        let before = self.present & ((1 << at) - 1);
        let is_present = self.present & (1 << at) != 0;
        let digest = self.digests.get(before.count_ones() as usize);
        digest
            .filter(|_| is_present)
            .map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// Every array of a plan, by name, as bytes. A field that is added to the plan must be added here.
fn arrays(plan: &StepPlan) -> [(&'static str, &[u8]); FIELDS] {
    let StepPlan {
        step: _,
        num_decodes: _,
        rows,
        adapter_ids,
        query_start_loc,
        seq_lens,
        token_ids,
        token_sources,
        positions,
        slot_mapping,
        block_table_offsets,
        block_ids,
        logits_indices,
        sample_rows,
        sample_output_indices,
        mask_rows,
        score_indices,
        score_token_ids,
        score_num_best,
        block_copies,
        block_copy_locations,
        resets,
        tables: _,
    } = plan;
    let RowResets {
        rows: reset_rows,
        floats,
        ints,
        id_ranges,
        bias_ranges,
        suppressed_ranges,
        ids,
        bias_ids,
        bias_values,
        suppressed_ids,
    } = resets;
    [
        ("rows", cast_slice(rows)),
        ("query_start_loc", cast_slice(query_start_loc)),
        ("seq_lens", cast_slice(seq_lens)),
        ("token_ids", cast_slice(token_ids)),
        ("positions", cast_slice(positions)),
        ("block_ids", cast_slice(block_ids)),
        ("block_table_offsets", cast_slice(block_table_offsets)),
        ("slot_mapping", cast_slice(slot_mapping)),
        ("sample_rows", cast_slice(sample_rows)),
        ("sample_output_indices", cast_slice(sample_output_indices)),
        ("logits_indices", cast_slice(logits_indices)),
        ("token_sources", cast_slice(token_sources)),
        ("adapter_ids", cast_slice(adapter_ids)),
        ("mask_rows", cast_slice(mask_rows)),
        ("score_indices", cast_slice(score_indices)),
        ("score_token_ids", cast_slice(score_token_ids)),
        ("score_num_best", cast_slice(score_num_best)),
        ("block_copies", cast_slice(block_copies)),
        ("block_copy_locations", cast_slice(block_copy_locations)),
        ("resets.rows", cast_slice(reset_rows)),
        ("resets.floats", cast_slice(floats)),
        ("resets.ints", cast_slice(ints)),
        ("resets.id_ranges", cast_slice(id_ranges)),
        ("resets.ids", cast_slice(ids)),
        ("resets.bias_ranges", cast_slice(bias_ranges)),
        ("resets.bias_ids", cast_slice(bias_ids)),
        ("resets.bias_values", cast_slice(bias_values)),
        ("resets.suppressed_ranges", cast_slice(suppressed_ranges)),
        ("resets.suppressed_ids", cast_slice(suppressed_ids)),
    ]
}

const K1: u64 = 0x9e37_79b9_7f4a_7c15;
const K2: u64 = 0xbf58_476d_1ce4_e5b9;
const K3: u64 = 0x94d0_49bb_1331_11eb;

/// Digests a batch of outputs, but for the values of log-probabilities, which no log has.
pub(crate) fn digest_outputs(batch: &OutputBatch, scratch: &mut Vec<u8>) -> u64 {
    let mut state = XxHash3_64::oneshot(cast_slice(&batch.token_ids));
    state ^= XxHash3_64::oneshot(batch.text.as_bytes()).rotate_left(1);
    for event in &batch.events {
        let word = match event {
            Event::Output(output) if is_common(event) => digest_output(output),
            rare => {
                scratch.clear();
                let bytes = postcard::to_extend(rare, std::mem::take(scratch));
                *scratch = bytes.expect("a vector takes everything");
                XxHash3_64::oneshot(scratch)
            }
        };
        state = (state ^ word).wrapping_mul(K1).rotate_left(23);
    }
    state
}

/// Whether an event is the common one: tokens of an answer that goes on.
pub(crate) fn is_common(event: &Event) -> bool {
    matches!(event, Event::Output(output) if output.finish.is_none())
}

/// The common event, of which there is one for each running sequence: mixed word by word.
fn digest_output(output: &Output) -> u64 {
    let pack = |span: Span| {
        let range = span.range();
        (range.start as u64) << 32 | range.end as u64
    };
    let who = output.request.0.wrapping_mul(K1) ^ u64::from(output.child);
    let said = pack(output.tokens).wrapping_mul(K2) ^ pack(output.text).wrapping_mul(K3);
    who ^ said.rotate_left(17) ^ pack(output.logprobs).wrapping_mul(K1).rotate_left(40)
}

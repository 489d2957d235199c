//! Where the tokens of one step stand: the ragged arrays of a step plan, owned and checked once.
//!
//! Every layer of a step uses the same [`AttentionBatch`]. What does not depend on a layer is checked
//! when it is built (lengths, orders, signs); what does (block size, pool size, table length) is one
//! comparison per call against extremes kept here. After both, every index the kernels form is in
//! bounds. The cutting into work items is done at the first layer and kept for the others.

use std::sync::OnceLock;

use crate::attention::items::{Item, ItemShape, cut};

/// What can be wrong with a call; nothing is written when one is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    /// The arrays of the batch contradict each other.
    #[error("attention batch: {0}")]
    Batch(String),
    /// The layer or its tensors do not fit the batch.
    #[error("attention call: {0}")]
    Call(String),
}

/// Borrowed arrays of a step plan, before they are checked.
#[derive(Clone, Copy, Debug)]
pub struct BatchArrays<'a> {
    /// `[N + 1]` where each sequence's tokens begin.
    pub query_start_loc: &'a [i32],
    /// `[N]` context length of each sequence after the step.
    pub seq_lens: &'a [i32],
    /// `[T]` position of each token.
    pub positions: &'a [i32],
    /// `[T]` cache slot of each token.
    pub slot_mapping: &'a [i64],
    /// `[N + 1]` where each sequence's block ids begin.
    pub block_table_offsets: &'a [i32],
    /// `[B]` the block tables.
    pub block_ids: &'a [i32],
}

/// The checked arrays of one step.
#[derive(Debug)]
pub struct AttentionBatch {
    query_start_loc: Vec<u32>,
    seq_lens: Vec<u32>,
    positions: Vec<u32>,
    slot_mapping: Vec<u64>,
    block_table_offsets: Vec<u32>,
    block_ids: Vec<u32>,
    max_position: u32,
    max_slot: u64,
    max_block: u32,
    items: OnceLock<(ItemShape, Vec<Item>)>,
}

impl AttentionBatch {
    /// Checks and copies the arrays.
    pub fn new(arrays: BatchArrays<'_>) -> Result<Self, AttentionError> {
        let query_start_loc = unsigned("query_start_loc", arrays.query_start_loc)?;
        let seq_lens = unsigned("seq_lens", arrays.seq_lens)?;
        let positions = unsigned("positions", arrays.positions)?;
        let block_table_offsets = unsigned("block_table_offsets", arrays.block_table_offsets)?;
        let block_ids = unsigned("block_ids", arrays.block_ids)?;
        let mut slot_mapping = Vec::with_capacity(arrays.slot_mapping.len());
        for &slot in arrays.slot_mapping {
            let slot = u64::try_from(slot)
                .map_err(|_| AttentionError::Batch(format!("slot {slot} is negative")))?;
            slot_mapping.push(slot);
        }

        let tokens = positions.len();
        if slot_mapping.len() != tokens {
            let slots = slot_mapping.len();
            return Err(AttentionError::Batch(format!(
                "{tokens} positions but {slots} slots"
            )));
        }
        if let Some(slot) = repeated(&slot_mapping) {
            // Threads would write it at once.
            return Err(AttentionError::Batch(format!(
                "two tokens go to slot {slot}"
            )));
        }
        let sequences = seq_lens.len();
        ragged("query_start_loc", &query_start_loc, sequences, tokens)?;
        ragged(
            "block_table_offsets",
            &block_table_offsets,
            sequences,
            block_ids.len(),
        )?;
        for (i, &seq_len) in seq_lens.iter().enumerate() {
            let queries = query_start_loc[i + 1] - query_start_loc[i];
            if queries > seq_len {
                return Err(AttentionError::Batch(format!(
                    "sequence {i} has {queries} query tokens but a context of {seq_len}"
                )));
            }
        }
        Ok(Self {
            max_position: positions.iter().copied().max().unwrap_or(0),
            max_slot: slot_mapping.iter().copied().max().unwrap_or(0),
            max_block: block_ids.iter().copied().max().unwrap_or(0),
            query_start_loc,
            seq_lens,
            positions,
            slot_mapping,
            block_table_offsets,
            block_ids,
            items: OnceLock::new(),
        })
    }

    /// Number of query tokens in the step.
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Number of sequences in the step.
    pub fn num_sequences(&self) -> usize {
        self.seq_lens.len()
    }

    /// Largest position of a token.
    pub fn max_position(&self) -> usize {
        self.max_position as usize
    }

    /// First query token of sequence `i`, and how many it has.
    pub fn queries(&self, i: usize) -> (usize, usize) {
        let begin = self.query_start_loc[i] as usize;
        (begin, self.query_start_loc[i + 1] as usize - begin)
    }

    /// Context length of sequence `i`.
    pub fn seq_len(&self, i: usize) -> usize {
        self.seq_lens[i] as usize
    }

    /// Block table of sequence `i`.
    pub fn block_table(&self, i: usize) -> &[u32] {
        let begin = self.block_table_offsets[i] as usize;
        &self.block_ids[begin..self.block_table_offsets[i + 1] as usize]
    }

    /// Position of token `t`.
    pub fn position(&self, t: usize) -> usize {
        self.positions[t] as usize
    }

    /// Cache slot of token `t`.
    pub fn slot(&self, t: usize) -> usize {
        self.slot_mapping[t] as usize
    }

    /// Checks that a cache of this size holds everything the batch refers to.
    pub fn check_cache(&self, num_blocks: usize, block_size: usize) -> Result<(), AttentionError> {
        let slots = num_blocks as u64 * block_size as u64;
        if self.num_tokens() > 0 && self.max_slot >= slots {
            let slot = self.max_slot;
            return Err(AttentionError::Call(format!(
                "slot {slot} is beyond the cache of {num_blocks} blocks of {block_size}"
            )));
        }
        if !self.block_ids.is_empty() && self.max_block as usize >= num_blocks {
            let block = self.max_block;
            return Err(AttentionError::Call(format!(
                "block {block} is beyond the cache of {num_blocks} blocks"
            )));
        }
        for i in 0..self.num_sequences() {
            let (seq_len, blocks) = (self.seq_len(i), self.block_table(i).len());
            if seq_len > blocks * block_size {
                return Err(AttentionError::Call(format!(
                    "sequence {i} has {seq_len} tokens but only {blocks} blocks of {block_size}"
                )));
            }
        }
        Ok(())
    }

    /// The work items for layers of this shape, cut at the first call.
    ///
    /// A second shape within one step (a model with unlike layers) is cut anew each time.
    pub fn with_items<R>(&self, shape: ItemShape, run: impl FnOnce(&[Item]) -> R) -> R {
        let (kept_shape, items) = self.items.get_or_init(|| (shape, cut(self, shape)));
        if *kept_shape == shape {
            run(items)
        } else {
            run(&cut(self, shape))
        }
    }
}

fn unsigned(name: &str, values: &[i32]) -> Result<Vec<u32>, AttentionError> {
    match values.iter().find(|&&value| value < 0) {
        Some(value) => Err(AttentionError::Batch(format!(
            "{name} holds {value}, which is negative"
        ))),
        None => Ok(values.iter().map(|&value| value.cast_unsigned()).collect()),
    }
}

fn ragged(name: &str, starts: &[u32], rows: usize, total: usize) -> Result<(), AttentionError> {
    let is_sorted = starts.is_sorted();
    if starts.len() != rows + 1 || starts[0] != 0 || starts[rows] as usize != total || !is_sorted {
        return Err(AttentionError::Batch(format!(
            "{name} must hold {} rising offsets from 0 to {total}",
            rows + 1
        )));
    }
    Ok(())
}

/// A value that occurs twice.
fn repeated(values: &[u64]) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let pair = sorted.windows(2).find(|pair| pair[0] == pair[1])?;
    Some(pair[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: BatchArrays<'static> = BatchArrays {
        query_start_loc: &[0, 1, 3],
        seq_lens: &[5, 2],
        positions: &[4, 0, 1],
        slot_mapping: &[12, 0, 1],
        block_table_offsets: &[0, 2, 3],
        block_ids: &[2, 1, 0],
    };

    #[test]
    fn a_consistent_batch_is_accepted() {
        let batch = AttentionBatch::new(GOOD).unwrap();
        assert_eq!(batch.queries(1), (1, 2));
        assert_eq!(batch.block_table(0), [2, 1]);
        assert_eq!(batch.check_cache(3, 8), Ok(()));
    }

    #[test]
    fn contradictions_are_refused() {
        let cases = [
            BatchArrays {
                query_start_loc: &[0, 3, 1],
                ..GOOD
            },
            BatchArrays {
                query_start_loc: &[0, 1],
                ..GOOD
            },
            BatchArrays {
                seq_lens: &[5, 1],
                ..GOOD
            },
            BatchArrays {
                positions: &[4, -1, 1],
                ..GOOD
            },
            BatchArrays {
                slot_mapping: &[12, 0],
                ..GOOD
            },
            BatchArrays {
                slot_mapping: &[12, 0, -1],
                ..GOOD
            },
            BatchArrays {
                slot_mapping: &[12, 0, 12],
                ..GOOD
            },
            BatchArrays {
                block_table_offsets: &[0, 2, 4],
                ..GOOD
            },
        ];
        for arrays in cases {
            let result = AttentionBatch::new(arrays);
            assert!(
                matches!(result, Err(AttentionError::Batch(_))),
                "{arrays:?}"
            );
        }
    }

    #[test]
    fn a_cache_that_is_too_small_is_refused() {
        let batch = AttentionBatch::new(GOOD).unwrap();
        for (num_blocks, block_size) in [(2, 8), (3, 4), (3, 2)] {
            assert!(
                batch.check_cache(num_blocks, block_size).is_err(),
                "{num_blocks} {block_size}"
            );
        }
    }
}

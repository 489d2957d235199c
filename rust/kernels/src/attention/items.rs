//! Cutting one layer's attention into work items of similar cost.
//!
//! An item is a few query tokens of one sequence against the keys of one kv head. Long prefill chunks
//! are cut along the queries. A few queries with a long context (a decode) are also cut along the
//! keys, at [`SEGMENT`] boundaries, when there would be too few items to keep the threads busy: each
//! part leaves its softmax state in a partial result and whoever finishes last merges them in order.
//! The merge takes place at the same boundaries when one item does all segments, so cutting never
//! changes a result.

use crate::batch::AttentionBatch;
use crate::tile::SEGMENT;

/// Rows (query tokens times heads of a group) that one item aims at: enough to pay for packing keys.
const ROWS_PER_ITEM: usize = 96;

/// What the cutting depends on besides the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemShape {
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Query heads per key/value head.
    pub group: usize,
    /// Threads that will share the items.
    pub threads: usize,
}

/// One piece of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index of the sequence in the batch.
    pub sequence: u32,
    /// Key/value head.
    pub kv_head: u32,
    /// First query token, counted within the sequence's tokens of this step.
    pub query_begin: u32,
    /// End of the query tokens.
    pub query_end: u32,
    /// First segment of keys.
    pub segment_begin: u32,
    /// End of the segments.
    pub segment_end: u32,
    /// Where the parts meet, if the keys are cut.
    pub split: Option<Split>,
}

/// The part of an item that is one of several over the same rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Number of this set of rows among all that are split, which counts finished segments.
    pub counter: u32,
    /// Index of the rows' first segment among the partial results.
    pub first_partial: u32,
    /// Segments in all parts together.
    pub num_segments: u32,
}

impl Item {
    /// Query tokens of the item.
    pub fn num_queries(&self) -> usize {
        (self.query_end - self.query_begin) as usize
    }

    /// Segments of keys of the item.
    pub fn num_segments(&self) -> usize {
        (self.segment_end - self.segment_begin) as usize
    }
}

/// Pairs of a query row and a key that the batch needs, per kv head.
pub fn total_cost(batch: &AttentionBatch, group: usize) -> usize {
    let cost = |i| {
        let (_, queries) = batch.queries(i);
        queries * group * (batch.seq_len(i) - queries / 2)
    };
    (0..batch.num_sequences()).map(cost).sum()
}

/// Cuts the batch into items, the long ones first.
pub fn cut(batch: &AttentionBatch, shape: ItemShape) -> Vec<Item> {
    let queries_per_item = (ROWS_PER_ITEM / shape.group).max(1);
    // Parts should be small against a thread's share, or the last one makes the others wait.
    let share = shape.kv_heads * total_cost(batch, shape.group) / shape.threads.max(1);
    let largest = (share / 4).max(SEGMENT * shape.group);
    let mut cutter = Cutter {
        shape,
        largest,
        items: Vec::new(),
        counters: 0,
        partials: 0,
    };
    for i in 0..batch.num_sequences() {
        let (_, queries) = batch.queries(i);
        for query_begin in (0..queries).step_by(queries_per_item) {
            let query_end = (query_begin + queries_per_item).min(queries);
            let context = batch.seq_len(i) - queries + query_end;
            for kv_head in 0..shape.kv_heads {
                cutter.add(Item {
                    sequence: i as u32,
                    kv_head: kv_head as u32,
                    query_begin: query_begin as u32,
                    query_end: query_end as u32,
                    segment_begin: 0,
                    segment_end: context.div_ceil(SEGMENT) as u32,
                    split: None,
                });
            }
        }
    }
    let mut items = cutter.items;
    items.sort_by_key(|item| std::cmp::Reverse(item.num_queries() * item.num_segments()));
    items
}

/// Number of split row sets and of partial results that `items` refer to.
pub fn split_sizes(items: &[Item]) -> (usize, usize) {
    let splits = items.iter().filter_map(|item| item.split);
    let counters = splits
        .clone()
        .map(|split| split.counter + 1)
        .max()
        .unwrap_or(0);
    let partials = splits
        .map(|split| split.first_partial + split.num_segments)
        .max()
        .unwrap_or(0);
    (counters as usize, partials as usize)
}

struct Cutter {
    shape: ItemShape,
    largest: usize,
    items: Vec<Item>,
    counters: u32,
    partials: u32,
}

impl Cutter {
    fn add(&mut self, item: Item) {
        let rows = item.num_queries() * self.shape.group;
        let segments = item.num_segments();
        let per_part = (self.largest / (rows * SEGMENT)).max(1);
        if self.shape.threads == 1 || segments <= per_part {
            self.items.push(item);
            return;
        }
        let num_segments = item.segment_end;
        let split = Split {
            counter: self.counters,
            first_partial: self.partials,
            num_segments,
        };
        self.counters += 1;
        self.partials += num_segments;
        for segment_begin in (0..num_segments).step_by(per_part) {
            let segment_end = (segment_begin + per_part as u32).min(num_segments);
            self.items.push(Item {
                segment_begin,
                segment_end,
                split: Some(split),
                ..item
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BatchArrays;

    fn batch(sequences: &[(i32, i32)]) -> AttentionBatch {
        let mut starts = vec![0];
        let (mut seq_lens, mut positions, mut offsets) = (vec![], vec![], vec![0]);
        for &(queries, seq_len) in sequences {
            starts.push(starts.last().unwrap() + queries);
            seq_lens.push(seq_len);
            positions.extend(seq_len - queries..seq_len);
            offsets.push(0);
        }
        AttentionBatch::new(BatchArrays {
            query_start_loc: &starts,
            seq_lens: &seq_lens,
            positions: &positions,
            slot_mapping: &(0..positions.len() as i64).collect::<Vec<_>>(),
            block_table_offsets: &offsets,
            block_ids: &[],
        })
        .unwrap()
    }

    /// Every (sequence, kv head, query, segment that it sees) is in exactly one item.
    #[test]
    fn items_cover_everything_once() {
        for sequences in [
            vec![(1, 1)],
            vec![(1, 4000)],
            vec![(1, 300), (1, 5000), (7, 7), (200, 900)],
            vec![(1000, 1000), (1, 17)],
        ] {
            let batch = batch(&sequences);
            for threads in [1, 2, 64] {
                for group in [1, 3, 8, 200] {
                    let shape = ItemShape {
                        kv_heads: 2,
                        group,
                        threads,
                    };
                    let mut seen = std::collections::HashSet::new();
                    for item in cut(&batch, shape) {
                        for query in item.query_begin..item.query_end {
                            for segment in item.segment_begin..item.segment_end {
                                assert!(seen.insert((item.sequence, item.kv_head, query, segment)));
                            }
                        }
                    }
                    for (i, &(queries, seq_len)) in sequences.iter().enumerate() {
                        for query in 0..queries {
                            let visible = (seq_len - queries + query + 1).cast_unsigned() as usize;
                            for segment in 0..visible.div_ceil(SEGMENT) {
                                let key = (i as u32, 1, query.cast_unsigned(), segment as u32);
                                assert!(seen.contains(&key), "{key:?} of {sequences:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_lone_decode_is_split_among_threads() {
        let batch = batch(&[(1, 4096)]);
        let items = cut(
            &batch,
            ItemShape {
                kv_heads: 1,
                group: 4,
                threads: 4,
            },
        );
        assert!(items.len() >= 4, "{items:?}");
        assert_eq!(split_sizes(&items), (1, 16));
    }
}

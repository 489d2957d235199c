//! The block tables of a plan, of which only what has changed is written.
//!
//! A plan's memory comes back after a few steps with what it said before, and while a batch stays the same
//! most of that still holds: a sequence that decodes gets a block more every so many steps. So the plan
//! remembers whose tables it has. As long as the next step has the same, they stay, and those behind a
//! block that is added are moved up in one piece; from the first other table on all are written anew. What
//! the plan says does not depend on what it said before.

use crate::memory::blocks::BlockTable;

/// What the arrays of a plan's block tables hold, while a step is written and until the next one is.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenTables {
    /// Each table in the arrays.
    tables: Vec<Written>,
    /// Tables of the step that were added so far.
    count: usize,
    /// All of them were in the arrays already, and are still where they were.
    are_kept: bool,
    /// Blocks that such tables have beyond those in the arrays: which table, and the block.
    grown: Vec<(usize, i32)>,
}

/// A table as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    stamp: u64,
    num_blocks: usize,
}

/// The arrays of a plan's block tables.
pub(crate) struct TableArrays<'a> {
    pub(crate) block_ids: &'a mut Vec<i32>,
    pub(crate) offsets: &'a mut Vec<i32>,
}

impl PartialEq for WrittenTables {
    /// It is no part of what a plan says.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl WrittenTables {
    /// For so many tables, with a block more each, without growing.
    pub(crate) fn with_capacity(tables: usize) -> Self {
        Self {
            tables: Vec::with_capacity(tables),
            grown: Vec::with_capacity(tables),
            ..Self::default()
        }
    }

    /// Begins a step; what was written for the last one stays in the arrays.
    pub(crate) fn begin(&mut self) {
        self.count = 0;
        self.are_kept = true;
    }

    /// Adds the table of the step's next sequence.
    #[inline]
    pub(crate) fn add(&mut self, arrays: &mut TableArrays<'_>, table: &BlockTable) {
        let new = Written {
            stamp: table.stamp(),
            num_blocks: table.blocks().len(),
        };
        if !self.are_kept || self.tables.get(self.count) != Some(&new) {
            self.add_changed(arrays, table, new);
        }
        self.count += 1;
    }

    /// Ends a step: what is behind its last table goes.
    pub(crate) fn end(&mut self, arrays: &mut TableArrays<'_>) {
        if self.are_kept {
            self.settle(arrays);
        }
    }

    #[inline(never)]
    fn add_changed(&mut self, arrays: &mut TableArrays<'_>, table: &BlockTable, new: Written) {
        let at = self.count;
        if self.are_kept {
            if let Some(written) = self.tables.get_mut(at)
                && written.stamp == new.stamp
            {
                let grown = table.blocks().iter().skip(written.num_blocks);
                self.grown.extend(grown.map(|block| (at, block.as_i32())));
                *written = new;
                return;
            }
            self.settle(arrays);
        }
        let blocks = table.blocks().iter();
        arrays.block_ids.extend(blocks.map(|block| block.as_i32()));
        arrays.offsets.push(arrays.block_ids.len() as i32);
        self.tables.push(new);
    }

    /// Forgets all tables but those that are kept, and gives those their new blocks. The offsets are made
    /// anew: what others may have written into a plan's arrays must not decide where anything goes.
    fn settle(&mut self, arrays: &mut TableArrays<'_>) {
        let TableArrays { block_ids, offsets } = arrays;
        self.are_kept = false;
        self.tables.truncate(self.count);
        let mut end = 0;
        offsets.clear();
        offsets.push(0);
        offsets.extend(self.tables.iter().map(|table| {
            end += table.num_blocks;
            end as i32
        }));
        block_ids.resize(end, 0);
        // From the last block on, so that what is moved up has room.
        let mut end = end - self.grown.len();
        let mut last = None;
        for (before, (at, block)) in self.grown.drain(..).enumerate().rev() {
            if last != Some(at) {
                last = Some(at);
                let table_end = offsets[at + 1] as usize - (before + 1);
                block_ids.copy_within(table_end..end, table_end + before + 1);
                end = table_end;
            }
            block_ids[end + before] = block;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::blocks::BlockPool;

    #[derive(Default)]
    struct Plan {
        written: WrittenTables,
        block_ids: Vec<i32>,
        offsets: Vec<i32>,
    }

    impl Plan {
        /// Writes tables; how many of them were not written anew, and how many blocks those got.
        fn write(&mut self, tables: &[BlockTable]) -> (usize, usize) {
            let mut arrays = TableArrays {
                block_ids: &mut self.block_ids,
                offsets: &mut self.offsets,
            };
            let (mut kept, mut grown) = (0, 0);
            self.written.begin();
            for table in tables {
                grown = grown.max(self.written.grown.len());
                self.written.add(&mut arrays, table);
                kept += usize::from(self.written.are_kept);
            }
            grown = grown.max(self.written.grown.len());
            self.written.end(&mut arrays);
            (kept, grown)
        }
    }

    /// Comings and goings, growth, copies on write and blocks given back, in plans that take turns.
    #[test]
    fn what_a_plan_says_does_not_depend_on_what_it_said_before() {
        let pool = BlockPool::new(2_000, 0);
        let mut state = 1_u64;
        let mut below = |bound: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % bound
        };
        let mut tables: Vec<BlockTable> = Vec::new();
        let mut plans = [Plan::default(), Plan::default()];
        let mut sums = [0; 3];
        for step in 0..4_000 {
            let mut copies = Vec::new();
            match below(16) {
                0 if tables.len() > 4 => drop(tables.remove(below(tables.len()))),
                1 if tables.len() < 24 => {
                    let mut table = pool.table();
                    table
                        .grow(below(20) as u32, &mut copies)
                        .expect("a pool that is large");
                    tables.insert(below(tables.len() + 1), table);
                }
                2 if !tables.is_empty() => {
                    let at = below(tables.len());
                    tables[at].release();
                    tables[at]
                        .grow(3, &mut copies)
                        .expect("a pool that is large");
                }
                3 if !tables.is_empty() => {
                    let at = below(tables.len());
                    let sibling = tables[at].fork();
                    let last = sibling.blocks().len().saturating_sub(1);
                    tables[at]
                        .grow_for_writing(last, 0, &mut copies)
                        .expect("a pool that is large");
                    assert_eq!(copies.is_empty(), sibling.blocks().is_empty());
                }
                _ => {}
            }
            for table in &mut tables {
                if below(4) == 0 && table.blocks().len() < 60 {
                    let count = 1 + u32::from(below(8) == 0);
                    table
                        .grow(count, &mut copies)
                        .expect("a pool that is large");
                }
            }
            let plan = &mut plans[step % 2];
            let (kept, grown) = plan.write(&tables);
            let (mut block_ids, mut offsets) = (Vec::new(), vec![0]);
            for table in &tables {
                block_ids.extend(table.blocks().iter().map(|block| block.as_i32()));
                offsets.push(block_ids.len() as i32);
            }
            assert_eq!(plan.offsets, offsets, "step {step}");
            assert_eq!(plan.block_ids, block_ids, "step {step}");
            sums = [sums[0] + tables.len(), sums[1] + kept, sums[2] + grown];
        }
        let [written, kept, grown] = sums;
        assert!(kept > written / 3 && kept < written, "{kept} of {written}");
        assert!(grown > 4_000, "{grown} blocks went between kept tables");
    }
}

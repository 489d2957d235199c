//! The block tables of a plan, of which only what has changed is written.
//!
//! A plan's memory comes back after a few steps with what it said before, and while a batch stays nearly the
//! same most of that still holds: a sequence that decodes gets a block more every so many steps, and a few
//! leave or join. So the plan remembers whose tables it has. Those that the next step has too stay, and are
//! moved in one piece to where others go or come, or get a block more. If too many do, from there on all are
//! written anew. What the plan says does not depend on what it said before.

use crate::memory::blocks::BlockTable;

/// Tables that come or go in a step before the rest is written anew.
const MOST_CHANGES: usize = 16;

/// What the arrays of a plan's block tables hold, while a step is written and until the next one is.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenTables {
    /// Each table in the arrays: those of the step, and behind them those that may still follow.
    tables: Vec<Written>,
    /// Tables of the step that were added so far.
    count: usize,
    /// What is in the arrays is kept, where the step has it.
    are_kept: bool,
    /// Tables of which the step has more than is in the arrays, and how many blocks more.
    grown: Vec<(usize, usize)>,
    /// Those blocks.
    new_blocks: Vec<i32>,
    /// Before which table one is in the arrays that the step has not, and how many blocks that has.
    gone: Vec<(usize, usize)>,
    /// Tables that came or went.
    num_changes: usize,
}

/// A table as it is in the arrays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    stamp: u64,
    num_blocks: usize,
}

impl Written {
    /// As it is now.
    pub(crate) fn of(table: &BlockTable) -> Self {
        Self {
            stamp: table.stamp(),
            num_blocks: table.num_blocks() as usize,
        }
    }
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
            tables: Vec::with_capacity(tables + MOST_CHANGES),
            grown: Vec::with_capacity(tables),
            new_blocks: Vec::with_capacity(tables),
            ..Self::default()
        }
    }

    /// Begins a step; what was written for the last one stays in the arrays.
    pub(crate) fn begin(&mut self) {
        self.count = 0;
        self.num_changes = 0;
        self.are_kept = true;
    }

    /// Adds the tables of the step's next sequences, which are known to be so; `table` has each.
    pub(crate) fn add_all<'a>(
        &mut self,
        arrays: &mut TableArrays<'_>,
        known: &[Written],
        table: impl Fn(usize) -> &'a BlockTable,
    ) {
        let mut at = 0;
        loop {
            if self.are_kept {
                let same = self.tables[self.count..].iter().zip(&known[at..]);
                let same = same.take_while(|(old, new)| old == new).count();
                self.count += same;
                at += same;
            }
            let Some(&new) = known.get(at) else {
                return;
            };
            self.add_changed(arrays, table(at), new);
            self.count += 1;
            at += 1;
        }
    }

    /// Ends a step: what is behind its last table goes.
    pub(crate) fn end(&mut self, arrays: &mut TableArrays<'_>) {
        if self.are_kept {
            self.settle(arrays);
        }
    }

    #[inline(never)]
    fn add_changed(&mut self, arrays: &mut TableArrays<'_>, table: &BlockTable, new: Written) {
        let ids = table.blocks().iter().map(|block| block.as_i32());
        if self.are_kept {
            self.find_place(new.stamp);
            if self.num_changes <= MOST_CHANGES {
                let missing = ids.skip(self.tables[self.count].num_blocks);
                self.grown.push((self.count, missing.len()));
                self.new_blocks.extend(missing);
                return;
            }
            self.settle(arrays);
        }
        arrays.block_ids.extend(ids);
        arrays.offsets.push(arrays.block_ids.len() as i32);
        self.tables.push(new);
    }

    /// Makes the step's next table the next that is kept: those before it are gone, or if it is not among the
    /// next few, it comes between them with no block yet.
    fn find_place(&mut self, stamp: u64) {
        let at = self.count;
        let mut next = self.tables[at..].iter().take(MOST_CHANGES);
        if let Some(before) = next.position(|table| table.stamp == stamp) {
            let gone = self.tables.drain(at..at + before);
            self.gone.extend(gone.map(|table| (at, table.num_blocks)));
            self.num_changes += before;
        } else {
            let num_blocks = 0;
            self.tables.insert(at, Written { stamp, num_blocks });
            self.num_changes += 1;
        }
    }

    /// Forgets all tables but those that are kept, moves those to where they belong, and gives them their new
    /// blocks. The offsets are made anew: what others may have written into a plan's arrays must not decide
    /// where anything goes.
    fn settle(&mut self, arrays: &mut TableArrays<'_>) {
        self.are_kept = false;
        self.tables.truncate(self.count);
        let TableArrays { block_ids, offsets } = arrays;
        self.close_gaps(block_ids);
        for &(at, num_blocks) in &self.grown {
            self.tables[at].num_blocks += num_blocks;
        }
        let mut end = write_offsets(offsets, &self.tables);
        block_ids.resize(end, 0);
        // From the last block on, so that what is moved up has room.
        let mut before = self.new_blocks.len();
        for (at, num_blocks) in self.grown.drain(..).rev() {
            let table_end = offsets[at + 1] as usize;
            block_ids.copy_within(table_end - before..end - before, table_end);
            before -= num_blocks;
            let new = &self.new_blocks[before..before + num_blocks];
            end = table_end - num_blocks;
            block_ids[end..table_end].copy_from_slice(new);
        }
        self.new_blocks.clear();
    }

    /// Moves kept tables down to where those before them were that are gone.
    fn close_gaps(&mut self, block_ids: &mut Vec<i32>) {
        let num_blocks = |tables: &[Written]| -> usize {
            let each = tables.iter().map(|table| table.num_blocks);
            each.sum()
        };
        let ends = self.gone.iter().skip(1).map(|&(at, _)| at);
        let ends = ends.chain([self.tables.len()]);
        let first = self.gone.first().map_or(0, |&(at, _)| at);
        let (mut begin, mut gap) = (num_blocks(&self.tables[..first]), 0);
        for (&(at, gone), next) in self.gone.iter().zip(ends) {
            gap += gone;
            let end = begin + num_blocks(&self.tables[at..next]);
            block_ids.resize(block_ids.len().max(end + gap), 0);
            block_ids.copy_within(begin + gap..end + gap, begin);
            begin = end;
        }
        self.gone.clear();
    }
}

/// Writes where each table ends; returns where the last one does.
fn write_offsets(offsets: &mut Vec<i32>, tables: &[Written]) -> usize {
    let mut end = 0;
    offsets.clear();
    offsets.push(0);
    offsets.extend(tables.iter().map(|table| {
        end += table.num_blocks;
        end as i32
    }));
    end
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
                let known = self.written.tables.len();
                let written = &mut self.written;
                written.add_all(&mut arrays, &[Written::of(table)], |_| table);
                grown = grown.max(self.written.new_blocks.len());
                let is_new = self.written.tables.len() > known;
                kept += usize::from(self.written.are_kept && !is_new);
            }
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
        let (mut sums, mut num_anew) = ([0; 3], 0);
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
                4 if below(8) == 0 => tables.reverse(),
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
            num_anew += u32::from(plan.written.num_changes > MOST_CHANGES);
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
        assert!(kept > written * 3 / 4, "{kept} of {written}");
        assert!(kept < written, "nobody came");
        assert!(grown > 4_000, "{grown} blocks went between kept tables");
        assert!(num_anew > 10, "{num_anew} steps changed too much");
    }
}

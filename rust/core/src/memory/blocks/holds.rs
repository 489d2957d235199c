//! What holds blocks: a sequence's table and a step's copies. Both are owned values that give their
//! blocks back when they are dropped; nobody but them changes who uses a block.

use super::{BlockHash, BlockId, BlockLocation, BlockPlace, BlockPool, OutOfBlocks};

/// A sequence's blocks, in order: a hold, released on drop.
pub struct BlockTable {
    pool: BlockPool,
    blocks: Vec<BlockId>,
    stamp: u64,
}

impl BlockTable {
    /// An empty table on `pool`.
    pub(super) fn new(pool: BlockPool) -> Self {
        let stamp = pool.0.borrow_mut().stamp();
        Self {
            pool,
            blocks: Vec::new(),
            stamp,
        }
    }

    /// The blocks, in order of position.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tells what it has: a table that bears the same stamp again has the same blocks, and perhaps more
    /// behind them. No two tables of a pool ever bear the same.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Makes room for `capacity` blocks, so that growing to it allocates nothing.
    pub fn reserve(&mut self, capacity: u32) {
        let extra = (capacity as usize).saturating_sub(self.blocks.len());
        self.blocks.reserve_exact(extra);
    }

    /// Appends `count` fresh blocks, or none.
    pub fn grow(&mut self, count: u32) -> Result<(), OutOfBlocks> {
        let mut pool = self.pool.0.borrow_mut();
        if pool.available() < count {
            return Err(OutOfBlocks);
        }
        self.blocks.extend((0..count).map_while(|_| pool.take()));
        Ok(())
    }

    /// Appends the cached blocks of `chain`, which [`BlockPool::find_prefix`] has just found.
    pub fn adopt(&mut self, chain: &[BlockHash]) {
        let mut pool = self.pool.0.borrow_mut();
        for &hash in chain {
            let Some(block) = pool.cache.find(hash) else {
                debug_assert!(false, "adopted a block that is not cached");
                return;
            };
            pool.share(block);
            self.blocks.push(block);
        }
    }

    /// A second table on the same blocks, with room for as many.
    #[must_use]
    pub fn fork(&self) -> BlockTable {
        let mut pool = self.pool.0.borrow_mut();
        for &block in &self.blocks {
            pool.share(block);
        }
        let stamp = pool.stamp();
        drop(pool);
        let mut blocks = Vec::with_capacity(self.blocks.capacity());
        blocks.extend_from_slice(&self.blocks);
        BlockTable {
            pool: self.pool.clone(),
            blocks,
            stamp,
        }
    }

    /// Makes the table writable from the block at `first` on, and `count` blocks longer; or changes
    /// nothing. Only the block at `first` can be shared among those: it is copied on write.
    ///
    /// Returns the copy to make, if there is one.
    pub fn grow_for_writing(
        &mut self,
        first: usize,
        count: u32,
    ) -> Result<Option<BlockCopy>, OutOfBlocks> {
        let mut pool = self.pool.0.borrow_mut();
        // A copy that reads the block is no other writer: it runs before anything is written.
        let shared = self
            .blocks
            .get_mut(first)
            .filter(|block| pool.blocks[block.index()].tables > 1);
        if pool.available() < count + u32::from(shared.is_some()) {
            return Err(OutOfBlocks);
        }
        let copy = match shared {
            None => None,
            Some(entry) => {
                let destination = pool.take().ok_or(OutOfBlocks)?;
                let source = std::mem::replace(entry, destination);
                pool.blocks[source.index()].copies_from += 1;
                pool.blocks[destination.index()].copies_to += 1;
                pool.release(source);
                self.stamp = pool.stamp();
                Some(BlockCopy {
                    pool: self.pool.clone(),
                    source,
                    destination,
                })
            }
        };
        self.blocks.extend((0..count).map_while(|_| pool.take()));
        Ok(copy)
    }

    /// Whether another table has the block at `position`, too.
    pub fn is_shared(&self, position: usize) -> bool {
        let block = self.blocks.get(position);
        block.is_some_and(|block| self.pool.0.borrow().blocks[block.index()].tables > 1)
    }

    /// Makes the full block at `position` findable by its content.
    pub fn publish(&self, position: usize, hash: BlockHash) {
        let block = self.blocks[position];
        let mut pool = self.pool.0.borrow_mut();
        if pool.blocks[block.index()].hash.is_none() && pool.cache.insert(hash, block) {
            pool.blocks[block.index()].hash = Some(hash);
        }
    }

    /// Blocks that dropping this table, and the copies into it, would make available now.
    pub fn num_exclusive(&self) -> u32 {
        self.num_exclusive_from(0)
    }

    /// The same, of those from `position` on.
    pub fn num_exclusive_from(&self, position: usize) -> u32 {
        let pool = self.pool.0.borrow();
        let exclusive = |block: &&BlockId| {
            let block = &pool.blocks[block.index()];
            block.tables == 1 && block.copies_from == 0
        };
        let blocks = self.blocks.iter().skip(position);
        blocks.filter(exclusive).count() as u32
    }

    /// Gives all blocks back, tail first.
    pub fn release(&mut self) {
        let mut pool = self.pool.0.borrow_mut();
        for block in self.blocks.drain(..).rev() {
            pool.release(block);
        }
        self.stamp = pool.stamp();
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.release();
    }
}

/// A copy that a step makes before its forward pass: a hold on both blocks, released on drop.
///
/// Kept until the step is over, so nobody can take either block while it runs. So no block is written
/// by one copy of a step and read or written by another: they may run in any order, or side by side.
pub struct BlockCopy {
    pool: BlockPool,
    source: BlockId,
    destination: BlockId,
}

impl BlockCopy {
    /// The block that is read.
    pub fn source(&self) -> BlockPlace {
        on_device(self.source)
    }

    /// The block that is written.
    pub fn destination(&self) -> BlockPlace {
        on_device(self.destination)
    }
}

/// A pool's blocks are the device's.
fn on_device(block: BlockId) -> BlockPlace {
    BlockPlace {
        location: BlockLocation::Device,
        block,
    }
}

impl Drop for BlockCopy {
    fn drop(&mut self) {
        let mut pool = self.pool.0.borrow_mut();
        pool.let_go(self.destination, |block| &mut block.copies_to);
        pool.let_go(self.source, |block| &mut block.copies_from);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::prefix::extend_chain;
    use super::super::{PoolUsage, PrefixMatch};
    use super::*;

    fn none() -> std::iter::Empty<&'static BlockCopy> {
        std::iter::empty()
    }

    fn chain(tokens: std::ops::Range<u32>) -> Vec<BlockHash> {
        let mut chain = Vec::new();
        let tokens: Vec<u32> = tokens.collect();
        extend_chain(&mut chain, BlockHash::root([None; 3]), &tokens, 4);
        chain
    }

    #[test]
    fn a_table_takes_and_returns_exactly_its_blocks() {
        let pool = BlockPool::new(4);
        let mut table = pool.table();
        assert_eq!(table.grow(3), Ok(()));
        assert_eq!(pool.available(), 1);
        assert_eq!(table.grow(2), Err(OutOfBlocks));
        assert_eq!(pool.available(), 1, "a failed growth changes nothing");
        assert_eq!(table.blocks().len(), 3);
        drop(table);
        assert_eq!(
            pool.usage(),
            PoolUsage {
                free: 4,
                used: 0,
                cached: 0
            }
        );
    }

    #[test]
    fn released_chains_are_found_again_and_evicted_tail_first() {
        let pool = BlockPool::new(3);
        let hashes = chain(0..12);
        let mut table = pool.table();
        table.grow(3).unwrap();
        for (position, &hash) in hashes.iter().enumerate() {
            table.publish(position, hash);
        }
        let blocks = table.blocks().to_vec();
        drop(table);
        let whole = PrefixMatch {
            num_blocks: 3,
            num_parked: 3,
        };
        assert_eq!(pool.find_prefix(&hashes), whole);
        let mut other = pool.table();
        other.grow(1).unwrap();
        assert_eq!(other.blocks(), [blocks[2]], "the tail goes first");
        let mut again = pool.table();
        assert_eq!(pool.find_prefix(&hashes).num_blocks, 2);
        again.adopt(&hashes[..2]);
        assert_eq!(again.blocks(), &blocks[..2]);
        assert_eq!(
            pool.usage(),
            PoolUsage {
                free: 0,
                used: 3,
                cached: 0
            }
        );
        pool.audit([&other, &again].into_iter(), none()).unwrap();
    }

    #[test]
    fn a_shared_block_is_copied_before_it_is_written() {
        let pool = BlockPool::new(4);
        let mut parent = pool.table();
        parent.grow(2).unwrap();
        let mut child = parent.fork();
        assert_eq!((parent.num_exclusive(), child.num_exclusive()), (0, 0));
        let source = child.blocks()[1];
        let copy = child.grow_for_writing(1, 1).unwrap().expect("shared");
        assert_eq!(copy.source(), on_device(source));
        assert_eq!(copy.destination(), on_device(child.blocks()[1]));
        assert_eq!(child.blocks().len(), 3);
        assert!(
            parent.grow_for_writing(1, 0).unwrap().is_none(),
            "the last table writes in place, though the copy still reads"
        );
        let tables = || [&parent, &child].into_iter();
        pool.audit(tables(), [&copy].into_iter()).unwrap();
        pool.audit(tables(), none()).unwrap_err();
        drop(copy);
        pool.audit(tables(), none()).unwrap();
        drop(parent);
        assert_eq!(pool.usage().used, 3);
    }

    #[test]
    fn growing_for_writing_is_all_or_nothing() {
        let pool = BlockPool::new(3);
        let mut parent = pool.table();
        parent.grow(1).unwrap();
        let mut child = parent.fork();
        // Two are free: one for the copy, and one block more.
        assert!(child.grow_for_writing(0, 2).is_err());
        assert_eq!(child.blocks(), parent.blocks());
        pool.audit([&parent, &child].into_iter(), none()).unwrap();
        let copy = child.grow_for_writing(0, 1).unwrap();
        assert!(copy.is_some());
        assert_eq!(pool.available(), 0);
    }

    #[test]
    fn a_copy_keeps_both_its_blocks_until_it_is_over() {
        let pool = BlockPool::new(3);
        let mut parent = pool.table();
        parent.grow(1).unwrap();
        let mut child = parent.fork();
        let copy = child.grow_for_writing(0, 0).unwrap().expect("shared");
        assert_eq!(
            (parent.num_exclusive(), child.num_exclusive()),
            (0, 1),
            "the child's copy goes with it, the parent's block is being read"
        );
        drop((parent, child));
        assert_eq!(pool.usage().used, 2);
        let mut other = pool.table();
        assert_eq!(other.grow(2), Err(OutOfBlocks));
        drop(copy);
        other.grow(3).unwrap();
    }

    #[test]
    fn equal_content_is_published_once() {
        let pool = BlockPool::new(4);
        let hashes = chain(0..4);
        let (mut one, mut two) = (pool.table(), pool.table());
        one.grow(1).unwrap();
        two.grow(1).unwrap();
        one.publish(0, hashes[0]);
        two.publish(0, hashes[0]);
        drop(two);
        assert_eq!(
            pool.usage(),
            PoolUsage {
                free: 3,
                used: 1,
                cached: 0
            }
        );
        drop(one);
        assert_eq!(
            pool.usage(),
            PoolUsage {
                free: 3,
                used: 0,
                cached: 1
            }
        );
    }
}

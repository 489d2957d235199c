//! The KV block pool: who uses which block, counted exactly.
//!
//! Every block is in one of three states: free, used (by as many tables as its reference count says),
//! or cached (findable by content, used by nobody, evictable). `free + used + cached = total` always.
//! A [`BlockTable`] owns its references and gives them back when it is dropped, tail first; nothing
//! else can take or return a block, so nothing can leak one. An operation that lacks blocks changes
//! nothing and says how many it lacks.
//!
//! The pool is shared by its tables on one thread; all its operations are O(1) per block.

use std::cell::RefCell;
use std::rc::Rc;

use super::prefix::{BlockHash, PrefixCache};

/// Names a block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// Position in the KV arrays.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// As plans carry it.
    pub fn as_i32(self) -> i32 {
        self.0 as i32
    }
}

/// Not enough blocks; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBlocks;

/// A block to copy before the forward pass: (source, destination).
pub type BlockCopy = (BlockId, BlockId);

#[derive(Clone, Copy, Default)]
struct Block {
    references: u32,
    hash: Option<BlockHash>,
}

struct Pool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    cache: PrefixCache,
}

impl Pool {
    fn available(&self) -> u32 {
        self.free.len() as u32 + self.cache.num_evictable()
    }

    /// A block for writing, evicting cached content if none is free.
    fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop().or_else(|| self.evict())?;
        self.blocks[block.index()].references = 1;
        Some(block)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.cache.eviction_candidate()?;
        self.cache.unpark(block);
        if let Some(hash) = self.blocks[block.index()].hash.take() {
            self.cache.forget(hash);
        }
        Some(block)
    }

    fn share(&mut self, block: BlockId) {
        let references = &mut self.blocks[block.index()].references;
        *references += 1;
        if *references == 1 {
            self.cache.unpark(block);
        }
    }

    fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        entry.references -= 1;
        if entry.references == 0 {
            match entry.hash {
                Some(_) => self.cache.park(block),
                None => self.free.push(block),
            }
        }
    }
}

/// How many blocks are in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Blocks that hold nothing.
    pub free: u32,
    /// Blocks that some table uses.
    pub used: u32,
    /// Blocks that hold findable content and that no table uses.
    pub cached: u32,
}

/// Handle on the pool; clones share it.
#[derive(Clone)]
pub struct BlockPool(Rc<RefCell<Pool>>);

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    pub fn new(num_blocks: u32) -> Self {
        Self(Rc::new(RefCell::new(Pool {
            blocks: vec![Block::default(); num_blocks as usize],
            free: (0..num_blocks).rev().map(BlockId).collect(),
            cache: PrefixCache::new(num_blocks),
        })))
    }

    /// An empty table on this pool.
    pub fn table(&self) -> BlockTable {
        BlockTable {
            pool: self.clone(),
            blocks: Vec::new(),
        }
    }

    /// Blocks that can be taken now: free or evictable.
    pub fn available(&self) -> u32 {
        self.0.borrow().available()
    }

    /// Counts of blocks by state.
    pub fn usage(&self) -> PoolUsage {
        let pool = self.0.borrow();
        let free = pool.free.len() as u32;
        let cached = pool.cache.num_evictable();
        PoolUsage {
            free,
            cached,
            used: pool.blocks.len() as u32 - free - cached,
        }
    }

    /// Finds the longest cached start of `chain`.
    pub fn find_prefix(&self, chain: &[BlockHash]) -> PrefixMatch {
        let pool = self.0.borrow();
        let mut found = PrefixMatch::default();
        for &hash in chain {
            let Some(block) = pool.cache.find(hash) else {
                break;
            };
            found.num_blocks += 1;
            if pool.blocks[block.index()].references == 0 {
                found.num_parked += 1;
            }
        }
        found
    }

    /// Checks the books against the tables that are alive: each block's reference count is the number
    /// of table entries that name it, and every block is in exactly one state. For tests.
    pub fn audit<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), String> {
        let pool = self.0.borrow();
        let mut entries = vec![0_u32; pool.blocks.len()];
        for block in tables.flat_map(|table| &table.blocks) {
            entries[block.index()] += 1;
        }
        let mut in_free = vec![false; pool.blocks.len()];
        for block in &pool.free {
            if std::mem::replace(&mut in_free[block.index()], true) {
                return Err(format!("block {} is free twice", block.0));
            }
        }
        let mut counted = PoolUsage::default();
        let mut findable = 0;
        for (id, block) in pool.blocks.iter().enumerate() {
            if block.references != entries[id] {
                let (counted, held) = (block.references, entries[id]);
                return Err(format!("block {id}: {counted} references, {held} entries"));
            }
            match (block.references > 0, block.hash.is_some(), in_free[id]) {
                (true, _, false) => counted.used += 1,
                (false, true, false) => counted.cached += 1,
                (false, false, true) => counted.free += 1,
                state => return Err(format!("block {id} is in two states: {state:?}")),
            }
            if let Some(hash) = block.hash {
                findable += 1;
                if pool.cache.find(hash).map(BlockId::index) != Some(id) {
                    return Err(format!("block {id} has a hash but is not found by it"));
                }
            }
        }
        drop(pool);
        if counted != self.usage() || findable != self.0.borrow().cache.len() {
            return Err(format!("counted {counted:?}, books say {:?}", self.usage()));
        }
        Ok(())
    }
}

/// What [`BlockPool::find_prefix`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Blocks of the chain that are cached, from its start.
    pub num_blocks: u32,
    /// Those among them that nobody uses: adopting them makes them unavailable to others.
    pub num_parked: u32,
}

/// A sequence's blocks, in order: a hold, released on drop.
pub struct BlockTable {
    pool: BlockPool,
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// The blocks, in order of position.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
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
        drop(pool);
        let mut blocks = Vec::with_capacity(self.blocks.capacity());
        blocks.extend_from_slice(&self.blocks);
        BlockTable {
            pool: self.pool.clone(),
            blocks,
        }
    }

    /// Makes the last block this table's own before it is written: copy on write.
    ///
    /// Returns the copy to make, if the block was shared.
    pub fn own_last(&mut self) -> Result<Option<BlockCopy>, OutOfBlocks> {
        let mut pool = self.pool.0.borrow_mut();
        let Some(last) = self.blocks.last_mut() else {
            return Ok(None);
        };
        if pool.blocks[last.index()].references == 1 {
            return Ok(None);
        }
        let copy = pool.take().ok_or(OutOfBlocks)?;
        let source = std::mem::replace(last, copy);
        pool.release(source);
        Ok(Some((source, copy)))
    }

    /// Makes the full block at `position` findable by its content.
    pub fn publish(&self, position: usize, hash: BlockHash) {
        let block = self.blocks[position];
        let mut pool = self.pool.0.borrow_mut();
        if pool.blocks[block.index()].hash.is_none() && pool.cache.insert(hash, block) {
            pool.blocks[block.index()].hash = Some(hash);
        }
    }

    /// Blocks that dropping this table would make available now.
    pub fn num_exclusive(&self) -> u32 {
        let pool = self.pool.0.borrow();
        let exclusive = |block: &&BlockId| pool.blocks[block.index()].references == 1;
        self.blocks.iter().filter(exclusive).count() as u32
    }

    /// Gives all blocks back, tail first.
    pub fn release(&mut self) {
        let mut pool = self.pool.0.borrow_mut();
        for block in self.blocks.drain(..).rev() {
            pool.release(block);
        }
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::super::prefix::extend_chain;
    use super::*;

    fn chain(tokens: std::ops::Range<u32>) -> Vec<BlockHash> {
        let mut chain = Vec::new();
        let tokens: Vec<u32> = tokens.collect();
        extend_chain(&mut chain, BlockHash::root(None, None), &tokens, 4);
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
        pool.audit([&other, &again].into_iter()).unwrap();
    }

    #[test]
    fn a_shared_last_block_is_copied_before_it_is_written() {
        let pool = BlockPool::new(4);
        let mut parent = pool.table();
        parent.grow(2).unwrap();
        let mut child = parent.fork();
        assert_eq!((parent.num_exclusive(), child.num_exclusive()), (0, 0));
        let source = child.blocks()[1];
        let copy = child.own_last().unwrap().expect("it was shared");
        assert_eq!(copy, (source, child.blocks()[1]));
        assert_eq!(
            parent.own_last(),
            Ok(None),
            "the last holder writes in place"
        );
        pool.audit([&parent, &child].into_iter()).unwrap();
        drop(parent);
        assert_eq!(pool.usage().used, 2);
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

//! The KV block pool: who uses which block, counted exactly.
//!
//! Every block is in one of three states: free, used (by tables and copies, exactly as many as its
//! counts say), or cached (findable by content, used by nobody, evictable). `free + used + cached =
//! total` always. A [`BlockTable`] and a [`BlockCopy`] own what they use and give it back when they are
//! dropped, a table its tail first; nothing else can take or return a block, so nothing can leak one.
//! An operation that lacks blocks changes nothing.
//!
//! The pool is shared by its holders on one thread; all its operations are O(1) per block.

use std::cell::RefCell;
use std::rc::Rc;

use super::prefix::{BlockHash, PrefixCache};

mod holds;

pub use holds::{BlockCopy, BlockTable};

/// Names a block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The name of no block, for links that have to be small.
    pub(super) const NONE: Self = Self(u32::MAX);

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

/// Where a block's memory is. The numbers are those of `chairlift.executor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockLocation {
    /// The KV arrays that the forward pass reads.
    Device = 0,
    /// Memory that the forward pass cannot read.
    Host = 1,
}

/// A block, and which pool's it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlace {
    /// Where it is.
    pub location: BlockLocation,
    /// Its name there.
    pub block: BlockId,
}

/// Who uses a block, and what is in it.
#[derive(Clone, Copy, Default)]
struct Block {
    /// Table entries that name it.
    tables: u32,
    /// Copies that read it.
    copies_from: u32,
    /// Copies that write it.
    copies_to: u32,
    hash: Option<BlockHash>,
}

impl Block {
    fn is_used(&self) -> bool {
        self.tables + self.copies_from + self.copies_to > 0
    }
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
        self.blocks[block.index()].tables = 1;
        Some(block)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let (block, _) = self.cache.evict()?;
        self.blocks[block.index()].hash = None;
        Some(block)
    }

    /// One more table uses a block that somebody uses or that is cached.
    fn share(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        if !entry.is_used() {
            self.cache.unpark(block);
        }
        entry.tables += 1;
    }

    /// A table uses the block no more.
    fn release(&mut self, block: BlockId) {
        self.let_go(block, |entry| &mut entry.tables);
    }

    /// Takes one from a count of the block; the last of all frees it, or leaves it findable.
    fn let_go(&mut self, block: BlockId, count: impl Fn(&mut Block) -> &mut u32) {
        let entry = &mut self.blocks[block.index()];
        *count(entry) -= 1;
        if !entry.is_used() {
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
    /// Blocks that tables or copies use.
    pub used: u32,
    /// Blocks that hold findable content and that nobody uses.
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
        BlockTable::new(self.clone())
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
            if !pool.blocks[block.index()].is_used() {
                found.num_parked += 1;
            }
        }
        found
    }

    /// Checks the books against the tables and copies that are alive: each block's counts are those of
    /// the table entries and of the copies that name it, and it is in exactly one state. For tests.
    pub fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        copies: impl Iterator<Item = &'a BlockCopy>,
    ) -> Result<(), String> {
        let pool = self.0.borrow();
        // Per block: table entries, copies from it, copies to it.
        let mut held = vec![[0_u32; 3]; pool.blocks.len()];
        for block in tables.flat_map(BlockTable::blocks) {
            held[block.index()][0] += 1;
        }
        for copy in copies {
            held[copy.source().block.index()][1] += 1;
            held[copy.destination().block.index()][2] += 1;
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
            let counts = [block.tables, block.copies_from, block.copies_to];
            if counts != held[id] {
                let held = held[id];
                return Err(format!(
                    "block {id} counts {counts:?}, but {held:?} hold it"
                ));
            }
            match (block.is_used(), block.hash.is_some(), in_free[id]) {
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

//! The books of one tier's blocks. Nobody but the holds ([`super::holds`]) asks for a change.

use super::super::prefix::{BlockHash, PrefixCache};
use super::{BlockId, PoolUsage};

/// Who uses a block, and whether it can be found. Small, for blocks come and go at random.
#[derive(Clone, Copy, Default)]
pub(super) struct Block {
    /// Table entries that name it.
    pub(super) tables: u32,
    /// Copies that read it.
    pub(super) copies_from: u32,
    /// Copies that write it.
    pub(super) copies_to: u32,
    /// It is findable by its content; the cache knows by which.
    is_findable: bool,
}

impl Block {
    pub(super) fn is_used(&self) -> bool {
        self.tables + self.copies_from + self.copies_to > 0
    }
}

/// The blocks of one tier.
pub(super) struct Pool {
    pub(super) blocks: Vec<Block>,
    free: Vec<BlockId>,
    cache: PrefixCache,
}

impl Pool {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            blocks: vec![Block::default(); num_blocks as usize],
            free: (0..num_blocks).rev().map(BlockId).collect(),
            cache: PrefixCache::new(num_blocks),
        }
    }

    pub(super) fn available(&self) -> u32 {
        self.free.len() as u32 + self.cache.num_evictable()
    }

    pub(super) fn usage(&self) -> PoolUsage {
        let free = self.free.len() as u32;
        let cached = self.cache.num_evictable();
        PoolUsage {
            free,
            cached,
            used: self.blocks.len() as u32 - free - cached,
        }
    }

    /// The block with this content.
    pub(super) fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.cache.find(hash)
    }

    /// The books of a block.
    pub(super) fn block(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[block.index()]
    }

    /// A block that nobody uses, for whoever counts itself in at once; and the content that was evicted
    /// from it, if none was free.
    pub(super) fn take(&mut self) -> Option<(BlockId, Option<BlockHash>)> {
        if let Some(block) = self.free.pop() {
            return Some((block, None));
        }
        let (block, evicted) = self.cache.evict()?;
        self.block(block).is_findable = false;
        Some((block, Some(evicted)))
    }

    /// Counts one more use of a block that somebody uses or that is cached.
    pub(super) fn hold(&mut self, block: BlockId, count: impl Fn(&mut Block) -> &mut u32) {
        if !self.block(block).is_used() {
            self.cache.unpark(block);
        }
        *count(self.block(block)) += 1;
    }

    /// Takes one from a count of the block; the last of all frees it, or leaves it findable.
    pub(super) fn let_go(&mut self, block: BlockId, count: impl Fn(&mut Block) -> &mut u32) {
        let entry = &mut self.blocks[block.index()];
        *count(entry) -= 1;
        if !entry.is_used() {
            if entry.is_findable {
                self.cache.park(block);
            } else {
                self.free.push(block);
            }
        }
    }

    /// Makes content the last to be evicted; false if it is not there.
    pub(super) fn touch(&mut self, hash: BlockHash) -> bool {
        let Some(block) = self.find(hash) else {
            return false;
        };
        if !self.block(block).is_used() {
            self.cache.unpark(block);
            self.cache.park(block);
        }
        true
    }

    /// Makes a used block findable by its content, unless it is already, or another one is by this.
    pub(super) fn publish(&mut self, block: BlockId, hash: BlockHash) {
        if !self.block(block).is_findable {
            self.block(block).is_findable = self.cache.insert(hash, block);
        }
    }

    /// Checks the books against what holds each block: table entries, copies from it, copies to it.
    pub(super) fn audit(&self, held: &[[u32; 3]]) -> Result<(), String> {
        let mut in_free = vec![false; self.blocks.len()];
        for block in &self.free {
            if std::mem::replace(&mut in_free[block.index()], true) {
                return Err(format!("block {} is free twice", block.0));
            }
        }
        let mut counted = PoolUsage::default();
        let mut findable = 0;
        for (id, block) in self.blocks.iter().enumerate() {
            let counts = [block.tables, block.copies_from, block.copies_to];
            if counts != held[id] {
                let held = held[id];
                return Err(format!(
                    "block {id} counts {counts:?}, but {held:?} hold it"
                ));
            }
            match (block.is_used(), block.is_findable, in_free[id]) {
                (true, _, false) => counted.used += 1,
                (false, true, false) => counted.cached += 1,
                (false, false, true) => counted.free += 1,
                state => return Err(format!("block {id} is in two states: {state:?}")),
            }
            if block.is_findable {
                findable += 1;
                if !self.cache.finds(BlockId(id as u32)) {
                    return Err(format!("block {id} is not found by its content"));
                }
            }
        }
        if counted != self.usage() || findable != self.cache.len() {
            return Err(format!("counted {counted:?}, books say {:?}", self.usage()));
        }
        Ok(())
    }
}

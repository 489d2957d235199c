//! The KV block pool: who uses which block, counted exactly.
//!
//! Every block is in one of three states: free, used (by tables and copies, exactly as many as its
//! counts say), or cached (findable by content, used by nobody, evictable). `free + used + cached =
//! total` always. A [`BlockTable`] and a [`BlockCopy`] own what they use and give it back when they are
//! dropped, a table its tail first; nothing else can take or return a block, so nothing can leak one.
//! An operation that lacks blocks changes nothing.
//!
//! There may be a second tier: blocks on the host, which hold what was evicted from the device. Tables are
//! of the device alone, so a block of the host is used by copies only. Content that is evicted from the
//! device goes there by a copy (offload), can be found there once that copy has landed, and comes back by
//! another one (restore). It stays on the host then, so that it need not be copied when it is evicted
//! again.
//!
//! The pool is shared by its holders on one thread; all its operations are O(1) per block.

use std::cell::RefCell;
use std::rc::Rc;

use super::prefix::BlockHash;

mod holds;
mod pool;
#[cfg(test)]
mod tests;

pub use holds::{BlockCopy, BlockTable, CopyKind};

use pool::Pool;

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

    /// Where it is, if it is of that tier.
    fn on(self, location: BlockLocation) -> BlockPlace {
        BlockPlace {
            location,
            block: self,
        }
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

/// The blocks of both tiers.
struct Tiers {
    device: Pool,
    host: Pool,
    /// Blocks that may still be copied to the host when they are evicted.
    offloads_left: u32,
    /// The last that a table got.
    last_stamp: u64,
}

impl Tiers {
    /// A number that no table has had.
    fn stamp(&mut self) -> u64 {
        self.last_stamp += 1;
        self.last_stamp
    }

    fn of(&mut self, location: BlockLocation) -> &mut Pool {
        match location {
            BlockLocation::Device => &mut self.device,
            BlockLocation::Host => &mut self.host,
        }
    }

    /// Where content that is evicted from the device is to be copied to: a block of the host that nobody
    /// uses, unless the host has it.
    fn place_for(&mut self, evicted: BlockHash) -> Option<BlockId> {
        if self.host.touch(evicted) || self.offloads_left == 0 {
            return None;
        }
        let (block, _) = self.host.take()?;
        self.offloads_left -= 1;
        Some(block)
    }
}

/// Handle on the pool; clones share it.
#[derive(Clone)]
pub struct BlockPool(Rc<RefCell<Tiers>>);

impl BlockPool {
    /// A pool of `num_blocks` free blocks of the device, and `num_host_blocks` of the host.
    pub fn new(num_blocks: u32, num_host_blocks: u32) -> Self {
        Self(Rc::new(RefCell::new(Tiers {
            device: Pool::new(num_blocks),
            host: Pool::new(num_host_blocks),
            offloads_left: 0,
            last_stamp: 0,
        })))
    }

    /// An empty table on this pool.
    pub fn table(&self) -> BlockTable {
        BlockTable::new(self.clone())
    }

    /// Blocks of the device that can be taken now: free or evictable.
    pub fn available(&self) -> u32 {
        self.0.borrow().device.available()
    }

    /// Counts of the device's blocks by state.
    pub fn usage(&self) -> PoolUsage {
        self.0.borrow().device.usage()
    }

    /// Counts of the host's blocks by state.
    pub fn host_usage(&self) -> PoolUsage {
        self.0.borrow().host.usage()
    }

    /// Finds the longest start of `chain` that the device has.
    pub fn find_prefix(&self, chain: &[BlockHash]) -> PrefixMatch {
        let device = &self.0.borrow().device;
        let mut found = PrefixMatch::default();
        for &hash in chain {
            let Some(block) = device.find(hash) else {
                break;
            };
            found.num_blocks += 1;
            if !device.blocks[block.index()].is_used() {
                found.num_parked += 1;
            }
        }
        found
    }

    /// Blocks of the longest start of `chain` that the host has.
    pub fn find_on_host(&self, chain: &[BlockHash]) -> u32 {
        let host = &self.0.borrow().host;
        let found = chain.iter().take_while(|&&hash| host.find(hash).is_some());
        found.count() as u32
    }

    /// Position of the first block of `chain` that the host has.
    pub fn find_first_on_host(&self, chain: &[BlockHash]) -> Option<u32> {
        let host = &self.0.borrow().host;
        let first = chain.iter().position(|&hash| host.find(hash).is_some());
        first.map(|at| at as u32)
    }

    /// Makes what the host has of `chain` the last that it evicts, the tail before the head. Returns how
    /// many blocks those are.
    pub fn touch_on_host(&self, chain: &[BlockHash]) -> u32 {
        let host = &mut self.0.borrow_mut().host;
        let found = chain.iter().rev().filter(|&&hash| host.touch(hash));
        found.count() as u32
    }

    /// Lets so many blocks go to the host when they are evicted from now on; what is evicted beyond those is
    /// gone.
    pub fn allow_offloads(&self, most: u32) {
        self.0.borrow_mut().offloads_left = most;
    }

    /// Checks the books against the tables and copies that are alive: each block's counts are those of
    /// the table entries and of the copies that name it, it is in exactly one state, and a table has the
    /// right one at hand. For tests.
    pub fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        copies: impl Iterator<Item = &'a BlockCopy>,
    ) -> Result<(), String> {
        let tiers = self.0.borrow();
        // Per tier and block: table entries, copies from it, copies to it.
        let mut held = [&tiers.device, &tiers.host].map(|pool| vec![[0_u32; 3]; pool.blocks.len()]);
        for table in tables {
            let blocks = table.blocks();
            for (position, &block) in blocks.iter().enumerate() {
                held[0][block.index()][0] += 1;
                if table.block(position) != block {
                    return Err(format!("a table has another block {position} at hand"));
                }
            }
        }
        for copy in copies {
            for (at, place) in [(1, copy.source()), (2, copy.destination())] {
                held[place.location as usize][place.block.index()][at] += 1;
            }
        }
        tiers.device.audit(&held[0])?;
        let on_host = tiers.host.audit(&held[1]);
        on_host.map_err(|mistake| format!("on the host: {mistake}"))
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

//! What holds blocks: a sequence's table and a step's copies. Both are owned values that give their
//! blocks back when they are dropped; nobody but them changes who uses a block.

use super::{BlockHash, BlockId, BlockLocation, BlockPlace, BlockPool, OutOfBlocks, Tiers};

/// A sequence's blocks, in order: a hold, released on drop. What a decode needs comes first.
#[repr(C)]
pub struct BlockTable {
    stamp: u64,
    /// The last of `blocks`; of no meaning without any.
    last: BlockId,
    /// How many `blocks` there are.
    len: u32,
    blocks: Vec<BlockId>,
    pool: BlockPool,
}

impl BlockTable {
    /// An empty table on `pool`.
    pub(super) fn new(pool: BlockPool) -> Self {
        let stamp = pool.0.borrow_mut().stamp();
        Self {
            pool,
            blocks: Vec::new(),
            stamp,
            last: BlockId::NONE,
            len: 0,
        }
    }

    /// The blocks, in order of position.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many blocks it has.
    pub fn num_blocks(&self) -> u32 {
        self.len
    }

    /// The block at `position`; the last one, all that a decode needs, is at hand.
    pub fn block(&self, position: usize) -> BlockId {
        if position + 1 == self.len as usize {
            self.last
        } else {
            self.blocks[position]
        }
    }

    /// Keeps at hand what `blocks` ends with.
    fn note_end(&mut self) {
        self.len = self.blocks.len() as u32;
        self.last = self.blocks.last().copied().unwrap_or(BlockId::NONE);
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

    /// Appends `count` fresh blocks, or none. Adds to `copies` those of evicted content to the host: they
    /// have to be made before the blocks are written.
    pub fn grow(&mut self, count: u32, copies: &mut Vec<BlockCopy>) -> Result<(), OutOfBlocks> {
        let mut tiers = self.pool.0.borrow_mut();
        if tiers.device.available() < count {
            return Err(OutOfBlocks);
        }
        let fresh = (0..count).map_while(|_| take(&mut tiers, &self.pool, copies));
        self.blocks.extend(fresh);
        drop(tiers);
        self.note_end();
        Ok(())
    }

    /// Appends the cached blocks of `chain`, which [`BlockPool::find_prefix`] has just found.
    pub fn adopt(&mut self, chain: &[BlockHash]) {
        let mut tiers = self.pool.0.borrow_mut();
        for &hash in chain {
            let Some(block) = tiers.device.find(hash) else {
                debug_assert!(false, "adopted a block that is not cached");
                break;
            };
            tiers.device.hold(block, |block| &mut block.tables);
            self.blocks.push(block);
        }
        drop(tiers);
        self.note_end();
    }

    /// Fills the blocks from `position` on, which hold nothing yet, with what the host has of `chain`, up
    /// to the first that it does not have: adds to `copies` what has to be copied.
    pub fn restore(&self, position: usize, chain: &[BlockHash], copies: &mut Vec<BlockCopy>) {
        let mut tiers = self.pool.0.borrow_mut();
        for (&hash, &block) in chain.iter().zip(&self.blocks[position..]) {
            let Some(source) = tiers.host.find(hash) else {
                return;
            };
            copies.push(BlockCopy::new(
                &mut tiers,
                &self.pool,
                source.on(BlockLocation::Host),
                block.on(BlockLocation::Device),
                None,
            ));
        }
    }

    /// A second table on the same blocks, with room for as many.
    #[must_use]
    pub fn fork(&self) -> BlockTable {
        let mut tiers = self.pool.0.borrow_mut();
        for &block in &self.blocks {
            tiers.device.hold(block, |block| &mut block.tables);
        }
        let mut blocks = Vec::with_capacity(self.blocks.capacity());
        blocks.extend_from_slice(&self.blocks);
        BlockTable {
            pool: self.pool.clone(),
            blocks,
            stamp: tiers.stamp(),
            last: self.last,
            len: self.len,
        }
    }

    /// Makes the table writable from the block at `first` on, and `count` blocks longer; or changes
    /// nothing. Only the block at `first` can be shared among those: it is copied on write.
    ///
    /// Adds to `copies` those that have to be made before: that one, and those of evicted content.
    pub fn grow_for_writing(
        &mut self,
        first: usize,
        count: u32,
        copies: &mut Vec<BlockCopy>,
    ) -> Result<(), OutOfBlocks> {
        let mut tiers = self.pool.0.borrow_mut();
        // A copy that reads the block is no other writer: it runs before anything is written.
        let shared = self
            .blocks
            .get_mut(first)
            .filter(|block| tiers.device.block(**block).tables > 1);
        if tiers.device.available() < count + u32::from(shared.is_some()) {
            return Err(OutOfBlocks);
        }
        if let Some(entry) = shared {
            let destination = take(&mut tiers, &self.pool, copies).ok_or(OutOfBlocks)?;
            let source = std::mem::replace(entry, destination);
            self.stamp = tiers.stamp();
            copies.push(BlockCopy::new(
                &mut tiers,
                &self.pool,
                source.on(BlockLocation::Device),
                destination.on(BlockLocation::Device),
                None,
            ));
            tiers.device.let_go(source, |block| &mut block.tables);
        }
        let fresh = (0..count).map_while(|_| take(&mut tiers, &self.pool, copies));
        self.blocks.extend(fresh);
        drop(tiers);
        self.note_end();
        Ok(())
    }

    /// Whether another table has the block at `position`, too.
    pub fn is_shared(&self, position: usize) -> bool {
        let block = self.blocks.get(position);
        block.is_some_and(|block| self.pool.0.borrow().device.blocks[block.index()].tables > 1)
    }

    /// Makes the full block at `position` findable by its content.
    pub fn publish(&self, position: usize, hash: BlockHash) {
        let device = &mut self.pool.0.borrow_mut().device;
        device.publish(self.block(position), hash);
    }

    /// Blocks that dropping this table, and the copies into it, would make available now. One whose old
    /// content is being copied to the host does not count, though that copy may be dropped too.
    pub fn num_exclusive(&self) -> u32 {
        self.num_exclusive_from(0)
    }

    /// The same, of those from `position` on.
    pub fn num_exclusive_from(&self, position: usize) -> u32 {
        let device = &self.pool.0.borrow().device;
        let exclusive = |block: &&BlockId| {
            let block = &device.blocks[block.index()];
            block.tables == 1 && block.copies_from == 0
        };
        let blocks = self.blocks.iter().skip(position);
        blocks.filter(exclusive).count() as u32
    }

    /// Gives all blocks back, tail first.
    pub fn release(&mut self) {
        let mut tiers = self.pool.0.borrow_mut();
        for block in self.blocks.drain(..).rev() {
            tiers.device.let_go(block, |block| &mut block.tables);
        }
        self.stamp = tiers.stamp();
        drop(tiers);
        self.note_end();
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.release();
    }
}

/// A block of the device for writing, as an entry of a table; evicts if none is free. What is evicted goes
/// to the host if there is a place for it.
fn take(tiers: &mut Tiers, pool: &BlockPool, copies: &mut Vec<BlockCopy>) -> Option<BlockId> {
    let (block, evicted) = tiers.device.take()?;
    tiers.device.block(block).tables = 1;
    if let Some(content) = evicted
        && let Some(place) = tiers.place_for(content)
    {
        copies.push(BlockCopy::new(
            tiers,
            pool,
            block.on(BlockLocation::Device),
            place.on(BlockLocation::Host),
            Some(content),
        ));
    }
    Some(block)
}

/// What a copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// A table writes to a block that others have too.
    OnWrite,
    /// Content that was evicted from the device goes to the host.
    Offload,
    /// Content comes back from the host.
    Restore,
}

/// A copy that a step makes before its forward pass: a hold on both blocks, released on drop.
///
/// Kept until the step is over, so nobody can take either block while it runs. Offloads are made first,
/// since the block they read may be written at once, by another copy too. Of the others, no block is
/// written by one and read or written by another: they may run in any order, or side by side.
pub struct BlockCopy {
    pool: BlockPool,
    source: BlockPlace,
    destination: BlockPlace,
    /// What is offloaded.
    content: Option<BlockHash>,
}

impl BlockCopy {
    fn new(
        tiers: &mut Tiers,
        pool: &BlockPool,
        source: BlockPlace,
        destination: BlockPlace,
        content: Option<BlockHash>,
    ) -> Self {
        let from = tiers.of(source.location);
        from.hold(source.block, |block| &mut block.copies_from);
        let to = tiers.of(destination.location);
        to.block(destination.block).copies_to += 1;
        Self {
            pool: pool.clone(),
            source,
            destination,
            content,
        }
    }

    /// The block that is read.
    pub fn source(&self) -> BlockPlace {
        self.source
    }

    /// The block that is written.
    pub fn destination(&self) -> BlockPlace {
        self.destination
    }

    /// What it is for.
    pub fn kind(&self) -> CopyKind {
        match (self.source.location, self.destination.location) {
            (_, BlockLocation::Host) => CopyKind::Offload,
            (BlockLocation::Host, _) => CopyKind::Restore,
            (BlockLocation::Device, _) => CopyKind::OnWrite,
        }
    }

    /// Its step has landed: what was offloaded can be found on the host.
    pub fn land(&self) {
        if let Some(content) = self.content {
            let host = &mut self.pool.0.borrow_mut().host;
            host.publish(self.destination.block, content);
        }
    }
}

impl Drop for BlockCopy {
    fn drop(&mut self) {
        let mut tiers = self.pool.0.borrow_mut();
        let to = tiers.of(self.destination.location);
        to.let_go(self.destination.block, |block| &mut block.copies_to);
        let from = tiers.of(self.source.location);
        from.let_go(self.source.block, |block| &mut block.copies_from);
    }
}

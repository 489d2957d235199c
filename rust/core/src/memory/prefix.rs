//! The prefix cache: finds full KV blocks again by their content.
//!
//! A full block is named by a hash of its tokens and of everything before them: a chain that starts at
//! a root made of what must never be shared across (cache salt of a tenant, adapter). The hash is 128
//! bits of BLAKE3, so equality of hashes decides equality of chains; no client can build a collision.
//! A block that no table uses any more but that has a hash stays findable, in least-recently-used
//! order, until its memory is needed. Tables release their tails first, so the tail of a chain goes
//! before its head.
//!
//! On the way of a request: looked up when a sequence is admitted, filled when a step is committed and
//! never before, so that a block whose tokens were not computed cannot be shared.

mod links;

pub use links::{LANES, LinkMaker};

use super::blocks::BlockId;

/// Names the content of a full block and all before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The start of a chain: separates everything that must not be shared, by tenant, salt and adapter.
    pub fn root(extras: [Option<&str>; 3]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for extra in extras {
            // Tag and length first, so that no two lists of extras read the same.
            let length = extra.map_or(u64::MAX, |text| text.len() as u64);
            hasher.update(&length.to_le_bytes());
            hasher.update(extra.unwrap_or("").as_bytes());
        }
        Self::truncate(&hasher.finalize())
    }

    /// The link after `self`: a full block of `tokens`, hashed with `self` as the key.
    #[must_use]
    pub fn then(self, tokens: &[u32]) -> Self {
        let mut key = [0; blake3::KEY_LEN];
        key[..16].copy_from_slice(&self.0.to_le_bytes());
        // Blocks of up to 64 tokens, the usual ones, are hashed from the stack in one call.
        let mut bytes = [0_u8; 256];
        if let Some(bytes) = bytes.get_mut(..tokens.len() * 4) {
            write_le(bytes, tokens);
            return Self::truncate(&blake3::keyed_hash(&key, bytes));
        }
        let mut hasher = blake3::Hasher::new_keyed(&key);
        for chunk in tokens.chunks(bytes.len() / 4) {
            let bytes = &mut bytes[..chunk.len() * 4];
            write_le(bytes, chunk);
            hasher.update(bytes);
        }
        Self::truncate(&hasher.finalize())
    }

    fn truncate(hash: &blake3::Hash) -> Self {
        let mut low = [0; 16];
        low.copy_from_slice(&hash.as_bytes()[..16]);
        Self(u128::from_le_bytes(low))
    }
}

fn write_le(bytes: &mut [u8], tokens: &[u32]) {
    for (slot, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        slot.copy_from_slice(&token.to_le_bytes());
    }
}

/// Appends to `chain` the hashes of the full blocks of `tokens` that it does not cover yet.
pub fn extend_chain(chain: &mut Vec<BlockHash>, root: BlockHash, tokens: &[u32], block_size: u32) {
    let block_size = block_size as usize;
    let mut parent = chain.last().copied().unwrap_or(root);
    for block in tokens[chain.len() * block_size..].chunks_exact(block_size) {
        parent = parent.then(block);
        chain.push(parent);
    }
}

/// What is known of a block. Small, and never across two cache lines: blocks come and go at random, and
/// each step evicts some.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Entry {
    /// What it holds, if it is in a chain.
    hash: BlockHash,
    /// The next block of its chain.
    next: Link,
    /// Its neighbours in the eviction order; nobody at the ends and outside it.
    older: Link,
    newer: Link,
}

/// A block or nobody, in half the room of an `Option`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Link(BlockId);

impl Link {
    const NOBODY: Self = Self(BlockId::NONE);

    fn to(block: BlockId) -> Self {
        Self(block)
    }

    fn block(self) -> Option<BlockId> {
        (self != Self::NOBODY).then_some(self.0)
    }

    /// Cuts the link; where it led to.
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::NOBODY)
    }
}

/// Content index of full blocks, and the eviction order of those that no table uses.
///
/// The index is a hash table whose chains run through the blocks' entries, so it never grows.
pub(super) struct PrefixCache {
    /// The first block of each chain, by the low bits of the hash, which is uniform already.
    chains: Vec<Link>,
    /// By block.
    entries: Vec<Entry>,
    num_findable: usize,
    oldest: Link,
    newest: Link,
    num_evictable: u32,
}

impl PrefixCache {
    /// A cache over blocks `0..num_blocks`, empty.
    pub(super) fn new(num_blocks: u32) -> Self {
        let num_blocks = num_blocks as usize;
        let entry = Entry {
            hash: BlockHash(0),
            next: Link::NOBODY,
            older: Link::NOBODY,
            newer: Link::NOBODY,
        };
        Self {
            chains: vec![Link::NOBODY; num_blocks.next_power_of_two()],
            entries: vec![entry; num_blocks],
            num_findable: 0,
            oldest: Link::NOBODY,
            newest: Link::NOBODY,
            num_evictable: 0,
        }
    }

    /// Blocks that hold findable content and that no table uses.
    pub(super) fn num_evictable(&self) -> u32 {
        self.num_evictable
    }

    /// The block with this content.
    pub(super) fn find(&self, hash: BlockHash) -> Option<BlockId> {
        let mut at = self.chains[self.chain_of(hash)];
        while let Some(block) = at.block() {
            let entry = &self.entries[block.index()];
            if entry.hash == hash {
                break;
            }
            at = entry.next;
        }
        at.block()
    }

    fn chain_of(&self, hash: BlockHash) -> usize {
        hash.0 as usize & (self.chains.len() - 1)
    }

    /// Makes `block` findable; false if another block with the same content is already.
    pub(super) fn insert(&mut self, hash: BlockHash, block: BlockId) -> bool {
        if self.find(hash).is_some() {
            return false;
        }
        let chain = self.chain_of(hash);
        let next = std::mem::replace(&mut self.chains[chain], Link::to(block));
        let entry = &mut self.entries[block.index()];
        (entry.hash, entry.next) = (hash, next);
        self.num_findable += 1;
        true
    }

    /// The last table let go of a findable block: it may be evicted, after all that were before it.
    pub(super) fn park(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.index()];
        (entry.older, entry.newer) = (self.newest, Link::NOBODY);
        match self.newest.block() {
            Some(newest) => self.entries[newest.index()].newer = Link::to(block),
            None => self.oldest = Link::to(block),
        }
        self.newest = Link::to(block);
        self.num_evictable += 1;
    }

    /// A table uses a parked block again.
    pub(super) fn unpark(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.index()];
        let (older, newer) = (entry.older.take(), entry.newer.take());
        match older.block() {
            Some(other) => self.entries[other.index()].newer = newer,
            None => self.oldest = newer,
        }
        match newer.block() {
            Some(other) => self.entries[other.index()].older = older,
            None => self.newest = older,
        }
        self.num_evictable -= 1;
    }

    /// Forgets the content of the parked block that is the oldest, and what that was.
    pub(super) fn evict(&mut self) -> Option<(BlockId, BlockHash)> {
        let block = self.oldest.block()?;
        self.unpark(block);
        let entry = &mut self.entries[block.index()];
        let (hash, next) = (entry.hash, entry.next.take());
        let chain = self.chain_of(hash);
        let mut link = &mut self.chains[chain];
        while let Some(other) = link.block().filter(|&other| other != block) {
            link = &mut self.entries[other.index()].next;
        }
        *link = next;
        self.num_findable -= 1;
        Some((block, hash))
    }

    /// Whether `block` is found by the content that it was inserted with; for invariant checks.
    pub(super) fn finds(&self, block: BlockId) -> bool {
        self.find(self.entries[block.index()].hash) == Some(block)
    }

    /// Findable blocks, used or not; for invariant checks.
    pub(super) fn len(&self) -> usize {
        self.num_findable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_and_every_extra_counts() {
        let root = BlockHash::root([None; 3]);
        let base: Vec<u32> = (0..16).collect();
        let hash = root.then(&base);
        for position in 0..16 {
            let mut other = base.clone();
            other[position] += 1;
            assert_ne!(root.then(&other), hash, "token {position} was ignored");
        }
        for other in [
            BlockHash::root([None, Some(""), None]),
            BlockHash::root([None, Some("a"), None]),
            BlockHash::root([None, None, Some("a")]),
            BlockHash::root([None, Some("a"), Some("")]),
        ] {
            assert_ne!(other, root);
            assert_ne!(other.then(&base), hash);
        }
        assert_ne!(
            BlockHash::root([None, Some("ab"), Some("c")]),
            BlockHash::root([None, Some("a"), Some("bc")])
        );
    }

    #[test]
    fn chains_cover_full_blocks_only_and_extend_in_place() {
        let root = BlockHash::root([None; 3]);
        let tokens: Vec<u32> = (0..70).collect();
        let mut whole = Vec::new();
        extend_chain(&mut whole, root, &tokens, 16);
        assert_eq!(whole.len(), 4);
        let mut grown = Vec::new();
        for length in 0..=70 {
            extend_chain(&mut grown, root, &tokens[..length], 16);
            assert_eq!(grown.len(), length / 16);
        }
        assert_eq!(grown, whole);
        assert_eq!(root.then(&[7; 100]), root.then(&[7; 100]));
        assert_ne!(root.then(&[7; 100]), root.then(&[7; 99]));
    }
}

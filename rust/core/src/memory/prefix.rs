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

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::blocks::BlockId;

/// Names the content of a full block and all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// The hash is uniform already; its low half is the map's hash.
#[derive(Default)]
struct Uniform(u64);

impl Hasher for Uniform {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}

/// Neighbours of a block in the eviction order; `None` at the ends and outside it.
#[derive(Clone, Copy, Default)]
struct Links {
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

/// Content index of full blocks, and the eviction order of those that no table uses.
pub(super) struct PrefixCache {
    index: HashMap<BlockHash, BlockId, BuildHasherDefault<Uniform>>,
    links: Vec<Links>,
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    num_evictable: u32,
}

impl PrefixCache {
    /// A cache over blocks `0..num_blocks`, empty.
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            index: HashMap::with_capacity_and_hasher(
                num_blocks as usize,
                BuildHasherDefault::default(),
            ),
            links: vec![Links::default(); num_blocks as usize],
            oldest: None,
            newest: None,
            num_evictable: 0,
        }
    }

    /// Blocks that hold findable content and that no table uses.
    pub(super) fn num_evictable(&self) -> u32 {
        self.num_evictable
    }

    /// The block with this content.
    pub(super) fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.index.get(&hash).copied()
    }

    /// Makes `block` findable; false if another block with the same content is already.
    pub(super) fn insert(&mut self, hash: BlockHash, block: BlockId) -> bool {
        match self.index.entry(hash) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(block);
                true
            }
        }
    }

    /// The last table let go of a findable block: it may be evicted, after all that were before it.
    pub(super) fn park(&mut self, block: BlockId) {
        self.links[block.index()] = Links {
            older: self.newest,
            newer: None,
        };
        match self.newest {
            Some(newest) => self.links[newest.index()].newer = Some(block),
            None => self.oldest = Some(block),
        }
        self.newest = Some(block);
        self.num_evictable += 1;
    }

    /// A table uses a parked block again.
    pub(super) fn unpark(&mut self, block: BlockId) {
        let Links { older, newer } = std::mem::take(&mut self.links[block.index()]);
        match older {
            Some(older) => self.links[older.index()].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.links[newer.index()].older = older,
            None => self.newest = older,
        }
        self.num_evictable -= 1;
    }

    /// The block to evict next.
    pub(super) fn eviction_candidate(&self) -> Option<BlockId> {
        self.oldest
    }

    /// Forgets the content of a block that was unparked for eviction.
    pub(super) fn forget(&mut self, hash: BlockHash) {
        self.index.remove(&hash);
    }

    /// Findable blocks, used or not; for invariant checks.
    pub(super) fn len(&self) -> usize {
        self.index.len()
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

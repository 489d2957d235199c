//! Blocks that a step filled, made findable together.
//!
//! Some dozens of a thousand decodes fill a block in a step. Their hashes are made side by side, and what
//! they touch, which is cold after as many steps as a block has tokens, is fetched side by side, too.

use slab::Slab;

use crate::iteration::sequence::Sequence;
use crate::memory::prefix::{BlockHash, LANES, LinkMaker};
use crate::request::SequenceKey;

/// Sequences whose last computed token filled a block.
pub(crate) struct Filled {
    sequences: Vec<SequenceKey>,
    maker: LinkMaker,
}

impl Filled {
    /// For so many sequences without growing.
    pub(crate) fn with_capacity(sequences: usize) -> Self {
        Self {
            sequences: Vec::with_capacity(sequences),
            maker: LinkMaker::default(),
        }
    }

    /// Adds one, which must not change until all are published.
    pub(crate) fn push(&mut self, sequence: SequenceKey) {
        self.sequences.push(sequence);
    }

    /// Makes the blocks findable.
    pub(crate) fn publish(&mut self, sequences: &mut Slab<Sequence>, block_size: u32) {
        for keys in self.sequences.chunks(LANES) {
            for key in keys {
                sequences[key.0].store_tail();
            }
            let mut parents = [BlockHash::default(); LANES];
            let mut blocks: [&[u32]; LANES] = [&[]; LANES];
            for (key, (parent, block)) in keys.iter().zip(parents.iter_mut().zip(&mut blocks)) {
                (*parent, *block) = sequences[key.0].filled_block(block_size);
            }
            let count = keys.len();
            let links = self.maker.links(&parents[..count], &blocks[..count]);
            for (key, link) in keys.iter().zip(links) {
                let sequence = &mut sequences[key.0];
                sequence.publish_filled(link);
                if sequence.has_filled_block(block_size) {
                    // Others came from the host before it.
                    sequence.publish_full_blocks(block_size);
                }
            }
        }
        self.sequences.clear();
    }
}

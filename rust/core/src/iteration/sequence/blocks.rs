//! A sequence's blocks: room for its tokens, and what of them the prefix cache is told.

use super::Sequence;
use crate::memory::blocks::{BlockCopy, OutOfBlocks};
use crate::memory::prefix::{BlockHash, extend_chain};

impl Sequence {
    /// Hashes of the full blocks that a prefix lookup may use: at least one token is always computed,
    /// and every token that is still to be scored.
    pub(crate) fn usable_chain(&mut self, block_size: u32) -> &[BlockHash] {
        self.store_tail();
        extend_chain(&mut self.chain, self.root, &self.stored, block_size);
        let needed_from = if self.num_scored_tokens < self.num_tokens_to_score {
            self.num_scored_tokens
        } else {
            self.num_tokens() - 1
        };
        &self.chain[..(needed_from / block_size) as usize]
    }

    /// Whether the slots of all its tokens are writable, as they are in most steps.
    pub(crate) fn has_room(&self, block_size: u32) -> bool {
        !self.may_share_last_block && self.num_missing_tokens(block_size) == 0
    }

    /// The same, told by a look at the blocks where that must be.
    pub(crate) fn is_writable(&self, block_size: u32) -> bool {
        let first = self.num_planned_tokens() / block_size;
        self.num_missing_tokens(block_size) == 0 && !self.table.is_shared(first as usize)
    }

    fn num_missing_tokens(&self, block_size: u32) -> u32 {
        let num_blocks = self.table.num_blocks();
        let num_tokens = self.num_expected_tokens();
        num_tokens.saturating_sub(num_blocks * block_size)
    }

    /// Makes the slots of all its tokens writable: fresh blocks, and an own copy of a shared one. Adds to
    /// `copies` those that this needs.
    pub(crate) fn make_room(
        &mut self,
        block_size: u32,
        copies: &mut Vec<BlockCopy>,
    ) -> Result<(), OutOfBlocks> {
        let missing_blocks = self.num_missing_tokens(block_size).div_ceil(block_size);
        let first = self.num_planned_tokens() / block_size;
        self.table
            .grow_for_writing(first as usize, missing_blocks, copies)
    }

    /// Whether it has full blocks that the prefix cache was not told of.
    #[inline]
    pub(crate) fn has_filled_block(&self, block_size: u32) -> bool {
        (self.num_published_blocks + 1) * block_size <= self.num_computed_tokens
    }

    /// The first of those, and the link before it. All its tokens must be stored.
    pub(crate) fn filled_block(&self, block_size: u32) -> (BlockHash, &[u32]) {
        let (at, block_size) = (self.num_published_blocks as usize, block_size as usize);
        let before = at.checked_sub(1).map_or(self.root, |at| self.chain[at]);
        (before, &self.stored[at * block_size..][..block_size])
    }

    /// Makes that block findable by its link.
    pub(crate) fn publish_filled(&mut self, link: BlockHash) {
        let at = self.num_published_blocks as usize;
        if self.chain.len() == at {
            self.chain.push(link);
        }
        self.table.publish(at, link);
        self.num_published_blocks += 1;
    }

    /// Makes all full blocks findable.
    pub(crate) fn publish_full_blocks(&mut self, block_size: u32) {
        let full = self.num_computed_tokens / block_size;
        if self.chain.len() < full as usize {
            self.store_tail();
            let tokens = &self.stored[..(full * block_size) as usize];
            extend_chain(&mut self.chain, self.root, tokens, block_size);
        }
        for position in self.num_published_blocks as usize..full as usize {
            self.table.publish(position, self.chain[position]);
        }
        self.num_published_blocks = full;
    }
}

//! Links of several chains, made side by side.
//!
//! In a step of many decodes some dozens fill a block each, and every one is a link of a chain of its own.
//! One compression of BLAKE3 is a long run of operations of which each needs the one before; those of
//! several links need nothing of one another, so they share vector instructions, one link a lane. It is the
//! keyed hash of the BLAKE3 specification (O'Connor, Aumasson, Neves and Wilcox-O'Hearn, 2020) for inputs of
//! one chunk, and what comes out is what [`BlockHash::then`] says.

#![expect(
    clippy::inline_always,
    reason = "compiled inside the function that `pulp` enabled the instructions for"
)]

use pulp::{Arch, Simd, WithSimd};

use super::BlockHash;

/// Links that are made at once.
pub const LANES: usize = 8;

/// Tokens of the largest block that is one chunk.
const MOST_TOKENS: usize = 256;
/// Words of a message of a compression.
const WORDS: usize = 16;

/// First words of the state's lower half.
const IV: [u32; 4] = [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A];
const CHUNK_START: u32 = 1;
const CHUNK_END: u32 = 1 << 1;
const ROOT: u32 = 1 << 3;
const KEYED_HASH: u32 = 1 << 4;

/// A word of each lane.
type Lanes = [u32; LANES];

/// Makes links side by side, with the widest vectors that the machine has.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkMaker(Arch);

impl LinkMaker {
    /// The links after up to [`LANES`] parents, each a full block; all blocks have as many tokens.
    pub fn links(&self, parents: &[BlockHash], blocks: &[&[u32]]) -> [BlockHash; LANES] {
        assert!(blocks.len() <= LANES && blocks.len() == parents.len());
        let num_tokens = blocks.first().map_or(0, |block| block.len());
        assert!(blocks.iter().all(|block| block.len() == num_tokens));
        if blocks.len() == 1 || num_tokens > MOST_TOKENS {
            let mut links = [BlockHash(0); LANES];
            for (link, (parent, block)) in links.iter_mut().zip(parents.iter().zip(blocks)) {
                *link = parent.then(block);
            }
            return links;
        }
        self.0.dispatch(SideBySide {
            parents,
            blocks,
            num_tokens,
        })
    }
}

struct SideBySide<'a> {
    parents: &'a [BlockHash],
    blocks: &'a [&'a [u32]],
    num_tokens: usize,
}

impl WithSimd for SideBySide<'_> {
    type Output = [BlockHash; LANES];

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        let mut chaining = [[0; LANES]; 8];
        for (lane, parent) in self.parents.iter().enumerate() {
            for (word, of_lanes) in chaining[..4].iter_mut().enumerate() {
                of_lanes[lane] = (parent.0 >> (32 * word)) as u32;
            }
        }
        for begin in (0..self.num_tokens).step_by(WORDS) {
            let end = self.num_tokens.min(begin + WORDS);
            let mut message = [[0; LANES]; WORDS];
            for (lane, block) in self.blocks.iter().enumerate() {
                for (of_lanes, &token) in message.iter_mut().zip(&block[begin..end]) {
                    of_lanes[lane] = token;
                }
            }
            let mut flags = KEYED_HASH;
            if begin == 0 {
                flags |= CHUNK_START;
            }
            if end == self.num_tokens {
                flags |= CHUNK_END | ROOT;
            }
            compress(&mut chaining, &message, 4 * (end - begin) as u32, flags);
        }
        std::array::from_fn(|lane| {
            let words = chaining[..4].iter().rev();
            BlockHash(words.fold(0, |hash, of_lanes| hash << 32 | u128::from(of_lanes[lane])))
        })
    }
}

/// Compresses a message of `num_bytes` into the chaining values. A loop over the lanes of straight code:
/// it is made into vectors as it stands.
#[inline(always)]
fn compress(chaining: &mut [Lanes; 8], message: &[Lanes; WORDS], num_bytes: u32, flags: u32) {
    for lane in 0..LANES {
        let mut state = [0; 16];
        for word in 0..8 {
            state[word] = chaining[word][lane];
        }
        state[8..12].copy_from_slice(&IV);
        state[14..].copy_from_slice(&[num_bytes, flags]);
        let mut first = [0; WORDS];
        for word in 0..WORDS {
            first[word] = message[word][lane];
        }
        // Unrolled by hand: a loop in the loop would not become vectors.
        let second = round(&mut state, first);
        let third = round(&mut state, second);
        let fourth = round(&mut state, third);
        let fifth = round(&mut state, fourth);
        let sixth = round(&mut state, fifth);
        let seventh = round(&mut state, sixth);
        round(&mut state, seventh);
        for word in 0..8 {
            chaining[word][lane] = state[word] ^ state[word + 8];
        }
    }
}

/// A round; the message of the next one.
#[inline(always)]
fn round(state: &mut [u32; 16], message: [u32; WORDS]) -> [u32; WORDS] {
    let m = &message;
    mix(state, [0, 4, 8, 12], [m[0], m[1]]);
    mix(state, [1, 5, 9, 13], [m[2], m[3]]);
    mix(state, [2, 6, 10, 14], [m[4], m[5]]);
    mix(state, [3, 7, 11, 15], [m[6], m[7]]);
    mix(state, [0, 5, 10, 15], [m[8], m[9]]);
    mix(state, [1, 6, 11, 12], [m[10], m[11]]);
    mix(state, [2, 7, 8, 13], [m[12], m[13]]);
    mix(state, [3, 4, 9, 14], [m[14], m[15]]);
    [
        m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14],
        m[15], m[8],
    ]
}

/// Mixes two words of the message into a column or a diagonal of the state.
#[inline(always)]
fn mix(state: &mut [u32; 16], [a, b, c, d]: [usize; 4], message: [u32; 2]) {
    for (word, rotations) in message.into_iter().zip([[16, 12], [8, 7]]) {
        state[a] = state[a].wrapping_add(state[b]).wrapping_add(word);
        state[d] = (state[d] ^ state[a]).rotate_right(rotations[0]);
        state[c] = state[c].wrapping_add(state[d]);
        state[b] = (state[b] ^ state[c]).rotate_right(rotations[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_those_made_one_by_one() {
        let maker = LinkMaker::default();
        let root = BlockHash::root([Some("tenant"), None, None]);
        let token = |at: u32, lane: u32| at.wrapping_mul(0x9E37_79B9) ^ lane;
        for num_tokens in [1, 7, 8, 16, 17, 32, 64, 100, 256, 257] {
            for count in 0..=LANES {
                let tokens: Vec<Vec<u32>> = (0..count as u32)
                    .map(|lane| (0..num_tokens).map(|at| token(at, lane)).collect())
                    .collect();
                let blocks: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
                let parents: Vec<BlockHash> =
                    (0..count as u32).map(|lane| root.then(&[lane])).collect();
                let links = maker.links(&parents, &blocks);
                for (lane, (parent, block)) in parents.iter().zip(&blocks).enumerate() {
                    assert_eq!(
                        links[lane],
                        parent.then(block),
                        "link {lane} of {count}, {num_tokens} tokens"
                    );
                }
            }
        }
    }
}

//! Bringing a tile into place: where its keys and values lie, keys packed to columns, values widened.
//!
//! While one tile is packed the next one is asked for, a little at a time, because what an item reads
//! lies scattered over the blocks and no hardware would guess it.

use pulp::Simd;

use super::{Frame, TILE};
use crate::attention::Call;
use crate::attention::items::Item;
use crate::element::Element;
use crate::scratch::padded;
use crate::simd::prefetch;
use crate::transpose::pack_columns;

/// Keys that are packed at a time, a multiple of every vector's lanes.
const CHUNK: usize = 16;

/// Where the keys and values of a tile lie.
pub(super) struct TileRows<C> {
    /// First position.
    pub(super) begin: usize,
    /// Number of positions; zero for no tile.
    pub(super) tokens: usize,
    /// Keys; from `tokens` on, up to a whole chunk, the last one again.
    keys: [*const C; TILE],
    /// Values.
    pub(super) values: [*const C; TILE],
}

impl<C: Element> TileRows<C> {
    /// Finds the tile at `begin` of a sequence that sees `visible` positions.
    #[inline(always)]
    pub(super) fn locate<E>(call: &Call<'_, E, C>, item: Item, begin: usize, visible: usize) -> Self
    where
        E: Element,
    {
        let table = call.batch.block_table(item.sequence as usize);
        let dim = call.layer.head_dim;
        let tokens = TILE.min(visible.saturating_sub(begin));
        let mut rows = Self {
            begin,
            tokens,
            keys: [std::ptr::null(); TILE],
            values: [std::ptr::null(); TILE],
        };
        let mut t = 0;
        while t < tokens {
            let (block, offset) = ((begin + t) / call.block_size, (begin + t) % call.block_size);
            let run = (call.block_size - offset).min(tokens - t);
            let at = call.cache_offset(table[block] as usize, item.kv_head as usize, offset);
            for i in 0..run {
                // SAFETY: the block is within the caches (`check_cache`), the run within the block.
                unsafe {
                    rows.keys[t + i] = call.k_cache.add(at + i * dim);
                    rows.values[t + i] = call.v_cache.add(at + i * dim);
                }
            }
            t += run;
        }
        if tokens > 0 {
            let last = rows.keys[tokens - 1];
            rows.keys[tokens..tokens.next_multiple_of(CHUNK)].fill(last);
        }
        rows
    }

    /// Packs the keys to columns and, if `widen`, the values to rows of the frame.
    ///
    /// # Safety
    /// The frame's areas have the sizes documented there.
    #[inline(always)]
    pub(super) unsafe fn pack<S: Simd>(&self, simd: S, frame: &Frame, next: &Self, widen: bool) {
        for begin in (0..self.tokens).step_by(CHUNK) {
            // SAFETY: every row leads to `dim` elements of a cache; the areas are the frame's.
            unsafe {
                let keys = &self.keys[begin..begin + CHUNK];
                pack_columns(simd, keys, frame.dim, frame.keys.add(begin));
                if widen {
                    for t in begin..self.tokens.min(begin + CHUNK) {
                        let target = frame.values.add(t * frame.width);
                        widen_row(simd, self.values[t], frame.dim, target);
                    }
                }
            }
            next.prefetch(frame.dim, begin, begin + CHUNK);
        }
    }

    /// Asks for the keys and values of some positions.
    #[inline(always)]
    pub(super) fn prefetch(&self, dim: usize, begin: usize, end: usize) {
        for t in begin..end.min(self.tokens) {
            for line in (0..dim * size_of::<C>()).step_by(64) {
                prefetch(self.keys[t].cast::<u8>().wrapping_add(line));
                prefetch(self.values[t].cast::<u8>().wrapping_add(line));
            }
        }
    }
}

/// Widens one value row and pads it with zeros to whole lines.
///
/// # Safety
/// `source` has `dim` elements, `target` room for `dim` rounded up to whole lines.
#[inline(always)]
unsafe fn widen_row<S: Simd, C: Element>(simd: S, source: *const C, dim: usize, target: *mut f32) {
    let whole = dim - dim % S::F32_LANES;
    // SAFETY: the caller's promise.
    unsafe {
        for d in (0..whole).step_by(S::F32_LANES) {
            f32::store(simd, target.add(d), C::load(simd, source.add(d)));
        }
        for d in whole..dim {
            target.add(d).write(source.add(d).read_unaligned().to_f32());
        }
        for d in dim..padded(dim) {
            target.add(d).write(0.0);
        }
    }
}

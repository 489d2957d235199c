//! The attention of one work item: rows of queries against tiles of keys and values.
//!
//! A row is one query token of one head. Keys are taken in tiles of [`TILE`] positions and segments of
//! [`SEGMENT`]; both begin at multiples of their size whatever the query is. Per tile, the keys are
//! packed to columns and the values widened, once for all rows of the item; then a few rows at a time
//! go through three steps: scores, softmax with a running maximum (Milakov and Gimelshein 2018), sum of
//! values. At the end of a segment the row's state is merged into its total.
//!
//! Per row this is one fixed sequence of operations: scores add up over dimensions in order, sums over
//! positions in order, segments in order. How many rows share a tile and which vectors are skipped
//! because nothing of them is visible changes no bit: a hidden position adds exactly zero.

mod pack;
mod rows;

use std::num::NonZeroUsize;
use std::sync::PoisonError;

use pulp::Simd;

use crate::attention::items::{Item, Split};
use crate::attention::{Call, Merge};
use crate::element::Element;
use crate::prologue::HeadTransform;
use crate::scratch::{Scratch, padded};
use crate::simd::{MAX_LANES, exp2, fma};
use pack::TileRows;
use rows::{ROWS, Step, SumRows, WeighRows};

/// Key positions that are packed and scored together.
pub const TILE: usize = 64;
/// Key positions after which a row's softmax state is merged into its total: where keys may be cut.
pub const SEGMENT: usize = 256;

/// Length of the softmax states of `rows` rows: per row the sum of values (padded), the sums of
/// weights by lane, and the maximum.
pub(crate) fn partial_len(rows: usize, dim: usize) -> usize {
    rows * state_stride(dim)
}

fn state_stride(dim: usize) -> usize {
    padded(dim) + 2 * MAX_LANES
}

/// Sizes and places that the steps of an item share.
struct Frame {
    dim: usize,
    /// `dim` rounded up to whole lines: stride of the packed values and of the sums.
    width: usize,
    /// Stride of a row's softmax state.
    stride: usize,
    rows: usize,
    group: usize,
    /// End of the positions that the first row sees.
    first_visible: usize,
    /// Positions that a row sees before that end.
    window: usize,
    /// Bound of the scores, to base two.
    soft_cap: Option<f32>,
    /// Queries `[rows, dim]`, scaled.
    queries: *const f32,
    /// Softmax states `[rows, stride]` of the current segment.
    states: *mut f32,
    /// Packed keys `[dim, TILE]`.
    keys: *mut f32,
    /// Widened values `[TILE, width]`.
    values: *mut f32,
    /// Scores, then weights `[ROWS, TILE]`.
    weights: *mut f32,
}

impl Frame {
    /// Rows of the widened values.
    fn widened(&self) -> [*const f32; TILE] {
        let mut rows = [std::ptr::null(); TILE];
        for (t, row) in rows.iter_mut().enumerate() {
            *row = self.values.wrapping_add(t * self.width).cast_const();
        }
        rows
    }

    /// End of the positions that a row sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        self.first_visible + row / self.group
    }

    /// Positions before those that a row sees.
    #[inline(always)]
    fn passed(&self, row: usize) -> usize {
        self.visible(row).saturating_sub(self.window)
    }
}

/// Computes one item and writes its rows of the output, or leaves its part for the last to merge.
#[inline(always)]
pub(crate) fn run_item<S: Simd, E: Element, C: Element>(
    simd: S,
    call: &Call<'_, E, C>,
    item: Item,
    merge: &Merge,
    scratch: &mut Scratch,
) {
    let dim = call.layer.head_dim;
    let (_, queries) = call.batch.queries(item.sequence as usize);
    let (width, stride) = (padded(dim), state_stride(dim));
    let rows = item.num_queries() * call.group;
    let [query_area, states, totals, keys, values, weights] = scratch.take([
        (rows * dim).next_multiple_of(MAX_LANES),
        rows * stride,
        rows * stride,
        dim * TILE,
        width * TILE,
        ROWS * TILE,
    ]);
    let seq_len = call.batch.seq_len(item.sequence as usize);
    let first = item.segment_begin as usize * SEGMENT;
    TileRows::locate(call, item, first, seq_len).prefetch(dim, 0, TILE);
    load_queries(simd, call, item, query_area);
    let frame = Frame {
        dim,
        width,
        stride,
        rows,
        group: call.group,
        first_visible: seq_len - queries + item.query_begin as usize + 1,
        window: call.layer.window.map_or(usize::MAX, NonZeroUsize::get),
        soft_cap: call
            .layer
            .soft_cap
            .map(|cap| cap * std::f32::consts::LOG2_E),
        queries: query_area.as_ptr(),
        states: states.as_mut_ptr(),
        keys: keys.as_mut_ptr(),
        values: values.as_mut_ptr(),
        weights: weights.as_mut_ptr(),
    };
    for segment in item.segment_begin..item.segment_end {
        // SAFETY: the areas of the frame have the sizes documented there.
        unsafe { run_segment(simd, call, item, &frame, segment as usize) };
        // SAFETY: the states are `rows * stride` floats and nothing else refers to them just now.
        let part = unsafe { std::slice::from_raw_parts(frame.states, rows * stride) };
        match item.split {
            Some(split) => {
                let partial = &merge.partials[(split.first_partial + segment) as usize];
                let mut partial = partial.lock().unwrap_or_else(PoisonError::into_inner);
                partial[..part.len()].copy_from_slice(part);
            }
            None if segment == 0 => totals.copy_from_slice(part),
            None => merge_states(simd, totals, part, width),
        }
    }
    if let Some(split) = item.split {
        if !merge.finish(split.counter, item.num_segments(), split.num_segments) {
            return;
        }
        merge_parts(simd, merge, split, totals, width);
    }
    write_output(simd, call, item, totals);
}

/// Merges all parts of a split set of rows, in order.
#[inline(always)]
fn merge_parts<S: Simd>(simd: S, merge: &Merge, split: Split, totals: &mut [f32], width: usize) {
    for segment in 0..split.num_segments {
        let partial = &merge.partials[(split.first_partial + segment) as usize];
        let part = partial.lock().unwrap_or_else(PoisonError::into_inner);
        let part = &part[..totals.len()];
        if segment == 0 {
            totals.copy_from_slice(part);
        } else {
            merge_states(simd, totals, part, width);
        }
    }
}

/// Loads, transforms and scales the item's queries: `[rows, dim]`.
#[inline(always)]
fn load_queries<S: Simd, E: Element, C: Element>(
    simd: S,
    call: &Call<'_, E, C>,
    item: Item,
    area: &mut [f32],
) {
    let layer = call.layer;
    let (first_token, _) = call.batch.queries(item.sequence as usize);
    // Scores are taken to base two.
    let scale = layer.scale * std::f32::consts::LOG2_E * call.cache_scales().0;
    for (row, head) in area.chunks_exact_mut(layer.head_dim).enumerate() {
        let (query, member) = (row / call.group, row % call.group);
        if query >= item.num_queries() {
            break;
        }
        let token = first_token + item.query_begin as usize + query;
        let transform = HeadTransform {
            norm: call
                .q_norm
                .as_deref()
                .map(|weight| (weight, layer.norm_eps)),
            rope: layer
                .rope
                .map(|tables| (tables, call.batch.position(token))),
        };
        let source = call.head(token, item.kv_head as usize * call.group + member);
        // SAFETY: a head has `head_dim` elements.
        unsafe { transform.apply(simd, source, head) };
        for x in head {
            *x *= scale;
        }
    }
}

/// Fills the states with the softmax of one segment of keys.
///
/// # Safety
/// The areas of the frame have the sizes documented there.
#[inline(always)]
unsafe fn run_segment<S: Simd, E: Element, C: Element>(
    simd: S,
    call: &Call<'_, E, C>,
    item: Item,
    frame: &Frame,
    segment: usize,
) {
    // SAFETY: the caller's promise.
    let states = unsafe { std::slice::from_raw_parts_mut(frame.states, frame.rows * frame.stride) };
    for state in states.chunks_exact_mut(frame.stride) {
        state[..frame.width + MAX_LANES].fill(0.0);
        state[frame.width + MAX_LANES] = f32::NEG_INFINITY;
    }
    let visible = frame.visible(frame.rows - 1);
    let own_end = visible.min(item.segment_end as usize * SEGMENT);
    let end = (segment * SEGMENT + SEGMENT).min(visible);
    let begin = (segment * SEGMENT).max(frame.passed(0) / TILE * TILE);
    if begin >= end {
        return; // the window has left this segment behind
    }
    // Few rows read the values where they lie; many are worth a widened copy.
    let in_place = frame.rows <= ROWS && frame.dim == frame.width;
    let widened = frame.widened();
    let mut tile = TileRows::locate(call, item, begin, end);
    while tile.begin < end {
        let next = TileRows::locate(call, item, tile.begin + TILE, own_end);
        // SAFETY: the frame's areas are as documented.
        unsafe { tile.pack(simd, frame, &next, !in_place) };
        for row in (0..frame.rows).step_by(ROWS) {
            let rows = ROWS.min(frame.rows - row);
            let last_visible = frame.visible(row + rows - 1);
            if last_visible <= tile.begin || frame.passed(row) >= tile.begin + TILE {
                continue;
            }
            let tokens = tile.tokens.min(last_visible - tile.begin);
            let step = Step {
                row,
                rows,
                tile_begin: tile.begin,
                tokens,
            };
            // SAFETY: rows and tokens are within the frame's areas.
            unsafe {
                simd.vectorize(WeighRows::new(frame, &step));
                if in_place {
                    simd.vectorize(SumRows::new(frame, &step, &tile.values));
                } else {
                    simd.vectorize(SumRows::new(frame, &step, &widened));
                }
            }
        }
        tile = next;
    }
}

/// Merges the states of a later segment into the totals.
#[inline(always)]
fn merge_states<S: Simd>(simd: S, totals: &mut [f32], part: &[f32], width: usize) {
    let stride = width + 2 * MAX_LANES;
    for (total, part) in totals
        .chunks_exact_mut(stride)
        .zip(part.chunks_exact(stride))
    {
        let (before, theirs) = (total[width + MAX_LANES], part[width + MAX_LANES]);
        if theirs == f32::NEG_INFINITY && part[width] == 0.0 {
            continue; // the row sees nothing of this segment
        }
        let now = before.max(theirs);
        let keep = exp2(simd, simd.splat_f32s(before - now));
        let add = exp2(simd, simd.splat_f32s(theirs - now));
        total[width + MAX_LANES] = now;
        let (total, _) = S::as_mut_simd_f32s(&mut total[..width + MAX_LANES]);
        let (part, _) = S::as_simd_f32s(&part[..width + MAX_LANES]);
        for (total, &part) in total.iter_mut().zip(part) {
            *total = fma(simd, part, add, simd.mul_f32s(*total, keep));
        }
    }
}

/// Divides by the sums of weights and writes the item's rows of the output.
#[inline(always)]
fn write_output<S: Simd, E: Element, C: Element>(
    simd: S,
    call: &Call<'_, E, C>,
    item: Item,
    totals: &[f32],
) {
    let layer = call.layer;
    let (dim, width) = (layer.head_dim, padded(layer.head_dim));
    let (_, v_scale) = call.cache_scales();
    let (first_token, _) = call.batch.queries(item.sequence as usize);
    for (row, total) in totals.chunks_exact(state_stride(dim)).enumerate() {
        let token = first_token + item.query_begin as usize + row / call.group;
        let head = item.kv_head as usize * call.group + row % call.group;
        let (sums, _) = S::as_simd_f32s(&total[width..width + S::F32_LANES]);
        let factor = v_scale / simd.reduce_sum_f32s(sums[0]);
        let whole = dim - dim % S::F32_LANES;
        // SAFETY: the token and the head are within the output, and this row is this item's alone.
        unsafe {
            let target = call.out.add((token * layer.num_heads + head) * dim);
            for d in (0..whole).step_by(S::F32_LANES) {
                let value = f32::load(simd, total.as_ptr().add(d));
                E::store(
                    simd,
                    target.add(d),
                    simd.mul_f32s(value, simd.splat_f32s(factor)),
                );
            }
            for (d, sum) in total[..dim].iter().enumerate().skip(whole) {
                target.add(d).write_unaligned(E::from_f32(sum * factor));
            }
        }
    }
}

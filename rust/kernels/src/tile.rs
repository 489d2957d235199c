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

use std::cell::RefCell;

use pulp::Simd;

use crate::attention::items::Item;
use crate::attention::{Call, Merge};
use crate::element::Element;
use crate::prologue::HeadTransform;
use crate::simd::{MAX_LANES, exp2, fma};
use crate::transpose::pack_columns;

/// Key positions that are packed and scored together.
pub const TILE: usize = 64;
/// Key positions after which a row's softmax state is merged into its total: where keys may be cut.
pub const SEGMENT: usize = 256;
/// Rows that go through a tile together; their sums stay in registers.
const ROWS: usize = 6;

/// Length of the softmax states of `rows` rows: per row the sum of values (padded), the sums of
/// weights by lane, and the maximum.
pub(crate) fn partial_len(rows: usize, dim: usize) -> usize {
    rows * state_stride(dim)
}

fn padded(dim: usize) -> usize {
    dim.next_multiple_of(MAX_LANES)
}

fn state_stride(dim: usize) -> usize {
    padded(dim) + 2 * MAX_LANES
}

/// A cache line of float32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; MAX_LANES]);

/// A thread's working memory; kept between calls.
pub(crate) struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// Lends the thread's scratch. Call it outside of `dispatch`: closures that the standard library
    /// calls are compiled without the vector instructions.
    pub(crate) fn with<R>(use_it: impl FnOnce(&mut Self) -> R) -> R {
        thread_local! {
            static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { lines: Vec::new() }) };
        }
        SCRATCH.with(|scratch| use_it(&mut scratch.borrow_mut()))
    }

    /// Room for one head.
    pub(crate) fn head(&mut self, dim: usize) -> &mut [f32] {
        &mut self.take([padded(dim)])[0][..dim]
    }

    /// Cuts the scratch into areas of these lengths, each a multiple of a line. Contents are left over
    /// from earlier calls.
    fn take<const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [f32]; N] {
        let lines = lengths.iter().sum::<usize>() / MAX_LANES;
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; MAX_LANES]));
        }
        // SAFETY: a line is 16 float32 without padding.
        let mut rest = unsafe {
            let first = self.lines.as_mut_ptr().cast::<f32>();
            std::slice::from_raw_parts_mut(first, self.lines.len() * MAX_LANES)
        };
        lengths.map(|length| {
            let (area, after) = std::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            area
        })
    }
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
    /// Positions that the first row sees.
    first_visible: usize,
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
    /// Positions that a row sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        self.first_visible + row / self.group
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
    load_queries(simd, call, item, query_area);
    let seq_len = call.batch.seq_len(item.sequence as usize);
    let frame = Frame {
        dim,
        width,
        stride,
        rows,
        group: call.group,
        first_visible: seq_len - queries + item.query_begin as usize + 1,
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
                let mut partial = partial
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
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
        for segment in 0..split.num_segments {
            let partial = &merge.partials[(split.first_partial + segment) as usize];
            let part = partial
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            let part = &part[..totals.len()];
            if segment == 0 {
                totals.copy_from_slice(part);
            } else {
                merge_states(simd, totals, part, width);
            }
        }
    }
    write_output(simd, call, item, totals);
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
    let scale = layer.scale * std::f32::consts::LOG2_E;
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
    let begin = segment * SEGMENT;
    let end = (begin + SEGMENT).min(frame.visible(frame.rows - 1));
    for tile_begin in (begin..end).step_by(TILE) {
        let tokens = TILE.min(end - tile_begin);
        // SAFETY: the tile's positions are within the sequence, hence within its block table.
        unsafe { pack_tile(simd, call, item, frame, tile_begin, tokens) };
        for row in (0..frame.rows).step_by(ROWS) {
            let rows = ROWS.min(frame.rows - row);
            let last_visible = frame.visible(row + rows - 1);
            if last_visible <= tile_begin {
                continue;
            }
            let tokens = tokens.min(last_visible - tile_begin);
            let step = Step {
                row,
                rows,
                tile_begin,
                tokens,
            };
            // SAFETY: rows and tokens are within the frame's areas.
            unsafe {
                score_rows(simd, frame, &step);
                weigh_rows(simd, frame, &step);
                sum_rows(simd, frame, &step);
            }
        }
    }
}

/// A few rows against one tile.
struct Step {
    row: usize,
    rows: usize,
    tile_begin: usize,
    /// Positions of the tile that the last of the rows sees.
    tokens: usize,
}

/// Packs a tile's keys to columns and widens its values.
///
/// # Safety
/// Positions `[tile_begin, tile_begin + tokens)` are within the item's sequence.
#[inline(always)]
unsafe fn pack_tile<S: Simd, E: Element, C: Element>(
    simd: S,
    call: &Call<'_, E, C>,
    item: Item,
    frame: &Frame,
    tile_begin: usize,
    tokens: usize,
) {
    let table = call.batch.block_table(item.sequence as usize);
    let mut key_rows = [std::ptr::null::<C>(); TILE];
    let mut value_rows = [std::ptr::null::<C>(); TILE];
    let (mut block, mut offset) = (tile_begin / call.block_size, tile_begin % call.block_size);
    for t in 0..tokens {
        let at = call.cache_offset(table[block] as usize, item.kv_head as usize, offset);
        // SAFETY: the block is within the cache (`check_cache`).
        unsafe {
            key_rows[t] = call.k_cache.add(at);
            value_rows[t] = call.v_cache.add(at);
        }
        offset += 1;
        if offset == call.block_size {
            (block, offset) = (block + 1, 0);
        }
    }
    // Whole vectors of keys: the rest repeats the last one and is masked away later.
    let whole = tokens.next_multiple_of(S::F32_LANES);
    let last = key_rows[tokens - 1];
    key_rows[tokens..whole].fill(last);
    // SAFETY: every row pointer leads to `dim` elements of the cache; the areas are the frame's.
    unsafe {
        pack_columns(simd, &key_rows[..whole], frame.dim, frame.keys);
        for (t, &source) in value_rows[..tokens].iter().enumerate() {
            widen_row(simd, source, frame.dim, frame.values.add(t * frame.width));
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

/// Calls `$kernel::<S, ROWS, VECTORS>` for run-time numbers of rows (1-6) and vectors (1-4).
macro_rules! with_sizes {
    ($kernel:ident, $rows:expr, $vectors:expr, ($($argument:expr),*)) => {
        with_sizes!(@rows $kernel, $rows, $vectors, ($($argument),*), 1 2 3 4 5 6)
    };
    (@rows $kernel:ident, $rows:expr, $vectors:expr, $arguments:tt, $($r:literal)*) => {
        match $rows {
            $($r => with_sizes!(@vectors $kernel, $r, $vectors, $arguments),)*
            _ => unreachable!("at most six rows"),
        }
    };
    (@vectors $kernel:ident, $r:literal, $vectors:expr, ($($argument:expr),*)) => {
        match $vectors {
            1 => $kernel::<S, $r, 1>($($argument),*),
            2 => $kernel::<S, $r, 2>($($argument),*),
            3 => $kernel::<S, $r, 3>($($argument),*),
            4 => $kernel::<S, $r, 4>($($argument),*),
            _ => unreachable!("at most four vectors"),
        }
    };
}

/// Vectors of one row that are summed at once; with [`ROWS`] rows they fill the registers.
const fn max_vectors<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 4 } else { 2 }
}

/// Scores of the step's rows: `weights[r][t] = queries[row + r] . keys[t]`.
///
/// # Safety
/// The step is within the frame's areas.
#[inline(always)]
unsafe fn score_rows<S: Simd>(simd: S, frame: &Frame, step: &Step) {
    let vectors = step.tokens.div_ceil(S::F32_LANES);
    let mut done = 0;
    while done < vectors {
        let count = (vectors - done).min(max_vectors::<S>());
        // SAFETY: the caller's promise; `done + count` vectors are within a tile.
        unsafe {
            let queries = frame.queries.add(step.row * frame.dim);
            let keys = frame.keys.add(done * S::F32_LANES);
            let scores = frame.weights.add(done * S::F32_LANES);
            with_sizes!(
                scores_kernel,
                step.rows,
                count,
                (simd, queries, frame.dim, keys, scores)
            );
        }
        done += count;
    }
}

/// # Safety
/// `queries` is `[R, dim]`, `keys` `[dim, TILE]` with `V` vectors from its start, `scores` `[R, TILE]`.
#[inline(always)]
unsafe fn scores_kernel<S: Simd, const R: usize, const V: usize>(
    simd: S,
    queries: *const f32,
    dim: usize,
    keys: *const f32,
    scores: *mut f32,
) {
    let mut sums = [[simd.splat_f32s(0.0); V]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for d in 0..dim {
            let mut columns = [simd.splat_f32s(0.0); V];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = f32::load(simd, keys.add(d * TILE + v * S::F32_LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = simd.splat_f32s(*queries.add(r * dim + d));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = fma(simd, query, column, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                f32::store(simd, scores.add(r * TILE + v * S::F32_LANES), sum);
            }
        }
    }
}

/// Turns scores into weights `2^(score - maximum)` and rescales states whose maximum grew.
///
/// # Safety
/// The step is within the frame's areas.
#[inline(always)]
unsafe fn weigh_rows<S: Simd>(simd: S, frame: &Frame, step: &Step) {
    let lanes = S::F32_LANES;
    let vectors = step.tokens.div_ceil(lanes);
    for r in 0..step.rows {
        let row = step.row + r;
        let visible = frame
            .visible(row)
            .saturating_sub(step.tile_begin)
            .min(step.tokens);
        // SAFETY: the caller's promise.
        unsafe {
            let scores = frame.weights.add(r * TILE);
            let state = frame.states.add(row * frame.stride);
            let (whole, rest) = (visible / lanes, visible % lanes);
            let seen = visible.div_ceil(lanes);
            for v in seen..vectors {
                f32::store(simd, scores.add(v * lanes), simd.splat_f32s(0.0));
            }
            if visible == 0 {
                continue;
            }
            let mut highest = simd.splat_f32s(f32::NEG_INFINITY);
            for v in 0..whole {
                highest = simd.max_f32s(highest, f32::load(simd, scores.add(v * lanes)));
            }
            if rest > 0 {
                let at = scores.add(whole * lanes);
                let is_visible = simd.mask_between_m32s(0, rest as u32).mask();
                let hidden = simd.splat_f32s(f32::NEG_INFINITY);
                let masked = simd.select_f32s(is_visible, f32::load(simd, at), hidden);
                f32::store(simd, at, masked);
                highest = simd.max_f32s(highest, masked);
            }
            let weight_sums = state.add(frame.width);
            let maximum = weight_sums.add(MAX_LANES);
            let before = *maximum;
            let now = before.max(simd.reduce_max_f32s(highest));
            if now > before {
                rescale(simd, state, frame.width, before - now);
                *maximum = now;
            }
            let mut sum = f32::load(simd, weight_sums);
            let subtract = simd.splat_f32s(now);
            for v in 0..seen {
                let at = scores.add(v * lanes);
                let weight = exp2(simd, simd.sub_f32s(f32::load(simd, at), subtract));
                f32::store(simd, at, weight);
                sum = simd.add_f32s(sum, weight);
            }
            f32::store(simd, weight_sums, sum);
        }
    }
}

/// Multiplies a state's sums by `2^exponent`.
///
/// # Safety
/// `state` is a row's state of `width` sums of values.
#[inline(always)]
unsafe fn rescale<S: Simd>(simd: S, state: *mut f32, width: usize, exponent: f32) {
    let factor = exp2(simd, simd.splat_f32s(exponent));
    for i in (0..width + S::F32_LANES).step_by(S::F32_LANES) {
        // SAFETY: the sums of values and the sums of weights are neighbours.
        unsafe {
            let at = state.add(i);
            f32::store(simd, at, simd.mul_f32s(f32::load(simd, at), factor));
        }
    }
}

/// Adds the weighted values: `state[r] += sum over t of weights[r][t] * values[t]`.
///
/// # Safety
/// The step is within the frame's areas.
#[inline(always)]
unsafe fn sum_rows<S: Simd>(simd: S, frame: &Frame, step: &Step) {
    let vectors = frame.width / S::F32_LANES;
    let passes = vectors.div_ceil(max_vectors::<S>());
    let per_pass = vectors.div_ceil(passes);
    let mut done = 0;
    while done < vectors {
        let count = (vectors - done).min(per_pass);
        // SAFETY: the caller's promise; `done + count` vectors are within a row.
        unsafe {
            let sums = frame
                .states
                .add(step.row * frame.stride + done * S::F32_LANES);
            let values = frame.values.add(done * S::F32_LANES);
            with_sizes!(
                sums_kernel,
                step.rows,
                count,
                (simd, frame, step.tokens, values, sums)
            );
        }
        done += count;
    }
}

/// # Safety
/// `values` is `[tokens, frame.width]` and `sums` `[R, frame.stride]`, `V` vectors from their starts.
#[inline(always)]
unsafe fn sums_kernel<S: Simd, const R: usize, const V: usize>(
    simd: S,
    frame: &Frame,
    tokens: usize,
    values: *const f32,
    sums: *mut f32,
) {
    let lanes = S::F32_LANES;
    let mut totals = [[simd.splat_f32s(0.0); V]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for (r, totals) in totals.iter_mut().enumerate() {
            for (v, total) in totals.iter_mut().enumerate() {
                *total = f32::load(simd, sums.add(r * frame.stride + v * lanes));
            }
        }
        for t in 0..tokens {
            let mut row = [simd.splat_f32s(0.0); V];
            for (v, value) in row.iter_mut().enumerate() {
                *value = f32::load(simd, values.add(t * frame.width + v * lanes));
            }
            for (r, totals) in totals.iter_mut().enumerate() {
                let weight = simd.splat_f32s(*frame.weights.add(r * TILE + t));
                for (total, &value) in totals.iter_mut().zip(&row) {
                    *total = fma(simd, weight, value, *total);
                }
            }
        }
        for (r, totals) in totals.iter().enumerate() {
            for (v, &total) in totals.iter().enumerate() {
                f32::store(simd, sums.add(r * frame.stride + v * lanes), total);
            }
        }
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
    let (first_token, _) = call.batch.queries(item.sequence as usize);
    for (row, total) in totals.chunks_exact(state_stride(dim)).enumerate() {
        let token = first_token + item.query_begin as usize + row / call.group;
        let head = item.kv_head as usize * call.group + row % call.group;
        let (sums, _) = S::as_simd_f32s(&total[width..width + S::F32_LANES]);
        let factor = 1.0 / simd.reduce_sum_f32s(sums[0]);
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
            for d in whole..dim {
                target
                    .add(d)
                    .write_unaligned(E::from_f32(total[d] * factor));
            }
        }
    }
}

//! One layer's attention: checks, the two parallel phases, and the choice of types.
//!
//! [`forward`] checks the call, then writes the step's keys and values into the cache (phase one) and
//! attends (phase two; it reads what phase one wrote, hence two regions). Small calls stay on the
//! caller's thread: waking a second one costs more than it brings.

pub mod items;

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use pulp::{Simd, WithSimd};

use crate::batch::{AttentionBatch, AttentionError};
use crate::e4m3::E4m3;
use crate::element::{Dtype, Element};
use crate::parallel;
use crate::prologue::write_token;
use crate::scratch::Scratch;
use crate::tile;

use items::{Item, ItemShape, split_sizes, total_cost};

/// Multiply-adds below which a call stays on one thread (about 5 us).
const PARALLEL_MIN_COST: usize = 150_000;
/// Tokens per piece of phase one.
const TOKENS_PER_PIECE: usize = 16;

/// What is fixed for a layer.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Dimensions of a head, a multiple of 8.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Rotary tables, if positions are rotary.
    pub rope: Option<RopeTables>,
    /// Weight `[head_dim]` of the query norm, if there is one.
    pub q_norm: Option<Vector>,
    /// Weight `[head_dim]` of the key norm, if there is one.
    pub k_norm: Option<Vector>,
    /// Added to the mean square in both norms.
    pub norm_eps: f32,
    /// Positions that a query sees, up to its own; none: all of them.
    pub window: Option<NonZeroUsize>,
    /// Scores become `cap * tanh(score / cap)`; none: they stay.
    pub soft_cap: Option<f32>,
    /// Keys are divided by it in caches of 8 bits, which alone have scales.
    pub k_scale: f32,
    /// Values are.
    pub v_scale: f32,
}

// SAFETY: the pointers are only read, and only under the contract of `forward`.
unsafe impl Send for Layer {}
// SAFETY: as above.
unsafe impl Sync for Layer {}

/// Rotary tables: float32 `[max_position, half]` each.
#[derive(Clone, Copy, Debug)]
pub struct RopeTables {
    /// Cosines.
    pub cos: *const f32,
    /// Sines.
    pub sin: *const f32,
    /// Rows of the tables.
    pub max_position: usize,
    /// Half of the rotated dimensions.
    pub half: usize,
}

/// A contiguous vector.
#[derive(Clone, Copy, Debug)]
pub struct Vector {
    /// First element.
    pub data: *const u8,
    /// Element type.
    pub dtype: Dtype,
}

/// The tensors of one call, all contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// `[T, (Hq + 2 * Hkv) * D]` of `dtype`.
    pub qkv: *const u8,
    /// `[T, Hq * D]` of `dtype`.
    pub out: *mut u8,
    /// Type of `qkv` and `out`.
    pub dtype: Dtype,
    /// `[num_blocks, Hkv, block_size, D]` of `cache_dtype`.
    pub k_cache: *mut u8,
    /// The same for the values.
    pub v_cache: *mut u8,
    /// Type of both caches.
    pub cache_dtype: Dtype,
    /// Blocks in each cache.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
}

/// Writes the step's keys and values and attends; see the module documentation.
///
/// # Safety
/// The pointers of `layer` and `tensors` are valid for the shapes documented there; `qkv` is not
/// written, and `out` and the caches are not touched at all, by others during the call.
pub unsafe fn forward(
    batch: &AttentionBatch,
    layer: &Layer,
    tensors: &Tensors,
    threads: usize,
) -> Result<(), AttentionError> {
    check(batch, layer, tensors)?;
    if batch.num_tokens() == 0 {
        return Ok(());
    }
    let call = LayerCall {
        batch,
        layer,
        tensors,
        threads,
    };
    match (tensors.dtype, tensors.cache_dtype) {
        (Dtype::F32, Dtype::F32) => call.run::<f32, f32>(),
        (Dtype::F32, Dtype::Bf16) => call.run::<f32, bf16>(),
        (Dtype::Bf16, Dtype::F32) => call.run::<bf16, f32>(),
        (Dtype::Bf16, Dtype::Bf16) => call.run::<bf16, bf16>(),
        (Dtype::Bf16, Dtype::E4m3) => call.run::<bf16, E4m3>(),
        (Dtype::F16, Dtype::F16) => call.run::<f16, f16>(),
        (Dtype::F16, Dtype::E4m3) => call.run::<f16, E4m3>(),
        (dtype, cache_dtype) => {
            return Err(AttentionError::Call(format!(
                "no kernel for queries of {dtype} and caches of {cache_dtype}"
            )));
        }
    }
    Ok(())
}

fn check(batch: &AttentionBatch, layer: &Layer, tensors: &Tensors) -> Result<(), AttentionError> {
    let (heads, kv_heads, dim) = (layer.num_heads, layer.num_kv_heads, layer.head_dim);
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(AttentionError::Call(format!(
            "{heads} heads over {kv_heads} kv heads"
        )));
    }
    if dim == 0 || !dim.is_multiple_of(8) || tensors.block_size == 0 {
        let block_size = tensors.block_size;
        return Err(AttentionError::Call(format!(
            "head_dim {dim}, block_size {block_size}"
        )));
    }
    if let Some(rope) = layer.rope {
        if rope.half == 0 || 2 * rope.half > dim {
            let rotary = 2 * rope.half;
            return Err(AttentionError::Call(format!(
                "rotary_dim {rotary} of head_dim {dim}"
            )));
        }
        if batch.num_tokens() > 0 && batch.max_position() >= rope.max_position {
            return Err(AttentionError::Call(format!(
                "position {} is beyond the rotary tables of {} positions",
                batch.max_position(),
                rope.max_position
            )));
        }
    }
    batch.check_cache(tensors.num_blocks, tensors.block_size)
}

struct LayerCall<'a> {
    batch: &'a AttentionBatch,
    layer: &'a Layer,
    tensors: &'a Tensors,
    threads: usize,
}

impl LayerCall<'_> {
    fn run<E: Element, C: Element>(&self) {
        let layer = self.layer;
        let group = layer.num_heads / layer.num_kv_heads;
        let cost = total_cost(self.batch, group) * layer.num_kv_heads * layer.head_dim * 2;
        let threads = if cost < PARALLEL_MIN_COST {
            1
        } else {
            self.threads.max(1)
        };
        let call = Call::<E, C> {
            batch: self.batch,
            layer,
            group,
            q_norm: layer.q_norm.map(|weight| widen(weight, layer.head_dim)),
            k_norm: layer.k_norm.map(|weight| widen(weight, layer.head_dim)),
            qkv: self.tensors.qkv.cast(),
            out: self.tensors.out.cast(),
            k_cache: self.tensors.k_cache.cast(),
            v_cache: self.tensors.v_cache.cast(),
            block_size: self.tensors.block_size,
        };
        let tokens = self.batch.num_tokens();
        let pieces = tokens.div_ceil(TOKENS_PER_PIECE);
        // A handful of pieces is not worth a region of its own.
        let writers = if pieces < 8 { 1 } else { threads };
        parallel::for_each(writers, pieces, &|piece| {
            let begin = piece * TOKENS_PER_PIECE;
            let end = (begin + TOKENS_PER_PIECE).min(tokens);
            Scratch::with(|scratch| {
                C::dispatch(WriteTokens {
                    call: &call,
                    begin,
                    end,
                    scratch,
                });
            });
        });

        let shape = ItemShape {
            kv_heads: layer.num_kv_heads,
            group,
            threads,
        };
        self.batch.with_items(shape, |items| {
            let (counters, partials) = split_sizes(items);
            let rows = items
                .iter()
                .filter(|item| item.split.is_some())
                .map(Item::num_queries);
            let rows = rows.max().unwrap_or(0) * group;
            let stride = tile::partial_len(rows, layer.head_dim);
            let merge = Merge {
                finished: (0..counters).map(|_| AtomicUsize::new(0)).collect(),
                partials: (0..partials)
                    .map(|_| Mutex::new(vec![0.0; stride]))
                    .collect(),
            };
            parallel::for_each(threads, items.len(), &|i| {
                let (call, item, merge) = (&call, items[i], &merge);
                Scratch::with(|scratch| {
                    C::dispatch(RunItem {
                        call,
                        item,
                        merge,
                        scratch,
                    });
                });
            });
        });
    }
}

fn widen(weight: Vector, dim: usize) -> Vec<f32> {
    let mut wide = Vec::with_capacity(dim);
    // SAFETY: `forward`'s caller vouches for `dim` elements of this type.
    unsafe { weight.dtype.widen(weight.data, dim, &mut wide) };
    wide
}

/// One call with its types known. `E`: activations, `C`: caches.
pub(crate) struct Call<'a, E, C> {
    pub(crate) batch: &'a AttentionBatch,
    pub(crate) layer: &'a Layer,
    /// Query heads per kv head.
    pub(crate) group: usize,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) qkv: *const E,
    pub(crate) out: *mut E,
    pub(crate) k_cache: *mut C,
    pub(crate) v_cache: *mut C,
    pub(crate) block_size: usize,
}

// SAFETY: the pointers are those of `forward`, whose caller vouches for them for the whole call; in
// phase one each token's slot, in phase two each row of `out`, is written by one thread.
unsafe impl<E: Element, C: Element> Sync for Call<'_, E, C> {}

impl<E: Element, C: Element> Call<'_, E, C> {
    /// First element of a token's head in the fused projection, counting q, k and v heads through.
    #[inline(always)]
    pub(crate) fn head(&self, token: usize, head: usize) -> *const E {
        let layer = self.layer;
        let width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
        // SAFETY: callers pass a token of the batch and a head of the projection.
        unsafe { self.qkv.add(token * width + head * layer.head_dim) }
    }

    /// Offset in either cache of the vector that `kv_head` has at a slot.
    #[inline(always)]
    pub(crate) fn cache_offset(&self, block: usize, kv_head: usize, offset: usize) -> usize {
        let layer = self.layer;
        ((block * layer.num_kv_heads + kv_head) * self.block_size + offset) * layer.head_dim
    }

    /// What keys and values are divided by in the caches.
    #[inline(always)]
    pub(crate) fn cache_scales(&self) -> (f32, f32) {
        match C::DTYPE {
            Dtype::E4m3 => (self.layer.k_scale, self.layer.v_scale),
            Dtype::F32 | Dtype::Bf16 | Dtype::F16 => (1.0, 1.0),
        }
    }
}

/// Partial results of rows whose keys were cut.
pub(crate) struct Merge {
    /// Segments finished of each set of rows.
    pub(crate) finished: Vec<AtomicUsize>,
    /// One softmax state per segment of each set of rows.
    pub(crate) partials: Vec<Mutex<Vec<f32>>>,
}

impl Merge {
    /// Counts `segments` as finished; true for the caller that finished the last.
    pub(crate) fn finish(&self, counter: u32, segments: usize, all: u32) -> bool {
        let before = self.finished[counter as usize].fetch_add(segments, Ordering::AcqRel);
        before + segments == all as usize
    }
}

struct WriteTokens<'a, E, C> {
    call: &'a Call<'a, E, C>,
    begin: usize,
    end: usize,
    scratch: &'a mut Scratch,
}

impl<E: Element, C: Element> WithSimd for WriteTokens<'_, E, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for token in self.begin..self.end {
            write_token(simd, self.call, token, self.scratch);
        }
    }
}

struct RunItem<'a, E, C> {
    call: &'a Call<'a, E, C>,
    item: Item,
    merge: &'a Merge,
    scratch: &'a mut Scratch,
}

impl<E: Element, C: Element> WithSimd for RunItem<'_, E, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        tile::run_item(simd, self.call, self.item, self.merge, self.scratch);
    }
}

//! The CPU kernels for Python: raw addresses of torch tensors in, nothing out.
//!
//! `chairlift.attention.cpu` and `chairlift.attention.ops` are the only callers; they check types,
//! shapes and contiguity. What the kernels can check themselves (indices against capacities) they do.
//! Every call gives up the GIL while it computes.

#![allow(
    clippy::needless_pass_by_value,
    reason = "PyO3 hands arguments over by value"
)]

use std::num::NonZeroUsize;

use chairlift_kernels::attention::{self, Layer, RopeTables, Tensors, Vector};
use chairlift_kernels::batch::{self, BatchArrays};
use chairlift_kernels::element::Dtype;
use chairlift_kernels::simd::{self, Limit};
use chairlift_kernels::{ops, parallel};
use half::bf16;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Where the tokens of one step stand, checked and copied once per step.
#[pyclass(frozen, module = "chairlift._core")]
pub struct AttentionBatch(batch::AttentionBatch);

#[pymethods]
impl AttentionBatch {
    /// Takes the arrays of a step plan.
    #[new]
    fn new(
        py: Python<'_>,
        query_start_loc: PyBuffer<i32>,
        seq_lens: PyBuffer<i32>,
        positions: PyBuffer<i32>,
        slot_mapping: PyBuffer<i64>,
        block_table_offsets: PyBuffer<i32>,
        block_ids: PyBuffer<i32>,
    ) -> PyResult<Self> {
        let arrays = (
            query_start_loc.to_vec(py)?,
            seq_lens.to_vec(py)?,
            positions.to_vec(py)?,
            slot_mapping.to_vec(py)?,
            block_table_offsets.to_vec(py)?,
            block_ids.to_vec(py)?,
        );
        let arrays = BatchArrays {
            query_start_loc: &arrays.0,
            seq_lens: &arrays.1,
            positions: &arrays.2,
            slot_mapping: &arrays.3,
            block_table_offsets: &arrays.4,
            block_ids: &arrays.5,
        };
        batch::AttentionBatch::new(arrays)
            .map(Self)
            .map_err(value_error)
    }

    /// Number of query tokens in the step.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens()
    }
}

/// One attention layer: sizes, and the addresses of its tables and weights.
#[pyclass(frozen, module = "chairlift._core")]
pub struct AttentionLayer(Layer);

#[pymethods]
impl AttentionLayer {
    /// `rope` is (cos, sin, `max_position`, `rotary_dim` / 2); a norm is (address, dtype); a
    /// `window` or `soft_cap` of 0 is none; `scales` are those of keys and values in a cache of 8 bits.
    #[new]
    #[allow(clippy::too_many_arguments)] // one flat call from Python
    fn new(
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        scale: f32,
        rope: Option<(usize, usize, usize, usize)>,
        q_norm: Option<(usize, &str)>,
        k_norm: Option<(usize, &str)>,
        norm_eps: f32,
        window: usize,
        soft_cap: f32,
        scales: (f32, f32),
    ) -> PyResult<Self> {
        let vector = |norm: Option<(usize, &str)>| {
            norm.map(|(address, name)| {
                Ok::<_, PyErr>(Vector {
                    data: address as *const u8,
                    dtype: dtype(name)?,
                })
            })
            .transpose()
        };
        Ok(Self(Layer {
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            rope: rope.map(|(cos, sin, max_position, half)| RopeTables {
                cos: cos as *const f32,
                sin: sin as *const f32,
                max_position,
                half,
            }),
            q_norm: vector(q_norm)?,
            k_norm: vector(k_norm)?,
            norm_eps,
            window: NonZeroUsize::new(window),
            soft_cap: (soft_cap > 0.0).then_some(soft_cap),
            k_scale: scales.0,
            v_scale: scales.1,
        }))
    }
}

/// Runs one layer's attention; see `chairlift_kernels::attention::forward`.
///
/// `tensors` holds the addresses of qkv, out, `k_cache` and `v_cache`, `dtypes` the names of the types
/// of the first two and of the caches.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // one flat call from Python
pub fn attention_forward(
    py: Python<'_>,
    batch: &AttentionBatch,
    layer: &AttentionLayer,
    tensors: (usize, usize, usize, usize),
    dtypes: (&str, &str),
    num_blocks: usize,
    block_size: usize,
    threads: usize,
) -> PyResult<()> {
    let (batch, layer) = (&batch.0, &layer.0);
    let (activations, caches) = (dtype(dtypes.0)?, dtype(dtypes.1)?);
    py.detach(|| {
        let tensors = Tensors {
            qkv: tensors.0 as *const u8,
            out: tensors.1 as *mut u8,
            dtype: activations,
            k_cache: tensors.2 as *mut u8,
            v_cache: tensors.3 as *mut u8,
            cache_dtype: caches,
            num_blocks,
            block_size,
        };
        // SAFETY: the Python caller has checked types, shapes and contiguity, and keeps the tensors.
        unsafe { attention::forward(batch, layer, &tensors, threads) }
    })
    .map_err(value_error)
}

/// Adds the residual in place and normalises; `tensors` holds the addresses of x, residual (0 for
/// none), weight and out.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // one flat call from Python
pub fn add_rms_norm(
    py: Python<'_>,
    tensors: (usize, usize, usize, usize),
    is_bf16: bool,
    weight_is_bf16: bool,
    rows: usize,
    width: usize,
    eps: f32,
    threads: usize,
) {
    let task = NormTask {
        tensors,
        rows,
        width,
        eps,
        threads,
    };
    py.detach(|| match (is_bf16, weight_is_bf16) {
        (false, false) => task.run::<f32, f32>(),
        (false, true) => task.run::<f32, bf16>(),
        (true, false) => task.run::<bf16, f32>(),
        (true, true) => task.run::<bf16, bf16>(),
    });
}

struct NormTask {
    tensors: (usize, usize, usize, usize),
    rows: usize,
    width: usize,
    eps: f32,
    threads: usize,
}

impl NormTask {
    fn run<E: chairlift_kernels::element::Element, W: chairlift_kernels::element::Element>(&self) {
        let tensors = ops::NormTensors {
            x: self.tensors.0 as *const E,
            residual: self.tensors.1 as *mut E,
            weight: self.tensors.2 as *const W,
            out: self.tensors.3 as *mut E,
            rows: self.rows,
            width: self.width,
        };
        // SAFETY: the Python caller has checked types, shapes and contiguity, and keeps the tensors.
        unsafe { ops::add_rms_norm(tensors, self.eps, self.threads) }
    }
}

/// Gates: rows of x hold gate and up, each `width` long.
#[pyfunction]
pub fn silu_and_mul(
    py: Python<'_>,
    x: usize,
    out: usize,
    is_bf16: bool,
    rows: usize,
    width: usize,
    threads: usize,
) {
    py.detach(|| {
        // SAFETY: the Python caller has checked types, shapes and contiguity, and keeps the tensors.
        unsafe {
            if is_bf16 {
                ops::silu_and_mul(x as *const bf16, out as *mut bf16, rows, width, threads);
            } else {
                ops::silu_and_mul(x as *const f32, out as *mut f32, rows, width, threads);
            }
        }
    });
}

/// Runs the kernels' parallel regions on the OpenMP pool behind this `GOMP_parallel`; false when a
/// pool has been chosen before, or the address is 0.
#[pyfunction]
pub fn use_openmp(gomp_parallel: usize) -> bool {
    // SAFETY: `chairlift.attention.threads` passes the symbol of a library that torch keeps loaded.
    gomp_parallel != 0 && unsafe { parallel::use_openmp(gomp_parallel) }
}

/// Holds the kernels to an instruction set: "best", "avx2" or "scalar"; for tests.
#[pyfunction]
pub fn limit_instruction_set(name: &str) -> PyResult<()> {
    let limit = match name {
        "best" => Limit::None,
        "avx2" => Limit::Avx2,
        "scalar" => Limit::Scalar,
        _ => {
            return Err(PyValueError::new_err(format!(
                "unknown instruction set {name}"
            )));
        }
    };
    simd::limit_instruction_set(limit);
    Ok(())
}

/// Name of the pool in use: "openmp" or "threads".
#[pyfunction]
pub fn kernel_pool() -> &'static str {
    parallel::pool_name()
}

fn dtype(name: &str) -> PyResult<Dtype> {
    [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::E4m3]
        .into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| PyValueError::new_err(format!("unknown element type {name}")))
}

fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

//! The cost model of iterations as Python sees it: what it has learned, and a fit of a log.

use chairlift_core::predict::iteration_time::{Coefficients, CostModel, StepShape};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::{Deserialize, Serialize};

use crate::errors::setup_error;

/// The coefficients among the attributes of `chairlift.cost_model.CostCoefficients`.
#[derive(FromPyObject)]
pub struct CoefficientsView {
    t0_us: f64,
    t_seq_us: f64,
    t_weights_us: f64,
    t_tok_us: f64,
    t_ctx_us: f64,
    t_pair_us: f64,
    t_sample_us: f64,
    t_copy_us: f64,
    most_tokens: f64,
}

impl From<CoefficientsView> for Coefficients {
    fn from(view: CoefficientsView) -> Self {
        Self {
            t0_us: view.t0_us,
            t_seq_us: view.t_seq_us,
            t_weights_us: view.t_weights_us,
            t_tok_us: view.t_tok_us,
            t_ctx_us: view.t_ctx_us,
            t_pair_us: view.t_pair_us,
            t_sample_us: view.t_sample_us,
            t_copy_us: view.t_copy_us,
            most_tokens: view.most_tokens,
        }
    }
}

/// What a cost model has learned.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Learned {
    coefficients: Coefficients,
    num_observations: u64,
    mean_error: f64,
}

impl Learned {
    /// Of a model; `None` while it knows too little.
    pub fn of(model: &CostModel) -> Option<Self> {
        Some(Self {
            coefficients: model.coefficients()?,
            num_observations: model.num_observations(),
            mean_error: model.mean_error(),
        })
    }

    /// As a dictionary.
    pub fn to_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in self.coefficients.named() {
            dict.set_item(name, value)?;
        }
        dict.set_item("num_observations", self.num_observations)?;
        dict.set_item("mean_error", self.mean_error)?;
        Ok(dict)
    }
}

/// Fits a log of `I` iterations: `[I, 6]` shapes (sequences, tokens, decode context, prefill pairs,
/// samples, copies) and `[I]` microseconds. `None` if that is too little to go by.
#[pyfunction]
#[expect(
    clippy::needless_pass_by_value,
    reason = "a buffer is extracted by value"
)]
pub fn fit_cost_model(
    py: Python<'_>,
    shapes: PyBuffer<f64>,
    time_us: PyBuffer<f64>,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    let (shapes, times) = (shapes.to_vec(py)?, time_us.to_vec(py)?);
    if shapes.len() != 6 * times.len() {
        let message = format!(
            "{} numbers are no {} shapes of 6",
            shapes.len(),
            times.len()
        );
        return Err(setup_error(&message, "invalid_log"));
    }
    let mut model = CostModel::default();
    for (shape, &time_us) in shapes.chunks_exact(6).zip(&times) {
        let shape = StepShape {
            sequences: shape[0],
            tokens: shape[1],
            decode_context: shape[2],
            prefill_pairs: shape[3],
            samples: shape[4],
            copies: shape[5],
        };
        model.observe(&shape, time_us);
    }
    let learned = Learned::of(&model);
    learned.map(|learned| learned.to_dict(py)).transpose()
}

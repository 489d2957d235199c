//! The one place that turns errors of the engine into Python exceptions.
//!
//! The classes are plain Python (`chairlift.errors`), so that they document themselves and can inherit
//! from `ValueError`; they are looked up once. Each exception carries the stable `code` of the Rust
//! error it stands for. Nothing here depends on the wording of a message.

use std::sync::Arc;

use chairlift_core::error::{ConfigError, SubmitError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// Why a command of a client was not carried out.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// The request itself, or a full queue.
    Submit(SubmitError),
    /// The engine no longer runs; says why.
    Dead(Arc<str>),
}

impl Refusal {
    /// Whether trying again later can help.
    pub fn is_full_queue(&self) -> bool {
        matches!(self, Self::Submit(SubmitError::QueueFull { .. }))
    }
}

impl From<SubmitError> for Refusal {
    fn from(error: SubmitError) -> Self {
        Self::Submit(error)
    }
}

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Submit(error) => {
                let class = match error {
                    SubmitError::PromptTooLong { .. } => "ContextLengthError",
                    SubmitError::QueueFull { .. } => "QueueFullError",
                    _ => "InvalidRequestError",
                };
                raise(class, &error.to_string(), error.code())
            }
            Refusal::Dead(reason) => raise("EngineDeadError", &reason, "engine_dead"),
        }
    }
}

/// A setting is invalid.
pub fn config_error(error: &ConfigError) -> PyErr {
    raise("ConfigError", &error.to_string(), error.code())
}

/// The token table or another part of the set-up is invalid.
pub fn setup_error(message: &str, code: &str) -> PyErr {
    raise("ConfigError", message, code)
}

/// A request is malformed before the core sees it.
pub fn invalid_request(message: &str, code: &str) -> PyErr {
    raise("InvalidRequestError", message, code)
}

/// Builds `chairlift.errors.<class>(message, code=code)`.
fn raise(class: &str, message: &str, code: &str) -> PyErr {
    Python::attach(|py| build(py, class, message, code).unwrap_or_else(|error| error))
}

fn build(py: Python<'_>, class: &str, message: &str, code: &str) -> PyResult<PyErr> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let errors = ERRORS.get_or_try_init(py, || py.import("chairlift.errors").map(Bound::unbind))?;
    let class = errors.bind(py).getattr(class)?;
    let class = class.cast::<PyType>().map_err(PyErr::from)?;
    let keywords = PyDict::new(py);
    keywords.set_item("code", code)?;
    Ok(PyErr::from_value(class.call((message,), Some(&keywords))?))
}

/// A call that the caller's own code must not make.
pub fn misuse(message: &'static str) -> PyErr {
    PyRuntimeError::new_err(message)
}

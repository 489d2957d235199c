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
    /// The request itself, or what the gate promised to others.
    Submit(SubmitError),
    /// The settings.
    Config(ConfigError),
    /// The engine no longer runs; says why.
    Dead(Arc<str>),
}

impl Refusal {
    /// Whether there is no place in the queue now, for nobody or for the likes of this request.
    pub fn is_full_queue(&self) -> bool {
        match self {
            Self::Submit(error) => python_class(error) == QUEUE_FULL,
            _ => false,
        }
    }
}

impl From<SubmitError> for Refusal {
    fn from(error: SubmitError) -> Self {
        Self::Submit(error)
    }
}

impl From<ConfigError> for Refusal {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Submit(error) => raise(
                python_class(&error),
                &error.to_string(),
                error.code(),
                error.retry_after_us(),
            ),
            Refusal::Config(error) => config_error(&error),
            Refusal::Dead(reason) => raise("EngineDeadError", &reason, "engine_dead", None),
        }
    }
}

const QUEUE_FULL: &str = "QueueFullError";

/// The class of `chairlift.errors` for a kind of refusal: one for each way of treating it.
fn python_class(error: &SubmitError) -> &'static str {
    match error {
        SubmitError::QueueFull { .. }
        | SubmitError::TokensFull { .. }
        | SubmitError::ClassFull { .. }
        | SubmitError::TenantFull { .. } => QUEUE_FULL,
        SubmitError::RateExceeded { .. }
        | SubmitError::TtftUnreachable { .. }
        | SubmitError::PromiseUnkeepable { .. } => "RateLimitError",
        SubmitError::Shedding { .. } => "OverloadedError",
        SubmitError::PromptTooLong { .. } => "ContextLengthError",
        SubmitError::EmptyPrompt
        | SubmitError::TokenOutOfRange { .. }
        | SubmitError::InvalidParameter { .. }
        | SubmitError::TooManyAnswers { .. }
        | SubmitError::UnknownClass { .. }
        | SubmitError::DuplicateRequest { .. }
        | SubmitError::NoReservation { .. } => "InvalidRequestError",
    }
}

/// A setting is invalid.
pub fn config_error(error: &ConfigError) -> PyErr {
    raise("ConfigError", &error.to_string(), error.code(), None)
}

/// The token table or another part of the set-up is invalid.
pub fn setup_error(message: &str, code: &str) -> PyErr {
    raise("ConfigError", message, code, None)
}

/// A request is malformed before the core sees it.
pub fn invalid_request(message: &str, code: &str) -> PyErr {
    raise("InvalidRequestError", message, code, None)
}

/// Builds `chairlift.errors.<class>(message, code=code)`, with `retry_after` in seconds if there is one.
fn raise(class: &str, message: &str, code: &str, retry_after_us: Option<u64>) -> PyErr {
    Python::attach(|py| {
        build(py, class, message, code, retry_after_us).unwrap_or_else(|error| error)
    })
}

fn build(
    py: Python<'_>,
    class: &str,
    message: &str,
    code: &str,
    retry_after_us: Option<u64>,
) -> PyResult<PyErr> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let errors = ERRORS.get_or_try_init(py, || py.import("chairlift.errors").map(Bound::unbind))?;
    let class = errors.bind(py).getattr(class)?;
    let class = class.cast::<PyType>().map_err(PyErr::from)?;
    let keywords = PyDict::new(py);
    keywords.set_item("code", code)?;
    if let Some(microseconds) = retry_after_us {
        keywords.set_item("retry_after", microseconds as f64 / 1e6)?;
    }
    Ok(PyErr::from_value(class.call((message,), Some(&keywords))?))
}

/// A call that the caller's own code must not make.
pub fn misuse(message: &'static str) -> PyErr {
    PyRuntimeError::new_err(message)
}

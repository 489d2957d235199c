//! The one place that turns errors of the engine into Python exceptions.
//!
//! The classes are plain Python (`chairlift.errors`), so that they document themselves and can inherit
//! from `ValueError`; they are looked up once. Each exception carries the stable `code` of the Rust
//! error it stands for. Nothing here depends on the wording of a message.

use chairlift_core::error::{ConfigError, SubmitError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use serde::{Deserialize, Serialize};

/// Why something that a client asked for was not done: an exception of Python, as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refusal {
    class: ErrorClass,
    message: String,
    code: String,
    retry_after_us: Option<u64>,
}

impl Refusal {
    /// The engine no longer runs; says why.
    pub fn dead(reason: &str) -> Self {
        Self {
            class: ErrorClass::EngineDead,
            message: reason.to_owned(),
            code: "engine_dead".to_owned(),
            retry_after_us: None,
        }
    }

    /// Whether there is no place in the queue now, for nobody or for the likes of this request.
    pub fn is_full_queue(&self) -> bool {
        self.class == ErrorClass::QueueFull
    }
}

impl From<SubmitError> for Refusal {
    fn from(error: SubmitError) -> Self {
        Self {
            class: ErrorClass::of(&error),
            message: error.to_string(),
            code: error.code().to_owned(),
            retry_after_us: error.retry_after_us(),
        }
    }
}

impl From<ConfigError> for Refusal {
    fn from(error: ConfigError) -> Self {
        Self {
            class: ErrorClass::Config,
            message: error.to_string(),
            code: error.code().to_owned(),
            retry_after_us: None,
        }
    }
}

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> Self {
        raise(
            refusal.class.name(),
            &refusal.message,
            &refusal.code,
            refusal.retry_after_us,
        )
    }
}

/// The classes of `chairlift.errors` that an engine's answers are raised as: one for each way of
/// treating them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum ErrorClass {
    InvalidRequest,
    ContextLength,
    QueueFull,
    RateLimit,
    Overloaded,
    Config,
    EngineDead,
}

impl ErrorClass {
    fn of(error: &SubmitError) -> Self {
        match error {
            SubmitError::QueueFull { .. }
            | SubmitError::TokensFull { .. }
            | SubmitError::ClassFull { .. }
            | SubmitError::TenantFull { .. } => Self::QueueFull,
            SubmitError::RateExceeded { .. }
            | SubmitError::TtftUnreachable { .. }
            | SubmitError::PromiseUnkeepable { .. } => Self::RateLimit,
            SubmitError::Shedding { .. } => Self::Overloaded,
            SubmitError::PromptTooLong { .. } => Self::ContextLength,
            SubmitError::EmptyPrompt
            | SubmitError::TokenOutOfRange { .. }
            | SubmitError::InvalidParameter { .. }
            | SubmitError::TooManyAnswers { .. }
            | SubmitError::UnknownClass { .. }
            | SubmitError::DuplicateRequest { .. }
            | SubmitError::NoReservation { .. } => Self::InvalidRequest,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "InvalidRequestError",
            Self::ContextLength => "ContextLengthError",
            Self::QueueFull => "QueueFullError",
            Self::RateLimit => "RateLimitError",
            Self::Overloaded => "OverloadedError",
            Self::Config => "ConfigError",
            Self::EngineDead => "EngineDeadError",
        }
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

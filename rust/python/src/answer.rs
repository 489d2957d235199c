//! Answers as Python sees them.

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::command::Answer;
use crate::groups::wait_times;

impl Answer {
    /// The answer's value: a dictionary, text, or `None`. A refusal is the exception it stands for.
    pub fn to_python(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Refused(refusal) => Ok(PyErr::from(refusal.clone()).into_value(py).into_any()),
            Self::Reserved(class) => class.into_py_any(py),
            Self::Done | Self::Wait(None) | Self::CostModel(None) => Ok(py.None()),
            Self::CostModel(Some(learned)) => learned.to_dict(py)?.into_py_any(py),
            Self::Taken(count, _) => count.into_py_any(py),
            Self::Metrics(metrics) => metrics.to_dict(py)?.into_py_any(py),
            Self::Iterations(recent) => recent.to_dict(py)?.into_py_any(py),
            Self::Groups(groups) => groups.to_dict(py)?.into_py_any(py),
            Self::Wait(Some(wait)) => {
                (wait.reason.name(), wait_times(py, wait.times)?).into_py_any(py)
            }
        }
    }

    /// The answer's value, or the exception raised.
    pub fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Refused(refusal) => Err(refusal.into()),
            answer => answer.to_python(py),
        }
    }
}

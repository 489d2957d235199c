//! Makes instances of a frozen, slotted dataclass without running its `__init__`.
//!
//! The generated `__init__` of a frozen dataclass calls `object.__setattr__` by name for every field,
//! which costs `StepPlan`, with its two dozen fields, microseconds of every iteration. The same calls
//! from here cost a quarter.
//! A class that does anything else on its way (`__post_init__`) is refused.

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

/// A dataclass, looked up once.
pub struct Record<'py> {
    class: Bound<'py, PyAny>,
    new: Bound<'py, PyAny>,
    fields: Vec<Bound<'py, PyString>>,
}

impl<'py> Record<'py> {
    /// Looks at a dataclass whose fields are its slots.
    pub fn new(class: Bound<'py, PyAny>) -> PyResult<Self> {
        if class.hasattr("__post_init__")? {
            return Err(PyTypeError::new_err("a record has no __post_init__"));
        }
        let slots = class
            .getattr("__slots__")?
            .cast_into::<PyTuple>()
            .map_err(PyErr::from)?;
        let fields = slots
            .iter()
            .map(|slot| Ok(PyString::intern(class.py(), slot.extract()?)))
            .collect::<PyResult<_>>()?;
        Ok(Self {
            new: class.getattr("__new__")?,
            class,
            fields,
        })
    }

    /// An instance with `values` in the order of the fields.
    pub fn make<const N: usize>(
        &self,
        values: &[Bound<'py, PyAny>; N],
    ) -> PyResult<Bound<'py, PyAny>> {
        if N != self.fields.len() {
            let fields = self.fields.len();
            let message = format!("{N} values for a record of {fields} fields");
            return Err(PyTypeError::new_err(message));
        }
        let record = self.new.call1((&self.class,))?;
        for (field, value) in self.fields.iter().zip(values) {
            // SAFETY: three live objects, and the interpreter is attached. This is
            // `object.__setattr__(record, field, value)`.
            let status = unsafe {
                ffi::PyObject_GenericSetAttr(record.as_ptr(), field.as_ptr(), value.as_ptr())
            };
            if status == -1 {
                return Err(PyErr::fetch(record.py()));
            }
        }
        Ok(record)
    }
}

//! Numpy arrays from Rust values: a copy, and a dtype by name.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyByteArray;

/// Elements that are valid whatever their bytes are, and have no padding.
pub trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl<T: Plain, const N: usize> Plain for [T; N] {}

/// A dtype, and the columns of a row (1: a flat array).
pub type Kind = (&'static str, usize);

/// `numpy.frombuffer`, shaped.
pub fn wrapped<'py>(
    buffer: &Bound<'py, PyAny>,
    (dtype, columns): Kind,
) -> PyResult<Bound<'py, PyAny>> {
    static FROMBUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = buffer.py();
    let frombuffer = FROMBUFFER.import(py, "numpy", "frombuffer")?;
    let flat = frombuffer.call1((buffer, dtype))?;
    if columns == 1 {
        return Ok(flat);
    }
    flat.call_method1("reshape", (-1, columns))
}

/// A fresh, writable array with a copy of `values`.
pub fn copied<'py, T: Plain>(
    py: Python<'py>,
    values: &[T],
    kind: Kind,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: `Plain` values have no padding, so all their bytes are initialised.
    let bytes =
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    wrapped(PyByteArray::new(py, bytes).as_any(), kind)
}

//! Python bindings of Chairlift: the private module `chairlift._core`.

/// The extension module.
#[pyo3::pymodule]
mod _core {}

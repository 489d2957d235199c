//! Python bindings of Chairlift: the private module `chairlift._core`.

mod kernels;
mod sampler;

/// The extension module.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use super::kernels::AttentionBatch;
    #[pymodule_export]
    use super::kernels::AttentionLayer;
    #[pymodule_export]
    use super::kernels::add_rms_norm;
    #[pymodule_export]
    use super::kernels::attention_forward;
    #[pymodule_export]
    use super::kernels::kernel_pool;
    #[pymodule_export]
    use super::kernels::limit_instruction_set;
    #[pymodule_export]
    use super::kernels::silu_and_mul;
    #[pymodule_export]
    use super::kernels::use_openmp;
    #[pymodule_export]
    use super::sampler::Sampler;
}

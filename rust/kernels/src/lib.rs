//! CPU kernels: paged attention, sampling, norms.

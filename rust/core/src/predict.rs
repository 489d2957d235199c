//! What is not known yet: how long answers will be, and how much memory they will need.

pub mod memory_peak;
pub mod output_length;
pub mod overflow;

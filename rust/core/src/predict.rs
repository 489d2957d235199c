//! What is not known yet: how long answers will be.

pub mod output_length;

//! What is not known yet: how long answers will be, and how long an iteration will take.

pub mod iteration_time;
pub mod output_length;

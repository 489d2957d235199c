//! What is not known yet: how long answers will be, how much memory they will need and when it comes
//! free, and how long an iteration will take.

pub mod iteration_time;
pub mod memory_peak;
pub mod output_length;
pub mod overflow;
pub mod reservation;

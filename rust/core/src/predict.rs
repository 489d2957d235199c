//! What is not known yet: how long answers will be, and when memory comes free.

pub mod output_length;
pub mod reservation;

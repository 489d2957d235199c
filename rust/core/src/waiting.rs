//! Waiting: the door and the queue. Knows nothing of iterations.

pub mod gate;
pub mod queue;

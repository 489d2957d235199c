//! Waiting: the door and the queue. Knows nothing of iterations.

pub mod fairness;
pub mod forecast;
pub mod gate;
pub mod order;
pub mod queue;
pub mod reasons;
pub mod tenants;

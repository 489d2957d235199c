//! The Chairlift scheduler.

pub mod text;

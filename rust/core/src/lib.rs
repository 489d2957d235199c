//! The Chairlift scheduler.

//! The scheduler, driven through its facade by a model executor that keeps its own KV memory.

#![allow(
    clippy::duplicate_mod,
    reason = "the tests run twice: with one step in flight and with two"
)]

/// Steps in flight.
pub const STEPS_IN_FLIGHT: u32 = 1;

mod ahead;
mod backfill;
mod conserving;
mod counts;
mod fairness;
mod gate;
mod golden;
mod harness;
mod levels;
mod memory;
mod orders;
mod pace;
mod predictions;
mod preemption;
mod random;
mod recording;
mod results;
mod scenarios;
mod sharing;
mod steady;
mod timers;
mod waits;

//! The scheduler, driven through its facade by a model executor that keeps its own KV memory.

#![allow(
    clippy::duplicate_mod,
    reason = "the tests run twice: with one step in flight and with two"
)]

/// Steps in flight.
pub const STEPS_IN_FLIGHT: u32 = 1;

mod ahead;
mod backfill;
mod client;
mod conserving;
mod contents;
mod counts;
mod executor;
mod fairness;
mod gate;
mod golden;
mod harness;
mod levels;
mod memory;
mod orders;
mod pace;
mod plan_checks;
mod predictions;
mod preemption;
mod random;
mod random_inputs;
mod recording;
mod results;
mod scenarios;
mod sharing;
mod steady;
mod tier;
mod timers;
mod waits;

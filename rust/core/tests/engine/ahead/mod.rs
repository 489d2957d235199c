//! The same tests on engines with two steps in flight.
//!
//! Left out are those of modules that count in iterations or microseconds of one step after the other.

#![allow(dead_code, reason = "the harness serves the other modules, too")]

/// Steps in flight.
pub const STEPS_IN_FLIGHT: u32 = 2;

#[path = "../conserving.rs"]
mod conserving;
#[path = "../fairness.rs"]
mod fairness;
#[path = "../gate.rs"]
mod gate;
#[path = "../harness.rs"]
mod harness;
#[path = "../levels.rs"]
mod levels;
#[path = "../memory.rs"]
mod memory;
#[path = "../orders.rs"]
mod orders;
#[path = "../preemption.rs"]
mod preemption;
#[path = "../random.rs"]
mod random;
#[path = "../recording.rs"]
mod recording;
#[path = "../results.rs"]
mod results;
mod rules;
#[path = "../scenarios.rs"]
mod scenarios;
#[path = "../sharing.rs"]
mod sharing;
#[path = "../steady.rs"]
mod steady;
#[path = "../timers.rs"]
mod timers;

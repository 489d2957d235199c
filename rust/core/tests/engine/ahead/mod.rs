//! The same tests on engines with two steps in flight.
//!
//! `golden` is left out, and tests that count the iterations or microseconds of one step after the other
//! return at once: with run-ahead what comes free is used a step later, and a head whose guests must go
//! first waits until they have landed.

#![allow(dead_code, reason = "the harness serves the other modules, too")]

/// Steps in flight.
pub const STEPS_IN_FLIGHT: u32 = 2;

#[path = "../backfill.rs"]
mod backfill;
#[path = "../client.rs"]
mod client;
#[path = "../conserving.rs"]
mod conserving;
#[path = "../contents.rs"]
mod contents;
#[path = "../counts.rs"]
mod counts;
#[path = "../executor.rs"]
mod executor;
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
#[path = "../pace.rs"]
mod pace;
#[path = "../plan_checks.rs"]
mod plan_checks;
#[path = "../predictions.rs"]
mod predictions;
#[path = "../preemption.rs"]
mod preemption;
#[path = "../random.rs"]
mod random;
#[path = "../random_inputs.rs"]
mod random_inputs;
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
#[path = "../tier.rs"]
mod tier;
#[path = "../timers.rs"]
mod timers;
#[path = "../waits.rs"]
mod waits;

//! The scheduler, driven through its facade by a model executor that keeps its own KV memory.

mod backfill;
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

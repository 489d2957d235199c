//! The Chairlift scheduler: one small state machine that owns the queue, the KV memory and the
//! iterations together.
//!
//! It is pure: it knows no Python, clock, random source, thread or I/O. Time and sampled tokens are
//! arguments, so the very same code runs in production, in tests and in benches.
//!
//! The way of a request:
//! 1. [`Engine::reserve`] takes a place at the door ([`waiting::gate`]) before anything costly is done.
//! 2. [`Engine::submit`] checks the request ([`request`]) and rejects it if its class's promise cannot be
//!    kept ([`waiting::forecast`]); it waits in [`waiting::queue`], where levels, shares
//!    ([`waiting::fairness`]) and order ([`waiting::order`]) say who is next. [`Engine::on_time`] expires
//!    or promotes who has waited too long.
//! 3. [`Engine::schedule`] decides one iteration: running decodes, then prefill chunks and newcomers,
//!    the highest level first, within the token budget and the memory. While the next in the queue does
//!    not fit, others go ahead that will be out of its way in time. Who needs memory when there is none
//!    preempts somebody of the lowest level.
//! 4. The decision is written once as flat arrays: [`iteration::plan`].
//! 5. An executor, outside, runs the step.
//! 6. [`Engine::commit`] applies its results: counters, full blocks made findable, text and stop
//!    strings ([`text`]). Who is finished leaves at once; its memory serves the next iteration.
//! 7. [`Engine::outputs`] holds what the clients want to know, one batch an iteration ([`output`]).
//!
//! [`sim`] drives all this under a virtual clock, to see what a policy does before anybody is served by
//! it. The module `record` (feature `record`) writes down what an engine is told, so that all of it can happen again.
//!
//! Modules use only what stands below them: record, sim, engine, iteration, waiting, predict, memory,
//! and the ground floor (config, error, request, output, text, metrics).
#![forbid(unsafe_code)]

pub mod config;
pub mod engine;
pub mod error;
pub mod iteration;
pub mod memory;
pub mod metrics;
pub mod output;
pub mod predict;
#[cfg(feature = "record")]
pub mod record;
pub mod request;
pub mod sim;
pub mod text;
pub mod waiting;

pub use config::Vocabulary;
pub use engine::Engine;

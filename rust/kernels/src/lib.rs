//! CPU kernels of Chairlift: what eager `PyTorch` does badly between two matrix products.
//!
//! The way of one layer's attention call:
//!
//! 1. [`batch`] holds where the tokens of a step stand, checked once per step.
//! 2. [`attention`] checks the call against it and cuts the work into items of similar cost.
//! 3. [`prologue`] normalises, rotates and writes the new keys and values into the paged cache.
//! 4. [`tile`] runs the items: a tile of keys against rows of queries, with an online softmax.
//! 5. [`parallel`] spreads items over `PyTorch`'s own thread pool, or over ours.
//!
//! [`ops`] holds the small fused operations, [`sampling`] everything after the logits. [`simd`],
//! [`transpose`] and [`element`] are the ground they stand on: vectors of any width, chosen at run
//! time, and the element types ([`e4m3`] is one of ours).
//!
//! One invariant rules all of it: a result depends only on its own row. Tiles, threads, neighbours
//! and the boundaries of prefill chunks choose when a row is computed, never in which order its sums
//! are taken.

#![allow(
    clippy::inline_always,
    reason = "vector code must be compiled inside the function that enables the instruction set"
)]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "a tensor's address is passed as bytes beside its element type"
)]
#![allow(
    clippy::float_cmp,
    reason = "scores and parameters are compared exactly on purpose"
)]

pub mod attention;
pub mod batch;
pub mod e4m3;
pub mod element;
pub mod ops;
pub mod parallel;
pub mod prologue;
pub mod sampling;
mod scratch;
pub mod simd;
pub mod tile;
pub mod transpose;

//! Criterion benches of the Rust crates.

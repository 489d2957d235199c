//! The Chairlift scheduler.
#![forbid(unsafe_code)]
pub mod config;
pub mod error;
pub mod output;
pub mod request;

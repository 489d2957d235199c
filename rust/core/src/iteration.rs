//! Iterations: who runs in the next one, the plan of it, and what its results change.

pub(crate) mod admission;
pub(crate) mod backfill;
pub(crate) mod charge;
pub mod commit;
pub(crate) mod door;
pub(crate) mod fit;
pub(crate) mod flight;
pub(crate) mod governor;
pub mod join;
pub(crate) mod lane;
pub(crate) mod ledger;
pub(crate) mod lengths;
pub(crate) mod outlook;
pub mod plan;
pub(crate) mod preempt;
pub mod progress;
pub(crate) mod rows;
pub(crate) mod scheduler;
pub mod seats;
pub(crate) mod sequence;
pub mod shares;
pub(crate) mod submission;
pub(crate) mod tables;
pub(crate) mod tally;
pub(crate) mod timers;
pub(crate) mod write;

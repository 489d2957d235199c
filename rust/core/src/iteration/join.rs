//! When newcomers may join those that run.
//!
//! `continuous` is what Chairlift is for: at every iteration. The other two are the baselines that it
//! is compared with, as policies of the same core: a batch is formed only while nobody runs, by itself
//! (`static`) or when enough answers wait or the oldest has waited long enough (`window`, as a dynamic
//! batcher does, whose batches have a size); nobody joins it later, and nobody leaves it before all are
//! done.

use crate::config::policy::Join;
use crate::request::Time;

/// What the join mode looks at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Situation {
    /// The batch is still being formed: the token budget of the last step was too small for it.
    pub(crate) is_forming: bool,
    /// Sequences in the running set.
    pub(crate) num_running: usize,
    /// Answers that wait.
    pub(crate) num_waiting: u64,
    /// When the oldest that waits came.
    pub(crate) oldest_arrival: Option<Time>,
}

/// Sequences that are done and stay until all of their batch are: a batcher that cannot let them go
/// computes their rows all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// How many.
    pub sequences: u32,
    /// Sum of their lengths.
    pub context_tokens: u64,
}

/// Whether a batch may be formed or joined now.
pub(crate) fn may_join(join: Join, situation: Situation, now: Time) -> bool {
    match join {
        Join::Continuous => true,
        _ if situation.is_forming => true,
        Join::Static => situation.num_running == 0,
        Join::Window { size, .. } => {
            situation.num_running == 0
                && (situation.num_waiting >= u64::from(size)
                    || window_end(join, situation).is_none_or(|end| now >= end))
        }
    }
}

/// Whether a batch of `num_rows` answers takes `more`: a window's is full at its size. A request of more
/// answers than that is a batch by itself.
pub(crate) fn takes(join: Join, num_rows: u32, more: u32) -> bool {
    match join {
        Join::Window { size, .. } => num_rows == 0 || num_rows + more <= size,
        Join::Continuous | Join::Static => true,
    }
}

/// When a batch is formed though nobody else comes.
pub(crate) fn window_end(join: Join, situation: Situation) -> Option<Time> {
    match join {
        Join::Window { delay_us, .. } if situation.num_running == 0 => {
            let oldest = situation.oldest_arrival?;
            Some(Time(oldest.0.saturating_add(delay_us)))
        }
        _ => None,
    }
}

/// Whether those that are done stay until all of their batch are.
pub(crate) fn leaves_together(join: Join) -> bool {
    !matches!(join, Join::Continuous)
}

//! Counters, gauges and histograms of the engine, O(1) each: of all, and by class and tenant.

mod histogram;
mod pace;
mod recent;

use crate::error::{REJECTION_CODES, SubmitError};
use crate::request::{EndKind, Finish, RequestStats};

pub use histogram::{Bounds, Histogram, ITERATION_BOUNDS_US, SIZE_BOUNDS, TIME_BOUNDS_US, bucket};
pub use pace::PaceMetrics;
pub(crate) use pace::{Beat, PaceBook};
pub use recent::{RecentMoments, RecentQuantiles};

/// A snapshot. Counters grow from the engine's start; gauges say what is now.
///
/// Conservation holds at every moment: `submitted` = `finished` + `failed` + `aborted` + `rejected` +
/// `expired` + `shed` + `displaced` + `live`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Metrics {
    /// Requests submitted, and those that were rejected before they could be.
    pub submitted: u64,
    /// Requests rejected at the door or at submission.
    pub rejected: u64,
    /// Requests whose last child ended by itself.
    pub finished: u64,
    /// Requests that their client gave up.
    pub aborted: u64,
    /// Requests that the executor or the engine failed.
    pub failed: u64,
    /// Requests that waited too long or missed their deadline before they were scheduled.
    pub expired: u64,
    /// Those of them that missed their deadline, or were certain to.
    pub deadline_missed: u64,
    /// Requests shed under overload before they were scheduled.
    pub shed: u64,
    /// Requests that gave their place to a more important one before they were scheduled.
    pub displaced: u64,
    /// Steps planned.
    pub iterations: u64,
    /// Microseconds that steps were in flight.
    pub device_us: u64,
    /// Tokens scheduled: prefill and decode.
    pub scheduled_tokens: u64,
    /// Output tokens committed.
    pub output_tokens: u64,
    /// Prompt tokens of requests scheduled for the first time.
    pub prompt_tokens: u64,
    /// Those of them that the prefix cache had.
    pub cached_tokens: u64,
    /// Sequences preempted.
    pub preemptions: u64,
    /// Tokens that were computed, lost in a preemption, and scheduled to be computed again.
    pub recomputed_tokens: u64,
    /// Blocks copied to the host when they were evicted.
    pub offloaded_blocks: u64,
    /// Tokens whose K and V were copied from the host instead of computed.
    pub restored_tokens: u64,
    /// Sequences admitted ahead of the first of the queue, which did not fit.
    pub backfilled: u64,
    /// Times that the promised start of the first of the queue was put off, because sequences ran longer
    /// than was predicted.
    pub forecast_slips: u64,
    /// Sum over the iterations of the sequences in them; over `iterations` it is the mean batch.
    pub scheduled_sequences: u64,
    /// Gauge: requests that have not ended.
    pub live: u64,
    /// Gauge: answers of requests at the door and in the queue that were never scheduled.
    pub queued: u64,
    /// Gauge: prompt tokens of requests in the queue that were never scheduled.
    pub queued_tokens: u64,
    /// Gauge: requests that were submitted and never scheduled.
    pub waiting: u64,
    /// Gauge: sequences in the waiting queue, preempted ones included.
    pub waiting_sequences: u64,
    /// Gauge: running sequences.
    pub running_sequences: u64,
    /// Gauge: blocks that hold nothing.
    pub free_blocks: u64,
    /// Gauge: blocks in use.
    pub used_blocks: u64,
    /// Gauge: blocks with findable content that nobody uses.
    pub cached_blocks: u64,
    /// Gauge: blocks on the host that hold nothing.
    pub host_free_blocks: u64,
    /// Gauge: blocks on the host that are being copied.
    pub host_used_blocks: u64,
    /// Gauge: blocks on the host with findable content.
    pub host_cached_blocks: u64,
    /// Rejections by reason; their sum is `rejected`.
    pub rejections: Rejections,
}

/// How often requests were rejected for what reason, in the order of [`REJECTION_CODES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Rejections([u64; REJECTION_CODES.len()]);

impl Rejections {
    /// Counts a rejection.
    pub(crate) fn count(&mut self, error: &SubmitError) {
        let code = error.code();
        let known = REJECTION_CODES.iter().position(|&known| known == code);
        debug_assert!(known.is_some(), "{code} is not among REJECTION_CODES");
        if let Some(at) = known {
            self.0[at] += 1;
        }
    }

    /// Each reason and how often it was one.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REJECTION_CODES.into_iter().zip(self.0)
    }

    /// Rejections for any reason.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    fn absorb(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own += other;
        }
    }
}

/// How well memory was foreseen. Of the admissions of sequences that have ended, or were preempted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemoryMetrics {
    /// Admissions that ended.
    pub ended: u64,
    /// Those of them during whose life somebody was preempted for memory.
    pub overflowed: u64,
    /// Gauge: the same as a share, of the last thousand or so.
    pub overflow: f64,
    /// Gauge: the share that the forecast aims at; 0 without a forecast.
    pub target: f64,
    /// Gauge: the quantile of output lengths that the forecast reckons with.
    pub quantile: f64,
}

/// What iterations were like, of those whose results came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct IterationMetrics {
    /// Decision to commit, by [`ITERATION_BOUNDS_US`].
    pub time: Histogram,
    /// Sequences in them, by [`SIZE_BOUNDS`].
    pub sequences: Histogram,
    /// Tokens scheduled, by [`SIZE_BOUNDS`].
    pub tokens: Histogram,
    /// Tokens of prefill chunks.
    pub prefill_tokens: u64,
    /// Tokens of decodes, and of chunks of one token.
    pub decode_tokens: u64,
}

impl IterationMetrics {
    /// Counts an iteration with so many sequences, of them so many with one token.
    pub(crate) fn observe(&mut self, time_us: u64, sequences: u64, decodes: u64, tokens: u64) {
        self.time.observe(&ITERATION_BOUNDS_US, time_us);
        self.sequences.observe(&SIZE_BOUNDS, sequences);
        self.tokens.observe(&SIZE_BOUNDS, tokens);
        self.prefill_tokens += tokens - decodes;
        self.decode_tokens += decodes;
    }
}

/// What steps did for the requests of a class, or of a tenant. Begins with a cache line that is nearly all of
/// what a step counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(C, align(64))]
pub struct WorkMetrics {
    /// Output tokens committed.
    pub output_tokens: u64,
    /// Nanoseconds of iterations, shared out as device time is priced.
    pub device_ns: u64,
    /// Each gap between outputs of a sequence, by [`ITERATION_BOUNDS_US`].
    pub itl: Histogram,
}

impl WorkMetrics {
    /// Adds what another counted.
    fn absorb(&mut self, other: &Self) {
        self.output_tokens += other.output_tokens;
        self.device_ns += other.device_ns;
        self.itl.absorb(&other.itl);
    }
}

/// What became of the requests of a class, or of a tenant, and how long it took.
///
/// Conservation holds at every moment: `accepted` = `finished` + `failed` + `aborted` + `expired` +
/// `shed` + `displaced` + `live`.
///
/// What each step counts is apart, so that it can be kept where little else is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupMetrics {
    /// What was done for them.
    pub work: WorkMetrics,
    /// Requests let into the waiting queue.
    pub accepted: u64,
    /// Requests rejected at the door or at submission.
    pub rejected: u64,
    /// The same by reason.
    pub rejections: Rejections,
    /// Requests whose last child ended by itself.
    pub finished: u64,
    /// Those of them whose last child ended by its length.
    pub finished_by_length: u64,
    /// Requests that their client gave up.
    pub aborted: u64,
    /// Requests that the executor or the engine failed.
    pub failed: u64,
    /// Requests that waited too long or missed their deadline before they were scheduled.
    pub expired: u64,
    /// Those of them that missed their deadline, or were certain to.
    pub deadline_missed: u64,
    /// Requests shed under overload.
    pub shed: u64,
    /// Requests that gave their place to a more important one.
    pub displaced: u64,
    /// Gauge: requests that have not ended.
    pub live: u64,
    /// Gauge: those of them that were never scheduled.
    pub waiting: u64,
    /// Prompt tokens of requests that were scheduled.
    pub prompt_tokens: u64,
    /// Those of them that the prefix cache had.
    pub cached_tokens: u64,
    /// Submission to first in a plan, by [`TIME_BOUNDS_US`].
    pub queue_time: Histogram,
    /// What the gate predicted it to be at submission, where it could, by [`TIME_BOUNDS_US`].
    pub predicted_queue_time: Histogram,
    /// By how much it was wrong, by [`TIME_BOUNDS_US`].
    pub queue_time_error: Histogram,
    /// Submission to first output token, by [`TIME_BOUNDS_US`].
    pub ttft: Histogram,
    /// Mean gap between the output tokens of a request's answers, of those with two at least, by
    /// [`TIME_BOUNDS_US`].
    pub tpot: Histogram,
    /// Submission to the end of requests that ended by themselves, by [`TIME_BOUNDS_US`].
    pub e2e: Histogram,
}

impl GroupMetrics {
    /// Counts a request that was let in.
    pub(crate) fn accepted(&mut self) {
        self.accepted += 1;
        self.live += 1;
        self.waiting += 1;
    }

    /// Counts a rejection.
    pub(crate) fn rejected(&mut self, error: &SubmitError) {
        self.rejected += 1;
        self.rejections.count(error);
    }

    /// Counts the end of a request.
    pub(crate) fn ended(&mut self, finish: Finish, stats: &RequestStats, n: u32) {
        let ended = match finish.kind() {
            EndKind::Finished => &mut self.finished,
            EndKind::Aborted => &mut self.aborted,
            EndKind::Failed => &mut self.failed,
            EndKind::Expired => &mut self.expired,
            EndKind::Shed => &mut self.shed,
            EndKind::Displaced => &mut self.displaced,
        };
        *ended += 1;
        self.live -= 1;
        self.waiting -= u64::from(stats.first_scheduled.is_none());
        self.finished_by_length += u64::from(finish == Finish::Length);
        self.deadline_missed += u64::from(finish == Finish::DeadlineMissed);
        if let Some(first) = stats.first_token {
            let gaps = u64::from(stats.num_output_tokens / n).saturating_sub(1);
            if let Some(mean_us) = stats.finished.since_us(first).checked_div(gaps) {
                self.tpot.observe(&TIME_BOUNDS_US, mean_us);
            }
        }
        if finish.kind() == EndKind::Finished {
            let time_us = stats.finished.since_us(stats.arrival);
            self.e2e.observe(&TIME_BOUNDS_US, time_us);
        }
    }

    /// Counts a request that was scheduled for the first time.
    pub(crate) fn scheduled(&mut self, queue_time_us: u64, stats: &RequestStats) {
        self.waiting -= 1;
        self.queue_time.observe(&TIME_BOUNDS_US, queue_time_us);
        if let Some(predicted_us) = stats.predicted_queue_time_us {
            self.predicted_queue_time
                .observe(&TIME_BOUNDS_US, predicted_us);
            let error_us = predicted_us.abs_diff(queue_time_us);
            self.queue_time_error.observe(&TIME_BOUNDS_US, error_us);
        }
        self.prompt_tokens += u64::from(stats.num_prompt_tokens);
        self.cached_tokens += u64::from(stats.num_cached_tokens);
    }

    /// Counts the first output of a request.
    pub(crate) fn started(&mut self, ttft_us: u64) {
        self.ttft.observe(&TIME_BOUNDS_US, ttft_us);
    }

    /// Requests that ended, however.
    pub fn ends(&self) -> u64 {
        let given_up = self.expired + self.shed + self.displaced;
        self.finished + self.aborted + self.failed + given_up
    }

    /// Adds what became of the requests of another group.
    pub(crate) fn absorb(&mut self, other: &Self) {
        self.accepted += other.accepted;
        self.rejected += other.rejected;
        self.rejections.absorb(&other.rejections);
        self.finished += other.finished;
        self.finished_by_length += other.finished_by_length;
        self.aborted += other.aborted;
        self.failed += other.failed;
        self.expired += other.expired;
        self.deadline_missed += other.deadline_missed;
        self.shed += other.shed;
        self.displaced += other.displaced;
        self.live += other.live;
        self.waiting += other.waiting;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.work.absorb(&other.work);
        self.queue_time.absorb(&other.queue_time);
        self.predicted_queue_time
            .absorb(&other.predicted_queue_time);
        self.queue_time_error.absorb(&other.queue_time_error);
        self.ttft.absorb(&other.ttft);
        self.tpot.absorb(&other.tpot);
        self.e2e.absorb(&other.e2e);
    }
}

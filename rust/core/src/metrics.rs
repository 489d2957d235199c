//! Counters, gauges and histograms of the engine, O(1) each: of all, and by class and tenant.

use crate::request::{EndKind, Finish, RequestStats};

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
    /// Tokens that were computed, lost in a preemption, and had to be computed again.
    pub recomputed_tokens: u64,
    /// Sum over the iterations of the sequences in them; over `iterations` it is the mean batch.
    pub scheduled_sequences: u64,
    /// Gauge: requests that have not ended.
    pub live: u64,
    /// Gauge: requests at the door and in the queue that were never scheduled.
    pub queued: u64,
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
}

/// Upper bounds of the buckets of a [`Histogram`], in microseconds; the last bucket has none. They are
/// those of vLLM's time to first token, which cover milliseconds to an hour.
pub const TIME_BOUNDS_US: [u64; 22] = [
    1_000,
    5_000,
    10_000,
    20_000,
    40_000,
    60_000,
    80_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    20_000_000,
    40_000_000,
    80_000_000,
    160_000_000,
    640_000_000,
    2_560_000_000,
];

/// How often something took how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Histogram {
    /// How often it was in each bucket of [`TIME_BOUNDS_US`], bounds included.
    pub counts: [u64; TIME_BOUNDS_US.len() + 1],
    /// Sum of all times, in microseconds.
    pub sum_us: u64,
}

impl Histogram {
    /// Counts a time.
    pub fn observe(&mut self, time_us: u64) {
        self.counts[TIME_BOUNDS_US.partition_point(|&bound| bound < time_us)] += 1;
        self.sum_us += time_us;
    }

    /// Times counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// What became of the requests of a class, or of a tenant, and how long it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupMetrics {
    /// Requests let into the waiting queue.
    pub accepted: u64,
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
    /// Requests shed under overload.
    pub shed: u64,
    /// Requests that gave their place to a more important one.
    pub displaced: u64,
    /// Prompt tokens of requests that were scheduled.
    pub prompt_tokens: u64,
    /// Those of them that the prefix cache had.
    pub cached_tokens: u64,
    /// Output tokens of requests that ended.
    pub output_tokens: u64,
    /// Submission to first in a plan.
    pub queue_time: Histogram,
    /// Submission to first output token.
    pub ttft: Histogram,
    /// Mean gap between the output tokens of a request's answers, of those with two at least.
    pub tpot: Histogram,
    /// Submission to the end of requests that ended by themselves.
    pub e2e: Histogram,
}

impl GroupMetrics {
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
        self.output_tokens += u64::from(stats.num_output_tokens);
        if let Some(first) = stats.first_token {
            self.ttft.observe(first.since_us(stats.arrival));
            let gaps = u64::from(stats.num_output_tokens / n).saturating_sub(1);
            if let Some(mean_us) = stats.finished.since_us(first).checked_div(gaps) {
                self.tpot.observe(mean_us);
            }
        }
        if finish.kind() == EndKind::Finished {
            self.e2e.observe(stats.finished.since_us(stats.arrival));
        }
    }

    /// Counts a request that was scheduled for the first time.
    pub(crate) fn scheduled(&mut self, queue_time_us: u64, prompt_tokens: u64, cached_tokens: u64) {
        self.queue_time.observe(queue_time_us);
        self.prompt_tokens += prompt_tokens;
        self.cached_tokens += cached_tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_that_bounds_it() {
        let mut histogram = Histogram::default();
        for time in [0, 1_000, 1_001, 3_000_000_000] {
            histogram.observe(time);
        }
        assert_eq!(histogram.counts[..2], [2, 1]);
        assert_eq!(histogram.counts.last(), Some(&1));
        assert_eq!((histogram.count(), histogram.sum_us), (4, 3_000_002_001));
    }
}

//! Counters and gauges of the engine, O(1) each.

/// A snapshot. Counters grow from the engine's start; gauges say what is now.
///
/// Conservation holds at every moment: `submitted` = `finished` + `failed` + `aborted` + `rejected` +
/// `expired` + `shed` + `displaced` + `live`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

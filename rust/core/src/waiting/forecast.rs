//! How long a request would wait: the work ahead over the measured service.
//!
//! Three things can hold the queue up, and each has its rate, measured only while it did: prefill
//! tokens computed a second while the token budget was short, rows handed to newcomers a second while
//! all were taken, blocks handed to newcomers a second while memory was short. The work ahead, in the
//! very order the queue will use, is known in the same three units; the slowest of the three decides.
//! A rate that was never measured never held anybody up, and predicts no wait.

use crate::request::Time;
use crate::waiting::queue::Work;

/// Microseconds after which a measurement counts for a third (1/e).
const MEMORY_US: f64 = 5_000_000.0;
/// Rows that are handed out until then at least: what comes slowly is measured over more time.
const MEMORY_ROWS: f64 = 64.0;

/// An amount per microsecond, as a decaying mean over the time it was measured in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    amount: f64,
    time_us: f64,
}

impl Rate {
    /// Counts `amount` in the last `time_us`.
    pub fn measure(&mut self, amount: u64, time_us: u64) {
        let time_us = time_us as f64;
        let keep = (-time_us / MEMORY_US).exp();
        self.amount = self.amount * keep + amount as f64;
        self.time_us = self.time_us * keep + time_us;
    }

    /// Counts `amount` in the last `time_us`, in which so many `rows` were handed out.
    fn measure_slowly(&mut self, amount: u64, time_us: u64, rows: u64) {
        let time_us = time_us as f64;
        let keep = (-(time_us / MEMORY_US).min(rows as f64 / MEMORY_ROWS)).exp();
        self.amount = self.amount * keep + amount as f64;
        self.time_us = self.time_us * keep + time_us;
    }

    /// Microseconds for `amount`; `None` if the rate was never measured.
    pub fn time_for(&self, amount: u64) -> Option<f64> {
        (self.amount > 0.0).then(|| amount as f64 * self.time_us / self.amount)
    }
}

/// What held the queue's first request up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// Every row was taken.
    Slots,
    /// Memory was short.
    Memory,
    /// The token budget was used up.
    Budget,
    /// The batch is formed later.
    Window,
    /// With it, the decodes would take longer than their target.
    Sla,
}

/// What is free now, and what is at work already.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// Rows that are free.
    pub rows: u64,
    /// Blocks that a newcomer may have.
    pub blocks: u64,
    /// Tokens that running sequences have still to compute before their first output.
    pub prefill_tokens: u64,
}

/// What the cost model says of a prompt that is next: see [`Forecast::predict`].
#[derive(Clone, Copy, Debug)]
pub struct Outlook {
    /// Microseconds of the iterations that compute it, with those that decode beside it.
    pub prefill_us: f64,
    /// Microseconds that the step in flight has still to go.
    pub rest_us: f64,
}

/// The measured service.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forecast {
    prefill: Rate,
    rows: Rate,
    blocks: Rate,
    iteration: Rate,
    /// Tokens per microsecond of all iterations.
    tokens: Rate,
}

impl Forecast {
    /// An iteration took `time_us` for so many tokens, of them so many prefill; `prefill_is_short` says
    /// that more prefill was there than the budget allowed.
    pub fn measure_iteration(
        &mut self,
        time_us: u64,
        tokens: u64,
        prefill_tokens: u64,
        prefill_is_short: bool,
    ) {
        self.iteration.measure(1, time_us);
        self.tokens.measure(tokens, time_us);
        if prefill_is_short {
            self.prefill.measure(prefill_tokens, time_us);
        }
    }

    /// The queue was held up by `blocked` for `time_us`, and then so many newcomers' rows and blocks
    /// were handed out.
    pub fn measure_admissions(&mut self, blocked: Blocked, time_us: u64, rows: u64, blocks: u64) {
        match blocked {
            Blocked::Slots => self.rows.measure_slowly(rows, time_us, rows),
            Blocked::Memory => self.blocks.measure_slowly(blocks, time_us, rows),
            Blocked::Budget | Blocked::Window | Blocked::Sla => {}
        }
    }

    /// Nanoseconds of device time a token takes, at least 1.
    pub fn token_ns(&self) -> u64 {
        let ns = self.tokens.time_for(1_000).unwrap_or(1.0);
        (ns as u64).max(1)
    }

    /// Predicted (queue time, time to first token) in microseconds of a request of `own` work behind
    /// `ahead`; `None` while no iteration was measured.
    ///
    /// Behind other prefill its iterations are as full as theirs, so its own prefill goes at the measured
    /// rate; with none ahead, it costs what `outlook` says, if that is known.
    pub fn predict(
        &self,
        ahead: Work,
        own: Work,
        room: Room,
        outlook: Option<Outlook>,
    ) -> Option<(u64, u64)> {
        let iteration = self.iteration.time_for(1)?;
        let prefill = self.prefill.time_for(1).or(self.tokens.time_for(1))?;
        let queued_tokens = ahead.prefill_tokens + room.prefill_tokens;
        let queued = queued_tokens as f64 * prefill;
        let short =
            |ahead: u64, own: u64, room: u64, rate: &Rate| match (ahead + own).checked_sub(room) {
                None | Some(0) => 0.0,
                Some(lack) => rate.time_for(lack).unwrap_or(0.0),
            };
        let rows = short(ahead.rows, own.rows, room.rows, &self.rows);
        let blocks = short(ahead.blocks, own.blocks, room.blocks, &self.blocks);
        let wait = queued.max(rows).max(blocks);
        let first_token = match outlook.filter(|_| queued_tokens == 0) {
            Some(outlook) => wait.max(outlook.rest_us) + outlook.prefill_us,
            None => wait + own.prefill_tokens as f64 * prefill + iteration,
        };
        Some((wait as u64, first_token as u64))
    }

    /// Predicted time to serve all of `work`, in microseconds.
    pub fn drain_us(&self, work: Work, room: Room) -> u64 {
        self.predict(work, Work::default(), room, None)
            .map_or(0, |(wait, _)| wait)
    }

    /// Mean time of an iteration, in microseconds; 0 while none was measured.
    pub fn iteration_us(&self) -> u64 {
        self.iteration.time_for(1).unwrap_or(0.0) as u64
    }

    /// Microseconds that a prompt's prefill takes at least.
    pub fn prefill_us(&self, tokens: u64) -> u64 {
        let prefill = self
            .prefill
            .time_for(tokens)
            .or(self.tokens.time_for(tokens));
        prefill.unwrap_or(0.0) as u64
    }
}

/// Measures intervals: microseconds since it was last asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stopwatch(Option<Time>);

impl Stopwatch {
    /// Microseconds since the last lap; `None` if it was not running.
    pub fn lap(&mut self, now: Time) -> Option<u64> {
        self.0.replace(now).map(|last| now.since_us(last))
    }

    /// Stops it.
    pub fn stop(&mut self) {
        self.0 = None;
    }
}

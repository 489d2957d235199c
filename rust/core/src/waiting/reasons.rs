//! Why a request waits, and for how long it waited for what.
//!
//! Nothing is written to a waiting request while it waits. The engine keeps one clock per thing that
//! can hold the first of the queue up; a request remembers what they showed when it came, and the
//! difference when it leaves is its share of each. That is the time for which it would have waited
//! first come, first served, too. From the moment on at which somebody who came later went ahead of it,
//! its wait is put down to fairness: to the order among flows. Who is let ahead by backfill is not told
//! here: the first of the queue waits for memory (or rows) all the same. The time for which its tenant was held is
//! put down to the rate.
//!
//! When somebody went ahead is found in a short history of the newest request admitted so far; beyond
//! [`MAX_HISTORY`] steps it is thinned, and `fairness` begins a little late.

use std::collections::VecDeque;

use crate::request::{Time, WaitReason, WaitTimes};
use crate::waiting::forecast::Blocked;

/// What the clocks showed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    at: Time,
    slots_us: u64,
    memory_us: u64,
    window_us: u64,
    sla_us: u64,
}

/// Steps of the history that are remembered.
const MAX_HISTORY: usize = 1_024;

/// The clocks, and who went ahead when.
#[derive(Debug, Default)]
pub struct WaitClocks {
    reading: Reading,
    blocked: Option<Blocked>,
    /// The newest request admitted, whenever it was a newer one, and the clocks then.
    history: VecDeque<(u64, Reading)>,
}

impl WaitClocks {
    /// What the clocks show now.
    pub fn read(&self, now: Time) -> Reading {
        let passed = now.since_us(self.reading.at);
        let mut reading = self.reading;
        match self.blocked {
            Some(Blocked::Slots) => reading.slots_us += passed,
            Some(Blocked::Memory) => reading.memory_us += passed,
            Some(Blocked::Window) => reading.window_us += passed,
            Some(Blocked::Sla) => reading.sla_us += passed,
            Some(Blocked::Budget) | None => {}
        }
        reading.at = now;
        reading
    }

    /// From `now` on the first of the queue is held up by `blocked`.
    pub fn set(&mut self, now: Time, blocked: Option<Blocked>) {
        self.reading = self.read(now);
        self.blocked = blocked;
    }

    /// What holds the first of the queue up.
    pub fn blocked(&self) -> Option<Blocked> {
        self.blocked
    }

    /// Request `number` was admitted; `oldest` is the oldest that waits.
    pub fn admitted(&mut self, now: Time, number: u64, oldest: Option<u64>) {
        while let Some(&(newest, _)) = self.history.front()
            && oldest.is_none_or(|oldest| newest < oldest)
        {
            self.history.pop_front();
        }
        if self
            .history
            .back()
            .is_some_and(|&(newest, _)| newest >= number)
        {
            return;
        }
        let reading = self.read(now);
        match self.history.back_mut() {
            Some((newest, when)) if when.at == now => *newest = number,
            _ => self.history.push_back((number, reading)),
        }
        if self.history.len() > MAX_HISTORY {
            let mut keep = false;
            self.history.retain(|_| {
                keep = !keep;
                keep
            });
        }
    }

    fn overtaken(&self, number: u64) -> Option<Reading> {
        let at = self
            .history
            .partition_point(|&(newest, _)| newest <= number);
        self.history.get(at).map(|&(_, reading)| reading)
    }

    /// Why request `number` waits now.
    pub fn reason(&self, number: u64, is_held: bool) -> WaitReason {
        if is_held {
            return WaitReason::Rate;
        }
        match self.blocked {
            Some(Blocked::Window) => WaitReason::Window,
            _ if self.overtaken(number).is_some() => WaitReason::Fairness,
            Some(Blocked::Slots) => WaitReason::Slots,
            Some(Blocked::Memory) => WaitReason::Memory,
            Some(Blocked::Sla) => WaitReason::Sla,
            Some(Blocked::Budget) | None => WaitReason::Budget,
        }
    }

    /// For how long request `number` waited for what; it came at `since` and its tenant was held for
    /// `held_us` of the time.
    pub fn times(&self, now: Time, number: u64, since: Reading, held_us: u64) -> WaitTimes {
        let mut end = self.read(now);
        let mut fairness_us = 0;
        if let Some(overtaken) = self.overtaken(number).filter(|then| then.at >= since.at) {
            fairness_us = now.since_us(overtaken.at);
            end = overtaken;
        }
        let total_us = now.since_us(since.at);
        // Where a tenant was held, that is why, whoever went ahead meanwhile.
        let rate_us = held_us.min(total_us);
        let mut left = total_us - rate_us;
        let mut take = |wanted: u64| {
            let taken = wanted.min(left);
            left -= taken;
            taken
        };
        let fairness_us = take(fairness_us.saturating_sub(rate_us));
        let slots_us = take(end.slots_us - since.slots_us);
        let memory_us = take(end.memory_us - since.memory_us);
        let window_us = take(end.window_us - since.window_us);
        let sla_us = take(end.sla_us - since.sla_us);
        WaitTimes {
            slots_us,
            memory_us,
            budget_us: left,
            fairness_us,
            rate_us,
            window_us,
            sla_us,
        }
    }
}

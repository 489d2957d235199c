//! Counting by class and tenant what a step's sequences did, while its results are applied.
//!
//! Neighbours in a step mostly are of one tenant and decode with the same gap, so what they have in
//! common is looked up once for a whole run of them.

use crate::config::policy::ClassId;
use crate::iteration::ledger::Ledger;
use crate::metrics::{ITERATION_BOUNDS_US, bucket};
use crate::request::Time;
use crate::waiting::tenants::TenantKey;

/// Whose a sequence is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Payer {
    pub(crate) class: ClassId,
    pub(crate) tenant: TenantKey,
}

/// A run of sequences that have payer and gap in common, not yet counted.
pub(crate) struct Tally {
    now: Time,
    payer: Payer,
    /// When their output before this one came, if they had any.
    since: Option<Time>,
    gaps: u64,
    /// The gap that was counted last, and the bucket that it is in.
    gap_us: u64,
    bucket: usize,
    device_ns: u64,
    outputs: u64,
}

impl Tally {
    /// Of a step that landed at `now`, whose first sequence is of `payer`.
    pub(crate) fn new(now: Time, payer: Payer) -> Self {
        Self {
            now,
            payer,
            since: None,
            gaps: 0,
            gap_us: 0,
            bucket: bucket(&ITERATION_BOUNDS_US, 0),
            device_ns: 0,
            outputs: 0,
        }
    }

    /// Counts a sequence with such a share of the step's time and so many outputs of it, the last of which
    /// before came at `since`.
    #[inline]
    pub(crate) fn add(
        &mut self,
        ledger: &mut Ledger,
        payer: Payer,
        device_ns: u64,
        outputs: u64,
        since: Option<Time>,
    ) {
        let since = since.filter(|_| outputs > 0);
        let has_other_gap = since.is_some() && since != self.since && self.gaps > 0;
        if payer != self.payer || has_other_gap {
            self.flush(ledger);
            self.payer = payer;
        }
        self.device_ns += device_ns;
        self.outputs += outputs;
        if since.is_some() {
            self.since = since;
            self.gaps += 1;
        }
    }

    /// Counts what was not yet counted.
    #[cold]
    pub(crate) fn flush(&mut self, ledger: &mut Ledger) {
        let Payer { class, tenant } = self.payer;
        ledger.counters.output_tokens += self.outputs;
        let of_class = &mut ledger.classes[class.0 as usize].metrics;
        let of_tenant = &mut ledger.tenants.get_mut(tenant).metrics;
        let gap_us = self.since.map_or(0, |since| self.now.since_us(since));
        if gap_us != self.gap_us {
            self.gap_us = gap_us;
            self.bucket = bucket(&ITERATION_BOUNDS_US, gap_us);
        }
        for metrics in [of_class, of_tenant] {
            metrics.device_ns += self.device_ns;
            metrics.output_tokens += self.outputs;
            metrics.itl.add(self.bucket, gap_us, self.gaps);
        }
        (self.gaps, self.device_ns, self.outputs) = (0, 0, 0);
    }
}

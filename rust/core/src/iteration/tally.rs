//! Counting by class and tenant what a step's sequences did, while its results are applied.
//!
//! Neighbours in a step mostly are of one tenant and decode with the same gap, so what they have in
//! common is looked up once for a whole run of them.

use crate::config::policy::ClassId;
use crate::iteration::ledger::Ledger;
use crate::metrics::{ITERATION_BOUNDS_US, bucket};
use crate::waiting::tenants::TenantKey;

/// Whose a sequence is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Payer {
    pub(crate) class: ClassId,
    pub(crate) tenant: TenantKey,
}

/// A run of sequences that have payer and gap in common, not yet counted.
pub(crate) struct Tally {
    payer: Payer,
    /// Between their last output and this one, and the bucket that it is in.
    gap_us: u64,
    bucket: usize,
    gaps: u64,
    device_ns: u64,
    outputs: u64,
}

impl Tally {
    /// Of a step whose first sequence is of `payer`.
    pub(crate) fn new(payer: Payer) -> Self {
        Self {
            payer,
            gap_us: 0,
            bucket: bucket(&ITERATION_BOUNDS_US, 0),
            gaps: 0,
            device_ns: 0,
            outputs: 0,
        }
    }

    /// Counts a sequence with such a share of the step's time and so many outputs of it.
    #[inline]
    pub(crate) fn add(
        &mut self,
        ledger: &mut Ledger,
        payer: Payer,
        device_ns: u64,
        outputs: u64,
        gap_us: Option<u64>,
    ) {
        let has_other_gap = gap_us.is_some_and(|gap_us| gap_us != self.gap_us && self.gaps > 0);
        if payer != self.payer || has_other_gap {
            self.flush(ledger);
            self.payer = payer;
        }
        self.device_ns += device_ns;
        self.outputs += outputs;
        if let Some(gap_us) = gap_us {
            if gap_us != self.gap_us {
                self.gap_us = gap_us;
                self.bucket = bucket(&ITERATION_BOUNDS_US, gap_us);
            }
            self.gaps += 1;
        }
    }

    /// Counts what was not yet counted.
    #[cold]
    pub(crate) fn flush(&mut self, ledger: &mut Ledger) {
        let Payer { class, tenant } = self.payer;
        let of_class = &mut ledger.classes[class.0 as usize].metrics;
        let of_tenant = &mut ledger.tenants.get_mut(tenant).metrics;
        for metrics in [of_class, of_tenant] {
            metrics.device_ns += self.device_ns;
            metrics.output_tokens += self.outputs;
            metrics.itl.add(self.bucket, self.gap_us, self.gaps);
        }
        (self.gaps, self.device_ns, self.outputs) = (0, 0, 0);
    }
}

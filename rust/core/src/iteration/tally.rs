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

/// A run of sequences that have payer and gap in common.
struct Run {
    payer: Payer,
    /// Between their last output and this one.
    gap_us: u64,
    gaps: u64,
    tokens: u64,
    outputs: u64,
}

/// What was not yet counted.
pub(crate) struct Tally {
    token_ns: u64,
    run: Option<Run>,
}

impl Tally {
    /// Of a step whose tokens took `token_ns` each.
    pub(crate) fn new(token_ns: u64) -> Self {
        Self {
            token_ns,
            run: None,
        }
    }

    /// Counts a sequence with so many tokens in the step and so many outputs of it.
    pub(crate) fn add(
        &mut self,
        ledger: &mut Ledger,
        payer: Payer,
        tokens: u32,
        outputs: u64,
        gap_us: Option<u64>,
    ) {
        let fits = self.run.as_ref().is_some_and(|run| {
            let same_gap = gap_us.is_none_or(|gap_us| run.gaps == 0 || run.gap_us == gap_us);
            run.payer == payer && same_gap
        });
        if !fits {
            self.flush(ledger);
        }
        let run = self.run.get_or_insert(Run {
            payer,
            gap_us: 0,
            gaps: 0,
            tokens: 0,
            outputs: 0,
        });
        run.tokens += u64::from(tokens);
        run.outputs += outputs;
        if let Some(gap_us) = gap_us {
            run.gap_us = gap_us;
            run.gaps += 1;
        }
    }

    /// Counts what was not yet counted.
    pub(crate) fn flush(&mut self, ledger: &mut Ledger) {
        let Some(run) = self.run.take() else {
            return;
        };
        let bucket = bucket(&ITERATION_BOUNDS_US, run.gap_us);
        let Payer { class, tenant } = run.payer;
        let of_class = &mut ledger.classes[class.0 as usize].metrics;
        let of_tenant = &mut ledger.tenants.get_mut(tenant).metrics;
        for metrics in [of_class, of_tenant] {
            metrics.device_ns += run.tokens * self.token_ns;
            metrics.output_tokens += run.outputs;
            metrics.itl.add(bucket, run.gap_us, run.gaps);
        }
    }
}

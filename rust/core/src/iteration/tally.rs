//! Counting by class and tenant what a step's sequences did.
//!
//! While results are applied it is only written down, and what neighbours of one payer with one gap have in
//! common is written down once. All is counted at the end, when nothing else stands between one tenant and
//! the next: they are in many places, and so are looked up side by side.

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

/// What was not counted yet; its memory is kept from step to step.
#[derive(Default)]
pub(crate) struct Tally {
    /// The next may belong to the last.
    runs: Vec<Run>,
}

/// Neighbours in a step that have payer and gap in common.
struct Run {
    payer: Payer,
    /// Between their last output and this one.
    gap_us: u64,
    /// How many have that; those without output have none.
    gaps: u64,
    device_ns: u64,
    outputs: u64,
}

impl Tally {
    /// Notes a sequence with such a share of the step's time and so many outputs of it.
    #[inline]
    pub(crate) fn add(&mut self, payer: Payer, device_ns: u64, outputs: u64, gap_us: Option<u64>) {
        let (gap_us, gaps) = gap_us.map_or((0, 0), |gap_us| (gap_us, 1));
        if let Some(run) = self.runs.last_mut()
            && run.payer == payer
            && (gaps == 0 || run.gaps == 0 || run.gap_us == gap_us)
        {
            if gaps > 0 {
                run.gap_us = gap_us;
            }
            run.gaps += gaps;
            run.device_ns += device_ns;
            run.outputs += outputs;
            return;
        }
        self.runs.push(Run {
            payer,
            gap_us,
            gaps,
            device_ns,
            outputs,
        });
    }

    /// Counts what was noted.
    pub(crate) fn settle(&mut self, ledger: &mut Ledger) {
        let mut known = (0, bucket(&ITERATION_BOUNDS_US, 0));
        for run in self.runs.drain(..) {
            ledger.counters.output_tokens += run.outputs;
            if run.gap_us != known.0 {
                known = (run.gap_us, bucket(&ITERATION_BOUNDS_US, run.gap_us));
            }
            let Payer { class, tenant } = run.payer;
            let of_class = &mut ledger.classes[class.0 as usize].metrics.work;
            let of_tenant = ledger.tenants.work_mut(tenant);
            for work in [of_class, of_tenant] {
                work.device_ns += run.device_ns;
                work.output_tokens += run.outputs;
                work.itl.add(known.1, run.gap_us, run.gaps);
            }
        }
    }
}

//! Counting by class and tenant what a step's sequences did, and charging their flows for it.
//!
//! While results are applied it is only written down, and what neighbours of one payer with one gap have in
//! common is written down once. All is settled at the end, when nothing else stands between one tenant and
//! the next: they are in many places, and so are looked up side by side. Only when a sequence ends it is
//! settled before, since that looks at counters.

use crate::config::policy::ClassId;
use crate::iteration::ledger::Ledger;
use crate::iteration::sequence::Sequence;
use crate::metrics::{ITERATION_BOUNDS_US, bucket};
use crate::waiting::fairness::FlowKey;
use crate::waiting::order::Units;
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
    /// Runs that others came after.
    runs: Vec<Run>,
    /// The run that the next may belong to.
    open: Option<Run>,
}

/// What a sequence did.
#[derive(Clone, Copy)]
pub(crate) struct Deed {
    pub(crate) payer: Payer,
    /// The flow that pays for it.
    pub(crate) leaf: FlowKey,
    /// Its share of the step's time.
    pub(crate) device_ns: u64,
    pub(crate) outputs: u64,
    /// What its flow is to be charged.
    pub(crate) units: Units,
    /// Between its last output and this one, if it has both.
    pub(crate) gap_us: Option<u64>,
}

impl Deed {
    /// Nothing yet.
    #[inline]
    pub(crate) fn of(sequence: &Sequence) -> Self {
        Self {
            payer: sequence.payer,
            leaf: sequence.leaf,
            device_ns: 0,
            outputs: 0,
            units: 0,
            gap_us: None,
        }
    }
}

/// Neighbours in a step that have payer, flow and gap in common: what they did together.
struct Run {
    sum: Deed,
    /// How many have that gap.
    gaps: u64,
}

impl Tally {
    /// Notes what a sequence did.
    #[inline]
    pub(crate) fn add(&mut self, deed: Deed) {
        let gaps = u64::from(deed.gap_us.is_some());
        if let Some(Run { sum, gaps: known }) = &mut self.open
            && sum.leaf == deed.leaf
            && sum.payer == deed.payer
            && (deed.gap_us.is_none() || sum.gap_us.is_none() || sum.gap_us == deed.gap_us)
        {
            sum.gap_us = sum.gap_us.or(deed.gap_us);
            sum.device_ns += deed.device_ns;
            sum.outputs += deed.outputs;
            sum.units += deed.units;
            *known += gaps;
            return;
        }
        if let Some(run) = self.open.replace(Run { sum: deed, gaps }) {
            self.runs.push(run);
        }
    }
}

impl Ledger {
    /// Counts what was noted, and charges for it.
    pub(crate) fn settle_tally(&mut self) {
        let flows = self.queue.flows_mut();
        let mut known = (0, bucket(&ITERATION_BOUNDS_US, 0));
        for Run { sum, gaps } in self.tally.runs.drain(..).chain(self.tally.open.take()) {
            if sum.units > 0 {
                flows.charge(sum.leaf, sum.units);
            }
            self.counters.output_tokens += sum.outputs;
            let gap_us = sum.gap_us.unwrap_or_default();
            if gap_us != known.0 {
                known = (gap_us, bucket(&ITERATION_BOUNDS_US, gap_us));
            }
            let Payer { class, tenant } = sum.payer;
            let of_class = &mut self.classes[class.0 as usize].metrics;
            let of_tenant = &mut self.tenants.get_mut(tenant).metrics;
            for metrics in [of_class, of_tenant] {
                metrics.device_ns += sum.device_ns;
                metrics.output_tokens += sum.outputs;
                metrics.itl.add(known.1, gap_us, gaps);
            }
        }
    }
}

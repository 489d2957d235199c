//! The engine as a picture: who sits in which row, and who has waited longest.
//!
//! Made only when somebody looks; nothing is kept for it.

use std::collections::BTreeMap;

use crate::config::Limits;
use crate::config::policy::ClassId;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::request::Time;
use crate::waiting::tenants::TenantKey;

/// Live requests that are looked at for the longest wait: the oldest so many.
const MAX_LOOKED_AT: usize = 10_000;

/// Who sits in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Its class.
    pub class: ClassId,
    /// Whether it writes output; if not, its prompt is being computed.
    pub decodes: bool,
}

/// Arrival of the longest-waiting request of each group that has one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct OldestWaits<'a> {
    /// By class.
    pub classes: BTreeMap<ClassId, Time>,
    /// By the tenant's name.
    pub tenants: BTreeMap<&'a str, Time>,
}

impl Ledger {
    /// Who sits in each row.
    pub(crate) fn seats(&self, lane: &Lane, limits: &Limits) -> Vec<Option<Seat>> {
        let mut seats = vec![None; limits.max_num_seqs() as usize];
        for key in lane.running.iter() {
            let sequence = &self.sequences[key.0];
            let seat = Seat {
                class: sequence.payer.class,
                decodes: sequence.num_output_tokens() > 0,
            };
            for row in sequence.row.iter().chain(&sequence.sibling_rows) {
                seats[row.as_i32() as usize] = Some(seat);
            }
        }
        seats
    }

    /// Arrivals of those that have waited longest.
    pub(crate) fn oldest_waits(&self) -> OldestWaits<'_> {
        let mut classes = BTreeMap::new();
        let mut tenants: BTreeMap<TenantKey, Time> = BTreeMap::new();
        for key in self.live.values().take(MAX_LOOKED_AT) {
            let entry = &self.requests[key.0];
            if entry.waiting.is_none() {
                continue;
            }
            // Names are given at the door, so a later one may have been submitted earlier.
            let arrival = entry.request.stats.arrival;
            for oldest in [
                classes.entry(entry.class).or_insert(arrival),
                tenants.entry(entry.tenant).or_insert(arrival),
            ] {
                *oldest = arrival.min(*oldest);
            }
        }
        let names = tenants
            .into_iter()
            .map(|(tenant, arrival)| (&*self.tenants.get(tenant).name, arrival));
        OldestWaits {
            classes,
            tenants: names.collect(),
        }
    }
}

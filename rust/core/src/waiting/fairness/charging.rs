//! Charging service to flows, taking it back, and keeping the counters in their range.

use std::sync::Arc;

use super::{FlowKey, Flows, LastLeft, MOST_DEBT, REBASE_TO, SiblingKey, service_key};
use crate::waiting::order::Units;

impl Flows {
    /// Charges units of service to a leaf and to everything above it.
    pub fn charge(&mut self, leaf: FlowKey, units: Units) {
        self.charge_up(leaf, units, usize::MAX);
    }

    /// The same of so many tiers at most; what is above those.
    fn charge_up(&mut self, leaf: FlowKey, units: Units, tiers: usize) -> FlowKey {
        let mut at = leaf;
        for _ in 0..tiers {
            let account = self.account_mut(at);
            let Some(parent) = account.parent else {
                return at;
            };
            account.served += units;
            account.service += account.steps(units);
            if account.service > self.rebase_above {
                self.rebase(parent);
            }
            at = parent;
        }
        at
    }

    /// Charges units of service to leaves and to everything above them. Two tiers up there are few flows, those
    /// of classes: what goes there is summed up first.
    pub fn charge_all(&mut self, charges: impl Iterator<Item = (FlowKey, Units)>) {
        let mut above = std::mem::take(&mut self.above);
        for (leaf, units) in charges {
            let top = self.charge_up(leaf, units, 2);
            match above.iter_mut().find(|(flow, _)| *flow == top) {
                Some((_, sum)) => *sum += units,
                None => above.push((top, units)),
            }
        }
        for (flow, units) in above.drain(..) {
            self.charge(flow, units);
        }
        self.above = above;
    }

    /// Takes a charge back, exactly.
    pub fn refund(&mut self, leaf: FlowKey, units: Units) {
        let mut at = leaf;
        while let Some(parent) = self.account(at).parent {
            let account = self.account_mut(at);
            let before = account.service;
            account.served -= units;
            account.service = before.saturating_sub(account.steps(units));
            let service = account.service;
            let (standing, is_idle) = (self.flow(at).standing, self.flow(at).references == 0);
            let is_late = |&(key, _): &SiblingKey| self.by_service && key.cost > service;
            if let Some(old) = standing.filter(is_late) {
                self.stand(parent, at, old, service_key(service));
            }
            if is_idle && self.flow_mut(parent).idle.remove(&(before, at)) {
                self.flow_mut(parent).idle.insert((service, at));
            }
            at = parent;
        }
    }

    /// Lowers the counters of all children alike; those that do not wait are lifted first, as they
    /// would be anyway.
    #[cold]
    fn rebase(&mut self, parent: FlowKey) {
        let eligible = self.flow(parent).eligible.iter();
        let least = eligible.map(|&(_, key)| self.account(key).service).min();
        let floor = least.or(self.floor(parent)).unwrap_or(0);
        let lower = floor.saturating_sub(REBASE_TO);
        let children: Vec<FlowKey> = self
            .by_name
            .range((parent, Arc::from(""))..)
            .take_while(|((of, _), _)| *of == parent)
            .map(|(_, &key)| key)
            .collect();
        for &key in &children {
            let account = self.account_mut(key);
            let before = account.service;
            let most = (floor - lower).saturating_add(MOST_DEBT);
            account.service = (before.max(floor) - lower).min(most);
            let (service, standing) = (account.service, self.flow(key).standing);
            if let Some(old) = standing.filter(|_| self.by_service) {
                self.stand(parent, key, old, service_key(service));
            }
            if self.flow_mut(parent).idle.remove(&(before, key)) {
                self.flow_mut(parent).idle.insert((service, key));
            }
        }
        if let LastLeft::Counter(counter) = &mut self.flow_mut(parent).last_left {
            *counter = (*counter).max(floor) - lower;
        }
    }
}

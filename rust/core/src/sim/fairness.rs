//! Watches the promise of fair queuing: tenants that are backlogged together are served together.

use crate::sim::service::{Services, TenantService};

/// The largest gap in service, for its weight, between any two tenants during any time in which both
/// were backlogged throughout (VTC, OSDI'24, Theorem 4.4: at most `2 * max(input price * longest
/// prompt, output price * tokens of the KV pool)` at weight 1).
///
/// For each pair the lowest and highest difference since both became backlogged is kept; the gap over
/// the worst part of that time is what lies between. An iteration costs O(pairs of the backlogged).
#[derive(Clone, Debug)]
pub struct GapProbe {
    weights: Vec<f64>,
    price: fn(&TenantService) -> f64,
    pairs: Vec<Option<(f64, f64)>>,
    max_gap: f64,
}

impl GapProbe {
    /// Watches tenants of these weights; `price` picks what is compared.
    pub fn new(weights: Vec<f64>, price: fn(&TenantService) -> f64) -> Self {
        let pairs = vec![None; weights.len() * weights.len()];
        Self {
            weights,
            price,
            pairs,
            max_gap: 0.0,
        }
    }

    /// Looks at an iteration's end; the largest gap so far.
    pub fn observe(&mut self, services: &Services) -> f64 {
        let tenants = services.tenants();
        let share = |at: usize| (self.price)(&tenants[at]) / self.weights[at];
        for a in 0..tenants.len() {
            for b in 0..a {
                let pair = &mut self.pairs[a * tenants.len() + b];
                if tenants[a].waiting == 0 || tenants[b].waiting == 0 {
                    *pair = None;
                    continue;
                }
                let difference = share(a) - share(b);
                let (low, high) = pair.unwrap_or((difference, difference));
                let (low, high) = (low.min(difference), high.max(difference));
                *pair = Some((low, high));
                self.max_gap = self.max_gap.max(high - low);
            }
        }
        self.max_gap
    }

    /// The largest gap so far.
    pub fn max_gap(&self) -> f64 {
        self.max_gap
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // whole numbers
mod tests {
    use super::*;
    use crate::config::policy::Price;

    #[test]
    fn only_service_while_both_wait_counts() {
        let mut services = Services::new(Price::default(), 2);
        let mut probe = GapProbe::new(vec![1.0, 2.0], |tenant| tenant.priced_tokens);
        services.enter(0);
        services.add_input(0, 100); // alone: no gap
        assert_eq!(probe.observe(&services), 0.0);
        services.enter(1);
        assert_eq!(probe.observe(&services), 0.0);
        services.add_input(0, 10);
        assert_eq!(probe.observe(&services), 10.0);
        services.add_output(1, 20); // 40 at weight 2: level, then 10 the other way
        assert_eq!(probe.observe(&services), 20.0);
        services.leave(1);
        services.add_input(0, 1_000);
        probe.observe(&services);
        services.enter(1);
        assert_eq!(probe.observe(&services), 20.0, "a new beginning");
    }
}

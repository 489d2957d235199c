//! What every tenant really receives, kept apart from the engine's own books.
//!
//! It is counted from plans and outputs alone, so that it can convict the engine of unfairness.

use crate::config::policy::Price;

/// Service, and who waits for it, by tenant.
#[derive(Clone, Debug)]
pub struct Services {
    input_price: f64,
    cached_price: f64,
    output_price: f64,
    tenants: Vec<TenantService>,
}

/// One tenant's service.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TenantService {
    /// Tokens at their prices: a prompt token when it is first computed, a cached one when its request
    /// is first scheduled, an output token when it is sampled.
    pub priced_tokens: f64,
    /// Microseconds of the iterations, shared out by the true terms of their cost.
    pub device_us: f64,
    /// Requests that wait and were never scheduled.
    pub waiting: u32,
}

impl Services {
    /// Nobody has received anything. Where `price` is device time, tokens have VTC's prices.
    pub(crate) fn new(price: Price, num_tenants: usize) -> Self {
        let Price::Tokens {
            input,
            cached,
            output,
        } = price
        else {
            return Self::new(Price::default(), num_tenants);
        };
        Self {
            input_price: input,
            cached_price: cached,
            output_price: output,
            tenants: vec![TenantService::default(); num_tenants],
        }
    }

    /// By tenant, in the order of the workload.
    pub fn tenants(&self) -> &[TenantService] {
        &self.tenants
    }

    pub(crate) fn add_input(&mut self, tenant: u32, tokens: u32) {
        self.tenants[tenant as usize].priced_tokens += self.input_price * f64::from(tokens);
    }

    pub(crate) fn add_cached(&mut self, tenant: u32, tokens: u32) {
        self.tenants[tenant as usize].priced_tokens += self.cached_price * f64::from(tokens);
    }

    pub(crate) fn add_output(&mut self, tenant: u32, tokens: u32) {
        self.tenants[tenant as usize].priced_tokens += self.output_price * f64::from(tokens);
    }

    pub(crate) fn add_device(&mut self, tenant: u32, us: f64) {
        self.tenants[tenant as usize].device_us += us;
    }

    pub(crate) fn enter(&mut self, tenant: u32) {
        self.tenants[tenant as usize].waiting += 1;
    }

    pub(crate) fn leave(&mut self, tenant: u32) {
        self.tenants[tenant as usize].waiting -= 1;
    }
}

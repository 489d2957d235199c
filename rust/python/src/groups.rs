//! What became of the requests of each class and tenant, as Python sees it: plain dictionaries, made
//! only when they are asked for.

use chairlift_core::Engine;
use chairlift_core::metrics::{GroupMetrics, Histogram, TIME_BOUNDS_US};
use chairlift_core::request::{WaitReason, WaitTimes};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets of all histograms, in seconds; the last bucket has none.
#[pyfunction]
pub fn time_bounds() -> Vec<f64> {
    TIME_BOUNDS_US.iter().map(|&us| us as f64 / 1e6).collect()
}

/// A snapshot of all groups.
#[derive(Serialize, Deserialize)]
pub struct Groups {
    classes: Vec<(String, GroupMetrics)>,
    tenants: Vec<(String, GroupMetrics)>,
    shares: Vec<TenantShare>,
}

/// A tenant's share, over all classes.
#[derive(Serialize, Deserialize)]
struct TenantShare {
    tenant: String,
    weight: f64,
    served: u64,
    num_running: u32,
    num_queued: u32,
}

/// Why a request waits.
#[derive(Serialize, Deserialize)]
pub struct Wait {
    /// The reason.
    pub reason: WaitReason,
    /// What it has waited for.
    pub times: WaitTimes,
}

impl From<(WaitReason, WaitTimes)> for Wait {
    fn from((reason, times): (WaitReason, WaitTimes)) -> Self {
        Self { reason, times }
    }
}

impl Groups {
    /// The groups of an engine.
    pub fn of(engine: &Engine) -> Self {
        let owned = |(name, metrics): (&str, &GroupMetrics)| (name.to_owned(), *metrics);
        let mut shares: Vec<TenantShare> = Vec::new();
        for share in engine.shares() {
            match shares.last_mut().filter(|last| last.tenant == share.tenant) {
                Some(last) => last.served += share.served,
                None => shares.push(TenantShare {
                    tenant: share.tenant.to_owned(),
                    weight: share.weight,
                    served: share.served,
                    num_running: share.num_running,
                    num_queued: share.num_queued,
                }),
            }
        }
        Self {
            classes: engine.class_metrics().map(owned).collect(),
            tenants: engine.tenant_metrics().map(owned).collect(),
            shares,
        }
    }

    /// `{"classes": {name: {...}}, "tenants": {name: {...}}}`; times in seconds, service in units of
    /// the price.
    pub fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let classes = PyDict::new(py);
        for (name, metrics) in &self.classes {
            classes.set_item(name, group(py, metrics)?)?;
        }
        let tenants = PyDict::new(py);
        for (name, metrics) in &self.tenants {
            tenants.set_item(name, group(py, metrics)?)?;
        }
        for share in &self.shares {
            if let Some(tenant) = tenants.get_item(&share.tenant)? {
                tenant.set_item("weight", share.weight)?;
                tenant.set_item("served", share.served as f64 / 1e3)?;
                tenant.set_item("running", share.num_running)?;
                tenant.set_item("queued", share.num_queued)?;
            }
        }
        let dict = PyDict::new(py);
        dict.set_item("classes", classes)?;
        dict.set_item("tenants", tenants)?;
        Ok(dict)
    }
}

fn group<'py>(py: Python<'py>, metrics: &GroupMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counters = [
        ("accepted", metrics.accepted),
        ("rejected", metrics.rejected),
        ("finished", metrics.finished),
        ("aborted", metrics.aborted),
        ("failed", metrics.failed),
        ("expired", metrics.expired),
        ("shed", metrics.shed),
        ("displaced", metrics.displaced),
        ("prompt_tokens", metrics.prompt_tokens),
        ("cached_tokens", metrics.cached_tokens),
        ("output_tokens", metrics.output_tokens),
    ];
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    let histograms = [
        ("queue_time", &metrics.queue_time),
        ("ttft", &metrics.ttft),
        ("tpot", &metrics.tpot),
        ("e2e", &metrics.e2e),
    ];
    for (name, value) in histograms {
        dict.set_item(name, histogram(py, value)?)?;
    }
    Ok(dict)
}

fn histogram<'py>(py: Python<'py>, histogram: &Histogram) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("counts", histogram.counts.to_vec())?;
    dict.set_item("sum", histogram.sum_us as f64 / 1e6)?;
    Ok(dict)
}

/// Seconds by what was waited for.
pub fn wait_times(py: Python<'_>, times: WaitTimes) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    let entries = [
        (WaitReason::Slots, times.slots_us),
        (WaitReason::Memory, times.memory_us),
        (WaitReason::Budget, times.budget_us),
        (WaitReason::Fairness, times.fairness_us),
        (WaitReason::Rate, times.rate_us),
        (WaitReason::Window, times.window_us),
    ];
    for (reason, us) in entries {
        dict.set_item(reason.name(), us as f64 / 1e6)?;
    }
    Ok(dict)
}

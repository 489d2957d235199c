//! What became of the requests of each class and tenant, as Python sees it: plain dictionaries, made
//! only when they are asked for.

use chairlift_core::Engine;
use chairlift_core::config::policy::ClassSettings;
use chairlift_core::metrics::{
    Bounds, GroupMetrics, Histogram, ITERATION_BOUNDS_US, Rejections, SIZE_BOUNDS, TIME_BOUNDS_US,
};
use chairlift_core::request::{WaitReason, WaitTimes};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::{Deserialize, Serialize};

use crate::metrics::EngineMetrics;

/// Upper bounds of the buckets of the times of requests, in seconds; the last bucket has none.
#[pyfunction]
pub fn time_bounds() -> Vec<f64> {
    seconds(&TIME_BOUNDS_US)
}

/// Upper bounds of the buckets of iteration times and of gaps between outputs, in seconds.
#[pyfunction]
pub fn iteration_bounds() -> Vec<f64> {
    seconds(&ITERATION_BOUNDS_US)
}

/// Upper bounds of the buckets of numbers of sequences and tokens.
#[pyfunction]
pub fn size_bounds() -> Vec<u64> {
    SIZE_BOUNDS.to_vec()
}

fn seconds(bounds: &Bounds) -> Vec<f64> {
    bounds.iter().map(|&us| us as f64 / 1e6).collect()
}

/// A snapshot of all groups and of the engine, of one moment.
#[derive(Serialize, Deserialize)]
pub struct Groups {
    engine: EngineMetrics,
    classes: Vec<(ClassSettings, GroupMetrics)>,
    tenants: Vec<(String, GroupMetrics)>,
    other_tenants: GroupMetrics,
    /// Whether tenants are told without histograms.
    is_brief: bool,
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
    /// The groups of an engine whose own counters are `metrics`.
    pub fn of(engine: &Engine, metrics: &EngineMetrics, is_brief: bool) -> Self {
        let settings = engine.policy().classes.iter();
        let owned = |(name, metrics): (&str, GroupMetrics)| (name.to_owned(), metrics);
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
            engine: *metrics,
            classes: settings
                .zip(engine.class_metrics())
                .map(|(settings, (_, metrics))| (settings.clone(), *metrics))
                .collect(),
            tenants: engine.tenant_metrics().map(owned).collect(),
            other_tenants: *engine.other_tenant_metrics(),
            is_brief,
            shares,
        }
    }

    /// `{"classes": {name: {...}}, "tenants": {name: {...}}, "other_tenants": {"": {...}},
    /// "engine": {"": {...}}}`, the last as `metrics()` has it; times in seconds, service in units of the price.
    pub fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let classes = PyDict::new(py);
        for (settings, metrics) in &self.classes {
            let class = group(py, metrics)?;
            class.set_item("level", settings.level)?;
            for (name, target_us) in [
                ("ttft_target", settings.ttft_target_us),
                ("tpot_target", settings.tpot_target_us),
            ] {
                class.set_item(name, target_us.map(|us| us as f64 / 1e6))?;
            }
            classes.set_item(&settings.name, class)?;
        }
        let tenant = |metrics| {
            if self.is_brief {
                counters(py, metrics)
            } else {
                group(py, metrics)
            }
        };
        let tenants = PyDict::new(py);
        for (name, metrics) in &self.tenants {
            tenants.set_item(name, tenant(metrics)?)?;
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
        let others = PyDict::new(py);
        others.set_item("", tenant(&self.other_tenants)?)?;
        dict.set_item("other_tenants", others)?;
        let engine = PyDict::new(py);
        engine.set_item("", self.engine.to_dict(py)?)?;
        dict.set_item("engine", engine)?;
        Ok(dict)
    }
}

fn counters<'py>(py: Python<'py>, metrics: &GroupMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counters = [
        ("accepted", metrics.accepted),
        ("rejected", metrics.rejected),
        ("finished", metrics.finished),
        ("finished_by_length", metrics.finished_by_length),
        ("aborted", metrics.aborted),
        ("failed", metrics.failed),
        ("expired", metrics.expired),
        ("deadline_missed", metrics.deadline_missed),
        ("shed", metrics.shed),
        ("displaced", metrics.displaced),
        ("live", metrics.live),
        ("waiting", metrics.waiting),
        ("prompt_tokens", metrics.prompt_tokens),
        ("cached_tokens", metrics.cached_tokens),
        ("output_tokens", metrics.work.output_tokens),
    ];
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    dict.set_item("device_time", metrics.work.device_ns as f64 / 1e9)?;
    Ok(dict)
}

fn group<'py>(py: Python<'py>, metrics: &GroupMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = counters(py, metrics)?;
    dict.set_item("rejections", rejections(py, &metrics.rejections)?)?;
    let histograms = [
        ("queue_time", &metrics.queue_time),
        ("predicted_queue_time", &metrics.predicted_queue_time),
        ("queue_time_error", &metrics.queue_time_error),
        ("ttft", &metrics.ttft),
        ("itl", &metrics.work.itl),
        ("tpot", &metrics.tpot),
        ("e2e", &metrics.e2e),
    ];
    for (name, value) in histograms {
        dict.set_item(name, times(py, value)?)?;
    }
    Ok(dict)
}

/// How often requests were rejected, by reason.
pub fn rejections<'py>(py: Python<'py>, rejections: &Rejections) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (reason, count) in rejections.iter() {
        dict.set_item(reason, count)?;
    }
    Ok(dict)
}

/// A histogram of microseconds, in seconds.
pub fn times<'py>(py: Python<'py>, histogram: &Histogram) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("counts", histogram.counts.to_vec())?;
    dict.set_item("sum", histogram.sum as f64 / 1e6)?;
    Ok(dict)
}

/// A histogram of numbers.
pub fn sizes<'py>(py: Python<'py>, histogram: &Histogram) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("counts", histogram.counts.to_vec())?;
    dict.set_item("sum", histogram.sum)?;
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
        (WaitReason::Sla, times.sla_us),
    ];
    for (reason, us) in entries {
        dict.set_item(reason.name(), us as f64 / 1e6)?;
    }
    Ok(dict)
}

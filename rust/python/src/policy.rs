//! The policy as Python hands it over: the attributes of `chairlift.PolicyConfig`, read once.
//!
//! Only the shape is read here (names of choices, seconds to microseconds). Numbers and names of
//! classes are checked by the core's own `Policy::validate`.

use std::collections::BTreeMap;

use chairlift_core::config::memory::{Backfill, MemoryAdmission, MemorySettings};
use chairlift_core::config::pace::Pace;
use chairlift_core::config::policy::{
    ClassSettings, Join, OnDoomed, OnTimeout, Order, Policy, Price, Sharing, Shedding,
    TenantSettings,
};
use chairlift_core::error::ConfigError;
use pyo3::prelude::*;

use crate::errors::config_error;

/// The attributes of a `PolicyConfig`, but for its classes, whose order counts.
#[derive(FromPyObject)]
struct PolicyView {
    tenants: BTreeMap<String, TenantView>,
    default_tenant: TenantView,
    sharing: String,
    price: PriceView,
    charge_predicted_output: bool,
    order: String,
    ageing: f64,
    max_level_wait: Option<f64>,
    join: JoinView,
    shedding: Option<SheddingView>,
    preempt_to_admit: bool,
    memory: MemoryView,
    pace: PaceView,
}

#[derive(FromPyObject)]
struct ClassView {
    level: i32,
    weight: f64,
    max_queued_requests: Option<u32>,
    max_queued_tokens: Option<u64>,
    max_queue_time: Option<f64>,
    on_timeout: String,
    ttft_target: Option<f64>,
    tpot_target: Option<f64>,
    on_doomed: String,
    may_be_shed: bool,
}

#[derive(FromPyObject)]
struct TenantView {
    weight: f64,
    default_class: Option<String>,
    best_class: Option<String>,
    max_running: Option<u32>,
    max_queued: Option<u32>,
    tokens_per_second: Option<u64>,
    burst_tokens: Option<u64>,
}

#[derive(FromPyObject)]
enum PriceView {
    #[pyo3(transparent)]
    Name(String),
    Tokens {
        input: f64,
        cached: f64,
        output: f64,
    },
}

#[derive(FromPyObject)]
enum JoinView {
    #[pyo3(transparent)]
    Name(String),
    Window {
        size: u32,
        delay: f64,
    },
}

#[derive(FromPyObject)]
struct SheddingView {
    above: f64,
    below: f64,
}

#[derive(FromPyObject)]
struct MemoryView {
    admission: String,
    overflow: f64,
    backfill: String,
    backfill_candidates: u32,
}

#[derive(FromPyObject)]
struct PaceView {
    governor: bool,
    iteration_target: Option<f64>,
    min_prefill_tokens: Option<u32>,
}

/// Reads a `PolicyConfig`. Raises `ConfigError` for a choice that there is not.
pub fn read_policy(config: &Bound<'_, PyAny>) -> PyResult<Policy> {
    let mut classes = Vec::new();
    for item in config
        .getattr("classes")?
        .call_method0("items")?
        .try_iter()?
    {
        let (name, view): (String, ClassView) = item?.extract()?;
        classes.push(read_class(name, &view)?);
    }
    let view: PolicyView = config.extract()?;
    let tenants = view.tenants.into_iter();
    Ok(Policy {
        classes,
        tenants: tenants.map(|(name, view)| (name, view.into())).collect(),
        default_tenant: view.default_tenant.into(),
        sharing: choose("queue.sharing", &view.sharing, &SHARING)?,
        price: match view.price {
            PriceView::Name(name) => choose("queue.price", &name, &PRICE)?,
            PriceView::Tokens {
                input,
                cached,
                output,
            } => Price::Tokens {
                input,
                cached,
                output,
            },
        },
        charge_predicted_output: view.charge_predicted_output,
        order: choose("queue.order", &view.order, &ORDER)?,
        ageing: view.ageing,
        max_level_wait_us: view.max_level_wait.map(microseconds),
        join: match view.join {
            JoinView::Name(name) => choose("queue.join", &name, &JOIN)?,
            JoinView::Window { size, delay } => Join::Window {
                size,
                delay_us: microseconds(delay),
            },
        },
        shedding: view.shedding.map(|shedding| Shedding {
            above_us: microseconds(shedding.above),
            below_us: microseconds(shedding.below),
        }),
        preempt_to_admit: view.preempt_to_admit,
        memory: read_memory(&view.memory)?,
        pace: Pace {
            governor: view.pace.governor,
            iteration_target_us: view.pace.iteration_target.map(microseconds),
            min_prefill_tokens: view.pace.min_prefill_tokens,
        },
    })
}

const SHARING: [(&str, Sharing); 2] = [("fcfs", Sharing::Fcfs), ("fair", Sharing::Fair)];
const PRICE: [(&str, Price); 1] = [("device_time", Price::DeviceTime)];
const ORDER: [(&str, Order); 5] = [
    ("arrival", Order::Arrival),
    ("shortest", Order::Shortest),
    ("footprint", Order::Footprint),
    ("deadline", Order::Deadline),
    ("prefix", Order::Prefix),
];
const BACKFILL: [(&str, Backfill); 3] = [
    ("easy", Backfill::Easy),
    ("off", Backfill::Off),
    ("unprotected", Backfill::Unprotected),
];
const JOIN: [(&str, Join); 2] = [("continuous", Join::Continuous), ("static", Join::Static)];
const MEMORY_ADMISSION: [(&str, MemoryAdmission); 3] = [
    ("optimistic", MemoryAdmission::Optimistic),
    ("reserve", MemoryAdmission::Reserve),
    ("forecast", MemoryAdmission::Forecast),
];
const ON_TIMEOUT: [(&str, OnTimeout); 2] = [
    ("expire", OnTimeout::Expire),
    ("promote", OnTimeout::Promote),
];
const ON_DOOMED: [(&str, OnDoomed); 3] = [
    ("keep", OnDoomed::Keep),
    ("relegate", OnDoomed::Relegate),
    ("drop", OnDoomed::Drop),
];

/// The choice of that name.
fn choose<T: Copy>(key: &str, name: &str, choices: &[(&str, T)]) -> PyResult<T> {
    if let Some((_, choice)) = choices.iter().find(|(known, _)| *known == name) {
        return Ok(*choice);
    }
    let known: Vec<String> = choices
        .iter()
        .map(|(name, _)| format!("\"{name}\""))
        .collect();
    let or_table = match key {
        "queue.price" => " or a table of input, cached and output",
        "queue.join" => " or a table of size and delay",
        _ => "",
    };
    Err(config_error(&ConfigError::Invalid {
        key: key.to_owned(),
        value: format!("\"{}\"", name.escape_default()),
        allowed: format!("{}{or_table}", known.join(" or ")),
    }))
}

fn read_memory(view: &MemoryView) -> PyResult<MemorySettings> {
    Ok(MemorySettings {
        admission: choose("memory.admission", &view.admission, &MEMORY_ADMISSION)?,
        overflow: view.overflow,
        backfill: choose("memory.backfill", &view.backfill, &BACKFILL)?,
        backfill_candidates: view.backfill_candidates,
    })
}

fn read_class(name: String, view: &ClassView) -> PyResult<ClassSettings> {
    let key = |field: &str| format!("classes.{name}.{field}");
    Ok(ClassSettings {
        level: view.level,
        weight: view.weight,
        max_queued_requests: view.max_queued_requests,
        max_queued_tokens: view.max_queued_tokens,
        max_queue_time_us: view.max_queue_time.map(microseconds),
        on_timeout: choose(&key("on_timeout"), &view.on_timeout, &ON_TIMEOUT)?,
        ttft_target_us: view.ttft_target.map(microseconds),
        tpot_target_us: view.tpot_target.map(microseconds),
        on_doomed: choose(&key("on_doomed"), &view.on_doomed, &ON_DOOMED)?,
        may_be_shed: view.may_be_shed,
        name,
    })
}

impl From<TenantView> for TenantSettings {
    fn from(view: TenantView) -> Self {
        Self {
            weight: view.weight,
            default_class: view.default_class,
            best_class: view.best_class,
            max_running: view.max_running,
            max_queued: view.max_queued,
            tokens_per_second: view.tokens_per_second,
            burst_tokens: view.burst_tokens,
        }
    }
}

/// Python's times are seconds.
pub fn microseconds(seconds: f64) -> u64 {
    (seconds * 1e6).round() as u64
}

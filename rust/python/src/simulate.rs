//! The simulator for Python: arrays in, arrays out.
//!
//! `chairlift.simulation` is the only caller; its dataclasses are what is read here. The simulation runs
//! without the GIL and comes back for it ten times a second, to see whether it was interrupted and to
//! report how far it is.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use chairlift_core::Engine;
use chairlift_core::config::policy::Price;
use chairlift_core::sim::{
    self, CostProfile, GapProbe, SimConfig, SimError, SimRequest, Stretch, TenantService, Workload,
};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::engine::read_settings;
use crate::errors::{config_error, setup_error};
use crate::sim_arrays::to_arrays;

/// How often the simulation comes back for the GIL.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// Iterations between two looks at the clock.
const LOOK_EVERY: u64 = 64;

/// The attributes of `chairlift.simulation.Options`.
#[derive(FromPyObject)]
struct OptionsView {
    seed: u64,
    max_tokens: u32,
    retry: bool,
    abort_share: f64,
    keep_gaps: bool,
    service_interval: Option<u32>,
    slowness: Option<Vec<(f64, f64)>>,
    max_iterations: Option<u64>,
    gap_weights: Option<Vec<f64>>,
}

/// The attributes of `chairlift.simulation.Workload`.
#[derive(FromPyObject)]
struct WorkloadView {
    arrival_s: PyBuffer<f64>,
    input_tokens: PyBuffer<i32>,
    output_tokens: PyBuffer<i32>,
    tenant: PyBuffer<i32>,
    request_class: PyBuffer<i32>,
    tenants: Vec<String>,
    priority: Option<PyBuffer<i32>>,
    deadline_s: Option<PyBuffer<f64>>,
    prefix_offsets: Option<PyBuffer<i32>>,
    prefix_hashes: Option<PyBuffer<i32>>,
    prefix_block_tokens: u32,
}

/// Runs a simulation; the result is a dict of scalars and flat arrays: times in seconds, NaN where there
/// is none. `progress`, if given, is called with the number of requests that are over.
#[pyfunction]
#[pyo3(signature = (settings, profile, workload, options, progress=None))]
pub fn simulate<'py>(
    settings: &Bound<'py, PyAny>,
    profile: &Bound<'py, PyAny>,
    workload: &Bound<'py, PyAny>,
    options: &Bound<'py, PyAny>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    run(
        settings,
        profile,
        read_workload(workload)?,
        options,
        progress,
    )
}

/// The same for a workload that was read.
pub fn run<'py>(
    settings: &Bound<'py, PyAny>,
    profile: &Bound<'py, PyAny>,
    mut workload: Workload,
    options: &Bound<'py, PyAny>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = settings.py();
    let options: OptionsView = options.extract()?;
    let config = read_config(settings, profile, &options)?;
    let mut probe = match options.gap_weights {
        None => None,
        Some(weights) => Some(gap_probe(&config, &workload, weights)?),
    };
    let mut reporter = Reporter::new(progress);
    let outcome = py.detach(|| {
        if options.abort_share > 0.0 {
            // A rehearsal without aborts tells how long everybody lives.
            let rehearsal = sim::simulate(&config, &workload, |engine, _| {
                reporter.look(engine)?;
                stop_at(options.max_iterations, engine)
            })?;
            workload.add_aborts(&rehearsal.records, options.abort_share, config.seed);
        }
        sim::simulate(&config, &workload, |engine, view| {
            if let Some(probe) = &mut probe {
                probe.observe(view.services);
            }
            reporter.look(engine)?;
            stop_at(options.max_iterations, engine)
        })
    });
    reporter.finish()?;
    let outcome = outcome.map_err(|error| sim_error(&error))?;
    let result = to_arrays(py, &outcome)?;
    result.set_item("max_gap", probe.map(|probe| probe.max_gap()))?;
    Ok(result)
}

/// Requests a second that continuous FCFS serves when the first 4,000 are all there at time 0; `None`
/// where there are no requests.
#[pyfunction]
#[pyo3(signature = (settings, profile, workload, options, progress=None))]
pub fn capacity(
    settings: &Bound<'_, PyAny>,
    profile: &Bound<'_, PyAny>,
    workload: &Bound<'_, PyAny>,
    options: &Bound<'_, PyAny>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Option<f64>> {
    let py = settings.py();
    let workload = read_workload(workload)?;
    let config = read_config(settings, profile, &options.extract()?)?;
    let mut reporter = Reporter::new(progress);
    let rate = py.detach(|| sim::capacity(&config, &workload, |engine, _| reporter.look(engine)));
    reporter.finish()?;
    rate.map_err(|error| sim_error(&error))
}

fn stop_at(max_iterations: Option<u64>, engine: &Engine) -> ControlFlow<()> {
    match max_iterations {
        Some(most) if engine.metrics().iterations >= most => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    }
}

/// Comes back for the GIL now and then; remembers what stopped the simulation there.
struct Reporter {
    progress: Option<Py<PyAny>>,
    looks: u64,
    next: Instant,
    error: Option<PyErr>,
}

impl Reporter {
    fn new(progress: Option<Py<PyAny>>) -> Self {
        Self {
            progress,
            looks: 0,
            next: Instant::now() + REPORT_EVERY,
            error: None,
        }
    }

    fn look(&mut self, engine: &Engine) -> ControlFlow<()> {
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOK_EVERY) || Instant::now() < self.next {
            return ControlFlow::Continue(());
        }
        self.next = Instant::now() + REPORT_EVERY;
        let counters = engine.metrics();
        let over = counters.submitted - counters.live;
        let result = Python::attach(|py| {
            py.check_signals()?;
            match &self.progress {
                None => Ok(()),
                Some(progress) => progress.call1(py, (over,)).map(drop),
            }
        });
        match result {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.error = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn finish(self) -> PyResult<()> {
        self.error.map_or(Ok(()), Err)
    }
}

fn read_config(
    settings: &Bound<'_, PyAny>,
    profile: &Bound<'_, PyAny>,
    options: &OptionsView,
) -> PyResult<SimConfig> {
    Ok(SimConfig {
        settings: read_settings(settings)?,
        profile: read_profile(profile)?,
        seed: options.seed,
        max_tokens: options.max_tokens,
        retry: options.retry,
        keep_gaps: options.keep_gaps,
        service_interval: options.service_interval,
        slowness: options.slowness.as_deref().map(read_slowness).transpose()?,
    })
}

/// Reads stretches: seconds of their start, and the factor.
fn read_slowness(stretches: &[(f64, f64)]) -> PyResult<Vec<Stretch>> {
    let read = |(at, &(start_s, factor)): (usize, &(f64, f64))| {
        let start_us = in_microseconds(start_s).ok_or_else(|| {
            sim_error(&SimError::Slowness {
                stretch: at,
                field: "start_s",
                value: start_s.to_string(),
                allowed: "from 0 to 1e9",
            })
        })?;
        Ok(Stretch { start_us, factor })
    };
    stretches.iter().enumerate().map(read).collect()
}

/// Reads a `chairlift.simulation.CostProfile`.
fn read_profile(profile: &Bound<'_, PyAny>) -> PyResult<CostProfile> {
    let value = |name: &str| -> PyResult<f64> { profile.getattr(name)?.extract() };
    Ok(CostProfile {
        t0_s: value("t0_s")?,
        t_seq_s: value("t_seq_s")?,
        t_w_s: value("t_w_s")?,
        t_tok_s: value("t_tok_s")?,
        t_ctx_s: value("t_ctx_s")?,
        t_pair_s: value("t_pair_s")?,
        t_sample_s: value("t_sample_s")?,
        t_copy_s: value("t_copy_s")?,
        noise_sigma: value("noise_sigma")?,
        slow_sigma: value("slow_sigma")?,
        slow_s: value("slow_s")?,
    })
}

/// The core's profile of a GPU that serves a model of 8B, and the KV blocks of the pool that goes with
/// it and of a small one.
#[pyfunction]
pub fn gpu_8b(py: Python<'_>) -> PyResult<(Bound<'_, PyDict>, u32, u32)> {
    Ok((
        CostProfile::GPU_8B.named().into_py_dict(py)?,
        CostProfile::GPU_8B_BLOCKS,
        CostProfile::GPU_8B_SMALL_BLOCKS,
    ))
}

/// Compares what the policy prices.
fn gap_probe(config: &SimConfig, workload: &Workload, weights: Vec<f64>) -> PyResult<GapProbe> {
    let (got, expected) = (weights.len(), workload.tenants.len());
    if got != expected {
        return Err(wrong_length("gap_weights", got, expected));
    }
    let price = match config.settings.policy.price {
        Price::Tokens { .. } => |tenant: &TenantService| tenant.priced_tokens,
        Price::DeviceTime => |tenant: &TenantService| tenant.device_us / 1e6,
    };
    Ok(GapProbe::new(weights, price))
}

fn read_workload(workload: &Bound<'_, PyAny>) -> PyResult<Workload> {
    let py = workload.py();
    let view: WorkloadView = workload.extract()?;
    let arrivals = view.arrival_s.to_vec(py)?;
    let count = arrivals.len();
    let column = |name, buffer: &PyBuffer<i32>| column(py, name, buffer, count);
    let input_tokens = unsigned("input_tokens", column("input_tokens", &view.input_tokens)?)?;
    let output_tokens = unsigned(
        "output_tokens",
        column("output_tokens", &view.output_tokens)?,
    )?;
    let tenant = unsigned("tenant", column("tenant", &view.tenant)?)?;
    let class = unsigned(
        "request_class",
        column("request_class", &view.request_class)?,
    )?;
    let priority = match &view.priority {
        None => vec![0; count],
        Some(buffer) => column("priority", buffer)?,
    };
    let deadlines = match &view.deadline_s {
        None => vec![f64::NAN; count],
        Some(buffer) => self::column(py, "deadline_s", buffer, count)?,
    };
    let prefixes = match &view.prefix_offsets {
        None => vec![0; count + 1],
        Some(buffer) => {
            let offsets = self::column(py, "prefix_offsets", buffer, count + 1)?;
            unsigned("prefix_offsets", offsets)?
        }
    };
    let prefix_hashes = match &view.prefix_hashes {
        None => Vec::new(),
        Some(buffer) => unsigned("prefix_hashes", buffer.to_vec(py)?)?,
    };
    let requests = (0..count).map(|at| {
        Ok(SimRequest {
            arrival_us: microseconds("arrival_s", arrivals[at])?,
            input_tokens: input_tokens[at],
            output_tokens: output_tokens[at],
            tenant: tenant[at],
            class: class[at],
            priority: priority[at],
            deadline_us: match deadlines[at] {
                none if none.is_nan() => None,
                seconds => Some(microseconds("deadline_s", seconds)?),
            },
            abort_us: None,
            prefix: prefixes[at]..prefixes[at + 1],
        })
    });
    Ok(Workload {
        requests: requests.collect::<PyResult<_>>()?,
        tenants: view.tenants,
        prefix_hashes,
        prefix_block_tokens: view.prefix_block_tokens,
        max_tokens: Vec::new(),
    })
}

fn column<T: Element>(
    py: Python<'_>,
    name: &str,
    buffer: &PyBuffer<T>,
    expected: usize,
) -> PyResult<Vec<T>> {
    let values = buffer.to_vec(py)?;
    if values.len() == expected {
        return Ok(values);
    }
    Err(wrong_length(name, values.len(), expected))
}

fn wrong_length(name: &str, got: usize, expected: usize) -> PyErr {
    let message = format!("workload: {name} has {got} entries; it must have {expected}");
    setup_error(&message, INVALID)
}

fn unsigned(name: &str, values: Vec<i32>) -> PyResult<Vec<u32>> {
    let values = values.into_iter().enumerate().map(|(at, value)| {
        u32::try_from(value).map_err(|_| {
            let message = format!("workload: {name}[{at}] is {value}; it must be at least 0");
            setup_error(&message, INVALID)
        })
    });
    values.collect()
}

fn microseconds(name: &str, seconds: f64) -> PyResult<u64> {
    in_microseconds(seconds).ok_or_else(|| {
        let message = format!("workload: {name} has {seconds}; it must be from 0 to 1e9 seconds");
        setup_error(&message, INVALID)
    })
}

fn in_microseconds(seconds: f64) -> Option<u64> {
    (0.0..=1e9)
        .contains(&seconds)
        .then(|| (seconds * 1e6).round() as u64)
}

/// Code of a workload that is refused, as the core has it.
const INVALID: &str = "invalid_workload";

fn sim_error(error: &SimError) -> PyErr {
    match error {
        SimError::Config(error) => config_error(error),
        SimError::Stuck { .. } => PyRuntimeError::new_err(error.to_string()),
        SimError::Profile { .. } | SimError::Slowness { .. } | SimError::Workload { .. } => {
            setup_error(&error.to_string(), error.code())
        }
    }
}

//! What a simulation returns, as a dict of flat numpy arrays and a few scalars.
//!
//! The names are those of the fields of `chairlift.simulation.Simulation`. Times are seconds, NaN where
//! there is none.

use chairlift_core::sim::{Iteration, Record, SimOutcome};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::numpy::{Plain, copied};

/// A column by its name.
type Column<Row, Value> = (&'static str, fn(&Row) -> Value);

const RECORD_TIMES: [Column<Record, f64>; 7] = [
    ("arrival_s", |record| seconds(record.arrival_us)),
    ("submitted_s", |record| seconds(record.submitted_us)),
    ("first_scheduled_s", |record| {
        seconds(record.first_scheduled_us)
    }),
    ("first_token_s", |record| seconds(record.first_token_us)),
    ("finished_s", |record| seconds(record.finished_us)),
    ("predicted_ttft_s", |record| {
        seconds(record.predicted_ttft_us)
    }),
    ("longest_gap_s", |record| seconds(record.max_gap_us)),
];

const RECORD_COUNTS: [Column<Record, u32>; 4] = [
    ("rejections", |record| record.rejections),
    ("preemptions", |record| record.preemptions),
    ("cached_tokens", |record| record.cached_tokens),
    ("output_tokens", |record| record.output_tokens),
];

const ITERATION_TIMES: [Column<Iteration, f64>; 2] = [
    ("iteration_start_s", |line| seconds(line.start_us)),
    ("iteration_s", |line| seconds(line.duration_us)),
];

const ITERATION_COUNTS: [Column<Iteration, u32>; 7] = [
    ("num_decodes", |line| line.num_decodes),
    ("prefill_tokens", |line| line.prefill_tokens),
    ("sequences", |line| line.sequences),
    ("running", |line| line.running),
    ("waiting", |line| line.waiting),
    ("free_blocks", |line| line.free_blocks),
    ("iteration_preemptions", |line| line.preemptions),
];

/// The whole result but for what the caller observed itself.
pub fn to_arrays<'py>(py: Python<'py>, outcome: &SimOutcome) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    write_columns(&result, "float64", &RECORD_TIMES, &outcome.records)?;
    write_columns(&result, "int32", &RECORD_COUNTS, &outcome.records)?;
    write_outcomes(&result, &outcome.records)?;
    write_columns(&result, "float64", &ITERATION_TIMES, &outcome.iterations)?;
    write_columns(&result, "int32", &ITERATION_COUNTS, &outcome.iterations)?;
    let requests = outcome.gaps.iter().map(|gap| gap.request);
    write(&result, "gap_request", "int32", requests)?;
    let gaps = outcome.gaps.iter();
    let gaps = gaps.map(|gap| (f64::from(gap.us) / 1e6) as f32);
    write(&result, "gap_s", "float32", gaps)?;
    write_services(&result, outcome)?;
    result.set_item("recomputed_tokens", outcome.recomputed_tokens)?;
    result.set_item("backfilled", outcome.backfilled)?;
    result.set_item("forecast_slips", outcome.forecast_slips)?;
    result.set_item("end_s", seconds(outcome.end_us))?;
    Ok(result)
}

/// How every request went, as positions in a list of names.
fn write_outcomes(result: &Bound<'_, PyDict>, records: &[Record]) -> PyResult<()> {
    let mut names: Vec<&str> = Vec::new();
    let mut outcomes = Vec::with_capacity(records.len());
    for record in records {
        let name = record.outcome.name();
        let known = names.iter().position(|&known| known == name);
        outcomes.push(known.unwrap_or(names.len()) as i32);
        if known.is_none() {
            names.push(name);
        }
    }
    write(result, "outcome", "int32", outcomes.into_iter())?;
    result.set_item("outcome_names", names)
}

fn write_services(result: &Bound<'_, PyDict>, outcome: &SimOutcome) -> PyResult<()> {
    let samples = || outcome.services.iter();
    let times = samples().map(|sample| seconds(sample.at_us));
    write(result, "service_at_s", "float64", times)?;
    let tokens = samples().flat_map(|sample| sample.priced_tokens.iter().copied());
    write(result, "priced_tokens", "float64", tokens)?;
    let device = samples().flat_map(|sample| sample.device_us.iter().map(|us| us / 1e6));
    write(result, "device_s", "float64", device)
}

fn write_columns<Row, Value: Plain>(
    result: &Bound<'_, PyDict>,
    dtype: &'static str,
    columns: &[Column<Row, Value>],
    rows: &[Row],
) -> PyResult<()> {
    for (name, value) in columns {
        write(result, name, dtype, rows.iter().map(value))?;
    }
    Ok(())
}

fn write<Value: Plain>(
    result: &Bound<'_, PyDict>,
    name: &str,
    dtype: &'static str,
    values: impl Iterator<Item = Value>,
) -> PyResult<()> {
    let values: Vec<Value> = values.collect();
    result.set_item(name, copied(result.py(), &values, (dtype, 1))?)
}

fn seconds(us: impl Into<Option<u64>>) -> f64 {
    us.into().map_or(f64::NAN, |us| us as f64 / 1e6)
}

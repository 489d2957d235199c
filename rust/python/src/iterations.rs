//! The last iterations, as the scheduler thread saw them: a ring of small records, and beside them, when
//! somebody asks, who sits in which row and who has waited longest.

use std::collections::VecDeque;

use chairlift_core::Engine;
use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::metrics::Metrics;
use chairlift_core::predict::iteration_time::StepShape;
use chairlift_core::request::Time;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::{Deserialize, Serialize};

use crate::numpy::{Plain, copied};

/// Iterations that are kept.
const KEPT: usize = 256;

/// One iteration whose results came back.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Record {
    step: u64,
    /// When it was committed.
    at: Time,
    duration_us: u64,
    decode_sequences: u32,
    prefill_sequences: u32,
    decode_tokens: u32,
    prefill_tokens: u32,
    /// Requests that finished by it.
    finished: u32,
    used_blocks: u32,
    /// Sequences that waited after it.
    waiting: u32,
    /// What its time depended on.
    shape: StepShape,
}

impl Record {
    /// The terms that its time depended on, in the order of the cost model.
    fn shape(&self) -> [f64; 6] {
        let shape = &self.shape;
        [
            shape.sequences,
            shape.tokens,
            shape.decode_context,
            shape.prefill_pairs,
            shape.samples,
            shape.copies,
        ]
    }
}

/// The ring.
#[derive(Default)]
pub struct Iterations {
    records: VecDeque<Record>,
    /// The core's counters after the last of them.
    finished: u64,
    device_us: u64,
}

impl Iterations {
    /// Keeps an iteration that was just committed; `metrics` are those after it.
    pub fn push(&mut self, metrics: &Metrics, plan: &StepPlan, now: Time) {
        if self.records.capacity() < KEPT {
            self.records.reserve_exact(KEPT);
        }
        if self.records.len() == KEPT {
            self.records.pop_front();
        }
        let decodes = plan.num_decodes as u32;
        self.records.push_back(Record {
            step: plan.step,
            at: now,
            duration_us: metrics.device_us - self.device_us,
            decode_sequences: decodes,
            prefill_sequences: plan.num_seqs() as u32 - decodes,
            decode_tokens: decodes,
            prefill_tokens: plan.num_tokens() as u32 - decodes,
            finished: (metrics.finished - self.finished) as u32,
            used_blocks: metrics.used_blocks as u32,
            waiting: metrics.waiting_sequences as u32,
            shape: plan.shape(),
        });
        self.finished = metrics.finished;
        self.device_us = metrics.device_us;
    }

    /// Those after step number `since`, and the engine as it is now.
    pub fn recent(&self, engine: &Engine, since: u64, now: Time) -> Recent {
        let begin = self.records.partition_point(|record| record.step <= since);
        let oldest = engine.oldest_waits();
        let seats = engine.seats();
        let classes = &engine.policy().classes;
        let seconds = |arrival: Time| now.since_us(arrival) as f64 / 1e6;
        let by_class = oldest.classes.iter();
        let by_tenant = oldest.tenants.iter();
        Recent {
            records: self.records.range(begin..).copied().collect(),
            row_classes: seats
                .iter()
                .map(|seat| seat.map_or(-1, |seat| seat.class.0 as i32))
                .collect(),
            row_decodes: seats
                .iter()
                .map(|seat| seat.is_some_and(|seat| seat.decodes).into())
                .collect(),
            classes: classes.iter().map(|class| class.name.clone()).collect(),
            oldest_by_class: by_class
                .map(|(class, &at)| (classes[class.0 as usize].name.clone(), seconds(at)))
                .collect(),
            oldest_by_tenant: by_tenant
                .map(|(&tenant, &at)| (tenant.to_owned(), seconds(at)))
                .collect(),
            now,
        }
    }
}

/// What one who looks is told.
#[derive(Serialize, Deserialize)]
pub struct Recent {
    records: Vec<Record>,
    /// By row: the number of the class, -1 where it is free, and whether output is written.
    row_classes: Vec<i32>,
    row_decodes: Vec<u8>,
    classes: Vec<String>,
    /// Seconds.
    oldest_by_class: Vec<(String, f64)>,
    oldest_by_tenant: Vec<(String, f64)>,
    now: Time,
}

impl Recent {
    /// As a dictionary of flat arrays: `I` iterations, `R` rows. Times are seconds on the engine's clock.
    pub fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let column = |name: &str, value: fn(&Record) -> u64| {
            let values: Vec<u64> = self.records.iter().map(value).collect();
            set(&dict, name, &values, "uint64")
        };
        column("step", |record| record.step)?;
        column("decode_sequences", |record| record.decode_sequences.into())?;
        column("prefill_sequences", |record| {
            record.prefill_sequences.into()
        })?;
        column("decode_tokens", |record| record.decode_tokens.into())?;
        column("prefill_tokens", |record| record.prefill_tokens.into())?;
        column("finished", |record| record.finished.into())?;
        column("used_blocks", |record| record.used_blocks.into())?;
        column("waiting", |record| record.waiting.into())?;
        let seconds = |name: &str, value: fn(&Record) -> u64| {
            let us = self.records.iter().map(value);
            let values: Vec<f64> = us.map(|us| us as f64 / 1e6).collect();
            set(&dict, name, &values, "float64")
        };
        seconds("time", |record| record.at.0)?;
        seconds("duration", |record| record.duration_us)?;
        let shapes: Vec<[f64; 6]> = self.records.iter().map(Record::shape).collect();
        dict.set_item("shape", copied(py, &shapes, ("float64", 6))?)?;
        set(&dict, "row_classes", &self.row_classes, "int32")?;
        set(&dict, "row_decodes", &self.row_decodes, "uint8")?;
        dict.set_item("classes", &self.classes)?;
        let oldest = [
            ("oldest_by_class", &self.oldest_by_class),
            ("oldest_by_tenant", &self.oldest_by_tenant),
        ];
        for (name, waits) in oldest {
            let by_name = PyDict::new(py);
            for (group, seconds) in waits {
                by_name.set_item(group, seconds)?;
            }
            dict.set_item(name, by_name)?;
        }
        dict.set_item("now", self.now.0 as f64 / 1e6)?;
        Ok(dict)
    }
}

fn set<T: Plain>(
    dict: &Bound<'_, PyDict>,
    name: &str,
    values: &[T],
    dtype: &'static str,
) -> PyResult<()> {
    dict.set_item(name, copied(dict.py(), values, (dtype, 1))?)
}

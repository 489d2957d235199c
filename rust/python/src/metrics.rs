//! What the engine can tell about itself: the core's counters and the times only the threads know.

use chairlift_core::metrics::{IterationMetrics, MemoryMetrics, Metrics, PaceMetrics};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::{Deserialize, Serialize};

use crate::groups::{rejections, sizes, times};

/// A snapshot.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct EngineMetrics {
    /// The core's counters and gauges.
    pub core: Metrics,
    /// What iterations were like.
    pub iterations: IterationMetrics,
    /// How well memory was foreseen.
    pub memory: MemoryMetrics,
    /// What they took of late.
    pub pace: PaceMetrics,
    /// Steps that came back from the executor, well or not.
    pub steps: u64,
    /// Steps that the executor failed.
    pub failed_steps: u64,
    /// Time from a plan's hand-over to its results, summed over the steps.
    pub step_us: u64,
    /// Gauge: how long the step in flight has been there, 0 if there is none.
    pub in_flight_us: u64,
    /// Time the scheduler spent on planning and committing, summed over the steps.
    pub scheduler_us: u64,
    /// Steps that were replayed as a CUDA graph.
    pub graph_steps: u64,
    /// Rows of those graphs, summed over the steps.
    pub graph_rows: u64,
    /// Those of them that were no sequence's.
    pub graph_padded_rows: u64,
}

impl EngineMetrics {
    /// Counts the graph of so many rows (0: there was none) that was replayed for a step.
    pub fn count_graph(&mut self, rows: u32, sequences: usize) {
        if rows > 0 {
            self.graph_steps += 1;
            self.graph_rows += u64::from(rows);
            self.graph_padded_rows += u64::from(rows).saturating_sub(sequences as u64);
        }
    }

    /// As a dictionary; names of times end in their unit, histograms are of seconds or of numbers.
    pub fn to_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let core = &self.core;
        let dict = PyDict::new(py);
        let entries = [
            ("submitted", core.submitted),
            ("rejected", core.rejected),
            ("expired", core.expired),
            ("deadline_missed", core.deadline_missed),
            ("shed", core.shed),
            ("displaced", core.displaced),
            ("finished", core.finished),
            ("aborted", core.aborted),
            ("failed", core.failed),
            ("iterations", core.iterations),
            ("scheduled_tokens", core.scheduled_tokens),
            ("prefill_tokens", self.iterations.prefill_tokens),
            ("decode_tokens", self.iterations.decode_tokens),
            ("scheduled_sequences", core.scheduled_sequences),
            ("output_tokens", core.output_tokens),
            ("prompt_tokens", core.prompt_tokens),
            ("cached_tokens", core.cached_tokens),
            ("preemptions", core.preemptions),
            ("recomputed_tokens", core.recomputed_tokens),
            ("offloaded_blocks", core.offloaded_blocks),
            ("restored_tokens", core.restored_tokens),
            ("backfilled", core.backfilled),
            ("forecast_slips", core.forecast_slips),
            ("live", core.live),
            ("queued", core.queued),
            ("queued_tokens", core.queued_tokens),
            ("waiting", core.waiting),
            ("waiting_sequences", core.waiting_sequences),
            ("running_sequences", core.running_sequences),
            ("free_blocks", core.free_blocks),
            ("used_blocks", core.used_blocks),
            ("cached_blocks", core.cached_blocks),
            ("host_free_blocks", core.host_free_blocks),
            ("host_used_blocks", core.host_used_blocks),
            ("host_cached_blocks", core.host_cached_blocks),
            ("device_us", core.device_us),
            ("steps", self.steps),
            ("failed_steps", self.failed_steps),
            ("step_us", self.step_us),
            ("in_flight_us", self.in_flight_us),
            ("scheduler_us", self.scheduler_us),
            ("graph_steps", self.graph_steps),
            ("graph_rows", self.graph_rows),
            ("graph_padded_rows", self.graph_padded_rows),
        ];
        for (name, value) in entries {
            dict.set_item(name, value)?;
        }
        let memory = &self.memory;
        dict.set_item("memory_lives", memory.ended)?;
        dict.set_item("memory_overflows", memory.overflowed)?;
        dict.set_item("memory_overflow", memory.overflow)?;
        dict.set_item("memory_overflow_target", memory.target)?;
        dict.set_item("memory_quantile", memory.quantile)?;
        dict.set_item("rejections", rejections(py, &core.rejections)?)?;
        dict.set_item("iteration_time", times(py, &self.iterations.time)?)?;
        dict.set_item(
            "iteration_sequences",
            sizes(py, &self.iterations.sequences)?,
        )?;
        dict.set_item("iteration_tokens", sizes(py, &self.iterations.tokens)?)?;
        dict.set_item("pace", pace(py, &self.pace)?)?;
        Ok(dict)
    }
}

/// Iterations of late: seconds and shares.
fn pace<'py>(py: Python<'py>, pace: &PaceMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let entries = [
        ("mean", pace.mean_us / 1e6),
        ("std", pace.std_us / 1e6),
        ("p50", pace.p50_us / 1e6),
        ("p95", pace.p95_us / 1e6),
        ("p99", pace.p99_us / 1e6),
        ("explained_share", pace.explained_share),
        ("prediction_error", pace.prediction_error),
        ("slowdown", pace.slowdown),
        ("p50_ratio", pace.p50_ratio),
        ("p95_ratio", pace.p95_ratio),
        ("gap", pace.gap_us / 1e6),
        ("idle", pace.idle_us as f64 / 1e6),
        ("padded_share", pace.padded_share),
    ];
    for (name, value) in entries {
        dict.set_item(name, value)?;
    }
    dict.set_item("padded_rows", pace.padded_rows)?;
    Ok(dict)
}

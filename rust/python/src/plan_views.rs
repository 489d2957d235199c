//! The executor's view of a plan: `chairlift.executor.StepPlan`, built from slices of standing arrays.
//!
//! Every fixed array is wrapped by numpy once, at full capacity. A step takes `[:n]` of it, and where
//! `n` is what it was in this plan set's last step, as in steady decode, even the slice is reused. Row
//! resets are rare and partly ragged without a bound: they are copied into fresh arrays, and a step
//! without resets shares one empty object.

use chairlift_core::iteration::plan::{RowResets, StepPlan};
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::numpy::{Kind, Plain, copied, wrapped};
use crate::plan_memory::PlanLease;
use crate::record::Record;

const I32: Kind = ("int32", 1);
const I64: Kind = ("int64", 1);
const U8: Kind = ("uint8", 1);
const U8_PAIRS: Kind = ("uint8", 2);
const F32: Kind = ("float32", 1);
const I32_PAIRS: Kind = ("int32", 2);
const F32_SIXES: Kind = ("float32", 6);
const I64_SIXES: Kind = ("int64", 6);

/// One array of one plan set.
struct View<'py> {
    kind: Kind,
    start: *const u8,
    whole: Bound<'py, PyAny>,
    len: usize,
    slice: Bound<'py, PyAny>,
}

impl<'py> View<'py> {
    fn new<T: Plain>(
        py: Python<'py>,
        lease: &PlanLease,
        vector: &Vec<T>,
        kind: Kind,
    ) -> PyResult<Self> {
        let exported = Bound::new(py, lease.export(vector))?;
        let whole = wrapped(exported.as_any(), kind)?;
        let slice = first(&whole, 0)?;
        Ok(Self {
            kind,
            start: vector.as_ptr().cast(),
            whole,
            len: 0,
            slice,
        })
    }

    /// The array's first `vector.len()` entries. A vector that moved (which the core promises not to
    /// let happen) is copied: what was exported is no longer its memory.
    fn of<T: Plain>(&mut self, vector: &[T]) -> PyResult<Bound<'py, PyAny>> {
        if vector.as_ptr().cast() != self.start {
            self.len = usize::MAX;
            self.slice = copied(self.whole.py(), vector, self.kind)?;
        } else if vector.len() != self.len {
            self.len = vector.len();
            self.slice = first(&self.whole, self.len)?;
        }
        Ok(self.slice.clone())
    }
}

/// The views of one plan set.
struct SetViews<'py> {
    rows: View<'py>,
    adapter_ids: View<'py>,
    query_start_loc: View<'py>,
    seq_lens: View<'py>,
    token_ids: View<'py>,
    token_sources: View<'py>,
    positions: View<'py>,
    slot_mapping: View<'py>,
    block_table_offsets: View<'py>,
    block_ids: View<'py>,
    logits_indices: View<'py>,
    sample_rows: View<'py>,
    sample_output_indices: View<'py>,
    mask_rows: View<'py>,
    score_indices: View<'py>,
    score_token_ids: View<'py>,
    score_num_best: View<'py>,
    block_copies: View<'py>,
    block_copy_locations: View<'py>,
}

impl<'py> SetViews<'py> {
    fn new(py: Python<'py>, lease: &PlanLease) -> PyResult<Self> {
        let plan = lease.plan();
        Ok(Self {
            rows: View::new(py, lease, &plan.rows, I32)?,
            adapter_ids: View::new(py, lease, &plan.adapter_ids, I32)?,
            query_start_loc: View::new(py, lease, &plan.query_start_loc, I32)?,
            seq_lens: View::new(py, lease, &plan.seq_lens, I32)?,
            token_ids: View::new(py, lease, &plan.token_ids, I32)?,
            token_sources: View::new(py, lease, &plan.token_sources, U8)?,
            positions: View::new(py, lease, &plan.positions, I32)?,
            slot_mapping: View::new(py, lease, &plan.slot_mapping, I64)?,
            block_table_offsets: View::new(py, lease, &plan.block_table_offsets, I32)?,
            block_ids: View::new(py, lease, &plan.block_ids, I32)?,
            logits_indices: View::new(py, lease, &plan.logits_indices, I32)?,
            sample_rows: View::new(py, lease, &plan.sample_rows, I32)?,
            sample_output_indices: View::new(py, lease, &plan.sample_output_indices, I32)?,
            mask_rows: View::new(py, lease, &plan.mask_rows, I32)?,
            score_indices: View::new(py, lease, &plan.score_indices, I32)?,
            score_token_ids: View::new(py, lease, &plan.score_token_ids, I32)?,
            score_num_best: View::new(py, lease, &plan.score_num_best, I32)?,
            block_copies: View::new(py, lease, &plan.block_copies, I32_PAIRS)?,
            block_copy_locations: View::new(py, lease, &plan.block_copy_locations, U8_PAIRS)?,
        })
    }

    /// A `StepPlan`: its fields in order.
    fn step_plan(
        &mut self,
        class: &Record<'py>,
        plan: &StepPlan,
        resets: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = resets.py();
        let num_prefills = plan.num_seqs() - plan.num_decodes;
        class.make(&[
            plan.step.into_pyobject(py)?.into_any(),
            plan.num_decodes.into_pyobject(py)?.into_any(),
            num_prefills.into_pyobject(py)?.into_any(),
            self.rows.of(&plan.rows)?,
            self.adapter_ids.of(&plan.adapter_ids)?,
            self.query_start_loc.of(&plan.query_start_loc)?,
            self.seq_lens.of(&plan.seq_lens)?,
            self.token_ids.of(&plan.token_ids)?,
            self.token_sources.of(&plan.token_sources)?,
            self.positions.of(&plan.positions)?,
            self.slot_mapping.of(&plan.slot_mapping)?,
            self.block_table_offsets.of(&plan.block_table_offsets)?,
            self.block_ids.of(&plan.block_ids)?,
            self.logits_indices.of(&plan.logits_indices)?,
            self.sample_rows.of(&plan.sample_rows)?,
            self.sample_output_indices.of(&plan.sample_output_indices)?,
            self.mask_rows.of(&plan.mask_rows)?,
            self.score_indices.of(&plan.score_indices)?,
            self.score_token_ids.of(&plan.score_token_ids)?,
            self.score_num_best.of(&plan.score_num_best)?,
            self.block_copies.of(&plan.block_copies)?,
            self.block_copy_locations.of(&plan.block_copy_locations)?,
            resets,
        ])
    }
}

/// The views of every plan set of the ring.
pub struct PlanViews<'py> {
    step_plan: Record<'py>,
    row_resets: Record<'py>,
    no_resets: Bound<'py, PyAny>,
    sets: Vec<Option<SetViews<'py>>>,
}

impl<'py> PlanViews<'py> {
    /// Looks up the Python side; the sets are wrapped when they first come by.
    pub fn new(py: Python<'py>, num_sets: usize) -> PyResult<Self> {
        let protocol = py.import("chairlift.executor")?;
        let row_resets = Record::new(protocol.getattr("RowResets")?)?;
        Ok(Self {
            step_plan: Record::new(protocol.getattr("StepPlan")?)?,
            no_resets: copied_resets(py, &row_resets, &RowResets::default())?,
            row_resets,
            sets: (0..num_sets).map(|_| None).collect(),
        })
    }

    /// The step plan as the executor gets it.
    pub fn step_plan(&mut self, lease: &PlanLease) -> PyResult<Bound<'py, PyAny>> {
        let py = self.no_resets.py();
        let plan = lease.plan();
        let resets = if plan.resets.rows.is_empty() {
            self.no_resets.clone()
        } else {
            copied_resets(py, &self.row_resets, &plan.resets)?
        };
        let set = &mut self.sets[lease.set];
        let views = match set {
            Some(views) => views,
            None => set.insert(SetViews::new(py, lease)?),
        };
        views.step_plan(&self.step_plan, plan, resets)
    }
}

/// A `RowResets` of fresh arrays: its fields in order.
fn copied_resets<'py>(
    py: Python<'py>,
    class: &Record<'py>,
    resets: &RowResets,
) -> PyResult<Bound<'py, PyAny>> {
    class.make(&[
        copied(py, &resets.rows, I32)?,
        copied(py, &resets.floats, F32_SIXES)?,
        copied(py, &resets.ints, I64_SIXES)?,
        copied(py, &resets.id_ranges, I32_PAIRS)?,
        copied(py, &resets.bias_ranges, I32_PAIRS)?,
        copied(py, &resets.suppressed_ranges, I32_PAIRS)?,
        copied(py, &resets.ids, I32)?,
        copied(py, &resets.bias_ids, I32)?,
        copied(py, &resets.bias_values, F32)?,
        copied(py, &resets.suppressed_ids, I32)?,
    ])
}

fn first<'py>(array: &Bound<'py, PyAny>, len: usize) -> PyResult<Bound<'py, PyAny>> {
    array.get_item(PySlice::new(array.py(), 0, len as isize, 1))
}

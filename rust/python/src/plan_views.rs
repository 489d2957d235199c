//! The executor's view of a plan: `chairlift.executor.StepPlan`, built from slices of standing arrays.
//!
//! Every fixed array is wrapped by numpy once, at full capacity. A step takes `[:n]` of it, and where
//! `n` is what it was in this plan set's last step, as in steady decode, even the slice is reused. Row
//! resets are rare and partly ragged without a bound: they are copied into fresh arrays, and a step
//! without resets shares one empty object.

use chairlift_core::iteration::plan::{RowResets, StepPlan};
use pyo3::prelude::*;
use pyo3::types::{PySlice, PyTuple};

use crate::plan_memory::{Plain, PlanLease};

/// What building views needs from Python, looked up once.
struct Tools<'py> {
    frombuffer: Bound<'py, PyAny>,
    step_plan: Bound<'py, PyAny>,
    row_resets: Bound<'py, PyAny>,
}

/// One array of one plan set.
struct View<'py> {
    start: *const u8,
    whole: Bound<'py, PyAny>,
    len: usize,
    slice: Bound<'py, PyAny>,
}

impl<'py> View<'py> {
    fn new<T: Plain>(
        tools: &Tools<'py>,
        lease: &PlanLease,
        vector: &Vec<T>,
        (dtype, columns): (&str, usize),
    ) -> PyResult<Self> {
        let py = tools.frombuffer.py();
        let exported = Bound::new(py, lease.export(vector))?;
        let whole = shaped(tools.frombuffer.call1((exported, dtype))?, columns)?;
        let slice = first(&whole, 0)?;
        Ok(Self {
            start: vector.as_ptr().cast(),
            whole,
            len: 0,
            slice,
        })
    }

    /// The array's first `vector.len()` entries. A vector that moved (which the core promises not to
    /// let happen) is copied: what was exported is no longer its memory.
    fn of<T: Plain>(
        &mut self,
        tools: &Tools<'py>,
        vector: &[T],
        kind: Kind,
    ) -> PyResult<&Bound<'py, PyAny>> {
        if vector.as_ptr().cast() != self.start {
            self.len = usize::MAX;
            self.slice = copied(tools, vector, kind)?;
        } else if vector.len() != self.len {
            self.len = vector.len();
            self.slice = first(&self.whole, self.len)?;
        }
        Ok(&self.slice)
    }
}

/// A dtype, and the columns of a row (1: a flat array).
type Kind = (&'static str, usize);
const I32: Kind = ("int32", 1);
const I64: Kind = ("int64", 1);
const U8: Kind = ("uint8", 1);
const F32: Kind = ("float32", 1);
const I32_PAIRS: Kind = ("int32", 2);
const F32_SIXES: Kind = ("float32", 6);
const I64_SIXES: Kind = ("int64", 6);

/// The views of one plan set.
struct SetViews<'py> {
    rows: View<'py>,
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
    block_copies: View<'py>,
}

/// The views of every plan set of the ring.
pub struct PlanViews<'py> {
    tools: Tools<'py>,
    sets: Vec<Option<SetViews<'py>>>,
    no_resets: Bound<'py, PyAny>,
}

impl<'py> PlanViews<'py> {
    /// Looks up the Python side; the sets are wrapped when they first come by.
    pub fn new(py: Python<'py>, num_sets: usize) -> PyResult<Self> {
        let protocol = py.import("chairlift.executor")?;
        let tools = Tools {
            frombuffer: py.import("numpy")?.getattr("frombuffer")?,
            step_plan: protocol.getattr("StepPlan")?,
            row_resets: protocol.getattr("RowResets")?,
        };
        let no_resets = row_resets(&tools, &RowResets::default())?;
        Ok(Self {
            tools,
            sets: (0..num_sets).map(|_| None).collect(),
            no_resets,
        })
    }

    /// The step plan as the executor gets it.
    pub fn step_plan(&mut self, lease: &PlanLease) -> PyResult<Bound<'py, PyAny>> {
        let tools = &self.tools;
        let plan = lease.plan();
        let set = &mut self.sets[lease.set];
        let views = match set {
            Some(views) => views,
            None => set.insert(SetViews::new(tools, lease)?),
        };
        let resets = if plan.resets.rows.is_empty() {
            self.no_resets.clone()
        } else {
            row_resets(tools, &plan.resets)?
        };
        views.step_plan(tools, plan, resets)
    }
}

impl<'py> SetViews<'py> {
    fn new(tools: &Tools<'py>, lease: &PlanLease) -> PyResult<Self> {
        let plan = lease.plan();
        Ok(Self {
            rows: View::new(tools, lease, &plan.rows, I32)?,
            query_start_loc: View::new(tools, lease, &plan.query_start_loc, I32)?,
            seq_lens: View::new(tools, lease, &plan.seq_lens, I32)?,
            token_ids: View::new(tools, lease, &plan.token_ids, I32)?,
            token_sources: View::new(tools, lease, &plan.token_sources, U8)?,
            positions: View::new(tools, lease, &plan.positions, I32)?,
            slot_mapping: View::new(tools, lease, &plan.slot_mapping, I64)?,
            block_table_offsets: View::new(tools, lease, &plan.block_table_offsets, I32)?,
            block_ids: View::new(tools, lease, &plan.block_ids, I32)?,
            logits_indices: View::new(tools, lease, &plan.logits_indices, I32)?,
            sample_rows: View::new(tools, lease, &plan.sample_rows, I32)?,
            sample_output_indices: View::new(tools, lease, &plan.sample_output_indices, I32)?,
            block_copies: View::new(tools, lease, &plan.block_copies, I32_PAIRS)?,
        })
    }

    /// Calls `StepPlan(...)` with its fields in order.
    fn step_plan(
        &mut self,
        tools: &Tools<'py>,
        plan: &StepPlan,
        resets: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = resets.py();
        let fields = [
            plan.step.into_pyobject(py)?.into_any(),
            plan.num_decodes.into_pyobject(py)?.into_any(),
            (plan.num_seqs() - plan.num_decodes)
                .into_pyobject(py)?
                .into_any(),
            self.rows.of(tools, &plan.rows, I32)?.clone(),
            self.query_start_loc
                .of(tools, &plan.query_start_loc, I32)?
                .clone(),
            self.seq_lens.of(tools, &plan.seq_lens, I32)?.clone(),
            self.token_ids.of(tools, &plan.token_ids, I32)?.clone(),
            self.token_sources
                .of(tools, &plan.token_sources, U8)?
                .clone(),
            self.positions.of(tools, &plan.positions, I32)?.clone(),
            self.slot_mapping
                .of(tools, &plan.slot_mapping, I64)?
                .clone(),
            self.block_table_offsets
                .of(tools, &plan.block_table_offsets, I32)?
                .clone(),
            self.block_ids.of(tools, &plan.block_ids, I32)?.clone(),
            self.logits_indices
                .of(tools, &plan.logits_indices, I32)?
                .clone(),
            self.sample_rows.of(tools, &plan.sample_rows, I32)?.clone(),
            self.sample_output_indices
                .of(tools, &plan.sample_output_indices, I32)?
                .clone(),
            self.block_copies
                .of(tools, &plan.block_copies, I32_PAIRS)?
                .clone(),
            resets,
        ];
        tools.step_plan.call1(PyTuple::new(py, fields)?)
    }
}

/// `RowResets(...)` of fresh arrays, its fields in order.
fn row_resets<'py>(tools: &Tools<'py>, resets: &RowResets) -> PyResult<Bound<'py, PyAny>> {
    let fields = [
        copied(tools, &resets.rows, I32)?,
        copied(tools, &resets.floats, F32_SIXES)?,
        copied(tools, &resets.ints, I64_SIXES)?,
        copied(tools, &resets.id_ranges, I32_PAIRS)?,
        copied(tools, &resets.bias_ranges, I32_PAIRS)?,
        copied(tools, &resets.suppressed_ranges, I32_PAIRS)?,
        copied(tools, &resets.ids, I32)?,
        copied(tools, &resets.bias_ids, I32)?,
        copied(tools, &resets.bias_values, F32)?,
        copied(tools, &resets.suppressed_ids, I32)?,
    ];
    tools
        .row_resets
        .call1(PyTuple::new(tools.row_resets.py(), fields)?)
}

/// A fresh, writable array with a copy of `values`.
fn copied<'py, T: Plain>(
    tools: &Tools<'py>,
    values: &[T],
    (dtype, columns): Kind,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tools.frombuffer.py();
    // SAFETY: `Plain` values are numbers without padding, so all their bytes are initialised.
    let bytes =
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    let bytes = pyo3::types::PyByteArray::new(py, bytes);
    shaped(tools.frombuffer.call1((bytes, dtype))?, columns)
}

fn shaped(flat: Bound<'_, PyAny>, columns: usize) -> PyResult<Bound<'_, PyAny>> {
    if columns == 1 {
        return Ok(flat);
    }
    flat.call_method1("reshape", (-1, columns))
}

fn first<'py>(array: &Bound<'py, PyAny>, len: usize) -> PyResult<Bound<'py, PyAny>> {
    array.get_item(PySlice::new(array.py(), 0, len as isize, 1))
}

//! Plan memory: step plans that Rust writes and Python reads, without a copy.
//!
//! A [`StepPlan`] is made of vectors whose capacity is fixed at start, so their memory never moves.
//! [`plan_sets`] makes the ring of plans; each is exported once through the buffer protocol
//! ([`PlanArray`]) and wrapped once by numpy (`plan_views.rs`).
//!
//! Two parties touch the memory, in turns: the scheduler thread through the only [`PlanLease`], and an
//! executor between `launch` and `collect`. The lease travels with the step by message, which orders
//! the turns. What Python still holds afterwards keeps the memory alive, never the right to its content.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use chairlift_core::config::Limits;
use chairlift_core::iteration::plan::StepPlan;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::numpy::Plain;

/// A plan whose memory outlives every view of it.
struct PlanCell(UnsafeCell<StepPlan>);

// SAFETY: the plan is reached only through its `PlanLease`, of which there is one; all other holders of
// the cell merely keep it alive.
unsafe impl Sync for PlanCell {}

/// The right to one plan. There is one lease per plan and it cannot be cloned, so holding it (or a
/// reference to it) is what makes access exclusive (or shared).
pub struct PlanLease {
    cell: Arc<PlanCell>,
    /// Which of the ring's plans this is.
    pub set: usize,
}

impl PlanLease {
    /// The plan, to read.
    pub fn plan(&self) -> &StepPlan {
        // SAFETY: this is the only lease of the cell, and it is borrowed.
        unsafe { &*self.cell.0.get() }
    }

    /// The plan, to write.
    pub fn plan_mut(&mut self) -> &mut StepPlan {
        // SAFETY: this is the only lease of the cell, and it is borrowed mutably.
        unsafe { &mut *self.cell.0.get() }
    }

    /// Exports one of the plan's vectors, from its first byte to the end of its capacity.
    ///
    /// `T` is a number or an array of numbers without padding.
    pub fn export<T: Plain>(&self, vector: &Vec<T>) -> PlanArray {
        PlanArray {
            owner: Arc::clone(&self.cell),
            start: vector.as_ptr().cast_mut().cast(),
            len_bytes: vector.capacity() * size_of::<T>(),
        }
    }
}

/// `count` empty plans that hold any step under `limits`.
pub fn plan_sets(limits: &Limits, count: usize) -> Vec<PlanLease> {
    (0..count)
        .map(|set| PlanLease {
            cell: Arc::new(PlanCell(UnsafeCell::new(zeroed_plan(limits)))),
            set,
        })
        .collect()
}

/// An empty plan whose whole capacity has been written once: the views show all of it, and memory that
/// was never written must not be read.
fn zeroed_plan(limits: &Limits) -> StepPlan {
    fn touch<T: Copy>(vector: &mut Vec<T>, zero: T) {
        vector.resize(vector.capacity(), zero);
        vector.clear();
    }
    let mut plan = StepPlan::new(limits);
    touch(&mut plan.rows, 0);
    touch(&mut plan.adapter_ids, 0);
    touch(&mut plan.query_start_loc, 0);
    touch(&mut plan.seq_lens, 0);
    touch(&mut plan.token_ids, 0);
    touch(&mut plan.token_sources, 0);
    touch(&mut plan.positions, 0);
    touch(&mut plan.slot_mapping, 0);
    touch(&mut plan.block_table_offsets, 0);
    touch(&mut plan.block_ids, 0);
    touch(&mut plan.logits_indices, 0);
    touch(&mut plan.sample_rows, 0);
    touch(&mut plan.sample_output_indices, 0);
    touch(&mut plan.mask_rows, 0);
    touch(&mut plan.score_indices, 0);
    touch(&mut plan.score_token_ids, 0);
    touch(&mut plan.score_num_best, 0);
    touch(&mut plan.block_copies, [0; 2]);
    touch(&mut plan.block_copy_locations, [0; 2]);
    plan
}

/// One plan array as Python sees it: bytes from the buffer protocol.
#[pyclass(frozen, module = "chairlift._core")]
pub struct PlanArray {
    owner: Arc<PlanCell>,
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: the pointer is only handed to the buffer protocol; the memory it points to lives as long as
// `owner`, and who may touch it when is the protocol described at the top.
unsafe impl Send for PlanArray {}
// SAFETY: as above; a shared `PlanArray` gives nothing but the pointer.
unsafe impl Sync for PlanArray {}

#[pymethods]
impl PlanArray {
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the buffer protocol's signature"
    )]
    /// Exports the memory as plain bytes. It is writable because torch warns about memory that is not.
    /// The executor protocol says that it must not be written; whatever reads it after a step
    /// (`step_result.rs`) takes it for foreign data.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let array = slf.get();
        // SAFETY: `view` comes from the interpreter. The memory stays where it is and alive as long as
        // `slf`, to which the view takes a reference: its vector was fully written by `zeroed_plan`, and
        // never grows (`plan_views.rs` compares the address before every use).
        let status = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                array.start.cast::<c_void>(),
                array.len_bytes as ffi::Py_ssize_t,
                0,
                flags,
            )
        };
        if status == -1 {
            return Err(PyErr::fetch(slf.py()));
        }
        debug_assert!(Arc::strong_count(&array.owner) > 0);
        Ok(())
    }
}

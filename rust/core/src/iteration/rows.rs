//! Rows: the stable places that running sequences have in the executor's per-sequence state.

use std::cell::RefCell;
use std::rc::Rc;

/// The free rows; clones share them.
#[derive(Clone)]
pub(crate) struct RowPool(Rc<RefCell<Vec<u32>>>);

impl RowPool {
    /// Rows `0..count`, all free.
    pub(crate) fn new(count: u32) -> Self {
        Self(Rc::new(RefCell::new((0..count).rev().collect())))
    }

    /// Rows that are free.
    pub(crate) fn num_free(&self) -> u32 {
        self.0.borrow().len() as u32
    }

    /// Takes a row.
    pub(crate) fn take(&self) -> Option<Row> {
        let index = self.0.borrow_mut().pop()?;
        Some(Row {
            pool: self.clone(),
            index,
        })
    }
}

/// A row that is taken; given back on drop.
pub(crate) struct Row {
    pool: RowPool,
    index: u32,
}

impl Row {
    /// Its number, as plans carry it.
    pub(crate) fn as_i32(&self) -> i32 {
        self.index as i32
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        self.pool.0.borrow_mut().push(self.index);
    }
}

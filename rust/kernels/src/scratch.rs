//! A thread's working memory for the kernels, kept between calls and aligned to cache lines.

use std::cell::RefCell;

use crate::simd::MAX_LANES;

/// Rounds a number of float32 up to whole lines.
pub(crate) fn padded(length: usize) -> usize {
    length.next_multiple_of(MAX_LANES)
}

/// A cache line of float32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; MAX_LANES]);

/// A thread's working memory; kept between calls.
pub(crate) struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// Lends the thread's scratch. Call it outside of `dispatch`: closures that the standard library
    /// calls are compiled without the vector instructions.
    pub(crate) fn with<R>(use_it: impl FnOnce(&mut Self) -> R) -> R {
        thread_local! {
            static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { lines: Vec::new() }) };
        }
        SCRATCH.with(|scratch| use_it(&mut scratch.borrow_mut()))
    }

    /// Room for one head.
    pub(crate) fn head(&mut self, dim: usize) -> &mut [f32] {
        &mut self.take([padded(dim)])[0][..dim]
    }

    /// Cuts the scratch into areas of these lengths, each a multiple of a line. Contents are left over
    /// from earlier calls.
    pub(crate) fn take<const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [f32]; N] {
        let lines = lengths.iter().sum::<usize>() / MAX_LANES;
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; MAX_LANES]));
        }
        // SAFETY: a line is 16 float32 without padding.
        let mut rest = unsafe {
            let first = self.lines.as_mut_ptr().cast::<f32>();
            std::slice::from_raw_parts_mut(first, self.lines.len() * MAX_LANES)
        };
        lengths.map(|length| {
            let (area, after) = std::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            area
        })
    }
}

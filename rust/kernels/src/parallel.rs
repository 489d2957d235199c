//! Running one closure on several threads at once.
//!
//! `PyTorch`'s operators run on OpenMP's thread pool, whose idle workers spin; a second pool would
//! fight them for the cores. So parallel regions run on that very pool when Python has told us where
//! its `GOMP_parallel` is ([`use_openmp`]), and otherwise on a small pool of parked threads. The
//! closures take their work from an atomic counter, so any number of threads, also one, is right.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// `void GOMP_parallel(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags)`.
type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, u32, u32);

static OPENMP: OnceLock<GompParallel> = OnceLock::new();

/// Runs later parallel regions on the OpenMP pool behind this `GOMP_parallel`.
///
/// Returns false when an earlier call has already chosen one.
///
/// # Safety
/// `gomp_parallel` is the address of that function, in a library that stays loaded.
pub unsafe fn use_openmp(gomp_parallel: usize) -> bool {
    // SAFETY: the caller vouches for the address and the signature.
    let function = unsafe { std::mem::transmute::<usize, GompParallel>(gomp_parallel) };
    OPENMP.set(function).is_ok()
}

/// Name of the pool that parallel regions run on.
pub fn pool_name() -> &'static str {
    if OPENMP.get().is_some() {
        "openmp"
    } else {
        "threads"
    }
}

/// Calls `body(item)` once for every `item < num_items`, on up to `threads` threads.
///
/// Items are started in rising order; put the long ones first.
pub fn for_each(threads: usize, num_items: usize, body: &(dyn Fn(usize) + Sync)) {
    let threads = threads.min(num_items);
    if threads <= 1 {
        (0..num_items).for_each(body);
        return;
    }
    let next = AtomicUsize::new(0);
    run(threads, &|| {
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= num_items {
                break;
            }
            body(item);
        }
    });
}

/// Runs `body` on up to `threads` threads at once and returns when all have finished.
///
/// A panic of any of them is resumed here.
fn run(threads: usize, body: &(dyn Fn() + Sync)) {
    let region = Region {
        body,
        panic: Mutex::new(None),
    };
    match OPENMP.get() {
        Some(parallel) => {
            let data = (&raw const region).cast_mut().cast();
            // SAFETY: `use_openmp` was given the right function; the region outlives the call, which
            // returns only when all threads have left `enter_region`.
            unsafe { parallel(enter_region, data, threads as u32, 0) };
        }
        None => Pool::global().run(threads, &|| region.enter()),
    }
    let panic = lock(&region.panic).take();
    if let Some(payload) = panic {
        resume_unwind(payload);
    }
}

struct Region<'a> {
    body: &'a (dyn Fn() + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Region<'_> {
    fn enter(&self) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(self.body)) {
            lock(&self.panic).get_or_insert(payload);
        }
    }
}

extern "C" fn enter_region(data: *mut c_void) {
    // SAFETY: `run` passes a region that lives until every thread has returned.
    unsafe { &*data.cast::<Region<'_>>() }.enter();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that sleep between parallel regions.
struct Pool {
    /// Held for a whole region: regions of different callers take turns.
    turn: Mutex<()>,
    state: Mutex<State>,
    wake: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct State {
    task: Option<Task>,
    /// Workers that may still join the region.
    open_places: usize,
    /// Workers inside the region.
    inside: usize,
    /// Workers ever started.
    workers: usize,
}

#[derive(Clone, Copy)]
struct Task(&'static (dyn Fn() + Sync));

impl Pool {
    fn global() -> &'static Self {
        static POOL: OnceLock<Pool> = OnceLock::new();
        POOL.get_or_init(|| Self {
            turn: Mutex::new(()),
            state: Mutex::new(State::default()),
            wake: Condvar::new(),
            done: Condvar::new(),
        })
    }

    fn run(&'static self, threads: usize, body: &(dyn Fn() + Sync)) {
        let _turn = lock(&self.turn);
        // SAFETY: only the lifetime changes; this function returns when no worker can hold the closure
        // any more (`task` taken back, `inside` zero).
        let task = Task(unsafe {
            std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(body)
        });
        {
            let mut state = lock(&self.state);
            state.task = Some(task);
            state.open_places = threads - 1;
            while state.workers < threads - 1 {
                let name = format!("chairlift-kernel-{}", state.workers);
                let worker = std::thread::Builder::new().name(name).spawn(|| self.work());
                if worker.is_err() {
                    break; // fewer threads are right too
                }
                state.workers += 1;
            }
        }
        self.wake.notify_all();
        body();
        let mut state = lock(&self.state);
        state.task = None;
        while state.inside > 0 {
            state = self
                .done
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            match state.task {
                Some(task) if state.open_places > 0 => {
                    state.open_places -= 1;
                    state.inside += 1;
                    drop(state);
                    (task.0)();
                    state = lock(&self.state);
                    state.inside -= 1;
                    if state.inside == 0 {
                        self.done.notify_one();
                    }
                }
                _ => {
                    state = self
                        .wake
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once() {
        for threads in [1, 2, 5] {
            for num_items in [0, 1, 7, 1000] {
                let counts: Vec<AtomicUsize> =
                    (0..num_items).map(|_| AtomicUsize::new(0)).collect();
                for_each(threads, num_items, &|item| {
                    counts[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let result = catch_unwind(|| {
            for_each(3, 100, &|item| assert!(item != 50, "item fifty"));
        });
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        for_each(3, 100, &|item| {
            sum.fetch_add(item, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }
}

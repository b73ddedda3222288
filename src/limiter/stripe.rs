//! What many threads change at once is kept several times, in stripes, and each thread keeps to its own:
//! else they would take its cache line from each other with every request.

use std::cell::Cell;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

const MOST: usize = 32;

/// As many as there are threads at work at once.
pub(super) fn stripes() -> usize {
    static STRIPES: LazyLock<usize> = LazyLock::new(|| {
        available_parallelism().map_or(1, |threads| threads.get().next_power_of_two().min(MOST))
    });
    *STRIPES
}

/// Which of so many is this thread's.
pub(super) fn mine(stripes: usize) -> usize {
    const NONE: usize = usize::MAX;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(NONE) };
    }
    if NUMBER.get() == NONE {
        NUMBER.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    NUMBER.get() % stripes
}

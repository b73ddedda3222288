//! Checks of the semaphore under schedulers that choose who runs next; run by `scripts/model-checks`.

#[cfg(slots_loom)]
mod exhaustive;
#[cfg(slots_shuttle)]
mod random;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::{Semaphore, Snapshot};

#[cfg(slots_loom)]
fn semaphore(capacity: i64, max_waiters: usize) -> Semaphore {
    Semaphore::builder(capacity).max_waiters(max_waiters).build().unwrap()
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// What holds at every instant, where all who may wait want at least `least`, and at most `started`
/// attempts have begun.
fn assert_sound(snapshot: &Snapshot, least: i64, started: u64) {
    let Snapshot { capacity, acquired, available, waiters, .. } = *snapshot;
    assert!((0..=capacity).contains(&acquired) && available == capacity - acquired, "{snapshot:?}");
    assert!(waiters == 0 || available < least, "{snapshot:?}");
    assert!(waiters == 0 || !snapshot.closed, "{snapshot:?}");
    assert!(counted(snapshot) <= started, "{snapshot:?} of {started}");
}

/// What holds once every attempt is over and every permit released.
fn assert_at_rest(semaphore: &Semaphore, started: u64) {
    let snapshot = semaphore.snapshot();
    assert_eq!((snapshot.acquired, snapshot.waiters), (0, 0), "{snapshot:?}");
    assert_eq!(counted(&snapshot), started, "{snapshot:?}");
}

fn counted(snapshot: &Snapshot) -> u64 {
    snapshot.admissions + snapshot.rejections + snapshot.cancellations + snapshot.waiters as u64
}

//! Runs one operation of the semaphore a number of times, for a count of its instructions.
//!
//! `instructions OPERATION TIMES`; see `scripts/model-checks`, which runs it under
//! callgrind and holds the counts against their budgets.

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use model_checks::semaphore::{Permit, Semaphore};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [operation, times] = arguments.as_slice() else { panic!("usage: instructions OPERATION TIMES") };
    let times: u32 = times.parse().expect("a number");
    let semaphore = Semaphore::builder(4).max_waiters(64).build().expect("valid settings");
    let semaphore = black_box(&semaphore);
    match operation.as_str() {
        "try" => (0..times).for_each(|_| drop(black_box(semaphore.try_acquire(1)))),
        "await" => (0..times).for_each(|_| drop(black_box(poll(&mut semaphore.acquire(1))))),
        "refusal" => {
            let _all = semaphore.try_acquire(4);
            (0..times).for_each(|_| drop(black_box(semaphore.try_acquire(1))));
        }
        "hand-over" => hand_over(semaphore, times),
        "cancel" => {
            let _all = semaphore.try_acquire(4);
            (0..times).for_each(|_| drop(black_box(poll(&mut semaphore.acquire(1)))));
        }
        other => panic!("unknown operation {other:?}"),
    }
}

/// Queue, release, collect: the weight goes from one to the next.
fn hand_over(semaphore: &Semaphore, times: u32) {
    let mut held: Option<Permit> = semaphore.try_acquire(4).expect("a valid weight");
    for _ in 0..times {
        let mut next = semaphore.acquire(4);
        assert!(poll(&mut next).is_pending());
        drop(held.take());
        held = match poll(&mut next) {
            Poll::Ready(permit) => permit.ok(),
            Poll::Pending => panic!("a release did not reach the next in line"),
        };
    }
}

//! Rules 32 to 34: the snapshot and its counters.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tokio::time::{Instant, advance};
use tower_slots::semaphore::{AcquireError, Snapshot};

use crate::support::*;

#[test]
fn rule_32_a_snapshot_tells_everything() {
    paused(async {
        for sem in both(5, 3) {
            let _held = hold(&sem, 3);
            let _also = hold(&sem, 1);
            let queued = queue(&sem, 2);
            drop(queue(&sem, 1));
            assert_unavailable(&sem, 1);
            assert_unavailable(&sem, 1);
            assert_unavailable(&sem, 1);
            let Snapshot {
                capacity,
                acquired,
                available,
                waiters,
                admissions,
                rejections,
                cancellations,
                closed,
                ..
            } = sem.snapshot();
            assert_eq!((capacity, acquired, available, waiters), (5, 4, 1, 1));
            assert_eq!((admissions, rejections, cancellations, closed), (2, 3, 1, false));
            drop(queued);
            sem.close();
            let after = sem.snapshot();
            assert!(after.closed);
            assert_eq!((after.waiters, after.cancellations), (0, 2));
            assert_eq!(after, sem.clone().snapshot());
        }
    });
}

#[test]
fn rule_32_a_snapshot_is_a_copy_that_stays() {
    let sem = plain(2, 0);
    let before = sem.snapshot();
    let copied = before;
    let _held = hold(&sem, 1);
    assert_eq!(before, copied);
    assert_ne!(before, sem.snapshot());
    fn is<T: Copy + Eq + std::fmt::Debug + Send + Sync>() {}
    is::<Snapshot>();
}

/// While others come and go, every snapshot is of one instant.
#[test]
fn rule_32_snapshots_under_load_add_up() {
    for sem in both(3, 8) {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            // Room for all of them: each is admitted at once.
            for weight in 1..=2 {
                let (sem, stop) = (&sem, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        drop(hold(sem, weight));
                    }
                });
            }
            // Refused always.
            let (refused, stopping) = (&sem, &stop);
            scope.spawn(move || {
                while !stopping.load(Ordering::Relaxed) {
                    assert_error!(refused.try_acquire(0), AcquireError::InvalidWeight { .. });
                }
            });
            let mut last = sem.snapshot();
            for _ in 0..if cfg!(debug_assertions) { 30_000 } else { 200_000 } {
                let at = sem.snapshot();
                line(at);
                assert_eq!((at.waiters, at.cancellations, at.closed), (0, 0, false));
                assert!(at.admissions >= last.admissions && at.rejections >= last.rejections);
                // Nothing is held without an admission.
                assert!(at.admissions > 0 || at.acquired == 0, "{at:?}");
                last = at;
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(sem.snapshot().acquired, 0);
    }
}

/// Two counters that have to move together: one is admitted for each that is held, and of those who
/// ask, each is admitted or refused.
#[test]
fn rule_32_what_is_acquired_matches_what_was_admitted() {
    const EACH: usize = 60_000;
    for sem in [plain(1_000_000, 0), plain(1 << 40, 0), recorded(1_000_000, 0)] {
        let (start, done) = (Barrier::new(3), AtomicBool::new(false));
        thread::scope(|scope| {
            let hands: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        let one = |_| sem.try_acquire(1).unwrap().unwrap();
                        (0..EACH).map(one).collect::<Vec<_>>()
                    })
                })
                .collect();
            let watching = scope.spawn(|| {
                start.wait();
                while !done.load(Ordering::Relaxed) {
                    let at = sem.snapshot();
                    assert_eq!((at.acquired as u64, at.rejections), (at.admissions, 0), "{at:?}");
                    assert_eq!(at.available, at.capacity - at.acquired);
                }
            });
            let permits: Vec<_> = hands.into_iter().map(|hand| hand.join().unwrap()).collect();
            done.store(true, Ordering::Relaxed);
            watching.join().unwrap();
            drop(permits);
        });
        assert_state(&sem, &format!("0/{} q0 a{} r0 c0", sem.capacity(), 2 * EACH));
    }
}

#[test]
fn rule_33_every_cause_counts_in_its_column() {
    paused(async {
        for sem in both(2, 2) {
            // Admissions: immediate, try, and from the queue.
            let immediate = hold(&sem, 1);
            assert_state(&sem, "1/2 q0 a1 r0 c0");
            let tried = sem.try_acquire(1).unwrap().unwrap();
            assert_state(&sem, "2/2 q0 a2 r0 c0");
            let mut queued = queue(&sem, 2);
            drop((immediate, tried));
            let held = queued.granted();
            assert_state(&sem, "2/2 q0 a3 r0 c0");
            // Rejections.
            assert_error!(now(&sem, 0), AcquireError::InvalidWeight { .. });
            assert_error!(sem.try_acquire(0), AcquireError::InvalidWeight { .. });
            assert_state(&sem, "2/2 q0 a3 r2 c0");
            assert_error!(now(&sem, 3), AcquireError::Oversize { .. });
            assert_error!(sem.try_acquire(3), AcquireError::Oversize { .. });
            assert_state(&sem, "2/2 q0 a3 r4 c0");
            assert_unavailable(&sem, 1);
            assert_state(&sem, "2/2 q0 a3 r5 c0");
            let (cancelled, mut late) =
                (queue(&sem, 1), Task::new(sem.acquire_timeout(1, SECOND).into_owned()));
            late.assert_pending();
            assert_error!(now(&sem, 1), AcquireError::QueueFull { .. });
            assert_state(&sem, "2/2 q2 a3 r6 c0");
            // Cancellations.
            drop(cancelled);
            assert_state(&sem, "2/2 q1 a3 r6 c1");
            advance(2 * SECOND).await;
            assert_error!(late.ready(), AcquireError::Deadline);
            assert_state(&sem, "2/2 q0 a3 r6 c2");
            assert_error!(
                Task::new(sem.acquire_timeout(1, Duration::ZERO).into_owned()).ready(),
                AcquireError::Deadline
            );
            assert_state(&sem, "2/2 q0 a3 r6 c3");
            assert!(sem.wait_idle_deadline(Instant::now() + MS).await.is_err());
            assert_state(&sem, "2/2 q0 a3 r6 c3");
            // And those of close.
            let (mut one, mut two) = (queue(&sem, 1), queue(&sem, 1));
            sem.close();
            assert_state(&sem, "2/2 q0 a3 r8 c3 closed");
            assert_error!(one.ready(), AcquireError::Closed);
            assert_error!(two.ready(), AcquireError::Closed);
            assert_error!(now(&sem, 1), AcquireError::Closed);
            assert_error!(sem.try_acquire(1), AcquireError::Closed);
            assert_state(&sem, "2/2 q0 a3 r10 c3 closed");
            drop(held);
            assert_state(&sem, "0/2 q0 a3 r10 c3 closed");
        }
    });
}

/// More of each than any packed counter of a few bits can hold.
#[test]
fn rule_33_counters_do_not_wrap() {
    const OFTEN: u64 = 70_000;
    for sem in both(2, 0) {
        for _ in 0..OFTEN {
            drop(sem.try_acquire(1).unwrap().unwrap());
        }
        assert_state(&sem, &format!("0/2 q0 a{OFTEN} r0 c0"));
        let held = hold(&sem, 2);
        for _ in 0..OFTEN {
            assert_unavailable(&sem, 1);
        }
        assert_state(&sem, &format!("2/2 q0 a{} r{OFTEN} c0", OFTEN + 1));
        assert_eq!(id(&held), OFTEN + 1);
        drop(held);
        for _ in 0..OFTEN {
            drop(hold(&sem, 1));
            assert_error!(now(&sem, 3), AcquireError::Oversize { .. });
        }
        assert_state(&sem, &format!("0/2 q0 a{} r{} c0", 2 * OFTEN + 1, 2 * OFTEN));
        assert_eq!(id(&hold(&sem, 1)), 2 * OFTEN + 2);
    }
}

/// A large capacity leaves least room for admissions beside it: 24 bits at the most.
#[test]
fn rule_33_ids_and_counters_go_on_where_the_word_is_full() {
    const MOST: u64 = 1 << 24;
    let sem = plain((1 << 32) - 1, 0);
    let mut last = 0;
    for _ in 0..MOST + 100 {
        let permit = sem.try_acquire(1 << 31).unwrap().unwrap();
        assert_eq!(id(&permit), last + 1);
        last += 1;
    }
    assert_state(&sem, &format!("0/{} q0 a{last} r0 c0", sem.capacity()));
}

#[test]
fn rule_34_worked_without_a_queue() {
    for sem in both(1, 0) {
        assert_error!(now(&sem, 0), AcquireError::InvalidWeight { .. });
        assert_error!(now(&sem, 2), AcquireError::Oversize { .. });
        let held = hold(&sem, 1);
        assert_unavailable(&sem, 1);
        assert_eq!(sem.snapshot().rejections, 3);
        sem.close();
        assert_error!(now(&sem, 1), AcquireError::Closed);
        assert_error!(sem.try_acquire(1), AcquireError::Closed);
        assert_state(&sem, "1/1 q0 a1 r5 c0 closed");
        drop(held);
    }
}

#[test]
fn rule_34_worked_with_a_queue_of_one() {
    for sem in both(1, 1) {
        let _held = hold(&sem, 1);
        let mut queued = queue(&sem, 1);
        sem.close();
        assert_error!(queued.ready(), AcquireError::Closed);
        assert_state(&sem, "1/1 q0 a1 r1 c0 closed");
    }
}

//! Rules 28 to 31: close, waiting until idle, and running an operation under a permit.

use std::future::{pending, poll_fn};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use futures_util::FutureExt;
use tokio::time::{Instant, advance};
use tower_slots::semaphore::{AcquireError, Semaphore};

use crate::support::*;

fn idle(sem: &Semaphore) -> Task<'_, ()> {
    Task::new(sem.wait_idle())
}

/// Whether it became idle in time.
fn idle_until(sem: &Semaphore, deadline: Instant) -> Task<'_, bool> {
    Task::new(async move { sem.wait_idle_deadline(deadline).await.is_ok() })
}

#[test]
fn rule_28_close_fails_everyone_from_the_head_then_says_so() {
    let sem = recorded(3, 4);
    let held = hold(&sem, 2);
    let mut tasks = [3, 1, 2].map(|weight| queue(&sem, weight));
    skip_events(&sem);
    assert!(!sem.is_closed());
    sem.close();
    assert!(sem.is_closed());
    assert_events(
        &sem,
        &[
            "rejected/closed #0 w3 | 2/3 q2 a1 r1 c0 closed",
            "rejected/closed #0 w1 | 2/3 q1 a1 r2 c0 closed",
            "rejected/closed #0 w2 | 2/3 q0 a1 r3 c0 closed",
            "closed/shutdown #0 w0 | 2/3 q0 a1 r3 c0 closed",
        ],
    );
    for task in &mut tasks {
        assert_eq!(task.wakes(), 1);
        assert_error!(task.ready(), AcquireError::Closed);
    }
    drop(tasks);
    drop(held);
    assert_events(&sem, &["released/released #1 w2 | 0/3 q0 a1 r3 c0 closed"]);
}

#[test]
fn rule_28_later_closes_do_nothing() {
    for sem in both(2, 2) {
        let _held = hold(&sem, 2);
        let _queued = queue(&sem, 1);
        sem.close();
        skip_events(&sem);
        for _ in 0..3 {
            sem.close();
            sem.clone().close();
        }
        assert_events(&sem, &[]);
        assert_state(&sem, "2/2 q0 a1 r1 c0 closed");
        assert!(sem.is_closed() && sem.clone().is_closed());
    }
}

#[test]
fn rule_28_an_idle_semaphore_closes_with_one_event() {
    let sem = recorded(2, 2);
    sem.close();
    assert_events(&sem, &["closed/shutdown #0 w0 | 0/2 q0 a0 r0 c0 closed"]);
}

#[test]
fn rule_29_permits_outlast_close_and_idling_is_not_woken_by_it() {
    for sem in both(3, 2) {
        let (one, two) = (hold(&sem, 1), hold(&sem, 2));
        let mut idle = idle(&sem);
        idle.assert_pending();
        let mut queued = queue(&sem, 1);
        sem.close();
        assert_eq!(idle.wakes(), 0);
        idle.assert_pending();
        assert_error!(queued.ready(), AcquireError::Closed);
        assert_state(&sem, "3/3 q0 a2 r1 c0 closed");
        drop(one);
        assert_state(&sem, "2/3 q0 a2 r1 c0 closed");
        assert_eq!(idle.wakes(), 0);
        drop(two);
        assert_state(&sem, "0/3 q0 a2 r1 c0 closed");
        assert_eq!(idle.wakes(), 1);
        idle.ready();
    }
}

#[test]
fn rule_30_idle_at_once_closed_or_not() {
    paused(async {
        for sem in both(2, 2) {
            for closed in [false, true] {
                if closed {
                    sem.close();
                }
                idle(&sem).ready();
                assert!(idle_until(&sem, Instant::now() + SECOND).ready());
                // Nothing was to be waited for.
                assert!(idle_until(&sem, Instant::now()).ready());
            }
            assert_state(&sem, "0/2 q0 a0 r0 c0 closed");
        }
    });
}

#[test]
fn rule_30_a_hand_over_is_not_idle() {
    for sem in both(1, 4) {
        let held = hold(&sem, 1);
        let (mut first, mut second) = (queue(&sem, 1), queue(&sem, 1));
        let mut idle = idle(&sem);
        idle.assert_pending();
        drop(held);
        idle.assert_pending();
        drop(first.granted());
        idle.assert_pending();
        let second = second.granted();
        assert_eq!(idle.wakes(), 0);
        drop(second);
        assert_eq!(idle.wakes(), 1);
        idle.ready();
    }
}

#[test]
fn rule_30_several_wait_and_all_are_told() {
    paused(async {
        for sem in both(2, 4) {
            let (one, other) = (hold(&sem, 1), hold(&sem, 1));
            let mut plain: Vec<_> = (0..4).map(|_| idle(&sem)).collect();
            let mut timed: Vec<_> = (0..4).map(|_| idle_until(&sem, Instant::now() + SECOND)).collect();
            let never_polled = idle(&sem);
            for task in &mut plain {
                task.assert_pending();
            }
            for task in &mut timed {
                task.assert_pending();
            }
            // Some stop waiting.
            drop(plain.remove(1));
            drop(timed.remove(2));
            drop(never_polled);
            drop(one);
            plain.iter_mut().for_each(Task::assert_pending);
            timed.iter_mut().for_each(Task::assert_pending);
            drop(other);
            for task in &mut plain {
                assert_eq!(task.wakes(), 1);
                task.ready();
            }
            assert!(timed.iter_mut().all(Task::ready));
        }
    });
}

#[test]
fn rule_30_a_drain_that_completed_stays_complete_for_those_who_waited() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            let mut idle_plain = idle(&sem);
            idle_plain.assert_pending();
            let mut timed = idle_until(&sem, Instant::now() + SECOND);
            timed.assert_pending();
            drop(held);
            // Taken again before they look, and late.
            let held = hold(&sem, 1);
            advance(2 * SECOND).await;
            idle_plain.ready();
            assert!(timed.ready(), "a drain that was complete in time");
            // Those who come now wait for the next one.
            let mut next = idle(&sem);
            next.assert_pending();
            drop(held);
            next.ready();
        }
    });
}

#[test]
fn rule_30_waiting_counts_nothing_and_emits_nothing() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            skip_events(&sem);
            let mut plain = idle(&sem);
            plain.assert_pending();
            let mut late = idle_until(&sem, Instant::now() + SECOND);
            late.assert_pending();
            assert!(!idle_until(&sem, Instant::now()).ready(), "a past deadline, and not idle");
            advance(SECOND - MS).await;
            late.assert_pending();
            advance(2 * MS).await;
            assert_eq!(late.wakes(), 1);
            assert!(!late.ready());
            assert_events(&sem, &[]);
            assert_state(&sem, "1/1 q0 a1 r0 c0");
            // A time-out of one disturbs no other.
            plain.assert_pending();
            drop(held);
            plain.ready();
            assert_state(&sem, "0/1 q0 a1 r0 c0");
        }
    });
}

#[test]
fn rule_30_a_deadline_of_idling_fails_as_deadline() {
    paused(async {
        let sem = plain(1, 0);
        let _held = hold(&sem, 1);
        let error = sem.wait_idle_deadline(Instant::now() + SECOND).await.unwrap_err();
        let text = error.to_string();
        let _: &(dyn std::error::Error + Send + Sync) = &error;
        assert_eq!(text, "the deadline passed while permits were held");
    });
}

#[test]
fn rule_30_a_cancellation_while_idling_does_not_end_it() {
    for sem in both(2, 4) {
        let held = hold(&sem, 1);
        let big = queue(&sem, 2);
        let mut small = queue(&sem, 1);
        let mut idle = idle(&sem);
        idle.assert_pending();
        drop(held);
        // The big one was granted; nobody polls it.
        small.assert_pending();
        drop(big);
        idle.assert_pending();
        drop(small.granted());
        idle.ready();
        assert_state(&sem, "0/2 q0 a3 r0 c0");
    }
}

#[test]
fn rule_31_an_operation_runs_under_a_permit() {
    for sem in both(3, 1) {
        let inside = sem.clone();
        let value = block_on(sem.execute(2, async move {
            assert_state(&inside, "2/3 q0 a1 r0 c0");
            "done"
        }));
        assert_eq!(value.unwrap(), "done");
        assert_state(&sem, "0/3 q0 a1 r0 c0");
        // An error of the operation is its output like any other.
        let value = block_on(sem.execute(3, async { Err::<(), _>("failed") }));
        assert_eq!(value.unwrap(), Err("failed"));
        assert_state(&sem, "0/3 q0 a2 r0 c0");
    }
    let sem = recorded(3, 1);
    block_on(sem.execute(2, async {})).unwrap();
    assert_events(
        &sem,
        &["admitted/immediate #1 w2 | 2/3 q0 a1 r0 c0", "released/released #1 w2 | 0/3 q0 a1 r0 c0"],
    );
}

#[test]
fn rule_31_an_operation_is_never_called_without_a_permit() {
    for sem in both(3, 0) {
        let polled = Arc::new(AtomicUsize::new(0));
        let operation = || {
            let polled = polled.clone();
            async move { polled.fetch_add(1, Ordering::SeqCst) }
        };
        assert_error!(block_on(sem.execute(0, operation())), AcquireError::InvalidWeight { .. });
        assert_error!(block_on(sem.execute(4, operation())), AcquireError::Oversize { .. });
        let held = hold(&sem, 3);
        assert_error!(block_on(sem.execute(1, operation())), AcquireError::QueueFull { .. });
        sem.close();
        assert_error!(block_on(sem.execute(1, operation())), AcquireError::Closed);
        drop(held);
        assert_eq!(polled.load(Ordering::SeqCst), 0);
        assert_state(&sem, "0/3 q0 a1 r4 c0 closed");
    }
}

#[test]
fn rule_31_an_operation_waits_for_its_turn() {
    for sem in both(1, 1) {
        let held = hold(&sem, 1);
        let polled = Arc::new(AtomicUsize::new(0));
        let counting = polled.clone();
        let running = sem.clone();
        let mut task = Task::new(async move {
            running.execute(1, async move { counting.fetch_add(1, Ordering::SeqCst) }).await
        });
        task.assert_pending();
        task.assert_pending();
        assert_eq!(polled.load(Ordering::SeqCst), 0);
        assert_state(&sem, "1/1 q1 a1 r0 c0");
        drop(held);
        assert_eq!(task.ready().unwrap(), 0);
        assert_state(&sem, "0/1 q0 a2 r0 c0");
    }
}

#[test]
fn rule_31_a_panic_goes_on_after_the_release() {
    for sem in both(1, 1) {
        let mut next = None;
        let outcome = block_on(
            AssertUnwindSafe(async {
                sem.execute(1, async {
                    next = Some(queue(&sem, 1));
                    std::panic::resume_unwind(Box::new("the operation"));
                })
                .await
            })
            .catch_unwind(),
        );
        let panic = outcome.map(|_: Result<(), _>| ()).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"the operation"));
        // It was released before, so the next one has it.
        assert_state(&sem, "1/1 q0 a2 r0 c0");
        drop(next.unwrap().granted());
    }
}

#[test]
fn rule_31_an_operation_that_is_dropped_halfway_releases() {
    for sem in both(1, 1) {
        let polled = Arc::new(AtomicUsize::new(0));
        let (running, counting) = (sem.clone(), polled.clone());
        let mut task = Task::new(async move {
            let operation = poll_fn(move |_| {
                counting.fetch_add(1, Ordering::SeqCst);
                Poll::<()>::Pending
            });
            running.execute(1, operation).await
        });
        task.assert_pending();
        task.assert_pending();
        assert_eq!(polled.load(Ordering::SeqCst), 2);
        assert_state(&sem, "1/1 q0 a1 r0 c0");
        drop(task);
        assert_state(&sem, "0/1 q0 a1 r0 c0");
        // And one that was still waiting leaves the queue.
        let held = hold(&sem, 1);
        let running = sem.clone();
        let mut task = Task::new(async move { running.execute(1, pending::<()>()).await });
        task.assert_pending();
        drop(task);
        assert_state(&sem, "1/1 q0 a2 r0 c1");
        drop(held);
    }
}

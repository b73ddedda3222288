//! What has been seen in other semaphores, and does not happen here.

use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::thread;
use std::time::Duration;

use tower_slots::semaphore::{AcquireError, Permit, Semaphore, SharedPermit};

use crate::support::*;

/// Elsewhere `acquire(5)` of 4 waits for ever, and nobody else gets anything.
#[test]
fn others_an_oversize_weight_wedges_an_idle_semaphore() {
    for sem in both(4, 8) {
        assert_error!(now(&sem, 5), AcquireError::Oversize { weight: 5, capacity: 4, .. });
        drop(hold(&sem, 4));
        drop(sem.try_acquire(4).unwrap().unwrap());
        assert_state(&sem, "0/4 q0 a2 r1 c0");
    }
}

/// Elsewhere the one that fits, once a big head has gone, is never woken.
#[test]
fn others_a_cancelled_big_head_leaves_its_followers_asleep() {
    for sem in both(4, 8) {
        let held = hold(&sem, 1);
        let big = queue(&sem, 4);
        let mut followers = [queue(&sem, 2), queue(&sem, 1)];
        drop(big);
        assert_eq!(followers.each_ref().map(Task::wakes), [1, 1]);
        let permits = followers.each_mut().map(Task::granted);
        assert_state(&sem, "4/4 q0 a3 r0 c1");
        drop((held, permits));
    }
}

/// Releases a permit as it is woken.
struct Releasing(Mutex<Option<SharedPermit>>);

impl Wake for Releasing {
    fn wake(self: Arc<Self>) {
        let permit = self.0.lock().unwrap().take();
        drop(permit);
    }
}

/// Elsewhere a waker that releases a permit waits for the lock that its caller holds.
#[test]
fn others_a_waker_that_releases_is_stuck() {
    within(Duration::from_secs(20), || {
        for sem in both(3, 8) {
            let (one, two) = (hold(&sem, 1), hold(&sem, 2));
            let releasing = Releasing(Mutex::new(Some(two.into_shared())));
            let waker = Waker::from(Arc::new(releasing));
            let mut first = Task::new(sem.acquire(1).into_owned());
            assert!(first.poll_with(&waker).is_pending());
            let mut second = queue(&sem, 2);
            drop(one);
            // The release of one woke the first, which released two for the second.
            let permits = (first.granted(), second.granted());
            assert_state(&sem, "3/3 q0 a4 r0 c0");
            drop(permits);
        }
    });
}

/// Elsewhere `try_acquire` takes what somebody was woken for and did not pick up yet.
#[test]
fn others_a_try_steals_from_a_woken_waiter() {
    for sem in both(1, 8) {
        for _ in 0..1000 {
            let held = hold(&sem, 1);
            let mut waiting = queue(&sem, 1);
            drop(held);
            assert_eq!(waiting.wakes(), 1);
            assert_unavailable(&sem, 1);
            drop(waiting.granted());
        }
        assert_eq!(sem.snapshot().rejections, 1000);
    }
    // And by another thread that tries all the time: nobody is passed.
    let sem = plain(1, 8);
    thread::scope(|scope| {
        let trying = scope.spawn(|| {
            let mut taken = 0_u32;
            while !sem.is_closed() {
                taken += u32::from(sem.try_acquire(1).is_ok_and(|permit| permit.is_some()));
            }
            taken
        });
        for _ in 0..500 {
            let held = block_on(sem.acquire(1)).unwrap();
            let mut waiting = queue(&sem, 1);
            let next = id(&held) + 1;
            drop(held);
            thread::yield_now();
            // It is the very next admission.
            let permit = waiting.granted();
            assert_eq!(id(&permit), next);
        }
        sem.close();
        trying.join().unwrap();
    });
}

/// Elsewhere what was granted is lost when it is closed before the poll.
#[test]
fn others_a_grant_is_lost_to_a_close() {
    for sem in both(1, 8) {
        let held = hold(&sem, 1);
        let mut waiting = queue(&sem, 1);
        drop(held);
        sem.close();
        let permit = waiting.granted();
        assert_eq!(id(&permit), 2);
        assert_state(&sem, "1/1 q0 a2 r0 c0 closed");
    }
}

/// Elsewhere a head that waits for two takes the one that is free, and `available` says 0.
#[test]
fn others_a_head_parks_what_is_free() {
    for sem in both(3, 8) {
        let held = hold(&sem, 2);
        let head = queue(&sem, 2);
        let at = sem.snapshot();
        assert_eq!((at.available, at.acquired, at.waiters), (1, 2, 1));
        drop(head);
        // Nothing was parked: the one is free at once.
        drop(hold(&sem, 1));
        drop(held);
        assert_eq!(sem.snapshot().available, 3);
    }
}

/// Elsewhere a weight of nothing passes whoever waits.
#[test]
fn others_a_weight_of_nothing_passes_the_queue() {
    for sem in both(1, 8) {
        let _held = hold(&sem, 1);
        let _waiting = queue(&sem, 1);
        assert_error!(now(&sem, 0), AcquireError::InvalidWeight { weight: 0, .. });
        assert_error!(sem.try_acquire(0), AcquireError::InvalidWeight { weight: 0, .. });
        assert_state(&sem, "1/1 q1 a1 r2 c0");
    }
}

/// The same as elsewhere, by contract: a future that was granted holds its weight, polled or not.
/// Dropping it gives it on.
#[test]
fn others_a_granted_future_that_nobody_polls_holds_its_weight() {
    for sem in both(1, 8) {
        let held = hold(&sem, 1);
        // Two in one task, which waits for the second.
        let (first, mut second) = (queue(&sem, 1), queue(&sem, 1));
        drop(held);
        second.assert_pending();
        assert_state(&sem, "1/1 q1 a2 r0 c0");
        drop(first);
        assert_eq!(second.wakes(), 1);
        drop(second.granted());
        assert_state(&sem, "0/1 q0 a3 r0 c0");
    }
}

/// All of it together, on one semaphore that is used for long.
#[test]
fn others_nothing_wears_out() {
    for sem in both(2, 3) {
        let mut random = fastrand::Rng::with_seed(8);
        let mut permits: Vec<Permit> = Vec::new();
        let mut waiting: Vec<Waiting> = Vec::new();
        for _ in 0..20_000 {
            match random.u8(..5) {
                0 | 1 => {
                    let mut task = Task::new(sem.acquire(random.i64(1..=2)).into_owned());
                    match task.poll() {
                        std::task::Poll::Ready(Ok(permit)) => permits.push(permit),
                        std::task::Poll::Ready(Err(_)) => {}
                        std::task::Poll::Pending => waiting.push(task),
                    }
                }
                2 if !waiting.is_empty() => drop(waiting.swap_remove(random.usize(..waiting.len()))),
                _ if !permits.is_empty() => drop(permits.swap_remove(random.usize(..permits.len()))),
                _ => {}
            }
            waiting.retain_mut(|task| match task.poll() {
                std::task::Poll::Ready(permit) => {
                    permits.push(permit.unwrap());
                    false
                }
                std::task::Poll::Pending => true,
            });
            let at = sem.snapshot();
            assert_eq!(at.acquired, permits.iter().map(Permit::weight).sum::<i64>());
            assert_eq!(at.waiters, waiting.len());
        }
        drop((waiting, permits));
        usable(&sem);
    }
}

fn usable(sem: &Semaphore) {
    let capacity = sem.capacity();
    drop(sem.try_acquire(capacity).unwrap().unwrap());
    assert_eq!((sem.snapshot().acquired, sem.snapshot().waiters), (0, 0));
}

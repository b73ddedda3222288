//! Rules 6 to 15: what decides an `acquire` and a `try_acquire`.

use std::time::Duration;

use tokio::time::{Instant, advance};
use tower_slots::semaphore::{AcquireError, AcquireErrorKind};

use crate::support::*;

const INVALID: [i64; 3] = [0, -1, i64::MIN];

#[test]
fn rule_06_a_weight_that_is_not_positive_is_invalid() {
    for weight in INVALID {
        for sem in both(2, 1) {
            assert_error!(now(&sem, weight), AcquireError::InvalidWeight { weight: given, .. } if given == weight);
            assert_state(&sem, "0/2 q0 a0 r1 c0");
        }
        let sem = recorded(2, 0);
        let _held = hold(&sem, 2);
        skip_events(&sem);
        assert_error!(now(&sem, weight), AcquireError::InvalidWeight { .. });
        assert_events(&sem, &[&format!("rejected/invalid_weight #0 w{weight} | 2/2 q0 a1 r1 c0")]);
        sem.close();
        assert_error!(now(&sem, weight), AcquireError::InvalidWeight { .. });
        assert_state(&sem, "2/2 q0 a1 r2 c0 closed");
    }
}

#[test]
fn rule_06_the_weight_check_beats_a_past_deadline() {
    paused(async {
        for sem in both(2, 1) {
            advance(SECOND).await;
            let mut task = Task::new(sem.acquire_deadline(0, Instant::now() - MS).into_owned());
            assert_error!(task.ready(), AcquireError::InvalidWeight { weight: 0, .. });
            assert_error!(
                Task::new(sem.acquire_timeout(-3, Duration::ZERO).into_owned()).ready(),
                AcquireError::InvalidWeight { weight: -3, .. }
            );
            assert_state(&sem, "0/2 q0 a0 r2 c0");
        }
    });
}

#[test]
fn rule_07_a_weight_above_the_capacity_is_refused_at_once() {
    for (capacity, weights) in [(1, vec![2, i64::MAX]), (4, vec![5, 1 << 44]), (i64::MAX - 1, vec![i64::MAX])]
    {
        for weight in weights {
            for sem in both(capacity, 4) {
                assert_error!(
                    now(&sem, weight),
                    AcquireError::Oversize { weight: given, capacity: of, .. } if (given, of) == (weight, capacity)
                );
                assert_state(&sem, &format!("0/{capacity} q0 a0 r1 c0"));
            }
        }
    }
    let sem = recorded(4, 1);
    let _held = hold(&sem, 4);
    let _queued = queue(&sem, 1);
    skip_events(&sem);
    assert_error!(now(&sem, 5), AcquireError::Oversize { .. });
    assert_events(&sem, &["rejected/oversize #0 w5 | 4/4 q1 a1 r1 c0"]);
}

#[test]
fn rule_07_the_weight_check_beats_closed_and_a_past_deadline() {
    paused(async {
        for sem in both(4, 1) {
            sem.close();
            assert_error!(now(&sem, 5), AcquireError::Oversize { weight: 5, capacity: 4, .. });
            let mut late = Task::new(sem.acquire_timeout(5, Duration::ZERO).into_owned());
            assert_error!(late.ready(), AcquireError::Oversize { weight: 5, capacity: 4, .. });
            assert_state(&sem, "0/4 q0 a0 r2 c0 closed");
        }
    });
}

#[test]
fn rule_08_a_past_deadline_is_a_cancellation_though_capacity_is_free() {
    paused(async {
        for sem in both(4, 1) {
            advance(SECOND).await;
            for deadline in [Instant::now(), Instant::now() - MS, Instant::now() - SECOND] {
                assert_error!(
                    Task::new(sem.acquire_deadline(1, deadline).into_owned()).ready(),
                    AcquireError::Deadline
                );
            }
            assert_error!(
                Task::new(sem.acquire_timeout(1, Duration::ZERO).into_owned()).ready(),
                AcquireError::Deadline
            );
            assert_state(&sem, "0/4 q0 a0 r0 c4");
        }
        let sem = recorded(4, 1);
        assert_error!(
            Task::new(sem.acquire_timeout(3, Duration::ZERO).into_owned()).ready(),
            AcquireError::Deadline
        );
        assert_events(&sem, &["canceled/deadline #0 w3 | 0/4 q0 a0 r0 c1"]);
    });
}

#[test]
fn rule_08_a_past_deadline_beats_closed_and_a_full_queue() {
    paused(async {
        for sem in both(1, 1) {
            let held = hold(&sem, 1);
            let mut queued = queue(&sem, 1);
            assert_error!(
                Task::new(sem.acquire_timeout(1, Duration::ZERO).into_owned()).ready(),
                AcquireError::Deadline
            );
            assert_state(&sem, "1/1 q1 a1 r0 c1");
            sem.close();
            assert_error!(
                Task::new(sem.acquire_timeout(1, Duration::ZERO).into_owned()).ready(),
                AcquireError::Deadline
            );
            assert_state(&sem, "1/1 q0 a1 r1 c2 closed");
            assert_error!(queued.ready(), AcquireError::Closed);
            drop(held);
        }
    });
}

#[test]
fn rule_08_the_deadline_is_measured_at_the_first_poll() {
    paused(async {
        for sem in both(1, 1) {
            let mut task = Task::new(sem.acquire_deadline(1, Instant::now() + SECOND).into_owned());
            advance(2 * SECOND).await;
            assert_error!(task.ready(), AcquireError::Deadline);
            assert_state(&sem, "0/1 q0 a0 r0 c1");
        }
    });
}

#[test]
fn rule_08_a_deadline_ahead_does_not_disturb() {
    paused(async {
        for sem in both(4, 1) {
            for far in [MS, SECOND, Duration::MAX] {
                drop(Task::new(sem.acquire_timeout(1, far).into_owned()).granted());
            }
            drop(Task::new(sem.acquire_deadline(1, Instant::now() + SECOND).into_owned()).granted());
            assert_state(&sem, "0/4 q0 a4 r0 c0");
            let _held = hold(&sem, 4);
            let mut queued = Task::new(sem.acquire_timeout(1, Duration::MAX).into_owned());
            queued.assert_pending();
            advance(Duration::from_secs(86_400 * 365)).await;
            queued.assert_pending();
            assert_state(&sem, "4/4 q1 a5 r0 c0");
        }
    });
}

#[test]
fn rule_09_closed_refuses() {
    for sem in both(2, 0) {
        let held = hold(&sem, 1);
        sem.close();
        // Closed beats the room that is there, and the room that is not.
        for weight in [1, 2] {
            assert_error!(now(&sem, weight), AcquireError::Closed);
        }
        assert_state(&sem, "1/2 q0 a1 r2 c0 closed");
        drop(held);
        assert_error!(now(&sem, 1), AcquireError::Closed);
        assert_state(&sem, "0/2 q0 a1 r3 c0 closed");
    }
    let sem = recorded(2, 0);
    sem.close();
    skip_events(&sem);
    assert_error!(now(&sem, 2), AcquireError::Closed);
    assert_events(&sem, &["rejected/closed #0 w2 | 0/2 q0 a0 r1 c0 closed"]);
}

#[test]
fn rule_09_a_deadline_ahead_meets_closed() {
    paused(async {
        for sem in both(2, 1) {
            sem.close();
            assert_error!(
                Task::new(sem.acquire_timeout(1, SECOND).into_owned()).ready(),
                AcquireError::Closed
            );
            assert_error!(
                Task::new(sem.acquire_deadline(1, Instant::now() + SECOND).into_owned()).ready(),
                AcquireError::Closed
            );
            assert_state(&sem, "0/2 q0 a0 r2 c0 closed");
        }
    });
}

#[test]
fn rule_10_what_fits_is_admitted_at_once() {
    for sem in both(4, 2) {
        let three = hold(&sem, 3);
        assert_state(&sem, "3/4 q0 a1 r0 c0");
        let one = hold(&sem, 1);
        assert_state(&sem, "4/4 q0 a2 r0 c0");
        drop(three);
        let other = hold(&sem, 2);
        assert_state(&sem, "3/4 q0 a3 r0 c0");
        drop((one, other));
    }
    let sem = recorded(4, 2);
    let _three = hold(&sem, 3);
    let _one = hold(&sem, 1);
    assert_events(
        &sem,
        &["admitted/immediate #1 w3 | 3/4 q0 a1 r0 c0", "admitted/immediate #2 w1 | 4/4 q0 a2 r0 c0"],
    );
}

#[test]
fn rule_10_nothing_overflows_at_the_ends_of_the_range() {
    const MAX: i64 = i64::MAX;
    for sem in both(MAX, 4) {
        let all = hold(&sem, MAX);
        assert_state(&sem, &format!("{MAX}/{MAX} q0 a1 r0 c0"));
        assert_unavailable(&sem, MAX);
        let mut whole = queue(&sem, MAX);
        let mut one = queue(&sem, 1);
        drop(all);
        let whole = whole.granted();
        one.assert_pending();
        assert_state(&sem, &format!("{MAX}/{MAX} q1 a2 r1 c0"));
        drop(whole);
        let one = one.granted();
        assert_unavailable(&sem, MAX);
        let rest = hold(&sem, MAX - 1);
        assert_unavailable(&sem, 1);
        drop((one, rest));
        assert_state(&sem, &format!("0/{MAX} q0 a4 r3 c0"));
    }
}

#[test]
fn rule_10_capacities_round_the_packed_bound_behave_alike() {
    for capacity in
        [(1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 44) - 2, (1 << 44) - 1, 1 << 44, (1 << 44) + 1, 1 << 62]
    {
        for sem in both(capacity, 4) {
            assert_error!(now(&sem, capacity + 1), AcquireError::Oversize { .. });
            let most = hold(&sem, capacity - 1);
            assert_unavailable(&sem, 2);
            let one = sem.try_acquire(1).unwrap().unwrap();
            let mut queued = queue(&sem, capacity);
            drop(one);
            assert_unavailable(&sem, 1);
            queued.assert_pending();
            drop(most);
            drop(queued.granted());
            assert_state(&sem, &format!("0/{capacity} q0 a3 r3 c0"));
        }
    }
}

#[test]
fn rule_11_a_full_queue_refuses_with_its_limit() {
    for sem in both(2, 2) {
        let held = hold(&sem, 1);
        let first = queue(&sem, 2);
        let _second = queue(&sem, 2);
        // Also what would fit.
        for weight in [1, 2] {
            assert_error!(now(&sem, weight), AcquireError::QueueFull { limit: 2, .. });
        }
        assert_state(&sem, "1/2 q2 a1 r2 c0");
        // A place that becomes free is used again.
        drop(first);
        let _third = queue(&sem, 1);
        assert_error!(now(&sem, 1), AcquireError::QueueFull { limit: 2, .. });
        assert_state(&sem, "1/2 q2 a1 r3 c1");
        drop(held);
    }
    let sem = recorded(1, 1);
    let _held = hold(&sem, 1);
    let _queued = queue(&sem, 1);
    skip_events(&sem);
    assert_error!(now(&sem, 1), AcquireError::QueueFull { limit: 1, .. });
    assert_events(&sem, &["rejected/queue_full #0 w1 | 1/1 q1 a1 r1 c0"]);
}

#[test]
fn rule_11_a_queue_holds_as_many_as_it_was_told() {
    const LIMIT: usize = 50_000;
    for sem in both(1, LIMIT) {
        let held = hold(&sem, 1);
        let waiting: Vec<_> = (0..LIMIT)
            .map(|_| {
                let mut task = Task::new(sem.acquire(1).into_owned());
                task.assert_pending();
                task
            })
            .collect();
        assert_error!(now(&sem, 1), AcquireError::QueueFull { limit: LIMIT, .. });
        assert_state(&sem, &format!("1/1 q{LIMIT} a1 r1 c0"));
        drop(held);
        // Each is granted as the one before it goes away.
        for mut task in waiting {
            drop(task.granted());
        }
        assert_state(&sem, &format!("0/1 q0 a{} r1 c0", LIMIT + 1));
    }
}

#[test]
fn rule_12_what_fits_queues_behind_whoever_queues() {
    for sem in both(4, 4) {
        let held = hold(&sem, 3);
        let mut big = queue(&sem, 2);
        let mut small = queue(&sem, 1);
        assert_state(&sem, "3/4 q2 a1 r0 c0");
        small.assert_pending();
        drop(held);
        let (big, small) = (big.granted(), small.granted());
        assert_eq!((id(&big), id(&small)), (2, 3));
        assert_state(&sem, "3/4 q0 a3 r0 c0");
    }
    let sem = recorded(4, 4);
    let _held = hold(&sem, 3);
    skip_events(&sem);
    let _big = queue(&sem, 2);
    let _small = queue(&sem, 1);
    assert_events(&sem, &["queued/fifo #0 w2 | 3/4 q1 a1 r0 c0", "queued/fifo #0 w1 | 3/4 q2 a1 r0 c0"]);
}

#[test]
fn rule_12_a_place_in_the_queue_is_taken_at_the_first_poll() {
    for sem in both(1, 4) {
        let held = hold(&sem, 1);
        let mut made_first = Task::new(sem.acquire(1).into_owned());
        let unpolled = sem.acquire(1).into_owned();
        assert_state(&sem, "1/1 q0 a1 r0 c0");
        let mut polled_first = queue(&sem, 1);
        made_first.assert_pending();
        assert_state(&sem, "1/1 q2 a1 r0 c0");
        // One that never asked leaves no trace.
        drop(unpolled);
        assert_state(&sem, "1/1 q2 a1 r0 c0");
        drop(held);
        made_first.assert_pending();
        drop(polled_first.granted());
        drop(made_first.granted());
        assert_state(&sem, "0/1 q0 a3 r0 c0");
    }
}

#[test]
fn rule_12_polling_again_keeps_the_place_and_counts_nothing() {
    let sem = recorded(1, 2);
    let held = hold(&sem, 1);
    let mut first = queue(&sem, 1);
    let mut second = queue(&sem, 1);
    skip_events(&sem);
    for _ in 0..5 {
        second.assert_pending();
        first.assert_pending();
    }
    assert_state(&sem, "1/1 q2 a1 r0 c0");
    assert_events(&sem, &[]);
    drop(held);
    second.assert_pending();
    drop(first.granted());
    drop(second.granted());
}

#[test]
fn rule_13_try_checks_the_weight_then_closed_then_what_is_free() {
    for sem in both(2, 1) {
        let _held = hold(&sem, 2);
        let _queued = queue(&sem, 1);
        // Three invalid, two oversize, one unavailable; closed: the one queued, and two more instead.
        for (closed, rejections) in [(false, 6), (true, 6 + 1 + 7)] {
            if closed {
                sem.close();
            }
            for weight in INVALID {
                assert_error!(
                    sem.try_acquire(weight),
                    AcquireError::InvalidWeight { weight: given, .. } if given == weight
                );
            }
            assert_error!(sem.try_acquire(3), AcquireError::Oversize { weight: 3, capacity: 2, .. });
            assert_error!(sem.try_acquire(i64::MAX), AcquireError::Oversize { .. });
            if closed {
                for weight in [1, 2] {
                    assert_error!(sem.try_acquire(weight), AcquireError::Closed);
                }
            } else {
                assert_unavailable(&sem, 1);
            }
            assert_eq!(sem.snapshot().rejections, rejections);
        }
    }
}

#[test]
fn rule_13_try_does_not_pass_the_queue() {
    for sem in both(4, 1) {
        let held = hold(&sem, 2);
        let mut big = queue(&sem, 3);
        assert_unavailable(&sem, 1);
        assert_unavailable(&sem, 2);
        assert_state(&sem, "2/4 q1 a1 r2 c0");
        drop(held);
        let big = big.granted();
        drop(sem.try_acquire(1).unwrap().unwrap());
        drop(big);
    }
}

#[test]
fn rule_14_unavailable_is_no_error_and_counts_one_rejection() {
    for sem in both(2, 1) {
        let _held = hold(&sem, 1);
        assert_unavailable(&sem, 2);
        assert_state(&sem, "1/2 q0 a1 r1 c0");
        let _queued = queue(&sem, 2);
        assert_unavailable(&sem, 1);
        assert_state(&sem, "1/2 q1 a1 r2 c0");
    }
    let sem = recorded(2, 1);
    let _held = hold(&sem, 1);
    let _queued = queue(&sem, 2);
    skip_events(&sem);
    assert_unavailable(&sem, 1);
    assert_events(&sem, &["rejected/unavailable #0 w1 | 1/2 q1 a1 r1 c0"]);
}

#[test]
fn rule_15_errors_of_try_count_and_success_is_an_admission() {
    let sem = recorded(2, 0);
    let permit = sem.try_acquire(2).unwrap().unwrap();
    assert_eq!((id(&permit), permit.weight()), (1, 2));
    assert_error!(sem.try_acquire(-7), AcquireError::InvalidWeight { weight: -7, .. });
    assert_error!(sem.try_acquire(3), AcquireError::Oversize { weight: 3, capacity: 2, .. });
    drop(permit);
    sem.close();
    assert_error!(sem.try_acquire(1), AcquireError::Closed);
    assert_events(
        &sem,
        &[
            "admitted/immediate #1 w2 | 2/2 q0 a1 r0 c0",
            "rejected/invalid_weight #0 w-7 | 2/2 q0 a1 r1 c0",
            "rejected/oversize #0 w3 | 2/2 q0 a1 r2 c0",
            "released/released #1 w2 | 0/2 q0 a1 r2 c0",
            "closed/shutdown #0 w0 | 0/2 q0 a1 r2 c0 closed",
            "rejected/closed #0 w1 | 0/2 q0 a1 r3 c0 closed",
        ],
    );
    let sem = plain(2, 0);
    drop(sem.try_acquire(1).unwrap().unwrap());
    assert_state(&sem, "0/2 q0 a1 r0 c0");
}

/// The words of each error: stable, and no more than the numbers that were given.
#[test]
fn rule_15_errors_are_typed_and_their_words_are_stable() {
    let sem = plain(2, 1);
    let held = hold(&sem, 2);
    let queued = queue(&sem, 1);
    let full = now(&sem, 1).unwrap_err();
    drop(queued);
    let invalid = now(&sem, 0).unwrap_err();
    let oversize = sem.try_acquire(3).unwrap_err();
    let deadline = Task::new(sem.acquire_timeout(1, Duration::ZERO).into_owned()).refused();
    let unqueued = plain(1, 0);
    let _all = hold(&unqueued, 1);
    let none = now(&unqueued, 1).unwrap_err();
    sem.close();
    let closed = now(&sem, 1).unwrap_err();
    drop(held);
    let expected = [
        (
            invalid,
            AcquireErrorKind::InvalidWeight,
            "invalid_weight",
            "weight 0 is not a weight: ask for at least 1",
        ),
        (
            oversize,
            AcquireErrorKind::Oversize,
            "oversize",
            "weight 3 can never be admitted: the capacity is 2",
        ),
        (full, AcquireErrorKind::QueueFull, "queue_full", "the queue is full: 1 callers may wait"),
        (none, AcquireErrorKind::QueueFull, "queue_full", "no capacity is free, and nobody may wait for it"),
        (
            deadline,
            AcquireErrorKind::Deadline,
            "deadline",
            "the deadline passed before the permit could be acquired",
        ),
        (closed, AcquireErrorKind::Closed, "closed", "the semaphore is closed"),
    ];
    for (error, kind, word, text) in expected {
        assert_eq!(
            (error.kind(), error.kind().as_str(), error.kind().to_string()),
            (kind, word, word.into())
        );
        assert_eq!(error.to_string(), text);
        let error: Box<dyn std::error::Error + Send + Sync> = Box::new(error);
        assert!(error.source().is_none());
    }
}

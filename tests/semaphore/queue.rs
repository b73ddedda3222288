//! Rules 16 to 23: the queue, grants, cancellations and ids.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant as Clock};

use tokio::time::{Instant, advance};
use tower_slots::semaphore::{AcquireError, Permit, PermitId, Semaphore};

use crate::support::*;

#[test]
fn rule_16_only_the_head_is_looked_at() {
    for sem in both(4, 8) {
        let (two, one, last) = (hold(&sem, 2), hold(&sem, 1), hold(&sem, 1));
        let mut big = queue(&sem, 3);
        let mut small = queue(&sem, 1);
        let mut tiny = queue(&sem, 1);
        drop(one);
        // One is free, and the head wants three.
        for task in [&mut small, &mut tiny, &mut big] {
            task.assert_pending();
        }
        assert_unavailable(&sem, 1);
        assert_state(&sem, "3/4 q3 a3 r1 c0");
        drop(two);
        assert_state(&sem, "4/4 q2 a4 r1 c0");
        small.assert_pending();
        let big = big.granted();
        drop(last);
        tiny.assert_pending();
        let small = small.granted();
        assert_state(&sem, "4/4 q1 a5 r1 c0");
        drop(big);
        drop((tiny.granted(), small));
        assert_state(&sem, "0/4 q0 a6 r1 c0");
    }
}

#[test]
fn rule_16_one_release_grants_while_the_head_fits() {
    for sem in both(4, 8) {
        let held = hold(&sem, 4);
        let mut tasks: Vec<_> = [1, 1, 2, 1, 3].map(|weight| queue(&sem, weight)).into_iter().collect();
        drop(held);
        assert_state(&sem, "4/4 q2 a4 r0 c0");
        let mut last = tasks.split_off(3);
        let permits: Vec<_> = tasks.iter_mut().map(Task::granted).collect();
        assert_eq!(permits.iter().map(id).collect::<Vec<_>>(), [2, 3, 4]);
        last[0].assert_pending();
        drop(permits);
        let fourth = last[0].granted();
        let fifth = last[1].granted();
        assert_state(&sem, "4/4 q0 a6 r0 c0");
        drop((fourth, fifth));
    }
}

#[test]
fn rule_16_a_grant_stops_at_the_first_that_does_not_fit() {
    for sem in both(4, 8) {
        let held = hold(&sem, 4);
        let mut first = queue(&sem, 2);
        let mut big = queue(&sem, 3);
        let mut behind = queue(&sem, 1);
        drop(held);
        let first = first.granted();
        // The third would fit, but the second stands before it.
        big.assert_pending();
        behind.assert_pending();
        assert_state(&sem, "2/4 q2 a2 r0 c0");
        drop(first);
        drop((big.granted(), behind.granted()));
    }
}

#[test]
fn rule_17_a_grant_is_complete_before_it_is_polled() {
    for sem in both(2, 4) {
        let held = hold(&sem, 2);
        let mut task = queue(&sem, 1);
        assert_eq!(task.wakes(), 0);
        drop(held);
        assert_eq!(task.wakes(), 1);
        assert_state(&sem, "1/2 q0 a2 r0 c0");
        // The id is the grant's, not the poll's.
        let later = hold(&sem, 1);
        let permit = task.granted();
        assert_eq!((id(&permit), id(&later)), (2, 3));
        assert_eq!(permit.weight(), 1);
    }
}

/// A waker that looks at the semaphore as it is called.
struct Looking {
    sem: Semaphore,
    seen: Mutex<Vec<String>>,
}

impl Wake for Looking {
    fn wake(self: Arc<Self>) {
        let state = line(self.sem.snapshot());
        self.seen.lock().unwrap().push(state);
    }
}

#[test]
fn rule_17_wakers_run_after_the_whole_transition() {
    within(Duration::from_secs(20), || {
        for sem in both(3, 4) {
            let held = hold(&sem, 3);
            let looking = Arc::new(Looking { sem: sem.clone(), seen: Mutex::default() });
            let waker = Waker::from(looking.clone());
            let mut tasks: Vec<Waiting> = (0..3).map(|_| Task::new(sem.acquire(1).into_owned())).collect();
            for task in &mut tasks {
                assert!(task.poll_with(&waker).is_pending());
            }
            drop(held);
            assert_eq!(*looking.seen.lock().unwrap(), ["3/3 q0 a4 r0 c0"; 3]);
        }
    });
}

#[test]
fn rule_17_the_last_waker_is_the_one_that_is_woken() {
    for sem in both(1, 4) {
        let held = hold(&sem, 1);
        let mut task = queue(&sem, 1);
        let other = Task::<()>::new(std::future::pending());
        let waker = Waker::from(other.flag());
        assert!(task.poll_with(&waker).is_pending());
        assert_eq!(task.wakers(), 0, "the first waker was let go");
        drop(held);
        assert_eq!((task.wakes(), other.wakes()), (0, 1));
        drop(task.granted());
    }
}

#[test]
fn rule_18_only_a_release_and_a_cancellation_grant() {
    for sem in both(4, 3) {
        let held = hold(&sem, 3);
        let mut big = queue(&sem, 2);
        let mut small = queue(&sem, 1);
        // None of these lets the small one in.
        assert_unavailable(&sem, 1);
        assert_error!(now(&sem, 9), AcquireError::Oversize { .. });
        let mut third = queue(&sem, 1);
        assert_error!(now(&sem, 1), AcquireError::QueueFull { .. });
        big.assert_pending();
        small.assert_pending();
        assert_state(&sem, "3/4 q3 a1 r3 c0");
        // Leaving from behind changes nothing for those before.
        third.assert_pending();
        drop(third);
        small.assert_pending();
        assert_state(&sem, "3/4 q2 a1 r3 c1");
        // Leaving from the head does.
        drop(big);
        assert_eq!(small.wakes(), 1);
        assert_state(&sem, "4/4 q0 a2 r3 c2");
        drop((small.granted(), held));
    }
}

#[test]
fn rule_18_close_grants_nobody() {
    for sem in both(4, 3) {
        let held = hold(&sem, 3);
        let mut big = queue(&sem, 2);
        let mut small = queue(&sem, 1);
        sem.close();
        assert_error!(small.ready(), AcquireError::Closed);
        assert_error!(big.ready(), AcquireError::Closed);
        assert_state(&sem, "3/4 q0 a1 r2 c0 closed");
        drop(held);
        assert_state(&sem, "0/4 q0 a1 r2 c0 closed");
    }
}

#[test]
fn rule_18_a_cancelled_big_head_admits_all_that_fit() {
    let sem = recorded(4, 8);
    let _held = hold(&sem, 1);
    let big = queue(&sem, 4);
    let mut tasks = [1, 2, 3, 1].map(|weight| queue(&sem, weight));
    skip_events(&sem);
    drop(big);
    assert_events(
        &sem,
        &[
            "canceled/context_canceled #0 w4 | 1/4 q4 a1 r0 c1",
            "admitted/fifo #2 w1 | 2/4 q3 a2 r0 c1",
            "admitted/fifo #3 w2 | 4/4 q2 a3 r0 c1",
        ],
    );
    assert_eq!(tasks.each_ref().map(Task::wakes), [1, 1, 0, 0]);
    let [first, second, third, fourth] = &mut tasks;
    let (one, two) = (first.granted(), second.granted());
    third.assert_pending();
    fourth.assert_pending();
    drop((one, two));
    drop((third.granted(), fourth.poll()));
}

#[test]
fn rule_18_a_head_past_its_deadline_admits_those_behind() {
    paused(async {
        let sem = recorded(4, 8);
        let _held = hold(&sem, 3);
        let mut big = Task::new(sem.acquire_timeout(2, SECOND).into_owned());
        big.assert_pending();
        let mut small = queue(&sem, 1);
        skip_events(&sem);
        advance(SECOND + MS).await;
        assert_eq!(big.wakes(), 1);
        assert_error!(big.ready(), AcquireError::Deadline);
        assert_events(
            &sem,
            &["canceled/deadline #0 w2 | 3/4 q1 a1 r0 c1", "admitted/fifo #2 w1 | 4/4 q0 a2 r0 c1"],
        );
        drop(small.granted());
    });
}

#[test]
fn rule_19_a_waiter_leaves_from_wherever_it_stands() {
    for leaving in 0..5 {
        for sem in both(1, 5) {
            let held = hold(&sem, 1);
            let mut tasks: Vec<_> = (0..5).map(|_| queue(&sem, 1)).collect();
            drop(tasks.remove(leaving));
            assert_state(&sem, "1/1 q4 a1 r0 c1");
            // The others keep their order.
            drop(held);
            for (at, task) in tasks.iter_mut().enumerate() {
                let permit = task.granted();
                assert_eq!(id(&permit), 2 + at as u64);
            }
            assert_state(&sem, "0/1 q0 a5 r0 c1");
        }
    }
}

#[test]
fn rule_19_any_order_of_leaving_keeps_the_others_in_order() {
    let mut random = fastrand::Rng::with_seed(19);
    for round in 0..50 {
        let sem = plain(1, 40);
        let held = hold(&sem, 1);
        let mut tasks: Vec<_> = (0..20).map(|_| queue(&sem, 1)).collect();
        for _ in 0..15 {
            drop(tasks.remove(random.usize(..tasks.len())));
            // Places are used again, at the tail.
            if random.bool() {
                tasks.push(queue(&sem, 1));
            }
        }
        assert_eq!(sem.snapshot().waiters, tasks.len());
        drop(held);
        for (at, task) in tasks.iter_mut().enumerate() {
            let permit = task.granted();
            assert_eq!(id(&permit), 2 + at as u64, "round {round}");
        }
    }
}

#[test]
fn rule_19_an_event_of_each_cancellation() {
    let sem = recorded(2, 4);
    let _held = hold(&sem, 2);
    let (one, two) = (queue(&sem, 1), queue(&sem, 2));
    skip_events(&sem);
    drop(two);
    drop(one);
    assert_events(
        &sem,
        &[
            "canceled/context_canceled #0 w2 | 2/2 q1 a1 r0 c1",
            "canceled/context_canceled #0 w1 | 2/2 q0 a1 r0 c2",
        ],
    );
}

/// What stands in a queue, by place, and whoever holds the one permit.
struct Line<'a> {
    sem: &'a Semaphore,
    tasks: Vec<Option<Waiting>>,
    held: Option<Permit>,
    next: usize,
}

/// The time that one operation takes with `waiting` in the queue, at its best of a few tries.
fn cost(waiting: usize, operation: impl Fn(&mut Line<'_>)) -> f64 {
    const DONE: usize = 100;
    let sem = plain(1, 1_000_000);
    let held = hold(&sem, 1);
    let mut tasks: Vec<_> = (0..waiting).map(|_| Some(Task::new(sem.acquire(1).into_owned()))).collect();
    for task in tasks.iter_mut().flatten() {
        task.assert_pending();
    }
    let mut line = Line { sem: &sem, tasks, held: Some(held), next: 0 };
    let best = (0..9)
        .map(|_| {
            let start = Clock::now();
            for _ in 0..DONE {
                operation(&mut line);
            }
            start.elapsed()
        })
        .min()
        .unwrap();
    best.as_secs_f64() / DONE as f64
}

#[track_caller]
fn assert_constant(operation: impl Fn(&mut Line<'_>)) {
    let (few, many) = (cost(2_000, &operation), cost(100_000, &operation));
    assert!(many < 25.0 * few, "{many} s with many waiting, {few} s with few");
}

#[test]
fn rule_19_leaving_takes_as_long_however_many_wait() {
    let random = Mutex::new(fastrand::Rng::with_seed(19));
    // Somebody from the middle, by index so that the test itself takes no time of its own.
    assert_constant(|line| {
        let mut random = random.lock().unwrap();
        let (from, to) = (line.tasks.len() / 4, line.tasks.len() / 4 * 3);
        while line.tasks[random.usize(from..to)].take().is_none() {}
    });
}

#[test]
fn rule_37_joining_and_being_granted_take_as_long_however_many_wait() {
    assert_constant(|line| {
        let mut task = Task::new(line.sem.acquire(1).into_owned());
        task.assert_pending();
        line.tasks.push(Some(task));
    });
    assert_constant(|line| {
        drop(line.held.take());
        let mut task = line.tasks[line.next].take().unwrap();
        line.held = Some(task.granted());
        line.next += 1;
    });
    // A refusal and a poll of the last one.
    assert_constant(|line| {
        assert_unavailable(line.sem, 1);
        line.tasks.last_mut().unwrap().as_mut().unwrap().assert_pending();
    });
}

#[test]
fn rule_20_a_grant_that_came_first_wins_against_everything() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            let mut task = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            task.assert_pending();
            drop(held);
            advance(2 * SECOND).await;
            sem.close();
            assert_eq!(id(&task.granted()), 2);
            assert_state(&sem, "0/1 q0 a2 r0 c0 closed");
        }
    });
}

#[test]
fn rule_20_a_grant_before_the_time_is_noticed_is_a_grant() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            let mut task = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            task.assert_pending();
            // Time is up, and the task was not polled since: it still stands in the queue.
            advance(2 * SECOND).await;
            drop(held);
            drop(task.granted());
            assert_state(&sem, "0/1 q0 a2 r0 c0");
        }
    });
}

#[test]
fn rule_20_close_that_came_first_beats_the_deadline_and_the_drop() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            let mut task = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            task.assert_pending();
            let dropped = queue(&sem, 1);
            sem.close();
            advance(2 * SECOND).await;
            assert_error!(task.ready(), AcquireError::Closed);
            drop(dropped);
            assert_state(&sem, "1/1 q0 a1 r2 c0 closed");
            drop(held);
            assert_state(&sem, "0/1 q0 a1 r2 c0 closed");
        }
    });
}

#[test]
fn rule_20_a_grant_that_is_never_polled_is_given_back() {
    for sem in both(2, 4) {
        let held = hold(&sem, 2);
        let granted = queue(&sem, 2);
        let mut next = queue(&sem, 1);
        drop(held);
        assert_state(&sem, "2/2 q1 a2 r0 c0");
        drop(granted);
        assert_eq!(next.wakes(), 1);
        assert_eq!(id(&next.granted()), 3);
        assert_state(&sem, "0/2 q0 a3 r0 c0");
    }
    let sem = recorded(2, 4);
    let held = hold(&sem, 2);
    let granted = queue(&sem, 2);
    let _next = queue(&sem, 1);
    skip_events(&sem);
    drop(held);
    drop(granted);
    assert_events(
        &sem,
        &[
            "released/released #1 w2 | 0/2 q2 a1 r0 c0",
            "admitted/fifo #2 w2 | 2/2 q1 a2 r0 c0",
            "released/released #2 w2 | 0/2 q1 a2 r0 c0",
            "admitted/fifo #3 w1 | 1/2 q0 a3 r0 c0",
        ],
    );
}

#[test]
fn rule_20_a_grant_that_is_never_polled_is_given_back_after_close_and_past_the_deadline() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            let mut granted = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            granted.assert_pending();
            let mut idle = Task::new(sem.wait_idle());
            idle.assert_pending();
            drop(held);
            sem.close();
            advance(2 * SECOND).await;
            idle.assert_pending();
            drop(granted);
            idle.ready();
            assert_state(&sem, "0/1 q0 a2 r0 c0 closed");
        }
    });
}

#[test]
fn rule_21_a_dropped_acquire_and_a_passed_deadline_are_told_apart() {
    paused(async {
        let sem = recorded(1, 4);
        let _held = hold(&sem, 1);
        let dropped = queue(&sem, 1);
        let mut dropped_with_deadline = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
        dropped_with_deadline.assert_pending();
        let mut late = Task::new(sem.acquire_deadline(1, Instant::now() + SECOND).into_owned());
        late.assert_pending();
        skip_events(&sem);
        drop(dropped_with_deadline);
        drop(dropped);
        advance(SECOND - MS).await;
        late.assert_pending();
        advance(2 * MS).await;
        assert_eq!(late.wakes(), 1);
        assert_error!(late.ready(), AcquireError::Deadline);
        assert_events(
            &sem,
            &[
                "canceled/context_canceled #0 w1 | 1/1 q2 a1 r0 c1",
                "canceled/context_canceled #0 w1 | 1/1 q1 a1 r0 c2",
                "canceled/deadline #0 w1 | 1/1 q0 a1 r0 c3",
            ],
        );
    });
}

#[test]
fn rule_21_each_deadline_is_kept_by_itself() {
    paused(async {
        for sem in both(1, 4) {
            let held = hold(&sem, 1);
            let mut tasks: Vec<_> = [3, 1, 2]
                .map(|seconds| Task::new(sem.acquire_timeout(1, seconds * SECOND).into_owned()))
                .into();
            for task in &mut tasks {
                task.assert_pending();
            }
            advance(SECOND + MS).await;
            tasks[0].assert_pending();
            tasks[2].assert_pending();
            assert_error!(tasks[1].ready(), AcquireError::Deadline);
            advance(SECOND).await;
            assert_error!(tasks[2].ready(), AcquireError::Deadline);
            drop(held);
            drop(tasks[0].granted());
            assert_state(&sem, "0/1 q0 a2 r0 c2");
        }
    });
}

#[test]
fn rule_21_an_aborted_task_is_a_dropped_acquire() {
    paused(async {
        let sem = recorded(1, 4);
        let held = hold(&sem, 1);
        let waiting = tokio::spawn({
            let sem = sem.clone();
            async move { sem.acquire(1).await.map(drop) }
        });
        tokio::task::yield_now().await;
        assert_state(&sem, "1/1 q1 a1 r0 c0");
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        assert_state(&sem, "1/1 q0 a1 r0 c1");
        let elapsed = tokio::time::timeout(SECOND, sem.acquire(1)).await;
        assert!(elapsed.is_err());
        assert_state(&sem, "1/1 q0 a1 r0 c2");
        drop(held);
    });
}

#[test]
fn rule_22_nothing_of_a_waiter_is_kept() {
    paused(async {
        for sem in both(1, 8) {
            let held = hold(&sem, 1);
            let mut granted = queue(&sem, 1);
            let cancelled = queue(&sem, 1);
            let mut late = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            late.assert_pending();
            let mut closed = queue(&sem, 1);
            let flags = [granted.flag(), cancelled.flag(), late.flag(), closed.flag()];
            let held_by_others = |at: usize, own: usize| Arc::strong_count(&flags[at]) - 1 - own;
            assert_eq!(held_by_others(0, 1), 1);
            drop(held);
            assert_eq!(held_by_others(0, 1), 0, "granted");
            let permit = granted.granted();
            drop(cancelled);
            assert_eq!(held_by_others(1, 0), 0, "cancelled");
            advance(SECOND + MS).await;
            assert_error!(late.ready(), AcquireError::Deadline);
            // Its timer is its own.
            drop(late);
            assert_eq!(held_by_others(2, 0), 0, "past its deadline");
            sem.close();
            assert_eq!(held_by_others(3, 1), 0, "closed");
            assert_error!(closed.ready(), AcquireError::Closed);
            drop(permit);
            // The queue still works as a queue would: empty.
            assert_state(&sem, "0/1 q0 a2 r1 c2 closed");
        }
    });
}

#[test]
fn rule_22_a_waiter_that_idles_is_let_go_too() {
    for sem in both(1, 1) {
        let held = hold(&sem, 1);
        let idle = || {
            let mut task = Task::new(sem.wait_idle());
            task.assert_pending();
            task
        };
        let (dropped, mut done) = (idle(), idle());
        let flags = [dropped.flag(), done.flag()];
        drop(dropped);
        assert_eq!(Arc::strong_count(&flags[0]), 1, "dropped");
        drop(held);
        assert_eq!(Arc::strong_count(&flags[1]), 2, "idle");
        done.ready();
    }
}

#[test]
fn rule_22_no_part_keeps_another_alive() {
    let token = Arc::new(());
    let seen = token.clone();
    let sem = Semaphore::builder(1)
        .max_waiters(4)
        .events(16)
        .observer(move |_| assert!(Arc::strong_count(&seen) > 0))
        .build()
        .unwrap();
    let joined = || {
        let mut task = Task::new(sem.acquire(1).into_owned());
        task.assert_pending();
        task
    };
    let held = hold(&sem, 1);
    let (mut granted, waiting) = (joined(), joined());
    let unpolled = sem.acquire(1).into_owned();
    let clone = sem.clone();
    drop(sem);
    drop(clone);
    assert_eq!(Arc::strong_count(&token), 2, "permits and waiters keep it");
    drop(unpolled);
    drop(held);
    let shared = granted.granted().into_shared();
    drop(waiting);
    assert_eq!(Arc::strong_count(&token), 2, "the shared permit keeps it");
    shared.release().unwrap();
    drop((shared, granted));
    assert_eq!(Arc::strong_count(&token), 1, "the last part let go");
}

#[test]
fn rule_23_ids_count_admissions() {
    for sem in both(4, 4) {
        let permits = [hold(&sem, 1), sem.try_acquire(1).unwrap().unwrap(), hold(&sem, 2)];
        assert_eq!(permits.each_ref().map(id), [1, 2, 3]);
        // Failed attempts use up none.
        assert_unavailable(&sem, 1);
        assert_error!(now(&sem, 0), AcquireError::InvalidWeight { .. });
        assert_error!(sem.try_acquire(5), AcquireError::Oversize { .. });
        let (mut first, gone, mut second) = (queue(&sem, 1), queue(&sem, 1), queue(&sem, 1));
        drop(gone);
        drop(permits);
        assert_eq!((id(&second.granted()), id(&first.granted())), (5, 4));
        assert_eq!(id(&hold(&sem, 1)), 6);
        // Another semaphore counts its own.
        assert_eq!(id(&hold(&plain(1, 0), 1)), 1);
    }
}

#[test]
fn rule_23_an_id_is_a_number_in_order_and_zero_is_none() {
    let sem = recorded(16, 0);
    let mut ids: Vec<PermitId> = (0..12).map(|_| hold(&sem, 1).id()).collect();
    let texts: Vec<String> = ids.iter().map(ToString::to_string).collect();
    assert_eq!(texts, (1..=12).map(|id: u64| id.to_string()).collect::<Vec<_>>());
    assert!(ids.is_sorted() && ids.iter().all(|id| !id.is_zero()));
    ids.extend(ids.clone());
    assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), 12);
    skip_events(&sem);
    assert_error!(now(&sem, 17), AcquireError::Oversize { .. });
    let none = sem.drain_events().events[0].permit_id;
    assert!(none.is_zero() && none.get() == 0 && none < ids[0]);
    assert_eq!(none.to_string(), "0");
}

/// A waker that panics.
struct Panicking(AtomicUsize);

impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        std::panic::resume_unwind(Box::new("a waker"));
    }
}

#[test]
fn rule_17_a_waker_that_panics_takes_nobody_with_it() {
    let caught = |act: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).is_ok();
    for (close, at) in (0..8).map(|round| (round >= 4, round % 4)) {
        for sem in both(4, 4) {
            let held = Mutex::new(Some(hold(&sem, 4)));
            let panicking = Arc::new(Panicking(AtomicUsize::new(0)));
            let mut tasks: Vec<Waiting> = (0..4).map(|_| Task::new(sem.acquire(1).into_owned())).collect();
            for (place, task) in tasks.iter_mut().enumerate() {
                let waker = Waker::from(panicking.clone());
                let polled = if place == at { task.poll_with(&waker) } else { task.poll() };
                assert!(polled.is_pending());
            }
            let _ = caught(&|| if close { sem.close() } else { drop(held.lock().unwrap().take()) });
            assert_eq!(panicking.0.load(Ordering::SeqCst), 1);
            let others = tasks.iter().enumerate().filter(|(place, _)| *place != at);
            assert!(others.map(|(_, task)| task.wakes()).all(|wakes| wakes == 1), "close: {close}, at {at}");
            if close {
                assert!(tasks.iter_mut().all(|task| task.refused() == AcquireError::Closed));
                assert_state(&sem, "4/4 q0 a1 r4 c0 closed");
            } else {
                assert_state(&sem, "4/4 q0 a5 r0 c0");
                drop(tasks.iter_mut().map(Task::granted).collect::<Vec<_>>());
                assert_state(&sem, "0/4 q0 a5 r0 c0");
            }
        }
    }
}

/// Nor does one of those who wait until all is given back.
#[test]
fn rule_30_a_waker_that_panics_takes_no_other_with_it() {
    for at in 0..3 {
        for sem in both(1, 1) {
            let held = Mutex::new(Some(hold(&sem, 1)));
            let panicking = Arc::new(Panicking(AtomicUsize::new(0)));
            let mut tasks: Vec<_> = (0..3).map(|_| Task::new(sem.wait_idle())).collect();
            for (place, task) in tasks.iter_mut().enumerate() {
                let waker = Waker::from(panicking.clone());
                let polled = if place == at { task.poll_with(&waker) } else { task.poll() };
                assert!(polled.is_pending());
            }
            let release = std::panic::AssertUnwindSafe(|| drop(held.lock().unwrap().take()));
            let _ = std::panic::catch_unwind(release);
            assert_eq!(tasks.iter().map(Task::wakes).sum::<usize>(), 2);
            tasks.iter_mut().for_each(Task::ready);
        }
    }
}

#[test]
fn rule_22_futures_outlive_every_handle() {
    for sem in both(1, 4) {
        let held = hold(&sem, 1);
        let (mut first, mut second) = (queue(&sem, 1), queue(&sem, 1));
        let mut unpolled: Waiting = Task::new(sem.acquire(1).into_owned());
        let mut idle: Task<'static, ()> = Task::new(sem.wait_idle());
        idle.assert_pending();
        drop(sem);
        unpolled.assert_pending();
        drop(held);
        second.assert_pending();
        assert_eq!(id(&first.granted()), 2);
        assert_eq!(id(&second.granted()), 3);
        idle.assert_pending();
        assert_eq!(id(&unpolled.granted()), 4);
        idle.ready();
    }
}

/// `will_wake` may say no to a clone of the same waker, as that of a waker without effect can do.
#[test]
fn rule_37_a_waker_that_does_not_know_its_clones_is_kept_all_the_same() {
    within(Duration::from_secs(20), || {
        for sem in both(1, 2) {
            let held = hold(&sem, 1);
            let (mut task, mut idle) = (queue(&sem, 1), Task::new(sem.wait_idle()));
            idle.assert_pending();
            for _ in 0..3 {
                assert!(task.poll_with(Waker::noop()).is_pending());
                assert!(idle.poll_with(Waker::noop()).is_pending());
            }
            assert_eq!(task.wakers() + idle.wakers(), 0, "the wakers before were let go");
            drop(held);
            drop(task.granted());
            idle.ready();
        }
    });
}

//! Many threads at once: nothing is lost, nothing is counted twice, and the recorded events, played
//! again one by one, are what the rules make of them.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Runtime;
use tower_slots::semaphore::{AcquireError, MAX_EVENTS, Semaphore};

use crate::model::replay;
use crate::support::*;

fn threads(workers: usize) -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_time().build().unwrap()
}

/// Without and with a record of everything.
fn two(capacity: i64, max_waiters: usize) -> [Semaphore; 2] {
    let recorded = Semaphore::builder(capacity).max_waiters(max_waiters).events(MAX_EVENTS);
    [plain(capacity, max_waiters), recorded.build().unwrap()]
}

/// The record of a semaphore that is idle again.
#[track_caller]
fn assert_record(sem: &Semaphore, max_waiters: usize) {
    let batch = sem.drain_events();
    assert_eq!(batch.dropped, 0);
    replay(&batch.events, sem.capacity(), max_waiters);
    if let Some(last) = batch.events.last() {
        assert_eq!(last.snapshot, sem.snapshot());
    }
}

#[test]
fn races_of_tries_with_doubled_releases_for_many_seeds() {
    const TRIES: usize = 48;
    for seed in 0..128 {
        let mut random = fastrand::Rng::with_seed(seed);
        let capacity = random.i64(1..=12);
        let weights: Vec<i64> = (0..TRIES).map(|_| random.i64(0..=capacity + 1)).collect();
        for sem in two(capacity, 0) {
            let (live, succeeded) = (AtomicI64::new(0), AtomicU64::new(0));
            let start = Barrier::new(4);
            thread::scope(|scope| {
                for weights in weights.chunks(TRIES / 4) {
                    let (sem, live, succeeded, start) = (&sem, &live, &succeeded, &start);
                    scope.spawn(move || {
                        start.wait();
                        let mut kept = Vec::new();
                        for (at, weight) in weights.iter().enumerate() {
                            if let Ok(Some(permit)) = sem.try_acquire(*weight) {
                                let now = live.fetch_add(*weight, Ordering::SeqCst) + weight;
                                assert!(now <= capacity, "{now} of {capacity} at once");
                                succeeded.fetch_add(1, Ordering::SeqCst);
                                kept.push(permit.into_shared());
                            }
                            if at % 3 == 2 {
                                for permit in kept.drain(..) {
                                    let other = permit.clone();
                                    live.fetch_sub(permit.weight(), Ordering::SeqCst);
                                    permit.release().unwrap();
                                    assert_eq!(other.release().unwrap_err().id, permit.id());
                                }
                            }
                        }
                        for permit in &kept {
                            live.fetch_sub(permit.weight(), Ordering::SeqCst);
                        }
                    });
                }
            });
            let succeeded = succeeded.into_inner();
            let refused = TRIES as u64 - succeeded;
            assert_state(&sem, &format!("0/{capacity} q0 a{succeeded} r{refused} c0"));
            assert_record(&sem, 0);
        }
    }
}

#[test]
fn races_of_64_callers_never_exceed_the_capacity() {
    const CALLERS: usize = 64;
    const TURNS: usize = 20;
    let runtime = threads(4);
    for sem in two(7, CALLERS) {
        let live = Arc::new(AtomicI64::new(0));
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let (sem, live) = (sem.clone(), live.clone());
                runtime.spawn(async move {
                    for turn in 0..TURNS {
                        let weight = 1 + ((caller + turn) % 3) as i64;
                        let permit = sem.acquire(weight).await.unwrap();
                        let now = live.fetch_add(weight, Ordering::SeqCst) + weight;
                        assert!(now <= 7, "{now} at once");
                        tokio::task::yield_now().await;
                        live.fetch_sub(weight, Ordering::SeqCst);
                        drop(permit);
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            for caller in callers {
                caller.await.unwrap();
            }
            sem.wait_idle().await;
        });
        assert_state(&sem, &format!("0/7 q0 a{} r0 c0", CALLERS * TURNS));
        assert_record(&sem, CALLERS);
    }
}

/// One holds, two wait; then a release, a cancellation and maybe a close at the same time.
fn cancel_release_close(close: bool) {
    for round in 0..256 {
        for sem in two(3, 4) {
            let held = hold(&sem, 3);
            let leaving = queue(&sem, 2);
            let mut staying = queue(&sem, 1);
            let start = Barrier::new(3);
            let stayed = thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    drop(leaving);
                });
                scope.spawn(|| {
                    start.wait();
                    drop(held);
                });
                start.wait();
                if round % 2 == 0 {
                    thread::yield_now();
                }
                if close {
                    sem.close();
                }
                drop(sem.try_acquire(3));
                block_on(std::future::poll_fn(|cx| staying.poll_with(cx.waker())))
            });
            let at = sem.snapshot();
            assert_eq!(at.waiters, 0);
            // Everybody is counted once: three, and the try.
            assert_eq!(at.admissions + at.rejections + at.cancellations, 4, "{at:?}");
            match stayed {
                Ok(permit) => {
                    assert_eq!((permit.weight(), at.acquired), (1, 1));
                    drop(permit);
                }
                Err(AcquireError::Closed) => assert!(close && at.acquired == 0, "{at:?}"),
                Err(other) => panic!("{other:?}"),
            }
            assert_eq!(sem.snapshot().acquired, 0);
            assert_record(&sem, 4);
        }
    }
}

#[test]
fn races_of_cancel_and_release() {
    within(Duration::from_secs(120), || cancel_release_close(false));
}

#[test]
fn races_of_cancel_release_and_close() {
    within(Duration::from_secs(120), || cancel_release_close(true));
}

#[test]
fn races_of_close_and_release() {
    let runtime = threads(2);
    for _ in 0..100 {
        for sem in two(4, 8) {
            let held: Vec<_> = (0..4).map(|_| hold(&sem, 1).into_shared()).collect();
            let waiting: Vec<_> = (0..8)
                .map(|_| {
                    let sem = sem.clone();
                    runtime.spawn(async move { sem.acquire(2).await.map(|permit| permit.weight()) })
                })
                .collect();
            while sem.snapshot().waiters < 8 {
                thread::yield_now();
            }
            let start = Barrier::new(5);
            thread::scope(|scope| {
                for permit in held {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        permit.release().unwrap();
                    });
                }
                start.wait();
                sem.close();
            });
            let (mut granted, mut closed) = (0, 0);
            for outcome in waiting {
                match runtime.block_on(outcome).unwrap() {
                    Ok(weight) => granted += weight / 2,
                    Err(AcquireError::Closed) => closed += 1,
                    Err(other) => panic!("{other:?}"),
                }
            }
            assert_eq!(granted + closed, 8);
            assert_state(&sem, &format!("0/4 q0 a{} r{closed} c0 closed", 4 + granted));
            assert_record(&sem, 8);
        }
    }
}

#[test]
fn races_of_tries_never_pass_a_head_of_five() {
    for sem in two(5, 3) {
        let held = hold(&sem, 1);
        let mut head = queue(&sem, 5);
        let (mut one, mut two) = (queue(&sem, 1), queue(&sem, 2));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..16 {
                        assert_unavailable(&sem, 1);
                    }
                });
            }
        });
        for task in [&mut head, &mut one, &mut two] {
            task.assert_pending();
        }
        assert_state(&sem, "1/5 q3 a1 r64 c0");
        drop(held);
        one.assert_pending();
        two.assert_pending();
        let head = head.granted();
        assert_state(&sem, "5/5 q2 a2 r64 c0");
        drop(head);
        let (one, two) = (one.granted(), two.granted());
        assert_eq!((id(&one), id(&two)), (3, 4));
        drop((one, two));
        assert_state(&sem, "0/5 q0 a4 r64 c0");
        assert_record(&sem, 3);
    }
}

/// Everything at once; weights differ, so that the record can be played again exactly.
#[test]
fn races_of_everything_leave_a_record_that_follows_the_rules() {
    const CALLERS: usize = 12;
    const TURNS: u64 = 60;
    let runtime = threads(4);
    for seed in 0..4 {
        let sem = Semaphore::builder(20).max_waiters(CALLERS - 2).events(MAX_EVENTS).build().unwrap();
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let sem = sem.clone();
                runtime.spawn(async move {
                    let mut random = fastrand::Rng::with_seed(seed * 1000 + caller as u64);
                    let weight = 1 + caller as i64;
                    for _ in 0..TURNS {
                        match random.u8(..10) {
                            0 => drop(sem.try_acquire(weight)),
                            1 => {
                                let _ = sem
                                    .acquire_timeout(weight, Duration::from_micros(random.u64(100..3000)))
                                    .await;
                            }
                            2 => {
                                // Left after one poll.
                                drop(sem.acquire(weight).now_or_never());
                            }
                            3 => {
                                let _ = sem.acquire(21 + weight).await;
                            }
                            4 => {
                                let _ = tokio::time::timeout(MS, sem.wait_idle()).await;
                            }
                            _ => {
                                if let Ok(permit) = sem.acquire(weight).await {
                                    for _ in 0..random.u8(1..5) {
                                        tokio::task::yield_now().await;
                                    }
                                    drop(permit);
                                }
                            }
                        }
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            for caller in callers {
                caller.await.unwrap();
            }
            sem.wait_idle().await;
        });
        sem.close();
        let at = sem.snapshot();
        assert_eq!((at.acquired, at.waiters), (0, 0));
        assert_record(&sem, CALLERS - 2);
    }
}

/// The same without a record, where the fast way is taken: it ends as it began.
#[test]
fn races_of_everything_end_idle() {
    const HANDS: u64 = 4;
    within(Duration::from_secs(120), || {
        for sem in [plain(3, 8), plain(3 << 44, 8)] {
            let unit = sem.capacity() / 3;
            let started = AtomicU64::new(0);
            thread::scope(|scope| {
                for hand in 0..HANDS {
                    let (sem, started) = (&sem, &started);
                    scope.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(hand);
                        for _ in 0..1500 {
                            let weight = random.i64(1..=3) * unit;
                            match random.u8(..6) {
                                0 | 1 => drop(sem.try_acquire(weight)),
                                2 => drop(Task::new(sem.acquire(weight).into_owned()).poll()),
                                3 => {
                                    let at = sem.snapshot();
                                    line(at);
                                    // An instant's truth: those who wait do so for a reason.
                                    assert!(at.waiters == 0 || at.acquired > 0, "{at:?}");
                                    continue;
                                }
                                _ => drop(block_on(sem.acquire(weight)).unwrap()),
                            }
                            started.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            });
            let at = sem.snapshot();
            assert_eq!((at.acquired, at.waiters), (0, 0));
            assert_eq!(at.admissions + at.rejections + at.cancellations, started.into_inner());
            block_on(sem.wait_idle());
            drop(sem.try_acquire(sem.capacity()).unwrap().unwrap());
        }
    });
}

/// The record is in the order of the transitions while others drain it.
#[test]
fn races_of_draining_lose_no_event() {
    let sem = two(4, 8).into_iter().nth(1).unwrap();
    let mut events = Vec::new();
    thread::scope(|scope| {
        let hands: Vec<_> = (1..=3_i64)
            .map(|weight| {
                let sem = &sem;
                scope.spawn(move || {
                    for _ in 0..400 {
                        drop(block_on(sem.acquire(weight)).unwrap());
                    }
                })
            })
            .collect();
        while !hands.iter().all(thread::ScopedJoinHandle::is_finished) {
            let batch = sem.drain_events();
            assert_eq!(batch.dropped, 0);
            events.extend(batch.events);
        }
    });
    events.extend(sem.drain_events().events);
    assert_eq!(sem.snapshot().admissions, 1200);
    replay(&events, 4, 8);
    assert_eq!(events.last().unwrap().snapshot, sem.snapshot());
}

/// One begins to wait as the other releases, and nothing else happens that could wake it.
#[test]
fn races_of_a_wait_with_its_end_lose_no_wake_up() {
    within(Duration::from_secs(120), || {
        for sem in two(1, 1) {
            for round in 0..2000_u64 {
                let held = hold(&sem, 1);
                let start = Barrier::new(2);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        start.wait();
                        if round % 3 == 0 {
                            std::hint::spin_loop();
                        }
                        drop(held);
                    });
                    start.wait();
                    if round % 2 == 0 {
                        block_on(sem.wait_idle());
                        drop(hold(&sem, 1));
                    } else {
                        drop(block_on(sem.acquire(1)).unwrap());
                    }
                });
                assert_state(&sem, &format!("0/1 q0 a{} r0 c0", 2 * (round + 1)));
            }
            assert_record(&sem, 1);
        }
    });
}

/// The quick way and the queue take turns: each id is given once, and none is left out.
#[test]
fn races_of_admissions_give_each_id_once() {
    within(Duration::from_secs(120), || {
        for sem in two(3, 8) {
            let mut ids: Vec<u64> = thread::scope(|scope| {
                let hands: Vec<_> = (0..4_i64)
                    .map(|hand| {
                        let sem = &sem;
                        scope.spawn(move || {
                            let mut ids = Vec::new();
                            for turn in 0..1000 {
                                let weight = 1 + (hand + turn) % 3;
                                let permit = match turn % 4 {
                                    0 => sem.try_acquire(weight).unwrap(),
                                    _ => Some(block_on(sem.acquire(weight)).unwrap()),
                                };
                                ids.extend(permit.as_ref().map(id));
                            }
                            ids
                        })
                    })
                    .collect();
                hands.into_iter().flat_map(|hand| hand.join().unwrap()).collect()
            });
            ids.sort_unstable();
            assert_eq!(ids, (1..=sem.snapshot().admissions).collect::<Vec<_>>());
            assert!(ids.len() >= 3000);
            assert_record(&sem, 8);
        }
    });
}

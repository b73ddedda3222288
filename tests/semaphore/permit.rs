//! Rules 24 to 27: permits, shared permits and what a release does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use tower_slots::semaphore::{DuplicateRelease, EventKind, Permit, Semaphore, SharedPermit};

use crate::support::*;

#[test]
fn rule_24_a_permit_is_released_once_by_drop_or_by_name() {
    for sem in both(4, 0) {
        let (dropped, released) = (hold(&sem, 1), hold(&sem, 3));
        assert_state(&sem, "4/4 q0 a2 r0 c0");
        drop(dropped);
        assert_state(&sem, "3/4 q0 a2 r0 c0");
        released.release();
        assert_state(&sem, "0/4 q0 a2 r0 c0");
    }
    let sem = recorded(4, 0);
    hold(&sem, 3).release();
    drop(hold(&sem, 2));
    assert_events(
        &sem,
        &[
            "admitted/immediate #1 w3 | 3/4 q0 a1 r0 c0",
            "released/released #1 w3 | 0/4 q0 a1 r0 c0",
            "admitted/immediate #2 w2 | 2/4 q0 a2 r0 c0",
            "released/released #2 w2 | 0/4 q0 a2 r0 c0",
        ],
    );
}

#[test]
fn rule_24_a_permit_cannot_be_copied() {
    assert_not_impl!(Permit: Clone);
    assert_not_impl!(Permit: Copy);
}

#[test]
fn rule_24_a_permit_is_sent_and_shared_between_threads() {
    fn is<T: Send + Sync + std::fmt::Debug + 'static>() {}
    is::<Permit>();
    is::<SharedPermit>();
    is::<Semaphore>();
    is::<DuplicateRelease>();
    fn error<T: std::error::Error>() {}
    error::<DuplicateRelease>();
}

#[test]
fn rule_24_a_shared_permit_is_released_by_the_first_and_refused_after() {
    for sem in both(4, 0) {
        drop(hold(&sem, 1));
        let permit = hold(&sem, 3);
        let shared = permit.into_shared();
        assert_state(&sem, "3/4 q0 a2 r0 c0");
        let other = shared.clone();
        assert_eq!((other.id().get(), other.weight()), (2, 3));
        other.release().unwrap();
        assert_state(&sem, "0/4 q0 a2 r0 c0");
        for permit in [&shared, &other, &shared] {
            let refused = permit.release().unwrap_err();
            assert_eq!(refused.id, shared.id());
            assert_eq!(refused.to_string(), "permit 2 was released before");
        }
        drop((shared, other));
        assert_state(&sem, "0/4 q0 a2 r0 c0");
    }
    let sem = recorded(4, 0);
    let shared = hold(&sem, 3).into_shared();
    skip_events(&sem);
    shared.release().unwrap();
    assert!(shared.release().is_err());
    drop(shared);
    assert_events(&sem, &["released/released #1 w3 | 0/4 q0 a1 r0 c0"]);
}

#[test]
fn rule_24_the_last_clone_releases() {
    for sem in both(4, 0) {
        let shared = hold(&sem, 3).into_shared();
        let other = shared.clone();
        drop(shared);
        assert_state(&sem, "3/4 q0 a1 r0 c0");
        drop(other);
        assert_state(&sem, "0/4 q0 a1 r0 c0");
    }
    let sem = recorded(4, 0);
    let shared = hold(&sem, 3).into_shared();
    drop((shared.clone(), shared));
    assert_eq!(lines(&sem.drain_events().events)[1..], ["released/released #1 w3 | 0/4 q0 a1 r0 c0"]);
}

#[test]
fn rule_24_a_release_before_others_take_the_room_does_not_take_it_from_them() {
    for sem in both(1, 1) {
        let shared = hold(&sem, 1).into_shared();
        let mut next = queue(&sem, 1);
        shared.release().unwrap();
        let _next = next.granted();
        // A second release must not give back what is another's now.
        assert!(shared.release().is_err());
        drop(shared);
        assert_state(&sem, "1/1 q0 a2 r0 c0");
        assert_unavailable(&sem, 1);
    }
}

#[test]
fn rule_24_of_many_concurrent_releases_one_succeeds() {
    const RELEASING: usize = 8;
    for sem in both(5, 0) {
        for round in 1..=200 {
            // Others hold some, so that a second release would be seen.
            let held = hold(&sem, 2);
            let shared = hold(&sem, 3).into_shared();
            let start = Barrier::new(RELEASING);
            let results = thread::scope(|scope| {
                let all: Vec<_> = (0..RELEASING)
                    .map(|_| {
                        let (shared, start) = (shared.clone(), &start);
                        scope.spawn(move || {
                            start.wait();
                            shared.release()
                        })
                    })
                    .collect();
                all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
            });
            let refused: Vec<_> = results.into_iter().filter_map(Result::err).collect();
            assert_eq!(refused.len(), RELEASING - 1);
            assert!(refused.iter().all(|refused| refused.id == shared.id()));
            assert_state(&sem, &format!("2/5 q0 a{} r0 c0", 2 * round));
            drop(held);
        }
    }
}

#[test]
fn rule_25_a_release_gives_back_then_grants_then_is_idle() {
    for (weights, idle_at_once) in [(vec![2, 1], false), (vec![], true)] {
        let sem = recorded(3, 4);
        let held = hold(&sem, 3);
        let mut waiting: Vec<_> = weights.into_iter().map(|weight| queue(&sem, weight)).collect();
        let mut idle = Task::new(sem.wait_idle());
        idle.assert_pending();
        skip_events(&sem);
        held.release();
        if idle_at_once {
            assert_eq!(idle.wakes(), 1);
            assert_events(&sem, &["released/released #1 w3 | 0/3 q0 a1 r0 c0"]);
        } else {
            assert_eq!(idle.wakes(), 0);
            idle.assert_pending();
            assert_events(
                &sem,
                &[
                    "released/released #1 w3 | 0/3 q2 a1 r0 c0",
                    "admitted/fifo #2 w2 | 2/3 q1 a2 r0 c0",
                    "admitted/fifo #3 w1 | 3/3 q0 a3 r0 c0",
                ],
            );
            let permits: Vec<_> = waiting.iter_mut().map(Task::granted).collect();
            drop(permits);
            assert_eq!(idle.wakes(), 1);
        }
        idle.ready();
    }
}

#[test]
fn rule_26_a_permit_outlives_its_task_and_the_close() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    for sem in both(3, 2) {
        let acquiring = sem.clone();
        let permit =
            runtime.block_on(runtime.spawn(async move { acquiring.acquire(2).await })).unwrap().unwrap();
        let mut queued = queue(&sem, 3);
        sem.close();
        assert_error!(queued.ready(), tower_slots::semaphore::AcquireError::Closed);
        assert_eq!((id(&permit), permit.weight()), (1, 2));
        assert_state(&sem, "2/3 q0 a1 r1 c0 closed");
        let shared = permit.into_shared();
        shared.release().unwrap();
        assert_eq!((shared.id().get(), shared.weight()), (1, 2));
        assert_state(&sem, "0/3 q0 a1 r1 c0 closed");
        assert_eq!(shared.release().unwrap_err().id, shared.id());
    }
}

#[test]
fn rule_26_a_permit_outlives_every_handle() {
    let notes = Notes::default();
    let sem = observed(Semaphore::builder(1), &notes);
    let permit = hold(&sem, 1);
    drop(sem);
    assert_eq!((id(&permit), permit.weight()), (1, 1));
    notes.take();
    drop(permit);
    assert_eq!(notes.take(), ["released/released #1 w1 | 0/1 q0 a1 r0 c0"]);
}

#[test]
fn rule_27_a_forgotten_permit_is_lost() {
    for sem in both(2, 1) {
        std::mem::forget(hold(&sem, 1));
        let mut waiting = queue(&sem, 2);
        let mut idle = Task::new(sem.wait_idle());
        for _ in 0..3 {
            waiting.assert_pending();
            idle.assert_pending();
        }
        assert_state(&sem, "1/2 q1 a1 r0 c0");
        drop(waiting);
        drop(hold(&sem, 1));
        idle.assert_pending();
    }
}

/// Kept in a struct that names no lifetime, beside other things or in a map.
struct Job {
    permit: Permit,
}

#[test]
fn rule_26_a_permit_belongs_to_whoever_has_it() {
    for sem in both(3, 1) {
        let job = Job { permit: hold(&sem, 2) };
        assert_eq!((id(&job.permit), job.permit.weight()), (1, 2));
        assert_state(&sem, "2/3 q0 a1 r0 c0");
        // Taken from queue by a task that ends, released by another thread.
        let mut waiting = queue(&sem, 2);
        thread::spawn(move || drop(job)).join().unwrap();
        let job = Job { permit: waiting.granted() };
        drop(waiting);
        assert_state(&sem, "2/3 q0 a2 r0 c0");
        thread::spawn(move || job.permit.release()).join().unwrap();
        assert_state(&sem, "0/3 q0 a2 r0 c0");
    }
}

/// A release that is asked for from inside the release is a second one like any other.
#[test]
fn rule_24_a_release_within_the_release_is_refused() {
    within(Duration::from_secs(20), || {
        let handle: Arc<Mutex<Option<SharedPermit>>> = Arc::default();
        let (inside, refused) = (handle.clone(), Arc::new(AtomicUsize::new(0)));
        let counting = refused.clone();
        let sem = Semaphore::builder(3)
            .observer(move |event| {
                let again = inside.lock().unwrap().clone();
                if let (EventKind::Released, Some(permit)) = (event.kind, again) {
                    assert_eq!(permit.release().unwrap_err().id, event.permit_id);
                    counting.fetch_add(1, Ordering::SeqCst);
                }
            })
            .build()
            .unwrap();
        let shared = hold(&sem, 2).into_shared();
        *handle.lock().unwrap() = Some(shared.clone());
        shared.release().unwrap();
        assert_eq!(refused.load(Ordering::SeqCst), 1);
        assert_state(&sem, "0/3 q0 a1 r0 c0");
        // The semaphore is held by the permit that its observer holds.
        handle.lock().unwrap().take();
    });
}

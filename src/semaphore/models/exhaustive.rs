//! Small histories, every schedule up to a number of preemptions (loom).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use loom::future::block_on;
use loom::model::Builder;
use loom::thread;

use super::super::sync::load_by_adding_zero;
use super::super::{AcquireError, Permit, Semaphore};
use super::{assert_at_rest, assert_sound, poll_once, semaphore};

/// Explores `model` with either kind of load, and says in how many schedules; see `sync`.
fn explore(preemptions: usize, model: fn()) {
    for adding_zero in [false, true] {
        load_by_adding_zero(adding_zero);
        let schedules = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&schedules);
        let mut builder = Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(move || {
            counted.fetch_add(1, Relaxed);
            model();
        });
        println!("{} schedules", schedules.load(Relaxed));
    }
}

fn hold(semaphore: &Semaphore, weight: i64) -> Permit {
    semaphore.try_acquire(weight).unwrap().expect("it is free")
}

fn spawn<R: 'static>(
    semaphore: &Semaphore,
    run: impl FnOnce(Semaphore) -> R + 'static,
) -> thread::JoinHandle<R> {
    let semaphore = semaphore.clone();
    thread::spawn(move || run(semaphore))
}

#[test]
fn two_try_for_one_place() {
    explore(3, || {
        let semaphore = semaphore(1, 0);
        let other = spawn(&semaphore, |s| s.try_acquire(1).unwrap().map(|permit| permit.id().get()));
        let mine = semaphore.try_acquire(1).unwrap().map(|permit| permit.id().get());
        assert_sound(&semaphore.snapshot(), 1, 2);
        let mut ids: Vec<u64> = mine.into_iter().chain(other.join().unwrap()).collect();
        ids.sort_unstable();
        assert!(ids == [1] || ids == [1, 2], "{ids:?}");
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn a_release_reaches_the_one_who_waits() {
    explore(3, || {
        let semaphore = semaphore(1, 1);
        let held = hold(&semaphore, 1);
        let waiter = spawn(&semaphore, |s| block_on(s.acquire(1)).unwrap().id().get());
        drop(held);
        assert_eq!(waiter.join().unwrap(), 2);
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn two_wait_for_one_release() {
    explore(3, || {
        let semaphore = semaphore(2, 2);
        let held = hold(&semaphore, 2);
        let others =
            [1, 2].map(|weight| spawn(&semaphore, move |s| drop(block_on(s.acquire(weight)).unwrap())));
        drop(held);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_at_rest(&semaphore, 3);
    });
}

#[test]
fn a_grant_meets_a_cancellation() {
    explore(3, || {
        let semaphore = semaphore(1, 1);
        let held = hold(&semaphore, 1);
        let other = spawn(&semaphore, |s| {
            let mut acquire = s.acquire(1);
            poll_once(&mut acquire).is_ready()
        });
        drop(held);
        assert_sound(&semaphore.snapshot(), 1, 2);
        let admitted = other.join().unwrap();
        let snapshot = semaphore.snapshot();
        assert!(!admitted || snapshot.cancellations == 0);
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn the_follower_of_a_big_head_that_leaves_is_admitted() {
    explore(3, || {
        let semaphore = semaphore(2, 2);
        let held = hold(&semaphore, 1);
        let mut head = semaphore.acquire(2);
        assert!(poll_once(&mut head).is_pending());
        let follower = spawn(&semaphore, |s| drop(block_on(s.acquire(1)).unwrap()));
        drop(head);
        follower.join().unwrap();
        drop(held);
        assert_at_rest(&semaphore, 3);
    });
}

#[test]
fn a_granted_future_that_is_dropped_passes_the_weight_on() {
    explore(3, || {
        let semaphore = semaphore(1, 2);
        let held = hold(&semaphore, 1);
        let mut first = semaphore.acquire(1).into_owned();
        assert!(poll_once(&mut first).is_pending());
        let second = spawn(&semaphore, |s| block_on(s.acquire(1)).unwrap().id().get());
        let dropping = thread::spawn(move || drop(first));
        drop(held);
        dropping.join().unwrap();
        let id = second.join().unwrap();
        let snapshot = semaphore.snapshot();
        assert_eq!((id, snapshot.cancellations), (snapshot.admissions, 3 - snapshot.admissions));
        assert_at_rest(&semaphore, 3);
    });
}

#[test]
fn close_meets_a_release_and_one_who_waits() {
    explore(3, || {
        let semaphore = semaphore(1, 1);
        let held = hold(&semaphore, 1);
        let waiter = spawn(&semaphore, |s| match block_on(s.acquire(1)) {
            Ok(permit) => assert_eq!(permit.id().get(), 2),
            Err(error) => assert_eq!(error, AcquireError::Closed),
        });
        let closer = spawn(&semaphore, |s| s.close());
        drop(held);
        waiter.join().unwrap();
        closer.join().unwrap();
        assert!(semaphore.is_closed() && semaphore.snapshot().closed);
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn close_meets_an_open_gate() {
    explore(3, || {
        let semaphore = semaphore(2, 0);
        let closer = spawn(&semaphore, |s| s.close());
        let first = semaphore.try_acquire(1);
        let second = semaphore.try_acquire(1);
        assert!(first.is_ok() || second.is_err(), "closing is for good");
        drop((first, second));
        closer.join().unwrap();
        assert_eq!(semaphore.try_acquire(1).unwrap_err(), AcquireError::Closed);
        assert_at_rest(&semaphore, 3);
    });
}

#[test]
fn idle_comes_after_the_last_release() {
    explore(3, || {
        let semaphore = semaphore(2, 0);
        let permits = [hold(&semaphore, 1), hold(&semaphore, 1)];
        let others = permits.map(|permit| thread::spawn(move || drop(permit)));
        block_on(semaphore.wait_idle());
        assert_eq!(semaphore.snapshot().acquired, 0);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn a_wait_for_idle_that_is_dropped_leaves_the_gate_usable() {
    explore(3, || {
        let semaphore = semaphore(1, 0);
        let held = hold(&semaphore, 1);
        let other = thread::spawn(move || drop(held));
        {
            let mut idle = semaphore.wait_idle();
            let _ = poll_once(&mut idle);
        }
        other.join().unwrap();
        assert!(semaphore.try_acquire(1).unwrap().is_some());
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn every_snapshot_is_of_one_instant() {
    explore(3, || {
        let semaphore = semaphore(1, 1);
        let other = spawn(&semaphore, |s| {
            drop(s.try_acquire(1));
            let mut acquire = s.acquire(1);
            let _ = poll_once(&mut acquire);
        });
        let mut held = semaphore.try_acquire(1).unwrap();
        for _ in 0..2 {
            let snapshot = semaphore.snapshot();
            assert_sound(&snapshot, 1, 3);
            assert!(held.is_none() || snapshot.acquired == 1, "{snapshot:?}");
            // Each admission but the held one was released, so that the weights tell how many there were.
            held = None;
        }
        other.join().unwrap();
        assert_at_rest(&semaphore, 3);
    });
}

#[test]
fn the_gate_is_shut_and_opened_between_two_who_try() {
    explore(3, || {
        let semaphore = semaphore(2, 1);
        let others = [(); 2]
            .map(|()| spawn(&semaphore, |s| s.try_acquire(1).unwrap().map(|permit| permit.id().get())));
        // A refusal of this kind goes through the lock.
        assert!(semaphore.try_acquire(3).is_err());
        let mut ids: Vec<u64> = others.into_iter().filter_map(|other| other.join().unwrap()).collect();
        ids.sort_unstable();
        assert_eq!(ids, [1, 2]);
        assert_at_rest(&semaphore, 3);
    });
}

#[test]
fn ids_go_on_where_the_word_is_full() {
    explore(3, || {
        let semaphore = semaphore(i64::from(u32::MAX), 0);
        semaphore.gate.skip_admissions((1 << 24) - 2);
        let take_two = |s: Semaphore| [(); 2].map(|()| hold(&s, 1).id().get());
        let other = spawn(&semaphore, take_two);
        let mut ids = [take_two(semaphore.clone()), other.join().unwrap()].concat();
        ids.sort_unstable();
        assert_eq!(ids, [1, 2, 3, 4].map(|n| (1 << 24) - 2 + n));
        assert_at_rest(&semaphore, (1 << 24) + 2);
    });
}

#[test]
fn one_of_two_shared_releases_counts() {
    explore(3, || {
        let semaphore = semaphore(1, 0);
        let permit = hold(&semaphore, 1).into_shared();
        let clone = permit.clone();
        let other = thread::spawn(move || clone.release().is_ok());
        let mine = permit.release().is_ok();
        assert_ne!(mine, other.join().unwrap());
        assert_at_rest(&semaphore, 1);
    });
}

#[test]
fn a_waker_that_changes_is_not_lost() {
    explore(3, || {
        let semaphore = semaphore(1, 1);
        let held = hold(&semaphore, 1);
        let mut acquire = semaphore.acquire(1).into_owned();
        assert!(poll_once(&mut acquire).is_pending());
        let waiter = thread::spawn(move || drop(block_on(acquire).unwrap()));
        drop(held);
        waiter.join().unwrap();
        assert_at_rest(&semaphore, 2);
    });
}

#[test]
fn the_last_handle_goes_beside_the_last_permit() {
    explore(3, || {
        let semaphore = semaphore(2, 0);
        let permits = [hold(&semaphore, 1), hold(&semaphore, 1)];
        let releases = permits.map(|permit| thread::spawn(move || drop(permit)));
        drop(semaphore);
        releases.into_iter().for_each(|release| release.join().unwrap());
    });
}

#[test]
fn two_handles_go_beside_a_release_through_the_lock() {
    explore(3, || {
        let semaphore = semaphore(1, 1);
        let held = hold(&semaphore, 1);
        let mut waiter = semaphore.acquire(1).into_owned();
        assert!(poll_once(&mut waiter).is_pending());
        let release = thread::spawn(move || drop(held));
        let cancel = thread::spawn(move || drop(waiter));
        drop(semaphore);
        release.join().unwrap();
        cancel.join().unwrap();
    });
}

#[test]
fn a_permit_outlives_every_handle() {
    explore(3, || {
        let semaphore = semaphore(2, 0);
        let [kept, other] = [hold(&semaphore, 1), hold(&semaphore, 1)];
        let clone = semaphore.clone();
        let deserting = thread::spawn(move || drop(clone));
        drop(semaphore);
        drop(other);
        deserting.join().unwrap();
        assert_eq!((kept.id().get(), kept.weight()), (1, 1));
        thread::spawn(move || drop(kept)).join().unwrap();
    });
}

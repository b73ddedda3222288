//! Larger histories, random schedules (shuttle).

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shuttle::future::block_on;
use shuttle::rand::{Rng, thread_rng};
use shuttle::{check_pct, check_random, thread};

use super::super::{Event, EventKind, Permit, Reason, Semaphore};
use super::{assert_at_rest, assert_sound, poll_once};

const SCHEDULES: usize = 4_000;
const THREADS: usize = 4;
const STEPS: usize = 5;
const CAPACITY: i64 = 3;

fn semaphore(events: usize) -> Semaphore {
    Semaphore::builder(CAPACITY).max_waiters(3).events(events).build().unwrap()
}

/// One thread's history: `STEPS` attempts of every kind, none of which may block for ever.
fn wander(semaphore: &Semaphore, started: &AtomicU64, may_close: bool) {
    let mut held: Vec<Permit> = Vec::new();
    for _ in 0..STEPS {
        let weight = thread_rng().gen_range(1..=CAPACITY);
        match thread_rng().gen_range(0..8) {
            0 | 1 => {
                started.fetch_add(1, Relaxed);
                held.extend(semaphore.try_acquire(weight).ok().flatten());
            }
            2 | 3 => {
                // Whoever holds while it waits could deadlock with another.
                held.clear();
                started.fetch_add(1, Relaxed);
                held.extend(block_on(semaphore.acquire(weight)));
            }
            4 | 5 => {
                started.fetch_add(1, Relaxed);
                let mut acquire = semaphore.acquire(weight);
                if poll_once(&mut acquire).is_pending() {
                    thread::yield_now();
                }
            }
            6 => {
                held.clear();
                block_on(semaphore.wait_idle());
            }
            _ if may_close && thread_rng().gen_bool(0.2) => semaphore.close(),
            _ => {
                held.pop();
            }
        }
        assert_sound(&semaphore.snapshot(), CAPACITY + 1, started.load(Relaxed));
    }
}

/// The history of all threads together.
fn run(events: usize, may_close: bool) {
    let (semaphore, started) = (semaphore(events), Arc::new(AtomicU64::new(0)));
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (semaphore, started) = (semaphore.clone(), Arc::clone(&started));
            thread::spawn(move || wander(&semaphore, &started, may_close))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_at_rest(&semaphore, started.load(Relaxed));
    let batch = semaphore.drain_events();
    assert_eq!(batch.dropped, 0);
    if events > 0 {
        replay(&batch.events);
    }
}

/// The events of a whole history, in order, have to add up.
fn replay(events: &[Event]) {
    let (mut acquired, mut queues, mut last) = (0, HashSet::from([VecDeque::new()]), 0);
    for event in events {
        let weight = event.weight;
        match (event.kind, event.reason) {
            (EventKind::Admitted, reason) => {
                acquired += weight;
                last += 1;
                assert_eq!(event.permit_id.get(), last);
                if reason == Reason::Fifo {
                    queues = after(&queues, |queue| first_leaves(queue, weight));
                } else {
                    assert_eq!(event.snapshot.waiters, 0, "{event:?} passed others");
                }
            }
            (EventKind::Queued, _) => queues = after(&queues, |queue| vec![joined(queue, weight)]),
            (EventKind::Released, _) => acquired -= weight,
            (EventKind::Canceled, _) => queues = after(&queues, |queue| any_leaves(queue, weight)),
            (EventKind::Rejected, Reason::Closed) if queues.iter().any(|queue| !queue.is_empty()) => {
                queues = after(&queues, |queue| first_leaves(queue, weight));
            }
            _ => {}
        }
        assert_eq!(event.snapshot.acquired, acquired, "{event:?}");
        queues.retain(|queue| queue.len() == event.snapshot.waiters);
        assert!(!queues.is_empty(), "no queue explains {event:?}");
    }
}

/// The weights in the queue. An event does not say which of two of the same weight went away, so that
/// there may be several possible ones.
type Line = VecDeque<i64>;

fn after(queues: &HashSet<Line>, step: impl Fn(&Line) -> Vec<Line>) -> HashSet<Line> {
    queues.iter().flat_map(step).collect()
}

fn joined(queue: &Line, weight: i64) -> Line {
    queue.iter().copied().chain([weight]).collect()
}

fn first_leaves(queue: &Line, weight: i64) -> Vec<Line> {
    let mut rest = queue.clone();
    if rest.pop_front() == Some(weight) { vec![rest] } else { vec![] }
}

fn any_leaves(queue: &Line, weight: i64) -> Vec<Line> {
    let places = (0..queue.len()).filter(|&place| queue[place] == weight);
    places
        .map(|place| {
            let mut rest = queue.clone();
            rest.remove(place);
            rest
        })
        .collect()
}

#[test]
fn open_and_shut_in_random_schedules() {
    check_random(|| run(0, false), SCHEDULES);
    println!("{SCHEDULES} schedules");
}

#[test]
fn closed_in_random_schedules() {
    check_random(|| run(0, true), SCHEDULES);
    println!("{SCHEDULES} schedules");
}

#[test]
fn events_add_up_in_random_schedules() {
    check_random(|| run(1024, true), SCHEDULES);
    println!("{SCHEDULES} schedules");
}

#[test]
fn open_and_shut_with_few_preemptions() {
    check_pct(|| run(0, true), SCHEDULES, 3);
    println!("{SCHEDULES} schedules");
}

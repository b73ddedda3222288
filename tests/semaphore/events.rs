//! Rules 35 and 36: the order of events, the ring, and observers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use tokio::time::advance;
use tower_slots::semaphore::{Event, EventKind, Permit, Reason, Semaphore, SharedPermit};

use crate::support::*;

#[test]
fn rule_35_one_of_each_transition_in_order() {
    paused(async {
        let notes = Notes::default();
        let sem = observed(Semaphore::builder(4).max_waiters(3).events(64), &notes);
        let one = hold(&sem, 1);
        let three = sem.try_acquire(3).unwrap().unwrap();
        let mut first = queue(&sem, 2);
        let mut second = queue(&sem, 1);
        let mut late = Task::new(sem.acquire_timeout(4, SECOND).into_owned());
        late.assert_pending();
        let _ = now(&sem, 1);
        let _ = sem.try_acquire(1);
        let _ = now(&sem, -5);
        let _ = sem.try_acquire(9);
        drop(three);
        let (first, second) = (first.granted(), second.granted());
        advance(2 * SECOND).await;
        let _ = late.refused();
        let _ = Task::new(sem.acquire_timeout(2, Duration::ZERO).into_owned()).refused();
        let gone = queue(&sem, 4);
        drop(gone);
        let (mut left, mut right) = (queue(&sem, 2), queue(&sem, 4));
        first.release();
        drop(left.granted());
        right.assert_pending();
        sem.close();
        let _ = now(&sem, 1);
        drop((one, second));
        let expected = [
            "admitted/immediate #1 w1 | 1/4 q0 a1 r0 c0",
            "admitted/immediate #2 w3 | 4/4 q0 a2 r0 c0",
            "queued/fifo #0 w2 | 4/4 q1 a2 r0 c0",
            "queued/fifo #0 w1 | 4/4 q2 a2 r0 c0",
            "queued/fifo #0 w4 | 4/4 q3 a2 r0 c0",
            "rejected/queue_full #0 w1 | 4/4 q3 a2 r1 c0",
            "rejected/unavailable #0 w1 | 4/4 q3 a2 r2 c0",
            "rejected/invalid_weight #0 w-5 | 4/4 q3 a2 r3 c0",
            "rejected/oversize #0 w9 | 4/4 q3 a2 r4 c0",
            "released/released #2 w3 | 1/4 q3 a2 r4 c0",
            "admitted/fifo #3 w2 | 3/4 q2 a3 r4 c0",
            "admitted/fifo #4 w1 | 4/4 q1 a4 r4 c0",
            "canceled/deadline #0 w4 | 4/4 q0 a4 r4 c1",
            "canceled/deadline #0 w2 | 4/4 q0 a4 r4 c2",
            "queued/fifo #0 w4 | 4/4 q1 a4 r4 c2",
            "canceled/context_canceled #0 w4 | 4/4 q0 a4 r4 c3",
            "queued/fifo #0 w2 | 4/4 q1 a4 r4 c3",
            "queued/fifo #0 w4 | 4/4 q2 a4 r4 c3",
            "released/released #3 w2 | 2/4 q2 a4 r4 c3",
            "admitted/fifo #5 w2 | 4/4 q1 a5 r4 c3",
            "released/released #5 w2 | 2/4 q1 a5 r4 c3",
            "rejected/closed #0 w4 | 2/4 q0 a5 r5 c3 closed",
            "closed/shutdown #0 w0 | 2/4 q0 a5 r5 c3 closed",
            "rejected/closed #0 w1 | 2/4 q0 a5 r6 c3 closed",
            "released/released #1 w1 | 1/4 q0 a5 r6 c3 closed",
            "released/released #4 w1 | 0/4 q0 a5 r6 c3 closed",
        ];
        assert_eq!(notes.take(), expected);
        assert_events(&sem, &expected);
    });
}

#[test]
fn rule_35_the_words_of_the_vocabulary() {
    let kinds = [
        (EventKind::Admitted, "admitted"),
        (EventKind::Queued, "queued"),
        (EventKind::Canceled, "canceled"),
        (EventKind::Rejected, "rejected"),
        (EventKind::Released, "released"),
        (EventKind::Closed, "closed"),
    ];
    for (kind, word) in kinds {
        assert_eq!((kind.as_str(), kind.to_string()), (word, word.to_owned()));
    }
    let reasons = [
        (Reason::Immediate, "immediate"),
        (Reason::Fifo, "fifo"),
        (Reason::Unavailable, "unavailable"),
        (Reason::InvalidWeight, "invalid_weight"),
        (Reason::Oversize, "oversize"),
        (Reason::QueueFull, "queue_full"),
        (Reason::ContextCanceled, "context_canceled"),
        (Reason::Deadline, "deadline"),
        (Reason::Closed, "closed"),
        (Reason::Released, "released"),
        (Reason::Shutdown, "shutdown"),
    ];
    for (reason, word) in reasons {
        assert_eq!((reason.as_str(), reason.to_string()), (word, word.to_owned()));
    }
    fn is<T: Copy + Eq + std::fmt::Debug + Send + Sync + 'static>() {}
    is::<Event>();
}

#[test]
fn rule_36_a_full_ring_loses_the_oldest_and_says_how_many() {
    let sem = Semaphore::builder(8).events(3).build().unwrap();
    let permits: Vec<Permit> = (0..3).map(|_| hold(&sem, 1)).collect();
    // Exactly full: nothing is lost.
    let batch = sem.drain_events();
    assert_eq!((batch.events.len(), batch.dropped), (3, 0));
    // Drained: empty, and counting anew.
    let batch = sem.drain_events();
    assert_eq!((batch.events.len(), batch.dropped), (0, 0));
    for turn in 0..3 {
        let more: Vec<Permit> = (0..5).map(|_| hold(&sem, 1)).collect();
        let batch = sem.drain_events();
        let ids: Vec<u64> = batch.events.iter().map(|event| event.permit_id.get()).collect();
        let first = 4 + 5 * turn;
        assert_eq!((ids, batch.dropped), (vec![first + 2, first + 3, first + 4], 2));
        drop(more);
        let batch = sem.drain_events();
        assert_eq!((batch.events.len(), batch.dropped), (3, 2));
        assert!(batch.events.iter().all(|event| event.kind == EventKind::Released));
    }
    // Half full again, from the middle of the ring.
    drop(hold(&sem, 1));
    assert_eq!(
        lines(&sem.drain_events().events),
        ["admitted/immediate #19 w1 | 4/8 q0 a19 r0 c0", "released/released #19 w1 | 3/8 q0 a19 r0 c0"]
    );
    drop(permits);
}

#[test]
fn rule_36_a_ring_of_one_keeps_the_newest() {
    let sem = Semaphore::builder(1).events(1).build().unwrap();
    for _ in 0..10 {
        assert_error!(sem.try_acquire(2), tower_slots::semaphore::AcquireError::Oversize { .. });
    }
    let batch = sem.drain_events();
    assert_eq!(lines(&batch.events), ["rejected/oversize #0 w2 | 0/1 q0 a0 r10 c0"]);
    assert_eq!(batch.dropped, 9);
}

#[test]
fn rule_36_the_ring_belongs_to_all_handles() {
    let sem = recorded(1, 0);
    let other = sem.clone();
    drop(hold(&other, 1));
    assert_eq!(sem.drain_events().events.len(), 2);
    assert_eq!(other.drain_events().events.len(), 0);
}

#[test]
fn rule_36_an_observer_is_called_by_whoever_caused_it() {
    let seen: Arc<Mutex<Vec<(EventKind, thread::ThreadId)>>> = Arc::default();
    let noting = seen.clone();
    let sem = Semaphore::builder(1)
        .max_waiters(4)
        .observer(move |event| noting.lock().unwrap().push((event.kind, thread::current().id())))
        .build()
        .unwrap();
    let here = thread::current().id();
    let held = hold(&sem, 1);
    let queued = queue(&sem, 1);
    let there = thread::spawn(move || {
        drop(held);
        thread::current().id()
    })
    .join()
    .unwrap();
    drop(queued);
    let closing = sem.clone();
    let closer = thread::spawn(move || {
        closing.close();
        thread::current().id()
    })
    .join()
    .unwrap();
    assert_eq!(
        *seen.lock().unwrap(),
        [
            (EventKind::Admitted, here),
            (EventKind::Queued, here),
            (EventKind::Released, there),
            (EventKind::Admitted, there),
            (EventKind::Released, here),
            (EventKind::Closed, closer),
        ]
    );
}

#[test]
fn rule_36_nothing_comes_before_the_observer_has_been_told() {
    // The call that caused an event returns after the observer did, and the state is already there.
    let notes = Notes::default();
    let noting = notes.clone();
    let handle: Arc<OnceLock<Semaphore>> = Arc::default();
    let inside = handle.clone();
    let states: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = states.clone();
    let sem = Semaphore::builder(3)
        .max_waiters(4)
        .observer(move |event| {
            noting.add(event);
            if let Some(sem) = inside.get() {
                seen.lock().unwrap().push(line(sem.snapshot()));
            }
        })
        .build()
        .unwrap();
    let held = hold(&sem, 3);
    let (one, two) = (queue(&sem, 1), queue(&sem, 2));
    notes.take();
    handle.set(sem.clone()).unwrap();
    drop(held);
    assert_eq!(notes.take().len(), 3);
    // All three events are told after the whole batch.
    assert_eq!(*states.lock().unwrap(), ["3/3 q0 a3 r0 c0"; 3]);
    drop((one, two));
}

/// An observer that does everything a caller may do, once for each event.
#[test]
fn rule_36_an_observer_may_re_enter() {
    within(Duration::from_secs(20), || {
        let handle: Arc<OnceLock<Semaphore>> = Arc::default();
        let (inside, shared) = (handle.clone(), Arc::new(Mutex::new(None::<SharedPermit>)));
        let releasing = shared.clone();
        let (depth, kinds) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (nested, noting) = (depth.clone(), kinds.clone());
        let sem = Semaphore::builder(4)
            .max_waiters(4)
            .events(1024)
            .observer(move |event| {
                let Some(sem) = inside.get() else { return };
                if nested.fetch_add(1, Ordering::SeqCst) == 0 {
                    noting.lock().unwrap().push(event.kind);
                    let _ = sem.snapshot();
                    let _ = sem.is_closed();
                    drop(sem.try_acquire(1));
                    drop(queue_anything(sem, 4));
                    drop(Task::new(sem.acquire(1).into_owned()).poll());
                    let _ = sem.drain_events();
                    if event.kind == EventKind::Closed {
                        sem.close();
                    }
                    let shared = releasing.lock().unwrap().take();
                    if let Some(shared) = shared {
                        let _ = shared.release();
                    }
                    let _ = Task::new(sem.wait_idle()).poll();
                }
                nested.fetch_sub(1, Ordering::SeqCst);
            })
            .build()
            .unwrap();
        handle.set(sem.clone()).unwrap();
        let held = hold(&sem, 2);
        let other = hold(&sem, 1);
        let mut waiting = Task::new(sem.acquire(3).into_owned());
        let waited = waiting.poll().is_pending();
        assert!(waited);
        *shared.lock().unwrap() = Some(other.into_shared());
        assert_error!(now(&sem, 9), tower_slots::semaphore::AcquireError::Oversize { .. });
        drop(held);
        drop(waiting.granted());
        let held = hold(&sem, 4);
        drop(queue(&sem, 1));
        sem.close();
        drop(held);
        let after = sem.snapshot();
        assert_eq!((after.acquired, after.waiters, after.closed), (0, 0, true));
        let kinds = kinds.lock().unwrap();
        for kind in [
            EventKind::Admitted,
            EventKind::Queued,
            EventKind::Canceled,
            EventKind::Rejected,
            EventKind::Released,
            EventKind::Closed,
        ] {
            assert!(kinds.contains(&kind), "{kind} was never re-entered from: {kinds:?}");
        }
        // Break the ring of the observer and its semaphore.
        assert_eq!(depth.load(Ordering::SeqCst), 0);
    });
}

/// Polls an acquire once, whatever comes of it.
fn queue_anything(sem: &Semaphore, weight: i64) -> Waiting {
    let mut task = Task::new(sem.acquire(weight).into_owned());
    // A permit is given back at once.
    drop(task.poll());
    task
}

#[test]
fn rule_36_an_observer_that_panics_disturbs_nothing() {
    for panicking in 0..4 {
        let notes = Notes::default();
        let (noting, calls) = (notes.clone(), Arc::new(AtomicUsize::new(0)));
        let counting = calls.clone();
        let sem = Semaphore::builder(3)
            .max_waiters(4)
            .observer(move |event| {
                noting.add(event);
                let call = counting.fetch_add(1, Ordering::SeqCst);
                if panicking == 3 || call == panicking {
                    std::panic::resume_unwind(Box::new("an observer"));
                }
            })
            .build()
            .unwrap();
        calls.store(100, Ordering::SeqCst);
        let held = hold(&sem, 3);
        let mut tasks = [1, 2].map(|weight| queue(&sem, weight));
        notes.take();
        // A batch of three; one of them panics, or all do.
        calls.store(0, Ordering::SeqCst);
        let released = catch_unwind(AssertUnwindSafe(|| drop(held)));
        assert!(released.is_ok(), "the panic was caught");
        assert_eq!(
            notes.take(),
            [
                "released/released #1 w3 | 0/3 q2 a1 r0 c0",
                "admitted/fifo #2 w1 | 1/3 q1 a2 r0 c0",
                "admitted/fifo #3 w2 | 3/3 q0 a3 r0 c0",
            ]
        );
        assert_eq!(tasks.each_ref().map(Task::wakes), [1, 1]);
        drop(tasks.each_mut().map(Task::granted));
        assert_state(&sem, "0/3 q0 a3 r0 c0");
    }
}

#[test]
fn rule_36_an_observer_that_always_panics_is_caught_everywhere() {
    paused(async {
        let calls = Arc::new(AtomicUsize::new(0));
        let counting = calls.clone();
        let sem = Semaphore::builder(2)
            .max_waiters(2)
            .observer(move |_| {
                counting.fetch_add(1, Ordering::SeqCst);
                std::panic::resume_unwind(Box::new("an observer"));
            })
            .build()
            .unwrap();
        let held = hold(&sem, 1);
        drop(sem.try_acquire(1).unwrap().unwrap());
        assert!(now(&sem, 0).is_err());
        assert!(sem.try_acquire(3).is_err());
        let mut late = Task::new(sem.acquire_timeout(2, SECOND).into_owned());
        late.assert_pending();
        drop(queue(&sem, 1));
        advance(2 * SECOND).await;
        let _ = late.refused();
        let mut closed = queue(&sem, 2);
        sem.close();
        let _ = closed.refused();
        drop(held.into_shared());
        assert_state(&sem, "0/2 q0 a2 r3 c2 closed");
        assert_eq!(calls.load(Ordering::SeqCst), 13);
    });
}

#[test]
fn rule_36_a_panic_while_another_panic_unwinds_does_not_abort() {
    let sem = Semaphore::builder(1)
        .observer(|_| std::panic::resume_unwind(Box::new("an observer")))
        .build()
        .unwrap();
    let inside = sem.clone();
    let outcome = catch_unwind(AssertUnwindSafe(move || {
        let _held = hold(&inside, 1);
        std::panic::resume_unwind(Box::new("a caller"));
    }));
    assert_eq!(outcome.unwrap_err().downcast_ref(), Some(&"a caller"));
    assert_state(&sem, "0/1 q0 a1 r0 c0");
}

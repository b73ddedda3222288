//! What needs to see inside, and what the state machine makes of the order of things.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Wake, Waker};

use super::*;

fn semaphore(capacity: i64, max_waiters: usize) -> Semaphore {
    Semaphore::builder(capacity).max_waiters(max_waiters).build().unwrap()
}

fn recorded(capacity: i64, max_waiters: usize) -> Semaphore {
    Semaphore::builder(capacity).max_waiters(max_waiters).events(64).build().unwrap()
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn told(semaphore: &Semaphore) -> Vec<(Reason, u64, i64, usize)> {
    let events = semaphore.drain_events().events;
    let tell = |e: &Event| (e.reason, e.permit_id.get(), e.snapshot.acquired, e.snapshot.waiters);
    events.iter().map(tell).collect()
}

#[test]
fn the_gate_opens_again_after_a_queue_was_there() {
    let semaphore = semaphore(1, 1);
    let held = semaphore.try_acquire(1).unwrap();
    assert!(semaphore.gate.is_open());
    let mut next = semaphore.acquire(1);
    assert!(poll(&mut next).is_pending());
    assert!(!semaphore.gate.is_open());
    drop(held);
    let Poll::Ready(Ok(permit)) = poll(&mut next) else { panic!("it was granted") };
    drop(permit);
    assert!(semaphore.gate.is_open());
    assert_eq!(semaphore.try_acquire(1).unwrap().unwrap().id().get(), 3);
}

#[test]
fn a_capacity_that_no_word_holds() {
    let semaphore = semaphore(i64::MAX, 1);
    let all = semaphore.try_acquire(i64::MAX).unwrap().unwrap();
    assert!(semaphore.try_acquire(1).unwrap().is_none());
    let mut next = semaphore.acquire(i64::MAX);
    assert!(poll(&mut next).is_pending());
    drop(all);
    assert!(matches!(poll(&mut next), Poll::Ready(Ok(permit)) if permit.id().get() == 2));
    assert!(!semaphore.gate.is_open());
    let snapshot = semaphore.snapshot();
    assert_eq!((snapshot.available, snapshot.admissions, snapshot.rejections), (i64::MAX, 2, 1));
}

#[test]
fn counts_go_on_over_the_edge_of_the_word() {
    let semaphore = semaphore(1, 0);
    let held = semaphore.try_acquire(1).unwrap();
    for _ in 0..1000 {
        assert!(semaphore.try_acquire(1).unwrap().is_none());
    }
    assert_eq!(semaphore.snapshot().rejections, 1000);
    drop(held);
    let semaphore = Semaphore::builder(i64::from(u32::MAX)).build().unwrap();
    let edge = (1 << 24) - 1;
    semaphore.gate.skip_admissions(edge);
    let ids: Vec<u64> = (0..4).map(|_| semaphore.try_acquire(1).unwrap().unwrap().id().get()).collect();
    assert_eq!(ids, [edge + 1, edge + 2, edge + 3, edge + 4]);
    assert_eq!(semaphore.snapshot().admissions, edge + 4);
}

#[test]
fn a_queue_that_has_grown_large_is_given_up_once_it_is_empty() {
    let mut queue = queue::Queue::default();
    let join = |queue: &mut queue::Queue, many| -> Vec<_> {
        (0..many).map(|_| queue.join(Waker::noop().clone(), 1)).collect()
    };
    let few = join(&mut queue, 1);
    assert!(few.into_iter().all(|ticket| queue.leave(ticket).is_ok()));
    assert!(queue.surplus().is_none());
    let mut many = join(&mut queue, 10_000);
    let last = many.pop().unwrap();
    assert!(many.into_iter().all(|ticket| queue.leave(ticket).is_ok()));
    assert!(queue.surplus().is_none(), "somebody waits");
    assert!(queue.leave(last).is_ok());
    assert!(queue.surplus().is_some_and(|surplus| surplus.into_values().count() >= 10_000));
    assert!(queue.surplus().is_none());
}

#[test]
fn what_is_left_goes_with_the_last_permit() {
    let witness = Arc::new(());
    let seen = Arc::clone(&witness);
    let semaphore = Semaphore::builder(2).observer(move |_| _ = &seen).build().unwrap();
    let permits = [1, 1].map(|weight| semaphore.try_acquire(weight).unwrap().unwrap());
    drop(semaphore);
    for permit in permits {
        assert_eq!(Arc::strong_count(&witness), 2);
        drop(permit);
    }
    assert_eq!(Arc::strong_count(&witness), 1);
}

#[test]
fn a_granted_future_that_is_dropped_was_admitted_and_released() {
    let semaphore = recorded(1, 2);
    let held = semaphore.try_acquire(1).unwrap();
    let (mut first, mut second) = (semaphore.acquire(1), semaphore.acquire(1));
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    drop(held);
    drop(first);
    assert!(poll(&mut second).is_ready());
    let expected = [
        (Reason::Immediate, 1, 1, 0),
        (Reason::Fifo, 0, 1, 1),
        (Reason::Fifo, 0, 1, 2),
        (Reason::Released, 1, 0, 2),
        (Reason::Fifo, 2, 1, 1),
        (Reason::Released, 2, 0, 1),
        (Reason::Fifo, 3, 1, 0),
        (Reason::Released, 3, 0, 0),
    ];
    assert_eq!(told(&semaphore), expected);
    assert_eq!(semaphore.snapshot().cancellations, 0);
}

#[test]
fn a_big_head_that_leaves_lets_its_followers_in() {
    let semaphore = recorded(3, 3);
    let _held = semaphore.try_acquire(1).unwrap();
    let mut queued = [3, 1, 1].map(|weight| semaphore.acquire(weight));
    assert!(queued.iter_mut().all(|acquire| poll(acquire).is_pending()));
    let [head, mut second, mut third] = queued;
    assert_eq!(told(&semaphore).len(), 4);
    drop(head);
    assert!(poll(&mut second).is_ready() && poll(&mut third).is_ready());
    let expected = [(Reason::ContextCanceled, 0, 1, 2), (Reason::Fifo, 2, 2, 1), (Reason::Fifo, 3, 3, 0)];
    assert_eq!(told(&semaphore)[..3], expected);
}

#[test]
fn close_fails_those_who_wait_in_order() {
    let semaphore = recorded(1, 2);
    let held = semaphore.try_acquire(1).unwrap();
    let mut queued = [1, 1].map(|weight| semaphore.acquire(weight));
    assert!(queued.iter_mut().all(|acquire| poll(acquire).is_pending()));
    told(&semaphore);
    semaphore.close();
    semaphore.close();
    let expected = [(Reason::Closed, 0, 1, 1), (Reason::Closed, 0, 1, 0), (Reason::Shutdown, 0, 1, 0)];
    assert_eq!(told(&semaphore), expected);
    for acquire in &mut queued {
        assert!(matches!(poll(acquire), Poll::Ready(Err(AcquireError::Closed))));
    }
    drop(held);
    assert_eq!(semaphore.snapshot().rejections, 2);
}

#[test]
fn a_hand_over_is_not_idle() {
    let semaphore = semaphore(1, 1);
    let held = semaphore.try_acquire(1).unwrap();
    let mut next = semaphore.acquire(1);
    assert!(poll(&mut next).is_pending());
    let (mut one, mut other) = (semaphore.wait_idle(), semaphore.wait_idle());
    assert!(poll(&mut one).is_pending() && poll(&mut other).is_pending());
    drop(held);
    assert!(poll(&mut one).is_pending());
    assert!(poll(&mut next).is_ready());
    let _later = semaphore.try_acquire(1).unwrap().unwrap();
    // Both were there when it was idle for an instant.
    assert!(poll(&mut one).is_ready() && poll(&mut other).is_ready());
    assert!(poll(&mut semaphore.wait_idle()).is_pending());
}

#[test]
fn an_observer_may_panic_and_use_the_semaphore() {
    let slot: Arc<OnceLock<Semaphore>> = Arc::default();
    let seen: Arc<Mutex<Vec<Reason>>> = Arc::default();
    let observer = {
        let (slot, seen) = (Arc::clone(&slot), Arc::clone(&seen));
        move |event: &Event| {
            seen.lock().unwrap().push(event.reason);
            let semaphore = slot.get().unwrap();
            if event.reason == Reason::Shutdown {
                assert!(semaphore.try_acquire(1).is_err());
            }
            assert_ne!(event.reason, Reason::Released, "of the observer");
        }
    };
    let semaphore = Semaphore::builder(1).observer(observer).build().unwrap();
    slot.set(semaphore.clone()).unwrap();
    drop(semaphore.try_acquire(1).unwrap());
    semaphore.close();
    assert_eq!(
        *seen.lock().unwrap(),
        [Reason::Immediate, Reason::Released, Reason::Shutdown, Reason::Closed]
    );
    assert_eq!(semaphore.snapshot().available, 1);
}

#[test]
fn a_waker_may_release_and_panic() {
    struct Releasing(Mutex<Option<Permit>>, AtomicUsize);
    impl Wake for Releasing {
        fn wake(self: Arc<Self>) {
            self.1.fetch_add(1, Ordering::Relaxed);
            let permit = self.0.lock().unwrap().take();
            drop(permit);
            panic!("of the waker");
        }
    }

    let semaphore = semaphore(3, 2);
    let [one, two] = [1, 2].map(|weight| semaphore.try_acquire(weight).unwrap().unwrap());
    let releasing = Arc::new(Releasing(Mutex::new(Some(two)), AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&releasing));
    let mut queued = [1, 2].map(|weight| semaphore.acquire(weight));
    for acquire in &mut queued {
        assert!(Pin::new(acquire).poll(&mut Context::from_waker(&waker)).is_pending());
    }
    drop(one);
    assert_eq!(releasing.1.load(Ordering::Relaxed), 2);
    assert!(queued.iter_mut().all(|acquire| poll(acquire).is_ready()));
}

#[tokio::test]
async fn a_spent_budget_costs_no_place() {
    let semaphore = semaphore(1, 0);
    tokio::task::coop::unconstrained(async {
        assert!(semaphore.acquire(1).await.is_ok());
    })
    .await;
    std::future::poll_fn(|cx| {
        while tokio::task::coop::has_budget_remaining() {
            if let Poll::Ready(budget) = tokio::task::coop::poll_proceed(cx) {
                budget.made_progress();
            }
        }
        Poll::Ready(())
    })
    .await;
    let mut acquire = semaphore.acquire(1);
    assert!(std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut acquire).poll(cx).is_pending())).await);
    assert_eq!(semaphore.snapshot().acquired, 1);
    assert_eq!(acquire.await.unwrap().id().get(), 2);
    assert_eq!(semaphore.snapshot().acquired, 0);
}

#[tokio::test(start_paused = true)]
async fn a_grant_beats_the_deadline() {
    let semaphore = semaphore(1, 1);
    let held = semaphore.acquire(1).await.unwrap();
    let timeout = std::time::Duration::from_secs(1);
    let mut acquire = Box::pin(semaphore.acquire_timeout(1, timeout));
    assert!(poll(&mut acquire).is_pending());
    drop(held);
    tokio::time::advance(timeout * 2).await;
    let permit = acquire.await.unwrap();
    assert_eq!(semaphore.acquire_timeout(1, timeout).await.unwrap_err(), AcquireError::Deadline);
    assert_eq!(semaphore.wait_idle_deadline(Instant::now() + timeout).await, Err(DeadlineExceeded));
    drop(permit);
    // One that has passed comes before what is free and before a close, and after the weight.
    let past = Instant::now() - timeout;
    assert_eq!(semaphore.acquire_deadline(1, past).await.unwrap_err(), AcquireError::Deadline);
    semaphore.close();
    assert_eq!(semaphore.acquire_deadline(1, past).await.unwrap_err(), AcquireError::Deadline);
    assert_eq!(
        semaphore.acquire_deadline(0, past).await.unwrap_err().kind(),
        AcquireErrorKind::InvalidWeight
    );
    assert_eq!(semaphore.snapshot().cancellations, 3);
}

#[test]
fn futures_and_permits_go_anywhere() {
    fn anywhere<T: Send + Sync + Unpin + 'static>() {}
    fn sendable<T: Send + Sync>(_: &T) {}
    anywhere::<Semaphore>();
    anywhere::<Acquire<'static>>();
    anywhere::<Permit>();
    anywhere::<SharedPermit>();
    let semaphore = semaphore(1, 0);
    sendable(&semaphore.acquire_timeout(1, Duration::ZERO));
    sendable(&semaphore.wait_idle());
    sendable(&semaphore.execute(1, async {}));
}

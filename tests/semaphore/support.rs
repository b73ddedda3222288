//! Stepping futures by hand, without a runtime, and writing states and events on one line each.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use tower_slots::semaphore::{AcquireError, Event, Permit, PermitId, Semaphore, SemaphoreBuilder, Snapshot};

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// A semaphore that nobody listens to.
pub(crate) fn plain(capacity: i64, max_waiters: usize) -> Semaphore {
    Semaphore::builder(capacity).max_waiters(max_waiters).build().unwrap()
}

/// A semaphore that records what happens.
pub(crate) fn recorded(capacity: i64, max_waiters: usize) -> Semaphore {
    Semaphore::builder(capacity).max_waiters(max_waiters).events(4096).build().unwrap()
}

pub(crate) fn both(capacity: i64, max_waiters: usize) -> [Semaphore; 2] {
    [plain(capacity, max_waiters), recorded(capacity, max_waiters)]
}

/// An observer's notes.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<Vec<Event>>>);

impl Notes {
    pub(crate) fn add(&self, event: &Event) {
        self.0.lock().unwrap().push(*event);
    }

    /// What was noted since the last call.
    pub(crate) fn take(&self) -> Vec<String> {
        lines(&std::mem::take(&mut *self.0.lock().unwrap()))
    }
}

pub(crate) fn observed(builder: SemaphoreBuilder, notes: &Notes) -> Semaphore {
    let notes = notes.clone();
    builder.observer(move |event| notes.add(event)).build().unwrap()
}

/// `3/4 q1 a2 r0 c0`: acquired of capacity, waiters, admissions, rejections and cancellations.
#[track_caller]
pub(crate) fn line(snapshot: Snapshot) -> String {
    let Snapshot {
        capacity,
        acquired,
        available,
        waiters,
        admissions,
        rejections,
        cancellations,
        closed,
        ..
    } = snapshot;
    assert_eq!(available, capacity - acquired, "available is what is not acquired");
    assert!((0..=capacity).contains(&acquired), "acquired is within the capacity: {snapshot:?}");
    let closed = if closed { " closed" } else { "" };
    format!("{acquired}/{capacity} q{waiters} a{admissions} r{rejections} c{cancellations}{closed}")
}

/// `admitted/fifo #2 w1 | 3/4 q1 a2 r0 c0`: what happened, the permit, the weight, and the state.
#[track_caller]
pub(crate) fn lines(events: &[Event]) -> Vec<String> {
    let one = |event: &Event| {
        let Event { kind, reason, permit_id, weight, snapshot, .. } = event;
        format!("{kind}/{reason} #{permit_id} w{weight} | {}", line(*snapshot))
    };
    events.iter().map(one).collect()
}

#[track_caller]
pub(crate) fn assert_state(sem: &Semaphore, expected: &str) {
    assert_eq!(line(sem.snapshot()), expected);
}

/// Takes the recorded events, which must be these; none may have been lost.
#[track_caller]
pub(crate) fn assert_events(sem: &Semaphore, expected: &[&str]) {
    let batch = sem.drain_events();
    let happened = lines(&batch.events);
    assert_eq!(happened, expected, "\nhappened:\n  {}\n", happened.join("\n  "));
    assert_eq!(batch.dropped, 0);
}

/// Those of the preparations.
pub(crate) fn skip_events(sem: &Semaphore) {
    drop(sem.drain_events());
}

pub(crate) struct Flag(AtomicUsize);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A future that moves only when it is told to.
pub(crate) struct Task<'a, T> {
    future: Boxed<'a, T>,
    flag: Arc<Flag>,
}

pub(crate) type Waiting = Task<'static, Result<Permit, AcquireError>>;

impl<'a, T> Task<'a, T> {
    pub(crate) fn new(future: impl Future<Output = T> + Send + 'a) -> Self {
        Self { future: Box::pin(future), flag: Arc::new(Flag(AtomicUsize::new(0))) }
    }

    pub(crate) fn poll(&mut self) -> Poll<T> {
        let waker = Waker::from(self.flag.clone());
        self.poll_with(&waker)
    }

    pub(crate) fn poll_with(&mut self, waker: &Waker) -> Poll<T> {
        self.future.as_mut().poll(&mut Context::from_waker(waker))
    }

    /// How often it was woken since the last call.
    pub(crate) fn wakes(&self) -> usize {
        self.flag.0.swap(0, Ordering::SeqCst)
    }

    /// The same, for another to ask again.
    pub(crate) fn woken(&self) -> usize {
        self.flag.0.load(Ordering::SeqCst)
    }

    /// How many wakers of this task anybody else holds.
    pub(crate) fn wakers(&self) -> usize {
        Arc::strong_count(&self.flag) - 1
    }

    pub(crate) fn flag(&self) -> Arc<Flag> {
        self.flag.clone()
    }
}

impl<T: Debug> Task<'_, T> {
    #[track_caller]
    pub(crate) fn assert_pending(&mut self) {
        let polled = self.poll();
        assert!(polled.is_pending(), "expected to wait, got {polled:?}");
    }

    #[track_caller]
    pub(crate) fn ready(&mut self) -> T {
        match self.poll() {
            Poll::Ready(output) => output,
            Poll::Pending => panic!("expected an answer"),
        }
    }
}

impl Waiting {
    #[track_caller]
    pub(crate) fn granted(&mut self) -> Permit {
        self.ready().unwrap()
    }

    #[track_caller]
    pub(crate) fn refused(&mut self) -> AcquireError {
        self.ready().unwrap_err()
    }
}

/// An acquire that waits in the queue.
#[track_caller]
pub(crate) fn queue(sem: &Semaphore, weight: i64) -> Waiting {
    let before = sem.snapshot().waiters;
    let mut task = Task::new(sem.acquire(weight).into_owned());
    task.assert_pending();
    assert_eq!(sem.snapshot().waiters, before + 1);
    task
}

/// An acquire that is answered at once.
#[track_caller]
pub(crate) fn now(sem: &Semaphore, weight: i64) -> Result<Permit, AcquireError> {
    Task::new(sem.acquire(weight).into_owned()).ready()
}

#[track_caller]
pub(crate) fn hold(sem: &Semaphore, weight: i64) -> Permit {
    now(sem, weight).unwrap()
}

/// A `try_acquire` that finds nothing free.
#[track_caller]
pub(crate) fn assert_unavailable(sem: &Semaphore, weight: i64) {
    let tried = sem.try_acquire(weight).unwrap();
    assert!(tried.is_none(), "{weight} was taken: {tried:?}");
}

pub(crate) fn id(permit: &Permit) -> u64 {
    let id: PermitId = permit.id();
    id.get()
}

/// Asserts the error of a call by its pattern.
macro_rules! assert_error {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {
        match $result {
            Err($pattern) $(if $guard)? => {}
            other => panic!("expected {}, got {other:?}", stringify!($pattern $(if $guard)?)),
        }
    };
}
pub(crate) use assert_error;

/// Fails when `work` is not done in time, as when it waits for a lock that it holds itself.
#[track_caller]
pub(crate) fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    let worker = thread::spawn(move || {
        let output = work();
        // Nobody waits any more when it came too late.
        let _ = done.send(());
        output
    });
    match wait.recv_timeout(limit) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("stuck for {limit:?}"),
        _ => worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// The smallest executor: this thread, parked until it is woken.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Runs on a clock that only `tokio::time::advance` moves. Polls by hand use up no budget.
pub(crate) fn paused<F: Future>(future: F) -> F::Output {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(tokio::task::unconstrained(future))
}

/// What `T` is not: the call does not compile when `T` has the trait.
macro_rules! assert_not_impl {
    ($type:ty: $trait:path) => {{
        trait Ambiguous<Marker> {
            fn only() {}
        }
        struct Has;
        impl<T> Ambiguous<()> for T {}
        impl<T: $trait> Ambiguous<Has> for T {}
        <$type as Ambiguous<_>>::only();
    }};
}
pub(crate) use assert_not_impl;

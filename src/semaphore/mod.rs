//! A weighted semaphore of one process: first come first served, with a bounded queue, permits that
//! are released exactly once, an orderly close, and a view of what goes on.
//!
//! ```
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_slots::semaphore::Semaphore;
//!
//! let semaphore = Semaphore::builder(4).max_waiters(64).build()?;
//! let permit = semaphore.acquire(3).await?;
//! assert_eq!(semaphore.snapshot().available, 1);
//! assert!(semaphore.try_acquire(2)?.is_none());
//! drop(permit);
//! assert!(semaphore.try_acquire(2)?.is_some());
//! # Ok(()) }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
//! ```
//!
//! # Order
//!
//! Callers are admitted strictly in the order in which they came. While anybody waits, nobody passes:
//! not a smaller weight that would fit, and not [`try_acquire`](Semaphore::try_acquire). A caller with
//! a large weight holds up those behind it until enough has been released, or until it goes away;
//! split large requests, or use two semaphores, if that is not wanted. Nobody starves, as long as
//! permits are released.
//!
//! A weight that could never be admitted, because it is above the capacity or not positive, is refused
//! at once rather than queued.
//!
//! # Limits
//!
//! The queue is bounded by [`max_waiters`](SemaphoreBuilder::max_waiters); without it nobody waits.
//! A semaphore counts what runs in one process: with capacity N on R replicas up to N × R can be in
//! flight. For a limit over all of them see [`Limiter`](crate::Limiter).
//!
//! # Runtime
//!
//! It works on any executor, and off it; only deadlines need tokio's timer. It spawns no task and
//! has no global state. On tokio an acquire takes part in cooperative scheduling: a task that has
//! used up its budget is admitted in its turn, and yields before it goes on.
//!
//! # Cost
//!
//! While nobody waits, an acquire and a release are one compare-and-swap each. Joining the queue,
//! leaving it and being granted take a lock for a time that does not depend on the queue's length.
//! An [observer](SemaphoreBuilder::observer), an [event ring](SemaphoreBuilder::events) or a capacity
//! of 2³² and more make each operation take that lock.

mod acquire;
mod builder;
mod effects;
mod error;
mod event;
mod gate;
mod handle;
mod idle;
#[cfg(all(test, any(slots_loom, slots_shuttle)))]
mod models;
mod permit;
mod queue;
mod slab;
mod snapshot;
mod state;
mod sync;
#[cfg(all(test, not(any(slots_loom, slots_shuttle))))]
mod tests;
mod word;

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

pub use self::acquire::{Acquire, AcquireDeadline};
pub use self::builder::{MAX_EVENTS, MAX_WAITERS, SemaphoreBuilder};
pub use self::error::{
    AcquireError, AcquireErrorKind, ConfigError, ConfigField, ConfigProblem, DeadlineExceeded,
    DuplicateRelease,
};
pub use self::event::{Event, EventBatch, EventKind, Reason};
use self::gate::Gate;
use self::handle::Handle;
pub use self::idle::WaitIdle;
pub use self::permit::{Permit, PermitId, SharedPermit};
pub use self::snapshot::Snapshot;

/// A weighted first come first served semaphore; see the [module](self). A cheap clone: clones are
/// the same semaphore.
#[derive(Clone)]
pub struct Semaphore {
    gate: Handle,
}

impl Semaphore {
    /// Starts to build a semaphore that admits up to `capacity` in total weight.
    pub fn builder(capacity: i64) -> SemaphoreBuilder {
        SemaphoreBuilder::new(capacity)
    }

    fn new(gate: Gate) -> Self {
        Self { gate: Handle::new(gate) }
    }

    /// Acquires `weight`, and waits for it if others are first or too little is available.
    ///
    /// The permit borrows nothing; for a future that does not either, see [`Acquire::into_owned`].
    ///
    /// # Errors
    ///
    /// In this order: [`InvalidWeight`](AcquireError::InvalidWeight),
    /// [`Oversize`](AcquireError::Oversize), [`Closed`](AcquireError::Closed) and, when it would have
    /// to wait, [`QueueFull`](AcquireError::QueueFull), each at once; `Closed` as well if the
    /// semaphore is closed while it waits.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up its place in the queue: a caller that comes back stands at the
    /// end. If the permit was granted before, but not seen yet, it is released. Nothing leaks.
    #[inline]
    pub fn acquire(&self, weight: i64) -> Acquire<'_> {
        Acquire::new(self, weight)
    }

    /// [Acquires](Self::acquire) `weight`, and waits for it no longer than `timeout` from now.
    ///
    /// A timeout of zero has always passed; to not wait at all, use
    /// [`try_acquire`](Self::try_acquire).
    ///
    /// # Errors
    ///
    /// As [`acquire_deadline`](Self::acquire_deadline).
    ///
    /// # Panics
    ///
    /// When it has to wait outside a tokio runtime with timers.
    pub fn acquire_timeout(&self, weight: i64, timeout: Duration) -> AcquireDeadline<'_> {
        AcquireDeadline::new(self.acquire(weight), Instant::now().checked_add(timeout))
    }

    /// [Acquires](Self::acquire) `weight`, and waits for it until `deadline`.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), and [`Deadline`](AcquireError::Deadline) if the deadline passes
    /// before the permit is granted. One that has passed already comes after the checks of the weight
    /// and before everything else: it fails also when `weight` is available.
    ///
    /// A permit that was granted in time is returned, even if the deadline has passed when the task
    /// gets to see it.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    ///
    /// When it has to wait outside a tokio runtime with timers.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tower_slots::semaphore::{AcquireError, Semaphore};
    ///
    /// let semaphore = Semaphore::builder(1).max_waiters(8).build()?;
    /// let _held = semaphore.acquire(1).await?;
    /// let late = semaphore.acquire_timeout(1, Duration::from_millis(5)).await;
    /// assert_eq!(late.unwrap_err(), AcquireError::Deadline);
    /// # Ok(()) }
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
    /// ```
    pub fn acquire_deadline(&self, weight: i64, deadline: Instant) -> AcquireDeadline<'_> {
        AcquireDeadline::new(self.acquire(weight), Some(deadline))
    }

    /// Acquires `weight` if it is available and nobody waits; otherwise `None`, which counts as a
    /// rejection.
    ///
    /// # Errors
    ///
    /// In this order: [`InvalidWeight`](AcquireError::InvalidWeight),
    /// [`Oversize`](AcquireError::Oversize), [`Closed`](AcquireError::Closed).
    #[inline]
    pub fn try_acquire(&self, weight: i64) -> Result<Option<Permit>, AcquireError> {
        let admitted = self.gate.try_acquire(weight)?;
        Ok(admitted.map(|id| Permit(self.gate.held(id, weight))))
    }

    /// Runs `operation` with `weight` held.
    ///
    /// The weight is released when the operation ends, in whatever way: it returns, it panics (the
    /// panic goes on after the release), or this future is dropped. The operation is gone by then.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire). The operation is not started then.
    ///
    /// # Cancel safety
    ///
    /// As that of [`acquire`](Self::acquire), and of `operation` once it runs.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_slots::semaphore::Semaphore;
    ///
    /// let semaphore = Semaphore::builder(2).build()?;
    /// assert_eq!(semaphore.execute(2, async { "finished" }).await?, "finished");
    /// assert_eq!(semaphore.snapshot().available, 2);
    /// # Ok(()) }
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
    /// ```
    pub async fn execute<T>(
        &self,
        weight: i64,
        operation: impl Future<Output = T>,
    ) -> Result<T, AcquireError> {
        let permit = self.acquire(weight).await?;
        let output = operation.await;
        permit.release();
        Ok(output)
    }

    /// Refuses everybody from now on, those who wait included: they fail with
    /// [`Closed`](AcquireError::Closed) in the order of the queue. Permits that are held stay valid.
    ///
    /// It does not wait for them: follow it with [`wait_idle`](Self::wait_idle). Closing again does
    /// nothing.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_slots::semaphore::{AcquireError, Semaphore};
    ///
    /// let semaphore = Semaphore::builder(1).build()?;
    /// let permit = semaphore.acquire(1).await?;
    /// semaphore.close();
    /// assert_eq!(semaphore.acquire(1).await.unwrap_err(), AcquireError::Closed);
    /// tokio::spawn(async move { drop(permit) });
    /// semaphore.wait_idle().await;
    /// # Ok(()) }
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
    /// ```
    pub fn close(&self) {
        self.gate.close();
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// The weight that can be held in total.
    #[must_use]
    pub fn capacity(&self) -> i64 {
        self.gate.capacity()
    }

    /// Waits until nothing is held: not from one permit to the next, when somebody waits for the
    /// weight. At once if nothing is held now.
    ///
    /// What is acquired after that instant does not matter, so that it also ends when new permits are
    /// handed out at once; to be sure that none are, [close](Self::close) first.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on anything.
    pub fn wait_idle(&self) -> WaitIdle {
        WaitIdle::new(self.gate.clone())
    }

    /// [Waits](Self::wait_idle) until nothing is held, but not past `deadline`.
    ///
    /// # Errors
    ///
    /// [`DeadlineExceeded`] if something is still held then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on anything.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime with timers.
    pub async fn wait_idle_deadline(&self, deadline: Instant) -> Result<(), DeadlineExceeded> {
        timeout_at(deadline, self.wait_idle()).await.map_err(|_| DeadlineExceeded)
    }

    /// The state at this instant.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.gate.snapshot()
    }

    /// Takes the recorded events and the number of those that were overwritten, and starts anew.
    /// Empty without [`SemaphoreBuilder::events`].
    ///
    /// ```
    /// use tower_slots::semaphore::{EventKind, Reason, Semaphore};
    ///
    /// let semaphore = Semaphore::builder(1).events(16).build()?;
    /// drop(semaphore.try_acquire(1)?);
    /// let batch = semaphore.drain_events();
    /// assert_eq!((batch.events[0].kind, batch.events[0].reason), (EventKind::Admitted, Reason::Immediate));
    /// assert_eq!((batch.events[1].kind, batch.events[1].reason), (EventKind::Released, Reason::Released));
    /// assert_eq!(batch.dropped, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn drain_events(&self) -> EventBatch {
        self.gate.drain_events()
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Semaphore").field(&self.snapshot()).finish()
    }
}

use std::fmt;

use super::Semaphore;
use super::effects::Observer;
use super::error::{ConfigError, ConfigField, ConfigProblem};
use super::event::Event;
use super::gate::Gate;

/// The most callers that a semaphore can let wait: 1 000 000.
pub const MAX_WAITERS: usize = 1_000_000;

/// The most events that a semaphore can keep: 65 536.
pub const MAX_EVENTS: usize = 65_536;

/// Settings of a [`Semaphore`], from [`Semaphore::builder`].
#[must_use = "a builder does nothing until it is built"]
pub struct SemaphoreBuilder {
    capacity: i64,
    max_waiters: usize,
    events: usize,
    observer: Option<Box<Observer>>,
}

impl SemaphoreBuilder {
    pub(super) fn new(capacity: i64) -> Self {
        Self { capacity, max_waiters: 0, events: 0, observer: None }
    }

    /// How many callers may wait, up to [`MAX_WAITERS`]. Default 0: an acquire is admitted at once or
    /// fails. Nothing is allocated before somebody waits.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.max_waiters = max_waiters;
        self
    }

    /// How many of the last events are kept for [`Semaphore::drain_events`], up to [`MAX_EVENTS`].
    /// The room for them is allocated at once. Default 0: none are recorded.
    ///
    /// With events each operation takes a lock.
    pub fn events(mut self, events: usize) -> Self {
        self.events = events;
        self
    }

    /// Calls `observer` with each event.
    ///
    /// The task that causes a transition calls it, on its own time, after the locks are released:
    /// it may use the semaphore again. Tasks call it concurrently, so that events of different tasks
    /// may arrive in another order than they happened (the event ring keeps that order). A panic in
    /// it is caught, per event, and changes nothing.
    ///
    /// With an observer each operation takes a lock.
    pub fn observer(mut self, observer: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }

    /// Builds the semaphore.
    ///
    /// # Errors
    ///
    /// The first of: a capacity below 1, more than [`MAX_WAITERS`], more than [`MAX_EVENTS`].
    pub fn build(self) -> Result<Semaphore, ConfigError> {
        if self.capacity < 1 {
            return Err(ConfigError::new(ConfigField::Capacity, ConfigProblem::MustBePositive));
        }
        if self.max_waiters > MAX_WAITERS {
            return Err(ConfigError::new(ConfigField::MaxWaiters, ConfigProblem::ExceedsBound));
        }
        if self.events > MAX_EVENTS {
            return Err(ConfigError::new(ConfigField::Events, ConfigProblem::ExceedsBound));
        }
        Ok(Semaphore::new(Gate::new(self.capacity, self.max_waiters, self.events, self.observer)))
    }
}

impl fmt::Debug for SemaphoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphoreBuilder")
            .field("capacity", &self.capacity)
            .field("max_waiters", &self.max_waiters)
            .field("events", &self.events)
            .field("observed", &self.observer.is_some())
            .finish()
    }
}

use std::collections::VecDeque;
use std::fmt;

use super::permit::PermitId;
use super::snapshot::Snapshot;

/// One transition of a [`Semaphore`](super::Semaphore), as an observer or the event ring sees it.
///
/// An event holds numbers and words of a closed vocabulary, and no text of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Why.
    pub reason: Reason,
    /// The permit that was handed out or released; [zero](PermitId::is_zero) where there is none.
    pub permit_id: PermitId,
    /// The weight that was asked for, as given; 0 when the semaphore was closed.
    pub weight: i64,
    /// The state right after this transition, before those that follow from it.
    pub snapshot: Snapshot,
}

/// What happened in an [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKind {
    /// A permit was handed out.
    Admitted,
    /// A caller entered the queue.
    Queued,
    /// A caller gave up.
    Canceled,
    /// A caller was refused.
    Rejected,
    /// A permit was released.
    Released,
    /// The semaphore was closed.
    Closed,
}

impl EventKind {
    /// A stable name: `"admitted"`, `"queued"`, `"canceled"`, `"rejected"`, `"released"` or
    /// `"closed"`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Queued => "queued",
            Self::Canceled => "canceled",
            Self::Rejected => "rejected",
            Self::Released => "released",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why an [`Event`] happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The weight was available and nobody waited: admitted without waiting.
    Immediate,
    /// Through the queue, first come first served.
    Fifo,
    /// `try_acquire` found too little available, or callers waiting.
    Unavailable,
    /// The weight is not positive.
    InvalidWeight,
    /// The weight is above the capacity.
    Oversize,
    /// The queue is full.
    QueueFull,
    /// The caller dropped its queued acquire.
    ContextCanceled,
    /// The caller's deadline passed.
    Deadline,
    /// The semaphore is closed.
    Closed,
    /// A permit was released or dropped.
    Released,
    /// `close` was called.
    Shutdown,
}

impl Reason {
    /// A stable name in snake case: `"immediate"`, `"invalid_weight"`, `"context_canceled"` …
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Immediate => "immediate",
            Self::Fifo => "fifo",
            Self::Unavailable => "unavailable",
            Self::InvalidWeight => "invalid_weight",
            Self::Oversize => "oversize",
            Self::QueueFull => "queue_full",
            Self::ContextCanceled => "context_canceled",
            Self::Deadline => "deadline",
            Self::Closed => "closed",
            Self::Released => "released",
            Self::Shutdown => "shutdown",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The events that [`Semaphore::drain_events`](super::Semaphore::drain_events) took out of the ring.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EventBatch {
    /// The events in the order of their transitions, oldest first.
    pub events: Vec<Event>,
    /// How many older events were overwritten since the last drain.
    pub dropped: u64,
}

/// The last events, as many as were asked for: when it is full, the oldest makes room.
#[derive(Debug, Default)]
pub(super) struct Ring {
    events: VecDeque<Event>,
    capacity: usize,
    dropped: u64,
}

impl Ring {
    pub(super) fn new(capacity: usize) -> Self {
        Self { events: VecDeque::with_capacity(capacity), capacity, dropped: 0 }
    }

    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() == self.capacity {
            self.events.pop_front();
            self.dropped = self.dropped.saturating_add(1);
        }
        self.events.push_back(event);
    }

    pub(super) fn into_batch(self) -> EventBatch {
        EventBatch { events: self.events.into(), dropped: self.dropped }
    }
}

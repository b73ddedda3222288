//! The rules, as a plain state machine: no lock, no atomic, no callback.

use std::task::Waker;

use super::effects::Effects;
use super::error::AcquireError;
use super::event::{Event, EventKind, Reason, Ring};
use super::idle::Idle;
use super::permit::PermitId;
use super::queue::{Queue, Ticket, Verdict};
use super::snapshot::Snapshot;

/// What an acquire came to at once.
pub(super) enum Start {
    Admitted(PermitId),
    Queued(Ticket),
}

/// Who hears of transitions.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) ring: Option<Ring>,
    pub(super) observed: bool,
}

/// Everything there is to know about a semaphore, while its [`Gate`](super::gate::Gate) is shut.
///
/// Invariants after each method: `0 <= acquired <= capacity`; while someone waits, the first wants
/// more than is available; nobody waits once it is closed; the n-th admission has id n.
#[derive(Debug)]
pub(super) struct State {
    pub(super) capacity: i64,
    pub(super) acquired: i64,
    pub(super) admissions: u64,
    pub(super) rejections: u64,
    pub(super) queue: Queue,
    pub(super) idle: Idle,
    /// Boxed: most have none, and each transition asks.
    pub(super) journal: Option<Box<Journal>>,
    /// Needed for good: somebody listens, the weights do not fit into a word, it is closed or deserted.
    always: bool,
    max_waiters: usize,
    cancellations: u64,
    closed: bool,
}

impl State {
    pub(super) fn new(capacity: i64, max_waiters: usize, wide: bool, journal: Option<Box<Journal>>) -> Self {
        Self {
            always: wide || journal.is_some(),
            capacity,
            acquired: 0,
            admissions: 0,
            rejections: 0,
            queue: Queue::default(),
            idle: Idle::default(),
            journal,
            max_waiters,
            cancellations: 0,
            closed: false,
        }
    }

    #[inline]
    pub(super) fn available(&self) -> i64 {
        self.capacity - self.acquired
    }

    /// Whether the next operation has to be decided here too, because more than two counters are at
    /// stake.
    #[inline]
    pub(super) fn needed(&self) -> bool {
        !self.queue.is_empty() || self.always || !self.idle.is_empty()
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot {
            capacity: self.capacity,
            acquired: self.acquired,
            available: self.available(),
            waiters: self.queue.len(),
            admissions: self.admissions,
            rejections: self.rejections,
            cancellations: self.cancellations,
            closed: self.closed,
        }
    }

    /// Admits, queues or refuses a valid weight. `waker` is taken if the caller is queued.
    #[inline(always)]
    pub(super) fn acquire(
        &mut self,
        weight: i64,
        waker: &mut Option<Waker>,
        effects: &mut Effects,
    ) -> Result<Start, AcquireError> {
        if self.closed {
            return Err(self.refuse(weight, AcquireError::Closed, effects));
        }
        if self.fits(weight) {
            return Ok(Start::Admitted(self.admit(weight, Reason::Immediate, effects)));
        }
        if self.queue.len() >= self.max_waiters {
            return Err(self.refuse(weight, AcquireError::QueueFull { limit: self.max_waiters }, effects));
        }
        let ticket = self.queue.join(waker.take().expect("one waker per caller"), weight);
        self.emit(EventKind::Queued, Reason::Fifo, PermitId::ZERO, weight, effects);
        Ok(Start::Queued(ticket))
    }

    /// Admits a valid weight, or not.
    #[inline]
    pub(super) fn try_acquire(
        &mut self,
        weight: i64,
        effects: &mut Effects,
    ) -> Result<Option<PermitId>, AcquireError> {
        if self.closed {
            return Err(self.refuse(weight, AcquireError::Closed, effects));
        }
        if self.fits(weight) {
            return Ok(Some(self.admit(weight, Reason::Immediate, effects)));
        }
        self.reject(weight, Reason::Unavailable, effects);
        Ok(None)
    }

    /// Counts a refusal.
    #[cold]
    pub(super) fn refuse(&mut self, weight: i64, error: AcquireError, effects: &mut Effects) -> AcquireError {
        let reason = match error {
            AcquireError::InvalidWeight { .. } => Reason::InvalidWeight,
            AcquireError::Oversize { .. } => Reason::Oversize,
            AcquireError::QueueFull { .. } => Reason::QueueFull,
            AcquireError::Closed => Reason::Closed,
            AcquireError::Deadline => {
                self.cancel(weight, Reason::Deadline, effects);
                return error;
            }
        };
        self.reject(weight, reason, effects);
        error
    }

    #[inline(always)]
    pub(super) fn release(&mut self, id: PermitId, weight: i64, effects: &mut Effects) {
        self.acquired -= weight;
        self.emit(EventKind::Released, Reason::Released, id, weight, effects);
        self.grant(effects);
        if self.acquired == 0 {
            self.idle.complete(effects);
        }
    }

    /// Takes a queued caller out: its waker, or how its wait had ended before.
    #[inline(always)]
    pub(super) fn leave(
        &mut self,
        ticket: Ticket,
        weight: i64,
        reason: Reason,
        effects: &mut Effects,
    ) -> Result<Waker, Verdict> {
        let waker = self.queue.leave(ticket)?;
        self.cancel(weight, reason, effects);
        self.grant(effects);
        if let Some(surplus) = self.queue.surplus() {
            effects.free(surplus);
        }
        Ok(waker)
    }

    pub(super) fn close(&mut self, effects: &mut Effects) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.always = true;
        while let Some((weight, waker)) = self.queue.settle_head(Verdict::Closed) {
            effects.wake(waker);
            self.reject(weight, Reason::Closed, effects);
        }
        self.emit(EventKind::Closed, Reason::Shutdown, PermitId::ZERO, 0, effects);
    }

    /// No handle is left, and so nobody who waits.
    pub(super) fn desert(&mut self) {
        self.always = true;
    }

    /// By subtraction: a sum could overflow.
    #[inline]
    fn fits(&self, weight: i64) -> bool {
        self.queue.is_empty() && weight <= self.available()
    }

    /// Admits from the head of the queue up to the first who does not fit.
    #[inline(always)]
    fn grant(&mut self, effects: &mut Effects) {
        while self.queue.head_weight().is_some_and(|weight| weight <= self.available()) {
            self.grant_head(effects);
        }
    }

    #[inline(always)]
    fn grant_head(&mut self, effects: &mut Effects) {
        let id = PermitId::new(self.admissions + 1);
        if let Some((weight, waker)) = self.queue.settle_head(Verdict::Granted(id)) {
            effects.wake(waker);
            self.admit(weight, Reason::Fifo, effects);
        }
    }

    #[inline]
    fn admit(&mut self, weight: i64, reason: Reason, effects: &mut Effects) -> PermitId {
        self.acquired += weight;
        self.admissions += 1;
        let id = PermitId::new(self.admissions);
        self.emit(EventKind::Admitted, reason, id, weight, effects);
        id
    }

    fn reject(&mut self, weight: i64, reason: Reason, effects: &mut Effects) {
        self.rejections += 1;
        self.emit(EventKind::Rejected, reason, PermitId::ZERO, weight, effects);
    }

    fn cancel(&mut self, weight: i64, reason: Reason, effects: &mut Effects) {
        self.cancellations += 1;
        self.emit(EventKind::Canceled, reason, PermitId::ZERO, weight, effects);
    }

    #[inline]
    fn emit(
        &mut self,
        kind: EventKind,
        reason: Reason,
        permit_id: PermitId,
        weight: i64,
        effects: &mut Effects,
    ) {
        if self.journal.is_some() {
            let snapshot = self.snapshot();
            self.record(Event { kind, reason, permit_id, weight, snapshot }, effects);
        }
    }

    #[cold]
    fn record(&mut self, event: Event, effects: &mut Effects) {
        if let Some(journal) = &mut self.journal {
            journal.record(event, effects);
        }
    }
}

impl Journal {
    fn record(&mut self, event: Event, effects: &mut Effects) {
        if let Some(ring) = &mut self.ring {
            ring.push(event);
        }
        if self.observed {
            effects.observe(event);
        }
    }
}

//! The queue: a linked list over a slab, so that joining, granting and leaving from anywhere are O(1).

use std::task::Waker;

use super::permit::PermitId;
use super::slab::{NONE, Slab};

/// What became of a caller that joined the queue.
#[derive(Debug)]
enum Waiter {
    Queued(Queued),
    /// It has its permit, and does not know yet.
    Granted(PermitId),
    /// The semaphore was closed while it waited.
    Closed,
}

#[derive(Debug)]
struct Queued {
    waker: Waker,
    weight: i64,
    before: u32,
    after: u32,
}

/// Where a caller stands: to be given back exactly once, through [`Queue::look`] or [`Queue::leave`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket(u32);

/// How a wait ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    Granted(PermitId),
    Closed,
}

/// What a waiting caller sees.
pub(super) enum Look {
    /// The wait is over, and the ticket spent.
    Over(Verdict),
    Waiting,
    /// Waiting, and the waker that the queue holds is not the caller's.
    WakerChanged,
}

/// Callers in the order they came.
///
/// Invariants: exactly the `Queued` entries of the slab are linked, from `head` to `tail`, and `len`
/// counts them. `Granted` and `Closed` entries only wait for their callers to look.
#[derive(Debug)]
pub(super) struct Queue {
    entries: Slab<Waiter>,
    head: u32,
    tail: u32,
    len: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Self { entries: Slab::default(), head: NONE, tail: NONE, len: 0 }
    }
}

impl Queue {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What the first in line wants.
    #[inline]
    pub(super) fn head_weight(&self) -> Option<i64> {
        (self.head != NONE).then(|| self.queued(self.head).weight)
    }

    #[inline]
    pub(super) fn join(&mut self, waker: Waker, weight: i64) -> Ticket {
        let entry = Waiter::Queued(Queued { waker, weight, before: self.tail, after: NONE });
        let index = self.entries.insert(entry);
        match self.tail {
            NONE => self.head = index,
            tail => self.queued_mut(tail).after = index,
        }
        self.tail = index;
        self.len += 1;
        Ticket(index)
    }

    /// Ends the wait of the first in line; the caller wakes it.
    #[inline]
    pub(super) fn settle_head(&mut self, verdict: Verdict) -> Option<(Waker, i64)> {
        let index = self.head;
        if index == NONE {
            return None;
        }
        let settled = match verdict {
            Verdict::Granted(id) => Waiter::Granted(id),
            Verdict::Closed => Waiter::Closed,
        };
        match std::mem::replace(self.entries.get_mut(index), settled) {
            Waiter::Queued(queued) => {
                self.unlink(&queued);
                Some((queued.waker, queued.weight))
            }
            _ => unreachable!("the head of the queue does not wait"),
        }
    }

    /// What became of the holder of `ticket`. With `fresh`, a clone of `current`, a changed waker is
    /// replaced, and the old one put in its place.
    pub(super) fn look(&mut self, ticket: Ticket, current: &Waker, fresh: &mut Option<Waker>) -> Look {
        let verdict = match self.entries.get_mut(ticket.0) {
            Waiter::Queued(queued) if queued.waker.will_wake(current) => return Look::Waiting,
            Waiter::Queued(queued) => {
                let Some(fresh) = fresh else { return Look::WakerChanged };
                std::mem::swap(fresh, &mut queued.waker);
                return Look::Waiting;
            }
            Waiter::Granted(id) => Verdict::Granted(*id),
            Waiter::Closed => Verdict::Closed,
        };
        self.entries.remove(ticket.0);
        Look::Over(verdict)
    }

    /// Takes the holder of `ticket` out, wherever it stands: its waker, unless its wait was over.
    #[inline]
    pub(super) fn leave(&mut self, ticket: Ticket) -> Result<Waker, Verdict> {
        match self.entries.remove(ticket.0) {
            Waiter::Queued(queued) => {
                self.unlink(&queued);
                Ok(queued.waker)
            }
            Waiter::Granted(id) => Err(Verdict::Granted(id)),
            Waiter::Closed => Err(Verdict::Closed),
        }
    }

    /// See [`Slab::surplus`].
    #[inline]
    pub(super) fn surplus(&mut self) -> Option<impl Sized + use<>> {
        self.entries.surplus()
    }

    #[inline]
    fn unlink(&mut self, queued: &Queued) {
        match queued.before {
            NONE => self.head = queued.after,
            before => self.queued_mut(before).after = queued.after,
        }
        match queued.after {
            NONE => self.tail = queued.before,
            after => self.queued_mut(after).before = queued.before,
        }
        self.len -= 1;
    }

    #[inline]
    fn queued(&self, index: u32) -> &Queued {
        match self.entries.get(index) {
            Waiter::Queued(queued) => queued,
            _ => unreachable!("a link leads out of the queue"),
        }
    }

    #[inline]
    fn queued_mut(&mut self, index: u32) -> &mut Queued {
        match self.entries.get_mut(index) {
            Waiter::Queued(queued) => queued,
            _ => unreachable!("a link leads out of the queue"),
        }
    }
}

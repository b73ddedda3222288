//! The queue: a linked list over a slab, so that joining, granting and leaving from anywhere are O(1).

use std::mem;
use std::task::Waker;

use super::permit::PermitId;
use super::slab::{Links, NONE, Slab};

/// How a wait ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    Granted(PermitId),
    Closed,
}

/// Where a caller stands: to be spent exactly once, through [`Queue::look`] or [`Queue::leave`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket(u32);

/// What a caller sees that looks whether its wait is over.
pub(super) enum Look {
    /// It is, and the ticket is spent.
    Over(Verdict),
    Waiting,
    /// It waits, and the queue holds another waker than the caller's.
    WakerChanged,
}

/// Memory that the queue no longer needs.
pub(super) type Surplus = Slab<Waiter>;

/// One caller, as the queue knows it.
#[derive(Debug)]
pub(super) enum Waiter {
    Waiting { waker: Waker, weight: i64 },
    Over(Verdict),
}

impl Default for Waiter {
    fn default() -> Self {
        Self::Over(Verdict::Closed)
    }
}

/// Callers in the order they came.
///
/// Invariants: exactly those who wait are linked, from `head` to `tail`, and `len` counts them. The
/// others only wait for their callers to look.
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
        if self.head == NONE {
            return None;
        }
        match self.entries.get(self.head) {
            Waiter::Waiting { weight, .. } => Some(*weight),
            Waiter::Over(_) => None,
        }
    }

    #[inline]
    pub(super) fn join(&mut self, waker: Waker, weight: i64) -> Ticket {
        let (index, before) = (self.entries.take(), self.tail);
        *self.entries.get_mut(index) = Waiter::Waiting { waker, weight };
        *self.entries.links(index) = Links { before, after: NONE };
        match before {
            NONE => self.head = index,
            before => self.entries.links(before).after = index,
        }
        self.tail = index;
        self.len += 1;
        Ticket(index)
    }

    /// Ends the wait of the first in line: its weight, and its waker for the caller to wake.
    #[inline(always)]
    pub(super) fn settle_head(&mut self, verdict: Verdict) -> Option<(i64, Waker)> {
        let index = self.head;
        if index == NONE {
            return None;
        }
        match mem::replace(self.entries.get_mut(index), Waiter::Over(verdict)) {
            Waiter::Waiting { waker, weight } => {
                self.unlink(index);
                Some((weight, waker))
            }
            Waiter::Over(_) => None,
        }
    }

    /// What became of the holder of `ticket`, whose waker is `current`.
    #[inline]
    pub(super) fn look(&mut self, ticket: Ticket, current: &Waker) -> Look {
        match *self.entries.get(ticket.0) {
            Waiter::Over(verdict) => {
                self.entries.free(ticket.0);
                Look::Over(verdict)
            }
            Waiter::Waiting { ref waker, .. } if waker.will_wake(current) => Look::Waiting,
            Waiter::Waiting { .. } => Look::WakerChanged,
        }
    }

    /// Another waker for the holder of `ticket`: the old one, or the new one if its wait is over.
    pub(super) fn change_waker(&mut self, ticket: Ticket, fresh: Waker) -> Result<Waker, Waker> {
        match self.entries.get_mut(ticket.0) {
            Waiter::Waiting { waker, .. } => Ok(mem::replace(waker, fresh)),
            Waiter::Over(_) => Err(fresh),
        }
    }

    /// Takes the holder of `ticket` out, wherever it stands: its waker, unless its wait was over.
    #[inline(always)]
    pub(super) fn leave(&mut self, ticket: Ticket) -> Result<Waker, Verdict> {
        let left = match mem::take(self.entries.get_mut(ticket.0)) {
            Waiter::Waiting { waker, .. } => {
                self.unlink(ticket.0);
                Ok(waker)
            }
            Waiter::Over(verdict) => Err(verdict),
        };
        self.entries.free(ticket.0);
        left
    }

    /// See [`Slab::surplus`].
    #[inline]
    pub(super) fn surplus(&mut self) -> Option<Surplus> {
        self.entries.surplus()
    }

    #[inline]
    fn unlink(&mut self, index: u32) {
        let Links { before, after } = *self.entries.links(index);
        match before {
            NONE => self.head = after,
            before => self.entries.links(before).after = after,
        }
        match after {
            NONE => self.tail = before,
            after => self.entries.links(after).before = before,
        }
        self.len -= 1;
    }
}

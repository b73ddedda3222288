//! The queue: a linked list over a slab, so that joining, granting and leaving from anywhere are O(1).

use std::task::Waker;

use super::permit::PermitId;
use super::slab::{NONE, Slab};

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

#[derive(Debug, Default)]
pub(super) struct Waiter {
    /// There is one while the caller waits.
    waker: Option<Waker>,
    weight: i64,
    before: u32,
    after: u32,
    verdict: Option<Verdict>,
}

/// Callers in the order they came.
///
/// Invariants: exactly the entries without a verdict are linked, from `head` to `tail`, and `len`
/// counts them. Those with one only wait for their callers to look.
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
        (self.head != NONE).then(|| self.entries.get(self.head).weight)
    }

    #[inline]
    pub(super) fn join(&mut self, waker: Waker, weight: i64) -> Ticket {
        let (index, before) = (self.entries.take(), self.tail);
        let entry = self.entries.get_mut(index);
        entry.waker = Some(waker);
        entry.weight = weight;
        entry.before = before;
        entry.after = NONE;
        entry.verdict = None;
        match before {
            NONE => self.head = index,
            before => self.entries.get_mut(before).after = index,
        }
        self.tail = index;
        self.len += 1;
        Ticket(index)
    }

    /// Ends the wait of the first in line: its weight, and its waker for the caller to wake.
    #[inline(always)]
    pub(super) fn settle_head(&mut self, verdict: Verdict) -> Option<(i64, Option<Waker>)> {
        let index = self.head;
        if index == NONE {
            return None;
        }
        let entry = self.entries.get_mut(index);
        entry.verdict = Some(verdict);
        let settled = (entry.weight, entry.waker.take());
        self.unlink(index);
        Some(settled)
    }

    /// What became of the holder of `ticket`, whose waker is `current`.
    #[inline]
    pub(super) fn look(&mut self, ticket: Ticket, current: &Waker) -> Look {
        let entry = self.entries.get(ticket.0);
        match (entry.verdict, &entry.waker) {
            (Some(verdict), _) => {
                self.entries.free(ticket.0);
                Look::Over(verdict)
            }
            (None, Some(waker)) if waker.will_wake(current) => Look::Waiting,
            (None, _) => Look::WakerChanged,
        }
    }

    /// Another waker for the holder of `ticket`: the old one, or the new one if its wait is over.
    pub(super) fn change_waker(&mut self, ticket: Ticket, waker: Waker) -> Result<Option<Waker>, Waker> {
        let entry = self.entries.get_mut(ticket.0);
        match entry.verdict {
            None => Ok(entry.waker.replace(waker)),
            Some(_) => Err(waker),
        }
    }

    /// Takes the holder of `ticket` out, wherever it stands: its waker, unless its wait was over.
    #[inline(always)]
    pub(super) fn leave(&mut self, ticket: Ticket) -> Result<Option<Waker>, Verdict> {
        let entry = self.entries.get_mut(ticket.0);
        let left = match entry.verdict {
            Some(verdict) => Err(verdict),
            None => Ok(entry.waker.take()),
        };
        if left.is_ok() {
            self.unlink(ticket.0);
        }
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
        let Waiter { before, after, .. } = *self.entries.get(index);
        match before {
            NONE => self.head = after,
            before => self.entries.get_mut(before).after = after,
        }
        match after {
            NONE => self.tail = before,
            after => self.entries.get_mut(after).before = before,
        }
        self.len -= 1;
    }
}

//! What a transition leaves to be done once the lock is released.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

use super::event::Event;
use super::queue::Surplus;
use super::slab::Slab;

/// Called with every event.
pub(super) type Observer = dyn Fn(&Event) + Send + Sync;

/// What a transition collects under the lock, and what runs without it.
///
/// A transition seldom leaves more than one waker: only what goes beyond that takes an allocation.
#[derive(Debug, Default)]
pub(super) struct Effects {
    waker: Option<Waker>,
    more: Option<Box<More>>,
}

#[derive(Debug, Default)]
struct More {
    wakers: Vec<Waker>,
    idle: Slab<Option<Waker>>,
    surplus: Option<Surplus>,
    events: Vec<Event>,
}

impl Effects {
    #[inline]
    pub(super) fn wake(&mut self, waker: Waker) {
        match self.waker {
            None => self.waker = Some(waker),
            Some(_) => self.more().wakers.push(waker),
        }
    }

    pub(super) fn wake_idle(&mut self, waiting: Slab<Option<Waker>>) {
        self.more().idle = waiting;
    }

    #[cold]
    pub(super) fn free(&mut self, surplus: Surplus) {
        self.more().surplus = Some(surplus);
    }

    pub(super) fn observe(&mut self, event: Event) {
        self.more().events.push(event);
    }

    /// Runs everything, each on its own: neither a waker nor an observer that panics keeps the
    /// others from their turn, and a panic ends here.
    #[inline(always)]
    pub(super) fn run(self, observer: Option<&Observer>) {
        if let Some(waker) = self.waker {
            contained(|| waker.wake());
        }
        if let Some(more) = self.more {
            more.run(observer);
        }
    }

    #[cold]
    fn more(&mut self) -> &mut More {
        self.more.get_or_insert_default()
    }
}

impl More {
    #[cold]
    fn run(self, observer: Option<&Observer>) {
        for waker in self.wakers.into_iter().chain(self.idle.into_values().flatten()) {
            contained(|| waker.wake());
        }
        drop(self.surplus);
        if let Some(observer) = observer {
            self.events.iter().for_each(|event| contained(|| observer(event)));
        }
    }
}

/// Runs code of others; the panic hook has reported what is swallowed here.
fn contained(call: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(call)) {
        // The payload may panic as well when it is dropped; what that throws is leaked.
        mem::forget(catch_unwind(AssertUnwindSafe(|| drop(payload))));
    }
}

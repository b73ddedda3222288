//! Callers that wait until nothing is held.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::effects::Effects;
use super::handle::Handle;
use super::slab::Slab;

/// The callers that wait for the current drain, and how many drains are over.
///
/// A caller belongs to the drain during which it came: once that is over its place is gone, whatever
/// was acquired since.
#[derive(Debug, Default)]
pub(super) struct Idle {
    waiting: Slab<Option<Waker>>,
    drains: u64,
}

/// A caller's place among those who wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    index: u32,
    drain: u64,
}

impl Idle {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.taken() == 0
    }

    pub(super) fn join(&mut self, waker: Waker) -> Place {
        let index = self.waiting.take();
        *self.waiting.get_mut(index) = Some(waker);
        Place { index, drain: self.drains }
    }

    pub(super) fn is_over(&self, place: Place) -> bool {
        place.drain != self.drains
    }

    /// Whether a place that is not over is to wake `waker`.
    pub(super) fn will_wake(&self, place: Place, waker: &Waker) -> bool {
        self.waiting.get(place.index).as_ref().is_some_and(|held| held.will_wake(waker))
    }

    /// Another waker for a place: the old one, or the new one if the wait is over.
    pub(super) fn change_waker(&mut self, place: Place, waker: Waker) -> Result<Option<Waker>, Waker> {
        if self.is_over(place) {
            return Err(waker);
        }
        Ok(self.waiting.get_mut(place.index).replace(waker))
    }

    pub(super) fn leave(&mut self, place: Place) -> Option<Waker> {
        if self.is_over(place) {
            return None;
        }
        self.waiting.free(place.index);
        self.waiting.get_mut(place.index).take()
    }

    /// Nothing is held: everyone who waits is done.
    pub(super) fn complete(&mut self, effects: &mut Effects) {
        if !self.is_empty() {
            self.drains += 1;
            effects.wake_idle(mem::take(&mut self.waiting));
        }
    }
}

/// Future of [`Semaphore::wait_idle`](super::Semaphore::wait_idle).
#[must_use = "futures do nothing unless they are awaited"]
pub struct WaitIdle {
    gate: Handle,
    stage: Stage,
}

enum Stage {
    Start,
    Waiting(Place),
    Done,
}

impl WaitIdle {
    pub(super) fn new(gate: Handle) -> Self {
        Self { gate, stage: Stage::Start }
    }
}

impl Future for WaitIdle {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let waiting = match self.stage {
            Stage::Start => self.gate.join_idle(cx.waker()),
            Stage::Waiting(place) => self.gate.look_idle(place, cx.waker()),
            Stage::Done => None,
        };
        match waiting {
            Some(place) => {
                self.stage = Stage::Waiting(place);
                Poll::Pending
            }
            None => {
                self.stage = Stage::Done;
                Poll::Ready(())
            }
        }
    }
}

impl Drop for WaitIdle {
    fn drop(&mut self) {
        if let Stage::Waiting(place) = self.stage {
            drop(self.gate.leave_idle(place));
        }
    }
}

impl fmt::Debug for WaitIdle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitIdle").finish_non_exhaustive()
    }
}

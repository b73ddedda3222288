//! The futures that acquire.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Semaphore;
use super::error::AcquireError;
use super::gate::Gate;
use super::permit::{Permit, PermitId};
use super::queue::{Ticket, Verdict};
use super::state::Start;

/// Future of [`Semaphore::acquire`](super::Semaphore::acquire).
///
/// Its first poll decides: it admits, refuses, or takes a place in the queue. A future that is not
/// polled holds no place. Once it has a place, dropping it is the cancellation; if the permit was
/// granted by then, dropping it releases the permit.
///
/// A place is kept without polling: a granted future that its task neither polls nor drops holds its
/// weight like a permit. Take care with several of them in one task.
#[must_use = "futures do nothing unless they are awaited"]
pub struct Acquire<'a> {
    semaphore: Cow<'a, Semaphore>,
    weight: i64,
    stage: Stage,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Start,
    Queued(Ticket),
    /// Admitted, but the task has used up its budget and has to yield before it goes on.
    Admitted(PermitId),
    Done,
}

impl<'a> Acquire<'a> {
    #[inline]
    pub(super) fn new(semaphore: &'a Semaphore, weight: i64) -> Self {
        Self { semaphore: Cow::Borrowed(semaphore), weight, stage: Stage::Start }
    }

    /// The same future, at the same place in the queue, with a handle of its own instead of a borrowed
    /// one.
    ///
    /// ```
    /// use tower_slots::semaphore::{Acquire, Semaphore};
    ///
    /// fn on_its_own() -> Acquire<'static> {
    ///     let semaphore = Semaphore::builder(1).build().unwrap();
    ///     semaphore.acquire(1).into_owned()
    /// }
    /// # assert!(tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(on_its_own()).is_ok());
    /// ```
    pub fn into_owned(mut self) -> Acquire<'static> {
        let stage = mem::replace(&mut self.stage, Stage::Done);
        Acquire { semaphore: Cow::Owned((*self.semaphore).clone()), weight: self.weight, stage }
    }

    #[inline(always)]
    fn start(&mut self, cx: &mut Context<'_>) -> Poll<Result<Permit, AcquireError>> {
        match self.gate().admit(self.weight) {
            Some(id) => self.admitted(id, cx),
            None => self.start_slowly(cx, false),
        }
    }

    #[cold]
    fn start_slowly(&mut self, cx: &mut Context<'_>, late: bool) -> Poll<Result<Permit, AcquireError>> {
        match self.gate().acquire(self.weight, late, cx.waker()) {
            Ok(Start::Admitted(id)) => self.admitted(id, cx),
            Ok(Start::Queued(ticket)) => {
                self.stage = Stage::Queued(ticket);
                Poll::Pending
            }
            Err(error) => self.failed(error),
        }
    }

    #[cold]
    fn go_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<Permit, AcquireError>> {
        match self.stage {
            Stage::Queued(ticket) => self.look(ticket, cx),
            Stage::Admitted(id) => self.admitted(id, cx),
            Stage::Start | Stage::Done => panic!("an acquire was polled after it had completed"),
        }
    }

    fn look(&mut self, ticket: Ticket, cx: &mut Context<'_>) -> Poll<Result<Permit, AcquireError>> {
        match self.gate().look(ticket, cx.waker()) {
            None => Poll::Pending,
            Some(Verdict::Granted(id)) => self.admitted(id, cx),
            Some(Verdict::Closed) => self.failed(AcquireError::Closed),
        }
    }

    /// The deadline has passed: whatever came first counts.
    fn expire(&mut self) -> Result<Permit, AcquireError> {
        let outcome = match self.stage {
            Stage::Queued(ticket) => self.gate().expire(ticket, self.weight),
            Stage::Admitted(id) => Ok(id),
            Stage::Start | Stage::Done => unreachable!("nothing waits"),
        };
        self.stage = Stage::Done;
        outcome.map(|id| self.permit(id))
    }

    /// Hands out the permit, unless the task has run for so long that others have to get a turn. The
    /// budget is charged after the admission, so that it never costs a place in the order.
    #[inline(always)]
    fn admitted(&mut self, id: PermitId, cx: &mut Context<'_>) -> Poll<Result<Permit, AcquireError>> {
        match coop::poll_proceed(cx) {
            Poll::Pending => {
                self.stage = Stage::Admitted(id);
                Poll::Pending
            }
            Poll::Ready(budget) => {
                budget.made_progress();
                self.stage = Stage::Done;
                Poll::Ready(Ok(self.permit(id)))
            }
        }
    }

    #[cold]
    fn give_up(&self) {
        match self.stage {
            Stage::Start | Stage::Done => {}
            Stage::Queued(ticket) => self.gate().abandon(ticket, self.weight),
            Stage::Admitted(id) => drop(self.permit(id)),
        }
    }

    fn failed(&mut self, error: AcquireError) -> Poll<Result<Permit, AcquireError>> {
        self.stage = Stage::Done;
        Poll::Ready(Err(error))
    }

    #[inline]
    fn permit(&self, id: PermitId) -> Permit {
        Permit(self.semaphore.gate.held(id, self.weight))
    }

    #[inline]
    fn gate(&self) -> &Gate {
        &self.semaphore.gate
    }
}

impl Future for Acquire<'_> {
    type Output = Result<Permit, AcquireError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.stage {
            Stage::Start => self.start(cx),
            _ => self.go_on(cx),
        }
    }
}

impl Drop for Acquire<'_> {
    #[inline]
    fn drop(&mut self) {
        if !matches!(self.stage, Stage::Start | Stage::Done) {
            self.give_up();
        }
    }
}

impl fmt::Debug for Acquire<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").field("weight", &self.weight).finish_non_exhaustive()
    }
}

pin_project! {
    /// Future of [`Semaphore::acquire_timeout`](super::Semaphore::acquire_timeout) and
    /// [`acquire_deadline`](super::Semaphore::acquire_deadline).
    ///
    /// Like [`Acquire`], and it sets a timer once it has to wait.
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct AcquireDeadline<'a> {
        acquire: Acquire<'a>,
        // None: so far away that it never comes.
        deadline: Option<Instant>,
        #[pin]
        timer: Option<Sleep>,
    }
}

impl<'a> AcquireDeadline<'a> {
    pub(super) fn new(acquire: Acquire<'a>, deadline: Option<Instant>) -> Self {
        Self { acquire, deadline, timer: None }
    }

    /// The same future with a handle of its own; see [`Acquire::into_owned`].
    pub fn into_owned(self) -> AcquireDeadline<'static> {
        AcquireDeadline { acquire: self.acquire.into_owned(), deadline: self.deadline, timer: self.timer }
    }
}

impl Future for AcquireDeadline<'_> {
    type Output = Result<Permit, AcquireError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let polled = match this.acquire.stage {
            Stage::Start => {
                let late = this.deadline.is_some_and(|deadline| deadline <= Instant::now());
                if late { this.acquire.start_slowly(cx, true) } else { this.acquire.start(cx) }
            }
            _ => Pin::new(&mut *this.acquire).poll(cx),
        };
        let (Poll::Pending, Stage::Queued(_), Some(deadline)) = (&polled, this.acquire.stage, *this.deadline)
        else {
            return polled;
        };
        if this.timer.is_none() {
            this.timer.set(Some(sleep_until(deadline)));
        }
        match this.timer.as_pin_mut() {
            Some(timer) => timer.poll(cx).map(|()| this.acquire.expire()),
            None => Poll::Pending,
        }
    }
}

impl fmt::Debug for AcquireDeadline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireDeadline")
            .field("weight", &self.acquire.weight)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

//! The futures that acquire.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

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
pub struct Acquire {
    /// Empty once the permit was handed out.
    gate: Option<Arc<Gate>>,
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

impl Acquire {
    pub(super) fn new(gate: Arc<Gate>, weight: i64) -> Self {
        Self { gate: Some(gate), weight, stage: Stage::Start }
    }

    #[inline]
    fn start(&mut self, cx: &mut Context<'_>, late: bool) -> Poll<Result<Permit, AcquireError>> {
        match self.gate().acquire(self.weight, late, cx.waker()) {
            Ok(Start::Admitted(id)) => self.admitted(id, cx),
            Ok(Start::Queued(ticket)) => {
                self.stage = Stage::Queued(ticket);
                Poll::Pending
            }
            Err(error) => self.failed(error),
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
    #[inline]
    fn admitted(&mut self, id: PermitId, cx: &mut Context<'_>) -> Poll<Result<Permit, AcquireError>> {
        self.stage = Stage::Admitted(id);
        ready!(coop::poll_proceed(cx)).made_progress();
        self.stage = Stage::Done;
        Poll::Ready(Ok(self.permit(id)))
    }

    fn failed(&mut self, error: AcquireError) -> Poll<Result<Permit, AcquireError>> {
        self.stage = Stage::Done;
        Poll::Ready(Err(error))
    }

    #[inline]
    fn permit(&mut self, id: PermitId) -> Permit {
        Permit::new(self.gate.take().expect(COMPLETED), id, self.weight)
    }

    #[inline]
    fn gate(&self) -> &Gate {
        self.gate.as_ref().expect(COMPLETED)
    }
}

const COMPLETED: &str = "an acquire was polled after it had completed";

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.stage {
            Stage::Start => self.start(cx, false),
            Stage::Queued(ticket) => self.look(ticket, cx),
            Stage::Admitted(id) => self.admitted(id, cx),
            Stage::Done => panic!("{COMPLETED}"),
        }
    }
}

impl Drop for Acquire {
    #[inline]
    fn drop(&mut self) {
        match self.stage {
            Stage::Start | Stage::Done => {}
            Stage::Queued(ticket) => self.gate().abandon(ticket, self.weight),
            Stage::Admitted(id) => self.gate().release(id, self.weight),
        }
    }
}

impl fmt::Debug for Acquire {
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
    pub struct AcquireDeadline {
        acquire: Acquire,
        // None: so far away that it never comes.
        deadline: Option<Instant>,
        #[pin]
        timer: Option<Sleep>,
    }
}

impl AcquireDeadline {
    pub(super) fn new(acquire: Acquire, deadline: Option<Instant>) -> Self {
        Self { acquire, deadline, timer: None }
    }
}

impl Future for AcquireDeadline {
    type Output = Result<Permit, AcquireError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let polled = match this.acquire.stage {
            Stage::Start => {
                let late = this.deadline.is_some_and(|deadline| deadline <= Instant::now());
                this.acquire.start(cx, late)
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

impl fmt::Debug for AcquireDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireDeadline")
            .field("weight", &self.acquire.weight)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

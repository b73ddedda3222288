use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::RefusalBody;
use super::bulkhead::{self, Entry};
use super::key::Asked;
use super::observe::Decision;
use super::settings::{Key, Settings};
use super::{Hold, Reason, Rejection, SlotBody};
use crate::limiter::{AcquireError, Claiming, KeyError, Prepared, ProjectId, Slot};
use crate::metrics::{End, Outcome};
use crate::semaphore::{self, AcquireDeadline, Permit};
use crate::store::Reply;
use crate::trace::event;

const POLLED_AGAIN: &str = "`ResponseFuture` polled after it was ready";

pin_project! {
    /// The response to one request: a slot first, then the inner service's answer.
    ///
    /// Nothing is acquired before the first poll. Dropping it gives up the request, and the slot
    /// with it.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        settings: Arc<Settings>,
        #[pin]
        state: State<S, B>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B>
    where
        S: Service<Request<B>>,
    {
        Called { call: Option<Call<S, B>> },
        // The request's head is with the asked one.
        Asking { asked: Asked, rest: Option<(B, S)> },
        Preparing { reply: Reply<Result<Prepared, AcquireError>>, who: Option<Who<S, B>> },
        Entering { entry: Pin<Box<AcquireDeadline<'static>>>, prepared: Option<Prepared>, who: Option<Who<S, B>> },
        Acquiring { claiming: Claiming, permit: Option<Permit>, who: Option<Who<S, B>> },
        // The slot comes after the future: it is given back when that is gone.
        Running { #[pin] future: S::Future, slot: Option<Slot>, method: Method },
    }
}

/// A request and the readied service that waits for it.
struct Call<S, B> {
    parts: Parts,
    body: B,
    inner: S,
}

/// A request whose project is known.
struct Who<S, B> {
    id: ProjectId,
    call: Call<S, B>,
}

/// What comes next, or the refusal that ends it.
enum Step<S: Service<Request<B>>, B> {
    Next(State<S, B>),
    Refused(Response<RefusalBody>),
}

impl<S: Service<Request<B>>, B> ResponseFuture<S, B> {
    pub(super) fn new(settings: Arc<Settings>, request: Request<B>, inner: S) -> Self {
        let (parts, body) = request.into_parts();
        Self { settings, state: State::Called { call: Some(Call { parts, body, inner }) } }
    }
}

impl<S: Service<Request<B>>, B> Call<S, B> {
    fn begin(self, settings: &Settings) -> Step<S, B> {
        if settings.passes(&self.parts) {
            return self.found(settings, Ok(None));
        }
        match &settings.key {
            Key::Now(key) => {
                let found = key.extract(&self.parts);
                self.found(settings, settings.who(found))
            }
            Key::Later(key) => {
                let asked = Asked::new(Arc::clone(key), self.parts);
                Step::Next(State::Asking { asked, rest: Some((self.body, self.inner)) })
            }
        }
    }

    fn found(self, settings: &Settings, who: Result<Option<ProjectId>, KeyError>) -> Step<S, B> {
        match who {
            Ok(Some(id)) => Who { id, call: self }.prepare(settings),
            Ok(None) => {
                settings.limiter.meters().requests.get(Outcome::Skipped).add(1);
                Decision::skipped(settings.limiter.name()).record();
                self.run(None)
            }
            Err(error) => {
                self.refused(settings, None, Rejection::new(settings.limiter.name(), &error.into()))
            }
        }
    }

    fn refused(self, settings: &Settings, id: Option<&ProjectId>, rejection: Rejection) -> Step<S, B> {
        Decision::refused(&rejection, id, settings.shadow).record();
        // The limiter has counted its own refusals, except in shadow.
        let requests = &settings.limiter.meters().requests;
        if settings.shadow {
            requests.get(Outcome::WouldReject).add(1);
            return self.run(None);
        }
        match rejection.reason() {
            Reason::Key(_) => requests.get(Outcome::InvalidKey).add(1),
            Reason::Bulkhead => requests.get(Outcome::BulkheadRejected).add(1),
            _ => {}
        }
        Step::Refused(settings.answer(rejection, &self.parts))
    }

    fn run(self, slot: Option<Slot>) -> Step<S, B> {
        let Self { mut parts, body, mut inner } = self;
        if let Some(slot) = &slot {
            let outer = parts.extensions.remove();
            parts.extensions.insert(slot.handle().within(outer));
        }
        let method = parts.method.clone();
        let future = inner.call(Request::from_parts(parts, body));
        Step::Next(State::Running { future, slot, method })
    }
}

/// The steps in their order; each goes on to the next at once where it need not wait.
impl<S: Service<Request<B>>, B> Who<S, B> {
    fn prepare(self, settings: &Settings) -> Step<S, B> {
        match settings.limiter.prepare(&self.id, settings.how(&self.call.parts)).into_ready() {
            Ok(prepared) => self.prepared(settings, prepared),
            Err(reply) => Step::Next(State::Preparing { reply, who: Some(self) }),
        }
    }

    fn prepared(self, settings: &Settings, prepared: Result<Prepared, AcquireError>) -> Step<S, B> {
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return self.refused(settings, &error),
        };
        let Some(semaphore) = &settings.bulkhead else { return self.acquire(settings, None, prepared) };
        match bulkhead::enter(semaphore, prepared.weight(), settings.bulkhead_wait) {
            Entry::In(permit) => self.acquire(settings, Some(permit), prepared),
            Entry::Refused(error) => self.kept_out(settings, error),
            Entry::Waiting(entry) => {
                Step::Next(State::Entering { entry, prepared: Some(prepared), who: Some(self) })
            }
        }
    }

    fn entered(
        self,
        settings: &Settings,
        permit: Result<Permit, semaphore::AcquireError>,
        prepared: Prepared,
    ) -> Step<S, B> {
        match permit {
            Ok(permit) => self.acquire(settings, Some(permit), prepared),
            Err(error) => self.kept_out(settings, error),
        }
    }

    fn acquire(self, settings: &Settings, permit: Option<Permit>, prepared: Prepared) -> Step<S, B> {
        match settings.limiter.claim(prepared) {
            Ok(answer) => self.decided(settings, permit, answer),
            Err(claiming) => Step::Next(State::Acquiring { claiming, permit, who: Some(self) }),
        }
    }

    fn decided(
        self,
        settings: &Settings,
        permit: Option<Permit>,
        answer: Result<Slot, AcquireError>,
    ) -> Step<S, B> {
        match answer {
            Ok(slot) => {
                Decision::admitted(settings.limiter.name(), &self.id, &slot).record();
                if let Some(permit) = permit {
                    slot.carry(permit);
                }
                self.call.run(Some(slot))
            }
            Err(error) => self.refused(settings, &error),
        }
    }

    fn refused(self, settings: &Settings, error: &AcquireError) -> Step<S, B> {
        let rejection = Rejection::new(settings.limiter.name(), error);
        self.call.refused(settings, Some(&self.id), rejection)
    }

    fn kept_out(self, settings: &Settings, error: semaphore::AcquireError) -> Step<S, B> {
        let rejection = Rejection::kept_out(settings.limiter.name(), error, settings.bulkhead_status);
        self.call.refused(settings, Some(&self.id), rejection)
    }
}

impl<S, B, ResBody, E> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<ResBody>, Error = E>,
    ResBody: Body,
{
    type Output = Result<Response<SlotBody<ResBody>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let step = match this.state.as_mut().project() {
                StateProj::Called { call } => call.take().expect(POLLED_AGAIN).begin(this.settings),
                StateProj::Asking { asked, rest } => {
                    let (parts, found) = ready!(Pin::new(asked).poll(cx));
                    let (body, inner) = rest.take().expect(POLLED_AGAIN);
                    Call { parts, body, inner }.found(this.settings, this.settings.who(found))
                }
                StateProj::Preparing { reply, who } => {
                    let prepared = ready!(Pin::new(reply).poll(cx));
                    who.take().expect(POLLED_AGAIN).prepared(this.settings, prepared)
                }
                StateProj::Entering { entry, prepared, who } => {
                    let permit = ready!(entry.as_mut().poll(cx));
                    let prepared = prepared.take().expect(POLLED_AGAIN);
                    who.take().expect(POLLED_AGAIN).entered(this.settings, permit, prepared)
                }
                StateProj::Acquiring { claiming, permit, who } => {
                    let answer = ready!(Pin::new(claiming).poll(cx));
                    who.take().expect(POLLED_AGAIN).decided(this.settings, permit.take(), answer)
                }
                StateProj::Running { future, slot, method } => {
                    let result = ready!(poll_holding(future, slot, cx));
                    return Poll::Ready(finish(this.settings, slot.take(), method, result));
                }
            };
            match step {
                Step::Next(next) => this.state.set(next),
                Step::Refused(refusal) => return Poll::Ready(Ok(refusal.map(SlotBody::refused))),
            }
        }
    }
}

/// Polls with the slot on the stack, so that a panic gives it back at once, even where the future
/// that has panicked is kept.
fn poll_holding<F: Future>(
    future: Pin<&mut F>,
    slot: &mut Option<Slot>,
    cx: &mut Context<'_>,
) -> Poll<F::Output> {
    let held = slot.take();
    let polled = future.poll(cx);
    *slot = held;
    polled
}

/// Hands the slot on to the response's body, or ends the hold here.
fn finish<B: Body, E>(
    settings: &Settings,
    mut slot: Option<Slot>,
    method: &Method,
    mut result: Result<Response<B>, E>,
) -> Result<Response<SlotBody<B>>, E> {
    if let (Some(slot), Ok(response)) = (&slot, &mut result) {
        settings.announce(slot, response);
    }
    match &result {
        Err(_) => end(slot.take(), End::Error),
        Ok(response) if is_upgrade(method, response.status()) => upgraded(settings, slot.take()),
        // Of a body that is not sent there is nothing to wait for. HTTP/1 servers drop it; HTTP/2
        // servers may keep it to its end, which need never come.
        Ok(response) if settings.hold == Hold::Head || is_bodiless(method, response.status()) => {
            end(slot.take(), End::Completed);
        }
        Ok(_) => {}
    }
    Ok(result?.map(|body| SlotBody::new(body, slot)))
}

fn end(slot: Option<Slot>, end: End) {
    if let Some(slot) = slot {
        slot.set_end(end);
    }
}

/// The connection goes on without the body, and maybe without a slot.
fn upgraded(settings: &Settings, slot: Option<Slot>) {
    let Some(slot) = slot else { return };
    if slot.is_shared() {
        return end(Some(slot), End::Upgraded);
    }
    settings.limiter.meters().upgrade_unheld.add(1);
    settings.unheld_warning.call_once(|| {
        event!(
            warn,
            policy = settings.limiter.name(),
            "connection upgraded without its slot: call `SlotHandle::hold` in the handler and keep what it returns"
        );
    });
    end(Some(slot), End::Completed);
}

fn is_upgrade(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

fn is_bodiless(method: &Method, status: StatusCode) -> bool {
    method == Method::HEAD || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED
}

impl<S: Service<Request<B>>, B> fmt::Debug for ResponseFuture<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Called { .. } => "called",
            State::Asking { .. } => "asking",
            State::Preparing { .. } => "preparing",
            State::Entering { .. } => "entering",
            State::Acquiring { .. } => "acquiring",
            State::Running { .. } => "running",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}

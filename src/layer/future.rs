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
use super::observe::Decision;
use super::settings::Settings;
use super::{Hold, Reason, Rejection, SlotBody};
use crate::limiter::{AcquireError, ProjectId, Slot};
use crate::metrics::{End, Outcome};
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
        Acquiring { reply: Reply<Result<Slot, AcquireError>>, id: ProjectId, call: Option<Call<S, B>> },
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
        let id = match settings.who(&self.parts) {
            Ok(Some(id)) => id,
            Ok(None) => {
                settings.limiter.meters().requests.get(Outcome::Skipped).add(1);
                Decision::skipped(settings.limiter.name()).record();
                return self.run(None);
            }
            Err(error) => return self.refused(settings, None, &error.into()),
        };
        match settings.limiter.start(&id, settings.how(&self.parts)).into_ready() {
            Ok(answer) => self.decided(settings, &id, answer),
            Err(reply) => Step::Next(State::Acquiring { reply, id, call: Some(self) }),
        }
    }

    fn decided(self, settings: &Settings, id: &ProjectId, answer: Result<Slot, AcquireError>) -> Step<S, B> {
        match answer {
            Ok(slot) => {
                Decision::admitted(settings.limiter.name(), id, &slot).record();
                self.run(Some(slot))
            }
            Err(error) => self.refused(settings, Some(id), &error),
        }
    }

    fn refused(self, settings: &Settings, id: Option<&ProjectId>, error: &AcquireError) -> Step<S, B> {
        let rejection = Rejection::new(settings.limiter.name(), error);
        Decision::refused(&rejection, id, settings.shadow).record();
        // The limiter has counted its own refusals, except in shadow.
        let requests = &settings.limiter.meters().requests;
        if settings.shadow {
            requests.get(Outcome::WouldReject).add(1);
            return self.run(None);
        }
        if let Reason::Key(_) = rejection.reason() {
            requests.get(Outcome::InvalidKey).add(1);
        }
        Step::Refused(settings.answer(rejection, &self.parts))
    }

    fn run(self, slot: Option<Slot>) -> Step<S, B> {
        let Self { mut parts, body, mut inner } = self;
        if let Some(slot) = &slot {
            parts.extensions.insert(slot.handle());
        }
        let method = parts.method.clone();
        let future = inner.call(Request::from_parts(parts, body));
        Step::Next(State::Running { future, slot, method })
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
                StateProj::Acquiring { reply, id, call } => {
                    let answer = ready!(Pin::new(reply).poll(cx));
                    call.take().expect(POLLED_AGAIN).decided(this.settings, id, answer)
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
    result: Result<Response<B>, E>,
) -> Result<Response<SlotBody<B>>, E> {
    match &result {
        Err(_) => end(slot.take(), End::Error),
        Ok(response) if is_upgrade(method, response.status()) => upgraded(settings, slot.take()),
        Ok(_) if settings.hold == Hold::Head => end(slot.take(), End::Completed),
        Ok(_) => {}
    }
    let response = result?;
    if let Some(slot) = slot.as_ref().filter(|_| is_bodiless(method, response.status())) {
        // The server will drop this body unread, and that is its proper end.
        slot.set_end(End::Completed);
    }
    Ok(response.map(|body| SlotBody::new(body, slot)))
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
            State::Acquiring { .. } => "acquiring",
            State::Running { .. } => "running",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}

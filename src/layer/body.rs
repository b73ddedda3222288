use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use http_body_util::combinators::UnsyncBoxBody;
use pin_project_lite::pin_project;

use crate::limiter::Slot;
use crate::metrics::End;

pin_project! {
    /// The body of a response: the service's own, with the slot it holds, or a refusal's.
    ///
    /// The slot is given back with the first of: the end of the body, trailers, an error, a frame
    /// after which the body says that it is at its end, or when this is dropped. `Send`, `Sync` and
    /// `Unpin` are as they are for `B`.
    #[derive(Debug)]
    pub struct SlotBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = KindProj]
    enum Kind<B> {
        // The slot comes after the body: it is given back when that is gone.
        Served { #[pin] body: B, slot: Option<Slot> },
        Refused { body: RefusalBody },
    }
}

impl<B: Body> SlotBody<B> {
    /// Holds `slot` until the end of `body`.
    pub(super) fn new(body: B, mut slot: Option<Slot>) -> Self {
        if body.is_end_stream() {
            release(&mut slot, End::Completed);
        }
        Self { kind: Kind::Served { body, slot } }
    }

    pub(super) fn refused(body: RefusalBody) -> Self {
        Self { kind: Kind::Refused { body } }
    }
}

fn release(slot: &mut Option<Slot>, end: End) {
    if let Some(slot) = slot.take() {
        slot.set_end(end);
    }
}

impl<B> Body for SlotBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project().kind.project() {
            KindProj::Served { mut body, slot } => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                match &frame {
                    None => release(slot, End::Completed),
                    Some(Err(_)) => release(slot, End::Error),
                    Some(Ok(frame)) if frame.is_trailers() || body.is_end_stream() => {
                        release(slot, End::Completed);
                    }
                    Some(Ok(_)) => {}
                }
                Poll::Ready(frame)
            }
            KindProj::Refused { body } => {
                let frame = ready!(body.poll_frame(cx));
                Poll::Ready(frame.map(|frame| Ok(frame.map_data(B::Data::from))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Served { body, .. } => body.is_end_stream(),
            Kind::Refused { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Served { body, .. } => body.size_hint(),
            Kind::Refused { body } => body.size_hint(),
        }
    }
}

/// The body of a refusal.
#[derive(Debug)]
pub(super) enum RefusalBody {
    Whole(Full<Bytes>),
    /// A hook's. It need not be `Sync`, but a [`SlotBody`] must be: a mutex makes it so, and is
    /// never waited for.
    Hook(Mutex<UnsyncBoxBody<Bytes, Infallible>>),
}

impl RefusalBody {
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self::Whole(Full::new(bytes))
    }

    pub(super) fn hook<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
    {
        Self::Hook(Mutex::new(UnsyncBoxBody::new(EndOnError { body: Some(body) })))
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let frame = match self {
            Self::Whole(body) => ready!(Pin::new(body).poll_frame(cx)),
            Self::Hook(body) => {
                let body = body.get_mut().unwrap_or_else(PoisonError::into_inner);
                ready!(Pin::new(body).poll_frame(cx))
            }
        };
        Poll::Ready(frame.map(|frame| match frame {
            Ok(frame) => frame,
            Err(never) => match never {},
        }))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Hook(body) => body.lock().unwrap_or_else(PoisonError::into_inner).is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Hook(body) => body.lock().unwrap_or_else(PoisonError::into_inner).size_hint(),
        }
    }
}

pin_project! {
    /// A body that ends where it fails: the error of a hook's body is none of the service's.
    struct EndOnError<B> {
        #[pin]
        body: Option<B>,
    }
}

impl<B: Body> Body for EndOnError<B> {
    type Data = B::Data;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Infallible>>> {
        let mut this = self.project();
        let Some(body) = this.body.as_mut().as_pin_mut() else { return Poll::Ready(None) };
        match ready!(body.poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            Some(Err(_)) | None => {
                this.body.set(None);
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

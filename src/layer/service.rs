use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::settings::Settings;
use super::{ResponseFuture, SlotBody};

/// Limits how many requests of each project are in the inner service at once; made by a
/// [`ConcurrencyLimitLayer`](crate::ConcurrencyLimitLayer).
///
/// See the [module's documentation](crate::layer).
#[derive(Clone)]
pub struct ConcurrencyLimit<S> {
    settings: Arc<Settings>,
    inner: S,
}

impl<S> ConcurrencyLimit<S> {
    pub(super) fn new(settings: Arc<Settings>, inner: S) -> Self {
        Self { settings, inner }
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for ConcurrencyLimit<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    ResBody: Body,
    ResBody::Data: From<Bytes>,
{
    type Response = Response<SlotBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, ReqBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> ResponseFuture<S, ReqBody> {
        // The one that is ready goes with the request; its clone may not be.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        ResponseFuture::new(Arc::clone(&self.settings), request, ready)
    }
}

impl<S: fmt::Debug> fmt::Debug for ConcurrencyLimit<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimit")
            .field("limiter", &self.settings.limiter)
            .field("inner", &self.inner)
            .finish()
    }
}

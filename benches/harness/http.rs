//! Requests to a service that answers at once, by itself and behind layers.
#![allow(dead_code, unreachable_pub)]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tower::Service;
use tower::limit::{ConcurrencyLimit as Tower, GlobalConcurrencyLimitLayer};
use tower_slots::{ConcurrencyLimitLayer, Limit, Limiter, MemoryStore};

pub type Plain = Full<Bytes>;

/// Answers every request with a short text.
#[derive(Clone)]
pub struct Answer;

impl Service<Request<Plain>> for Answer {
    type Response = Response<Plain>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Plain>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Plain>) -> Self::Future {
        ready(Ok(Response::new(Full::new(Bytes::from_static(b"hello")))))
    }
}

/// What an outer layer of a real server would have put into a request: its peer, a span, a user.
#[derive(Clone)]
pub struct Tenant(pub &'static str);

pub const KEY: &str = "project-1";

/// A request with an id in a header; with an extension too, as every request in a real server has one.
pub fn request(extension: bool) -> Request<Plain> {
    let mut request = Request::new(Full::default());
    request.headers_mut().insert("x-project-id", http::HeaderValue::from_static(KEY));
    if extension {
        request.extensions_mut().insert(Tenant(KEY));
    }
    request
}

/// Calls the service with each of these, and reads its answers to their ends.
pub async fn call_all<S, B>(service: &mut S, requests: Vec<Request<Plain>>)
where
    S: Service<Request<Plain>, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Error = Infallible> + Unpin,
{
    for request in requests {
        std::future::poll_fn(|cx| service.poll_ready(cx)).await.unwrap_or_else(|never| match never {});
        let response = service.call(request).await.unwrap_or_else(|never| match never {});
        let mut body = response.into_body();
        while body.frame().await.is_some() {}
    }
}

/// Ours, with slots in memory, or without a limit.
pub fn ours(limit: impl Into<Limit>) -> ConcurrencyLimitLayer {
    let limiter = Limiter::builder(MemoryStore::new()).limit(limit).build().expect("settings");
    ConcurrencyLimitLayer::new(limiter)
}

/// Tower's.
pub fn tower() -> Tower<Answer> {
    tower::Layer::layer(&GlobalConcurrencyLimitLayer::new(100), Answer)
}

//! From when until when a request holds its slot.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Channel, Empty, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_slots::{ConcurrencyLimitLayer, HeldSlot, Hold, Limiter, SlotHandle};

use crate::support::{
    App, Plain, Script, Watched, active, app, data, endless, endless_body, is_at_end, next, request, send,
};

/// A service for one request, which gets this body.
fn once<B>(layer: ConcurrencyLimitLayer, body: B) -> App
where
    B: http_body::Body<Data = Bytes, Error = io::Error> + Send + 'static,
{
    let body = Arc::new(Mutex::new(Some(body)));
    app(layer, move |_| body.lock().expect("a lock").take().expect("one request"))
}

#[tokio::test]
async fn a_streamed_body_holds_its_slot_until_it_ends() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let (mut sender, body) = Channel::<Bytes, io::Error>::new(1);
    let app = once(layer.clone(), body);
    let mut response = send(&app, request("acme")).await;
    for _ in 0..3 {
        sender.send_data(Bytes::from_static(b"data")).await.expect("a receiver");
        assert_eq!(next(response.body_mut()).await, "data");
        assert_eq!(active(layer.limiter(), "acme").await, 1);
    }
    drop(sender);
    assert_eq!(next(response.body_mut()).await, "end");
    assert_eq!(active(layer.limiter(), "acme").await, 0);
}

#[tokio::test]
async fn each_end_of_a_body_gives_the_slot_back_while_the_body_lives() {
    let cases = [
        (Script::new([data()]), "end"),
        (Script::new([data(), Err(io::Error::other("broken"))]), "error"),
        (Script::new([data(), Ok(Frame::trailers(HeaderMap::new())), data()]), "trailers"),
        (Script { ends_with_last: true, ..Script::new([data(), data()]) }, "data"),
    ];
    for (body, last) in cases {
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let app = once(layer.clone(), body);
        let mut response = send(&app, request("acme")).await;
        assert_eq!(active(layer.limiter(), "acme").await, 1, "{last}");
        assert_eq!(next(response.body_mut()).await, "data");
        assert_eq!(active(layer.limiter(), "acme").await, 1, "{last}");
        assert_eq!(next(response.body_mut()).await, last);
        assert_eq!(active(layer.limiter(), "acme").await, 0, "{last}");
    }
}

#[tokio::test]
async fn a_body_at_its_end_gives_the_slot_back_at_once() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let app = app(layer.clone(), |_| Empty::<Bytes>::new());
    let response = send(&app, request("acme")).await;
    assert_eq!(active(layer.limiter(), "acme").await, 0);
    assert!(is_at_end(&response));
}

#[tokio::test]
async fn a_body_dropped_early_or_unread_gives_the_slot_back() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let read = app(layer.clone(), |_| Script::new([data(), data()]));
    let mut response = send(&read, request("acme")).await;
    assert_eq!(next(response.body_mut()).await, "data");
    drop(response);
    assert_eq!(active(layer.limiter(), "acme").await, 0);

    let unread = endless(layer.clone());
    let response = send(&unread, request("acme")).await;
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    drop(response);
    assert_eq!(active(layer.limiter(), "acme").await, 0);
}

#[test]
fn responses_may_be_dropped_outside_of_a_runtime() {
    let layer = ConcurrencyLimitLayer::in_memory(2);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let count = || runtime().block_on(active(layer.limiter(), "acme"));
    let hangs = layer.layer(service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>()));
    let (answered, unanswered) = runtime().block_on(async {
        let mut future = Box::pin(hangs.oneshot(request("acme")));
        assert!(futures_util::poll!(&mut future).is_pending());
        (send(&endless(layer.clone()), request("acme")).await, future)
    });
    assert_eq!(count(), 2);
    drop(answered);
    drop(unanswered);
    assert_eq!(count(), 0);
}

#[tokio::test]
async fn the_bodies_size_and_end_are_those_of_the_service() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"12345"))))
    }));
    let mut response = service.oneshot(request("acme")).await.expect("infallible");
    assert_eq!(response.body().size_hint().exact(), Some(5));
    assert!(!response.body().is_end_stream());
    assert!(response.body_mut().frame().await.is_some());
    assert!(response.body().is_end_stream());
}

#[tokio::test]
async fn with_hold_head_a_stream_is_not_counted() {
    let layer = ConcurrencyLimitLayer::in_memory(1).hold(Hold::Head);
    let app = endless(layer.clone());
    let _streams = send(&app, request("acme")).await;
    assert_eq!(active(layer.limiter(), "acme").await, 0);
    assert_eq!(send(&app, request("acme")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn the_slot_is_held_while_the_service_works_and_an_error_ends_it() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let limiter = layer.limiter().clone();
    let service = layer.layer(service_fn(move |_: Request<Body>| {
        let limiter = limiter.clone();
        async move {
            assert_eq!(active(&limiter, "acme").await, 1);
            Err::<Response<Body>, _>("failed")
        }
    }));
    assert_eq!(service.oneshot(request("acme")).await.map(drop), Err("failed"));
    assert_eq!(active(layer.limiter(), "acme").await, 0);
}

#[tokio::test]
async fn a_dropped_response_future_gives_the_slot_back() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let mut service =
        layer.layer(service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>()));
    let mut future = Box::pin(service.call(request("acme")));
    assert_eq!(active(layer.limiter(), "acme").await, 0, "nothing is taken before the first poll");
    assert!(futures_util::poll!(&mut future).is_pending());
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    drop(future);
    assert_eq!(active(layer.limiter(), "acme").await, 0);
}

#[tokio::test]
async fn giving_up_before_the_store_has_answered_gives_the_slot_back() {
    let store = Watched::gated();
    let limiter = Limiter::builder(store.clone()).limit(1).build().expect("valid settings");
    let mut service = ConcurrencyLimitLayer::new(limiter.clone()).layer(Plain);

    let mut future = Box::pin(service.call(request("acme")));
    assert!(futures_util::poll!(&mut future).is_pending());
    assert_eq!(active(&limiter, "acme").await, 1);
    drop(future);
    assert_eq!(active(&limiter, "acme").await, 0);

    let mut future = Box::pin(service.call(request("acme")));
    assert!(futures_util::poll!(&mut future).is_pending());
    store.let_through();
    let Poll::Ready(response) = futures_util::poll!(&mut future) else { panic!("the store has answered") };
    assert_eq!(response.expect("infallible").status(), StatusCode::OK);
}

#[tokio::test]
async fn a_panic_gives_the_slot_back() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let mut service = layer.layer(service_fn(|request: Request<Body>| {
        assert!(request.uri().path() != "/call", "in call");
        async { panic!("in the future") as Result<Response<Body>, Infallible> }
    }));
    // The future is kept: it is the panic itself that gives the slot back.
    let mut future = pin!(AssertUnwindSafe(service.call(request("acme"))).catch_unwind());
    assert!((&mut future).await.is_err());
    assert_eq!(active(layer.limiter(), "acme").await, 0);

    let mut in_call = request("acme");
    *in_call.uri_mut() = "/call".parse().expect("a path");
    assert!(tokio::spawn(service.call(in_call)).await.is_err());
    assert_eq!(active(layer.limiter(), "acme").await, 0);
}

#[tokio::test]
async fn the_request_body_is_untouched_when_a_request_is_refused() {
    let layer = ConcurrencyLimitLayer::in_memory(0);
    let service = layer
        .layer(service_fn(async |_: Request<Unpollable>| Ok::<_, Infallible>(Response::new(Body::empty()))));
    let request = Request::builder().header("x-project-id", "acme").body(Unpollable).expect("a request");
    let response = service.oneshot(request).await.expect("infallible");
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
}

struct Unpollable;

impl http_body::Body for Unpollable {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("polled");
    }
}

#[tokio::test]
async fn a_held_slot_outlives_the_response() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let (keep, mut kept) = tokio::sync::mpsc::unbounded_channel::<HeldSlot>();
    let app = app(layer.clone(), move |request| {
        let handle = request.extensions().get::<SlotHandle>().expect("a slot handle");
        assert_eq!((handle.active(), handle.limit()), (1, 1.into()));
        keep.send(handle.hold().expect("a living slot")).expect("a receiver");
        Body::empty()
    });
    drop(send(&app, request("acme")).await);
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    drop(kept.recv().await);
    assert_eq!(active(layer.limiter(), "acme").await, 0);
}

#[tokio::test]
async fn answers_without_a_body_hold_no_slot_even_if_one_was_made() {
    for (method, status) in [(Method::HEAD, 200), (Method::GET, 204), (Method::GET, 304)] {
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let service = layer.layer(service_fn(move |_: Request<Body>| async move {
            let response = Response::builder().status(status).body(endless_body());
            Ok::<_, Infallible>(response.expect("a response"))
        }));
        let mut request = request("acme");
        *request.method_mut() = method;
        let _kept = service.oneshot(request).await;
        assert_eq!(active(layer.limiter(), "acme").await, 0, "{status}");
    }
}

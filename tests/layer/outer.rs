//! The layer among others, over real connections: what stands outside of it, and what inside.

use std::convert::Infallible;
use std::future::pending;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::error_handling::HandleErrorLayer;
use axum::extract::FromRequestParts;
use axum::routing::get;
use flate2::read::GzDecoder;
use futures_util::stream::{self, StreamExt};
use http::header::{
    ACCEPT_ENCODING, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, CONTENT_ENCODING, ORIGIN,
    RETRY_AFTER,
};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{Notify, Semaphore, mpsc};
use tower::{BoxError, ServiceBuilder};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_slots::layer::Reason;
use tower_slots::{ConcurrencyLimitLayer, Limiter, Rejection, SlotHandle};

use crate::support::{Watched, active, ask, endless_body, next, request, serve, text, until};

async fn until_free(layer: &ConcurrencyLimitLayer) {
    until(async || active(layer.limiter(), "acme").await == 0).await;
}

#[tokio::test]
async fn tracing_sees_refusals_and_holds_a_stream_no_longer_than_it_lasts() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let (saw, mut seen) = mpsc::unbounded_channel();
    let trace = TraceLayer::new_for_http().on_response(
        move |response: &Response<_>, _: Duration, _: &tracing::Span| {
            let reason = response.extensions().get().map(Rejection::reason);
            saw.send((response.status(), reason)).expect("the test listens");
        },
    );
    let router = Router::new().route("/", get(async || endless_body())).layer(layer.clone()).layer(trace);
    let address = serve(router).await;

    let held = ask(address, request("acme")).await;
    assert_eq!(seen.recv().await, Some((StatusCode::OK, None)));
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    let refused = ask(address, request("acme")).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(seen.recv().await, Some((StatusCode::TOO_MANY_REQUESTS, Some(Reason::Saturated))));
    drop(held);
    until_free(&layer).await;
}

const PAGE: HeaderValue = HeaderValue::from_static("https://app.example");

fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(PAGE)
        .allow_headers([HeaderName::from_static("x-project-id")])
        .expose_headers([RETRY_AFTER])
}

fn of_a_page(method: Method, id: &str) -> Request<Body> {
    let mut request = request(id);
    request.headers_mut().insert(ORIGIN, PAGE);
    *request.method_mut() = method;
    request
}

fn preflight() -> Request<Body> {
    let mut request = of_a_page(Method::OPTIONS, "acme");
    request.headers_mut().remove("x-project-id");
    let headers = request.headers_mut();
    headers.insert("access-control-request-method", HeaderValue::from_static("GET"));
    headers.insert("access-control-request-headers", HeaderValue::from_static("x-project-id"));
    request
}

#[tokio::test]
async fn with_cors_outside_a_page_can_read_every_refusal() {
    let layer = ConcurrencyLimitLayer::in_memory(0);
    let router = Router::new().route("/", get(async || "never")).layer(layer).layer(cors());
    let address = serve(router).await;
    for (id, status) in [("acme", StatusCode::TOO_MANY_REQUESTS), ("", StatusCode::BAD_REQUEST)] {
        let refused = ask(address, of_a_page(Method::GET, id)).await;
        assert_eq!(refused.status(), status);
        assert_eq!(refused.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], PAGE);
        assert_eq!(refused.headers()[ACCESS_CONTROL_EXPOSE_HEADERS], "retry-after");
    }
    assert_eq!(ask(address, preflight()).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_preflight_reaches_cors_inside_without_a_slot() {
    let layer = ConcurrencyLimitLayer::in_memory(0);
    let router = Router::new().route("/", get(async || "never")).layer(cors()).layer(layer);
    let address = serve(router).await;
    let answer = ask(address, preflight()).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], PAGE);
    assert_eq!(ask(address, of_a_page(Method::GET, "acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

fn in_100_ms() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_millis(100))
}

#[tokio::test]
async fn a_time_out_outside_gives_the_slot_back() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let (began, mut begun) = mpsc::unbounded_channel();
    let hangs = get(async move |request: Request<Body>| {
        let handle = request.extensions().get::<SlotHandle>();
        began.send(handle.map(SlotHandle::active)).expect("the test listens");
        pending::<()>().await;
    });
    let address = serve(Router::new().route("/", hangs).layer(layer.clone()).layer(in_100_ms())).await;
    for _ in 0..2 {
        assert_eq!(ask(address, request("acme")).await.status(), StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(begun.recv().await, Some(Some(1)), "it ran, and held the only slot");
        until_free(&layer).await;
    }
}

#[tokio::test]
async fn a_time_out_while_the_store_is_asked_gives_the_slot_back() {
    let store = Watched::gated();
    let limiter = Limiter::builder(store.clone()).limit(1).build().expect("valid settings");
    let layer = ConcurrencyLimitLayer::new(limiter);
    let router = Router::new().route("/", get(async || "never")).layer(layer.clone()).layer(in_100_ms());
    let address = serve(router).await;
    assert_eq!(ask(address, request("acme")).await.status(), StatusCode::GATEWAY_TIMEOUT);
    until_free(&layer).await;
    assert_eq!(store.released(), 1);
}

async fn unzipped(response: Response<Incoming>) -> String {
    assert_eq!(response.headers()[CONTENT_ENCODING], "gzip");
    let zipped = response.into_body().collect().await.expect("a whole body").to_bytes();
    let mut text = String::new();
    GzDecoder::new(&*zipped).read_to_string(&mut text).expect("gzip");
    text
}

#[tokio::test]
async fn a_compressed_stream_holds_its_slot_until_its_end() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let (hand, mut handed) = mpsc::unbounded_channel();
    let streams = get(async move || {
        let (sender, mut pieces) = mpsc::channel(1);
        hand.send(sender).expect("the test listens");
        Body::from_stream(stream::poll_fn(move |cx| pieces.poll_recv(cx)))
    });
    let router = Router::new().route("/", streams).layer(layer.clone()).layer(CompressionLayer::new());
    let address = serve(router).await;
    let zipping = || {
        let mut request = request("acme");
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        request
    };

    let response = ask(address, zipping()).await;
    let sender = handed.recv().await.expect("a handler");
    for _ in 0..100 {
        sender.send(Ok::<_, Infallible>("a line of a stream\n")).await.expect("a reader");
    }
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    let refused = unzipped(ask(address, zipping()).await).await;
    assert!(refused.starts_with(r#"{"type":"https://iana.org/"#), "{refused}");
    drop(sender);
    assert_eq!(unzipped(response).await, "a line of a stream\n".repeat(100));
    until_free(&layer).await;
}

struct Broken;

impl<S: Sync> FromRequestParts<S> for Broken {
    type Rejection = Infallible;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Infallible> {
        panic!("in an extractor")
    }
}

#[tokio::test]
async fn a_panic_is_answered_with_500_and_gives_the_slot_back() {
    let layer = ConcurrencyLimitLayer::in_memory(1).weight(|parts: &Parts| {
        assert!(parts.uri.path() != "/weight", "in a closure of the layer's");
        1
    });
    let router = Router::new()
        .route("/handler", get(async |_: Request<Body>| -> &'static str { panic!("in a handler") }))
        .route("/extractor", get(async |_: Broken| "never"))
        .route("/weight", get(async || "never"))
        .route("/", get(async || "fine"))
        .layer(layer.clone())
        .layer(CatchPanicLayer::new());
    let address = serve(router).await;
    for path in ["/handler", "/extractor", "/weight"] {
        let mut request = request("acme");
        *request.uri_mut() = path.parse().expect("a path");
        assert_eq!(ask(address, request).await.status(), StatusCode::INTERNAL_SERVER_ERROR, "{path}");
        until_free(&layer).await;
    }
    assert_eq!(text(ask(address, request("acme")).await).await, "fine");
}

#[tokio::test]
async fn a_panic_within_a_stream_gives_the_slot_back() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let read = Arc::new(Notify::new());
    let told = Arc::clone(&read);
    let streams = get(async move || {
        let breaks = stream::once(async move {
            told.notified().await;
            panic!("in a stream")
        });
        Body::from_stream(stream::iter([Ok::<_, Infallible>("first")]).chain(breaks))
    });
    let router = Router::new().route("/", streams).layer(layer.clone()).layer(CatchPanicLayer::new());
    let address = serve(router).await;
    let mut response = ask(address, request("acme")).await;
    assert_eq!(next(response.body_mut()).await, "data");
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    read.notify_one();
    assert_eq!(next(response.body_mut()).await, "error", "the connection ends early");
    until_free(&layer).await;
}

/// A router whose handler runs until `gate` lets it go, over an inner limit of one.
fn gated(stack: &str, layer: &ConcurrencyLimitLayer, gate: &Arc<Semaphore>) -> Router {
    let gate = Arc::clone(gate);
    let waits = get(async move || {
        gate.acquire().await.expect("an open gate").forget();
        "done"
    });
    let router = Router::new().route("/", waits);
    let router = match stack {
        "limit" => router.layer(ServiceBuilder::new().layer(layer.clone()).concurrency_limit(1)),
        _ => router.layer(
            ServiceBuilder::new()
                .layer(layer.clone())
                .layer(HandleErrorLayer::new(async |_: BoxError| StatusCode::SERVICE_UNAVAILABLE))
                .buffer(8)
                .concurrency_limit(1),
        ),
    };
    // Or axum would make the services anew for each connection, and the inner limit with them.
    router.with_state(())
}

/// Both panic when a service is called that was not asked whether it is ready.
#[tokio::test]
async fn over_inner_services_whose_readiness_matters() {
    // Who waits for the inner limit itself has no slot yet; who waits in the buffer is in flight.
    for (stack, expected) in [("limit", 1), ("buffer", 2)] {
        let layer = ConcurrencyLimitLayer::in_memory(9);
        let gate = Arc::new(Semaphore::new(0));
        let address = serve(gated(stack, &layer, &gate)).await;
        let asked = [0; 2].map(|_| tokio::spawn(ask(address, request("acme"))));
        until(async || active(layer.limiter(), "acme").await == expected).await;
        // Time for the other.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(active(layer.limiter(), "acme").await, expected, "{stack}");
        gate.add_permits(2);
        for asked in asked {
            assert_eq!(text(asked.await.expect("no panic")).await, "done", "{stack}");
        }
        until_free(&layer).await;
    }
}

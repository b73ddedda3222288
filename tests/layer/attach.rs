//! However the layer is attached, one limit holds.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{MethodRouter, get};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_slots::layer::SlotBody;
use tower_slots::{ConcurrencyLimitLayer, SlotHandle};

use crate::support::{Plain, active, ask, endless_body, listen, request, send, serve, text, until};

fn streams() -> MethodRouter {
    get(async || endless_body())
}

/// A request over a connection of its own.
async fn fetch(address: SocketAddr, path: &str) -> Response<Incoming> {
    let mut request = request("acme");
    *request.uri_mut() = path.parse().expect("a path");
    ask(address, request).await
}

/// One stream on `first` must be enough to fill the limit of 1 for both paths, until it is dropped.
async fn expect_one_limit(address: SocketAddr, layer: &ConcurrencyLimitLayer, first: &str, second: &str) {
    let held = fetch(address, first).await;
    assert_eq!(held.status(), StatusCode::OK);
    for path in [first, second] {
        assert_eq!(fetch(address, path).await.status(), StatusCode::TOO_MANY_REQUESTS, "{path}");
    }
    drop(held);
    until(async || active(layer.limiter(), "acme").await == 0).await;
    assert_eq!(fetch(address, second).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn on_a_router() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let address =
        serve(Router::new().route("/a", streams()).route("/b", streams()).layer(layer.clone())).await;
    expect_one_limit(address, &layer, "/a", "/b").await;
}

#[tokio::test]
async fn of_a_hundred_streams_at_once_as_many_run_as_the_limit_says() {
    let layer = ConcurrencyLimitLayer::in_memory(8);
    let address = serve(Router::new().route("/", streams()).layer(layer.clone())).await;
    for _ in 0..2 {
        let answers = futures_util::future::join_all((0..100).map(|_| fetch(address, "/"))).await;
        let (running, refused): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|answer| answer.status() == StatusCode::OK);
        assert_eq!((running.len(), refused.len()), (8, 92));
        assert!(refused.iter().all(|answer| answer.status() == StatusCode::TOO_MANY_REQUESTS));
        assert_eq!(active(layer.limiter(), "acme").await, 8);
        drop(running);
        until(async || active(layer.limiter(), "acme").await == 0).await;
    }
}

#[tokio::test]
async fn on_method_routers() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let router = Router::new()
        .route("/a", streams().layer(layer.clone()))
        .route("/b", streams().layer(layer.clone()))
        .route("/free", get(async || "free"));
    let address = serve(router).await;
    expect_one_limit(address, &layer, "/a", "/b").await;
    let _held = fetch(address, "/a").await;
    assert_eq!(fetch(address, "/free").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn as_a_route_layer() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let router = Router::new().route("/a", streams()).route("/b", streams()).route_layer(layer.clone());
    let address = serve(router).await;
    expect_one_limit(address, &layer, "/a", "/b").await;
    let _held = fetch(address, "/a").await;
    assert_eq!(fetch(address, "/none").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn with_into_make_service() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let router = Router::new().route("/a", streams()).route("/b", streams()).layer(layer.clone());
    let (listener, address) = listen().await;
    tokio::spawn(async { axum::serve(listener, router.into_make_service()).await });
    expect_one_limit(address, &layer, "/a", "/b").await;
}

#[tokio::test]
async fn around_a_whole_router() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let router = Router::new().route("/a", streams()).route("/b", streams());
    let service = ServiceBuilder::new()
        .map_response(|response: Response<SlotBody<Body>>| response.map(Body::new))
        .layer(layer.clone())
        .service(router);
    let (listener, address) = listen().await;
    tokio::spawn(async {
        axum::serve(listener, axum::ServiceExt::<Request<Body>>::into_make_service(service)).await
    });
    expect_one_limit(address, &layer, "/a", "/b").await;
}

#[tokio::test]
async fn on_each_connection_of_a_hyper_server() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let router = Router::new().route("/a", streams()).route("/b", streams());
    let (listener, address) = listen().await;
    tokio::spawn({
        let layer = layer.clone();
        async move {
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                let service = TowerToHyperService::new(layer.layer(router.clone()));
                tokio::spawn(async move {
                    let http = auto::Builder::new(TokioExecutor::new());
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        }
    });
    expect_one_limit(address, &layer, "/a", "/b").await;
}

#[tokio::test]
async fn the_refusal_on_the_wire() {
    let address = serve(Router::new().route("/", streams()).layer(ConcurrencyLimitLayer::in_memory(0))).await;
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let head = "GET / HTTP/1.1\r\nhost: a\r\nx-project-id: acme\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("an open connection");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    let lines: Vec<&str> = answer
        .split("\r\n")
        .filter(|line| !line.starts_with("date: ") && !line.starts_with("retry-after: "))
        .collect();
    let expected = [
        "HTTP/1.1 429 Too Many Requests",
        "content-type: application/problem+json",
        "cache-control: no-store",
        "content-length: 161",
        "connection: close",
        "",
        r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Too many concurrent requests","status":429,"violated-policies":["concurrency"]}"#,
    ];
    assert_eq!(lines, expected);
    assert!(answer.contains("\r\nretry-after: "), "{answer}");
}

/// Both panic when a service is called that was not asked whether it is ready.
#[tokio::test]
async fn over_services_whose_readiness_matters() {
    let layer = ConcurrencyLimitLayer::in_memory(9);
    let mut limited = ServiceBuilder::new().layer(layer.clone()).concurrency_limit(1).service(Plain);
    for _ in 0..3 {
        let response = limited.ready().await.expect("infallible").call(request("acme")).await;
        assert_eq!(response.expect("infallible").status(), StatusCode::OK);
    }
    let mut buffered = ServiceBuilder::new().layer(layer).buffer(1).service(Plain);
    for _ in 0..3 {
        let response = buffered.ready().await.expect("ready").call(request("acme")).await;
        assert_eq!(response.expect("a response").status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_refusal_gives_up_the_inner_services_readiness() {
    let layer = ConcurrencyLimitLayer::in_memory(0);
    let mut service = ServiceBuilder::new().layer(layer).concurrency_limit(1).service(Plain);
    for _ in 0..3 {
        let ready = tokio::time::timeout(Duration::from_secs(5), service.ready()).await;
        let response = ready.expect("the permit is back").expect("infallible").call(request("acme")).await;
        assert_eq!(response.expect("infallible").status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn readiness_is_the_inner_services() {
    struct Failing;
    impl Clone for Failing {
        fn clone(&self) -> Self {
            Self
        }
    }
    impl Service<Request<Body>> for Failing {
        type Response = Response<Body>;
        type Error = &'static str;
        type Future = std::future::Pending<Result<Response<Body>, &'static str>>;

        fn poll_ready(
            &mut self,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Result<(), &'static str>> {
            std::task::Poll::Ready(Err("not ready"))
        }

        fn call(&mut self, _: Request<Body>) -> Self::Future {
            std::future::pending()
        }
    }
    let mut service = ConcurrencyLimitLayer::in_memory(1).layer(Failing);
    assert_eq!(service.ready().await.map(drop), Err("not ready"));
}

#[tokio::test]
async fn two_layers_take_a_slot_each_and_the_inner_ones_handle_wins() {
    let outer = ConcurrencyLimitLayer::in_memory(7);
    let inner = ConcurrencyLimitLayer::in_memory(5);
    let service = tower::service_fn(async |request: Request<Body>| {
        let limit = request.extensions().get::<SlotHandle>().map(SlotHandle::limit);
        Ok::<_, Infallible>(Response::new(Body::from(format!("{limit:?}"))))
    });
    let stack = ServiceBuilder::new().layer(outer.clone()).layer(inner.clone()).service(service);
    let stack = tower::util::BoxCloneService::new(stack.map_response(|response| response.map(Body::new)));
    let response = send(&stack, request("acme")).await;
    assert_eq!(active(outer.limiter(), "acme").await, 1);
    assert_eq!(active(inner.limiter(), "acme").await, 1);
    assert_eq!(text(response).await, "Some(Max(5))");
    assert_eq!(active(outer.limiter(), "acme").await, 0);
    assert_eq!(active(inner.limiter(), "acme").await, 0);
}

//! Requests over real connections: clients that go away, code that panics, services that are attached
//! in every style.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response, StatusCode};
use axum::{Router, routing::get};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, ServiceExt, service_fn};
use tower_slots::{ConcurrencyLimitLayer, Limit, Limiter, ProjectId};

use crate::common::{
    ID, SECOND, SLACK, SOON, healed, judge, judge_time, live, lives, never_above, on, say, steady,
};
use crate::support::meter::{Meter, recorded};
use crate::support::{History, RedisServer};

/// A body that sends a little and then nothing more.
fn endless(history: &History) -> Body {
    let visit = history.enter(ID, 1);
    let first = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"data"))]);
    Body::from_stream(first.chain(stream::pending()).inspect(move |_| _ = &visit))
}

/// A service that waits for ever, streams for ever, or answers.
fn router(history: &History) -> Router {
    let wait = async |State(history): State<History>| {
        let _visit = history.enter(ID, 1);
        std::future::pending::<()>().await;
    };
    let whole = async |State(history): State<History>| {
        drop(history.enter(ID, 1));
        "all of it"
    };
    Router::new()
        .route("/wait", get(wait))
        .route("/stream", get(async |State(history): State<History>| endless(&history)))
        .route("/whole", get(whole))
        .with_state(history.clone())
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn serve(router: Router) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::spawn(async { axum::serve(listener, router).await });
    address
}

fn request(path: &str) -> Request<Body> {
    Request::get(format!("http://localhost{path}")).header("x-project-id", ID).body(Body::empty()).unwrap()
}

// ---- 23: clients that go away

/// A request over a connection of its own, written by hand.
async fn write_request(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nx-project-id: {ID}\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

struct Served {
    server: RedisServer,
    limiter: Limiter,
    meter: Meter,
    history: History,
    address: SocketAddr,
}

const CLIENTS: usize = 3;
const LEASE: Duration = Duration::from_secs(30);

impl Served {
    async fn start() -> Self {
        let (server, history) = (RedisServer::start(), History::new());
        let (limiter, meter) =
            recorded(|| on(&server.url()).limit(4).lease(LEASE).store_timeout(5 * SECOND).build().unwrap());
        let layer = ConcurrencyLimitLayer::new(limiter.clone());
        let address = serve(router(&history).layer(layer)).await;
        Self { server, limiter, meter, history, address }
    }

    /// Clients hold so many slots; each is given back once when they go away.
    async fn given_back_by<T>(&self, how: &str, held: usize, clients: T) {
        lives(&self.server, held, SOON).await;
        drop(clients);
        let start = tokio::time::Instant::now();
        lives(&self.server, 0, SOON).await;
        judge_time(23, &format!("{how}: given back after"), start.elapsed(), SLACK);
    }

    async fn judge(self) {
        healed(&self.server, &self.limiter, 4, LEASE).await;
        assert!(self.limiter.shutdown(SOON).await);
        let admitted = self.meter.sum("requests_total{admitted}");
        let confirmed = self.meter.sum("releases_total{confirmed}");
        say(23, &format!("{confirmed} releases for {admitted} admitted"));
        assert_eq!(confirmed, admitted, "fault 23: each is released once");
        assert_eq!(self.meter.sum("active_slots"), 0.0);
        judge(23, &self.history, &never_above(4));
    }
}

#[tokio::test]
async fn fault_23_clients_of_http_1_that_go_away_give_their_slots_back_once() {
    let served = Served::start().await;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(write_request(served.address, "/wait").await);
    }
    served.given_back_by("gone before the head", CLIENTS, clients).await;

    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = write_request(served.address, "/stream").await;
        client.read_u8().await.unwrap();
        clients.push(client);
    }
    served.given_back_by("gone in the body", CLIENTS, clients).await;

    for _ in 0..CLIENTS {
        let mut text = String::new();
        write_request(served.address, "/whole").await.read_to_string(&mut text).await.unwrap();
        assert!(text.ends_with("all of it"), "{text}");
    }
    served.given_back_by("gone after the last byte", 0, ()).await;
    served.judge().await;
}

#[tokio::test]
async fn fault_23_streams_of_http_2_that_are_reset_give_their_slots_back_once() {
    let served = Served::start().await;
    let stream = TcpStream::connect(served.address).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);

    let calls: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut sender = sender.clone();
            tokio::spawn(async move { sender.send_request(request("/wait")).await })
        })
        .collect();
    lives(&served.server, CLIENTS, SOON).await;
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    served.given_back_by("reset before the head", 0, calls).await;

    let mut responses = Vec::new();
    for _ in 0..CLIENTS {
        let mut response = sender.clone().send_request(request("/stream")).await.unwrap();
        response.body_mut().frame().await.unwrap().unwrap();
        responses.push(response);
    }
    served.given_back_by("reset in the body", CLIENTS, responses).await;

    let responses = sender.clone().send_request(request("/stream")).await.unwrap();
    served.given_back_by("reset unread", 1, (responses, sender)).await;
    served.judge().await;
}

// ---- 24: panics

/// A body that panics when it is read.
struct Broken;

impl http_body::Body for Broken {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        panic!("in the body")
    }
}

#[tokio::test]
async fn fault_24_a_panic_gives_the_slot_back_and_goes_on() {
    let (server, lease) = (RedisServer::start(), 30 * SECOND);
    let limiter = on(&server.url()).limit(4).lease(lease).store_timeout(5 * SECOND);
    let limiter = limiter.limits(|id: ProjectId| async move {
        assert!(!id.starts_with("unknown"), "in the limit source");
        Limit::Default
    });
    let limiter = limiter.build().unwrap();
    let layer = ConcurrencyLimitLayer::new(limiter.clone()).key(|parts: &http::request::Parts| {
        let path = parts.uri.path();
        assert!(path != "/extractor", "in the extractor");
        Ok(Some(if path == "/source" { "unknown" } else { ID }))
    });
    let service = layer.layer(service_fn(|request: Request<Body>| {
        let path = request.uri().path().to_owned();
        assert!(path != "/call", "in the call");
        async move {
            assert!(path != "/handler", "in the handler");
            Ok::<_, Infallible>(Response::new(Broken))
        }
    }));
    for path in ["/extractor", "/source", "/call", "/handler", "/body"] {
        for _ in 0..3 {
            let service = service.clone();
            let run = tokio::spawn(async move {
                let response = service.oneshot(request(path)).await.unwrap();
                drop(response.into_body().collect().await);
            });
            let panic = run.await.unwrap_err().into_panic();
            let text = panic.downcast_ref::<&str>().copied().unwrap_or_default();
            assert!(text.ends_with(&path[1..]), "{text:?} at {path}");
        }
        let start = tokio::time::Instant::now();
        lives(&server, 0, SOON).await;
        judge_time(24, &format!("a panic at {path}: given back after"), start.elapsed(), SLACK);
    }
    healed(&server, &limiter, 4, lease).await;
}

// ---- 27: one limit, whatever the style

/// Streams that are opened until one is refused.
async fn fill(address: SocketAddr, paths: &[&str]) -> Vec<Response<hyper::body::Incoming>> {
    let mut held = Vec::new();
    for path in paths.iter().cycle() {
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let response = sender.send_request(request(path)).await.unwrap();
        match response.status() {
            StatusCode::OK => held.push(response),
            StatusCode::TOO_MANY_REQUESTS => break,
            other => panic!("{other}"),
        }
        assert!(held.len() <= 100, "no limit holds");
    }
    held
}

#[tokio::test]
async fn fault_27_one_limit_holds_however_the_layer_is_attached() {
    let (server, lease, history) = (RedisServer::start(), 5 * SECOND, History::new());
    let limiter = steady(&server.url(), 4, lease);
    let layer = ConcurrencyLimitLayer::new(limiter.clone());
    let streams = || {
        let history = history.clone();
        get(move || async move { endless(&history) })
    };
    // Once per route, and once more by `route_layer`; a router of each; once per connection.
    let per_route =
        Router::new().route("/a", streams().layer(layer.clone())).route("/b", streams().layer(layer.clone()));
    let routes = Router::new().route("/a", streams()).route("/b", streams());
    let (listener, per_connection) = listen().await;
    tokio::spawn({
        let (layer, routes) = (layer.clone(), routes.clone());
        async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = TowerToHyperService::new(layer.layer(routes.clone()));
                let connection = async move {
                    let http = auto::Builder::new(TokioExecutor::new());
                    drop(http.serve_connection(TokioIo::new(stream), service).await);
                };
                tokio::spawn(connection);
            }
        }
    });
    let addresses = [
        serve(per_route).await,
        serve(routes.clone().route_layer(layer.clone())).await,
        serve(routes.layer(layer)).await,
        per_connection,
    ];
    for filled in addresses {
        let held = fill(filled, &["/a", "/b"]).await;
        assert_eq!((held.len(), live(&server).await), (4, 4), "fault 27: slots of at most 4");
        for other in addresses {
            assert!(fill(other, &["/b"]).await.is_empty(), "one limit for all");
        }
        drop(held);
        lives(&server, 0, SOON).await;
    }
    judge(27, &history, &never_above(4));
    healed(&server, &limiter, 4, lease).await;
}

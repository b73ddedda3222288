//! Connections that outlive their request, over real sockets.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ws::WebSocketUpgrade;
use axum::response::Response as Answer;
use axum::routing::any;
use axum::{Extension, Router};
use futures_util::{SinkExt, StreamExt};
use http::{Method, Request, Response, StatusCode};
use hyper::client::conn::{http1, http2};
use hyper::ext::Protocol;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::{Message, Role};
use tokio_tungstenite::{WebSocketStream, client_async, tungstenite};
use tower::{Layer, ServiceExt, service_fn};
use tower_slots::{ConcurrencyLimitLayer, HeldSlot, Limit, SlotHandle};

use crate::support::{active, endless_body, request, until};

/// The ways to turn a request into a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Upgrade {
    /// HTTP/1: 101 to a GET.
    WebSocket,
    /// HTTP/2: 200 to an extended CONNECT (RFC 8441).
    WebSocketStream,
    /// HTTP/1: 200 to a CONNECT.
    Tunnel,
    /// HTTP/2: 200 to a CONNECT.
    TunnelStream,
}

pub(crate) const ALL: [Upgrade; 4] =
    [Upgrade::WebSocket, Upgrade::WebSocketStream, Upgrade::Tunnel, Upgrade::TunnelStream];

/// Serves echoes by any upgrade, and keeps the slot of each if it `holds`.
pub(crate) async fn serve(layer: &ConcurrencyLimitLayer, holds: bool) -> SocketAddr {
    let websocket = async move |Extension(slot): Extension<SlotHandle>, upgrade: WebSocketUpgrade| {
        let slot = slot.hold().filter(|_| holds);
        upgrade.on_upgrade(async move |mut socket| {
            while let Some(Ok(message)) = socket.recv().await {
                if socket.send(message).await.is_err() {
                    break;
                }
            }
            drop(slot);
        })
    };
    // What a plain CONNECT asks for has no path, so no route matches it.
    let tunnel = async move |Extension(slot): Extension<SlotHandle>, mut request: Request<Body>| {
        let slot = slot.hold().filter(|_| holds);
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let (mut from, mut to) = tokio::io::split(TokioIo::new(upgrade.await.expect("an upgrade")));
            let _however_it_ends = tokio::io::copy(&mut from, &mut to).await;
            drop(slot);
        });
        Answer::new(Body::empty())
    };
    let router = Router::new().route("/", any(websocket)).fallback(tunnel).layer(layer.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, router).await });
    address
}

pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The client's end of an upgraded connection; dropping it closes it.
pub(crate) enum Open {
    WebSocket(Box<WebSocketStream<Box<dyn Io>>>),
    Tunnel(Box<dyn Io>),
}

impl Upgrade {
    /// The connection, or the status of the refusal.
    pub(crate) async fn open(self, address: SocketAddr) -> Result<Open, StatusCode> {
        let stream = TcpStream::connect(address).await.expect("a connection");
        match self {
            Self::WebSocket => handshake(address, stream).await,
            Self::WebSocketStream => {
                let io = over_http2(stream, extended_connect(address)).await?;
                let socket = WebSocketStream::from_raw_socket(io, Role::Client, None).await;
                Ok(Open::WebSocket(Box::new(socket)))
            }
            Self::Tunnel => over_http1(stream, connect()).await.map(Open::Tunnel),
            Self::TunnelStream => over_http2(stream, connect()).await.map(Open::Tunnel),
        }
    }
}

impl Open {
    pub(crate) async fn echo(&mut self) {
        match self {
            Self::WebSocket(socket) => {
                socket.send(Message::text("hello")).await.expect("an open connection");
                let echo = socket.next().await.expect("an echo").expect("an open connection");
                assert_eq!(echo, Message::text("hello"));
            }
            Self::Tunnel(io) => {
                io.write_u8(7).await.expect("an open connection");
                assert_eq!(io.read_u8().await.expect("an echo"), 7);
            }
        }
    }
}

async fn handshake(address: SocketAddr, stream: TcpStream) -> Result<Open, StatusCode> {
    let mut request = format!("ws://{address}/").into_client_request().expect("a url");
    request.headers_mut().insert("x-project-id", "acme".parse().expect("a value"));
    match client_async(request, Box::new(stream) as Box<dyn Io>).await {
        Ok((socket, _)) => Ok(Open::WebSocket(Box::new(socket))),
        Err(tungstenite::Error::Http(refusal)) => Err(refusal.status()),
        Err(error) => panic!("no answer: {error}"),
    }
}

fn connect() -> Request<Body> {
    let mut request = request("acme");
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = "db.internal:5432".parse().expect("an authority");
    request
}

fn extended_connect(address: SocketAddr) -> Request<Body> {
    let mut request = request("acme");
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = format!("http://{address}/").parse().expect("a url");
    request.headers_mut().insert("sec-websocket-version", "13".parse().expect("a value"));
    request.extensions_mut().insert(Protocol::from_static("websocket"));
    request
}

async fn over_http1(stream: TcpStream, request: Request<Body>) -> Result<Box<dyn Io>, StatusCode> {
    let (mut http, connection) = http1::handshake(TokioIo::new(stream)).await.expect("a connection");
    tokio::spawn(connection.with_upgrades());
    upgraded(http.send_request(request).await).await
}

async fn over_http2(stream: TcpStream, request: Request<Body>) -> Result<Box<dyn Io>, StatusCode> {
    let io = TokioIo::new(stream);
    let (mut http, connection) = http2::handshake(TokioExecutor::new(), io).await.expect("a connection");
    tokio::spawn(connection);
    // An extended CONNECT may go out once the server's settings allow it, and those come before its
    // first answer.
    let nobodys = Request::get("http://localhost/").body(Body::empty()).expect("a request");
    assert_eq!(http.send_request(nobodys).await.expect("an answer").status(), StatusCode::BAD_REQUEST);
    upgraded(http.send_request(request).await).await
}

async fn upgraded(answer: hyper::Result<Response<hyper::body::Incoming>>) -> Result<Box<dyn Io>, StatusCode> {
    let answer = answer.expect("an answer");
    if answer.status() != StatusCode::OK {
        return Err(answer.status());
    }
    let connection = hyper::upgrade::on(answer).await.expect("an upgrade");
    Ok(Box::new(TokioIo::new(connection)))
}

#[tokio::test]
async fn a_held_upgrade_occupies_its_slot_until_it_is_closed() {
    for upgrade in ALL {
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let server = serve(&layer, true).await;
        let mut first = upgrade.open(server).await.expect("a free slot");
        first.echo().await;
        assert_eq!(active(layer.limiter(), "acme").await, 1, "{upgrade:?}");
        let second = upgrade.open(server).await.err();
        assert_eq!(second, Some(StatusCode::TOO_MANY_REQUESTS), "{upgrade:?}");
        first.echo().await;

        drop(first);
        until(async || active(layer.limiter(), "acme").await == 0).await;
        upgrade.open(server).await.expect("a free slot").echo().await;
    }
}

#[tokio::test]
async fn an_upgrade_that_nobody_holds_gives_its_slot_back_at_once() {
    for upgrade in ALL {
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let server = serve(&layer, false).await;
        let mut first = upgrade.open(server).await.expect("a free slot");
        assert_eq!(active(layer.limiter(), "acme").await, 0, "{upgrade:?}");
        let mut second = upgrade.open(server).await.expect("a free slot");
        first.echo().await;
        second.echo().await;
    }
}

#[tokio::test]
async fn only_a_successful_connect_is_an_upgrade() {
    let layer = ConcurrencyLimitLayer::in_memory(9);
    let fails = Arc::new(AtomicBool::new(false));
    let service = layer.layer(service_fn({
        let fails = Arc::clone(&fails);
        move |_: Request<Body>| {
            let mut response = Response::new(endless_body());
            if fails.load(Ordering::Relaxed) {
                *response.status_mut() = StatusCode::BAD_GATEWAY;
            }
            async { Ok::<_, Infallible>(response) }
        }
    }));
    let connect = || {
        let mut request = request("acme");
        *request.method_mut() = Method::CONNECT;
        service.clone().oneshot(request)
    };
    let _tunnel = connect().await;
    assert_eq!(active(layer.limiter(), "acme").await, 0);
    fails.store(true, Ordering::Relaxed);
    let _failed = connect().await;
    assert_eq!(active(layer.limiter(), "acme").await, 1);
}

#[tokio::test]
async fn one_hold_keeps_the_slots_of_all_layers_and_hears_of_all_losses() {
    let [outer, inner] = [1, 2].map(ConcurrencyLimitLayer::in_memory);
    let kept: Arc<Mutex<Option<HeldSlot>>> = Arc::default();
    let service = outer.layer(inner.layer(service_fn({
        let kept = Arc::clone(&kept);
        move |request: Request<Body>| {
            let slot = request.extensions().get::<SlotHandle>().expect("a handle").clone();
            assert_eq!(slot.limit(), Limit::Max(2), "of the innermost");
            *kept.lock().expect("no panic") = slot.hold();
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            async { Ok::<_, Infallible>(response) }
        }
    })));
    let held = async || [active(outer.limiter(), "acme").await, active(inner.limiter(), "acme").await];
    for _ in 0..2 {
        drop(service.clone().oneshot(request("acme")).await);
        assert_eq!(held().await, [1, 1]);
        let slot = kept.lock().expect("no panic").take().expect("a slot");
        drop(slot);
        assert_eq!(held().await, [0, 0]);
    }
    drop(service.oneshot(request("acme")).await);
    let slot = kept.lock().expect("no panic").take().expect("a slot");
    assert_eq!(outer.limiter().drain("acme").await.expect("an answer"), 1);
    timeout(Duration::from_secs(10), slot.lost()).await.expect("the holder is told");
}

//! How requests end on real connections: each gives its slot back once, and in time.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{any, get, post};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower_slots::{ConcurrencyLimitLayer, Limiter};

use crate::support::{Script, Watched, active, data, endless_body, next, request, serve, until};

/// A server with one slot.
struct Server {
    store: Watched,
    limiter: Limiter,
    address: SocketAddr,
}

impl Server {
    async fn of(router: Router) -> Self {
        let store = Watched::default();
        let limiter = Limiter::builder(store.clone()).limit(1).build().expect("valid settings");
        let address = serve(router.layer(ConcurrencyLimitLayer::new(limiter.clone()))).await;
        Self { store, limiter, address }
    }

    async fn active(&self) -> u32 {
        active(&self.limiter, "acme").await
    }

    async fn until_held(&self) {
        until(async || self.active().await == 1).await;
    }

    /// As many slots have been given back, and none is held.
    async fn until_released(&self, times: usize) {
        until(async || self.active().await == 0).await;
        // Time for one too many.
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(self.store.released(), times);
    }
}

/// A connection that stays open until it is dropped.
enum Client {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl Client {
    async fn http1(server: &Server) -> Self {
        let (sender, connection) = http1::handshake(connect(server).await).await.expect("a handshake");
        tokio::spawn(connection);
        Self::Http1(sender)
    }

    async fn http2(server: &Server) -> Self {
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), connect(server).await).await.expect("a handshake");
        tokio::spawn(connection);
        Self::Http2(sender)
    }

    async fn both(server: &Server) -> [Self; 2] {
        [Self::http1(server).await, Self::http2(server).await]
    }

    async fn send(&mut self, mut request: Request<Body>) -> Response<Incoming> {
        let answer = match self {
            Self::Http1(sender) => {
                request.headers_mut().insert("host", HeaderValue::from_static("localhost"));
                sender.send_request(request).await
            }
            Self::Http2(sender) => {
                *request.uri_mut() = format!("http://localhost{}", request.uri()).parse().expect("a uri");
                sender.send_request(request).await
            }
        };
        answer.expect("a response")
    }

    async fn get(&mut self) -> Response<Incoming> {
        self.send(request("acme")).await
    }

    fn is_open(&self) -> bool {
        match self {
            Self::Http1(sender) => !sender.is_closed(),
            Self::Http2(sender) => !sender.is_closed(),
        }
    }
}

async fn connect(server: &Server) -> TokioIo<TcpStream> {
    TokioIo::new(TcpStream::connect(server.address).await.expect("a connection"))
}

/// An HTTP/1 connection with nothing between the test and its bytes, on which a request was sent.
async fn raw(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.expect("a connection");
    let head = "GET / HTTP/1.1\r\nhost: localhost\r\nx-project-id: acme\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("an open connection");
    stream
}

/// "first", and then nothing more for ever.
fn begun_body() -> Body {
    let first = stream::iter([Ok::<_, Infallible>("first")]);
    Body::from_stream(first.chain(stream::pending()))
}

#[tokio::test]
async fn a_client_that_goes_before_the_head() {
    let server = Server::of(Router::new().route("/", get(async || pending::<()>().await))).await;
    let stream = raw(&server).await;
    server.until_held().await;
    drop(stream);
    server.until_released(1).await;

    // On HTTP/2 a request that is given up resets its stream, and no other.
    let mut client = Client::http2(&server).await;
    tokio::select! {
        _ = client.get() => panic!("an answer"),
        () = server.until_held() => {}
    }
    server.until_released(2).await;
    assert!(client.is_open());
}

/// An HTTP/1 server reads no further than the request's body is read, and so not to the end.
#[tokio::test]
async fn a_client_whose_going_cannot_be_noticed() {
    let limiter = Limiter::builder(Watched::default()).limit(1).max_hold(Duration::from_secs(2)).build();
    let layer = ConcurrencyLimitLayer::new(limiter.expect("valid settings"));
    let never_reads = post(async |_unread: Body| pending::<()>().await);
    let address = serve(Router::new().route("/", never_reads).layer(layer.clone())).await;
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let head = "POST / HTTP/1.1\r\nhost: localhost\r\nx-project-id: acme\r\ncontent-length: 100000\r\n\r\n";
    stream.write_all(&[head.as_bytes(), &[0; 100_000]].concat()).await.expect("an open connection");
    until(async || active(layer.limiter(), "acme").await == 1).await;
    drop(stream);
    until(async || active(layer.limiter(), "acme").await == 0).await;
}

#[tokio::test]
async fn a_client_that_goes_within_the_body() {
    let server = Server::of(Router::new().route("/", get(async || begun_body()))).await;
    let mut stream = raw(&server).await;
    let mut read = Vec::new();
    while !read.ends_with(b"first\r\n") {
        read.push(stream.read_u8().await.expect("a body that has begun"));
    }
    assert_eq!(server.active().await, 1);
    drop(stream);
    server.until_released(1).await;
}

#[tokio::test]
async fn a_stream_that_is_reset_within_the_body() {
    let server = Server::of(Router::new().route("/", get(async || begun_body()))).await;
    let mut client = Client::http2(&server).await;
    for released in 1..=2 {
        let mut response = client.get().await;
        assert_eq!(next(response.body_mut()).await, "data");
        assert_eq!(server.active().await, 1);
        drop(response);
        server.until_released(released).await;
        assert!(client.is_open());
    }
}

#[tokio::test]
async fn the_last_byte_ends_the_hold_and_not_the_connection() {
    let pieces = || Body::from_stream(stream::iter(["first", "last"].map(Ok::<_, Infallible>)));
    let server = Server::of(Router::new().route("/", get(async move || pieces()))).await;
    for (times, mut client) in Client::both(&server).await.into_iter().enumerate() {
        let body = client.get().await.into_body().collect().await.expect("a whole body").to_bytes();
        assert_eq!(body, "firstlast");
        server.until_released(times + 1).await;
        assert!(client.is_open());
    }
}

const PIECE: Bytes = Bytes::from_static(&[0; 65_536]);
const PIECES: usize = 1024;

/// 64 MiB, more than any buffer on the way takes.
fn long_body() -> Body {
    Body::from_stream(stream::iter((0..PIECES).map(|_| Ok::<_, Infallible>(PIECE))))
}

#[tokio::test]
async fn a_slow_reader_keeps_its_slot_while_there_is_more_to_send() {
    let server = Server::of(Router::new().route("/", get(async || long_body()))).await;
    for (times, mut client) in Client::both(&server).await.into_iter().enumerate() {
        let mut response = client.get().await;
        assert_eq!(next(response.body_mut()).await, "data");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(server.active().await, 1);
        let mut read = 0;
        while let Some(frame) = response.body_mut().frame().await {
            read += frame.expect("an open connection").data_ref().map_or(0, Bytes::len);
        }
        assert!(read > (PIECES - 1) * PIECE.len());
        server.until_released(times + 1).await;
    }
}

#[tokio::test]
async fn a_body_in_one_piece_is_with_the_server_at_once() {
    let whole = || Body::from(vec![0; PIECE.len() * PIECES]);
    let server = Server::of(Router::new().route("/", get(async move || whole()))).await;
    let mut stream = raw(&server).await;
    stream.read_u8().await.expect("an answer");
    server.until_released(1).await;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.expect("an open connection");
    assert!(rest.len() > PIECE.len() * PIECES);
}

#[tokio::test]
async fn answers_without_a_body() {
    let answers = any(async |method: Method, headers: HeaderMap| {
        let status = headers["x-status"].to_str().expect("ascii").parse().expect("a status");
        let body = if method == Method::POST { Body::empty() } else { endless_body() };
        Response::builder().status::<u16>(status).body(body).expect("a response")
    });
    let server = Server::of(Router::new().route("/", answers)).await;
    let cases = [(Method::HEAD, "200"), (Method::GET, "204"), (Method::GET, "304"), (Method::POST, "200")];
    let mut released = 0;
    for mut client in Client::both(&server).await {
        for (method, status) in &cases {
            let mut request = request("acme");
            *request.method_mut() = method.clone();
            request.headers_mut().insert("x-status", HeaderValue::from_static(status));
            let response = client.send(request).await;
            assert_eq!(response.status().as_str(), *status);
            released += 1;
            server.until_released(released).await;
            assert!(client.is_open(), "{method} {status}");
        }
    }
}

#[tokio::test]
async fn trailers_end_the_hold() {
    let with_trailers = || {
        let trailers = HeaderMap::from_iter([("x-sum".parse().expect("a name"), HeaderValue::from(7))]);
        let script = Script::new([data(), Ok(Frame::trailers(trailers))]);
        Response::builder().header("trailer", "x-sum").body(Body::new(script)).expect("a response")
    };
    let server = Server::of(Router::new().route("/", get(async move || with_trailers()))).await;
    for (times, mut client) in Client::both(&server).await.into_iter().enumerate() {
        let mut request = request("acme");
        request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let response = client.send(request).await;
        assert_eq!(response.status(), StatusCode::OK);
        let read = response.into_body().collect().await.expect("a whole body");
        assert_eq!(read.trailers().map(|trailers| &trailers["x-sum"]), Some(&HeaderValue::from(7)));
        server.until_released(times + 1).await;
        assert!(client.is_open());
    }
}

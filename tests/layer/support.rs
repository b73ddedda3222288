use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tower::util::BoxCloneService;
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_slots::store::{Claim, Grant, Key, Reply, SlotId, SlotStore, StoreError, StoreErrorKind, Terms};
use tower_slots::{ConcurrencyLimitLayer, Limiter, SlotHandle};

#[path = "../support/watched.rs"]
mod watched;

pub(crate) use self::watched::Watched;

pub(crate) type App = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

pub(crate) fn request(id: &str) -> Request<Body> {
    Request::builder().header("x-project-id", id).body(Body::empty()).expect("a valid request")
}

/// A service that answers with what `body` makes of the request.
pub(crate) fn app<B>(
    layer: ConcurrencyLimitLayer,
    body: impl Fn(Request<Body>) -> B + Clone + Send + Sync + 'static,
) -> App
where
    B: http_body::Body<Data = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
{
    let answer = service_fn(move |request| {
        let response = Response::new(body(request));
        async { Ok::<_, Infallible>(response) }
    });
    let service = ServiceBuilder::new().layer(layer).service(answer);
    BoxCloneService::new(service.map_response(|response| response.map(Body::new)))
}

/// A service whose responses' first data says which slot handle the request carries.
pub(crate) fn origins(layer: ConcurrencyLimitLayer) -> App {
    app(layer, |request| {
        let handle = request.extensions().get::<SlotHandle>();
        Body::from(handle.map_or("none".to_owned(), |handle| format!("{:?}", handle.origin())))
    })
}

/// A service whose responses never end.
pub(crate) fn endless(layer: ConcurrencyLimitLayer) -> App {
    app(layer, |_| endless_body())
}

pub(crate) fn endless_body() -> Body {
    Body::from_stream(futures_util::stream::pending::<Result<Bytes, io::Error>>())
}

pub(crate) async fn send(app: &App, request: Request<Body>) -> Response<Body> {
    app.clone().oneshot(request).await.expect("infallible")
}

pub(crate) async fn text<B>(response: Response<B>) -> String
where
    B: http_body::Body<Error: std::fmt::Debug>,
{
    let bytes = response.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(bytes.to_vec()).expect("text")
}

pub(crate) async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

pub(crate) async fn serve(router: Router) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::spawn(async { axum::serve(listener, router).await });
    address
}

/// Sends a request to `address`, over a connection of its own.
pub(crate) async fn ask(address: SocketAddr, mut request: Request<Body>) -> Response<Incoming> {
    let client: Client<HttpConnector, Body> = Client::builder(TokioExecutor::new()).build_http();
    *request.uri_mut() = format!("http://{address}{}", request.uri()).parse().expect("a uri");
    client.request(request).await.expect("a response")
}

pub(crate) async fn active(limiter: &Limiter, id: &str) -> u32 {
    limiter.active(id).await.expect("the store answers")
}

/// Waits for what another task does; fails the test if it never does.
pub(crate) async fn until<F: Future<Output = bool>>(condition: impl Fn() -> F) {
    for _ in 0..500 {
        if condition().await {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("waited for 5 s in vain");
}

/// A body that yields these frames and then, if `ends_with_last`, says that it is at its end.
pub(crate) struct Script {
    pub(crate) frames: VecDeque<Result<Frame<Bytes>, io::Error>>,
    pub(crate) ends_with_last: bool,
}

impl Script {
    pub(crate) fn new(frames: impl IntoIterator<Item = Result<Frame<Bytes>, io::Error>>) -> Self {
        Self { frames: frames.into_iter().collect(), ends_with_last: false }
    }
}

pub(crate) fn data() -> Result<Frame<Bytes>, io::Error> {
    Ok(Frame::data(Bytes::from_static(b"data")))
}

impl http_body::Body for Script {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(self.frames.pop_front())
    }

    fn is_end_stream(&self) -> bool {
        self.ends_with_last && self.frames.is_empty()
    }
}

/// The next frame's kind, for any body.
pub(crate) async fn next<B>(body: &mut B) -> &'static str
where
    B: http_body::Body + Unpin,
{
    match body.frame().await {
        None => "end",
        Some(Err(_)) => "error",
        Some(Ok(frame)) if frame.is_trailers() => "trailers",
        Some(Ok(_)) => "data",
    }
}

/// A store that cannot answer.
pub(crate) struct Down;

fn down<T: Send + Unpin + 'static>() -> Reply<Result<T, StoreError>> {
    Reply::ready(Err(StoreError::new(StoreErrorKind::Io, "10.0.0.7 refused")))
}

impl SlotStore for Down {
    fn acquire(&self, _: Claim) -> Reply<Result<Grant, StoreError>> {
        down()
    }

    fn release(&self, _: &Key, _: SlotId) {}

    fn release_confirmed(&self, _: &Key, _: SlotId) -> Reply<Result<(), StoreError>> {
        down()
    }

    fn count(&self, _: &Key, _: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        down()
    }

    fn drain(&self, _: &Key, _: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        down()
    }

    fn flush(&self) -> Reply<()> {
        Reply::ready(())
    }
}

/// Answers every request with itself being called: for stacks whose layers' readiness matters.
#[derive(Clone, Debug)]
pub(crate) struct Plain;

impl Service<Request<Body>> for Plain {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

pub(crate) fn is_at_end(response: &Response<Body>) -> bool {
    response.body().is_end_stream()
}

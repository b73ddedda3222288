//! A real gRPC client and server, with the layer around the server and around one service.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut};
use futures_util::stream::{self, StreamExt};
use http::request::Parts;
use http::{HeaderValue, uri::PathAndQuery};
use tokio::sync::Notify;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::server::NamedService;
use tonic::service::LayerExt;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tonic_types::StatusExt;
use tower::{Service, service_fn};
use tower_slots::layer::RateLimitFields;
use tower_slots::semaphore::Semaphore;
use tower_slots::{ConcurrencyLimitLayer, Limiter, MemoryStore, Rejection};

/// Messages that are text, so that no code has to be generated.
#[derive(Clone, Copy)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, text: String, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        String::from_utf8(bytes.to_vec()).map(Some).map_err(|_| Status::internal("no text"))
    }
}

/// Answers `Echo` with the request, and streams "first" and, when told to, "last" to `Watch`.
#[derive(Clone, Default)]
struct Demo {
    go_on: Arc<Notify>,
}

impl NamedService for Demo {
    const NAME: &'static str = "test.Demo";
}

impl Service<http::Request<Body>> for Demo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let go_on = Arc::clone(&self.go_on);
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Text);
            let watch = service_fn(move |_: Request<String>| {
                let go_on = Arc::clone(&go_on);
                let last = stream::once(async move {
                    go_on.notified().await;
                    Ok("last".to_owned())
                });
                async { Ok(Response::new(stream::iter([Ok("first".to_owned())]).chain(last))) }
            });
            let echo = service_fn(async |request: Request<String>| Ok(Response::new(request.into_inner())));
            Ok(match request.uri().path() {
                "/test.Demo/Echo" => grpc.unary(echo, request).await,
                "/test.Demo/Watch" => grpc.server_streaming(watch, request).await,
                _ => Status::unimplemented("").into_http(),
            })
        })
    }
}

/// A client of a server of its own.
#[derive(Clone)]
struct Client {
    grpc: tonic::client::Grpc<Channel>,
    go_on: Arc<Notify>,
}

/// What the layer is put around.
#[derive(Clone, Copy, Debug)]
enum Around {
    Server,
    Service,
}

const BOTH: [Around; 2] = [Around::Server, Around::Service];

impl Client {
    async fn of(around: Around, layer: ConcurrencyLimitLayer) -> Self {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a socket");
        let url = format!("http://{}", incoming.local_addr().expect("an address"));
        let demo = Demo::default();
        let go_on = Arc::clone(&demo.go_on);
        match around {
            Around::Server => {
                let server = Server::builder().layer(layer).add_service(demo);
                tokio::spawn(server.serve_with_incoming(incoming));
            }
            Around::Service => {
                let service = layer.named_layer(demo);
                assert_eq!(name_of(&service), Demo::NAME);
                let server = Server::builder().add_service(service);
                tokio::spawn(server.serve_with_incoming(incoming));
            }
        }
        let channel = Channel::from_shared(url).expect("a url").connect().await.expect("a connection");
        Self { grpc: tonic::client::Grpc::new(channel), go_on }
    }

    async fn echo(&self, id: &str) -> Result<Response<String>, Status> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.expect("a connection");
        grpc.unary(from(id), PathAndQuery::from_static("/test.Demo/Echo"), Text).await
    }

    async fn watch(&self, id: &str) -> Result<Response<Streaming<String>>, Status> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.expect("a connection");
        grpc.server_streaming(from(id), PathAndQuery::from_static("/test.Demo/Watch"), Text).await
    }
}

fn name_of<S: NamedService>(_: &S) -> &'static str {
    S::NAME
}

fn from(id: &str) -> Request<String> {
    let mut request = Request::new("hello".to_owned());
    if !id.is_empty() {
        request.metadata_mut().insert("x-project-id", id.parse().expect("ascii"));
    }
    request
}

fn limit(limit: u32) -> (Limiter, ConcurrencyLimitLayer) {
    let limiter = Limiter::builder(MemoryStore::new()).limit(limit).build().expect("valid settings");
    (limiter.clone(), ConcurrencyLimitLayer::new(limiter))
}

async fn active(limiter: &Limiter) -> u32 {
    limiter.active("acme").await.expect("memory answers")
}

async fn until_free(limiter: &Limiter) {
    for _ in 0..500 {
        if active(limiter).await == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited 5 s in vain for the slot");
}

fn retry_delay(status: &Status) -> Option<Duration> {
    let details = status.check_error_details().expect("well-formed details");
    details.retry_info().and_then(|info| info.retry_delay)
}

#[tokio::test]
async fn a_stream_holds_its_slot_until_its_end() {
    for around in BOTH {
        let (limiter, layer) = limit(1);
        let layer = layer.retry_after(|_: &Rejection, _: &Parts| Duration::from_secs(7));
        let client = Client::of(around, layer).await;
        assert_eq!(client.echo("acme").await.expect("a free slot").into_inner(), "hello");
        until_free(&limiter).await;

        let mut stream = client.watch("acme").await.expect("a free slot").into_inner();
        assert_eq!(stream.message().await.expect("a message").as_deref(), Some("first"));
        assert_eq!(active(&limiter).await, 1, "{around:?}");
        for refused in [
            client.echo("acme").await.expect_err("no slot is free"),
            client.watch("acme").await.map(|_| ()).expect_err("no slot is free"),
        ] {
            assert_eq!(refused.code(), Code::ResourceExhausted, "{around:?}");
            assert_eq!(refused.message(), "concurrency limit reached");
            assert_eq!(retry_delay(&refused), Some(Duration::from_secs(7)));
        }
        client.echo("globex").await.expect("another's slot");

        client.go_on.notify_one();
        assert_eq!(stream.message().await.expect("a message").as_deref(), Some("last"));
        assert_eq!(stream.message().await.expect("an end"), None);
        until_free(&limiter).await;
        client.echo("acme").await.expect("a free slot");
    }
}

#[tokio::test]
async fn a_stream_that_is_given_up_frees_its_slot() {
    for around in BOTH {
        let (limiter, layer) = limit(1);
        let client = Client::of(around, layer).await;
        let mut stream = client.watch("acme").await.expect("a free slot").into_inner();
        assert_eq!(stream.message().await.expect("a message").as_deref(), Some("first"));
        assert_eq!(active(&limiter).await, 1);
        drop(stream);
        until_free(&limiter).await;
    }
}

#[tokio::test]
async fn an_rpc_without_an_id_is_the_callers_fault() {
    for around in BOTH {
        let (_, layer) = limit(1);
        let client = Client::of(around, layer.clone()).await;
        let refused = client.echo("").await.expect_err("no id");
        assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "no project id: send one"));
        assert!(refused.details().is_empty());

        let client = Client::of(around, layer.challenge(HeaderValue::from_static("Bearer"))).await;
        assert_eq!(client.echo("").await.expect_err("no id").code(), Code::Unauthenticated);
    }
}

#[tokio::test]
async fn a_full_bulkhead_is_not_the_callers_fault() {
    let (_, layer) = limit(9);
    let semaphore = Semaphore::builder(1).build().expect("valid settings");
    let client = Client::of(Around::Server, layer.bulkhead(semaphore)).await;
    let _held = client.watch("acme").await.expect("a free permit");
    let refused = client.echo("globex").await.expect_err("no permit is free");
    assert_eq!(refused.code(), Code::Unavailable);
    assert_eq!(retry_delay(&refused), Some(Duration::from_secs(1)));
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn an_outage_is_not_the_callers_fault() {
    for around in BOTH {
        // Nobody listens there.
        let nobody = tower_slots::RedisStore::open("redis://127.0.0.1:1/").expect("a url");
        let limiter = Limiter::builder(nobody).on_outage(tower_slots::OnOutage::Refuse);
        let layer = ConcurrencyLimitLayer::new(limiter.build().expect("valid settings"));
        let client = Client::of(around, layer).await;
        let refused = client.echo("acme").await.expect_err("no store");
        assert_eq!((refused.code(), refused.message()), (Code::Unavailable, "service unavailable"));
        assert_eq!(retry_delay(&refused), Some(Duration::from_secs(1)));
    }
}

#[tokio::test]
async fn what_is_left_stands_in_the_head_and_never_in_trailers() {
    let (_, layer) = limit(8);
    let layer = layer.rate_limit_fields(RateLimitFields::DraftIetf11);
    let client = Client::of(Around::Server, layer).await;
    let response = client.watch("acme").await.expect("a free slot");
    let value = |name| response.metadata().get(name).and_then(|value| value.to_str().ok());
    assert_eq!(value("ratelimit"), Some(r#""concurrency";r=7"#));
    assert_eq!(value("ratelimit-policy"), Some(r#""concurrency";q=8;qu="concurrent-requests""#));

    client.go_on.notify_one();
    let trailers = response.into_inner().trailers().await.expect("an end").unwrap_or_default();
    assert!(!trailers.keys().any(|key| format!("{key:?}").contains("ratelimit")));

    let (_, none) = limit(0);
    let none = Client::of(Around::Server, none.rate_limit_fields(RateLimitFields::DraftIetf11)).await;
    let refused = none.echo("acme").await.expect_err("no slot is free");
    assert!(refused.metadata().get("ratelimit").is_none());
}

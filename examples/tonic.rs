//! gRPC: at most 2 RPCs of one project in flight, a stream for as long as it streams.
//!
//! `cargo run --example tonic`
//!
//! A tonic server with the layer, and a tonic client. Ends by itself; exits with 1 if anything is not as
//! it says. The service is written by hand, with messages that are text, so that no code has to be
//! generated; around a generated one the layer stands just the same.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut};
use futures_util::StreamExt;
use http::uri::PathAndQuery;
use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tonic_types::StatusExt;
use tower::{Service, service_fn};
use tower_slots::{ConcurrencyLimitLayer, Limiter};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Client = tonic::client::Grpc<Channel>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let layer = ConcurrencyLimitLayer::in_memory(2); // per `x-project-id`, here a metadata key
    let limiter = layer.limiter().clone();
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let url = format!("http://{}", incoming.local_addr()?);
    let greeter = Greeter { more: Arc::new(Semaphore::new(0)) };
    let more = Arc::clone(&greeter.more);
    tokio::spawn(Server::builder().layer(layer).add_service(greeter).serve_with_incoming(incoming));
    let client = Client::new(Channel::from_shared(url)?.connect().await?);

    println!("a unary call: {}", hello(&client, "acme").await?);

    println!("acme opens two streams, and asks for more:");
    let (mut one, two) = (count(&client, "acme").await?, count(&client, "acme").await?);
    println!("  stream one: {:?}", one.message().await?);
    expect(limiter.active("acme").await? == 2, "both streams hold a slot")?;
    refused(hello(&client, "acme").await.err())?;
    refused(count(&client, "acme").await.err())?;
    println!("  globex is not held up: {}", hello(&client, "globex").await?);

    println!("one stream is given up, the other read to its end:");
    drop(two);
    until(&limiter, 1).await?;
    more.add_permits(2);
    while let Some(text) = one.message().await? {
        println!("  stream one: {text:?}");
    }
    until(&limiter, 0).await?;
    println!("both slots are free, and acme is served: {}", hello(&client, "acme").await?);
    Ok(())
}

/// Shows how a client learns that it is refused, and when to come back.
fn refused(status: Option<Status>) -> Result<(), Error> {
    let status = status.ok_or("a third call was let in")?;
    expect(status.code() == Code::ResourceExhausted, "the code is RESOURCE_EXHAUSTED")?;
    let details = status.get_error_details();
    let delay = details.retry_info().and_then(|info| info.retry_delay).ok_or("no RetryInfo")?;
    println!("  refused: {:?} ({}), again in {delay:?}", status.code(), status.message());
    expect(delay >= Duration::from_secs(1), "the delay is at least a second")
}

/// The server learns of the end a little later, or earlier, than the client.
async fn until(limiter: &Limiter, active: u32) -> Result<(), Error> {
    for _ in 0..500 {
        if limiter.active("acme").await? == active {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(format!("acme never has {active} slots in use").into())
}

fn expect(holds: bool, what: &str) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(format!("not so: {what}").into()) }
}

async fn hello(client: &Client, project: &str) -> Result<String, Status> {
    let (mut client, request) = (ready(client).await?, request(project)?);
    let path = PathAndQuery::from_static("/demo.Greeter/Hello");
    Ok(client.unary(request, path, Text).await?.into_inner())
}

async fn count(client: &Client, project: &str) -> Result<Streaming<String>, Status> {
    let (mut client, request) = (ready(client).await?, request(project)?);
    let path = PathAndQuery::from_static("/demo.Greeter/Count");
    Ok(client.server_streaming(request, path, Text).await?.into_inner())
}

async fn ready(client: &Client) -> Result<Client, Status> {
    let mut client = client.clone();
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(client)
}

fn request(project: &str) -> Result<Request<String>, Status> {
    let mut request = Request::new(format!("hello from {project}"));
    let id = project.parse().map_err(|_| Status::invalid_argument("a project id is ascii"))?;
    request.metadata_mut().insert("x-project-id", id);
    Ok(request)
}

/// `Hello` answers with what it is sent; `Count` streams three texts.
#[derive(Clone)]
struct Greeter {
    /// How many texts may come after the first: what is shown does not hang on how fast this runs.
    more: Arc<Semaphore>,
}

impl NamedService for Greeter {
    const NAME: &'static str = "demo.Greeter";
}

impl Service<http::Request<Body>> for Greeter {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let more = Arc::clone(&self.more);
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Text);
            let hello = service_fn(async |request: Request<String>| Ok(Response::new(request.into_inner())));
            let count = service_fn(move |_: Request<String>| {
                let more = Arc::clone(&more);
                let numbers = futures_util::stream::iter(1..=3).then(move |n| text(n, Arc::clone(&more)));
                async { Ok(Response::new(numbers.boxed())) }
            });
            Ok(match request.uri().path() {
                "/demo.Greeter/Hello" => grpc.unary(hello, request).await,
                "/demo.Greeter/Count" => grpc.server_streaming(count, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

async fn text(n: usize, more: Arc<Semaphore>) -> Result<String, Status> {
    if n > 1 {
        more.acquire().await.map_err(|_| Status::cancelled("no more"))?.forget();
    }
    Ok(format!("{n} of 3"))
}

/// The messages' codec: a generated service brings its own.
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

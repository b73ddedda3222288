//! A gateway to language models: a stream of tokens occupies its tenant's slots until the last one.
//!
//! `cargo run --example sse`
//!
//! Each tenant has 4 slots; a run of the small model takes 1 of them, of the large one 3. Ends by
//! itself; exits with 1 if anything is not as it says.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::response::sse::{Event, Sse};
use axum::routing::post;
use futures_util::stream::{self, Stream, StreamExt};
use http::request::Parts;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower_slots::{ConcurrencyLimitLayer, Limiter};

type Error = Box<dyn std::error::Error + Send + Sync>;

const TOKENS: [&str; 6] = ["a", "stream", "holds", "what", "it", "took"];

/// How many more tokens a model may yield: what is shown does not hang on how fast this runs.
type Yield = Arc<Semaphore>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let (small, large) = (Yield::new(Semaphore::new(0)), Yield::new(Semaphore::new(0)));
    let layer = ConcurrencyLimitLayer::in_memory(4).weight(weight);
    let limiter = layer.limiter().clone();
    let app = Router::new()
        .route("/v1/small", post(generate).with_state(Arc::clone(&small)))
        .route("/v1/large", post(generate).with_state(Arc::clone(&large)))
        .layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let server = Gateway::at(listener.local_addr()?);
    tokio::spawn(async { axum::serve(listener, app).await });

    println!("acme runs both models:");
    let mut long = server.run("large", "acme").await?.ok_or("the large model was refused")?;
    let mut short = server.run("small", "acme").await?.ok_or("the small model was refused")?;
    large.add_permits(1);
    small.add_permits(1);
    println!("  large: {}", next(&mut long).await?);
    println!("  small: {}", next(&mut short).await?);
    expect(limiter.active("acme").await? == 4, "all 4 slots are in use")?;
    expect(server.run("small", "acme").await?.is_none(), "there is no slot for a third run")?;
    expect(server.run("small", "globex").await?.is_some(), "globex has slots of its own")?;

    println!("the small one comes to its end:");
    small.add_permits(2 * TOKENS.len()); // globex may take some
    println!("  small: {}", rest(short).await?);
    until(&limiter, 3).await?;
    println!("  its slot is free, and the large one's 3 are in use");
    expect(server.run("large", "acme").await?.is_none(), "another large run has no room")?;

    println!("the large one comes to its end:");
    large.add_permits(TOKENS.len() - 1);
    println!("  large: {}", rest(long).await?);
    until(&limiter, 0).await?;
    expect(server.run("large", "acme").await?.is_some(), "another large run has room now")?;
    println!("each stream held its slots until its last token");
    Ok(())
}

/// How many of its tenant's slots a run takes: as the large model costs three times as much.
fn weight(parts: &Parts) -> u32 {
    if parts.uri.path() == "/v1/large" { 3 } else { 1 }
}

async fn generate(State(tokens): State<Yield>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    Sse::new(stream::iter(TOKENS).then(move |token| {
        let tokens = Arc::clone(&tokens);
        async move {
            if let Ok(permit) = tokens.acquire().await {
                permit.forget();
            }
            Ok(Event::default().data(token))
        }
    }))
}

/// The client's side.
struct Gateway {
    client: Client<HttpConnector, Empty<Bytes>>,
    address: SocketAddr,
}

impl Gateway {
    fn at(address: SocketAddr) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), address }
    }

    /// A stream of tokens, or none if the tenant has too few slots left.
    async fn run(&self, model: &str, tenant: &str) -> Result<Option<Incoming>, Error> {
        let request = Request::post(format!("http://{}/v1/{model}", self.address));
        let response = self.client.request(request.header("x-project-id", tenant).body(Empty::new())?);
        let response = response.await?;
        println!("  {tenant} asks for {model}: {}", response.status());
        match response.status() {
            StatusCode::OK => Ok(Some(response.into_body())),
            StatusCode::TOO_MANY_REQUESTS => Ok(None),
            other => Err(format!("an unexpected answer: {other}").into()),
        }
    }
}

async fn next(stream: &mut Incoming) -> Result<String, Error> {
    let frame = stream.frame().await.ok_or("the stream has ended")??;
    Ok(tokens(&frame.into_data().map_err(|_| "no data")?))
}

async fn rest(stream: Incoming) -> Result<String, Error> {
    Ok(tokens(&stream.collect().await?.to_bytes()))
}

/// Each event is a line `data: token` and an empty one.
fn tokens(events: &[u8]) -> String {
    let events = String::from_utf8_lossy(events);
    events.lines().filter_map(|line| line.strip_prefix("data: ")).collect::<Vec<_>>().join(" ")
}

/// The last byte is sent a little before the slots are given back.
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

//! The layer on a plain hyper server, over HTTP/1 and HTTP/2.
//!
//! `cargo run --example hyper`
//!
//! Each project may have 2 requests in flight. Three are sent at once, over each protocol: one of them
//! is refused. Ends by itself; exits with 1 if anything is not as it says.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::RETRY_AFTER;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tower::{Layer, service_fn};
use tower_slots::ConcurrencyLimitLayer;

type Error = Box<dyn std::error::Error + Send + Sync>;
type HttpClient = Client<HttpConnector, Empty<Bytes>>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let gate = Arc::new(Semaphore::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(serve(listener, Arc::clone(&gate)));

    let http1 = Client::builder(TokioExecutor::new()).build_http();
    let http2 = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    for (protocol, client) in [("HTTP/1, three connections", http1), ("HTTP/2, one connection", http2)] {
        println!("{protocol}:");
        three_at_once(&client, address, &gate).await?;
    }
    println!("one of three was refused, over either protocol");
    Ok(())
}

/// A service for each connection, and one limit for all of them: that is in the layer.
async fn serve(listener: TcpListener, gate: Arc<Semaphore>) -> std::io::Result<()> {
    let layer = ConcurrencyLimitLayer::in_memory(2);
    loop {
        let (stream, _) = listener.accept().await?;
        let gate = Arc::clone(&gate);
        let service = layer.layer(service_fn(move |_: Request<Incoming>| work(Arc::clone(&gate))));
        tokio::spawn(async move {
            let http = auto::Builder::new(TokioExecutor::new());
            let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
            if let Err(error) = connection.await {
                eprintln!("a connection failed: {error}");
            }
        });
    }
}

/// Takes until the gate lets it through, so that what is shown does not hang on how fast this runs.
async fn work(gate: Arc<Semaphore>) -> Result<Response<Full<Bytes>>, Infallible> {
    if let Ok(permit) = gate.acquire().await {
        permit.forget();
    }
    Ok(Response::new(Full::new(Bytes::from_static(b"done"))))
}

async fn three_at_once(client: &HttpClient, address: SocketAddr, gate: &Semaphore) -> Result<(), Error> {
    let mut requests = JoinSet::new();
    for _ in 0..3 {
        requests.spawn(send(client.clone(), address));
    }
    expect(next(&mut requests).await? == StatusCode::TOO_MANY_REQUESTS, "the first answer is a refusal")?;
    gate.add_permits(2);
    for _ in 0..2 {
        expect(next(&mut requests).await? == StatusCode::OK, "the other two are served")?;
    }
    Ok(())
}

async fn next(requests: &mut JoinSet<Result<StatusCode, Error>>) -> Result<StatusCode, Error> {
    requests.join_next().await.ok_or("no more requests")??
}

async fn send(client: HttpClient, address: SocketAddr) -> Result<StatusCode, Error> {
    let request = Request::get(format!("http://{address}/")).header("x-project-id", "acme");
    let response = client.request(request.body(Empty::new())?).await?;
    let (head, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    let again = head.headers.get(RETRY_AFTER).map_or(Ok("-"), |seconds| seconds.to_str())?;
    println!("  {}, retry-after {again}: {}", head.status, String::from_utf8_lossy(&body));
    Ok(head.status)
}

fn expect(holds: bool, what: &str) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(format!("not so: {what}").into()) }
}

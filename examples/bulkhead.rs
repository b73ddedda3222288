//! A process's own cap in front of the projects' limits, and how to shut both down.
//!
//! `cargo run --example bulkhead`
//!
//! Each project may have 4 requests in flight (over a whole fleet, with a `RedisStore`), this process
//! runs 6 of all projects together, and 4 more may queue for half a second.

use std::sync::Arc;
use std::time::Duration;

use axum::{Router, routing::get};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tower_slots::semaphore::Semaphore;
use tower_slots::{ConcurrencyLimitLayer, Limiter, MemoryStore};

type Error = Box<dyn std::error::Error + Send + Sync>;
type HttpClient = Client<HttpConnector, Empty<Bytes>>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let limiter = Limiter::builder(MemoryStore::new()).limit(4).build()?;
    let semaphore = Semaphore::builder(6).max_waiters(4).build()?;
    let layer = ConcurrencyLimitLayer::new(limiter.clone())
        .bulkhead(semaphore.clone())
        .bulkhead_wait(Duration::from_millis(500));
    let work = get(|| async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        "done"
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let app = Router::new().route("/", work).layer(layer);
    let server = tokio::spawn(async move {
        axum::serve(listener, app).with_graceful_shutdown(async move { stopped.notified().await }).await
    });
    let client = Client::builder(TokioExecutor::new()).build_http();

    println!("12 requests of 3 projects at once: 6 run, 4 queue, 2 find no room");
    let mut requests = burst(&client, &url, 12);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let now = semaphore.snapshot();
    println!("  in flight {}, queued {}, refused {}", now.acquired, now.waiters, now.rejections);
    report(&mut requests).await?;

    println!("6 requests of one project: 4 run, 2 are over its limit and give their permits back");
    let mut requests = JoinSet::new();
    (0..6).for_each(|_| _ = requests.spawn(status(client.clone(), url.clone(), "acme".to_owned())));
    report(&mut requests).await?;

    println!("shutdown with 6 in flight: those finish, new ones are refused at once");
    let mut requests = burst(&client, &url, 6);
    tokio::time::sleep(Duration::from_millis(50)).await;
    semaphore.close();
    println!("  a new request: {}", status(client.clone(), url.clone(), "late".to_owned()).await?);
    semaphore.wait_idle().await;
    println!("  nothing in flight: {:?}", semaphore.snapshot().acquired);
    println!("  all slots given back: {}", limiter.shutdown(Duration::from_secs(5)).await);
    report(&mut requests).await?;
    stop.notify_one();
    drop(client);
    server.await??;
    Ok(())
}

fn burst(client: &HttpClient, url: &str, count: usize) -> JoinSet<Result<u16, Error>> {
    let mut requests = JoinSet::new();
    for n in 0..count {
        requests.spawn(status(client.clone(), url.to_owned(), format!("project-{}", n % 3)));
    }
    requests
}

async fn status(client: HttpClient, url: String, project: String) -> Result<u16, Error> {
    let request = hyper::Request::get(url).header("x-project-id", project).body(Empty::new())?;
    let response = client.request(request).await?;
    let status = response.status().as_u16();
    response.into_body().collect().await?;
    Ok(status)
}

async fn report(requests: &mut JoinSet<Result<u16, Error>>) -> Result<(), Error> {
    let mut answers = Vec::new();
    while let Some(answer) = requests.join_next().await {
        answers.push(answer??);
    }
    answers.sort_unstable();
    println!("  answers: {answers:?}");
    Ok(())
}

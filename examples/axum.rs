//! The smallest real service: at most 10 requests of each project in flight, over all processes.
//!
//! `cargo run --example axum [redis://127.0.0.1/ [127.0.0.1:3000]]`, then
//! `curl -H 'x-project-id: acme' http://127.0.0.1:3000/`. It ends with Ctrl-C.

use std::time::Duration;

use axum::{Router, routing::get};
use tower_slots::{ConcurrencyLimitLayer, RedisStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or_else(|| "redis://127.0.0.1/".to_owned());
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());

    let layer = ConcurrencyLimitLayer::redis(RedisStore::open(url)?, 10);
    let limiter = layer.limiter().clone();
    let app = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stop()).await?;
    println!("all slots given back: {}", limiter.shutdown(Duration::from_secs(5)).await);
    Ok(())
}

async fn stop() {
    tokio::signal::ctrl_c().await.expect("signals can be listened for");
}

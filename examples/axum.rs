//! The smallest real service: at most 10 requests of each project in flight, over all processes.
//!
//! `cargo run --example axum [redis://127.0.0.1/]`, then
//! `curl -H 'x-project-id: acme' http://127.0.0.1:3000/`

use axum::{Router, routing::get};
use tower_slots::{ConcurrencyLimitLayer, RedisStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1/".to_owned());
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(ConcurrencyLimitLayer::redis(RedisStore::open(url)?, 10));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

//! Connections that outlive their request.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tower::{Layer, ServiceExt, service_fn};
use tower_slots::{ConcurrencyLimitLayer, SlotHandle};

use crate::support::{active, endless_body, request, until};

/// Serves HTTP/1 on one end of a pipe: upgrades, then echoes one byte and closes.
fn serve(layer: &ConcurrencyLimitLayer, holds: bool) -> DuplexStream {
    let service = layer.layer(service_fn(move |mut request: Request<Incoming>| async move {
        let slot = request.extensions().get().and_then(SlotHandle::hold).filter(|_| holds);
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut io = TokioIo::new(upgrade.await.expect("an upgrade"));
            let byte = io.read_u8().await.expect("a byte");
            io.write_u8(byte).await.expect("an open connection");
            drop(slot);
        });
        let response = Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header("connection", "upgrade")
            .header("upgrade", "echo");
        Ok::<_, Infallible>(response.body(Body::empty()).expect("a response"))
    }));
    let (client, server) = tokio::io::duplex(1024);
    let http = hyper::server::conn::http1::Builder::new();
    tokio::spawn(
        http.serve_connection(TokioIo::new(server), TowerToHyperService::new(service)).with_upgrades(),
    );
    client
}

async fn upgrade(client: &mut DuplexStream) {
    let head =
        "GET / HTTP/1.1\r\nhost: a\r\nx-project-id: acme\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    client.write_all(head.as_bytes()).await.expect("an open connection");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(client.read_u8().await.expect("an answer"));
    }
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test]
async fn a_held_upgrade_keeps_its_slot_for_as_long_as_the_connection_lives() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let mut client = serve(&layer, true);
    upgrade(&mut client).await;
    assert_eq!(active(layer.limiter(), "acme").await, 1);
    client.write_u8(7).await.expect("an open connection");
    assert_eq!(client.read_u8().await.expect("an echo"), 7);
    until(async || active(layer.limiter(), "acme").await == 0).await;
}

#[tokio::test]
async fn an_unheld_upgrade_lets_go_of_its_slot() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let mut client = serve(&layer, false);
    upgrade(&mut client).await;
    assert_eq!(active(layer.limiter(), "acme").await, 0);
    client.write_u8(7).await.expect("an open connection");
    assert_eq!(client.read_u8().await.expect("an echo"), 7);
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

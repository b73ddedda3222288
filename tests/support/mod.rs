//! What the integration tests share: real Redis servers, a proxy that injects faults, a recorded
//! history with the overlap check, real child processes, and a client with the seed's semantics.
//!
//! Each test binary uses a part of it, hence the two lints that are switched off here.
#![allow(dead_code, unreachable_pub, unused_imports)]

pub mod child;
pub mod clock;
#[cfg(feature = "redis-cluster")]
pub mod cluster;
pub mod gotsem;
pub mod history;
pub mod log;
#[cfg(feature = "metrics")]
pub mod meter;
pub mod process;
pub mod proxy;
pub mod rows;
#[cfg(feature = "redis-sentinel")]
pub mod sentinel;
pub mod server;
#[cfg(feature = "redis-tls")]
pub mod tls;
pub mod watched;

pub use child::Child;
pub use clock::ClockedServer;
pub use gotsem::Gotsem;
pub use history::{History, Visit};
pub use log::Log;
pub use proxy::Proxy;
pub use server::{RedisServer, connect};
pub use watched::Watched;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The ports that [`free_port`] hands out.
///
/// They lie below the range that Linux takes outgoing ports from (32768 on), because a client that
/// keeps connecting to a dead port inside that range ends up connected to itself and occupies it.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

/// A loopback port that nobody listens on, the same only after all others in one process.
///
/// Another process may still take it before the caller does, so the caller retries.
pub fn free_port() -> u16 {
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(random() >> 1));
    for _ in 0..PORTS.len() {
        let n = NEXT.fetch_add(1, Ordering::Relaxed) % PORTS.len() as u64;
        let port = PORTS.start + n as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free loopback port in {PORTS:?}");
}

/// 64 random bits, different in every process and at every call.
pub fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// Waits until `check` holds; panics with `what` when it does not within `timeout`.
///
/// `eventually("the slot is back", SECOND, async || server.zcard("sem:a").await == 0).await`
pub async fn eventually(what: &str, timeout: Duration, mut check: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !check().await {
        let waited = start.elapsed();
        assert!(waited < timeout, "not within {timeout:?}: {what} (waited {waited:?})");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

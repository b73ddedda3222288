//! Whatever comes from outside, nothing panics: ids, requests, addresses, and what a server replies.
#![cfg(all(feature = "axum", feature = "redis-cluster", feature = "redis-sentinel"))]

mod support;

use std::convert::Infallible;
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri};
use proptest::prelude::*;
use support::{Proxy, RedisServer, eventually};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_slots::key::{
    KeyExtractor, TrustedProxies, first_of, header, host, path_segment, peer_ip, query_param, subdomain,
    trusted_proxy_ip,
};
use tower_slots::{
    Acquire, AcquireError, ConcurrencyLimitLayer, Limiter, MemoryStore, OnOutage, Origin, RedisStore,
};

const SECOND: Duration = Duration::from_secs(1);

// ---- ids

fn id() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[a-zA-Z0-9._~:@{}%/ -]{0,140}", "\\PC{0,200}"]
}

proptest! {
    #[test]
    fn an_id_is_taken_or_named_as_unusable(id in id(), weight in any::<u32>()) {
        let limiter = Limiter::builder(MemoryStore::new()).limit(u32::MAX).build().unwrap();
        let usable = (1..=128).contains(&id.len());
        match limiter.try_acquire(&id).now_or_never().unwrap() {
            Ok(slot) => prop_assert!(usable && slot.weight() == 1),
            Err(AcquireError::Key(error)) => {
                prop_assert!(!error.to_string().contains(&id) || id.len() < 8, "{error}");
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
        let weighted = limiter.acquire(&id, Acquire::weight(weight)).now_or_never().unwrap();
        let refused = matches!(weighted, Err(AcquireError::Weight { .. } | AcquireError::Key(_)));
        prop_assert!(weighted.is_ok() || refused);
    }
}

// ---- requests

const HEADERS: [&str; 6] =
    ["x-project-id", "host", "x-forwarded-for", "authorization", "cookie", "x-real-ip"];

fn headers() -> impl Strategy<Value = Vec<(usize, Vec<u8>)>> {
    let addresses = "([0-9a-f:.\\[\\]]{1,40}[, ]{0,2}){0,6}".prop_map(String::into_bytes);
    let value = prop_oneof![proptest::collection::vec(any::<u8>(), 0..60), addresses];
    proptest::collection::vec((0..HEADERS.len(), value), 0..6)
}

fn layers() -> Vec<ConcurrencyLimitLayer> {
    let layer = || ConcurrencyLimitLayer::in_memory(4);
    let networks = || TrustedProxies::networks(["10.0.0.0/8", "::1/128"]).unwrap();
    vec![
        layer().key(header("x-project-id")),
        layer().key(header("x-real-ip").hashed("a secret of 32 bytes, as it needs").unwrap()),
        layer().key(header("authorization").hashed("a secret of 32 bytes, as it needs").unwrap()),
        layer().key(host()),
        layer().key(subdomain(0).under("example.com")),
        layer().key(path_segment(1)),
        layer().key(query_param("id")),
        layer().key(peer_ip()),
        layer().key(trusted_proxy_ip(TrustedProxies::hops(2)).peer_from(|_: &()| None)),
        layer().key(trusted_proxy_ip(networks()).peer_from(|_: &()| "10.0.0.1".parse().ok())),
        layer().key(first_of((header("x-project-id"), query_param("id"), host()))),
    ]
}

proptest! {
    #[test]
    fn a_request_is_served_or_refused_for_its_id(
        headers in headers(),
        path in "(/[ -~]{0,20}){1,4}",
        query in "[ -~]{0,60}",
    ) {
        let uri = format!("{}?{query}", path.replace(['?', '#'], "")).parse::<Uri>();
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = uri.unwrap_or_default();
        request.extensions_mut().insert(());
        for (name, value) in headers {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                request.headers_mut().append(HeaderName::from_static(HEADERS[name]), value);
            }
        }
        let (parts, _) = request.into_parts();
        for layer in layers() {
            let service = layer.layer(service_fn(|_: Request<Body>| async {
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }));
            let request = Request::from_parts(parts.clone(), Body::empty());
            let status = service.oneshot(request).now_or_never().unwrap().unwrap().status();
            prop_assert!([StatusCode::OK, StatusCode::BAD_REQUEST].contains(&status), "{status}");
        }
    }

    #[test]
    fn networks_are_ranges_or_named_as_none(ranges in proptest::collection::vec("[0-9a-f:./ ]{0,24}", 0..4)) {
        if let Err(error) = TrustedProxies::networks(&ranges) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

// ---- addresses

proptest! {
    #[test]
    fn an_address_leads_to_a_store_or_an_error(
        scheme in "(redis|rediss|unix|redis\\+unix|http|)(://|:|)",
        rest in prop_oneof!["[ -~]{0,40}", any::<String>(), "[a-z]{0,5}(:[a-z%0-9]{0,5}@)?[a-z.]{0,9}:[0-9]{0,6}/[0-9a-z?=]{0,9}"],
    ) {
        let url = format!("{scheme}{rest}");
        for store in [
            RedisStore::open(url.as_str()),
            RedisStore::cluster([url.as_str()]),
            RedisStore::sentinel(["redis://127.0.0.1/"], url.as_str()),
            RedisStore::sentinel([url.as_str()], "redis://mymaster"),
        ] {
            if let Err(error) = store {
                prop_assert!(!error.to_string().is_empty());
            }
        }
    }
}

// ---- replies

/// A value of RESP2 or RESP3, or what looks like one.
fn reply(random: &mut fastrand::Rng, depth: u32) -> Vec<u8> {
    let number = |random: &mut fastrand::Rng| match random.u8(0..4) {
        0 => random.i64(..),
        1 => random.i64(-2..4),
        _ => random.i64(1_700_000_000_000..1_900_000_000_000),
    };
    match random.u8(0..if depth > 3 { 8 } else { 12 }) {
        0 => format!(":{}\r\n", number(random)).into_bytes(),
        1 => b"$-1\r\n".to_vec(),
        2 => b"_\r\n".to_vec(),
        3 => format!("#{}\r\n", if random.bool() { 't' } else { 'f' }).into_bytes(),
        4 => {
            let codes =
                ["ERR", "OOM", "NOPERM", "READONLY", "MOVED 1 127.0.0.1:1", "ASK 1 :1", "MOVED", "BUSY"];
            format!("-{} {}\r\n", codes[random.usize(..codes.len())], random.u32(..)).into_bytes()
        }
        5 => format!("+{}\r\n", random.alphanumeric()).into_bytes(),
        6 => {
            let text: String = (0..random.usize(0..20)).map(|_| random.char('a'..='ÿ')).collect();
            format!("${}\r\n{text}\r\n", text.len()).into_bytes()
        }
        7 => format!(",{}\r\n", random.f64() * 1e13).into_bytes(),
        kind => {
            let many = random.usize(0..6);
            let (sign, items) = if kind == 11 { ('%', 2 * many) } else { ('*', many) };
            let mut bytes = format!("{sign}{many}\r\n").into_bytes();
            (0..items).for_each(|_| bytes.extend(reply(random, depth + 1)));
            bytes
        }
    }
}

/// Replies that begin as those of a flight do come further than others.
fn flight_like(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes =
        format!("*{}\r\n:{}\r\n", random.usize(2..5), random.i64(1_600_000_000_000..)).into_bytes();
    (0..random.usize(1..4)).for_each(|_| bytes.extend(reply(random, 2)));
    bytes
}

fn mangled(random: &mut fastrand::Rng, frame: Vec<u8>) -> Vec<u8> {
    match random.u8(0..8) {
        // So that it gets past the greeting now and then.
        0..3 => frame,
        3 | 4 => reply(random, 0),
        5 | 6 => flight_like(random),
        _ => (0..random.usize(0..40)).map(|_| random.u8(..)).collect(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_of_any_kind_panic_nothing_and_leave_nothing() {
    let panics = Arc::new(AtomicUsize::new(0));
    let (counted, default) = (Arc::clone(&panics), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        counted.fetch_add(1, Ordering::Relaxed);
        default(info);
    }));
    let seed = support::random();
    println!("seed {seed}");
    join_all((0..4).map(async |n| {
        let server = RedisServer::start();
        let proxy = Proxy::start(server.addr());
        let limiter = Limiter::builder(RedisStore::open(proxy.url()).unwrap())
            .limit(5)
            .lease(SECOND)
            .store_timeout(SECOND / 5)
            .on_outage(OnOutage::Refuse)
            .build()
            .unwrap();
        let random = std::sync::Mutex::new(fastrand::Rng::with_seed(seed + n));
        proxy.rewrite_replies(Some(Box::new(move |frame| mangled(&mut random.lock().unwrap(), frame))));
        let end = Instant::now() + 5 * SECOND;
        let callers = (0..20).map(async |caller| {
            while Instant::now() < end {
                let id = ["acme", "globex", "initech"][caller % 3];
                match limiter.try_acquire(id).await {
                    Ok(slot) => drop(slot),
                    Err(AcquireError::Saturated { .. } | AcquireError::Unavailable(_)) => {}
                    Err(other) => panic!("{other}"),
                }
                let _whatever = limiter.active(id).await.and(limiter.drain(id).await);
                tokio::time::sleep(SECOND / 500).await;
            }
        });
        join_all(callers).await;
        proxy.rewrite_replies(None);
        eventually("it works again", 10 * SECOND, async || {
            limiter.try_acquire("acme").await.is_ok_and(|slot| slot.origin() == Origin::Store)
        })
        .await;
        eventually("no slot is left", 10 * SECOND, async || {
            server.keys().await.iter().all(|key| key.ends_with(":drained"))
        })
        .await;
    }))
    .await;
    assert_eq!(panics.load(Ordering::Relaxed), 0, "with seed {seed}");
}

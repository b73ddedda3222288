//! Who is limited, by real requests.

use std::net::SocketAddr;

use axum::body::Body;
use http::request::{Builder, Parts};
use http::{Request, Response, StatusCode};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use proptest::prelude::*;
use tower_slots::key::{
    KeyExtractor, PeerAddr, TrustedProxies, extension, first_of, header, host, path_segment, peer_ip,
    query_param, subdomain, trusted_proxy_ip,
};
use tower_slots::layer::Reason;
use tower_slots::{ConcurrencyLimitLayer, KeyError, OnMissing, ProjectId, Rejection};

use crate::support::{App, active, app, endless, endless_body, origins, send, text};

/// A layer by this key, with room for one of each id, and its service without an end.
fn limited(key: impl KeyExtractor) -> (ConcurrencyLimitLayer, App) {
    let layer = ConcurrencyLimitLayer::in_memory(1).key(key);
    let app = endless(layer.clone());
    (layer, app)
}

fn empty(request: Builder) -> Request<Body> {
    request.body(Body::empty()).expect("a valid request")
}

fn get(uri: &str) -> Request<Body> {
    empty(Request::get(uri))
}

fn from(peer: &str, forwarded: &[&str]) -> Request<Body> {
    let mut request = Request::get("/");
    for line in forwarded {
        request = request.header("x-forwarded-for", *line);
    }
    let mut request = empty(request);
    let address = SocketAddr::new(peer.parse().expect("an address"), 50_000);
    request.extensions_mut().insert(PeerAddr(address));
    request
}

fn reason(response: &Response<Body>) -> Option<Reason> {
    response.extensions().get().map(Rejection::reason)
}

/// Each of these requests has the same id, and `other` has another.
async fn assert_one_id(key: impl KeyExtractor, id: &str, same: Vec<Request<Body>>, other: Request<Body>) {
    let (layer, app) = limited(key);
    let mut same = same.into_iter();
    let _held = send(&app, same.next().expect("a request")).await;
    assert_eq!(active(layer.limiter(), id).await, 1, "{id}");
    for request in same {
        let shown = format!("{:?} {:?}", request.uri(), request.headers());
        assert_eq!(send(&app, request).await.status(), StatusCode::TOO_MANY_REQUESTS, "{shown}");
    }
    assert_eq!(send(&app, other).await.status(), StatusCode::OK);
}

async fn assert_refused(key: impl KeyExtractor, request: Request<Body>, error: KeyError) {
    let response = send(&limited(key).1, request).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{error}");
    assert_eq!(reason(&response), Some(Reason::Key(error)));
}

#[tokio::test]
async fn a_segment_of_the_path() {
    let same = vec![get("/p/a%2Fb%7B%7D"), get("/p/%61%2fb%7b%7d?x=/y"), get("/p/a%2Fb%7B%7D/runs/7")];
    assert_one_id(path_segment(1), "a/b{}", same, get("/p/a/b%7B%7D")).await;
    assert_refused(path_segment(1), get("/p"), KeyError::Missing).await;
    assert_refused(path_segment(1), get("/p/"), KeyError::Empty).await;
    assert_refused(path_segment(1), get("/p/%FF"), KeyError::NotText).await;
    assert_refused(path_segment(1), get("/p/a%0Ab"), KeyError::NotText).await;
    assert_refused(path_segment(0), get(&format!("/{}", "x".repeat(10_000))), KeyError::TooLong).await;
}

#[tokio::test]
async fn a_parameter_of_the_query() {
    let same = vec![get("/?project=a+b"), get("/?project=a%20b&x"), get("/?x=1&pro%6Aect=%61+b")];
    assert_one_id(query_param("project"), "a b", same, get("/?project=a%2Bb")).await;
    assert_refused(query_param("project"), get("/?projects=a"), KeyError::Missing).await;
    assert_refused(query_param("project"), get("/?project=a&project=b"), KeyError::Duplicate).await;
    assert_refused(query_param("project"), get("/?project=%C3"), KeyError::NotText).await;
}

#[tokio::test]
async fn the_host_and_its_labels() {
    let at = |host: &str| empty(Request::get("/").header("host", host));
    let same = || vec![at("acme.example.com"), at("ACME.example.com:80"), get("http://Acme.Example.com./")];
    assert_one_id(host(), "acme.example.com", same(), at("other.example.com")).await;
    assert_one_id(subdomain(0), "acme", same(), at("other.example.com")).await;
    assert_one_id(subdomain(0).under("example.com"), "acme", same(), at("other.example.com")).await;

    let two = || empty(Request::get("/").header("host", "a").header("host", "b"));
    assert_refused(host(), two(), KeyError::Duplicate).await;
    assert_refused(subdomain(0), two(), KeyError::Duplicate).await;
    let differs = empty(Request::get("http://a.example/").header("host", "b.example"));
    assert_refused(host(), differs, KeyError::Duplicate).await;
    assert_refused(host(), at("a b"), KeyError::Malformed).await;
    assert_refused(host(), get("/"), KeyError::Missing).await;
    assert_refused(subdomain(0), at("[::1]:80"), KeyError::Missing).await;
}

#[tokio::test]
async fn the_address_of_the_connection() {
    let same = vec![from("192.0.2.1", &[]), from("::ffff:192.0.2.1", &["6.6.6.6"])];
    assert_one_id(peer_ip(), "192.0.2.1", same, from("192.0.2.2", &[])).await;
    let same = vec![from("2001:db8:1:2::1", &[]), from("2001:db8:1:2:ffff::", &[])];
    assert_one_id(peer_ip(), "2001:db8:1:2::/64", same, from("2001:db8:1:3::1", &[])).await;
}

/// Or all clients behind one proxy would be one.
#[tokio::test]
async fn clients_behind_a_proxy_are_told_apart() {
    let trusted = TrustedProxies::networks(["10.0.0.0/8"]).expect("a valid range");
    for proxies in [TrustedProxies::hops(1), trusted] {
        let same = vec![from("10.0.0.1", &["203.0.113.7"]), from("10.0.0.2", &["203.0.113.7:4711"])];
        let other = from("10.0.0.1", &["203.0.113.8"]);
        assert_one_id(trusted_proxy_ip(proxies), "203.0.113.7", same, other).await;
    }
}

/// Or a client would choose its id by what it writes into the header.
#[tokio::test]
async fn what_a_client_writes_into_forwarded_for_does_not_count() {
    let trusted = TrustedProxies::networks(["10.0.0.0/8"]).expect("a valid range");
    for proxies in [TrustedProxies::hops(2), trusted] {
        let spoofed =
            ["1.1.1.1", "2.2.2.2, 3.3.3.3", "10.9.9.9", "garbage", "", ",", "{}", "10.0.0.2, 4.4.4.4"];
        let mut same: Vec<_> = spoofed
            .iter()
            .map(|spoofed| from("10.0.0.1", &[&format!("{spoofed}, 203.0.113.7, 10.0.0.2")]))
            .collect();
        same.extend(spoofed.iter().map(|spoofed| from("10.0.0.1", &[spoofed, "203.0.113.7", "10.0.0.2"])));
        let other = from("10.0.0.1", &["203.0.113.7, 203.0.113.8, 10.0.0.2"]);
        assert_one_id(trusted_proxy_ip(proxies), "203.0.113.7", same, other).await;
    }
}

#[tokio::test]
async fn a_walk_that_finds_no_client_does_not_fall_back() {
    let networks = || trusted_proxy_ip(TrustedProxies::networks(["10.0.0.0/8"]).expect("a valid range"));
    let hops = || trusted_proxy_ip(TrustedProxies::hops(2));
    assert_refused(networks(), from("10.0.0.1", &["6.6.6.6, unknown"]), KeyError::Malformed).await;
    assert_refused(networks(), from("10.0.0.1", &["10.0.0.3, 10.0.0.2"]), KeyError::Missing).await;
    assert_refused(networks(), from("10.0.0.1", &[]), KeyError::Missing).await;
    assert_refused(hops(), from("10.0.0.1", &["6.6.6.6"]), KeyError::Missing).await;
    assert_refused(hops(), from("10.0.0.1", &["6.6.6.6, unknown, 10.0.0.2"]), KeyError::Malformed).await;
    // Past the proxies, one's own header says nothing.
    let direct = vec![from("203.0.113.7", &["1.1.1.1"]), from("203.0.113.7", &["2.2.2.2"])];
    assert_one_id(networks(), "203.0.113.7", direct, from("203.0.113.8", &["1.1.1.1"])).await;
}

/// And not a 500, with which all would fail.
#[tokio::test]
async fn without_an_address_the_policy_for_missing_ids_answers() {
    let layer = ConcurrencyLimitLayer::in_memory(1).key(peer_ip());
    let response = send(&origins(layer.clone()), get("/")).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(reason(&response), Some(Reason::Key(KeyError::Missing)));

    let skips = origins(layer.clone().on_missing(OnMissing::Skip));
    assert_eq!(text(send(&skips, get("/")).await).await, "none");

    let shared = OnMissing::Shared(ProjectId::new("unknown").expect("a valid id"));
    let shares = endless(layer.clone().on_missing(shared));
    let _held = send(&shares, get("/")).await;
    assert_eq!(active(layer.limiter(), "unknown").await, 1);
    assert_eq!(send(&shares, get("/")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn the_first_that_finds_an_id() {
    let key = || first_of((header("x-tenant"), query_param("tenant"), path_segment(0)));
    let with = |uri: &str, tenant: &str| empty(Request::get(uri).header("x-tenant", tenant));
    let same = vec![get("/acme"), get("/x?tenant=acme"), with("/x?tenant=y", "acme"), with("/acme", "")];
    assert_one_id(key(), "acme", same, with("/acme", "other")).await;
    assert_refused(key(), with("/acme", "a,b"), KeyError::Duplicate).await;
    assert_refused(key(), get("/acme?tenant=a&tenant=b"), KeyError::Duplicate).await;
    assert_refused(key(), get("/"), KeyError::Empty).await;

    let boxed: Vec<Box<dyn KeyExtractor>> = vec![Box::new(header("x-tenant")), Box::new(path_segment(0))];
    assert_one_id(first_of(boxed), "acme", vec![get("/acme")], get("/other")).await;
}

/// What a client may send in the place of an id: each in turn, and what becomes of it.
#[tokio::test]
async fn hostile_values_are_refused_or_are_ids_of_their_own() {
    use KeyError::{Duplicate, Malformed, NotText, TooLong};
    let values: [&[u8]; 5] = [&[b'x'; 10_000], b"{acme}", b"ac\tme", b"\xff\xfe", b"acme,globex"];
    let in_header = |name: &'static str, value: &[u8]| empty(Request::get("/").header(name, value));
    let encoded = |value: &[u8]| percent_encode(value, NON_ALPHANUMERIC).to_string();
    type Place<'a> = (Box<dyn KeyExtractor>, &'a dyn Fn(&[u8]) -> Request<Body>, [Option<KeyError>; 5]);
    let plain = [Some(TooLong), None, Some(NotText), Some(NotText), None];
    let of_host = [Some(TooLong), Some(Malformed), Some(Malformed), Some(NotText), Some(Duplicate)];
    let places: [Place<'_>; 6] = [
        (
            Box::new(header("x-tenant")),
            &|value| in_header("x-tenant", value),
            [Some(TooLong), None, Some(NotText), Some(NotText), Some(Duplicate)],
        ),
        (Box::new(path_segment(0)), &|value| get(&format!("/{}", encoded(value))), plain),
        (Box::new(query_param("id")), &|value| get(&format!("/?id={}", encoded(value))), plain),
        (Box::new(host()), &|value| in_header("host", value), of_host),
        (Box::new(subdomain(0)), &|value| in_header("host", value), of_host),
        (
            Box::new(trusted_proxy_ip(TrustedProxies::hops(1))),
            &|value| in_header("x-forwarded-for", value),
            [Some(Malformed); 5],
        ),
    ];
    for (key, at, expected) in places {
        let (layer, app) = limited(key);
        for (value, error) in values.into_iter().zip(expected) {
            let response = send(&app, at(value)).await;
            let shown = String::from_utf8_lossy(&value[..value.len().min(20)]);
            assert_eq!(reason(&response), error.map(Reason::Key), "{shown}");
            assert_eq!(active(layer.limiter(), "acme").await, 0, "{shown} is not acme");
        }
    }
}

/// Ids get into names of keys, so that a secret must not become one: not by any way to a header.
#[tokio::test]
async fn raw_secrets_are_refused_however_they_are_asked_for() {
    fn through(key: impl KeyExtractor) -> impl KeyExtractor {
        move |parts: &Parts| key.extract(parts)
    }
    for name in ["authorization", "Proxy-Authorization", "cookie"] {
        let secret = || header(name);
        let layer = || ConcurrencyLimitLayer::in_memory(1).on_missing(OnMissing::Skip);
        let boxed: Vec<Box<dyn KeyExtractor>> = vec![Box::new(secret())];
        let waiting = secret();
        let layers = [
            layer().key(secret()),
            layer().key(first_of((header("x-tenant"), secret()))),
            layer().key(first_of(boxed)),
            layer().key(first_of((first_of((secret(), query_param("x"))), host()))),
            layer().key(through(secret())),
            layer().key_async(move |parts: &Parts| std::future::ready(waiting.extract(parts))),
        ];
        for layer in layers {
            let request = empty(Request::get("/?x=y").header(name, "sk-1").header("host", "a"));
            let response = send(&endless(layer.clone()), request).await;
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(reason(&response), Some(Reason::Key(KeyError::Unusable)));
            assert_eq!(active(layer.limiter(), "sk-1").await, 0);
        }
    }
}

#[cfg(feature = "hashed")]
mod hashed {
    use tower_slots::key::AsyncKeyExtractor;

    use super::*;

    fn bearing(value: &str) -> Request<Body> {
        empty(Request::get("/").header("authorization", value))
    }

    #[tokio::test]
    async fn secrets_make_ids_only_hashed() {
        let raw = send(&limited(header("authorization")).1, bearing("Bearer sk-1")).await;
        assert_eq!(raw.status(), StatusCode::INTERNAL_SERVER_ERROR);

        let key = || header("authorization").hashed("a secret of this service").expect("a secret");
        let id = "bb262836c031d003876d5b74da5eefcd";
        let same = vec![bearing("Bearer sk-1"), bearing("bearer sk-1"), bearing("BEARER   sk-1")];
        assert_one_id(key(), id, same, bearing("Bearer sk-2")).await;
        let another = header("authorization").hashed("another secret").expect("a secret");
        let (layer, app) = limited(another);
        let _held = send(&app, bearing("Bearer sk-1")).await;
        assert_eq!(active(layer.limiter(), id).await, 0);

        assert_refused(key(), get("/"), KeyError::Missing).await;
        let two = empty(Request::get("/").header("authorization", "a").header("authorization", "a"));
        assert_refused(key(), two, KeyError::Duplicate).await;
    }

    /// Each of these finds `acme`, and so has the same hash.
    #[test]
    fn every_extractor_can_be_hashed() {
        fn id(key: impl KeyExtractor) -> Option<String> {
            let request = Request::get("/acme?id=acme").header("host", "acme").header("x-id", "acme");
            let (mut parts, ()) = request.body(()).expect("a valid request").into_parts();
            parts.extensions.insert("acme");
            let key = key.hashed("a secret").expect("a secret");
            key.extract(&parts).expect("an id").map(|id| id.to_string())
        }
        let expected = id(header("x-id"));
        assert_eq!(expected.as_ref().map(String::len), Some(32));
        assert_eq!(id(path_segment(0)), expected);
        assert_eq!(id(query_param("id")), expected);
        assert_eq!(id(host()), expected);
        assert_eq!(id(subdomain(0)), expected);
        assert_eq!(id(extension::<&'static str>(|id| *id)), expected);
        assert_eq!(id(first_of((header("x-none"), header("x-id")))), expected);
        assert_eq!(id(Box::new(header("x-id")) as Box<dyn KeyExtractor>), expected);
        assert_eq!(id(|_: &Parts| Ok(Some("acme"))), expected);

        let hash = |key: Box<dyn KeyExtractor>| {
            let (parts, _) = from("192.0.2.1", &[]).into_parts();
            let key = key.hashed("a secret").expect("a secret");
            key.extract(&parts).expect("an id").map(|id| id.to_string())
        };
        let expected = hash(Box::new(|_: &Parts| Ok(Some("192.0.2.1"))));
        assert_eq!(hash(Box::new(peer_ip())), expected);
        assert_eq!(hash(Box::new(trusted_proxy_ip(TrustedProxies::hops(0)))), expected);
    }

    #[tokio::test]
    async fn what_takes_a_wait_is_hashed_to_the_same_ids() {
        let key = || header("authorization").hashed("a secret").expect("a secret");
        let waiting = |parts: &Parts| {
            let found = header("authorization").extract_unhashed(parts);
            std::future::ready(found.map(|text| text.map(|text| text.as_str().to_owned())))
        };
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let now = endless(layer.clone().key(key()));
        let later = endless(layer.clone().key_async(waiting.hashed("a secret").expect("a secret")));
        let long = format!("Bearer {}", "x".repeat(1000));
        for token in ["Bearer sk-1", &long] {
            let held = send(&later, bearing(token)).await;
            assert_eq!(held.status(), StatusCode::OK);
            assert_eq!(send(&now, bearing(token)).await.status(), StatusCode::TOO_MANY_REQUESTS);
            drop(held);
            assert_eq!(send(&now, bearing(token)).await.status(), StatusCode::OK);
        }
        assert_eq!(send(&later, get("/")).await.status(), StatusCode::BAD_REQUEST);
        let error = waiting.hashed("").map(drop).expect_err("an empty secret");
        assert_eq!(error.field(), "hashed");
    }

    #[cfg(feature = "axum")]
    #[tokio::test]
    async fn what_an_extractor_of_axum_yields_can_be_hashed() {
        use tower_slots::key::extract;

        let cookie = extract::<http::HeaderMap>(|headers| {
            let cookie = headers.get("cookie").ok_or(KeyError::Missing)?;
            cookie.to_str().map(str::to_owned).map_err(|_| KeyError::NotText)
        });
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let by_cookie = layer.clone().key_async(cookie.hashed("a secret").expect("a secret"));
        let with = |cookie: String| empty(Request::get("/").header("cookie", cookie));
        let app = endless(by_cookie);
        let _held = send(&app, with("session=1".repeat(100))).await;
        assert_eq!(send(&app, with("session=1".repeat(100))).await.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(send(&app, with("session=2".repeat(100))).await.status(), StatusCode::OK);
        assert_eq!(send(&app, get("/")).await.status(), StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn what_is_longer_than_an_id_is_hashed_within_bounds() {
        let key = || header("x-token").hashed("a secret").expect("a secret");
        let with = |bytes: usize| empty(Request::get("/").header("x-token", "x".repeat(bytes)));
        let app = limited(key()).1;
        for bytes in [1, 129, 8192] {
            assert_eq!(send(&app, with(bytes)).await.status(), StatusCode::OK, "{bytes}");
        }
        assert_refused(key(), with(10_000), KeyError::TooLong).await;

        let closure = |_: &Parts| Ok(Some("y".repeat(1000)));
        let app = limited(closure.hashed("a secret").expect("a secret")).1;
        assert_eq!(send(&app, get("/")).await.status(), StatusCode::OK);
    }
}

mod asked {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    fn token(parts: &Parts) -> Option<String> {
        parts.headers.get("x-token")?.to_str().ok().map(str::to_owned)
    }

    fn with(token: &str) -> Request<Body> {
        empty(Request::get("/").header("x-token", token))
    }

    #[tokio::test]
    async fn a_key_may_take_a_wait() {
        let layer = ConcurrencyLimitLayer::in_memory(1).key_async(|parts: &Parts| {
            let token = token(parts);
            async move {
                tokio::task::yield_now().await;
                match token.as_deref() {
                    Some("free") => Ok(None),
                    Some(token) => Ok(Some(token.to_uppercase())),
                    None => Err(KeyError::Missing),
                }
            }
        });
        let app = app(layer.clone(), |request| {
            assert!(request.headers().contains_key("x-token"), "the head comes back whole");
            endless_body()
        });
        let _held = send(&app, with("acme")).await;
        assert_eq!(active(layer.limiter(), "ACME").await, 1);
        assert_eq!(send(&app, with("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(send(&app, with("free")).await.status(), StatusCode::OK);
        assert_eq!(send(&app, get("/")).await.status(), StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn who_gives_up_while_asked_leaves_nothing() {
        let gate = Arc::new(Semaphore::new(0));
        let closed = Arc::clone(&gate);
        let layer = ConcurrencyLimitLayer::in_memory(1).key_async(move |_: &Parts| {
            let gate = Arc::clone(&closed);
            async move {
                gate.acquire().await.map_err(|_| KeyError::Missing)?.forget();
                Ok(Some("acme"))
            }
        });
        let app = endless(layer.clone());
        let mut asking = Box::pin(send(&app, get("/")));
        assert!(futures_util::poll!(&mut asking).is_pending());
        drop(asking);
        gate.add_permits(1);
        assert_eq!(send(&app, get("/")).await.status(), StatusCode::OK);
        assert_eq!(layer.limiter().active("acme").await.ok(), Some(0), "its body was dropped at once");
    }

    #[tokio::test]
    async fn who_is_exempt_is_not_asked() {
        let layer = ConcurrencyLimitLayer::in_memory(1)
            .key_async(|_: &Parts| std::future::pending::<Result<Option<String>, KeyError>>())
            .skip(|parts: &Parts| parts.uri.path() == "/health");
        assert_eq!(text(send(&origins(layer), get("/health")).await).await, "none");
    }
}

#[cfg(feature = "axum")]
mod of_axum {
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
    use axum::extract::{Extension, FromRequestParts, Path};
    use axum::{Router, routing::get as route};
    use tower::ServiceExt;
    use tower_slots::key::extract;

    use super::*;

    async fn seen(layer: ConcurrencyLimitLayer, router: Router, request: Request<Body>, id: &str) -> u32 {
        let response = router.layer(layer.clone()).oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::OK);
        active(layer.limiter(), id).await
    }

    fn router() -> Router {
        Router::new().route("/{id}/runs", route(async || endless_body()))
    }

    #[tokio::test]
    async fn extractors_of_axum() {
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let by_path = layer.clone().key_async(extract::<Path<String>>(|Path(id)| id.clone()));
        let response = router().layer(by_path).oneshot(get("/acme/runs")).await.expect("infallible");
        assert_eq!(active(layer.limiter(), "acme").await, 1);
        drop(response);

        let by_extension = layer.clone().key_async(extract::<Extension<&'static str>>(|Extension(id)| *id));
        let mut request = get("/x/runs");
        request.extensions_mut().insert("other");
        let app = router().layer(by_extension);
        let _held = app.clone().oneshot(request).await.expect("infallible");
        assert_eq!(active(layer.limiter(), "other").await, 1);
        let missing = app.oneshot(get("/x/runs")).await.expect("infallible");
        assert_eq!(missing.status(), StatusCode::BAD_REQUEST);
    }

    struct Never;

    impl<S: Sync> FromRequestParts<S> for Never {
        type Rejection = StatusCode;

        async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, StatusCode> {
            Err(StatusCode::UNAUTHORIZED)
        }
    }

    #[tokio::test]
    async fn a_rejection_can_be_told_from_a_missing_id() {
        let layer = ConcurrencyLimitLayer::in_memory(1).on_missing(OnMissing::Skip);
        let lenient = layer.clone().key_async(extract::<Never>(|_| "never"));
        assert_eq!(seen(lenient, router(), get("/x/runs"), "never").await, 0);
        let strict = layer.key_async(extract::<Result<Never, StatusCode>>(|found| match found {
            Ok(_) => Ok("never"),
            Err(_) => Err(KeyError::Malformed),
        }));
        let response = router().layer(strict).oneshot(get("/x/runs")).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn the_address_comes_from_axums_connect_info() {
        let layer = ConcurrencyLimitLayer::in_memory(1).key(peer_ip());
        let address = SocketAddr::from(([192, 0, 2, 1], 1));
        for mock in [false, true] {
            let mut request = get("/x/runs");
            if mock {
                request.extensions_mut().insert(MockConnectInfo(address));
            } else {
                request.extensions_mut().insert(ConnectInfo(address));
            }
            let response = router().layer(layer.clone()).oneshot(request).await.expect("infallible");
            assert_eq!(active(layer.limiter(), "192.0.2.1").await, 1);
            drop(response);
        }
    }

    #[tokio::test]
    async fn over_a_real_connection() -> Result<(), Box<dyn std::error::Error>> {
        let layer = ConcurrencyLimitLayer::in_memory(1).key(peer_ip());
        let router = router().layer(layer.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let service = router.into_make_service_with_connect_info::<SocketAddr>();
        let server = tokio::spawn(async move { axum::serve(listener, service).await });

        let stream = tokio::net::TcpStream::connect(address).await?;
        let io = hyper_util::rt::TokioIo::new(stream);
        let (mut client, connection) = hyper::client::conn::http1::handshake::<_, Body>(io).await?;
        tokio::spawn(connection);
        let request = Request::get("/x/runs").header("host", "localhost").body(Body::empty())?;
        let response = client.send_request(request).await?;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(active(layer.limiter(), "127.0.0.1").await, 1);
        server.abort();
        Ok(())
    }

    #[allow(dead_code, reason = "it need only compile")]
    fn infallible_extractors_too() {
        let _ = extract::<Option<Extension<String>>>(|found| found.as_ref().map(|id| id.0.clone()));
    }
}

/// Nothing of what is read may be shown.
#[test]
fn nothing_shows_an_id() {
    let request = empty(Request::get("/secret").header("x-tenant", "secret"));
    let (parts, _) = request.into_parts();
    let key = first_of((header("x-tenant"), path_segment(0)));
    let id = key.extract(&parts).expect("an id");
    let unhashed = key.extract_unhashed(&parts).expect("an id");
    let shown = format!("{id:?} {unhashed:?} {key:?}");
    assert!(!shown.contains("secret"), "{shown}");
}

fn every_extractor() -> Vec<Box<dyn KeyExtractor>> {
    let networks = TrustedProxies::networks(["10.0.0.0/8", "::/1"]).expect("valid ranges");
    vec![
        Box::new(header("x-any")),
        Box::new(path_segment(0)),
        Box::new(path_segment(usize::MAX)),
        Box::new(query_param("a")),
        Box::new(host()),
        Box::new(subdomain(1)),
        Box::new(subdomain(0).under("example.com")),
        Box::new(peer_ip()),
        Box::new(trusted_proxy_ip(TrustedProxies::hops(2))),
        Box::new(trusted_proxy_ip(networks)),
        #[cfg(feature = "hashed")]
        Box::new(header("authorization").hashed("a secret").expect("a secret")),
    ]
}

fn is_a_valid_id(id: &ProjectId) -> bool {
    (1..=128).contains(&id.len()) && !id.chars().any(char::is_control)
}

proptest! {
    #[test]
    fn no_bytes_of_a_head_panic(
        value in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..200),
            "[0-9a-f:.,\\[\\] ]{0,40}".prop_map(String::into_bytes),
        ],
        uri in prop_oneof!["/[!-~]{0,60}", "http://[a-zA-Z0-9.:\\[\\]@]{1,20}/\\?a=[%+&=a-f0-9]{0,20}"],
        peer in any::<[u8; 16]>(),
    ) {
        let mut request = Request::get(uri.as_str());
        for name in ["x-any", "host", "x-forwarded-for", "authorization"] {
            request = request.header(name, value.as_slice());
        }
        if let Ok(request) = request.body(()) {
            let (mut parts, ()) = request.into_parts();
            parts.extensions.insert(PeerAddr(SocketAddr::new(peer.into(), 1)));
            for key in every_extractor() {
                if let Ok(Some(id)) = key.extract(&parts) {
                    prop_assert!(is_a_valid_id(&id));
                }
                let _ = key.extract_unhashed(&parts);
            }
        }
    }
}

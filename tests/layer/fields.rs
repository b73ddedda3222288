//! RateLimit header fields, read back as structured fields by another parser than the one that writes
//! them.

use std::convert::Infallible;

use axum::body::Body;
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode};
use sfparse::{Parser, Value};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_slots::layer::RateLimitFields;
use tower_slots::semaphore::Semaphore;
use tower_slots::{ConcurrencyLimitLayer, Limit, Limiter, MemoryStore, OnOutage};

use crate::support::{Down, endless, origins, request, send};

fn with_fields(layer: ConcurrencyLimitLayer) -> ConcurrencyLimitLayer {
    layer.rate_limit_fields(RateLimitFields::DraftIetf11)
}

fn named(name: &'static str, limit: u32) -> ConcurrencyLimitLayer {
    let limiter = Limiter::builder(MemoryStore::new()).name(name).limit(limit).build();
    with_fields(ConcurrencyLimitLayer::new(limiter.expect("valid settings")))
}

/// The lines of a field, one list in any number of them.
fn lines<'a, B>(response: &'a Response<B>, name: &str) -> Vec<&'a str> {
    response.headers().get_all(name).iter().map(|value| value.to_str().expect("ascii")).collect()
}

#[derive(Debug, PartialEq)]
enum Bare {
    Integer(i64),
    Text(String),
}

fn bare(line: &str, value: Value) -> Bare {
    match value {
        Value::Integer(number) => Bare::Integer(number),
        Value::String { range, escape: false } => Bare::Text(line[range].to_owned()),
        other => panic!("neither an integer nor a plain string: {other:?}"),
    }
}

type Member = (Bare, Vec<(String, Bare)>);

/// The members of a list, with their parameters.
fn members<B>(response: &Response<B>, name: &str) -> Vec<Member> {
    let line = lines(response, name).join(", ");
    let mut parser = Parser::new(line.as_bytes());
    let mut members = Vec::new();
    while let Some(item) = parser.parse_list().expect("a structured list") {
        let mut parameters = Vec::new();
        while let Some((key, value)) = parser.parse_param().expect("parameters") {
            parameters.push((key.to_owned(), bare(&line, value)));
        }
        members.push((bare(&line, item), parameters));
    }
    members
}

fn text(value: &str) -> Bare {
    Bare::Text(value.to_owned())
}

fn number(key: &str, value: u32) -> (String, Bare) {
    (key.to_owned(), Bare::Integer(value.into()))
}

fn quota(policy: &str, quota: u32) -> Member {
    (text(policy), vec![number("q", quota), ("qu".to_owned(), text("concurrent-requests"))])
}

fn left(policy: &str, remaining: u32) -> Member {
    (text(policy), vec![number("r", remaining)])
}

/// Asserts what the fields say.
fn assert_says<B>(response: &Response<B>, policy: &str, limit: u32, remaining: u32) {
    assert_eq!(members(response, "ratelimit-policy"), [quota(policy, limit)]);
    assert_eq!(members(response, "ratelimit"), [left(policy, remaining)]);
}

fn says_nothing<B>(response: &Response<B>) -> bool {
    !response.headers().keys().any(|name| name.as_str().starts_with("ratelimit"))
}

#[tokio::test]
async fn admitted_requests_are_told_what_is_left() {
    let app = endless(with_fields(ConcurrencyLimitLayer::in_memory(8)));
    let _held = [send(&app, request("acme")).await, send(&app, request("acme")).await];
    let response = send(&app, request("acme")).await;
    assert_eq!(lines(&response, "ratelimit-policy"), [r#""concurrency";q=8;qu="concurrent-requests""#]);
    assert_eq!(lines(&response, "ratelimit"), [r#""concurrency";r=5"#]);
    assert_says(&response, "concurrency", 8, 5);
}

#[tokio::test]
async fn a_429_says_that_nothing_is_left() {
    let app = endless(named("runs of a day", 1));
    assert_says(&send(&app, request("other")).await, "runs of a day", 1, 0);
    let _held = send(&app, request("acme")).await;
    let refused = send(&app, request("acme")).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_says(&refused, "runs of a day", 1, 0);

    let mut connect = request("acme");
    connect.headers_mut().insert("connect-protocol-version", HeaderValue::from_static("1"));
    assert_says(&send(&app, connect).await, "runs of a day", 1, 0);
}

#[tokio::test]
async fn grpc_refusals_and_connect_streams_carry_none() {
    let app = endless(named("runs", 0));
    for media in ["application/grpc", "application/grpc-web", "application/connect+proto"] {
        let mut request = request("acme");
        request.headers_mut().insert("content-type", HeaderValue::from_static(media));
        assert!(says_nothing(&send(&app, request).await), "{media}");
    }
}

#[tokio::test]
async fn nothing_is_said_where_nobody_counts_or_may_know() {
    let down = |policy| {
        let limiter = Limiter::builder(Down).limit(4).on_outage(policy).build().expect("valid settings");
        with_fields(ConcurrencyLimitLayer::new(limiter))
    };
    let memory = || with_fields(ConcurrencyLimitLayer::in_memory(1));
    let closed = Semaphore::builder(1).build().expect("valid settings");
    closed.close();
    let silent = [
        ("not asked for", ConcurrencyLimitLayer::in_memory(1), 200),
        ("no limit", with_fields(ConcurrencyLimitLayer::in_memory(Limit::Unlimited)), 200),
        ("fail open", down(OnOutage::Admit), 200),
        ("outage", down(OnOutage::Refuse), 503),
        ("bulkhead", memory().bulkhead(closed), 503),
        ("weight", memory().weight(|_: &Parts| 2), 400),
        ("skipped", memory().skip(|_: &Parts| true), 200),
        ("shadow", memory().shadow(true), 200),
    ];
    for (case, layer, status) in silent {
        let response = send(&origins(layer), request("acme")).await;
        assert_eq!(response.status(), status, "{case}");
        assert!(says_nothing(&response), "{case}");
    }
    let challenge = HeaderValue::from_static("Bearer");
    for (layer, status) in [(memory(), 400), (memory().challenge(challenge), 401)] {
        let response = send(&origins(layer), request("")).await;
        assert_eq!(response.status(), status);
        assert!(says_nothing(&response));
    }
    // What this process may have is known to it.
    let local = endless(down(OnOutage::Local { share: 0.5 }));
    assert_says(&send(&local, request("acme")).await, "concurrency", 2, 1);
}

#[tokio::test]
async fn an_inner_400_or_401_tells_nothing() {
    for (status, told) in [(200, true), (304, true), (400, false), (401, false), (404, true), (500, true)] {
        let answer = service_fn(move |_: Request<Body>| async move {
            Ok::<_, Infallible>(Response::builder().status(status).body(Body::empty()).expect("a response"))
        });
        let layer = with_fields(ConcurrencyLimitLayer::in_memory(1));
        let service = ServiceBuilder::new().layer(layer).service(answer);
        let response = service.oneshot(request("acme")).await.expect("infallible");
        assert_eq!(says_nothing(&response), !told, "{status}");
    }
}

/// A list may stand in several lines (RFC 9651, 3.1): to who reads it, it is one.
#[tokio::test]
async fn each_of_several_policies_is_a_member_of_one_list() {
    for (inner, status) in [(4, StatusCode::OK), (0, StatusCode::TOO_MANY_REQUESTS)] {
        let answer = service_fn(|_: Request<Body>| async {
            let response = Response::builder().header("ratelimit", r#""hourly";r=99;t=1800"#);
            Ok::<_, Infallible>(response.body(Body::empty()).expect("a response"))
        });
        // Two layers, and what the service itself says.
        let stack = ServiceBuilder::new().layer(named("a fleet", u32::MAX)).layer(named("inner", inner));
        let response = stack.service(answer).oneshot(request("acme")).await.expect("infallible");
        assert_eq!(response.status(), status);
        let hourly = (text("hourly"), vec![number("r", 99), number("t", 1800)]);
        let said = members(&response, "ratelimit");
        let layers = [left("inner", inner.saturating_sub(1)), left("a fleet", u32::MAX - 1)];
        assert_eq!(said.iter().filter(|member| **member != hourly).collect::<Vec<_>>(), layers.each_ref());
        assert_eq!(said.contains(&hourly), status == StatusCode::OK, "a refusal is not the service's");
        assert_eq!(
            members(&response, "ratelimit-policy"),
            [quota("inner", inner), quota("a fleet", u32::MAX)]
        );
    }
}

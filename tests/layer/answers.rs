//! Who passes, who is refused, and with what answer.

use std::time::Duration;

use axum::body::Body;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use tower_slots::key::{extension, header};
use tower_slots::layer::Reason;
use tower_slots::{
    ConcurrencyLimitLayer, KeyError, Limit, Limiter, MemoryStore, OnMissing, OnOutage, ProjectId, Rejection,
};

use crate::support::{Down, Script, active, data, endless, origins, request, send, text};

const AT_LIMIT: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Too many concurrent requests","status":429,"violated-policies":["concurrency"]}"#;

fn with_ids(ids: &[&[u8]]) -> Request<Body> {
    let mut request = Request::builder();
    for id in ids {
        request = request.header("x-project-id", *id);
    }
    request.body(Body::empty()).expect("a valid request")
}

fn rejection(response: &Response<Body>) -> &Rejection {
    response.extensions().get().expect("a rejection in the extensions")
}

#[tokio::test]
async fn an_unusable_id_is_a_bad_request() {
    let app = origins(ConcurrencyLimitLayer::in_memory(1));
    let long = [b'x'; 129];
    let cases = [
        (with_ids(&[]), KeyError::Missing),
        (with_ids(&[b""]), KeyError::Empty),
        (with_ids(&[b"a", b"b"]), KeyError::Duplicate),
        (with_ids(&[b"a,b"]), KeyError::Duplicate),
        (with_ids(&[&long]), KeyError::TooLong),
        (with_ids(&[b"\xff\xfe"]), KeyError::NotText),
    ];
    for (request, error) in cases {
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{error}");
        assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
        assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
        assert!(!response.headers().contains_key(RETRY_AFTER), "{error}");
        assert_eq!(rejection(&response).reason(), Reason::Key(error));
        let expected =
            format!(r#"{{"type":"about:blank","title":"Bad Request","status":400,"detail":"{error}"}}"#);
        assert_eq!(text(response).await, expected);
    }
    assert_eq!(send(&app, with_ids(&[&long[..128]])).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_project_at_its_limit_is_told_when_to_come_back() {
    let app = endless(ConcurrencyLimitLayer::in_memory(1));
    let _held = send(&app, request("acme")).await;
    let response = send(&app, request("acme")).await;

    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers().len(), 3);
    assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
    assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
    let rejection = rejection(&response);
    assert_eq!(rejection.reason(), Reason::Saturated);
    assert_eq!(rejection.policy(), "concurrency");
    assert_eq!((rejection.active(), rejection.limit()), (Some(1), Some(1)));
    let after = rejection.retry_after().expect("an estimate");
    assert!(after >= Duration::from_secs(1));
    assert_eq!(response.headers()[RETRY_AFTER], after.as_secs_f64().ceil().to_string().as_str());
    assert_eq!(text(response).await, AT_LIMIT);

    assert_eq!(send(&app, request("other")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn policy_and_problem_type_stand_in_the_answer() {
    let limiter = Limiter::builder(MemoryStore::new()).name("runs").limit(0).build().expect("valid settings");
    let layer = ConcurrencyLimitLayer::new(limiter);
    for bad in ["", "a b", "a\"b", "a\\b", "ä"] {
        let error = layer.clone().problem_type(bad).expect_err(bad);
        assert_eq!(error.field(), "problem_type");
    }
    let app = endless(layer.problem_type("urn:example:busy").expect("a valid type"));
    let body = text(send(&app, request("acme")).await).await;
    let expected = r#"{"type":"urn:example:busy","title":"Too many concurrent requests","status":429,"violated-policies":["runs"]}"#;
    assert_eq!(body, expected);
}

#[tokio::test]
async fn the_outage_policy_decides_while_the_store_is_down() {
    let app = |policy| {
        let limiter = Limiter::builder(Down).limit(1).on_outage(policy).build().expect("valid settings");
        ConcurrencyLimitLayer::new(limiter)
    };
    let open = origins(app(OnOutage::Admit));
    assert_eq!(text(send(&open, request("acme")).await).await, "FailOpen");

    let closed = origins(app(OnOutage::Refuse));
    let response = send(&closed, request("acme")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()[RETRY_AFTER], "1");
    assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
    assert_eq!(rejection(&response).reason(), Reason::Unavailable);
    let expected = r#"{"type":"about:blank","title":"Service Unavailable","status":503}"#;
    assert_eq!(text(response).await, expected);

    let local = endless(app(OnOutage::Local { share: 1.0 }));
    let _held = send(&local, request("acme")).await;
    assert_eq!(send(&local, request("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_limiter_that_shuts_down_is_unavailable() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let app = origins(layer.clone());
    assert!(layer.limiter().shutdown(Duration::from_secs(1)).await);
    let response = send(&app, request("acme")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()[RETRY_AFTER], "1");
    assert_eq!(rejection(&response).reason(), Reason::Closed);
}

#[tokio::test]
async fn requests_weigh_what_the_closure_says() {
    let layer = ConcurrencyLimitLayer::in_memory(3)
        .weight(|parts: &Parts| parts.uri.path()[1..].parse().unwrap_or(1));
    let app = endless(layer.clone());
    let weighing = |weight: u32| {
        let mut request = request("acme");
        *request.uri_mut() = format!("/{weight}").parse().expect("a path");
        request
    };
    let _held = send(&app, weighing(2)).await;
    assert_eq!(active(layer.limiter(), "acme").await, 2);
    assert_eq!(send(&app, weighing(2)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    for never in [0, 4, u32::MAX] {
        let response = send(&app, weighing(never)).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{never}");
        assert!(!response.headers().contains_key(RETRY_AFTER));
        assert_eq!(rejection(&response).reason(), Reason::Weight);
        let expected = r#"{"type":"about:blank","title":"Bad Request","status":400,"detail":"the request has a weight that can never be admitted"}"#;
        assert_eq!(text(response).await, expected);
    }
}

#[tokio::test]
async fn exempt_requests_need_neither_id_nor_slot() {
    let layer = ConcurrencyLimitLayer::in_memory(0).skip(|parts: &Parts| parts.uri.path() == "/health");
    let app = origins(layer);
    let path = |path: &str| Request::get(path).body(Body::empty()).expect("a valid request");
    assert_eq!(text(send(&app, path("/health")).await).await, "none");
    assert_eq!(send(&app, path("/healthy")).await.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_preflight_takes_no_slot() {
    let app = origins(ConcurrencyLimitLayer::in_memory(0));
    let options = |method, asks: bool| {
        let mut request = Request::builder().method(method).header("x-project-id", "acme");
        if asks {
            request = request.header("access-control-request-method", "POST");
        }
        request.body(Body::empty()).expect("a valid request")
    };
    assert_eq!(text(send(&app, options(Method::OPTIONS, true)).await).await, "none");
    assert_eq!(send(&app, options(Method::OPTIONS, false)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send(&app, options(Method::GET, true)).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn requests_without_an_id_are_treated_as_told() {
    let nobody = || Request::new(Body::empty());
    let twice = || with_ids(&[b"a", b"b"]);

    let skip = origins(ConcurrencyLimitLayer::in_memory(0).on_missing(OnMissing::Skip));
    assert_eq!(text(send(&skip, nobody()).await).await, "none");
    assert_eq!(text(send(&skip, request("")).await).await, "none");
    assert_eq!(send(&skip, twice()).await.status(), StatusCode::BAD_REQUEST);

    let id = ProjectId::new("anonymous").expect("a valid id");
    let layer = ConcurrencyLimitLayer::in_memory(1).on_missing(OnMissing::Shared(id));
    let shared = endless(layer.clone());
    let _held = send(&shared, nobody()).await;
    assert_eq!(active(layer.limiter(), "anonymous").await, 1);
    assert_eq!(send(&shared, request("")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send(&shared, twice()).await.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn ids_come_from_where_the_key_says() {
    #[derive(Clone)]
    struct Tenant(&'static str);
    let layer = ConcurrencyLimitLayer::in_memory(9);
    let limiter = layer.limiter();

    let by_header = endless(layer.clone().key(header("x-tenant")));
    let by_extension = endless(layer.clone().key(extension::<Tenant>(|tenant| tenant.0)));
    let by_path = endless(layer.clone().key(|parts: &Parts| match parts.uri.path() {
        "/" => Ok(None),
        path => Ok(Some(path[1..].to_owned())),
    }));

    let mut request = request("project");
    request.headers_mut().insert("x-tenant", "by-header".parse().expect("a value"));
    let _header = send(&by_header, request).await;
    assert_eq!(active(limiter, "by-header").await, 1);

    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(Tenant("by-extension"));
    let _extension = send(&by_extension, request).await;
    assert_eq!(active(limiter, "by-extension").await, 1);
    assert_eq!(send(&by_extension, Request::new(Body::empty())).await.status(), StatusCode::BAD_REQUEST);

    let _path = send(&by_path, Request::get("/by-path").body(Body::empty()).expect("a request")).await;
    assert_eq!(active(limiter, "by-path").await, 1);
    assert_eq!(send(&by_path, Request::new(Body::empty())).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_key_that_cannot_work_is_the_services_fault() {
    let layer = ConcurrencyLimitLayer::in_memory(9).key(header("authorization")).on_missing(OnMissing::Skip);
    let mut request = request("acme");
    request.headers_mut().insert("authorization", "Bearer secret".parse().expect("a value"));
    let response = send(&origins(layer), request).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(rejection(&response).reason(), Reason::Key(KeyError::Unusable));
}

#[tokio::test]
async fn shadow_refuses_nobody() {
    let layer = ConcurrencyLimitLayer::in_memory(1).shadow(true);
    let app = endless(layer.clone());
    let _held = send(&app, request("acme")).await;
    assert_eq!(active(layer.limiter(), "acme").await, 1);

    let app = origins(layer.clone());
    assert_eq!(text(send(&app, request("acme")).await).await, "none");
    assert_eq!(text(send(&app, Request::new(Body::empty())).await).await, "none");
    assert_eq!(text(send(&app, request("other")).await).await, "Store");
    assert_eq!(active(layer.limiter(), "acme").await, 1);
}

#[tokio::test]
async fn a_hook_replaces_the_answer() {
    let layer = ConcurrencyLimitLayer::in_memory(0).on_reject(|rejection: &Rejection, parts: &Parts| {
        let text = format!("{} {}", parts.uri.path(), rejection.status().as_u16());
        Response::builder().status(StatusCode::IM_A_TEAPOT).body(Body::from(text)).expect("a response")
    });
    let response = send(&origins(layer), request("acme")).await;
    assert_eq!(response.status(), StatusCode::IM_A_TEAPOT);
    assert!(response.headers().is_empty());
    assert_eq!(rejection(&response).reason(), Reason::Saturated);
    assert_eq!(text(response).await, "/ 429");
}

#[tokio::test]
async fn a_hooks_body_that_fails_ends_there() {
    let layer = ConcurrencyLimitLayer::in_memory(0).on_reject(|_: &Rejection, _: &Parts| {
        Response::new(Script::new([data(), Err(std::io::Error::other("broken")), data()]))
    });
    assert_eq!(text(send(&origins(layer), request("acme")).await).await, "data");
}

#[tokio::test]
async fn the_default_limit_is_the_limiters_own() {
    let app = endless(ConcurrencyLimitLayer::in_memory(Limit::Default));
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(send(&app, request("acme")).await);
        assert_eq!(held.last().map(Response::status), Some(StatusCode::OK));
    }
    assert_eq!(send(&app, request("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);

    let unlimited = origins(ConcurrencyLimitLayer::in_memory(Limit::Unlimited));
    assert_eq!(text(send(&unlimited, request("acme")).await).await, "Unlimited");
}

#[tokio::test]
async fn settings_of_a_clone_are_its_own_and_its_limit_is_not() {
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let lenient = layer.clone().on_missing(OnMissing::Skip);
    let strict = origins(layer.clone());
    assert_eq!(send(&strict, Request::new(Body::empty())).await.status(), StatusCode::BAD_REQUEST);
    let lenient = endless(lenient);
    assert_eq!(send(&lenient, Request::new(Body::empty())).await.status(), StatusCode::OK);
    let _held = send(&lenient, request("acme")).await;
    assert_eq!(send(&strict, request("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

//! What the `axum` feature adds.

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use tower::ServiceExt;
use tower_slots::{ConcurrencyLimitLayer, Rejection, SlotHandle};

use crate::support::{request, text};

fn router() -> Router {
    Router::new()
        .route("/needed", get(async |slot: SlotHandle| format!("{}", slot.limit())))
        .route("/optional", get(async |slot: Option<SlotHandle>| format!("{}", slot.is_some())))
}

async fn fetch(router: Router, path: &str) -> Response<Body> {
    let mut request: Request<Body> = request("acme");
    *request.uri_mut() = path.parse().expect("a path");
    router.oneshot(request).await.expect("infallible")
}

#[tokio::test]
async fn handlers_take_the_slots_handle() {
    let limited = router().layer(ConcurrencyLimitLayer::in_memory(3));
    assert_eq!(text(fetch(limited.clone(), "/needed").await).await, "3");
    assert_eq!(text(fetch(limited, "/optional").await).await, "true");

    let missing = fetch(router(), "/needed").await;
    assert_eq!(missing.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text(missing).await.contains("layer is not on this route"));
    assert_eq!(text(fetch(router(), "/optional").await).await, "false");
}

#[tokio::test]
async fn a_hook_returns_what_a_handler_may_return() {
    let hook = |rejection: &Rejection, _: &Parts| (rejection.status(), "busy");
    let limited = router().layer(ConcurrencyLimitLayer::in_memory(0).on_reject(hook));
    let refused = fetch(limited, "/needed").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(text(refused).await, "busy");
}

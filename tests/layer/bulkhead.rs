//! The process's own semaphore in front of the limiter.

use std::time::Duration;

use axum::body::Body;
use http::request::Parts;
use http::{Request, StatusCode};
use tower::ServiceExt;
use tower_slots::layer::Reason;
use tower_slots::semaphore::Semaphore;
use tower_slots::{ConcurrencyLimitLayer, Hold, Limiter, MemoryStore, Rejection, SlotHandle};

use crate::support::{active, app, endless, endless_body, origins, request, send, text};

fn semaphore(capacity: i64, queue: usize) -> Semaphore {
    Semaphore::builder(capacity).max_waiters(queue).build().expect("valid settings")
}

fn limiter(limit: u32) -> Limiter {
    Limiter::builder(MemoryStore::new()).limit(limit).build().expect("valid settings")
}

fn acquired(semaphore: &Semaphore) -> i64 {
    semaphore.snapshot().acquired
}

fn reason(response: &http::Response<Body>) -> Option<Reason> {
    response.extensions().get::<Rejection>().map(Rejection::reason)
}

#[tokio::test]
async fn a_full_bulkhead_answers_503_and_takes_no_slot() {
    let (semaphore, limiter) = (semaphore(1, 0), limiter(10));
    let app = endless(ConcurrencyLimitLayer::new(limiter.clone()).bulkhead(semaphore.clone()));
    let first = send(&app, request("acme")).await;
    assert_eq!((first.status(), acquired(&semaphore)), (StatusCode::OK, 1));
    let second = send(&app, request("globex")).await;
    assert_eq!(second.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(second.headers()["retry-after"], "1");
    assert_eq!(second.headers()["cache-control"], "no-store");
    assert_eq!(reason(&second), Some(Reason::Bulkhead));
    assert_eq!(text(second).await, r#"{"type":"about:blank","title":"Service Unavailable","status":503}"#);
    assert_eq!(active(&limiter, "globex").await, 0);
    drop(first);
    assert_eq!((acquired(&semaphore), active(&limiter, "acme").await), (0, 0));
}

#[tokio::test]
async fn the_status_of_a_full_bulkhead_can_be_chosen() {
    let layer = ConcurrencyLimitLayer::in_memory(10).bulkhead_status(StatusCode::TOO_MANY_REQUESTS);
    let app = endless(layer.bulkhead(semaphore(1, 0)));
    let _held = send(&app, request("acme")).await;
    assert_eq!(send(&app, request("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_refused_slot_gives_the_permit_back() {
    let (semaphore, limiter) = (semaphore(10, 0), limiter(1));
    let app = endless(ConcurrencyLimitLayer::new(limiter).bulkhead(semaphore.clone()));
    let _held = send(&app, request("acme")).await;
    assert_eq!(send(&app, request("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(acquired(&semaphore), 1);
}

#[tokio::test]
async fn the_permit_lives_as_long_as_the_slot() {
    for (hold, after_head) in [(Hold::Body, 1), (Hold::Head, 0)] {
        let semaphore = semaphore(1, 0);
        let app = endless(ConcurrencyLimitLayer::in_memory(10).bulkhead(semaphore.clone()).hold(hold));
        let response = send(&app, request("acme")).await;
        assert_eq!(acquired(&semaphore), after_head, "{hold:?}");
        drop(response);
        assert_eq!(acquired(&semaphore), 0, "{hold:?}");
    }
}

#[tokio::test]
async fn a_held_slot_keeps_the_permit_too() {
    let semaphore = semaphore(1, 0);
    let (sender, mut kept) = tokio::sync::mpsc::unbounded_channel();
    let app = app(ConcurrencyLimitLayer::in_memory(10).bulkhead(semaphore.clone()), move |request| {
        let handle = request.extensions().get::<SlotHandle>();
        sender.send(handle.and_then(SlotHandle::hold)).expect("the test listens");
        Body::empty()
    });
    drop(send(&app, request("acme")).await);
    let kept = kept.recv().await.flatten().expect("a held slot");
    assert_eq!(acquired(&semaphore), 1);
    drop(kept);
    assert_eq!(acquired(&semaphore), 0);
}

#[tokio::test]
async fn weights_are_shared_with_the_slot_and_one_above_the_capacity_is_never_retried() {
    let (semaphore, limiter) = (semaphore(5, 0), limiter(100));
    let layer = ConcurrencyLimitLayer::new(limiter.clone()).bulkhead(semaphore.clone());
    let app = endless(layer.weight(|parts: &Parts| parts.uri.path().len() as u32));
    let weighing =
        |path: &str| Request::get(path).header("x-project-id", "acme").body(Body::empty()).expect("valid");
    let _held = send(&app, weighing("/12")).await;
    assert_eq!((acquired(&semaphore), active(&limiter, "acme").await), (3, 3));
    assert_eq!(reason(&send(&app, weighing("/12")).await), Some(Reason::Bulkhead));
    let never = send(&app, weighing("/12345")).await;
    assert_eq!((never.status(), reason(&never)), (StatusCode::BAD_REQUEST, Some(Reason::Weight)));
}

#[tokio::test(start_paused = true)]
async fn with_a_wait_requests_queue_in_their_order_and_no_longer_than_that() {
    let semaphore = semaphore(1, 2);
    let layer = ConcurrencyLimitLayer::in_memory(10).bulkhead_wait(Duration::from_secs(1));
    let app = endless(layer.bulkhead(semaphore.clone()));
    let first = send(&app, request("acme")).await;
    let queue = |id| tokio::spawn(app.clone().oneshot(request(id)));
    let second = queue("globex");
    tokio::task::yield_now().await;
    let third = queue("initech");
    tokio::task::yield_now().await;
    assert_eq!(semaphore.snapshot().waiters, 2);
    assert_eq!(reason(&send(&app, request("acme")).await), Some(Reason::Bulkhead), "the queue is full");
    drop(first);
    let second = second.await.expect("no panic").expect("infallible");
    assert_eq!(second.status(), StatusCode::OK);
    assert_eq!(
        third.await.expect("no panic").expect("infallible").status(),
        StatusCode::SERVICE_UNAVAILABLE,
        "it waited for 1 s"
    );
    let snapshot = semaphore.snapshot();
    assert_eq!((snapshot.acquired, snapshot.waiters), (1, 0));
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_the_queue() {
    let semaphore = semaphore(1, 2);
    let layer = ConcurrencyLimitLayer::in_memory(10).bulkhead_wait(Duration::from_secs(60));
    let app = endless(layer.bulkhead(semaphore.clone()));
    let _first = send(&app, request("acme")).await;
    let gone = tokio::time::timeout(Duration::from_millis(20), send(&app, request("acme"))).await;
    assert!(gone.is_err());
    assert_eq!((semaphore.snapshot().waiters, semaphore.snapshot().cancellations), (0, 1));
}

#[tokio::test]
async fn a_closed_semaphore_refuses_at_once_and_tells_when_all_are_done() {
    let semaphore = semaphore(2, 2);
    let layer = ConcurrencyLimitLayer::in_memory(10).bulkhead_wait(Duration::from_secs(60));
    let app = endless(layer.bulkhead(semaphore.clone()));
    let running = send(&app, request("acme")).await;
    semaphore.close();
    let refused = send(&app, request("acme")).await;
    assert_eq!((refused.status(), reason(&refused)), (StatusCode::SERVICE_UNAVAILABLE, Some(Reason::Closed)));
    let idle = tokio::spawn(semaphore.wait_idle());
    tokio::task::yield_now().await;
    assert!(!idle.is_finished());
    drop(running);
    idle.await.expect("no panic");
}

#[tokio::test]
async fn a_bulkhead_alone_asks_nobody_for_an_id() {
    let semaphore = semaphore(2, 0);
    let app = endless(ConcurrencyLimitLayer::bulkhead_only(semaphore.clone()));
    let anonymous = || Request::new(Body::empty());
    let _first = send(&app, anonymous()).await;
    let _second = send(&app, request("acme")).await;
    assert_eq!(acquired(&semaphore), 2);
    assert_eq!(reason(&send(&app, anonymous()).await), Some(Reason::Bulkhead));
}

#[tokio::test]
async fn what_is_skipped_takes_no_permit_and_shadow_refuses_nobody() {
    let semaphore = semaphore(1, 0);
    let layer = ConcurrencyLimitLayer::in_memory(10).bulkhead(semaphore.clone());
    let held = endless(layer.clone());
    let skipping = origins(layer.clone().skip(|parts: &Parts| parts.uri.path() == "/health"));
    let _held = send(&held, request("acme")).await;
    let health = Request::get("/health").body(Body::empty()).expect("a valid request");
    assert_eq!(text(send(&skipping, health).await).await, "none");
    assert_eq!(text(send(&origins(layer.shadow(true)), request("acme")).await).await, "none");
    assert_eq!(acquired(&semaphore), 1);
}

#[tokio::test]
async fn the_hook_answers_for_the_bulkhead_too() {
    let layer = ConcurrencyLimitLayer::in_memory(10).bulkhead(semaphore(1, 0));
    let app = app(
        layer.on_reject(|rejection: &Rejection, _: &Parts| {
            http::Response::new(Body::from(format!("{:?}", rejection.reason())))
        }),
        |_| endless_body(),
    );
    let _held = send(&app, request("acme")).await;
    assert_eq!(text(send(&app, request("acme")).await).await, "Bulkhead");
}

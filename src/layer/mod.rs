//! The Tower layer: requests in, and a slot for each of them.
//!
//! ```
//! use http::{Request, Response, StatusCode};
//! use http_body_util::Full;
//! use bytes::Bytes;
//! use std::convert::Infallible;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//! use tower_slots::ConcurrencyLimitLayer;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let service = ServiceBuilder::new()
//!     .layer(ConcurrencyLimitLayer::in_memory(10)) // 10 in flight per `x-project-id`
//!     .service(service_fn(|_: Request<Full<Bytes>>| async {
//!         Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
//!     }));
//!
//! let request = Request::builder().header("x-project-id", "acme").body(Full::default())?;
//! assert_eq!(service.clone().oneshot(request).await?.status(), StatusCode::OK);
//!
//! let nobody = Request::new(Full::default());
//! assert_eq!(service.oneshot(nobody).await?.status(), StatusCode::BAD_REQUEST);
//! # Ok(()) }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
//! ```
//!
//! # What happens to a request
//!
//! 1. CORS preflights (`OPTIONS` with `Access-Control-Request-Method`) and what
//!    [`skip`](ConcurrencyLimitLayer::skip) exempts go straight on, without a slot.
//! 2. The [`key`] says whose request it is. Without an id, [`OnMissing`] decides.
//! 3. The [`bulkhead`](ConcurrencyLimitLayer::bulkhead), if there is one, gives a permit: this process's
//!    own cap. It goes back if the slot is refused, and otherwise lives as long as the slot.
//! 4. The [`Limiter`](crate::Limiter) grants a slot or refuses it. The request's body is not touched
//!    before. Nothing is acquired in `poll_ready`, which is the inner service's own.
//! 5. The inner service runs. In the request's extensions stands a [`SlotHandle`](crate::SlotHandle),
//!    unless the request passed without a slot.
//! 6. The slot is given back, once: see [below](#how-long-a-slot-is-held).
//!
//! The service's error type stays its own: a refusal is a response.
//!
//! # Which key
//!
//! By default the header `x-project-id` is the id. [`key`] lists what else there is. Whatever a client can
//! write it can change, so that the right key is mostly what authentication has found out:
//!
//! ```
//! # use bytes::Bytes;
//! # use http::{Request, Response};
//! # use http_body_util::Full;
//! # use std::convert::Infallible;
//! # use tower::{Layer, ServiceExt, service_fn};
//! use tower_slots::{ConcurrencyLimitLayer, SlotHandle, key::{extension, first_of, peer_ip}};
//!
//! #[derive(Clone)]
//! struct User { project: String } // put into the request's extensions by a layer outside
//!
//! // Users share their project's slots; who is not logged in counts by address.
//! let key = first_of((extension::<User>(|user| user.project.clone()).optional(), peer_ip()));
//! let layer = ConcurrencyLimitLayer::in_memory(10).key(key);
//! # async fn run(layer: ConcurrencyLimitLayer) -> Result<(), Box<dyn std::error::Error>> {
//! # let limiter = layer.limiter().clone();
//! # let service = layer.layer(service_fn(|_: Request<()>| async {
//! #     Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
//! # }));
//! # let mut request = Request::new(());
//! # request.extensions_mut().insert(User { project: "acme".to_owned() });
//!
//! let response = service.oneshot(request).await?; // of a User { project: "acme" }
//! assert_eq!(limiter.active("acme").await?, 1);
//! # Ok(()) }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run(layer)).unwrap();
//! ```
//!
//! # How long a slot is held
//!
//! | the request | gives its slot back |
//! |---|---|
//! | is answered, with a body | when that ends, fails, yields trailers or its last frame, or is dropped: a stream holds its slot for as long as it streams |
//! | is answered without one (`HEAD`, 204, 304, a body at its end) | with the head of the response |
//! | fails, or panics | at once |
//! | is given up, as by a time-out outside | when the response future is dropped |
//! | loses its client | when the server notices: on HTTP/2 at once; on HTTP/1 not while the handler leaves the request's body unread. [`max_hold`](crate::LimiterBuilder::max_hold) bounds that |
//! | upgrades its connection | with the head, unless the handler [keeps it](#upgraded-connections) |
//!
//! With [`Hold::Head`] the head of the response is the end of all of these. A body in one piece is over when
//! the server has taken it, and a stream when the server has taken its last frame: what is then still on its
//! way to the client is not counted.
//!
//! ```
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::{BodyExt, Full};
//! use std::convert::Infallible;
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_slots::ConcurrencyLimitLayer;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let layer = ConcurrencyLimitLayer::in_memory(10);
//! let service = layer.layer(service_fn(|_: Request<()>| async {
//!     Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
//! }));
//!
//! let request = Request::builder().header("x-project-id", "acme").body(())?;
//! let response = service.oneshot(request).await?;
//! assert_eq!(layer.limiter().active("acme").await?, 1); // the body is still to come
//! response.into_body().collect().await?;
//! assert_eq!(layer.limiter().active("acme").await?, 0);
//! # Ok(()) }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
//! ```
//!
//! # Answers
//!
//! A refusal is written in the protocol of the request:
//!
//! | [`Reason`] | HTTP | gRPC, gRPC-Web | Connect | try again |
//! |---|---|---|---|---|
//! | [`Saturated`](Reason::Saturated) | 429 | `RESOURCE_EXHAUSTED` (8) | `resource_exhausted`, 429 | yes |
//! | [`Unavailable`](Reason::Unavailable), [`Closed`](Reason::Closed), [`Bulkhead`](Reason::Bulkhead) | 503 | `UNAVAILABLE` (14) | `unavailable`, 503 | yes |
//! | [`Key`](Reason::Key), [`Weight`](Reason::Weight) | 400 | `INVALID_ARGUMENT` (3) | `invalid_argument`, 400 | no |
//! | [`Key`](Reason::Key), with a [`challenge`](ConcurrencyLimitLayer::challenge) | 401 | `UNAUTHENTICATED` (16) | `unauthenticated`, 401 | no |
//! | [`KeyError::Unusable`](crate::KeyError::Unusable): the [`key`] itself cannot work | 500 | `INTERNAL` (13) | `internal`, 500 | no |
//!
//! | the request | its answer |
//! |---|---|
//! | `content-type: application/grpc-web…` | gRPC-Web: HTTP 200, the status in the headers, no body |
//! | `content-type: application/grpc`, `application/grpc+…` | gRPC: the same ("trailers only") |
//! | `content-type: application/connect+…` | a Connect stream: HTTP 200, and one message that ends it |
//! | `connect-protocol-version: 1` or `?connect=v1` | unary Connect: the status above, and JSON |
//! | any other | the status above, and a problem document (RFC 9457, `application/problem+json`) |
//!
//! When to try again stands in `Retry-After`, in gRPC and Connect as `google.rpc.RetryInfo` among the
//! details: the limiter's estimate, or what [`retry_after`](ConcurrencyLimitLayer::retry_after) says.
//! Answers hold nothing that the client has sent, and no count and no limit, unless
//! [`rate_limit_fields`](ConcurrencyLimitLayer::rate_limit_fields) asks for those. Outside of gRPC
//! `Cache-Control` is `no-store`.
//!
//! [`on_reject`](ConcurrencyLimitLayer::on_reject) replaces all of it, for every protocol. Either way the
//! [`Rejection`] stands in the response's extensions, where an outer layer can see it.
//!
//! ```
//! use bytes::Bytes;
//! use http::{HeaderValue, Request, Response, StatusCode};
//! use http_body_util::Full;
//! use std::convert::Infallible;
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_slots::{ConcurrencyLimitLayer, RateLimitFields, Rejection, layer::Reason};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let layer = ConcurrencyLimitLayer::in_memory(0)
//!     .challenge(HeaderValue::from_static("Bearer")) // 401 instead of 400
//!     .rate_limit_fields(RateLimitFields::DraftIetf11);
//! let service = layer.layer(service_fn(|_: Request<()>| async {
//!     Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
//! }));
//!
//! let request = Request::builder().header("x-project-id", "acme").body(())?;
//! let refused = service.clone().oneshot(request).await?;
//! assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(refused.headers()["ratelimit"], r#""concurrency";r=0"#);
//! assert_eq!(refused.extensions().get().map(Rejection::reason), Some(Reason::Saturated));
//!
//! let grpc = Request::builder().header("x-project-id", "acme").header("content-type", "application/grpc");
//! let refused = service.clone().oneshot(grpc.body(())?).await?;
//! assert_eq!((refused.status(), &refused.headers()["grpc-status"]), (StatusCode::OK, &HeaderValue::from(8)));
//!
//! assert_eq!(service.oneshot(Request::new(())).await?.status(), StatusCode::UNAUTHORIZED);
//! # Ok(()) }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
//! ```
//!
//! # Where to put it
//!
//! | on | by |
//! |---|---|
//! | a router or routes of axum | `Router::layer`, `Router::route_layer`, `MethodRouter::layer` |
//! | a tonic server | `Server::builder().layer(layer)` |
//! | one service of tonic | `layer.named_layer(service)`, of `tonic::service::LayerExt` |
//! | any other service, as for hyper | `ServiceBuilder`, or [`Layer::layer`](tower_layer::Layer::layer) |
//!
//! Any number of clones, on routers, routes or connections, keep one limit.
//!
//! Behind what finds out who is asking, in front of what costs. CORS, tracing, time-outs, compression and
//! `CatchPanic` go outside: so refusals pass through them too, and a time-out gives the slot back. Of axum's
//! layers the last is the outermost:
//!
//! ```
//! use axum::{Router, routing::get};
//! use std::time::Duration;
//! use tower_http::{cors::CorsLayer, timeout::TimeoutLayer, trace::TraceLayer};
//! use tower_slots::ConcurrencyLimitLayer;
//!
//! let app: Router = Router::new()
//!     .route("/", get(|| async { "done" }))
//!     .layer(ConcurrencyLimitLayer::in_memory(10))
//!     // … authentication, if the key comes from it …
//!     .layer(TimeoutLayer::with_status_code(http::StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(30)))
//!     .layer(CorsLayer::permissive())
//!     .layer(TraceLayer::new_for_http());
//! ```
//!
//! A layer outside that reads a whole body in advance, to buffer it, ends the hold when it has read it. Two
//! layers in one stack both count: a request holds a slot of each, and the inner one's handle is in the
//! extensions. A request that waits until the services inside are ready holds no slot yet.
//!
//! # Upgraded connections
//!
//! A WebSocket outlives its request: after a 101, or a 2xx to a `CONNECT`, the layer lets go of the
//! slot. A handler that wants it kept takes a strong guard and moves it to where the connection lives:
//!
//! ```
//! use http::{Request, Response, StatusCode};
//! use http_body_util::Empty;
//! use bytes::Bytes;
//! use tower_slots::SlotHandle;
//!
//! fn upgrade<B>(request: &Request<B>) -> Response<Empty<Bytes>> {
//!     let slot = request.extensions().get().and_then(SlotHandle::hold);
//!     let _serve = async move {
//!         // … talk on the upgraded connection …
//!         drop(slot);
//!     };
//!     let mut response = Response::new(Empty::new());
//!     *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
//!     response
//! }
//! ```
//!
//! The same serves work that a handler spawns and that outlives the response. If nobody holds the
//! slot, `tower_slots_upgrade_unheld_total` counts it, and the log says so once.
//!
//! # What can be seen
//!
//! The metric `tower_slots_requests_total` counts what became of requests. If the span that is
//! current when the request is decided declares them, the fields `policy`, `decision`, `limit`,
//! `active` and `key_hash` are recorded on it: `decision` is the metric's `result` (`rejected` for
//! `local_rejected` too), or `closed` or `weight`. Refusals are debug events. Ids are never shown, only a
//! short hash.

#[cfg(feature = "axum")]
mod axum;
mod body;
mod bulkhead;
mod future;
mod hold;
pub mod key;
#[allow(clippy::module_inception, reason = "the type is the layer of this layer")]
mod layer;
mod observe;
mod on_missing;
mod reject;
mod service;
mod settings;

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::axum::MissingSlotHandle;
pub use self::body::SlotBody;
pub use self::future::ResponseFuture;
pub use self::hold::Hold;
pub use self::layer::ConcurrencyLimitLayer;
pub use self::on_missing::OnMissing;
pub use self::reject::{RateLimitFields, Reason, RejectResponse, Rejection};
pub use self::service::ConcurrencyLimit;

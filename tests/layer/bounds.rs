//! What the compiler must grant to users.

use std::convert::Infallible;
use std::fmt::Debug;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{Empty, combinators::UnsyncBoxBody};
use tower::Layer;
use tower::util::{BoxCloneService, BoxCloneSyncService, BoxCloneSyncServiceLayer};
use tower_slots::key::{Header, KeyExtractor};
use tower_slots::layer::{ResponseFuture, SlotBody};
use tower_slots::{ConcurrencyLimit, ConcurrencyLimitLayer, Rejection};

use crate::support::Plain;

fn layer_like<T: Clone + Debug + Send + Sync + Unpin + 'static>() {}
fn sync<T: Send + Sync + Unpin>() {}
fn send<T: Send + Unpin>() {}

/// A body of neither `Default` nor `Data = Bytes`.
fn body<B: http_body::Body>() {}

#[test]
fn auto_traits_are_those_of_what_is_inside() {
    layer_like::<ConcurrencyLimitLayer>();
    layer_like::<ConcurrencyLimit<Plain>>();
    layer_like::<Rejection>();
    sync::<SlotBody<Empty<Bytes>>>();
    send::<SlotBody<UnsyncBoxBody<Bytes, std::io::Error>>>();
    send::<ResponseFuture<Plain, Body>>();
    body::<SlotBody<UnsyncBoxBody<VecBuf, std::io::Error>>>();
}

#[test]
fn services_and_layers_can_be_boxed() {
    type Answer = Response<SlotBody<Body>>;
    let layer = ConcurrencyLimitLayer::in_memory(1);
    let service = layer.layer(Plain);
    let _: BoxCloneService<Request<Body>, Answer, Infallible> = BoxCloneService::new(service.clone());
    let shared: BoxCloneSyncService<Request<Body>, Answer, Infallible> = BoxCloneSyncService::new(service);
    let _: BoxCloneSyncServiceLayer<Plain, Request<Body>, Answer, Infallible> =
        BoxCloneSyncServiceLayer::new(layer);
    fn sync_clone<T: Clone + Send + Sync>(_: T) {}
    sync_clone(shared);
}

#[test]
fn extractors_are_object_safe() {
    let extractor: Box<dyn KeyExtractor> = Box::new(Header::default());
    let (parts, ()) = Request::new(()).into_parts();
    assert!(extractor.extract(&parts).is_err());
    let _layer =
        ConcurrencyLimitLayer::in_memory(1).key(move |parts: &http::request::Parts| extractor.extract(parts));
}

/// Data of one's own, made from a refusal's bytes.
struct VecBuf(Bytes);

impl From<Bytes> for VecBuf {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

impl bytes::Buf for VecBuf {
    fn remaining(&self) -> usize {
        self.0.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.0.chunk()
    }

    fn advance(&mut self, n: usize) {
        self.0.advance(n);
    }
}

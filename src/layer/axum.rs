use std::convert::Infallible;
use std::fmt;

use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
use axum_core::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::limiter::SlotHandle;

/// A handler asks for a [`SlotHandle`] and the request has none. It answers 500.
///
/// The [`ConcurrencyLimitLayer`](crate::ConcurrencyLimitLayer) is not on the route, or it has let the
/// request pass without a slot. Where that is meant, take an `Option<SlotHandle>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingSlotHandle;

impl fmt::Display for MissingSlotHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no slot handle: the concurrency limit layer is not on this route, or the request passed without a slot",
        )
    }
}

impl std::error::Error for MissingSlotHandle {}

impl IntoResponse for MissingSlotHandle {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

impl<S: Sync> FromRequestParts<S> for SlotHandle {
    type Rejection = MissingSlotHandle;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, MissingSlotHandle> {
        parts.extensions.get().cloned().ok_or(MissingSlotHandle)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for SlotHandle {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

use std::any::type_name;
use std::fmt;
use std::sync::Once;

use axum_core::extract::FromRequestParts;
use axum_core::response::IntoResponse;
use http::request::Parts;

use super::extension::Reader;
use super::{AsyncKeyExtractor, KeyFuture, ReadId, Unhashed};
use crate::limiter::KeyError;
use crate::trace::event;

/// Takes the id from one of axum's extractors; made by [`extract`].
pub struct Extract<T> {
    read: Reader<T>,
    complained: Once,
}

/// Takes the id from what an extractor of axum yields, for
/// [`key_async`](crate::ConcurrencyLimitLayer::key_async): `Path`, `Extension`, `TypedHeader`, or any
/// other `FromRequestParts` that needs no state.
///
/// If the extractor rejects, the request counts as one without an id. As a rejection of 500 or more is
/// mostly a layer or a route in the wrong place, the log says so once as an error. To tell rejections
/// apart, extract a `Result<T, T::Rejection>` and return a [`KeyError`]. What the extractor takes out of
/// the request, the handler does not find there.
///
/// ```
/// use axum::{Router, extract::Path, routing::get};
/// use tower_slots::{ConcurrencyLimitLayer, key::extract};
///
/// let layer = ConcurrencyLimitLayer::in_memory(10)
///     .key_async(extract::<Path<String>>(|Path(project)| project.clone()));
/// let app: Router = Router::new().route("/projects/{id}", get(|| async { "done" })).layer(layer);
/// ```
#[must_use]
pub fn extract<T>(read: impl ReadId<T>) -> Extract<T>
where
    T: FromRequestParts<()> + 'static,
{
    Extract { read: Reader::new(read), complained: Once::new() }
}

impl<T: FromRequestParts<()> + 'static> AsyncKeyExtractor for Extract<T> {
    fn extract<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p> {
        Box::pin(async move { (self.read.id)(&self.find(parts).await?).map(Some) })
    }

    fn extract_unhashed<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p, Unhashed<'static>> {
        Box::pin(async move { (self.read.unhashed)(&self.find(parts).await?).map(Some) })
    }
}

impl<T: FromRequestParts<()>> Extract<T> {
    async fn find(&self, parts: &mut Parts) -> Result<T, KeyError> {
        T::from_request_parts(parts, &()).await.map_err(|rejection| self.rejected(rejection))
    }

    fn rejected(&self, rejection: impl IntoResponse) -> KeyError {
        if rejection.into_response().status().is_server_error() {
            self.complained.call_once(|| {
                event!(
                    error,
                    extractor = type_name::<T>(),
                    "the extractor to take the project id from cannot work here: is what it needs set outside of this layer?"
                );
            });
        }
        KeyError::Missing
    }
}

impl<T> fmt::Debug for Extract<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Extract").field(&type_name::<T>()).finish()
    }
}

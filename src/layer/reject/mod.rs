mod answers;
mod code;
mod connect;
mod grpc;
mod problem;
mod protocol;
mod ratelimit_fields;
mod retry_info;

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode};
use http_body::Body;

pub(super) use self::answers::Answers;
pub(super) use self::problem::Problems;
pub use self::ratelimit_fields::RateLimitFields;
use crate::error::ConfigError;
use crate::limiter::{AcquireError, KeyError};
use crate::semaphore;

/// When to come back where nothing is known about it: another process, or this one a moment later,
/// may answer.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// No refusal is for others, or for later: a 429 must not be stored at all (RFC 6585, 4).
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// Of a [`Reason::Weight`], to the client.
const NEVER_ADMITTED: &str = "the request has a weight that can never be admitted";

/// A refusal: what an [`on_reject`](crate::ConcurrencyLimitLayer::on_reject) hook is told.
///
/// It also stands in the extensions of the response, whoever made that, for outer layers to see. It
/// holds nothing that the client has sent.
#[derive(Debug, Clone)]
pub struct Rejection {
    reason: Reason,
    policy: &'static str,
    active: Option<u32>,
    limit: Option<u32>,
    retry_after: Option<Duration>,
    status: StatusCode,
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The project has as many slots in use as its limit allows: 429.
    Saturated,
    /// The store cannot answer, and the limiter refuses in an outage: 503.
    Unavailable,
    /// The limiter is shutting down, or the bulkhead was closed: 503.
    Closed,
    /// The process's own bulkhead is full, which is not this caller's fault: 503, unless
    /// [`bulkhead_status`](crate::ConcurrencyLimitLayer::bulkhead_status) says otherwise.
    Bulkhead,
    /// The request's weight can never be admitted: 400, since a 429 would be retried for ever.
    Weight,
    /// The project id is missing or unusable: 400, 401 with a
    /// [`challenge`](crate::ConcurrencyLimitLayer::challenge), or 500 for [`KeyError::Unusable`].
    Key(KeyError),
}

impl Rejection {
    pub(super) fn new(policy: &'static str, error: &AcquireError) -> Self {
        let refused =
            |reason, status| Self { reason, policy, status, active: None, limit: None, retry_after: None };
        match *error {
            AcquireError::Saturated { active, limit, retry_after } => Self {
                active: Some(active),
                limit: Some(limit),
                retry_after: Some(retry_after),
                ..refused(Reason::Saturated, StatusCode::TOO_MANY_REQUESTS)
            },
            AcquireError::Unavailable(_) => Self::soon(policy, Reason::Unavailable),
            AcquireError::Closed => Self::soon(policy, Reason::Closed),
            AcquireError::Weight { most, .. } => {
                Self { limit: Some(most), ..refused(Reason::Weight, StatusCode::BAD_REQUEST) }
            }
            AcquireError::Key(KeyError::Unusable) => {
                refused(Reason::Key(KeyError::Unusable), StatusCode::INTERNAL_SERVER_ERROR)
            }
            AcquireError::Key(error) => refused(Reason::Key(error), StatusCode::BAD_REQUEST),
        }
    }

    /// The bulkhead has not let a request in; a full one is answered with `status`.
    pub(super) fn kept_out(policy: &'static str, error: semaphore::AcquireError, status: StatusCode) -> Self {
        match error {
            semaphore::AcquireError::Closed => Self::soon(policy, Reason::Closed),
            semaphore::AcquireError::Oversize { weight, capacity } => {
                let [weight, most] = [weight, capacity].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
                Self::new(policy, &AcquireError::Weight { weight, most })
            }
            _ => Self { status, ..Self::soon(policy, Reason::Bulkhead) },
        }
    }

    /// A refusal that may be over in a moment.
    fn soon(policy: &'static str, reason: Reason) -> Self {
        let (status, retry_after) = (StatusCode::SERVICE_UNAVAILABLE, Some(RETRY_SOON));
        Self { reason, policy, status, active: None, limit: None, retry_after }
    }

    /// Why.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// The HTTP status of the answer that is given without a hook, where its protocol has one.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Slots of the project in use, for [`Reason::Saturated`]. Not for the client's eyes.
    #[must_use]
    pub fn active(&self) -> Option<u32> {
        self.active
    }

    /// The project's limit, for [`Reason::Saturated`]; the most that a request may weigh, for
    /// [`Reason::Weight`]. Not for the client's eyes.
    #[must_use]
    pub fn limit(&self) -> Option<u32> {
        self.limit
    }

    /// When another try makes sense, if ever: at least a second. `Retry-After` and `RetryInfo` are this
    /// in whole seconds, rounded up.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Rounded up, so that nobody is told to come back too early, and at least 1: with 0 a client
    /// would come back at once.
    fn retry_after_seconds(&self) -> Option<u64> {
        let after = self.retry_after?;
        let begun = u64::from(after.subsec_nanos() > 0);
        Some(after.as_secs().saturating_add(begun).max(1))
    }

    /// The name of the limiter that refused.
    #[must_use]
    pub fn policy(&self) -> &'static str {
        self.policy
    }
}

/// What an [`on_reject`](crate::ConcurrencyLimitLayer::on_reject) hook may return: an
/// [`http::Response`] with a body of [`Bytes`], and with the `axum` feature all that is
/// `IntoResponse`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot answer a refused request",
    note = "return an `http::Response<B>` where `B: http_body::Body<Data = Bytes> + Send + 'static`, \
            or, with the `axum` feature, anything that is `IntoResponse`"
)]
pub trait RejectResponse: sealed::Sealed {
    /// The body of the response.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static;

    /// The response.
    fn into_response(self) -> Response<Self::Body>;
}

// Without `axum` this is what axum-core says of `http::Response`, bound for bound: switching the
// feature on, which another crate may do, must not stop anything from compiling.
#[cfg(not(feature = "axum"))]
impl<B> RejectResponse for Response<B>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    type Body = B;

    fn into_response(self) -> Self {
        self
    }
}

#[cfg(feature = "axum")]
impl<R: axum_core::response::IntoResponse> RejectResponse for R {
    type Body = axum_core::body::Body;

    fn into_response(self) -> Response<Self::Body> {
        axum_core::response::IntoResponse::into_response(self)
    }
}

/// Closed to others, so that the two sets of implementations above can replace each other.
mod sealed {
    pub trait Sealed {}

    #[cfg(not(feature = "axum"))]
    impl<B> Sealed for http::Response<B> {}

    #[cfg(feature = "axum")]
    impl<R: axum_core::response::IntoResponse> Sealed for R {}
}

/// What an answer's problem type may be.
pub(super) fn check_problem_type(uri: &str) -> Result<(), ConfigError> {
    let printable = uri.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
    if uri.is_empty() || !printable {
        return Err(ConfigError::new(
            "problem_type",
            "must be printable ascii without spaces, quotes and backslashes",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_up() {
        for (millis, seconds) in [(0, 1), (1, 1), (1000, 1), (1001, 2), (29_999, 30)] {
            let retry_after = Some(Duration::from_millis(millis));
            let rejection = Rejection { retry_after, ..Rejection::soon("concurrency", Reason::Closed) };
            assert_eq!(rejection.retry_after_seconds(), Some(seconds), "{millis} ms");
        }
    }
}

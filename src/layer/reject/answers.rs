use std::sync::Arc;
use std::time::Duration;

use http::header::WWW_AUTHENTICATE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use super::protocol::Protocol;
use super::{Problems, RateLimitFields, Reason, Rejection, connect, grpc};
use crate::layer::body::RefusalBody;
use crate::limiter::{KeyError, Limit, Origin, Slot};

type RetryAfter = dyn Fn(&Rejection, &Parts) -> Duration + Send + Sync;

/// What the responses of one layer say of its limits.
#[derive(Clone)]
pub(in crate::layer) struct Answers {
    pub(in crate::layer) problems: Problems,
    /// What an id that cannot be used is answered with, instead of 400.
    pub(in crate::layer) challenge: Option<HeaderValue>,
    pub(in crate::layer) retry_after: Option<Arc<RetryAfter>>,
    pub(in crate::layer) fields: Option<RateLimitFields>,
}

impl Answers {
    pub(in crate::layer) fn new(policy: &str) -> Self {
        Self { problems: Problems::new(policy), challenge: None, retry_after: None, fields: None }
    }

    /// The rejection as this layer words it.
    pub(in crate::layer) fn adjust(&self, mut rejection: Rejection, parts: &Parts) -> Rejection {
        let is_callers = matches!(rejection.reason, Reason::Key(error) if error != KeyError::Unusable);
        if self.challenge.is_some() && is_callers {
            rejection.status = StatusCode::UNAUTHORIZED;
        }
        if let (Some(hook), Some(_)) = (&self.retry_after, rejection.retry_after) {
            rejection.retry_after = Some(hook(&rejection, parts).max(Duration::from_secs(1)));
        }
        rejection
    }

    /// In the protocol of the request.
    pub(in crate::layer) fn answer(&self, rejection: &Rejection, parts: &Parts) -> Response<RefusalBody> {
        let mut response = match Protocol::of(parts) {
            Protocol::GrpcWeb(media_type) => grpc::web_answer(rejection, media_type),
            Protocol::Grpc(media_type) => grpc::answer(rejection, media_type),
            Protocol::ConnectStream(media_type) => connect::stream(rejection, media_type),
            Protocol::ConnectUnary => connect::unary(rejection),
            Protocol::Http => self.problems.answer(rejection),
        };
        match response.status() {
            StatusCode::UNAUTHORIZED => self.demand(response.headers_mut()),
            StatusCode::TOO_MANY_REQUESTS => self.none_left(rejection, response.headers_mut()),
            _ => {}
        }
        response
    }

    /// A 401 must name a way in (RFC 9110, 15.5.2).
    fn demand(&self, headers: &mut HeaderMap) {
        if let Some(challenge) = &self.challenge {
            headers.insert(WWW_AUTHENTICATE, challenge.clone());
        }
    }

    fn none_left(&self, rejection: &Rejection, headers: &mut HeaderMap) {
        if let (Some(fields), Some(limit)) = (self.fields, rejection.limit) {
            fields.append(headers, rejection.policy, limit, 0);
        }
    }

    /// Adds the RateLimit fields to what the inner service has answered. Not to a 400 or 401: who has
    /// not shown that he is the project learns nothing of it.
    pub(in crate::layer) fn admitted<B>(&self, policy: &str, slot: &Slot, response: &mut Response<B>) {
        let Some(fields) = self.fields else { return };
        let counted = matches!(slot.origin(), Origin::Store | Origin::Local);
        let (true, Limit::Max(limit)) = (counted, slot.limit()) else { return };
        if !matches!(response.status(), StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED) {
            fields.append(response.headers_mut(), policy, limit, limit.saturating_sub(slot.active()));
        }
    }
}

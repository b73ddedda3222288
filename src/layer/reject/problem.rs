//! The answer as a problem document (RFC 9457).

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response};

use super::{NEVER_ADMITTED, NO_STORE, Reason, Rejection};
use crate::layer::body::RefusalBody;

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// The problem documents of one layer. The one that matters under load is made once.
#[derive(Clone)]
pub(in crate::layer) struct Problems {
    saturated: Bytes,
}

impl Problems {
    pub(in crate::layer) fn new(policy: &str) -> Self {
        Self::with_type(QUOTA_EXCEEDED, policy)
    }

    /// `kind` and `policy` are printable ASCII without quotes and backslashes, so that nothing has
    /// to be escaped.
    pub(in crate::layer) fn with_type(kind: &str, policy: &str) -> Self {
        let saturated = format!(
            r#"{{"type":"{kind}","title":"Too many concurrent requests","status":429,"violated-policies":["{policy}"]}}"#
        );
        Self { saturated: saturated.into() }
    }

    pub(in crate::layer) fn answer(&self, rejection: &Rejection) -> Response<RefusalBody> {
        let mut response = Response::new(RefusalBody::whole(self.document(rejection)));
        *response.status_mut() = rejection.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, PROBLEM_JSON);
        headers.insert(CACHE_CONTROL, NO_STORE);
        if let Some(after) = rejection.retry_after_seconds() {
            headers.insert(RETRY_AFTER, HeaderValue::from(after));
        }
        response
    }

    fn document(&self, rejection: &Rejection) -> Bytes {
        match rejection.reason() {
            Reason::Saturated => self.saturated.clone(),
            Reason::Unavailable | Reason::Closed | Reason::Bulkhead => without_detail(rejection),
            Reason::Weight => with_detail(rejection, NEVER_ADMITTED),
            Reason::Key(error) => with_detail(rejection, &error.to_string()),
        }
    }
}

fn without_detail(rejection: &Rejection) -> Bytes {
    let status = rejection.status();
    let title = status.canonical_reason().unwrap_or_default();
    format!(r#"{{"type":"about:blank","title":"{title}","status":{}}}"#, status.as_u16()).into()
}

/// `detail` is a text of our own: nothing in it has to be escaped.
fn with_detail(rejection: &Rejection, detail: &str) -> Bytes {
    let status = rejection.status();
    let title = status.canonical_reason().unwrap_or_default();
    let status = status.as_u16();
    format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}"}}"#).into()
}

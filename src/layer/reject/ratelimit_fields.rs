//! `RateLimit-Policy` and `RateLimit`: what a project may have in flight, and what is left of it.

use http::{HeaderMap, HeaderName, HeaderValue};
use sfv::{KeyRef, ListSerializer, StringRef, key_ref, string_ref};

/// Which revision of the RateLimit header fields responses carry; see
/// [`rate_limit_fields`](crate::ConcurrencyLimitLayer::rate_limit_fields).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RateLimitFields {
    /// As in draft-ietf-httpapi-ratelimit-headers-11:
    ///
    /// ```text
    /// RateLimit-Policy: "concurrency";q=8;qu="concurrent-requests"
    /// RateLimit: "concurrency";r=5
    /// ```
    ///
    /// The quota `q` is the limit, and `r` what was left of it when the request was decided. There is
    /// no window `w` and no reset `t`: a slot comes free when a request ends, and not by the clock.
    DraftIetf11,
}

/// What a revision calls things.
struct Names {
    policy_field: HeaderName,
    state_field: HeaderName,
    quota: &'static KeyRef,
    unit: &'static KeyRef,
    concurrent_requests: &'static StringRef,
    remaining: &'static KeyRef,
}

static DRAFT_IETF_11: Names = Names {
    policy_field: HeaderName::from_static("ratelimit-policy"),
    state_field: HeaderName::from_static("ratelimit"),
    quota: key_ref("q"),
    unit: key_ref("qu"),
    concurrent_requests: string_ref("concurrent-requests"),
    remaining: key_ref("r"),
};

impl RateLimitFields {
    fn names(self) -> &'static Names {
        match self {
            Self::DraftIetf11 => &DRAFT_IETF_11,
        }
    }

    /// Adds a member to each list. Both are structured fields (RFC 9651), which may have several lines:
    /// those of others stay.
    pub(super) fn append(self, headers: &mut HeaderMap, policy: &str, limit: u32, remaining: u32) {
        let names = self.names();
        if let Some(value) = names.policy(policy, limit) {
            headers.append(names.policy_field.clone(), value);
        }
        if let Some(value) = names.state(policy, remaining) {
            headers.append(names.state_field.clone(), value);
        }
    }
}

/// `None` for a policy that a structured field cannot hold, which a limiter's name never is.
impl Names {
    fn policy(&self, policy: &str, limit: u32) -> Option<HeaderValue> {
        let mut list = ListSerializer::new();
        let _ = list
            .bare_item(StringRef::from_str(policy).ok()?)
            .parameter(self.quota, limit)
            .parameter(self.unit, self.concurrent_requests);
        HeaderValue::try_from(list.finish()?).ok()
    }

    fn state(&self, policy: &str, remaining: u32) -> Option<HeaderValue> {
        let mut list = ListSerializer::new();
        let _ = list.bare_item(StringRef::from_str(policy).ok()?).parameter(self.remaining, remaining);
        HeaderValue::try_from(list.finish()?).ok()
    }
}

//! What gRPC and Connect say of a refusal: a code and a message.

use std::borrow::Cow;

use http::StatusCode;

use super::{Reason, Rejection};

/// The status codes in use here, of the sixteen that gRPC and Connect share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

impl Code {
    /// The code that says what the HTTP status would.
    pub(super) fn of(rejection: &Rejection) -> Self {
        match rejection.status() {
            StatusCode::BAD_REQUEST => Self::InvalidArgument,
            StatusCode::UNAUTHORIZED => Self::Unauthenticated,
            StatusCode::TOO_MANY_REQUESTS => Self::ResourceExhausted,
            StatusCode::INTERNAL_SERVER_ERROR => Self::Internal,
            _ => Self::Unavailable,
        }
    }

    /// As gRPC numbers it (statuscodes.md).
    pub(super) fn number(self) -> u8 {
        self as u8
    }

    /// As Connect spells it (Connect protocol, "Error codes").
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::ResourceExhausted => "resource_exhausted",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::Unauthenticated => "unauthenticated",
        }
    }
}

/// For the caller's eyes: printable ASCII without quotes and backslashes, and nothing of the request's.
pub(super) fn message(rejection: &Rejection) -> Cow<'static, str> {
    Cow::Borrowed(match rejection.reason() {
        Reason::Saturated => "concurrency limit reached",
        Reason::Unavailable => "service unavailable",
        Reason::Closed => "service is shutting down",
        Reason::Bulkhead => "service is at its capacity",
        Reason::Weight => super::NEVER_ADMITTED,
        Reason::Key(error) => return Cow::Owned(error.to_string()),
    })
}

//! The answer in gRPC and gRPC-Web: trailers only.
//!
//! The RPC's outcome stands where gRPC looks for it, in a header block with an empty body and HTTP
//! status 200 (PROTOCOL-HTTP2.md, "Trailers-Only"; PROTOCOL-WEB.md allows the same). A bare 429 would
//! reach the caller as UNAVAILABLE (http-grpc-status-mapping.md). RateLimit fields have no place in it:
//! to gRPC it is one of trailers.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::code::{Code, message};
use super::{NO_STORE, Rejection, retry_info};
use crate::layer::body::RefusalBody;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Unpadded base64, as "Binary-Header" wants it sent.
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// All but printable ASCII, and the percent sign itself ("Percent-Encoded").
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

pub(super) fn answer(rejection: &Rejection, media_type: &'static str) -> Response<RefusalBody> {
    let (code, message) = (Code::of(rejection), message(rejection));
    let mut response = Response::new(RefusalBody::whole(Bytes::new()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(STATUS, HeaderValue::from(u16::from(code.number())));
    if let Ok(value) = HeaderValue::try_from(utf8_percent_encode(&message, ENCODED).to_string()) {
        headers.insert(MESSAGE, value);
    }
    let details = rejection.retry_after_seconds().map(|after| details(code, &message, after));
    if let Some(Ok(value)) = details.map(HeaderValue::try_from) {
        headers.insert(DETAILS, value);
    }
    response
}

/// Unlike gRPC's, these go through browsers and caches that know nothing of it.
pub(super) fn web_answer(rejection: &Rejection, media_type: &'static str) -> Response<RefusalBody> {
    let mut response = answer(rejection, media_type);
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

fn details(code: Code, message: &str, after: u64) -> String {
    STANDARD_NO_PAD.encode(retry_info::status(code.number(), message, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_of_a_reached_limit() {
        let expected = "CAgSGWNvbmN1cnJlbmN5IGxpbWl0IHJlYWNoZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIAQ";
        assert_eq!(details(Code::ResourceExhausted, "concurrency limit reached", 1), expected);
    }

    #[test]
    fn messages_are_percent_encoded() {
        let cases = [("a b~", "a b~"), ("100%", "100%25"), ("a\nb", "a%0Ab"), ("\u{e9}", "%C3%A9")];
        for (message, expected) in cases {
            assert_eq!(utf8_percent_encode(message, ENCODED).to_string(), expected);
        }
    }
}

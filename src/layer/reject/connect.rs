//! The answer in Connect: an error in JSON, whatever codec the request has.
//!
//! A unary one is an HTTP error with that as its body; a stream's is the end-of-stream message, the only
//! one, under HTTP status 200 (Connect protocol, "Unary-Response" and "EndStreamResponse").

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response};

use super::code::{Code, message};
use super::retry_info::{RETRY_INFO, retry_info};
use super::{NO_STORE, Rejection};
use crate::layer::body::RefusalBody;

/// The flag of the envelope that ends a stream.
const END_STREAM: u8 = 0b10;

pub(super) fn unary(rejection: &Rejection) -> Response<RefusalBody> {
    let mut response = written(error(rejection).into(), "application/json");
    *response.status_mut() = rejection.status();
    if let Some(after) = rejection.retry_after_seconds() {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(after));
    }
    response
}

pub(super) fn stream(rejection: &Rejection, media_type: &'static str) -> Response<RefusalBody> {
    let end = format!(r#"{{"error":{}}}"#, error(rejection));
    written(enveloped(END_STREAM, end.as_bytes()), media_type)
}

fn written(body: Bytes, media_type: &'static str) -> Response<RefusalBody> {
    let mut response = Response::new(RefusalBody::whole(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(CACHE_CONTROL, NO_STORE);
    response
}

/// All in it are texts of our own: nothing has to be escaped.
fn error(rejection: &Rejection) -> String {
    let (code, message) = (Code::of(rejection).name(), message(rejection));
    let details = rejection.retry_after_seconds().map(details).unwrap_or_default();
    format!(r#"{{"code":"{code}","message":"{message}"{details}}}"#)
}

fn details(after: u64) -> String {
    let value = STANDARD_NO_PAD.encode(retry_info(after));
    format!(r#","details":[{{"type":"{RETRY_INFO}","value":"{value}"}}]"#)
}

/// A byte of flags, the length in four, and the message ("Enveloped-Message").
fn enveloped(flags: u8, message: &[u8]) -> Bytes {
    let mut envelope = BytesMut::with_capacity(5 + message.len());
    envelope.put_u8(flags);
    envelope.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    envelope.put_slice(message);
    envelope.freeze()
}

//! How bytes of a request become text.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use super::Unhashed;
use crate::limiter::KeyError;

/// UTF-8 without control characters: ids get into names of keys, answers and, by choice, logs.
pub(super) fn visible(bytes: &[u8]) -> Result<&str, KeyError> {
    let text = std::str::from_utf8(bytes).map_err(|_| KeyError::NotText)?;
    if text.chars().any(char::is_control) { Err(KeyError::NotText) } else { Ok(text) }
}

/// What percent-encoded text stands for. A `%` that encodes nothing stands for itself.
pub(super) fn decoded(encoded: &str) -> Result<Unhashed<'_>, KeyError> {
    from_bytes(percent_decode(encoded.as_bytes()).into())
}

pub(super) fn from_bytes(bytes: Cow<'_, [u8]>) -> Result<Unhashed<'_>, KeyError> {
    match bytes {
        Cow::Borrowed(bytes) => Unhashed::new(visible(bytes)?),
        Cow::Owned(bytes) => Unhashed::new(visible(&bytes)?.to_owned()),
    }
}

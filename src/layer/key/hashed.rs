use std::fmt::{self, Write};

use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use sha2::Sha256;

use super::{AsyncKeyExtractor, KeyExtractor, KeyFuture, Unhashed};
use crate::error::ConfigError;
use crate::limiter::{KeyError, ProjectId};

/// How much of the hash makes the id: 128 bits, as 32 digits.
const ID_BYTES: usize = 16;

/// Makes ids by hashing; made by [`hashed`](KeyExtractor::hashed), of extractors that wait too.
pub struct Hashed<E> {
    extractor: E,
    /// Keyed already.
    mac: Hmac<Sha256>,
}

impl<E> Hashed<E> {
    pub(super) fn new(extractor: E, secret: &[u8]) -> Result<Self, ConfigError> {
        if secret.is_empty() {
            return Err(ConfigError::new("hashed", "the secret is empty: hashes could be guessed back"));
        }
        let mac = Hmac::new_from_slice(secret)
            .map_err(|_| ConfigError::new("hashed", "the secret cannot serve as a key"))?;
        Ok(Self { extractor, mac })
    }

    fn id(&self, found: Option<Unhashed<'_>>) -> Result<Option<ProjectId>, KeyError> {
        found.map(|text| ProjectId::new(self.hash(text.as_str()))).transpose()
    }

    fn hash(&self, text: &str) -> String {
        let tag = self.mac.clone().chain_update(text).finalize().into_bytes();
        let mut id = String::with_capacity(2 * ID_BYTES);
        for byte in tag.iter().take(ID_BYTES) {
            // Writing to a `String` does not fail.
            let _ = write!(id, "{byte:02x}");
        }
        id
    }
}

impl<E: KeyExtractor> KeyExtractor for Hashed<E> {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        self.id(self.extractor.extract_unhashed(parts)?)
    }
}

impl<E: AsyncKeyExtractor> AsyncKeyExtractor for Hashed<E> {
    fn extract<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p> {
        Box::pin(async move { self.id(self.extractor.extract_unhashed(parts).await?) })
    }
}

impl<E: fmt::Debug> fmt::Debug for Hashed<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hashed").field(&self.extractor).finish()
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::layer::key::header;

    #[test]
    fn the_id_is_half_of_an_hmac() {
        // RFC 4231, test case 2.
        let key = |_: &Parts| Ok(Some("what do ya want for nothing?"));
        let (parts, ()) = Request::new(()).into_parts();
        let id = Hashed::new(key, b"Jefe").expect("a secret").extract(&parts);
        assert_eq!(
            id.map(|id| id.map(|id| id.to_string())),
            Ok(Some("5bdcc146bf60754e6a042426089575c7".into()))
        );
    }

    #[test]
    fn an_empty_secret_is_refused_and_none_is_shown() {
        let error = header("x-key").hashed("").expect_err("an empty secret");
        assert_eq!(error.field(), "hashed");
        let shown = format!("{:?}", header("x-key").hashed("hunter2").expect("a secret"));
        assert!(shown.starts_with("Hashed(Header") && !shown.contains("hunter2"), "{shown}");
    }
}

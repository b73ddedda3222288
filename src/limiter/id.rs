use std::borrow::{Borrow, Cow};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::KeyError;
use crate::store::{Key, short_hash};

/// The most bytes that a project id may have.
pub(crate) const MAX_ID_BYTES: usize = 128;
/// The most bytes that a prefix may have.
pub(super) const MAX_PREFIX_BYTES: usize = 64;

/// Everything but the plain set `[A-Za-z0-9._~:@-]`, whose ids name their keys byte by byte.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'~').remove(b':').remove(b'@').remove(b'-');

/// Who is limited: a project, tenant, customer or API key, as 1 to 128 bytes of text.
///
/// A cheap clone that dereferences to `str`. It has no `Display`, and `Debug` shows a short hash
/// only, so that ids do not get into logs by accident.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProjectId(Arc<str>);

impl ProjectId {
    /// The id with this text.
    ///
    /// # Errors
    ///
    /// [`KeyError::Empty`] and [`KeyError::TooLong`].
    pub fn new(text: impl AsRef<str>) -> Result<Self, KeyError> {
        check(text.as_ref()).map(|text| Self(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for ProjectId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for ProjectId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for ProjectId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for ProjectId {
    type Error = KeyError;

    fn try_from(text: &str) -> Result<Self, KeyError> {
        Self::new(text)
    }
}

impl fmt::Debug for ProjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProjectId(#{:08x})", short_hash(&self.0))
    }
}

pub(crate) fn check(id: &str) -> Result<&str, KeyError> {
    match id.len() {
        0 => Err(KeyError::Empty),
        1..=MAX_ID_BYTES => Ok(id),
        _ => Err(KeyError::TooLong),
    }
}

/// The key of `id` under `prefix`: no two ids share one, and none holds a brace of its own.
pub(crate) fn key(prefix: &str, id: &str) -> Result<Key, KeyError> {
    match Cow::from(utf8_percent_encode(check(id)?, ENCODED)) {
        Cow::Borrowed(plain) => Ok(plain_key(prefix, plain)),
        Cow::Owned(encoded) => Ok(Key::new(prefix.to_owned() + &encoded)),
    }
}

/// Put together on the stack: most ids are plain, and their keys cost one allocation.
fn plain_key(prefix: &str, id: &str) -> Key {
    let mut name = [0; MAX_PREFIX_BYTES + MAX_ID_BYTES];
    let (length, whole) = (prefix.len(), prefix.len() + id.len());
    name[..length].copy_from_slice(prefix.as_bytes());
    name[length..whole].copy_from_slice(id.as_bytes());
    // Two texts in a row are a text.
    Key::new(std::str::from_utf8(&name[..whole]).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(id: &str) -> String {
        key("sem:", id).expect("a valid id").as_str().to_owned()
    }

    #[test]
    fn plain_ids_keep_their_bytes() {
        let plain = "AZaz09._~:@-";
        assert_eq!(named(plain), format!("sem:{plain}"));
        assert_eq!(named(&"x".repeat(128)).len(), 132);
        let longest = key(&"p".repeat(MAX_PREFIX_BYTES), &"x".repeat(MAX_ID_BYTES)).expect("a valid id");
        assert_eq!(longest.as_str().len(), MAX_PREFIX_BYTES + MAX_ID_BYTES);
        for byte in 0..=127u8 {
            let id = char::from(byte).to_string();
            let is_plain = byte.is_ascii_alphanumeric() || b"._~:@-".contains(&byte);
            assert_eq!(named(&id) == format!("sem:{id}"), is_plain, "{id:?}");
        }
    }

    #[test]
    fn other_ids_are_encoded_without_meeting_another() {
        assert_eq!(named("a{b}"), "sem:a%7Bb%7D");
        assert_eq!(named("a%7Bb%7D"), "sem:a%257Bb%257D");
        assert_eq!(named("ä \r\n"), "sem:%C3%A4%20%0D%0A");
    }

    #[test]
    fn lengths_are_checked() {
        assert_eq!(ProjectId::new(""), Err(KeyError::Empty));
        assert_eq!(key("", &"x".repeat(129)), Err(KeyError::TooLong));
    }

    #[test]
    fn debug_shows_no_id() {
        let id = ProjectId::new("secret-tenant").expect("a valid id");
        assert!(!format!("{id:?}").contains("secret"));
        assert!(!format!("{:?}", key("sem:", &id)).contains("secret"));
    }
}

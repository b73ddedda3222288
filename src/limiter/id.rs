use std::borrow::{Borrow, Cow};
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use arrayvec::ArrayString;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::KeyError;
use crate::store::{Key, short_hash};

/// The most bytes that a project id may have.
pub(crate) const MAX_ID_BYTES: usize = 128;
/// The most bytes of an id that is held in place, without an allocation: a UUID fits.
const SHORT_ID_BYTES: usize = 36;
/// The most bytes that a prefix may have.
pub(super) const MAX_PREFIX_BYTES: usize = 64;

/// Everything but the plain set `[A-Za-z0-9._~:@-]`, whose ids name their keys byte by byte.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'~').remove(b':').remove(b'@').remove(b'-');

/// Who is limited: a project, tenant, customer or API key, as 1 to 128 bytes of text.
///
/// A cheap clone that dereferences to `str`. It has no `Display`, and `Debug` shows a short hash
/// only, so that ids do not get into logs by accident.
#[derive(Clone)]
pub struct ProjectId(Text);

#[derive(Clone)]
enum Text {
    Short(ArrayString<SHORT_ID_BYTES>),
    Long(Arc<str>),
}

impl ProjectId {
    /// The id with this text.
    ///
    /// # Errors
    ///
    /// [`KeyError::Empty`] and [`KeyError::TooLong`].
    pub fn new(text: impl AsRef<str>) -> Result<Self, KeyError> {
        check(text.as_ref())
            .map(|text| Self(ArrayString::from(text).map_or_else(|_| Text::Long(text.into()), Text::Short)))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Text::Short(text) => text,
            Text::Long(text) => text,
        }
    }
}

// By the text alone, as `Borrow<str>` asks.
impl PartialEq for ProjectId {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for ProjectId {}

impl Hash for ProjectId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl PartialOrd for ProjectId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ProjectId {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Deref for ProjectId {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<str> for ProjectId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for ProjectId {
    fn borrow(&self) -> &str {
        self.as_str()
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
        write!(f, "ProjectId(#{:08x})", short_hash(self.as_str()))
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
    let mut name = ArrayString::<{ MAX_PREFIX_BYTES + MAX_ID_BYTES }>::new();
    // Both were measured: there is room.
    name.push_str(prefix);
    name.push_str(id);
    Key::new(name.as_str())
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
    fn an_id_is_its_text_whatever_its_length() {
        use std::collections::{BTreeSet, HashSet};
        let texts: Vec<String> = (1..=MAX_ID_BYTES).map(|length| "x".repeat(length)).collect();
        let ids: Vec<ProjectId> =
            texts.iter().map(|text| ProjectId::new(text).expect("a valid id")).collect();
        let (hashed, ordered): (HashSet<_>, BTreeSet<_>) =
            (ids.iter().cloned().collect(), ids.iter().cloned().collect());
        for (text, id) in texts.iter().zip(&ids) {
            assert_eq!(id.as_str(), text);
            assert_eq!(AsRef::<str>::as_ref(id), text);
            assert_eq!(hashed.get(text.as_str()), Some(id));
        }
        assert!(ordered.iter().map(ProjectId::as_str).eq(&texts));
        assert!(ids.is_sorted(), "the longer one comes later");
    }

    #[test]
    fn debug_shows_no_id() {
        let id = ProjectId::new("secret-tenant").expect("a valid id");
        assert_eq!(format!("{id:?}"), format!("ProjectId(#{:08x})", short_hash("secret-tenant")));
        assert!(!format!("{:?}", key("sem:", &id)).contains("secret"));
    }
}

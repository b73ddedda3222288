use std::borrow::Cow;
use std::fmt;

use crate::limiter::{KeyError, ProjectId};

/// The most bytes that may stand below a hash.
const MAX_BYTES: usize = 8 * 1024;

/// Text that [`hashed`](super::KeyExtractor::hashed) makes an id of: a secret, or too long to be an
/// id itself.
///
/// 1 to 8192 bytes. It has no `Display`, and `Debug` shows nothing of it.
///
/// ```
/// use tower_slots::key::Unhashed;
///
/// # fn run() -> Result<(), tower_slots::KeyError> {
/// let text = Unhashed::new("sk-live-51Hx")?;
/// assert_eq!(format!("{text:?}"), "Unhashed(12 bytes)");
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Unhashed<'p>(Cow<'p, str>);

impl<'p> Unhashed<'p> {
    /// This text.
    ///
    /// # Errors
    ///
    /// [`KeyError::Empty`] and [`KeyError::TooLong`].
    pub fn new(text: impl Into<Cow<'p, str>>) -> Result<Self, KeyError> {
        let text = text.into();
        match text.len() {
            0 => Err(KeyError::Empty),
            1..=MAX_BYTES => Ok(Self(text)),
            _ => Err(KeyError::TooLong),
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// An id with this text, as it is.
    ///
    /// # Errors
    ///
    /// [`KeyError::TooLong`] above 128 bytes.
    pub fn into_id(self) -> Result<ProjectId, KeyError> {
        ProjectId::new(self.0)
    }
}

impl From<ProjectId> for Unhashed<'_> {
    fn from(id: ProjectId) -> Self {
        Self(Cow::Owned(id.as_str().to_owned()))
    }
}

impl fmt::Debug for Unhashed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Unhashed({} bytes)", self.0.len())
    }
}

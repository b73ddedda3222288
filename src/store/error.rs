use std::borrow::Cow;
use std::fmt;

pub use crate::error::StoreErrorKind;

/// A store could not answer. It says nothing about whether a key is at its limit.
#[derive(Debug, Clone)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: Cow<'static, str>,
}

impl StoreError {
    /// An error of this kind; `message` is lower-case and says what to do where that is known.
    pub fn new(kind: StoreErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into() }
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot store failed ({}): {}", self.kind.label(), self.message)
    }
}

impl std::error::Error for StoreError {}

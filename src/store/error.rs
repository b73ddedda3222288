use std::borrow::Cow;
use std::fmt;

use crate::metrics::closed_set;

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

closed_set! {
    /// What went wrong in a store.
    #[non_exhaustive]
    pub enum StoreErrorKind {
        /// No answer within the time-out.
        Timeout = "timeout",
        /// The connection could not be made, or broke.
        Io = "io",
        /// The server does not know the script, even after it was sent whole.
        NoScript = "noscript",
        /// The server is a replica.
        ReadOnly = "readonly",
        /// The server has reached `maxmemory`.
        Oom = "oom",
        /// The login is missing, wrong, or lacks a right.
        NoPerm = "noperm",
        /// The server is loading its data, or busy with a script, or has lost its master.
        Loading = "loading",
        /// The cluster is down, or the key has moved.
        Cluster = "cluster",
        /// Something else is stored under the key.
        WrongType = "wrongtype",
        /// Anything else: the message says what.
        Other = "other",
    }
}

//! What errors of all modules are made of.

use std::fmt;

use crate::labels::closed_set;

/// A setting that cannot work, found while a limiter or a store is built.
///
/// It names the setting and the problem, and holds no text of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigError {
    field: &'static str,
    problem: &'static str,
}

impl ConfigError {
    pub(crate) const fn new(field: &'static str, problem: &'static str) -> Self {
        Self { field, problem }
    }

    /// The name of the setting, as the builder's method has it (`"lease"`).
    #[must_use]
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// What is wrong with it and what would be right.
    #[must_use]
    pub fn problem(&self) -> &'static str {
        self.problem
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for ConfigError {}

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

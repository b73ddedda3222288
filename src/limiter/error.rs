use std::fmt;
use std::time::Duration;

use crate::store::StoreError;

/// Why no slot was acquired.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AcquireError {
    /// The id has as many slots in use as its limit allows.
    Saturated {
        /// Slots in use, over the whole fleet.
        active: u32,
        /// The limit that was applied.
        limit: u32,
        /// When a slot is likely to be free: an estimate from the hold times seen so far, at least
        /// a second.
        retry_after: Duration,
    },
    /// The store could not answer, and the limiter refuses in an outage.
    Unavailable(StoreError),
    /// The weight can never be admitted: zero, above the limiter's bound, or above the id's limit.
    Weight {
        /// The weight that was asked for.
        weight: u32,
        /// The most that could be.
        most: u32,
    },
    /// The id is unusable.
    Key(KeyError),
    /// The limiter is shutting down.
    Closed,
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Saturated { active, limit, .. } => {
                write!(f, "concurrency limit reached: {active} of {limit} slots in use")
            }
            Self::Unavailable(_) => {
                f.write_str("the slot store is unavailable and the limiter refuses in an outage")
            }
            Self::Weight { weight: 0, .. } => f.write_str("weight 0 is not a weight: ask for at least 1"),
            Self::Weight { weight, most } => {
                write!(f, "weight {weight} can never be admitted: at most {most} can")
            }
            Self::Key(_) => f.write_str("the project id is unusable"),
            Self::Closed => f.write_str("the limiter is shutting down"),
        }
    }
}

impl std::error::Error for AcquireError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unavailable(error) => Some(error),
            Self::Key(error) => Some(error),
            _ => None,
        }
    }
}

impl From<KeyError> for AcquireError {
    fn from(error: KeyError) -> Self {
        Self::Key(error)
    }
}

/// Why a project id is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// The request carries no id.
    Missing,
    /// The id is empty.
    Empty,
    /// The id has more than 128 bytes, or more than 8 KiB below a hash.
    TooLong,
    /// The request carries more than one id.
    Duplicate,
    /// The id is not visible text.
    NotText,
    /// What holds the id cannot be read: a host or an address that is none.
    Malformed,
    /// The service looks for the id where none can come from: its own configuration is at fault.
    Unusable,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "no project id: send one",
            Self::Empty => "empty project id: send 1 to 128 bytes",
            Self::TooLong => "project id too long: send a shorter one",
            Self::Duplicate => "more than one project id: send exactly one",
            Self::NotText => "project id is not visible text: send printable ascii or utf-8",
            Self::Malformed => "the host or address that tells the project cannot be read",
            Self::Unusable => "the service cannot read project ids: its configuration is at fault",
        })
    }
}

impl std::error::Error for KeyError {}

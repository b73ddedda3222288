use std::error::Error;
use std::fmt;

use super::permit::PermitId;

/// Why no permit was acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AcquireError {
    /// The weight is not positive.
    #[non_exhaustive]
    InvalidWeight {
        /// The weight that was asked for.
        weight: i64,
    },
    /// The weight is above the capacity: it could never be admitted.
    #[non_exhaustive]
    Oversize {
        /// The weight that was asked for.
        weight: i64,
        /// The capacity of the semaphore.
        capacity: i64,
    },
    /// The weight could not be admitted at once, and the queue is full.
    #[non_exhaustive]
    QueueFull {
        /// How many callers may wait.
        limit: usize,
    },
    /// The deadline passed first.
    Deadline,
    /// The semaphore is closed.
    Closed,
}

impl AcquireError {
    /// What kind of failure it is, without its details.
    #[must_use]
    pub fn kind(&self) -> AcquireErrorKind {
        match self {
            Self::InvalidWeight { .. } => AcquireErrorKind::InvalidWeight,
            Self::Oversize { .. } => AcquireErrorKind::Oversize,
            Self::QueueFull { .. } => AcquireErrorKind::QueueFull,
            Self::Deadline => AcquireErrorKind::Deadline,
            Self::Closed => AcquireErrorKind::Closed,
        }
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidWeight { weight } => {
                write!(f, "weight {weight} is not a weight: ask for at least 1")
            }
            Self::Oversize { weight, capacity } => {
                write!(f, "weight {weight} can never be admitted: the capacity is {capacity}")
            }
            Self::QueueFull { limit: 0 } => f.write_str("no capacity is free, and nobody may wait for it"),
            Self::QueueFull { limit } => write!(f, "the queue is full: {limit} callers may wait"),
            Self::Deadline => f.write_str("the deadline passed before the permit could be acquired"),
            Self::Closed => f.write_str("the semaphore is closed"),
        }
    }
}

impl Error for AcquireError {}

/// The kinds of [`AcquireError`], for labels and comparisons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AcquireErrorKind {
    /// The weight is not positive.
    InvalidWeight,
    /// The weight is above the capacity.
    Oversize,
    /// The queue is full.
    QueueFull,
    /// The deadline passed first.
    Deadline,
    /// The semaphore is closed.
    Closed,
}

impl AcquireErrorKind {
    /// A stable name: `"invalid_weight"`, `"oversize"`, `"queue_full"`, `"deadline"` or `"closed"`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::InvalidWeight => "invalid_weight",
            Self::Oversize => "oversize",
            Self::QueueFull => "queue_full",
            Self::Deadline => "deadline",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for AcquireErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A setting that cannot work, found by [`SemaphoreBuilder::build`](super::SemaphoreBuilder::build).
///
/// It names the setting and the problem, and holds nothing of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConfigError {
    field: ConfigField,
    problem: ConfigProblem,
}

impl ConfigError {
    pub(super) fn new(field: ConfigField, problem: ConfigProblem) -> Self {
        Self { field, problem }
    }

    /// Which setting.
    #[must_use]
    pub fn field(&self) -> ConfigField {
        self.field
    }

    /// What is wrong with it.
    #[must_use]
    pub fn problem(&self) -> ConfigProblem {
        self.problem
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl Error for ConfigError {}

/// The settings of a semaphore that can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigField {
    /// The capacity.
    Capacity,
    /// How many callers may wait.
    MaxWaiters,
    /// How many events are kept.
    Events,
}

impl ConfigField {
    /// A stable name: `"capacity"`, `"max waiters"` or `"events"`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::MaxWaiters => "max waiters",
            Self::Events => "events",
        }
    }
}

impl fmt::Display for ConfigField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What can be wrong with a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigProblem {
    /// It is zero or negative.
    MustBePositive,
    /// It is above the most that is supported.
    ExceedsBound,
}

impl ConfigProblem {
    /// A stable description: `"must be positive"` or `"exceeds the supported bound"`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::MustBePositive => "must be positive",
            Self::ExceedsBound => "exceeds the supported bound",
        }
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A [`SharedPermit`](super::SharedPermit) that had been released before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DuplicateRelease {
    /// The permit.
    pub id: PermitId,
}

impl fmt::Display for DuplicateRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "permit {} was released before", self.id)
    }
}

impl Error for DuplicateRelease {}

/// The deadline of a [`wait_idle_deadline`](super::Semaphore::wait_idle_deadline) passed while
/// weight was still held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DeadlineExceeded;

impl fmt::Display for DeadlineExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the deadline passed while permits were held")
    }
}

impl Error for DeadlineExceeded {}

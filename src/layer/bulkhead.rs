use std::pin::Pin;
use std::time::Duration;

use crate::semaphore::{AcquireDeadline, AcquireError, Permit, Semaphore};

/// Where a request stands before the process's own cap on what it runs at once.
pub(super) enum Entry {
    In(Permit),
    Refused(AcquireError),
    Waiting(Pin<Box<AcquireDeadline<'static>>>),
}

/// Enters, or queues for up to `wait`.
pub(super) fn enter(semaphore: &Semaphore, weight: u32, wait: Option<Duration>) -> Entry {
    let weight = i64::from(weight);
    if let Some(wait) = wait {
        return Entry::Waiting(Box::pin(semaphore.acquire_timeout(weight, wait).into_owned()));
    }
    match semaphore.try_acquire(weight) {
        Ok(Some(permit)) => Entry::In(permit),
        Ok(None) => Entry::Refused(AcquireError::QueueFull { limit: 0 }),
        Err(error) => Entry::Refused(error),
    }
}

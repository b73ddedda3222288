/// The state of a [`Semaphore`](super::Semaphore) at one instant.
///
/// The numbers belong together: `available` is `capacity - acquired`, and every attempt that has
/// begun is in exactly one of `admissions`, `rejections`, `cancellations` and `waiters`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Snapshot {
    /// The weight that can be held in total.
    pub capacity: i64,
    /// The weight that is held.
    pub acquired: i64,
    /// The weight that is not held. It may be positive while callers wait: the first of them may
    /// want more.
    pub available: i64,
    /// Callers in the queue.
    pub waiters: usize,
    /// Permits handed out: at once, from the queue, and by
    /// [`try_acquire`](super::Semaphore::try_acquire).
    pub admissions: u64,
    /// Attempts refused: a weight that cannot be admitted, nothing available, a full queue, closed.
    pub rejections: u64,
    /// Attempts given up by their callers: dropped while queued, or past their deadline.
    pub cancellations: u64,
    /// Whether the semaphore was closed.
    pub closed: bool,
}

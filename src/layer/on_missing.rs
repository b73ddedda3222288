use crate::limiter::ProjectId;

/// What becomes of requests that carry no project id, or an empty one.
///
/// An id that is there and wrong (too long, given twice, not text) is refused whatever this says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissing {
    /// They are refused with 400, or 401 with a
    /// [`challenge`](crate::ConcurrencyLimitLayer::challenge).
    #[default]
    Refuse,
    /// They pass without a slot.
    Skip,
    /// They share the slots of this id.
    ///
    /// It is an id like any other: a client that sends it takes from the same slots. Choose one that
    /// no project has.
    ///
    /// ```
    /// use tower_slots::{ConcurrencyLimitLayer, OnMissing, ProjectId};
    ///
    /// # fn run() -> Result<(), tower_slots::KeyError> {
    /// let layer = ConcurrencyLimitLayer::in_memory(10)
    ///     .on_missing(OnMissing::Shared(ProjectId::new("anonymous")?));
    /// # Ok(()) }
    /// # run().unwrap();
    /// ```
    Shared(ProjectId),
}

/// Until when a request holds its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Hold {
    /// Until the response body has ended or was dropped: a stream holds its slot for as long as it
    /// streams.
    #[default]
    Body,
    /// Until the head of the response is ready, as with tower's own `ConcurrencyLimit`: streams are
    /// not counted while they stream.
    Head,
}

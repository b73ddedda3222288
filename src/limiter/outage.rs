use crate::store::MemoryStore;

/// What becomes of requests while the store cannot answer.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum OnOutage {
    /// Let them pass, unlimited: an outage of the store is none of the service. Those that still run
    /// when the store answers again are counted from then on, also over the limit.
    Admit,
    /// Refuse them with [`AcquireError::Unavailable`](crate::AcquireError::Unavailable).
    Refuse,
    /// Limit them within this process: each id to `ceil(limit × share)`.
    ///
    /// With `share` one over the number of processes, the fleet as a whole stays near the limit. What
    /// still runs when the store answers again counts there from then on.
    Local {
        /// This process's share of each limit, from 0 to 1.
        share: f64,
    },
}

/// The outage policy at work.
pub(super) enum Outage {
    Admit,
    Refuse,
    Local { share: f64, slots: MemoryStore },
}

impl From<OnOutage> for Outage {
    fn from(policy: OnOutage) -> Self {
        match policy {
            OnOutage::Admit => Self::Admit,
            OnOutage::Refuse => Self::Refuse,
            OnOutage::Local { share } => Self::Local { share, slots: MemoryStore::new() },
        }
    }
}

/// `ceil(limit × share)`, for a share from 0 to 1.
pub(super) fn local_limit(limit: u32, share: f64) -> u32 {
    (f64::from(limit) * share).ceil() as u32
}

#[cfg(test)]
mod tests {
    use super::local_limit;

    #[test]
    fn a_share_is_rounded_up() {
        for (limit, share, local) in
            [(10, 0.25, 3), (10, 0.0, 0), (10, 1.0, 10), (1, 0.01, 1), (0, 0.5, 0), (u32::MAX, 1.0, u32::MAX)]
        {
            assert_eq!(local_limit(limit, share), local, "{limit} × {share}");
        }
    }
}

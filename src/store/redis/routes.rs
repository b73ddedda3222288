//! Which lane leads to the server that a key is on.

use crate::store::Key;

/// Which lane leads to the server that a key is on: the first, but on a cluster.
#[derive(Default)]
pub(super) struct Routes {
    /// By hash slot; empty where one server has all, or nobody was asked yet.
    #[cfg(feature = "redis-cluster")]
    pub(super) lanes: Vec<usize>,
}

#[cfg(not(feature = "redis-cluster"))]
impl Routes {
    pub(super) fn lane_of(&self, _key: &Key) -> usize {
        0
    }

    pub(super) fn part(&self) -> bool {
        false
    }
}

#[cfg(feature = "redis-cluster")]
impl Routes {
    pub(super) fn lane_of(&self, key: &Key) -> usize {
        if self.lanes.is_empty() { 0 } else { self.lanes[super::cluster::hash_slot(key.as_str())] }
    }

    /// Whether keys go to several servers.
    pub(super) fn part(&self) -> bool {
        !self.lanes.is_empty()
    }

    pub(super) fn lead_to(&self, lane: usize) -> bool {
        if self.lanes.is_empty() { lane == 0 } else { self.lanes.contains(&lane) }
    }
}

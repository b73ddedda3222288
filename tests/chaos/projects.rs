//! The ids, their limits, and what is asked of them.

use std::time::Duration;

use crate::record::{Nanos, SECOND};
use tower_slots::{Limiter, OnOutage, RedisStore};

pub(crate) struct Project {
    pub(crate) id: &'static str,
    pub(crate) limit: u32,
    /// The largest weight that is asked for.
    pub(crate) heaviest: u32,
    /// In seconds; of several each worker takes one.
    leases: &'static [u64],
}

pub(crate) const PROJECTS: [Project; 12] = [
    Project { id: "one", limit: 1, heaviest: 1, leases: &[1] },
    Project { id: "one-long", limit: 1, heaviest: 1, leases: &[6] },
    Project { id: "two", limit: 2, heaviest: 1, leases: &[2] },
    Project { id: "three", limit: 3, heaviest: 2, leases: &[3] },
    Project { id: "four-mixed", limit: 4, heaviest: 3, leases: &[1, 6] },
    Project { id: "five", limit: 5, heaviest: 2, leases: &[2] },
    Project { id: "six", limit: 6, heaviest: 6, leases: &[4] },
    Project { id: "eight-mixed", limit: 8, heaviest: 3, leases: &[3, 1] },
    Project { id: "ten", limit: 10, heaviest: 1, leases: &[6] },
    Project { id: "twelve-mixed", limit: 12, heaviest: 4, leases: &[2, 5] },
    Project { id: "twenty", limit: 20, heaviest: 8, leases: &[4] },
    Project { id: "thirty", limit: 30, heaviest: 3, leases: &[3] },
];

/// The longest of all.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(6);
/// The shortest of all: a tick is a twelfth of it.
pub(crate) const SHORTEST_LEASE: Duration = Duration::from_secs(1);
/// How long a call may take: longer than by default, for a busy machine is no outage.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_millis(500);

impl Project {
    pub(crate) fn key(&self) -> String {
        format!("sem:{}", self.id)
    }

    pub(crate) fn lease(&self, worker: usize) -> Duration {
        Duration::from_secs(self.leases[worker % self.leases.len()])
    }

    pub(crate) fn longest_lease(&self) -> Nanos {
        self.leases.iter().max().expect("each has one") * SECOND
    }

    pub(crate) fn limiter(&self, store: &RedisStore, worker: usize, policy: OnOutage) -> Limiter {
        Limiter::builder(store.clone())
            .limit(self.limit)
            .lease(self.lease(worker))
            .store_timeout(STORE_TIMEOUT)
            .on_outage(policy)
            .build()
            .expect("settings that work")
    }
}

//! Where slots live: the mechanism below a [`Limiter`](crate::Limiter).
//!
//! A [`SlotStore`] takes, gives back, renews, counts and drains slots, each in one atomic step, and
//! decides nothing: limits, outage policy and the guards that callers hold are the limiter's.
//! [`MemoryStore`] keeps the slots of one process, `RedisStore` those of a whole fleet.

mod error;
mod key;
mod memory;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub mod redis;
mod reply;
mod slot_id;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

pub use self::error::{StoreError, StoreErrorKind};
pub use self::key::Key;
pub(crate) use self::key::{KeyMap, short_hash};
pub use self::memory::MemoryStore;
pub use self::reply::Reply;
pub use self::slot_id::SlotId;
pub(crate) use self::slot_id::SlotMap;
use crate::metrics::Meters;

/// The most slots that one request may take: its weight's upper bound.
pub const MAX_WEIGHT: u32 = 1024;

/// Takes and gives back slots, atomically, for any number of keys.
///
/// All of it must hold for every implementation:
///
/// * [`acquire`](Self::acquire) takes all the slots of a claim or none, and grants a slot id that
///   is held already without counting it against itself, so that a repeated call is harmless.
/// * A slot stays taken until it is released, drained, or its lease has run out without a renewal.
///   Renewing is the store's own work: nobody calls it.
/// * A call answers within [`Terms::timeout`]. Whatever the caller does meanwhile, giving up
///   included, a later [`release`](Self::release) of the claim's slot undoes it.
/// * A store that cannot answer returns a [`StoreError`], never a refusal.
pub trait SlotStore: Send + Sync + 'static {
    /// Takes `claim.weight` slots of `claim.key` if no more than `claim.limit` are then in use.
    ///
    /// The claim is the store's with the call, whether or not what it returns is ever polled.
    fn acquire(&self, claim: Claim) -> Reply<Result<Grant, StoreError>>;

    /// Counts the slots of a claim that was admitted while the store could not answer: as soon as it
    /// can, whatever the limit, if they are not released before. From then on they are renewed, lost
    /// and released as any other.
    ///
    /// Called in an outage, for every request that is admitted: it must be cheap, and must not block.
    /// By default nothing is counted, as for a store that never fails.
    fn adopt(&self, claim: Claim) {
        drop(claim);
    }

    /// Gives the slots of one claim back, in the background.
    ///
    /// Called from `Drop`: it must not block, and must work outside an async runtime. A slot that
    /// is not held, or not any more, is no error.
    fn release(&self, key: &Key, slot: SlotId);

    /// Like [`release`](Self::release), and tells when the store has confirmed it.
    ///
    /// # Errors
    ///
    /// The slots could not be given back before their lease ran out.
    fn release_confirmed(&self, key: &Key, slot: SlotId) -> Reply<Result<(), StoreError>>;

    /// How many slots of `key` are taken now. It only reads.
    fn count(&self, key: &Key, terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>>;

    /// Drops every slot of `key`, whoever holds it, tells those holders that it can reach, and
    /// returns how many slots there were. No renewal brings them back.
    fn drain(&self, key: &Key, terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>>;

    /// Waits until every release that was asked for so far is confirmed or has lapsed.
    fn flush(&self) -> Reply<()>;
}

/// One request's claim to slots: what [`SlotStore::acquire`] decides on.
#[derive(Clone)]
#[non_exhaustive]
pub struct Claim {
    /// Whose slots.
    pub key: Key,
    /// The id under which they are taken and later given back.
    pub slot: SlotId,
    /// How many slots, all or none: from 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// The most slots of the key that may be taken afterwards.
    pub limit: u32,
    /// The limiter's terms: lease, time-outs, names.
    pub terms: Arc<Terms>,
    /// Who is to be told when the slot is lost.
    pub holder: Weak<dyn Holder>,
}

impl Claim {
    /// A claim that nobody watches.
    #[must_use]
    pub fn new(key: Key, slot: SlotId, weight: u32, limit: u32, terms: &Arc<Terms>) -> Self {
        let terms = Arc::clone(terms);
        let holder: Weak<dyn Holder> = Weak::<Nobody>::new();
        Self { key, slot, weight, limit, terms, holder }
    }

    /// The same claim; `holder` is told when its slot is lost.
    #[must_use]
    pub fn watched_by(mut self, holder: Weak<dyn Holder>) -> Self {
        self.holder = holder;
        self
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("key", &self.key)
            .field("slot", &self.slot)
            .field("weight", &self.weight)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// The store's answer to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// The slots are taken.
    Granted {
        /// Slots of the key in use, with these.
        active: u32,
    },
    /// They are not: the limit would have been exceeded.
    Refused {
        /// Slots of the key in use, without these.
        active: u32,
    },
}

/// Told when a slot that it holds is gone before it was released.
pub trait Holder: Send + Sync {
    /// The slot is lost. Called at most a few times, from any task; must not block.
    fn lost(&self, why: Lost);

    /// Since when it has the slot, which was claimed then: `max_hold` counts from here. Called under
    /// the store's locks: must not block, nor call the store.
    ///
    /// Another time than that of the claim, which is the default, is for slots that pass from one
    /// request to the next.
    fn since(&self, claimed: Instant) -> Instant {
        claimed
    }
}

/// Why a slot is gone although its holder did not release it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lost {
    /// Somebody drained the key.
    Drained,
    /// The store could not be reached for a whole lease: others may have been admitted in its place.
    Lapsed,
    /// It was held for longer than `max_hold`.
    MaxHold,
}

struct Nobody;

impl Holder for Nobody {
    fn lost(&self, _why: Lost) {}
}

/// What a limiter tells its store about every claim: made once, shared by all its claims.
pub struct Terms {
    pub(crate) policy: &'static str,
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) timeout: Duration,
    pub(crate) meters: Meters,
}

impl Terms {
    /// Terms with this lease and time-out, no `max_hold`, and the policy name `"concurrency"`:
    /// for tests of a store of one's own. A limiter makes its own.
    #[must_use]
    pub fn new(lease: Duration, timeout: Duration) -> Self {
        let policy = "concurrency";
        Self { policy, lease, max_hold: None, timeout, meters: Meters::new(policy) }
    }

    /// The limiter's name.
    #[must_use]
    pub fn policy(&self) -> &'static str {
        self.policy
    }

    /// How long a slot outlives its last renewal.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// After this time a slot is given back although its holder lives, if set.
    #[must_use]
    pub fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }

    /// How long a call to the store may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }
}

impl fmt::Debug for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terms")
            .field("policy", &self.policy)
            .field("lease", &self.lease)
            .field("max_hold", &self.max_hold)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_tell_what_they_were_made_of() {
        let (lease, timeout, max_hold) =
            (Duration::from_secs(9), Duration::from_millis(70), Duration::from_secs(5));
        let mut terms = Terms::new(lease, timeout);
        assert_eq!((terms.policy(), terms.lease(), terms.timeout()), ("concurrency", lease, timeout));
        assert_eq!(terms.max_hold(), None);
        terms.max_hold = Some(max_hold);
        assert_eq!(terms.max_hold(), Some(max_hold));
    }
}

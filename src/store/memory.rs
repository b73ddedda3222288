use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::time::Instant;

use super::{Claim, Grant, Holder, Key, Lost, Reply, SlotId, SlotStore, StoreError, Terms};

/// Slots in the memory of this process.
///
/// The embedded default: for a service of one process, for tests, and as a bulkhead per key. It
/// answers at once, needs no task and no connection, and never fails. Slots have no lease to renew:
/// they die with the process. Clones share their slots.
///
/// ```
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_slots::{Limiter, MemoryStore};
///
/// let limiter = Limiter::builder(MemoryStore::new()).limit(1).build()?;
/// let slot = limiter.try_acquire("acme").await?;
/// assert!(limiter.try_acquire("acme").await.is_err());
/// drop(slot);
/// assert!(limiter.try_acquire("acme").await.is_ok());
/// # Ok(()) }
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    shards: Arc<[Mutex<Shard>; SHARDS]>,
    hasher: RandomState,
}

const SHARDS: usize = 32;

/// The slots of the keys that hash here. Both maps keep their room, so that a key whose slots come
/// and go costs no allocation; an entry leaves with its last slot.
#[derive(Default)]
struct Shard {
    usage: HashMap<Key, Usage>,
    slots: HashMap<SlotId, Taken>,
}

#[derive(Default)]
struct Usage {
    used: u32,
    /// No slot of the key reaches its `max_hold` before this.
    next_end: Option<Instant>,
}

struct Taken {
    key: Key,
    weight: u32,
    /// When `max_hold` is over.
    ends: Option<Instant>,
    holder: Weak<dyn Holder>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self { shards: Arc::new(std::array::from_fn(|_| Mutex::default())), hasher: RandomState::new() }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        let index = self.hasher.hash_one(key) as usize % SHARDS;
        // A panic elsewhere cannot leave a shard half changed: every change is one map call.
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Shard {
    fn acquire(&mut self, claim: Claim) -> Grant {
        let usage = self.usage.entry(claim.key.clone()).or_default();
        if self.slots.contains_key(&claim.slot) {
            return Grant::Granted { active: usage.used };
        }
        if u64::from(usage.used) + u64::from(claim.weight) > u64::from(claim.limit) {
            let active = usage.used;
            self.forget_unused(&claim.key);
            return Grant::Refused { active };
        }
        usage.used += claim.weight;
        let active = usage.used;
        let ends = claim.terms.max_hold.map(|most| Instant::now() + most);
        usage.next_end = earlier(usage.next_end, ends);
        let Claim { key, slot, weight, holder, .. } = claim;
        self.slots.insert(slot, Taken { key, weight, ends, holder });
        Grant::Granted { active }
    }

    fn release(&mut self, slot: SlotId) {
        let Some(taken) = self.slots.remove(&slot) else { return };
        if let Some(usage) = self.usage.get_mut(&taken.key) {
            usage.used -= taken.weight;
        }
        self.forget_unused(&taken.key);
    }

    fn forget_unused(&mut self, key: &Key) {
        if self.usage.get(key).is_some_and(|usage| usage.used == 0) {
            self.usage.remove(key);
        }
    }

    /// Takes away the slots of `key` that `gone` says so of, and returns their holders.
    fn remove_where(&mut self, key: &Key, gone: impl Fn(&Taken) -> bool) -> Vec<Taken> {
        let removed: Vec<Taken> = self
            .slots
            .extract_if(|_, taken| taken.key == *key && gone(taken))
            .map(|(_, taken)| taken)
            .collect();
        let next_end =
            self.slots.values().filter(|taken| taken.key == *key).filter_map(|taken| taken.ends).min();
        if let Some(usage) = self.usage.get_mut(key) {
            usage.used -= removed.iter().map(|taken| taken.weight).sum::<u32>();
            usage.next_end = next_end;
        }
        self.forget_unused(key);
        removed
    }

    /// Gives back what has reached its `max_hold`.
    fn end_overdue(&mut self, key: &Key) -> Vec<Taken> {
        let Some(next_end) = self.usage.get(key).and_then(|usage| usage.next_end) else { return Vec::new() };
        let now = Instant::now();
        if now < next_end {
            Vec::new()
        } else {
            self.remove_where(key, |taken| taken.ends.is_some_and(|ends| ends <= now))
        }
    }
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Tells the holders, with no lock held: what they do is theirs.
fn tell(taken: &[Taken], why: Lost) {
    for holder in taken.iter().filter_map(|taken| taken.holder.upgrade()) {
        holder.lost(why);
    }
}

impl SlotStore for MemoryStore {
    fn acquire(&self, claim: Claim) -> Reply<Result<Grant, StoreError>> {
        let mut shard = self.shard(&claim.key);
        let overdue = shard.end_overdue(&claim.key);
        let grant = shard.acquire(claim);
        drop(shard);
        tell(&overdue, Lost::MaxHold);
        Reply::ready(Ok(grant))
    }

    fn release(&self, key: &Key, slot: SlotId) {
        self.shard(key).release(slot);
    }

    fn release_confirmed(&self, key: &Key, slot: SlotId) -> Reply<Result<(), StoreError>> {
        self.release(key, slot);
        Reply::ready(Ok(()))
    }

    fn count(&self, key: &Key, _terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        let mut shard = self.shard(key);
        let overdue = shard.end_overdue(key);
        let used = shard.usage.get(key).map_or(0, |usage| usage.used);
        drop(shard);
        tell(&overdue, Lost::MaxHold);
        Reply::ready(Ok(used))
    }

    fn drain(&self, key: &Key, _terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        let drained = self.shard(key).remove_where(key, |_| true);
        tell(&drained, Lost::Drained);
        Reply::ready(Ok(drained.iter().map(|taken| taken.weight).sum()))
    }

    fn flush(&self) -> Reply<()> {
        Reply::ready(())
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

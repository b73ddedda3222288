use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::{Claim, Grant, Holder, Key, KeyMap, Lost, Reply, SlotId, SlotMap, SlotStore, StoreError, Terms};

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
}

const SHARDS: usize = 32;
/// Room that a map of a shard keeps in any case.
const ROOM: usize = 256;

/// The slots of the keys that hash here. An entry leaves with its last slot, and both maps keep some
/// room, so that a key whose slots come and go costs no allocation; that of a burst they give back.
#[derive(Default)]
struct Shard {
    usage: KeyMap<Usage>,
    slots: SlotMap<Taken>,
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
    end: Option<End>,
    holder: Weak<dyn Holder>,
}

#[derive(Clone, Copy)]
struct End {
    since: Instant,
    most: Duration,
}

impl End {
    fn at(self) -> Instant {
        self.since + self.most
    }
}

/// What is past its `max_hold`.
#[derive(Default)]
struct Overdue {
    taken: Vec<Taken>,
    /// Their holders, who may be dropped with no lock held only: that gives slots back.
    asked: Vec<Arc<dyn Holder>>,
}

impl Overdue {
    /// With no lock held.
    fn tell(self) {
        tell(&self.taken, Lost::MaxHold);
        drop(self.asked);
    }
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self { shards: Arc::new(std::array::from_fn(|_| Mutex::default())) }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        // A panic elsewhere cannot leave a shard half changed: every change is one map call.
        self.shards[key.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
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
        let end = claim.terms.max_hold.map(|most| End { since: Instant::now(), most });
        usage.next_end = earlier(usage.next_end, end.map(End::at));
        let Claim { key, slot, weight, holder, .. } = claim;
        self.slots.insert(slot, Taken { key, weight, end, holder });
        Grant::Granted { active }
    }

    fn release(&mut self, slot: SlotId) {
        let Some(taken) = self.slots.remove(&slot) else { return };
        give_back_room(&mut self.slots);
        if let Some(usage) = self.usage.get_mut(&taken.key) {
            usage.used -= taken.weight;
        }
        self.forget_unused(&taken.key);
    }

    fn forget_unused(&mut self, key: &Key) {
        if self.usage.get(key).is_some_and(|usage| usage.used == 0) {
            self.usage.remove(key);
            give_back_room(&mut self.usage);
        }
    }

    /// Takes away the slots of `key` that `gone` says so of, and returns their holders.
    fn remove_where(&mut self, key: &Key, gone: impl Fn(&Taken) -> bool) -> Vec<Taken> {
        let removed: Vec<Taken> = self
            .slots
            .extract_if(|_, taken| taken.key == *key && gone(taken))
            .map(|(_, taken)| taken)
            .collect();
        give_back_room(&mut self.slots);
        let next_end = self
            .slots
            .values()
            .filter(|taken| taken.key == *key)
            .filter_map(|taken| taken.end)
            .map(End::at)
            .min();
        if let Some(usage) = self.usage.get_mut(key) {
            usage.used -= removed.iter().map(|taken| taken.weight).sum::<u32>();
            usage.next_end = next_end;
        }
        self.forget_unused(key);
        removed
    }

    /// Gives back what has reached its `max_hold`.
    fn end_overdue(&mut self, key: &Key) -> Overdue {
        let mut overdue = Overdue::default();
        let now = Instant::now();
        if self.usage.get(key).and_then(|usage| usage.next_end).is_none_or(|next_end| now < next_end) {
            return overdue;
        }
        let is_over = |taken: &Taken| taken.end.is_some_and(|end| end.at() <= now);
        for taken in self.slots.values_mut().filter(|taken| taken.key == *key && is_over(taken)) {
            // It may have passed to another holder since.
            if let (Some(end), Some(holder)) = (&mut taken.end, taken.holder.upgrade()) {
                end.since = holder.since(end.since);
                overdue.asked.push(holder);
            }
        }
        overdue.taken = self.remove_where(key, is_over);
        overdue
    }
}

/// Halves a map's room, and again, once it is hardly used: a cost that its growth has paid for.
fn give_back_room<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    let room = map.capacity();
    if room > ROOM && map.len() < room / 8 {
        map.shrink_to((room / 4).max(ROOM / 2));
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
        overdue.tell();
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
        overdue.tell();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn entries_and_room(store: &MemoryStore) -> (usize, usize) {
        let shards = store.shards.iter().map(|shard| shard.lock().expect("no test has panicked"));
        shards.fold((0, 0), |(entries, room), shard| {
            (
                entries + shard.usage.len() + shard.slots.len(),
                room + shard.usage.capacity() + shard.slots.capacity(),
            )
        })
    }

    fn take(store: &MemoryStore, key: &Key, terms: &Arc<Terms>) -> SlotId {
        let slot = SlotId::new();
        let grant = store.acquire(Claim::new(key.clone(), slot, 1, 1, terms)).into_ready();
        assert!(matches!(grant, Ok(Ok(Grant::Granted { active: 1 }))));
        slot
    }

    #[test]
    fn nothing_is_left_of_ids_that_came_and_went() {
        let (store, terms) = (MemoryStore::new(), Arc::new(Terms::new(Duration::MAX, Duration::MAX)));
        let key = |n: u32| Key::new(format!("sem:{n}"));
        for n in 0..200_000 {
            let slot = take(&store, &key(n), &terms);
            assert!(matches!(store.count(&key(n + 1), &terms).into_ready(), Ok(Ok(0))));
            store.release(&key(n), slot);
        }
        let (entries, room) = entries_and_room(&store);
        assert_eq!(entries, 0);
        assert!(room < SHARDS * ROOM, "room for {room} entries");
    }

    #[test]
    fn the_room_of_a_burst_is_given_back() {
        let (store, terms) = (MemoryStore::new(), Arc::new(Terms::new(Duration::MAX, Duration::MAX)));
        let slots: Vec<_> = (0..100_000)
            .map(|n| Key::new(format!("sem:{n}")))
            .map(|key| (take(&store, &key, &terms), key))
            .collect();
        let (entries, full) = entries_and_room(&store);
        assert_eq!(entries, 2 * slots.len());
        for (n, (slot, key)) in slots.iter().enumerate() {
            if n % 100 == 0 {
                assert!(matches!(store.drain(key, &terms).into_ready(), Ok(Ok(1))));
            }
            store.release(key, *slot);
        }
        let (entries, room) = entries_and_room(&store);
        assert_eq!(entries, 0);
        assert!(room <= 2 * SHARDS * ROOM && room < full / 10, "room for {room} entries, of {full}");
    }

    #[test]
    fn room_is_kept_while_an_eighth_of_it_is_used() {
        let with_room = |room: usize, entries: usize| {
            let mut map: HashMap<usize, ()> = HashMap::with_capacity(room);
            let room = map.capacity();
            map.extend((0..entries).map(|entry| (entry, ())));
            give_back_room(&mut map);
            (room, map.capacity())
        };
        let (before, after) = with_room(8 * ROOM, ROOM * 2);
        assert_eq!(after, before);
        let (room, _) = with_room(8 * ROOM, 0);
        assert_eq!(with_room(room, room / 8), (room, room));
        let (_, after) = with_room(room, room / 8 - 1);
        assert!((room / 4..room).contains(&after), "{after} of {room}");
        let (before, after) = with_room(ROOM / 2, 0);
        assert_eq!(after, before);
    }

    /// Each key has 3 slots, of which one ends after `n` seconds and one after `2 n`.
    #[tokio::test(start_paused = true)]
    async fn slots_of_keys_that_share_a_shard_end_each_at_its_own_time() {
        let store = MemoryStore::new();
        let hold = |seconds| {
            let mut terms = Terms::new(Duration::MAX, Duration::MAX);
            terms.max_hold = seconds;
            Arc::new(terms)
        };
        let keys: Vec<_> =
            (1..=200).map(|n| (Key::new(format!("sem:{n}")), Duration::from_secs(n))).collect();
        for (key, seconds) in &keys {
            for terms in [hold(Some(*seconds)), hold(Some(2 * *seconds)), hold(None)] {
                let claim = Claim::new(key.clone(), SlotId::new(), 1, 3, &terms);
                assert!(matches!(store.acquire(claim).into_ready(), Ok(Ok(Grant::Granted { .. }))));
            }
        }
        let start = Instant::now();
        for seconds in [50, 90, 170, 250, 390, 401] {
            tokio::time::advance(start + Duration::from_millis(seconds * 1000 + 500) - Instant::now()).await;
            for (key, end) in &keys {
                let over = start.elapsed();
                let expected = 1 + u32::from(over < *end) + u32::from(over < 2 * *end);
                let used = store.count(key, &hold(None)).into_ready();
                assert!(
                    matches!(used, Ok(Ok(used)) if used == expected),
                    "{used:?} of {key:?} after {over:?}"
                );
            }
        }
    }

    /// Got its slot from another request, 8 seconds after that one's claim.
    struct Successor;

    impl Holder for Successor {
        fn lost(&self, _: Lost) {}

        fn since(&self, claimed: Instant) -> Instant {
            claimed + Duration::from_secs(8)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_that_passed_to_another_holder_ends_by_that_holders_time() {
        let store = MemoryStore::new();
        let mut terms = Terms::new(Duration::MAX, Duration::MAX);
        terms.max_hold = Some(Duration::from_secs(10));
        let (key, terms) = (Key::new("sem:a"), Arc::new(terms));
        let holder: Arc<dyn Holder> = Arc::new(Successor);
        let claim = Claim::new(key.clone(), SlotId::new(), 1, 1, &terms).watched_by(Arc::downgrade(&holder));
        assert!(matches!(store.acquire(claim).into_ready(), Ok(Ok(Grant::Granted { .. }))));
        tokio::time::advance(Duration::from_secs(11)).await;
        assert!(matches!(store.count(&key, &terms).into_ready(), Ok(Ok(1))));
        tokio::time::advance(Duration::from_secs(16)).await;
        assert!(matches!(store.count(&key, &terms).into_ready(), Ok(Ok(0))));
    }

    #[test]
    fn debug_names_the_type_alone() {
        assert_eq!(format!("{:?}", MemoryStore::new()), "MemoryStore { .. }");
    }
}

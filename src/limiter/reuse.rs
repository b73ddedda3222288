//! Local reuse: a slot that was released stays with this process for a short while, and serves the
//! next request of its id without a call to the store.
//!
//! It stays taken in the store, so that the limit holds whatever happens here. What others lose is the
//! room that it takes up: hence it goes back when what is known of the use is older than the set time,
//! and at once when more than half of the limit is in use.

use std::collections::{HashMap, hash_map};
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use crate::store::{Holder, Key, Lost, SlotId, SlotStore};

const SHARDS: usize = 32;
/// So many ids of one shard are known at the most; slots of others are not kept.
const MOST_KEYS: usize = 4096;
/// Room that a shard keeps in any case.
const ROOM: usize = 64;
/// The sweeper looks so often within the time for which slots are kept.
const TICKS: u32 = 4;
/// A sweeper that is late by this is on a runtime that nobody drives.
const LATE: Duration = Duration::from_millis(500);

/// What the store has registered under one slot id. It passes from one request to the next.
pub(super) struct Lease {
    key: Hashed,
    id: SlotId,
    weight: u32,
    state: Mutex<LeaseState>,
}

struct LeaseState {
    holder: Weak<dyn Holder>,
    /// When the holder got it; nobody has it while it is idle.
    since: Option<Instant>,
    lost: bool,
}

impl Lease {
    pub(super) fn id(&self) -> SlotId {
        self.id
    }

    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its holder is another one from now on, unless it is lost.
    fn pass_to(&self, holder: &Weak<dyn Holder>, now: Instant) -> bool {
        let mut state = self.state();
        (state.holder, state.since) = (Weak::clone(holder), Some(now));
        !state.lost
    }

    /// Nobody holds it from now on; not so if it is lost.
    fn idle(&self) -> bool {
        let mut state = self.state();
        state.since = None;
        !state.lost
    }
}

impl Holder for Lease {
    fn lost(&self, why: Lost) {
        let mut state = self.state();
        state.lost = true;
        // While it is idle nobody loses anything.
        let holder = state.since.and_then(|_| state.holder.upgrade());
        drop(state);
        if let Some(holder) = holder {
            holder.lost(why);
        }
    }

    fn since(&self, _claimed: Instant) -> Instant {
        self.state().since.unwrap_or_else(Instant::now)
    }
}

/// The slots that are kept, by id, and what is known of those ids.
pub(super) struct Reuse {
    store: Arc<dyn SlotStore>,
    time: Duration,
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    /// One task looks for what is due, while there is anything: the number of the newest.
    sweeper: Mutex<u64>,
    sweeps: AtomicBool,
    /// When it looked last, in milliseconds since `start`.
    swept: AtomicU64,
    start: Instant,
}

type Shard = HashMap<Hashed, Known, BuildHasherDefault<Ready>>;

/// A key with its hash: made once for each lease, which then comes and goes without another.
#[derive(Clone, PartialEq, Eq)]
struct Hashed {
    hash: u64,
    key: Key,
}

impl Hashed {
    /// By bits that a map does not use.
    fn shard(&self) -> usize {
        (self.hash >> 32) as usize % SHARDS
    }
}

impl Hash for Hashed {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Takes a hash as it is.
#[derive(Default)]
struct Ready(u64);

impl Hasher for Ready {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a hash is one number");
    }
}

/// An id that has less than half its limit in use.
struct Known {
    /// Slots in use over the whole fleet when the store was heard last.
    used: u32,
    heard: Instant,
    /// The limit of the newest claim.
    most: u32,
    idle: Vec<Arc<Lease>>,
    /// Of all that are idle.
    weight: u32,
}

impl Known {
    /// Whether slots may stay idle when those that are have this weight.
    fn has_room(&self, idle: u32) -> bool {
        u64::from(self.used.max(idle)) * 2 <= u64::from(self.most)
    }

    /// Takes out the newest of this weight.
    fn pop(&mut self, weight: u32) -> Option<Arc<Lease>> {
        let at = self.idle.iter().rposition(|lease| lease.weight == weight)?;
        self.weight -= weight;
        Some(self.idle.remove(at))
    }

    fn push(&mut self, lease: Arc<Lease>) {
        self.weight += lease.weight;
        self.idle.push(lease);
    }

    fn take_all(&mut self) -> Vec<Arc<Lease>> {
        self.weight = 0;
        std::mem::take(&mut self.idle)
    }
}

impl Reuse {
    pub(super) fn new(store: Arc<dyn SlotStore>, time: Duration) -> Arc<Self> {
        Arc::new(Self {
            store,
            time,
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            sweeper: Mutex::new(0),
            sweeps: AtomicBool::new(false),
            swept: AtomicU64::new(0),
            start: Instant::now(),
        })
    }

    /// What is to be registered for a request of `holder`.
    pub(super) fn lease(
        &self,
        key: &Key,
        id: SlotId,
        weight: u32,
        holder: Weak<dyn Holder>,
        since: Instant,
    ) -> Arc<Lease> {
        let state = LeaseState { holder, since: Some(since), lost: false };
        Arc::new(Lease { key: self.hashed(key), id, weight, state: Mutex::new(state) })
    }

    /// A kept slot for a request of `holder`, and the last known use of the key. When there is none,
    /// those of other weights are given back, ahead of the claim that the store is sent then.
    pub(super) fn take(
        &self,
        key: &Key,
        weight: u32,
        most: u32,
        holder: &Weak<dyn Holder>,
        now: Instant,
    ) -> Option<(Arc<Lease>, u32)> {
        let key = self.hashed(key);
        let mut shard = self.shard(&key);
        let known = shard.get_mut(&key)?;
        known.most = most;
        let (mut back, mut found) = (Vec::new(), None);
        // After a stop of this process nobody may have looked yet for what is due.
        while found.is_none() && self.is_fresh(known, now) && known.has_room(known.weight) {
            let Some(lease) = known.pop(weight) else { break };
            if lease.pass_to(holder, now) { found = Some(lease) } else { back.push(lease) }
        }
        if found.is_none() {
            back.append(&mut known.take_all());
        }
        let used = known.used;
        drop(shard);
        self.give_back(&back);
        found.map(|lease| (lease, used))
    }

    /// The store says how many slots of a key are in use, and this was its limit.
    pub(super) fn heard(self: &Arc<Self>, key: &Key, used: u32, most: u32) {
        let (now, key) = (Instant::now(), self.hashed(key));
        let mut shard = self.shard(&key);
        let full = shard.len() >= MOST_KEYS;
        let known = match shard.entry(key.clone()) {
            hash_map::Entry::Occupied(known) => known.into_mut(),
            hash_map::Entry::Vacant(_) if full => return,
            hash_map::Entry::Vacant(place) => {
                place.insert(Known { used, heard: now, most, idle: Vec::new(), weight: 0 })
            }
        };
        (known.used, known.heard, known.most) = (used, now, most);
        let room = known.has_room(known.weight);
        drop(shard);
        if !room || !self.is_swept(now) {
            self.forget_hashed(&key);
        }
    }

    /// Keeps a slot that its last guard gives up, where that is right. Else it is the caller's to give
    /// back.
    pub(super) fn keep(self: &Arc<Self>, lease: &Arc<Lease>) -> bool {
        let now = Instant::now();
        let mut shard = self.shard(&lease.key);
        let Some(known) = shard.get_mut(&lease.key) else { return false };
        // Else it passes through the store, with news of the use when it is acquired again.
        if !self.is_fresh(known, now)
            || !known.has_room(known.weight.saturating_add(lease.weight))
            || !lease.idle()
        {
            return false;
        }
        known.push(Arc::clone(lease));
        drop(shard);
        // Only now: a sweeper that finds nothing ends.
        if !self.is_swept(now) {
            self.forget_hashed(&lease.key);
        }
        true
    }

    /// Gives back what is kept of a key.
    pub(super) fn forget(&self, key: &Key) {
        self.forget_hashed(&self.hashed(key));
    }

    fn forget_hashed(&self, key: &Hashed) {
        let known = self.shard(key).remove(key);
        let idle = known.map(|known| known.idle).unwrap_or_default();
        self.give_back(&idle);
    }

    /// Gives back what is kept of all keys.
    pub(super) fn forget_all(&self) {
        for shard in &self.shards {
            let all = std::mem::take(&mut *lock(shard));
            all.values().for_each(|known| self.give_back(&known.idle));
        }
    }

    /// With no lock held.
    fn give_back(&self, leases: &[Arc<Lease>]) {
        leases.iter().for_each(|lease| self.store.release(&lease.key.key, lease.id));
    }

    fn hashed(&self, key: &Key) -> Hashed {
        Hashed { hash: self.hasher.hash_one(key), key: key.clone() }
    }

    fn is_fresh(&self, known: &Known, now: Instant) -> bool {
        now < known.heard + self.time
    }

    fn shard(&self, key: &Hashed) -> MutexGuard<'_, Shard> {
        lock(&self.shards[key.shard()])
    }

    fn tick(&self) -> Duration {
        self.time / TICKS
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether a sweeper is at work.
    fn is_at_work(&self, now: Instant) -> bool {
        let most = self.tick() + LATE;
        let ago = self.millis(now).saturating_sub(self.swept.load(Ordering::Relaxed));
        self.sweeps.load(Ordering::SeqCst) && u128::from(ago) <= most.as_millis()
    }

    /// Sees to it that a sweeper is at work; where it cannot be, nothing may be kept.
    fn is_swept(self: &Arc<Self>, now: Instant) -> bool {
        if self.is_at_work(now) {
            return true;
        }
        let Ok(runtime) = Handle::try_current() else { return false };
        let mut newest = lock(&self.sweeper);
        if self.is_at_work(now) {
            return true;
        }
        *newest += 1;
        let sweeper = Sweeper { reuse: Arc::downgrade(self), number: *newest };
        self.swept.store(self.millis(now), Ordering::Relaxed);
        self.sweeps.store(true, Ordering::SeqCst);
        drop(newest);
        // A runtime that is shutting down drops it at once, and everything goes back.
        runtime.spawn(sweeper.run(self.tick()));
        true
    }

    /// Gives back what would be too old at the next look. Returns whether there is to be one.
    fn sweep(&self, number: u64) -> bool {
        if *lock(&self.sweeper) != number {
            return false;
        }
        let now = Instant::now();
        self.swept.store(self.millis(now), Ordering::Relaxed);
        for shard in &self.shards {
            let due = self.take_due(&mut lock(shard), now);
            due.iter().for_each(|known| self.give_back(&known.idle));
        }
        if !self.is_empty() {
            return true;
        }
        self.sweeps.store(false, Ordering::SeqCst);
        // What was kept before that is ours still, unless another sweeper has begun.
        let newest = lock(&self.sweeper);
        let goes_on = *newest == number && !self.is_empty();
        if goes_on {
            self.sweeps.store(true, Ordering::SeqCst);
        }
        goes_on
    }

    fn take_due(&self, shard: &mut Shard, now: Instant) -> Vec<Known> {
        let next = now + self.tick();
        let due = shard.extract_if(|_, known| !self.is_fresh(known, next)).map(|(_, known)| known).collect();
        if shard.capacity() > ROOM.max(8 * shard.len()) {
            shard.shrink_to(ROOM.max(2 * shard.len()));
        }
        due
    }

    fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| lock(shard).is_empty())
    }
}

impl Drop for Reuse {
    fn drop(&mut self) {
        self.forget_all();
    }
}

/// No change under these locks can be left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The task that gives back what is due.
struct Sweeper {
    reuse: Weak<Reuse>,
    number: u64,
}

impl Sweeper {
    async fn run(self, tick: Duration) {
        loop {
            sleep(tick).await;
            if !self.reuse.upgrade().is_some_and(|reuse| reuse.sweep(self.number)) {
                return;
            }
        }
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        let Some(reuse) = self.reuse.upgrade() else { return };
        let newest = lock(&reuse.sweeper);
        // Its runtime is gone in the middle of its work.
        let ended = *newest == self.number && reuse.sweeps.swap(false, Ordering::SeqCst);
        drop(newest);
        if ended {
            reuse.forget_all();
        }
    }
}

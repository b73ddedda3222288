//! Local reuse: a slot that was released stays with this process for a short while, and serves the
//! next request of its id without a call to the store.
//!
//! It stays taken in the store, so that the limit holds whatever happens here. What others lose is the
//! room that it takes up: hence it goes back when what is known of the use is older than the set time,
//! and at once when more than half of the limit is in use.

use std::collections::hash_map;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::stripe;
use crate::store::{Holder, Key, KeyMap, Lost, SlotId, SlotStore};

const SHARDS: usize = 32;
/// So many ids of one shard are known at the most; slots of others are not kept.
const MOST_KEYS: usize = 4096;
/// Room that a shard keeps in any case.
const ROOM: usize = 64;
/// A thread keeps slots of its own of those ids of which it may keep so many.
const LEAST_SHARE: u32 = 8;
/// The sweeper looks so often within the time for which slots are kept.
const TICKS: u32 = 4;
/// A sweeper that is late by this is on a runtime that nobody drives.
const LATE: Duration = Duration::from_millis(500);

/// What the store has registered under one slot id. It passes from one request to the next.
pub(super) struct Lease {
    key: Key,
    id: SlotId,
    weight: u32,
    /// The limit was large enough for each thread to have its share of it.
    is_shared: bool,
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
    /// Here is the home of every id that is known.
    shards: [Mutex<Shard>; SHARDS],
    /// Each thread keeps some slots of ids with a large limit where no other looks for them. What is
    /// known of an id there was true at its home.
    near: Box<[Near]>,
    /// One task looks for what is due, while there is anything: the number of the newest.
    sweeper: Mutex<u64>,
    sweeps: AtomicBool,
    /// When it looked last, in milliseconds since `start`.
    swept: AtomicU64,
    start: Instant,
}

#[derive(Default)]
#[repr(align(128))]
struct Near(Mutex<Shard>);

type Shard = KeyMap<Known>;

/// A request that would have a slot that is kept.
pub(super) struct Next<'a> {
    pub holder: &'a Weak<dyn Holder>,
    pub weight: u32,
    /// The limit of its id.
    pub most: u32,
    pub now: Instant,
}

/// What the store said of an id.
#[derive(Clone, Copy)]
struct Heard {
    /// Slots in use over the whole fleet.
    used: u32,
    at: Instant,
    /// The limit of the newest claim.
    most: u32,
}

/// An id that has less than half its limit in use.
struct Known {
    heard: Heard,
    idle: Vec<Arc<Lease>>,
    /// Of all that are idle.
    weight: u32,
    /// Threads may keep slots on the ground of what is known here.
    is_copied: bool,
}

impl Known {
    fn new(heard: Heard) -> Self {
        Self { heard, idle: Vec::new(), weight: 0, is_copied: false }
    }

    /// Whether slots of this weight may stay idle here, where `share` is allowed.
    fn has_room(&self, idle: u32, share: u32) -> bool {
        u64::from(self.heard.used) * 2 <= u64::from(self.heard.most) && idle <= share
    }

    /// Takes out the newest of this weight.
    fn pop(&mut self, weight: u32) -> Option<Arc<Lease>> {
        let at = self.idle.iter().rposition(|lease| lease.weight == weight)?;
        self.weight -= weight;
        Some(self.idle.remove(at))
    }

    /// Takes out one that its next holder can have. Without one all go back, ahead of the claim that
    /// the store is sent then.
    fn take(&mut self, next: &Next<'_>, share: u32, back: &mut Vec<Arc<Lease>>) -> Option<Arc<Lease>> {
        while self.has_room(self.weight, share) {
            let Some(lease) = self.pop(next.weight) else { break };
            if lease.pass_to(next.holder, next.now) {
                return Some(lease);
            }
            back.push(lease);
        }
        back.append(&mut self.take_all());
        None
    }

    fn keep(&mut self, lease: &Arc<Lease>, share: u32) -> Option<()> {
        let weight = self.weight.saturating_add(lease.weight);
        if !self.has_room(weight, share) || !lease.idle() {
            return None;
        }
        self.weight = weight;
        self.idle.push(Arc::clone(lease));
        Some(())
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
            near: std::iter::repeat_with(Near::default).take(stripe::stripes()).collect(),
            sweeper: Mutex::new(0),
            sweeps: AtomicBool::new(false),
            swept: AtomicU64::new(0),
            start: Instant::now(),
        })
    }

    /// What is to be registered for the next request of a key.
    pub(super) fn lease(&self, key: &Key, id: SlotId, next: &Next<'_>) -> Arc<Lease> {
        let state = LeaseState { holder: Weak::clone(next.holder), since: Some(next.now), lost: false };
        Arc::new(Lease {
            key: key.clone(),
            id,
            weight: next.weight,
            is_shared: self.near_share(next.most).is_some(),
            state: Mutex::new(state),
        })
    }

    /// A kept slot for the next request of a key, and the last known use.
    pub(super) fn take(&self, key: &Key, next: &Next<'_>) -> Option<(Arc<Lease>, u32)> {
        let mut back = Vec::new();
        let found = match self.near_share(next.most) {
            Some(_) => self.take_near(self.near(), key, next, &mut back),
            None => None,
        };
        let found = found.or_else(|| self.take_home(key, next, &mut back));
        self.give_back(&back);
        found
    }

    fn take_near(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        key: &Key,
        next: &Next<'_>,
        back: &mut Vec<Arc<Lease>>,
    ) -> Option<(Arc<Lease>, u32)> {
        let known = shard.get_mut(key)?;
        let fresh = self.refresh(key, known, next.now);
        known.heard.most = next.most;
        let share = self.near_share(next.most).filter(|_| fresh).unwrap_or(0);
        Some((known.take(next, share, back)?, known.heard.used))
    }

    fn take_home(&self, key: &Key, next: &Next<'_>, back: &mut Vec<Arc<Lease>>) -> Option<(Arc<Lease>, u32)> {
        let mut shard = self.shard(key);
        let known = shard.get_mut(key)?;
        let is_new_limit = std::mem::replace(&mut known.heard.most, next.most) != next.most;
        // After a stop of this process nobody may have looked yet for what is due.
        let share = if self.is_fresh(known.heard, next.now) { self.home_share(next.most) } else { 0 };
        let found = known.take(next, share, back).map(|lease| (lease, known.heard.used));
        let is_copied = known.is_copied;
        drop(shard);
        if is_copied && is_new_limit {
            self.forget_near(key);
        }
        if is_copied && found.is_none() {
            // The store may refuse what another thread keeps.
            let mut near = self.near.iter().map(|Near(shard)| lock(shard));
            return near.find_map(|shard| self.take_near(shard, key, next, back));
        }
        found
    }

    /// The store says how many slots of a key are in use, and this was its limit.
    pub(super) fn heard(self: &Arc<Self>, key: &Key, used: u32, most: u32) {
        let now = Instant::now();
        let heard = Heard { used, at: now, most };
        let mut shard = self.shard(key);
        let full = shard.len() >= MOST_KEYS;
        let known = match shard.entry(key.clone()) {
            hash_map::Entry::Occupied(known) => known.into_mut(),
            hash_map::Entry::Vacant(_) if full => return,
            hash_map::Entry::Vacant(place) => place.insert(Known::new(heard)),
        };
        known.heard = heard;
        let room = known.has_room(known.weight, self.home_share(most));
        drop(shard);
        if !room || !self.is_swept(now) {
            self.forget(key);
        }
    }

    /// Keeps a slot that its last guard gives up, where that is right. Else it is the caller's to give
    /// back.
    pub(super) fn keep(self: &Arc<Self>, lease: &Arc<Lease>, now: Instant) -> bool {
        // Else it passes through the store, with news of the use when it is acquired again.
        if self.keep_near(lease, now).is_none() && self.keep_home(lease, now).is_none() {
            return false;
        }
        // Only now: a sweeper that finds nothing ends.
        if !self.is_swept(now) {
            self.forget(&lease.key);
        }
        true
    }

    fn keep_near(&self, lease: &Arc<Lease>, now: Instant) -> Option<()> {
        if !lease.is_shared {
            return None;
        }
        let mut shard = self.near();
        if let Some(known) = shard.get_mut(&lease.key) {
            let fresh = self.refresh(&lease.key, known, now);
            return known.keep(lease, self.near_share(known.heard.most).filter(|_| fresh)?);
        }
        let heard = self.heard_at_home(&lease.key, now).filter(|_| shard.len() < MOST_KEYS)?;
        let mut known = Known::new(heard);
        known.keep(lease, self.near_share(heard.most)?)?;
        shard.insert(lease.key.clone(), known);
        Some(())
    }

    fn keep_home(&self, lease: &Arc<Lease>, now: Instant) -> Option<()> {
        let mut shard = self.shard(&lease.key);
        let known = shard.get_mut(&lease.key).filter(|known| self.is_fresh(known.heard, now))?;
        known.keep(lease, self.home_share(known.heard.most))
    }

    /// Sees to it that what is known near a thread is fresh, if it can be.
    fn refresh(&self, key: &Key, known: &mut Known, now: Instant) -> bool {
        if self.is_fresh(known.heard, now) {
            return true;
        }
        let heard = self.heard_at_home(key, now);
        known.heard = heard.unwrap_or(known.heard);
        heard.is_some()
    }

    /// What is known of a key at its home, while that is fresh, to be copied. The lock of what is near
    /// is held meanwhile, so that `forget_near` comes before or after.
    fn heard_at_home(&self, key: &Key, now: Instant) -> Option<Heard> {
        let mut shard = self.shard(key);
        let known = shard.get_mut(key).filter(|known| self.is_fresh(known.heard, now))?;
        known.is_copied = true;
        Some(known.heard)
    }

    /// How much of a limit each thread may keep for itself: a quarter for all of them.
    fn near_share(&self, most: u32) -> Option<u32> {
        let share = most / (4 * self.near.len() as u32);
        (share >= LEAST_SHARE).then_some(share)
    }

    /// What is left of half the limit.
    fn home_share(&self, most: u32) -> u32 {
        most / 2 - self.near_share(most).unwrap_or(0) * self.near.len() as u32
    }

    /// Gives back what is kept of a key.
    pub(super) fn forget(&self, key: &Key) {
        let Some(known) = self.shard(key).remove(key) else { return };
        self.give_back(&known.idle);
        if known.is_copied {
            self.forget_near(key);
        }
    }

    fn forget_near(&self, key: &Key) {
        for Near(shard) in &self.near {
            let known = lock(shard).remove(key);
            known.iter().for_each(|known| self.give_back(&known.idle));
        }
    }

    /// Gives back what is kept of all keys.
    pub(super) fn forget_all(&self) {
        for shard in self.all_shards() {
            let all = std::mem::take(&mut *lock(shard));
            all.values().for_each(|known| self.give_back(&known.idle));
        }
    }

    /// With no lock held.
    fn give_back(&self, leases: &[Arc<Lease>]) {
        leases.iter().for_each(|lease| self.store.release(&lease.key, lease.id));
    }

    fn is_fresh(&self, heard: Heard, now: Instant) -> bool {
        now < heard.at + self.time
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        lock(&self.shards[key.shard(SHARDS)])
    }

    /// What this thread keeps.
    fn near(&self) -> MutexGuard<'_, Shard> {
        lock(&self.near[stripe::mine(self.near.len())].0)
    }

    /// The homes first: a thread keeps nothing of an id that has none, so that what is known near a thread
    /// never outlives it.
    fn all_shards(&self) -> impl Iterator<Item = &Mutex<Shard>> {
        self.shards.iter().chain(self.near.iter().map(|Near(shard)| shard))
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
        for shard in self.all_shards() {
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
        let due =
            shard.extract_if(|_, known| !self.is_fresh(known.heard, next)).map(|(_, known)| known).collect();
        if shard.capacity() > ROOM.max(8 * shard.len()) {
            shard.shrink_to(ROOM.max(2 * shard.len()));
        }
        due
    }

    fn is_empty(&self) -> bool {
        self.all_shards().all(|shard| lock(shard).is_empty())
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test it is the assertion")]
mod tests {
    use super::*;
    use crate::MemoryStore;

    const TIME: Duration = Duration::from_secs(1);
    /// So large that each thread has a share.
    const LARGE: u32 = 100_000;

    fn reuse() -> Arc<Reuse> {
        Reuse::new(Arc::new(MemoryStore::new()), TIME)
    }

    fn nobody() -> Weak<dyn Holder> {
        Weak::<Lease>::new()
    }

    fn next(holder: &Weak<dyn Holder>, now: Instant) -> Next<'_> {
        Next { holder, weight: 1, most: LARGE, now }
    }

    fn keep(reuse: &Arc<Reuse>, key: &Key, now: Instant) -> bool {
        let lease = reuse.lease(key, SlotId::new(), &next(&nobody(), now));
        reuse.keep(&lease, now)
    }

    fn take(reuse: &Reuse, key: &Key, now: Instant) -> bool {
        reuse.take(key, &next(&nobody(), now)).is_some()
    }

    #[test]
    fn threads_and_home_share_half_the_limit() {
        let reuse = reuse();
        let threads = reuse.near.len() as u32;
        let least = 4 * threads * LEAST_SHARE;
        for most in [0, 1, 2, 3, 31, least - 1, least, least + 1, 1000 * least + 7, u32::MAX] {
            let near = reuse.near_share(most);
            assert_eq!(near.is_some(), most >= least, "{most}");
            let near = near.unwrap_or(0) * threads;
            assert_eq!(near + reuse.home_share(most), most / 2, "{most}");
            let quarter = most / 4;
            assert!(near == 0 || (near <= quarter && near > quarter - threads), "{near} of {most}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_thread_knows_is_as_old_as_what_its_home_knew() {
        let (reuse, key, start) = (reuse(), Key::new("a"), Instant::now());
        reuse.heard(&key, 1, LARGE);
        assert!(keep(&reuse, &key, start + TIME / 2) && take(&reuse, &key, start + TIME / 2));
        assert_eq!(
            lock(&reuse.near[stripe::mine(reuse.near.len())].0).len(),
            1,
            "it was kept near this thread"
        );
        let last = start + TIME - Duration::from_millis(1);
        assert!(keep(&reuse, &key, last) && take(&reuse, &key, last));
        assert!(keep(&reuse, &key, last) && !take(&reuse, &key, start + TIME), "it is too old");
        assert!(!keep(&reuse, &key, start + TIME));
    }

    #[tokio::test(start_paused = true)]
    async fn news_at_home_are_news_near_a_thread() {
        let (reuse, key, start) = (reuse(), Key::new("a"), Instant::now());
        reuse.heard(&key, 1, LARGE);
        assert!(keep(&reuse, &key, start));
        // Not a sleep, in which what is due would go back.
        tokio::time::advance(TIME / 5).await;
        reuse.heard(&key, 1, LARGE);
        assert!(take(&reuse, &key, start + TIME), "known since a fifth of the time");
        assert!(!take(&reuse, &key, start + TIME), "it was the only one");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_known_of_ids_is_bounded_and_its_room_comes_back() {
        let reuse = reuse();
        let keys: Vec<_> = (0..MOST_KEYS * SHARDS + MOST_KEYS).map(|n| Key::new(n.to_string())).collect();
        keys.iter().for_each(|key| reuse.heard(key, 1, LARGE));
        let known = || reuse.shards.iter().map(|shard| lock(shard).len()).collect::<Vec<_>>();
        assert!(known().iter().all(|&known| known <= MOST_KEYS), "{:?}", known());
        assert!(known().contains(&MOST_KEYS), "{:?}", known());
        keys.iter().for_each(|key| _ = keep(&reuse, key, Instant::now()));
        let near = || reuse.near.iter().map(|Near(shard)| lock(shard).len()).max();
        assert_eq!(near(), Some(MOST_KEYS));
        sleep(2 * TIME).await;
        assert!(reuse.is_empty());
        assert!(reuse.all_shards().all(|shard| lock(shard).capacity() < 4 * ROOM));
    }
}

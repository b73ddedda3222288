//! What all handles of one semaphore share: a word that settles the common cases with one
//! compare-and-swap, and a lock round the state machine for the others.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::task::Waker;

use super::effects::{Effects, Observer};
use super::error::AcquireError;
use super::event::{EventBatch, Reason, Ring};
use super::handle::{Handles, Life};
use super::idle::Place;
use super::permit::PermitId;
use super::queue::{Look, Ticket, Verdict};
use super::snapshot::Snapshot;
use super::state::{Journal, Start, State};
use super::sync::{Alive, Arc, AtomicU64, Mutex, MutexGuard};
use super::word::{CLOSED, Layout, SHUT};

/// The gate is **open** while nobody waits, nobody listens and the semaphore is not closed. Then one
/// compare-and-swap on the word both decides an operation and counts it. Otherwise the gate is
/// **shut**: the state decides, under the lock.
///
/// Invariants:
/// - While the word says [`SHUT`] it is written under the lock alone, and `state` is the truth.
///   While it does not, the word is the truth for the acquired weight, the admissions and the
///   rejections, and `state` for the rest. Whoever changes the state shuts the gate first.
/// - While the state is [needed](State::needed) the gate is shut. It is opened by the first change that
///   neither finds nor leaves it needed: one late, so that a queue that is empty now and then does
///   not pay for an opening each time.
/// - `base`, the number of admissions that the word does not count, changes under the lock while the
///   gate is shut, and only when the word's count is full.
/// - No waker, no observer and no destructor of a waker runs under the lock.
pub(super) struct Gate {
    pub(super) word: AtomicU64,
    base: AtomicU64,
    pub(super) layout: Layout,
    pub(super) handles: Handles,
    pub(super) alive: Alive,
    capacity: i64,
    max_waiters: usize,
    events: usize,
    locked: Mutex<Locked>,
    observer: Option<Box<Observer>>,
}

/// What the lock is round.
struct Locked {
    state: State,
    life: Life,
}

/// What an open gate says to a valid weight.
enum Pass {
    Admitted(PermitId),
    /// Too little is available. The rejection is counted.
    Refused,
    /// The state has to decide.
    Undecided,
}

impl Gate {
    /// The arguments are within their bounds.
    pub(super) fn new(
        capacity: i64,
        max_waiters: usize,
        events: usize,
        observer: Option<Box<Observer>>,
    ) -> Self {
        let journal = (events > 0 || observer.is_some())
            .then(|| Journal { ring: (events > 0).then(|| Ring::new(events)), observed: observer.is_some() })
            .map(Box::new);
        let layout = Layout::new(capacity);
        let state = State::new(capacity, max_waiters, layout.is_none(), journal);
        let layout = layout.unwrap_or(Layout::UNUSED);
        Self {
            word: AtomicU64::new(if state.needed() { SHUT } else { layout.pack(capacity, 0) }),
            base: AtomicU64::new(0),
            layout,
            handles: Handles::default(),
            alive: Alive::default(),
            capacity,
            max_waiters,
            events,
            locked: Mutex::new(Locked { state, life: Life::default() }),
            observer,
        }
    }

    /// As if so many permits had come and gone.
    #[cfg(all(test, not(slots_shuttle)))]
    pub(super) fn skip_admissions(&self, admissions: u64) {
        self.change(|state, _| state.admissions += admissions);
    }

    #[cfg(all(test, not(any(slots_loom, slots_shuttle))))]
    pub(super) fn is_open(&self) -> bool {
        self.word.load(Acquire) & SHUT == 0
    }

    pub(super) fn capacity(&self) -> i64 {
        self.capacity
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.word.load(Acquire) & CLOSED != 0
    }

    /// Admits a weight, or not, without waiting.
    #[inline]
    pub(super) fn try_acquire(&self, weight: i64) -> Result<Option<PermitId>, AcquireError> {
        if !self.is_valid(weight) {
            return Err(self.refuse_invalid(weight));
        }
        match self.pass(weight, true) {
            Pass::Admitted(id) => Ok(Some(id)),
            Pass::Refused => Ok(None),
            Pass::Undecided => self.try_acquire_shut(weight),
        }
    }

    #[cold]
    fn try_acquire_shut(&self, weight: i64) -> Result<Option<PermitId>, AcquireError> {
        self.change(|state, effects| state.try_acquire(weight, effects))
    }

    /// Admits a weight if nothing more than that is to be done.
    #[inline]
    pub(super) fn admit(&self, weight: i64) -> Option<PermitId> {
        if !self.is_valid(weight) {
            return None;
        }
        match self.pass(weight, false) {
            Pass::Admitted(id) => Some(id),
            Pass::Refused | Pass::Undecided => None,
        }
    }

    /// Admits a weight, gives it a place in the queue, or refuses it; `late` says whether its
    /// deadline has passed.
    #[inline(always)]
    pub(super) fn acquire(&self, weight: i64, late: bool, waker: &Waker) -> Result<Start, AcquireError> {
        if !self.is_valid(weight) {
            return Err(self.refuse_invalid(weight));
        }
        if late {
            return Err(self.refuse(weight, AcquireError::Deadline));
        }
        // Nobody can wait: an open gate decides that too.
        if self.max_waiters == 0 {
            match self.pass(weight, true) {
                Pass::Admitted(id) => return Ok(Start::Admitted(id)),
                Pass::Refused => return Err(AcquireError::QueueFull { limit: 0 }),
                Pass::Undecided => {}
            }
        }
        self.acquire_shut(weight, waker)
    }

    #[inline(always)]
    fn acquire_shut(&self, weight: i64, waker: &Waker) -> Result<Start, AcquireError> {
        let mut waker = Some(waker.clone());
        self.change(|state, effects| state.acquire(weight, &mut waker, effects))
    }

    /// Releases what an open gate did not take back, and returns the gate: with its weight the caller
    /// gives up what kept it.
    #[cold]
    pub(super) fn release_shut(&self, id: PermitId, weight: i64) -> Option<Arc<Self>> {
        self.change_life(|locked, effects| {
            locked.state.release(id, weight, effects);
            locked.life.keep(locked.state.acquired == 0)
        })
    }

    /// How the wait of a queued caller ended, if it has; otherwise `waker` will be told.
    #[inline]
    pub(super) fn look(&self, ticket: Ticket, waker: &Waker) -> Option<Verdict> {
        loop {
            let mut locked = self.lock();
            match locked.state.queue.look(ticket, waker) {
                Look::Waiting => return None,
                Look::Over(verdict) => {
                    let surplus = locked.state.queue.surplus();
                    drop(locked);
                    drop(surplus);
                    return Some(verdict);
                }
                Look::WakerChanged => drop(locked),
            }
            let fresh = waker.clone();
            // Not to be asked again afterwards: a waker need not recognise its own clone.
            let changed = self.lock().state.queue.change_waker(ticket, fresh);
            if changed.is_ok() {
                return None;
            }
        }
    }

    /// The wait of a queued caller is over at its deadline, if it is not over yet.
    pub(super) fn expire(&self, ticket: Ticket, weight: i64) -> Result<PermitId, AcquireError> {
        let left = self.change(|state, effects| state.leave(ticket, weight, Reason::Deadline, effects));
        match left {
            Ok(_waker) => Err(AcquireError::Deadline),
            Err(Verdict::Granted(id)) => Ok(id),
            Err(Verdict::Closed) => Err(AcquireError::Closed),
        }
    }

    /// A queued caller went away. What it was granted meanwhile is released.
    #[cold]
    pub(super) fn abandon(&self, ticket: Ticket, weight: i64) {
        let left = self.change(|state, effects| {
            let left = state.leave(ticket, weight, Reason::ContextCanceled, effects);
            if let Err(Verdict::Granted(id)) = left {
                state.release(id, weight, effects);
            }
            left
        });
        drop(left);
    }

    pub(super) fn close(&self) {
        self.change(|state, effects| {
            self.word.fetch_or(CLOSED, Release);
            state.close(effects);
        });
    }

    /// A place among those who wait for nothing to be held, unless nothing is.
    pub(super) fn join_idle(&self, waker: &Waker) -> Option<Place> {
        let waker = waker.clone();
        self.change(|state, _| match state.acquired {
            0 => Err(waker),
            _ => Ok(state.idle.join(waker)),
        })
        .ok()
    }

    /// The same place if the wait goes on; then `waker` will be told of its end.
    pub(super) fn look_idle(&self, place: Place, waker: &Waker) -> Option<Place> {
        loop {
            let locked = self.lock();
            if locked.state.idle.is_over(place) {
                return None;
            }
            if locked.state.idle.will_wake(place, waker) {
                return Some(place);
            }
            drop(locked);
            let fresh = waker.clone();
            let changed = self.lock().state.idle.change_waker(place, fresh);
            if changed.is_ok() {
                return Some(place);
            }
        }
    }

    pub(super) fn leave_idle(&self, place: Place) -> Option<Waker> {
        self.change(|state, _| state.idle.leave(place))
    }

    /// The last handle goes. From now on permits are released under the lock, to see which is the last.
    #[cold]
    pub(super) fn desert(&self) -> Option<Arc<Self>> {
        self.change_life(|locked, _| {
            locked.state.desert();
            locked.life.desert();
            locked.life.keep(locked.state.acquired == 0)
        })
    }

    /// Ties the gate to itself, before anybody else knows it.
    pub(super) fn own(&self, gate: Arc<Self>) {
        self.lock().life.own(gate);
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let locked = self.lock();
        let mut snapshot = locked.state.snapshot();
        // One load: whatever changes the word later comes after this instant.
        let word = self.word.load(Acquire);
        if word & SHUT == 0 {
            snapshot.available = self.layout.available(word);
            snapshot.acquired = self.capacity - snapshot.available;
            snapshot.admissions = self.base.load(Relaxed) + self.layout.admissions(word);
            snapshot.rejections += self.layout.rejections(word);
        }
        snapshot
    }

    pub(super) fn drain_events(&self) -> EventBatch {
        if self.events == 0 {
            return EventBatch::default();
        }
        let fresh = Ring::new(self.events);
        let mut locked = self.lock();
        let ring = locked.state.journal.as_mut().and_then(|journal| journal.ring.as_mut());
        let full = ring.map(|ring| std::mem::replace(ring, fresh));
        drop(locked);
        full.map(Ring::into_batch).unwrap_or_default()
    }

    /// Whether a weight can ever be admitted.
    #[inline]
    fn is_valid(&self, weight: i64) -> bool {
        (1..=self.capacity).contains(&weight)
    }

    #[cold]
    fn refuse_invalid(&self, weight: i64) -> AcquireError {
        let error = if weight < 1 {
            AcquireError::InvalidWeight { weight }
        } else {
            AcquireError::Oversize { weight, capacity: self.capacity }
        };
        self.refuse(weight, error)
    }

    #[cold]
    fn refuse(&self, weight: i64, error: AcquireError) -> AcquireError {
        self.change(|state, effects| state.refuse(weight, error, effects))
    }

    /// Decides at an open gate. With `refuse` a lack of capacity is decided too, and counted.
    ///
    /// The id is right because the swap fails if the gate was shut since the word was read: `base`
    /// was read in between, and whoever changes it shuts the gate before. (Shut and opened again, the
    /// word is the same only after as many admissions as it can count, 2^24 at least, in the few
    /// nanoseconds between the load and the swap.)
    #[inline]
    fn pass(&self, weight: i64, refuse: bool) -> Pass {
        let mut word = self.word.load(Acquire);
        while word & SHUT == 0 {
            let base = self.base.load(Acquire);
            let fits = self.layout.fits(word, weight);
            let next = match fits {
                true => self.layout.admit(word, weight),
                false if refuse => self.layout.reject(word),
                false => None,
            };
            let Some(next) = next else { break };
            match self.word.compare_exchange_weak(word, next, AcqRel, Acquire) {
                Ok(_) if fits => return Pass::Admitted(PermitId::new(base + self.layout.admissions(next))),
                Ok(_) => return Pass::Refused,
                Err(now) => word = now,
            }
        }
        Pass::Undecided
    }

    /// Changes the state, then does what the change leaves to do.
    #[inline(always)]
    fn change<R>(&self, change: impl FnOnce(&mut State, &mut Effects) -> R) -> R {
        self.change_life(|locked, effects| change(&mut locked.state, effects))
    }

    #[inline(always)]
    fn change_life<R>(&self, change: impl FnOnce(&mut Locked, &mut Effects) -> R) -> R {
        let mut effects = Effects::default();
        let mut locked = self.lock();
        self.shut(&mut locked.state);
        let was_needed = locked.state.needed();
        let result = change(&mut locked, &mut effects);
        if !was_needed && !locked.state.needed() {
            self.open(&locked.state);
        }
        drop(locked);
        self.alive.touch();
        effects.run(self.observer.as_deref());
        result
    }

    #[inline]
    fn shut(&self, state: &mut State) {
        // Relaxed is enough: the flag changes under the lock alone.
        if self.word.load(Relaxed) & SHUT == 0 {
            let word = self.word.fetch_or(SHUT, AcqRel);
            state.acquired = self.capacity - self.layout.available(word);
            state.admissions = self.base.load(Relaxed) + self.layout.admissions(word);
            state.rejections += self.layout.rejections(word);
        }
    }

    fn open(&self, state: &State) {
        let mut counted = state.admissions - self.base.load(Relaxed);
        if counted > self.layout.most_admissions() {
            self.base.store(state.admissions, Release);
            counted = 0;
        }
        self.word.store(self.layout.pack(state.available(), counted), Release);
    }

    /// No code of others runs under the lock, so that nothing can poison it.
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Locked> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives weight back to an open gate, if it is one.
#[inline]
pub(super) fn release(word: &AtomicU64, layout: Layout, weight: i64) -> bool {
    let mut now = word.load(Relaxed);
    while now & SHUT == 0 {
        match word.compare_exchange_weak(now, layout.release(now, weight), Release, Relaxed) {
            Ok(_) => return true,
            Err(changed) => now = changed,
        }
    }
    false
}

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::reuse::{Lease, Next, Reuse};
use super::{Acquire, Core, Limit, Stripe};
use crate::metrics::End;
use crate::semaphore::Permit;
use crate::store::{Holder, Key, Lost, SlotId, SlotStore, StoreError};

/// Where a slot comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The store granted it.
    Store,
    /// The store could not answer and the limiter admits in an outage. The slot counts from when the
    /// store answers again, if it is still held then.
    FailOpen,
    /// The store could not answer and this process's share of the limit granted it. With the whole
    /// fleet it counts from when the store answers again, if it is still held then.
    Local,
    /// The id has no limit: the slot stands for nothing.
    Unlimited,
}

/// A slot, or as many as the weight says, held until this is dropped.
///
/// While it lives its lease is renewed, so that work may take as long as it likes. Dropping it gives
/// the slot back, from anywhere: outside an async runtime, during a panic, after the runtime is gone.
#[must_use = "a slot is given back when it is dropped"]
pub struct Slot {
    held: Arc<Held>,
    origin: Origin,
    active: u32,
    limit: Limit,
}

impl Slot {
    /// The slot's id, as the store has it.
    #[must_use]
    pub fn id(&self) -> SlotId {
        self.held.id()
    }

    /// Where the slot comes from.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Slots of this project in use just after this one was acquired, this one included: over the
    /// whole fleet for [`Origin::Store`], in this process for [`Origin::Local`], else 0. Of a slot that
    /// was [reused](crate::LimiterBuilder::reuse), what the store said last.
    #[must_use]
    pub fn active(&self) -> u32 {
        self.active
    }

    /// The limit that was applied.
    #[must_use]
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// How many slots this stands for.
    #[must_use]
    pub fn weight(&self) -> u32 {
        self.held.weight()
    }

    /// A weak handle to this slot, for work that may outlive its holder.
    #[must_use]
    pub fn handle(&self) -> SlotHandle {
        SlotHandle {
            held: Arc::downgrade(&self.held),
            origin: self.origin,
            active: self.active,
            limit: self.limit,
            outer: None,
        }
    }

    /// Resolves when the slot is lost: drained, past its `max_hold`, or not renewed for a whole
    /// lease, so that others may have been admitted in its place. Until then it never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe: nothing is lost with the future.
    pub async fn lost(&self) {
        lost(&Arc::downgrade(&self.held)).await;
    }

    /// Gives the slot back and waits for the store to confirm it.
    ///
    /// If a [`HeldSlot`] still keeps the slot, it stays taken, and this returns at once; likewise if
    /// this process keeps it for [`reuse`](crate::LimiterBuilder::reuse).
    ///
    /// # Errors
    ///
    /// The store could not be reached before the slot's lease ran out. It is free all the same.
    ///
    /// # Cancel safety
    ///
    /// The release is under way before the first await: dropping the future only gives up the
    /// confirmation.
    pub async fn release(self) -> Result<(), StoreError> {
        self.set_end(End::Completed);
        let Some(held) = Arc::into_inner(self.held) else { return Ok(()) };
        let confirmed =
            held.take_back(Instant::now()).map(|store| store.release_confirmed(&held.key, held.id()));
        drop(held);
        match confirmed {
            Some(confirmed) => confirmed.await,
            None => Ok(()),
        }
    }

    /// Keeps a permit of the process's own bulkhead for as long as the slot is kept.
    pub(crate) fn carry(&self, permit: Permit) {
        // A slot is acquired once, and with it its permit.
        let _ = self.held.permit.set(permit);
    }

    /// How the hold will have ended, for the metrics; a slot that is lost stays so.
    pub(crate) fn set_end(&self, end: End) {
        if !self.held.loss().lost {
            self.held.end.store(end as u8, Ordering::Relaxed);
        }
    }

    /// Whether a [`HeldSlot`] keeps the slot beyond this guard.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.held) > 1
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("id", &self.id())
            .field("origin", &self.origin)
            .field("active", &self.active)
            .field("limit", &self.limit)
            .field("weight", &self.weight())
            .finish()
    }
}

/// A weak handle to a slot: does not keep it, tells about it, and can be turned into what keeps it.
///
/// The layer puts one into each request's extensions. A handler that upgrades the connection, or
/// spawns work that outlives the response, calls [`hold`](Self::hold) and moves what it gets there.
///
/// Of a request that has passed several layers, it is about the innermost one's slot, and holds and
/// loses all of them together.
#[derive(Clone)]
pub struct SlotHandle {
    held: Weak<Held>,
    origin: Origin,
    active: u32,
    limit: Limit,
    outer: Option<Arc<Self>>,
}

impl SlotHandle {
    /// The handle for a request that has the slot of a layer further out as well.
    pub(crate) fn within(self, outer: Option<Self>) -> Self {
        Self { outer: outer.map(Arc::new), ..self }
    }

    /// Keeps the slot until the returned guard is dropped, wherever it is moved; `None` if it was
    /// given back already.
    #[must_use]
    pub fn hold(&self) -> Option<HeldSlot> {
        let outer = self.outer.as_ref().and_then(|outer| outer.hold()).map(Box::new);
        self.held.upgrade().map(|held| HeldSlot { held, outer })
    }

    /// Where the slot comes from.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Slots of this project in use just after this one was acquired; see [`Slot::active`].
    #[must_use]
    pub fn active(&self) -> u32 {
        self.active
    }

    /// The limit that was applied.
    #[must_use]
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// Resolves when the slot is lost, or was given back; see [`Slot::lost`].
    ///
    /// # Cancel safety
    ///
    /// Safe: nothing is lost with the future.
    pub async fn lost(&self) {
        let outer = self.outer.as_ref().map(|outer| Box::pin(outer.lost()));
        either_lost(&self.held, outer).await;
    }
}

impl fmt::Debug for SlotHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotHandle")
            .field("origin", &self.origin)
            .field("active", &self.active)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// Keeps a slot taken, and its lease renewed, until it is dropped. Made by [`SlotHandle::hold`].
#[must_use = "the slot is kept only until this is dropped"]
pub struct HeldSlot {
    held: Arc<Held>,
    outer: Option<Box<Self>>,
}

impl HeldSlot {
    /// The slot's id, as the store has it.
    #[must_use]
    pub fn id(&self) -> SlotId {
        self.held.id()
    }

    /// Resolves when the slot is lost; see [`Slot::lost`].
    ///
    /// # Cancel safety
    ///
    /// Safe: nothing is lost with the future.
    pub async fn lost(&self) {
        let outer = self.outer.as_ref().map(|outer| Box::pin(outer.lost()));
        either_lost(&Arc::downgrade(&self.held), outer).await;
    }
}

impl fmt::Debug for HeldSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldSlot").field("id", &self.id()).field("weight", &self.held.weight()).finish()
    }
}

/// What all guards of one slot share. It exists before the store is asked, so that the slot is given
/// back whatever becomes of the caller; the last guard gives it back.
pub(super) struct Held {
    stripe: Arc<Stripe>,
    key: Key,
    id: SlotId,
    /// What the store has registered, where it may outlive these guards.
    lease: OnceLock<Arc<Lease>>,
    how: Acquire,
    since: Instant,
    /// Who has to be told of the release: a [`Taken`].
    taken: AtomicU8,
    /// The hold has begun.
    granted: AtomicBool,
    /// How the hold ends: an [`End`].
    end: AtomicU8,
    loss: Mutex<Loss>,
    /// Released after the slot: fields are dropped after `Drop` has run.
    permit: OnceLock<Permit>,
}

#[derive(Default)]
struct Loss {
    lost: bool,
    /// Those who wait for it, if anybody ever did.
    news: Option<Arc<Notify>>,
}

/// Who holds the slot on the guards' behalf.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Taken {
    /// Nobody: the guards stand for nothing.
    Nowhere = 0,
    Store = 1,
    /// The store, and this process's share of the limit.
    Both = 2,
}

impl Held {
    pub(super) fn new(stripe: &Arc<Stripe>, key: Key, how: Acquire) -> Arc<Self> {
        stripe.enter();
        Arc::new(Self {
            stripe: Arc::clone(stripe),
            key,
            id: SlotId::new(),
            lease: OnceLock::new(),
            how,
            since: Instant::now(),
            taken: AtomicU8::new(Taken::Nowhere as u8),
            granted: AtomicBool::new(false),
            end: AtomicU8::new(End::Dropped as u8),
            loss: Mutex::default(),
            permit: OnceLock::new(),
        })
    }

    /// One for the same request, under another id.
    pub(super) fn anew(&self) -> Arc<Self> {
        Self::new(&self.stripe, self.key.clone(), self.how)
    }

    pub(super) fn stripe(&self) -> &Arc<Stripe> {
        &self.stripe
    }

    fn core(&self) -> &Core {
        &self.stripe.core
    }

    /// Takes over a slot that is kept, if there is one, and returns the last known use.
    pub(super) fn take_idle(self: &Arc<Self>, reuse: &Reuse, most: u32) -> Option<u32> {
        let next = Next { holder: &self.weak(), weight: self.weight(), most, now: self.since };
        let (lease, used) = reuse.take(&self.key, &next)?;
        self.set_lease(lease);
        self.set_taken(Taken::Store);
        Some(used)
    }

    /// The slot that is to be claimed may be kept when it is released.
    pub(super) fn make_reusable(self: &Arc<Self>, reuse: &Reuse, most: u32) {
        let next = Next { holder: &self.weak(), weight: self.weight(), most, now: self.since };
        self.set_lease(reuse.lease(&self.key, self.id, &next));
    }

    fn set_lease(&self, lease: Arc<Lease>) {
        // A guard is for one slot.
        let _ = self.lease.set(lease);
    }

    fn weak(self: &Arc<Self>) -> Weak<dyn Holder> {
        let weak: Weak<Self> = Arc::downgrade(self);
        weak
    }

    /// Who is told when the slot is lost.
    pub(super) fn holder(self: &Arc<Self>) -> Weak<dyn Holder> {
        match self.lease.get() {
            Some(lease) => {
                let weak: Weak<Lease> = Arc::downgrade(lease);
                weak
            }
            None => self.weak(),
        }
    }

    /// Begins the hold.
    pub(super) fn granted(self: Arc<Self>, origin: Origin, active: u32, limit: Limit) -> Slot {
        self.granted.store(true, Ordering::Release);
        self.core().hold_begins(self.weight());
        Slot { held: self, origin, active, limit }
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    pub(super) fn id(&self) -> SlotId {
        self.lease.get().map_or(self.id, |lease| lease.id())
    }

    pub(super) fn how(&self) -> Acquire {
        self.how
    }

    pub(super) fn weight(&self) -> u32 {
        self.how.weight
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    pub(super) fn set_taken(&self, taken: Taken) {
        self.taken.store(taken as u8, Ordering::Release);
    }

    /// The store that has to be told, once: not of a slot that this process keeps. The process's own
    /// share is given back at once.
    fn take_back(&self, now: Instant) -> Option<&dyn SlotStore> {
        let taken = self.taken.swap(Taken::Nowhere as u8, Ordering::AcqRel);
        if let Some(local) = self.core().local_slots().filter(|_| taken == Taken::Both as u8) {
            local.release(&self.key, self.id());
        }
        (taken != Taken::Nowhere as u8 && !self.is_kept(now)).then(|| self.core().store())
    }

    /// Lets this process keep the slot for the next request, if it may.
    fn is_kept(&self, now: Instant) -> bool {
        // One that was not granted yet may never be.
        let lease = self.lease.get().filter(|_| self.granted.load(Ordering::Acquire));
        lease.zip(self.core().keeps()).is_some_and(|(lease, reuse)| reuse.keep(lease, now))
    }

    fn loss(&self) -> MutexGuard<'_, Loss> {
        self.loss.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What announces the loss, unless it has happened.
    fn news(&self) -> Option<Arc<Notify>> {
        let mut loss = self.loss();
        if loss.lost { None } else { Some(Arc::clone(loss.news.get_or_insert_default())) }
    }

    fn ends(&self) -> Option<Instant> {
        let counted = self.taken.load(Ordering::Acquire) != Taken::Nowhere as u8;
        self.core().terms().max_hold().filter(|_| counted).map(|most| self.since + most)
    }
}

impl Holder for Held {
    fn lost(&self, why: Lost) {
        let mut loss = self.loss();
        if std::mem::replace(&mut loss.lost, true) {
            return;
        }
        let news = loss.news.take();
        let end = if why == Lost::MaxHold { End::MaxHold } else { End::Lost };
        self.end.store(end as u8, Ordering::Relaxed);
        drop(loss);
        self.core().slot_lost(&self.key, why);
        if let Some(news) = news {
            news.notify_waiters();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let now = Instant::now();
        if let Some(store) = self.take_back(now) {
            store.release(&self.key, self.id());
        }
        if *self.granted.get_mut() {
            let end = usize::from(*self.end.get_mut());
            self.core().hold_ends(self.weight(), now - self.since, end);
        }
        self.stripe.leave();
        // Those who wait for a loss through a weak handle: there is nothing left to lose.
        let loss = self.loss.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(news) = loss.news.take() {
            news.notify_waiters();
        }
    }
}

/// The first loss, of this slot or of those of the layers further out.
async fn either_lost(held: &Weak<Held>, outer: Option<impl Future<Output = ()>>) {
    match outer {
        None => lost(held).await,
        Some(outer) => tokio::select! { () = lost(held) => {}, () = outer => {} },
    }
}

/// Resolves when the slot is lost or given back. Holds no strong reference across an await, which
/// would keep the slot.
async fn lost(held: &Weak<Held>) {
    let (ends, news) = match held.upgrade() {
        Some(held) => (held.ends(), held.news()),
        None => return,
    };
    let Some(news) = news else { return };
    let told = news.notified();
    // What was lost or given back before `told` existed is not announced to it.
    if held.upgrade().is_none_or(|held| held.loss().lost) {
        return;
    }
    match ends {
        Some(ends) => tokio::select! { () = told => {}, () = sleep_until(ends) => {} },
        None => told.await,
    }
}

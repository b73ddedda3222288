//! The policy: limits, outages, and the guards that hold slots.
//!
//! A [`Limiter`] asks its [`SlotStore`] for slots and hands them out as [`Slot`]s. The
//! layer of this crate is one user of it; a worker that takes jobs from a queue may be another:
//!
//! ```
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_slots::{AcquireError, Limiter, MemoryStore};
//!
//! let limiter = Limiter::builder(MemoryStore::new()).limit(2).build()?;
//! match limiter.try_acquire("acme").await {
//!     Ok(_slot) => { /* work; the slot is given back when `_slot` is dropped */ }
//!     Err(AcquireError::Saturated { retry_after, .. }) => println!("again in {retry_after:?}"),
//!     Err(error) => return Err(error.into()),
//! }
//! # Ok(()) }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run()).unwrap();
//! ```

mod builder;
mod error;
mod id;
mod limits;
mod outage;
mod reuse;
mod slot;
mod stripe;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

pub use self::builder::LimiterBuilder;
pub use self::error::{AcquireError, KeyError};
pub use self::id::ProjectId;
use self::limits::Limits;
pub use self::limits::{Limit, LimitAnswer, LimitSource};
pub use self::outage::OnOutage;
use self::outage::{Outage, local_limit};
use self::reuse::Reuse;
use self::slot::{Held, Taken};
pub use self::slot::{HeldSlot, Origin, Slot, SlotHandle};
use crate::metrics::{Acquired, Meters, Outcome};
use crate::store::{Claim, Grant, Key, Lost, Reply, SlotStore, StoreError, Terms};
use crate::trace::{Sparingly, event};

/// Limits how many slots each project has in use at once. A cheap clone; clones share everything.
///
/// Needs a tokio runtime for a [`LimitSource`] and for [`RedisStore`](crate::RedisStore); with a
/// [`MemoryStore`](crate::MemoryStore) and fixed limits it runs anywhere.
#[derive(Clone)]
pub struct Limiter {
    /// At least one, and all of the same core.
    stripes: Arc<[Arc<Stripe>]>,
}

/// How to acquire: how many slots one request takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acquire {
    weight: u32,
    shadow: bool,
}

impl Acquire {
    /// Takes `weight` slots, all or none.
    #[must_use]
    pub fn weight(weight: u32) -> Self {
        Self { weight, shadow: false }
    }

    /// The caller passes whatever the answer is, and counts refusals itself.
    #[must_use]
    pub(crate) fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }
}

impl Default for Acquire {
    /// One slot.
    fn default() -> Self {
        Self::weight(1)
    }
}

impl Limiter {
    fn new(core: Core) -> Self {
        let core = Arc::new(core);
        Self { stripes: (0..stripe::stripes()).map(|_| Stripe::new(&core)).collect() }
    }

    fn core(&self) -> &Arc<Core> {
        &self.stripes[0].core
    }

    /// Starts a limiter on this store.
    pub fn builder(store: impl SlotStore) -> LimiterBuilder {
        LimiterBuilder::new(Arc::new(store))
    }

    /// The limiter's name: the `policy` of metrics and refusals.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.core().terms.policy
    }

    /// Acquires one slot of `id`, without waiting for one.
    ///
    /// # Errors
    ///
    /// See [`AcquireError`]. With [`OnOutage::Admit`] an outage of the store is none: it yields a
    /// slot of [`Origin::FailOpen`].
    ///
    /// # Cancel safety
    ///
    /// Safe: a slot that is granted after the future was dropped is given back.
    pub async fn try_acquire(&self, id: &str) -> Result<Slot, AcquireError> {
        self.start(id, Acquire::default()).await
    }

    /// Acquires slots of `id` as `how` says.
    ///
    /// # Errors
    ///
    /// As for [`try_acquire`](Self::try_acquire), and [`AcquireError::Weight`] for a weight that can
    /// never be admitted.
    ///
    /// # Cancel safety
    ///
    /// Safe: slots that are granted after the future was dropped are given back.
    pub async fn acquire(&self, id: &str, how: Acquire) -> Result<Slot, AcquireError> {
        self.start(id, how).await
    }

    /// How many slots of `id` are in use over the whole fleet, with those that a process keeps for
    /// [`reuse`](LimiterBuilder::reuse). It only reads.
    ///
    /// # Errors
    ///
    /// [`AcquireError::Key`], and [`AcquireError::Unavailable`] when the store cannot answer,
    /// whatever the outage policy: there is no number then.
    pub async fn active(&self, id: &str) -> Result<u32, AcquireError> {
        let key = self.core().key(id)?;
        self.core().store.count(&key, &self.core().terms).await.map_err(AcquireError::Unavailable)
    }

    /// Drops every slot of `id`, whoever holds it, and returns how many there were.
    ///
    /// For emergencies. The work goes on; its holders learn it by [`Slot::lost`], and no renewal
    /// brings the slots back. Slots that a process keeps for [`reuse`](LimiterBuilder::reuse) may be among
    /// them.
    ///
    /// # Errors
    ///
    /// As for [`active`](Self::active).
    pub async fn drain(&self, id: &str) -> Result<u32, AcquireError> {
        let key = self.core().key(id)?;
        if let Some(reuse) = &self.core().reuse {
            reuse.forget(&key);
        }
        self.core().store.drain(&key, &self.core().terms).await.map_err(AcquireError::Unavailable)
    }

    /// Forgets the cached limit of `id`: the next request looks it up.
    pub fn invalidate(&self, id: &str) {
        self.core().limits.invalidate(id);
    }

    /// Refuses new requests with [`AcquireError::Closed`], and waits until every slot of this
    /// limiter was given back and the store has confirmed it, for at most `deadline`.
    ///
    /// Slots in flight go on being renewed, also after the deadline. Returns whether all were given
    /// back in time.
    ///
    /// # Cancel safety
    ///
    /// The limiter stays closed; call again to go on waiting.
    pub async fn shutdown(&self, deadline: Duration) -> bool {
        self.core().closed.store(true, Ordering::SeqCst);
        self.core().give_back_idle();
        let all_back = async {
            loop {
                let gone = self.core().gone.notified();
                // None is added to a stripe any more, but for one that sees in time that it is closed.
                if self.stripes.iter().all(|stripe| stripe.live.load(Ordering::SeqCst) == 0) {
                    break;
                }
                gone.await;
            }
            // The last guards may not have seen that it is closed.
            self.core().give_back_idle();
            self.core().store.flush().await;
        };
        timeout(deadline, all_back).await.is_ok()
    }

    async fn start(&self, id: &str, how: Acquire) -> Result<Slot, AcquireError> {
        let prepared = self.prepare(id, how).await?;
        match self.claim(prepared) {
            Ok(settled) => settled,
            Err(claiming) => claiming.await,
        }
    }

    /// All that comes before the store is asked: the checks, and the limit.
    pub(crate) fn prepare(&self, id: &str, how: Acquire) -> Reply<Result<Prepared, AcquireError>> {
        let core = self.core();
        let key = match core.check(id, how.weight) {
            Ok(key) => key,
            Err(error) => return Reply::ready(Err(error)),
        };
        if let Some(limit) = core.limits.known(id, core.meters()) {
            return Reply::ready(Ok(Prepared { key, how, limit }));
        }
        let (core, id) = (Arc::clone(core), ProjectId::new(id));
        Reply::later(async move {
            let limit = core.limits.resolve(id?, &core.terms).await;
            Ok(Prepared { key, how, limit })
        })
    }

    /// Asks the store, where the limit needs it; what is left to wait for, if anything is.
    pub(crate) fn claim(&self, prepared: Prepared) -> Result<Result<Slot, AcquireError>, Claiming> {
        let stripe = &self.stripes[stripe::mine(self.stripes.len())];
        self.core().claim(stripe, prepared)
    }

    pub(crate) fn meters(&self) -> &Meters {
        self.core().meters()
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("terms", &self.core().terms).finish_non_exhaustive()
    }
}

/// An acquire whose limit is known.
pub(crate) struct Prepared {
    key: Key,
    how: Acquire,
    limit: Limit,
}

impl Prepared {
    pub(crate) fn weight(&self) -> u32 {
        self.how.weight
    }
}

/// A claim that the store has not answered yet.
pub(crate) struct Claiming {
    held: Option<Arc<Held>>,
    most: u32,
    reply: Reply<Result<Grant, StoreError>>,
}

impl Future for Claiming {
    type Output = Result<Slot, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.reply).poll(cx));
        let held = self.held.take().expect("a claim was polled after it was answered");
        let stripe = Arc::clone(held.stripe());
        Poll::Ready(stripe.core.settle(held, self.most, answer))
    }
}

/// What all clones of a limiter share.
pub(crate) struct Core {
    store: Arc<dyn SlotStore>,
    terms: Arc<Terms>,
    prefix: String,
    max_weight: u32,
    limits: Limits,
    outage: Outage,
    reuse: Option<Arc<Reuse>>,
    closed: AtomicBool,
    /// Once it is closed: guards are gone, perhaps the last ones.
    gone: Notify,
    /// An average of the hold times, in seconds: the bits of an `f64`.
    hold_time: AtomicU64,
    loss_warnings: Sparingly,
}

/// What changes with every request: one for each thread that is at work.
#[repr(align(128))]
struct Stripe {
    core: Arc<Core>,
    /// Guards that exist and were made here, in any state.
    live: AtomicUsize,
}

impl Stripe {
    fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core: Arc::clone(core), live: AtomicUsize::new(0) })
    }

    /// A guard exists from now on, though its slot may yet be refused.
    fn enter(&self) {
        self.live.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        if self.live.fetch_sub(1, Ordering::SeqCst) == 1 && self.core.is_closed() {
            self.core.gone.notify_waiters();
        }
    }
}

impl Core {
    fn new(
        store: Arc<dyn SlotStore>,
        terms: Terms,
        prefix: String,
        max_weight: u32,
        limits: Limits,
        outage: Outage,
        reuse: Option<Duration>,
    ) -> Self {
        Self {
            reuse: reuse.map(|time| Reuse::new(Arc::clone(&store), time)),
            store,
            terms: Arc::new(terms),
            prefix,
            max_weight,
            limits,
            outage,
            closed: AtomicBool::new(false),
            gone: Notify::new(),
            hold_time: AtomicU64::new(0),
            loss_warnings: Sparingly::default(),
        }
    }

    fn meters(&self) -> &Meters {
        &self.terms.meters
    }

    fn terms(&self) -> &Terms {
        &self.terms
    }

    fn store(&self) -> &dyn SlotStore {
        &*self.store
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Where a slot may stay that is released now.
    fn keeps(&self) -> Option<&Arc<Reuse>> {
        self.reuse.as_ref().filter(|_| !self.is_closed())
    }

    fn give_back_idle(&self) {
        if let Some(reuse) = &self.reuse {
            reuse.forget_all();
        }
    }

    fn local_slots(&self) -> Option<&dyn SlotStore> {
        match &self.outage {
            Outage::Local { slots, .. } => Some(slots),
            Outage::Admit | Outage::Refuse => None,
        }
    }

    fn key(&self, id: &str) -> Result<Key, KeyError> {
        id::key(&self.prefix, id)
    }

    fn check(&self, id: &str, weight: u32) -> Result<Key, AcquireError> {
        if self.is_closed() {
            return Err(AcquireError::Closed);
        }
        let key = self.key(id)?;
        if weight == 0 || weight > self.max_weight {
            return Err(AcquireError::Weight { weight, most: self.max_weight });
        }
        Ok(key)
    }

    fn claim(
        &self,
        stripe: &Arc<Stripe>,
        prepared: Prepared,
    ) -> Result<Result<Slot, AcquireError>, Claiming> {
        let Prepared { key, how, limit } = prepared;
        let (held, weight) = (Held::new(stripe, key, how), how.weight);
        // Once more, now that `shutdown` would wait for this guard: it may have begun meanwhile.
        if self.is_closed() {
            return Ok(Err(AcquireError::Closed));
        }
        let Limit::Max(most) = limit else {
            self.count(Outcome::Admitted);
            return Ok(Ok(held.granted(Origin::Unlimited, 0, limit)));
        };
        // A paused id refuses every weight for now; any other limit refuses a larger one for ever.
        if weight > most && most > 0 {
            return Ok(Err(AcquireError::Weight { weight, most }));
        }
        if let Some(reuse) = &self.reuse {
            if let Some(active) = held.take_idle(reuse, most) {
                self.meters().reused.add(1);
                self.count(Outcome::Admitted);
                self.record_use(active, most);
                return Ok(Ok(held.granted(Origin::Store, active, limit)));
            }
            held.make_reusable(reuse, most);
        }
        held.set_taken(Taken::Store);
        let reply = self.store.acquire(self.claim_of(&held, most));
        match reply.into_ready() {
            Ok(answer) => Ok(self.settle(held, most, answer)),
            Err(reply) => Err(Claiming { held: Some(held), most, reply }),
        }
    }

    fn claim_of(&self, held: &Arc<Held>, most: u32) -> Claim {
        Claim {
            key: held.key().clone(),
            slot: held.id(),
            weight: held.weight(),
            limit: most,
            terms: Arc::clone(&self.terms),
            holder: held.holder(),
        }
    }

    fn settle(
        &self,
        held: Arc<Held>,
        most: u32,
        answer: Result<Grant, StoreError>,
    ) -> Result<Slot, AcquireError> {
        let acquired = match answer {
            Ok(Grant::Granted { .. }) => Acquired::Granted,
            Ok(Grant::Refused { .. }) => Acquired::Refused,
            Err(_) => Acquired::Error,
        };
        self.meters().acquire_seconds.get(acquired).record(held.since().elapsed().as_secs_f64());
        if let (Some(reuse), Ok(Grant::Granted { active } | Grant::Refused { active })) =
            (&self.reuse, &answer)
        {
            reuse.heard(held.key(), *active, most);
        }
        match answer {
            Ok(Grant::Granted { active }) => {
                self.count(Outcome::Admitted);
                self.record_use(active, most);
                Ok(held.granted(Origin::Store, active, Limit::Max(most)))
            }
            Ok(Grant::Refused { active }) => {
                held.set_taken(Taken::Nowhere);
                self.count_refusal(&held, Outcome::Rejected);
                self.record_use(active, most);
                Err(self.saturated(active, most))
            }
            // The store sees to what it may have taken: the guard keeps its claim on the release
            // until here, and a store that failed has begun to undo it.
            Err(error) => self.in_outage(&held, most, error),
        }
    }

    fn in_outage(&self, held: &Arc<Held>, most: u32, error: StoreError) -> Result<Slot, AcquireError> {
        held.set_taken(Taken::Nowhere);
        // Under an id of its own: the store may yet have to undo what became of the claim.
        let held = held.anew();
        match &self.outage {
            Outage::Admit => {
                held.set_taken(Taken::Store);
                self.store.adopt(self.claim_of(&held, most));
                self.count(Outcome::FailOpen);
                Ok(held.granted(Origin::FailOpen, 0, Limit::Max(most)))
            }
            Outage::Refuse => {
                self.count_refusal(&held, Outcome::FailClosed);
                Err(AcquireError::Unavailable(error))
            }
            Outage::Local { share, slots } => {
                let most = local_limit(most, *share);
                let Ok(Ok(grant)) = slots.acquire(self.claim_of(&held, most)).into_ready() else {
                    return Err(AcquireError::Unavailable(error));
                };
                match grant {
                    Grant::Granted { active } => {
                        held.set_taken(Taken::Both);
                        self.store.adopt(self.claim_of(&held, most));
                        self.count(Outcome::LocalAdmitted);
                        Ok(held.granted(Origin::Local, active, Limit::Max(most)))
                    }
                    Grant::Refused { active } => {
                        self.count_refusal(&held, Outcome::LocalRejected);
                        Err(self.saturated(active, most))
                    }
                }
            }
        }
    }

    fn saturated(&self, active: u32, limit: u32) -> AcquireError {
        AcquireError::Saturated { active, limit, retry_after: self.retry_after(limit) }
    }

    /// When a slot is likely to come free: the mean hold time over the number of slots, from 1 s to
    /// 30 s. Whole seconds, since that is what HTTP can say, and up to half as many more, so that
    /// refused callers do not return together.
    fn retry_after(&self, limit: u32) -> Duration {
        let hold_time = f64::from_bits(self.hold_time.load(Ordering::Relaxed));
        let estimate = (hold_time / f64::from(limit.max(1))).ceil().clamp(1.0, 30.0) as u64;
        Duration::from_secs(estimate + fastrand::u64(0..=(estimate / 2).max(1)))
    }

    fn count(&self, outcome: Outcome) {
        self.meters().requests.get(outcome).add(1);
    }

    /// In shadow it is none, and the caller counts it.
    fn count_refusal(&self, held: &Held, outcome: Outcome) {
        if !held.how().shadow {
            self.count(outcome);
        }
    }

    fn record_use(&self, active: u32, most: u32) {
        if most > 0 {
            self.meters().utilization.record(f64::from(active) / f64::from(most));
        }
    }

    fn hold_begins(&self, weight: u32) {
        self.meters().active_slots.add(f64::from(weight));
    }

    fn hold_ends(&self, weight: u32, held_for: Duration, end: usize) {
        let held_for = held_for.as_secs_f64();
        self.meters().active_slots.add(-f64::from(weight));
        self.meters().hold_seconds.get(end).record(held_for);
        let mean = f64::from_bits(self.hold_time.load(Ordering::Relaxed));
        // Up to a second they all make the same `retry_after`, and many threads may be here at once.
        if held_for > 1.0 || mean > 1.0 {
            let mean = mean + (held_for - mean) / 16.0;
            self.hold_time.store(mean.to_bits(), Ordering::Relaxed);
        }
    }

    fn slot_lost(&self, _key: &Key, _why: Lost) {
        self.meters().lost.add(1);
        if self.loss_warnings.due() {
            event!(warn, policy = self.terms.policy, key = ?_key, why = ?_why, "slot lost before it was released");
        }
    }
}

//! The owner of everything that is in flight between this process and its store: one server, or the
//! nodes of a cluster, with a lane for each.
//!
//! At most [`FLIGHTS`] flights are out at a time on a lane. A claim that finds one free is
//! sent by its caller's own task; whatever finds none waits, and goes out with all else that waits
//! once a flight is back. So an idle server costs no hop between tasks, and a busy one is asked in
//! batches. On a slow link that bound would cost time: then one more flight a millisecond goes out.

mod calls;
mod links;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use ::redis::{Cmd, RedisResult, Value};
use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::unconstrained;
use tokio::time::{Instant, timeout_at};

pub(super) use self::calls::Ran;
pub(super) use self::links::Place;
use super::connection::Endpoint;
use super::error::{connection_lost, from_redis, timed_out};
use super::flight::{Confirm, Failed, Flight, FlightReply};
use super::news::News;
use super::script;
use super::state::{FLIGHTS, Home, Out, State};
use super::upkeep;
use crate::metrics::Operation;
use crate::store::{Claim, Grant, Key, Reply, SlotId, StoreError, StoreErrorKind, Terms};

/// So many at the most, however slow the link is.
const MOST_FLIGHTS: usize = 512;
/// The longest that a claim or a release waits for a flight on a slow link.
pub(super) const MOST_WAIT: Duration = Duration::from_millis(1);

pub(super) struct Driver {
    state: Mutex<State>,
    /// Held while a flight is made up and handed to the connection; taken before `state`.
    gate: Mutex<()>,
    /// Wakes the upkeep task.
    pub(super) wake: Arc<Notify>,
    /// A connection is there, or none is to be had.
    linked: Notify,
}

impl Driver {
    pub(super) fn new(endpoint: Endpoint) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::new(endpoint)),
            gate: Mutex::default(),
            wake: Arc::default(),
            linked: Notify::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn acquire(self: &Arc<Self>, claim: Claim) -> Reply<Result<Grant, StoreError>> {
        let (slot, now) = (claim.slot, Instant::now());
        let deadline = now + claim.terms.timeout;
        let terms = Arc::clone(&claim.terms);
        let (reply, answer) = oneshot::channel();
        let mut state = self.lock();
        let lane = state.table.routes.lane_of(&claim.key);
        let mut admit = || {
            self.ready(&mut state, &terms, now)?;
            self.want(&mut state, lane);
            state.lanes[lane].breaker.admit(now, deadline)
        };
        if let Err(error) = admit() {
            drop(state);
            return Reply::ready(Err(counted(&terms, Operation::Acquire, error)));
        }
        state.table.enqueue(claim, reply, now);
        // Else whoever lands next takes it along.
        let flies = state.lanes[lane].out.len() < FLIGHTS;
        if !flies {
            self.watch_queue(&mut state);
        }
        drop(state);
        let driver = Arc::clone(self);
        Reply::later(async move {
            if flies && driver.fly_next(lane, FLIGHTS, Some(deadline)).await {
                driver.depart();
            }
            let answer = match timeout_at(deadline, answer).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(StoreError::new(StoreErrorKind::Other, "the store's runtime went away")),
                Err(_) => {
                    driver.release(slot);
                    Err(timed_out())
                }
            };
            answer.map_err(|error| counted(&terms, Operation::Acquire, error))
        })
    }

    pub(super) fn adopt(self: &Arc<Self>, claim: Claim) {
        let (mut state, now) = (self.lock(), Instant::now());
        // Where there is no runtime, none of it will ever be sent.
        if self.ready(&mut state, &claim.terms, now).is_ok() {
            let lane = state.table.routes.lane_of(&claim.key);
            self.want(&mut state, lane);
            state.table.adopt(claim, now);
        }
    }

    pub(super) fn release(self: &Arc<Self>, slot: SlotId) {
        let mut news = News::default();
        let mut state = self.lock();
        state.table.release(slot, None, &mut news);
        let pilots = self.summon(&mut state);
        drop(state);
        news.deliver();
        self.call_pilots(pilots);
    }

    /// Releases a slot, whoever acquired it: one that we do not hold is sent to the server too.
    pub(super) fn release_confirmed(
        self: &Arc<Self>,
        key: &Key,
        slot: SlotId,
        confirm: Confirm,
    ) -> Result<(), StoreError> {
        let mut news = News::default();
        let mut state = self.lock();
        if state.table.knows(slot) {
            state.table.release(slot, Some(confirm), &mut news);
        } else {
            let terms = state.terms.first().cloned().unwrap_or_else(some_terms);
            self.ready(&mut state, &terms, Instant::now())?;
            state.table.release_foreign(key.clone(), slot, terms, confirm);
        }
        let pilots = self.summon(&mut state);
        drop(state);
        news.deliver();
        self.call_pilots(pilots);
        Ok(())
    }

    pub(super) fn flush(&self) -> Reply<()> {
        match self.lock().table.when_flushed() {
            None => Reply::ready(()),
            // An error means that the driver is gone, and all it had to release with it.
            Some(flushed) => Reply::later(async move { flushed.await.unwrap_or_default() }),
        }
    }

    /// Sees to it that there is a runtime to run on, and an upkeep task.
    fn ready(
        self: &Arc<Self>,
        state: &mut State,
        terms: &Arc<Terms>,
        now: Instant,
    ) -> Result<(), StoreError> {
        state.tick = state.tick.min(terms.lease / 12);
        if !state.terms.iter().any(|known| known.policy == terms.policy) {
            state.terms.push(Arc::clone(terms));
            state.show(0, None);
        }
        if !state.is_driven(now) {
            self.move_in(state)?;
        }
        if state.dozing {
            state.dozing = false;
            state.due = Some(now);
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Makes the current runtime the driver's. What ran on another one is gone with it, or stands still.
    fn move_in(self: &Arc<Self>, state: &mut State) -> Result<(), StoreError> {
        let handle = Handle::try_current().map_err(|_| no_runtime())?;
        state.homes += 1;
        let id = state.homes;
        // For the upkeep task that was: it stands before the next one in the line.
        self.wake.notify_one();
        let upkeep = upkeep::spawn(&handle, Arc::downgrade(self), Arc::clone(&self.wake), id);
        state.home = Some(Home { id, handle, upkeep });
        for lane in &mut state.lanes {
            lane.link = None;
            lane.endpoint.forget();
            lane.recovering = false;
            lane.summoned = None;
        }
        state.dozing = false;
        state.due = Some(Instant::now());
        Ok(())
    }

    /// Gives up what an earlier runtime than this home had under way.
    pub(super) fn strand(&self, home: u64) {
        let mut news = News::default();
        let mut state = self.lock();
        if state.is_home(home) {
            state.strand(Instant::now(), &mut news);
        }
        drop(state);
        news.deliver();
    }

    /// Calls pilots for what waits, if they may fly.
    pub(super) fn depart(self: &Arc<Self>) {
        let mut state = self.lock();
        let pilots = self.summon(&mut state);
        drop(state);
        self.call_pilots(pilots);
    }

    /// Where pilots are to be called for what waits.
    fn summon(self: &Arc<Self>, state: &mut State) -> Vec<(usize, Handle)> {
        for lane in 0..state.lanes.len() {
            if state.table.waiting_since(lane).is_some() {
                self.want(state, lane);
            }
        }
        let pilots = state.summon_all();
        self.watch_queue(state);
        pilots
    }

    /// Has the upkeep task see to it that what waits does not wait for long: the flights that are out
    /// may be slow, or their callers too busy to land them. A pilot that was called needs no such help,
    /// and that task's waking would have a second worker of the runtime woken each time.
    fn watch_queue(&self, state: &mut State) {
        let waits = (0..state.lanes.len()).any(|lane| state.waits_alone(lane));
        if waits && !std::mem::replace(&mut state.watching_queue, true) {
            state.due = Some(state.due.map_or(Instant::now(), |due| due.min(Instant::now())));
            self.wake.notify_one();
        }
    }

    fn call_pilots(self: &Arc<Self>, pilots: Vec<(usize, Handle)>) {
        for (lane, handle) in pilots {
            let driver = Arc::clone(self);
            handle.spawn(async move { while driver.fly_next(lane, FLIGHTS, None).await {} });
        }
    }

    /// Calls a pilot although all flights are out.
    pub(super) fn depart_late(self: &Arc<Self>, handle: &Handle, lane: usize) {
        let driver = Arc::clone(self);
        handle.spawn(async move {
            let mut most = MOST_FLIGHTS;
            while driver.fly_next(lane, most, None).await {
                most = FLIGHTS;
            }
        });
    }

    /// Flies what waits on a lane, if fewer than `most` flights are out; tells whether it did.
    ///
    /// A flight carries whatever waits, also for callers that have more time than this one has
    /// `until`: then a task of its own brings it home.
    async fn fly_next(self: &Arc<Self>, lane: usize, most: usize, until: Option<Instant>) -> bool {
        let mut flying = None;
        poll_fn(|cx| match &mut flying {
            None => {
                // Flights are handed to the connection in the order in which they are made up: a
                // slot that was given back first is back first.
                let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
                let Some((flight, home)) = self.take_flight(lane, most) else { return Poll::Ready(false) };
                let outlasts = until.is_some_and(|until| flight.peek(|f| f.deadline > until) == Some(true));
                let flight = flying.insert(Box::pin(Airborne::new(self, flight).fly()));
                let polled = flight.as_mut().poll(cx).map(|()| true);
                if !outlasts || polled.is_ready() {
                    return polled;
                }
                if let Some(flight) = flying.take() {
                    self.bring_home(&home, flight);
                }
                Poll::Ready(true)
            }
            Some(flight) => flight.as_mut().poll(cx).map(|()| true),
        })
        .await
    }

    fn bring_home(
        self: &Arc<Self>,
        home: &Handle,
        flight: Pin<Box<impl Future<Output = ()> + Send + 'static>>,
    ) {
        let driver = Arc::clone(self);
        home.spawn(async move {
            flight.await;
            driver.depart();
        });
    }

    fn take_flight(self: &Arc<Self>, lane: usize, most: usize) -> Option<(Out, Handle)> {
        let mut news = News::default();
        let mut state = self.lock();
        state.lanes[lane].summoned = None;
        let flight = state.take_flight(lane, most, Instant::now(), &mut news);
        let home = state.home.as_ref().map(|home| home.handle.clone());
        let more = state.summon_all();
        self.watch_queue(&mut state);
        drop(state);
        news.deliver();
        self.call_pilots(more);
        flight.zip(home)
    }

    /// Sends all calls of a flight; each has an outcome of its own.
    async fn send(self: &Arc<Self>, out: &Out) -> Vec<Outcome> {
        let about = |flight: &Flight| (flight.lane, flight.epoch, flight.deadline, flight.calls.len());
        let Some((lane, epoch, deadline, calls)) = out.peek(about) else { return Vec::new() };
        let link = {
            let state = self.lock();
            if let Some(terms) = state.terms.first() {
                terms.meters.batch_size.record(out.peek(Flight::size).unwrap_or_default() as f64);
            }
            let link = state.lanes[lane].link.as_ref();
            link.filter(|link| link.epoch == epoch).map(|link| link.conn.clone())
        };
        let all = |failed: Failed| {
            let outcome = || Outcome { result: Err(failed.clone()), strayed: false };
            (0..calls).map(|_| outcome()).collect()
        };
        let Some(mut conn) = link else {
            return all(Failed { error: connection_lost(), abandoned: false, unknown: false });
        };
        // What was taken meanwhile is nobody's any more, and the server refuses a call without keys.
        let write = |call, cmd: &mut Cmd| out.peek(|flight| flight.write(call, cmd)).unwrap_or_default();
        // Unconstrained, for its first poll must hand the calls to the connection.
        let run = unconstrained(conn.run_each(&script::FLIGHT, calls, write));
        match timeout_at(deadline, run).await {
            Ok(Ok(replies)) => {
                let replies = replies.into_iter().enumerate();
                join_all(replies.map(|(call, reply)| self.read(out, call, reply))).await
            }
            Ok(Err(error)) => all(from_redis(&error).into()),
            Err(_) => all(timed_out().into()),
        }
    }

    async fn read(self: &Arc<Self>, out: &Out, call: usize, reply: RedisResult<Value>) -> Outcome {
        let about = |flight: &Flight| (flight.calls[call][0].key.clone(), flight.deadline);
        let Some((key, deadline)) = out.peek(about) else {
            return Outcome { result: Err(Failed::abandoned()), strayed: false };
        };
        let write = |cmd: &mut Cmd, _| out.peek(|flight| flight.write(call, cmd)).unwrap_or_default();
        let Ran { reply, strayed } = self.arrive(reply, &key, deadline, &script::FLIGHT, write).await;
        let read =
            |reply| out.peek(|flight| flight.read(call, reply)).unwrap_or_else(|| Err(connection_lost()));
        Outcome { result: reply.and_then(read).map_err(Failed::from), strayed }
    }

    /// A flight is back; its calls brought replies or did not.
    fn land(self: &Arc<Self>, out: &Out, outcomes: Vec<Outcome>) {
        let Some(flight) = out.take() else { return };
        let (mut news, now, epoch) = (News::default(), Instant::now(), flight.epoch);
        let (mut trouble, mut granted) = (None, false);
        let doubt = flight.doubt();
        let mut state = self.lock();
        let lane = &mut state.lanes[flight.lane];
        lane.back(out);
        let ordered = lane.endpoint.keeps_order().then_some(epoch);
        for (asks, Outcome { result, strayed }) in flight.calls.into_iter().zip(outcomes) {
            let claimed = asks.iter().any(|ask| !ask.claims.is_empty());
            let error = match result {
                Ok(reply) => {
                    if !strayed {
                        state.server_heard(epoch, reply.now, now);
                    }
                    state.warn_of_foreign_data(&asks, &reply);
                    let error = reply.trouble();
                    state.table.landed(asks, reply, ordered, doubt, now, &mut news);
                    error
                }
                Err(failed) => {
                    if let Some(terms) = state.terms.first().filter(|_| !claimed) {
                        terms.meters.store_errors.get(Operation::Release).get(failed.error.kind()).add(1);
                    }
                    state.table.crashed(asks, &failed, doubt, now, &mut news);
                    Some(failed.error)
                }
            };
            if !strayed {
                granted |= claimed && error.is_none();
                trouble = trouble.or(error);
            }
        }
        match trouble {
            Some(error) => self.failed(&mut state, &error, epoch),
            None if granted => self.succeeded(&mut state, flight.lane),
            None => {}
        }
        self.settle(state, news);
    }

    /// A caller or a runtime went away in the middle of a flight: nobody's failure.
    fn abandoned(self: &Arc<Self>, out: &Out) {
        let Some(flight) = out.take() else { return };
        let mut news = News::default();
        let mut state = self.lock();
        state.lanes[flight.lane].back(out);
        state.table.abandoned(flight, Instant::now(), &mut news);
        self.settle(state, news);
        // Not from here: what is spawned on a runtime in shutdown comes back here at once.
        self.wake.notify_one();
    }

    /// Ends a piece of work: fails what cannot be sent, has time kept for what is to be sent later,
    /// shows the gauges, unlocks, delivers.
    pub(super) fn settle(&self, mut state: MutexGuard<'_, State>, mut news: News) {
        for lane in 0..state.lanes.len() {
            if let Some(error) = state.lanes[lane].breaker.open_error().cloned() {
                state.table.fail_queued(lane, &error, &mut news);
            }
        }
        if state.table.take_put_off() {
            self.wake.notify_one();
        }
        state.show_backlog();
        drop(state);
        news.deliver();
    }

    pub(super) fn lock_and(self: &Arc<Self>, change: impl FnOnce(&Arc<Self>, &mut State)) {
        let mut state = self.lock();
        change(self, &mut state);
        self.settle(state, News::default());
    }

    fn succeeded(self: &Arc<Self>, state: &mut State, lane: usize) {
        let change = state.lanes[lane].breaker.succeeded();
        state.show(lane, change.as_ref());
    }
}

/// What one call of a flight came to.
struct Outcome {
    result: Result<FlightReply, Failed>,
    strayed: bool,
}

/// A flight that will land: with a reply, with an error, or because its future was dropped.
struct Airborne {
    driver: Arc<Driver>,
    flight: Out,
}

impl Airborne {
    fn new(driver: &Arc<Driver>, flight: Out) -> Self {
        Self { driver: Arc::clone(driver), flight }
    }

    async fn fly(self) {
        let outcomes = self.driver.send(&self.flight).await;
        self.driver.land(&self.flight, outcomes);
    }
}

impl Drop for Airborne {
    fn drop(&mut self) {
        self.driver.abandoned(&self.flight);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.wake.notify_one();
    }
}

fn counted(terms: &Terms, operation: Operation, error: StoreError) -> StoreError {
    terms.meters.store_errors.get(operation).get(error.kind()).add(1);
    error
}

/// For a store that is asked to release before any limiter has used it.
fn some_terms() -> Arc<Terms> {
    Arc::new(Terms::new(Duration::from_secs(30), Duration::from_millis(250)))
}

fn no_runtime() -> StoreError {
    StoreError::new(StoreErrorKind::Other, "no tokio runtime: use the store from within one")
}

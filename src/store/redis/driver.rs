//! The owner of everything that is in flight between this process and one server.
//!
//! At most [`FLIGHTS`] calls of the flight script are out at a time. A claim that finds one free is
//! sent by its caller's own task; whatever finds none waits, and goes out with all else that waits
//! once a flight is back. So an idle server costs no hop between tasks, and a busy one is asked in
//! batches. On a slow link that bound would cost time: then one more flight a millisecond goes out.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use ::redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::unconstrained;
use tokio::time::{Instant, timeout_at};

use super::connection::{Conn, Endpoint};
use super::error::timed_out;
use super::flight::{Confirm, Flight, FlightReply};
use super::script::{self, Source};
use super::state::{FLIGHTS, Home, Link, State};
use super::table::{Failed, News, Stamp};
use super::upkeep;
use crate::metrics::Operation;
use crate::store::{Claim, Grant, Key, Reply, SlotId, StoreError, StoreErrorKind, Terms};

/// So many at the most, however slow the link is.
const MOST_FLIGHTS: usize = 512;
/// The longest that a claim or a release waits for a flight on a slow link.
pub(super) const MOST_WAIT: Duration = Duration::from_millis(1);

pub(super) struct Driver {
    endpoint: Endpoint,
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
            endpoint,
            state: Mutex::new(State::new()),
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
        if let Err(error) = self.ready(&mut state, &terms).and_then(|()| state.breaker.admit(now, deadline)) {
            drop(state);
            return Reply::ready(Err(counted(&terms, Operation::Acquire, error)));
        }
        state.table.enqueue(claim, reply, now);
        drop(state);
        let driver = Arc::clone(self);
        Reply::later(async move {
            if driver.fly_next(FLIGHTS, Some(deadline)).await {
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
        let mut state = self.lock();
        // Where there is no runtime, none of it will ever be sent.
        if self.ready(&mut state, &claim.terms).is_ok() {
            state.table.adopt(claim, Instant::now());
        }
    }

    pub(super) fn release(self: &Arc<Self>, slot: SlotId) {
        let mut news = News::default();
        self.lock().table.release(slot, None, &mut news);
        news.deliver();
        self.depart();
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
            self.ready(&mut state, &terms)?;
            state.table.release_foreign(key.clone(), slot, terms, confirm);
        }
        drop(state);
        news.deliver();
        self.depart();
        Ok(())
    }

    pub(super) fn flush(&self) -> Reply<()> {
        match self.lock().table.when_flushed() {
            None => Reply::ready(()),
            // An error means that the driver is gone, and all it had to release with it.
            Some(flushed) => Reply::later(async move { flushed.await.unwrap_or_default() }),
        }
    }

    /// Runs a script outside the flights.
    pub(super) async fn call(
        self: Arc<Self>,
        terms: Arc<Terms>,
        operation: Operation,
        source: &'static Source,
        arguments: impl Fn(&mut Cmd) + Send + Sync,
    ) -> Result<Value, StoreError> {
        let deadline = Instant::now() + terms.timeout;
        let result = match timeout_at(deadline, self.link(&terms)).await.unwrap_or_else(|_| Err(timed_out()))
        {
            Ok((mut conn, epoch)) => {
                let run = conn.run(source, arguments);
                let result = timeout_at(deadline, run).await.unwrap_or_else(|_| Err(timed_out()));
                if let Err(error) = &result {
                    self.lock_and(|driver, state| driver.failed(state, error, epoch));
                }
                result
            }
            Err(error) => Err(error),
        };
        result.map_err(|error| counted(&terms, operation, error))
    }

    /// The connection, once there is one.
    async fn link(self: &Arc<Self>, terms: &Arc<Terms>) -> Result<(Conn, u64), StoreError> {
        loop {
            let linked = self.linked.notified();
            {
                let mut state = self.lock();
                self.ready(&mut state, terms)?;
                if let Some(error) = state.breaker.open_error().filter(|_| !state.breaker.lets_send()) {
                    return Err(error.clone());
                }
                if let Some(Link { conn, epoch }) = &state.link {
                    return Ok((conn.clone(), *epoch));
                }
            }
            linked.await;
        }
    }

    /// Sees to it that there is a runtime to run on, an upkeep task, and somebody who connects.
    fn ready(self: &Arc<Self>, state: &mut State, terms: &Arc<Terms>) -> Result<(), StoreError> {
        state.tick = state.tick.min(terms.lease / 12);
        if !state.terms.iter().any(|known| known.policy == terms.policy) {
            state.terms.push(Arc::clone(terms));
            state.show(None);
        }
        if !state.home.as_ref().is_some_and(Home::is_alive) {
            self.move_in(state)?;
        }
        if state.dozing {
            state.dozing = false;
            self.wake.notify_one();
        }
        if state.link.is_none() {
            self.recover(state, false);
        }
        Ok(())
    }

    /// Makes the current runtime the driver's. What ran on another one is gone with it.
    fn move_in(self: &Arc<Self>, state: &mut State) -> Result<(), StoreError> {
        let handle = Handle::try_current().map_err(|_| no_runtime())?;
        state.homes += 1;
        let id = state.homes;
        let upkeep = upkeep::spawn(&handle, Arc::downgrade(self), Arc::clone(&self.wake), id);
        state.home = Some(Home { id, handle, upkeep });
        state.link = None;
        state.recovering = false;
        state.summoned = false;
        state.dozing = false;
        Ok(())
    }

    /// Calls a pilot for what waits, if it may fly.
    pub(super) fn depart(self: &Arc<Self>) {
        let mut state = self.lock();
        let handle = state.summon();
        self.watch_queue(&mut state);
        drop(state);
        self.call_pilot(handle);
    }

    /// Has the upkeep task see to it that what waits does not wait for long: the flights that are out
    /// may be slow, or their callers too busy to land them.
    fn watch_queue(&self, state: &mut State) {
        let waits = state.can_send() && state.table.waiting_since().is_some();
        if waits && !std::mem::replace(&mut state.watching_queue, true) {
            self.wake.notify_one();
        }
    }

    fn call_pilot(self: &Arc<Self>, handle: Option<Handle>) {
        if let Some(handle) = handle {
            let driver = Arc::clone(self);
            handle.spawn(async move { while driver.fly_next(FLIGHTS, None).await {} });
        }
    }

    /// Calls a pilot although all flights are out.
    pub(super) fn depart_late(self: &Arc<Self>, handle: &Handle) {
        let driver = Arc::clone(self);
        handle.spawn(async move {
            let mut most = MOST_FLIGHTS;
            while driver.fly_next(most, None).await {
                most = FLIGHTS;
            }
        });
    }

    /// Flies what waits, if fewer than `most` flights are out; tells whether it did.
    ///
    /// A flight carries whatever waits, also for callers that have more time than this one has
    /// `until`: then a task of its own brings it home.
    async fn fly_next(self: &Arc<Self>, most: usize, until: Option<Instant>) -> bool {
        let mut flying = None;
        poll_fn(|cx| match &mut flying {
            None => {
                // Flights are handed to the connection in the order in which they are made up: a
                // slot that was given back first is back first.
                let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
                let Some((flight, home)) = self.take_flight(most) else { return Poll::Ready(false) };
                let outlasts = until.is_some_and(|until| flight.deadline > until);
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

    fn take_flight(self: &Arc<Self>, most: usize) -> Option<(Flight, Handle)> {
        let mut news = News::default();
        let mut state = self.lock();
        state.summoned = false;
        let flight = state.take_flight(most, Instant::now(), &mut news);
        let home = state.home.as_ref().map(|home| home.handle.clone());
        let more = state.summon();
        self.watch_queue(&mut state);
        drop(state);
        news.deliver();
        self.call_pilot(more);
        flight.zip(home)
    }

    async fn send(&self, flight: &Flight) -> Result<FlightReply, Failed> {
        let link = {
            let state = self.lock();
            if let Some(terms) = state.terms.first() {
                terms.meters.batch_size.record(flight.size() as f64);
            }
            state.link.as_ref().filter(|link| link.epoch == flight.epoch).map(|link| link.conn.clone())
        };
        let Some(mut conn) = link else {
            return Err(Failed { error: connection_lost(), abandoned: false, unknown: false });
        };
        // Unconstrained, for its first poll must hand the call to the connection.
        let run = unconstrained(conn.run(&script::FLIGHT, |cmd| flight.write(cmd)));
        let reply = timeout_at(flight.deadline, run).await.unwrap_or_else(|_| Err(timed_out()));
        reply.and_then(|reply| flight.read(reply)).map_err(Failed::from)
    }

    fn land(self: &Arc<Self>, flight: Flight, result: Result<FlightReply, Failed>) {
        let (mut news, now) = (News::default(), Instant::now());
        let epoch = flight.epoch;
        let mut state = self.lock();
        state.flights -= 1;
        match result {
            Ok(reply) => {
                state.server_heard(reply.now, now);
                let trouble = reply.answers.iter().find_map(|answer| {
                    answer.as_ref().err().filter(|error| error.kind() != StoreErrorKind::WrongType).cloned()
                });
                state.warn_of_foreign_data(&flight, &reply);
                let claimed = flight.has_claims();
                let ordered = self.endpoint.keeps_order().then_some(epoch);
                state.table.landed(flight, reply, ordered, now, &mut news);
                match trouble {
                    Some(error) => self.failed(&mut state, &error, epoch),
                    None if claimed => self.succeeded(&mut state),
                    None => {}
                }
            }
            Err(failed) => {
                if let Some(terms) = state.terms.first().filter(|_| !flight.has_claims()) {
                    terms.meters.store_errors.get(Operation::Release).get(failed.error.kind()).add(1);
                }
                state.table.crashed(flight, &failed, now, &mut news);
                self.failed(&mut state, &failed.error, epoch);
            }
        }
        self.settle(state, news);
    }

    /// A caller or a runtime went away in the middle of a flight: nobody's failure.
    fn abandoned(self: &Arc<Self>, flight: Flight) {
        let mut news = News::default();
        let mut state = self.lock();
        state.flights -= 1;
        let failed = Failed { error: connection_lost(), abandoned: true, unknown: true };
        state.table.crashed(flight, &failed, Instant::now(), &mut news);
        self.settle(state, news);
        // Not from here: what is spawned on a runtime in shutdown comes back here at once.
        self.wake.notify_one();
    }

    /// Ends a piece of work: fails what cannot be sent, has time kept for what is to be sent later,
    /// shows the gauges, unlocks, delivers.
    fn settle(&self, mut state: MutexGuard<'_, State>, mut news: News) {
        if let Some(error) = state.breaker.open_error().cloned() {
            state.table.fail_queued(&error, &mut news);
        }
        if state.table.take_put_off() {
            self.wake.notify_one();
        }
        if let Some(terms) = state.terms.first() {
            terms.meters.release_backlog.set(state.table.backlog() as f64);
        }
        drop(state);
        news.deliver();
    }

    fn lock_and(self: &Arc<Self>, change: impl FnOnce(&Arc<Self>, &mut State)) {
        let mut state = self.lock();
        change(self, &mut state);
        self.settle(state, News::default());
    }

    fn succeeded(self: &Arc<Self>, state: &mut State) {
        let change = state.breaker.succeeded();
        state.show(change.as_ref());
    }

    /// A call over the connection `epoch` has failed. Replaces the connection if it is of no more
    /// use, and looks after the server once the breaker is open.
    pub(super) fn failed(self: &Arc<Self>, state: &mut State, error: &StoreError, epoch: u64) {
        let in_use = state.link.as_ref().is_some_and(|link| link.epoch == epoch);
        if !in_use || error.kind() == StoreErrorKind::WrongType {
            return; // of a connection that was given up since, or of one key alone
        }
        let change = state.breaker.failed(error);
        let broken =
            matches!(error.kind(), StoreErrorKind::Io | StoreErrorKind::ReadOnly | StoreErrorKind::Loading);
        let open = state.breaker.open_error().is_some();
        if broken || (open && error.kind() == StoreErrorKind::Timeout) {
            state.link = None;
        }
        state.show(change.as_ref());
        if open || state.link.is_none() {
            self.recover(state, open);
        }
    }

    /// Starts the task that looks for a working connection, unless it runs.
    fn recover(self: &Arc<Self>, state: &mut State, wait: bool) {
        let Some(home) = state.home.as_ref().filter(|_| !state.recovering) else { return };
        state.recovering = true;
        let driver = Arc::downgrade(self);
        upkeep::spawn_recovery(
            &home.handle,
            driver,
            self.endpoint.clone(),
            wait.then(|| state.breaker.wait(0)),
        );
    }

    /// The recovery task has a working connection.
    pub(super) fn connected(self: &Arc<Self>, conn: Conn, server: u64) {
        let mut state = self.lock();
        state.recovering = false;
        state.epoch += 1;
        let check_settings = !std::mem::replace(&mut state.settings_checked, true);
        if let Some(home) = &state.home {
            if check_settings {
                home.handle.spawn(super::connection::warn_of_settings(conn.clone()));
            }
            if self.endpoint.may_move() {
                let endpoint = self.endpoint.clone();
                upkeep::spawn_watch(&home.handle, Arc::downgrade(self), endpoint, state.epoch);
            }
        }
        state.link = Some(Link { conn, epoch: state.epoch });
        state.server_heard(server, Instant::now());
        state.breaker.half_open();
        state.show(None);
        drop(state);
        self.linked.notify_waiters();
        self.wake.notify_one();
        self.depart();
    }

    /// The recovery task has found none. Returns how long to wait before the next try.
    pub(super) fn not_connected(self: &Arc<Self>, error: &StoreError, tries: u32) -> Duration {
        let mut state = self.lock();
        state.link = None;
        let change = state.breaker.open(error);
        state.show(change.as_ref());
        let wait = state.breaker.wait(tries);
        self.settle(state, News::default());
        self.linked.notify_waiters();
        wait
    }

    pub(super) fn uses(&self, epoch: u64) -> bool {
        self.lock().link.as_ref().is_some_and(|link| link.epoch == epoch)
    }

    /// The connection `epoch` leads to a server that is not to be used any more.
    pub(super) fn leave(self: &Arc<Self>, epoch: u64) {
        let mut state = self.lock();
        if state.link.take_if(|link| link.epoch == epoch).is_some() {
            self.recover(&mut state, false);
        }
    }

    /// The connection for a renewal, and the stamp of now.
    pub(super) fn link_now(&self) -> Option<(Conn, Stamp)> {
        let state = self.lock();
        let conn = state.link.as_ref().filter(|_| state.breaker.lets_send())?.conn.clone();
        Some((conn, state.stamp(Instant::now())?))
    }
}

/// A flight that will land: with a reply, with an error, or because its future was dropped.
struct Airborne {
    driver: Arc<Driver>,
    flight: Option<Flight>,
}

impl Airborne {
    fn new(driver: &Arc<Driver>, flight: Flight) -> Self {
        Self { driver: Arc::clone(driver), flight: Some(flight) }
    }

    async fn fly(mut self) {
        let Some(flight) = &self.flight else { return };
        let result = self.driver.send(flight).await;
        if let Some(flight) = self.flight.take() {
            self.driver.land(flight, result);
        }
    }
}

impl Drop for Airborne {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.driver.abandoned(flight);
        }
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

fn connection_lost() -> StoreError {
    StoreError::new(StoreErrorKind::Io, "the connection was lost")
}

/// For a store that is asked to release before any limiter has used it.
fn some_terms() -> Arc<Terms> {
    Arc::new(Terms::new(Duration::from_secs(30), Duration::from_millis(250)))
}

fn no_runtime() -> StoreError {
    StoreError::new(StoreErrorKind::Other, "no tokio runtime: use the store from within one")
}

/// Reads a number that a call outside the flights brought.
pub(super) async fn number_of(
    driver: Arc<Driver>,
    terms: Arc<Terms>,
    operation: Operation,
    source: &'static Source,
    arguments: impl Fn(&mut Cmd) + Send + Sync,
) -> Result<(u64, u32), StoreError> {
    script::read_number(driver.call(terms, operation, source, arguments).await?)
}

pub(super) async fn drain(driver: Arc<Driver>, key: Key, terms: Arc<Terms>) -> Result<u32, StoreError> {
    let lease_ms = super::flight::lease_ms(&terms);
    let write = |cmd: &mut Cmd| script::write_drain(cmd, &key, lease_ms);
    let (drained_at, dropped) =
        number_of(Arc::clone(&driver), terms, Operation::Drain, &script::DRAIN, write).await?;
    let mut news = News::default();
    driver.lock().table.drained(&key, drained_at, &mut news);
    news.deliver();
    Ok(dropped)
}

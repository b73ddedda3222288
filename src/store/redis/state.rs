//! What a driver knows and has under way, behind its one lock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::breaker::{Breaker, Change};
use super::connection::{Conn, Endpoint};
use super::flight::{Ask, Flight, FlightReply};
use super::news::News;
use super::table::{Stamp, Table};
use crate::store::{StoreErrorKind, Terms};
use crate::trace::{Sparingly, event};

/// So many flights are out at a time, unless the link is slow.
pub(super) const FLIGHTS: usize = 2;
/// So late the upkeep task is not on a busy machine.
const STALLED: Duration = Duration::from_millis(500);

/// What a driver knows and has under way.
pub(super) struct State {
    pub(super) table: Table,
    /// One for each server that is in use.
    pub(super) lanes: Vec<Lane>,
    pub(super) epoch: u64,
    pub(super) home: Option<Home>,
    pub(super) homes: u64,
    pub(super) foreign_data_warnings: Sparingly,
    /// The upkeep task sleeps until it is woken.
    pub(super) dozing: bool,
    /// By when the upkeep task should have run.
    pub(super) due: Option<Instant>,
    /// The upkeep task knows that something waits.
    pub(super) watching_queue: bool,
    /// A third of the shortest lease seen is four ticks.
    pub(super) tick: Duration,
    /// Terms of the limiters on this store, one of each name. What is the store's own is measured
    /// under the name that came first.
    pub(super) terms: Vec<Arc<Terms>>,
}

/// The way to one server.
pub(super) struct Lane {
    pub(super) endpoint: Endpoint,
    /// Which node of a cluster that is.
    #[cfg(feature = "redis-cluster")]
    pub(super) node: Option<super::connection::Address>,
    pub(super) breaker: Breaker,
    pub(super) link: Option<Link>,
    clock: Clock,
    pub(super) out: Vec<Out>,
    /// When a pilot was called that has not taken off yet.
    pub(super) summoned: Option<Instant>,
    /// A task looks for a working connection.
    pub(super) recovering: bool,
    pub(super) settings_checked: bool,
}

impl Lane {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            #[cfg(feature = "redis-cluster")]
            node: None,
            breaker: Breaker::default(),
            link: None,
            clock: Clock { server: 0, at: Instant::now() },
            out: Vec::new(),
            summoned: None,
            recovering: false,
            settings_checked: false,
        }
    }

    pub(super) fn stamp(&self, now: Instant) -> Option<Stamp> {
        let link = self.link.as_ref()?;
        Some(Stamp { now, epoch: link.epoch, server_now: self.clock.server_now(now) })
    }

    /// The server's clock showed `server` `at` this instant.
    pub(super) fn set_clock(&mut self, server: u64, at: Instant) {
        self.clock = Clock { server, at };
    }

    /// Whether anything could be sent at all.
    pub(super) fn can_send(&self) -> bool {
        self.link.is_some() && self.breaker.lets_send()
    }

    /// A flight is not out any more.
    pub(super) fn back(&mut self, flight: &Out) {
        self.out.retain(|out| !Arc::ptr_eq(&out.0, &flight.0));
    }
}

pub(super) struct Link {
    pub(super) conn: Conn,
    pub(super) epoch: u64,
}

/// A flight that is out. Whoever takes it out of here decides what becomes of it: who brings it home,
/// or who cannot wait for that.
#[derive(Clone)]
pub(super) struct Out(Arc<Mutex<Option<Flight>>>);

impl Out {
    fn new(flight: Flight) -> Self {
        Self(Arc::new(Mutex::new(Some(flight))))
    }

    pub(super) fn take(&self) -> Option<Flight> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What `look` sees, unless the flight was taken.
    pub(super) fn peek<T>(&self, look: impl FnOnce(&Flight) -> T) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(look)
    }
}

/// The runtime on which flights and upkeep run.
pub(super) struct Home {
    pub(super) id: u64,
    pub(super) handle: Handle,
    /// Ends with the runtime.
    pub(super) upkeep: JoinHandle<()>,
}

impl Home {
    pub(super) fn is_alive(&self) -> bool {
        !self.upkeep.is_finished()
    }

    /// Whether this is called on it.
    fn is_here(&self) -> bool {
        Handle::try_current().is_ok_and(|here| here.id() == self.handle.id())
    }
}

/// What the server's clock showed, and when by ours.
struct Clock {
    server: u64,
    at: Instant,
}

impl Clock {
    fn server_now(&self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.at).as_millis();
        self.server.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }
}

impl State {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            table: Table::default(),
            lanes: vec![Lane::new(endpoint)],
            epoch: 0,
            home: None,
            homes: 0,
            foreign_data_warnings: Sparingly::default(),
            dozing: false,
            due: None,
            watching_queue: false,
            tick: Duration::from_secs(3600),
            terms: Vec::new(),
        }
    }

    /// The lane that has this connection, unless it was given up.
    pub(super) fn lane_with(&self, epoch: u64) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.link.as_ref().is_some_and(|link| link.epoch == epoch))
    }

    /// The server's clock showed `server` in a reply that came over this connection `at` this instant.
    pub(super) fn server_heard(&mut self, epoch: u64, server: u64, at: Instant) {
        if let Some(lane) = self.lane_with(epoch) {
            self.lanes[lane].set_clock(server, at);
        }
        self.answered(epoch);
    }

    /// A call was answered over this connection.
    pub(super) fn answered(&mut self, epoch: u64) {
        if let Some(lane) = self.lane_with(epoch) {
            self.lanes[lane].breaker.answered();
        }
    }

    /// The next flight, if fewer than `most` are out and something may be sent.
    pub(super) fn take_flight(
        &mut self,
        lane: usize,
        most: usize,
        now: Instant,
        news: &mut News,
    ) -> Option<Out> {
        let flies = &mut self.lanes[lane];
        if flies.out.len() >= most || !flies.breaker.lets_send() {
            return None;
        }
        let flight = Out::new(self.table.next_flight(lane, flies.stamp(now)?, news)?);
        flies.out.push(flight.clone());
        Some(flight)
    }

    /// Whether pilots and the upkeep task run when they should. A runtime that nobody drives any more runs nothing,
    /// and does not tell; one that is only busy is told by who calls from it.
    pub(super) fn is_driven(&self, now: Instant) -> bool {
        let mut dues = self.lanes.iter().filter_map(|lane| lane.summoned).chain(self.due);
        let late = dues.any(|due| due + STALLED <= now);
        self.home.as_ref().is_some_and(|home| home.is_alive() && (!late || home.is_here()))
    }

    /// Gives up what another runtime had under way, whether that still comes to something or not.
    pub(super) fn strand(&mut self, now: Instant, news: &mut News) {
        let out = self.lanes.iter_mut().flat_map(|lane| std::mem::take(&mut lane.out));
        for flight in out.filter_map(|out| out.take()) {
            self.table.abandoned(flight, now, news);
        }
        // Their keys may have moved since they were sent, to a server that was never heard.
        let clocks = self.lanes.iter().map(|lane| lane.clock.server_now(now));
        self.table.strand_renewals(clocks.max().unwrap_or_default(), self.epoch);
    }

    /// Where to call a pilot, if there is something for one to do.
    fn summon(&mut self, lane: usize) -> Option<Handle> {
        let home = self.home.as_ref().filter(|home| home.is_alive())?;
        let flies = &mut self.lanes[lane];
        let due = flies.summoned.is_none()
            && flies.out.len() < FLIGHTS
            && flies.can_send()
            && self.table.waiting_since(lane).is_some();
        due.then(|| {
            flies.summoned = Some(Instant::now());
            home.handle.clone()
        })
    }

    pub(super) fn summon_all(&mut self) -> Vec<(usize, Handle)> {
        (0..self.lanes.len()).filter_map(|lane| Some((lane, self.summon(lane)?))).collect()
    }

    /// Whether anything waits on a lane that no pilot was called for.
    pub(super) fn waits_alone(&self, lane: usize) -> bool {
        self.lanes[lane].summoned.is_none() && self.waiting_since(lane).is_some()
    }

    /// Since when the oldest of what could be sent on a lane waits for a flight.
    pub(super) fn waiting_since(&self, lane: usize) -> Option<Instant> {
        self.table.waiting_since(lane).filter(|_| self.lanes[lane].can_send())
    }

    pub(super) fn is_home(&self, id: u64) -> bool {
        self.home.as_ref().is_some_and(|home| home.id == id)
    }

    /// It concerns one key, so the breaker has nothing to tell.
    pub(super) fn warn_of_foreign_data(&self, asks: &[Ask], reply: &FlightReply) {
        for (ask, answer) in asks.iter().zip(&reply.answers) {
            if let Err(error) = answer
                && error.kind() == StoreErrorKind::WrongType
                && self.foreign_data_warnings.due()
            {
                let (_key, _error) = (&ask.key, error);
                event!(warn, key = ?_key, error = %_error, "no slots of this key: the outage policy decides");
            }
        }
    }

    pub(super) fn show_backlog(&self) {
        if let Some(terms) = self.terms.first() {
            terms.meters.release_backlog.set(self.table.backlog() as f64);
        }
    }

    pub(super) fn show(&self, _lane: usize, change: Option<&Change>) {
        match change {
            Some(Change::Opened(_error)) => {
                event!(warn, node = self.name_of(_lane), error = %_error, "slot store down: the outage policy decides");
            }
            Some(Change::Closed) => event!(info, node = self.name_of(_lane), "slot store up again"),
            None => {}
        }
        let worst = self.lanes.iter().map(|lane| lane.breaker.state()).max_by_key(|state| *state as u8);
        let state = worst.unwrap_or(crate::metrics::Breaker::Closed);
        for terms in &self.terms {
            terms.meters.breaker_state.set(f64::from(state as u8));
            terms.meters.store_up.set(f64::from(u8::from(state == crate::metrics::Breaker::Closed)));
        }
    }

    /// Which node of a cluster it is about.
    #[cfg(feature = "tracing")]
    fn name_of(&self, _lane: usize) -> Option<tracing::field::DisplayValue<String>> {
        #[cfg(feature = "redis-cluster")]
        if let Some((host, port)) = &self.lanes[_lane].node {
            return Some(tracing::field::display(format!("{host}:{port}")));
        }
        None
    }
}

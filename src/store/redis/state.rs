//! What a driver knows and has under way, behind its one lock.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::breaker::{Breaker, Change};
use super::connection::Conn;
use super::flight::{Flight, FlightReply};
use super::table::{News, Stamp, Table};
use crate::store::{StoreErrorKind, Terms};
use crate::trace::{Sparingly, event};

/// So many flights are out at a time, unless the link is slow.
pub(super) const FLIGHTS: usize = 2;

/// What a driver knows and has under way.
pub(super) struct State {
    pub(super) table: Table,
    pub(super) breaker: Breaker,
    pub(super) link: Option<Link>,
    pub(super) epoch: u64,
    clock: Clock,
    pub(super) flights: usize,
    pub(super) home: Option<Home>,
    pub(super) homes: u64,
    /// A pilot was called and has not taken off yet.
    pub(super) summoned: bool,
    /// A task looks for a working connection.
    pub(super) recovering: bool,
    pub(super) settings_checked: bool,
    pub(super) foreign_data_warnings: Sparingly,
    /// The upkeep task sleeps until it is woken.
    pub(super) dozing: bool,
    /// The upkeep task knows that something waits.
    pub(super) watching_queue: bool,
    /// A third of the shortest lease seen is four ticks.
    pub(super) tick: Duration,
    /// Terms of the limiters on this store, one of each name. What is the store's own is measured
    /// under the name that came first.
    pub(super) terms: Vec<Arc<Terms>>,
}

pub(super) struct Link {
    pub(super) conn: Conn,
    pub(super) epoch: u64,
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
    pub(super) fn new() -> Self {
        Self {
            table: Table::default(),
            breaker: Breaker::default(),
            link: None,
            epoch: 0,
            clock: Clock { server: 0, at: Instant::now() },
            flights: 0,
            home: None,
            homes: 0,
            summoned: false,
            recovering: false,
            settings_checked: false,
            foreign_data_warnings: Sparingly::default(),
            dozing: false,
            watching_queue: false,
            tick: Duration::from_secs(3600),
            terms: Vec::new(),
        }
    }

    pub(super) fn stamp(&self, now: Instant) -> Option<Stamp> {
        let link = self.link.as_ref()?;
        Some(Stamp { now, epoch: link.epoch, server_now: self.clock.server_now(now) })
    }

    /// The next flight, if fewer than `most` are out and something may be sent.
    pub(super) fn take_flight(&mut self, most: usize, now: Instant, news: &mut News) -> Option<Flight> {
        if self.flights >= most || !self.breaker.lets_send() {
            return None;
        }
        let stamp = self.stamp(now)?;
        let flight = self.table.next_flight(stamp, news)?;
        self.flights += 1;
        Some(flight)
    }

    /// Where to call a pilot, if there is something for one to do.
    pub(super) fn summon(&mut self) -> Option<Handle> {
        let home = self.home.as_ref().filter(|home| home.is_alive())?;
        let due = !self.summoned
            && self.flights < FLIGHTS
            && self.can_send()
            && self.table.waiting_since().is_some();
        due.then(|| {
            self.summoned = true;
            home.handle.clone()
        })
    }

    /// Whether anything could be sent at all.
    pub(super) fn can_send(&self) -> bool {
        self.link.is_some() && self.breaker.lets_send()
    }

    pub(super) fn is_home(&self, id: u64) -> bool {
        self.home.as_ref().is_some_and(|home| home.id == id)
    }

    /// The server's clock showed `server` in a reply that came `at` this instant.
    pub(super) fn server_heard(&mut self, server: u64, at: Instant) {
        self.clock = Clock { server, at };
    }

    /// It concerns one key, so the breaker has nothing to tell.
    pub(super) fn warn_of_foreign_data(&self, flight: &Flight, reply: &FlightReply) {
        for (ask, answer) in flight.asks.iter().zip(&reply.answers) {
            if let Err(error) = answer
                && error.kind() == StoreErrorKind::WrongType
                && self.foreign_data_warnings.due()
            {
                let (_key, _error) = (&ask.key, error);
                event!(warn, key = ?_key, error = %_error, "no slots of this key: the outage policy decides");
            }
        }
    }

    pub(super) fn show(&self, change: Option<&Change>) {
        match change {
            Some(Change::Opened(_error)) => {
                event!(warn, error = %_error, "slot store down: the outage policy decides");
            }
            Some(Change::Closed) => event!(info, "slot store up again"),
            None => {}
        }
        for terms in &self.terms {
            let state = self.breaker.state();
            terms.meters.breaker_state.set(f64::from(state as u8));
            terms.meters.store_up.set(f64::from(u8::from(state == crate::metrics::Breaker::Closed)));
        }
    }
}

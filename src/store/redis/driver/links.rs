//! The connections of the lanes: who has one, what becomes of it, and of its server's breaker.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::super::connection::{self, Conn};
use super::super::news::News;
use super::super::state::{Lane, Link, State};
use super::super::table::Stamp;
use super::super::upkeep;
use super::Driver;
use crate::store::{Key, StoreError, StoreErrorKind};

/// Where a connection is to lead to.
#[derive(Clone, Copy)]
pub(in super::super) enum Place<'a> {
    /// The server that has this key.
    Key(&'a Key),
    #[cfg(feature = "redis-cluster")]
    Node(&'a connection::Address),
}

impl Driver {
    /// The connection to the server at this place, once there is one.
    pub(in super::super) async fn link(
        self: &Arc<Self>,
        place: Place<'_>,
    ) -> Result<(Conn, u64), StoreError> {
        loop {
            let linked = self.linked.notified();
            {
                let mut state = self.lock();
                let lane = match place {
                    Place::Key(key) => state.table.routes.lane_of(key),
                    #[cfg(feature = "redis-cluster")]
                    Place::Node(node) => state.lane_to(node).unwrap_or_default(),
                };
                self.want(&mut state, lane);
                let Lane { breaker, link, .. } = &state.lanes[lane];
                if let Some(error) = breaker.open_error().filter(|_| !breaker.lets_send()) {
                    return Err(error.clone());
                }
                if let Some(Link { conn, epoch }) = link {
                    return Ok((conn.clone(), *epoch));
                }
            }
            linked.await;
        }
    }

    /// Sees to it that there is a connection on a lane, or somebody who connects.
    pub(super) fn want(self: &Arc<Self>, state: &mut State, lane: usize) {
        if state.lanes[lane].link.is_none() {
            self.recover(state, lane, false);
        }
    }

    /// A call over the connection `epoch` has failed. Replaces the connection if it is of no more
    /// use, and looks after the server once the breaker is open.
    pub(in super::super) fn failed(self: &Arc<Self>, state: &mut State, error: &StoreError, epoch: u64) {
        // Otherwise it was one that was given up since, or one key alone.
        let Some(lane) = state.lane_with(epoch).filter(|_| error.kind() != StoreErrorKind::WrongType) else {
            return;
        };
        let Lane { breaker, link, .. } = &mut state.lanes[lane];
        let change = breaker.failed(error);
        let broken =
            matches!(error.kind(), StoreErrorKind::Io | StoreErrorKind::ReadOnly | StoreErrorKind::Loading);
        let open = breaker.open_error().is_some();
        if broken || (open && error.kind() == StoreErrorKind::Timeout) {
            *link = None;
        }
        let lost = link.is_none();
        state.show(lane, change.as_ref());
        #[cfg(feature = "redis-cluster")]
        if error.kind() == StoreErrorKind::Cluster {
            self.ask_again(state);
        }
        if open || lost {
            self.recover(state, lane, open);
        }
    }

    /// Starts the task that looks for a working connection on a lane, unless it runs.
    pub(in super::super) fn recover(self: &Arc<Self>, state: &mut State, lane: usize, wait: bool) {
        let home = state.home.as_ref().filter(|home| home.is_alive());
        let lost = &mut state.lanes[lane];
        let Some(home) = home.filter(|_| !lost.recovering) else { return };
        lost.recovering = true;
        let wait = wait.then(|| lost.breaker.wait(0));
        upkeep::spawn_recovery(home, Arc::downgrade(self), lane, lost.endpoint.clone(), wait);
    }

    /// The recovery task has a working connection.
    pub(in super::super) fn connected(self: &Arc<Self>, lane: usize, conn: Conn, server: u64) {
        let mut state = self.lock();
        state.epoch += 1;
        let epoch = state.epoch;
        let check_settings = !std::mem::replace(&mut state.lanes[lane].settings_checked, true);
        if let Some(home) = &state.home {
            if check_settings {
                home.handle.spawn(connection::warn_of_settings(conn.clone()));
            }
            let endpoint = &state.lanes[lane].endpoint;
            if endpoint.may_move() {
                upkeep::spawn_watch(&home.handle, Arc::downgrade(self), endpoint.clone(), epoch);
            }
        }
        let found = &mut state.lanes[lane];
        found.recovering = false;
        found.link = Some(Link { conn, epoch });
        found.breaker.half_open();
        found.set_clock(server, Instant::now());
        state.show(lane, None);
        drop(state);
        self.linked.notify_waiters();
        self.wake.notify_one();
        self.depart();
    }

    /// The recovery task has found none. Returns how long to wait before the next try, unless there
    /// is no need for one.
    pub(in super::super) fn not_connected(
        self: &Arc<Self>,
        lane: usize,
        error: &StoreError,
        tries: u32,
    ) -> Option<Duration> {
        let mut state = self.lock();
        #[cfg(feature = "redis-cluster")]
        if !self.still_needs(&mut state, lane) {
            state.lanes[lane].recovering = false;
            return None;
        }
        let lost = &mut state.lanes[lane];
        lost.link = None;
        let change = lost.breaker.not_connected(error);
        let wait = lost.breaker.wait(tries);
        state.show(lane, change.as_ref());
        self.settle(state, News::default());
        self.linked.notify_waiters();
        Some(wait)
    }

    /// Who waits for a connection looks again, and what waits for a flight departs: it may have
    /// another lane now.
    #[cfg(feature = "redis-cluster")]
    pub(in super::super) fn rerouted(self: &Arc<Self>) {
        self.linked.notify_waiters();
        self.wake.notify_one();
        self.depart();
    }

    pub(in super::super) fn uses(&self, epoch: u64) -> bool {
        self.lock().lane_with(epoch).is_some()
    }

    /// The connection `epoch` leads to a server that is not to be used any more.
    pub(in super::super) fn leave(self: &Arc<Self>, epoch: u64) {
        let mut state = self.lock();
        if let Some(lane) = state.lane_with(epoch) {
            state.lanes[lane].link = None;
            self.recover(&mut state, lane, false);
        }
    }

    /// The connection for a renewal, and the stamp of now. None for one that was given up with its home.
    pub(in super::super) fn link_now(self: &Arc<Self>, key: &Key, home: u64) -> Option<(Conn, Stamp)> {
        let mut state = self.lock();
        if !state.is_home(home) {
            return None;
        }
        let lane = state.table.routes.lane_of(key);
        self.want(&mut state, lane);
        let lane = &state.lanes[lane];
        let conn = lane.link.as_ref().filter(|_| lane.breaker.lets_send())?.conn.clone();
        Some((conn, lane.stamp(Instant::now())?))
    }
}

//! Which node of a cluster serves which keys, and how a call finds the node that its key has moved to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::redis::{Client, Cmd, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::time::{sleep, timeout};

use super::connection::{Address, Endpoint, address_of, dial, relocated, request};
use super::driver::{Driver, Place};
use super::error::{from_redis, malformed};
use super::news::News;
use super::script::{Source, text};
use super::state::{Lane, State};
use crate::store::{Key, StoreError, StoreErrorKind};

/// The hash slots that a cluster deals out to its nodes.
const HASH_SLOTS: usize = 16384;
/// So long does one node have to tell who serves what, before the next is asked.
const ASK_TIMEOUT: Duration = Duration::from_millis(300);
/// How long to wait before a call is repeated whose keys are on their way between nodes.
const PAUSE: Duration = Duration::from_millis(10);

/// The lane that stands for the cluster as a whole: looking for its connection is asking who serves
/// what. It has the hash slots that nobody serves, as far as we know.
pub(super) const NOBODY: usize = 0;

/// Who may be asked for the others.
pub(super) struct Cluster {
    seeds: Vec<Client>,
    nodes: Mutex<Vec<Client>>,
    next: AtomicUsize,
}

/// A range of hash slots, and the address of the master that serves it.
pub(super) struct Share {
    first: u16,
    last: u16,
    master: Address,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Client>) -> Self {
        Self { seeds, nodes: Mutex::default(), next: AtomicUsize::new(0) }
    }

    /// Connects with the login and settings of the first seed.
    fn node(&self, address: Address) -> Option<Client> {
        relocated(self.seeds.first()?.get_connection_info(), address).ok()
    }

    /// Who serves what. Each time another node is asked first, for one may be behind the others.
    pub(super) async fn shares(&self) -> Result<Vec<Share>, StoreError> {
        let nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let all: Vec<_> = nodes.iter().chain(&self.seeds).collect();
        let mut shares = Err(no_node());
        for _ in 0..all.len() {
            let node = all[self.next.fetch_add(1, Ordering::Relaxed) % all.len()];
            shares = timeout(ASK_TIMEOUT, ask(node)).await.unwrap_or_else(|_| Err(no_node()));
            if shares.is_ok() {
                break;
            }
        }
        shares
    }
}

async fn ask(node: &Client) -> Result<Vec<Share>, StoreError> {
    let mut conn = dial(node).await?;
    let mut ask = ::redis::cmd("CLUSTER");
    ask.arg("SLOTS");
    let reply = request(&mut conn, &ask).await.map_err(|error| no_cluster(&error))?;
    let rows: Vec<Vec<Value>> = ::redis::from_redis_value(reply).map_err(|_| malformed())?;
    let asked = address_of(node.get_connection_info());
    if rows.is_empty() {
        // It may have been thrown out of the cluster, or not have been let in yet.
        return Err(unserved());
    }
    rows.into_iter().map(|row| read_share(row, asked.as_ref()).ok_or_else(malformed)).collect()
}

/// First and last hash slot, then the master's host, port and more, then its replicas.
fn read_share(row: Vec<Value>, asked: Option<&Address>) -> Option<Share> {
    let mut row = row.into_iter();
    let mut slot = || match row.next() {
        Some(Value::Int(slot)) => u16::try_from(slot).ok().filter(|slot| usize::from(*slot) < HASH_SLOTS),
        _ => None,
    };
    let (first, last) = (slot()?, slot()?);
    let mut master = row.next()?.into_sequence().ok()?.into_iter();
    let host = ::redis::from_redis_value::<Option<String>>(master.next()?).ok()?;
    let port = ::redis::from_redis_value(master.next()?).ok()?;
    // A node that does not know its own name is found where it was asked.
    let host = host.filter(|host| !host.is_empty()).or_else(|| Some(asked?.0.clone()))?;
    Some(Share { first, last, master: (host, port) })
}

fn no_node() -> StoreError {
    StoreError::new(
        StoreErrorKind::Io,
        "no node of the cluster answers: are they up, and the addresses right?",
    )
}

fn no_cluster(error: &RedisError) -> StoreError {
    let error = from_redis(error);
    if error.to_string().contains("cluster support disabled") {
        let message = "this server is no part of a cluster: use RedisStore::open";
        return StoreError::new(StoreErrorKind::Cluster, message);
    }
    error
}

pub(super) fn unserved() -> StoreError {
    StoreError::new(
        StoreErrorKind::Cluster,
        "no node serves the hash slot of this key: look at CLUSTER INFO, and give each hash slot to a node",
    )
}

/// Where a node says that a call should go instead.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// The hash slot is served by another node from now on; by which, the node may not know.
    Moved { slot: usize, to: Option<Address> },
    /// This key is on the node that takes the hash slot over.
    Ask(Address),
    /// Not all keys of the call are in one place.
    Again,
}

impl Redirect {
    fn of(reply: &RedisResult<Value>) -> Option<Self> {
        let error = match reply {
            // Where a flight's notes stand, which tell what is wrong with a key.
            Ok(Value::Array(items)) => {
                let Some(Value::Array(notes)) = items.get(1) else { return None };
                let left = notes.iter().any(|note| text(note).is_some_and(left_half_way));
                return left.then_some(Self::Again);
            }
            Ok(_) => return None,
            Err(error) => error,
        };
        if let Some((to, slot)) = error.redirect_node() {
            let to = to.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            let to = to.and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
            return Some(match to {
                Some(to) if error.kind() == ServerErrorKind::Ask.into() => Self::Ask(to),
                to => Self::Moved { slot: slot.into(), to },
            });
        }
        let again = error.kind() == ServerErrorKind::TryAgain.into() || left_half_way(&error.to_string());
        again.then_some(Self::Again)
    }
}

/// The last member of a key was removed on the node that hands its hash slot over: then the rest of
/// the script may not put a new one there. All scripts may be run again from the start.
fn left_half_way(text: &str) -> bool {
    text.contains("non local key")
}

/// Of a name with braces only what stands in the first pair counts.
pub(super) fn hash_slot(key: &str) -> usize {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let counts = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
    usize::from(crc16::State::<crc16::XMODEM>::calculate(counts.as_bytes())) % HASH_SLOTS
}

impl State {
    fn cluster(&self) -> Option<Arc<Cluster>> {
        match &self.lanes[NOBODY].endpoint {
            Endpoint::Cluster(cluster) => Some(Arc::clone(cluster)),
            _ => None,
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.lanes[NOBODY].endpoint, Endpoint::Cluster(_))
    }

    /// The lane to a node, and a new one if there is none.
    pub(super) fn lane_to(&mut self, node: &Address) -> Option<usize> {
        let known = self.lanes.iter().position(|lane| lane.node.as_ref() == Some(node));
        if known.is_some() {
            return known;
        }
        let client = self.cluster()?.node(node.clone())?;
        let mut lane = Lane::new(Endpoint::Node(client));
        lane.node = Some(node.clone());
        let free = (NOBODY + 1..self.lanes.len()).find(|n| self.lanes[*n].node.is_none());
        let at = free.unwrap_or(self.lanes.len());
        if at == self.lanes.len() {
            self.lanes.push(lane);
            self.table.add_lane();
        } else {
            self.lanes[at] = lane;
        }
        Some(at)
    }

    /// Frees the lanes to nodes that serve nothing any more.
    fn retire_lanes(&mut self) {
        for n in NOBODY + 1..self.lanes.len() {
            if self.is_of_use(n) {
                continue;
            }
            let lane = &mut self.lanes[n];
            let change = lane.breaker.succeeded();
            if lane.out.is_empty() && !lane.recovering && lane.summoned.is_none() {
                (lane.node, lane.link) = (None, None);
            }
            self.show(n, change.as_ref());
        }
    }

    fn is_of_use(&self, lane: usize) -> bool {
        self.table.routes.lead_to(lane) || self.table.waiting_since(lane).is_some()
    }
}

impl Driver {
    /// Nodes have told who serves what. Returns how long to wait before they are asked again, if
    /// somebody needs what nobody serves.
    pub(super) fn mapped(self: &Arc<Self>, shares: &[Share]) -> Option<Duration> {
        let mut state = self.lock();
        let cluster = state.cluster()?;
        state.retire_lanes();
        let mut lanes = vec![NOBODY; HASH_SLOTS];
        for Share { first, last, master } in shares {
            let lane = state.lane_to(master).unwrap_or(NOBODY);
            lanes[usize::from(*first)..=usize::from(*last)].fill(lane);
        }
        let nodes = state.lanes.iter().filter_map(|lane| match &lane.endpoint {
            Endpoint::Node(client) if lane.node.is_some() => Some(client.clone()),
            _ => None,
        });
        *cluster.nodes.lock().unwrap_or_else(PoisonError::into_inner) = nodes.collect();
        state.table.routes.lanes = lanes;
        state.table.reroute();
        let wait = self.tell_unserved(&mut state);
        state.lanes[NOBODY].recovering = wait.is_some();
        self.settle(state, News::default());
        self.rerouted();
        wait
    }

    fn tell_unserved(&self, state: &mut State) -> Option<Duration> {
        let needed = state.table.waiting_since(NOBODY).is_some();
        let breaker = &mut state.lanes[NOBODY].breaker;
        let served = !state.table.routes.lead_to(NOBODY);
        let change = match breaker.open_error() {
            _ if served => breaker.succeeded(),
            None if !needed => return None,
            _ => breaker.open(&unserved()),
        };
        let wait = (!served).then(|| breaker.wait(0));
        state.show(NOBODY, change.as_ref());
        wait
    }

    /// The cluster could not be asked, or a node not reached. Returns whether to go on trying.
    pub(super) fn still_needs(self: &Arc<Self>, state: &mut State, lane: usize) -> bool {
        let needed = state.is_of_use(lane);
        if lane != NOBODY && needed {
            self.ask_again(state);
        }
        needed
    }

    /// Who serves what may have changed.
    pub(super) fn ask_again(self: &Arc<Self>, state: &mut State) {
        if state.is_cluster() {
            self.recover(state, NOBODY, true);
        }
    }

    fn moved(self: &Arc<Self>, slot: usize, to: Option<&Address>) {
        let mut state = self.lock();
        if let Some(lane) = to.and_then(|to| state.lane_to(to))
            && let Some(route) = state.table.routes.lanes.get_mut(slot)
        {
            *route = lane;
            state.table.reroute();
        }
        self.ask_again(&mut state);
        drop(state);
        self.rerouted();
    }

    pub(super) fn redirect(&self, reply: &RedisResult<Value>) -> Option<Redirect> {
        Redirect::of(reply).filter(|_| self.lock().is_cluster())
    }

    /// Runs a script that a node did not run where it says, until one does.
    pub(super) async fn follow(
        self: &Arc<Self>,
        mut redirect: Redirect,
        key: &Key,
        source: &'static Source,
        arguments: impl Fn(&mut Cmd, bool) + Send + Sync,
    ) -> Result<Value, StoreError> {
        let (mut alone, mut hops) = (false, 0);
        loop {
            if hops > 2 || redirect == Redirect::Again {
                sleep(PAUSE).await;
            }
            if let Redirect::Moved { slot, to } = &redirect {
                self.moved(*slot, to.as_ref());
            }
            alone |= redirect == Redirect::Again;
            let place = if let Redirect::Ask(node) = &redirect { Place::Node(node) } else { Place::Key(key) };
            let (mut conn, epoch) = self.link(place).await?;
            let write = |cmd: &mut Cmd| arguments(cmd, alone);
            let reply = match redirect {
                Redirect::Ask(_) => conn.run_asking(source, write).await,
                _ => conn.run(source, write).await,
            };
            match Redirect::of(&reply) {
                Some(next) => (redirect, hops) = (next, hops + 1),
                None => return reply.map_err(|error| self.failed_astray(&error, epoch)),
            }
        }
    }

    fn failed_astray(self: &Arc<Self>, error: &RedisError, epoch: u64) -> StoreError {
        let error = from_redis(error);
        self.lock_and(|driver, state| driver.failed(state, &error, epoch));
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_slots_are_those_of_the_cluster_specification() {
        assert_eq!(hash_slot("123456789"), 0x31c3);
        assert_eq!(hash_slot("{user1000}.following"), hash_slot("user1000"));
        assert_eq!(hash_slot("{sem:acme}:drained"), hash_slot("sem:acme"));
        assert_eq!(hash_slot("foo{{bar}}zap"), hash_slot("{bar"));
        assert_eq!(hash_slot("foo{bar}{zap}"), hash_slot("bar"));
        assert_ne!(hash_slot("foo{}{bar}"), hash_slot("bar"));
    }

    fn redirect(code: ServerErrorKind, text: &str) -> Option<Redirect> {
        Redirect::of(&Err((code.into(), "refused", text.to_owned()).into()))
    }

    #[test]
    fn redirects_are_read_as_the_cluster_specification_has_them() {
        let node = |host: &str, port| (host.to_owned(), port);
        let moved = |to| Some(Redirect::Moved { slot: 3999, to });
        let kind = ServerErrorKind::Moved;
        assert_eq!(redirect(kind, "3999 10.0.0.1:6381"), moved(Some(node("10.0.0.1", 6381))));
        assert_eq!(redirect(kind, "3999 node.internal:6381"), moved(Some(node("node.internal", 6381))));
        assert_eq!(redirect(kind, "3999 2001:db8::1:6381"), moved(Some(node("2001:db8::1", 6381))));
        assert_eq!(redirect(kind, "3999 :6381"), moved(None), "a node that does not know");
        assert_eq!(redirect(kind, "3999 10.0.0.1:x"), moved(None));
        assert_eq!(redirect(kind, "x"), None);
        let ask = redirect(ServerErrorKind::Ask, "3999 10.0.0.1:6381");
        assert_eq!(ask, Some(Redirect::Ask(node("10.0.0.1", 6381))));
        assert_eq!(redirect(ServerErrorKind::TryAgain, "later"), Some(Redirect::Again));
        assert_eq!(redirect(ServerErrorKind::ClusterDown, "down"), None);
    }
}

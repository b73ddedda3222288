//! Slots in Redis or Valkey, shared by a whole fleet.
//!
//! # Data
//!
//! One sorted set per key, its members the slots in use, each scored with the instant in Unix
//! milliseconds at which its lease runs out, by the server's clock. That is the layout of gotsem, so
//! that a fleet may mix both. Draining leaves a marker under `{key}:drained`.
//!
//! # What the server needs
//!
//! Redis 7.0 or Valkey 7.2, or later, with `maxmemory-policy noeviction`. A user with these rights
//! is enough, where `sem:` is the limiter's prefix:
//!
//! ```text
//! ACL SETUSER slots on >password ~sem:* ~{sem:* +eval +evalsha +time +get +set +del
//!     +zadd +zcard +zcount +zmscore +zrem +zremrangebyscore +pttl +pexpire
//! ```
//!
//! With a database in the address (`redis://host/3`) it needs `+select` too. On a cluster add
//! `+cluster|slots +asking`. A user of sentinels needs `+sentinel|get-master-addr-by-name` there, and
//! nothing else.
//!
//! Where slots may move from one server to another, from a master to its replica or between the nodes
//! of a cluster, the clocks of those servers must agree within a small part of a lease.

mod breaker;
#[cfg(feature = "redis-cluster")]
mod cluster;
mod connection;
mod driver;
mod error;
mod flight;
mod news;
mod routes;
mod script;
#[cfg(feature = "redis-sentinel")]
mod sentinel;
mod state;
mod table;
#[cfg(feature = "redis-tls")]
mod tls;
mod upkeep;

use std::fmt;
use std::sync::Arc;

use ::redis::aio::{ConnectionManager, MultiplexedConnection};
use ::redis::{Client, Cmd, ErrorKind, IntoConnectionInfo, RedisError};
use tokio::sync::oneshot;
use tokio::time::Instant;

#[cfg(feature = "redis-cluster")]
use self::cluster::Cluster;
use self::connection::{Endpoint, tuned};
use self::driver::Driver;
#[cfg(feature = "redis-sentinel")]
use self::sentinel::Sentinels;
#[cfg(feature = "redis-tls")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis-tls")))]
pub use self::tls::TlsAddress;
use super::{Claim, Grant, Key, Reply, SlotId, SlotStore, StoreError, Terms};
use crate::error::ConfigError;
use crate::metrics::Operation;

/// Slots in Redis or Valkey, shared by a whole fleet. See the [module](self) for what the server
/// needs.
///
/// Nothing is connected before the first call. All calls of one store to one server go over one
/// connection, which is replaced when it breaks, stalls or turns out to lead to a replica. Clones share
/// it, and limiters of different names and prefixes may share a store.
///
/// It runs on the tokio runtime of the call that came first, and moves to another's with the next call
/// there when that one is gone, or was not driven for half a second.
///
/// ```
/// # fn build() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_slots::{Limiter, RedisStore};
///
/// let limiter = Limiter::builder(RedisStore::open("redis://127.0.0.1/")?).limit(10).build()?;
/// # Ok(()) }
/// # build().unwrap();
/// ```
#[derive(Clone)]
pub struct RedisStore {
    driver: Arc<Driver>,
}

impl RedisStore {
    /// The store at this address: `redis://[user:password@]host[:port][/db]`, with
    /// `?protocol=resp3` for RESP3, or `unix:///path/to/socket`. With the feature `redis-tls` also
    /// `rediss://…`, and `TlsAddress` for certificates of one's own.
    ///
    /// # Errors
    ///
    /// The address is malformed, or of a kind that this build does not support. Whether a server is
    /// there shows at the first call.
    pub fn open(url: impl IntoConnectionInfo) -> Result<Self, ConfigError> {
        Client::open(url).map(Self::from).map_err(|error| config_error(&error))
    }

    /// The master that these sentinels watch over, wherever it moves.
    ///
    /// `sentinels` are the addresses of some or all of them, with logins of their own. `master` is an
    /// address as in [`open`](Self::open), with the master's name in place of the host, and with no
    /// port: `redis://user:password@mymaster`. A master that is replaced is followed within some
    /// seconds; slots that it took along are put back by their holders.
    ///
    /// ```
    /// # fn open() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_slots::RedisStore;
    ///
    /// let sentinels = ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379", "redis://10.0.0.3:26379"];
    /// let store = RedisStore::sentinel(sentinels, "redis://slots:password@mymaster")?;
    /// # Ok(()) }
    /// # open().unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// An address is malformed or of a kind that this build does not support, or there is no
    /// sentinel. Who is there shows at the first call.
    #[cfg(feature = "redis-sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-sentinel")))]
    pub fn sentinel(
        sentinels: impl IntoIterator<Item = impl IntoConnectionInfo>,
        master: impl IntoConnectionInfo,
    ) -> Result<Self, ConfigError> {
        let sentinels = clients(sentinels)?;
        let master = master.into_connection_info().map_err(|error| config_error(&error))?;
        let problem = "must be redis://[user:password@]name-of-the-master[/db]";
        let sentinels = Sentinels::new(sentinels, master).ok_or(ConfigError::new("master", problem))?;
        Ok(Self::at(Endpoint::Sentinel(Arc::new(sentinels))))
    }

    /// The cluster that these nodes belong to. All others are found through them.
    ///
    /// `nodes` are addresses as in [`open`](Self::open); the login and settings of the first one are
    /// those for all nodes. Ids are spread over the nodes by the hash slots of their keys, and follow
    /// them when they move. A node that is down is an outage for its ids alone, unless the cluster is
    /// set up to stop as a whole: it needs `cluster-require-full-coverage no`.
    ///
    /// ```
    /// # fn open() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_slots::RedisStore;
    ///
    /// let store = RedisStore::cluster(["redis://10.0.0.1:7000", "redis://10.0.0.2:7000"])?;
    /// # Ok(()) }
    /// # open().unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// An address is malformed or of a kind that this build does not support, or there is none. Who
    /// is there shows at the first call.
    #[cfg(feature = "redis-cluster")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-cluster")))]
    pub fn cluster(nodes: impl IntoIterator<Item = impl IntoConnectionInfo>) -> Result<Self, ConfigError> {
        Ok(Self::at(Endpoint::Cluster(Arc::new(Cluster::new(clients(nodes)?)))))
    }

    fn at(endpoint: Endpoint) -> Self {
        Self { driver: Driver::new(endpoint) }
    }
}

/// Clients for these addresses, one at least.
#[cfg(any(feature = "redis-cluster", feature = "redis-sentinel"))]
fn clients(urls: impl IntoIterator<Item = impl IntoConnectionInfo>) -> Result<Vec<Client>, ConfigError> {
    let clients: Result<Vec<_>, _> = urls.into_iter().map(|url| Client::open(url).map(tuned)).collect();
    let clients = clients.map_err(|error| config_error(&error))?;
    if clients.is_empty() { Err(ConfigError::new("url", "must be at least one")) } else { Ok(clients) }
}

/// The client library's error may show a password; ours shows nothing of the address.
fn config_error(error: &RedisError) -> ConfigError {
    if error.kind() == ErrorKind::Io {
        let problem =
            "must be in PEM: an authority's certificates, or a certificate chain and its private key";
        return ConfigError::new("certificates", problem);
    }
    let problem = if cfg!(feature = "redis-tls") {
        "must be redis[s]://[user:password@]host[:port][/db] or unix:///path/to/socket"
    } else {
        "must be redis://[user:password@]host[:port][/db] or unix:///path/to/socket; \
         rediss:// needs the feature redis-tls"
    };
    ConfigError::new("url", problem)
}

/// Dials with the client's settings; socket options that it leaves at their defaults are set to what
/// a limiter needs.
impl From<Client> for RedisStore {
    fn from(client: Client) -> Self {
        Self::at(Endpoint::Client(tuned(client)))
    }
}

/// Uses the manager's connection, which replaces itself as the manager is set up to do.
impl From<ConnectionManager> for RedisStore {
    fn from(manager: ConnectionManager) -> Self {
        Self::at(Endpoint::Manager(manager))
    }
}

/// Uses this very connection. When it breaks the store stays down: prefer a [`Client`].
impl From<MultiplexedConnection> for RedisStore {
    fn from(connection: MultiplexedConnection) -> Self {
        Self::at(Endpoint::Fixed(connection))
    }
}

impl SlotStore for RedisStore {
    fn acquire(&self, claim: Claim) -> Reply<Result<Grant, StoreError>> {
        self.driver.acquire(claim)
    }

    fn adopt(&self, claim: Claim) {
        self.driver.adopt(claim);
    }

    fn release(&self, _key: &Key, slot: SlotId) {
        self.driver.release(slot);
    }

    fn release_confirmed(&self, key: &Key, slot: SlotId) -> Reply<Result<(), StoreError>> {
        let (confirm, confirmed) = oneshot::channel();
        if let Err(error) = self.driver.release_confirmed(key, slot, confirm) {
            return Reply::ready(Err(error));
        }
        // Without its sender the driver is gone: nothing renews the slot, so its lease runs out.
        Reply::later(async move { confirmed.await.unwrap_or(Ok(())) })
    }

    fn count(&self, key: &Key, terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        let (driver, key, terms) = (Arc::clone(&self.driver), key.clone(), Arc::clone(terms));
        Reply::later(async move {
            let write = |cmd: &mut Cmd| script::write_key(cmd, &key);
            let (deadline, count) = (Instant::now() + terms.timeout, Operation::Count);
            let counted = driver.number_of(&key, &terms, deadline, count, &script::COUNT, write).await;
            counted.map(|(_, used)| used)
        })
    }

    fn drain(&self, key: &Key, terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        let (driver, key, terms) = (Arc::clone(&self.driver), key.clone(), Arc::clone(terms));
        Reply::later(async move { driver.drain(&key, &terms).await })
    }

    fn flush(&self) -> Reply<()> {
        self.driver.flush()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").finish_non_exhaustive()
    }
}

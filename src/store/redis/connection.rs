//! Where connections come from, and one that is ready for use.

use std::time::Duration;

use ::redis::aio::{ConnectionLike, ConnectionManager, MultiplexedConnection};
use ::redis::io::tcp::socket2::TcpKeepalive;
use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value,
};
#[cfg(any(feature = "redis-cluster", feature = "redis-sentinel"))]
use ::redis::{ConnectionAddr, ConnectionInfo};

use super::error::from_redis;
use super::script::{self, Source};
use crate::store::{StoreError, StoreErrorKind};
use crate::trace::event;

const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long data may stay unacknowledged before the kernel gives a connection up.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(2);
const KEEPALIVE_AFTER: Duration = Duration::from_secs(5);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(1);

/// Where a store's connections come from.
#[derive(Clone)]
pub(super) enum Endpoint {
    /// We dial, and replace a connection that is of no more use.
    Client(Client),
    /// The same, and the sentinels tell whom.
    #[cfg(feature = "redis-sentinel")]
    Sentinel(std::sync::Arc<super::sentinel::Sentinels>),
    /// The same, and calls may stray from there to other nodes.
    #[cfg(feature = "redis-cluster")]
    Node(Client),
    /// No server, but whoever tells which there are.
    #[cfg(feature = "redis-cluster")]
    Cluster(std::sync::Arc<super::cluster::Cluster>),
    /// The user's, which replaces its connection itself.
    Manager(ConnectionManager),
    /// The user's only connection: if it is gone, so is the store.
    Fixed(MultiplexedConnection),
}

impl Endpoint {
    /// A connection on which nothing was said yet.
    async fn dial(&self) -> Result<Conn, StoreError> {
        Ok(match self {
            Self::Client(client) => Conn::Multiplexed(dial(client).await?),
            #[cfg(feature = "redis-cluster")]
            Self::Node(client) => Conn::Multiplexed(dial(client).await?),
            #[cfg(feature = "redis-sentinel")]
            Self::Sentinel(sentinels) => Conn::Multiplexed(sentinels.dial().await?),
            #[cfg(feature = "redis-cluster")]
            Self::Cluster(_) => return Err(super::cluster::unserved()),
            Self::Manager(manager) => Conn::Managed(manager.clone()),
            Self::Fixed(connection) => Conn::Multiplexed(connection.clone()),
        })
    }

    /// Whether somebody else may become the server to use while this one still answers.
    pub(super) fn may_move(&self) -> bool {
        match self {
            #[cfg(feature = "redis-sentinel")]
            Self::Sentinel(_) => true,
            _ => false,
        }
    }

    /// Whether the server to use is another one than was dialled last.
    pub(super) async fn has_moved(&self) -> bool {
        match self {
            #[cfg(feature = "redis-sentinel")]
            Self::Sentinel(sentinels) => sentinels.has_moved().await,
            _ => false,
        }
    }

    /// What was kept for the next dial may have ended with its runtime, or stand still with it.
    pub(super) fn forget(&self) {
        #[cfg(feature = "redis-sentinel")]
        if let Self::Sentinel(sentinels) = self {
            sentinels.forget();
        }
    }

    /// What was dialled last is of no use.
    fn distrust(&self) {
        #[cfg(feature = "redis-sentinel")]
        if let Self::Sentinel(sentinels) = self {
            sentinels.distrust();
        }
    }

    /// Whether what is sent on one dialled connection arrives in order, for as long as it lives.
    pub(super) fn keeps_order(&self) -> bool {
        match self {
            #[cfg(feature = "redis-cluster")]
            Self::Node(_) => false,
            Self::Manager(_) => false,
            _ => true,
        }
    }

    /// A connection that works: the server is no replica, runs scripts and is recent enough. Of a
    /// cluster, who serves what.
    pub(super) async fn find(&self) -> Result<Found, StoreError> {
        let find = async {
            #[cfg(feature = "redis-cluster")]
            if let Self::Cluster(cluster) = self {
                return cluster.shares().await.map(Found::Shares);
            }
            let mut conn = self.dial().await?;
            let now = greet(&mut conn).await.inspect_err(|_| self.distrust())?;
            Ok(Found::Server(conn, now))
        };
        tokio::time::timeout(CONNECT_TIMEOUT * 2, find).await.unwrap_or_else(|_| Err(unreachable_in_time()))
    }
}

/// What looking for a server came to.
pub(super) enum Found {
    /// A connection to it, and its clock.
    Server(Conn, u64),
    #[cfg(feature = "redis-cluster")]
    Shares(Vec<super::cluster::Share>),
}

/// A connection of our own, on which nothing was said yet.
pub(super) async fn dial(client: &Client) -> Result<MultiplexedConnection, StoreError> {
    #[cfg(feature = "redis-tls")]
    super::tls::choose_provider();
    // The driver bounds each call itself; a second timer would only cost.
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(None);
    let dialled = client.get_multiplexed_async_connection_with_config(&config).await;
    dialled.map_err(|error| from_redis(&error))
}

/// The server's clock, if it may be used.
async fn greet(conn: &mut Conn) -> Result<u64, StoreError> {
    let reply = conn.run(&script::HELLO, |cmd| _ = cmd.arg(0)).await;
    let (now, version) = script::read_hello(reply.map_err(|error| not_greeted(&error))?)?;
    check_version(&version)?;
    Ok(now)
}

/// Servers before 7.0 take the first line of the script, its flags, for code.
fn not_greeted(error: &RedisError) -> StoreError {
    if error.to_string().contains("compiling script") { too_old() } else { from_redis(error) }
}

fn unreachable_in_time() -> StoreError {
    StoreError::new(
        StoreErrorKind::Timeout,
        "the server did not take a connection in time: is it up and reachable?",
    )
}

fn check_version(version: &str) -> Result<(), StoreError> {
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major >= 7) {
        return Ok(());
    }
    Err(too_old())
}

fn too_old() -> StoreError {
    let message = "the server is older than redis 7.0: upgrade it to redis 7.0 or valkey 7.2, or later";
    StoreError::new(StoreErrorKind::Other, message)
}

/// Says once, by name, what is wrong with the server's settings, where it lets us look.
pub(super) async fn warn_of_settings(mut conn: Conn) {
    let mut ask = ::redis::cmd("CONFIG");
    ask.arg("GET").arg("maxmemory-policy");
    let Ok(value) = conn.request(&ask).await else { return };
    let Ok(pairs) = ::redis::from_redis_value::<Vec<String>>(value) else { return };
    if let [_, _policy] = pairs.as_slice()
        && _policy != "noeviction"
    {
        event!(
            warn,
            policy = %_policy,
            "redis may evict slots under memory pressure, which admits too many: set maxmemory-policy noeviction"
        );
    }
}

/// A live connection. A cheap clone.
#[derive(Clone)]
pub(super) enum Conn {
    Multiplexed(MultiplexedConnection),
    Managed(ConnectionManager),
}

impl Conn {
    /// Runs a script: by its hash, and whole if the server does not know it.
    pub(super) async fn run(&mut self, source: &Source, arguments: impl Fn(&mut Cmd)) -> RedisResult<Value> {
        match self.request(&written(source.by_hash(), &arguments)).await {
            Err(error) if is_unknown_script(&error) => {
                self.request(&written(source.whole(), &arguments)).await
            }
            result => result,
        }
    }

    /// Runs a script once for each of several sets of arguments, as one message to the server.
    pub(super) async fn run_each(
        &mut self,
        source: &Source,
        calls: usize,
        arguments: impl Fn(usize, &mut Cmd),
    ) -> RedisResult<Vec<RedisResult<Value>>> {
        if calls == 1 {
            return Ok(vec![self.run(source, |cmd| arguments(0, cmd)).await]);
        }
        let all = (0..calls).map(|call| written(source.by_hash(), |cmd| arguments(call, cmd)));
        let mut replies = self.request_all(all).await?;
        let is_unknown = |reply: &RedisResult<_>| reply.as_ref().is_err_and(is_unknown_script);
        let unknown: Vec<_> = (0..calls).filter(|call| is_unknown(&replies[*call])).collect();
        if !unknown.is_empty() {
            let again = unknown.iter().map(|call| written(source.whole(), |cmd| arguments(*call, cmd)));
            for (call, reply) in unknown.iter().zip(self.request_all(again).await?) {
                replies[*call] = reply;
            }
        }
        Ok(replies)
    }

    /// Runs a script on a node that is about to take its key over.
    #[cfg(feature = "redis-cluster")]
    pub(super) async fn run_asking(
        &mut self,
        source: &Source,
        arguments: impl Fn(&mut Cmd),
    ) -> RedisResult<Value> {
        match self.request_asking(written(source.by_hash(), &arguments)).await {
            Err(error) if is_unknown_script(&error) => {
                self.request_asking(written(source.whole(), &arguments)).await
            }
            result => result,
        }
    }

    #[cfg(feature = "redis-cluster")]
    async fn request_asking(&mut self, cmd: Cmd) -> RedisResult<Value> {
        let mut replies = self.request_all([::redis::cmd("ASKING"), cmd].into_iter()).await?;
        replies.pop().unwrap_or_else(|| Ok(Value::Nil))
    }

    /// Sends several commands as one message; each has its own reply.
    async fn request_all(&mut self, cmds: impl Iterator<Item = Cmd>) -> RedisResult<Vec<RedisResult<Value>>> {
        let mut all = Pipeline::new();
        cmds.for_each(|cmd| _ = all.add_command(cmd));
        let replies = match self {
            Self::Multiplexed(conn) => conn.req_packed_commands(&all, 0, all.len()).await?,
            Self::Managed(conn) => conn.req_packed_commands(&all, 0, all.len()).await?,
        };
        if replies.len() != all.len() {
            return Err((ErrorKind::Parse, "not as many replies as commands").into());
        }
        Ok(replies.into_iter().map(no_error).collect())
    }

    async fn request(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Multiplexed(conn) => request(conn, cmd).await,
            Self::Managed(conn) => request(conn, cmd).await,
        }
    }
}

fn written(mut cmd: Cmd, arguments: impl Fn(&mut Cmd)) -> Cmd {
    arguments(&mut cmd);
    cmd
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ServerErrorKind::NoScript.into()
}

/// Sends a command; what the server says no to is an error.
pub(super) async fn request(conn: &mut impl ConnectionLike, cmd: &Cmd) -> RedisResult<Value> {
    no_error(conn.req_packed_command(cmd).await?)
}

fn no_error(reply: Value) -> RedisResult<Value> {
    match reply {
        Value::ServerError(error) => Err(error.into()),
        value => Ok(value),
    }
}

/// The host and port of a server.
#[cfg(any(feature = "redis-cluster", feature = "redis-sentinel"))]
pub(super) type Address = (String, u16);

/// The host and port of a server, unless it is reached otherwise.
#[cfg(any(feature = "redis-cluster", feature = "redis-sentinel"))]
pub(super) fn address_of(info: &ConnectionInfo) -> Option<Address> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host.clone(), *port))
        }
        _ => None,
    }
}

/// A client of another server, with everything else the same.
#[cfg(any(feature = "redis-cluster", feature = "redis-sentinel"))]
pub(super) fn relocated(info: &ConnectionInfo, (host, port): Address) -> RedisResult<Client> {
    let addr = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Client::open(info.clone().set_addr(addr)).map(tuned)
}

/// The client with the socket options that a store needs. Those are set only where they were left
/// at their defaults.
pub(super) fn tuned(client: Client) -> Client {
    let info = client.get_connection_info();
    let tcp = info.tcp_settings();
    let mut tuned = tcp.clone().set_nodelay(true);
    if tcp.keepalive().is_none() {
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_AFTER);
        #[cfg(any(target_os = "linux", target_os = "macos"))]
        let keepalive = keepalive.with_interval(KEEPALIVE_EVERY).with_retries(3);
        tuned = tuned.set_keepalive(keepalive);
    }
    #[cfg(target_os = "linux")]
    if tcp.user_timeout().is_none() {
        tuned = tuned.set_user_timeout(TCP_USER_TIMEOUT);
    }
    let info = info.clone().set_tcp_settings(tuned);
    Client::open(info).unwrap_or(client)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_older_than_7_are_refused() {
        for version in ["7.0.0", "7.2.5", "8", "10.1", "255.255.255"] {
            assert!(check_version(version).is_ok(), "{version}");
        }
        for version in ["6.2.14", "2.8", "", "latest"] {
            let error = check_version(version).expect_err(version);
            assert!(error.to_string().contains("older than redis 7.0"), "{error}");
        }
    }
}

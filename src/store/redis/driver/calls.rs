//! Script calls outside the flights, and where a call of either kind ends.

use std::sync::Arc;

use ::redis::{Cmd, RedisResult, Value};
use tokio::time::{Instant, timeout_at};

use super::super::connection::Conn;
use super::super::error::{from_redis, timed_out};
use super::super::flight::lease_ms;
use super::super::news::News;
use super::super::script::{self, Source};
use super::{Driver, Place, counted};
use crate::metrics::Operation;
use crate::store::{Key, StoreError, Terms};

/// What a script call came to.
pub(in super::super) struct Ran {
    pub(in super::super) reply: Result<Value, StoreError>,
    /// It did not end where it was sent first.
    pub(in super::super) strayed: bool,
}

impl Driver {
    pub(in super::super) async fn drain(
        self: &Arc<Self>,
        key: &Key,
        terms: &Arc<Terms>,
    ) -> Result<u32, StoreError> {
        let (drained_at, dropped) = self.drop_all(key, terms).await?;
        let mut news = News::default();
        self.lock().table.drained(key, drained_at, &mut news);
        news.deliver();
        Ok(dropped)
    }

    /// When and how many.
    async fn drop_all(self: &Arc<Self>, key: &Key, terms: &Arc<Terms>) -> Result<(u64, u32), StoreError> {
        let (lease_ms, deadline) = (lease_ms(terms), Instant::now() + terms.timeout);
        let drain = Operation::Drain;
        #[cfg(feature = "redis-cluster")]
        if self.lock().is_cluster() {
            // While a hash slot moves, no call with two keys is served.
            let write = |cmd: &mut Cmd| script::write_key(cmd, key);
            let (_, ttl) = self.number_of(key, terms, deadline, drain, &script::TTL, write).await?;
            // A holder may have a longer lease than who drains: the key outlives its slots by 10 s.
            let keep_ms = (2 * lease_ms).max(u64::from(ttl).saturating_sub(10_000));
            let write = |cmd: &mut Cmd| script::write_mark(cmd, key, keep_ms);
            let (drained_at, _) = self.number_of(key, terms, deadline, drain, &script::MARK, write).await?;
            let write = |cmd: &mut Cmd| script::write_drop(cmd, key, lease_ms);
            let (_, dropped) = self.number_of(key, terms, deadline, drain, &script::DRAIN, write).await?;
            return Ok((drained_at, dropped));
        }
        let write = |cmd: &mut Cmd| script::write_drain(cmd, key, lease_ms);
        self.number_of(key, terms, deadline, drain, &script::DRAIN, write).await
    }

    /// Runs a script for a key outside the flights, and returns the server's time and its number.
    pub(in super::super) async fn number_of(
        self: &Arc<Self>,
        key: &Key,
        terms: &Arc<Terms>,
        deadline: Instant,
        operation: Operation,
        source: &'static Source,
        arguments: impl Fn(&mut Cmd) + Send + Sync,
    ) -> Result<(u64, u32), StoreError> {
        let reply = self.call(key, terms, deadline, source, arguments).await.and_then(script::read_number);
        reply.map_err(|error| counted(terms, operation, error))
    }

    async fn call(
        self: &Arc<Self>,
        key: &Key,
        terms: &Arc<Terms>,
        deadline: Instant,
        source: &'static Source,
        arguments: impl Fn(&mut Cmd) + Send + Sync,
    ) -> Result<Value, StoreError> {
        let linked = async {
            self.ready(&mut self.lock(), terms, Instant::now())?;
            self.link(Place::Key(key)).await
        };
        let (mut conn, epoch) = timeout_at(deadline, linked).await.unwrap_or_else(|_| Err(timed_out()))?;
        let run = self.run(&mut conn, key, deadline, source, |cmd, _| arguments(cmd));
        let Ran { reply, strayed } = run.await;
        match &reply {
            _ if strayed => {}
            Ok(_) => self.lock().answered(epoch),
            Err(error) => self.lock_and(|driver, state| driver.failed(state, error, epoch)),
        }
        reply
    }

    /// Runs a script over this connection, or where the server says that the key is. What is written
    /// must be about that key alone, without its marker, where the second argument is true.
    pub(in super::super) async fn run(
        self: &Arc<Self>,
        conn: &mut Conn,
        key: &Key,
        deadline: Instant,
        source: &'static Source,
        arguments: impl Fn(&mut Cmd, bool) + Send + Sync,
    ) -> Ran {
        let run = conn.run(source, |cmd| arguments(cmd, false));
        match timeout_at(deadline, run).await {
            Ok(reply) => self.arrive(reply, key, deadline, source, arguments).await,
            Err(_) => Ran { reply: Err(timed_out()), strayed: false },
        }
    }

    /// Follows a reply that says that the key is elsewhere.
    pub(super) async fn arrive(
        self: &Arc<Self>,
        reply: RedisResult<Value>,
        _key: &Key,
        _deadline: Instant,
        _source: &'static Source,
        _arguments: impl Fn(&mut Cmd, bool) + Send + Sync,
    ) -> Ran {
        #[cfg(feature = "redis-cluster")]
        if let Some(redirect) = self.redirect(&reply) {
            let follow = self.follow(redirect, _key, _source, _arguments);
            let reply = timeout_at(_deadline, follow).await.unwrap_or_else(|_| Err(timed_out()));
            return Ran { reply, strayed: true };
        }
        Ran { reply: reply.map_err(|error| from_redis(&error)), strayed: false }
    }
}

//! The seed's way: a client with gotsem's semantics, for mixed fleets in tests and as the yardstick
//! of the benches.
//!
//! One script per acquire and per release, `now` from the client's own clock, no renewal, and the
//! key's TTL set to the slot's TTL every time. An unreachable server is an `Err` here, where the
//! seed would fail open.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, RedisResult, Script, ServerErrorKind};

/// A script and its hash.
struct Lua {
    code: &'static str,
    hash: String,
}

impl Lua {
    /// Hashes the script.
    fn new(code: &'static str) -> Self {
        let hash = Script::new(code).get_hash().to_owned();
        Self { code, hash }
    }
}

/// KEYS: the set. ARGV: now, max, expiry, member, TTL. Returns {1 or 0, active}.
static ACQUIRE: LazyLock<Lua> = LazyLock::new(|| {
    Lua::new(
        "redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
local active = redis.call('ZCARD', KEYS[1])
if active >= tonumber(ARGV[2]) then return {0, active} end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {1, active + 1}",
    )
});

/// KEYS: the set. ARGV: now, member. Returns how many members it removed.
static RELEASE: LazyLock<Lua> = LazyLock::new(|| {
    Lua::new(
        "local removed = redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
return removed",
    )
});

/// A client of the seed's kind; clones share their connection and clock.
#[derive(Clone)]
pub struct Gotsem {
    connection: MultiplexedConnection,
    prefix: Arc<str>,
    ttl_ms: i64,
    max: u32,
    offset_ms: Arc<AtomicI64>,
}

impl Gotsem {
    /// A client with that key prefix, slot TTL and limit.
    pub fn new(connection: MultiplexedConnection, prefix: &str, ttl: Duration, max: u32) -> Self {
        Self {
            connection,
            prefix: prefix.into(),
            ttl_ms: ttl.as_millis() as i64,
            max,
            offset_ms: Arc::default(),
        }
    }

    /// Sets this client's clock ahead of the real one (or behind it) by so many ms.
    pub fn set_clock_offset(&self, ms: i64) {
        self.offset_ms.store(ms, Ordering::Relaxed);
    }

    /// Tries to take a slot: whether it was granted, its id, and how many are active after it.
    pub async fn try_acquire(&self, id: &str) -> RedisResult<(bool, String, u32)> {
        let slot = new_slot();
        let now = self.now();
        let args = [
            now.to_string(),
            self.max.to_string(),
            (now + self.ttl_ms).to_string(),
            slot.clone(),
            self.ttl_ms.to_string(),
        ];
        let (granted, active) = self.run(&ACQUIRE, id, &args).await?;
        Ok((granted, slot, active))
    }

    /// Gives a slot back; whether it was still there.
    pub async fn release(&self, id: &str, slot: &str) -> RedisResult<bool> {
        let args = [self.now().to_string(), slot.to_owned()];
        self.run(&RELEASE, id, &args).await
    }

    /// How many slots are active by this client's clock; it only reads.
    pub async fn active(&self, id: &str) -> RedisResult<u32> {
        let mut count = redis::cmd("ZCOUNT");
        count.arg(self.key(id)).arg(format!("({}", self.now())).arg("+inf");
        count.query_async(&mut self.connection.clone()).await
    }

    /// Drops all slots.
    pub async fn force_release(&self, id: &str) -> RedisResult<()> {
        let mut del = redis::cmd("DEL");
        del.arg(self.key(id)).query_async(&mut self.connection.clone()).await
    }

    /// EVALSHA, and EVAL where the server does not know the script.
    async fn run<T: FromRedisValue>(&self, script: &Lua, id: &str, args: &[String]) -> RedisResult<T> {
        let mut connection = self.connection.clone();
        let call = |name: &str, script: &str| {
            let mut call = redis::cmd(name);
            call.arg(script).arg(1).arg(self.key(id)).arg(args);
            call
        };
        match call("EVALSHA", &script.hash).query_async(&mut connection).await {
            Err(error) if error.kind() == ServerErrorKind::NoScript.into() => {
                call("EVAL", script.code).query_async(&mut connection).await
            }
            result => result,
        }
    }

    /// The id's key.
    fn key(&self, id: &str) -> String {
        format!("{}{id}", self.prefix)
    }

    /// This client's clock, ms since the Unix epoch.
    fn now(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let real = since.expect("a clock after 1970").as_millis() as i64;
        real + self.offset_ms.load(Ordering::Relaxed)
    }
}

/// A new slot id: `slot_` and 32 hex digits.
pub fn new_slot() -> String {
    format!("slot_{:016x}{:016x}", super::random(), super::random())
}

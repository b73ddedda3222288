//! What the tests of all rows share: limiters, and the one id that all is about.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_slots::store::StoreError;
use tower_slots::{AcquireError, Limiter, LimiterBuilder, OnOutage, Origin, RedisStore, Slot};

pub(crate) use crate::support::rows::{Bound, Tally, judge_time, never_above, say};
use crate::support::{History, RedisServer, Visit, eventually, rows};

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// For what comes at once, on however busy a machine.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// The default time-out of the store.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(250);
/// What a busy machine adds to a bound.
pub(crate) const SLACK: Duration = Duration::from_millis(500);
/// The id that all is about, and its key.
pub(crate) const ID: &str = "acme";
pub(crate) const KEY: &str = "sem:acme";

/// A limiter with a store of its own, as another process would have it, that refuses in an outage.
pub(crate) fn on(url: &str) -> LimiterBuilder {
    Limiter::builder(RedisStore::open(url).unwrap()).on_outage(OnOutage::Refuse)
}

/// One whose callers wait so long that a busy machine is no outage.
pub(crate) fn steady(url: &str, limit: u32, lease: Duration) -> Limiter {
    on(url).limit(limit).lease(lease).store_timeout(lease.mul_f64(0.9)).build().unwrap()
}

/// A slot and its visit, which ends before the slot is given back.
pub(crate) struct Held {
    _visit: Visit,
    pub(crate) slot: Slot,
}

pub(crate) async fn hold(limiter: &Limiter, history: &History, n: usize) -> Vec<Held> {
    let slots = join_all((0..n).map(|_| limiter.try_acquire(ID))).await;
    let held = |slot: Result<Slot, _>| Held { _visit: history.enter(ID, 1), slot: slot.unwrap() };
    slots.into_iter().map(held).collect()
}

pub(crate) fn error_of(result: Result<Slot, AcquireError>) -> StoreError {
    match result {
        Err(AcquireError::Unavailable(error)) => error,
        other => panic!("not an outage: {other:?}"),
    }
}

pub(crate) fn is_saturated(result: &Result<Slot, AcquireError>) -> bool {
    matches!(result, Err(AcquireError::Saturated { .. }))
}

/// Members whose lease has not run out.
pub(crate) async fn live(server: &RedisServer) -> usize {
    let now = server.time_ms().await;
    server.members(KEY).await.iter().filter(|(_, until)| *until > now).count()
}

pub(crate) async fn lives(server: &RedisServer, n: usize, within: Duration) {
    eventually(&format!("{n} slots"), within, async || live(server).await == n).await;
}

/// The store grants again.
pub(crate) async fn recovered(limiter: &Limiter, within: Duration) {
    let granted = async || limiter.try_acquire(ID).await.is_ok_and(|slot| slot.origin() == Origin::Store);
    eventually("slots come from the store again", within, granted).await;
}

/// Once all is given back, no member is left within a lease, and then exactly `limit` can be taken.
pub(crate) async fn healed(server: &RedisServer, limiter: &Limiter, limit: usize, lease: Duration) {
    eventually("no slot is left", lease + SLACK, async || live(server).await == 0).await;
    recovered(limiter, SOON).await;
    eventually("nor of this", SOON, async || live(server).await == 0).await;
    let all = join_all((0..=limit).map(|_| limiter.try_acquire(ID))).await;
    assert_eq!(all.iter().filter(|slot| slot.is_ok()).count(), limit, "{all:?}");
    assert_eq!(all.iter().filter(|slot| is_saturated(slot)).count(), 1, "{all:?}");
    drop(all);
    eventually("all is free again", SOON, async || live(server).await == 0).await;
}

/// Callers that come and go for `time`, each for a few ms. Those that the store let in are recorded.
pub(crate) async fn traffic(limiter: &Limiter, history: &History, callers: usize, time: Duration) -> Tally {
    let end = Instant::now() + time;
    rows::traffic(limiter, ID, history, callers, || Instant::now() < end).await
}

/// Prints what was measured for the row, and checks it.
pub(crate) fn judge(row: u32, history: &History, bound: &Bound) {
    rows::judge(row, history, ID, bound);
}

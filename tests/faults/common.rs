//! What the tests of all rows share: limiters, callers that come and go, and the judgement.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_slots::store::StoreError;
use tower_slots::{AcquireError, Limiter, LimiterBuilder, OnOutage, Origin, RedisStore, Slot};

use crate::support::{History, RedisServer, Visit, eventually};

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

/// What became of the calls of some callers.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) served: u32,
    pub(crate) refused: u32,
    /// Refused in an outage, let pass in one, and limited within the process in one.
    pub(crate) failed: u32,
    pub(crate) open: u32,
    pub(crate) local: u32,
    pub(crate) slowest: Duration,
    pub(crate) errors: Vec<StoreError>,
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { served, refused, failed, open, local, slowest, .. } = self;
        write!(
            f,
            "{served} served, {refused} refused, {failed} failed, {open} let pass, {local} by share, "
        )?;
        write!(f, "slowest {slowest:?}, errors {:?}", self.texts())
    }
}

impl Tally {
    /// Each different error once.
    pub(crate) fn texts(&self) -> BTreeSet<String> {
        self.errors.iter().map(ToString::to_string).collect()
    }

    fn add(mut self, other: Self) -> Self {
        self.served += other.served;
        self.refused += other.refused;
        self.failed += other.failed;
        self.open += other.open;
        self.local += other.local;
        self.slowest = self.slowest.max(other.slowest);
        self.errors.extend(other.errors);
        self
    }
}

/// Callers that come and go for `time`, each for a few ms. Those that the store let in are recorded.
pub(crate) async fn traffic(limiter: &Limiter, history: &History, callers: usize, time: Duration) -> Tally {
    let end = Instant::now() + time;
    let callers = (0..callers).map(|_| async {
        let mut tally = Tally::default();
        while Instant::now() < end {
            let start = Instant::now();
            let result = limiter.try_acquire(ID).await;
            tally.slowest = tally.slowest.max(start.elapsed());
            let mut visit = None;
            match &result {
                Ok(slot) => match slot.origin() {
                    Origin::Store => {
                        visit = Some(history.enter(ID, 1));
                        tally.served += 1;
                    }
                    Origin::FailOpen => tally.open += 1,
                    _ => tally.local += 1,
                },
                Err(AcquireError::Saturated { .. }) => tally.refused += 1,
                Err(AcquireError::Unavailable(error)) => {
                    tally.failed += 1;
                    tally.errors.push(error.clone());
                }
                Err(error) => panic!("{error}"),
            }
            sleep(3 * MS).await;
            drop(visit);
            drop(result);
        }
        tally
    });
    join_all(callers).await.into_iter().fold(Tally::default(), Tally::add)
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

/// What a row of the table allows.
pub(crate) struct Bound {
    pub(crate) limit: u32,
    /// The most at once.
    pub(crate) most: u32,
    /// How long there may be more than the limit.
    pub(crate) above: Duration,
}

/// No more than the limit, ever.
pub(crate) fn never_above(limit: u32) -> Bound {
    Bound { limit, most: limit, above: Duration::ZERO }
}

/// Prints what was measured for the row, and checks it.
pub(crate) fn judge(row: u32, history: &History, bound: &Bound) {
    let Bound { limit, most, above } = *bound;
    let (overlap, time) = (history.overlap(ID), history.time_above(ID, limit));
    let (ms, most_ms) = (time.as_millis(), above.as_millis());
    say(row, &format!("overlap {overlap} of at most {most}; above {limit} for {ms} of at most {most_ms} ms"));
    history.assert_within(ID, most);
    assert!(time <= above, "fault {row:02}: above {limit} for {ms} ms, where {most_ms} ms are allowed");
}

/// Prints and checks a time.
pub(crate) fn judge_time(row: u32, what: &str, time: Duration, most: Duration) {
    let line = format!("{what} {} of at most {} ms", time.as_millis(), most.as_millis());
    say(row, &line);
    assert!(time <= most, "fault {row:02}: {line}");
}

pub(crate) fn say(row: u32, line: &str) {
    println!("fault {row:02}: {line}");
}

//! Slots on a master that sentinels watch over.

#![cfg(feature = "redis-sentinel")]
#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod support;

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::rows::{Bound, judge, judge_time, traffic};
use support::sentinel::{MASTER, Sentinel, Watched};
use support::server::query;
use support::{History, RedisServer, Visit, eventually, free_port};
use tower_slots::store::{StoreError, StoreErrorKind};
use tower_slots::{AcquireError, Limiter, OnOutage, Origin, RedisStore, Slot};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// For what comes at once, on however busy a machine.
const SOON: Duration = Duration::from_secs(10);
/// For a failover, which takes the sentinels a few seconds.
const FAILOVER: Duration = Duration::from_secs(60);
/// How long there may be more than the limit: the two processes may follow a new master seconds apart,
/// and then it takes a third of a lease.
const ABOVE: Duration = Duration::from_secs(6);
const LIMIT: u32 = 10;
const ACME: &str = "sem:acme";

fn limiter(sentinels: &[String], master: &str) -> Limiter {
    let store = RedisStore::sentinel(sentinels.iter().map(String::as_str), master).unwrap();
    let builder = Limiter::builder(store).limit(LIMIT).lease(3 * SECOND).store_timeout(900 * MS);
    builder.on_outage(OnOutage::Refuse).build().unwrap()
}

fn on(watched: &Watched) -> Limiter {
    limiter(&watched.urls(), "redis://mymaster")
}

async fn granted(limiter: &Limiter, within: Duration) {
    let granted = async || limiter.try_acquire("acme").await.is_ok_and(|slot| slot.origin() == Origin::Store);
    eventually("slots come from the store", within, granted).await;
}

/// The store answers: with a refusal too, where others want more than there is.
async fn served(limiter: &Limiter, within: Duration) {
    let served = async || !matches!(limiter.try_acquire("acme").await, Err(AcquireError::Unavailable(_)));
    eventually("the store answers", within, served).await;
}

async fn hold(limiter: &Limiter, n: usize) -> Vec<Slot> {
    granted(limiter, SOON).await;
    join_all((0..n).map(|_| limiter.try_acquire("acme"))).await.into_iter().collect::<Result<_, _>>().unwrap()
}

async fn counts(server: &RedisServer, n: u64, within: Duration) {
    eventually(&format!("{n} slots"), within, async || server.zcard(ACME).await == n).await;
}

/// Judges what `slots` and another process's callers, who want more than there is, have at once until
/// `fault` is over. Returns the visits of `slots`.
async fn under_load(sentinels: &[String], slots: &[Slot], fault: impl Future<Output = ()>) -> Vec<Visit> {
    let (history, over) = (History::new(), Cell::new(false));
    let visits = slots.iter().map(|_| history.enter("acme", 1)).collect();
    let other = limiter(sentinels, "redis://mymaster");
    let callers = traffic(&other, "acme", &history, 30, || !over.get());
    let fault = async {
        tokio::time::sleep(SECOND / 2).await;
        fault.await;
        over.set(true);
    };
    let (tally, ()) = tokio::join!(callers, fault);
    assert!(tally.served > 0 && tally.refused > 0, "{tally:?}");
    judge(9, &history, "acme", &Bound { limit: LIMIT, most: 2 * LIMIT, above: ABOVE });
    assert!(other.shutdown(SOON).await);
    visits
}

/// Whether a server has that role. Sentinels end all connections to one whose role they change.
async fn is(server: &RedisServer, role: &str) -> bool {
    let info = query(server.url(), &["INFO", "replication"]).await.ok();
    let info = info.and_then(|info| tower_slots::redis::from_redis_value::<String>(info).ok());
    info.is_some_and(|info| info.contains(&format!("role:{role}")))
}

/// All of them are in that server's set.
async fn are_on(server: &RedisServer, slots: &[Slot]) {
    let all = async || {
        let members = server.members(ACME).await;
        slots.iter().all(|slot| members.iter().any(|(member, _)| *member == slot.id().to_string()))
    };
    let start = Instant::now();
    eventually("held slots are put back", SOON, all).await;
    judge_time(9, "held slots are on the new master after", start.elapsed(), ABOVE);
}

async fn error_of(limiter: &Limiter) -> StoreError {
    match limiter.try_acquire("acme").await {
        Err(AcquireError::Unavailable(error)) => error,
        other => panic!("not an outage: {other:?}"),
    }
}

#[tokio::test]
async fn fault_09_a_master_that_dies_is_followed_by_its_successor_with_all_slots() {
    let watched = Watched::start().await;
    let limiter = on(&watched);
    let slots = hold(&limiter, 4).await;
    counts(&watched.master, 4, SOON).await;
    let visits = under_load(&watched.urls(), &slots, async {
        watched.master.kill();
        let start = Instant::now();
        served(&limiter, FAILOVER).await;
        judge_time(9, "the new master answers after", start.elapsed(), FAILOVER);
        are_on(&watched.replica, &slots).await;
    })
    .await;
    counts(&watched.replica, 4, SOON).await;
    drop((visits, slots));
    counts(&watched.replica, 0, SOON).await;
    assert!(limiter.shutdown(SOON).await);
}

#[tokio::test]
async fn fault_09_a_failover_on_request_is_followed_and_what_it_lost_is_put_back() {
    let watched = Watched::start().await;
    let limiter = on(&watched);
    let slots = hold(&limiter, 4).await;
    let visits = under_load(&watched.urls(), &slots, async {
        let _: () = watched.sentinels[0].read(&["SENTINEL", "FAILOVER", MASTER]).await;
        eventually("the replica is the master", FAILOVER, async || is(&watched.replica, "master").await)
            .await;
        // As if nothing had reached it before.
        watched.replica.flushall().await;
        served(&limiter, SOON).await;
        are_on(&watched.replica, &slots).await;
    })
    .await;
    counts(&watched.replica, 4, SOON).await;
    eventually("the old master is a replica", FAILOVER, async || is(&watched.master, "slave").await).await;
    drop((visits, slots));
    counts(&watched.replica, 0, SOON).await;
    let calls = watched.master.errors("READONLY").await;
    assert!(calls < 500, "{calls} calls went to the old master");
}

#[tokio::test]
async fn fault_09_a_master_that_is_replaced_while_it_answers_is_left_within_seconds() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let sentinels = [Sentinel::start(&[(MASTER, &old)]), Sentinel::start(&[(MASTER, &old)])];
    for sentinel in &sentinels {
        let _: String = sentinel.read(&["PING"]).await;
    }
    let urls = sentinels.each_ref().map(Sentinel::url);
    let limiter = limiter(&urls, "redis://mymaster");
    let slots = hold(&limiter, 4).await;
    counts(&old, 4, SOON).await;
    let visits = under_load(&urls, &slots, async {
        for sentinel in &sentinels {
            let _: () = sentinel.read(&["SENTINEL", "REMOVE", MASTER]).await;
            let port = new.port().to_string();
            let _: () = sentinel.read(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
        }
        are_on(&new, &slots).await;
    })
    .await;
    counts(&new, 4, SOON).await;
    let start = Instant::now();
    while start.elapsed() < SECOND {
        let slot = limiter.try_acquire("acme").await.unwrap();
        assert_eq!(slot.origin(), Origin::Store);
    }
    drop((visits, slots));
    counts(&new, 0, SOON).await;
}

#[tokio::test]
async fn a_sentinel_that_is_down_silent_or_behind_is_passed_over() {
    let mut watched = Watched::start().await;
    // To this one the replica is a master, as it may have been before a failover.
    let behind = Sentinel::start(&[(MASTER, &watched.replica)]);
    let _: String = behind.read(&["PING"]).await;
    watched.sentinels[0].kill();
    watched.sentinels[1].stop();
    let urls = [&[behind.url()][..], &watched.urls()].concat();
    let limiter = limiter(&urls, "redis://mymaster");
    granted(&limiter, SOON).await;
    let slots = hold(&limiter, 2).await;
    counts(&watched.master, 2, SOON).await;
    drop(slots);
}

#[test]
fn a_store_moves_to_the_next_runtime() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(&[(MASTER, &server)]);
    let limiter = limiter(&[sentinel.url()], "redis://mymaster");
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _slots = runtime().block_on(hold(&limiter, 2));
    let next = runtime().block_on(limiter.try_acquire("acme")).unwrap();
    assert_eq!((next.origin(), next.active()), (Origin::Store, 3));
}

#[test]
fn a_store_moves_to_the_next_runtime_while_the_first_stands_still() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(&[(MASTER, &server)]);
    let limiter = limiter(&[sentinel.url()], "redis://mymaster");
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, next) = (runtime(), runtime());
    let _slots = first.block_on(hold(&limiter, 2));
    std::thread::sleep(SECOND);
    let next = next.block_on(limiter.try_acquire("acme")).unwrap();
    assert_eq!((next.origin(), next.active()), (Origin::Store, 3));
}

#[tokio::test]
async fn sentinels_that_cannot_help_are_an_outage_that_says_why() {
    let nobody = format!("redis://127.0.0.1:{}/", free_port());
    let error = error_of(&limiter(&[nobody], "redis://mymaster")).await;
    assert!(error.kind() == StoreErrorKind::Io && error.to_string().contains("is the server up"), "{error}");
    let server = RedisServer::start();
    let sentinel = Sentinel::start(&[(MASTER, &server)]);
    let _: String = sentinel.read(&["PING"]).await;
    let error = error_of(&limiter(&[sentinel.url()], "redis://another")).await;
    assert!(error.to_string().contains("no master of this name"), "{error}");
    let error = error_of(&limiter(&[server.url()], "redis://mymaster")).await;
    assert_eq!(error.kind(), StoreErrorKind::Other, "no sentinel: {error}");
    server.kill();
    let error = error_of(&limiter(&[sentinel.url()], "redis://mymaster")).await;
    assert_eq!(error.kind(), StoreErrorKind::Io, "a master that is down: {error}");
}

#[test]
fn addresses_that_cannot_work_are_errors() {
    let none: [&str; 0] = [];
    assert!(RedisStore::sentinel(none, "redis://mymaster").is_err());
    assert!(RedisStore::sentinel(["redis://127.0.0.1"], "mymaster").is_err());
    assert!(RedisStore::sentinel(["redis://127.0.0.1"], "unix:///mymaster").is_err());
    assert!(RedisStore::sentinel(["http://127.0.0.1"], "redis://mymaster").is_err());
}

#[tokio::test]
async fn the_documented_rights_are_enough() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(&[(MASTER, &server)]);
    let sentinel_user = ["ACL", "SETUSER", "asks", "on", ">pass", "+sentinel|get-master-addr-by-name"];
    let _: () = sentinel.read(&sentinel_user).await;
    let rights = "~sem:* ~{sem:* +eval +evalsha +time +get +set +del +zadd +zcard +zcount +zmscore +zrem \
                  +zremrangebyscore +pttl +pexpire";
    let user: Vec<_> =
        ["ACL", "SETUSER", "slots", "on", ">pass"].into_iter().chain(rights.split(' ')).collect();
    server.command(&user).await;
    let url = sentinel.url().replace("//", "//asks:pass@");
    let slots = hold(&limiter(&[url], "redis://slots:pass@mymaster"), 2).await;
    counts(&server, 2, SOON).await;
    drop(slots);
    counts(&server, 0, SOON).await;
    let denied =
        error_of(&limiter(&[sentinel.url().replace("//", "//asks:wrong@")], "redis://mymaster")).await;
    assert_eq!(denied.kind(), StoreErrorKind::NoPerm, "{denied}");
}

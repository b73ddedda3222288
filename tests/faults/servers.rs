//! Servers that stop, die, lose their data, refuse, or hold foreign data.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tower_slots::store::StoreErrorKind;
use tower_slots::{AcquireError, Limiter, OnOutage, Origin};

use crate::common::{
    Bound, Held, ID, KEY, MS, SECOND, SLACK, SOON, TIMEOUT, error_of, healed, hold, is_saturated, judge,
    judge_time, live, lives, never_above, on, recovered, say, steady, traffic,
};
use crate::support::meter::recorded;
use crate::support::{History, Log, Proxy, RedisServer, eventually, free_port};

// ---- 6: a server that stands still

#[tokio::test]
async fn fault_06_on_a_stopped_server_every_call_answers_in_its_budget_by_policy() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let build = |policy| recorded(|| on(&server.url()).lease(lease).on_outage(policy).build().unwrap());
    let (refuse, refuse_meter) = build(OnOutage::Refuse);
    let (admit, admit_meter) = build(OnOutage::Admit);
    let (local, local_meter) = build(OnOutage::Local { share: 0.25 });
    for limiter in [&refuse, &admit, &local] {
        recovered(limiter, SOON).await;
    }
    server.stop();
    let limiters = [&refuse, &admit, &local];
    let calls = limiters.map(|limiter| traffic(limiter, &history, 8, 2 * SECOND));
    let tallies = join_all(calls).await;
    server.cont();
    let [refused, admitted, limited] = &tallies[..] else { unreachable!("three limiters") };
    for tally in &tallies {
        judge_time(6, "the slowest call took", tally.slowest, TIMEOUT + SLACK);
        assert_eq!(tally.served, 0, "{tally:?}");
    }
    assert_eq!((refused.open, refused.local, refused.refused), (0, 0, 0), "an outage is no saturation");
    assert_eq!((admitted.failed, admitted.local, admitted.refused), (0, 0, 0));
    assert_eq!((limited.failed, limited.open), (0, 0));
    assert!(limited.local > 0 && limited.refused > 0, "3 of 8 at a time: {limited:?}");
    for (meter, result, count) in [
        (refuse_meter, "fail_closed", refused.failed),
        (admit_meter, "fail_open", admitted.open),
        (local_meter, "local_rejected", limited.refused),
    ] {
        let counted = meter.sum(&format!("requests_total{{{result}}}"));
        assert!(counted >= f64::from(count), "{counted} counted as {result}, of {count}");
        assert_eq!(meter.sum("requests_total{rejected}"), 0.0);
    }
    for limiter in [&refuse, &admit, &local] {
        recovered(limiter, SOON).await;
    }
    judge(6, &history, &never_above(10));
    healed(&server, &refuse, 10, lease).await;
}

/// Slots that are let in while the server stands still are counted once it goes on.
async fn counted_afterwards(policy: OnOutage, origin: Origin) {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let (log, _guard) = Log::start();
    let (limiter, meter) =
        recorded(|| on(&server.url()).limit(4).lease(lease).on_outage(policy).build().unwrap());
    let other = steady(&server.url(), 4, lease);
    recovered(&limiter, SOON).await;
    recovered(&other, SOON).await;
    lives(&server, 0, SOON).await;
    server.stop();
    let mut admitted = hold(&limiter, &history, 4).await;
    assert!(admitted.iter().all(|held| held.slot.origin() == origin));
    // A slot that is given back before the server goes on is none of its business.
    admitted.pop().unwrap().slot.release().await.expect("it is given back at once");
    eventually("the breaker opens", SOON, async || {
        drop(limiter.try_acquire(ID).await);
        !log.lines("slot store down").is_empty()
    })
    .await;
    sleep(lease).await;
    server.cont();
    recovered(&limiter, SOON).await;
    let start = Instant::now();
    lives(&server, 3, SOON).await;
    judge_time(6, "what was let in counts after", start.elapsed(), lease / 3 + SLACK);
    let more = hold(&other, &history, 1).await;
    assert!(is_saturated(&other.try_acquire(ID).await), "the limit is 4");
    sleep(lease + lease / 2).await;
    assert_eq!(live(&server).await, 4, "it is renewed");
    assert_eq!(meter.sum("slots_lost_total"), 0.0, "a slot that was never there is not lost");
    admitted.pop().unwrap().slot.release().await.expect("and given back");
    lives(&server, 3, SOON).await;
    sleep(2 * MS).await;
    assert_eq!(other.drain(ID).await.unwrap(), 3);
    for held in &admitted {
        timeout(SOON, held.slot.lost()).await.expect("and lost to a drain");
    }
    drop((admitted, more));
    judge(6, &history, &never_above(4));
    healed(&server, &limiter, 4, lease).await;
}

#[tokio::test]
async fn fault_06_slots_admitted_in_an_outage_count_within_a_third_of_a_lease_after_it() {
    counted_afterwards(OnOutage::Admit, Origin::FailOpen).await;
}

#[tokio::test]
async fn fault_06_slots_of_the_processes_share_count_within_a_third_of_a_lease_after_an_outage() {
    counted_afterwards(OnOutage::Local { share: 1.0 }, Origin::Local).await;
}

#[test]
fn fault_06_a_stale_acquire_takes_no_slot_though_nobody_releases_it() {
    let server = RedisServer::start();
    let here = tokio::runtime::Runtime::new().unwrap();
    let there = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limiter = on(&server.url()).limit(20).store_timeout(100 * MS).build().unwrap();
    there.block_on(async {
        recovered(&limiter, SOON).await;
        lives(&server, 0, SOON).await;
    });
    let before = here.block_on(server.script_calls());
    server.stop();
    let late = there.block_on(join_all((0..20).map(|_| limiter.try_acquire(ID))));
    late.into_iter().for_each(|result| drop(error_of(result)));
    // With its runtime gone, nothing of the limiter can release anything.
    drop(there);
    server.cont();
    here.block_on(eventually("the server runs it", SOON, async || server.script_calls().await > before));
    let taken = here.block_on(server.zcard(KEY));
    say(6, &format!("{taken} slots taken by stale acquires of at most 0"));
    assert_eq!(taken, 0, "fault 06: stale acquires took {taken} slots of at most 0");
}

// ---- 7: a server that loses its data

/// `lose` makes the server lose its data, while one process holds all slots and another wants some.
async fn data_is_lost(server: &RedisServer, above: Duration, lose: impl AsyncFn()) {
    const LIMIT: usize = 4;
    let (lease, history) = (2 * SECOND, History::new());
    let (holder, other) = (steady(&server.url(), 4, lease), steady(&server.url(), 4, lease));
    let held = hold(&holder, &history, LIMIT).await;
    let ids: Vec<_> = held.iter().map(|held| held.slot.id().to_string()).collect();
    let callers = traffic(&other, &history, 8, 3 * lease);
    let fault = async {
        sleep(lease / 2).await;
        lose().await;
        let start = Instant::now();
        let back = async || {
            let members = server.members(KEY).await;
            ids.iter().all(|id| members.iter().any(|(member, _)| member == id))
        };
        eventually("all are put back", SOON, back).await;
        judge_time(7, "held slots are put back after", start.elapsed(), above);
        sleep(lease).await;
        let (before, busy) = (history.visits(ID), other.try_acquire(ID).await);
        assert!(is_saturated(&busy), "nothing new below the limit: {busy:?}");
        sleep(lease / 4).await;
        assert_eq!(history.visits(ID), before, "nothing new is let in");
        for Held { slot, .. } in held {
            slot.release().await.expect("no release fails on a slot that was lost and put back");
        }
    };
    let (tally, ()) = tokio::join!(callers, fault);
    assert!(tally.served > 0 && tally.refused > 0, "{tally:?}");
    judge(7, &history, &Bound { limit: 4, most: 8, above });
    healed(server, &other, LIMIT, lease).await;
}

#[tokio::test]
async fn fault_07_after_a_flushall_holders_put_their_slots_back_within_a_third_of_a_lease() {
    let server = RedisServer::start();
    data_is_lost(&server, 2 * SECOND / 3 + SLACK, async || server.flushall().await).await;
}

#[tokio::test]
async fn fault_07_after_a_kill_and_an_empty_restart_holders_put_their_slots_back() {
    let server = RedisServer::start();
    // The clients have to come back too: they look every second at the latest.
    data_is_lost(&server, 2 * SECOND / 3 + SECOND + SLACK, async || server.restart()).await;
}

#[tokio::test]
async fn fault_07_a_release_of_a_slot_that_the_server_lost_succeeds() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let limiter = steady(&server.url(), 3, lease);
    let held = hold(&limiter, &history, 3).await;
    server.flushall().await;
    for Held { slot, .. } in held {
        slot.release().await.expect("a slot that is gone is given back");
    }
    judge(7, &history, &never_above(3));
    healed(&server, &limiter, 3, lease).await;
}

// ---- 8: a server that loads its data, or has lost its master

/// All calls are an outage of that kind until `end`, and none of them a refusal.
async fn outage_until(row: u32, limiter: &Limiter, kinds: &[StoreErrorKind], end: impl Future<Output = ()>) {
    let history = History::new();
    let callers = async {
        let mut tally = traffic(limiter, &history, 4, 1500 * MS).await;
        tally.errors.retain(|error| !kinds.contains(&error.kind()));
        tally
    };
    let (tally, ()) = tokio::join!(callers, end);
    say(row, &format!("{} refused of at most 0, {} outages", tally.refused, tally.failed));
    assert_eq!(tally.refused, 0, "fault {row:02}: an outage is no saturation");
    assert!(tally.failed > 0 && tally.errors.is_empty(), "{tally:?}");
    judge_time(row, "the slowest call took", tally.slowest, SECOND + SLACK);
}

#[tokio::test]
async fn fault_08_a_server_that_loads_its_data_is_an_outage_and_asked_again() {
    let server = RedisServer::with(&["--loading-process-events-interval-bytes", "1024"]);
    let (log, _guard) = Log::start();
    let limiter = steady(&server.url(), 10, SECOND);
    recovered(&limiter, SOON).await;
    server.command(&["DEBUG", "POPULATE", "1000", "other", "1000"]).await;
    server.command(&["CONFIG", "SET", "key-load-delay", "1000"]).await;
    let reload = async {
        server.command(&["DEBUG", "RELOAD"]).await;
    };
    // A connection that waits through a stretch of loading times out.
    let kinds = [StoreErrorKind::Loading, StoreErrorKind::Timeout];
    outage_until(8, &limiter, &kinds, reload).await;
    assert!(log.warnings().len() <= 2, "{:?}", log.warnings());
    server.command(&["CONFIG", "SET", "key-load-delay", "0"]).await;
    recovered(&limiter, 3 * SECOND).await;
    healed(&server, &limiter, 10, SECOND).await;
}

#[tokio::test]
async fn fault_08_a_replica_without_its_master_is_an_outage_and_asked_again() {
    let server = RedisServer::with(&["--replica-serve-stale-data", "no"]);
    let (log, _guard) = Log::start();
    let limiter = steady(&server.url(), 10, SECOND);
    recovered(&limiter, SOON).await;
    server.command(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]).await;
    let kinds = [StoreErrorKind::Loading, StoreErrorKind::ReadOnly];
    outage_until(8, &limiter, &kinds, async {}).await;
    // As what it was before, or as the replica that it is found to be when it is greeted anew.
    assert_eq!(log.lines("slot store down").len(), 1, "{:?}", log.warnings());
    server.command(&["REPLICAOF", "NO", "ONE"]).await;
    recovered(&limiter, 3 * SECOND).await;
    healed(&server, &limiter, 10, SECOND).await;
}

// ---- 10: a master that was demoted

#[tokio::test]
async fn fault_10_a_connection_to_a_demoted_master_is_replaced_by_one_to_the_new_master() {
    let (lease, history) = (SECOND, History::new());
    let (old, new) = (RedisServer::start(), RedisServer::start());
    // As an address that moves does: existing connections stay with the old server.
    let proxy = Proxy::start(old.addr());
    let (log, _guard) = Log::start();
    let limiter = steady(&proxy.url(), 4, lease);
    let held = hold(&limiter, &history, 2).await;
    proxy.redirect(new.addr());
    old.command(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]).await;
    let start = Instant::now();
    recovered(&limiter, SOON).await;
    judge_time(10, "the new master grants after", start.elapsed(), 2 * SECOND + SLACK);
    lives(&new, 2, lease).await;
    assert!(log.warnings().len() <= 1, "{:?}", log.warnings());
    drop(held);
    judge(10, &history, &never_above(4));
    healed(&new, &limiter, 4, lease).await;
}

#[tokio::test]
async fn fault_10_a_replica_is_named_and_not_stormed() {
    let (server, lease) = (RedisServer::start(), SECOND);
    let proxy = Proxy::start(server.addr());
    let (log, _guard) = Log::start();
    let limiter = steady(&proxy.url(), 10, lease);
    recovered(&limiter, SOON).await;
    server.command(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]).await;
    let before = proxy.connections();
    outage_until(10, &limiter, &[StoreErrorKind::ReadOnly], async {}).await;
    let tries = proxy.connections() - before;
    say(10, &format!("{tries} connections in 1.5 s of at most 30"));
    assert!(tries <= 30, "fault 10: {tries} connections in 1.5 s of at most 30");
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("connect to the master"), "{warnings:?}");
    server.command(&["REPLICAOF", "NO", "ONE"]).await;
    recovered(&limiter, 3 * SECOND).await;
    healed(&server, &limiter, 10, lease).await;
}

// ---- 11: a server that forgets its scripts

#[tokio::test]
async fn fault_11_no_request_fails_when_the_server_forgets_its_scripts() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let limiter = steady(&server.url(), 24, lease);
    let held = hold(&limiter, &history, 8).await;
    let flushes = async {
        let start = Instant::now();
        while start.elapsed() < 2 * lease {
            server.script_flush().await;
            sleep(3 * MS).await;
        }
    };
    let (tally, ()) = tokio::join!(traffic(&limiter, &history, 16, 2 * lease), flushes);
    say(11, &format!("{} of {} requests failed of at most 0", tally.failed, tally.served));
    assert_eq!((tally.failed, tally.refused), (0, 0), "fault 11: requests failed: {tally:?}");
    assert!(tally.served > 100 && server.calls("eval").await > 20, "forgotten in the middle: {tally:?}");
    for Held { slot, .. } in held {
        slot.release().await.expect("no release fails");
    }
    judge(11, &history, &never_above(24));
    healed(&server, &limiter, 24, lease).await;
}

#[tokio::test]
async fn fault_11_renewals_do_not_fail_when_the_server_forgets_its_scripts() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let (limiter, meter) = recorded(|| steady(&server.url(), 8, lease));
    let held = hold(&limiter, &history, 8).await;
    let start = Instant::now();
    while start.elapsed() < 3 * lease {
        server.script_flush().await;
        sleep(3 * MS).await;
        assert_eq!(live(&server).await, 8, "held slots are renewed");
    }
    let failed = meter.sum("renewals_total{error}");
    say(11, &format!("{failed} renewals failed of at most 0"));
    assert_eq!(failed, 0.0, "fault 11: renewals failed");
    drop(held);
    judge(11, &history, &never_above(8));
    healed(&server, &limiter, 8, lease).await;
}

// ---- 13: a server that is full

#[tokio::test]
async fn fault_13_a_full_server_is_an_outage_for_acquires_only() {
    let server = RedisServer::with(&["--maxmemory-policy", "noeviction"]);
    let (lease, history) = (SECOND, History::new());
    let (log, _guard) = Log::start();
    let (limiter, meter) = recorded(|| steady(&server.url(), 10, lease));
    let mut held = hold(&limiter, &history, 5).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    outage_until(13, &limiter, &[StoreErrorKind::Oom], async {}).await;
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("raise maxmemory"), "{warnings:?}");
    let renewed = meter.sum("renewals_total{renewed}");
    say(13, &format!("{renewed} renewals on a full server of at least 15"));
    assert!(live(&server).await == 5 && renewed >= 15.0, "fault 13: {renewed} renewals");
    held.pop().unwrap().slot.release().await.expect("a full server takes slots back");
    assert_eq!(server.zcard(KEY).await, 4);
    assert_eq!(limiter.active(ID).await.unwrap(), 4, "it can be counted");
    drop(held);
    lives(&server, 0, SOON).await;
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    recovered(&limiter, 3 * SECOND).await;
    judge(13, &history, &never_above(10));
    healed(&server, &limiter, 10, lease).await;
}

// ---- 14: a user without a right

#[tokio::test]
async fn fault_14_a_missing_right_is_named_once_and_not_stormed() {
    let server = RedisServer::start();
    for (n, rights) in
        [&["~sem:*", "+ping"][..], &["~sem:*", "+evalsha", "+eval", "+time"], &["~x:*", "+@all"]]
            .into_iter()
            .enumerate()
    {
        let (user, (log, _guard)) = (format!("user{n}"), Log::start());
        server.command(&[&["ACL", "SETUSER", &user, "on", ">secret"], rights].concat()).await;
        let limiter = steady(&format!("redis://{user}:secret@{}/", server.addr()), 10, SECOND);
        let calls = server.script_calls().await;
        outage_until(14, &limiter, &[StoreErrorKind::NoPerm], async {}).await;
        let calls = server.script_calls().await - calls;
        say(14, &format!("{calls} calls in 1.5 s of at most 90"));
        assert!(calls <= 90, "fault 14: {calls} calls in 1.5 s of at most 90");
        let warnings = log.warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("grant the user"), "{warnings:?}");
        assert!(!warnings[0].contains("secret"), "{warnings:?}");
    }
}

#[tokio::test]
async fn fault_14_a_right_that_is_taken_away_and_given_back() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    server.command(&["ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all"]).await;
    let (log, _guard) = Log::start();
    let limiter = steady(&format!("redis://app:secret@{}/", server.addr()), 5, lease);
    let held = hold(&limiter, &history, 3).await;
    server.command(&["ACL", "SETUSER", "app", "-zadd"]).await;
    outage_until(14, &limiter, &[StoreErrorKind::NoPerm], async {}).await;
    assert_eq!(log.lines("slot store down").len(), 1, "{:?}", log.warnings());
    server.command(&["ACL", "SETUSER", "app", "+zadd"]).await;
    recovered(&limiter, 3 * SECOND).await;
    lives(&server, 3, lease).await;
    drop(held);
    judge(14, &history, &never_above(5));
    healed(&server, &limiter, 5, lease).await;
}

// ---- 22: foreign data under a key

#[tokio::test]
async fn fault_22_foreign_data_under_a_key_is_that_ids_outage_alone() {
    let (server, history) = (RedisServer::start(), History::new());
    let (log, _guard) = Log::start();
    let limiter = steady(&server.url(), 100, 5 * SECOND);
    server.command(&["SET", "sem:foreign", "data"]).await;
    for _ in 0..20 {
        // The first of them fly alone, the others mixed.
        let ids = ["foreign", ID, "foreign", ID, "other", "foreign", ID];
        for (id, result) in ids.iter().zip(join_all(ids.map(|id| limiter.try_acquire(id))).await) {
            if *id == "foreign" {
                let error = error_of(result);
                assert_eq!(error.kind(), StoreErrorKind::WrongType, "{error}");
            } else {
                let _visit = history.enter(id, 1);
                assert_eq!(result.unwrap().origin(), Origin::Store);
            }
        }
    }
    let counted = limiter.active("foreign").await;
    assert!(matches!(counted, Err(AcquireError::Unavailable(e)) if e.kind() == StoreErrorKind::WrongType));
    assert!(limiter.drain("foreign").await.is_err());
    assert_eq!(server.read::<String>(&["GET", "sem:foreign"]).await, "data");
    let warnings = log.warnings();
    say(22, &format!("{} warnings of 1", warnings.len()));
    assert!(warnings.len() == 1 && warnings[0].contains("wrongtype"), "fault 22: {warnings:?}");
    assert!(!warnings[0].contains("foreign"), "ids do not get into logs");
    judge(22, &history, &never_above(100));
    healed(&server, &limiter, 100, 5 * SECOND).await;
}

#[tokio::test]
async fn fault_22_foreign_data_that_replaces_slots_ends_their_releases() {
    let (server, history) = (RedisServer::start(), History::new());
    let limiter = steady(&server.url(), 10, SECOND);
    let held = hold(&limiter, &history, 1).await.pop().unwrap();
    let other = limiter.try_acquire("other").await.unwrap();
    server.command(&["SET", KEY, "data"]).await;
    sleep(800 * MS).await;
    assert_eq!(held.slot.release().await.unwrap_err().kind(), StoreErrorKind::WrongType);
    assert_eq!(server.zcard("sem:other").await, 1);
    drop(other);
    let start = Instant::now();
    assert!(limiter.shutdown(SOON).await);
    judge_time(22, "a shutdown took", start.elapsed(), 2 * SECOND);
    judge(22, &history, &never_above(10));
}

// ---- 25: leases of different length

#[tokio::test]
async fn fault_25_the_keys_ttl_outlives_the_longest_lease_and_never_shrinks() {
    let (server, history) = (RedisServer::start(), History::new());
    let (short, long) = (steady(&server.url(), 100, SECOND), steady(&server.url(), 100, 600 * SECOND));
    let (mut last, mut least) = (0, i64::MAX);
    let mut check = async |what: &str| {
        let expires: i64 = server.read(&["PEXPIRETIME", KEY]).await;
        let longest = server.members(KEY).await.last().map_or(0, |(_, score)| *score);
        least = least.min(expires - longest);
        assert!(expires >= longest + 10_000, "fault 25: {what}: {expires}, a lease at {longest}");
        assert!(expires >= last, "fault 25: {what}: shrank from {last} to {expires}");
        last = expires;
    };
    let first = hold(&short, &history, 1).await;
    check("a lease of 1 s").await;
    let second = hold(&long, &history, 1).await;
    check("beside one of 600 s").await;
    for _ in 0..20 {
        drop(hold(&short, &history, 1).await);
        check("short leases come and go").await;
        sleep(50 * MS).await;
    }
    drop(first);
    check("renewed and released").await;
    assert!(server.zcard(KEY).await >= 1);
    drop(second);
    say(25, &format!("the key outlives its longest lease by {least} ms of at least 10000 ms"));
    judge(25, &history, &never_above(100));
    healed(&server, &short, 100, SECOND).await;
}

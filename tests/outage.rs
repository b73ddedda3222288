//! A Redis that cannot answer: what callers get, what is logged, and how it heals.

#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::{Log, Proxy, RedisServer, eventually, free_port};
use tower_slots::store::{Claim, Key, SlotId, SlotStore, StoreError, StoreErrorKind, Terms};
use tower_slots::{AcquireError, Limiter, LimiterBuilder, OnOutage, Origin, RedisStore, Slot};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// For what comes at once, on however busy a machine.
const SOON: Duration = Duration::from_secs(10);
/// The default time-out of the store.
const TIMEOUT: Duration = Duration::from_millis(250);
/// What a busy machine adds to a budget.
const SLACK: Duration = Duration::from_millis(500);
const ACME: &str = "sem:acme";

fn on(url: &str) -> LimiterBuilder {
    Limiter::builder(RedisStore::open(url).unwrap()).limit(10)
}

fn refusing(url: &str) -> Limiter {
    on(url).on_outage(OnOutage::Refuse).build().unwrap()
}

/// One whose callers wait so long that a busy machine is no outage.
fn steady(url: &str) -> Limiter {
    on(url).lease(SECOND).store_timeout(900 * MS).on_outage(OnOutage::Refuse).build().unwrap()
}

fn dead_url() -> String {
    format!("redis://127.0.0.1:{}/", free_port())
}

fn error_of(result: Result<Slot, AcquireError>) -> StoreError {
    match result {
        Err(AcquireError::Unavailable(error)) => error,
        other => panic!("not an outage: {other:?}"),
    }
}

async fn acquire_many(limiter: &Limiter, n: usize) -> Vec<Result<Slot, AcquireError>> {
    join_all((0..n).map(|_| limiter.try_acquire("acme"))).await
}

async fn timed(limiter: &Limiter) -> (Result<Slot, AcquireError>, Duration) {
    let start = Instant::now();
    let result = limiter.try_acquire("acme").await;
    (result, start.elapsed())
}

/// The store grants again.
async fn recovered(limiter: &Limiter, within: Duration) {
    let granted = async || limiter.try_acquire("acme").await.is_ok_and(|slot| slot.origin() == Origin::Store);
    eventually("slots come from the store again", within, granted).await;
}

async fn empty(server: &RedisServer) {
    eventually("no slot is left", SOON, async || !server.exists(ACME).await).await;
}

async fn assert_whole(limiter: &Limiter, limit: usize) {
    let all = acquire_many(limiter, limit + 1).await;
    assert_eq!(all.iter().filter(|slot| slot.is_ok()).count(), limit, "{all:?}");
}

// ---- the policies

/// What the policies make of an outage, from the first call on.
async fn policies_hold(url: &str, slots_before: bool, cause: impl Fn()) {
    let admit = on(url).on_outage(OnOutage::Admit).build().unwrap();
    let refuse = on(url).on_outage(OnOutage::Refuse).build().unwrap();
    let local = on(url).on_outage(OnOutage::Local { share: 0.25 }).build().unwrap();
    if slots_before {
        for limiter in [&admit, &refuse, &local] {
            recovered(limiter, SOON).await;
        }
    }
    cause();
    let mut locals = Vec::new();
    for n in 0..8 {
        for limiter in [&admit, &refuse, &local] {
            let (result, time) = timed(limiter).await;
            assert!(time < TIMEOUT + SLACK, "answered after {time:?}");
            match (limiter.active("acme").await, result) {
                (Ok(active), _) => panic!("{active} active in an outage"),
                (Err(AcquireError::Unavailable(_)), Ok(slot)) if slot.origin() == Origin::FailOpen => {
                    assert!(std::ptr::eq(limiter, &admit) && slot.active() == 0);
                }
                (Err(AcquireError::Unavailable(_)), Ok(slot)) => {
                    assert!(std::ptr::eq(limiter, &local) && slot.origin() == Origin::Local);
                    locals.push(slot);
                    assert_eq!(locals.last().unwrap().active() as usize, locals.len());
                }
                (Err(AcquireError::Unavailable(_)), Err(AcquireError::Saturated { active, limit, .. })) => {
                    assert!(std::ptr::eq(limiter, &local) && n >= 3, "an outage is no saturation");
                    assert_eq!((active, limit), (3, 3), "a quarter of 10, rounded up");
                }
                (Err(AcquireError::Unavailable(_)), Err(AcquireError::Unavailable(error))) => {
                    assert!(std::ptr::eq(limiter, &refuse));
                    assert!(matches!(error.kind(), StoreErrorKind::Io | StoreErrorKind::Timeout), "{error}");
                }
                (active, result) => panic!("{active:?} {result:?}"),
            }
        }
    }
    assert_eq!(locals.len(), 3);
    assert!(refuse.drain("acme").await.is_err());
    // By now the breaker is open.
    let mut times = Vec::new();
    for _ in 0..15 {
        times.push(timed(&refuse).await.1);
    }
    times.sort();
    assert!(times[7] < 20 * MS, "with the breaker open: {times:?}");
}

#[tokio::test]
async fn nobody_listens() {
    policies_hold(&dead_url(), false, || {}).await;
}

#[tokio::test]
async fn the_server_stands_still_from_the_first_call_on() {
    let server = RedisServer::start();
    policies_hold(&server.url(), false, || server.stop()).await;
}

#[tokio::test]
async fn the_server_stands_still_later() {
    let server = RedisServer::start();
    policies_hold(&server.url(), true, || server.stop()).await;
}

#[tokio::test]
async fn the_network_swallows_everything() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    policies_hold(&proxy.url(), true, || proxy.black_hole(true)).await;
}

#[tokio::test]
async fn the_server_dies() {
    let server = RedisServer::start();
    policies_hold(&server.url(), true, || server.kill()).await;
}

#[tokio::test]
async fn a_callers_budget_is_its_own_whoever_shares_its_call() {
    let server = RedisServer::start();
    let store = RedisStore::open(server.url()).unwrap();
    let terms = |timeout| Arc::new(Terms::new(30 * SECOND, timeout));
    let (patient, hasty) = (terms(20 * SECOND), terms(TIMEOUT));
    let acquire = |terms| store.acquire(Claim::new(Key::new(ACME), SlotId::new(), 1, 10, terms));
    acquire(&patient).await.unwrap();
    server.stop();
    let first = acquire(&patient);
    let _others = (acquire(&patient), acquire(&patient));
    // What the first would have sent goes with the next that comes.
    drop(first);
    let start = Instant::now();
    let answer = tokio::time::timeout(SOON, acquire(&hasty)).await.unwrap();
    assert_eq!(answer.unwrap_err().kind(), StoreErrorKind::Timeout);
    assert!(start.elapsed() < TIMEOUT + SLACK, "answered after {:?}", start.elapsed());
}

// ---- recovery

#[tokio::test]
async fn a_server_that_goes_on_or_comes_back_grants_again_within_seconds() {
    let server = RedisServer::start();
    let (log, _guard) = Log::start();
    let limiter = refusing(&server.url());
    recovered(&limiter, SOON).await;
    for round in 1..=3 {
        if round == 2 {
            server.kill();
        } else {
            server.stop();
        }
        eventually("the breaker opens", SOON, async || log.lines("slot store down").len() == round).await;
        let start = Instant::now();
        while start.elapsed() < SECOND {
            error_of(limiter.try_acquire("acme").await);
            tokio::time::sleep(10 * MS).await;
        }
        if round == 2 {
            server.restart();
        } else {
            server.cont();
        }
        recovered(&limiter, 2 * SECOND + 2 * SLACK).await;
        assert_eq!(log.lines("slot store up again").len(), round);
        assert_eq!(log.lines("slot store down").len(), round, "one line per outage");
        empty(&server).await;
        assert_whole(&limiter, 10).await;
    }
}

#[tokio::test]
async fn slots_dropped_in_an_outage_are_free_soon_after_it() {
    let server = RedisServer::start();
    let limiter = refusing(&server.url());
    let mut slots: Vec<_> = acquire_many(&limiter, 10).await.into_iter().map(Result::unwrap).collect();
    server.stop();
    let release = tokio::spawn(slots.pop().unwrap().release());
    drop(slots);
    for _ in 0..4 {
        error_of(limiter.try_acquire("acme").await);
    }
    assert!(!release.is_finished(), "a release waits for its confirmation");
    server.cont();
    release.await.unwrap().unwrap();
    empty(&server).await;
    recovered(&limiter, SOON).await;
    assert_whole(&limiter, 10).await;
}

#[tokio::test]
async fn a_holder_is_told_when_its_lease_ran_out_unrenewed() {
    let server = RedisServer::start();
    let limiter = on(&server.url()).lease(SECOND).build().unwrap();
    let slot = limiter.try_acquire("acme").await.unwrap();
    let start = Instant::now();
    server.stop();
    tokio::time::timeout(SOON, slot.lost()).await.unwrap();
    // It may have been renewed just before the stop.
    assert!((500 * MS..2 * SECOND).contains(&start.elapsed()), "{:?}", start.elapsed());
    server.cont();
    eventually("the work runs, so its slot is back", SOON, async || server.zcard(ACME).await == 1).await;
}

#[tokio::test]
async fn a_release_that_is_never_confirmed_ends_with_the_lease() {
    let server = RedisServer::start();
    let limiter = on(&server.url()).lease(SECOND).build().unwrap();
    let slot = limiter.try_acquire("acme").await.unwrap();
    server.stop();
    let released = tokio::time::timeout(SOON, slot.release()).await.unwrap();
    assert_eq!(released.unwrap_err().kind(), StoreErrorKind::Timeout);
    assert!(limiter.shutdown(SOON).await);
}

#[tokio::test]
async fn callers_that_give_up_while_a_backlog_is_released_do_not_keep_the_breaker_open() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter =
        on(&proxy.url()).limit(5000).on_outage(OnOutage::Refuse).store_timeout(SECOND).build().unwrap();
    let mut slots = Vec::new();
    for _ in 0..10 {
        slots.extend(acquire_many(&limiter, 500).await);
    }
    assert!(slots.iter().all(Result::is_ok));
    proxy.refuse(true);
    proxy.cut();
    eventually("an outage", SOON, async || limiter.try_acquire("acme").await.is_err()).await;
    drop(slots);
    proxy.set_delay(20 * MS);
    proxy.refuse(false);
    let before = proxy.connections();
    let start = Instant::now();
    while start.elapsed() < SECOND {
        let mut caller = Box::pin(limiter.try_acquire("acme"));
        let _gives_up = futures_util::poll!(caller.as_mut());
        drop(caller);
        tokio::time::sleep(MS).await;
    }
    assert!(proxy.connections() > before);
    recovered(&limiter, SOON).await;
    empty(&server).await;
}

// ---- what is no outage

#[tokio::test]
async fn callers_that_go_away_are_no_outage() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let (log, _guard) = Log::start();
    let limiter =
        on(&proxy.url()).limit(1000).on_outage(OnOutage::Refuse).store_timeout(5 * SECOND).build().unwrap();
    recovered(&limiter, SOON).await;
    proxy.hold_replies(true);
    for _ in 0..10 {
        let callers = (0..10).map(|_| tokio::time::timeout(10 * MS, limiter.try_acquire("acme")));
        assert!(join_all(callers).await.iter().all(Result::is_err));
    }
    proxy.hold_replies(false);
    let slot = limiter.try_acquire("acme").await.unwrap();
    assert_eq!(slot.origin(), Origin::Store);
    assert_eq!((proxy.connections(), log.warnings()), (1, vec![]));
    drop(slot);
    empty(&server).await;
}

// ---- errors of the server

/// All callers see an outage of this kind, and there is one line in the log about it. Returns it.
async fn outage_of(limiter: &Limiter, log: &Log, kind: StoreErrorKind) -> String {
    let start = Instant::now();
    while start.elapsed() < SECOND {
        let (result, time) = timed(limiter).await;
        let error = error_of(result);
        assert!(time < SECOND + SLACK, "answered after {time:?}");
        assert_eq!(error.kind(), kind, "{error}");
        tokio::time::sleep(10 * MS).await;
    }
    let warnings = log.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("slot store down"), "{warnings:?}");
    warnings[0].clone()
}

async fn url_fails(url: &str, kind: StoreErrorKind, advice: &str) {
    let (log, _guard) = Log::start();
    let line = outage_of(&steady(url), &log, kind).await;
    assert!(line.contains(advice), "{line}");
    assert!(!line.contains("secret"), "{line}");
}

#[tokio::test]
async fn a_missing_or_wrong_login_is_named() {
    let server = RedisServer::with(&["--requirepass", "sesame"]);
    url_fails(&server.url(), StoreErrorKind::NoPerm, "put the right login into the url").await;
    let wrong = format!("redis://:secret@{}/", server.addr());
    url_fails(&wrong, StoreErrorKind::NoPerm, "put the right login into the url").await;
}

#[tokio::test]
async fn a_master_that_may_not_write_without_replicas_is_an_outage() {
    let server = RedisServer::start();
    let (log, _guard) = Log::start();
    let limiter = steady(&server.url());
    recovered(&limiter, SOON).await;
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    let line = outage_of(&limiter, &log, StoreErrorKind::Other).await;
    assert!(line.contains("NOREPLICAS"), "{line}");
    server.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    recovered(&limiter, 3 * SECOND).await;
    empty(&server).await;
    assert_whole(&limiter, 10).await;
}

#[tokio::test]
async fn a_server_that_may_evict_slots_is_warned_of_once() {
    let server = RedisServer::with(&["--maxmemory-policy", "allkeys-lru"]);
    let (log, _guard) = Log::start();
    let limiter = refusing(&server.url());
    recovered(&limiter, SOON).await;
    eventually("a warning", SOON, async || log.warnings().len() == 1).await;
    server.restart();
    let _reconnects = limiter.try_acquire("acme").await;
    recovered(&limiter, SOON).await;
    let warnings = log.lines("maxmemory-policy noeviction");
    assert!(warnings.len() == 1 && warnings[0].contains("allkeys-lru"), "{warnings:?}");
}

/// A limiter on a proxy that answers everything but the client library's greeting with `reply`.
async fn reply_fails(reply: &'static str, after: bool, kind: StoreErrorKind) {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let (log, _guard) = Log::start();
    let refusals = reply.starts_with('-');
    let lease = if refusals { SECOND } else { 30 * SECOND };
    let builder = on(&proxy.url()).lease(lease).store_timeout(900 * MS);
    let limiter = builder.on_outage(OnOutage::Refuse).build().unwrap();
    if after {
        recovered(&limiter, SOON).await;
        empty(&server).await;
    }
    proxy.rewrite_replies(Some(Box::new(move |frame| match frame.first() {
        Some(b'+' | b'%') => frame,
        _ => reply.as_bytes().to_vec(),
    })));
    outage_of(&limiter, &log, kind).await;
    proxy.rewrite_replies(None);
    recovered(&limiter, 3 * SECOND).await;
    if refusals {
        // A server that says no has taken nothing, but this one has: its slots lapse.
        let none = async || matches!(limiter.active("acme").await, Ok(0));
        eventually("no slot is left", SOON, none).await;
    } else {
        empty(&server).await;
    }
    assert_whole(&limiter, 10).await;
}

#[tokio::test]
async fn a_server_in_trouble_is_an_outage_of_its_kind() {
    use StoreErrorKind as Kind;
    let replies = [
        ("-LOADING Redis is loading the dataset in memory\r\n", Kind::Loading),
        ("-MASTERDOWN Link with MASTER is down\r\n", Kind::Loading),
        ("-BUSY Redis is busy running a script\r\n", Kind::Loading),
        ("-CLUSTERDOWN The cluster is down\r\n", Kind::Cluster),
        ("-MOVED 3999 127.0.0.1:6381\r\n", Kind::Cluster),
        ("-NOSCRIPT No matching script\r\n", Kind::NoScript),
        ("-ERR max number of clients reached\r\n", Kind::Other),
    ];
    join_all(replies.map(|(reply, kind)| on_a_thread(reply, true, kind))).await;
}

#[tokio::test]
async fn replies_of_unknown_shape_are_an_outage_and_no_panic() {
    let replies = [
        ":1\r\n",
        "*0\r\n",
        "$-1\r\n",
        "$3\r\nabc\r\n",
        "*1\r\n:5\r\n",
        "*2\r\n:5\r\n:7\r\n",
        "*2\r\n:5\r\n$-1\r\n",
        "*3\r\n:5\r\n$-1\r\n*0\r\n",
        "*3\r\n:-5\r\n$-1\r\n:1\r\n",
        "*3\r\n$1\r\n5\r\n$-1\r\n:1\r\n",
        "*4\r\n:5\r\n$-1\r\n:1\r\n:1\r\n",
        "*3\r\n:5\r\n*1\r\n:1\r\n:1\r\n",
        "*3\r\n:5\r\n*2\r\n:0\r\n:1\r\n:1\r\n",
        "*3\r\n:5\r\n*2\r\n:2\r\n:1\r\n:1\r\n",
        "*3\r\n:5\r\n*2\r\n:1\r\n*0\r\n:1\r\n",
    ];
    join_all(replies.map(|reply| on_a_thread(reply, true, StoreErrorKind::Other))).await;
}

#[tokio::test]
async fn a_greeting_of_unknown_shape_or_an_old_version_is_an_outage() {
    let replies = [
        ":1\r\n",
        "*2\r\n:5\r\n:7\r\n",
        "*2\r\n:5\r\n$0\r\n\r\n",
        "*2\r\n:1700000000000\r\n$6\r\n6.2.14\r\n",
        "*2\r\n:1700000000000\r\n$1\r\nx\r\n",
    ];
    join_all(replies.map(|reply| on_a_thread(reply, false, StoreErrorKind::Other))).await;
}

#[tokio::test]
async fn a_server_that_is_too_old_is_named() {
    let server = RedisServer::start();
    for reply in [
        "*2\r\n:1700000000000\r\n$6\r\n6.2.14\r\n",
        "-ERR Error compiling script (new function): user_script:1: unexpected symbol near '#'\r\n",
    ] {
        let proxy = Proxy::start(server.addr());
        proxy.rewrite_replies(Some(Box::new(move |frame| match frame.first() {
            Some(b'+' | b'%') => frame,
            _ => reply.as_bytes().to_vec(),
        })));
        let error = error_of(refusing(&proxy.url()).try_acquire("acme").await);
        assert!(error.to_string().contains("older than redis 7.0"), "{error}");
    }
}

/// The log is one of this thread, so each case has its own.
async fn on_a_thread(reply: &'static str, after: bool, kind: StoreErrorKind) {
    let case = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(reply_fails(reply, after, kind));
    };
    tokio::task::spawn_blocking(case).await.unwrap_or_else(|_| panic!("the case {reply:?} failed"));
}

#[tokio::test]
async fn what_is_not_redis_is_an_outage_and_no_panic() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = refusing(&proxy.url());
    recovered(&limiter, SOON).await;
    proxy.rewrite_replies(Some(Box::new(|_| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec())));
    for _ in 0..50 {
        error_of(limiter.try_acquire("acme").await);
        tokio::time::sleep(10 * MS).await;
    }
    proxy.rewrite_replies(None);
    recovered(&limiter, 3 * SECOND).await;
    empty(&server).await;
}

#[tokio::test]
async fn a_clock_beyond_reason_does_no_harm() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = refusing(&proxy.url());
    recovered(&limiter, SOON).await;
    for clock in ["0", "9223372036854775807"] {
        let reply = format!("*3\r\n:{clock}\r\n$-1\r\n:1\r\n");
        proxy.rewrite_replies(Some(Box::new(move |_| reply.clone().into_bytes())));
        let slots: Vec<_> = (0..3).map(|_| limiter.try_acquire("acme")).collect();
        drop(join_all(slots).await);
        tokio::time::sleep(50 * MS).await;
        proxy.rewrite_replies(None);
        recovered(&limiter, 3 * SECOND).await;
        empty(&server).await;
        assert_whole(&limiter, 10).await;
    }
}

// ---- connections

#[tokio::test]
async fn a_connection_that_answers_no_more_is_replaced() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = refusing(&proxy.url());
    recovered(&limiter, SOON).await;
    empty(&server).await;
    proxy.black_hole(true);
    let start = Instant::now();
    eventually("another connection", SOON, async || {
        error_of(limiter.try_acquire("acme").await);
        proxy.connections() > 1
    })
    .await;
    assert!(start.elapsed() < 4 * TIMEOUT + 2 * SLACK, "within a few time-outs: {:?}", start.elapsed());
    proxy.black_hole(false);
    recovered(&limiter, 3 * SECOND).await;
    empty(&server).await;
    assert_whole(&limiter, 10).await;
}

#[tokio::test]
async fn a_server_that_is_down_is_not_stormed() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let limiter = refusing(&proxy.url());
    recovered(&limiter, SOON).await;
    proxy.refuse(true);
    proxy.cut();
    let before = proxy.connections();
    let end = Instant::now() + 3 * SECOND;
    let callers = (0..256).map(|_| async {
        while Instant::now() < end {
            let _outage = limiter.try_acquire("acme").await;
            tokio::time::sleep(5 * MS).await;
        }
    });
    join_all(callers).await;
    let tries = proxy.connections() - before;
    assert!((3..30).contains(&tries), "{tries} connections in 3 s");
    proxy.refuse(false);
    recovered(&limiter, 3 * SECOND).await;
}

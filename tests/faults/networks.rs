//! Connections that break, stall, lose replies, or are slow.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tower_slots::store::SlotStore;
use tower_slots::{Limiter, OnOutage, Origin, RedisStore};

use crate::common::{
    Bound, Held, ID, KEY, MS, SECOND, SLACK, SOON, TIMEOUT, error_of, healed, hold, judge, judge_time, live,
    lives, never_above, on, recovered, say, steady, traffic,
};
use crate::support::meter::recorded;
use crate::support::{History, Log, Proxy, RedisServer, eventually};

// ---- 12: connections and replies that are lost in flight

#[tokio::test]
async fn fault_12_connections_killed_in_flight_cost_no_slot_and_few_requests() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let limiter = steady(&server.url(), 8, lease);
    recovered(&limiter, SOON).await;
    let kills = async {
        let start = Instant::now();
        while start.elapsed() < 2 * lease {
            sleep(50 * MS).await;
            server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        }
    };
    let (tally, ()) = tokio::join!(traffic(&limiter, &history, 32, 2 * lease), kills);
    say(12, &format!("{} requests failed of {} under 40 cuts", tally.failed, tally.served));
    assert!(tally.served > 100, "{tally:?}");
    judge(12, &history, &never_above(8));
    healed(&server, &limiter, 8, lease).await;
}

#[tokio::test]
async fn fault_12_a_connection_that_breaks_twice_costs_no_request() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = steady(&proxy.url(), 8, lease);
    recovered(&limiter, SOON).await;
    let (log, _guard) = Log::start();
    let cuts = async {
        let (start, mut cuts) = (Instant::now(), 0);
        while start.elapsed() < 2 * SECOND {
            proxy.refuse_next(1);
            proxy.cut();
            cuts += 1;
            // It is well again, and in use, before the next.
            let (connections, served) = (proxy.connections(), history.visits(ID));
            let well = async || proxy.connections() >= connections + 2 && history.visits(ID) > served + 16;
            eventually("it is well again", SOON, well).await;
        }
        cuts
    };
    let (tally, cuts) = tokio::join!(traffic(&limiter, &history, 16, 3 * SECOND), cuts);
    say(12, &format!("{} failed of {} under {cuts} double cuts, of at most 0", tally.failed, tally.served));
    assert!(cuts > 2, "{cuts} cuts, {tally:?}");
    assert_eq!((tally.failed, log.lines("slot store down").len()), (0, 0), "fault 12: {tally:?}");
    judge(12, &history, &never_above(8));
    healed(&server, &limiter, 8, lease).await;
}

/// Between the breaks nothing is acquired, but calls are answered.
#[tokio::test]
async fn fault_12_connections_that_break_now_and_then_are_no_outage() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = steady(&proxy.url(), 8, lease);
    recovered(&limiter, SOON).await;
    let (log, _guard) = Log::start();
    for _ in 0..6 {
        proxy.cut();
        eventually("calls are answered", SOON, async || limiter.active(ID).await.is_ok()).await;
    }
    let held = hold(&limiter, &history, 8).await;
    let outages = log.lines("slot store down").len();
    say(12, &format!("{outages} outages under 6 cuts with answers in between, of at most 0"));
    assert_eq!(outages, 0, "fault 12: {:?}", log.warnings());
    drop(held);
    judge(12, &history, &never_above(8));
    healed(&server, &limiter, 8, lease).await;
}

#[tokio::test]
async fn fault_12_a_reply_lost_after_its_execution_is_counted_once_and_leaks_nothing() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = steady(&proxy.url(), 1, lease);
    recovered(&limiter, SOON).await;
    lives(&server, 0, SOON).await;
    for _ in 0..3 {
        proxy.lose_replies(1);
        let Held { slot, .. } = hold(&limiter, &history, 1).await.pop().unwrap();
        assert_eq!((slot.active(), slot.origin()), (1, Origin::Store), "counted once");
        assert_eq!(server.zcard(KEY).await, 1);
        proxy.lose_replies(1);
        slot.release().await.unwrap();
        assert!(!server.exists(KEY).await);
    }
    assert!(proxy.connections() >= 7);
    judge(12, &history, &never_above(1));
    healed(&server, &limiter, 1, lease).await;
}

#[tokio::test]
async fn fault_12_a_reply_that_comes_after_the_time_out_leaks_nothing() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(5).lease(lease).build().unwrap();
    recovered(&limiter, SOON).await;
    for _ in 0..3 {
        proxy.set_delay(TIMEOUT);
        let late = join_all((0..5).map(|_| limiter.try_acquire(ID))).await;
        late.into_iter().for_each(|slot| drop(error_of(slot)));
        proxy.set_delay(Duration::ZERO);
        recovered(&limiter, SOON).await;
        let tally = traffic(&limiter, &history, 8, 200 * MS).await;
        assert!(tally.served > 0, "replies and requests are still paired: {tally:?}");
    }
    judge(12, &history, &never_above(5));
    healed(&server, &limiter, 5, lease).await;
}

/// An acquire is on its way over one connection when its release goes over the next. The acquire
/// arrives after the release, and the slot must not stay taken.
#[tokio::test]
async fn fault_12_an_acquire_that_arrives_after_its_release_over_another_connection_leaks_nothing() {
    let (server, lease, history) = (RedisServer::start(), 60 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(5).lease(lease).store_timeout(3 * SECOND).build().unwrap();
    recovered(&limiter, SOON).await;
    lives(&server, 0, SOON).await;
    let before = proxy.requests();
    proxy.freeze();
    let callers: Vec<_> = (0..3)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.try_acquire(ID).await })
        })
        .collect();
    eventually("the acquires are on their way", SOON, async || proxy.requests() > before).await;
    callers.iter().for_each(tokio::task::JoinHandle::abort);
    // The server gives the connection up, which the client hears, but what it sent is still under way.
    proxy.hang_up();
    recovered(&limiter, SOON).await;
    lives(&server, 0, SOON).await;
    proxy.thaw();
    eventually("the acquires arrive", SOON, async || live(&server).await > 0).await;
    let start = Instant::now();
    lives(&server, 0, SOON).await;
    judge_time(12, "late acquires are given back after", start.elapsed(), 3 * SECOND + 2 * SLACK);
    judge(12, &history, &never_above(5));
    healed(&server, &limiter, 5, lease).await;
}

// ---- 18: a holder that is cut off

#[tokio::test]
async fn fault_18_a_holder_that_is_cut_off_is_told_in_time_and_serves_by_policy() {
    const LIMIT: usize = 4;
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let (cut_off, meter) =
        recorded(|| on(&proxy.url()).limit(4).lease(lease).on_outage(OnOutage::Admit).build().unwrap());
    let other = steady(&server.url(), 4, lease);
    recovered(&cut_off, SOON).await;
    let held = hold(&cut_off, &history, LIMIT).await;
    proxy.black_hole(true);
    let start = Instant::now();
    let lost = join_all(held.iter().map(|held| held.slot.lost()));
    timeout(SOON, lost).await.expect("all holders are told");
    judge_time(18, "the holders are told after", start.elapsed(), lease + SLACK);
    assert_eq!(meter.sum("slots_lost_total"), 4.0);
    let others = async {
        lives(&server, 0, SOON).await;
        hold(&other, &history, LIMIT).await
    };
    let (others, served) = tokio::join!(others, traffic(&cut_off, &history, 4, lease / 2));
    judge_time(18, "the slowest call of the cut off took", served.slowest, TIMEOUT + SLACK);
    assert_eq!((served.served, served.refused, served.failed), (0, 0, 0), "{served:?}");
    assert!(meter.sum("requests_total{fail_open}") >= f64::from(served.open));
    proxy.black_hole(false);
    lives(&server, 2 * LIMIT, 2 * SECOND + SLACK).await;
    for Held { slot, .. } in held {
        slot.release().await.expect("a late release succeeds");
    }
    sleep(lease / 2).await;
    assert_eq!(live(&server).await, LIMIT, "and frees its own alone");
    drop(others);
    judge(18, &history, &Bound { limit: 4, most: 8, above: 4 * SECOND });
    healed(&server, &other, LIMIT, lease).await;
}

/// What cannot be given back is known, and no longer than a lease.
#[tokio::test]
async fn fault_18_the_backlog_of_releases_shows_and_ends_with_the_lease() {
    const HELD: usize = 200;
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::open(proxy.url()).unwrap();
    let (limiter, meter) = recorded(|| {
        let builder = Limiter::builder(store.clone()).limit(1000).lease(lease);
        builder.on_outage(OnOutage::Refuse).build().unwrap()
    });
    recovered(&limiter, SOON).await;
    let held = hold(&limiter, &history, HELD).await;
    proxy.black_hole(true);
    drop(held);
    let start = Instant::now();
    let callers = traffic(&limiter, &history, 8, lease * 3 / 4);
    let (mut most, watch) = (0.0_f64, async {
        tokio::time::timeout(SOON, store.flush()).await.expect("a backlog ends");
        start.elapsed()
    });
    let watch = async {
        let mut watch = std::pin::pin!(watch);
        let mut last = meter.sum("release_backlog");
        loop {
            // What was set since the last reading.
            let sum = meter.sum("release_backlog");
            most = most.max(sum - std::mem::replace(&mut last, sum));
            if let Ok(ended) = timeout(20 * MS, &mut watch).await {
                break ended;
            }
        }
    };
    let (ended, tally) = tokio::join!(watch, callers);
    // With what the callers sent before the breaker opened.
    let bound = HELD as f64 + 3.0 * 8.0;
    say(18, &format!("a backlog of {most} of at most {bound}"));
    assert!(most >= HELD as f64 && most <= bound, "fault 18: {most} of at most {bound}: {tally:?}");
    judge_time(18, "the backlog ended after", ended, 2 * lease + SLACK);
    assert!(meter.sum("releases_total{lapsed}") >= HELD as f64);
    proxy.black_hole(false);
    recovered(&limiter, SOON).await;
    judge(18, &history, &never_above(1000));
    healed(&server, &limiter, 1000, lease).await;
}

#[tokio::test]
async fn fault_18_a_backlog_of_releases_goes_out_by_age() {
    const HELD: usize = 600;
    let (server, lease, history) = (RedisServer::start(), 30 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(1000).lease(lease).store_timeout(2 * SECOND).build().unwrap();
    recovered(&limiter, SOON).await;
    let newer = join_all((0..HELD).map(|_| limiter.try_acquire("newer"))).await;
    let older = hold(&limiter, &history, HELD).await;
    lives(&server, HELD, SOON).await;
    proxy.black_hole(true);
    drop(older);
    assert!(newer.iter().all(Result::is_ok));
    drop(newer);
    // All of it is on its way when the connection breaks.
    sleep(TIMEOUT).await;
    assert_eq!(live(&server).await, HELD);
    // So slow that the calls can be told apart.
    proxy.throttle(Some(100_000));
    proxy.cut();
    proxy.black_hole(false);
    eventually("all is given back", SOON, async || {
        let newer = server.zcard("sem:newer").await;
        let older = server.zcard(KEY).await;
        assert!(newer == HELD as u64 || older == 0, "fault 18: {newer} newer ones left, and {older} older");
        (newer, older) == (0, 0)
    })
    .await;
    say(18, "600 older releases before 600 newer ones");
    judge(18, &history, &never_above(1000));
}

// ---- 19: a connection that is half open

#[tokio::test]
async fn fault_19_a_half_open_connection_is_replaced_within_a_few_time_outs() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(10).lease(lease).build().unwrap();
    recovered(&limiter, SOON).await;
    let held = hold(&limiter, &history, 3).await;
    proxy.freeze();
    let start = Instant::now();
    recovered(&limiter, SOON).await;
    judge_time(19, "another connection serves after", start.elapsed(), 4 * TIMEOUT + 2 * SLACK);
    let tally = traffic(&limiter, &history, 4, lease).await;
    judge_time(19, "the slowest call took", tally.slowest, TIMEOUT + SLACK);
    assert_eq!(live(&server).await, 3, "held slots are renewed over it");
    drop(held);
    judge(19, &history, &never_above(10));
    healed(&server, &limiter, 10, lease).await;
    proxy.thaw();
    sleep(lease / 4).await;
    healed(&server, &limiter, 10, lease).await;
}

/// Nobody waits for as long as a time-out, so no call ever fails by itself.
#[tokio::test]
async fn fault_19_a_connection_is_replaced_though_all_callers_give_up_early() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(10).lease(lease).build().unwrap();
    recovered(&limiter, SOON).await;
    lives(&server, 0, SOON).await;
    proxy.freeze();
    let start = Instant::now();
    let served = loop {
        match timeout(20 * MS, limiter.try_acquire(ID)).await {
            Ok(Ok(slot)) => break slot,
            Ok(Err(_)) => sleep(10 * MS).await,
            Err(_) => {}
        }
        assert!(start.elapsed() < SOON, "nobody noticed");
    };
    judge_time(19, "another connection serves after", start.elapsed(), 4 * TIMEOUT + 3 * SLACK);
    assert_eq!(served.origin(), Origin::Store);
    assert!(proxy.connections() > 1);
    drop(served);
    judge(19, &history, &never_above(10));
    proxy.thaw();
    healed(&server, &limiter, 10, lease).await;
}

// ---- 20: a slow network

/// Calls over a slow link, none of which may be refused below the limit.
async fn slow(name: &str, served: u32, slow_down: impl AsyncFn(&Proxy, Instant)) {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let proxy = Proxy::start(server.addr());
    let limiter = on(&proxy.url()).limit(100).lease(lease).build().unwrap();
    recovered(&limiter, SOON).await;
    lives(&server, 0, SOON).await;
    let calls = traffic(&limiter, &history, 16, 2 * SECOND);
    let (tally, ()) = tokio::join!(calls, slow_down(&proxy, Instant::now() + 2 * SECOND));
    say(
        20,
        &format!(
            "{name}: {} served, {} outages, {} false refusals of 0",
            tally.served, tally.failed, tally.refused
        ),
    );
    assert_eq!(tally.refused, 0, "fault 20: refused below the limit: {tally:?}");
    assert!(tally.served >= served, "fault 20: {} served of at least {served}", tally.served);
    judge_time(20, "the slowest call took", tally.slowest, TIMEOUT + SLACK);
    proxy.set_delay(Duration::ZERO);
    proxy.throttle(None);
    judge(20, &history, &never_above(100));
    healed(&server, &limiter, 100, lease).await;
}

#[tokio::test]
async fn fault_20_latency_with_jitter_costs_throughput_only() {
    slow("200 ms ± 20 ms", 32, async |proxy, end| {
        let delays = [90, 110, 95, 105, 100];
        for delay in delays.iter().cycle().take_while(|_| Instant::now() < end) {
            proxy.set_delay(*delay * MS);
            sleep(13 * MS).await;
        }
    })
    .await;
}

#[tokio::test]
async fn fault_20_a_kilobyte_a_second_is_an_outage_at_the_worst() {
    slow("1 KB/s", 0, async |proxy, _| proxy.throttle(Some(1000))).await;
}

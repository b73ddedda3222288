//! Clocks that jump: the server's, and those of holders.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::common::{
    Bound, Held, ID, MS, SECOND, SLACK, SOON, healed, hold, is_saturated, judge, judge_time, live, lives,
    never_above, say, steady, traffic,
};
use crate::holder::{PATIENCE, spawn_with, tell};
use crate::support::clock::with_offset;
use crate::support::{ClockedServer, History, RedisServer, Visit};

#[tokio::test]
async fn fault_15_a_server_clock_that_jumps_ahead_heals_within_a_third_of_a_lease() {
    const LIMIT: usize = 4;
    let (server, lease, history) = (ClockedServer::start(), 2 * SECOND, History::new());
    let (holder, other) = (steady(&server.url(), 4, lease), steady(&server.url(), 4, lease));
    let held = hold(&holder, &history, LIMIT).await;
    let before = server.time_ms().await;
    let callers = traffic(&other, &history, 8, 3 * lease);
    let fault = async {
        sleep(lease / 2).await;
        // For more than the lease, and more than the key's TTL.
        server.set_ahead(3_600_000);
        sleep(lease / 3 + SLACK).await;
        assert!(server.time_ms().await > before + 3_600_000, "the clock has jumped");
        let (visits, busy) = (history.visits(ID), other.try_acquire(ID).await);
        assert!(is_saturated(&busy), "held slots count again: {busy:?}");
        sleep(lease / 4).await;
        assert_eq!(history.visits(ID), visits, "nothing new is let in");
        for Held { slot, .. } in held {
            slot.release().await.expect("a release succeeds");
        }
    };
    let (tally, ()) = tokio::join!(callers, fault);
    assert!(tally.served > 0 && tally.failed == 0, "{tally:?}");
    judge(15, &history, &Bound { limit: 4, most: 8, above: lease / 3 + SLACK });
    healed(&server, &other, LIMIT, lease).await;
}

#[tokio::test]
async fn fault_16_a_server_clock_that_jumps_back_admits_too_few_for_a_lease_and_the_jump_at_most() {
    const BACK: Duration = Duration::from_secs(2);
    let (server, lease, history) = (ClockedServer::start(), SECOND, History::new());
    let (gone, other) = (steady(&server.url(), 4, lease), steady(&server.url(), 4, lease));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // Two are held by one who dies with its runtime, one by one who lives.
    let dead = {
        let (limiter, history) = (gone.clone(), history.clone());
        runtime.spawn(async move { hold(&limiter, &history, 2).await }).await.unwrap()
    };
    let mut alive = hold(&other, &history, 1).await;
    runtime.shutdown_background();
    server.set_ahead(-(BACK.as_millis() as i64));
    let start = Instant::now();
    drop(dead);
    let tally = traffic(&other, &history, 4, lease + BACK + SLACK).await;
    assert!(tally.served > 0 && tally.failed == 0, "one is free all the time, and none fails: {tally:?}");
    let more = hold(&other, &history, 3).await;
    judge_time(16, "all are free again after", start.elapsed(), lease + BACK + 2 * SLACK);
    assert!(is_saturated(&other.try_acquire(ID).await));
    alive.pop().unwrap().slot.release().await.expect("a release succeeds");
    drop(more);
    judge(16, &history, &never_above(4));
    healed(&server, &other, 4, lease).await;
}

#[tokio::test]
async fn fault_16_slots_that_are_held_and_given_back_do_not_mind_a_clock_that_jumps_back() {
    let (server, lease, history) = (ClockedServer::start(), SECOND, History::new());
    let limiter = steady(&server.url(), 4, lease);
    let held = hold(&limiter, &history, 4).await;
    server.set_ahead(-60_000);
    let start = Instant::now();
    while start.elapsed() < 2 * lease {
        assert!(is_saturated(&limiter.try_acquire(ID).await), "all four are held");
        sleep(20 * MS).await;
    }
    drop(held);
    let start = Instant::now();
    lives(&server, 0, SOON).await;
    judge_time(16, "given back after", start.elapsed(), SLACK);
    judge(16, &history, &never_above(4));
    healed(&server, &limiter, 4, lease).await;
}

/// Two holders whose clocks are hours apart share a limit with each other and with this process.
#[tokio::test]
async fn fault_17_clocks_of_holders_have_no_effect() {
    const LIMIT: u32 = 6;
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let mut children = Vec::new();
    for hours in [-1, 1] {
        let env = with_offset(hours * 3600);
        let env: Vec<_> = env.iter().map(|(name, value)| (*name, &**value)).collect();
        children.push(spawn_with(&server, LIMIT, lease, &env).await);
    }
    let limiter = steady(&server.url(), LIMIT, lease);
    // What the children record has their clocks, so this process records for them.
    let mut visits: Vec<Visit> = Vec::new();
    for child in &children {
        tell(child, "take 2", "granted 2").await;
        visits.push(history.enter(ID, 2));
    }
    let held = hold(&limiter, &history, 2).await;
    let apart = visits_apart(&children[0].lines(), &children[1].lines());
    assert!(apart > Duration::from_secs(7000), "the children's clocks are {apart:?} apart");
    let start = Instant::now();
    while start.elapsed() < 2 * lease {
        assert!(is_saturated(&limiter.try_acquire(ID).await));
        assert_eq!(live(&server).await, 6);
        sleep(20 * MS).await;
    }
    drop(visits);
    for child in children {
        tell(&child, "drop", "dropped").await;
        child.finish(PATIENCE).await;
    }
    lives(&server, 2, SOON).await;
    drop(held);
    say(17, "clocks 2 h apart");
    judge(17, &history, &never_above(LIMIT));
    healed(&server, &limiter, LIMIT as usize, lease).await;
}

/// How far apart two children's clocks are, by what each recorded of its first visit.
fn visits_apart(one: &[String], other: &[String]) -> Duration {
    let admitted = |lines: &[String]| -> u64 {
        let line = lines.iter().find(|line| line.starts_with("visit ")).expect("a visit");
        line.split(' ').nth(4).expect("its start").parse().expect("a number of ns")
    };
    Duration::from_nanos(admitted(one).abs_diff(admitted(other)))
}

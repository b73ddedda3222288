//! Fleets of real processes on one Redis: killed, stopped, resumed and shut down.

use tokio::time::{Instant, sleep};
use tower_slots::{Acquire, Origin};

use crate::common::{
    Bound, ID, KEY, MS, SECOND, SLACK, SOON, healed, judge, judge_time, live, lives, never_above, steady,
};
use crate::holder::{PATIENCE, spawn, tell};
use crate::support::{History, RedisServer, eventually};

#[tokio::test]
async fn no_fault_one_more_acquire_than_the_limit_over_four_processes_grants_exactly_the_limit() {
    const LIMIT: u32 = 39;
    let server = RedisServer::start();
    let mut children = Vec::new();
    for _ in 0..4 {
        children.push(spawn(&server, LIMIT, 30 * SECOND).await);
    }
    for round in 0..3 {
        for child in &children {
            child.send_line("try 10");
        }
        let mut granted = 0;
        for child in &children {
            let line = child.wait_line("granted ", PATIENCE).await;
            granted += line["granted ".len()..].parse::<u32>().unwrap();
        }
        assert_eq!(granted, LIMIT, "in round {round}");
        assert_eq!(server.zcard(KEY).await, u64::from(LIMIT));
        for child in &children {
            tell(child, "drop", "dropped").await;
        }
        eventually("all is given back", SECOND, async || server.zcard(KEY).await == 0).await;
    }
    let history = History::new();
    for child in children {
        history.read_lines(child.finish(PATIENCE).await);
    }
    history.assert_within(ID, LIMIT);
    assert_eq!(history.overlap(ID), LIMIT, "the limit was reached");
}

#[tokio::test]
async fn no_fault_four_processes_under_load_keep_the_limit_and_reach_it() {
    const LIMIT: u32 = 5;
    let server = RedisServer::start();
    let mut children = Vec::new();
    for _ in 0..4 {
        children.push(spawn(&server, LIMIT, 30 * SECOND).await);
    }
    for child in &children {
        child.send_line("visit 1500");
    }
    let history = History::new();
    for child in children {
        child.wait_line("visited", PATIENCE).await;
        history.read_lines(child.finish(PATIENCE).await);
    }
    history.assert_within(ID, LIMIT);
    assert_eq!(history.overlap(ID), LIMIT, "the limit was reached");
    assert!(history.visits(ID) > 100, "{} visits", history.visits(ID));
}

#[tokio::test]
async fn fault_01_slots_of_a_killed_process_are_free_within_a_lease_and_others_stay() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let (killed, other) = (spawn(&server, 5, lease).await, spawn(&server, 5, lease).await);
    tell(&killed, "take 3", "granted 3").await;
    tell(&other, "take 2", "granted 2").await;
    // For longer than a lease: renewals are what keeps them.
    sleep(lease + lease / 2).await;
    assert_eq!(live(&server).await, 5);
    history.read_lines(killed.lines());
    let pid = killed.pid();
    killed.kill();
    history.end_process(pid);
    let start = Instant::now();
    assert_eq!(live(&server).await, 5, "nobody gives them back before their lease is over");
    let limiter = steady(&server.url(), 5, lease);
    let slot = loop {
        if let Ok(slot) = limiter.acquire(ID, Acquire::weight(3)).await {
            break slot;
        }
        assert!(start.elapsed() < 5 * lease);
        sleep(10 * MS).await;
    };
    judge_time(1, "3 slots of a killed process are free after", start.elapsed(), lease + SLACK);
    let visit = history.enter(ID, 3);
    assert_eq!((slot.active(), slot.origin()), (5, Origin::Store), "the other's two are untouched");
    sleep(lease).await;
    assert_eq!(live(&server).await, 5);
    drop((visit, slot));
    sleep(lease).await;
    assert_eq!(live(&server).await, 2, "and stay so");
    history.read_lines(other.finish(PATIENCE).await);
    judge(1, &history, &never_above(5));
    healed(&server, &limiter, 5, lease).await;
}

#[tokio::test]
async fn fault_02_a_graceful_shutdown_gives_all_back_at_once() {
    let (server, history) = (RedisServer::start(), History::new());
    let child = spawn(&server, 600, 30 * SECOND).await;
    tell(&child, "take 600", "granted 600").await;
    assert_eq!(live(&server).await, 600);
    let start = Instant::now();
    tell(&child, "shutdown 0", "shutdown true").await;
    assert_eq!(server.zcard(KEY).await, 0, "when shutdown returns, the server has it all");
    judge_time(2, "600 slots are given back after", start.elapsed(), 2 * SECOND);
    history.read_lines(child.finish(PATIENCE).await);
    judge(2, &history, &never_above(600));
    assert!(!server.exists(KEY).await);
}

#[tokio::test]
async fn fault_02_in_a_graceful_shutdown_slots_in_flight_are_renewed() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let child = spawn(&server, 3, lease).await;
    let limiter = steady(&server.url(), 3, lease);
    tell(&child, "take 3", "granted 3").await;
    child.send_line("shutdown 2500");
    let start = Instant::now();
    while start.elapsed() < 2400 * MS {
        assert!(limiter.try_acquire(ID).await.is_err(), "admitted after {:?}", start.elapsed());
        sleep(20 * MS).await;
    }
    child.wait_line("shutdown true", PATIENCE).await;
    assert_eq!(server.zcard(KEY).await, 0, "when shutdown returns, the server has it all");
    history.read_lines(child.finish(PATIENCE).await);
    judge(2, &history, &never_above(3));
    healed(&server, &limiter, 3, lease).await;
}

#[tokio::test]
async fn fault_03_a_process_stopped_for_longer_than_a_lease_reasserts_and_frees_only_its_own() {
    const LIMIT: u32 = 4;
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let (stopped, other) = (spawn(&server, LIMIT, lease).await, spawn(&server, LIMIT, lease).await);
    tell(&stopped, "take 3", "granted 3").await;
    stopped.stop();
    sleep(lease + lease / 2).await;
    assert_eq!(live(&server).await, 0, "a stopped process renews nothing");
    tell(&other, "try 10", "granted 4").await;
    stopped.cont();
    let start = Instant::now();
    lives(&server, 7, SOON).await;
    judge_time(3, "3 slots are put back over the limit after", start.elapsed(), lease / 3 + SLACK);
    tell(&other, "try 1", "granted 0").await;
    sleep(lease + lease / 2).await;
    assert_eq!(live(&server).await, 7, "and renewed, and none of the other's is lost");
    tell(&stopped, "drop", "dropped").await;
    lives(&server, 4, SECOND).await;
    sleep(lease).await;
    assert_eq!(live(&server).await, 4, "the other's four stay");
    tell(&other, "drop", "dropped").await;
    history.read_lines(stopped.finish(PATIENCE).await);
    history.read_lines(other.finish(PATIENCE).await);
    judge(3, &history, &Bound { limit: LIMIT, most: LIMIT + 3, above: 5 * SECOND });
    healed(&server, &steady(&server.url(), LIMIT, lease), LIMIT as usize, lease).await;
}

#[tokio::test]
async fn fault_03_a_process_that_gives_back_right_after_a_long_stop_frees_only_its_own() {
    const LIMIT: u32 = 3;
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let (stopped, other) = (spawn(&server, LIMIT, lease).await, spawn(&server, LIMIT, lease).await);
    tell(&stopped, "take 3", "granted 3").await;
    stopped.stop();
    sleep(lease + lease / 2).await;
    tell(&other, "take 3", "granted 3").await;
    // What it reads first when it runs again.
    stopped.send_line("drop");
    stopped.cont();
    stopped.wait_line("dropped", PATIENCE).await;
    lives(&server, 3, SECOND).await;
    tell(&other, "try 1", "granted 0").await;
    sleep(lease).await;
    assert_eq!(live(&server).await, 3, "the other's stay, and nothing is put back after its release");
    history.read_lines(stopped.finish(PATIENCE).await);
    history.read_lines(other.finish(PATIENCE).await);
    judge(3, &history, &Bound { limit: LIMIT, most: 2 * LIMIT, above: 5 * SECOND });
}

#[tokio::test]
async fn fault_04_a_process_stopped_for_less_than_a_lease_loses_nothing() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let child = spawn(&server, 3, lease).await;
    tell(&child, "take 3", "granted 3").await;
    let limiter = steady(&server.url(), 3, lease);
    for _ in 0..3 {
        // Two renewals are missed, and the slots live on.
        child.stop();
        let end = Instant::now() + lease * 55 / 100;
        while Instant::now() < end {
            assert!(limiter.try_acquire(ID).await.is_err());
            sleep(20 * MS).await;
        }
        child.cont();
        sleep(lease * 45 / 100).await;
    }
    assert_eq!(live(&server).await, 3);
    tell(&child, "drop", "dropped").await;
    history.read_lines(child.finish(PATIENCE).await);
    judge(4, &history, &never_above(3));
    healed(&server, &limiter, 3, lease).await;
}

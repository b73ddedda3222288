//! Async runtimes that are blocked, gone, or not driven any more.

use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tower_slots::Limiter;

use crate::common::{
    Bound, ID, MS, SECOND, SLACK, SOON, healed, hold, judge, judge_time, live, lives, never_above, on, steady,
};
use crate::support::{History, RedisServer, eventually};

/// A runtime whose two workers can be blocked.
fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Blocks both workers of a runtime.
fn block(runtime: &Runtime, time: Duration) {
    for _ in 0..2 {
        runtime.spawn(async move { thread::sleep(time) });
    }
}

async fn is_free(limiter: &Limiter) -> bool {
    limiter.try_acquire(ID).await.is_ok()
}

#[tokio::test]
async fn fault_05_workers_blocked_for_longer_than_a_lease_cost_what_a_stopped_process_costs() {
    const LIMIT: usize = 3;
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let (blocked, other) = (steady(&server.url(), 3, lease), steady(&server.url(), 3, lease));
    let runtime = runtime();
    let held = {
        let (limiter, history) = (blocked.clone(), history.clone());
        runtime.spawn(async move { hold(&limiter, &history, LIMIT).await }).await.unwrap()
    };
    block(&runtime, lease * 2);
    let blocked_at = Instant::now();
    sleep(lease + 100 * MS).await;
    let others = hold(&other, &history, LIMIT).await;
    sleep((blocked_at + 2 * lease).saturating_duration_since(Instant::now())).await;
    let start = Instant::now();
    lives(&server, 2 * LIMIT, SOON).await;
    judge_time(5, "3 slots are put back after", start.elapsed(), lease / 3 + SLACK);
    assert!(!is_free(&other).await, "and nothing new is let in");
    drop(held);
    lives(&server, LIMIT, SOON).await;
    sleep(lease / 2).await;
    assert_eq!(live(&server).await, LIMIT, "the other's stay");
    drop(others);
    judge(5, &history, &Bound { limit: 3, most: 6, above: 2 * SECOND });
    healed(&server, &other, LIMIT, lease).await;
    runtime.shutdown_background();
}

#[tokio::test]
async fn fault_05_workers_blocked_for_two_ticks_lose_nothing() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let (blocked, other) = (steady(&server.url(), 3, lease), steady(&server.url(), 3, lease));
    let runtime = runtime();
    let held = {
        let (limiter, history) = (blocked.clone(), history.clone());
        runtime.spawn(async move { hold(&limiter, &history, 3).await }).await.unwrap()
    };
    for _ in 0..2 {
        let end = Instant::now() + lease;
        block(&runtime, lease * 55 / 100);
        while Instant::now() < end {
            assert!(!is_free(&other).await, "a slot of a blocked runtime was lost");
            sleep(20 * MS).await;
        }
    }
    drop(held);
    judge(5, &history, &never_above(3));
    healed(&server, &other, 3, lease).await;
    runtime.shutdown_background();
}

/// The task that sends what was given back waits behind the one that blocks.
#[tokio::test]
async fn fault_05_what_a_worker_gave_back_before_it_blocked_goes_with_the_next_call() {
    let (server, lease) = (RedisServer::start(), 6 * SECOND);
    let (blocked, other) = (steady(&server.url(), 1, lease), steady(&server.url(), 1, lease));
    let runtime = runtime();
    let (given_back, when) = oneshot::channel();
    let limiter = blocked.clone();
    runtime.spawn(async move {
        let slot = limiter.try_acquire(ID).await.unwrap();
        sleep(100 * MS).await;
        drop(slot);
        given_back.send(()).unwrap();
        thread::sleep(2 * lease);
    });
    when.await.unwrap();
    let called = Instant::now();
    drop(runtime.spawn(async move { blocked.try_acquire("another").await.unwrap() }).await.unwrap());
    eventually("the slot is free", lease, async || is_free(&other).await).await;
    judge_time(5, "a blocked worker's slot is free after", called.elapsed(), SLACK);
    runtime.shutdown_background();
}

/// A runtime of one thread whose `block_on` has ended lives on, and runs nothing.
#[test]
fn fault_26_a_runtime_that_nobody_drives_any_more_is_left_for_the_next() {
    let (server, lease, history) = (RedisServer::start(), 2 * SECOND, History::new());
    let limiter = on(&server.url()).limit(5).lease(lease).build().unwrap();
    let build = || Builder::new_current_thread().enable_all().build().unwrap();
    let (first, next) = (build(), build());
    let mut held = first.block_on(async {
        let held = hold(&limiter, &history, 3).await;
        // What is under way when the runtime stops.
        for _ in 0..4 {
            let limiter = limiter.clone();
            tokio::spawn(async move { drop(limiter.try_acquire(ID).await) });
        }
        tokio::task::yield_now().await;
        held
    });
    drop(held.pop());
    next.block_on(async {
        let start = Instant::now();
        let served = async || limiter.try_acquire(ID).await.is_ok();
        eventually("calls are served", SOON, served).await;
        judge_time(26, "calls are served on the next runtime after", start.elapsed(), 2 * SECOND + SLACK);
        lives(&server, 2, lease + SLACK).await;
        sleep(lease).await;
        assert_eq!(live(&server).await, 2, "held slots are renewed there");
    });
    // What the first runtime does once it is driven again is of no importance.
    first.block_on(async { sleep(lease / 4).await });
    next.block_on(async {
        sleep(lease / 2).await;
        lives(&server, 2, SOON).await;
        drop(held);
        lives(&server, 0, SOON).await;
        judge(26, &history, &never_above(5));
        healed(&server, &limiter, 5, lease).await;
    });
}

#[test]
fn fault_26_slots_may_be_dropped_outside_a_runtime_and_after_it_is_gone() {
    let (server, lease, history) = (RedisServer::start(), SECOND, History::new());
    let limiter = steady(&server.url(), 2, lease);
    let runtime = Runtime::new().unwrap();
    let mut held = runtime.block_on(hold(&limiter, &history, 2));
    drop(held.pop());
    runtime.block_on(lives(&server, 1, SOON));
    drop(runtime);
    // No panic, and no runtime to send it from.
    drop(held);
    judge(26, &history, &never_above(2));
    let next = Builder::new_current_thread().enable_all().build().unwrap();
    next.block_on(async {
        // The first call of the next runtime sends what was left.
        assert!(is_free(&limiter).await);
        healed(&server, &limiter, 2, lease).await;
    });
}

//! Fleets of real processes on one Redis: killed, stopped, resumed and shut down.

mod support;

use std::time::Duration;

use futures_util::future::join_all;
use support::child::{self, Args};
use support::{Child, History, RedisServer, eventually};
use tokio::time::{Instant, sleep};
use tower_slots::{Acquire, Limiter, Origin, RedisStore, Slot};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// How long a child may take to start or to say something, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn limiter(url: &str, limit: u32, lease: Duration) -> Limiter {
    let store = RedisStore::open(url).unwrap();
    // As long a time-out as can be: a machine under load is no outage, and an outage would admit.
    Limiter::builder(store).limit(limit).lease(lease).store_timeout(lease.mul_f64(0.9)).build().unwrap()
}

/// The child's part: does what the parent's lines say.
///
/// `take <n>` takes n slots, `try <n>` tries to, all at once, `drop` gives all back, `shutdown` gives
/// all back and shuts down, `visit <ms>` comes and goes for that time. Each answers with one line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder() {
    let Some(args) = child::role("holder") else { return };
    let lease = Duration::from_millis(args.get("LEASE_MS").parse().unwrap());
    let limiter = limiter(&args.get("URL"), args.get("LIMIT").parse().unwrap(), lease);
    let history = History::new();
    let mut slots: Vec<(support::Visit, Slot)> = Vec::new();
    // Connected, so that what is measured later is no start.
    limiter.active("acme").await.unwrap();
    println!("ready");
    let args = std::sync::Arc::new(args);
    while let Some(line) = next_line(&args).await {
        let (word, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number: u64 = number.parse().unwrap();
        match word {
            "take" | "try" => {
                let tries = join_all((0..number).map(|_| limiter.try_acquire("acme"))).await;
                let mut granted = 0;
                for slot in tries {
                    match slot {
                        Ok(slot) => {
                            assert_eq!(slot.origin(), Origin::Store);
                            let visit = history.enter("acme", 1);
                            println!("{}", visit.line());
                            slots.push((visit, slot));
                            granted += 1;
                        }
                        Err(error) => assert_eq!(word, "try", "{error}"),
                    }
                }
                println!("granted {granted}");
            }
            "drop" => {
                slots.clear();
                println!("dropped");
            }
            "visit" => {
                let end = Instant::now() + Duration::from_millis(number);
                let visits = (0..4).map(|visitor| {
                    let (limiter, history) = (limiter.clone(), history.clone());
                    tokio::spawn(async move {
                        while Instant::now() < end {
                            let weight = 1 + visitor % 2;
                            if let Ok(slot) = limiter.acquire("acme", Acquire::weight(weight)).await {
                                let visit = history.enter("acme", weight);
                                sleep(2 * MS).await;
                                drop((visit, slot));
                            }
                            sleep(MS).await;
                        }
                    })
                });
                for visit in join_all(visits).await {
                    visit.unwrap();
                }
                println!("visited");
            }
            "shutdown" => {
                slots.clear();
                println!("shutdown {}", limiter.shutdown(2 * SECOND).await);
                for line in history.to_lines() {
                    println!("{line}");
                }
                // No destructor may help.
                std::process::exit(0);
            }
            other => panic!("the parent says {other:?}"),
        }
    }
    for line in history.to_lines() {
        println!("{line}");
    }
}

async fn next_line(args: &std::sync::Arc<Args>) -> Option<String> {
    let args = std::sync::Arc::clone(args);
    tokio::task::spawn_blocking(move || args.read_line()).await.unwrap()
}

async fn spawn(server: &RedisServer, limit: u32, lease: Duration) -> Child {
    let lease = lease.as_millis().to_string();
    let args = [("URL", &*server.url()), ("LIMIT", &limit.to_string()), ("LEASE_MS", &lease)];
    let child = Child::spawn("holder", "holder", &args);
    child.wait_line("ready", PATIENCE).await;
    child
}

/// Tells a child and waits for its answer.
async fn tell(child: &Child, line: &str, answer: &str) {
    child.send_line(line);
    child.wait_line(answer, PATIENCE).await;
}

async fn active(server: &RedisServer) -> usize {
    let now = server.time_ms().await;
    server.members("sem:acme").await.iter().filter(|(_, until)| *until > now).count()
}

#[tokio::test]
async fn one_more_acquire_than_the_limit_over_four_processes_grants_exactly_the_limit() {
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
        assert_eq!(server.zcard("sem:acme").await, u64::from(LIMIT));
        for child in &children {
            tell(child, "drop", "dropped").await;
        }
        eventually("all is given back", SECOND, async || server.zcard("sem:acme").await == 0).await;
    }
    let history = History::new();
    for child in children {
        history.read_lines(child.finish(PATIENCE).await);
    }
    history.assert_within("acme", LIMIT);
    assert_eq!(history.overlap("acme"), LIMIT, "the limit was reached");
}

#[tokio::test]
async fn four_processes_under_load_keep_the_limit_and_reach_it() {
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
    history.assert_within("acme", LIMIT);
    assert_eq!(history.overlap("acme"), LIMIT, "the limit was reached");
    assert!(history.visits("acme") > 100, "{} visits", history.visits("acme"));
}

#[tokio::test]
async fn slots_of_a_killed_process_are_free_within_a_lease_and_others_stay() {
    let (server, lease) = (RedisServer::start(), SECOND);
    let (killed, other) = (spawn(&server, 5, lease).await, spawn(&server, 5, lease).await);
    tell(&killed, "take 3", "granted").await;
    tell(&other, "take 2", "granted").await;
    // For longer than a lease: renewals are what keeps them.
    sleep(lease + lease / 2).await;
    assert_eq!(active(&server).await, 5);
    killed.kill();
    let start = Instant::now();
    assert_eq!(active(&server).await, 5, "nobody gives them back before their lease is over");
    let limiter = limiter(&server.url(), 5, lease);
    let slot = loop {
        if let Ok(slot) = limiter.acquire("acme", Acquire::weight(3)).await {
            break slot;
        }
        assert!(start.elapsed() < lease + 100 * MS, "not within a lease");
        sleep(10 * MS).await;
    };
    assert_eq!((slot.active(), slot.origin()), (5, Origin::Store), "the other's two are untouched");
    drop(slot);
    sleep(lease).await;
    assert_eq!(active(&server).await, 2, "and stay so");
    drop(limiter);
    other.finish(PATIENCE).await;
    eventually("the other's are given back", SECOND, async || active(&server).await == 0).await;
}

#[tokio::test]
async fn a_process_stopped_for_longer_than_a_lease_reasserts_and_frees_only_its_own() {
    const LIMIT: u32 = 4;
    let (server, lease) = (RedisServer::start(), SECOND);
    let (stopped, other) = (spawn(&server, LIMIT, lease).await, spawn(&server, LIMIT, lease).await);
    tell(&stopped, "take 3", "granted 3").await;
    stopped.stop();
    sleep(lease + lease / 2).await;
    assert_eq!(active(&server).await, 0, "a stopped process renews nothing");
    tell(&other, "try 10", "granted 4").await;
    stopped.cont();
    eventually("it puts its slots back, over the limit", SECOND, async || active(&server).await == 7).await;
    tell(&other, "try 1", "granted 0").await;
    sleep(lease + lease / 2).await;
    assert_eq!(active(&server).await, 7, "and renews them, and loses none of the other's");
    tell(&stopped, "drop", "dropped").await;
    eventually("its own are free", SECOND, async || active(&server).await == 4).await;
    sleep(lease).await;
    assert_eq!(active(&server).await, 4, "the other's four stay");
    let history = History::new();
    history.read_lines(stopped.finish(PATIENCE).await);
    history.read_lines(other.finish(PATIENCE).await);
    history.assert_within("acme", LIMIT + 3);
    eventually("the other's are given back", SECOND, async || active(&server).await == 0).await;
}

#[tokio::test]
async fn a_process_that_gives_back_right_after_a_long_stop_frees_only_its_own() {
    const LIMIT: u32 = 3;
    let (server, lease) = (RedisServer::start(), SECOND);
    let (stopped, other) = (spawn(&server, LIMIT, lease).await, spawn(&server, LIMIT, lease).await);
    tell(&stopped, "take 3", "granted 3").await;
    stopped.stop();
    sleep(lease + lease / 2).await;
    tell(&other, "take 3", "granted 3").await;
    // What it reads first when it runs again.
    stopped.send_line("drop");
    stopped.cont();
    stopped.wait_line("dropped", PATIENCE).await;
    eventually("its own are free", SECOND, async || active(&server).await == 3).await;
    tell(&other, "try 1", "granted 0").await;
    sleep(lease).await;
    assert_eq!(active(&server).await, 3, "the other's stay, and nothing is put back after its release");
}

#[tokio::test]
async fn a_process_stopped_for_less_than_a_lease_loses_nothing() {
    let (server, lease) = (RedisServer::start(), 2 * SECOND);
    let child = spawn(&server, 3, lease).await;
    tell(&child, "take 3", "granted 3").await;
    let limiter = limiter(&server.url(), 3, lease);
    for _ in 0..3 {
        // Two renewals are missed, and the slots live on.
        child.stop();
        let end = Instant::now() + lease * 55 / 100;
        while Instant::now() < end {
            assert!(limiter.try_acquire("acme").await.is_err());
            sleep(20 * MS).await;
        }
        child.cont();
        sleep(lease * 45 / 100).await;
    }
    assert_eq!(active(&server).await, 3);
    tell(&child, "drop", "dropped").await;
    eventually("all is given back", SECOND, async || active(&server).await == 0).await;
}

#[tokio::test]
async fn a_graceful_shutdown_gives_all_back_at_once() {
    let server = RedisServer::start();
    let child = spawn(&server, 600, 30 * SECOND).await;
    tell(&child, "take 600", "granted 600").await;
    assert_eq!(server.zcard("sem:acme").await, 600);
    let start = Instant::now();
    tell(&child, "shutdown", "shutdown true").await;
    assert_eq!(server.zcard("sem:acme").await, 0, "when shutdown returns, the server has it all");
    assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
    child.finish(PATIENCE).await;
    assert!(!server.exists("sem:acme").await);
}

//! One fleet of two kinds: clients with the seed's semantics and limiters, on the same keys.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use support::{Gotsem, History, RedisServer, connect, eventually};
use tokio::time::{Instant, sleep};
use tower_slots::store::{Key, SlotStore};
use tower_slots::{Acquire, AcquireError, Limiter, LimiterBuilder, RedisStore};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const MS: Duration = Duration::from_millis(1);

fn ours(server: &RedisServer, limit: u32) -> LimiterBuilder {
    // A long time-out: a machine under load is no outage, and an outage would admit.
    Limiter::builder(RedisStore::open(server.url()).unwrap())
        .prefix("sem:")
        .limit(limit)
        .store_timeout(5 * SECOND)
}

async fn gotsem(server: &RedisServer, ttl: Duration, max: u32) -> Gotsem {
    Gotsem::new(connect(&server.url()).await, "sem:", ttl, max)
}

fn is_saturated<T>(result: &Result<T, AcquireError>, active: u32) -> bool {
    matches!(result, Err(AcquireError::Saturated { active: found, .. }) if *found == active)
}

#[tokio::test]
async fn each_kind_counts_the_others_slots_weights_included() {
    let server = RedisServer::start();
    let (limiter, gotsem) = (ours(&server, 6).build().unwrap(), gotsem(&server, 30 * SECOND, 6).await);
    let three = limiter.acquire("acme", Acquire::weight(3)).await.unwrap();
    let (granted, _, active) = gotsem.try_acquire("acme").await.unwrap();
    assert_eq!((granted, active), (true, 4));
    let two = limiter.acquire("acme", Acquire::weight(2)).await.unwrap();
    assert_eq!(two.active(), 6);
    assert!(!gotsem.try_acquire("acme").await.unwrap().0);
    assert!(is_saturated(&limiter.try_acquire("acme").await, 6));
    assert_eq!((limiter.active("acme").await.unwrap(), gotsem.active("acme").await.unwrap()), (6, 6));
    three.release().await.unwrap();
    assert_eq!((limiter.active("acme").await.unwrap(), gotsem.active("acme").await.unwrap()), (3, 3));
}

#[tokio::test]
async fn members_and_scores_of_both_kinds_look_alike() {
    let server = RedisServer::start();
    let (limiter, gotsem) = (ours(&server, 6).build().unwrap(), gotsem(&server, 30 * SECOND, 6).await);
    let slot = limiter.try_acquire("acme").await.unwrap();
    let (_, theirs, _) = gotsem.try_acquire("acme").await.unwrap();
    let now = server.time_ms().await;
    let members = server.members("sem:acme").await;
    assert!([slot.id().to_string(), theirs].iter().all(|id| members.iter().any(|(member, _)| member == id)));
    for (member, score) in members {
        assert!(member.len() == 37 && member.starts_with("slot_"), "{member}");
        assert!((now + 28_000..=now + 30_000).contains(&score), "{member} until {score}, and it is {now}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_kinds_under_load_keep_one_limit_together() {
    const LIMIT: u32 = 5;
    let server = RedisServer::start();
    let history = History::new();
    let theirs = Arc::new(AtomicUsize::new(0));
    let our_visits = Arc::new(AtomicUsize::new(0));
    let end = Instant::now() + 2 * SECOND;
    let mut workers = Vec::new();
    for _ in 0..2 {
        let limiter = ours(&server, LIMIT).build().unwrap();
        for worker in 0..6 {
            let (limiter, history, visits) = (limiter.clone(), history.clone(), Arc::clone(&our_visits));
            workers.push(tokio::spawn(async move {
                while Instant::now() < end {
                    let weight = 1 + worker % 2;
                    if let Ok(slot) = limiter.acquire("acme", Acquire::weight(weight)).await {
                        assert_eq!(slot.origin(), tower_slots::Origin::Store);
                        let visit = history.enter("acme", weight);
                        visits.fetch_add(1, Ordering::Relaxed);
                        sleep(MS).await;
                        drop((visit, slot));
                    }
                    sleep(MS).await;
                }
            }));
        }
        let gotsem = gotsem(&server, 30 * SECOND, LIMIT).await;
        for _ in 0..6 {
            let (gotsem, history, visits) = (gotsem.clone(), history.clone(), Arc::clone(&theirs));
            workers.push(tokio::spawn(async move {
                while Instant::now() < end {
                    let (granted, slot, _) = gotsem.try_acquire("acme").await.unwrap();
                    if granted {
                        let visit = history.enter("acme", 1);
                        visits.fetch_add(1, Ordering::Relaxed);
                        sleep(MS).await;
                        drop(visit);
                        assert!(
                            gotsem.release("acme", &slot).await.unwrap(),
                            "nobody else took the slot away"
                        );
                    }
                    sleep(MS).await;
                }
            }));
        }
    }
    for worker in workers {
        worker.await.unwrap();
    }
    history.assert_within("acme", LIMIT);
    assert_eq!(history.overlap("acme"), LIMIT, "the limit was reached");
    let (ours, theirs) = (our_visits.load(Ordering::Relaxed), theirs.load(Ordering::Relaxed));
    assert!(ours > 50 && theirs > 50, "both kinds had their part: {ours} and {theirs}");
    eventually("all is given back", SECOND, async || server.zcard("sem:acme").await == 0).await;
}

#[tokio::test]
async fn a_slot_of_ours_that_gotsem_releases_is_free_and_our_late_release_is_harmless() {
    let server = RedisServer::start();
    let (limiter, gotsem) = (ours(&server, 1).build().unwrap(), gotsem(&server, 30 * SECOND, 1).await);
    let slot = limiter.try_acquire("acme").await.unwrap();
    assert!(gotsem.release("acme", &slot.id().to_string()).await.unwrap());
    let (granted, theirs, _) = gotsem.try_acquire("acme").await.unwrap();
    assert!(granted);
    slot.release().await.unwrap();
    assert_eq!(limiter.active("acme").await.unwrap(), 1, "theirs is untouched");
    assert!(gotsem.release("acme", &theirs).await.unwrap());
}

#[tokio::test]
async fn a_slot_of_ours_that_gotsem_releases_comes_back_while_its_work_runs() {
    let server = RedisServer::start();
    let limiter = ours(&server, 1).lease(SECOND).store_timeout(900 * MS).build().unwrap();
    let gotsem = gotsem(&server, 30 * SECOND, 1).await;
    let slot = limiter.try_acquire("acme").await.unwrap();
    gotsem.force_release("acme").await.unwrap();
    assert_eq!(gotsem.active("acme").await.unwrap(), 0);
    eventually("the slot is back", SECOND, async || gotsem.active("acme").await.unwrap() == 1).await;
    assert_eq!(server.members("sem:acme").await[0].0, slot.id().to_string());
}

#[tokio::test]
async fn slots_of_gotsem_go_with_our_drain_and_do_not_come_back() {
    let server = RedisServer::start();
    let (limiter, gotsem) = (ours(&server, 3).build().unwrap(), gotsem(&server, 30 * SECOND, 3).await);
    let (_, theirs, _) = gotsem.try_acquire("acme").await.unwrap();
    let _ours = limiter.try_acquire("acme").await.unwrap();
    assert_eq!(limiter.drain("acme").await.unwrap(), 2);
    assert_eq!(gotsem.active("acme").await.unwrap(), 0);
    assert!(!gotsem.release("acme", &theirs).await.unwrap());
}

#[tokio::test]
async fn a_gotsem_ttl_below_a_third_of_our_lease_takes_our_slots_along_until_their_renewal() {
    let server = RedisServer::start();
    let limiter = ours(&server, 5).lease(6 * SECOND).build().unwrap();
    let gotsem = gotsem(&server, SECOND, 5).await;
    let slot = limiter.try_acquire("acme").await.unwrap();
    assert!(gotsem.try_acquire("acme").await.unwrap().0);
    // The seed sets the key's TTL to that of its own slots, whatever else is there.
    assert!(server.pttl("sem:acme").await <= 1000);
    eventually("the key goes, our slot with it", 2 * SECOND, async || !server.exists("sem:acme").await).await;
    eventually("our slot is back", 2 * SECOND, async || server.exists("sem:acme").await).await;
    assert_eq!(server.members("sem:acme").await[0].0, slot.id().to_string());
    assert!(server.pttl("sem:acme").await >= 16_000, "and the key's TTL leaves room again");
}

#[tokio::test]
async fn a_slot_of_ours_survives_the_shorter_ttl_that_gotsem_sets_on_the_key() {
    let server = RedisServer::start();
    let limiter = ours(&server, 5).lease(3 * SECOND).store_timeout(2 * SECOND).build().unwrap();
    let gotsem = gotsem(&server, 1500 * MS, 5).await;
    let slot = limiter.try_acquire("acme").await.unwrap();
    assert!(gotsem.try_acquire("acme").await.unwrap().0);
    let end = Instant::now() + 4 * SECOND;
    while Instant::now() < end {
        let members = server.members("sem:acme").await;
        assert!(members.iter().any(|(member, _)| *member == slot.id().to_string()), "{members:?}");
        sleep(50 * MS).await;
    }
    assert_eq!(limiter.active("acme").await.unwrap(), 1, "and what gotsem never released has lapsed");
}

#[tokio::test]
async fn a_gotsem_whose_clock_is_behind_holds_slots_that_are_free_for_us() {
    let server = RedisServer::start();
    let (limiter, gotsem) = (ours(&server, 2).build().unwrap(), gotsem(&server, 30 * SECOND, 2).await);
    let slot = limiter.try_acquire("acme").await.unwrap();
    gotsem.set_clock_offset(-5 * MINUTE.as_millis() as i64);
    // It does not see that its slots are past their time by the server's clock.
    assert!(gotsem.try_acquire("acme").await.unwrap().0);
    assert_eq!(gotsem.active("acme").await.unwrap(), 2);
    assert_eq!(limiter.active("acme").await.unwrap(), 1, "by the server's clock its slot has lapsed");
    let second = limiter.try_acquire("acme").await.unwrap();
    assert!(is_saturated(&limiter.try_acquire("acme").await, 2), "among ourselves the limit holds");
    drop((slot, second));
}

#[tokio::test]
async fn a_gotsem_whose_clock_is_ahead_drops_our_slots_until_their_renewal() {
    let server = RedisServer::start();
    let limiter = ours(&server, 1).lease(3 * SECOND).store_timeout(2 * SECOND).build().unwrap();
    let gotsem = gotsem(&server, 30 * SECOND, 1).await;
    let slot = limiter.try_acquire("acme").await.unwrap();
    gotsem.set_clock_offset(5 * MINUTE.as_millis() as i64);
    // It evicts, as lapsed, whatever ends within the next five minutes.
    assert!(gotsem.try_acquire("acme").await.unwrap().0);
    eventually("our slot is back over the limit, for its work runs", 2 * SECOND, async || {
        server.members("sem:acme").await.iter().any(|(member, _)| *member == slot.id().to_string())
    })
    .await;
    assert!(is_saturated(&limiter.try_acquire("acme").await, 2), "and nothing new is admitted");
    assert_eq!(slot.lost().now_or_never(), None, "its holder lost nothing");
}

#[tokio::test]
async fn a_slot_of_gotsem_that_we_release_by_its_id_is_free() {
    let server = RedisServer::start();
    let gotsem = gotsem(&server, Duration::from_secs(30), 1).await;
    let (acquired, slot, _) = gotsem.try_acquire("acme").await.unwrap();
    assert!(acquired && !gotsem.try_acquire("acme").await.unwrap().0);
    let store = RedisStore::open(server.url()).unwrap();
    store.release_confirmed(&Key::new("sem:acme"), slot.parse().unwrap()).await.unwrap();
    assert!(gotsem.try_acquire("acme").await.unwrap().0);
}

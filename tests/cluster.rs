//! Slots on a cluster.

#![cfg(feature = "redis-cluster")]
#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod support;

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::cluster::{Cluster, hash_slot};
use support::rows::{self, Bound, judge, judge_time, never_above};
use support::{History, RedisServer, eventually, free_port};
use tower_slots::store::{StoreError, StoreErrorKind};
use tower_slots::{AcquireError, Limiter, LimiterBuilder, OnOutage, Origin, RedisStore, Slot};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// For what comes at once, on however busy a machine.
const SOON: Duration = Duration::from_secs(10);
/// For a failover, which takes the nodes a few seconds.
const FAILOVER: Duration = Duration::from_secs(60);

fn at(url: &str) -> LimiterBuilder {
    Limiter::builder(RedisStore::cluster([url]).unwrap()).limit(3).on_outage(OnOutage::Refuse)
}

/// One with a lease of a second, whose callers wait so long that a busy machine is no outage.
fn on(cluster: &Cluster) -> Limiter {
    at(&cluster.url()).lease(SECOND).store_timeout(900 * MS).build().unwrap()
}

async fn hold(limiter: &Limiter, id: &str, n: usize) -> Vec<Slot> {
    join_all((0..n).map(|_| limiter.try_acquire(id))).await.into_iter().collect::<Result<_, _>>().unwrap()
}

fn key(id: &str) -> String {
    format!("sem:{id}")
}

async fn empty(cluster: &Cluster) {
    for node in &cluster.nodes {
        let none = async || node.keys().await.iter().all(|key| key.ends_with(":drained"));
        eventually("no slot is left", SOON, none).await;
    }
}

async fn granted(limiter: &Limiter, id: &str, within: Duration) {
    let granted = async || limiter.try_acquire(id).await.is_ok_and(|slot| slot.origin() == Origin::Store);
    eventually("slots come from the store", within, granted).await;
}

fn error_of(result: Result<Slot, AcquireError>) -> StoreError {
    match result {
        Err(AcquireError::Unavailable(error)) => error,
        other => panic!("not an outage: {other:?}"),
    }
}

/// Takes and gives back slots of these ids until the end; every answer comes from the store. Returns
/// how many were granted.
async fn traffic(limiter: &Limiter, ids: &[String], history: &History, end: Instant) -> usize {
    let workers = ids.iter().flat_map(|id| [id; 5]).map(|id| async move {
        let mut served = 0;
        while Instant::now() < end {
            match limiter.try_acquire(id).await {
                Ok(slot) => {
                    assert_eq!(slot.origin(), Origin::Store);
                    let visit = history.enter(id, 1);
                    tokio::time::sleep(2 * MS).await;
                    drop((visit, slot));
                    served += 1;
                }
                Err(AcquireError::Saturated { .. }) => tokio::time::sleep(MS).await,
                Err(error) => panic!("{id}: {error:?}"),
            }
        }
        served
    });
    join_all(workers).await.into_iter().sum()
}

// ---- slots

#[tokio::test]
async fn slots_on_all_nodes_are_taken_counted_renewed_drained_and_given_back() {
    let cluster = Cluster::start(3).await;
    let limiter = on(&cluster);
    let ids: Vec<_> = (0..3).flat_map(|node| cluster.ids_on(node, 10)).collect();
    let held = join_all(ids.iter().map(|id| hold(&limiter, id, 3))).await;
    for id in &ids {
        let full = limiter.try_acquire(id).await;
        assert!(matches!(full, Err(AcquireError::Saturated { active: 3, limit: 3, .. })), "{full:?}");
        assert_eq!(limiter.active(id).await.unwrap(), 3);
        let node = &cluster.nodes[cluster.node_of(id)];
        assert_eq!(node.zcard(&key(id)).await, 3, "{id} is where the cluster has it");
    }
    tokio::time::sleep(2500 * MS).await;
    for (id, slots) in ids.iter().zip(&held) {
        let node = &cluster.nodes[cluster.node_of(id)];
        let now = node.time_ms().await;
        let members = node.members(&key(id)).await;
        assert!(members.len() == 3 && members.iter().all(|(_, score)| *score > now), "{members:?}");
        assert_eq!(limiter.drain(id).await.unwrap(), 3);
        for slot in slots {
            tokio::time::timeout(SOON, slot.lost()).await.unwrap();
        }
    }
    let again = join_all(ids.iter().map(|id| hold(&limiter, id, 3))).await;
    drop((held, again));
    empty(&cluster).await;
    assert!(limiter.shutdown(SOON).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_under_load_over_all_nodes_and_no_call_crosses_hash_slots() {
    let cluster = Cluster::start(3).await;
    let limiter = on(&cluster);
    let ids: Vec<_> = (0..60).map(|n| format!("id-{n}")).collect();
    let history = History::new();
    let served = traffic(&limiter, &ids, &history, Instant::now() + 2 * SECOND).await;
    assert!(served > 1000, "{served} served");
    for id in &ids {
        history.assert_within(id, 3);
    }
    drop(limiter);
    empty(&cluster).await;
    for node in &cluster.nodes {
        for code in ["CROSSSLOT", "MOVED", "ASK"] {
            assert_eq!(node.errors(code).await, 0, "{code}");
        }
    }
}

// ---- hash slots that move

/// Ids whose keys share one hash slot, that of the first.
fn siblings(cluster: &Cluster, n: usize) -> Vec<String> {
    let first = cluster.ids_on(0, 1).remove(0);
    let slot = hash_slot(&first);
    let others = (0..).map(|n| format!("sibling-{n}")).filter(|id| hash_slot(id) == slot);
    std::iter::once(first.clone()).chain(others).take(n).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_21_nobody_notices_that_hash_slots_move_under_load() {
    let mut cluster = Cluster::start(3).await;
    cluster.add().await;
    let limiter = on(&cluster);
    let mut ids = siblings(&cluster, 3);
    let held_id = ids[0].clone();
    ids.extend(cluster.ids_on(1, 3));
    let history = History::new();
    // Held all the time, in the very hash slot that moves: of three slots one is left.
    let held = hold(&limiter, &held_id, 2).await;
    let _visit = history.enter(&held_id, 2);
    let end = Instant::now() + 9 * SECOND;
    let moves = async {
        // The last one was not there when the store connected.
        for (from, to) in [(0, 1), (1, 3), (3, 2), (2, 0)] {
            cluster.move_id(&held_id, from, to, async || tokio::time::sleep(1500 * MS).await).await;
            let node = &cluster.nodes[to];
            let now = node.time_ms().await;
            let live =
                node.members(&key(&held_id)).await.into_iter().filter(|(_, score)| *score > now).count();
            assert!((2..=3).contains(&live), "{live} slots after a move");
            tokio::time::sleep(200 * MS).await;
        }
    };
    let (served, ()) = tokio::join!(traffic(&limiter, &ids, &history, end), moves);
    assert!(served > 1000, "{served} served");
    for id in &ids {
        judge(21, &history, id, &never_above(3));
    }
    let mut followed = 0;
    for node in &cluster.nodes {
        followed += node.errors("ASK").await;
        assert_eq!(node.errors("CROSSSLOT").await, 0);
    }
    assert!(followed > 0, "keys were asked for on the way");
    for slot in held {
        slot.release().await.unwrap();
    }
    assert_eq!(limiter.active(&held_id).await.unwrap(), 0);
    empty(&cluster).await;
    assert!(limiter.shutdown(SOON).await);
}

#[tokio::test]
async fn fault_21_counts_are_read_and_drains_hold_while_a_hash_slot_moves() {
    let cluster = Cluster::start(3).await;
    let limiter = on(&cluster);
    let ids = siblings(&cluster, 2);
    let held = hold(&limiter, &ids[0], 3).await;
    cluster
        .move_id(&ids[0], 0, 2, async || {
            assert_eq!(limiter.active(&ids[0]).await.unwrap(), 3, "it has not moved yet");
            assert_eq!(limiter.active(&ids[1]).await.unwrap(), 0, "it is asked for where it would be");
            let _other = hold(&limiter, &ids[1], 3).await;
            assert_eq!(limiter.active(&ids[1]).await.unwrap(), 3);
            assert_eq!(limiter.drain(&ids[0]).await.unwrap(), 3);
            // Long enough for renewals, which put nothing back.
            tokio::time::sleep(SECOND).await;
            assert_eq!(limiter.active(&ids[0]).await.unwrap(), 0);
        })
        .await;
    for slot in &held {
        tokio::time::timeout(SOON, slot.lost()).await.unwrap();
    }
    assert_eq!(limiter.active(&ids[0]).await.unwrap(), 0);
    empty(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_when_a_node_forgets_its_scripts() {
    let cluster = Cluster::start(3).await;
    let limiter = on(&cluster);
    let ids: Vec<_> = (0..30).map(|n| format!("id-{n}")).collect();
    let history = History::new();
    let end = Instant::now() + 2 * SECOND;
    let flushes = async {
        while Instant::now() < end {
            cluster.nodes[1].script_flush().await;
            tokio::time::sleep(20 * MS).await;
        }
    };
    let (served, ()) = tokio::join!(traffic(&limiter, &ids, &history, end), flushes);
    assert!(served > 500 && cluster.nodes[1].errors("NOSCRIPT").await > 5, "{served} served");
    empty(&cluster).await;
}

#[test]
fn a_store_moves_to_the_next_runtime_with_the_slots_it_holds() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let cluster = runtime().block_on(Cluster::start(2));
    let limiter = on(&cluster);
    let ids = [cluster.ids_on(0, 1).remove(0), cluster.ids_on(1, 1).remove(0)];
    let mut held = Vec::new();
    for n in 1..=3 {
        runtime().block_on(async {
            for id in &ids {
                let slot = limiter.try_acquire(id).await.unwrap();
                assert_eq!((slot.origin(), slot.active()), (Origin::Store, n));
                held.push(slot);
            }
            tokio::time::sleep(500 * MS).await;
        });
    }
    drop(held);
    runtime().block_on(async {
        assert!(limiter.active(&ids[0]).await.is_ok());
        empty(&cluster).await;
    });
}

// ---- nodes that are down

/// While a node is down its ids have an outage, and those of the other nodes have none.
async fn is_an_outage_of_its_own_ids(cluster: &Cluster, limiter: &Limiter, down: usize) {
    let lost = &cluster.ids_on(down, 2);
    let others: Vec<_> =
        (0..3).filter(|node| *node != down).flat_map(|node| cluster.ids_on(node, 3)).collect();
    let history = History::new();
    let end = Instant::now() + 4 * SECOND;
    let outage = async {
        let mut slowest = Duration::ZERO;
        for n in 0.. {
            let start = Instant::now();
            if start >= end {
                break;
            }
            error_of(limiter.try_acquire(&lost[n % 2]).await);
            if n > 10 {
                slowest = slowest.max(start.elapsed());
            }
            tokio::time::sleep(10 * MS).await;
        }
        judge_time(21, "the slowest call to the lost node took", slowest, 1500 * MS);
    };
    let (served, ()) = tokio::join!(traffic(limiter, &others, &history, end), outage);
    assert!(served > 500, "{served} served");
    for id in &others {
        judge(21, &history, id, &never_above(3));
    }
    assert!(limiter.active(&lost[0]).await.is_err());
}

#[tokio::test]
async fn fault_21_a_node_that_dies_is_an_outage_of_its_own_ids() {
    let cluster = Cluster::start(3).await;
    let limiter = on(&cluster);
    for node in 0..3 {
        granted(&limiter, &cluster.ids_on(node, 1)[0], SOON).await;
    }
    cluster.nodes[0].kill();
    is_an_outage_of_its_own_ids(&cluster, &limiter, 0).await;
}

#[tokio::test]
async fn fault_21_a_node_that_stands_still_is_an_outage_of_its_own_ids_until_it_goes_on() {
    let cluster = Cluster::start(3).await;
    let limiter = on(&cluster);
    for node in 0..3 {
        granted(&limiter, &cluster.ids_on(node, 1)[0], SOON).await;
    }
    let id = &cluster.ids_on(2, 1)[0];
    let slots = hold(&limiter, id, 2).await;
    cluster.nodes[2].stop();
    is_an_outage_of_its_own_ids(&cluster, &limiter, 2).await;
    cluster.nodes[2].cont();
    granted(&limiter, id, FAILOVER).await;
    eventually("its slots are put back", SOON, async || limiter.active(id).await.is_ok_and(|n| n == 2)).await;
    drop(slots);
    empty(&cluster).await;
}

#[tokio::test]
async fn fault_21_a_replica_that_is_promoted_has_all_slots_again_within_seconds() {
    let mut cluster = Cluster::start(3).await;
    let replica = cluster.add_replica_of(1).await;
    let limiter = on(&cluster);
    let id = &cluster.ids_on(1, 1)[0];
    let slots = hold(&limiter, id, 2).await;
    let (history, over, other) = (History::new(), Cell::new(false), on(&cluster));
    let visit = history.enter(id, 2);
    // Callers of another process.
    let callers = rows::traffic(&other, id, &history, 9, || !over.get());
    let fault = async {
        tokio::time::sleep(SECOND / 2).await;
        cluster.nodes[1].kill();
        let start = Instant::now();
        let answered = async || !matches!(limiter.try_acquire(id).await, Err(AcquireError::Unavailable(_)));
        eventually("the store answers", FAILOVER, answered).await;
        judge_time(21, "the replica answers after", start.elapsed(), FAILOVER);
        tokio::time::sleep(SECOND).await;
        over.set(true);
    };
    let (tally, ()) = tokio::join!(callers, fault);
    assert!(tally.served > 0 && tally.refused > 0, "{tally:?}");
    // Writes may be lost, and the two may follow seconds apart; then it takes a third of a lease.
    judge(21, &history, id, &Bound { limit: 3, most: 6, above: 6 * SECOND });
    assert!(other.shutdown(SOON).await);
    let replica = &cluster.nodes[replica];
    eventually("its slots are put back", SOON, async || replica.zcard(&key(id)).await == 2).await;
    drop((visit, slots));
    eventually("its slots are given back", SOON, async || replica.zcard(&key(id)).await == 0).await;
    assert!(limiter.shutdown(SOON).await);
}

#[tokio::test]
async fn what_no_node_serves_is_an_outage_that_says_so_until_one_does() {
    let cluster = Cluster::start(2).await;
    let limiter = on(&cluster);
    let (id, other) = (&cluster.ids_on(0, 1)[0], &cluster.ids_on(1, 1)[0]);
    let slot = hash_slot(id).to_string();
    for node in &cluster.nodes {
        node.command(&["CLUSTER", "DELSLOTS", &slot]).await;
    }
    let start = Instant::now();
    while start.elapsed() < SECOND {
        let error = error_of(limiter.try_acquire(id).await);
        assert!(
            error.kind() == StoreErrorKind::Cluster && error.to_string().contains("hash slot"),
            "{error}"
        );
        assert!(limiter.active(id).await.is_err());
        hold(&limiter, other, 1).await;
        tokio::time::sleep(10 * MS).await;
    }
    cluster.nodes[1].command(&["CLUSTER", "ADDSLOTS", &slot]).await;
    granted(&limiter, id, SOON).await;
    empty(&cluster).await;
}

// ---- addresses and rights

#[tokio::test]
async fn what_is_no_cluster_is_an_outage_that_says_so() {
    let dead = format!("redis://127.0.0.1:{}/", free_port());
    // A caller waits for some more tries before it is told.
    let patient = at(&dead).store_timeout(2 * SECOND).build().unwrap();
    let error = error_of(patient.try_acquire("acme").await);
    assert_eq!(error.kind(), StoreErrorKind::Io, "{error}");
    let server = RedisServer::start();
    let error = error_of(at(&server.url()).build().unwrap().try_acquire("acme").await);
    assert!(
        error.kind() == StoreErrorKind::Cluster && error.to_string().contains("RedisStore::open"),
        "{error}"
    );
    let none: [&str; 0] = [];
    assert!(RedisStore::cluster(none).is_err());
    assert!(RedisStore::cluster(["http://127.0.0.1"]).is_err());
}

#[tokio::test]
async fn one_address_that_works_is_enough_and_a_single_server_is_told_of_clusters() {
    let cluster = Cluster::start(2).await;
    let dead = format!("redis://127.0.0.1:{}/", free_port());
    let store = RedisStore::cluster([dead, cluster.url()]).unwrap();
    let limiter = Limiter::builder(store).limit(3).on_outage(OnOutage::Refuse).build().unwrap();
    for node in 0..2 {
        granted(&limiter, &cluster.ids_on(node, 1)[0], SOON).await;
    }
    let single = Limiter::builder(RedisStore::open(cluster.url()).unwrap()).limit(3);
    let single = single.on_outage(OnOutage::Refuse).build().unwrap();
    let error = error_of(single.try_acquire(&cluster.ids_on(1, 1)[0]).await);
    assert!(
        error.kind() == StoreErrorKind::Cluster && error.to_string().contains("with RedisStore::cluster"),
        "{error}"
    );
}

/// What a node says no to by its hash, is not asked again in full: neither of one script, nor of
/// several in a message, nor where another node sent us.
#[tokio::test]
async fn a_script_goes_whole_to_a_node_that_does_not_know_it_and_to_no_other() {
    let cluster = Cluster::start(2).await;
    let allow = async |node: usize, rule| {
        cluster.nodes[node].command(&["ACL", "SETUSER", "slots", "on", ">pass", "~*", "+@all", rule]).await;
    };
    for node in 0..2 {
        allow(node, "+evalsha").await;
    }
    let limiter = at(&cluster.url().replace("//", "//slots:pass@")).store_timeout(900 * MS).build().unwrap();
    let (many, moving) = (cluster.ids_on(0, 100), siblings(&cluster, 2));
    let ask_all = async || join_all(many.iter().map(|id| limiter.try_acquire(id))).await;
    assert!(ask_all().await.iter().all(Result::is_ok));
    granted(&limiter, &cluster.ids_on(1, 1)[0], SOON).await;
    let whole = async |node: usize| cluster.nodes[node].calls("eval").await;
    let known = (whole(0).await, whole(1).await);
    assert!(known.0 > 0 && known.1 > 0, "{known:?}");

    allow(0, "-evalsha").await;
    for denied in ask_all().await {
        assert_eq!(error_of(denied).kind(), StoreErrorKind::NoPerm);
    }
    assert_eq!(whole(0).await, known.0);
    allow(0, "+evalsha").await;
    granted(&limiter, &many[0], SOON).await;
    cluster
        .move_id(&moving[0], 0, 1, async || {
            allow(1, "-evalsha").await;
            assert_eq!(error_of(limiter.try_acquire(&moving[1]).await).kind(), StoreErrorKind::NoPerm);
            assert_eq!(whole(1).await, known.1);
            allow(1, "+evalsha").await;
            cluster.nodes[1].command(&["SCRIPT", "FLUSH"]).await;
            granted(&limiter, &moving[1], SOON).await;
            assert!(whole(1).await > known.1);
        })
        .await;
}

#[tokio::test]
async fn the_documented_rights_are_enough() {
    let cluster = Cluster::start(2).await;
    let rights = "~sem:* ~{sem:* +eval +evalsha +time +get +set +del +zadd +zcard +zcount +zmscore +zrem \
                  +zremrangebyscore +pttl +pexpire +cluster|slots +asking";
    let user: Vec<_> =
        ["ACL", "SETUSER", "slots", "on", ">pass"].into_iter().chain(rights.split(' ')).collect();
    for node in &cluster.nodes {
        node.command(&user).await;
    }
    let url = cluster.url().replace("//", "//slots:pass@");
    let limiter = at(&url).lease(SECOND).store_timeout(900 * MS).build().unwrap();
    let ids = siblings(&cluster, 2);
    let slots = hold(&limiter, &ids[0], 3).await;
    cluster.move_id(&ids[0], 0, 1, async || drop(hold(&limiter, &ids[1], 3).await)).await;
    assert_eq!(limiter.active(&ids[0]).await.unwrap(), 3);
    assert_eq!(limiter.drain(&ids[0]).await.unwrap(), 3);
    drop(slots);
    cluster.nodes[0].command(&["ACL", "SETUSER", "slots", "-cluster|slots"]).await;
    let blind = at(&url).build().unwrap();
    assert_eq!(error_of(blind.try_acquire("acme").await).kind(), StoreErrorKind::NoPerm);
}

//! Random sequences of store operations: memory, a real Redis and a model of a few lines agree.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use support::RedisServer;
use tower_slots::store::{Claim, Grant, Key, SlotId, SlotStore, Terms};
use tower_slots::{MemoryStore, RedisStore};

/// What happens to one of a few keys, and for some to one of its few slots.
#[derive(Debug, Clone)]
enum Operation {
    /// Of a slot that may be held already; then it is the same claim again.
    Acquire {
        slot: usize,
        weight: u32,
    },
    /// Several at once, so that one call carries more than one.
    Burst(Vec<(usize, u32)>),
    /// Of a slot that may not be held, or not any more.
    Release {
        slot: usize,
    },
    Drain,
    Count,
    SetLimit(u32),
}

const KEYS: usize = 3;
const SLOTS: usize = 8;

fn operation() -> impl Strategy<Value = Operation> {
    // Small weights, and now and then one of many members.
    let weight = || prop_oneof![9 => 1..5u32, 1 => Just(1024u32)];
    let slots = (0..SLOTS).collect::<Vec<_>>();
    let burst = (Just(slots).prop_shuffle(), prop::collection::vec(weight(), 3..=SLOTS));
    prop_oneof![
        4 => burst.prop_map(|(slots, weights)| Operation::Burst(slots.into_iter().zip(weights).collect())),
        8 => (0..SLOTS, weight()).prop_map(|(slot, weight)| Operation::Acquire { slot, weight }),
        5 => (0..SLOTS).prop_map(|slot| Operation::Release { slot }),
        1 => Just(Operation::Drain),
        2 => Just(Operation::Count),
        2 => prop_oneof![4 => 0..16u32, 1 => Just(2000)].prop_map(Operation::SetLimit),
    ]
}

/// The rules, as plainly as they can be written.
#[derive(Default)]
struct Model {
    held: HashMap<(usize, usize), u32>,
}

impl Model {
    fn count(&self, key: usize) -> u32 {
        self.held.iter().filter(|((of, _), _)| *of == key).map(|(_, weight)| weight).sum()
    }

    fn acquire(&mut self, key: usize, slot: usize, weight: u32, limit: u32) -> Grant {
        let active = self.count(key);
        if self.held.contains_key(&(key, slot)) {
            return Grant::Granted { active };
        }
        if active + weight > limit {
            return Grant::Refused { active };
        }
        self.held.insert((key, slot), weight);
        Grant::Granted { active: active + weight }
    }

    fn drain(&mut self, key: usize) -> u32 {
        let dropped = self.count(key);
        self.held.retain(|(of, _), _| *of != key);
        dropped
    }
}

/// A store under test: every answer as text, so that all stores can be compared.
struct Subject {
    name: &'static str,
    store: Arc<dyn SlotStore>,
    /// Slots of the keys, by the claim that was made last: an id is never used for another weight.
    slots: HashMap<(usize, usize), (SlotId, u32)>,
    prefix: String,
    terms: Arc<Terms>,
    model: Model,
}

impl Subject {
    fn new(name: &'static str, store: Arc<dyn SlotStore>) -> Self {
        let terms = Arc::new(Terms::new(Duration::from_secs(30), Duration::from_secs(5)));
        let prefix = format!("{:016x}:", support::random());
        Self { name, store, slots: HashMap::new(), prefix, terms, model: Model::default() }
    }

    fn key(&self, key: usize) -> Key {
        Key::new(format!("{}{key}", self.prefix))
    }

    async fn acquire(&mut self, key: usize, claims: &[(usize, u32)], limit: u32) -> Vec<Grant> {
        let mut replies = Vec::new();
        for &(slot, weight) in claims {
            let (slot, weight) = *self.slots.entry((key, slot)).or_insert_with(|| (SlotId::new(), weight));
            let claim = Claim::new(self.key(key), slot, weight, limit, &self.terms);
            replies.push(self.store.acquire(claim));
        }
        let grants = join_all(replies).await.into_iter();
        grants.map(|grant| grant.unwrap_or_else(|error| panic!("{}: {error}", self.name))).collect()
    }

    async fn release(&self, key: usize, slot: usize) {
        let Some((slot, _)) = self.slots.get(&(key, slot)) else { return };
        let released = self.store.release_confirmed(&self.key(key), *slot).await;
        released.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    async fn count(&self, key: usize) -> u32 {
        let count = self.store.count(&self.key(key), &self.terms).await;
        count.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    async fn drain(&self, key: usize) -> u32 {
        let dropped = self.store.drain(&self.key(key), &self.terms).await;
        dropped.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

macro_rules! same {
    ($left:expr, $right:expr, $($what:tt)+) => {{
        let (left, right) = ($left, $right);
        if left != right {
            return Err(TestCaseError::fail(format!("{}: {left:?}, the model says {right:?}", format!($($what)+))));
        }
    }};
}

async fn step(
    subject: &mut Subject,
    key: usize,
    operation: &Operation,
    limit: u32,
    what: &str,
) -> Result<(), TestCaseError> {
    match operation {
        &Operation::Acquire { slot, weight } => {
            let grants = subject.acquire(key, &[(slot, weight)], limit).await;
            let weight = subject.slots[&(key, slot)].1;
            same!(grants, [subject.model.acquire(key, slot, weight, limit)], "{what}");
        }
        // Claims that are made at once may be served in any order, so what is due is that one order
        // explains the answers: the granted ones first, then the refused ones, which do not fit.
        Operation::Burst(claims) => {
            let grants = subject.acquire(key, claims, limit).await;
            let granted = |grant: &Grant| matches!(grant, Grant::Granted { .. });
            let mut claims: Vec<_> = claims.iter().map(|(slot, _)| *slot).zip(grants).collect();
            claims.sort_by_key(|(_, grant)| !granted(grant));
            for (slot, grant) in &claims {
                let weight = subject.slots[&(key, *slot)].1;
                let expected = subject.model.acquire(key, *slot, weight, limit);
                same!(granted(grant), granted(&expected), "slot {slot} of {what}");
            }
        }
        &Operation::Release { slot } => {
            subject.model.held.remove(&(key, slot));
            subject.release(key, slot).await;
        }
        Operation::Drain => {
            let dropped = subject.drain(key).await;
            same!(dropped, subject.model.drain(key), "{what}");
        }
        Operation::Count | Operation::SetLimit(_) => {}
    }
    Ok(())
}

async fn check(
    server: &RedisServer,
    redis: &RedisStore,
    operations: &[(usize, Operation)],
) -> Result<(), TestCaseError> {
    let mut limits = [3; KEYS];
    let mut subjects = [
        Subject::new("memory", Arc::new(MemoryStore::new())),
        Subject::new("redis", Arc::new(redis.clone())),
    ];
    for (at, (key, operation)) in operations.iter().enumerate() {
        for subject in &mut subjects {
            let what = format!("{} at step {at}, {operation:?} of key {key}", subject.name);
            step(subject, *key, operation, limits[*key], &what).await?;
            same!(subject.count(*key).await, subject.model.count(*key), "the count after {what}");
        }
        if let Operation::SetLimit(limit) = operation {
            limits[*key] = *limit;
        }
    }
    for subject in &subjects {
        for (key, slot) in subject.slots.keys() {
            subject.store.release(&subject.key(*key), subject.slots[&(*key, *slot)].0);
        }
        subject.store.flush().await;
        for key in 0..KEYS {
            same!(subject.count(key).await, 0, "what is left of key {key} in {}", subject.name);
        }
    }
    for key in 0..KEYS {
        let left = server.zcard(subjects[1].key(key).as_str()).await;
        same!(left, 0, "members left under key {key}");
    }
    Ok(())
}

#[test]
fn memory_redis_and_the_model_agree_on_every_step() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RedisServer::start();
    let redis = {
        let _on = runtime.enter();
        RedisStore::open(server.url()).unwrap()
    };
    let config =
        Config { cases: 150, max_shrink_time: 20_000, failure_persistence: None, ..Config::default() };
    let operations = prop::collection::vec((0..KEYS, operation()), 1..80);
    TestRunner::new(config)
        .run(&operations, |operations| runtime.block_on(check(&server, &redis, &operations)))
        .unwrap_or_else(|error| panic!("{error}"));
}

/// A reply that is never polled, as when a request is dropped before its first poll.
#[tokio::test]
async fn an_acquire_that_is_dropped_before_its_first_poll_leaves_nothing_behind() {
    let server = RedisServer::start();
    let redis = RedisStore::open(server.url()).unwrap();
    for store in [Arc::new(MemoryStore::new()) as Arc<dyn SlotStore>, Arc::new(redis)] {
        let (key, terms) =
            (Key::new("a"), Arc::new(Terms::new(Duration::from_secs(30), Duration::from_secs(1))));
        assert_eq!(store.count(&key, &terms).await.unwrap(), 0);
        for _ in 0..10 {
            let slot = SlotId::new();
            drop(store.acquire(Claim::new(key.clone(), slot, 1, 100, &terms)));
            store.release(&key, slot);
        }
        tokio::time::timeout(Duration::from_secs(5), store.flush()).await.expect("all is given back");
        let claim = Claim::new(key.clone(), SlotId::new(), 1, 1, &terms);
        assert_eq!(store.acquire(claim).await.unwrap(), Grant::Granted { active: 1 });
    }
}

/// As in a stream of buffered futures while its consumer is busy.
#[tokio::test]
async fn acquires_that_nobody_polls_any_more_do_not_keep_a_release_from_the_server() {
    let server = RedisServer::start();
    let store = RedisStore::open(server.url()).unwrap();
    let (key, terms) =
        (Key::new("a"), Arc::new(Terms::new(Duration::from_secs(30), Duration::from_secs(10))));
    let claim = || Claim::new(key.clone(), SlotId::new(), 1, 100, &terms);
    let held = claim();
    let (slot, mut stuck) = (held.slot, Vec::new());
    store.acquire(held).await.unwrap();
    // As many as there are flights.
    for _ in 0..2 {
        let mut reply = store.acquire(claim());
        assert!((&mut reply).now_or_never().is_none());
        stuck.push(reply);
    }
    store.release(&key, slot);
    let is_held = async || server.members("a").await.iter().any(|(member, _)| *member == slot.to_string());
    support::eventually("the slot is given back", Duration::from_secs(2), async || !is_held().await).await;
    assert!(join_all(stuck).await.iter().all(Result::is_ok));
}

/// Limiters of two names on one store: an outage of the store is both's.
#[cfg(feature = "metrics")]
#[tokio::test]
async fn every_limiter_on_a_store_shows_whether_it_is_up() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    let server = RedisServer::start();
    let redis = RedisStore::open(server.url()).unwrap();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let limiters = metrics::with_local_recorder(&recorder, || {
        ["first", "second"]
            .map(|name| tower_slots::Limiter::builder(redis.clone()).name(name).build().unwrap())
    });
    let gauges = |name: &str| {
        let mut found = HashMap::new();
        for (key, _, _, value) in snapshotter.snapshot().into_vec() {
            if let (true, DebugValue::Gauge(value)) = (key.key().name() == name, value) {
                let policy = key.key().labels().find(|label| label.key() == "policy").expect("a policy");
                found.insert(policy.value().to_owned(), value.into_inner());
            }
        }
        [found["first"], found["second"]]
    };
    for limiter in &limiters {
        drop(limiter.try_acquire("acme").await.unwrap());
    }
    assert_eq!(gauges("tower_slots_store_up"), [1.0, 1.0]);
    server.kill();
    support::eventually("both show the breaker open", Duration::from_secs(5), async || {
        drop(limiters[0].try_acquire("acme").await);
        gauges("tower_slots_breaker_state") == [2.0, 2.0]
    })
    .await;
}

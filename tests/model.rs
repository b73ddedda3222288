//! Random sequences of store operations: memory, a real Redis and a model of a few lines agree.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use support::RedisServer;
use tower_slots::store::{Claim, Grant, Key, SlotId, SlotStore, Terms};
use tower_slots::{MemoryStore, RedisStore};

/// What happens to one of a few keys, and for some to one of its few slots.
#[derive(Debug, Clone, Copy)]
enum Operation {
    /// Of a slot that may be held already; then it is the same claim again.
    Acquire {
        slot: usize,
        weight: u32,
    },
    /// Of a slot that may not be held, or not any more.
    Release {
        slot: usize,
    },
    Drain,
    Count,
    SetLimit(u32),
}

const KEYS: usize = 3;
const SLOTS: usize = 6;

fn operation() -> impl Strategy<Value = Operation> {
    // Small weights, and now and then one of many members.
    let weight = prop_oneof![9 => 1..5u32, 1 => Just(1024u32)];
    prop_oneof![
        8 => (0..SLOTS, weight).prop_map(|(slot, weight)| Operation::Acquire { slot, weight }),
        5 => (0..SLOTS).prop_map(|slot| Operation::Release { slot }),
        1 => Just(Operation::Drain),
        2 => Just(Operation::Count),
        2 => prop_oneof![4 => 0..8u32, 1 => Just(2000)].prop_map(Operation::SetLimit),
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
}

impl Subject {
    fn new(name: &'static str, store: Arc<dyn SlotStore>) -> Self {
        let terms = Arc::new(Terms::new(Duration::from_secs(30), Duration::from_secs(5)));
        Self { name, store, slots: HashMap::new(), prefix: format!("{:016x}:", support::random()), terms }
    }

    fn key(&self, key: usize) -> Key {
        Key::new(format!("{}{key}", self.prefix))
    }

    async fn acquire(&mut self, key: usize, slot: usize, weight: u32, limit: u32) -> Grant {
        let (slot, weight) = *self.slots.entry((key, slot)).or_insert_with(|| (SlotId::new(), weight));
        let claim = Claim::new(self.key(key), slot, weight, limit, &self.terms);
        self.store.acquire(claim).await.unwrap_or_else(|error| panic!("{}: {error}", self.name))
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

async fn check(
    server: &RedisServer,
    redis: &RedisStore,
    operations: &[(usize, Operation)],
) -> Result<(), TestCaseError> {
    let mut model = Model::default();
    let mut limits = [3; KEYS];
    let mut subjects = [
        Subject::new("memory", Arc::new(MemoryStore::new())),
        Subject::new("redis", Arc::new(redis.clone())),
    ];
    for (at, (key, operation)) in operations.iter().copied().enumerate() {
        let what = |subject: &Subject| format!("{} at step {at}, {operation:?} of key {key}", subject.name);
        match operation {
            Operation::Acquire { slot, weight } => {
                let weight = subjects[0].slots.get(&(key, slot)).map_or(weight, |(_, weight)| *weight);
                let expected = model.acquire(key, slot, weight, limits[key]);
                for subject in &mut subjects {
                    let what = what(subject);
                    same!(subject.acquire(key, slot, weight, limits[key]).await, expected, "{what}");
                }
            }
            Operation::Release { slot } => {
                model.held.remove(&(key, slot));
                for subject in &subjects {
                    subject.release(key, slot).await;
                    same!(subject.count(key).await, model.count(key), "the count of {}", what(subject));
                }
            }
            Operation::Drain => {
                let expected = model.drain(key);
                for subject in &subjects {
                    same!(subject.drain(key).await, expected, "{}", what(subject));
                }
            }
            Operation::Count => {
                for subject in &subjects {
                    same!(subject.count(key).await, model.count(key), "{}", what(subject));
                }
            }
            Operation::SetLimit(limit) => limits[key] = limit,
        }
    }
    for key in 0..KEYS {
        for subject in &subjects {
            same!(
                subject.count(key).await,
                model.count(key),
                "the last count of key {key} in {}",
                subject.name
            );
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

//! The limiter's policy, over slots in memory: settings, ids, weights, limits and where they come
//! from, the guards, shutdown and metrics.

mod support;

use std::collections::HashSet;
use std::future::pending;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use support::Watched;
use tokio::sync::Semaphore;
use tokio::time::{Instant, advance, sleep, timeout};
use tower_slots::store::{Claim, Grant, Holder, Key, Lost, SlotId, SlotStore, StoreError, Terms};
use tower_slots::{
    Acquire, AcquireError, KeyError, Limit, LimitSource, Limiter, LimiterBuilder, MemoryStore, OnOutage,
    Origin, ProjectId, Slot,
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn builder() -> LimiterBuilder {
    Limiter::builder(MemoryStore::new())
}

fn limiter(limit: u32) -> Limiter {
    builder().limit(limit).build().unwrap()
}

fn with_source(source: impl LimitSource) -> Limiter {
    builder().limit(7).limits(source).build().unwrap()
}

/// The limit that the next request of `id` is measured by.
async fn limit_of(limiter: &Limiter, id: &str) -> Limit {
    limiter.try_acquire(id).await.unwrap().limit()
}

#[track_caller]
fn assert_saturated(result: Result<Slot, AcquireError>, at: (u32, u32)) {
    match result {
        Err(AcquireError::Saturated { active, limit, .. }) => assert_eq!((active, limit), at),
        other => panic!("expected saturation at {at:?}, got {other:?}"),
    }
}

mod settings {
    use super::*;

    #[test]
    fn that_cannot_work_are_refused_by_name() {
        type Change = fn(LimiterBuilder) -> LimiterBuilder;
        let cases: [(&str, Change); 28] = [
            ("name", |b| b.name("")),
            ("name", |b| b.name("a\"b")),
            ("name", |b| b.name("a\\b")),
            ("name", |b| b.name("a\nb")),
            ("name", |b| b.name("ä")),
            ("limit", |b| b.limit(Limit::Default)),
            ("limit_cache", |b| b.limit_cache(MINUTE, 0)),
            ("lease", |b| b.lease(Duration::ZERO)),
            ("lease", |b| b.lease(SECOND - MS)),
            ("lease", |b| b.lease(24 * 60 * MINUTE + MS)),
            ("lease", |b| b.lease(Duration::MAX)),
            ("max_hold", |b| b.max_hold(Duration::ZERO)),
            ("max_weight", |b| b.max_weight(0)),
            ("max_weight", |b| b.max_weight(1025)),
            ("prefix", |b| b.prefix("{")),
            ("prefix", |b| b.prefix("a}")),
            ("prefix", |b| b.prefix("a b")),
            ("prefix", |b| b.prefix("a\n")),
            ("prefix", |b| b.prefix("a\x7f")),
            ("prefix", |b| b.prefix("ä:")),
            ("prefix", |b| b.prefix("x".repeat(65))),
            ("store_timeout", |b| b.store_timeout(Duration::ZERO)),
            ("store_timeout", |b| b.lease(SECOND).store_timeout(SECOND)),
            ("store_timeout", |b| b.store_timeout(MINUTE)),
            ("on_outage", |b| b.on_outage(OnOutage::Local { share: -0.1 })),
            ("on_outage", |b| b.on_outage(OnOutage::Local { share: 1.1 })),
            ("on_outage", |b| b.on_outage(OnOutage::Local { share: f64::NAN })),
            ("on_outage", |b| b.on_outage(OnOutage::Local { share: f64::INFINITY })),
        ];
        for (at, (field, change)) in cases.into_iter().enumerate() {
            let error = change(builder()).build().expect_err("the setting cannot work");
            assert_eq!(error.field(), field, "case {at}: {error}");
            assert_eq!(error.to_string(), format!("{field}: {}", error.problem()));
        }
    }

    #[test]
    fn at_their_bounds_are_accepted() {
        type Change = fn(LimiterBuilder) -> LimiterBuilder;
        let cases: [(&str, Change); 15] = [
            ("defaults", |b| b),
            ("shortest name", |b| b.name("a")),
            ("name with a space", |b| b.name("per project")),
            ("limit 0", |b| b.limit(0)),
            ("unlimited", |b| b.limit(Limit::Unlimited)),
            ("cache of one, for no time", |b| b.limit_cache(Duration::ZERO, 1)),
            ("shortest lease", |b| b.lease(SECOND)),
            ("longest lease", |b| b.lease(24 * 60 * MINUTE)),
            ("shortest hold", |b| b.max_hold(MS)),
            ("least weight", |b| b.max_weight(1)),
            ("most weight", |b| b.max_weight(1024)),
            ("no prefix", |b| b.prefix("")),
            ("longest prefix", |b| b.prefix("x".repeat(64))),
            ("longest time-out", |b| b.lease(SECOND).store_timeout(SECOND - MS)),
            ("share 0 and 1", |b| {
                b.on_outage(OnOutage::Local { share: 0.0 }).on_outage(OnOutage::Local { share: 1.0 })
            }),
        ];
        for (what, change) in cases {
            if let Err(error) = change(builder()).build() {
                panic!("{what}: {error}");
            }
        }
    }

    #[tokio::test]
    async fn of_endless_times_mean_for_ever() {
        let limiter = builder()
            .max_hold(Duration::MAX)
            .limit_cache(Duration::MAX, 10)
            .limits(|_| async { 1 })
            .build()
            .unwrap();
        let slot = limiter.try_acquire("acme").await.unwrap();
        assert_eq!(slot.lost().now_or_never(), None);
        assert_saturated(limiter.try_acquire("acme").await, (1, 1));
        drop(slot);
        assert!(limiter.shutdown(Duration::MAX).await);
    }

    #[tokio::test(start_paused = true)]
    async fn of_any_shorter_time_mean_that_time() {
        let year = 365 * 24 * 60 * MINUTE;
        let limiter = builder().max_hold(99 * year).limit(1).build().unwrap();
        let slot = limiter.try_acquire("acme").await.unwrap();
        advance(98 * year).await;
        assert_saturated(limiter.try_acquire("acme").await, (1, 1));
        advance(year).await;
        assert!(limiter.try_acquire("acme").await.is_ok());
        assert_eq!(slot.lost().now_or_never(), Some(()));
    }
}

mod errors {
    use std::error::Error;

    use tower_slots::store::StoreErrorKind;

    use super::*;

    #[test]
    fn say_what_was_wrong_and_name_their_source() {
        let unavailable = StoreError::new(StoreErrorKind::Io, "no route to it");
        let key = ProjectId::new("").unwrap_err();
        let saturated = AcquireError::Saturated { active: 3, limit: 4, retry_after: SECOND };
        for (error, shown, source) in [
            (saturated, "concurrency limit reached: 3 of 4 slots in use", None),
            (
                AcquireError::Unavailable(unavailable.clone()),
                "the slot store is unavailable and the limiter refuses in an outage",
                Some(unavailable.to_string()),
            ),
            (
                AcquireError::Weight { weight: 0, most: 8 },
                "weight 0 is not a weight: ask for at least 1",
                None,
            ),
            (
                AcquireError::Weight { weight: 9, most: 8 },
                "weight 9 can never be admitted: at most 8 can",
                None,
            ),
            (AcquireError::Key(key), "the project id is unusable", Some(key.to_string())),
            (AcquireError::Closed, "the limiter is shutting down", None),
        ] {
            assert_eq!(error.to_string(), shown);
            assert_eq!(error.source().map(ToString::to_string), source);
        }
    }
}

mod ids {
    use super::*;

    #[tokio::test]
    async fn of_1_to_128_bytes_are_accepted_and_no_others() {
        let limiter = limiter(1);
        for id in ["a", &"x".repeat(128), &"ä".repeat(64), "\0", "{", " "] {
            assert!(limiter.try_acquire(id).await.is_ok(), "{id:?}");
        }
        for (id, error) in [
            (String::new(), KeyError::Empty),
            ("x".repeat(129), KeyError::TooLong),
            ("ä".repeat(65), KeyError::TooLong),
        ] {
            let refusals = [
                limiter.try_acquire(&id).await.err(),
                limiter.active(&id).await.err(),
                limiter.drain(&id).await.err(),
            ];
            for refusal in refusals {
                match refusal {
                    Some(AcquireError::Key(found)) => assert_eq!(found, error),
                    other => panic!("{id:?}: {other:?}"),
                }
            }
            limiter.invalidate(&id);
        }
    }

    #[tokio::test]
    async fn of_plain_text_name_their_key_byte_by_byte() {
        let store = Watched::default();
        let limiter = Limiter::builder(store.clone()).prefix("sem:").build().unwrap();
        let plain = "AZ.az_09~:@-";
        drop(limiter.try_acquire(plain).await.unwrap());
        assert_eq!(store.keys(), [format!("sem:{plain}")]);
    }

    #[tokio::test]
    async fn that_differ_never_share_a_key() {
        let store = Watched::default();
        let limiter = Limiter::builder(store.clone()).limit(1).build().unwrap();
        let mut ids: Vec<String> = (0..=127u8).map(|byte| char::from(byte).to_string()).collect();
        ids.extend(ids.clone().iter().map(|id| format!("a{id}")));
        ids.extend((0..=255).map(|byte| format!("%{byte:02X}")));
        ids.extend((0..=255).map(|byte| format!("%25{byte:02X}")));
        ids.extend((0x61..=0x7a).map(|byte| format!("%{byte:02x}")));
        for id in [
            "ä",
            "a\u{308}",
            "Ä",
            "%C3%A4",
            "é",
            "日本",
            "a{b}",
            "{a}b",
            "{a}:drained",
            "a:drained",
            "a b",
            "a+b",
        ] {
            ids.push(id.to_owned());
        }
        let ids: HashSet<String> = ids.into_iter().collect();
        let mut slots = Vec::new();
        for id in &ids {
            slots.push(limiter.try_acquire(id).await.unwrap_or_else(|error| panic!("{id:?}: {error}")));
        }
        let keys = store.keys();
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), ids.len());
        for key in keys {
            assert!(key.bytes().all(|b| b.is_ascii_graphic() && b != b'{' && b != b'}'), "{key:?}");
        }
    }

    #[tokio::test]
    async fn do_not_show_in_debug_output() {
        let limiter = with_source(|_| async { 3 });
        let slot = limiter.try_acquire("secret").await.unwrap();
        let held = slot.handle().hold().unwrap();
        let saturated = {
            let _rest = limiter.acquire("secret", Acquire::weight(2)).await.unwrap();
            limiter.try_acquire("secret").await.unwrap_err()
        };
        let claim = Claim::new(Key::new("sem:secret"), slot.id(), 1, 1, &terms());
        let texts = [
            format!("{limiter:?} {slot:?} {:?} {held:?} {claim:?}", slot.handle()),
            format!("{saturated:?} {saturated}"),
            format!("{:?} {:?}", ProjectId::new("secret").unwrap(), Key::new("secret")),
            format!("{:?}", builder()),
        ];
        for text in texts {
            assert!(!text.contains("secret"), "{text}");
        }
    }
}

mod weights {
    use super::*;

    #[track_caller]
    fn assert_impossible(result: Result<Slot, AcquireError>, at: (u32, u32)) {
        match result {
            Err(AcquireError::Weight { weight, most }) => assert_eq!((weight, most), at),
            other => panic!("expected an impossible weight {at:?}, got {other:?}"),
        }
    }

    #[tokio::test]
    async fn that_can_never_fit_are_refused_without_asking_the_store() {
        let store = Watched::default();
        let limiter = Limiter::builder(store.clone()).limit(5).max_weight(8).build().unwrap();
        for (weight, most) in [(0, 8), (9, 8), (u32::MAX, 8), (6, 5), (8, 5)] {
            assert_impossible(limiter.acquire("acme", Acquire::weight(weight)).await, (weight, most));
        }
        assert!(store.keys().is_empty());
        assert_eq!(limiter.acquire("acme", Acquire::weight(5)).await.unwrap().weight(), 5);
    }

    #[tokio::test]
    async fn are_taken_whole_or_not_at_all() {
        let limiter = limiter(5);
        let three = limiter.acquire("acme", Acquire::weight(3)).await.unwrap();
        assert_saturated(limiter.acquire("acme", Acquire::weight(3)).await, (3, 5));
        assert_eq!(limiter.active("acme").await.unwrap(), 3);
        let two = limiter.acquire("acme", Acquire::weight(2)).await.unwrap();
        assert_eq!((three.active(), two.active()), (3, 5));
        drop(three);
        assert_eq!(limiter.active("acme").await.unwrap(), 2);
    }

    #[tokio::test]
    async fn on_a_paused_id_are_refused_for_now_only() {
        let limiter = limiter(0);
        assert_saturated(limiter.acquire("acme", Acquire::weight(3)).await, (0, 0));
        assert_saturated(limiter.try_acquire("acme").await, (0, 0));
    }

    #[tokio::test]
    async fn do_not_bound_an_unlimited_id_beyond_the_limiters_own_bound() {
        let limiter = builder().limit(Limit::Unlimited).max_weight(4).build().unwrap();
        assert_eq!(limiter.acquire("acme", Acquire::weight(4)).await.unwrap().weight(), 4);
        assert_impossible(limiter.acquire("acme", Acquire::weight(5)).await, (5, 4));
    }
}

mod limits {
    use super::*;

    #[test]
    fn compare_with_numbers() {
        assert_eq!(Limit::Max(3), 3);
        assert_ne!(Limit::Max(3), 4);
        assert_ne!(Limit::Unlimited, u32::MAX);
    }

    /// A limiter whose limit can be changed from outside at any time.
    fn adjustable(store: impl SlotStore) -> (Limiter, impl Fn(Limit)) {
        let limit = Arc::new(Mutex::new(Limit::Max(3)));
        let read = Arc::clone(&limit);
        let source = move |_| {
            let now = *read.lock().unwrap();
            async move { now }
        };
        let limiter = Limiter::builder(store).limit(7).limits(source).build().unwrap();
        let handle = limiter.clone();
        let set = move |new| {
            *limit.lock().unwrap() = new;
            handle.invalidate("acme");
        };
        (limiter, set)
    }

    #[tokio::test]
    async fn lowered_end_nobody_and_admit_nobody_until_use_is_below() {
        let (limiter, set) = adjustable(MemoryStore::new());
        let mut slots = Vec::new();
        for _ in 0..3 {
            slots.push(limiter.try_acquire("acme").await.unwrap());
        }
        set(Limit::Max(2));
        assert!(slots.iter().all(|slot| slot.lost().now_or_never().is_none()));
        for active in [3, 2] {
            assert_saturated(limiter.try_acquire("acme").await, (active, 2));
            slots.pop();
        }
        assert_eq!(limiter.try_acquire("acme").await.unwrap().active(), 2);
    }

    #[tokio::test]
    async fn raised_admit_at_once() {
        let (limiter, set) = adjustable(MemoryStore::new());
        let _three = limiter.acquire("acme", Acquire::weight(3)).await.unwrap();
        assert_saturated(limiter.try_acquire("acme").await, (3, 3));
        set(Limit::Max(4));
        assert_eq!(limiter.try_acquire("acme").await.unwrap().active(), 4);
    }

    #[tokio::test]
    async fn of_zero_pause_an_id() {
        let (limiter, set) = adjustable(MemoryStore::new());
        let slot = limiter.try_acquire("acme").await.unwrap();
        set(Limit::Max(0));
        assert_saturated(limiter.try_acquire("acme").await, (1, 0));
        drop(slot);
        assert_saturated(limiter.try_acquire("acme").await, (0, 0));
        set(Limit::Max(1));
        assert!(limiter.try_acquire("acme").await.is_ok());
    }

    #[tokio::test]
    async fn that_are_none_admit_without_asking_the_store() {
        let store = Watched::default();
        let (limiter, set) = adjustable(store.clone());
        set(Limit::Unlimited);
        let slots = join_all((0..100).map(|_| limiter.try_acquire("acme"))).await;
        for slot in &slots {
            let slot = slot.as_ref().unwrap();
            assert_eq!(
                (slot.origin(), slot.limit(), slot.active()),
                (Origin::Unlimited, Limit::Unlimited, 0)
            );
        }
        assert!(store.keys().is_empty());
        // They do not count against a limit that comes later.
        set(Limit::Max(1));
        assert!(limiter.try_acquire("acme").await.is_ok());
    }

    #[tokio::test]
    async fn by_default_are_the_limiters_own() {
        let (limiter, set) = adjustable(MemoryStore::new());
        set(Limit::Default);
        assert_eq!(limit_of(&limiter, "acme").await, 7);
    }

    #[tokio::test]
    async fn tell_a_refused_caller_to_wait_for_a_second_at_least() {
        let limiter = limiter(1);
        let _slot = limiter.try_acquire("acme").await.unwrap();
        for _ in 0..100 {
            let Err(AcquireError::Saturated { retry_after, .. }) = limiter.try_acquire("acme").await else {
                panic!("the limit is reached");
            };
            assert!((SECOND..=31 * SECOND).contains(&retry_after), "{retry_after:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tell_a_refused_caller_to_wait_for_the_mean_hold_over_the_limit_and_up_to_half_as_long_again() {
        for (hold, limit, waits) in [(20, 5, 4..=6), (20, 1, 20..=30), (20, 40, 1..=2), (3600, 2, 30..=45)] {
            let limiter = limiter(limit);
            for _ in 0..200 {
                let _slot = limiter.try_acquire("acme").await.unwrap();
                sleep(hold * SECOND).await;
            }
            let _slots = join_all((0..limit).map(|_| limiter.try_acquire("acme"))).await;
            let mut seen = HashSet::new();
            for _ in 0..1000 {
                let Err(AcquireError::Saturated { retry_after, .. }) = limiter.try_acquire("acme").await
                else {
                    panic!("the limit is reached");
                };
                assert_eq!(retry_after.subsec_nanos(), 0);
                seen.insert(retry_after.as_secs());
            }
            assert_eq!(seen, waits.collect(), "{limit} slots held for {hold} s");
        }
    }
}

mod source {
    use super::*;

    /// What a source saw and does: counts lookups, and lets each wait for a permit.
    #[derive(Clone)]
    struct Probe {
        lookups: Arc<AtomicUsize>,
        running: Arc<AtomicUsize>,
        most_running: Arc<AtomicUsize>,
        gate: Arc<Semaphore>,
    }

    impl Probe {
        /// A source that answers at once.
        fn open() -> Self {
            Self::with(Semaphore::MAX_PERMITS)
        }

        /// A source whose lookups wait for [`Probe::let_pass`].
        fn shut() -> Self {
            Self::with(0)
        }

        fn with(permits: usize) -> Self {
            Self {
                lookups: Arc::default(),
                running: Arc::default(),
                most_running: Arc::default(),
                gate: Arc::new(Semaphore::new(permits)),
            }
        }

        fn lookups(&self) -> usize {
            self.lookups.load(Ordering::SeqCst)
        }

        fn let_pass(&self, lookups: usize) {
            self.gate.add_permits(lookups);
        }

        /// One lookup: returns its number, from 1 on.
        async fn look_up(self) -> usize {
            struct Running(Arc<AtomicUsize>);
            impl Drop for Running {
                fn drop(&mut self) {
                    self.0.fetch_sub(1, Ordering::SeqCst);
                }
            }
            let number = self.lookups.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_running.fetch_max(self.running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let _running = Running(self.running);
            self.gate.acquire().await.expect("the gate stays open").forget();
            number
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn is_asked_once_for_100_callers_of_one_id() {
        let probe = Probe::shut();
        let limiter = with_source({
            let probe = probe.clone();
            move |_| probe.clone().look_up().map(|_| 100)
        });
        let callers: Vec<_> = (0..100)
            .map(|_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { limiter.try_acquire("acme").await })
            })
            .collect();
        while probe.lookups() == 0 {
            sleep(MS).await;
        }
        sleep(20 * MS).await;
        probe.let_pass(100);
        let slots = join_all(callers).await;
        assert!(slots.iter().all(|slot| slot.as_ref().unwrap().as_ref().unwrap().limit() == 100));
        assert_eq!(probe.lookups(), 1);
    }

    #[tokio::test]
    async fn is_asked_once_for_many_callers_of_one_id_also_when_the_cache_is_full() {
        let probe = Probe::shut();
        let source = {
            let probe = probe.clone();
            move |id: ProjectId| {
                let probe = probe.clone();
                async move { if id.starts_with("other") { 100 } else { probe.look_up().await as i64 * 100 } }
            }
        };
        let limiter = builder().limits(source).limit_cache(MINUTE, 4).build().unwrap();
        for n in 0..200 {
            drop(limiter.try_acquire(&format!("other-{}", n % 8)).await.unwrap());
        }
        let callers = (0..50).map(|n| {
            let limiter = limiter.clone();
            async move {
                for other in 0..20 {
                    drop(limiter.try_acquire(&format!("other-{}", (n + other) % 8)).await.unwrap());
                }
                limiter.try_acquire("acme").await
            }
        });
        let callers = tokio::spawn(join_all(callers));
        while probe.lookups() == 0 {
            sleep(MS).await;
        }
        sleep(50 * MS).await;
        probe.let_pass(100);
        assert!(callers.await.unwrap().iter().all(Result::is_ok));
        assert_eq!(probe.most_running.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn is_asked_again_once_an_answers_time_is_over() {
        let probe = Probe::open();
        let asked = probe.clone();
        let limiter = with_source(move |_| asked.clone().look_up().map(|n| n as i64));
        assert_eq!(limit_of(&limiter, "acme").await, 1);
        advance(59 * SECOND).await;
        assert_eq!(limit_of(&limiter, "acme").await, 1);
        advance(SECOND).await;
        assert_eq!(limit_of(&limiter, "acme").await, 2);
        assert_eq!(probe.lookups(), 2);
    }

    #[tokio::test]
    async fn is_asked_once_also_where_the_answer_is_that_there_is_none() {
        async fn check<A: tower_slots::limiter::LimitAnswer + Copy + Send + Sync + 'static>(answer: A) {
            let probe = Probe::open();
            let asked = probe.clone();
            let limiter = with_source(move |_| asked.clone().look_up().map(move |_| answer));
            for _ in 0..3 {
                assert_eq!(limit_of(&limiter, "acme").await, 7);
            }
            assert_eq!(probe.lookups(), 1);
        }
        check(None::<u32>).await;
        check(Some(0)).await;
        check(0u32).await;
        check(0i64).await;
        check(-1).await;
        check(i64::MIN).await;
        check(Limit::Default).await;
    }

    #[tokio::test]
    async fn may_answer_in_many_types() {
        async fn check(source: impl LimitSource, limit: impl Into<Limit>) {
            assert_eq!(limit_of(&with_source(source), "acme").await, limit.into());
        }
        check(|_| async { Limit::Max(3) }, 3).await;
        check(|_| async { Limit::Unlimited }, Limit::Unlimited).await;
        check(|_| async { 3 }, 3).await;
        check(|_| async { 3i64 }, 3).await;
        check(|_| async { 3u32 }, 3).await;
        check(|_| async { 3u64 }, 3).await;
        check(|_| async { 3usize }, 3).await;
        check(|_| async { i64::MAX }, u32::MAX).await;
        check(|_| async { Some(3) }, 3).await;
        check(|_| async { Ok::<_, std::io::Error>(3) }, 3).await;
        check(|_| async { Ok::<_, String>(Some(Limit::Max(3))) }, 3).await;
        check(|_| async { Err::<u32, _>("no such table") }, 7).await;
        check(|id: ProjectId| async move { if id.as_str() == "acme" { 3 } else { 4 } }, 3).await;
    }

    #[tokio::test(start_paused = true)]
    async fn that_fails_leaves_the_last_good_limit_and_is_asked_again_soon() {
        let probe = Probe::open();
        let asked = probe.clone();
        let limiter = with_source(move |_| {
            let lookup = asked.clone().look_up();
            async move { if lookup.await % 2 == 1 { Ok(3) } else { Err("down") } }
        });
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        advance(MINUTE).await;
        assert_eq!(limit_of(&limiter, "acme").await, 3, "the lookup fails, and the last good answer stays");
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        assert_eq!(probe.lookups(), 2, "a failure holds for a moment, so that it is no storm");
        advance(2 * SECOND).await;
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        assert_eq!(probe.lookups(), 3, "and not for the full time of an answer");
    }

    #[tokio::test]
    async fn that_always_fails_leaves_the_default() {
        let limiter = with_source(|_| async { Err::<u32, _>("down") });
        assert_eq!(limit_of(&limiter, "acme").await, 7);
        assert_eq!(limit_of(&limiter, "acme").await, 7);
    }

    #[tokio::test]
    async fn answers_are_kept_for_so_many_ids_only() {
        let probe = Probe::open();
        let asked = probe.clone();
        let source = move |_| asked.clone().look_up().map(|_| 3);
        let limiter = builder().limits(source).limit_cache(MINUTE, 100).build().unwrap();
        for round in 1..=2 {
            for n in 0..5000 {
                assert_eq!(limit_of(&limiter, &format!("id-{n}")).await, 3);
            }
            // Room for some that the cache has not got round to evicting.
            assert!(probe.lookups() > round * 4000, "{} lookups in {round} rounds", probe.lookups());
        }
    }

    #[tokio::test]
    async fn is_asked_again_after_invalidate() {
        let probe = Probe::open();
        let asked = probe.clone();
        let limiter = with_source(move |_| asked.clone().look_up().map(|n| n as i64));
        assert_eq!(limit_of(&limiter, "acme").await, 1);
        assert_eq!(limit_of(&limiter, "other").await, 2);
        limiter.invalidate("acme");
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        assert_eq!(limit_of(&limiter, "other").await, 2);
    }

    #[tokio::test]
    async fn answers_from_before_an_invalidate_do_not_outlive_it() {
        let probe = Probe::shut();
        let asked = probe.clone();
        let limiter = with_source(move |_| asked.clone().look_up().map(|n| n as i64));
        let mut before = Box::pin(limiter.try_acquire("acme"));
        assert!((&mut before).now_or_never().is_none());
        tokio::task::yield_now().await;
        assert_eq!(probe.lookups(), 1);
        limiter.invalidate("acme");
        let mut after = Box::pin(limiter.try_acquire("acme"));
        assert!((&mut after).now_or_never().is_none());
        tokio::task::yield_now().await;
        assert_eq!(probe.lookups(), 2, "what was asked before may be out of date");
        probe.let_pass(2);
        let _first = before.await.unwrap();
        assert_eq!(after.await.unwrap().limit(), 2);
        assert_eq!(limit_of(&limiter, "acme").await, 2);
        assert_eq!(probe.lookups(), 2);
    }

    #[tokio::test]
    async fn finishes_a_lookup_whose_caller_has_gone() {
        let probe = Probe::shut();
        let asked = probe.clone();
        let limiter = with_source(move |_| asked.clone().look_up().map(|_| 3));
        let mut gone = Box::pin(limiter.try_acquire("acme"));
        assert!((&mut gone).now_or_never().is_none());
        let mut waiting = Box::pin(limiter.try_acquire("acme"));
        assert!((&mut waiting).now_or_never().is_none());
        drop(gone);
        probe.let_pass(1);
        assert_eq!(waiting.await.unwrap().limit(), 3);
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        assert_eq!(probe.lookups(), 1);
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn that_hangs_costs_a_caller_a_second_and_the_next_ones_nothing() {
        let limiter = with_source(|_| pending::<Limit>());
        let start = Instant::now();
        assert_eq!(limit_of(&limiter, "acme").await, 7);
        assert!((SECOND..SECOND + 100 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
        let start = Instant::now();
        for _ in 0..5 {
            assert_eq!(limit_of(&limiter, "acme").await, 7);
        }
        assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn that_hangs_leaves_the_last_good_limit() {
        let probe = Probe::with(1);
        let asked = probe.clone();
        let limiter = with_source(move |_| asked.clone().look_up().map(|n| n as i64 + 2));
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        advance(MINUTE).await;
        let start = Instant::now();
        assert_eq!(limit_of(&limiter, "acme").await, 3);
        assert!(start.elapsed() < SECOND + 100 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn that_hung_once_is_asked_again() {
        let probe = Probe::open();
        let asked = probe.clone();
        let limiter = with_source(move |_| {
            let lookup = asked.clone().look_up();
            async move { if lookup.await == 1 { pending().await } else { 3 } }
        });
        assert_eq!(limit_of(&limiter, "acme").await, 7);
        sleep(MINUTE).await;
        assert_eq!(limit_of(&limiter, "acme").await, 3, "one lost answer does not pin the limit for ever");
        assert_eq!(probe.running.load(Ordering::SeqCst), 0, "and what hung is gone");
    }

    #[test]
    fn is_asked_again_when_the_runtime_of_a_lookup_has_gone() {
        let probe = Probe::shut();
        let asked = probe.clone();
        let limiter = with_source(move |_| asked.clone().look_up().map(|_| 3));
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime().block_on(async {
            let given_up = timeout(10 * MS, limiter.try_acquire("acme")).await;
            assert!(given_up.is_err());
        });
        probe.let_pass(1);
        assert_eq!(runtime().block_on(limit_of(&limiter, "acme")), 3);
    }

    #[tokio::test]
    async fn that_panics_does_so_in_the_caller_that_asked_and_in_no_other() {
        let probe = Probe::shut();
        let asked = probe.clone();
        let limiter = with_source(move |_| {
            let lookup = asked.clone().look_up();
            async move {
                let number = lookup.await;
                assert!(number > 1, "the plan table is broken");
                3
            }
        });
        let mut first = Box::pin(AssertUnwindSafe(limiter.try_acquire("acme")).catch_unwind());
        assert!((&mut first).now_or_never().is_none());
        let mut second = Box::pin(limiter.try_acquire("acme"));
        assert!((&mut second).now_or_never().is_none());
        probe.let_pass(5);
        let panic = first.await.expect_err("the source's panic is the caller's");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"the plan table is broken"));
        assert_eq!(second.await.unwrap().limit(), 7, "who only waited takes the default");
        assert_eq!(limit_of(&limiter, "acme").await, 3, "and the next caller asks again");
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
        assert!(limiter.shutdown(SECOND).await);
    }

    #[tokio::test]
    async fn that_panics_before_its_first_await_does_the_same() {
        let panics = Arc::new(AtomicBool::new(true));
        let read = Arc::clone(&panics);
        let limiter = with_source(move |_| {
            assert!(!read.load(Ordering::SeqCst), "the plan table is broken");
            async { 3 }
        });
        assert!(AssertUnwindSafe(limiter.try_acquire("acme")).catch_unwind().await.is_err());
        panics.store(false, Ordering::SeqCst);
        assert_eq!(limit_of(&limiter, "acme").await, 3);
    }
}

mod slots {
    use super::*;

    #[tokio::test]
    async fn tell_what_they_stand_for() {
        let limiter = builder().limit(5).name("uploads").build().unwrap();
        assert_eq!(limiter.name(), "uploads");
        let first = limiter.acquire("acme", Acquire::weight(2)).await.unwrap();
        let second = limiter.try_acquire("acme").await.unwrap();
        assert_eq!((first.weight(), first.active(), first.limit()), (2, 2, Limit::Max(5)));
        assert_eq!((second.weight(), second.active(), second.origin()), (1, 3, Origin::Store));
        assert_ne!(first.id(), second.id());
        let handle = second.handle();
        assert_eq!((handle.active(), handle.limit(), handle.origin()), (3, Limit::Max(5), Origin::Store));
        assert_eq!(handle.hold().unwrap().id(), second.id());
        assert_eq!(Acquire::default(), Acquire::weight(1));
    }

    #[tokio::test]
    async fn are_given_back_by_drop_and_by_release() {
        let limiter = limiter(2);
        let (first, second) = (limiter.try_acquire("acme").await, limiter.try_acquire("acme").await);
        drop(first.unwrap());
        assert_eq!(limiter.active("acme").await.unwrap(), 1);
        second.unwrap().release().await.unwrap();
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
    }

    #[tokio::test]
    async fn are_given_back_when_a_future_is_dropped_at_any_point() {
        let limiter = with_source(|_| async {
            tokio::task::yield_now().await;
            1
        });
        for polls in 0..6 {
            limiter.invalidate("acme");
            let mut acquire = Box::pin(limiter.try_acquire("acme"));
            for _ in 0..polls {
                if (&mut acquire).now_or_never().is_some() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(acquire);
            assert_eq!(limiter.active("acme").await.unwrap(), 0, "after {polls} polls");
        }
        assert!(limiter.shutdown(SECOND).await);
    }

    #[test]
    fn are_given_back_in_a_panic_and_outside_a_runtime() {
        let limiter = limiter(1);
        let acquire = || limiter.try_acquire("acme").now_or_never().expect("memory answers at once").unwrap();
        let slot = acquire();
        assert!(
            std::panic::catch_unwind(AssertUnwindSafe(|| {
                let _slot = slot;
                panic!("the work fails")
            }))
            .is_err()
        );
        let slot = acquire();
        std::thread::spawn(move || drop(slot)).join().unwrap();
        let _slot = acquire();
    }

    #[tokio::test]
    async fn handles_do_not_keep_a_slot_and_held_slots_do() {
        let limiter = limiter(1);
        let slot = limiter.try_acquire("acme").await.unwrap();
        let handle = slot.handle();
        drop(handle.hold());
        let held = handle.clone().hold().unwrap();
        drop(slot);
        assert_saturated(limiter.try_acquire("acme").await, (1, 1));
        drop(handle.hold().expect("what is held can be held again"));
        drop(held);
        assert!(handle.hold().is_none());
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
        handle.lost().now_or_never().expect("a handle of what was given back has nothing to lose");
    }

    #[tokio::test]
    async fn stay_taken_by_a_held_slot_after_release() {
        let limiter = limiter(1);
        let slot = limiter.try_acquire("acme").await.unwrap();
        let held = slot.handle().hold().unwrap();
        slot.release().now_or_never().expect("there is nothing to wait for").unwrap();
        assert_eq!(limiter.active("acme").await.unwrap(), 1);
        drop(held);
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
    }

    #[tokio::test]
    async fn are_lost_to_a_drain_and_all_who_wait_hear_it() {
        let limiter = limiter(3);
        let slot = Arc::new(limiter.acquire("acme", Acquire::weight(2)).await.unwrap());
        let other = limiter.try_acquire("other").await.unwrap();
        let (handle, held) = (slot.handle(), slot.handle().hold().unwrap());
        let mut waiters = Vec::new();
        for _ in 0..50 {
            let (slot, handle) = (Arc::clone(&slot), handle.clone());
            waiters.push(tokio::spawn(async move { slot.lost().await }));
            waiters.push(tokio::spawn(async move { handle.lost().await }));
        }
        waiters.push(tokio::spawn(async move { held.lost().await }));
        tokio::task::yield_now().await;
        for waiter in waiters.drain(..10) {
            waiter.abort();
        }
        tokio::task::yield_now().await;
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
        assert_eq!(limiter.drain("acme").await.unwrap(), 2);
        for heard in timeout(SECOND, join_all(waiters)).await.expect("all hear it") {
            heard.unwrap();
        }
        slot.lost().now_or_never().expect("who asks later knows at once");
        assert_eq!(other.lost().now_or_never(), None);
        assert_eq!(limiter.drain("acme").await.unwrap(), 0);
    }

    #[tokio::test]
    async fn lost_to_a_drain_do_not_count_twice_when_they_are_given_back() {
        let limiter = limiter(2);
        let lost = limiter.acquire("acme", Acquire::weight(2)).await.unwrap();
        assert_eq!(limiter.drain("acme").await.unwrap(), 2);
        let _new = limiter.try_acquire("acme").await.unwrap();
        drop(lost);
        assert_eq!(limiter.active("acme").await.unwrap(), 1);
    }

    #[tokio::test]
    async fn wake_a_handle_that_waits_when_they_are_given_back() {
        let limiter = limiter(1);
        let slot = limiter.try_acquire("acme").await.unwrap();
        let handle = slot.handle();
        let waiter = tokio::spawn(async move { handle.lost().await });
        tokio::task::yield_now().await;
        drop(slot);
        timeout(SECOND, waiter).await.expect("nothing is left to lose").unwrap();
    }

    #[tokio::test]
    async fn forget_those_who_have_stopped_waiting() {
        struct Count;
        impl Wake for Count {
            fn wake(self: Arc<Self>) {}
        }
        let limiter = limiter(1);
        let slot = limiter.try_acquire("acme").await.unwrap();
        let count = Arc::new(Count);
        let waker = Waker::from(Arc::clone(&count));
        let mut lost = Box::pin(slot.lost());
        assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop((lost, waker));
        assert_eq!(
            Arc::strong_count(&count),
            1,
            "a task that waited once is not kept for as long as the slot"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn are_lost_at_max_hold_and_free_from_then_on() {
        let limiter = builder().limit(1).max_hold(10 * SECOND).build().unwrap();
        let slot = limiter.try_acquire("acme").await.unwrap();
        advance(9 * SECOND).await;
        assert_saturated(limiter.try_acquire("acme").await, (1, 1));
        let start = Instant::now();
        slot.lost().await;
        assert!((SECOND..SECOND + 100 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
        let new = limiter.try_acquire("acme").await.unwrap();
        drop(slot);
        assert_eq!(limiter.active("acme").await.unwrap(), 1, "the late drop does not free another's slot");
        assert_eq!(new.lost().now_or_never(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn are_held_for_as_long_as_one_likes_without_max_hold() {
        let limiter = builder().limit(1).lease(SECOND).build().unwrap();
        let _slot = limiter.try_acquire("acme").await.unwrap();
        advance(1000 * MINUTE).await;
        assert_saturated(limiter.try_acquire("acme").await, (1, 1));
    }

    #[tokio::test]
    async fn and_all_futures_may_move_between_threads() {
        fn is_send<T: Send>(value: T) -> T {
            value
        }
        fn is_send_and_sync<T: Send + Sync>(_: &T) {}
        let limiter = limiter(5);
        is_send_and_sync(&limiter);
        let slot = is_send(limiter.try_acquire("acme")).await.unwrap();
        let (handle, held) = (slot.handle(), slot.handle().hold().unwrap());
        is_send_and_sync(&slot);
        is_send_and_sync(&handle);
        is_send_and_sync(&held);
        drop(is_send(limiter.acquire("acme", Acquire::weight(2))));
        drop((is_send(limiter.active("acme")), is_send(limiter.drain("acme"))));
        drop((is_send(slot.lost()), is_send(handle.lost()), is_send(held.lost())));
        drop(is_send(slot.release()));
        assert_eq!(
            limiter.active("acme").await.unwrap(),
            1,
            "a release that was never polled waits for `held`"
        );
        drop(held);
        assert!(is_send(limiter.shutdown(SECOND)).await);
    }
}

mod shutdown {
    use super::*;

    #[tokio::test]
    async fn waits_for_guards_of_every_thread() {
        let limiter = limiter(100);
        let on_a_thread = || {
            let limiter = limiter.clone();
            let thread =
                std::thread::spawn(move || limiter.try_acquire("acme").now_or_never().unwrap().unwrap());
            thread.join().unwrap()
        };
        let mut slots: Vec<_> = std::iter::repeat_with(on_a_thread).take(64).collect();
        let last = slots.swap_remove(40);
        assert!(!limiter.shutdown(MS).await);
        drop(slots);
        assert!(!limiter.shutdown(20 * MS).await);
        let waiting = tokio::spawn({
            let limiter = limiter.clone();
            async move { limiter.shutdown(MINUTE).await }
        });
        tokio::task::yield_now().await;
        std::thread::spawn(move || drop(last)).join().unwrap();
        assert!(timeout(10 * SECOND, waiting).await.expect("it is woken").unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn refuses_new_requests_and_waits_for_slots() {
        let limiter = limiter(3);
        let slots = join_all((0..3).map(|_| limiter.try_acquire("acme"))).await;
        let clone = limiter.clone();
        let shutdown = tokio::spawn(async move { clone.shutdown(MINUTE).await });
        tokio::task::yield_now().await;
        assert!(matches!(limiter.try_acquire("other").await, Err(AcquireError::Closed)));
        assert_eq!(limiter.active("acme").await.unwrap(), 3, "counting still works");
        for slot in slots {
            assert!(!shutdown.is_finished());
            drop(slot);
            tokio::task::yield_now().await;
        }
        assert!(timeout(SECOND, shutdown).await.expect("all slots are back").unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn tells_when_the_deadline_comes_first_and_can_be_continued() {
        let limiter = limiter(1);
        let slot = limiter.try_acquire("acme").await.unwrap();
        let start = Instant::now();
        assert!(!limiter.shutdown(5 * SECOND).await);
        assert!((5 * SECOND..6 * SECOND).contains(&start.elapsed()));
        assert!(matches!(limiter.try_acquire("acme").await, Err(AcquireError::Closed)));
        drop(slot);
        assert!(limiter.shutdown(5 * SECOND).await);
        assert!(limiter.shutdown(Duration::ZERO).await);
    }

    #[tokio::test(start_paused = true)]
    async fn waits_for_what_is_held_beyond_its_slot() {
        let limiter = limiter(1);
        let slot = limiter.try_acquire("acme").await.unwrap();
        let held = slot.handle().hold().unwrap();
        drop(slot);
        assert!(!limiter.shutdown(SECOND).await);
        drop(held);
        assert!(limiter.shutdown(SECOND).await);
    }

    #[tokio::test]
    async fn lets_no_request_in_that_was_still_looking_up_its_limit() {
        for answer in [Limit::Max(1), Limit::Unlimited] {
            let gate = Arc::new(Semaphore::new(0));
            let wait = Arc::clone(&gate);
            let limiter = with_source(move |_| {
                let wait = Arc::clone(&wait);
                async move {
                    wait.acquire().await.expect("the gate stays open").forget();
                    answer
                }
            });
            let mut acquire = Box::pin(limiter.try_acquire("acme"));
            assert!((&mut acquire).now_or_never().is_none());
            assert!(limiter.shutdown(SECOND).await);
            gate.add_permits(1);
            let late = acquire.await;
            assert!(matches!(late, Err(AcquireError::Closed)), "nothing is let in after the end: {late:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn is_the_end_whoever_races_with_it() {
        for _ in 0..200 {
            let limiter = limiter(1000);
            let acquires: Vec<_> = (0..4)
                .map(|_| {
                    let limiter = limiter.clone();
                    tokio::spawn(async move {
                        while let Ok(slot) = limiter.try_acquire("acme").await {
                            drop(slot);
                        }
                    })
                })
                .collect();
            tokio::task::yield_now().await;
            assert!(limiter.shutdown(MINUTE).await);
            assert_eq!(limiter.active("acme").await.unwrap(), 0);
            join_all(acquires).await;
        }
    }
}

#[cfg(feature = "metrics")]
mod metrics_of {
    use super::support::meter::recorded;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_show_results_holds_and_use() {
        let (limiter, meter) = recorded(|| builder().name("uploads").limit(4).build().unwrap());
        let first = limiter.try_acquire("acme").await.unwrap();
        let three = limiter.acquire("acme", Acquire::weight(3)).await.unwrap();
        assert!(limiter.try_acquire("acme").await.is_err());
        let seen = meter.read();
        assert_eq!(seen["store_up"], [1.0]);
        assert_eq!(seen["requests_total{admitted}"], [2.0]);
        assert_eq!(seen["requests_total{rejected}"], [1.0]);
        assert_eq!(seen["active_slots"], [4.0]);
        assert_eq!(seen["utilization_ratio"], [0.25, 1.0, 1.0]);
        assert_eq!(seen["acquire_seconds{granted}"].len(), 2);
        assert_eq!(seen["acquire_seconds{refused}"].len(), 1);
        advance(2 * SECOND).await;
        drop(first);
        advance(SECOND).await;
        three.release().await.unwrap();
        let seen = meter.read();
        assert_eq!(seen["active_slots"], [0.0]);
        assert_eq!(seen["slot_hold_seconds{dropped}"], [2.0]);
        assert_eq!(seen["slot_hold_seconds{completed}"], [3.0]);
        assert_eq!(seen["slots_lost_total"], [0.0]);
    }

    #[tokio::test]
    async fn requests_do_not_divide_by_a_limit_of_zero() {
        let (limiter, meter) = recorded(|| builder().name("uploads").limit(0).build().unwrap());
        assert!(limiter.try_acquire("acme").await.is_err());
        let seen = meter.read();
        assert_eq!(seen["requests_total{rejected}"], [1.0]);
        assert!(seen["utilization_ratio"].is_empty());
    }

    #[tokio::test]
    async fn unlimited_requests_are_admitted_and_active() {
        let (limiter, meter) =
            recorded(|| builder().name("uploads").limit(Limit::Unlimited).build().unwrap());
        let slot = limiter.try_acquire("acme").await.unwrap();
        let seen = meter.read();
        assert_eq!(
            (&seen["requests_total{admitted}"][..], &seen["active_slots"][..]),
            (&[1.0][..], &[1.0][..])
        );
        drop(slot);
        assert_eq!(meter.read()["active_slots"], [0.0]);
    }

    #[tokio::test(start_paused = true)]
    async fn losses_show_once_and_as_the_end_of_the_hold() {
        let (limiter, meter) =
            recorded(|| builder().name("uploads").limit(4).max_hold(10 * SECOND).build().unwrap());
        let (dropped, released) = (limiter.try_acquire("acme").await, limiter.try_acquire("acme").await);
        assert_eq!(limiter.drain("acme").await.unwrap(), 2);
        assert_eq!(limiter.drain("acme").await.unwrap(), 0);
        drop(dropped);
        released.unwrap().release().await.unwrap();
        let overdue = limiter.try_acquire("acme").await.unwrap();
        advance(10 * SECOND).await;
        assert_eq!(limiter.active("acme").await.unwrap(), 0);
        drop(overdue);
        let seen = meter.read();
        assert_eq!(seen["slots_lost_total"], [3.0]);
        assert_eq!(seen["slot_hold_seconds{lost}"].len(), 2, "a lost slot does not complete: {seen:?}");
        assert_eq!(seen["slot_hold_seconds{max_hold}"], [10.0]);
        assert_eq!(seen["active_slots"], [0.0]);
    }

    #[tokio::test(start_paused = true)]
    async fn lookups_show_where_limits_came_from() {
        let fails = Arc::new(AtomicBool::new(true));
        let read = Arc::clone(&fails);
        let source = move |_| {
            let failed = read.load(Ordering::SeqCst);
            async move { if failed { Err("down") } else { Ok(3) } }
        };
        let (limiter, meter) = recorded(|| builder().name("uploads").limits(source).build().unwrap());
        let ask = async || drop(limiter.try_acquire("acme").await.unwrap());
        let lookups = || {
            let seen = meter.read();
            ["error", "miss", "hit", "stale"]
                .map(|result| seen.get(&format!("limit_lookups_total{{{result}}}")).map_or(0.0, |n| n[0]))
        };
        ask().await;
        assert_eq!(lookups(), [1.0, 0.0, 0.0, 0.0]);
        fails.store(false, Ordering::SeqCst);
        advance(2 * SECOND).await;
        ask().await;
        assert_eq!(lookups(), [1.0, 1.0, 0.0, 0.0]);
        ask().await;
        assert_eq!(lookups(), [1.0, 1.0, 1.0, 0.0]);
        fails.store(true, Ordering::SeqCst);
        advance(MINUTE).await;
        ask().await;
        assert_eq!(lookups(), [1.0, 1.0, 1.0, 1.0]);
    }
}

fn terms() -> Arc<Terms> {
    Arc::new(Terms::new(30 * SECOND, 250 * MS))
}

mod memory_store {
    use super::*;

    fn acquire(store: &MemoryStore, key: &Key, slot: SlotId, weight: u32, limit: u32) -> Grant {
        let claim = Claim::new(key.clone(), slot, weight, limit, &terms());
        store.acquire(claim).now_or_never().expect("memory answers at once").unwrap()
    }

    fn count(store: &MemoryStore, key: &Key) -> u32 {
        store.count(key, &terms()).now_or_never().expect("memory answers at once").unwrap()
    }

    #[test]
    fn grants_an_id_that_is_held_without_counting_it_twice() {
        let (store, key, slot) = (MemoryStore::new(), Key::new("a"), SlotId::new());
        for _ in 0..3 {
            assert_eq!(acquire(&store, &key, slot, 1, 1), Grant::Granted { active: 1 });
        }
        assert_eq!(acquire(&store, &key, SlotId::new(), 1, 1), Grant::Refused { active: 1 });
        store.release(&key, slot);
        store.release(&key, slot);
        assert_eq!(count(&store, &key), 0);
    }

    #[test]
    fn counts_weights_up_to_the_largest_limits() {
        let (store, key) = (MemoryStore::new(), Key::new("a"));
        assert_eq!(acquire(&store, &key, SlotId::new(), 1024, u32::MAX), Grant::Granted { active: 1024 });
        assert_eq!(acquire(&store, &key, SlotId::new(), u32::MAX, u32::MAX), Grant::Refused { active: 1024 });
        assert_eq!(
            acquire(&store, &key, SlotId::new(), u32::MAX - 1024, u32::MAX),
            Grant::Granted { active: u32::MAX }
        );
        assert_eq!(acquire(&store, &key, SlotId::new(), 1, u32::MAX), Grant::Refused { active: u32::MAX });
        assert_eq!(store.drain(&key, &terms()).now_or_never().unwrap().unwrap(), u32::MAX);
    }

    #[test]
    fn tells_the_holders_of_the_drained_key_and_no_others() {
        #[derive(Default)]
        struct Told(Mutex<Vec<Lost>>);
        impl Holder for Told {
            fn lost(&self, why: Lost) {
                self.0.lock().unwrap().push(why);
            }
        }
        let store = MemoryStore::new();
        let told: Vec<Arc<Told>> = (0..3).map(|_| Arc::default()).collect();
        for (key, told) in ["a", "a", "b"].into_iter().zip(&told) {
            let watch: Arc<dyn Holder> = Arc::clone(told) as _;
            let claim =
                Claim::new(Key::new(key), SlotId::new(), 1, 9, &terms()).watched_by(Arc::downgrade(&watch));
            assert!(store.acquire(claim).now_or_never().unwrap().is_ok());
        }
        assert_eq!(store.drain(&Key::new("a"), &terms()).now_or_never().unwrap().unwrap(), 2);
        let told: Vec<_> = told.iter().map(|told| told.0.lock().unwrap().clone()).collect();
        assert_eq!(told, [vec![Lost::Drained], vec![Lost::Drained], vec![]]);
        assert_eq!(count(&store, &Key::new("b")), 1);
    }

    #[test]
    fn shares_its_slots_with_its_clones() {
        let (store, key, slot) = (MemoryStore::new(), Key::new("a"), SlotId::new());
        assert_eq!(acquire(&store, &key, slot, 1, 1), Grant::Granted { active: 1 });
        let clone = store.clone();
        assert_eq!(acquire(&clone, &key, SlotId::new(), 1, 1), Grant::Refused { active: 1 });
        clone.release(&key, slot);
        assert_eq!(count(&store, &key), 0);
    }

    #[test]
    fn keeps_every_limit_under_contention() {
        let limiter = limiter(3);
        let inside = AtomicUsize::new(0);
        let most = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let Some(Ok(slot)) = limiter.try_acquire("acme").now_or_never() else { continue };
                        most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(slot);
                    }
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 3, "the limit is reached and never passed");
        assert_eq!(limiter.active("acme").now_or_never().unwrap().unwrap(), 0);
    }
}

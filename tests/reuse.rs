//! Local reuse: what is kept, what is given back and when, and that the limit holds all the same.

mod support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use support::child::{self, Args};
use support::{Child, History, RedisServer, Watched, eventually};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::{Instant, advance, sleep};
use tower_slots::{Acquire, AcquireError, Limiter, LimiterBuilder, Origin, RedisStore, Slot};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(5);
const ID: &str = "acme";
const ACME: &str = "sem:acme";
/// For how long slots are kept here, where nothing else is said.
const KEPT: Duration = SECOND;

fn on(store: &Watched) -> LimiterBuilder {
    Limiter::builder(store.clone()).limit(10).reuse(KEPT)
}

fn reusing(limit: u32) -> (Limiter, Watched) {
    let store = Watched::default();
    (on(&store).limit(limit).build().unwrap(), store)
}

async fn take(limiter: &Limiter) -> Slot {
    limiter.try_acquire(ID).await.unwrap()
}

async fn take_some(limiter: &Limiter, count: usize) -> Vec<Slot> {
    join_all((0..count).map(|_| take(limiter))).await
}

/// Slots in use in the store.
async fn used(limiter: &Limiter) -> u32 {
    limiter.active(ID).await.unwrap()
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_released_slot_serves_the_next_request_of_its_id_without_the_store() {
    let (limiter, store) = reusing(10);
    let first = take(&limiter).await;
    let id = first.id();
    drop(first);
    for _ in 0..100 {
        let slot = limiter.try_acquire(ID).now_or_never().expect("an answer at once").unwrap();
        assert_eq!((slot.id(), slot.origin(), slot.active(), slot.weight()), (id, Origin::Store, 1, 1));
        assert_eq!(used(&limiter).await, 1);
        slot.release().await.unwrap();
    }
    assert_eq!(store.calls(), (1, 0));
    drop(limiter.try_acquire("other").await.unwrap());
    assert_eq!(store.calls(), (2, 0), "another id has slots of its own");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_kept_without_it() {
    let store = Watched::default();
    let limiter = Limiter::builder(store.clone()).build().unwrap();
    for n in 1..4 {
        drop(take(&limiter).await);
        assert_eq!(store.calls(), (n, n));
    }
}

#[tokio::test(start_paused = true)]
async fn idle_slots_go_back_within_the_time_and_no_sooner_than_its_half() {
    let (limiter, store) = reusing(10);
    drop(take_some(&limiter, 5).await);
    sleep(KEPT / 2).await;
    assert_eq!((used(&limiter).await, store.calls()), (5, (5, 0)));
    sleep(KEPT / 2).await;
    assert_eq!((used(&limiter).await, store.calls()), (0, (5, 5)));
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_goes_to_and_fro_passes_through_the_store_once_in_a_while() {
    let (limiter, store) = reusing(10);
    for _ in 0..100 {
        let slot = take(&limiter).await;
        advance(KEPT / 10).await;
        drop(slot);
        tokio::task::yield_now().await;
    }
    let (acquires, _) = store.calls();
    assert!((10..=20).contains(&acquires), "{acquires} in ten times the time");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_takes_longer_than_the_time_is_not_kept() {
    let (limiter, _store) = reusing(10);
    let slot = take(&limiter).await;
    sleep(KEPT).await;
    drop(slot);
    assert_eq!(used(&limiter).await, 0);
}

#[tokio::test(start_paused = true)]
async fn no_more_is_idle_than_half_the_limit() {
    let (limiter, _store) = reusing(10);
    drop(take_some(&limiter, 6).await);
    assert_eq!(used(&limiter).await, 0, "six of ten were in use");
    let mut slots = take_some(&limiter, 5).await;
    let last = slots.pop();
    drop(slots);
    assert_eq!(used(&limiter).await, 5, "five of ten");
    drop(last);
    assert_eq!(used(&limiter).await, 5);
    let (limiter, _store) = reusing(1);
    drop(take(&limiter).await);
    assert_eq!(used(&limiter).await, 0, "one of one");
}

#[tokio::test(start_paused = true)]
async fn all_idle_slots_of_an_id_go_back_when_its_use_passes_half_the_limit() {
    let store = Watched::default();
    let (ours, theirs) = (on(&store).build().unwrap(), on(&store).build().unwrap());
    let mut held = take_some(&ours, 3).await;
    let others = take_some(&theirs, 2).await;
    held.truncate(1);
    assert_eq!(used(&ours).await, 5, "two are idle");
    // Both idle slots are used again, and the next one tells of six.
    held.extend(take_some(&ours, 3).await);
    assert_eq!(held.last().map(Slot::active), Some(6));
    drop(held);
    assert_eq!(used(&ours).await, 2);
    drop(others);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_tells_as_well() {
    let store = Watched::default();
    let (ours, theirs) = (on(&store).limit(4).build().unwrap(), on(&store).limit(4).build().unwrap());
    drop(take_some(&ours, 2).await);
    let others = take_some(&theirs, 2).await;
    assert!(matches!(theirs.try_acquire(ID).await, Err(AcquireError::Saturated { active: 4, .. })));
    // Of another weight, for which idle slots go back first.
    assert!(ours.acquire(ID, Acquire::weight(3)).await.is_err());
    assert_eq!(used(&ours).await, 2);
    drop(others);
}

#[tokio::test(start_paused = true)]
async fn slots_of_other_weights_go_back_before_the_store_is_asked() {
    let (limiter, store) = reusing(10);
    drop(limiter.acquire(ID, Acquire::weight(5)).await.unwrap());
    assert_eq!(used(&limiter).await, 5);
    let six = limiter.acquire(ID, Acquire::weight(6)).await.unwrap();
    assert_eq!((six.active(), store.calls()), (6, (2, 1)));
    drop(six);
    assert_eq!(used(&limiter).await, 0);
    let two = limiter.acquire(ID, Acquire::weight(2)).await.unwrap();
    let three = limiter.acquire(ID, Acquire::weight(3)).await.unwrap();
    let (second, third) = (two.id(), three.id());
    drop((two, three));
    let two = limiter.acquire(ID, Acquire::weight(2)).await.unwrap();
    let three = limiter.acquire(ID, Acquire::weight(3)).await.unwrap();
    assert_eq!((two.id(), three.id(), store.calls().0), (second, third, 4), "each by its weight");
}

#[tokio::test(start_paused = true)]
async fn a_lowered_limit_counts_at_once() {
    let most = Arc::new(AtomicU32::new(10));
    let source = Arc::clone(&most);
    let store = Watched::default();
    let limiter = on(&store)
        .limits(move |_| {
            let most = source.load(Ordering::SeqCst);
            async move { tower_slots::Limit::Max(most) }
        })
        .limit_cache(Duration::ZERO, 100)
        .build()
        .unwrap();
    for lowered in [0, 3, 1] {
        most.store(10, Ordering::SeqCst);
        let slots = take_some(&limiter, 2).await;
        let ids: Vec<_> = slots.iter().map(Slot::id).collect();
        drop(slots);
        assert_eq!(used(&limiter).await, 2);
        most.store(lowered, Ordering::SeqCst);
        let slot = limiter.try_acquire(ID).await;
        assert_eq!(slot.is_ok(), lowered > 0);
        assert!(slot.as_ref().is_ok_and(|slot| !ids.contains(&slot.id())) || lowered == 0);
        assert_eq!(used(&limiter).await, u32::from(lowered > 0));
        drop(slot);
        limiter.drain(ID).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_drained_while_idle_serves_nobody() {
    let store = Watched::default();
    let (ours, theirs) = (on(&store).build().unwrap(), on(&store).build().unwrap());
    let old = take(&ours).await;
    let id = old.id();
    drop(old);
    assert_eq!(theirs.drain(ID).await.unwrap(), 1);
    let new = take(&ours).await;
    assert!(new.id() != id && new.active() == 1);
    assert_eq!(new.lost().now_or_never(), None);
    drop(new);
    assert_eq!(ours.drain(ID).await.unwrap(), 0, "one's own idle slots are nobody's");
    assert_eq!(used(&ours).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_reused_slot_that_is_drained_is_lost_to_who_has_it_now() {
    let (limiter, _store) = reusing(10);
    let first = take(&limiter).await;
    let (id, handle) = (first.id(), first.handle());
    assert_eq!(handle.lost().now_or_never(), None);
    let mut told = Box::pin(handle.lost());
    assert!((&mut told).now_or_never().is_none());
    drop(first);
    assert_eq!((&mut told).now_or_never(), Some(()), "what was given back is lost");
    assert!(handle.hold().is_none());
    let second = take(&limiter).await;
    assert_eq!(second.id(), id);
    assert!(handle.hold().is_none(), "a handle is for its own request");
    assert_eq!(second.lost().now_or_never(), None);
    assert_eq!(limiter.drain(ID).await.unwrap(), 1);
    assert_eq!(second.lost().now_or_never(), Some(()));
    drop(second);
    assert_ne!(take(&limiter).await.id(), id, "what is lost is not kept");
}

#[tokio::test(start_paused = true)]
async fn a_held_slot_keeps_it_from_being_reused() {
    let (limiter, _store) = reusing(10);
    let slot = take(&limiter).await;
    let held = slot.handle().hold().unwrap();
    drop(slot);
    let other = take(&limiter).await;
    assert_ne!(other.id(), held.id());
    let id = held.id();
    drop(held);
    assert_eq!(take(&limiter).await.id(), id);
}

#[tokio::test(start_paused = true)]
async fn max_hold_counts_from_each_requests_own_acquire() {
    let store = Watched::default();
    let limiter = on(&store).lease(60 * SECOND).reuse(20 * SECOND).max_hold(10 * SECOND).build().unwrap();
    let first = take(&limiter).await;
    let id = first.id();
    advance(8 * SECOND).await;
    drop(first);
    advance(4 * SECOND).await;
    assert_eq!(used(&limiter).await, 1, "idle, it is not held");
    let second = take(&limiter).await;
    assert_eq!(second.id(), id);
    advance(9 * SECOND).await;
    assert_eq!(used(&limiter).await, 1);
    assert_eq!(second.lost().now_or_never(), None, "9 s of its own");
    let start = Instant::now();
    second.lost().await;
    assert!(start.elapsed() < 1100 * MS);
    assert_eq!(used(&limiter).await, 0);
    assert_eq!(second.lost().now_or_never(), Some(()));
}

#[tokio::test(start_paused = true)]
async fn shutdown_gives_back_what_is_idle_and_then_keeps_nothing() {
    let (limiter, store) = reusing(10);
    let held = take_some(&limiter, 2).await;
    drop(take(&limiter).await);
    let mut shutdown = Box::pin(limiter.shutdown(SECOND));
    assert!((&mut shutdown).now_or_never().is_none());
    assert_eq!(used(&limiter).await, 2);
    assert!(matches!(limiter.try_acquire(ID).await, Err(AcquireError::Closed)));
    drop(held);
    assert!(shutdown.await);
    assert_eq!((used(&limiter).await, store.calls()), (0, (3, 3)));
}

#[tokio::test(start_paused = true)]
async fn a_limiter_that_is_dropped_gives_back_what_is_idle() {
    let store = Watched::default();
    let watch = on(&store).build().unwrap();
    let limiter = on(&store).build().unwrap();
    let last = take(&limiter).await;
    drop(take(&limiter).await);
    drop(limiter);
    assert_eq!(used(&watch).await, 2, "a slot keeps its limiter");
    drop(last);
    assert_eq!(used(&watch).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_panics_gives_its_slot_to_the_next() {
    let (limiter, store) = reusing(10);
    let slot = take(&limiter).await;
    let id = slot.id();
    let panicked = tokio::spawn(async move {
        let _slot = slot;
        panic!("on purpose");
    });
    panicked.await.unwrap_err();
    assert_eq!(take(&limiter).await.id(), id);
    assert_eq!(store.calls(), (1, 0));
}

#[test]
fn nothing_is_kept_outside_a_runtime() {
    let (limiter, store) = reusing(10);
    let slot = limiter.try_acquire(ID).now_or_never().unwrap().unwrap();
    drop(slot);
    assert_eq!(store.calls(), (1, 1));
    let runtime = runtime();
    let slot = runtime.block_on(take(&limiter));
    // Outside, while the one that looks for what is due lives.
    drop(slot);
    assert_eq!(store.calls(), (2, 1));
    drop(runtime);
    assert_eq!(store.calls(), (2, 2), "everything goes back with the runtime");
    drop(limiter.try_acquire(ID).now_or_never().unwrap().unwrap());
    assert_eq!(store.calls(), (3, 3));
}

#[test]
fn threads_that_go_on_after_the_runtime_keep_nothing() {
    for _ in 0..200 {
        let (limiter, store) = reusing(1000);
        let runtime = runtime();
        let slots = runtime.block_on(take_some(&limiter, 200));
        drop(runtime.block_on(take(&limiter)));
        let barrier = Arc::new(Barrier::new(2));
        let others = Arc::clone(&barrier);
        let releasing = std::thread::spawn(move || {
            others.wait();
            drop(slots);
        });
        barrier.wait();
        drop(runtime);
        releasing.join().unwrap();
        let (claims, releases) = store.calls();
        assert_eq!(claims, releases, "a slot stays where nobody looks for it");
    }
}

#[test]
fn a_runtime_that_nobody_drives_is_left_for_another() {
    let store = Watched::default();
    let limiter = on(&store).reuse(100 * MS).build().unwrap();
    let stuck = Builder::new_current_thread().enable_all().build().unwrap();
    stuck.block_on(async { drop(take(&limiter).await) });
    std::thread::sleep(800 * MS);
    assert_eq!(store.calls(), (1, 0));
    let other = runtime();
    other.block_on(async {
        drop(take(&limiter).await);
        assert_eq!(store.calls().0, 2, "what is too old serves nobody");
        eventually("all goes back", SOON, async || used(&limiter).await == 0).await;
    });
    // Driven again, the former one does not disturb.
    stuck.block_on(async {
        drop(take(&limiter).await);
        sleep(200 * MS).await;
    });
    other.block_on(eventually("all goes back", SOON, async || used(&limiter).await == 0));
}

#[tokio::test(start_paused = true)]
async fn ids_that_come_once_leave_nothing() {
    let (limiter, store) = reusing(10);
    for n in 0..10_000 {
        drop(limiter.try_acquire(&n.to_string()).await.unwrap());
    }
    sleep(2 * KEPT).await;
    assert_eq!(store.calls(), (10_000, 10_000));
    let metrics = tokio::runtime::Handle::current().metrics();
    assert_eq!(metrics.num_alive_tasks(), 0, "nobody looks where nothing is");
    // And it starts again.
    drop(take(&limiter).await);
    assert_eq!((used(&limiter).await, metrics.num_alive_tasks()), (1, 1));
    sleep(KEPT).await;
    assert_eq!(used(&limiter).await, 0);
}

#[test]
fn times_that_cannot_work_are_refused() {
    let with = |time, lease| on(&Watched::default()).lease(lease).reuse(time).build().err();
    for time in [Duration::ZERO, Duration::from_micros(999), 10 * SECOND + MS, Duration::MAX] {
        assert_eq!(with(time, 30 * SECOND).map(|error| error.field()), Some("reuse"), "{time:?}");
    }
    for time in [MS, 10 * SECOND] {
        assert_eq!(with(time, 30 * SECOND), None, "{time:?}");
    }
}

#[cfg(feature = "metrics")]
#[tokio::test(start_paused = true)]
async fn metrics_count_requests_and_not_what_the_store_has() {
    let (limiter, meter) = support::meter::recorded(|| on(&Watched::default()).build().unwrap());
    for _ in 0..3 {
        drop(take(&limiter).await);
    }
    let slot = take(&limiter).await;
    let seen = meter.read();
    assert_eq!(seen["requests_total{admitted}"], [4.0]);
    assert_eq!(seen["slots_reused_total"], [3.0]);
    assert_eq!(seen["slot_hold_seconds{dropped}"].len(), 3);
    assert_eq!(seen["active_slots"], [1.0]);
    drop(slot);
    limiter.drain(ID).await.unwrap();
    let seen = meter.read();
    assert_eq!((&seen["active_slots"][..], &seen["slots_lost_total"][..]), (&[0.0][..], &[0.0][..]));
}

// ---- over Redis

/// So large that every thread keeps slots of its own, on whatever machine this is.
const LARGE: u32 = 8192;

/// Does it on a thread of its own, within the runtime of the test.
fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let runtime = Handle::current();
    std::thread::spawn(move || {
        let _within = runtime.enter();
        work()
    })
}

/// Takes so many at once and gives them back, on another thread.
fn keep_on_a_thread(limiter: &Limiter, count: usize, weight: u32) -> JoinHandle<()> {
    let limiter = limiter.clone();
    on_a_thread(move || {
        let take = || limiter.acquire(ID, Acquire::weight(weight)).now_or_never().unwrap().unwrap();
        drop(std::iter::repeat_with(take).take(count).collect::<Vec<_>>());
    })
}

#[tokio::test(start_paused = true)]
async fn threads_keep_no_more_than_half_the_limit_among_them() {
    let (limiter, store) = reusing(LARGE);
    let keep = || {
        let all_have_theirs = Arc::new(Barrier::new(8));
        let thread = |_| {
            let (limiter, all_have_theirs) = (limiter.clone(), Arc::clone(&all_have_theirs));
            on_a_thread(move || {
                let slots: Vec<_> = (0..500).map(|_| take(&limiter).now_or_never().unwrap()).collect();
                all_have_theirs.wait();
                drop(slots);
            })
        };
        let threads: Vec<_> = (0..8).map(thread).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    };
    keep();
    let (kept, acquires) = (used(&limiter).await, store.calls().0);
    assert!((LARGE / 4..=LARGE / 2).contains(&kept), "{kept} are kept");
    keep();
    let more = store.calls().0 - acquires;
    assert!(more <= 8 * 500 - kept as usize, "{more} went to the store though {kept} were kept");
    sleep(KEPT).await;
    assert_eq!(used(&limiter).await, 0);
}

#[tokio::test(start_paused = true)]
async fn what_one_thread_keeps_serves_another_before_the_store_is_asked() {
    let (limiter, store) = reusing(LARGE);
    keep_on_a_thread(&limiter, 8, 1).join().unwrap();
    assert_eq!((used(&limiter).await, store.calls()), (8, (8, 0)));
    let slots = take_some(&limiter, 8).await;
    assert_eq!((used(&limiter).await, store.calls()), (8, (8, 0)));
    drop(slots);
    // None of this weight is kept: all others go back ahead of the claim.
    keep_on_a_thread(&limiter, 1, 2).join().unwrap();
    assert_eq!((used(&limiter).await, store.calls()), (2, (9, 8)));
}

#[tokio::test(start_paused = true)]
async fn what_threads_keep_goes_back_when_the_use_passes_half_the_limit() {
    let store = Watched::default();
    let build = || on(&store).limit(LARGE).build().unwrap();
    let (ours, theirs) = (build(), build());
    keep_on_a_thread(&ours, 8, 1).join().unwrap();
    let others = take_some(&theirs, LARGE as usize / 2).await;
    let held = take_some(&ours, 8).await;
    keep_on_a_thread(&ours, 1, 1).join().unwrap();
    drop(held);
    assert_eq!(used(&ours).await, LARGE / 2);
    drop(others);
}

#[tokio::test(start_paused = true)]
async fn what_threads_keep_goes_back_when_the_limit_is_lowered() {
    let most = Arc::new(AtomicU32::new(LARGE));
    let source = Arc::clone(&most);
    let store = Watched::default();
    let limiter = on(&store)
        .limits(move |_| std::future::ready(tower_slots::Limit::Max(source.load(Ordering::SeqCst))))
        .build()
        .unwrap();
    let _looked_up = take(&limiter).await;
    keep_on_a_thread(&limiter, 8, 1).join().unwrap();
    assert_eq!(used(&limiter).await, 9);
    most.store(10, Ordering::SeqCst);
    limiter.invalidate(ID);
    let _slot = take(&limiter).await;
    assert_eq!(used(&limiter).await, 2);
}

#[tokio::test(start_paused = true)]
async fn what_threads_keep_is_drained_and_shut_down_with_the_rest() {
    let (limiter, store) = reusing(LARGE);
    keep_on_a_thread(&limiter, 8, 1).join().unwrap();
    assert_eq!(limiter.drain(ID).await.unwrap(), 0, "they went back first");
    assert_eq!(store.calls(), (8, 8));
    keep_on_a_thread(&limiter, 8, 1).join().unwrap();
    assert!(limiter.shutdown(SECOND).await);
    assert_eq!((used(&limiter).await, store.calls()), (0, (16, 16)));
}

fn over(server: &RedisServer, limit: u32) -> LimiterBuilder {
    // A long time-out: a machine under load is no outage, and an outage would admit.
    Limiter::builder(RedisStore::open(server.url()).unwrap())
        .limit(limit)
        .store_timeout(5 * SECOND)
        .reuse(KEPT)
}

#[tokio::test]
async fn shutdown_returns_when_the_server_has_the_releases() {
    let server = RedisServer::start();
    let limiter = over(&server, 10).build().unwrap();
    drop(take_some(&limiter, 5).await);
    assert_eq!(server.zcard(ACME).await, 5);
    assert!(limiter.shutdown(SOON).await);
    assert_eq!(server.zcard(ACME).await, 0);
}

#[tokio::test]
async fn a_slot_that_another_process_drained_is_lost_at_its_next_renewal() {
    let server = RedisServer::start();
    let ours = over(&server, 10).lease(3 * SECOND).store_timeout(2 * SECOND).build().unwrap();
    let theirs = over(&server, 10).build().unwrap();
    let first = take(&ours).await;
    let id = first.id();
    drop(first);
    assert_eq!(theirs.drain(ID).await.unwrap(), 1);
    let second = take(&ours).await;
    assert_eq!(second.id(), id, "nobody could know");
    tokio::time::timeout(SOON, second.lost()).await.expect("a renewal tells");
    drop(second);
    let third = take(&ours).await;
    assert_eq!((third.id() == id, third.active()), (false, 1));
}

#[tokio::test]
async fn max_hold_counts_from_each_requests_own_acquire_over_redis() {
    let server = RedisServer::start();
    let limiter = over(&server, 10).lease(6 * SECOND).reuse(2 * SECOND).max_hold(3 * SECOND).build().unwrap();
    let first = take(&limiter).await;
    let id = first.id();
    sleep(1500 * MS).await;
    drop(first);
    let (second, start) = (take(&limiter).await, Instant::now());
    assert_eq!(second.id(), id);
    while start.elapsed() < 2800 * MS {
        let kept = server.zcard(ACME).await == 1;
        assert!(kept || start.elapsed() >= 2900 * MS, "given back after {:?}", start.elapsed());
        sleep(20 * MS).await;
    }
    tokio::time::timeout(SOON, second.lost()).await.expect("its time is over");
    eventually("the server has it back", SOON, async || server.zcard(ACME).await == 0).await;
}

#[tokio::test]
async fn an_idle_slot_is_renewed_and_the_limit_is_whole_afterwards() {
    let server = RedisServer::start();
    let limiter = over(&server, 2).lease(3 * SECOND).store_timeout(2 * SECOND).build().unwrap();
    let end = Instant::now() + 4 * SECOND;
    while Instant::now() < end {
        drop(take(&limiter).await);
        sleep(5 * MS).await;
    }
    eventually("idle slots go back", SOON, async || server.zcard(ACME).await == 0).await;
    let whole = take_some(&limiter, 2).await;
    assert!(limiter.try_acquire(ID).await.is_err());
    drop(whole);
}

/// Comes and goes, now in a crowd and now alone, with weights of one and two. Returns how many visits
/// had a slot that one before them had.
async fn visit(limiter: Limiter, history: History, time: Duration) -> usize {
    let end = Instant::now() + time;
    let visits = (0..8u64).map(|visitor| {
        let (limiter, history) = (limiter.clone(), history.clone());
        tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(support::random());
            let mut ids = Vec::new();
            while Instant::now() < end {
                let weight = if visitor == 0 { 2 } else { 1 };
                if let Ok(slot) = limiter.acquire(ID, Acquire::weight(weight)).await {
                    assert_eq!(slot.origin(), Origin::Store);
                    let visit = history.enter(ID, weight);
                    ids.push(slot.id());
                    sleep(Duration::from_micros(random.u64(0..3000))).await;
                    drop((visit, slot));
                }
                let pause = if random.u8(0..20) == 0 { 200 } else { random.u64(0..4) };
                sleep(Duration::from_millis(pause)).await;
            }
            ids
        })
    });
    let ids: Vec<_> = join_all(visits).await.into_iter().flat_map(Result::unwrap).collect();
    ids.len() - ids.iter().collect::<HashSet<_>>().len()
}

/// The child's part: comes and goes until its time is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn visitor() {
    let Some(args) = child::role("visitor") else { return };
    let builder = Limiter::builder(RedisStore::open(args.get("URL")).unwrap()).store_timeout(5 * SECOND);
    let limit = number(&args, "LIMIT");
    let limiter = builder.limit(limit).reuse(50 * MS).build().unwrap();
    let history = History::new();
    assert!(is_reuse_enough(visit(limiter.clone(), history.clone(), 3 * SECOND).await, limit));
    assert!(limiter.shutdown(SOON).await);
    history.to_lines().iter().for_each(|line| println!("{line}"));
}

/// Where the limit is low, more than half of it may be in use all the time, and nothing is kept.
fn is_reuse_enough(reused: usize, limit: u32) -> bool {
    reused > 0 || limit < 16
}

fn number(args: &Args, name: &str) -> u32 {
    args.get(name).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_holds_over_processes_that_reuse() {
    for limit in [4, 7, 16] {
        let server = RedisServer::start();
        let (url, most) = (server.url(), limit.to_string());
        let children: Vec<_> = (0..2)
            .map(|_| Child::spawn("visitor", "visitor", &[("URL", &*url), ("LIMIT", &*most)]))
            .collect();
        // And one limiter that does not reuse, and one that does, in one process.
        let history = History::new();
        let plain = Limiter::builder(RedisStore::open(server.url()).unwrap());
        let plain = plain.limit(limit).store_timeout(5 * SECOND).build().unwrap();
        let (store, ours) = (server.url(), over(&server, limit).reuse(20 * MS).build().unwrap());
        let visits = [plain.clone(), ours.clone()].map(|it| visit(it, history.clone(), 3 * SECOND));
        let reused = join_all(visits).await;
        assert!(reused[0] == 0 && is_reuse_enough(reused[1], limit), "{reused:?} at {limit}");
        for child in children {
            let lines = child.finish(6 * SOON).await;
            history.read_lines(lines.iter().map(String::as_str));
        }
        history.assert_within(ID, limit);
        assert!(history.visits(ID) > 20, "{} visits", history.visits(ID));
        assert!(plain.shutdown(SOON).await && ours.shutdown(SOON).await);
        assert_eq!(server.zcard(ACME).await, 0, "nothing is left on {store}");
    }
}

#[tokio::test]
async fn a_second_process_is_never_refused_while_the_first_only_idles_on_more_than_half() {
    let server = RedisServer::start();
    // Not within this test's patience do slots go back just because their time is over.
    let first = over(&server, 10).lease(MINUTE).reuse(MINUTE / 3).build().unwrap();
    let second = Limiter::builder(RedisStore::open(server.url()).unwrap()).limit(10);
    let second = second.store_timeout(5 * SECOND).build().unwrap();
    for crowd in 1..=10 {
        drop(take_some(&first, crowd).await);
        let kept = if crowd <= 5 { crowd as u64 } else { 0 };
        // What the first gives back may still be on its way.
        eventually("no more than half is idle", SOON, async || server.zcard(ACME).await == kept).await;
        let slots = take_some(&second, 10 - kept as usize).await;
        assert!(second.try_acquire(ID).await.is_err());
        for slot in slots {
            slot.release().await.unwrap();
        }
        first.drain(ID).await.unwrap();
        eventually("nothing is left", SOON, async || server.zcard(ACME).await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_on_one_id_both_get_on() {
    let server = RedisServer::start();
    let limiters = [over(&server, 8), over(&server, 8)].map(|it| it.reuse(50 * MS).build().unwrap());
    let over = Arc::new(AtomicBool::new(false));
    let counts = limiters.map(|limiter| {
        let over = Arc::clone(&over);
        tokio::spawn(async move {
            let mut count = 0;
            while !over.load(Ordering::Relaxed) {
                if let Ok(slots) = join_all((0..5).map(|_| limiter.try_acquire(ID)))
                    .await
                    .into_iter()
                    .collect::<Result<Vec<_>, _>>()
                {
                    count += 1;
                    sleep(MS).await;
                    drop(slots);
                }
                sleep(Duration::from_micros(fastrand::u64(0..2000))).await;
            }
            count
        })
    });
    sleep(2 * SECOND).await;
    over.store(true, Ordering::Relaxed);
    for count in join_all(counts).await {
        assert!(count.unwrap() > 20);
    }
}

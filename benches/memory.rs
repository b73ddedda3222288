//! Memory: what very many ids leave behind, and what held slots take, here and in Redis.

mod harness;
#[path = "../tests/support/mod.rs"]
mod support;
#[path = "harness/ways.rs"]
mod ways;

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use harness::{Bench, Figures, Target, Unit};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::RedisServer;
use tower_slots::{Limit, Limiter, ProjectId};
use ways::{NO_LIMIT, builder, names};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const CALLERS: usize = 1024;
const LEASE: Duration = Duration::from_secs(5);
/// How many limits are kept: far fewer than there are ids.
const CACHED: u64 = 10_000;

fn main() {
    let bench = Bench::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(&bench));
}

async fn run(bench: &Bench) {
    if bench.wants("ids") {
        passing_ids(bench).await;
    }
    if bench.wants("held") {
        held_slots(bench).await;
    }
}

/// One limiter is asked for slots of ids that it never sees again, each with a limit that is looked up.
async fn passing_ids(bench: &Bench) {
    let server = RedisServer::start();
    let limiter = builder(&server.url(), NO_LIMIT)
        .limits(|_: ProjectId| async { Limit::Max(10) })
        .limit_cache(Duration::from_secs(60), CACHED)
        .lease(LEASE)
        .store_timeout(LEASE * 4 / 5)
        .build()
        .expect("settings");
    let ids = bench.pick(1_000_000, 200_000, 2000);
    // Half as many fill the cache and all buffers.
    pass(&limiter, "warm-up", ids / 2).await;
    let (resident, heap, redis) = settled(&server).await;
    pass(&limiter, "id", ids).await;
    let (resident_after, heap_after, redis_after) = settled(&server).await;

    let name = |what: &str| format!("memory: {ids} ids passed: {what}, at the start");
    let (mb, most) = (Unit::lower("MB"), Target::Ratio(1.1));
    bench.row(&name("resident"), mb, Figures::once(resident_after, resident), most);
    bench.row(&name("heap"), mb, Figures::once(heap_after, heap), most);
    bench.row(&name("used by Redis"), mb, Figures::once(redis_after, redis), Target::None);
    let keys: u64 = server.read(&["DBSIZE"]).await;
    let name = format!("memory: {ids} ids passed: keys in Redis after a lease");
    bench.row(&name, Unit::lower("keys"), Figures::ours(keys as f64), Target::Ours(0.0));
}

async fn pass(limiter: &Limiter, name: &'static str, ids: usize) {
    let next = Arc::new(AtomicUsize::new(0));
    let callers = (0..CALLERS).map(|_| {
        let (limiter, next) = (limiter.clone(), Arc::clone(&next));
        tokio::spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= ids {
                    return;
                }
                drop(limiter.try_acquire(&format!("{name}-{n}")).await.expect("a slot"));
            }
        })
    });
    for caller in join_all(callers).await {
        caller.expect("a caller");
    }
}

/// Megabytes, resident and on the heap of this process, and in use by Redis, a lease after the last call.
async fn settled(server: &RedisServer) -> (f64, f64, f64) {
    tokio::time::sleep(LEASE).await;
    (resident() / 1e6, heap() / 1e6, in_redis(server).await / 1e6)
}

async fn held_slots(bench: &Bench) {
    let server = RedisServer::start();
    let limiter = builder(&server.url(), NO_LIMIT).build().expect("settings");
    let (ids, each) = bench.pick((1000, 100), (1000, 100), (10, 10));
    let slots = (ids * each) as f64;
    pass(&limiter, "warm-up", 5000).await;
    let before = (resident(), heap(), in_redis(&server).await);
    let mut held = Vec::with_capacity(ids * each);
    for id in names(ids) {
        held.extend(join_all((0..each).map(|_| limiter.try_acquire(&id))).await);
    }
    let after = (resident(), heap(), in_redis(&server).await);
    assert!(held.iter().all(Result::is_ok), "each acquire got a slot");

    let row = |what: &str, bytes: f64| {
        let name = format!("memory: {} slots held, {ids} ids: {what}", ids * each);
        bench.row(&name, Unit::lower("bytes per slot"), Figures::ours(bytes / slots), Target::None);
    };
    row("resident", after.0 - before.0);
    row("heap", after.1 - before.1);
    row("in Redis", after.2 - before.2);
}

/// In bytes; where the system does not tell, not a number.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    kilobytes.and_then(|kilobytes| kilobytes.parse::<f64>().ok()).unwrap_or(f64::NAN) * 1024.0
}

fn heap() -> f64 {
    let stats = HEAP.stats();
    stats.bytes_allocated as f64 - stats.bytes_deallocated as f64
}

async fn in_redis(server: &RedisServer) -> f64 {
    let info: String = server.read(&["INFO", "memory"]).await;
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
    used.and_then(|used| used.trim().parse().ok()).expect("a number")
}

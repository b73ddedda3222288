//! Heap allocations: of a call through the layer, and of a pair of acquire and release through Redis.
//!
//! They are counted over the whole process, so what tasks beside the caller allocate counts too. They
//! have a bench of their own, because counting takes time.

mod harness;
#[path = "harness/http.rs"]
mod services;
#[path = "../tests/support/mod.rs"]
mod support;
#[path = "harness/ways.rs"]
mod ways;

use std::alloc::System;
use std::convert::Infallible;
use std::time::Duration;

use harness::{Bench, Figures, Target, Unit, count};
use http::{Request, Response};
use services::{Answer, Plain, call_all, ours, request, tower};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::RedisServer;
use tower::{Layer, Service};
use tower_slots::Limit;
use ways::{Load, NO_LIMIT, Way};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const ALLOCATIONS: Unit = Unit::lower("allocations");

fn main() {
    let bench = Bench::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(&bench));
}

async fn run(bench: &Bench) {
    if bench.wants("calls") {
        calls(bench).await;
    }
    if bench.wants("pairs") {
        pairs(bench).await;
    }
}

async fn calls(bench: &Bench) {
    for (extension, what) in [(false, "no extension"), (true, "an extension")] {
        for (name, limit, target) in
            [("memory", Limit::Max(100), Target::Ours(3.0)), ("unlimited", Limit::Unlimited, Target::None)]
        {
            let mut ours = ours(limit).layer(Answer);
            let figures =
                Figures::once(per_call(&mut ours, extension).await, per_call(&mut tower(), extension).await);
            bench.row(&format!("layer: {name}, {what}: per call"), ALLOCATIONS, figures, target);
        }
    }
}

async fn per_call<S, B>(service: &mut S, extension: bool) -> f64
where
    S: Service<Request<Plain>, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Error = Infallible> + Unpin,
{
    const CALLS: usize = 1000;
    let requests = || (0..CALLS).map(|_| request(extension)).collect::<Vec<_>>();
    call_all(service, requests()).await;
    let requests = requests();
    let before = allocations();
    call_all(service, requests).await;
    (allocations() - before) / CALLS as f64
}

async fn pairs(bench: &Bench) {
    let server = RedisServer::start();
    let (ours, theirs) = (Way::ours(&server.url(), NO_LIMIT), Way::theirs(&server.url(), NO_LIMIT).await);
    for (ids, callers, work) in [(1, 1, Some(Duration::from_millis(2))), (1, 256, None), (1000, 256, None)] {
        let load = Load { work, ..Load::new(ids, callers, bench.millis(400, 200)) };
        let measure = async |way: &Way| {
            let before = allocations();
            let came = load.run(way).await;
            (allocations() - before) / came.asked as f64
        };
        let rounds = bench.compare(async || measure(&ours).await, async || measure(&theirs).await).await;
        let name = format!("redis: {}, {}: per pair", count(ids, "id"), count(callers, "caller"));
        bench.row(&name, ALLOCATIONS, rounds.figures(|count| *count), Target::None);
    }
}

fn allocations() -> f64 {
    let stats = HEAP.stats();
    (stats.allocations + stats.reallocations) as f64
}

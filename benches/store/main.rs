//! Slots through Redis, beside the same with one script call for each acquire and release.
//!
//! The servers are started here.

#[path = "../harness/mod.rs"]
mod harness;
#[path = "../../tests/support/mod.rs"]
mod support;
#[path = "../harness/ways.rs"]
mod ways;

mod fleet;
mod latency;
mod renewal;
mod reuse;
mod saturated;
mod throughput;

use harness::Bench;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        if !fleet::run_part().await {
            run(&Bench::start()).await;
        }
    });
}

async fn run(bench: &Bench) {
    if bench.wants("throughput") {
        throughput::run(bench).await;
    }
    if bench.wants("quiet") {
        latency::quiet(bench).await;
    }
    if bench.wants("link") {
        latency::slow_link(bench).await;
    }
    if bench.wants("weights") {
        latency::weights(bench).await;
    }
    if bench.wants("saturated") {
        saturated::run(bench).await;
    }
    if bench.wants("renewal") {
        renewal::run(bench).await;
    }
    if bench.wants("reuse") {
        reuse::run(bench).await;
    }
    if bench.wants("fleet") {
        fleet::run(bench).await;
    }
}

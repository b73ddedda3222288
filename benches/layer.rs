//! The layer beside tower's `GlobalConcurrencyLimitLayer` and beside the bare service: whole calls,
//! from the request to the end of the response's body, without making the request.

mod harness;
#[path = "harness/http.rs"]
mod services;

use std::convert::Infallible;
use std::time::Instant;

use harness::{Bench, Target, Unit};
use http::{Request, Response};
use metrics_util::debugging::DebuggingRecorder;
use services::{Answer, Plain, Tenant, call_all, ours, request, tower};
use tower::{Layer, Service};
use tower_slots::{ConcurrencyLimitLayer, Limit, key, key::KeyExtractor};

const NANOS: Unit = Unit::lower("ns");
/// So many requests are made ready at a time: few enough to stay in the cache, as a fresh one would be.
const BATCH: usize = 32;

fn main() {
    let bench = Bench::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(&bench));
}

async fn run(bench: &Bench) {
    for (extension, what) in [(false, "no extension"), (true, "an extension")] {
        if !bench.wants(what) {
            continue;
        }
        let row = async |name: &str, layer, target| {
            beside_tower(bench, &format!("{name}, {what}"), layer, extension, target).await;
        };
        row("memory", ours(100), Target::Ratio(2.0)).await;
        row("unlimited", ours(Limit::Unlimited), Target::None).await;
    }
    if bench.wants("bare") {
        let name = "layer: memory, an extension, bare service";
        compare(bench, name, ours(100).layer(Answer), Answer, true, Target::None).await;
    }
    if bench.wants("keys") {
        keys(bench).await;
    }
    if bench.wants("metrics") {
        metered(bench).await;
    }
}

async fn beside_tower(
    bench: &Bench,
    name: &str,
    layer: ConcurrencyLimitLayer,
    extension: bool,
    target: Target,
) {
    let name = format!("layer: {name}, tower's");
    compare(bench, &name, layer.layer(Answer), tower(), extension, target).await;
}

/// Other sources of the id beside the header.
async fn keys(bench: &Bench) {
    let hashed = key::header("x-project-id").hashed("a secret").expect("a secret");
    let layers = [
        ("extension", ours(100).key(key::extension::<Tenant>(|tenant| tenant.0))),
        ("hashed header", ours(100).key(hashed)),
    ];
    for (name, layer) in layers {
        let name = format!("layer: id of {name}, of a header");
        compare(bench, &name, layer.layer(Answer), ours(100).layer(Answer), true, Target::None).await;
    }
}

/// With a recorder that keeps what is measured, as exporters do, beside none.
async fn metered(bench: &Bench) {
    let recorder = DebuggingRecorder::new();
    let scrape = recorder.snapshotter();
    let mut metered = metrics::with_local_recorder(&recorder, || ours(100)).layer(Answer);
    let mut silent = ours(100).layer(Answer);
    let batches = batches(bench);
    let ours = async || {
        drop(scrape.snapshot());
        nanos_per_call(&mut metered, batches, true).await
    };
    let theirs = async || nanos_per_call(&mut silent, batches, true).await;
    let rounds = bench.compare(ours, theirs).await;
    bench.row("layer: metrics recorded, not recorded", NANOS, rounds.figures(|nanos| *nanos), Target::None);
}

fn batches(bench: &Bench) -> usize {
    bench.pick(1500, 600, 1)
}

async fn compare<A, B, BodyA, BodyB>(
    bench: &Bench,
    name: &str,
    mut a: A,
    mut b: B,
    extension: bool,
    target: Target,
) where
    A: Service<Request<Plain>, Response = Response<BodyA>, Error = Infallible>,
    B: Service<Request<Plain>, Response = Response<BodyB>, Error = Infallible>,
    BodyA: http_body::Body<Error = Infallible> + Unpin,
    BodyB: http_body::Body<Error = Infallible> + Unpin,
{
    let batches = batches(bench);
    let ours = async || nanos_per_call(&mut a, batches, extension).await;
    let theirs = async || nanos_per_call(&mut b, batches, extension).await;
    let rounds = bench.compare(ours, theirs).await;
    bench.row(name, NANOS, rounds.figures(|nanos| *nanos), target);
}

async fn nanos_per_call<S, B>(service: &mut S, batches: usize, extension: bool) -> f64
where
    S: Service<Request<Plain>, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Error = Infallible> + Unpin,
{
    let mut nanos = Vec::new();
    for _ in 0..batches {
        let requests: Vec<_> = (0..BATCH).map(|_| request(extension)).collect();
        let start = Instant::now();
        call_all(service, requests).await;
        nanos.push(start.elapsed().as_secs_f64() * 1e9 / BATCH as f64);
    }
    harness::median(nanos)
}

//! What it costs to keep slots: renewals of very many.

use std::time::Duration;

use futures_util::future::join_all;
use tower_slots::Limiter;

use crate::harness::{Bench, Figures, Target, Unit};
use crate::support::RedisServer;
use crate::support::meter::recorded;
use crate::ways::{NO_LIMIT, Spent, builder, names};

const LEASE: Duration = Duration::from_secs(30);

pub(crate) async fn run(bench: &Bench) {
    let (ids, each) = bench.pick((1000, 100), (1000, 100), (10, 10));
    // A renewal costs the same whatever the lease is, so a shorter one is measured in less time.
    let lease = bench.pick(LEASE, Duration::from_secs(6), Duration::from_secs(1));
    let server = RedisServer::start();
    let limiter = builder(&server.url(), NO_LIMIT).lease(lease).store_timeout(lease / 2);
    let build = || limiter.build().expect("settings");
    let (limiter, meter) = recorded(build);
    let slots = hold(&limiter, ids, each).await;
    let (spent, renewed) = (Spent::by(&server).await, meter.sum("renewals_total{renewed}"));
    tokio::time::sleep(lease).await;
    let spent = Spent::by(&server).await.since(spent);
    let renewed = meter.sum("renewals_total{renewed}") - renewed;
    drop(slots);

    let name = |what: &str| format!("redis: {} held slots, {ids} ids: {what}", ids * each);
    let calls = spent.script_calls * each as f64 / renewed;
    bench.row(&name("calls per id and its tick"), Unit::lower("1"), Figures::ours(calls), Target::Ours(1.1));
    let share = spent.cpu / LEASE.as_secs_f64() * 100.0;
    let unit = Unit::lower("% of a core");
    bench.row(&name("server CPU at 30 s lease"), unit, Figures::ours(share), Target::Ours(2.0));
    let micros = spent.cpu * 1e6 / renewed;
    bench.row(&name("server CPU per renewal"), Unit::lower("µs"), Figures::ours(micros), Target::None);
    let rounds = renewed / (ids * each) as f64;
    bench.row(&name("renewals of a slot in a lease"), Unit::lower("1"), Figures::ours(rounds), Target::None);
}

/// Takes the slots of an id together, one id after the other, so that they fall due in one tick.
async fn hold(limiter: &Limiter, ids: usize, each: usize) -> Vec<tower_slots::Slot> {
    let mut slots = Vec::new();
    for id in names(ids) {
        let taken = join_all((0..each).map(|_| limiter.try_acquire(&id))).await;
        slots.extend(taken.into_iter().map(|slot| slot.expect("a slot")));
    }
    slots
}

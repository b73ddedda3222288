//! A hot id whose released slots stay in the process for a moment.

use std::time::Duration;

use crate::harness::{Bench, Target, Unit};
use crate::support::RedisServer;
use crate::ways::{Cost, Load, NO_LIMIT, Way, builder};

pub(crate) async fn run(bench: &Bench) {
    let server = RedisServer::start();
    let limiter = builder(&server.url(), NO_LIMIT).reuse(Duration::from_millis(100)).build();
    let ours = Way::Ours(limiter.expect("settings"));
    let theirs = Way::theirs(&server.url(), NO_LIMIT).await;
    for callers in [16, 256] {
        // The clock costs as much as such an acquire.
        let load = Load { timed: 32, ..Load::new(1, callers, bench.millis(500, 200)) };
        let measure = async |way: &Way| Cost::of(&server, way, &load).await;
        let rounds = bench.compare(async || measure(&ours).await, async || measure(&theirs).await).await;
        let row = |what: &str, unit, target, of: &dyn Fn(&Cost) -> f64| {
            let name = format!("redis: reuse, 1 id, {callers} callers: {what}");
            bench.row(&name, unit, rounds.figures(of), target);
        };
        let micros = Unit::lower("µs");
        row("pairs", Unit::higher("1/s"), Target::Ratio(50.0), &|cost| cost.came.per_second());
        row("acquire p50", micros, Target::None, &|cost| cost.came.acquire(0.5));
        row("server CPU per pair", micros, Target::None, &|cost| cost.per_pair(|spent| spent.cpu * 1e6));
    }
}

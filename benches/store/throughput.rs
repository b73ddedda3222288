//! Pairs of acquire and release as fast as callers can make them.

use crate::harness::{Bench, Rounds, Target, Unit, count};
use crate::support::RedisServer;
use crate::ways::{Cost, Load, NO_LIMIT, Way};

/// How many ids, and what share of their CPU time the server may spend on a pair of ours.
const IDS: [(usize, f64); 3] = [(1, 0.25), (100, 0.33), (1000, 0.5)];
const CALLERS: [usize; 6] = [1, 4, 16, 64, 256, 2048];

pub(crate) async fn run(bench: &Bench) {
    let server = RedisServer::start();
    let (ours, theirs) = (Way::ours(&server.url(), NO_LIMIT), Way::theirs(&server.url(), NO_LIMIT).await);
    for (ids, cpu) in IDS {
        for callers in CALLERS {
            let load = Load::new(ids, callers, bench.millis(500, 120));
            let measure = async |way: &Way| Cost::of(&server, way, &load).await;
            let rounds = bench.compare(async || measure(&ours).await, async || measure(&theirs).await).await;
            let cpu = if callers >= 256 { Target::Ratio(cpu) } else { Target::None };
            print(bench, ids, callers, &rounds, cpu);
        }
    }
}

fn pairs_target(ids: usize, callers: usize) -> Target {
    match (ids, callers) {
        (1, 64) => Target::Ratio(3.0),
        (1, 256) => Target::Ratio(6.0),
        (1, 2048) => Target::Ratio(8.0),
        (100, 256) => Target::Ratio(3.0),
        (100, 2048) => Target::Ratio(3.5),
        (1000, 256 | 2048) => Target::Ratio(2.0),
        (_, 4 | 16 | 64) => Target::Ratio(1.0),
        _ => Target::None,
    }
}

fn print(bench: &Bench, ids: usize, callers: usize, rounds: &Rounds<Cost>, cpu: Target) {
    let load = format!("redis: {}, {}", count(ids, "id"), count(callers, "caller"));
    let row = |what: &str, unit, target, of: &dyn Fn(&Cost) -> f64| {
        bench.row(&format!("{load}: {what}"), unit, rounds.figures(of), target);
    };
    let micros = Unit::lower("µs");
    row("pairs", Unit::higher("1/s"), pairs_target(ids, callers), &|cost| cost.came.per_second());
    row("acquire p50", micros, Target::None, &|cost| cost.came.acquire(0.5));
    row("acquire p99", micros, Target::None, &|cost| cost.came.acquire(0.99));
    row("server CPU per pair", micros, cpu, &|cost| cost.per_pair(|spent| spent.cpu * 1e6));
    // What it consists of, where callers are few and where they are many.
    if callers == 1 || callers >= 256 {
        row("in scripts per pair", micros, Target::None, &|cost| cost.per_pair(|spent| spent.scripts * 1e6));
        row("script calls per pair", Unit::lower("1"), Target::None, &|cost| {
            cost.per_pair(|spent| spent.script_calls)
        });
        row("bytes per pair", Unit::lower("bytes"), Target::None, &|cost| cost.per_pair(|spent| spent.bytes));
    }
}

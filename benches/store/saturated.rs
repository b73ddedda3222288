//! An id at its limit whose callers go on asking, and what others feel of it.

use std::time::Duration;

use crate::harness::{Bench, Target, Unit};
use crate::support::RedisServer;
use crate::ways::{Came, Cost, Load, Taken, Way};

const LIMIT: u32 = 4;

pub(crate) async fn run(bench: &Bench) {
    let server = RedisServer::start();
    let (ours, theirs) = (Way::ours(&server.url(), LIMIT), Way::theirs(&server.url(), LIMIT).await);
    let (full_a, full_b) = (fill(&ours).await, fill(&theirs).await);
    for callers in [64, 256] {
        let load = Load { ids: hot(), ..Load::new(1, callers, bench.millis(500, 150)) };
        let measure = async |way: &Way| Cost::of(&server, way, &load).await;
        let rounds = bench.compare(async || measure(&ours).await, async || measure(&theirs).await).await;
        let row = |what: &str, unit, of: &dyn Fn(&Cost) -> f64| {
            let name = format!("redis: full id, {callers} callers: {what}");
            bench.row(&name, unit, rounds.figures(of), Target::None);
        };
        row("refusals", Unit::higher("1/s"), &|cost| cost.came.refused as f64 / cost.came.seconds);
        let micros = Unit::lower("µs");
        row("server CPU per refusal", micros, &|cost| cost.per_pair(|spent| spent.cpu * 1e6));
    }
    for (name, way) in [("", &ours), ("script calls: ", &theirs)] {
        // Of refusals: clients that come back 10 ms after each, and clients that come back at once.
        for (storm, pause) in [("25 000/s", Some(Duration::from_millis(10))), ("a storm", None)] {
            let time = bench.millis(1500, 800);
            let storm_load = Load { ids: hot(), work: pause, ..Load::new(1, 256, time) };
            let others = others(time);
            let beside = async || tokio::join!(others.run(way), storm_load.run(way)).0;
            let rounds = bench.compare(beside, async || others.run(way).await).await;
            let name = format!("redis: {name}another id's p99, beside {storm} and quiet");
            let target = if matches!(way, Way::Ours(_)) { Target::Ratio(1.5) } else { Target::None };
            bench.row(&name, Unit::lower("µs"), rounds.figures(|came: &Came| came.acquire(0.99)), target);
        }
    }
    for (way, taken) in [(&ours, full_a), (&theirs, full_b)] {
        for slot in taken {
            way.release("hot", slot).await;
        }
    }
}

/// Callers of ids that have room.
fn others(time: Duration) -> Load {
    Load::new(16, 16, time).with_work(Duration::from_millis(2))
}

fn hot() -> std::sync::Arc<Vec<String>> {
    std::sync::Arc::new(vec!["hot".to_owned()])
}

async fn fill(way: &Way) -> Vec<Taken> {
    let mut taken = Vec::new();
    while let Some(slot) = way.try_acquire("hot").await {
        taken.push(slot);
    }
    taken
}

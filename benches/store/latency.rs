//! What a caller waits for: on a quiet server, over a slow link, and with weights.

use std::time::{Duration, Instant};

use tower_slots::Acquire;

use crate::harness::{Bench, Target, Unit};
use crate::support::{Proxy, RedisServer};
use crate::ways::{Came, Load, NO_LIMIT, Taken, Way};

const MICROS: Unit = Unit::lower("µs");

/// One caller whose requests take 2 ms.
pub(crate) async fn quiet(bench: &Bench) {
    let server = RedisServer::start();
    let (ours, theirs) = (Way::ours(&server.url(), NO_LIMIT), Way::theirs(&server.url(), NO_LIMIT).await);
    let load = Load::new(1, 1, bench.millis(1000, 600)).with_work(Duration::from_millis(2));
    let rounds = bench.compare(async || load.run(&ours).await, async || load.run(&theirs).await).await;
    let row = |what: &str, target, of: &dyn Fn(&Came) -> f64| {
        bench.row(&format!("redis: one caller, 2 ms of work: {what}"), MICROS, rounds.figures(of), target);
    };
    row("acquire p50", Target::Ratio(1.1), &|came| came.acquire(0.5));
    row("acquire p99", Target::None, &|came| came.acquire(0.99));
    // Whose release takes a round trip; half of one is out of reach for who makes one.
    row("release p50", Target::Ratio(0.5), &|came| came.release(0.5));
    row("release p99", Target::None, &|came| came.release(0.99));
}

/// Callers at the other end of a link with 50 ms from here to there and back.
pub(crate) async fn slow_link(bench: &Bench) {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.addr());
    let ours = Way::ours(&proxy.url(), NO_LIMIT);
    let theirs = Way::theirs(&proxy.url(), NO_LIMIT).await;
    proxy.set_delay(Duration::from_millis(25));
    let load = Load::new(1, 256, bench.millis(1500, 700));
    let alone = Load::new(1, 1, load.time);
    let rounds = bench.compare(async || load.run(&ours).await, async || alone.run(&theirs).await).await;
    let name = "redis: 50 ms link, 256 callers: acquire p50, one script call";
    bench.row(name, MICROS, rounds.figures(|came| came.acquire(0.5)), Target::Ratio(1.05));
    let rounds = bench.compare(async || load.run(&ours).await, async || load.run(&theirs).await).await;
    let row = |what: &str, unit, of: &dyn Fn(&Came) -> f64| {
        let name = format!("redis: 50 ms link, 256 callers: {what}");
        bench.row(&name, unit, rounds.figures(of), Target::None);
    };
    row("acquire p99", MICROS, &|came| came.acquire(0.99));
    row("pairs", Unit::higher("1/s"), &Came::per_second);
}

/// Requests that take several slots of one id; theirs takes them by as many calls at once.
pub(crate) async fn weights(bench: &Bench) {
    let server = RedisServer::start();
    let (ours, theirs) = (Way::ours(&server.url(), NO_LIMIT), Way::theirs(&server.url(), NO_LIMIT).await);
    for weight in [1, 8, 64] {
        let time = bench.millis(500, 150);
        let rounds = bench
            .compare(
                async || weighted_pairs(&ours, weight, time).await,
                async || weighted_pairs(&theirs, weight, time).await,
            )
            .await;
        let name = format!("redis: 1 id, 64 callers of weight {weight}: pairs");
        bench.row(&name, Unit::higher("1/s"), rounds.figures(|pairs| *pairs), Target::None);
    }
}

async fn weighted_pairs(way: &Way, weight: u32, time: Duration) -> f64 {
    let start = Instant::now();
    let callers = (0..64).map(|_| {
        let way = way.clone();
        tokio::spawn(async move {
            let mut pairs = 0;
            while start.elapsed() < time {
                weighted_pair(&way, weight).await;
                pairs += 1;
            }
            pairs
        })
    });
    let pairs: Vec<_> = futures_util::future::join_all(callers).await;
    let pairs: u32 = pairs.into_iter().map(|pairs| pairs.expect("a caller")).sum();
    f64::from(pairs) / start.elapsed().as_secs_f64()
}

async fn weighted_pair(way: &Way, weight: u32) {
    if let Way::Ours(limiter) = way {
        drop(limiter.acquire("heavy", Acquire::weight(weight)).await.expect("slots"));
        return;
    }
    let all = (0..weight).map(|_| way.try_acquire("heavy"));
    let taken: Vec<Option<Taken>> = futures_util::future::join_all(all).await;
    let back = taken.into_iter().flatten().map(|taken| way.release("heavy", taken));
    futures_util::future::join_all(back).await;
}

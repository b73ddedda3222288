//! Acquire + release pairs through Redis, beside the same pairs made with one script call each.
//!
//! Both ways run in turns within one process, against one server that is started here; each row is
//! the median of several rounds. Absolute numbers depend on the machine: read the ratios.
//!
//! `cargo bench --bench store [-- --rounds N --millis M]`

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{Gotsem, RedisServer};
use tower_slots::{Limiter, RedisStore};

/// More slots than callers: every pair is admitted.
const LIMIT: u32 = 100_000;

#[derive(Clone)]
enum Way {
    Ours(Limiter),
    ScriptCalls(Gotsem),
}

impl Way {
    async fn pair(&self, id: &str) {
        match self {
            Self::Ours(limiter) => drop(limiter.try_acquire(id).await.expect("a slot")),
            Self::ScriptCalls(client) => {
                let (acquired, slot, _) = client.try_acquire(id).await.expect("an answer");
                assert!(acquired, "the limit is out of reach");
                client.release(id, &slot).await.expect("an answer");
            }
        }
    }
}

/// What one round came to.
#[derive(Clone, Copy)]
struct Round {
    pairs_per_second: f64,
    server_micros_per_pair: f64,
}

async fn round(
    server: &RedisServer,
    way: &Way,
    ids: &Arc<Vec<String>>,
    callers: usize,
    time: Duration,
) -> Round {
    let (pairs, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (cpu, start) = (server_cpu(server).await, Instant::now());
    let tasks: Vec<_> = (0..callers)
        .map(|caller| {
            let (way, ids, pairs, stop) =
                (way.clone(), Arc::clone(ids), Arc::clone(&pairs), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut at = caller;
                while !stop.load(Ordering::Relaxed) {
                    way.pair(&ids[at % ids.len()]).await;
                    pairs.fetch_add(1, Ordering::Relaxed);
                    at += callers + 1;
                }
            })
        })
        .collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("a caller");
    }
    let (pairs, seconds) = (pairs.load(Ordering::Relaxed) as f64, start.elapsed().as_secs_f64());
    let cpu = server_cpu(server).await - cpu;
    Round { pairs_per_second: pairs / seconds, server_micros_per_pair: cpu * 1e6 / pairs }
}

/// User and system time of the server, in seconds.
async fn server_cpu(server: &RedisServer) -> f64 {
    let info: String = server.read(&["INFO", "cpu"]).await;
    info.lines()
        .filter_map(|line| line.strip_prefix("used_cpu_user:").or_else(|| line.strip_prefix("used_cpu_sys:")))
        .map(|seconds| seconds.trim().parse::<f64>().expect("a number"))
        .sum()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Acquires of one caller whose requests take 2 ms, against the bare script call: median, in µs.
async fn quiet_acquire(ways: [&Way; 2], pairs: usize) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..pairs {
        for (way, times) in ways.iter().zip(&mut times) {
            let start = Instant::now();
            match way {
                Way::Ours(limiter) => {
                    let slot = limiter.try_acquire("quiet").await.expect("a slot");
                    times.push(start.elapsed().as_secs_f64() * 1e6);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    drop(slot);
                }
                Way::ScriptCalls(client) => {
                    let (_, slot, _) = client.try_acquire("quiet").await.expect("an answer");
                    times.push(start.elapsed().as_secs_f64() * 1e6);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    client.release("quiet", &slot).await.expect("an answer");
                }
            }
        }
    }
    times.map(median)
}

fn argument(name: &str, default: u64) -> u64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).map_or(default, |value| value.parse().expect("a whole number"))
}

fn main() {
    let (rounds, millis) = (argument("--rounds", 5), argument("--millis", 600));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(rounds, Duration::from_millis(millis)));
}

async fn run(rounds: u64, time: Duration) {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).expect("an address");
    let mut tcp = client.get_connection_info().tcp_settings().clone();
    tcp = tcp.set_nodelay(true);
    let info = client.get_connection_info().clone().set_tcp_settings(tcp);
    let connection = redis::Client::open(info).expect("an address");
    let connection = connection.get_multiplexed_async_connection().await.expect("a connection");
    let limiter = Limiter::builder(RedisStore::open(server.url()).expect("an address"))
        .limit(LIMIT)
        .prefix("ours:")
        .store_timeout(Duration::from_secs(5))
        .build()
        .expect("settings");
    let ours = Way::Ours(limiter);
    let theirs = Way::ScriptCalls(Gotsem::new(connection, "theirs:", Duration::from_secs(30), LIMIT));

    println!(
        "{:>6} {:>8} {:>12} {:>12} {:>7} {:>22}",
        "ids", "callers", "ours/s", "script/s", "ratio", "server µs/pair (ratio)"
    );
    for (ids, callers) in [
        (1, 1),
        (1, 4),
        (1, 16),
        (1, 64),
        (1, 256),
        (1, 2048),
        (100, 256),
        (100, 2048),
        (1000, 64),
        (1000, 256),
        (1000, 2048),
    ] {
        let names = Arc::new((0..ids).map(|n| format!("project-{n}")).collect::<Vec<_>>());
        for way in [&ours, &theirs] {
            round(&server, way, &names, callers, time / 4).await;
        }
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            a.push(round(&server, &ours, &names, callers, time).await);
            b.push(round(&server, &theirs, &names, callers, time).await);
        }
        let pick = |f: fn(&Round) -> f64, rounds: &[Round]| median(rounds.iter().map(f).collect());
        let ratio = |f: fn(&Round) -> f64| median(a.iter().zip(&b).map(|(a, b)| f(a) / f(b)).collect());
        println!(
            "{ids:>6} {callers:>8} {:>12.0} {:>12.0} {:>6.2}x {:>8.2} {:>7.2} {:>5.2}x",
            pick(|r| r.pairs_per_second, &a),
            pick(|r| r.pairs_per_second, &b),
            ratio(|r| r.pairs_per_second),
            pick(|r| r.server_micros_per_pair, &a),
            pick(|r| r.server_micros_per_pair, &b),
            ratio(|r| r.server_micros_per_pair),
        );
    }
    let [ours, theirs] = quiet_acquire([&ours, &theirs], 150 * rounds as usize).await;
    println!(
        "one caller with 2 ms of work, acquire p50: {ours:.0} µs, bare script call {theirs:.0} µs: {:.2}x",
        ours / theirs
    );
}

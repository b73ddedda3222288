//! A child process that takes, holds and gives back slots as its parent says.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_slots::{Acquire, Limiter, Origin, RedisStore, Slot};

use crate::common::{ID, MS, SECOND};
use crate::support::child::{self, Args};
use crate::support::{Child, History, RedisServer, Visit};

/// How long a child may take to start or to say something, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The child's part: does what the parent's lines say.
///
/// `take <n>` takes n slots, `try <n>` tries to, all at once, `drop` gives all back, `visit <ms>` comes
/// and goes for that time, `shutdown <ms>` shuts down and gives all back after that time. Each answers
/// with one line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder() {
    let Some(args) = child::role("holder") else { return };
    let lease = Duration::from_millis(args.get("LEASE_MS").parse().unwrap());
    // As long a time-out as can be: a machine under load is no outage, and an outage would admit.
    let builder = Limiter::builder(RedisStore::open(args.get("URL")).unwrap()).lease(lease);
    let builder = builder.limit(args.get("LIMIT").parse::<u32>().unwrap());
    let limiter = builder.store_timeout(lease.mul_f64(0.9)).build().unwrap();
    let history = History::new();
    let mut slots: Vec<(Visit, Slot)> = Vec::new();
    // Connected, so that what is measured later is no start.
    limiter.active(ID).await.unwrap();
    println!("ready");
    let args = Arc::new(args);
    while let Some(line) = next_line(&args).await {
        let (word, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number: u64 = number.parse().unwrap();
        match word {
            "take" | "try" => {
                let mut granted = 0;
                for slot in join_all((0..number).map(|_| limiter.try_acquire(ID))).await {
                    match slot {
                        Ok(slot) => {
                            assert_eq!(slot.origin(), Origin::Store);
                            let visit = history.enter(ID, 1);
                            println!("{}", visit.line());
                            slots.push((visit, slot));
                            granted += 1;
                        }
                        Err(error) => assert_eq!(word, "try", "{error}"),
                    }
                }
                println!("granted {granted}");
            }
            "drop" => {
                slots.clear();
                println!("dropped");
            }
            "visit" => {
                visit(&limiter, &history, Duration::from_millis(number)).await;
                println!("visited");
            }
            "shutdown" => {
                let slots = std::mem::take(&mut slots);
                let given_back = async {
                    sleep(Duration::from_millis(number)).await;
                    drop(slots);
                };
                let (flushed, ()) = tokio::join!(limiter.shutdown(5 * SECOND), given_back);
                println!("shutdown {flushed}");
                history.to_lines().iter().for_each(|line| println!("{line}"));
                // No destructor may help.
                std::process::exit(0);
            }
            other => panic!("the parent says {other:?}"),
        }
    }
    history.to_lines().iter().for_each(|line| println!("{line}"));
}

/// Comes and goes with weights of one and two.
async fn visit(limiter: &Limiter, history: &History, time: Duration) {
    let end = Instant::now() + time;
    let visits = (0..4).map(|visitor| {
        let (limiter, history) = (limiter.clone(), history.clone());
        tokio::spawn(async move {
            while Instant::now() < end {
                let weight = 1 + visitor % 2;
                if let Ok(slot) = limiter.acquire(ID, Acquire::weight(weight)).await {
                    let visit = history.enter(ID, weight);
                    sleep(2 * MS).await;
                    drop((visit, slot));
                }
                sleep(MS).await;
            }
        })
    });
    for visit in join_all(visits).await {
        visit.unwrap();
    }
}

async fn next_line(args: &Arc<Args>) -> Option<String> {
    let args = Arc::clone(args);
    tokio::task::spawn_blocking(move || args.read_line()).await.unwrap()
}

pub(crate) async fn spawn(server: &RedisServer, limit: u32, lease: Duration) -> Child {
    spawn_with(server, limit, lease, &[]).await
}

/// With further environment variables.
pub(crate) async fn spawn_with(
    server: &RedisServer,
    limit: u32,
    lease: Duration,
    env: &[(&str, &str)],
) -> Child {
    let (url, limit, lease) = (server.url(), limit.to_string(), lease.as_millis().to_string());
    let args = [&[("URL", &*url), ("LIMIT", &*limit), ("LEASE_MS", &*lease)], env].concat();
    let child = Child::spawn("holder::holder", "holder", &args);
    child.wait_line("ready", PATIENCE).await;
    child
}

/// Tells a child and waits for its answer.
pub(crate) async fn tell(child: &Child, line: &str, answer: &str) {
    child.send_line(line);
    child.wait_line(answer, PATIENCE).await;
}

//! The two ways of taking slots in Redis that the benches compare: ours, and one script call for each
//! acquire and each release on one multiplexed connection, as the seed and most of its kind do.
#![allow(dead_code, unreachable_pub)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tower_slots::{AcquireError, Limiter, LimiterBuilder, OnOutage, RedisStore, Slot};

use crate::harness::percentile;
use crate::support::{Gotsem, RedisServer};

/// So high that every acquire is admitted.
pub const NO_LIMIT: u32 = 1_000_000;
/// The longest that anything waits for the server: a machine under load is no outage.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub enum Way {
    Ours(Limiter),
    Theirs(Gotsem),
}

/// A slot that was taken, by either way.
pub enum Taken {
    Ours(Slot),
    Theirs(String),
}

/// A limiter with keys of its own beside theirs.
pub fn builder(url: &str, limit: u32) -> LimiterBuilder {
    let store = RedisStore::open(url).expect("an address");
    // What is not answered is to be seen, and not let through.
    let builder = Limiter::builder(store).on_outage(OnOutage::Refuse);
    builder.limit(limit).prefix("ours:").store_timeout(PATIENCE)
}

impl Way {
    pub fn ours(url: &str, limit: u32) -> Self {
        Self::Ours(builder(url, limit).build().expect("settings"))
    }

    pub async fn theirs(url: &str, limit: u32) -> Self {
        let client = redis::Client::open(url).expect("an address");
        let info = client.get_connection_info().clone();
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = redis::Client::open(info.set_tcp_settings(tcp)).expect("an address");
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let connection = connection.expect("a connection");
        Self::Theirs(Gotsem::new(connection, "theirs:", Duration::from_secs(30), limit))
    }

    /// None if the id is at its limit.
    pub async fn try_acquire(&self, id: &str) -> Option<Taken> {
        match self {
            Self::Ours(limiter) => match limiter.try_acquire(id).await {
                Ok(slot) => Some(Taken::Ours(slot)),
                Err(AcquireError::Saturated { .. }) => None,
                Err(error) => panic!("no answer: {error}"),
            },
            Self::Theirs(client) => {
                let (acquired, slot, _) = client.try_acquire(id).await.expect("an answer");
                acquired.then_some(Taken::Theirs(slot))
            }
        }
    }

    pub async fn release(&self, id: &str, taken: Taken) {
        match (self, taken) {
            (_, Taken::Ours(slot)) => drop(slot),
            (Self::Theirs(client), Taken::Theirs(slot)) => {
                client.release(id, &slot).await.expect("an answer");
            }
            (Self::Ours(_), Taken::Theirs(_)) => unreachable!("each way releases its own"),
        }
    }
}

/// Callers that take slots and give them back, each one after the other.
#[derive(Clone)]
pub struct Load {
    pub ids: Arc<Vec<String>>,
    pub callers: usize,
    pub time: Duration,
    /// For how long a slot is held, and how long a caller waits before it asks again, on average.
    pub work: Option<Duration>,
    /// One of so many acquires, and its release, is timed.
    pub timed: usize,
}

impl Load {
    pub fn new(ids: usize, callers: usize, time: Duration) -> Self {
        Self { ids: Arc::new(names(ids)), callers, time, work: None, timed: 1 }
    }

    pub fn with_work(mut self, work: Duration) -> Self {
        self.work = Some(work);
        self
    }

    /// Runs it the one way.
    pub async fn run(&self, way: &Way) -> Came {
        self.run_over(std::slice::from_ref(way)).await
    }

    /// Runs it with the callers spread over these.
    pub async fn run_over(&self, ways: &[Way]) -> Came {
        let (stop, start) = (Arc::new(AtomicBool::new(false)), Instant::now());
        let tasks: Vec<_> = (0..self.callers)
            .map(|caller| {
                let way = ways[caller % ways.len()].clone();
                tokio::spawn(self.clone().call(caller, way, Arc::clone(&stop)))
            })
            .collect();
        tokio::time::sleep(self.time).await;
        stop.store(true, Ordering::Relaxed);
        let mut came = Came::default();
        for task in tasks {
            came.add(task.await.expect("a caller"));
        }
        came.seconds = start.elapsed().as_secs_f64();
        came
    }

    async fn call(self, caller: usize, way: Way, stop: Arc<AtomicBool>) -> Came {
        let (mut came, mut at) = (Came::default(), caller);
        self.pause().await;
        while !stop.load(Ordering::Relaxed) {
            let id = &self.ids[at % self.ids.len()];
            let timer = Timer::start(came.asked % self.timed as u64 == 0);
            let taken = way.try_acquire(id).await;
            timer.stop(&mut came.acquires);
            came.asked += 1;
            came.refused += u64::from(taken.is_none());
            if let Some(taken) = taken {
                self.pause().await;
                let timer = Timer::start(timer.runs());
                way.release(id, taken).await;
                timer.stop(&mut came.releases);
            }
            self.pause().await;
            // Where nothing has to be waited for, the other callers have their turn too.
            tokio::task::consume_budget().await;
            at += self.callers + 1;
        }
        came
    }

    /// Not equally long each time: callers do not stay in step.
    async fn pause(&self) {
        if let Some(work) = self.work {
            tokio::time::sleep(work.mul_f64(0.5 + fastrand::f64())).await;
        }
    }
}

/// Times a call, unless it is one of those that are not timed.
struct Timer(Option<Instant>);

impl Timer {
    fn start(runs: bool) -> Self {
        Self(runs.then(Instant::now))
    }

    fn runs(&self) -> bool {
        self.0.is_some()
    }

    fn stop(&self, micros: &mut Vec<f64>) {
        micros.extend(self.0.map(|start| start.elapsed().as_secs_f64() * 1e6));
    }
}

/// What a load came to.
#[derive(Debug, Default)]
pub struct Came {
    pub seconds: f64,
    /// How many acquires there were, and how many of them were refused.
    pub asked: u64,
    pub refused: u64,
    /// How long those acquires and releases took that were timed, in µs.
    pub acquires: Vec<f64>,
    pub releases: Vec<f64>,
}

impl Came {
    pub fn add(&mut self, more: Self) {
        self.asked += more.asked;
        self.refused += more.refused;
        self.acquires.extend(more.acquires);
        self.releases.extend(more.releases);
    }

    /// Acquires per second, admitted or not. Each one that was admitted was followed by a release.
    pub fn per_second(&self) -> f64 {
        self.asked as f64 / self.seconds
    }

    pub fn acquire(&self, share: f64) -> f64 {
        percentile(self.acquires.clone(), share)
    }

    pub fn release(&self, share: f64) -> f64 {
        percentile(self.releases.clone(), share)
    }
}

/// What a server has spent since its start.
#[derive(Debug, Clone, Copy)]
pub struct Spent {
    /// User and system time, in seconds.
    pub cpu: f64,
    /// Of these, what running scripts took.
    pub scripts: f64,
    pub script_calls: f64,
    /// Read and written.
    pub bytes: f64,
}

impl Spent {
    pub async fn by(server: &RedisServer) -> Self {
        let info: String = server.read(&["INFO", "cpu", "stats", "commandstats"]).await;
        let field = |name: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.unwrap_or_else(|| panic!("no {name} in {info}")).to_owned()
        };
        let number = |name: &str| field(name).parse::<f64>().expect("a number");
        let of_scripts = |what: &str| {
            let lines = info.lines().filter(|line| line.starts_with("cmdstat_eval"));
            let values =
                lines.filter_map(|line| line.split([':', ',']).find_map(|item| item.strip_prefix(what)));
            values.map(|value| value.parse::<f64>().expect("a number")).sum::<f64>()
        };
        Self {
            cpu: number("used_cpu_user") + number("used_cpu_sys"),
            scripts: of_scripts("usec=") / 1e6,
            script_calls: of_scripts("calls="),
            bytes: number("total_net_input_bytes") + number("total_net_output_bytes"),
        }
    }

    pub fn since(self, before: Self) -> Self {
        Self {
            cpu: self.cpu - before.cpu,
            scripts: self.scripts - before.scripts,
            script_calls: self.script_calls - before.script_calls,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// A load and what it cost the server.
pub struct Cost {
    pub came: Came,
    pub spent: Spent,
}

impl Cost {
    pub async fn of(server: &RedisServer, way: &Way, load: &Load) -> Self {
        let before = Spent::by(server).await;
        let came = load.run(way).await;
        Self { came, spent: Spent::by(server).await.since(before) }
    }

    /// Of what the server spent, so much for each acquire with its release.
    pub fn per_pair(&self, of: impl Fn(&Spent) -> f64) -> f64 {
        of(&self.spent) / self.came.asked as f64
    }
}

/// Ids.
pub fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("project-{n}")).collect()
}

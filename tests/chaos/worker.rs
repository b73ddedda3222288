//! The part of a worker process: callers that come and go, and tell their parent all of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower_slots::{Acquire, AcquireError, Limiter, OnOutage, Origin, RedisStore, Slot};

use crate::ledger::number_of;
use crate::projects::{PROJECTS, Project, STORE_TIMEOUT};
use crate::record::{Entry, MS, Nanos, Report, SECOND, Span, Tally, now};
use crate::support::child::Args;

/// How many workers share the demand.
pub(crate) const WORKERS: usize = 4;
/// A gap that long between two beats is told.
const STALL: Nanos = 40 * MS;
const BEAT: Duration = Duration::from_millis(20);

/// Plays the worker until the parent says "end".
pub(crate) fn main(args: &Args) {
    let number = |name| args.get(name).parse::<u64>().expect("a number");
    let worker = number("WORKER") as usize;
    let policy = if args.get("POLICY") == "admit" { OnOutage::Admit } else { OnOutage::Refuse };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("the runtime starts");
    let store = RedisStore::open(args.get("URL")).expect("a good url");
    let fleet = runtime.block_on(async { Fleet::start(&store, worker, policy, number("SEED")) });
    drop(store);
    println!("ready");
    // Not on the runtime: reading blocks.
    while let Some(line) = args.read_line() {
        match &*line {
            "rest" => runtime.block_on(fleet.rest()),
            "probe" => runtime.block_on(fleet.probe()),
            "end" => break,
            other => panic!("the parent says {other:?}"),
        }
    }
    let metrics = runtime.metrics();
    runtime.block_on(async {
        let flushed = fleet.end().await;
        // What is left of the store ends by itself: a task that waits to reconnect takes two seconds.
        let mut tasks = metrics.num_alive_tasks();
        for _ in 0..500 {
            if tasks == 0 {
                break;
            }
            sleep(Duration::from_millis(10)).await;
            tasks = metrics.num_alive_tasks();
        }
        println!("ended {flushed} {tasks}");
    });
}

/// All callers of this process.
struct Fleet {
    limiters: Vec<Limiter>,
    callers: Mutex<JoinSet<()>>,
    resting: watch::Sender<bool>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    tally: Mutex<Tally>,
    outage: Mutex<Option<Outage>>,
    visits: AtomicU64,
}

/// A row of calls that were told of an outage.
struct Outage {
    span: Span,
    calls: u64,
    why: String,
}

fn tell(report: &Report) {
    println!("{report}");
}

impl Fleet {
    fn start(store: &RedisStore, worker: usize, policy: OnOutage, seed: u64) -> Self {
        let limiters: Vec<_> =
            PROJECTS.iter().map(|project| project.limiter(store, worker, policy)).collect();
        let (resting, shared) = (watch::Sender::new(false), Arc::<Shared>::default());
        let mut callers = JoinSet::new();
        let mut rng = fastrand::Rng::with_seed(seed);
        for (project, limiter) in limiters.iter().enumerate() {
            for _ in 0..callers_of(&PROJECTS[project]) {
                let caller = Caller {
                    project,
                    lease: PROJECTS[project].lease(worker).as_nanos() as Nanos,
                    limiter: limiter.clone(),
                    rng: fastrand::Rng::with_seed(rng.u64(..)),
                    resting: resting.subscribe(),
                    shared: Arc::clone(&shared),
                };
                callers.spawn(caller.run());
            }
        }
        callers.spawn(beat(resting.subscribe(), Arc::clone(&shared)));
        Self { limiters, callers: Mutex::new(callers), resting, shared }
    }

    /// Ends all visits and calls.
    async fn rest(&self) {
        self.resting.send_replace(true);
        let mut callers = std::mem::take(&mut *self.callers.lock().expect("no panic under this lock"));
        while let Some(ended) = callers.join_next().await {
            ended.expect("no caller panics");
        }
        self.shared.tell_all();
        println!("rested");
    }

    /// One slot of each project, one after the other, from the store.
    async fn probe(&self) {
        let (mut granted, mut others) = (0, Vec::new());
        for (limiter, project) in self.limiters.iter().zip(&PROJECTS) {
            match limiter.try_acquire(project.id).await {
                Ok(slot) if slot.origin() == Origin::Store => {
                    granted += u32::from(slot.release().await.is_ok());
                }
                other => others.push((project.id, other)),
            }
        }
        println!("probed {granted} {others:?}");
    }

    async fn end(self) -> bool {
        let mut flushed = true;
        for limiter in &self.limiters {
            flushed &= limiter.shutdown(Duration::from_secs(5)).await;
        }
        flushed
    }
}

/// So many that all workers together want half as much again as there is.
fn callers_of(project: &Project) -> u32 {
    let mean_weight = f64::from(project.heaviest + 1) / 2.0;
    (1.5 * f64::from(project.limit) / mean_weight / WORKERS as f64).ceil() as u32
}

/// Tells when this process does not run, and the tally every second.
async fn beat(resting: watch::Receiver<bool>, shared: Arc<Shared>) {
    let (mut last, mut told) = (now(), now());
    while !*resting.borrow() {
        sleep(BEAT).await;
        let at = now();
        if at - last > STALL {
            tell(&Report::Stalled(Span::new(last, at)));
        }
        last = at;
        if at - told > SECOND {
            told = at;
            shared.tell_all();
        }
    }
}

impl Shared {
    fn count(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock().expect("no panic under this lock"));
    }

    fn tell_all(&self) {
        tell(&Report::Tally(*self.tally.lock().expect("no panic under this lock")));
        let outage = self.outage.lock().expect("no panic under this lock").take();
        outage.into_iter().for_each(Outage::tell);
    }

    /// A call was told of an outage: a row of them is told as one.
    fn down(&self, answered: Nanos, why: &str) {
        let mut outage = self.outage.lock().expect("no panic under this lock");
        match &mut *outage {
            Some(row) if row.why == why && answered <= row.span.to + 100 * MS => {
                row.span.to = row.span.to.max(answered);
                row.calls += 1;
            }
            _ => {
                let row = Outage { span: Span::new(answered, answered), calls: 1, why: why.to_owned() };
                outage.replace(row).into_iter().for_each(Outage::tell);
            }
        }
    }
}

impl Outage {
    fn tell(self) {
        tell(&Report::Down { span: self.span, calls: self.calls, why: self.why });
    }
}

/// Asks for slots of one project over and over.
struct Caller {
    project: usize,
    lease: Nanos,
    limiter: Limiter,
    rng: fastrand::Rng,
    resting: watch::Receiver<bool>,
    shared: Arc<Shared>,
}

impl Caller {
    async fn run(mut self) {
        self.pause(0..300).await;
        while !*self.resting.borrow() {
            match self.call().await {
                Some((entry, slot)) => self.visit(entry, slot).await,
                None => self.pause(5..40).await,
            }
        }
    }

    async fn pause(&mut self, ms: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(ms))).await;
    }

    /// One call. Now and then its caller goes away in the middle of it.
    async fn call(&mut self) -> Option<(Entry, Slot)> {
        let Project { id, heaviest, .. } = PROJECTS[self.project];
        let weight = self.rng.u32(1..=heaviest);
        let patience = if self.rng.u8(..) < 10 { self.rng.u64(0..20) } else { 60_000 };
        let asked = now();
        let call = self.limiter.acquire(id, Acquire::weight(weight));
        let answer = timeout(Duration::from_millis(patience), call).await;
        let call = Span::new(asked, now());
        if call.length() > STORE_TIMEOUT.as_nanos() as Nanos {
            tell(&Report::Slow(call));
        }
        let shared = &self.shared;
        shared.count(|tally| tally.calls += 1);
        match answer {
            Ok(Ok(slot)) => {
                let stored = slot.origin() == Origin::Store;
                shared.count(|tally| *if stored { &mut tally.admitted } else { &mut tally.open } += 1);
                let number = shared.visits.fetch_add(1, Ordering::Relaxed);
                let (project, lease) = (self.project, self.lease);
                return Some((
                    Entry {
                        number,
                        project,
                        weight,
                        lease,
                        stored,
                        slot: number_of(&slot.id().to_string()),
                        call,
                    },
                    slot,
                ));
            }
            Ok(Err(AcquireError::Saturated { .. })) => shared.count(|tally| tally.refused += 1),
            Ok(Err(AcquireError::Unavailable(error))) => {
                shared.count(|tally| tally.unavailable += 1);
                shared.down(call.to, &error.to_string());
            }
            Ok(Err(error)) => panic!("{error}"),
            Err(_) => shared.count(|tally| tally.cancelled += 1),
        }
        None
    }

    /// Mostly short, and at times longer than any lease.
    async fn visit(&mut self, entry: Entry, slot: Slot) {
        let number = entry.number;
        tell(&Report::Entered(entry));
        let ms = match self.rng.u32(0..100) {
            0..80 => self.rng.u64(1..40),
            80..94 => self.rng.u64(100..1000),
            _ => self.rng.u64(1000..8000),
        };
        let over = sleep(Duration::from_millis(ms));
        tokio::pin!(over);
        let mut told = false;
        loop {
            tokio::select! {
                () = &mut over => break,
                _ = self.resting.wait_for(|resting| *resting) => break,
                () = slot.lost(), if !told => {
                    told = true;
                    tell(&Report::Lost { number, at: now() });
                }
            }
        }
        tell(&Report::Left { number, at: now() });
        if self.rng.bool() {
            drop(slot);
        } else {
            // What could not be confirmed has lapsed, which is what a lease is for.
            let _confirmed = slot.release().await;
        }
    }
}

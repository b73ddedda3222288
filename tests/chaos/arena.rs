//! One server, workers that each reach it through a proxy of their own, and what is done to them.

use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::block_in_place;
use tokio::time::sleep;
use tower_slots::{Limiter, OnOutage, RedisStore};

use crate::faults::{Fault, Link};
use crate::projects::PROJECTS;
use crate::record::{Nanos, Report, SECOND, Span, now};
use crate::support::{Child, Proxy, RedisServer};
use crate::watch::Watch;
use crate::worker::WORKERS;

/// How long a worker may take to start or to say something, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What a fault did, and from when to when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) fault: Fault,
    pub(crate) span: Span,
}

/// A life of a worker that is over.
pub(crate) struct Life {
    pub(crate) worker: usize,
    /// When it was killed, if it was.
    pub(crate) killed: Option<Nanos>,
    pub(crate) reports: Vec<Report>,
}

pub(crate) struct Arena {
    seed: u64,
    pub(crate) server: RedisServer,
    /// An operator's own limiters, who is never cut off.
    operator: Vec<Limiter>,
    proxies: Vec<Proxy>,
    workers: Vec<Mutex<Worker>>,
    /// Held while a fault needs the server for itself, or to answer.
    pub(crate) server_taken: Mutex<()>,
    /// The same for each proxy.
    proxy_taken: Vec<Mutex<()>>,
    watch: Watch,
    /// What the watch looks through.
    _window: Proxy,
    events: StdMutex<Vec<Event>>,
    lives: StdMutex<Vec<Life>>,
}

struct Worker {
    child: Child,
    generation: u64,
}

impl Arena {
    pub(crate) async fn start(seed: u64) -> Self {
        let server = RedisServer::start();
        let proxies: Vec<_> = (0..WORKERS).map(|_| Proxy::start(server.addr())).collect();
        let store = RedisStore::open(server.url()).expect("a good url");
        let operator = PROJECTS.iter().map(|project| project.limiter(&store, 0, OnOutage::Refuse)).collect();
        let mut workers = Vec::new();
        for (worker, proxy) in proxies.iter().enumerate() {
            workers.push(Mutex::new(spawn(seed, worker, 0, proxy).await));
        }
        let window = Proxy::start(server.addr());
        let watch = Watch::start(window.addr());
        Self {
            seed,
            server,
            operator,
            proxies,
            workers,
            server_taken: Mutex::default(),
            proxy_taken: (0..WORKERS).map(|_| Mutex::default()).collect(),
            watch,
            _window: window,
            events: StdMutex::default(),
            lives: StdMutex::default(),
        }
    }

    pub(crate) fn limiter(&self, project: usize) -> &Limiter {
        &self.operator[project]
    }

    /// Injects a fault and undoes it.
    pub(crate) async fn inject(self: Arc<Self>, fault: Fault) {
        let span = self.act(fault).await;
        self.events.lock().expect("no panic under this lock").push(Event { fault, span });
    }

    async fn act(&self, fault: Fault) -> Span {
        match fault {
            Fault::KillWorker { worker } => self.kill_worker(worker).await,
            Fault::StopWorker { worker, time } => {
                let worker = self.workers[worker].lock().await;
                span(async || {
                    worker.child.stop();
                    sleep(time).await;
                    worker.child.cont();
                })
                .await
            }
            Fault::StopServer { .. }
            | Fault::RestartServer { .. }
            | Fault::FlushAll
            | Fault::ScriptFlush { .. }
            | Fault::ClientKill
            | Fault::Drain { .. } => {
                let _taken = self.server_taken.lock().await;
                span(async || self.act_on_server(fault).await).await
            }
            Fault::FillServer { time } => {
                span(async || {
                    self.set_maxmemory("1").await;
                    sleep(time).await;
                    self.set_maxmemory("0").await;
                })
                .await
            }
            Fault::BusyMachine => unreachable!("nobody injects it"),
            Fault::LoseReplies { link, .. }
            | Fault::HoldReplies { link, .. }
            | Fault::BlackHole { link, .. }
            | Fault::Cut { link, .. }
            | Fault::Freeze { link, .. }
            | Fault::Delay { link, .. } => {
                let _taken = self.take(link).await;
                span(async || self.act_on_link(fault, &self.proxies[link.workers()]).await).await
            }
        }
    }

    async fn kill_worker(&self, index: usize) -> Span {
        let mut worker = self.workers[index].lock().await;
        let generation = worker.generation + 1;
        let start = now();
        // It is dead before the next one lives.
        worker.child.kill();
        let next = spawn(self.seed, index, generation, &self.proxies[index]).await;
        let dead = std::mem::replace(&mut *worker, next);
        let reports = dead.child.killed().await.iter().filter_map(|line| Report::parse(line)).collect();
        let life = Life { worker: index, killed: Some(start), reports };
        self.lives.lock().expect("no panic under this lock").push(life);
        Span::new(start, now())
    }

    async fn act_on_server(&self, fault: Fault) {
        let server = &self.server;
        match fault {
            Fault::StopServer { time } => {
                server.stop();
                sleep(time).await;
                server.cont();
            }
            Fault::RestartServer { time } => {
                block_in_place(|| server.kill());
                sleep(time).await;
                block_in_place(|| server.restart());
            }
            Fault::FlushAll => server.flushall().await,
            Fault::ScriptFlush { times } => {
                for _ in 0..times {
                    server.script_flush().await;
                    sleep(Duration::from_millis(5)).await;
                }
            }
            Fault::ClientKill => {
                server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
            }
            Fault::Drain { project } => {
                // One that fails may be executed all the same, a moment later.
                if self.operator[project].drain(PROJECTS[project].id).await.is_err() {
                    sleep(Duration::from_secs(1)).await;
                }
            }
            other => unreachable!("{other:?} is none of the server's"),
        }
    }

    async fn set_maxmemory(&self, bytes: &str) {
        let _taken = self.server_taken.lock().await;
        self.server.command(&["CONFIG", "SET", "maxmemory", bytes]).await;
    }

    async fn act_on_link(&self, fault: Fault, proxies: &[Proxy]) {
        match fault {
            Fault::LoseReplies { replies, .. } => {
                proxies.iter().for_each(|proxy| proxy.lose_replies(replies));
                sleep(Duration::from_secs(1)).await;
                proxies.iter().for_each(|proxy| proxy.lose_replies(0));
            }
            Fault::HoldReplies { time, .. } => switch(proxies, time, Proxy::hold_replies).await,
            Fault::BlackHole { time, .. } => switch(proxies, time, Proxy::black_hole).await,
            Fault::Cut { refused, .. } => {
                for proxy in proxies {
                    proxy.refuse_next(refused);
                    block_in_place(|| proxy.cut());
                }
                sleep(Duration::from_millis(200)).await;
                proxies.iter().for_each(|proxy| proxy.refuse_next(0));
            }
            Fault::Freeze { time, .. } => {
                switch(proxies, time, |proxy, on| if on { proxy.freeze() } else { proxy.thaw() }).await;
            }
            Fault::Delay { time, delay, .. } => {
                proxies.iter().for_each(|proxy| proxy.set_delay(delay));
                sleep(time).await;
                proxies.iter().for_each(|proxy| proxy.set_delay(Duration::ZERO));
                // What is on its way.
                sleep(delay).await;
            }
            other => unreachable!("{other:?} is none of the links'"),
        }
    }

    /// Proxies, in the order of their numbers, so that no two wait for each other.
    async fn take(&self, link: Link) -> Vec<MutexGuard<'_, ()>> {
        let mut taken = Vec::new();
        for worker in link.workers() {
            taken.push(self.proxy_taken[worker].lock().await);
        }
        taken
    }

    /// Tells all workers, and waits for the answer of each; returns the answers.
    pub(crate) async fn tell_all(&self, line: &str, answer: &str) -> Vec<String> {
        for worker in &self.workers {
            worker.lock().await.child.send_line(line);
        }
        let answers = self
            .workers
            .iter()
            .map(|worker| async { worker.lock().await.child.wait_line(answer, PATIENCE).await });
        join_all(answers).await
    }

    /// Tells the workers one after the other.
    pub(crate) async fn tell_each(&self, line: &str, answer: &str) -> Vec<String> {
        let mut answers = Vec::new();
        for worker in &self.workers {
            let worker = worker.lock().await;
            worker.child.send_line(line);
            answers.push(worker.child.wait_line(answer, PATIENCE).await);
        }
        answers
    }

    /// Waits for the end of all workers; what happened, and what was reported.
    pub(crate) async fn finish(self) -> (Vec<Event>, Vec<Life>) {
        let mut lives = self.lives.into_inner().expect("no panic under this lock");
        for (worker, ended) in self.workers.into_iter().enumerate() {
            let lines = ended.into_inner().child.finish(PATIENCE).await;
            let reports = lines.iter().filter_map(|line| Report::parse(line)).collect();
            lives.push(Life { worker, killed: None, reports });
        }
        let mut events = self.events.into_inner().expect("no panic under this lock");
        let late = self.watch.end();
        events.extend(late.into_iter().map(|span| Event { fault: Fault::BusyMachine, span }));
        events.sort_by_key(|event| event.span);
        (events, lives)
    }
}

/// One of the workers lets pass in an outage, the others refuse.
pub(crate) fn admits(worker: usize) -> bool {
    worker == WORKERS - 1
}

async fn spawn(seed: u64, worker: usize, generation: u64, proxy: &Proxy) -> Worker {
    let policy = if admits(worker) { "admit" } else { "refuse" };
    let seed = seed.wrapping_mul(31).wrapping_add(worker as u64 + 1000 * generation).to_string();
    let args =
        [("URL", &*proxy.url()), ("WORKER", &*worker.to_string()), ("POLICY", policy), ("SEED", &*seed)];
    let child = Child::spawn("worker", "worker", &args);
    child.wait_line("ready", PATIENCE).await;
    Worker { child, generation }
}

/// Switches something on, and off after that time.
async fn switch(proxies: &[Proxy], time: Duration, set: fn(&Proxy, bool)) {
    proxies.iter().for_each(|proxy| set(proxy, true));
    sleep(time).await;
    proxies.iter().for_each(|proxy| set(proxy, false));
}

/// From just before to just after.
async fn span(act: impl AsyncFnOnce()) -> Span {
    let from = now();
    act().await;
    Span::new(from, now())
}

pub(crate) fn seconds(time: Nanos) -> f64 {
    time as f64 / SECOND as f64
}

//! Which faults there are, and in which order a seed draws them.

use std::time::Duration;

use crate::projects::PROJECTS;
use crate::worker::WORKERS;

/// One fault, and how long it lasts where it does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// kill -9, and a new one.
    KillWorker {
        worker: usize,
    },
    /// SIGSTOP, and SIGCONT later.
    StopWorker {
        worker: usize,
        time: Duration,
    },
    StopServer {
        time: Duration,
    },
    /// kill -9, and an empty one later.
    RestartServer {
        time: Duration,
    },
    FlushAll,
    ScriptFlush {
        times: u32,
    },
    ClientKill,
    /// `maxmemory` of one byte.
    FillServer {
        time: Duration,
    },
    /// An operator drops all slots of one id.
    Drain {
        project: usize,
    },
    LoseReplies {
        link: Link,
        replies: u64,
    },
    HoldReplies {
        link: Link,
        time: Duration,
    },
    BlackHole {
        link: Link,
        time: Duration,
    },
    /// The connections are closed, and so are the next ones.
    Cut {
        link: Link,
        refused: u64,
    },
    /// Connections are half open: new ones pass.
    Freeze {
        link: Link,
        time: Duration,
    },
    Delay {
        link: Link,
        time: Duration,
        delay: Duration,
    },
    /// No seed draws it: the server was not given the time to answer.
    BusyMachine,
}

/// The connections of one worker, or of all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Link {
    Of(usize),
    All,
}

impl Link {
    pub(crate) fn workers(self) -> std::ops::Range<usize> {
        match self {
            Self::Of(worker) => worker..worker + 1,
            Self::All => 0..WORKERS,
        }
    }
}

impl Fault {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::KillWorker { .. } => "kill -9 of a worker",
            Self::StopWorker { time, .. } if *time < Duration::from_millis(700) => "short stop of a worker",
            Self::StopWorker { .. } => "long stop of a worker",
            Self::StopServer { .. } => "stop of redis",
            Self::RestartServer { .. } => "kill -9 of redis, empty restart",
            Self::FlushAll => "flushall",
            Self::ScriptFlush { .. } => "script flush",
            Self::ClientKill => "client kill",
            Self::FillServer { .. } => "maxmemory of a byte",
            Self::Drain { .. } => "drain",
            Self::LoseReplies { .. } => "lost replies",
            Self::HoldReplies { .. } => "late replies",
            Self::BlackHole { .. } => "black hole",
            Self::Cut { .. } => "cut connections",
            Self::Freeze { .. } => "half-open connections",
            Self::Delay { .. } => "slow link",
            Self::BusyMachine => "busy machine",
        }
    }
}

/// The faults of one seed, each with the time to wait before it. It never ends.
pub(crate) struct Plan(fastrand::Rng);

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn ms(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.0.u64(range))
    }

    /// Mostly so short that faults overlap, at times so long that all heals.
    fn gap(&mut self) -> Duration {
        match self.0.u32(0..100) {
            0..45 => self.ms(20..1000),
            45..85 => self.ms(1000..4000),
            _ => self.ms(8000..12_000),
        }
    }

    fn link(&mut self) -> Link {
        if self.0.u32(0..3) == 0 { Link::All } else { Link::Of(self.0.usize(0..WORKERS)) }
    }

    fn fault(&mut self) -> Fault {
        let worker = self.0.usize(0..WORKERS);
        match self.0.u32(0..20) {
            0 | 1 => Fault::KillWorker { worker },
            2 => Fault::StopWorker { worker, time: self.ms(50..600) },
            3 | 4 => Fault::StopWorker { worker, time: self.ms(800..9000) },
            5 => Fault::StopServer { time: self.ms(50..500) },
            6 => Fault::StopServer { time: self.ms(500..5000) },
            7 => Fault::RestartServer { time: self.ms(0..2000) },
            8 | 9 => Fault::FlushAll,
            10 => Fault::ScriptFlush { times: self.0.u32(1..50) },
            11 => Fault::ClientKill,
            12 => Fault::FillServer { time: self.ms(100..4000) },
            13 => Fault::Drain { project: self.0.usize(0..PROJECTS.len()) },
            14 => Fault::LoseReplies { link: self.link(), replies: self.0.u64(1..8) },
            15 => Fault::HoldReplies { link: self.link(), time: self.ms(50..1500) },
            16 => Fault::BlackHole { link: self.link(), time: self.ms(100..9000) },
            17 => Fault::Cut { link: self.link(), refused: self.0.u64(0..4) },
            18 => Fault::Freeze { link: self.link(), time: self.ms(100..5000) },
            _ => Fault::Delay { link: self.link(), time: self.ms(200..4000), delay: self.ms(5..300) },
        }
    }
}

impl Iterator for Plan {
    type Item = (Duration, Fault);

    fn next(&mut self) -> Option<Self::Item> {
        Some((self.gap(), self.fault()))
    }
}

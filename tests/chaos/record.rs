//! What the workers report, line by line, on a clock that all processes of a host share.

use std::fmt;

use rustix::time::{ClockId, clock_gettime};

/// A moment or a time in ns, on the host's monotonic clock.
pub(crate) type Nanos = u64;

pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1000 * MS;

pub(crate) fn now() -> Nanos {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as Nanos * SECOND + time.tv_nsec as Nanos
}

/// What a worker has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    Entered(Entry),
    /// A visit ends: its slot is given back from now on.
    Left {
        number: u64,
        at: Nanos,
    },
    /// A visit was told that its slot is lost.
    Lost {
        number: u64,
        at: Nanos,
    },
    /// The process did not run.
    Stalled(Span),
    /// Calls were answered with an outage.
    Down {
        span: Span,
        calls: u64,
        why: String,
    },
    /// A call took longer than its budget.
    Slow(Span),
    Tally(Tally),
}

/// A visit that was admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) number: u64,
    pub(crate) project: usize,
    pub(crate) weight: u32,
    pub(crate) lease: Nanos,
    /// By the store, or else in an outage.
    pub(crate) stored: bool,
    pub(crate) slot: u128,
    /// From the call to its answer: somewhere in between it was decided.
    pub(crate) call: Span,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    pub(crate) from: Nanos,
    pub(crate) to: Nanos,
}

impl Span {
    pub(crate) fn new(from: Nanos, to: Nanos) -> Self {
        Self { from, to }
    }

    pub(crate) fn length(self) -> Nanos {
        self.to.saturating_sub(self.from)
    }

    /// Whether they have a moment in common.
    pub(crate) fn meets(self, other: Self) -> bool {
        self.from <= other.to && other.from <= self.to
    }
}

/// What became of a worker's calls so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) calls: u64,
    pub(crate) admitted: u64,
    pub(crate) refused: u64,
    pub(crate) unavailable: u64,
    /// Let pass in an outage.
    pub(crate) open: u64,
    /// Given up by the caller before there was an answer.
    pub(crate) cancelled: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.admitted += other.admitted;
        self.refused += other.refused;
        self.unavailable += other.unavailable;
        self.open += other.open;
        self.cancelled += other.cancelled;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entered(Entry { number, project, weight, lease, stored, slot, call }) => {
                let (from, to, stored) = (call.from, call.to, u8::from(*stored));
                write!(f, "in {number} {project} {weight} {lease} {stored} {slot} {from} {to}")
            }
            Self::Left { number, at } => write!(f, "out {number} {at}"),
            Self::Lost { number, at } => write!(f, "lost {number} {at}"),
            Self::Stalled(Span { from, to }) => write!(f, "stalled {from} {to}"),
            Self::Down { span, calls, why } => write!(f, "down {} {} {calls} {why}", span.from, span.to),
            Self::Slow(Span { from, to }) => write!(f, "slow {from} {to}"),
            Self::Tally(Tally { calls, admitted, refused, unavailable, open, cancelled }) => {
                write!(f, "tally {calls} {admitted} {refused} {unavailable} {open} {cancelled}")
            }
        }
    }
}

impl Report {
    /// The reverse of its text; none for other lines, and for one that was cut off by a kill.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let (name, rest) = line.split_once(' ')?;
        let numbers: Vec<u128> = rest.split(' ').map_while(|word| word.parse().ok()).collect();
        let small: Vec<u64> = numbers.iter().map(|number| *number as u64).collect();
        Some(match (name, &small[..]) {
            ("in", &[number, project, weight, lease, stored, _, from, to]) => Self::Entered(Entry {
                number,
                project: project as usize,
                weight: weight as u32,
                lease,
                stored: stored == 1,
                slot: numbers[5],
                call: Span::new(from, to),
            }),
            ("out", &[number, at]) => Self::Left { number, at },
            ("lost", &[number, at]) => Self::Lost { number, at },
            ("stalled", &[from, to]) => Self::Stalled(Span::new(from, to)),
            ("down", &[from, to, calls]) => {
                let why = rest.splitn(4, ' ').nth(3)?.to_owned();
                Self::Down { span: Span::new(from, to), calls, why }
            }
            ("slow", &[from, to]) => Self::Slow(Span::new(from, to)),
            ("tally", &[calls, admitted, refused, unavailable, open, cancelled]) => {
                Self::Tally(Tally { calls, admitted, refused, unavailable, open, cancelled })
            }
            _ => return None,
        })
    }
}

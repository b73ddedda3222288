//! What the tests of the table of faults in docs/reliability.md share: callers that come and go, and the
//! judgement, which prints what was measured.

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_slots::store::StoreError;
use tower_slots::{AcquireError, Limiter, Origin};

use super::History;

/// What became of the calls of some callers.
#[derive(Default)]
pub struct Tally {
    pub served: u32,
    pub refused: u32,
    /// Refused in an outage, let pass in one, and limited within the process in one.
    pub failed: u32,
    pub open: u32,
    pub local: u32,
    pub slowest: Duration,
    pub errors: Vec<StoreError>,
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { served, refused, failed, open, local, slowest, .. } = self;
        write!(
            f,
            "{served} served, {refused} refused, {failed} failed, {open} let pass, {local} by share, "
        )?;
        write!(f, "slowest {slowest:?}, errors {:?}", self.texts())
    }
}

impl Tally {
    /// Each different error once.
    pub fn texts(&self) -> BTreeSet<String> {
        self.errors.iter().map(ToString::to_string).collect()
    }

    fn add(mut self, other: Self) -> Self {
        self.served += other.served;
        self.refused += other.refused;
        self.failed += other.failed;
        self.open += other.open;
        self.local += other.local;
        self.slowest = self.slowest.max(other.slowest);
        self.errors.extend(other.errors);
        self
    }
}

/// Callers that come and go while `going`, each for a few ms. Those that the store let in are recorded.
pub async fn traffic(
    limiter: &Limiter,
    id: &str,
    history: &History,
    callers: usize,
    going: impl Fn() -> bool,
) -> Tally {
    let callers = (0..callers).map(|_| async {
        let mut tally = Tally::default();
        while going() {
            let start = Instant::now();
            let result = limiter.try_acquire(id).await;
            tally.slowest = tally.slowest.max(start.elapsed());
            let mut visit = None;
            match &result {
                Ok(slot) => match slot.origin() {
                    Origin::Store => {
                        visit = Some(history.enter(id, 1));
                        tally.served += 1;
                    }
                    Origin::FailOpen => tally.open += 1,
                    _ => tally.local += 1,
                },
                Err(AcquireError::Saturated { .. }) => tally.refused += 1,
                Err(AcquireError::Unavailable(error)) => {
                    tally.failed += 1;
                    tally.errors.push(error.clone());
                }
                Err(error) => panic!("{error}"),
            }
            sleep(Duration::from_millis(3)).await;
            drop(visit);
            drop(result);
        }
        tally
    });
    join_all(callers).await.into_iter().fold(Tally::default(), Tally::add)
}

/// What a row of the table allows.
pub struct Bound {
    pub limit: u32,
    /// The most at once.
    pub most: u32,
    /// How long there may be more than the limit.
    pub above: Duration,
}

/// No more than the limit, ever.
pub fn never_above(limit: u32) -> Bound {
    Bound { limit, most: limit, above: Duration::ZERO }
}

/// Prints what was measured for the row, and checks it.
pub fn judge(row: u32, history: &History, id: &str, bound: &Bound) {
    let Bound { limit, most, above } = *bound;
    let (overlap, time) = (history.overlap(id), history.time_above(id, limit));
    let (ms, most_ms) = (time.as_millis(), above.as_millis());
    say(row, &format!("overlap {overlap} of at most {most}; above {limit} for {ms} of at most {most_ms} ms"));
    history.assert_within(id, most);
    assert!(time <= above, "fault {row:02}: above {limit} for {ms} ms, where {most_ms} ms are allowed");
}

/// Prints and checks a time.
pub fn judge_time(row: u32, what: &str, time: Duration, most: Duration) {
    let line = format!("{what} {} of at most {} ms", time.as_millis(), most.as_millis());
    say(row, &line);
    assert!(time <= most, "fault {row:02}: {line}");
}

pub fn say(row: u32, line: &str) {
    println!("fault {row:02}: {line}");
}

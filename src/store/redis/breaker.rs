//! Whether the store is asked: a circuit breaker, with neither clock nor input and output of its own.

use std::time::Duration;

use tokio::time::Instant;

use crate::metrics::Breaker as State;
use crate::store::{StoreError, StoreErrorKind};

/// So many failures in a row open the breaker.
const FAILURES: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Opens after failures in a row; half open lets one trial through, which closes or opens it.
#[derive(Default)]
pub(super) struct Breaker {
    mode: Mode,
    failures: u32,
    /// The last of them was a connection that broke.
    broken: bool,
    /// Openings without a success in between: how long to wait before the next try.
    openings: u32,
}

#[derive(Default)]
enum Mode {
    #[default]
    Closed,
    HalfOpen {
        trial_until: Option<Instant>,
        error: StoreError,
    },
    Open(StoreError),
}

/// A change of the breaker that a log line is due for.
#[derive(Debug)]
pub(super) enum Change {
    Opened(StoreError),
    Closed,
}

impl Breaker {
    pub(super) fn state(&self) -> State {
        match self.mode {
            Mode::Closed => State::Closed,
            Mode::HalfOpen { .. } => State::HalfOpen,
            Mode::Open(_) => State::Open,
        }
    }

    /// Lets a call for new slots pass, or tells why not. In half open the first that passes is the
    /// trial, and the next is one if that had no outcome by its `deadline`: its caller gave up.
    pub(super) fn admit(&mut self, now: Instant, deadline: Instant) -> Result<(), StoreError> {
        match &mut self.mode {
            Mode::Closed => Ok(()),
            Mode::HalfOpen { trial_until, .. } if trial_until.is_none_or(|until| until <= now) => {
                *trial_until = Some(deadline);
                Ok(())
            }
            Mode::HalfOpen { error, .. } | Mode::Open(error) => Err(error.clone()),
        }
    }

    /// Calls other than for new slots may be sent: a server that is full still renews and releases.
    pub(super) fn lets_send(&self) -> bool {
        self.open_error().is_none_or(|error| error.kind() == StoreErrorKind::Oom)
    }

    /// The error of the last failure, while calls are refused for it.
    pub(super) fn open_error(&self) -> Option<&StoreError> {
        match &self.mode {
            Mode::Open(error) => Some(error),
            Mode::Closed | Mode::HalfOpen { .. } => None,
        }
    }

    /// A call was answered that the store would not have answered in its trouble.
    pub(super) fn succeeded(&mut self) -> Option<Change> {
        self.failures = 0;
        self.openings = 0;
        match std::mem::take(&mut self.mode) {
            Mode::Closed => None,
            Mode::HalfOpen { .. } | Mode::Open(_) => Some(Change::Closed),
        }
    }

    /// Any call was answered. That tells nothing of most troubles, but connections that break are only
    /// in a row while nothing is answered in between.
    pub(super) fn answered(&mut self) {
        if self.broken {
            self.failures = 0;
        }
    }

    /// A call failed.
    pub(super) fn failed(&mut self, error: &StoreError) -> Option<Change> {
        self.failures += 1;
        self.broken = error.kind() == StoreErrorKind::Io;
        match self.mode {
            Mode::Closed if self.failures < FAILURES => None,
            _ => self.open(error),
        }
    }

    /// There was no connection to be had. One that breaks at once may be the only one that does, and
    /// callers have time for the next try; whatever else went wrong does so again, or took that time.
    pub(super) fn not_connected(&mut self, error: &StoreError) -> Option<Change> {
        if error.kind() == StoreErrorKind::Io { self.failed(error) } else { self.open(error) }
    }

    /// There is no use in calling at all.
    pub(super) fn open(&mut self, error: &StoreError) -> Option<Change> {
        let was = std::mem::replace(&mut self.mode, Mode::Open(error.clone()));
        if !matches!(was, Mode::Open(_)) {
            self.openings = self.openings.saturating_add(1);
        }
        matches!(was, Mode::Closed).then(|| Change::Opened(error.clone()))
    }

    /// The server answers again: one call may try.
    pub(super) fn half_open(&mut self) {
        if let Mode::Open(error) = &self.mode {
            self.mode = Mode::HalfOpen { trial_until: None, error: error.clone() };
        }
    }

    /// How long to wait before the next look at the server: up to twice as long after each failure,
    /// and anything below that, so that a fleet does not return in step.
    pub(super) fn wait(&self, tries: u32) -> Duration {
        let doublings = self.openings.saturating_sub(1).saturating_add(tries).min(8);
        let most = (FIRST_WAIT * 2u32.pow(doublings)).min(LONGEST_WAIT);
        most.mul_f64(fastrand::f64()).max(Duration::from_millis(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error() -> StoreError {
        StoreError::new(StoreErrorKind::Io, "refused")
    }

    fn admits(breaker: &mut Breaker, now: Instant) -> bool {
        breaker.admit(now, now + Duration::from_millis(250)).is_ok()
    }

    #[test]
    fn opens_after_three_failures_in_a_row_only() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        assert!(breaker.failed(&error()).is_none() && breaker.failed(&error()).is_none());
        assert!(breaker.succeeded().is_none(), "it was closed all along");
        assert!(breaker.failed(&error()).is_none() && breaker.failed(&error()).is_none());
        assert!(admits(&mut breaker, now));
        assert!(matches!(breaker.failed(&error()), Some(Change::Opened(_))));
        assert!(!admits(&mut breaker, now) && !breaker.lets_send());
    }

    #[test]
    fn a_connection_that_broke_at_once_is_one_failure_of_three() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        assert!(breaker.failed(&error()).is_none() && breaker.not_connected(&error()).is_none());
        assert!(admits(&mut breaker, now));
        assert!(matches!(breaker.not_connected(&error()), Some(Change::Opened(_))));
        let mut breaker = Breaker::default();
        let late = StoreError::new(StoreErrorKind::Timeout, "no answer");
        assert!(matches!(breaker.not_connected(&late), Some(Change::Opened(_))));
    }

    #[test]
    fn connections_that_break_are_not_in_a_row_when_calls_are_answered_in_between() {
        let mut breaker = Breaker::default();
        for _ in 0..5 {
            assert!(breaker.failed(&error()).is_none());
            breaker.answered();
        }
        let full = StoreError::new(StoreErrorKind::Oom, "full");
        assert!(breaker.failed(&full).is_none());
        breaker.answered();
        assert!(breaker.failed(&full).is_none());
        breaker.answered();
        assert!(matches!(breaker.failed(&full), Some(Change::Opened(_))), "renewals are answered all along");
    }

    #[test]
    fn half_open_lets_one_trial_through() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        breaker.open(&error());
        breaker.half_open();
        assert!(breaker.lets_send() && admits(&mut breaker, now) && !admits(&mut breaker, now));
        let later = now + Duration::from_millis(250);
        assert!(admits(&mut breaker, later), "the trial had no outcome in its time");
        assert!(breaker.failed(&error()).is_none(), "it opens again without a second line in the log");
        assert!(!breaker.lets_send());
        breaker.half_open();
        assert!(matches!(breaker.succeeded(), Some(Change::Closed)));
        assert!(admits(&mut breaker, now) && admits(&mut breaker, now));
    }

    #[test]
    fn a_full_server_is_still_asked_for_anything_but_slots() {
        let mut breaker = Breaker::default();
        breaker.open(&StoreError::new(StoreErrorKind::Oom, "full"));
        assert!(
            !admits(&mut breaker, Instant::now()) && breaker.open_error().is_some() && breaker.lets_send()
        );
    }

    #[test]
    fn waits_grow_to_a_second_and_vary() {
        let mut breaker = Breaker::default();
        breaker.open(&error());
        let waits: Vec<_> = (0..200).map(|_| breaker.wait(20)).collect();
        assert!(waits.iter().all(|wait| *wait <= LONGEST_WAIT));
        assert!(waits.iter().max() > waits.iter().min());
        assert!((0..200).all(|_| breaker.wait(0) <= FIRST_WAIT));
    }

    #[test]
    fn waits_grow_with_trials_that_fail_and_not_with_further_failures() {
        let longest = |breaker: &Breaker| (0..200).map(|_| breaker.wait(0)).max();
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            breaker.open(&error());
        }
        assert!(longest(&breaker) <= Some(FIRST_WAIT));
        for _ in 0..3 {
            breaker.half_open();
            breaker.failed(&error());
        }
        assert!(longest(&breaker) > Some(FIRST_WAIT * 4) && longest(&breaker) <= Some(FIRST_WAIT * 8));
        breaker.succeeded();
        assert!(longest(&breaker) <= Some(FIRST_WAIT));
    }
}

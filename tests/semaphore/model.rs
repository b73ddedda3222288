//! A plain reference of the rules, and random sequences of calls that have to agree with it: states,
//! events, answers and who is woken, after each step.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::time::{Instant, advance};
use tower_slots::semaphore::{AcquireError, Event, EventKind, Permit, Reason, Semaphore, SharedPermit};

use crate::support::*;

/// What a call comes to; a permit with its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Permit(u64),
    Unavailable,
    Queued,
    InvalidWeight,
    Oversize,
    QueueFull,
    Deadline,
    Closed,
}

/// The rules, as plainly as they can be written.
#[derive(Default)]
pub(crate) struct Model {
    capacity: i64,
    limit: usize,
    acquired: i64,
    queue: VecDeque<(usize, i64)>,
    held: HashMap<u64, i64>,
    admissions: u64,
    rejections: u64,
    cancellations: u64,
    closed: bool,
    /// What became of those who waited.
    settled: HashMap<usize, Outcome>,
    /// How often all was given back.
    drains: u64,
    log: Vec<String>,
}

impl Model {
    pub(crate) fn new(capacity: i64, limit: usize) -> Self {
        Self { capacity, limit, ..Self::default() }
    }

    fn state(&self) -> String {
        let Self { capacity, acquired, admissions, rejections, cancellations, .. } = self;
        let (waiters, closed) = (self.queue.len(), if self.closed { " closed" } else { "" });
        format!("{acquired}/{capacity} q{waiters} a{admissions} r{rejections} c{cancellations}{closed}")
    }

    fn note(&mut self, what: &str, id: u64, weight: i64) {
        self.log.push(format!("{what} #{id} w{weight} | {}", self.state()));
    }

    fn reject(&mut self, reason: &str, weight: i64, outcome: Outcome) -> Outcome {
        self.rejections += 1;
        self.note(&format!("rejected/{reason}"), 0, weight);
        outcome
    }

    fn admit(&mut self, reason: &str, weight: i64) -> Outcome {
        self.acquired += weight;
        self.admissions += 1;
        self.held.insert(self.admissions, weight);
        self.note(&format!("admitted/{reason}"), self.admissions, weight);
        Outcome::Permit(self.admissions)
    }

    fn fits(&self, weight: i64) -> bool {
        weight <= self.capacity - self.acquired
    }

    fn acquire(&mut self, caller: usize, weight: i64, past: bool) -> Outcome {
        if weight <= 0 {
            self.reject("invalid_weight", weight, Outcome::InvalidWeight)
        } else if weight > self.capacity {
            self.reject("oversize", weight, Outcome::Oversize)
        } else if past {
            self.cancellations += 1;
            self.note("canceled/deadline", 0, weight);
            Outcome::Deadline
        } else if self.closed {
            self.reject("closed", weight, Outcome::Closed)
        } else if self.queue.is_empty() && self.fits(weight) {
            self.admit("immediate", weight)
        } else if self.queue.len() >= self.limit {
            self.reject("queue_full", weight, Outcome::QueueFull)
        } else {
            self.queue.push_back((caller, weight));
            self.note("queued/fifo", 0, weight);
            Outcome::Queued
        }
    }

    fn try_acquire(&mut self, weight: i64) -> Outcome {
        if weight <= 0 {
            self.reject("invalid_weight", weight, Outcome::InvalidWeight)
        } else if weight > self.capacity {
            self.reject("oversize", weight, Outcome::Oversize)
        } else if self.closed {
            self.reject("closed", weight, Outcome::Closed)
        } else if self.queue.is_empty() && self.fits(weight) {
            self.admit("immediate", weight)
        } else {
            self.reject("unavailable", weight, Outcome::Unavailable)
        }
    }

    fn grant(&mut self) {
        while let Some(&(caller, weight)) = self.queue.front()
            && self.fits(weight)
        {
            self.queue.pop_front();
            let outcome = self.admit("fifo", weight);
            self.settled.insert(caller, outcome);
        }
    }

    fn release(&mut self, id: u64) {
        let weight = self.held.remove(&id).expect("a permit that is held");
        self.acquired -= weight;
        self.note("released/released", id, weight);
        self.grant();
        self.drains += u64::from(self.acquired == 0);
    }

    fn cancel(&mut self, caller: usize, reason: &str) {
        let at = self.queue.iter().position(|(of, _)| *of == caller).expect("a caller that waits");
        let (_, weight) = self.queue.remove(at).unwrap();
        self.cancellations += 1;
        self.note(&format!("canceled/{reason}"), 0, weight);
        self.grant();
    }

    fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) {
            while let Some((caller, weight)) = self.queue.pop_front() {
                let outcome = self.reject("closed", weight, Outcome::Closed);
                self.settled.insert(caller, outcome);
            }
            self.note("closed/shutdown", 0, 0);
        }
    }
}

/// Plays recorded events again, in their order: each must be what the rules make of those before it.
/// Waiters that may be cancelled are told apart by their weights, so these have to differ.
#[track_caller]
pub(crate) fn replay(events: &[Event], capacity: i64, limit: usize) {
    let mut model = Model::new(capacity, limit);
    let happened = lines(events);
    let mut at = 0;
    while at < events.len() {
        let Event { kind, reason, permit_id, weight, .. } = events[at];
        match (kind, reason) {
            (EventKind::Admitted, Reason::Immediate) | (EventKind::Queued, _) => {
                model.acquire(at, weight, false);
            }
            (EventKind::Rejected, Reason::Unavailable) => {
                model.try_acquire(weight);
            }
            (EventKind::Closed, _) => model.close(),
            (EventKind::Rejected, Reason::Closed) if !model.closed => model.close(),
            (EventKind::Rejected, _) => {
                model.acquire(at, weight, false);
            }
            (EventKind::Canceled, reason) => {
                let waiting = model.queue.iter().find(|(_, of)| *of == weight).copied();
                match waiting {
                    Some((caller, _)) => model.cancel(caller, reason.as_str()),
                    None if reason == Reason::Deadline => drop(model.acquire(at, weight, true)),
                    None => panic!("nobody waits: {}", happened[at]),
                }
            }
            (EventKind::Released, _) => model.release(permit_id.get()),
            other => panic!("event {at} comes from nowhere: {other:?}\n{}", happened.join("\n")),
        }
        for expected in model.log.drain(..) {
            assert_eq!(happened.get(at), Some(&expected), "event {at} of\n{}", happened.join("\n"));
            at += 1;
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Ends {
    Never,
    Past,
    Soon,
    Late,
}

#[derive(Debug, Clone, Copy)]
enum How {
    Drop,
    Release,
    /// Two clones, each released, one of them twice.
    Shared,
    /// Two clones, both dropped.
    SharedDrop,
}

/// What is done next; indexes are taken modulo what there is.
#[derive(Debug, Clone, Copy)]
enum Step {
    Acquire { weight: i64, ends: Ends, poll: bool },
    Try { weight: i64 },
    Poll(usize),
    Leave(usize),
    Release(usize, How),
    Close,
    Advance(u64),
    Idle(Ends),
    PollIdle(usize),
    LeaveIdle(usize),
    Drain,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    /// What a weight of one is.
    unit: i64,
    capacity: i64,
    limit: usize,
    ring: usize,
    /// Takes the events after each step, so that the ring cannot overflow.
    drain: bool,
    observer: bool,
}

fn settings() -> impl Strategy<Value = Settings> {
    let unit =
        prop_oneof![4 => Just(1), 1 => Just((1 << 32) / 6), 1 => Just(1 << 42), 1 => Just(i64::MAX / 6)];
    let ring = prop_oneof![3 => Just((0, false)), 3 => Just((64, true)), 2 => (1..5usize).prop_map(|ring| (ring, false))];
    (unit, 1..=6i64, 0..5usize, ring, any::<bool>()).prop_map(
        |(unit, capacity, limit, (ring, drain), observer)| Settings {
            unit,
            capacity: capacity * unit,
            limit,
            ring,
            drain,
            observer: observer && !drain,
        },
    )
}

fn ends() -> impl Strategy<Value = Ends> {
    prop_oneof![6 => Just(Ends::Never), 1 => Just(Ends::Past), 2 => Just(Ends::Soon), 2 => Just(Ends::Late)]
}

fn step() -> impl Strategy<Value = Step> {
    let weight = || prop_oneof![12 => 1..=4i64, 2 => 5..=6i64, 1 => -1..=0i64, 1 => Just(7)];
    let how = prop_oneof![3 => Just(How::Drop), 2 => Just(How::Release), 1 => Just(How::Shared), 1 => Just(How::SharedDrop)];
    prop_oneof![
        12 => (weight(), ends(), prop::bool::weighted(0.85))
            .prop_map(|(weight, ends, poll)| Step::Acquire { weight, ends, poll }),
        4 => weight().prop_map(|weight| Step::Try { weight }),
        6 => any::<usize>().prop_map(Step::Poll),
        5 => any::<usize>().prop_map(Step::Leave),
        10 => (any::<usize>(), how).prop_map(|(at, how)| Step::Release(at, how)),
        1 => prop::bool::weighted(0.3).prop_map(|close| if close { Step::Close } else { Step::Drain }),
        2 => (1..4u64).prop_map(Step::Advance),
        2 => ends().prop_map(Step::Idle),
        2 => any::<usize>().prop_map(Step::PollIdle),
        1 => any::<usize>().prop_map(Step::LeaveIdle),
        1 => Just(Step::Drain),
    ]
}

struct Caller {
    name: usize,
    weight: i64,
    deadline: Option<Instant>,
    task: Waiting,
    polled: bool,
}

struct Idler<'a> {
    task: Task<'a, bool>,
    deadline: Option<Instant>,
    /// How many drains there had been when it was first polled.
    since: Option<u64>,
}

struct Run<'a> {
    sem: &'a Semaphore,
    model: Model,
    notes: Option<Notes>,
    settings: Settings,
    callers: Vec<Caller>,
    permits: Vec<Permit>,
    idlers: Vec<Idler<'a>>,
    next: usize,
    /// Events that were not compared with the ring yet.
    unread: Vec<String>,
}

macro_rules! same {
    ($left:expr, $right:expr, $($what:tt)+) => {{
        let (left, right) = ($left, $right);
        if left != right {
            let what = format!($($what)+);
            return Err(TestCaseError::fail(format!("{what}: {left:?}, the model says {right:?}")));
        }
    }};
}

type Checked = Result<(), TestCaseError>;

impl<'a> Run<'a> {
    fn new(sem: &'a Semaphore, notes: Option<Notes>, settings: Settings) -> Self {
        Self {
            sem,
            model: Model::new(settings.capacity, settings.limit),
            notes,
            settings,
            callers: Vec::new(),
            permits: Vec::new(),
            idlers: Vec::new(),
            next: 0,
            unread: Vec::new(),
        }
    }

    /// The answer of the semaphore, with the permit put aside.
    fn outcome(
        &mut self,
        result: Result<Permit, AcquireError>,
        weight: i64,
    ) -> Result<Outcome, TestCaseError> {
        Ok(match result {
            Ok(permit) => {
                same!(permit.weight(), weight, "the permit's weight");
                let id = permit.id().get();
                self.permits.push(permit);
                Outcome::Permit(id)
            }
            Err(AcquireError::InvalidWeight { weight: given, .. }) => {
                same!(given, weight, "the weight that is invalid");
                Outcome::InvalidWeight
            }
            Err(AcquireError::Oversize { weight: given, capacity, .. }) => {
                same!((given, capacity), (weight, self.model.capacity), "what is too much");
                Outcome::Oversize
            }
            Err(AcquireError::QueueFull { limit, .. }) => {
                same!(limit, self.model.limit, "the limit of the queue");
                Outcome::QueueFull
            }
            Err(AcquireError::Deadline) => Outcome::Deadline,
            Err(AcquireError::Closed) => Outcome::Closed,
            Err(other) => return Err(TestCaseError::fail(format!("an unknown error: {other:?}"))),
        })
    }

    fn poll_caller(&mut self, at: usize) -> Checked {
        let Caller { name, weight, deadline, polled, .. } = self.callers[at];
        let past = deadline.is_some_and(|deadline| deadline <= Instant::now());
        let expected = if !polled {
            self.model.acquire(name, weight, past)
        } else if let Some(outcome) = self.model.settled.remove(&name) {
            outcome
        } else if past {
            self.model.cancel(name, "deadline");
            Outcome::Deadline
        } else {
            Outcome::Queued
        };
        let caller = &mut self.callers[at];
        caller.polled = true;
        caller.task.wakes();
        let outcome = match caller.task.poll() {
            std::task::Poll::Pending => Outcome::Queued,
            std::task::Poll::Ready(result) => {
                let flag = self.callers.swap_remove(at).task.flag();
                same!(std::sync::Arc::strong_count(&flag), 1, "wakers kept of one that is done");
                self.outcome(result, weight)?
            }
        };
        same!(outcome, expected, "the poll of caller {name}");
        Ok(())
    }

    fn leave(&mut self, at: usize) -> Checked {
        let Caller { name, task, polled, .. } = self.callers.swap_remove(at);
        if let Some(outcome) = self.model.settled.remove(&name) {
            if let Outcome::Permit(id) = outcome {
                self.model.release(id);
            }
        } else if polled {
            self.model.cancel(name, "context_canceled");
        }
        let flag = task.flag();
        drop(task);
        same!(std::sync::Arc::strong_count(&flag), 1, "wakers kept of one that left");
        Ok(())
    }

    fn release(&mut self, at: usize, how: How) -> Checked {
        let permit = self.permits.swap_remove(at);
        let id = permit.id();
        self.model.release(id.get());
        match how {
            How::Drop => drop(permit),
            How::Release => permit.release(),
            How::Shared => {
                let shared: SharedPermit = permit.into_shared();
                let other = shared.clone();
                same!(shared.release().is_ok(), true, "the first release");
                same!(other.release().map_err(|again| again.id), Err(id), "the second release");
                same!(shared.release().map_err(|again| again.id), Err(id), "the third release");
            }
            How::SharedDrop => {
                let shared = permit.into_shared();
                drop((shared.clone(), shared));
            }
        }
        Ok(())
    }

    fn poll_idler(&mut self, at: usize) -> Checked {
        let Idler { deadline, since, .. } = self.idlers[at];
        let past = deadline.is_some_and(|deadline| deadline <= Instant::now());
        let idle = match since {
            None => self.model.acquired == 0,
            Some(since) => self.model.drains > since,
        };
        let expected = if idle {
            Some(true)
        } else if past {
            Some(false)
        } else {
            None
        };
        self.idlers[at].since.get_or_insert(self.model.drains);
        self.idlers[at].task.wakes();
        let polled = match self.idlers[at].task.poll() {
            std::task::Poll::Pending => None,
            std::task::Poll::Ready(idle) => {
                self.idlers.swap_remove(at);
                Some(idle)
            }
        };
        same!(polled, expected, "the poll of one that waits until idle");
        Ok(())
    }

    fn deadline(ends: Ends) -> Option<Instant> {
        // Never at the same time as the clock, which moves by tens.
        match ends {
            Ends::Never => None,
            Ends::Past => Some(Instant::now()),
            Ends::Soon => Some(Instant::now() + 5 * MS),
            Ends::Late => Some(Instant::now() + 25 * MS),
        }
    }

    async fn step(&mut self, step: Step) -> Checked {
        let index = |at: usize, len: usize| if len == 0 { None } else { Some(at % len) };
        match step {
            Step::Acquire { weight, ends, poll } => {
                let weight = weight.saturating_mul(self.settings.unit);
                let deadline = Self::deadline(ends);
                let task = match deadline {
                    None => Task::new(self.sem.acquire(weight).into_owned()),
                    Some(deadline) => Task::new(self.sem.acquire_deadline(weight, deadline).into_owned()),
                };
                self.callers.push(Caller { name: self.next, weight, deadline, task, polled: false });
                self.next += 1;
                if poll {
                    self.poll_caller(self.callers.len() - 1)?;
                }
            }
            Step::Try { weight } => {
                let weight = weight.saturating_mul(self.settings.unit);
                let outcome = match self.sem.try_acquire(weight) {
                    Ok(None) => Outcome::Unavailable,
                    Ok(Some(permit)) => self.outcome(Ok(permit), weight)?,
                    Err(error) => self.outcome(Err(error), weight)?,
                };
                same!(outcome, self.model.try_acquire(weight), "try_acquire");
            }
            Step::Poll(at) => {
                if let Some(at) = index(at, self.callers.len()) {
                    self.poll_caller(at)?;
                }
            }
            Step::Leave(at) => {
                if let Some(at) = index(at, self.callers.len()) {
                    self.leave(at)?;
                }
            }
            Step::Release(at, how) => {
                if let Some(at) = index(at, self.permits.len()) {
                    self.release(at, how)?;
                }
            }
            Step::Close => {
                self.sem.close();
                self.model.close();
            }
            Step::Advance(tens) => advance(Duration::from_millis(10 * tens)).await,
            Step::Idle(ends) => {
                let (sem, deadline) = (self.sem, Self::deadline(ends));
                let task = match deadline {
                    None => Task::new(async move {
                        sem.wait_idle().await;
                        true
                    }),
                    Some(deadline) => {
                        Task::new(async move { sem.wait_idle_deadline(deadline).await.is_ok() })
                    }
                };
                self.idlers.push(Idler { task, deadline, since: None });
                self.poll_idler(self.idlers.len() - 1)?;
            }
            Step::PollIdle(at) => {
                if let Some(at) = index(at, self.idlers.len()) {
                    self.poll_idler(at)?;
                }
            }
            Step::LeaveIdle(at) => {
                if let Some(at) = index(at, self.idlers.len()) {
                    drop(self.idlers.swap_remove(at));
                }
            }
            Step::Drain => self.drain()?,
        }
        self.compare()
    }

    fn drain(&mut self) -> Checked {
        self.unread.append(&mut self.model.log);
        let batch = self.sem.drain_events();
        let kept = self.unread.len().min(self.settings.ring);
        let lost = if self.settings.ring == 0 { 0 } else { self.unread.len() - kept };
        let expected = self.unread.split_off(self.unread.len() - kept);
        self.unread.clear();
        same!(lines(&batch.events), expected, "the recorded events");
        same!(batch.dropped, lost as u64, "the events that were lost");
        Ok(())
    }

    fn compare(&mut self) -> Checked {
        same!(line(self.sem.snapshot()), self.model.state(), "the state");
        same!(self.sem.is_closed(), self.model.closed, "closed");
        if let Some(notes) = &self.notes {
            same!(notes.take(), self.model.log.clone(), "the observed events");
        }
        if self.settings.drain {
            self.drain()?;
        } else {
            self.unread.append(&mut self.model.log);
        }
        let now = Instant::now();
        for Caller { name, task, deadline, polled, .. } in &self.callers {
            let settled = self.model.settled.contains_key(name);
            let late = *polled && !settled && deadline.is_some_and(|deadline| deadline <= now);
            let wakes = task.woken();
            if (settled || late) && wakes == 0 {
                return Err(TestCaseError::fail(format!("caller {name} was not woken")));
            }
            if wakes > 0 && deadline.is_none() && !settled {
                return Err(TestCaseError::fail(format!("caller {name} was woken for nothing")));
            }
        }
        for Idler { task, deadline, since } in &self.idlers {
            let done = since.is_some_and(|since| self.model.drains > since);
            let late = deadline.is_some_and(|deadline| deadline <= now);
            if (done || late) && task.woken() == 0 {
                return Err(TestCaseError::fail("one that waits until idle was not woken"));
            }
        }
        Ok(())
    }

    /// Everybody leaves: nothing may be left.
    fn finish(mut self) -> Checked {
        while !self.callers.is_empty() {
            self.leave(self.callers.len() / 2)?;
            self.compare()?;
        }
        while !self.permits.is_empty() {
            self.release(self.permits.len() / 2, How::Drop)?;
            self.compare()?;
        }
        while !self.idlers.is_empty() {
            self.poll_idler(self.idlers.len() / 2)?;
        }
        same!(self.sem.snapshot().acquired, 0, "what is left");
        self.drain()
    }
}

fn check(settings: Settings, steps: &[Step]) -> Checked {
    paused(async {
        let Settings { capacity, limit, ring, observer, .. } = settings;
        let builder = Semaphore::builder(capacity).max_waiters(limit).events(ring);
        let notes = observer.then(Notes::default);
        let sem = match &notes {
            Some(notes) => observed(builder, notes),
            None => builder.build().unwrap(),
        };
        let mut run = Run::new(&sem, notes, settings);
        for (at, step) in steps.iter().enumerate() {
            let checked = run.step(*step).await;
            checked.map_err(|error| TestCaseError::fail(format!("at step {at}, {step:?}: {error}")))?;
        }
        run.finish()
    })
}

#[test]
fn every_sequence_of_calls_agrees_with_the_model() {
    let cases = std::env::var("SEMAPHORE_CASES").map_or(1500, |cases| cases.parse().unwrap());
    let config = Config { cases, max_shrink_time: 20_000, failure_persistence: None, ..Config::default() };
    let sequences = (settings(), prop::collection::vec(step(), 1..80));
    TestRunner::new(config)
        .run(&sequences, |(settings, steps)| check(settings, &steps))
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn two_thousand_steps_agree_with_the_model() {
    for (unit, ring, drain, observer) in
        [(1, 0, false, false), (1, 64, true, false), (1, 3, false, true), (1 << 42, 0, false, false)]
    {
        let settings = Settings { unit, capacity: 5 * unit, limit: 6, ring, drain, observer };
        let mut runner = TestRunner::deterministic();
        let steps = prop::collection::vec(step(), 2000).new_tree(&mut runner).unwrap().current();
        // Open all the way, closed towards the end.
        let (close, open): (Vec<Step>, Vec<Step>) =
            steps.into_iter().partition(|step| matches!(step, Step::Close));
        assert!(!close.is_empty());
        let steps: Vec<Step> = open.into_iter().chain(close).collect();
        check(settings, &steps).unwrap_or_else(|error| panic!("{settings:?}: {error}"));
    }
}

/// The reference itself, by a sequence that was worked out by hand.
#[test]
fn the_model_says_what_the_rules_say() {
    let mut model = Model::new(4, 2);
    assert_eq!(model.acquire(0, 3, false), Outcome::Permit(1));
    assert_eq!(model.acquire(1, 4, false), Outcome::Queued);
    assert_eq!(model.acquire(2, 1, false), Outcome::Queued);
    assert_eq!(model.acquire(3, 1, false), Outcome::QueueFull);
    assert_eq!(model.try_acquire(1), Outcome::Unavailable);
    model.cancel(1, "context_canceled");
    assert_eq!(model.settled.remove(&2), Some(Outcome::Permit(2)));
    model.release(1);
    model.release(2);
    model.close();
    assert_eq!(model.acquire(4, 5, true), Outcome::Oversize);
    assert_eq!(model.acquire(5, 1, true), Outcome::Deadline);
    assert_eq!(model.acquire(6, 1, false), Outcome::Closed);
    assert_eq!(model.drains, 1);
    assert_eq!(
        model.log,
        [
            "admitted/immediate #1 w3 | 3/4 q0 a1 r0 c0",
            "queued/fifo #0 w4 | 3/4 q1 a1 r0 c0",
            "queued/fifo #0 w1 | 3/4 q2 a1 r0 c0",
            "rejected/queue_full #0 w1 | 3/4 q2 a1 r1 c0",
            "rejected/unavailable #0 w1 | 3/4 q2 a1 r2 c0",
            "canceled/context_canceled #0 w4 | 3/4 q1 a1 r2 c1",
            "admitted/fifo #2 w1 | 4/4 q0 a2 r2 c1",
            "released/released #1 w3 | 1/4 q0 a2 r2 c1",
            "released/released #2 w1 | 0/4 q0 a2 r2 c1",
            "closed/shutdown #0 w0 | 0/4 q0 a2 r2 c1 closed",
            "rejected/oversize #0 w5 | 0/4 q0 a2 r3 c1 closed",
            "canceled/deadline #0 w1 | 0/4 q0 a2 r3 c2 closed",
            "rejected/closed #0 w1 | 0/4 q0 a2 r4 c2 closed",
        ]
    );
}

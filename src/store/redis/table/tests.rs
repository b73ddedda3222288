//! What the table decides, with answers made up for it.

use std::sync::Mutex;

use tokio::sync::oneshot::error::TryRecvError;

use super::super::flight::Answer as KeyAnswer;
use super::*;

const MS: Duration = Duration::from_millis(1);
const LEASE: Duration = Duration::from_secs(30);
const TIMEOUT: Duration = Duration::from_secs(1);
const SERVER_NOW: u64 = 1_000_000;
const GRANTED: Verdict = Verdict::Decided(Grant::Granted { active: 1 });
const REFUSED: Verdict = Verdict::Decided(Grant::Refused { active: 1 });

#[derive(Default)]
struct Told(Mutex<Vec<Lost>>);

impl Holder for Told {
    fn lost(&self, why: Lost) {
        self.0.lock().unwrap().push(why);
    }
}

/// A table, and what is told by it.
struct Bench {
    table: Table,
    start: Instant,
    key: Key,
    terms: Arc<Terms>,
    told: Arc<Told>,
}

type Reply = oneshot::Receiver<Result<Grant, StoreError>>;
type Confirmed = oneshot::Receiver<Result<(), StoreError>>;

impl Bench {
    fn new() -> Self {
        Self {
            table: Table::default(),
            start: Instant::now(),
            key: Key::new("a"),
            terms: Arc::new(Terms::new(LEASE, TIMEOUT)),
            told: Arc::default(),
        }
    }

    fn claim(&self, slot: SlotId) -> Claim {
        let told: Arc<dyn Holder> = self.told.clone();
        let mut claim = Claim::new(self.key.clone(), slot, 1, 10, &self.terms);
        claim.holder = Arc::downgrade(&told);
        claim
    }

    fn enqueue(&mut self, slot: SlotId) -> Reply {
        let (reply, answer) = oneshot::channel();
        let claim = self.claim(slot);
        self.table.enqueue(claim, reply, self.start);
        answer
    }

    fn release(&mut self, slot: SlotId) -> Confirmed {
        let (confirm, confirmed) = oneshot::channel();
        self.told_by(|table, news| table.release(slot, Some(confirm), news));
        confirmed
    }

    fn told_by<T>(&mut self, change: impl FnOnce(&mut Table, &mut News) -> T) -> T {
        let mut news = News::default();
        let result = change(&mut self.table, &mut news);
        news.deliver();
        result
    }

    /// The next flight, `after` the start.
    fn fly(&mut self, after: Duration) -> Option<Flight> {
        let stamp = Stamp { now: self.start + after, epoch: 1, server_now: SERVER_NOW };
        self.told_by(|table, news| table.next_flight(0, stamp, news))
    }

    /// It comes back with the same fate for all claims, and with its connection's epoch in order.
    fn land(&mut self, flight: Flight, verdict: Verdict, now: u64, epoch: Option<u64>) {
        let verdicts = |ask: &Ask| vec![verdict; ask.claims.len()];
        let asks: Vec<Ask> = flight.calls.into_iter().flatten().collect();
        let answers = asks.iter().map(|ask| Ok(KeyAnswer { lapsed: 0, verdicts: verdicts(ask) })).collect();
        self.land_with(asks, FlightReply { now, answers }, epoch);
    }

    fn land_with(&mut self, asks: Vec<Ask>, reply: FlightReply, epoch: Option<u64>) {
        let (doubt, now) = (Doubt { until: SERVER_NOW + 500, epoch: 1 }, self.start + MS);
        self.told_by(|table, news| table.landed(asks, reply, epoch, doubt, now, news));
    }

    fn crash(&mut self, flight: Flight, error: StoreErrorKind, after: Duration) {
        let (doubt, now) = (flight.doubt(), self.start + after);
        let failed = Failed::from(StoreError::new(error, "it failed"));
        let asks = flight.calls.into_iter().flatten().collect();
        self.told_by(|table, news| table.crashed(asks, &failed, doubt, now, news));
    }

    /// A slot that is held since the server's clock showed this.
    fn held(&mut self, server_now: u64) -> SlotId {
        let slot = SlotId::new();
        let mut answer = self.enqueue(slot);
        let flight = self.fly(Duration::ZERO).unwrap();
        self.land(flight, GRANTED, server_now, None);
        assert!(matches!(answer.try_recv(), Ok(Ok(Grant::Granted { active: 1 }))));
        slot
    }

    fn lost(&self) -> Vec<Lost> {
        self.told.0.lock().unwrap().clone()
    }
}

/// How many releases and claims it carries.
fn carries(flight: &Flight) -> (usize, usize) {
    let asks = || flight.calls.iter().flatten();
    (asks().map(|ask| ask.back.len()).sum(), asks().map(|ask| ask.claims.len()).sum())
}

fn kind<T: std::fmt::Debug>(answer: Result<Result<T, StoreError>, TryRecvError>) -> StoreErrorKind {
    answer.unwrap().unwrap_err().kind()
}

#[test]
fn a_slot_is_backlog_from_its_release_until_that_is_confirmed() {
    let mut bench = Bench::new();
    let slot = bench.held(SERVER_NOW);
    assert!(bench.table.knows(slot) && !bench.table.is_empty());
    assert_eq!((bench.table.backlog(), bench.table.when_flushed().is_some()), (0, false));
    let mut confirmed = bench.release(slot);
    assert!(!bench.table.knows(slot) && !bench.table.is_empty());
    assert_eq!(bench.table.backlog(), 1);
    let mut flushed = bench.table.when_flushed().unwrap();
    let flight = bench.fly(MS).unwrap();
    assert_eq!(carries(&flight), (1, 0));
    assert_eq!(confirmed.try_recv().unwrap_err(), TryRecvError::Empty);
    assert!(flushed.try_recv().is_err());
    bench.land(flight, GRANTED, SERVER_NOW, None);
    assert!(confirmed.try_recv().unwrap().is_ok() && flushed.try_recv().is_ok());
    assert!(bench.table.is_empty());
}

#[test]
fn a_claim_that_was_never_sent_is_given_up_without_the_server() {
    let mut bench = Bench::new();
    let slot = SlotId::new();
    let _answer = bench.enqueue(slot);
    let mut confirmed = bench.release(slot);
    assert!(confirmed.try_recv().unwrap().is_ok());
    assert!(bench.fly(Duration::ZERO).is_none() && bench.table.is_empty());
}

#[test]
fn a_claim_that_is_given_up_in_flight_is_given_back_once_it_is_granted_and_counts_once() {
    let mut bench = Bench::new();
    let slot = SlotId::new();
    let mut answer = bench.enqueue(slot);
    let flight = bench.fly(Duration::ZERO).unwrap();
    let mut confirmed = bench.release(slot);
    // A second release of it changes nothing.
    bench.told_by(|table, news| table.release(slot, None, news));
    assert_eq!(bench.table.backlog(), 1);
    bench.land(flight, GRANTED, SERVER_NOW, None);
    assert_eq!(kind(answer.try_recv()), StoreErrorKind::Timeout);
    let flight = bench.fly(MS).unwrap();
    assert_eq!(carries(&flight), (1, 0));
    bench.land(flight, GRANTED, SERVER_NOW, None);
    assert!(confirmed.try_recv().unwrap().is_ok() && bench.table.is_empty());
}

#[test]
fn a_refused_claim_leaves_nothing() {
    let mut bench = Bench::new();
    let mut answer = bench.enqueue(SlotId::new());
    let flight = bench.fly(Duration::ZERO).unwrap();
    bench.land(flight, REFUSED, SERVER_NOW, None);
    assert!(matches!(answer.try_recv(), Ok(Ok(Grant::Refused { active: 1 }))));
    assert!(bench.table.is_empty());
}

#[test]
fn a_claim_whose_connection_breaks_is_sent_three_times_at_most_and_then_undone() {
    let mut bench = Bench::new();
    let mut answer = bench.enqueue(SlotId::new());
    for _ in 0..3 {
        let flight = bench.fly(Duration::ZERO).unwrap();
        assert_eq!(carries(&flight), (0, 1));
        assert_eq!(answer.try_recv().unwrap_err(), TryRecvError::Empty);
        bench.crash(flight, StoreErrorKind::Io, MS);
    }
    assert_eq!(kind(answer.try_recv()), StoreErrorKind::Io);
    assert_eq!(bench.table.backlog(), 1, "it may have been granted");
    assert_eq!(carries(&bench.fly(Duration::ZERO).unwrap()), (1, 0));
}

#[test]
fn a_claim_is_not_sent_again_after_its_deadline_or_another_error() {
    for (error, after) in [(StoreErrorKind::Io, TIMEOUT), (StoreErrorKind::Timeout, MS)] {
        let mut bench = Bench::new();
        let mut answer = bench.enqueue(SlotId::new());
        let flight = bench.fly(Duration::ZERO).unwrap();
        bench.crash(flight, error, after);
        assert_eq!(kind(answer.try_recv()), error);
        assert_eq!(carries(&bench.fly(after).unwrap()), (1, 0));
    }
    // What the server did not run needs no undoing.
    let mut bench = Bench::new();
    let mut answer = bench.enqueue(SlotId::new());
    let flight = bench.fly(Duration::ZERO).unwrap();
    bench.crash(flight, StoreErrorKind::Loading, MS);
    assert_eq!(kind(answer.try_recv()), StoreErrorKind::Loading);
    assert!(bench.table.is_empty());
}

#[test]
fn a_claim_that_came_too_late_is_sent_again() {
    let mut bench = Bench::new();
    let mut answer = bench.enqueue(SlotId::new());
    let flight = bench.fly(Duration::ZERO).unwrap();
    bench.land(flight, Verdict::Late, SERVER_NOW, None);
    let flight = bench.fly(MS).unwrap();
    bench.land(flight, GRANTED, SERVER_NOW, None);
    assert!(matches!(answer.try_recv(), Ok(Ok(Grant::Granted { .. }))));
}

#[test]
fn a_claim_that_nobody_waits_for_any_more_is_not_sent() {
    let mut bench = Bench::new();
    let mut answer = bench.enqueue(SlotId::new());
    assert!(bench.fly(TIMEOUT).is_none());
    assert_eq!(kind(answer.try_recv()), StoreErrorKind::Timeout);
    assert!(bench.table.is_empty());
}

/// A call may still run that acquires the slot: so a release counts once the server's clock has
/// passed that call's last instant, or at once where both took one connection in order.
#[test]
fn a_release_in_doubt_is_sent_again_once_the_doubt_is_over() {
    for in_order in [false, true] {
        let mut bench = Bench::new();
        let slot = SlotId::new();
        let _answer = bench.enqueue(slot);
        let flight = bench.fly(Duration::ZERO).unwrap();
        let until = flight.not_after;
        assert_eq!(until, SERVER_NOW + 1001);
        bench.crash(flight, StoreErrorKind::Timeout, MS);
        let release = bench.fly(MS).unwrap();
        bench.land(release, GRANTED, SERVER_NOW + 1, in_order.then_some(1));
        assert_eq!((bench.table.take_put_off(), bench.table.is_empty()), (!in_order, in_order));
        if in_order {
            continue;
        }
        // A thousand ms are left, and one more for the clock to have passed it.
        let due = bench.start + MS + 1001 * MS;
        assert_eq!(bench.table.next_later(), Some(due));
        bench.table.queue_due(due - MS);
        assert!(bench.fly(MS).is_none());
        bench.table.queue_due(due);
        let release = bench.fly(2 * MS).unwrap();
        bench.land(release, GRANTED, until + 1, None);
        assert!(bench.table.is_empty());
    }
}

#[test]
fn a_key_in_trouble_undoes_its_claims_and_tries_its_releases_again() {
    let mut bench = Bench::new();
    let slot = bench.held(SERVER_NOW);
    let mut confirmed = bench.release(slot);
    let mut answer = bench.enqueue(SlotId::new());
    let fail = |bench: &mut Bench, kind| {
        let flight = bench.fly(MS).unwrap();
        let asks: Vec<Ask> = flight.calls.into_iter().flatten().collect();
        let answers = vec![Err(StoreError::new(kind, "in trouble"))];
        bench.land_with(asks, FlightReply { now: SERVER_NOW, answers }, None);
    };
    fail(&mut bench, StoreErrorKind::Oom);
    assert_eq!(kind(answer.try_recv()), StoreErrorKind::Oom);
    assert_eq!(confirmed.try_recv().unwrap_err(), TryRecvError::Empty);
    // The claim may have been executed, and the release is tried again after a while.
    assert_eq!(bench.table.backlog(), 2);
    assert_eq!(bench.table.next_later(), Some(bench.start + MS + RELEASE_RETRY));
    bench.table.queue_due(bench.start + MS + RELEASE_RETRY);
    // Where something else is stored under the key there is nothing to give back.
    fail(&mut bench, StoreErrorKind::WrongType);
    assert_eq!(kind(confirmed.try_recv()), StoreErrorKind::WrongType);
    assert!(bench.table.is_empty());
}

#[test]
fn a_release_is_given_up_when_the_lease_has_run_out() {
    for by_tick in [false, true] {
        let mut bench = Bench::new();
        let slot = bench.held(SERVER_NOW);
        let mut confirmed = bench.release(slot);
        if by_tick {
            let end = bench.start + LEASE;
            bench.told_by(|table, news| table.end_overdue(end - MS, news));
            assert_eq!(confirmed.try_recv().unwrap_err(), TryRecvError::Empty);
            bench.told_by(|table, news| table.end_overdue(end, news));
        } else {
            assert!(bench.fly(LEASE).is_none());
        }
        assert_eq!(kind(confirmed.try_recv()), StoreErrorKind::Timeout);
        assert!(bench.table.is_empty());
    }
}

#[test]
fn anothers_slot_is_released_and_confirmed() {
    let mut bench = Bench::new();
    let (confirm, mut confirmed) = oneshot::channel();
    let (key, terms) = (bench.key.clone(), Arc::clone(&bench.terms));
    bench.table.release_foreign(key, SlotId::new(), terms, confirm);
    assert_eq!(bench.table.backlog(), 1);
    let flight = bench.fly(Duration::ZERO).unwrap();
    assert_eq!(carries(&flight), (1, 0));
    bench.land(flight, GRANTED, SERVER_NOW, None);
    assert!(confirmed.try_recv().unwrap().is_ok() && bench.table.is_empty());
}

#[test]
fn a_drain_takes_what_was_acquired_before_it() {
    let mut bench = Bench::new();
    let (before, same_ms) = (bench.held(SERVER_NOW - 1), bench.held(SERVER_NOW));
    let adopted = SlotId::new();
    let claim = bench.claim(adopted);
    let start = bench.start;
    bench.table.adopt(claim, start);
    let on_its_way = SlotId::new();
    let _answer = bench.enqueue(on_its_way);
    let flight = bench.fly(MS).unwrap();
    bench.told_by(|table, news| table.drained(&Key::new("b"), SERVER_NOW, news));
    assert!(bench.table.knows(before) && bench.lost().is_empty(), "another key was drained");
    let key = bench.key.clone();
    bench.told_by(|table, news| table.drained(&key, SERVER_NOW, news));
    assert_eq!(bench.lost().len(), 1);
    assert!(!bench.table.knows(before));
    assert!([same_ms, adopted, on_its_way].iter().all(|slot| bench.table.knows(*slot)));
    drop(flight);
}

#[test]
fn claims_that_wait_fail_with_the_server_and_leave_nothing() {
    let mut bench = Bench::new();
    let held = bench.held(SERVER_NOW);
    let (mut queued, mut again) = (bench.enqueue(SlotId::new()), bench.enqueue(held));
    let error = StoreError::new(StoreErrorKind::Io, "down");
    bench.told_by(|table, news| table.fail_queued(0, &error, news));
    assert_eq!((kind(queued.try_recv()), kind(again.try_recv())), (StoreErrorKind::Io, StoreErrorKind::Io));
    // The second one was a claim of a slot that the server may have: it is given back.
    assert_eq!(bench.table.backlog(), 1);
    assert_eq!(carries(&bench.fly(MS).unwrap()), (1, 0));
}

#[test]
fn releases_go_out_in_the_order_of_their_age() {
    let mut bench = Bench::new();
    let slots: Vec<_> = (0..3).map(|_| bench.held(SERVER_NOW)).collect();
    let _first = bench.release(slots[0]);
    let flight = bench.fly(MS).unwrap();
    std::thread::sleep(2 * MS);
    let _others: Vec<_> = slots[1..].iter().map(|slot| bench.release(*slot)).collect();
    bench.crash(flight, StoreErrorKind::Io, MS);
    let flight = bench.fly(MS).unwrap();
    let back: Vec<_> = flight.calls[0][0].back.iter().map(|release| release.slot).collect();
    assert_eq!(back, slots);
}

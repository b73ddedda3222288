//! One call of the flight script: what it carries, how it is written, and how its reply is read.

use std::collections::VecDeque;
use std::sync::Arc;

use ::redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::error::{classify_text, connection_lost, malformed};
use super::script::{List, count, sequence, signed, text, unsigned};
use crate::store::{Grant, Key, KeyMap, SlotId, StoreError, StoreErrorKind, Terms};

/// The most slots that one flight carries, so that it never holds the server for long.
pub(super) const MOST_SLOTS: u32 = 512;
/// The most calls of one flight, for the same reason: each has a cost of its own.
const MOST_CALLS: usize = 64;

/// Something that was sent may still be executed, until the server's clock has passed `until`,
/// unless what comes after it takes the same connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Doubt {
    pub(super) until: u64,
    pub(super) epoch: u64,
}

impl Doubt {
    /// The doubt that lasts longer.
    pub(super) fn or(self, other: Option<Self>) -> Self {
        other.filter(|other| other.until > self.until).unwrap_or(self)
    }

    /// Whether what was executed at `now`, over the connection `epoch`, came after it for sure.
    pub(super) fn settled(self, now: u64, epoch: Option<u64>) -> bool {
        now > self.until || epoch == Some(self.epoch)
    }
}

/// What a call came to that brought no reply.
#[derive(Clone)]
pub(super) struct Failed {
    pub(super) error: StoreError,
    /// A task went away that carried it for others: nothing is wrong with the connection.
    pub(super) abandoned: bool,
    /// The server may have executed it, or may still do so.
    pub(super) unknown: bool,
}

impl Failed {
    /// A caller or a runtime went away: nobody's failure.
    pub(super) fn abandoned() -> Self {
        Self { error: connection_lost(), abandoned: true, unknown: true }
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        // The server says no before it runs a script, in all other cases.
        let unknown =
            matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Io | StoreErrorKind::Other);
        Self { error, abandoned: false, unknown }
    }
}

pub(super) type Confirm = oneshot::Sender<Result<(), StoreError>>;

/// A slot that is to be given back.
pub(super) struct Release {
    pub(super) key: Key,
    pub(super) slot: SlotId,
    pub(super) weight: u32,
    pub(super) terms: Arc<Terms>,
    pub(super) queued: Instant,
    /// When the server gives it back by itself at the latest.
    pub(super) lapses: Instant,
    pub(super) doubt: Option<Doubt>,
    pub(super) confirm: Option<Confirm>,
}

/// A claim on its way to the server; the rest of it stands in the table of slots.
pub(super) struct Acquire {
    pub(super) slot: SlotId,
    pub(super) weight: u32,
    pub(super) limit: u32,
    pub(super) queued: Instant,
    pub(super) deadline: Instant,
    pub(super) tries: u32,
    pub(super) reply: oneshot::Sender<Result<Grant, StoreError>>,
}

/// What a flight asks of one key.
pub(super) struct Ask {
    pub(super) key: Key,
    pub(super) limit: u32,
    pub(super) lease_ms: u64,
    pub(super) back: Vec<Release>,
    pub(super) claims: Vec<Acquire>,
}

impl Ask {
    /// How many members are given back.
    fn given_back(&self) -> usize {
        self.back.iter().map(|release| release.weight as usize).sum()
    }

    /// The weight of all claims.
    fn claimed(&self) -> u64 {
        self.claims.iter().map(|claim| u64::from(claim.weight)).sum()
    }

    /// Unless all are 1.
    fn tells_weights(&self) -> bool {
        self.claims.iter().any(|claim| claim.weight > 1)
    }

    /// How long its part of the list is.
    fn items(&self) -> usize {
        let claims = self.claims.len();
        let claims = match claims {
            0 => 0,
            _ if self.tells_weights() => 3 + 2 * claims,
            _ => 3 + claims,
        };
        2 + self.given_back() + claims
    }
}

/// What is put into a flight, grouped by key in the order in which the keys came up.
///
/// One call serves many keys, but on a cluster just one: there its keys would have to share a hash
/// slot, which those of different ids hardly ever do, and while the hash slot moves from node to node
/// a call is only served with one key.
pub(super) struct Cargo {
    apart: bool,
    pub(super) calls: Vec<Vec<Ask>>,
    by_key: KeyMap<(usize, usize)>,
}

impl Cargo {
    pub(super) fn new(apart: bool) -> Self {
        Self { apart, calls: Vec::new(), by_key: KeyMap::default() }
    }

    /// The head of a queue, unless it does not fit into a flight that carries something already.
    pub(super) fn pop_fitting<T>(
        &self,
        queue: &mut VecDeque<T>,
        room: u32,
        weight: impl Fn(&T) -> u32,
    ) -> Option<T> {
        let fits = queue.front().is_some_and(|head| weight(head) <= room || room == MOST_SLOTS);
        if fits && self.calls.len() < MOST_CALLS { queue.pop_front() } else { None }
    }

    fn push(&mut self, ask: Ask) -> &mut Ask {
        let known = self.by_key.get(&ask.key).map(|(call, _)| *call);
        let call = known.unwrap_or(if self.apart { self.calls.len() } else { 0 });
        if call == self.calls.len() {
            self.calls.push(Vec::new());
        }
        let at = self.calls[call].len();
        self.by_key.insert(ask.key.clone(), (call, at));
        self.calls[call].push(ask);
        &mut self.calls[call][at]
    }

    fn last_of(&mut self, key: &Key) -> Option<&mut Ask> {
        // Where one key is busy, most of what comes is about the same as what came before it.
        let newest = self.calls.len().checked_sub(1).map(|call| (call, self.calls[call].len() - 1));
        let (call, at) = match newest {
            Some((call, at)) if self.calls[call][at].key == *key => (call, at),
            _ => *self.by_key.get(key)?,
        };
        self.calls.get_mut(call)?.get_mut(at)
    }

    pub(super) fn push_release(&mut self, release: Release) {
        let (key, lease_ms) = (release.key.clone(), lease_ms(&release.terms));
        match self.last_of(&key) {
            Some(ask) => ask.back.push(release),
            None => _ = self.push(Ask { key, limit: 0, lease_ms, back: vec![release], claims: Vec::new() }),
        }
    }

    /// Claims of one key that differ in limit or lease go into asks of their own, in their order.
    pub(super) fn push_claim(&mut self, key: &Key, terms: &Terms, acquire: Acquire) {
        let (limit, lease_ms) = (acquire.limit, lease_ms(terms));
        if let Some(ask) = self.last_of(key) {
            if ask.claims.is_empty() {
                (ask.limit, ask.lease_ms) = (limit, lease_ms);
            }
            if (ask.limit, ask.lease_ms) == (limit, lease_ms) {
                ask.claims.push(acquire);
                return;
            }
        }
        self.push(Ask { key: key.clone(), limit, lease_ms, back: Vec::new(), claims: vec![acquire] });
    }
}

pub(super) fn lease_ms(terms: &Terms) -> u64 {
    u64::try_from(terms.lease.as_millis()).unwrap_or(u64::MAX)
}

/// Calls on their way to one server.
pub(super) struct Flight {
    pub(super) lane: usize,
    /// What each of them asks.
    pub(super) calls: Vec<Vec<Ask>>,
    /// After this instant on the server's clock the script takes nothing any more.
    pub(super) not_after: u64,
    /// The connection that it goes over.
    pub(super) epoch: u64,
    pub(super) deadline: Instant,
}

impl Flight {
    /// How many slots it takes and gives back.
    pub(super) fn size(&self) -> u64 {
        self.calls.iter().flatten().map(|ask| ask.given_back() as u64 + ask.claimed()).sum()
    }

    /// What may be executed of it later than we know of.
    pub(super) fn doubt(&self) -> Doubt {
        Doubt { until: self.not_after, epoch: self.epoch }
    }

    pub(super) fn write(&self, call: usize, cmd: &mut Cmd) {
        let asks = &self.calls[call];
        cmd.arg(asks.len());
        for ask in asks {
            cmd.arg(ask.key.as_str());
        }
        cmd.arg(packed(self.not_after, asks));
    }

    pub(super) fn read(&self, call: usize, reply: Value) -> Result<FlightReply, StoreError> {
        let asks = &self.calls[call];
        let mut items = sequence(reply)?.into_iter();
        let now = items.next().and_then(|value| unsigned(&value)).ok_or_else(malformed)?;
        let mut answers: Vec<Result<Answer, StoreError>> =
            asks.iter().map(|_| Ok(Answer::default())).collect();
        read_notes(items.next().ok_or_else(malformed)?, &mut answers)?;
        for (ask, answer) in asks.iter().zip(&mut answers).filter(|(ask, _)| !ask.claims.is_empty()) {
            let verdicts = read_verdicts(items.next().ok_or_else(malformed)?, &ask.claims)?;
            if let Ok(answer) = answer {
                answer.verdicts = verdicts;
            }
        }
        if items.next().is_some() {
            return Err(malformed());
        }
        Ok(FlightReply { now, answers })
    }
}

/// All of a call but its keys, as one MessagePack list.
fn packed(not_after: u64, asks: &[Ask]) -> Vec<u8> {
    let first_claimed = asks.iter().position(|ask| !ask.claims.is_empty()).map_or(0, |at| at + 1);
    let items: usize = 2 + asks.iter().map(Ask::items).sum::<usize>();
    let mut list = List::of(items);
    list.number(not_after);
    list.number(first_claimed as u64);
    for ask in asks {
        list.number(ask.given_back() as u64);
        list.number(ask.claims.len() as u64);
        for release in &ask.back {
            release.slot.members(release.weight).for_each(|member| list.slot(member));
        }
        if ask.claims.is_empty() {
            continue;
        }
        list.number(u64::from(ask.limit));
        list.number(ask.lease_ms);
        list.number(ask.claimed());
        if ask.tells_weights() {
            ask.claims.iter().for_each(|claim| list.number(u64::from(claim.weight)));
        }
        ask.claims.iter().for_each(|claim| list.slot(claim.slot));
    }
    list.into_bytes()
}

/// The server's time, and each key's answer in the order of the asks.
pub(super) struct FlightReply {
    pub(super) now: u64,
    pub(super) answers: Vec<Result<Answer, StoreError>>,
}

impl FlightReply {
    /// What is wrong with the server, if not with one key alone.
    pub(super) fn trouble(&self) -> Option<StoreError> {
        let errors = self.answers.iter().filter_map(|answer| answer.as_ref().err());
        errors.into_iter().find(|error| error.kind() != StoreErrorKind::WrongType).cloned()
    }
}

/// What became of what a flight asked of one key.
#[derive(Default)]
pub(super) struct Answer {
    pub(super) lapsed: u64,
    pub(super) verdicts: Vec<Verdict>,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Decided(Grant),
    Late,
}

/// What a reply tells of single keys: how many members had lapsed, or what is wrong.
fn read_notes(notes: Value, answers: &mut [Result<Answer, StoreError>]) -> Result<(), StoreError> {
    if matches!(notes, Value::Nil | Value::Boolean(false)) {
        return Ok(());
    }
    for note in sequence(notes)?.chunks(2) {
        let [place, what] = note else { return Err(malformed()) };
        let place = unsigned(place).and_then(|place| usize::try_from(place).ok());
        let answer = place.and_then(|place| answers.get_mut(place.checked_sub(1)?)).ok_or_else(malformed)?;
        match (unsigned(what), text(what)) {
            (Some(lapsed), _) => {
                if let Ok(answer) = answer {
                    answer.lapsed = lapsed;
                }
            }
            (None, Some(text)) => *answer = Err(classify_text(text)),
            (None, None) => return Err(malformed()),
        }
    }
    Ok(())
}

/// What became of the claims on one key: of all alike, or of each.
fn read_verdicts(value: Value, claims: &[Acquire]) -> Result<Vec<Verdict>, StoreError> {
    match value {
        Value::Nil | Value::Boolean(false) => Ok(claims.iter().map(|_| Verdict::Late).collect()),
        Value::Int(used) if used >= 0 => Ok(granted(count(used), claims)),
        Value::Int(used) => Ok(claims.iter().map(|_| decided(used)).collect()),
        Value::Array(each) if each.len() == claims.len() => {
            each.iter().map(|used| signed(used).map(decided).ok_or_else(malformed)).collect()
        }
        _ => Err(malformed()),
    }
}

/// All claims are admitted; with the last one `used` slots are in use.
fn granted(used: u32, claims: &[Acquire]) -> Vec<Verdict> {
    let total: u32 = claims.iter().map(|claim| claim.weight).sum();
    let mut active = used.saturating_sub(total);
    let grants = claims.iter().map(|claim| {
        active += claim.weight;
        Verdict::Decided(Grant::Granted { active })
    });
    grants.collect()
}

fn decided(used: i64) -> Verdict {
    Verdict::Decided(match used {
        0.. => Grant::Granted { active: count(used) },
        _ => Grant::Refused { active: count(-1 - used) },
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test it is the assertion")]
mod tests {
    use std::time::Duration;

    use super::*;

    const OOM: &str = "OOM command not allowed when used memory > 'maxmemory'.";
    const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

    fn claim(weight: u32, limit: u32) -> Acquire {
        let (now, reply) = (Instant::now(), oneshot::channel().0);
        Acquire { slot: SlotId::new(), weight, limit, queued: now, deadline: now, tries: 0, reply }
    }

    fn release(key: &Key, weight: u32) -> Release {
        let (key, terms, now) = (key.clone(), terms(30), Instant::now());
        Release {
            key,
            slot: SlotId::new(),
            weight,
            terms,
            queued: now,
            lapses: now,
            doubt: None,
            confirm: None,
        }
    }

    fn terms(lease: u64) -> Arc<Terms> {
        Arc::new(Terms::new(Duration::from_secs(lease), Duration::from_secs(1)))
    }

    fn flight(cargo: Cargo) -> Flight {
        Flight { lane: 0, calls: cargo.calls, not_after: 7, epoch: 1, deadline: Instant::now() }
    }

    /// Of `a` two slots are given back and a claim of one made, of `b` claims of two and of one.
    fn a_and_b() -> Flight {
        let (a, b) = (Key::new("a"), Key::new("b"));
        let mut cargo = Cargo::new(false);
        cargo.push_release(release(&a, 2));
        cargo.push_claim(&b, &terms(30), claim(2, 9));
        cargo.push_claim(&a, &terms(60), claim(1, 5));
        cargo.push_claim(&b, &terms(30), claim(1, 9));
        flight(cargo)
    }

    fn ints(numbers: &[i64]) -> Value {
        Value::Array(numbers.iter().map(|number| Value::Int(*number)).collect())
    }

    fn note(key: i64, what: Value) -> Value {
        Value::Array(vec![Value::Int(key), what])
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn read(flight: &Flight, reply: Vec<Value>) -> Result<FlightReply, StoreError> {
        flight.read(0, Value::Array(reply))
    }

    const fn taken(active: u32) -> Verdict {
        Verdict::Decided(Grant::Granted { active })
    }

    const fn refused(active: u32) -> Verdict {
        Verdict::Decided(Grant::Refused { active })
    }

    #[test]
    fn the_longer_doubt_counts_until_the_clock_or_the_connection_has_passed_it() {
        let doubt = |until, epoch| Doubt { until, epoch };
        assert_eq!(doubt(5, 1).or(None), doubt(5, 1));
        assert_eq!(doubt(5, 1).or(Some(doubt(4, 2))), doubt(5, 1));
        assert_eq!(doubt(5, 1).or(Some(doubt(5, 2))), doubt(5, 1));
        assert_eq!(doubt(5, 1).or(Some(doubt(6, 2))), doubt(6, 2));
        assert!(!doubt(5, 1).settled(5, None) && doubt(5, 1).settled(6, None));
        assert!(doubt(5, 1).settled(0, Some(1)) && !doubt(5, 1).settled(0, Some(2)));
    }

    #[test]
    fn a_call_has_each_key_once_with_what_is_given_back_before_what_is_claimed() {
        let flight = a_and_b();
        assert_eq!(flight.size(), 6);
        let [a, b] = flight.calls[0].as_slice() else { panic!("two keys in one call") };
        let back: Vec<_> = a.back[0].slot.members(2).collect();
        let mut list = List::of(19);
        let mut numbers = |numbers: &[u64], slots: &[SlotId]| {
            numbers.iter().for_each(|number| list.number(*number));
            slots.iter().for_each(|slot| list.slot(*slot));
        };
        // Not after 7, the first key has claims; two back and one claim of a limit of 5, 60 s, weight 1.
        numbers(&[7, 1, 2, 1], &back);
        numbers(&[5, 60_000, 1], &[a.claims[0].slot]);
        // None back and two claims of a limit of 9, 30 s, weight 3, which are 2 and 1.
        numbers(&[0, 2, 9, 30_000, 3, 2, 1], &[b.claims[0].slot, b.claims[1].slot]);
        let packed = packed(flight.not_after, &flight.calls[0]);
        assert_eq!(packed, list.into_bytes());
        assert_eq!(packed[..3], [0xdc, 0, 19], "a list of so many");
    }

    #[test]
    fn the_place_of_the_first_claims_is_told() {
        let (a, b) = (Key::new("a"), Key::new("b"));
        let mut cargo = Cargo::new(false);
        cargo.push_release(release(&a, 1));
        let place = |cargo: &Cargo| packed(7, &cargo.calls[0])[2];
        assert_eq!(place(&cargo), 0);
        cargo.push_claim(&b, &terms(30), claim(1, 9));
        assert_eq!(place(&cargo), 2);
    }

    #[test]
    fn claims_of_another_limit_or_lease_are_asks_of_their_own() {
        let a = Key::new("a");
        let mut cargo = Cargo::new(false);
        for (lease, limit) in [(30, 1), (30, 1), (30, 2), (60, 2), (30, 1)] {
            cargo.push_claim(&a, &terms(lease), claim(1, limit));
        }
        let claims: Vec<_> = cargo.calls[0].iter().map(|ask| (ask.limit, ask.claims.len())).collect();
        assert_eq!(claims, [(1, 2), (2, 1), (2, 1), (1, 1)]);
    }

    #[test]
    fn where_keys_must_be_apart_each_has_a_call() {
        let (a, b) = (Key::new("a"), Key::new("b"));
        let mut cargo = Cargo::new(true);
        for key in [&a, &b, &a] {
            cargo.push_claim(key, &terms(30), claim(1, 1));
        }
        // Another limit, but the same key.
        cargo.push_claim(&b, &terms(30), claim(1, 2));
        let calls: Vec<_> = cargo.calls.iter().map(|asks| (asks[0].key.clone(), asks.len())).collect();
        assert_eq!(calls, [(a, 1), (b, 2)]);
    }

    #[test]
    fn what_does_not_fit_waits_unless_the_flight_is_empty() {
        let cargo = Cargo::new(false);
        let pop = |weight, room| cargo.pop_fitting(&mut VecDeque::from([weight]), room, |weight| *weight);
        assert_eq!((pop(3, 3), pop(4, 3)), (Some(3), None));
        assert_eq!(pop(MOST_SLOTS + 1, MOST_SLOTS), Some(MOST_SLOTS + 1));
        let mut full = Cargo::new(true);
        for n in 0..MOST_CALLS {
            full.push_release(release(&Key::new(n.to_string()), 1));
        }
        assert_eq!(full.pop_fitting(&mut VecDeque::from([1]), 100, |weight| *weight), None);
    }

    #[test]
    fn a_reply_tells_what_became_of_each_key() {
        let flight = a_and_b();
        // Both claims of `b` fared alike: six slots are in use with the second one.
        let reply = read(&flight, vec![Value::Int(99), note(1, Value::Int(3)), Value::Int(4), Value::Int(6)]);
        let reply = reply.unwrap();
        assert_eq!((reply.now, reply.trouble().is_none()), (99, true));
        let [Ok(a), Ok(b)] = reply.answers.as_slice() else { panic!("two answers") };
        assert_eq!((a.lapsed, a.verdicts.as_slice()), (3, [taken(4)].as_slice()));
        assert_eq!((b.lapsed, b.verdicts.as_slice()), (0, [taken(5), taken(6)].as_slice()));
    }

    #[test]
    fn claims_are_refused_late_or_decided_one_by_one() {
        let flight = a_and_b();
        let verdicts = |of_a, of_b| {
            let reply = read(&flight, vec![Value::Int(99), Value::Nil, of_a, of_b]).unwrap();
            let verdicts = |answer: &Result<Answer, _>| answer.as_ref().ok().map(|it| it.verdicts.clone());
            (verdicts(&reply.answers[0]).unwrap(), verdicts(&reply.answers[1]).unwrap())
        };
        let none_of_b = vec![refused(8), refused(8)];
        assert_eq!(verdicts(Value::Int(-6), Value::Int(-9)), (vec![refused(5)], none_of_b));
        assert_eq!(verdicts(Value::Nil, ints(&[9, -10])), (vec![Verdict::Late], vec![taken(9), refused(9)]));
        let late = vec![Verdict::Late, Verdict::Late];
        assert_eq!(verdicts(Value::Int(0), Value::Boolean(false)), (vec![taken(1)], late));
    }

    #[test]
    fn trouble_is_what_is_not_of_one_key_alone() {
        let flight = a_and_b();
        let reply = |what| {
            let reply = vec![Value::Int(99), note(2, what), Value::Int(4), Value::Nil];
            read(&flight, reply).unwrap()
        };
        let foreign = reply(bulk(WRONG_TYPE));
        assert!(foreign.trouble().is_none());
        let kinds = |reply: &FlightReply| {
            reply.answers.iter().map(|answer| answer.as_ref().err().map(StoreError::kind)).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&foreign), [None, Some(StoreErrorKind::WrongType)]);
        let full = reply(bulk(OOM));
        assert_eq!(kinds(&full), [None, full.trouble().map(|error| error.kind())]);
        assert!(full.trouble().is_some_and(|error| error.kind() != StoreErrorKind::WrongType));
    }

    #[test]
    fn replies_of_another_shape_are_malformed() {
        let flight = a_and_b();
        let (now, nil, one) = (Value::Int(99), Value::Nil, Value::Int(1));
        for reply in [
            vec![],
            vec![now.clone()],
            vec![now.clone(), nil.clone(), one.clone()],
            vec![now.clone(), nil.clone(), one.clone(), one.clone(), one.clone()],
            vec![Value::Int(-1), nil.clone(), one.clone(), one.clone()],
            vec![now.clone(), one.clone(), one.clone(), one.clone()],
            vec![now.clone(), nil.clone(), one.clone(), ints(&[1])],
            vec![now.clone(), nil.clone(), one.clone(), ints(&[1, 2, 3])],
            vec![now.clone(), nil.clone(), one.clone(), Value::Array(vec![nil.clone(), nil.clone()])],
            vec![now.clone(), nil.clone(), bulk("1"), one.clone()],
            vec![now.clone(), ints(&[1]), one.clone(), one.clone()],
            vec![now.clone(), ints(&[0, 1]), one.clone(), one.clone()],
            vec![now.clone(), ints(&[3, 1]), one.clone(), one.clone()],
            vec![now.clone(), ints(&[1, -1]), one.clone(), one.clone()],
            vec![now.clone(), note(1, nil.clone()), one.clone(), one.clone()],
        ] {
            assert!(read(&flight, reply.clone()).is_err(), "{reply:?}");
        }
        assert!(flight.read(0, Value::Okay).is_err());
    }
}

//! The table of every slot that this process has asked for and not yet given back, and the queues
//! to and from it. It decides what becomes of each; it sends nothing and waits for nothing.

mod renewal;

use std::collections::{BTreeSet, VecDeque, hash_map};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

pub(super) use self::renewal::Batch;
use super::error::timed_out;
use super::flight::{
    Acquire, Ask, Cargo, Confirm, Doubt, Failed, Flight, FlightReply, MOST_SLOTS, Release, Verdict,
};
use super::news::{Answer, News};
use super::routes::Routes;
use crate::metrics::Released;
use crate::store::{Claim, Grant, Holder, Key, Lost, SlotId, SlotMap, StoreError, StoreErrorKind, Terms};

/// How long a release waits that the server answered with an error.
const RELEASE_RETRY: Duration = Duration::from_secs(1);
/// How often a claim is sent again after its connection broke, or it came too late by a clock that
/// was wrong.
const CLAIM_TRIES: u32 = 2;

pub(super) struct Table {
    /// Which queue is whose.
    pub(super) routes: Routes,
    slots: SlotMap<Entry>,
    /// One for each lane.
    queues: Vec<Queue>,
    /// Releases that are not to be sent before an instant.
    later: Vec<(Instant, Release)>,
    /// One was added that nobody keeps time for yet.
    put_off: bool,
    /// Slots that their holders have given up and the server has not yet confirmed.
    backlog: usize,
    flushers: Vec<oneshot::Sender<()>>,
}

/// What waits for a flight on one lane.
#[derive(Default)]
struct Queue {
    acquires: VecDeque<Acquire>,
    releases: VecDeque<Release>,
}

struct Entry {
    key: Key,
    weight: u32,
    terms: Arc<Terms>,
    holder: Weak<dyn Holder>,
    phase: Phase,
    /// The holder has gone while a call was out: give the slot back when its answer is there.
    given_up: Option<GivenUp>,
    /// When it was acquired, on our clock and on the server's; on ours, by its holder of now.
    since: Instant,
    since_server: u64,
    /// When the call was sent that acquired or renewed it last, as far as we know.
    renewed: Instant,
    /// When the last call was sent that may have acquired or renewed it: its lease runs from there.
    sent: Instant,
    told_lapsed: bool,
    /// The server has granted or renewed it. One that was admitted without the server waits for that.
    registered: bool,
    doubt: Option<Doubt>,
    /// Claims of the same slot that came while a call was out: they get the answer to the first.
    followers: Vec<Acquire>,
}

struct GivenUp(Option<Confirm>);

impl Entry {
    fn new(claim: Claim, phase: Phase, now: Instant) -> Self {
        let Claim { key, weight, terms, holder, .. } = claim;
        Self {
            key,
            weight,
            terms,
            holder,
            phase,
            given_up: None,
            since: now,
            since_server: 0,
            renewed: now,
            sent: now,
            told_lapsed: false,
            registered: false,
            doubt: None,
            followers: Vec::new(),
        }
    }

    /// It is not with the server, and nothing is on its way there.
    fn is_unknown(&self) -> bool {
        !self.registered && self.doubt.is_none()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// In the queue of acquires.
    Queued,
    /// In a flight.
    Flying,
    Held,
    /// In a renewal. A release waits for it, so that the renewal does not bring the slot back.
    Renewing,
}

/// The instant, the connection's epoch, and the server's clock: what a call is stamped with.
#[derive(Clone, Copy)]
pub(super) struct Stamp {
    pub(super) now: Instant,
    pub(super) epoch: u64,
    pub(super) server_now: u64,
}

impl Stamp {
    /// The server's clock at `deadline`.
    pub(super) fn server_at(&self, deadline: Instant) -> u64 {
        let left = deadline.saturating_duration_since(self.now).as_millis();
        self.server_now.saturating_add(u64::try_from(left).unwrap_or(u64::MAX)).saturating_add(1)
    }
}

impl Default for Table {
    fn default() -> Self {
        Self {
            routes: Routes::default(),
            slots: SlotMap::default(),
            queues: vec![Queue::default()],
            later: Vec::new(),
            put_off: false,
            backlog: 0,
            flushers: Vec::new(),
        }
    }
}

impl Table {
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.backlog == 0
    }

    pub(super) fn backlog(&self) -> usize {
        self.backlog
    }

    /// Since when the oldest claim or release waits for a flight on a lane.
    pub(super) fn waiting_since(&self, lane: usize) -> Option<Instant> {
        let queue = &self.queues[lane];
        let claimed = queue.acquires.front().map(|acquire| acquire.queued);
        let released = queue.releases.front().map(|release| release.queued);
        claimed.into_iter().chain(released).min()
    }

    /// The queue of what concerns a key.
    fn queue(&mut self, key: &Key) -> &mut Queue {
        &mut self.queues[self.routes.lane_of(key)]
    }

    #[cfg(feature = "redis-cluster")]
    pub(super) fn add_lane(&mut self) {
        self.queues.push(Queue::default());
    }

    /// Puts everything that waits into the queue that is right now.
    #[cfg(feature = "redis-cluster")]
    pub(super) fn reroute(&mut self) {
        let mut moved = Vec::new();
        for lane in 0..self.queues.len() {
            let Queue { acquires, releases } = std::mem::take(&mut self.queues[lane]);
            moved.extend(releases);
            for acquire in acquires {
                // Of those that were given up the entry is gone, and the queue does not matter.
                let entry = self.slots.get(&acquire.slot);
                let lane = entry.map_or(lane, |entry| self.routes.lane_of(&entry.key));
                self.queues[lane].acquires.push_back(acquire);
            }
        }
        self.requeue(moved);
    }

    fn put_off(&mut self, at: Instant, release: Release) {
        self.later.push((at, release));
        self.put_off = true;
    }

    /// Whether releases were put off since this was asked last.
    pub(super) fn take_put_off(&mut self) -> bool {
        std::mem::take(&mut self.put_off)
    }

    /// When the next of the releases is due that were put off.
    pub(super) fn next_later(&self) -> Option<Instant> {
        self.later.iter().map(|(at, _)| *at).min()
    }

    pub(super) fn enqueue(&mut self, claim: Claim, reply: Answer, now: Instant) {
        let (slot, weight, limit) = (claim.slot, claim.weight, claim.limit);
        let deadline = now + claim.terms.timeout;
        let acquire = Acquire { slot, weight, limit, queued: now, deadline, tries: 0, reply };
        let lane = self.routes.lane_of(&claim.key);
        match self.slots.entry(slot) {
            hash_map::Entry::Vacant(place) => _ = place.insert(Entry::new(claim, Phase::Queued, now)),
            hash_map::Entry::Occupied(mut known) if known.get().phase == Phase::Held => {
                known.get_mut().phase = Phase::Queued;
            }
            hash_map::Entry::Occupied(mut known) => return known.get_mut().followers.push(acquire),
        }
        self.queues[lane].acquires.push_back(acquire);
    }

    /// Answers a claim, and those of the same slot that came after it.
    fn answer(&mut self, claim: Acquire, answer: &Result<Grant, StoreError>, news: &mut News) {
        let entry = self.slots.get_mut(&claim.slot);
        let followers = entry.map(|entry| std::mem::take(&mut entry.followers)).unwrap_or_default();
        let claims = std::iter::once(claim).chain(followers);
        news.replies.extend(claims.map(|claim| (claim.reply, answer.clone())));
    }

    /// Holds slots that the server does not know: the next renewal that comes through registers them.
    pub(super) fn adopt(&mut self, claim: Claim, now: Instant) {
        let slot = claim.slot;
        // No drain that the server knows of was about it.
        let entry = Entry { since_server: u64::MAX, ..Entry::new(claim, Phase::Held, now) };
        self.slots.insert(slot, entry);
    }

    /// The holder of `slot` is gone.
    pub(super) fn release(&mut self, slot: SlotId, confirm: Option<Confirm>, news: &mut News) {
        let Some(entry) = self.slots.get_mut(&slot) else {
            news.confirms.extend(confirm.map(|confirm| (confirm, Ok(()))));
            return;
        };
        match entry.phase {
            // Else what was sent for it before may still be executed.
            Phase::Queued | Phase::Held if entry.is_unknown() => {
                self.slots.remove(&slot);
                news.confirms.extend(confirm.map(|confirm| (confirm, Ok(()))));
            }
            Phase::Queued | Phase::Held => {
                self.backlog += 1;
                self.give_back(slot, confirm);
            }
            Phase::Flying | Phase::Renewing if entry.given_up.is_none() => {
                self.backlog += 1;
                entry.given_up = Some(GivenUp(confirm));
            }
            Phase::Flying | Phase::Renewing => {}
        }
    }

    /// Releases a slot that somebody else acquired.
    pub(super) fn release_foreign(&mut self, key: Key, slot: SlotId, terms: Arc<Terms>, confirm: Confirm) {
        self.backlog += 1;
        let queued = Instant::now();
        let lapses = queued + terms.lease;
        let confirm = Some(confirm);
        self.queue_release(Release { key, slot, weight: 1, terms, queued, lapses, doubt: None, confirm });
    }

    pub(super) fn knows(&self, slot: SlotId) -> bool {
        self.slots.contains_key(&slot)
    }

    /// Takes the slot out of the table and into the queue of releases; it counts as backlog already.
    fn give_back(&mut self, slot: SlotId, confirm: Option<Confirm>) {
        let Some(entry) = self.slots.remove(&slot) else { return };
        let Entry { key, weight, terms, sent, doubt, .. } = entry;
        let (queued, lapses) = (Instant::now(), sent + terms.lease);
        self.queue_release(Release { key, slot, weight, terms, queued, lapses, doubt, confirm });
    }

    fn queue_release(&mut self, release: Release) {
        self.queue(&release.key).releases.push_back(release);
    }

    /// A claim has failed: nobody holds its slot. Undoes what may have been done of it, or else
    /// forgets it.
    fn undo(&mut self, slot: SlotId, news: &mut News) {
        let Some(entry) = self.slots.get_mut(&slot) else { return };
        let given_up = entry.given_up.take();
        if !entry.is_unknown() {
            self.backlog += usize::from(given_up.is_none());
            self.give_back(slot, given_up.and_then(|given_up| given_up.0));
        } else {
            self.slots.remove(&slot);
            if let Some(GivenUp(confirm)) = given_up {
                self.finish(confirm, Ok(()), news);
            }
        }
    }

    /// A release is over.
    fn finish(&mut self, confirm: Option<Confirm>, result: Result<(), StoreError>, news: &mut News) {
        self.backlog -= 1;
        news.confirms.extend(confirm.map(|confirm| (confirm, result)));
        if self.backlog == 0 {
            news.flushed.append(&mut self.flushers);
        }
    }

    /// Tells when there is no backlog.
    pub(super) fn when_flushed(&mut self) -> Option<oneshot::Receiver<()>> {
        (self.backlog > 0).then(|| {
            let (flushed, receiver) = oneshot::channel();
            self.flushers.push(flushed);
            receiver
        })
    }

    /// Makes up the next flight on a lane: releases first, then claims, each in the order of their
    /// age.
    pub(super) fn next_flight(&mut self, lane: usize, stamp: Stamp, news: &mut News) -> Option<Flight> {
        let mut cargo = Cargo::new(self.routes.part());
        let mut room = MOST_SLOTS;
        let mut budget = Duration::ZERO;
        while let Some(release) =
            cargo.pop_fitting(&mut self.queues[lane].releases, room, |release| release.weight)
        {
            if release.lapses <= stamp.now {
                self.lapse(release, news);
                continue;
            }
            room = room.saturating_sub(release.weight);
            budget = budget.max(release.terms.timeout);
            cargo.push_release(release);
        }
        let mut deadline = stamp.now + budget;
        while let Some(acquire) =
            cargo.pop_fitting(&mut self.queues[lane].acquires, room, |acquire| acquire.weight)
        {
            let Some(entry) = self.slots.get_mut(&acquire.slot).filter(|entry| entry.phase == Phase::Queued)
            else {
                continue;
            };
            if acquire.deadline <= stamp.now {
                let slot = acquire.slot;
                self.answer(acquire, &Err(timed_out()), news);
                self.undo(slot, news);
                continue;
            }
            entry.phase = Phase::Flying;
            (entry.renewed, entry.sent) = (stamp.now, stamp.now);
            room = room.saturating_sub(acquire.weight);
            deadline = deadline.max(acquire.deadline);
            cargo.push_claim(&entry.key, &entry.terms, acquire);
        }
        let calls = cargo.calls;
        if calls.is_empty() {
            return None;
        }
        let not_after = stamp.server_at(deadline);
        Some(Flight { lane, calls, not_after, epoch: stamp.epoch, deadline })
    }

    fn lapse(&mut self, release: Release, news: &mut News) {
        release.terms.meters.releases.get(Released::Lapsed).add(1);
        let error =
            StoreError::new(StoreErrorKind::Timeout, "the lease ran out before the release was confirmed");
        self.finish(release.confirm, Err(error), news);
    }

    /// A call is back with a reply. `epoch` is its connection's, where that keeps order; in `doubt`
    /// is what failed half way through.
    pub(super) fn landed(
        &mut self,
        asks: Vec<Ask>,
        reply: FlightReply,
        epoch: Option<u64>,
        doubt: Doubt,
        now: Instant,
        news: &mut News,
    ) {
        for (ask, answer) in asks.into_iter().zip(reply.answers) {
            let Ask { back, claims, .. } = ask;
            match answer {
                Ok(answer) => {
                    if answer.lapsed > 0
                        && let Some(terms) = self.terms_of(&back, &claims)
                    {
                        terms.meters.expired.add(answer.lapsed);
                    }
                    for release in back {
                        self.released(release, reply.now, epoch, now, news);
                    }
                    for (claim, verdict) in claims.into_iter().zip(answer.verdicts) {
                        self.decided(claim, verdict, reply.now, now, news);
                    }
                }
                Err(error) => {
                    // The script may have failed half way through: the claims are undone, and the
                    // releases tried again, except where the key holds no slots at all.
                    let undo = error.kind() != StoreErrorKind::WrongType;
                    for release in back {
                        if undo {
                            self.put_off(now + RELEASE_RETRY, release);
                        } else {
                            self.finish(release.confirm, Err(error.clone()), news);
                        }
                    }
                    let doubt = undo.then_some(doubt);
                    for claim in claims {
                        self.refused(claim, error.clone(), doubt, news);
                    }
                }
            }
        }
    }

    fn terms_of(&self, back: &[Release], claims: &[Acquire]) -> Option<Arc<Terms>> {
        let of_claims =
            || claims.iter().find_map(|claim| self.slots.get(&claim.slot)).map(|entry| &entry.terms);
        back.first().map(|release| &release.terms).or_else(of_claims).cloned()
    }

    fn released(
        &mut self,
        release: Release,
        server_now: u64,
        epoch: Option<u64>,
        now: Instant,
        news: &mut News,
    ) {
        match release.doubt.filter(|doubt| !doubt.settled(server_now, epoch)) {
            // A late acquire or renewal could still bring the slot back: release it once more then.
            Some(doubt) => {
                let wait = Duration::from_millis(doubt.until - server_now + 1);
                // The server's clock may have been set back by any time.
                let at = now.checked_add(wait).map_or(release.lapses, |at| at.min(release.lapses));
                release.terms.meters.releases.get(Released::Retried).add(1);
                self.put_off(at, release);
            }
            None => {
                release.terms.meters.releases.get(Released::Confirmed).add(1);
                self.finish(release.confirm, Ok(()), news);
            }
        }
    }

    fn decided(&mut self, claim: Acquire, verdict: Verdict, server_now: u64, now: Instant, news: &mut News) {
        let Some(entry) = self.slots.get_mut(&claim.slot) else { return };
        match verdict {
            Verdict::Decided(grant @ Grant::Granted { .. }) => {
                entry.phase = Phase::Held;
                entry.since_server = server_now;
                entry.registered = true;
                let slot = claim.slot;
                match entry.given_up.take() {
                    Some(GivenUp(confirm)) => {
                        self.answer(claim, &Err(timed_out()), news);
                        self.give_back(slot, confirm);
                    }
                    None => self.answer(claim, &Ok(grant), news),
                }
            }
            Verdict::Decided(grant @ Grant::Refused { .. }) => {
                let slot = claim.slot;
                self.answer(claim, &Ok(grant), news);
                self.undo(slot, news);
            }
            Verdict::Late => match self.retry(claim, 1, now) {
                Ok(()) => {}
                Err(claim) => self.refused(claim, timed_out(), None, news),
            },
        }
    }

    /// Sends a claim once more if there is time and nobody gave it up.
    fn retry(&mut self, mut claim: Acquire, tries: u32, now: Instant) -> Result<(), Acquire> {
        let entry = self.slots.get_mut(&claim.slot).filter(|entry| entry.given_up.is_none());
        claim.tries += tries;
        let Some(entry) = entry.filter(|_| now < claim.deadline && claim.tries <= CLAIM_TRIES) else {
            return Err(claim);
        };
        entry.phase = Phase::Queued;
        self.queues[self.routes.lane_of(&entry.key)].acquires.push_front(claim);
        Ok(())
    }

    fn refused(&mut self, claim: Acquire, error: StoreError, doubt: Option<Doubt>, news: &mut News) {
        if let (Some(entry), Some(doubt)) = (self.slots.get_mut(&claim.slot), doubt) {
            entry.doubt = Some(doubt.or(entry.doubt));
        }
        let slot = claim.slot;
        self.answer(claim, &Err(error), news);
        self.undo(slot, news);
    }

    /// A call brought no reply. In `doubt` is what may still be executed of it.
    pub(super) fn crashed(
        &mut self,
        asks: Vec<Ask>,
        failed: &Failed,
        doubt: Doubt,
        now: Instant,
        news: &mut News,
    ) {
        let doubt = failed.unknown.then_some(doubt);
        let mut undone = Vec::new();
        for Ask { back, claims, .. } in asks {
            // Whether these were executed does not matter: releasing twice is harmless.
            undone.extend(back);
            for claim in claims.into_iter().rev() {
                if let Some(entry) = self.slots.get_mut(&claim.slot) {
                    entry.doubt = doubt.map(|doubt| doubt.or(entry.doubt)).or(entry.doubt);
                }
                let broken = failed.error.kind() == StoreErrorKind::Io;
                match if broken { self.retry(claim, u32::from(!failed.abandoned), now) } else { Err(claim) } {
                    Ok(()) => {}
                    Err(claim) => self.refused(claim, failed.error.clone(), None, news),
                }
            }
        }
        self.requeue(undone);
    }

    /// Whoever carried a flight went away in the middle of it.
    pub(super) fn abandoned(&mut self, flight: Flight, now: Instant, news: &mut News) {
        let doubt = flight.doubt();
        for asks in flight.calls {
            self.crashed(asks, &Failed::abandoned(), doubt, now, news);
        }
    }

    /// Fails all queued claims of a lane: nothing will be sent for a while.
    pub(super) fn fail_queued(&mut self, lane: usize, error: &StoreError, news: &mut News) {
        for claim in std::mem::take(&mut self.queues[lane].acquires) {
            let slot = claim.slot;
            let queued = self.slots.get(&slot).is_some_and(|entry| entry.phase == Phase::Queued);
            self.answer(claim, &Err(error.clone()), news);
            if queued {
                self.undo(slot, news);
            }
        }
    }

    /// Puts releases that have waited into their queue.
    pub(super) fn queue_due(&mut self, now: Instant) {
        let due: Vec<_> =
            self.later.extract_if(.., |(at, _)| *at <= now).map(|(_, release)| release).collect();
        self.requeue(due);
    }

    /// Puts releases back into their queues, which stay sorted by age: what lapses first goes out first.
    fn requeue(&mut self, releases: Vec<Release>) {
        let lanes: BTreeSet<_> = releases.iter().map(|release| self.routes.lane_of(&release.key)).collect();
        releases.into_iter().for_each(|release| self.queue_release(release));
        for lane in lanes {
            self.queues[lane].releases.make_contiguous().sort_by_key(|release| release.queued);
        }
    }

    /// Once a tick: ends what has lapsed, and what is past its `max_hold`.
    pub(super) fn end_overdue(&mut self, now: Instant, news: &mut News) {
        let mut lapsed = Vec::new();
        for queue in &mut self.queues {
            let releases = std::mem::take(&mut queue.releases);
            let (over, kept): (VecDeque<_>, _) =
                releases.into_iter().partition(|release| release.lapses <= now);
            queue.releases = kept;
            lapsed.extend(over);
        }
        lapsed.into_iter().for_each(|release| self.lapse(release, news));
        let overdue = |entry: &Entry| {
            entry.phase == Phase::Held && entry.terms.max_hold.is_some_and(|most| entry.since + most <= now)
        };
        for entry in self.slots.values_mut().filter(|entry| overdue(entry)) {
            // It may have passed to another holder since.
            if let Some(holder) = entry.holder.upgrade() {
                entry.since = holder.since(entry.since);
                news.asked.push(holder);
            }
        }
        let slots: Vec<_> =
            self.slots.iter().filter(|(_, entry)| overdue(entry)).map(|(slot, _)| *slot).collect();
        for slot in slots {
            if let Some(entry) = self.slots.get(&slot) {
                news.losses.push((Weak::clone(&entry.holder), Lost::MaxHold));
            }
            self.release(slot, None, news);
        }
    }

    /// A drain of `key` was executed at `drained_at`: what was acquired before is gone. What was
    /// acquired in the same millisecond is left for its next renewal to find out.
    pub(super) fn drained(&mut self, key: &Key, drained_at: u64, news: &mut News) {
        let gone = |entry: &Entry| {
            entry.phase == Phase::Held && entry.key == *key && entry.since_server < drained_at
        };
        for (_, entry) in self.slots.extract_if(|_, entry| gone(entry)) {
            news.losses.push((entry.holder, Lost::Drained));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test it is the assertion")]
mod tests;

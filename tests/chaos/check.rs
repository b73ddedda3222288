//! Whether what was reported keeps the limits, under the faults that there were.
//!
//! The server counts a visit from the moment at which it is decided until its slot is given back,
//! save for the stretches in which a fault may have taken the slot away: its *doubts*. These are
//!
//! * after data was lost, until its holder must have put it back: a third of a lease and some slack
//!   later, from when the holder can reach the server on;
//! * from when the last renewal that must have come through has run out, if the holder was stopped or
//!   cut off for so long, until the same moment. A holder that runs is told of the loss, so where it was
//!   not told there is no doubt, save for the time that telling takes;
//! * after a drain, for ever;
//! * when it was let in by policy in an outage, until it must have been counted.
//!
//! The rule, at each admission by the store: its weight, and the weights of all visits that are there
//! and were in no doubt since it was asked for, stay within the limit. Where faults overlap, so do the
//! doubts; no bound of one is stretched by another. From that rule follow the bounds that are printed:
//! the limit without a fault; once more the limit for each loss of data that those present have seen;
//! and above it as much as those weigh whose holder was stopped or cut off, that were drained, or that
//! were let in by policy.
//!
//! Pages of the server's own ledger are held against the same visits: one in no doubt is there, and
//! nothing is renewed after its end, or although nobody ever came to hold it. What has ended, or came
//! to nothing, is gone as soon as its worker must have given it back, unless that was killed before.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;

use crate::arena::{Event, Life, admits, seconds};
use crate::faults::Fault;
use crate::ledger::Page;
use crate::projects::{PROJECTS, Project, SHORTEST_LEASE, STORE_TIMEOUT};
use crate::record::{Entry, MS, Nanos, Report, SECOND, Span, Tally};
use crate::worker::WORKERS;

const CALL: Nanos = STORE_TIMEOUT.as_nanos() as Nanos;
/// What a busy machine adds to any bound.
const SLACK: Nanos = 500 * MS;
/// How long after a fault there may be no connection: a try to connect that hangs for its last moment,
/// and the longest wait between two tries.
const RECONNECT: Nanos = 2 * SECOND;
/// How long a slot that is given up may stay where nothing is in the way: a call whose reply was lost
/// runs out before the next one is sent.
const GIVING_BACK: Nanos = 2 * CALL + SLACK;
/// What is shorter makes no call fail, and is part of the slack.
const NOTICED: Nanos = 150 * MS;
/// How long it takes to notice and tell that a slot is lost.
const TELLING: Nanos = SHORTEST_LEASE.as_nanos() as Nanos / 12 + SLACK;
/// So many violations are printed in full.
const SHOWN: usize = 10;

/// What a check came to.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) violations: Vec<String>,
    pub(crate) tallies: Tally,
    pub(crate) slowest: Nanos,
    /// The highest overlap of each kind of bound.
    overlaps: BTreeMap<&'static str, Overlap>,
    /// Admissions, and those that were held against the limit.
    pub(crate) admissions: (u64, u64),
    /// Slots that had to be on a page of the ledger.
    pub(crate) found: u64,
    /// Projects that were at their limit.
    pub(crate) full: BTreeSet<usize>,
}

/// How many were there at once, and how many were allowed to be.
struct Overlap {
    seen: u32,
    bound: u32,
    project: usize,
}

struct Visit {
    worker: usize,
    entry: Entry,
    /// From its admission to its end.
    stay: Span,
    lost: Option<Nanos>,
    doubts: Vec<Doubt>,
}

/// A stretch in which the server may not count a visit.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    span: Span,
    why: Why,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// With the number of the event.
    DataLost(usize),
    Lapsed,
    Drained,
    LetIn,
}

impl Visit {
    fn members(&self) -> impl Iterator<Item = u128> {
        let first = self.entry.slot;
        (0..u128::from(self.entry.weight)).map(move |n| first + n)
    }

    fn counts_during(&self, span: Span) -> bool {
        !self.doubts.iter().any(|doubt| doubt.span.meets(span))
    }
}

pub(crate) fn check(start: Nanos, events: &[Event], lives: &[Life], pages: &[Page]) -> Findings {
    let mut findings = Findings::default();
    let troubles: Vec<_> = (0..WORKERS).map(|worker| Troubles::of(worker, events, lives)).collect();
    let mut visits = Vec::new();
    for life in lives {
        visits.extend(findings.read(life, &troubles[life.worker], events, start));
    }
    for visit in &mut visits {
        visit.doubts = doubts(visit, &troubles[visit.worker], events);
    }
    findings.check_losses(&visits, &troubles, events, start);
    for project in 0..PROJECTS.len() {
        let mut of_project: Vec<_> = visits.iter().filter(|visit| visit.entry.project == project).collect();
        of_project.sort_by_key(|visit| visit.stay);
        findings.sweep(project, &of_project, events, start);
        let pages: Vec<_> = pages.iter().filter(|page| page.project == project).collect();
        findings.check_ledger(project, &of_project, &pages, events, start);
        findings.check_ends(project, &of_project, &pages, &troubles, events, start);
    }
    findings
}

/// When a worker could not reach the server, or did not run.
struct Troubles {
    /// With the time to reconnect, apart from each other.
    cut_off: Vec<Span>,
    /// The same, but only until it is seen to be served again.
    away: Vec<Span>,
    stopped: Vec<Span>,
    /// When it, the server or a proxy waited for a turn.
    stalls: Vec<Span>,
    /// When calls may be told of an outage.
    down: Vec<Span>,
    killed: Vec<Nanos>,
}

impl Troubles {
    fn of(worker: usize, events: &[Event], lives: &[Life]) -> Self {
        let (mut stopped, mut killed, mut served) = (Vec::new(), Vec::new(), Vec::new());
        for life in lives.iter().filter(|life| life.worker == worker) {
            killed.extend(life.killed);
            stopped.extend(life.reports.iter().filter_map(|report| match report {
                Report::Stalled(span) => Some(*span),
                _ => None,
            }));
            served.extend(life.reports.iter().filter_map(|report| match report {
                Report::Entered(entry) if entry.stored => Some(entry.call),
                _ => None,
            }));
        }
        let stops = events.iter().filter(
            |event| matches!(event.fault, Fault::StopWorker { worker: stopped, .. } if stopped == worker),
        );
        stopped.extend(stops.map(|event| event.span));
        let busy = events.iter().filter(|event| event.fault == Fault::BusyMachine).map(|event| event.span);
        let stalls = stopped.iter().copied().chain(busy).collect();
        let hits = events.iter().filter(|event| cuts_off(event, worker)).map(|event| event.span);
        let stops = stopped.iter().copied().filter(|stop| stop.length() > NOTICED);
        let hits: Vec<_> = hits.chain(stops).collect();
        let full = events.iter().filter(|event| matches!(event.fault, Fault::FillServer { .. }));
        let down = hits.iter().copied().chain(full.map(|event| event.span));
        let down = merged(down.map(healing).collect(), SLACK);
        let cut_off = merged(hits.iter().copied().map(healing).collect(), 0);
        served.sort_unstable();
        let until_served = |hit: Span| {
            let next = served.get(served.partition_point(|call| call.from < hit.to));
            Span::new(hit.from, next.map_or(Nanos::MAX, |call| call.to).min(healing(hit).to))
        };
        let away = merged(hits.into_iter().map(until_served).collect(), 0);
        Self { cut_off, away, stalls, stopped: merged(stopped, 0), down, killed }
    }

    /// When a holder must have renewed all its slots once more after this moment.
    fn healed(&self, after: Nanos, lease: Nanos) -> Nanos {
        done(&self.cut_off, after, round(lease))
    }

    /// When it must have given back what it gave up at this moment.
    fn given_back(&self, after: Nanos) -> Nanos {
        done(&self.away, after, GIVING_BACK)
    }

    /// When slots of a visit may have run out.
    fn lapses(&self, visit: &Visit) -> Vec<Span> {
        let lease = visit.entry.lease;
        let chains = merged(self.cut_off.clone(), round(lease));
        let first = chains.partition_point(|chain| chain.to + round(lease) < visit.entry.call.from);
        let chains = chains[first..].iter().take_while(|chain| chain.from <= visit.stay.to);
        let lapse = |chain: &Span| {
            // The last renewal before was sent a third of a lease before it at the latest.
            let out = (chain.from + lease * 2 / 3).max(visit.entry.call.from + lease) - SLACK;
            Span::new(out, chain.to + round(lease))
        };
        chains.map(lapse).filter(|lapse| lapse.from <= lapse.to && lapse.from <= visit.stay.to).collect()
    }

    /// Whether there was a fault that calls may fail for, or the machine so busy that they may.
    fn explain(&self, down: Span) -> bool {
        let before = Span::new(down.from.saturating_sub(CALL), down.to);
        let waited: Nanos = self.stalls.iter().map(|stall| common(*stall, before)).sum();
        waited > CALL / 2
            || self.down.iter().any(|trouble| trouble.from <= down.from && down.to <= trouble.to)
    }

    /// It goes on for a moment after the note that it is killed.
    fn killed_during(&self, from: Nanos, to: Nanos) -> bool {
        self.killed.iter().any(|killed| from <= killed + SLACK && *killed <= to)
    }

    fn stopped_during(&self, span: Span) -> bool {
        self.stopped.iter().any(|stop| stop.meets(span))
    }

    /// How much of a time this worker did not run.
    fn stopped_for(&self, span: Span) -> Nanos {
        self.stopped.iter().map(|stop| common(*stop, span)).sum()
    }
}

fn common(one: Span, other: Span) -> Nanos {
    Span::new(one.from.max(other.from), one.to.min(other.to)).length()
}

/// When that must be done which takes so long, begun at this moment and once more after each trouble.
fn done(troubles: &[Span], after: Nanos, takes: Nanos) -> Nanos {
    let mut done = after.saturating_add(takes);
    for span in &troubles[troubles.partition_point(|span| span.to < after)..] {
        if span.from > done {
            break;
        }
        done = done.max(span.to + takes);
    }
    done
}

/// The longest time between two renewals of a slot.
fn round(lease: Nanos) -> Nanos {
    lease / 3 + SLACK
}

fn healing(span: Span) -> Span {
    Span::new(span.from, span.to + RECONNECT)
}

/// Whether a worker cannot reach the server meanwhile, or cannot rely on it.
fn cuts_off(event: &Event, worker: usize) -> bool {
    match &event.fault {
        Fault::StopServer { .. } | Fault::BusyMachine => event.span.length() > NOTICED,
        Fault::RestartServer { .. } | Fault::ClientKill => true,
        Fault::LoseReplies { link, .. }
        | Fault::HoldReplies { link, .. }
        | Fault::BlackHole { link, .. }
        | Fault::Cut { link, .. }
        | Fault::Freeze { link, .. }
        | Fault::Delay { link, .. } => link.workers().contains(&worker),
        Fault::KillWorker { .. }
        | Fault::StopWorker { .. }
        | Fault::FlushAll
        | Fault::ScriptFlush { .. }
        | Fault::FillServer { .. }
        | Fault::Drain { .. } => false,
    }
}

/// Joins what overlaps or has less than `gap` in between.
fn merged(mut spans: Vec<Span>, gap: Nanos) -> Vec<Span> {
    spans.sort_unstable();
    let mut joined: Vec<Span> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if span.from <= last.to + gap => last.to = last.to.max(span.to),
            _ => joined.push(span),
        }
    }
    joined
}

fn doubts(visit: &Visit, troubles: &Troubles, events: &[Event]) -> Vec<Doubt> {
    let lease = visit.entry.lease;
    let whole = Span::new(visit.entry.call.from, visit.stay.to);
    let mut doubts = Vec::new();
    for (number, event) in events.iter().enumerate().filter(|(_, event)| event.span.meets(whole)) {
        match event.fault {
            Fault::FlushAll | Fault::RestartServer { .. } => {
                let span = Span::new(event.span.from, troubles.healed(event.span.to, lease));
                doubts.push(Doubt { span, why: Why::DataLost(number) });
            }
            Fault::Drain { project } if project == visit.entry.project => {
                doubts.push(Doubt { span: Span::new(event.span.from, Nanos::MAX), why: Why::Drained });
            }
            _ => {}
        }
    }
    if !visit.entry.stored {
        let span = Span::new(visit.entry.call.from, troubles.healed(visit.stay.from, lease));
        doubts.push(Doubt { span, why: Why::LetIn });
    }
    for lapse in troubles.lapses(visit) {
        let told = visit.lost.filter(|told| lapse.from <= *told && *told <= lapse.to + TELLING);
        let from = if troubles.stopped_during(lapse) {
            lapse.from
        } else {
            lapse.from.max(told.unwrap_or(visit.stay.to).saturating_sub(TELLING))
        };
        if from <= lapse.to {
            doubts.push(Doubt { span: Span::new(from, lapse.to), why: Why::Lapsed });
        }
    }
    doubts
}

impl Findings {
    /// The visits of one life; and what else it reported, checked.
    fn read(&mut self, life: &Life, troubles: &Troubles, events: &[Event], start: Nanos) -> Vec<Visit> {
        let mut visits: Vec<Visit> = Vec::new();
        let mut places = HashMap::new();
        let mut tally = Tally::default();
        let end = life.killed.unwrap_or(Nanos::MAX);
        for report in &life.reports {
            match report {
                Report::Entered(entry) => {
                    places.insert(entry.number, visits.len());
                    let (worker, entry) = (life.worker, entry.clone());
                    let stay = Span::new(entry.call.to, end);
                    visits.push(Visit { worker, entry, stay, lost: None, doubts: Vec::new() });
                }
                Report::Left { number, at } => visits[places[number]].stay.to = *at,
                Report::Lost { number, at } => visits[places[number]].lost = Some(*at),
                Report::Tally(so_far) => tally = *so_far,
                Report::Stalled(_) => {}
                Report::Slow(call) => {
                    let took = call.length() - troubles.stopped_for(*call);
                    self.slowest = self.slowest.max(took);
                    if took > CALL + SLACK {
                        let at = seconds(call.from - start);
                        self.violations.push(format!(
                            "a call of worker {} at {at:.3} s took {} ms",
                            life.worker,
                            took / MS
                        ));
                    }
                }
                Report::Down { span, calls, why } => {
                    if !troubles.explain(*span) {
                        let (from, to) = (seconds(span.from - start), seconds(span.to - start));
                        let mut text = format!(
                            "worker {} was told of an outage without a fault: {calls} calls from {from:.3} to {to:.3} s: {why}",
                            life.worker
                        );
                        let waited: Nanos = troubles
                            .stalls
                            .iter()
                            .map(|stall| common(*stall, Span::new(span.from - 2 * CALL, span.to)))
                            .sum();
                        let _ = write!(text, ", waited {} ms", waited / MS);
                        describe_events(&mut text, events, span.from, start);
                        self.violations.push(text);
                    }
                }
            }
        }
        self.tallies += tally;
        visits.retain(|visit| visit.stay.from < visit.stay.to);
        visits
    }

    /// Nobody is told of a loss without a fault.
    fn check_losses(&mut self, visits: &[Visit], troubles: &[Troubles], events: &[Event], start: Nanos) {
        for visit in visits {
            let Some(lost) = visit.lost else { continue };
            let drained =
                visit.doubts.iter().any(|doubt| doubt.why == Why::Drained && doubt.span.from <= lost);
            let mut lapses = troubles[visit.worker].lapses(visit).into_iter();
            if !drained && !lapses.any(|lapse| lapse.from <= lost && lost <= lapse.to + TELLING) {
                let mut text = format!("a slot was lost at {:.3} s without a fault: ", seconds(lost - start));
                describe(&mut text, visit, start);
                describe_events(&mut text, events, lost, start);
                self.violations.push(text);
            }
        }
    }

    /// The rule, at each admission of one project.
    fn sweep(&mut self, project: usize, visits: &[&Visit], events: &[Event], start: Nanos) {
        let limit = PROJECTS[project].limit;
        let mut steps: Vec<(Nanos, bool, usize)> = Vec::new();
        for (place, visit) in visits.iter().enumerate() {
            // Of one moment the ends come first.
            steps.extend([(visit.stay.from, true, place), (visit.stay.to, false, place)]);
        }
        steps.sort_unstable();
        let mut present: BTreeSet<usize> = BTreeSet::new();
        for (at, comes, place) in steps {
            if !comes {
                present.remove(&place);
                continue;
            }
            present.insert(place);
            let (new, there) = (visits[place], present.iter().map(|place| visits[*place]));
            self.measure(project, limit, at, there.clone());
            let call = new.entry.call;
            if !new.entry.stored {
                continue;
            }
            self.admissions.0 += 1;
            if !new.counts_during(call) {
                continue;
            }
            self.admissions.1 += 1;
            let counted: Vec<_> = there.filter(|visit| visit.counts_during(call)).collect();
            let weight: u32 = counted.iter().map(|visit| visit.entry.weight).sum();
            if weight > limit {
                let mut text = format!(
                    "{} admitted at {:.3} s, which makes {weight} of {limit} that count for sure:",
                    PROJECTS[project].id,
                    seconds(at - start)
                );
                for visit in counted {
                    text.push_str("\n    ");
                    describe(&mut text, visit, start);
                }
                describe_events(&mut text, events, at, start);
                self.violations.push(text);
            }
        }
    }

    /// What the server's ledger says of one project.
    fn check_ledger(
        &mut self,
        project: usize,
        visits: &[&Visit],
        pages: &[&Page],
        events: &[Event],
        start: Nanos,
    ) {
        let mut owners = HashMap::new();
        for visit in visits {
            owners.extend(visit.members().map(|member| (member, visit)));
        }
        let mut first_seen = HashMap::new();
        let mut reported = BTreeSet::new();
        let (mut coming, mut there) = (visits.iter().peekable(), Vec::<&&Visit>::new());
        for page in pages {
            there.extend(std::iter::from_fn(|| coming.next_if(|visit| visit.stay.from <= page.span.from)));
            there.retain(|visit| visit.stay.to >= page.span.to);
            for visit in there.iter().filter(|visit| visit.counts_during(page.span)) {
                let is_there = |member| page.members.get(&member).is_some_and(|out| *out > page.span.from);
                self.found += u64::from(visit.entry.weight);
                if !visit.members().all(is_there) && reported.insert(visit.entry.slot) {
                    let mut text = format!("not in the store at {:.3} s: ", seconds(page.span.from - start));
                    describe(&mut text, visit, start);
                    describe_events(&mut text, events, page.span.from, start);
                    self.violations.push(text);
                }
            }
            for (member, runs_out) in &page.members {
                let since = match owners.get(member) {
                    Some(visit) => visit.stay.to.saturating_add(visit.entry.lease),
                    None => {
                        *first_seen.entry(member).or_insert(page.span.to) + PROJECTS[project].longest_lease()
                    }
                };
                // A renewal that was sent before is executed within a time-out.
                if *runs_out > since.saturating_add(CALL + SLACK) && reported.insert(*member) {
                    let (seen, out) = (seconds(page.span.from - start), seconds(runs_out - start));
                    let id = PROJECTS[project].id;
                    let mut text =
                        format!("leak: {member:x} of {id}, seen at {seen:.3} s, lasts until {out:.3} s: ");
                    match owners.get(member) {
                        Some(visit) => describe(&mut text, visit, start),
                        None => text.push_str("nobody holds it"),
                    }
                    describe_events(&mut text, events, page.span.from, start);
                    self.violations.push(text);
                }
            }
        }
    }

    /// Of one project, what has ended or came to nothing is gone.
    fn check_ends(
        &mut self,
        project: usize,
        visits: &[&Visit],
        pages: &[&Page],
        troubles: &[Troubles],
        events: &[Event],
        start: Nanos,
    ) {
        let owners: HashMap<_, _> =
            visits.iter().flat_map(|visit| visit.members().map(move |member| (member, visit))).collect();
        let (mut first_seen, mut reported) = (HashMap::new(), BTreeSet::new());
        for page in pages {
            let at = page.span.from;
            for (member, runs_out) in page.members.iter().filter(|(_, runs_out)| **runs_out > page.span.to) {
                let seen = *first_seen.entry(*member).or_insert(at);
                let owner = owners.get(member);
                let may_stay = match owner {
                    Some(Visit { worker, stay, .. }) => {
                        let worker = &troubles[*worker];
                        at <= worker.given_back(stay.to) || worker.killed_during(stay.to, at)
                    }
                    // Any of them may have asked for it, within a call before it was taken.
                    None => troubles.iter().any(|worker| {
                        let asked = runs_out.saturating_sub(PROJECTS[project].longest_lease() + CALL);
                        at <= worker.given_back(seen + CALL) || worker.killed_during(asked, at)
                    }),
                };
                let slot = owner.map_or(*member, |visit| visit.entry.slot);
                if may_stay || !reported.insert(slot) {
                    continue;
                }
                let (at, id) = (seconds(at - start), PROJECTS[project].id);
                let mut text = format!("not given back at {at:.3} s: {member:x} of {id}: ");
                match owner {
                    Some(visit) => describe(&mut text, visit, start),
                    None => text.push_str("nobody came to hold it"),
                }
                describe_events(&mut text, events, page.span.from, start);
                self.violations.push(text);
            }
        }
    }

    /// Takes note of how many are there, under the bound that holds for them.
    fn measure<'a>(
        &mut self,
        project: usize,
        limit: u32,
        at: Nanos,
        present: impl Iterator<Item = &'a Visit>,
    ) {
        let (mut seen, mut beyond, mut losses) = (0, 0, BTreeSet::new());
        for visit in present {
            seen += visit.entry.weight;
            let had = || visit.doubts.iter().filter(|doubt| doubt.span.from <= at);
            losses.extend(had().filter_map(|doubt| match doubt.why {
                Why::DataLost(number) => Some(number),
                _ => None,
            }));
            if had().any(|doubt| !matches!(doubt.why, Why::DataLost(_))) {
                beyond += visit.entry.weight;
            }
        }
        let bound = limit * (1 + losses.len() as u32) + beyond;
        let kind = match (losses.len(), beyond) {
            (0, 0) => "no fault: the limit",
            (1, 0) => "data lost: twice the limit",
            (_, 0) => "data lost again: once more the limit",
            (0, _) => "holders stopped, cut off, drained or let in: the limit and what they have",
            _ => "both: the sum",
        };
        if seen >= limit {
            self.full.insert(project);
        }
        let overlap = Overlap { seen, bound, project };
        if seen > bound {
            self.violations.push(format!("{} had {seen} at once of at most {bound}", PROJECTS[project].id));
        }
        let highest = self.overlaps.entry(kind).or_insert(Overlap { seen: 0, bound: 1, project });
        if (seen * highest.bound, seen) > (highest.seen * bound, highest.seen) {
            *highest = overlap;
        }
    }

    /// The highest overlap of each bound, as lines.
    pub(crate) fn overlaps(&self) -> Vec<String> {
        let line = |(kind, Overlap { seen, bound, project }): (&&str, &Overlap)| {
            let Project { id, limit, .. } = &PROJECTS[*project];
            format!("{kind}: {seen} of at most {bound} ({id}, limit {limit})")
        };
        self.overlaps.iter().map(line).collect()
    }

    /// The violations that are shown, and how many there are besides.
    pub(crate) fn shown(&self) -> (&[String], usize) {
        let shown = self.violations.len().min(SHOWN);
        (&self.violations[..shown], self.violations.len() - shown)
    }
}

fn describe(text: &mut String, visit: &Visit, start: Nanos) {
    let Visit { worker, entry, stay, lost, doubts } = visit;
    let at = |moment: Nanos| {
        if moment == Nanos::MAX { f64::INFINITY } else { moment.saturating_sub(start) as f64 / SECOND as f64 }
    };
    let how = if entry.stored { "" } else { ", let in" };
    // Writing into a string does not fail.
    let _ = write!(
        text,
        "worker {worker}{}: weight {} of {}, lease {} s, slot {:x}, asked {:.3}, from {:.3} to {:.3} s{how}",
        if admits(*worker) { " (admits)" } else { "" },
        entry.weight,
        PROJECTS[entry.project].id,
        entry.lease / SECOND,
        entry.slot,
        at(entry.call.from),
        at(stay.from),
        at(stay.to),
    );
    if let Some(lost) = lost {
        let _ = write!(text, ", lost {:.3}", at(*lost));
    }
    for Doubt { span, why } in doubts {
        let _ = write!(text, ", {why:?} {:.3} to {:.3}", at(span.from), at(span.to));
    }
}

/// The faults of some time before a moment.
fn describe_events(text: &mut String, events: &[Event], at: Nanos, start: Nanos) {
    let near = Span::new(at.saturating_sub(20 * SECOND), at + SECOND);
    for event in events.iter().filter(|event| event.span.meets(near)) {
        if event.fault == Fault::BusyMachine && event.span.length() <= NOTICED {
            continue;
        }
        let (from, to) = (seconds(event.span.from - start), seconds(event.span.to - start));
        let _ = write!(text, "\n    {from:.3} to {to:.3} s: {:?}", event.fault);
    }
}

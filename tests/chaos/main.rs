//! Chaos: worker processes take and give back slots of one real Redis while faults are drawn at random,
//! and what they report is checked. `scripts/chaos --seed 1 --minutes 2` runs it.
//!
//! * `projects`: the ids, with their limits and leases.
//! * `worker`: the worker processes, this binary run again.
//! * `faults`: the faults, and the order in which a seed draws them.
//! * `arena`: the server, the proxies, the workers, and how faults are injected.
//! * `ledger`: what the server says is taken.
//! * `watch`: whether the machine has time for all of it.
//! * `check`: the rule that all of it must keep, and how it follows for faults that overlap.

#![allow(clippy::unwrap_used, reason = "in a test it is the assertion")]

mod arena;
mod check;
mod faults;
mod ledger;
mod projects;
mod record;
#[path = "../support/mod.rs"]
mod support;
mod watch;
mod worker;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower_slots::{AcquireError, Limiter};

use crate::arena::Arena;
use crate::faults::{Fault, Plan};
use crate::projects::{LONGEST_LEASE, PROJECTS, STORE_TIMEOUT};
use crate::record::MS;
use crate::support::child;
use crate::worker::WORKERS;

/// How long after the last lease nothing may be left, on a busy machine.
const SLACK: Duration = Duration::from_secs(1);

const LOOK_EVERY: Duration = Duration::from_millis(700);

fn main() -> ExitCode {
    if let Some(args) = child::role("worker") {
        worker::main(&args);
        return ExitCode::SUCCESS;
    }
    let Some((seed, minutes)) = arguments() else {
        println!("chaos: does nothing by itself: scripts/chaos --seed 1 --minutes 2");
        return ExitCode::SUCCESS;
    };
    let runtime = tokio::runtime::Runtime::new().expect("the runtime starts");
    let violations = runtime.block_on(run(seed, Duration::from_secs_f64(60.0 * minutes)));
    if violations == 0 {
        println!("chaos: no violation, no leak");
        return ExitCode::SUCCESS;
    }
    println!("chaos: {violations} violations; seed {seed}");
    ExitCode::FAILURE
}

/// The seed and the minutes, where these are given.
fn arguments() -> Option<(u64, f64)> {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let minutes = value("--minutes")?.parse().expect("--minutes takes a number");
    let seed = value("--seed").map(|seed| seed.parse().expect("--seed takes a whole number"));
    Some((seed.unwrap_or_else(|| support::random() % 1_000_000), minutes))
}

async fn run(seed: u64, time: Duration) -> usize {
    println!("chaos: seed {seed}, {} s, {WORKERS} workers, {} ids", time.as_secs(), PROJECTS.len());
    let start = record::now();
    let arena = Arc::new(Arena::start(seed).await);
    let mut pages = Vec::new();
    let looks = async {
        loop {
            pages.extend(ledger::look(&arena).await);
            sleep(LOOK_EVERY).await;
        }
    };
    let injected = tokio::select! {
        injected = storm(&arena, seed, time) => injected,
        never = looks => never,
    };
    let mut problems = calm(&arena).await;
    let arena = Arc::into_inner(arena).expect("all faults are over");
    let (events, lives) = arena.finish().await;
    let findings = check::check(start, &events, &lives, &pages);

    let busy: record::Nanos = events
        .iter()
        .filter(|event| event.fault == Fault::BusyMachine)
        .map(|event| event.span.length())
        .sum();
    println!(
        "chaos: the server did not answer for {} ms, by a fault or because the machine was busy",
        busy / MS
    );
    for (name, count) in injected {
        println!("chaos: {count} × {name}");
    }
    let tally = findings.tallies;
    println!(
        "chaos: {} calls: {} admitted, {} refused, {} unavailable, {} let in by policy, {} given up",
        tally.calls, tally.admitted, tally.refused, tally.unavailable, tally.open, tally.cancelled
    );
    let (admitted, checked) = findings.admissions;
    println!(
        "chaos: {checked} of {admitted} admissions held against the limit, {} slots found in the store",
        findings.found
    );
    findings.overlaps().iter().for_each(|line| println!("chaos: {line}"));
    println!("chaos: {} of {} ids were at their limit", findings.full.len(), PROJECTS.len());
    println!("chaos: the slowest call took {} of {} ms", findings.slowest / MS, STORE_TIMEOUT.as_millis());
    let (shown, more) = findings.shown();
    shown.iter().for_each(|violation| println!("chaos: violation: {violation}"));
    if more > 0 {
        println!("chaos: and {more} more");
    }
    if findings.full.len() < PROJECTS.len() || checked < admitted / 2 || findings.found == 0 {
        problems.push("too little was asked for to tell anything".to_owned());
    }
    problems.iter().for_each(|problem| println!("chaos: violation: {problem}"));
    findings.violations.len() + problems.len()
}

/// Injects faults for that time; returns how many of each.
async fn storm(arena: &Arc<Arena>, seed: u64, time: Duration) -> BTreeMap<&'static str, u32> {
    let (end, mut injected, mut faults) = (Instant::now() + time, BTreeMap::new(), JoinSet::new());
    sleep(Duration::from_secs(2)).await;
    for (gap, fault) in Plan::new(seed) {
        if Instant::now() + gap > end {
            break;
        }
        sleep(gap).await;
        // One that could not be injected ends the run at once.
        while let Some(undone) = faults.try_join_next() {
            undone.expect("every fault can be injected");
        }
        *injected.entry(fault.name()).or_default() += 1;
        faults.spawn(Arc::clone(arena).inject(fault));
    }
    while let Some(undone) = faults.join_next().await {
        undone.expect("every fault can be injected");
    }
    injected
}

/// All is given back, all can be taken again, and nothing is left; returns what is wrong.
async fn calm(arena: &Arena) -> Vec<String> {
    let mut problems = Vec::new();
    arena.tell_all("rest", "rested").await;
    empty(arena, &mut problems).await;
    for (project, known) in PROJECTS.iter().enumerate() {
        refill(arena, project, known.limit, &mut problems).await;
    }
    for (worker, answer) in arena.tell_each("probe", "probed").await.iter().enumerate() {
        if *answer != format!("probed {} []", PROJECTS.len()) {
            problems.push(format!("worker {worker} does not get slots again: {answer}"));
        }
    }
    for (worker, answer) in arena.tell_all("end", "ended").await.iter().enumerate() {
        if answer != "ended true 0" {
            problems.push(format!("worker {worker} leaves something (all given back, tasks): {answer}"));
        }
    }
    empty(arena, &mut problems).await;
    problems
}

/// No slot is left, within a lease.
async fn empty(arena: &Arena, problems: &mut Vec<String>) {
    let end = Instant::now() + LONGEST_LEASE + SLACK;
    for project in &PROJECTS {
        let mut left = live(arena, &project.key()).await;
        while !left.is_empty() && Instant::now() < end {
            sleep(Duration::from_millis(20)).await;
            left = live(arena, &project.key()).await;
        }
        if !left.is_empty() {
            problems.push(format!("leak: {} of {}: {left:?}", left.len(), project.id));
        }
    }
}

/// Members whose lease has not run out.
async fn live(arena: &Arena, key: &str) -> Vec<(String, i64)> {
    let now = arena.server.time_ms().await;
    let members = arena.server.members(key).await;
    members.into_iter().filter(|(_, until)| *until > now).collect()
}

/// Whether a slot can be taken and given back.
async fn gives(limiter: &Limiter, id: &str) -> bool {
    match limiter.try_acquire(id).await {
        Ok(slot) => slot.release().await.is_ok(),
        Err(_) => false,
    }
}

/// Exactly the limit can be taken, and no more.
async fn refill(arena: &Arena, project: usize, limit: u32, problems: &mut Vec<String>) {
    let (limiter, id) = (arena.limiter(project), PROJECTS[project].id);
    // The operator may have to connect again; then its breaker lets one acquire through at first.
    let ready = Instant::now() + Duration::from_secs(5);
    while !gives(limiter, id).await && Instant::now() < ready {
        sleep(Duration::from_millis(20)).await;
    }
    let all = join_all((0..=limit).map(|_| limiter.try_acquire(id))).await;
    let granted = all.iter().filter(|slot| slot.is_ok()).count();
    let refused = all.iter().filter(|slot| matches!(slot, Err(AcquireError::Saturated { .. }))).count();
    if (granted, refused) != (limit as usize, 1) {
        problems.push(format!(
            "{id}: {granted} granted and {refused} refused where {limit} is the limit: {all:?}"
        ));
    }
}

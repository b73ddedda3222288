//! Rules 1 to 5: what can be built, and what is refused.

use std::error::Error;

use tower_slots::semaphore::{
    AcquireError, ConfigError, ConfigField, ConfigProblem, MAX_EVENTS, MAX_WAITERS, Semaphore,
};

use crate::support::*;

#[track_caller]
fn refused(capacity: i64, max_waiters: usize, events: usize) -> ConfigError {
    Semaphore::builder(capacity).max_waiters(max_waiters).events(events).build().unwrap_err()
}

#[track_caller]
fn assert_refused(error: &ConfigError, field: ConfigField, problem: ConfigProblem) {
    assert_eq!((error.field(), error.problem()), (field, problem));
}

#[test]
fn rule_01_the_first_failed_check_wins() {
    for capacity in [0, -1, i64::MIN] {
        for (waiters, events) in [(0, 0), (MAX_WAITERS + 1, 0), (0, MAX_EVENTS + 1), (usize::MAX, usize::MAX)]
        {
            assert_refused(
                &refused(capacity, waiters, events),
                ConfigField::Capacity,
                ConfigProblem::MustBePositive,
            );
        }
    }
    for (waiters, events) in
        [(MAX_WAITERS + 1, 0), (MAX_WAITERS + 1, MAX_EVENTS + 1), (usize::MAX, usize::MAX)]
    {
        assert_refused(&refused(1, waiters, events), ConfigField::MaxWaiters, ConfigProblem::ExceedsBound);
    }
}

#[test]
fn rule_01_every_positive_capacity_is_accepted() {
    for capacity in [
        1,
        2,
        (1 << 32) - 1,
        1 << 32,
        (1 << 32) + 1,
        (1 << 44) - 2,
        (1 << 44) - 1,
        1 << 44,
        (1 << 44) + 1,
        i64::MAX - 1,
        i64::MAX,
    ] {
        for sem in both(capacity, 0) {
            assert_eq!(sem.capacity(), capacity);
            assert_state(&sem, &format!("0/{capacity} q0 a0 r0 c0"));
        }
    }
}

/// The size of this process's address space, in bytes.
#[cfg(target_os = "linux")]
fn address_space() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn rule_02_a_million_waiters_are_accepted_and_none_is_allocated_for() {
    assert_eq!(MAX_WAITERS, 1_000_000);
    assert_eq!(plain(1, 1_000_000).snapshot().waiters, 0);
    assert_refused(&refused(1, 1_000_001, 0), ConfigField::MaxWaiters, ConfigProblem::ExceedsBound);
    #[cfg(target_os = "linux")]
    {
        // Eight bytes for each waiter would be eight gigabytes.
        let before = address_space();
        let all: Vec<Semaphore> = (0..1000).map(|_| plain(i64::MAX, 1_000_000)).collect();
        let grown = address_space().saturating_sub(before);
        assert!(grown < 4_000_000_000, "{} semaphores took {grown} bytes", all.len());
    }
}

#[test]
fn rule_03_the_bound_of_the_ring() {
    assert_eq!(MAX_EVENTS, 65_536);
    assert_refused(&refused(1, 0, 65_537), ConfigField::Events, ConfigProblem::ExceedsBound);
    assert_refused(&refused(1, 1_000_000, usize::MAX), ConfigField::Events, ConfigProblem::ExceedsBound);

    let sem = Semaphore::builder(1).events(65_536).build().unwrap();
    let _held = hold(&sem, 1);
    for _ in 1..65_536 {
        assert_unavailable(&sem, 1);
    }
    let batch = sem.drain_events();
    assert_eq!((batch.events.len(), batch.dropped), (65_536, 0));
    assert_eq!(lines(&batch.events[65_535..]), ["rejected/unavailable #0 w1 | 1/1 q0 a1 r65535 c0"]);
}

#[cfg(target_os = "linux")]
#[test]
fn rule_03_the_ring_is_allocated_up_front() {
    let ring = 65_536 * size_of::<tower_slots::semaphore::Event>() as u64;
    let before = address_space();
    let all: Vec<Semaphore> =
        (0..64).map(|_| Semaphore::builder(1).events(65_536).build().unwrap()).collect();
    let grown = address_space().saturating_sub(before);
    // Half of it, for what other tests give back in the meantime.
    assert!(grown > 32 * ring, "{} rings of {ring} bytes took {grown}", all.len());
}

#[test]
fn rule_03_no_ring_records_nothing() {
    for sem in [plain(1, 1), Semaphore::builder(1).events(0).build().unwrap()] {
        drop(hold(&sem, 1));
        assert_error!(now(&sem, 2), AcquireError::Oversize { .. });
        sem.close();
        let batch = sem.drain_events();
        assert!(batch.events.is_empty());
        assert_eq!(batch.dropped, 0);
    }
}

#[test]
fn rule_04_a_failed_construction_says_what_and_nothing_of_the_caller() {
    let texts = [
        (refused(-987_654, 0, 0), "capacity", "must be positive"),
        (refused(1, 9_876_543, 0), "max waiters", "exceeds the supported bound"),
        (refused(1, 0, 9_876_543), ConfigField::Events.as_str(), "exceeds the supported bound"),
    ];
    for (error, field, problem) in texts {
        assert_eq!((error.field().as_str(), error.problem().as_str()), (field, problem));
        assert_eq!((error.field().to_string(), error.problem().to_string()), (field.into(), problem.into()));
        let error: Box<dyn Error + Send + Sync> = Box::new(error);
        let (display, debug) = (error.to_string(), format!("{error:?}"));
        assert!(display.contains(field) && display.contains(problem), "{display}");
        assert!(!display.contains("987") && !debug.contains("987"), "{display}, {debug}");
    }
}

#[test]
fn rule_05_without_a_queue_nobody_waits() {
    for sem in both(2, 0).into_iter().chain([Semaphore::builder(2).build().unwrap()]) {
        let held = hold(&sem, 1);
        assert_error!(now(&sem, 2), AcquireError::QueueFull { limit: 0, .. });
        assert_state(&sem, "1/2 q0 a1 r1 c0");
        // What fits is admitted all the same.
        let more = hold(&sem, 1);
        assert_error!(now(&sem, 1), AcquireError::QueueFull { limit: 0, .. });
        drop((held, more));
        assert_state(&sem, "0/2 q0 a2 r2 c0");
    }
}

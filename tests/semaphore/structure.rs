//! Rule 37: no task, no timer, no runtime, and no lock held while anybody else's code runs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use tokio::time::{Instant, advance};
use tower_slots::semaphore::{AcquireError, Semaphore};

use crate::support::*;

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn rule_37_it_works_without_a_runtime() {
    within(Duration::from_secs(60), || {
        assert!(tokio::runtime::Handle::try_current().is_err());
        for sem in both(2, 64) {
            let taken = AtomicUsize::new(0);
            thread::scope(|scope| {
                for hand in 0..4 {
                    let (sem, taken) = (&sem, &taken);
                    scope.spawn(move || {
                        for turn in 0..200 {
                            let weight = 1 + i64::from((hand + turn) % 2);
                            let permit = block_on(sem.acquire(weight)).unwrap();
                            let more = taken.fetch_add(weight as usize, Ordering::SeqCst);
                            assert!(more + weight as usize <= 2);
                            thread::yield_now();
                            taken.fetch_sub(weight as usize, Ordering::SeqCst);
                            drop(permit);
                        }
                    });
                }
            });
            block_on(sem.wait_idle());
            assert_eq!(block_on(sem.execute(2, async { 7 })).unwrap(), 7);
            assert_state(&sem, "0/2 q0 a801 r0 c0");
            sem.close();
            assert_error!(block_on(sem.acquire(1)), AcquireError::Closed);
        }
    });
}

#[test]
fn rule_37_waiting_until_idle_works_without_a_runtime() {
    within(PATIENCE, || {
        for sem in both(1, 0) {
            let started = Barrier::new(2);
            thread::scope(|scope| {
                let held = hold(&sem, 1);
                let waiting = scope.spawn(|| {
                    started.wait();
                    block_on(sem.wait_idle());
                });
                started.wait();
                thread::sleep(5 * MS);
                assert!(!waiting.is_finished());
                drop(held);
                waiting.join().unwrap();
            });
        }
    });
}

#[test]
fn rule_37_nothing_is_spawned() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        assert_eq!(alive(), 0);
        for sem in both(2, 8) {
            let held = hold(&sem, 2);
            let mut tasks: Vec<_> = (0..4).map(|_| queue(&sem, 1)).collect();
            let mut late = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            late.assert_pending();
            assert!(sem.wait_idle_deadline(Instant::now() + MS).await.is_err());
            let idle = sem.wait_idle();
            drop(tasks.pop());
            drop(held);
            drop(tasks.remove(0).granted());
            advance(2 * SECOND).await;
            sem.close();
            drop((tasks, late, idle));
            assert_eq!(alive(), 0);
        }
    });
}

/// The clock is tokio's: it stands still when that is paused.
#[test]
fn rule_37_deadlines_follow_the_clock_of_tokio() {
    paused(async {
        for sem in both(1, 4) {
            let _held = hold(&sem, 1);
            let mut task = Task::new(sem.acquire_timeout(1, MS).into_owned());
            task.assert_pending();
            thread::sleep(10 * MS);
            task.assert_pending();
            assert_eq!(task.wakes(), 0);
            advance(2 * MS).await;
            assert_error!(task.ready(), AcquireError::Deadline);
            // A year passes at once when there is nothing else to do.
            let year = Duration::from_secs(365 * 86_400);
            let before = Instant::now();
            assert_error!(sem.acquire_timeout(1, year).await, AcquireError::Deadline);
            assert!(before.elapsed() >= year);
        }
    });
}

/// Whether another thread gets at the semaphore now: it does not while this one holds the lock.
fn is_free(sem: &Semaphore) -> bool {
    let looking = sem.clone();
    let (done, wait) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let _ = looking.snapshot();
        let _ = looking.try_acquire(i64::MAX);
        let _ = done.send(());
    });
    wait.recv_timeout(5 * SECOND).is_ok()
}

/// A waker that looks, as it is woken and as it is dropped, whether another thread could go on, and
/// then uses the semaphore itself.
struct Probing {
    sem: Semaphore,
    calls: Arc<Mutex<Vec<(&'static str, bool)>>>,
}

impl Probing {
    fn probe(&self, when: &'static str) {
        let free = is_free(&self.sem);
        self.calls.lock().unwrap().push((when, free));
        if free {
            let _ = self.sem.snapshot();
            let _ = self.sem.try_acquire(1);
            drop(Task::new(self.sem.acquire(1).into_owned()).poll());
        }
    }
}

impl Wake for Probing {
    fn wake(self: Arc<Self>) {
        self.probe("wake");
    }
}

impl Drop for Probing {
    fn drop(&mut self) {
        self.probe("drop");
    }
}

/// What is called while `act` runs on a semaphore of two, taken, where one waits with the waker that
/// probes. The acquire is kept until after the count.
fn probed(
    act: impl FnOnce(&Semaphore, tower_slots::semaphore::Permit, &mut Option<Waiting>) + Send + 'static,
) {
    within(PATIENCE, move || {
        let mut act = Some(act);
        let sem = recorded(2, 8);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let held = hold(&sem, 2);
        let mut task = Some(Task::new(sem.acquire(1).into_owned()));
        let waker = Waker::from(Arc::new(Probing { sem: sem.clone(), calls: calls.clone() }));
        assert!(task.as_mut().unwrap().poll_with(&waker).is_pending());
        drop(waker);
        assert!(calls.lock().unwrap().is_empty(), "the semaphore has the only one");
        act.take().unwrap()(&sem, held, &mut task);
        let calls = std::mem::take(&mut *calls.lock().unwrap());
        assert!(!calls.is_empty(), "nothing was called");
        assert!(calls.iter().all(|(_, free)| *free), "called under the lock: {calls:?}");
        drop(task);
    });
}

#[test]
fn rule_37_no_waker_is_woken_under_the_lock_on_release() {
    probed(|_, held, _| drop(held));
}

#[test]
fn rule_37_no_waker_is_woken_under_the_lock_on_close() {
    probed(|sem, _held, _| sem.close());
}

#[test]
fn rule_37_no_waker_is_dropped_under_the_lock_on_cancel() {
    probed(|_, _held, task| drop(task.take()));
}

#[test]
fn rule_37_no_waker_is_dropped_under_the_lock_when_another_takes_its_place() {
    probed(|_, _held, task| task.as_mut().unwrap().assert_pending());
}

#[test]
fn rule_37_no_waker_is_touched_under_the_lock_at_a_deadline() {
    within(PATIENCE, || {
        paused(async {
            let sem = recorded(2, 8);
            let calls = Arc::new(Mutex::new(Vec::new()));
            let _held = hold(&sem, 2);
            let mut task = Task::new(sem.acquire_timeout(1, SECOND).into_owned());
            let waker = Waker::from(Arc::new(Probing { sem: sem.clone(), calls: calls.clone() }));
            assert!(task.poll_with(&waker).is_pending());
            drop(waker);
            advance(2 * SECOND).await;
            assert_error!(task.ready(), AcquireError::Deadline);
            drop(task);
            let calls = std::mem::take(&mut *calls.lock().unwrap());
            assert!(!calls.is_empty() && calls.iter().all(|(_, free)| *free), "{calls:?}");
        });
    });
}

#[test]
fn rule_37_no_waker_is_touched_under_the_lock_while_idling() {
    for how in ["wake", "leave", "replace"] {
        within(PATIENCE, move || {
            let sem = recorded(2, 8);
            let calls = Arc::new(Mutex::new(Vec::new()));
            let mut held = Some(hold(&sem, 2));
            let mut task = Some(Task::new(sem.wait_idle()));
            let waker = Waker::from(Arc::new(Probing { sem: sem.clone(), calls: calls.clone() }));
            assert!(task.as_mut().unwrap().poll_with(&waker).is_pending());
            drop(waker);
            match how {
                "wake" => drop(held.take()),
                "leave" => drop(task.take()),
                _ => task.as_mut().unwrap().assert_pending(),
            }
            let calls = std::mem::take(&mut *calls.lock().unwrap());
            assert!(!calls.is_empty() && calls.iter().all(|(_, free)| *free), "{how}: {calls:?}");
        });
    }
}

#[test]
fn rule_37_no_waker_is_touched_under_the_lock_when_a_big_head_leaves() {
    within(PATIENCE, || {
        let sem = recorded(2, 8);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let _held = hold(&sem, 1);
        let big = queue(&sem, 2);
        let mut small = Task::new(sem.acquire(1).into_owned());
        let waker = Waker::from(Arc::new(Probing { sem: sem.clone(), calls: calls.clone() }));
        assert!(small.poll_with(&waker).is_pending());
        drop(waker);
        drop(big);
        let calls = std::mem::take(&mut *calls.lock().unwrap());
        assert_eq!(calls[0], ("wake", true), "{calls:?}");
        assert!(calls.iter().all(|(_, free)| *free), "{calls:?}");
        drop(small.granted());
    });
}

#[test]
fn rule_37_no_observer_is_called_under_the_lock() {
    within(PATIENCE, || {
        let handle: Arc<Mutex<Option<Semaphore>>> = Arc::default();
        let (inside, calls) = (handle.clone(), Arc::new(Mutex::new(Vec::new())));
        let noting = calls.clone();
        let sem = Semaphore::builder(2)
            .max_waiters(2)
            .observer(move |event| {
                // Taken out meanwhile: the event of the look itself is not looked at.
                let sem = inside.lock().unwrap().take();
                if let Some(sem) = sem {
                    let free = is_free(&sem);
                    noting.lock().unwrap().push((event.kind.as_str(), free));
                    *inside.lock().unwrap() = Some(sem);
                }
            })
            .build()
            .unwrap();
        *handle.lock().unwrap() = Some(sem.clone());
        let held = hold(&sem, 2);
        let mut granted = queue(&sem, 1);
        drop(queue(&sem, 1));
        assert_unavailable(&sem, 1);
        drop(held);
        drop(granted.granted());
        let _held = hold(&sem, 2);
        let mut closed = queue(&sem, 1);
        sem.close();
        assert!(matches!(closed.poll(), Poll::Ready(Err(AcquireError::Closed))));
        handle.lock().unwrap().take();
        let calls = calls.lock().unwrap();
        assert!(calls.iter().all(|(_, free)| *free), "called under the lock: {calls:?}");
        for kind in ["admitted", "queued", "canceled", "rejected", "released", "closed"] {
            assert!(calls.iter().any(|(called, _)| *called == kind), "{kind} was not seen: {calls:?}");
        }
    });
}

/// A future that is awaited in a task of tokio shares it with the others.
#[test]
fn rule_37_futures_may_be_sent_and_moved() {
    fn sent<T: Send>(future: T) -> T {
        future
    }
    fn moved<T: Unpin>(future: T) -> T {
        future
    }
    let sem = plain(1, 1);
    drop(moved(sent(sem.acquire(1).into_owned())));
    drop(sent(sem.acquire_timeout(1, SECOND).into_owned()));
    drop(sent(sem.wait_idle()));
    drop(sent(sem.execute(1, async {})));
}

/// Uses up what tokio grants a task before it has to yield.
async fn use_up_budget() {
    std::future::poll_fn(|cx| {
        while let Poll::Ready(budget) = tokio::task::coop::poll_proceed(cx) {
            budget.made_progress();
        }
        Poll::Ready(())
    })
    .await;
}

#[test]
fn rule_37_a_task_that_never_has_to_wait_lets_others_have_their_turn() {
    within(PATIENCE, || {
        for sem in both(1, 1) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let busy = sem.clone();
                let greedy = tokio::spawn(async move {
                    while !busy.is_closed() {
                        if let Ok(permit) = busy.acquire(1).await {
                            drop(permit);
                        }
                    }
                });
                let other = sem.clone();
                tokio::spawn(async move { other.close() }).await.unwrap();
                greedy.await.unwrap();
            });
        }
    });
}

/// Yielding for others costs no place: what was admitted is kept meanwhile, and given back on a drop.
#[test]
fn rule_37_a_task_that_has_to_yield_keeps_what_it_was_admitted_for() {
    for queued in [false, true] {
        for sem in both(1, 4) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                for (at, end) in ["polled", "dropped", "late"].into_iter().enumerate() {
                    let before = 2 * at as u64;
                    let held = hold(&sem, 1);
                    let mut task = match end {
                        "late" => Task::new(sem.acquire_timeout(1, 20 * MS).into_owned()),
                        _ => Task::new(sem.acquire(1).into_owned()),
                    };
                    let mut held = Some(held);
                    if queued {
                        task.assert_pending();
                    }
                    drop(held.take());
                    use_up_budget().await;
                    task.assert_pending();
                    task.assert_pending();
                    assert_state(&sem, &format!("1/1 q0 a{} r0 c0", before + 2));
                    if end == "dropped" {
                        drop(task);
                    } else {
                        let pause = if end == "late" { 40 * MS } else { Duration::ZERO };
                        tokio::time::sleep(pause).await;
                        tokio::task::yield_now().await;
                        assert!(task.wakes() > 0);
                        assert_eq!(id(&task.granted()), before + 2);
                    }
                    assert_state(&sem, &format!("0/1 q0 a{} r0 c0", before + 2));
                    tokio::task::yield_now().await;
                }
            });
        }
    }
}

#[test]
fn rule_37_an_acquire_that_is_polled_after_its_end_panics_and_changes_nothing() {
    for sem in both(1, 1) {
        let mut task = Task::new(sem.acquire(1).into_owned());
        drop(task.granted());
        let mut refused = Task::new(sem.acquire(2).into_owned());
        let _ = refused.refused();
        let mut polls = || {
            let again = std::panic::AssertUnwindSafe(|| drop((task.poll(), refused.poll())));
            std::panic::catch_unwind(again).is_err()
        };
        assert!(polls());
        drop((task, refused));
        assert_state(&sem, "0/1 q0 a1 r1 c0");
    }
}

#[test]
fn rule_37_everything_can_be_shown_and_shows_nothing_but_numbers() {
    let sem = recorded(45, 1);
    let permit = hold(&sem, 42);
    assert!(format!("{permit:?}").contains("42"));
    assert!(format!("{sem:?}").contains("capacity: 45"));
    assert!(format!("{sem:?}").contains("acquired: 42"));
    assert!(format!("{:?}", sem.acquire(17)).contains("17"));
    assert!(format!("{:?}", sem.acquire_timeout(17, SECOND)).contains("17"));
    assert!(format!("{:?}", sem.wait_idle()).contains("WaitIdle"));
    let shared = permit.into_shared();
    assert!(format!("{shared:?}").contains("42"));
    let builder = Semaphore::builder(45).max_waiters(6).events(7);
    let shown = format!("{builder:?}");
    assert!(["45", "6", "7"].iter().all(|number| shown.contains(number)), "{shown}");
}

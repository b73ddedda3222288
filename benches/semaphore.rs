//! The local semaphore beside those of tokio, async-lock and futures-intrusive (fair).
//!
//! In nanoseconds per operation.

mod harness;

use std::future::Future;
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use harness::{Bench, Target, Unit};
use tower_slots::semaphore::Semaphore;

/// A semaphore under test. A weight other than 1 is only asked of those that have weights.
trait Contender: Send + Sync + Sized + 'static {
    const WEIGHTS: bool = true;
    type Permit<'a>: Send;

    fn new(capacity: usize) -> Self;
    fn try_acquire(&self, weight: usize) -> Option<Self::Permit<'_>>;
    fn acquire(&self, weight: usize) -> impl Future<Output = Self::Permit<'_>> + Send;
}

impl Contender for Semaphore {
    type Permit<'a> = tower_slots::semaphore::Permit;

    fn new(capacity: usize) -> Self {
        Self::builder(capacity as i64).max_waiters(10_000).build().expect("valid settings")
    }

    fn try_acquire(&self, weight: usize) -> Option<Self::Permit<'_>> {
        self.try_acquire(weight as i64).expect("a valid weight")
    }

    async fn acquire(&self, weight: usize) -> Self::Permit<'_> {
        self.acquire(weight as i64).await.expect("a valid weight")
    }
}

impl Contender for tokio::sync::Semaphore {
    type Permit<'a> = tokio::sync::SemaphorePermit<'a>;

    fn new(capacity: usize) -> Self {
        Self::new(capacity)
    }

    fn try_acquire(&self, weight: usize) -> Option<Self::Permit<'_>> {
        self.try_acquire_many(weight as u32).ok()
    }

    async fn acquire(&self, weight: usize) -> Self::Permit<'_> {
        self.acquire_many(weight as u32).await.expect("it is never closed")
    }
}

/// Tokio's with permits that borrow nothing, as ours do.
struct TokioOwned(Arc<tokio::sync::Semaphore>);

impl Contender for TokioOwned {
    type Permit<'a> = tokio::sync::OwnedSemaphorePermit;

    fn new(capacity: usize) -> Self {
        Self(Arc::new(tokio::sync::Semaphore::new(capacity)))
    }

    fn try_acquire(&self, weight: usize) -> Option<Self::Permit<'_>> {
        Arc::clone(&self.0).try_acquire_many_owned(weight as u32).ok()
    }

    async fn acquire(&self, weight: usize) -> Self::Permit<'_> {
        Arc::clone(&self.0).acquire_many_owned(weight as u32).await.expect("it is never closed")
    }
}

impl Contender for async_lock::Semaphore {
    const WEIGHTS: bool = false;
    type Permit<'a> = async_lock::SemaphoreGuard<'a>;

    fn new(capacity: usize) -> Self {
        Self::new(capacity)
    }

    fn try_acquire(&self, _: usize) -> Option<Self::Permit<'_>> {
        self.try_acquire()
    }

    async fn acquire(&self, _: usize) -> Self::Permit<'_> {
        self.acquire().await
    }
}

impl Contender for futures_intrusive::sync::Semaphore {
    type Permit<'a> = futures_intrusive::sync::SemaphoreReleaser<'a>;

    fn new(capacity: usize) -> Self {
        Self::new(true, capacity)
    }

    fn try_acquire(&self, weight: usize) -> Option<Self::Permit<'_>> {
        self.try_acquire(weight)
    }

    async fn acquire(&self, weight: usize) -> Self::Permit<'_> {
        self.acquire(weight).await
    }
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

/// Runs about `times` operations, and says how long they took and how many they were.
type Row<C> = fn(&Arc<C>, u32) -> (Duration, u32);

fn try_and_release<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    let start = Instant::now();
    for _ in 0..times {
        assert!(black_box(&**semaphore).try_acquire(1).is_some());
    }
    (start.elapsed(), times)
}

fn refused_try<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    let _all: Vec<_> = (0..CAPACITY).map(|_| semaphore.try_acquire(1)).collect();
    let start = Instant::now();
    for _ in 0..times {
        assert!(black_box(&**semaphore).try_acquire(1).is_none());
    }
    (start.elapsed(), times)
}

fn await_and_release<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    await_weight(semaphore, times, 1)
}

fn weight_4<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    await_weight(semaphore, times, 4)
}

fn await_weight<C: Contender>(semaphore: &Arc<C>, times: u32, weight: usize) -> (Duration, u32) {
    runtime().block_on(async {
        let start = Instant::now();
        for _ in 0..times {
            drop(black_box(&**semaphore).acquire(weight).await);
        }
        (start.elapsed(), times)
    })
}

fn two_threads<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    let start = Instant::now();
    let threads = [(); 2].map(|()| {
        let semaphore = Arc::clone(semaphore);
        std::thread::spawn(move || await_weight(&semaphore, times / 2, 1))
    });
    threads.into_iter().for_each(|thread| drop(thread.join()));
    (start.elapsed(), times)
}

fn sixty_four_tasks<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    runtime().block_on(async {
        let start = Instant::now();
        let tasks: Vec<_> = (0..64)
            .map(|_| {
                let semaphore = Arc::clone(semaphore);
                tokio::spawn(async move {
                    for _ in 0..times / 64 {
                        let _permit = semaphore.acquire(1).await;
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a task");
        }
        (start.elapsed(), times / 64 * 64)
    })
}

fn hand_over<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    let _rest: Vec<_> = (1..CAPACITY).map(|_| semaphore.try_acquire(1)).collect();
    let mut held = semaphore.try_acquire(1);
    let start = Instant::now();
    for _ in 0..times {
        let mut next = pin!(semaphore.acquire(1));
        assert!(poll(next.as_mut()).is_pending());
        drop(held.take());
        let Poll::Ready(permit) = poll(next) else { panic!("a release did not reach the next in line") };
        held = Some(permit);
    }
    (start.elapsed(), times)
}

fn queue_and_cancel<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    let _all: Vec<_> = (0..CAPACITY).map(|_| semaphore.try_acquire(1)).collect();
    let start = Instant::now();
    for _ in 0..times {
        assert!(poll(pin!(semaphore.acquire(1))).is_pending());
    }
    (start.elapsed(), times)
}

/// Those who wait go away in no order: every 1 021st.
fn cancel_of_4096<C: Contender>(semaphore: &Arc<C>, times: u32) -> (Duration, u32) {
    const WAITERS: usize = 4096;
    let _all: Vec<_> = (0..CAPACITY).map(|_| semaphore.try_acquire(1)).collect();
    let (mut elapsed, rounds) = (Duration::ZERO, (times / WAITERS as u32).max(1));
    for _ in 0..rounds {
        let mut waiters: Vec<_> = (0..WAITERS).map(|_| Some(Box::pin(semaphore.acquire(1)))).collect();
        for waiter in waiters.iter_mut().flatten() {
            assert!(poll(waiter.as_mut()).is_pending());
        }
        let start = Instant::now();
        (0..WAITERS).for_each(|n| drop(waiters[n * 1021 % WAITERS].take()));
        elapsed += start.elapsed();
    }
    (elapsed, rounds * WAITERS as u32)
}

const CAPACITY: usize = 4;
const NANOS: Unit = Unit::lower("ns");

/// A row, bound to one contender's semaphore.
type Contest = Box<dyn FnMut(u32) -> (Duration, u32)>;

/// The time of one operation, for each contender; their rounds alternate.
struct Rows<'a> {
    bench: &'a Bench,
    name: &'static str,
    ours: Contest,
    others: Vec<(&'static str, Contest)>,
}

impl<'a> Rows<'a> {
    fn new(bench: &'a Bench, name: &'static str, row: Row<Semaphore>) -> Self {
        Self { bench, name, ours: contest(row), others: Vec::new() }
    }

    fn with<C: Contender>(mut self, name: &'static str, weighted: bool, row: Row<C>) -> Self {
        if C::WEIGHTS || !weighted {
            self.others.push((name, contest(row)));
        }
        self
    }

    async fn run(mut self) {
        // All run as often as fills the time of ours.
        let (elapsed, times) = (self.ours)(10_000);
        let fill = self.bench.millis(20, 10).as_secs_f64() / elapsed.as_secs_f64();
        let times = (f64::from(times) * fill).max(self.bench.pick(10_000.0, 10_000.0, 100.0)) as u32;
        let nanos = |contest: &mut Contest| {
            let (elapsed, times) = contest(times);
            elapsed.as_secs_f64() * 1e9 / f64::from(times)
        };
        for (name, theirs) in &mut self.others {
            let ours = &mut self.ours;
            let rounds = self.bench.compare(async || nanos(ours), async || nanos(theirs)).await;
            let target = if *name == "tokio" { Target::Ratio(1.0) } else { Target::None };
            self.bench.row(
                &format!("semaphore: {}, {name}", self.name),
                NANOS,
                rounds.figures(|n| *n),
                target,
            );
        }
    }
}

fn contest<C: Contender>(row: Row<C>) -> Contest {
    let semaphore = Arc::new(C::new(CAPACITY));
    Box::new(move |times| row(&semaphore, times))
}

fn main() {
    let bench = Bench::start();
    macro_rules! row {
        ($name:literal, $row:ident, weighted = $weighted:literal) => {
            if bench.wants($name) {
                let rows = Rows::new(&bench, $name, $row)
                    .with::<tokio::sync::Semaphore>("tokio", $weighted, $row)
                    .with::<TokioOwned>("tokio owned", $weighted, $row)
                    .with::<async_lock::Semaphore>("async-lock", $weighted, $row)
                    .with::<futures_intrusive::sync::Semaphore>("intrusive", $weighted, $row);
                futures_util::FutureExt::now_or_never(rows.run());
            }
        };
    }
    row!("try + release", try_and_release, weighted = false);
    row!("await + release", await_and_release, weighted = false);
    row!("weight 4", weight_4, weighted = true);
    row!("two threads", two_threads, weighted = false);
    row!("64 tasks over 4", sixty_four_tasks, weighted = false);
    row!("hand-over", hand_over, weighted = false);
    row!("queue + cancel", queue_and_cancel, weighted = false);
    row!("cancel of 4096", cancel_of_4096, weighted = false);
    row!("refused try", refused_try, weighted = false);
}

//! The tasks beside the flights: one that keeps time, one that renews, one that reconnects.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{Endpoint, Found};
use super::driver::{Driver, MOST_WAIT, Ran};
use super::flight::{Doubt, Failed, lease_ms};
use super::news::News;
use super::script;
use super::state::{Home, Lane, State};
use super::table::Batch;
use crate::metrics::Operation;

/// How often to ask whether the server in use still is the right one.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So many renewal calls are out at a time.
const RENEWALS: usize = 8;

/// Starts the task that keeps time, for as long as the driver and the runtime live.
pub(super) fn spawn(handle: &Handle, driver: Weak<Driver>, wake: Arc<Notify>, home: u64) -> JoinHandle<()> {
    let renewals = handle.clone();
    handle.spawn(async move {
        if let Some(driver) = driver.upgrade() {
            driver.strand(home);
        }
        // Ticks that are missed, by a stopped process or a blocked runtime, are made up for by one.
        let mut next_tick = Instant::now();
        while let Some(driver) = driver.upgrade() {
            let Some(until) = keep_time(&driver, home, &mut next_tick, &renewals) else { break };
            drop(driver);
            match until {
                Some(until) => tokio::select! { () = wake.notified() => {}, () = sleep_until(until) => {} },
                None => wake.notified().await,
            }
        }
    })
}

/// Does what is due, and returns until when to sleep, or `None` if this is not the driver's home any
/// more.
fn keep_time(
    driver: &Arc<Driver>,
    home: u64,
    next_tick: &mut Instant,
    handle: &Handle,
) -> Option<Option<Instant>> {
    let (now, mut news) = (Instant::now(), News::default());
    let mut state = driver.lock();
    if !state.is_home(home) {
        return None;
    }
    // Not with the tick: until the next one, this task would find them due again and again.
    state.table.queue_due(now);
    let mut batches = Vec::new();
    let tick = state.tick;
    if *next_tick <= now || *next_tick > now + tick {
        *next_tick = now + tick;
        let can_send: Vec<_> = state.lanes.iter().map(Lane::can_send).collect();
        state.table.end_overdue(now, &mut news);
        batches = state.table.due_renewals(now, tick, &can_send, &mut news);
        state.show_backlog();
    }
    let waits = |lane: &usize| state.waiting_since(*lane).is_some_and(|since| since + MOST_WAIT <= now);
    let late: Vec<_> = (0..state.lanes.len()).filter(waits).collect();
    let until = sleep_time(&mut state, now, *next_tick);
    state.due = until;
    drop(state);
    news.deliver();
    driver.depart();
    for lane in late {
        driver.depart_late(handle, lane);
    }
    if !batches.is_empty() {
        // All of them from the start, for the task may end with its runtime at any time.
        let renewals: Vec<_> = batches.into_iter().map(|batch| Renewing::new(driver, home, batch)).collect();
        handle.spawn(stream::iter(renewals).for_each_concurrent(RENEWALS, renew));
    }
    Some(until)
}

fn sleep_time(state: &mut State, now: Instant, next_tick: Instant) -> Option<Instant> {
    state.dozing = state.table.is_empty();
    let queue = (0..state.lanes.len()).filter_map(|lane| state.waiting_since(lane)).min();
    state.watching_queue = queue.is_some();
    let mut until = (!state.dozing).then_some(next_tick);
    for next in [queue.map(|since| (since + MOST_WAIT).max(now + MOST_WAIT / 4)), state.table.next_later()]
        .into_iter()
        .flatten()
    {
        until = Some(until.map_or(next, |until| until.min(next)));
    }
    until
}

/// Renews one batch; its slots are released from the renewal also when this future is dropped.
async fn renew(mut renewing: Renewing) {
    let driver = &renewing.driver;
    let Some(batch) = &renewing.batch else { return };
    let Some((mut conn, stamp)) = driver.link_now(&batch.key, renewing.home) else { return };
    let lease_ms = lease_ms(&batch.terms);
    let deadline = stamp.now + batch.terms.timeout.min(batch.terms.lease / 4);
    let doubt = Doubt { until: stamp.server_at(deadline), epoch: stamp.epoch };
    renewing.doubt = Some(doubt);
    let write = |cmd: &mut ::redis::Cmd, alone| {
        script::write_renewal(cmd, &batch.key, alone, doubt.until, lease_ms, &batch.slots);
    };
    let Ran { reply, strayed } = driver.run(&mut conn, &batch.key, deadline, &script::RENEW, write).await;
    match reply.and_then(|reply| script::read_renewal(reply, batch.slots.len())) {
        Ok(reply) => {
            let mut news = News::default();
            let mut state = driver.lock();
            if !state.is_home(renewing.home) {
                return;
            }
            if !strayed {
                state.server_heard(stamp.epoch, reply.now, Instant::now());
            }
            state.table.renewed(batch, &reply, doubt, &mut news);
            drop(state);
            news.deliver();
            renewing.batch = None;
            driver.depart();
        }
        Err(error) => {
            batch.terms.meters.store_errors.get(Operation::Renew).get(error.kind()).add(1);
            let failed = Failed::from(error);
            if !failed.unknown {
                renewing.doubt = None;
            }
            if !strayed {
                driver.failed(&mut driver.lock(), &failed.error, stamp.epoch);
            }
        }
    }
}

struct Renewing {
    driver: Arc<Driver>,
    home: u64,
    batch: Option<Batch>,
    doubt: Option<Doubt>,
}

impl Renewing {
    fn new(driver: &Arc<Driver>, home: u64, batch: Batch) -> Self {
        Self { driver: Arc::clone(driver), home, batch: Some(batch), doubt: None }
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        if let Some(batch) = self.batch.take() {
            let mut state = self.driver.lock();
            // Else it was given up when the store moved to another runtime.
            if state.is_home(self.home) {
                state.table.not_renewed(&batch, self.doubt);
            }
            drop(state);
            self.driver.wake.notify_one();
        }
    }
}

/// Starts the task that looks for a working connection until it has one, after `wait`.
pub(super) fn spawn_recovery(
    home: &Home,
    driver: Weak<Driver>,
    lane: usize,
    endpoint: Endpoint,
    wait: Option<Duration>,
) {
    let id = home.id;
    home.handle.spawn(async move {
        let mut wait = wait;
        for tries in 1.. {
            if let Some(wait) = wait {
                sleep(wait).await;
            }
            let found = endpoint.find().await;
            let Some(driver) = driver.upgrade() else { return };
            if !driver.lock().is_home(id) {
                return; // one on the runtime of now looks for a connection there
            }
            wait = match found {
                Ok(Found::Server(conn, server)) => return driver.connected(lane, conn, server),
                #[cfg(feature = "redis-cluster")]
                Ok(Found::Shares(shares)) => driver.mapped(&shares),
                Err(error) => driver.not_connected(lane, &error, tries),
            };
            if wait.is_none() {
                return;
            }
        }
    });
}

/// Starts the task that leaves the connection `epoch` when its server is not the right one any more.
pub(super) fn spawn_watch(handle: &Handle, driver: Weak<Driver>, endpoint: Endpoint, epoch: u64) {
    handle.spawn(async move {
        loop {
            sleep(LOOK_EVERY).await;
            if !driver.upgrade().is_some_and(|driver| driver.uses(epoch)) {
                return;
            }
            if endpoint.has_moved().await
                && let Some(driver) = driver.upgrade()
            {
                return driver.leave(epoch);
            }
        }
    });
}

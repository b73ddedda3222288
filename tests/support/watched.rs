//! A store that tests look into.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;
use tower_slots::MemoryStore;
use tower_slots::store::{Claim, Grant, Key, Reply, SlotId, SlotStore, StoreError, Terms};

/// A memory store that keeps the keys of its claims and counts releases, and that holds its answers back
/// until they are let through, if it has a gate.
#[derive(Clone, Default)]
pub struct Watched {
    slots: MemoryStore,
    gate: Option<Arc<Semaphore>>,
    claimed: Arc<Mutex<Vec<Key>>>,
    released: Arc<AtomicUsize>,
}

impl Watched {
    /// With a gate that is shut.
    pub fn gated() -> Self {
        Self { gate: Some(Arc::new(Semaphore::new(0))), ..Self::default() }
    }

    /// Lets one answer through.
    pub fn let_through(&self) {
        self.gate.as_ref().expect("a gate").add_permits(1);
    }

    /// The key of each claim so far.
    pub fn keys(&self) -> Vec<String> {
        self.claimed.lock().unwrap().iter().map(|key| key.as_str().to_owned()).collect()
    }

    pub fn released(&self) -> usize {
        self.released.load(Ordering::SeqCst)
    }

    /// How many claims and releases there were.
    pub fn calls(&self) -> (usize, usize) {
        (self.claimed.lock().unwrap().len(), self.released())
    }
}

impl SlotStore for Watched {
    fn acquire(&self, claim: Claim) -> Reply<Result<Grant, StoreError>> {
        self.claimed.lock().unwrap().push(claim.key.clone());
        let answer = self.slots.acquire(claim);
        let Some(gate) = self.gate.clone() else { return answer };
        Reply::later(async move {
            gate.acquire().await.expect("an open gate").forget();
            answer.await
        })
    }

    fn release(&self, key: &Key, slot: SlotId) {
        self.released.fetch_add(1, Ordering::SeqCst);
        self.slots.release(key, slot);
    }

    fn release_confirmed(&self, key: &Key, slot: SlotId) -> Reply<Result<(), StoreError>> {
        self.released.fetch_add(1, Ordering::SeqCst);
        self.slots.release_confirmed(key, slot)
    }

    fn count(&self, key: &Key, terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        self.slots.count(key, terms)
    }

    fn drain(&self, key: &Key, terms: &Arc<Terms>) -> Reply<Result<u32, StoreError>> {
        self.slots.drain(key, terms)
    }

    fn flush(&self) -> Reply<()> {
        self.slots.flush()
    }
}

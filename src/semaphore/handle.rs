//! What keeps a gate alive: its handles, and the weight that is held.
//!
//! A permit outlives whatever it came from. Counting permits for that, as an `Arc` does, would double
//! the price of an acquire and a release: two more steps on a counter that all threads share. They are
//! counted already, by the weight that the gate says is acquired. So a gate owns itself until it has
//! neither a handle nor acquired weight, and a permit is a plain pointer.
//!
//! # Safety
//!
//! Pointers to a gate are followed here and nowhere else, and this is why it is there:
//!
//! 1. From [`Handle::new`] on the gate holds an `Arc` of itself. It is let go in one place,
//!    [`Life::keep`], under the lock, once the gate is deserted and no weight is acquired.
//! 2. A [`Handle`] is counted. The last one deserts the gate; the count does not rise from zero, since
//!    handles are made from handles.
//! 3. A [`Held`] is made for weight of 1 at least that the gate counts as acquired, and only its drop
//!    gives that back.
//! 4. Whoever gives weight back does not touch the gate after the step that does so: at an open gate
//!    the compare-and-swap is the last access, through a reference to the word alone; at a shut one an
//!    `Arc` is taken under the same lock, and outlives the unlocking.

#![allow(unsafe_code, reason = "a counted permit takes twice the time; see the module's docs")]

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use super::gate::{Gate, release};
use super::permit::PermitId;
use super::sync::{Arc, AtomicU64};

/// A gate's part in its own life; under its lock.
#[derive(Default)]
pub(super) struct Life {
    gate: Option<Arc<Gate>>,
    deserted: bool,
}

impl Life {
    pub(super) fn own(&mut self, gate: Arc<Gate>) {
        self.gate = Some(gate);
    }

    pub(super) fn desert(&mut self) {
        self.deserted = true;
    }

    /// The gate, for someone who is about to unlock it and whom nothing else keeps it for; for the
    /// last time if it is deserted and `idle`.
    pub(super) fn keep(&mut self, idle: bool) -> Option<Arc<Gate>> {
        if self.deserted && idle { self.gate.take() } else { self.gate.clone() }
    }
}

/// How many handles a gate has.
pub(super) struct Handles(AtomicU64);

impl Default for Handles {
    fn default() -> Self {
        Self(AtomicU64::new(1))
    }
}

/// A counted pointer to a gate.
pub(super) struct Handle(NonNull<Gate>);

// SAFETY: it gives out nothing but `&Gate`, and what it drops on whatever thread is a `Gate`.
unsafe impl Send for Handle where Gate: Send + Sync {}
// SAFETY: as above.
unsafe impl Sync for Handle where Gate: Send + Sync {}

impl Handle {
    pub(super) fn new(gate: Gate) -> Self {
        let gate = Arc::new(gate);
        gate.own(Arc::clone(&gate));
        Self(NonNull::from(&*gate))
    }

    /// For weight that this gate has admitted, and that nobody else gives back.
    #[inline]
    pub(super) fn held(&self, id: PermitId, weight: i64) -> Held {
        Held { gate: self.0, id, weight }
    }
}

impl Deref for Handle {
    type Target = Gate;

    #[inline]
    fn deref(&self) -> &Gate {
        // SAFETY: this handle is counted.
        let gate = unsafe { self.0.as_ref() };
        gate.alive.touch();
        gate
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // 2^64 clones take centuries: no overflow.
        self.handles.0.fetch_add(1, Relaxed);
        Self(self.0)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.handles.0.fetch_sub(1, AcqRel) == 1 {
            drop(self.desert());
        }
    }
}

/// Acquired weight, given back on drop.
pub(super) struct Held {
    gate: NonNull<Gate>,
    id: PermitId,
    weight: i64,
}

// SAFETY: as for `Handle`.
unsafe impl Send for Held where Gate: Send + Sync {}
// SAFETY: as for `Handle`.
unsafe impl Sync for Held where Gate: Send + Sync {}

impl Held {
    #[inline]
    pub(super) fn id(&self) -> PermitId {
        self.id
    }

    #[inline]
    pub(super) fn weight(&self) -> i64 {
        self.weight
    }
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the weight is acquired until the swap in `release` succeeds. What is left of the
        // gate here is a reference to an atomic, which, unlike one to the gate, promises nothing
        // about the memory after that.
        let (word, layout) = unsafe {
            let gate = self.gate.as_ptr();
            (*gate).alive.touch();
            (&(*gate).word, (*gate).layout)
        };
        if !release(word, layout, self.weight) {
            // SAFETY: still acquired, until this call takes the lock; it returns what keeps the gate
            // from then on, so that no reference is left when that is dropped.
            drop(unsafe { self.gate.as_ref() }.release_shut(self.id, self.weight));
        }
    }
}

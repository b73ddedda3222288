//! The primitives the semaphore is built on: those of `std`, or of a model checker in its own build.
//!
//! `Arc` stays that of `std`: what is checked is the protocol, not the count of handles.

#[cfg(not(all(test, any(slots_loom, slots_shuttle))))]
mod imp {
    pub(in super::super) use std::sync::atomic::AtomicU64;
    pub(in super::super) use std::sync::{Mutex, MutexGuard};
}

#[cfg(all(test, slots_shuttle))]
mod imp {
    pub(in super::super) use shuttle::sync::atomic::AtomicU64;
    pub(in super::super) use shuttle::sync::{Mutex, MutexGuard};
}

#[cfg(all(test, slots_loom))]
mod imp {
    pub(in super::super) use super::strict::{AtomicU64, load_by_adding_zero};
    pub(in super::super) use loom::sync::{Mutex, MutexGuard};
}

pub(super) use self::imp::*;

/// loom explores too few orders of a plain load before a compare-and-swap, and too many of a plain
/// store beside one. So a store is a swap here, and every model runs twice: with plain loads, which
/// may be stale, and with loads that add nothing, which take part in the order of writes.
#[cfg(all(test, slots_loom))]
mod strict {
    use std::cell::Cell;
    use std::sync::atomic::Ordering;

    thread_local! {
        static ADD_ZERO: Cell<bool> = const { Cell::new(false) };
    }

    /// Chooses how this thread's models load.
    pub(in super::super) fn load_by_adding_zero(yes: bool) {
        ADD_ZERO.set(yes);
    }

    #[derive(Debug)]
    pub(in super::super) struct AtomicU64(loom::sync::atomic::AtomicU64);

    impl AtomicU64 {
        pub(in super::super) fn new(value: u64) -> Self {
            Self(loom::sync::atomic::AtomicU64::new(value))
        }

        #[track_caller]
        pub(in super::super) fn load(&self, order: Ordering) -> u64 {
            if ADD_ZERO.get() { self.0.fetch_add(0, Ordering::AcqRel) } else { self.0.load(order) }
        }

        #[track_caller]
        pub(in super::super) fn store(&self, value: u64, order: Ordering) {
            self.0.swap(value, order);
        }

        #[track_caller]
        pub(in super::super) fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
            self.0.fetch_or(bits, order)
        }

        #[track_caller]
        pub(in super::super) fn compare_exchange_weak(
            &self,
            current: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            // A strong one: spurious failures would only add loops to explore.
            self.0.compare_exchange(current, new, success, failure)
        }
    }
}

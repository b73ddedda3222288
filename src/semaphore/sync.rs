//! The primitives the semaphore is built on: those of `std`, or of a model checker in its own build.
//!
//! An `Arc` that is not part of our own protocol stays that of `std`.

#[cfg(not(all(test, any(slots_loom, slots_shuttle))))]
mod imp {
    pub(in super::super) use std::sync::atomic::AtomicU64;
    pub(in super::super) use std::sync::{Arc, Mutex, MutexGuard};
}

#[cfg(all(test, slots_shuttle))]
mod imp {
    pub(in super::super) use shuttle::sync::atomic::AtomicU64;
    pub(in super::super) use shuttle::sync::{Arc, Mutex, MutexGuard};
}

#[cfg(all(test, slots_loom))]
mod imp {
    pub(in super::super) use super::strict::{Alive, AtomicU64, load_by_adding_zero};
    pub(in super::super) use loom::sync::{Arc, Mutex, MutexGuard};
}

/// Shows loom where a value is used, so that it finds a use after the end, and a value that has none.
#[cfg(not(all(test, slots_loom)))]
#[derive(Debug, Default)]
pub(super) struct Alive {}

#[cfg(not(all(test, slots_loom)))]
impl Alive {
    #[inline(always)]
    pub(super) fn touch(&self) {}
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
    pub(in super::super) struct Alive {
        uses: loom::cell::UnsafeCell<()>,
        _counted: loom::alloc::Track<()>,
    }

    // SAFETY: the cell holds nothing; loom keeps a record of who looks at it, in its one real thread.
    #[allow(unsafe_code, reason = "loom's cells are not Sync")]
    unsafe impl Sync for Alive {}

    impl Default for Alive {
        fn default() -> Self {
            Self { uses: loom::cell::UnsafeCell::new(()), _counted: loom::alloc::Track::new(()) }
        }
    }

    impl Alive {
        #[track_caller]
        pub(in super::super) fn touch(&self) {
            self.uses.with(|_| ());
        }
    }

    impl Drop for Alive {
        fn drop(&mut self) {
            self.uses.with_mut(|_| ());
        }
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
        pub(in super::super) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_add(value, order)
        }

        #[track_caller]
        pub(in super::super) fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_sub(value, order)
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

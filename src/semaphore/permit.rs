use std::fmt;
use std::sync::{Arc, PoisonError};

use super::error::DuplicateRelease;
use super::handle::Held;
use super::sync::Mutex;

/// The number of a permit: 1, 2, 3 … in the order in which a semaphore admitted.
///
/// Unique within one semaphore; zero means that there is no permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PermitId(u64);

impl PermitId {
    pub(super) const ZERO: Self = Self(0);

    #[inline]
    pub(super) fn new(id: u64) -> Self {
        Self(id)
    }

    /// The number.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0
    }

    /// Whether it is unset.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for PermitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Weight that is held until this is dropped or [released](Self::release).
///
/// A permit is worth its weight exactly once. It is neither `Clone` nor `Copy`, and `release` takes
/// it by value, so that a second release cannot be written:
///
/// ```compile_fail,E0382
/// # use tower_slots::semaphore::Semaphore;
/// let semaphore = Semaphore::builder(1).build().unwrap();
/// let permit = semaphore.try_acquire(1).unwrap().unwrap();
/// permit.release();
/// permit.release(); // error[E0382]: use of moved value: `permit`
/// ```
///
/// It borrows nothing: it may outlive the task that acquired it and every handle to the semaphore. It
/// stays valid after the semaphore was closed, and may be dropped anywhere, also outside a runtime.
/// There is no lease and no timer: a permit that is forgotten with [`std::mem::forget`], or in a cycle
/// of `Rc`s, keeps its weight, and the semaphore's memory, for good.
#[must_use = "the weight is released when the permit is dropped"]
pub struct Permit(pub(super) Held);

impl Permit {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> PermitId {
        self.0.id()
    }

    /// What it holds.
    #[must_use]
    pub fn weight(&self) -> i64 {
        self.0.weight()
    }

    /// Gives the weight back, as dropping does.
    #[inline]
    pub fn release(self) {
        drop(self);
    }

    /// The permit in a form that several owners can hold, and any of them release.
    pub fn into_shared(self) -> SharedPermit {
        let (id, weight) = (self.id(), self.weight());
        SharedPermit { shared: Arc::new(Shared { permit: Mutex::new(Some(self)), id, weight }) }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("id", &self.id())
            .field("weight", &self.weight())
            .finish_non_exhaustive()
    }
}

/// A [`Permit`] with several owners, any of whom may release it, once.
///
/// Clones are the same permit. The weight comes back with the first [`release`](Self::release), or
/// when the last clone is dropped.
///
/// ```
/// use tower_slots::semaphore::Semaphore;
///
/// let semaphore = Semaphore::builder(1).build()?;
/// let permit = semaphore.try_acquire(1)?.unwrap().into_shared();
/// let other = permit.clone();
/// assert!(permit.release().is_ok());
/// assert_eq!(other.release().unwrap_err().id, permit.id());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use = "the weight is released when the last clone is dropped"]
pub struct SharedPermit {
    shared: Arc<Shared>,
}

struct Shared {
    /// Taken by whoever releases first.
    permit: Mutex<Option<Permit>>,
    id: PermitId,
    weight: i64,
}

impl SharedPermit {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> PermitId {
        self.shared.id
    }

    /// What it holds, or held.
    #[must_use]
    pub fn weight(&self) -> i64 {
        self.shared.weight
    }

    /// Gives the weight back. Of any number of concurrent calls exactly one does.
    ///
    /// # Errors
    ///
    /// [`DuplicateRelease`] if the permit was released before, through this or another clone.
    pub fn release(&self) -> Result<(), DuplicateRelease> {
        let permit = self.shared.permit.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The lock is released by now: what follows may run code of others.
        permit.map(Permit::release).ok_or(DuplicateRelease { id: self.id() })
    }
}

impl fmt::Debug for SharedPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPermit")
            .field("id", &self.id())
            .field("weight", &self.weight())
            .finish_non_exhaustive()
    }
}

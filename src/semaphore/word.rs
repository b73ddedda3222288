//! How the counters of an open gate share one word.
//!
//! ```text
//! bit  0        shut: the word means nothing, the state behind the lock decides
//!      1        closed: the semaphore is, for good
//!      2..8     rejections since the gate was opened
//!      8..8+n   available weight, n bits: as many as the capacity needs
//!      8+n..    admissions since the base
//! ```

/// The state behind the lock decides.
pub(super) const SHUT: u64 = 1;
/// The semaphore is closed; always beside [`SHUT`].
pub(super) const CLOSED: u64 = 1 << 1;

const REJECTION: u64 = 1 << 2;
const REJECTIONS: u64 = 0b11_1111 << 2;
const AVAILABLE_SHIFT: u32 = 8;
const AVAILABLE_BITS: u32 = 32;

/// Where the fields of a semaphore's words are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    admission_shift: u32,
    /// What one admission adds.
    admission: u64,
}

impl Layout {
    /// For a gate that never opens.
    pub(super) const UNUSED: Self = Self { admission_shift: 0, admission: 1 };

    /// The layout for a capacity, unless it is too large to share a word. At least 24 bits are left
    /// for the admissions.
    pub(super) fn new(capacity: i64) -> Option<Self> {
        let bits = i64::BITS - capacity.leading_zeros();
        let admission_shift = AVAILABLE_SHIFT + bits;
        (bits <= AVAILABLE_BITS).then(|| Self { admission_shift, admission: 1 << admission_shift })
    }

    #[inline]
    pub(super) fn pack(self, available: i64, admissions: u64) -> u64 {
        admissions << self.admission_shift | (available as u64) << AVAILABLE_SHIFT
    }

    #[inline]
    pub(super) fn available(self, word: u64) -> i64 {
        (self.below_admissions(word) >> AVAILABLE_SHIFT) as i64
    }

    #[inline]
    pub(super) fn admissions(self, word: u64) -> u64 {
        word >> self.admission_shift
    }

    #[inline]
    pub(super) fn rejections(self, word: u64) -> u64 {
        (word & REJECTIONS) / REJECTION
    }

    /// The most admissions that a word can count.
    #[inline]
    pub(super) fn most_admissions(self) -> u64 {
        u64::MAX >> self.admission_shift
    }

    /// Whether a valid weight is available: the bits below it do not change the answer.
    #[inline]
    pub(super) fn fits(self, word: u64, weight: i64) -> bool {
        self.below_admissions(word) >= (weight as u64) << AVAILABLE_SHIFT
    }

    /// The word after one more admission, if it can count it.
    #[inline]
    pub(super) fn admit(self, word: u64, weight: i64) -> Option<u64> {
        let counted = word.checked_add(self.admission)?;
        Some(counted - ((weight as u64) << AVAILABLE_SHIFT))
    }

    /// The word after one more rejection, if it can count it.
    #[inline]
    pub(super) fn reject(self, word: u64) -> Option<u64> {
        (word & REJECTIONS != REJECTIONS).then_some(word + REJECTION)
    }

    /// The word after a release: what was held fits into its field again.
    #[inline]
    pub(super) fn release(self, word: u64, weight: i64) -> u64 {
        word + ((weight as u64) << AVAILABLE_SHIFT)
    }

    #[inline]
    fn below_admissions(self, word: u64) -> u64 {
        word & (self.admission - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch() {
        for capacity in [1, 2, 3, 255, 256, i64::from(u32::MAX)] {
            let layout = Layout::new(capacity).unwrap();
            let full = layout.pack(capacity, 0);
            let mut word = layout.admit(full, capacity).unwrap();
            assert!(!layout.fits(word, 1) && layout.fits(full, capacity));
            while let Some(next) = layout.reject(word) {
                word = next;
            }
            assert!(!layout.fits(word, 1));
            assert_eq!(
                (layout.available(word), layout.admissions(word), layout.rejections(word)),
                (0, 1, 63)
            );
            let word = layout.release(word, capacity);
            assert_eq!(
                (layout.available(word), layout.admissions(word), layout.rejections(word)),
                (capacity, 1, 63)
            );
            let last = layout.pack(capacity, layout.most_admissions());
            assert!(layout.admit(last, 1).is_none());
            assert_eq!(word & SHUT, 0);
        }
        assert!(Layout::new(i64::from(u32::MAX) + 1).is_none());
    }
}

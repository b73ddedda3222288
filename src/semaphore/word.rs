//! How the counters of an open gate share one word.
//!
//! ```text
//! bit  0          shut: the word means nothing, the state behind the lock decides
//!      1          closed: the semaphore is, for good
//!      2..2+r     rejections since the gate was opened, 6 to 16 bits
//!      2+r..      available weight: as many bits as the capacity needs, 32 at most
//!      the rest   admissions since the base, 24 bits at least
//! ```

/// The state behind the lock decides.
pub(super) const SHUT: u64 = 1;
/// The semaphore is closed; always beside [`SHUT`].
pub(super) const CLOSED: u64 = 1 << 1;

const REJECTION: u64 = 1 << 2;
const FLAGS: u32 = 2;
const MOST_REJECTION_BITS: u32 = 16;
const MOST_AVAILABLE_BITS: u32 = 32;
const LEAST_ADMISSION_BITS: u32 = 24;

/// Where the fields of a semaphore's words are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    available_shift: u32,
    admission_shift: u32,
    /// What a weight of one takes: a product costs the common cases less than a shift that varies.
    unit: u64,
    /// What one admission adds.
    admission: u64,
}

impl Layout {
    /// For a gate that never opens.
    pub(super) const UNUSED: Self =
        Self { available_shift: FLAGS, admission_shift: FLAGS, unit: REJECTION, admission: REJECTION };

    /// The layout for a capacity, unless it is too large to share a word.
    pub(super) fn new(capacity: i64) -> Option<Self> {
        let bits = i64::BITS - capacity.leading_zeros();
        if bits > MOST_AVAILABLE_BITS {
            return None;
        }
        let spare = u64::BITS - FLAGS - bits - LEAST_ADMISSION_BITS;
        let available_shift = FLAGS + spare.min(MOST_REJECTION_BITS);
        let admission_shift = available_shift + bits;
        Some(Self {
            available_shift,
            admission_shift,
            unit: 1 << available_shift,
            admission: 1 << admission_shift,
        })
    }

    #[inline]
    pub(super) fn pack(self, available: i64, admissions: u64) -> u64 {
        admissions << self.admission_shift | (available as u64) << self.available_shift
    }

    #[inline]
    pub(super) fn available(self, word: u64) -> i64 {
        (self.below_admissions(word) >> self.available_shift) as i64
    }

    #[inline]
    pub(super) fn admissions(self, word: u64) -> u64 {
        word >> self.admission_shift
    }

    #[inline]
    pub(super) fn rejections(self, word: u64) -> u64 {
        (word & self.full_rejections()) / REJECTION
    }

    /// The most admissions that a word can count.
    #[inline]
    pub(super) fn most_admissions(self) -> u64 {
        u64::MAX >> self.admission_shift
    }

    /// Whether a valid weight is available: the bits below it do not change the answer.
    #[inline]
    pub(super) fn fits(self, word: u64, weight: i64) -> bool {
        self.below_admissions(word) >= self.share(weight)
    }

    /// The word after one more admission, if it can count it.
    #[inline]
    pub(super) fn admit(self, word: u64, weight: i64) -> Option<u64> {
        let counted = word.checked_add(self.admission)?;
        Some(counted - self.share(weight))
    }

    /// The word after one more rejection, if it can count it.
    #[inline]
    pub(super) fn reject(self, word: u64) -> Option<u64> {
        let full = self.full_rejections();
        (word & full != full).then_some(word + REJECTION)
    }

    /// The word after a release: what was held fits into its field again.
    #[inline]
    pub(super) fn release(self, word: u64, weight: i64) -> u64 {
        word + self.share(weight)
    }

    /// What a weight, held or available, takes of the word.
    #[inline]
    fn share(self, weight: i64) -> u64 {
        weight as u64 * self.unit
    }

    /// The field of the rejections, full.
    #[inline]
    fn full_rejections(self) -> u64 {
        self.unit - REJECTION
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
        let most = i64::from(u32::MAX);
        for (capacity, rejections) in [(1, 65_535), (3, 65_535), (256, 65_535), (1 << 22, 32_767), (most, 63)]
        {
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
                (0, 1, rejections)
            );
            let word = layout.release(word, capacity);
            assert_eq!(
                (layout.available(word), layout.admissions(word), layout.rejections(word)),
                (capacity, 1, rejections)
            );
            let last = layout.pack(capacity, layout.most_admissions());
            assert!(layout.admit(last, 1).is_none());
            assert_eq!(word & SHUT, 0);
        }
        assert!(Layout::new(i64::from(u32::MAX) + 1).is_none());
    }
}

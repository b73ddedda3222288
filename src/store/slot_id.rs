use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::MAX_WEIGHT;

/// The id of one claim's slots: `slot_` and 32 lowercase hex digits.
///
/// A claim of weight *w* owns *w* members of the key's sorted set: its id and the *w* − 1 that
/// follow it in number. Ids made in one process are never given twice, and the process's own random
/// 64 bits keep those of different processes apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u128);

/// Room for the members of one claim between two ids.
const STEP: u64 = MAX_WEIGHT as u64;
/// Odd, so that no two numbers become one. A server's Lua looks at every other digit of a text only to
/// find it among those that it has: numbers that follow each other differ in few of these.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl SlotId {
    /// A new id.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "two default values must be equal; two ids never are")]
    pub fn new() -> Self {
        static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
        let number = next_number().wrapping_mul(SPREAD).wrapping_mul(STEP);
        Self(u128::from(*PROCESS) << 64 | u128::from(number))
    }

    /// The text, for the wire.
    #[cfg(feature = "redis")]
    pub(crate) fn to_bytes(self) -> [u8; 37] {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut text = *b"slot_00000000000000000000000000000000";
        for (at, digit) in text[5..].iter_mut().rev().enumerate() {
            *digit = HEX[(self.0 >> (4 * at)) as usize & 0xf];
        }
        text
    }

    /// The names of the `weight` members that a claim with this id owns.
    pub fn members(self, weight: u32) -> impl Iterator<Item = Self> {
        (0..u128::from(weight)).map(move |n| Self(self.0.wrapping_add(n)))
    }
}

/// A number that no other call in this process returns. Each thread takes a block of them at a time:
/// one counter for each call would be a cache line that all threads take from each other.
fn next_number() -> u64 {
    const BLOCK: u64 = 1024;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static MINE: Cell<u64> = const { Cell::new(0) };
    }
    let number = match MINE.get() {
        none_left if none_left % BLOCK == 0 => NEXT.fetch_add(BLOCK, Ordering::Relaxed),
        number => number,
    };
    MINE.set(number + 1);
    number
}

/// A map by slot id.
pub(crate) type SlotMap<V> = HashMap<SlotId, V, BuildHasherDefault<SlotIdHasher>>;

/// Nobody outside chooses the ids in a [`SlotMap`], so that it is enough to spread their bits.
#[derive(Debug, Default)]
pub(crate) struct SlotIdHasher(u64);

impl Hasher for SlotIdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u128(&mut self, id: u128) {
        let spread = ((id >> 64) as u64 ^ id as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The low bits of a product depend on those of the id alone, which often are zero.
        self.0 = spread ^ spread >> 32;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a slot id is one number");
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot_{:032x}", self.0)
    }
}

impl fmt::Debug for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not a slot id: `slot_` and 32 lowercase hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParseSlotIdError;

impl fmt::Display for ParseSlotIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a slot id: expected `slot_` and 32 lowercase hex digits")
    }
}

impl std::error::Error for ParseSlotIdError {}

impl FromStr for SlotId {
    type Err = ParseSlotIdError;

    fn from_str(text: &str) -> Result<Self, ParseSlotIdError> {
        let digits = text.strip_prefix("slot_").ok_or(ParseSlotIdError)?;
        let lowercase_hex = digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if digits.len() != 32 || !lowercase_hex {
            return Err(ParseSlotIdError);
        }
        u128::from_str_radix(digits, 16).map(Self).map_err(|_| ParseSlotIdError)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn reads_what_it_prints() {
        let id = SlotId::new();
        let text = id.to_string();
        assert_eq!(text.len(), 37);
        assert_eq!(text.parse(), Ok(id));
        assert_eq!(format!("{id:?}"), text);
        #[cfg(feature = "redis")]
        assert_eq!(id.to_bytes(), *text.as_bytes());
    }

    #[test]
    fn refuses_other_texts() {
        for text in [
            "",
            "slot_",
            "failopen",
            "slot_0",
            "slot_0123456789ABCDEF0123456789ABCDEF",
            "slot_+123456789abcdef0123456789abcdef",
        ] {
            assert_eq!(text.parse::<SlotId>(), Err(ParseSlotIdError), "{text}");
        }
        assert!(ParseSlotIdError.to_string().starts_with("not a slot id: "));
    }

    /// A map finds its group by the low bits of a hash, and the slot in it by the high ones.
    #[test]
    fn hashes_differ_in_low_and_high_bits() {
        use std::hash::BuildHasher;
        let spread = SlotMap::<()>::default();
        let hashes: Vec<u64> = (0..4096).map(|_| spread.hasher().hash_one(SlotId::new())).collect();
        let low: HashSet<u64> = hashes.iter().map(|hash| hash & 0xfff).collect();
        let high: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        // Hashes at random have some 2 589 and 128.
        assert!(low.len() > 2_000 && high.len() == 128, "{} and {}", low.len(), high.len());
    }

    #[test]
    fn ids_of_several_threads_differ() {
        let ids = |_| std::thread::spawn(|| (0..5000).map(|_| SlotId::new()).collect::<Vec<_>>());
        let threads: Vec<_> = (0..4).map(ids).collect();
        let ids: HashSet<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(ids.len(), 4 * 5000);
    }

    #[test]
    fn members_of_two_claims_never_meet() {
        let claims: Vec<_> = (0..1000).map(|_| SlotId::new()).collect();
        let members: HashSet<_> = claims.iter().flat_map(|slot| slot.members(MAX_WEIGHT)).collect();
        assert_eq!(members.len(), claims.len() * MAX_WEIGHT as usize);
    }
}

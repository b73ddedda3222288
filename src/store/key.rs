use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

/// The name under which a store keeps one id's slots: the limiter's prefix and the encoded id.
///
/// A cheap clone. `Debug` shows only a short hash.
#[derive(Clone)]
pub struct Key {
    name: Arc<str>,
    /// Made once: a request looks its key up several times. By a secret of this process, since ids come
    /// from outside.
    hash: u64,
}

impl Key {
    /// The key with exactly this name.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let name = name.into();
        Self { hash: SECRET.hash_one(&*name), name }
    }

    /// The whole name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Which of so many shards is its own: by bits that a [`KeyMap`] does not use.
    pub(crate) fn shard(&self, shards: usize) -> usize {
        (self.hash >> 32) as usize % shards
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.name == other.name
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(#{:08x})", short_hash(&self.name))
    }
}

/// Tells two names apart in a log without showing them.
pub(crate) fn short_hash(name: &str) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write(name.as_bytes());
    hasher.finish() as u32
}

/// A map by key, or by a key and something else that hashes as numbers do.
pub(crate) type KeyMap<V, K = Key> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;

/// Takes the hash that a [`Key`] has.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = self.0.rotate_left(5) ^ hash;
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a key's hash is one number");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use super::*;

    #[test]
    fn keys_are_their_names() {
        let (a, b) = (Key::new("sem:a"), Key::new("sem:b"));
        assert_eq!((a.as_str(), &a), ("sem:a", &Key::new("sem:a".to_owned())));
        assert_ne!(a, b);
        assert_eq!(BTreeSet::from([b.clone(), a.clone()]).first(), Some(&a));
        let mut map = KeyMap::default();
        map.insert(a.clone(), 1);
        assert_eq!((map.get(&Key::new("sem:a")), map.get(&b)), (Some(&1), None));
        let mut map = KeyMap::default();
        let second = std::time::Duration::from_secs(1);
        map.insert((a.clone(), second), 1);
        assert_eq!((map.get(&(a.clone(), second)), map.get(&(a.clone(), 2 * second))), (Some(&1), None));
        assert_eq!(format!("{a:?}"), format!("Key(#{:08x})", short_hash("sem:a")));
    }

    /// A map finds its group by the low bits of a hash, and the entry in it by the high ones.
    #[test]
    fn keys_spread_over_maps_and_shards() {
        let hashes: Vec<u64> = (0..4096)
            .map(|n| BuildHasherDefault::<KeyHasher>::default().hash_one(Key::new(format!("sem:{n}"))))
            .collect();
        let low: HashSet<u64> = hashes.iter().map(|hash| hash & 0xfff).collect();
        let high: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        // Hashes at random have some 2 589 and 128.
        assert!(low.len() > 2_400 && high.len() == 128, "{} and {}", low.len(), high.len());
        let mut shards = [0; 32];
        (0..4096).for_each(|n| shards[Key::new(format!("sem:{n}")).shard(32)] += 1);
        assert!(shards.iter().all(|keys| (64..256).contains(keys)), "{shards:?}");
    }
}

//! Values at stable indexes, with O(1) insertion and removal.

use std::mem;

/// No index.
pub(super) const NONE: u32 = u32::MAX;

/// Slots that are allocated at a time. Growing adds a chunk and moves no value, so that the longest
/// insertion under the lock is one small allocation.
const CHUNK: usize = 64;

/// An empty slab keeps its memory up to this many chunks.
const KEEP: usize = 16;

type Chunks<T> = Vec<Box<[Slot<T>]>>;

#[derive(Debug)]
enum Slot<T> {
    Used(T),
    /// The next free slot, or [`NONE`].
    Free(u32),
}

/// Invariant: the free slots form one list from `free`; `len` slots are used.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Chunks<T>,
    free: u32,
    len: usize,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: NONE, len: 0 }
    }
}

impl<T> Slab<T> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn insert(&mut self, value: T) -> u32 {
        if self.free == NONE {
            self.grow();
        }
        let index = self.free;
        match mem::replace(self.slot(index), Slot::Used(value)) {
            Slot::Free(next) => self.free = next,
            Slot::Used(_) => unreachable!("a used slot in the free list"),
        }
        self.len += 1;
        index
    }

    #[inline]
    pub(super) fn remove(&mut self, index: u32) -> T {
        let free = self.free;
        match mem::replace(self.slot(index), Slot::Free(free)) {
            Slot::Used(value) => {
                self.free = index;
                self.len -= 1;
                value
            }
            Slot::Free(_) => unreachable!("a slot was freed twice"),
        }
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> &T {
        let index = index as usize;
        match &self.chunks[index / CHUNK][index % CHUNK] {
            Slot::Used(value) => value,
            Slot::Free(_) => unreachable!("a free slot was read"),
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: u32) -> &mut T {
        match self.slot(index) {
            Slot::Used(value) => value,
            Slot::Free(_) => unreachable!("a free slot was read"),
        }
    }

    /// An empty slab in place of one that is empty, but has grown large: to be freed outside the lock.
    #[inline]
    pub(super) fn surplus(&mut self) -> Option<Box<Self>> {
        (self.len == 0 && self.chunks.len() > KEEP).then(|| Box::new(mem::take(self)))
    }

    pub(super) fn into_values(self) -> impl Iterator<Item = T> {
        self.chunks.into_iter().flatten().filter_map(|slot| match slot {
            Slot::Used(value) => Some(value),
            Slot::Free(_) => None,
        })
    }

    #[inline]
    fn slot(&mut self, index: u32) -> &mut Slot<T> {
        let index = index as usize;
        &mut self.chunks[index / CHUNK][index % CHUNK]
    }

    #[cold]
    fn grow(&mut self) {
        let start = self.chunks.len() * CHUNK;
        // Every slot belongs to a future of more than 16 bytes: memory ends before the indexes do.
        let end = u32::try_from(start + CHUNK).expect("more waiters than memory can hold");
        let next = (end - CHUNK as u32 + 1..end).chain([NONE]);
        self.chunks.push(next.map(Slot::Free).collect());
        self.free = end - CHUNK as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_are_stable_and_reused() {
        let mut slab = Slab::default();
        let indexes: Vec<u32> = (0..1000).map(|n| slab.insert(n)).collect();
        assert!(indexes.iter().enumerate().all(|(n, &index)| *slab.get(index) == n));
        for &index in &indexes[..500] {
            slab.remove(index);
        }
        let chunks = slab.chunks.len();
        for n in 0..500 {
            slab.insert(n);
        }
        assert_eq!((slab.len(), slab.chunks.len()), (1000, chunks));
        assert_eq!(slab.into_values().count(), 1000);
    }

    #[test]
    fn an_empty_slab_gives_its_memory_back() {
        let mut slab = Slab::default();
        let indexes: Vec<u32> = (0..10_000).map(|n| slab.insert(n)).collect();
        for index in indexes {
            slab.remove(index);
        }
        assert!(slab.surplus().is_some() && slab.surplus().is_none());
        assert_eq!(slab.insert(7), 0);
    }
}

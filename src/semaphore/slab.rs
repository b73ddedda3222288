//! Places at stable indexes, taken and freed in O(1).

use std::mem;

/// No index.
pub(super) const NONE: u32 = u32::MAX;

/// Places that are allocated at a time. Growing adds a chunk and moves nothing, so that the longest
/// step under the lock is one small allocation.
const CHUNK: usize = 64;

/// A slab that is not in use keeps its memory up to this many chunks: a burst that comes again and
/// again does not allocate again and again.
const KEEP: usize = 64;

#[derive(Debug, Default)]
struct Slot<T> {
    value: T,
    /// The next free slot, or [`NONE`].
    next: u32,
}

/// A value is not moved when its place is taken or freed: it is written and cleared where it is.
///
/// Invariant: the free slots form one list from `free`; `taken` counts the others.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Vec<Box<[Slot<T>; CHUNK]>>,
    free: u32,
    taken: usize,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: NONE, taken: 0 }
    }
}

impl<T: Default> Slab<T> {
    /// How many places are taken.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// A place, with whatever value was left in it.
    #[inline]
    pub(super) fn take(&mut self) -> u32 {
        if self.free == NONE {
            self.grow();
        }
        let index = self.free;
        self.free = self.slot(index).next;
        self.taken += 1;
        index
    }

    #[inline]
    pub(super) fn free(&mut self, index: u32) {
        self.slot(index).next = self.free;
        self.free = index;
        self.taken -= 1;
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> &T {
        let index = index as usize;
        &self.chunks[index / CHUNK][index % CHUNK].value
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: u32) -> &mut T {
        &mut self.slot(index).value
    }

    /// A slab that has grown large and is not in use any more, to be freed outside the lock; a new
    /// one is put in its place.
    #[inline]
    pub(super) fn surplus(&mut self) -> Option<Self> {
        (self.taken == 0 && self.chunks.len() > KEEP).then(|| mem::take(self))
    }

    /// The values of all places, taken or not.
    pub(super) fn into_values(self) -> impl Iterator<Item = T> {
        self.chunks.into_iter().flat_map(|chunk| *chunk).map(|slot| slot.value)
    }

    #[inline]
    fn slot(&mut self, index: u32) -> &mut Slot<T> {
        let index = index as usize;
        &mut self.chunks[index / CHUNK][index % CHUNK]
    }

    #[cold]
    fn grow(&mut self) {
        let start = self.chunks.len() * CHUNK;
        // Each place belongs to a future of more than 16 bytes: memory ends before the indexes do.
        let end = u32::try_from(start + CHUNK).expect("more waiters than memory can hold");
        let start = end - CHUNK as u32;
        self.chunks.push(Box::new(std::array::from_fn(|n| {
            let next = start + n as u32 + 1;
            Slot { value: T::default(), next: if next < end { next } else { NONE } }
        })));
        self.free = start;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(places: usize) -> (Slab<usize>, Vec<u32>) {
        let mut slab = Slab::default();
        let indexes = (0..places).map(|n| {
            let index = slab.take();
            *slab.get_mut(index) = n;
            index
        });
        let indexes = indexes.collect();
        (slab, indexes)
    }

    #[test]
    fn places_are_stable_and_taken_again() {
        let (mut slab, indexes) = filled(1000);
        assert!(indexes.iter().enumerate().all(|(n, &index)| *slab.get(index) == n));
        for &index in &indexes[..500] {
            slab.free(index);
        }
        let chunks = slab.chunks.len();
        for _ in 0..500 {
            slab.take();
        }
        assert_eq!((slab.taken(), slab.chunks.len()), (1000, chunks));
    }

    #[test]
    fn a_large_slab_gives_its_memory_back() {
        let (mut slab, indexes) = filled(10_000);
        assert!(slab.surplus().is_none());
        for index in indexes {
            slab.free(index);
        }
        assert!(slab.surplus().is_some() && slab.surplus().is_none());
        assert_eq!(slab.take(), 0);
    }
}

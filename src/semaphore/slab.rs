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

/// A place's neighbours in a list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Links {
    pub(super) before: u32,
    pub(super) after: u32,
}

#[derive(Debug)]
struct Slot<T> {
    value: T,
    /// Its holder's, while the place is taken; else `after` is the next free place.
    links: Links,
}

/// A value is not moved when its place is taken or freed: it is written and cleared where it is.
///
/// Invariant: the places below `fresh` are taken, or form one list from `free`; `taken` counts the
/// former.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Vec<Box<[Slot<T>; CHUNK]>>,
    free: u32,
    fresh: u32,
    taken: usize,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: NONE, fresh: 0, taken: 0 }
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
        self.taken += 1;
        let index = self.free;
        if index == NONE {
            return self.take_fresh();
        }
        self.free = self.links(index).after;
        index
    }

    #[inline]
    pub(super) fn free(&mut self, index: u32) {
        self.taken -= 1;
        if self.taken == 0 {
            // Starting over keeps those who come one after the other next to each other in memory.
            (self.free, self.fresh) = (NONE, 0);
        } else {
            self.links(index).after = mem::replace(&mut self.free, index);
        }
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

    /// The links of a taken place, for its holder to use.
    #[inline]
    pub(super) fn links(&mut self, index: u32) -> &mut Links {
        &mut self.slot(index).links
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

    #[inline]
    fn take_fresh(&mut self) -> u32 {
        let index = self.fresh;
        if index as usize == self.chunks.len() * CHUNK {
            self.grow();
        }
        self.fresh += 1;
        index
    }

    #[cold]
    fn grow(&mut self) {
        // Each place belongs to a future of more than 16 bytes: memory ends before the indexes do.
        assert!(self.fresh < NONE - CHUNK as u32, "more waiters than memory can hold");
        self.chunks.push(Box::new(std::array::from_fn(|_| {
            let links = Links { before: NONE, after: NONE };
            Slot { value: T::default(), links }
        })));
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
    fn an_empty_slab_starts_over() {
        let (mut slab, indexes) = filled(3);
        for index in [1, 2, 0] {
            slab.free(indexes[index]);
        }
        assert_eq!([(); 3].map(|()| slab.take()), [0, 1, 2]);
        slab.free(1);
        slab.free(0);
        assert_eq!([(); 3].map(|()| slab.take()), [0, 1, 3]);
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

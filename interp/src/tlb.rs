//! The software TLB: direct host pointers for pages of RAM that need no further look.
//!
//! What must be seen by someone (MMIO, watched pages, writes to code pages) is never entered, and
//! so takes the slow path.

/// Entries of one set, a power of two.
const ENTRIES: usize = 512;
/// Sets: see [`Set`].
const SETS: usize = 4;

/// Who accesses. Rights are checked when an entry is made, so each has its own entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Set {
    /// CPL 0 to 2, and implicit accesses by the processor; SMAP in force.
    Supervisor = 0,
    /// CPL 3.
    User = 1,
    /// CPL 0 to 2 with EFLAGS.AC set: SMAP suspended.
    SupervisorAc = 2,
    /// Nothing is ever entered: alignment checks are on.
    Never = 3,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Entry {
    /// Linear page address, with the generation in the low 12 bits.
    tag: u64,
    /// What to add to a linear address to get the host address.
    add: u64,
}

/// One TLB: for reads, for writes or for fetches.
#[derive(Debug)]
pub(crate) struct Tlb {
    entries: Box<[Entry; ENTRIES * SETS]>,
    generation: u64,
}

impl Tlb {
    pub(crate) fn new() -> Self {
        Self {
            entries: Box::new([Entry::default(); ENTRIES * SETS]),
            generation: 1,
        }
    }

    #[inline(always)]
    fn index(lin: u64, set: usize) -> usize {
        let page = (lin >> 12) as usize & (ENTRIES - 1);
        (set * ENTRIES + page) & (ENTRIES * SETS - 1)
    }

    /// The host address of `size` bytes at `lin`, if they lie in one page that is entered.
    #[inline(always)]
    pub(crate) fn find(&self, lin: u64, size: u64, set: usize) -> Option<u64> {
        let entry = &self.entries[Self::index(lin, set)];
        let tag = (lin.wrapping_add(size - 1) & !0xfff) | self.generation;
        (entry.tag == tag).then(|| lin.wrapping_add(entry.add))
    }

    /// Enters a page.
    pub(crate) fn insert(&mut self, lin: u64, set: Set, host_page: u64) {
        if set == Set::Never {
            return;
        }
        let page = lin & !0xfff;
        self.entries[Self::index(lin, set as usize)] = Entry {
            tag: page | self.generation,
            add: host_page.wrapping_sub(page),
        };
    }

    /// Forgets one page in all sets.
    pub(crate) fn evict(&mut self, lin: u64) {
        for set in 0..SETS {
            self.entries[Self::index(lin, set)].tag = 0;
        }
    }

    /// Forgets everything.
    pub(crate) fn flush(&mut self) {
        self.generation += 1;
        if self.generation > 0xfff {
            self.entries.fill(Entry::default());
            self.generation = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_found_until_flushed_and_not_across_its_page() {
        let mut tlb = Tlb::new();
        tlb.insert(0x7000, Set::User, 0x10_0000);
        assert_eq!(tlb.find(0x7ff8, 8, Set::User as usize), Some(0x10_0ff8));
        assert_eq!(tlb.find(0x7ff9, 8, Set::User as usize), None);
        assert_eq!(tlb.find(0x7ff8, 8, Set::Supervisor as usize), None);
        for _ in 0..0x1001 {
            tlb.flush();
            assert_eq!(tlb.find(0x7000, 1, Set::User as usize), None);
        }
    }
}

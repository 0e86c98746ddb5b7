//! The software TLB: direct host pointers for pages of RAM that need no further look.
//!
//! What must be seen by someone (MMIO, writes to code pages) is never entered, and so takes the slow
//! path. Pages that are watched are kept apart: the slow path finds them here, for what is not watched
//! in them.

#![expect(
    unsafe_code,
    reason = "every access of the guest looks here: without a bounds check"
)]

/// Entries of one set, a power of two.
const ENTRIES: usize = 512;
/// Watched pages that are kept, a power of two.
const WATCHED: usize = 8;
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

/// Where the entries of a [`Set`] begin, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First(usize);

impl Set {
    #[inline(always)]
    pub(crate) const fn first(self) -> First {
        First(self as usize * ENTRIES * size_of::<Entry>())
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Entry {
    /// Linear page address, with the generation in the low 12 bits.
    tag: u64,
    /// What to add to a linear address to get the host address.
    add: u64,
}

/// Binary logarithm of an entry's size.
const ENTRY_SHIFT: u32 = size_of::<Entry>().trailing_zeros();

/// What else is known of an entry's page.
#[derive(Clone, Copy, Debug, Default)]
struct More {
    /// Guest-physical page address.
    gpa: u64,
    /// For a global page its linear address, with the generation of global pages in the low 12
    /// bits; else 0.
    global: u64,
    /// Binary logarithm of the guest's page size.
    shift: u8,
}

/// A translated page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translation {
    /// Guest-physical address.
    pub(crate) gpa: u64,
    /// The page is global: a load of CR3 keeps it.
    pub(crate) global: bool,
    /// Binary logarithm of its size.
    pub(crate) shift: u8,
}

/// One TLB: for reads, for writes or for fetches.
#[derive(Debug)]
pub(crate) struct Tlb {
    entries: Box<[Entry; ENTRIES * SETS]>,
    more: Box<[More; ENTRIES * SETS]>,
    generation: u64,
    /// Generation of the global pages.
    globals: u64,
    /// Counts what was forgotten: as long as it is the same, so is what was found.
    epoch: u64,
    /// Where parts of large pages were entered: a bit for each 4 MiB, and for each GiB, modulo 1024.
    large: [u64; 16],
    huge: [u64; 16],
    /// Pages that are watched, with whose rights they were entered.
    watched: [(Entry, Set); WATCHED],
    /// The place of the next one.
    next_watched: usize,
}

fn bit(lin: u64, shift: u8) -> (usize, u64) {
    let n = lin >> shift & 0x3ff;
    ((n / 64) as usize, 1 << (n % 64))
}

impl Tlb {
    pub(crate) fn new() -> Self {
        Self {
            entries: Box::new([Entry::default(); ENTRIES * SETS]),
            more: Box::new([More::default(); ENTRIES * SETS]),
            generation: 1,
            globals: 1,
            epoch: 1,
            large: [0; 16],
            huge: [0; 16],
            watched: [(Entry::default(), Set::Never); WATCHED],
            next_watched: 0,
        }
    }

    #[inline(always)]
    fn index(lin: u64, set: First) -> usize {
        set.0 / size_of::<Entry>() + ((lin >> 12) as usize & (ENTRIES - 1))
    }

    /// The host address of `size` bytes at `lin`, if they lie in one page that is entered.
    #[inline(always)]
    pub(crate) fn find(&self, lin: u64, size: u64, set: First) -> Option<u64> {
        // SAFETY: a set has `ENTRIES` entries from its first one on.
        let entry = unsafe {
            let page = (lin >> (12 - ENTRY_SHIFT)) as usize & ((ENTRIES - 1) << ENTRY_SHIFT);
            &*self.entries.as_ptr().byte_add(set.0 + page)
        };
        let tag = (lin.wrapping_add(size - 1) & !0xfff) | self.generation;
        (entry.tag == tag).then(|| lin.wrapping_add(entry.add))
    }

    /// The translation of `lin`, if its page is entered; also a global page that was entered before
    /// the last load of CR3.
    pub(crate) fn known(&self, lin: u64, set: Set) -> Option<Translation> {
        let i = Self::index(lin, set.first());
        let (entry, more) = (&self.entries[i], &self.more[i]);
        let page = lin & !0xfff;
        let global = more.global == page | self.globals;
        (global || entry.tag == page | self.generation).then_some(Translation {
            gpa: more.gpa | (lin & 0xfff),
            global,
            shift: more.shift,
        })
    }

    /// Enters a page.
    pub(crate) fn insert(&mut self, lin: u64, set: Set, host_page: u64, t: Translation) {
        if set == Set::Never {
            return;
        }
        let page = lin & !0xfff;
        let i = Self::index(lin, set.first());
        self.entries[i] = Entry {
            tag: page | self.generation,
            add: host_page.wrapping_sub(page),
        };
        self.more[i] = More {
            gpa: t.gpa & !0xfff,
            global: if t.global { page | self.globals } else { 0 },
            shift: t.shift,
        };
        if t.shift > 12 {
            let (map, shift) = match t.shift {
                30 => (&mut self.huge, 30),
                _ => (&mut self.large, 22),
            };
            let (word, mask) = bit(lin, shift);
            map[word] |= mask;
        }
    }

    /// Keeps a page that is watched: [`Tlb::find`] does not find it.
    pub(crate) fn insert_watched(&mut self, lin: u64, set: Set, host_page: u64) {
        if set == Set::Never {
            return;
        }
        let page = lin & !0xfff;
        let entry = Entry {
            tag: page | self.generation,
            add: host_page.wrapping_sub(page),
        };
        self.watched[self.next_watched] = (entry, set);
        self.next_watched = (self.next_watched + 1) % WATCHED;
    }

    /// As [`Tlb::find`], in pages that are watched.
    pub(crate) fn find_watched(&self, lin: u64, size: u64, set: Set) -> Option<u64> {
        let tag = (lin.wrapping_add(size - 1) & !0xfff) | self.generation;
        let same = lin.wrapping_add(size - 1) & !0xfff == lin & !0xfff;
        let found = self.watched.iter().find(|(e, s)| e.tag == tag && *s == set);
        found
            .filter(|_| same)
            .map(|(entry, _)| lin.wrapping_add(entry.add))
    }

    fn forget_watched(&mut self) {
        self.watched = [(Entry::default(), Set::Never); WATCHED];
    }

    /// What was found stays good until this changes; never 0.
    #[inline(always)]
    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Forgets the page that `lin` lies in, of whatever size, in all sets.
    pub(crate) fn evict(&mut self, lin: u64) {
        self.epoch += 1;
        self.forget_watched();
        for set in (0..SETS).map(|n| First(n * ENTRIES * size_of::<Entry>())) {
            let i = Self::index(lin, set);
            self.entries[i].tag = 0;
            self.more[i].global = 0;
        }
        let entered = |map: &[u64; 16], shift| {
            let (word, mask) = bit(lin, shift);
            map[word] & mask != 0
        };
        if !entered(&self.large, 22) && !entered(&self.huge, 30) {
            return;
        }
        for (entry, more) in self.entries.iter_mut().zip(self.more.iter_mut()) {
            if more.shift > 12 && (entry.tag ^ lin) >> more.shift == 0 {
                entry.tag = 0;
            }
            if more.shift > 12 && (more.global ^ lin) >> more.shift == 0 {
                more.global = 0;
            }
        }
    }

    /// Forgets all but global pages.
    pub(crate) fn flush_locals(&mut self) {
        self.epoch += 1;
        self.generation += 1;
        if self.generation > 0xfff {
            self.entries.fill(Entry::default());
            self.forget_watched();
            self.generation = 1;
        }
    }

    /// Forgets everything.
    pub(crate) fn flush(&mut self) {
        self.flush_locals();
        self.large = [0; 16];
        self.huge = [0; 16];
        self.globals += 1;
        if self.globals > 0xfff {
            self.more.fill(More::default());
            self.globals = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_found_until_flushed_and_not_across_its_page() {
        let mut tlb = Tlb::new();
        tlb.insert(0x7000, Set::User, 0x10_0000, page(0x3000, false, 12));
        assert_eq!(tlb.find(0x7ff8, 8, Set::User.first()), Some(0x10_0ff8));
        assert_eq!(tlb.find(0x7ff9, 8, Set::User.first()), None);
        assert_eq!(tlb.find(0x7ff8, 8, Set::Supervisor.first()), None);
        for _ in 0..0x1001 {
            let epoch = tlb.epoch();
            tlb.flush();
            assert_eq!(tlb.find(0x7000, 1, Set::User.first()), None);
            assert_ne!(tlb.epoch(), epoch);
        }
    }

    #[test]
    fn watched_pages_are_found_apart_until_flushed_or_evicted() {
        let mut tlb = Tlb::new();
        let find = |tlb: &Tlb, lin, set| tlb.find_watched(lin, 8, set);
        tlb.insert_watched(0x7000, Set::User, 0x10_0000);
        assert_eq!(tlb.find(0x7000, 8, Set::User.first()), None);
        assert_eq!(find(&tlb, 0x7ff8, Set::User), Some(0x10_0ff8));
        assert_eq!(find(&tlb, 0x7ff9, Set::User), None, "across its end");
        assert_eq!(find(&tlb, 0x6ff9, Set::User), None, "across its start");
        assert_eq!(find(&tlb, 0x7000, Set::Supervisor), None);
        for _ in 0..0x1001 {
            let epoch = tlb.epoch();
            tlb.flush_locals();
            assert_eq!(find(&tlb, 0x7000, Set::User), None);
            assert_ne!(tlb.epoch(), epoch);
        }
        tlb.insert_watched(0x7000, Set::User, 0x10_0000);
        let epoch = tlb.epoch();
        tlb.evict(0x9000);
        assert_eq!(find(&tlb, 0x7000, Set::User), None);
        assert_ne!(tlb.epoch(), epoch);
        tlb.insert_watched(0x7000, Set::Never, 0x10_0000);
        assert_eq!(find(&tlb, 0x7000, Set::Never), None);
    }

    fn page(gpa: u64, global: bool, shift: u8) -> Translation {
        Translation { gpa, global, shift }
    }

    fn gpa(tlb: &Tlb, lin: u64) -> Option<u64> {
        tlb.known(lin, Set::Supervisor).map(|t| t.gpa)
    }

    #[test]
    fn global_pages_stay_until_all_is_flushed() {
        let mut tlb = Tlb::new();
        tlb.insert(0x7000, Set::Supervisor, 0x10_0000, page(0x3000, true, 12));
        tlb.insert(0x8000, Set::Supervisor, 0x11_0000, page(0x4000, false, 12));
        for _ in 0..0x1001 {
            tlb.flush_locals();
            assert_eq!((gpa(&tlb, 0x7123), gpa(&tlb, 0x8000)), (Some(0x3123), None));
            assert_eq!(
                tlb.find(0x7000, 1, Set::Supervisor.first()),
                None,
                "only after it was entered again"
            );
        }
        tlb.flush();
        assert_eq!(gpa(&tlb, 0x7000), None);
    }

    #[test]
    fn evicting_an_address_forgets_all_of_its_large_page() {
        let mut tlb = Tlb::new();
        let (large, next, huge) = (0x4020_0000, 0x4040_0000, 0x8000_0000);
        tlb.insert(large + 0x5000, Set::Supervisor, 0, page(0x5000, true, 21));
        tlb.insert(next + 0x6000, Set::Supervisor, 0, page(0x6000, false, 21));
        tlb.insert(
            huge + 0x12_3000,
            Set::Supervisor,
            0,
            page(0x7000, false, 30),
        );
        tlb.evict(large + 0x1f_0000);
        assert_eq!(gpa(&tlb, large + 0x5000), None);
        assert_eq!(gpa(&tlb, next + 0x6000), Some(0x6000));
        tlb.evict(huge + 0x3000_0000);
        assert_eq!(gpa(&tlb, huge + 0x12_3000), None);
    }
}

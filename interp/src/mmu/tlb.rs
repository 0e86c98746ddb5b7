//! The software TLB: direct host pointers to RAM pages without side effects.
//!
//! Pages whose accesses must be intercepted (MMIO, writes to code pages) are never entered, so that
//! these accesses take the slow path. The fast path looks up a single entry. A page that a new one
//! displaces moves to the second way of that entry; the slow path moves it back without a page
//! walk, so that two hot pages that share an entry cost an exchange. Pages that contain a
//! watchpoint are kept in a separate list, in which the slow path looks up accesses that miss the
//! watchpoint.

#![expect(
    unsafe_code,
    reason = "entries are read without a bounds check, and become references to guest memory"
)]

use crate::memory::{GuestBytes, GuestBytesMut, GuestMut, GuestRef};
use crate::width::Width;

/// Entries of one set, a power of two.
const ENTRIES: usize = 512;
/// Number of entries for pages with watchpoints, a power of two.
const WATCHED: usize = 8;
/// Number of values of [`TlbSet`].
const SETS: usize = 5;
/// Number of generations, which are tags of 12 bits.
const GENERATIONS: u64 = 1 << 12;
/// Number of process contexts whose pages can be entered at the same time.
pub(crate) const CONTEXTS: usize = 16;

/// The rights of an access.
///
/// They are checked when an entry is made, so each has its own set of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum TlbSet {
    /// CPL 0 to 2, and implicit accesses by the processor; SMAP is in force.
    Supervisor = 0,
    /// CPL 3.
    User = 1,
    /// CPL 0 to 2 with RFLAGS.AC set, which suspends SMAP.
    SupervisorNoSmap = 2,
    /// CPL 3 with alignment checks on. Nothing is entered, so that every access is checked.
    UserAligned = 3,
    /// Accesses to the DS save area by the processor: neither SMAP nor PKRU applies (rule DS-04).
    DebugStore = 4,
}

/// Where a process context has the entries of a set.
///
/// It is the offset of the entry of page 0, in bytes. The entry of another page is found by XOR.
/// Invariant: it is within one of the [`SETS`] sets, and a multiple of the size of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetOffset(usize);

impl SetOffset {
    /// Offset in a set whose entries are never valid.
    pub(crate) const EMPTY: Self = TlbSet::UserAligned.offset(0);
}

impl TlbSet {
    const ALL: [Self; SETS] = [
        Self::Supervisor,
        Self::User,
        Self::SupervisorNoSmap,
        Self::UserAligned,
        Self::DebugStore,
    ];

    /// Returns where a process context has the set's entries.
    ///
    /// Processes use the same linear addresses. So the entries of pages that are rarely global
    /// depend on the context.
    #[inline(always)]
    pub(crate) const fn offset(self, context: usize) -> SetOffset {
        /// Entries between those of page 0 in two contexts.
        const STRIDE: usize = 37;
        let first = match self {
            Self::User | Self::SupervisorNoSmap => context * STRIDE % ENTRIES,
            Self::Supervisor | Self::UserAligned | Self::DebugStore => 0,
        };
        SetOffset((self as usize * ENTRIES + first) << ENTRY_SHIFT)
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct TlbEntry {
    /// Linear page address, with the generation in the low 12 bits.
    tag: u64,
    /// The difference between the host address and the linear address.
    add: u64,
}

/// Binary logarithm of the size of an entry.
const ENTRY_SHIFT: u32 = size_of::<TlbEntry>().trailing_zeros();

/// The part of an entry that the fast path does not need.
#[derive(Clone, Copy, Debug, Default)]
struct TlbEntryDetails {
    /// Guest-physical page address.
    gpa: u64,
    /// For a global page its linear address, with the generation of global pages in the low 12
    /// bits; else 0.
    global: u64,
    /// Binary logarithm of the guest's page size.
    shift: u8,
}

/// A translated address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Translation {
    /// Guest-physical address.
    pub(crate) gpa: u64,
    /// The page is global: a load of CR3 keeps its translation.
    pub(crate) global: bool,
    /// Binary logarithm of the size of the guest's page.
    pub(crate) shift: u8,
}

/// The common part of the TLBs for reads, writes and fetches.
#[derive(Debug)]
pub(crate) struct Tlb {
    entries: Box<[TlbEntry; ENTRIES * SETS]>,
    details: Box<[TlbEntryDetails; ENTRIES * SETS]>,
    /// The second way: the page that was displaced from each entry.
    ///
    /// Never the page of that entry, unless it is that of another process context.
    displaced: Box<[(TlbEntry, TlbEntryDetails); ENTRIES * SETS]>,
    /// The generation of the current process context, 1 to 0xfff.
    generation: u64,
    /// The newest generation of any context.
    newest: u64,
    /// The generation of each process context; 0 if none of its pages are entered.
    contexts: [u64; CONTEXTS],
    /// Index of the current process context.
    current: usize,
    /// Generation of the global pages, 1 to 0xfff.
    globals: u64,
    /// Number of times that the generations of all contexts became invalid.
    renewals: u64,
    epoch: u64,
    /// Bit maps of the regions where parts of large pages were entered.
    ///
    /// One bit stands for each 4 MiB, and one for each GiB, modulo 1024.
    large: [u64; 16],
    huge: [u64; 16],
    /// Pages with watchpoints, and the rights with which they were entered.
    watched: [(TlbEntry, TlbSet); WATCHED],
    /// Index of the watched page to replace next.
    next_watched: usize,
}

/// Word and bit of a map with a bit for each 2^`shift` bytes.
fn map_bit(lin: u64, shift: u8) -> (usize, u64) {
    let n = lin >> shift & 0x3ff;
    ((n / 64) as usize, 1 << (n % 64))
}

impl Tlb {
    pub(crate) fn new() -> Self {
        Self {
            entries: Box::new([TlbEntry::default(); ENTRIES * SETS]),
            details: Box::new([TlbEntryDetails::default(); ENTRIES * SETS]),
            displaced: Box::new([Default::default(); ENTRIES * SETS]),
            generation: 1,
            newest: 1,
            contexts: std::array::from_fn(|context| u64::from(context == 0)),
            current: 0,
            globals: 1,
            renewals: 0,
            epoch: 1,
            large: [0; 16],
            huge: [0; 16],
            watched: [(TlbEntry::default(), TlbSet::UserAligned); WATCHED],
            next_watched: 0,
        }
    }

    #[inline(always)]
    fn index(lin: u64, set: SetOffset) -> usize {
        (set.0 >> ENTRY_SHIFT) ^ ((lin >> 12) as usize & (ENTRIES - 1))
    }

    /// Returns where the current process context has the entries of a set.
    pub(crate) const fn offset(&self, set: TlbSet) -> SetOffset {
        set.offset(self.current)
    }

    /// Returns the host address of `size` bytes at `lin`, if their page is entered.
    ///
    /// They must lie in one page; otherwise returns `None`.
    #[inline(always)]
    fn find(&self, lin: u64, size: u64, set: SetOffset) -> Option<u64> {
        // SAFETY: `set` is within a set, whose size is a power of two, and the XOR changes only the
        // position in the set.
        let entry = unsafe {
            let page = (lin >> (12 - ENTRY_SHIFT)) as usize & ((ENTRIES - 1) << ENTRY_SHIFT);
            &*self.entries.as_ptr().byte_add(set.0 ^ page)
        };
        let tag = (lin.wrapping_add(size - 1) & !0xfff) | self.generation;
        (entry.tag == tag).then(|| lin.wrapping_add(entry.add))
    }

    /// Returns the translation of `lin`, if its page is entered.
    ///
    /// This includes a global page that was entered in another process context.
    pub(crate) fn translation(&self, lin: u64, set: TlbSet) -> Option<Translation> {
        let i = Self::index(lin, self.offset(set));
        let page = lin & !0xfff;
        let ways = [(self.entries[i], self.details[i]), self.displaced[i]];
        ways.iter().find_map(|(entry, details)| {
            let global = details.global == page | self.globals;
            (global || entry.tag == page | self.generation).then_some(Translation {
                gpa: details.gpa | (lin & 0xfff),
                global,
                shift: details.shift,
            })
        })
    }

    /// Moves the page of `lin` back to the first way, if it was displaced.
    ///
    /// It is exchanged with the page that displaced it, so that [`Tlb::find`] finds it. Returns
    /// whether the page is entered.
    pub(crate) fn promote(&mut self, lin: u64, set: TlbSet) -> bool {
        let i = Self::index(lin, self.offset(set));
        let tag = (lin & !0xfff) | self.generation;
        if self.entries[i].tag == tag {
            return true;
        }
        if self.displaced[i].0.tag != tag {
            return false;
        }
        let page = (self.entries[i], self.details[i]);
        (self.entries[i], self.details[i]) = std::mem::replace(&mut self.displaced[i], page);
        true
    }

    /// Whether an entry is valid.
    ///
    /// Its page is entered for a process context, or is global.
    fn is_live(&self, entry: &TlbEntry, details: &TlbEntryDetails) -> bool {
        let generation = entry.tag & 0xfff;
        (generation != 0 && self.contexts.contains(&generation))
            || details.global & 0xfff == self.globals
    }

    /// Moves the page of an entry into the second way, before `page` is entered.
    fn displace(&mut self, i: usize, page: u64) {
        let is_page = |(entry, details): &(TlbEntry, TlbEntryDetails)| {
            entry.tag == page | self.generation || (details.global ^ page) >> 12 == 0
        };
        let old = (self.entries[i], self.details[i]);
        if self.is_live(&old.0, &old.1) && !is_page(&old) {
            self.displaced[i] = old;
        } else if is_page(&self.displaced[i]) {
            self.displaced[i] = Default::default();
        }
    }

    /// Enters a page whose exposed host address is `host_page`.
    fn insert(&mut self, lin: u64, set: TlbSet, host_page: u64, t: Translation) {
        if set == TlbSet::UserAligned {
            return;
        }
        let entry = self.entry(lin, host_page);
        let page = lin & !0xfff;
        let i = Self::index(lin, self.offset(set));
        self.displace(i, page);
        self.entries[i] = entry;
        self.details[i] = TlbEntryDetails {
            gpa: t.gpa & !0xfff,
            global: if t.global { page | self.globals } else { 0 },
            shift: t.shift,
        };
        if t.shift > 12 {
            debug_assert!(matches!(t.shift, 21 | 22 | 30));
            let (map, shift) = match t.shift {
                30 => (&mut self.huge, 30),
                _ => (&mut self.large, 22),
            };
            let (word, mask) = map_bit(lin, shift);
            map[word] |= mask;
        }
    }

    fn entry(&self, lin: u64, host_page: u64) -> TlbEntry {
        debug_assert!(host_page & 0xfff == 0, "entries are made of pages");
        debug_assert!((1..GENERATIONS).contains(&self.generation));
        let page = lin & !0xfff;
        TlbEntry {
            tag: page | self.generation,
            add: host_page.wrapping_sub(page),
        }
    }

    /// Enters a page that contains a watchpoint: [`Tlb::find`] does not find it.
    fn insert_watched(&mut self, lin: u64, set: TlbSet, host_page: u64) {
        if set == TlbSet::UserAligned {
            return;
        }
        self.watched[self.next_watched] = (self.entry(lin, host_page), set);
        self.next_watched = (self.next_watched + 1) % WATCHED;
    }

    /// Like [`Tlb::find`], among the pages that contain a watchpoint.
    fn find_watched(&self, lin: u64, size: u64, set: TlbSet) -> Option<u64> {
        let tag = (lin.wrapping_add(size - 1) & !0xfff) | self.generation;
        let same = lin.wrapping_add(size - 1) & !0xfff == lin & !0xfff;
        let found = self.watched.iter().find(|(e, s)| e.tag == tag && *s == set);
        found
            .filter(|_| same)
            .map(|(entry, _)| lin.wrapping_add(entry.add))
    }

    fn forget_watched(&mut self) {
        self.watched = [(TlbEntry::default(), TlbSet::UserAligned); WATCHED];
    }

    /// Returns a number that changes whenever a page is evicted. Never 0.
    ///
    /// A host address from the TLB is valid until then.
    #[inline(always)]
    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns a number that depends on which pages may be entered.
    ///
    /// It changes with each flush and each change of the process context, but not when single pages
    /// are evicted. When a context becomes current again, the number is the one that it had before,
    /// unless its pages were evicted in the meantime.
    pub(crate) const fn stamp(&self) -> u64 {
        self.renewals << 12 | self.generation
    }

    /// Evicts the page that contains `lin`, of any size, from all sets and process contexts.
    ///
    /// Returns whether that page may be large.
    pub(crate) fn evict(&mut self, lin: u64) -> bool {
        self.epoch += 1;
        self.forget_watched();
        for context in 0..CONTEXTS {
            for set in TlbSet::ALL {
                self.evict_at(Self::index(lin, set.offset(context)), lin >> 12);
            }
        }
        let is_in = |map: &[u64; 16], shift| {
            let (word, mask) = map_bit(lin, shift);
            map[word] & mask != 0
        };
        if !is_in(&self.large, 22) && !is_in(&self.huge, 30) {
            return false;
        }
        let (mut large_left, mut huge_left) = (false, false);
        let first = self.entries.iter_mut().zip(self.details.iter_mut());
        let second = self
            .displaced
            .iter_mut()
            .map(|(entry, details)| (entry, details));
        for (entry, details) in first.chain(second).filter(|(_, d)| d.shift > 12) {
            if (entry.tag ^ lin) >> details.shift == 0 {
                entry.tag = 0;
            }
            if (details.global ^ lin) >> details.shift == 0 {
                details.global = 0;
            }
            let (left, shift) = match details.shift {
                30 => (&mut huge_left, 30),
                _ => (&mut large_left, 22),
            };
            let is_here = |tag: u64| tag != 0 && map_bit(tag, shift) == map_bit(lin, shift);
            *left |= is_here(entry.tag) || is_here(details.global);
        }
        // A region without parts of large pages need not be searched again: the caller forgets all that it
        // knows of pages in any case.
        for (map, shift, left) in [
            (&mut self.large, 22, large_left),
            (&mut self.huge, 30, huge_left),
        ] {
            let (word, mask) = map_bit(lin, shift);
            if !left {
                map[word] &= !mask;
            }
        }
        true
    }

    /// Evicts a page from both ways of an entry.
    fn evict_at(&mut self, i: usize, page: u64) {
        if self.entries[i].tag >> 12 == page {
            self.entries[i].tag = 0;
        }
        if self.details[i].global >> 12 == page {
            self.details[i].global = 0;
        }
        let (entry, details) = &self.displaced[i];
        if entry.tag >> 12 == page || details.global >> 12 == page {
            self.displaced[i] = Default::default();
        }
    }

    /// Makes a process context current.
    ///
    /// Pages that were entered for it are found again if `keep`. Otherwise, all of them but global
    /// ones are evicted.
    pub(crate) fn select(&mut self, context: usize, keep: bool) {
        debug_assert!(context < CONTEXTS);
        self.epoch += 1;
        self.current = context;
        self.generation = self.contexts[context];
        if self.generation == 0 || !keep {
            self.renew();
        }
    }

    /// Whether the pages of a [`Tlb::stamp`] can be found again.
    pub(crate) fn has_stamp(&self, stamp: u64) -> bool {
        stamp >> 12 == self.renewals && self.contexts.contains(&(stamp & 0xfff))
    }

    /// Gives the current process context a generation for which no page is entered.
    fn renew(&mut self) {
        self.newest += 1;
        if self.newest == GENERATIONS {
            self.entries.fill(TlbEntry::default());
            for (entry, _) in self.displaced.iter_mut() {
                *entry = TlbEntry::default();
            }
            self.forget_watched();
            self.contexts = [0; CONTEXTS];
            self.renewals += 1;
            self.newest = 1;
        }
        self.generation = self.newest;
        self.contexts[self.current] = self.generation;
    }

    /// Evicts all pages that are not global, of all process contexts.
    pub(crate) fn flush_locals(&mut self) {
        self.epoch += 1;
        self.contexts = [0; CONTEXTS];
        self.renew();
    }

    /// Evicts all pages.
    pub(crate) fn flush(&mut self) {
        self.flush_locals();
        self.large = [0; 16];
        self.huge = [0; 16];
        self.globals += 1;
        if self.globals == GENERATIONS {
            self.details.fill(TlbEntryDetails::default());
            self.displaced.fill(Default::default());
            self.globals = 1;
        }
    }
}

/// The TLB for fetches, which holds no host addresses.
#[derive(Debug)]
pub(crate) struct FetchTlb(Tlb);

impl FetchTlb {
    pub(crate) fn new() -> Self {
        Self(Tlb::new())
    }

    /// Enters a page.
    pub(crate) fn insert(&mut self, lin: u64, set: TlbSet, t: Translation) {
        self.0.insert(lin, set, 0, t);
    }
}

/// The TLB for reads.
///
/// Invariant: the host addresses of its entries are those of pages of guest memory that stay mapped
/// as long as the TLB exists.
#[derive(Debug)]
pub(crate) struct ReadTlb(Tlb);

impl ReadTlb {
    pub(crate) fn new() -> Self {
        Self(Tlb::new())
    }

    /// Enters a page; one with a watchpoint, if `watched`, for [`ReadTlb::find_watched`] only.
    ///
    /// # Safety
    /// `host_page` must be the exposed host address of a page of guest memory that stays mapped as
    /// long as the TLB exists.
    pub(crate) unsafe fn insert(
        &mut self,
        lin: u64,
        set: TlbSet,
        host_page: u64,
        t: Translation,
        watched: bool,
    ) {
        if watched {
            self.0.insert_watched(lin, set, host_page);
        } else {
            self.0.insert(lin, set, host_page, t);
        }
    }

    /// Returns the value at `lin`, if it lies in one page that is entered.
    #[inline(always)]
    pub(crate) fn find<T: Width>(&self, lin: u64, set: SetOffset) -> Option<GuestRef<'_, T>> {
        let host = self.0.find(lin, T::SIZE as u64, set)?;
        // SAFETY: the type's invariant, for all bytes of the value.
        Some(unsafe { GuestRef::new(host) })
    }

    /// Like [`ReadTlb::find`], among the pages that contain a watchpoint.
    pub(crate) fn find_watched<T: Width>(&self, lin: u64, set: TlbSet) -> Option<GuestRef<'_, T>> {
        let host = self.0.find_watched(lin, T::SIZE as u64, set)?;
        // SAFETY: the type's invariant, for all bytes of the value.
        Some(unsafe { GuestRef::new(host) })
    }

    /// The bytes at `lin`, 1 to 4096, if they lie in one page that is entered.
    pub(crate) fn find_bytes(
        &self,
        lin: u64,
        len: usize,
        set: SetOffset,
    ) -> Option<GuestBytes<'_>> {
        assert!((1..=4096).contains(&len));
        let host = self.0.find(lin, len as u64, set)?;
        // SAFETY: the type's invariant, for all of the bytes.
        Some(unsafe { GuestBytes::new(host, len) })
    }
}

/// The TLB for writes.
///
/// Invariant: as for [`ReadTlb`], and the pages are writable.
#[derive(Debug)]
pub(crate) struct WriteTlb(Tlb);

impl WriteTlb {
    pub(crate) fn new() -> Self {
        Self(Tlb::new())
    }

    /// Enters a page; one with a watchpoint, if `watched`, for [`WriteTlb::find_watched`] only.
    ///
    /// # Safety
    /// As for [`ReadTlb::insert`], and the page must be writable.
    pub(crate) unsafe fn insert(
        &mut self,
        lin: u64,
        set: TlbSet,
        host_page: u64,
        t: Translation,
        watched: bool,
    ) {
        if watched {
            self.0.insert_watched(lin, set, host_page);
        } else {
            self.0.insert(lin, set, host_page, t);
        }
    }

    /// Returns the value at `lin`, if it lies in one page that is entered.
    #[inline(always)]
    pub(crate) fn find<T: Width>(&self, lin: u64, set: SetOffset) -> Option<GuestMut<'_, T>> {
        let host = self.0.find(lin, T::SIZE as u64, set)?;
        // SAFETY: the type's invariant, for all bytes of the value.
        Some(unsafe { GuestMut::new(host) })
    }

    /// Like [`WriteTlb::find`], among the pages that contain a watchpoint.
    pub(crate) fn find_watched<T: Width>(&self, lin: u64, set: TlbSet) -> Option<GuestMut<'_, T>> {
        let host = self.0.find_watched(lin, T::SIZE as u64, set)?;
        // SAFETY: the type's invariant, for all bytes of the value.
        Some(unsafe { GuestMut::new(host) })
    }

    /// The bytes at `lin`, 1 to 4096, if they lie in one page that is entered.
    #[inline(always)]
    pub(crate) fn find_bytes(
        &self,
        lin: u64,
        len: usize,
        set: SetOffset,
    ) -> Option<GuestBytesMut<'_>> {
        assert!((1..=4096).contains(&len));
        let host = self.0.find(lin, len as u64, set)?;
        // SAFETY: the type's invariant, for all of the bytes.
        Some(unsafe { GuestBytesMut::new(host, len) })
    }
}

macro_rules! is_tlb {
    ($($name:ident)*) => {$(
        impl std::ops::Deref for $name {
            type Target = Tlb;

            #[inline(always)]
            fn deref(&self) -> &Tlb {
                &self.0
            }
        }

        impl std::ops::DerefMut for $name {
            fn deref_mut(&mut self) -> &mut Tlb {
                &mut self.0
            }
        }
    )*};
}
is_tlb!(FetchTlb ReadTlb WriteTlb);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_found_until_flushed_and_not_beyond_its_page() {
        let mut tlb = Tlb::new();
        tlb.insert(0x7000, TlbSet::User, 0x10_0000, page(0x3000, false, 12));
        assert_eq!(tlb.find(0x7ff8, 8, TlbSet::User.offset(0)), Some(0x10_0ff8));
        assert_eq!(tlb.find(0x7ff9, 8, TlbSet::User.offset(0)), None);
        assert_eq!(tlb.find(0x7ff8, 8, TlbSet::Supervisor.offset(0)), None);
        for _ in 0..0x1001 {
            let epoch = tlb.epoch();
            tlb.flush();
            assert_eq!(tlb.find(0x7000, 1, TlbSet::User.offset(0)), None);
            assert_ne!(tlb.epoch(), epoch);
        }
    }

    #[test]
    fn displaced_page_returns_until_flushed_or_evicted() {
        const SET: TlbSet = TlbSet::Supervisor;
        let (a, b, c) = (0x20_7000, 0x40_7000, 0x60_7000);
        let mut tlb = Tlb::new();
        let find = |tlb: &Tlb, lin| tlb.find(lin, 8, SET.offset(0));
        let enter = |tlb: &mut Tlb| {
            tlb.insert(a, SET, 0x10_0000, page(0x3000, true, 12));
            tlb.insert(b, SET, 0x11_0000, page(0x4000, false, 12));
        };
        enter(&mut tlb);
        assert_eq!((find(&tlb, a), find(&tlb, b)), (None, Some(0x11_0000)));
        assert_eq!((gpa(&tlb, a), gpa(&tlb, b)), (Some(0x3000), Some(0x4000)));
        assert!(tlb.promote(a, SET) && tlb.promote(a, SET));
        assert_eq!((find(&tlb, a), find(&tlb, b)), (Some(0x10_0000), None));
        assert_eq!((gpa(&tlb, a), gpa(&tlb, b)), (Some(0x3000), Some(0x4000)));
        assert!(!tlb.promote(a, TlbSet::User));

        // Enter a page again while it is displaced: only one of the two entries is left.
        tlb.insert(b, SET, 0x12_0000, page(0x5000, false, 12));
        tlb.evict(b);
        assert_eq!((gpa(&tlb, a), gpa(&tlb, b)), (Some(0x3000), None));
        tlb.insert(a, SET, 0x13_0000, page(0x6000, true, 12));
        tlb.evict(a);
        assert_eq!((gpa(&tlb, a), tlb.promote(a, SET)), (None, false));

        // A third page replaces the older one.
        enter(&mut tlb);
        tlb.insert(c, SET, 0x14_0000, page(0x7000, false, 12));
        assert_eq!((gpa(&tlb, a), gpa(&tlb, b)), (None, Some(0x4000)));

        // A displaced page is flushed like any other: a global one only by a full flush.
        tlb.flush();
        for _ in 0..0x1001 {
            enter(&mut tlb);
            tlb.flush_locals();
            assert!(!tlb.promote(a, SET) && !tlb.promote(b, SET));
            assert_eq!((gpa(&tlb, a), gpa(&tlb, b)), (Some(0x3000), None));
        }
        for _ in 0..0x1001 {
            enter(&mut tlb);
            tlb.flush();
            assert!(!tlb.promote(a, SET));
            assert_eq!(gpa(&tlb, a), None);
        }
    }

    #[test]
    fn eviction_forgets_displaced_part_of_large_page() {
        const SET: TlbSet = TlbSet::Supervisor;
        let mut tlb = Tlb::new();
        tlb.insert(0x4020_5000, SET, 0, page(0x5000, true, 21));
        tlb.insert(0x5020_5000, SET, 0, page(0x6000, false, 12));
        assert_eq!(gpa(&tlb, 0x4020_5000), Some(0x5000));
        tlb.evict(0x4020_0000);
        assert_eq!(gpa(&tlb, 0x4020_5000), None);
        assert_eq!(gpa(&tlb, 0x5020_5000), Some(0x6000));
    }

    #[test]
    fn watched_page_is_found_apart_until_flushed_or_evicted() {
        let mut tlb = Tlb::new();
        let find = |tlb: &Tlb, lin, set| tlb.find_watched(lin, 8, set);
        tlb.insert_watched(0x7000, TlbSet::User, 0x10_0000);
        assert_eq!(tlb.find(0x7000, 8, TlbSet::User.offset(0)), None);
        assert_eq!(find(&tlb, 0x7ff8, TlbSet::User), Some(0x10_0ff8));
        assert_eq!(find(&tlb, 0x7ff9, TlbSet::User), None, "across its end");
        assert_eq!(find(&tlb, 0x6ff9, TlbSet::User), None, "across its start");
        assert_eq!(find(&tlb, 0x7000, TlbSet::Supervisor), None);
        for _ in 0..0x1001 {
            let epoch = tlb.epoch();
            tlb.flush_locals();
            assert_eq!(find(&tlb, 0x7000, TlbSet::User), None);
            assert_ne!(tlb.epoch(), epoch);
        }
        tlb.insert_watched(0x7000, TlbSet::User, 0x10_0000);
        let epoch = tlb.epoch();
        tlb.evict(0x9000);
        assert_eq!(find(&tlb, 0x7000, TlbSet::User), None);
        assert_ne!(tlb.epoch(), epoch);
        tlb.insert_watched(0x7000, TlbSet::UserAligned, 0x10_0000);
        assert_eq!(find(&tlb, 0x7000, TlbSet::UserAligned), None);
    }

    fn page(gpa: u64, global: bool, shift: u8) -> Translation {
        Translation { gpa, global, shift }
    }

    fn gpa(tlb: &Tlb, lin: u64) -> Option<u64> {
        tlb.translation(lin, TlbSet::Supervisor).map(|t| t.gpa)
    }

    #[test]
    fn global_page_survives_flush_of_locals() {
        let mut tlb = Tlb::new();
        tlb.insert(
            0x7000,
            TlbSet::Supervisor,
            0x10_0000,
            page(0x3000, true, 12),
        );
        tlb.insert(
            0x8000,
            TlbSet::Supervisor,
            0x11_0000,
            page(0x4000, false, 12),
        );
        for _ in 0..0x1001 {
            tlb.flush_locals();
            assert_eq!((gpa(&tlb, 0x7123), gpa(&tlb, 0x8000)), (Some(0x3123), None));
            assert_eq!(
                tlb.find(0x7000, 1, TlbSet::Supervisor.offset(0)),
                None,
                "not before it is entered again"
            );
        }
        tlb.flush();
        assert_eq!(gpa(&tlb, 0x7000), None);
    }

    #[test]
    fn eviction_forgets_whole_large_page() {
        let mut tlb = Tlb::new();
        let (large, next, huge) = (0x4020_0000, 0x4040_0000, 0x8000_0000);
        tlb.insert(
            large + 0x5000,
            TlbSet::Supervisor,
            0,
            page(0x5000, true, 21),
        );
        tlb.insert(
            next + 0x6000,
            TlbSet::Supervisor,
            0,
            page(0x6000, false, 21),
        );
        tlb.insert(
            huge + 0x12_3000,
            TlbSet::Supervisor,
            0,
            page(0x7000, false, 30),
        );
        tlb.evict(large + 0x1f_0000);
        assert_eq!(gpa(&tlb, large + 0x5000), None);
        assert_eq!(gpa(&tlb, next + 0x6000), Some(0x6000));
        tlb.evict(huge + 0x3000_0000);
        assert_eq!(gpa(&tlb, huge + 0x12_3000), None);
    }

    #[test]
    fn regions_without_large_pages_are_not_searched() {
        let mut tlb = Tlb::new();
        // Two pages of 2 MiB in one region.
        let (first, second) = (0x4000_0000, 0x4020_0000);
        for lin in [first, second + 0x3000] {
            tlb.insert(lin, TlbSet::Supervisor, 0, page(0x5000, true, 21));
        }
        assert!(tlb.evict(first + 0x1000));
        assert_eq!(gpa(&tlb, second + 0x3000), Some(0x5000));
        assert!(tlb.evict(second));
        assert_eq!(gpa(&tlb, second + 0x3000), None);
        assert!(!tlb.evict(second) && !tlb.evict(first));
        tlb.insert(first, TlbSet::Supervisor, 0, page(0x5000, false, 30));
        assert!(tlb.evict(second));
        assert_eq!(gpa(&tlb, first), None);
        assert!(!tlb.evict(second));
    }
}

//! Paging: TLBs, page walks, and the rights of accesses.
//!
//! This module does not depend on the rest of the processor; the module `translate` connects them.

mod contexts;
mod tlb;
mod walk;

pub(crate) use contexts::{ContextChange, Contexts};
pub(crate) use tlb::{CONTEXTS, FetchTlb, ReadTlb, SetOffset, Tlb, TlbSet, Translation, WriteTlb};
pub(crate) use walk::{AccessKind, Paging, TableMemory};

/// The TLBs, and the TLB sets that accesses use now.
#[derive(Debug)]
pub(crate) struct Mmu {
    /// Pages that may be read.
    pub(crate) reads: ReadTlb,
    /// Pages that may be written.
    pub(crate) writes: WriteTlb,
    /// Pages that code may be fetched from.
    pub(crate) fetches: FetchTlb,
    /// The rights of explicit accesses.
    rights: TlbSet,
    /// The TLB set that the fast path of explicit accesses uses.
    fast: SetOffset,
    /// The TLB set that locked accesses use.
    locked: SetOffset,
    /// The TLB set that accesses to the DS save area use.
    ds: SetOffset,
    /// The process contexts whose pages are in the TLBs.
    contexts: Contexts,
    /// Mask of the bits that a physical address may have.
    phys_mask: u64,
    /// Whether translations were invalidated since [`Mmu::take_flushed`].
    flushed: bool,
    /// Entries made in the TLBs, for statistics.
    fills: u64,
}

impl Mmu {
    pub(crate) fn new() -> Self {
        Self {
            reads: ReadTlb::new(),
            writes: WriteTlb::new(),
            fetches: FetchTlb::new(),
            rights: TlbSet::Supervisor,
            fast: TlbSet::Supervisor.offset(0),
            locked: TlbSet::Supervisor.offset(0),
            ds: TlbSet::DebugStore.offset(0),
            contexts: Contexts::new(),
            phys_mask: (1 << 46) - 1,
            flushed: false,
            fills: 0,
        }
    }

    /// Sets the rights of explicit accesses.
    ///
    /// The fast path finds no page while `every_access` is reported to a model. While
    /// `transactions` are open, no access finds one without a page walk.
    pub(crate) fn set_rights(&mut self, rights: TlbSet, every_access: bool, transactions: bool) {
        let unless = |slow: bool, set: TlbSet| match slow {
            true => SetOffset::EMPTY,
            false => self.reads.offset(set),
        };
        let fast = unless(every_access || transactions, rights);
        let locked = unless(transactions, rights);
        let ds = unless(transactions, TlbSet::DebugStore);
        self.rights = rights;
        (self.fast, self.locked, self.ds) = (fast, locked, ds);
    }

    /// The rights of explicit accesses.
    pub(crate) fn rights(&self) -> TlbSet {
        self.rights
    }

    /// The TLB set that the fast path of explicit accesses uses.
    #[inline(always)]
    pub(crate) fn fast(&self) -> SetOffset {
        self.fast
    }

    /// Returns where the current process context has the entries of a TLB set.
    pub(crate) fn offset_of(&self, set: TlbSet) -> SetOffset {
        self.reads.offset(set)
    }

    /// Whether the fast path of explicit accesses uses a TLB set.
    pub(crate) fn is_fast(&self, set: TlbSet) -> bool {
        self.fast == self.reads.offset(set)
    }

    /// Returns the TLB set that locked accesses use.
    pub(crate) fn locked(&self) -> SetOffset {
        self.locked
    }

    /// Returns the TLB set that accesses to the DS save area use.
    #[inline(always)]
    pub(crate) fn ds(&self) -> SetOffset {
        self.ds
    }

    /// Returns the mask of the bits that a physical address may have.
    pub(crate) fn phys_mask(&self) -> u64 {
        self.phys_mask
    }

    /// Sets the width of physical addresses, 32 to 52 bits; other widths are ignored.
    pub(crate) fn set_phys_width(&mut self, width: u32) {
        if (32..=52).contains(&width) {
            self.phys_mask = (1 << width) - 1;
        }
    }

    /// Returns the TLB for accesses of a kind.
    pub(crate) fn tlb(&self, access: AccessKind) -> &Tlb {
        match access {
            AccessKind::Read => &self.reads,
            AccessKind::Write => &self.writes,
            AccessKind::Fetch => &self.fetches,
        }
    }

    /// Moves the page of `lin` to the first way of a TLB: see [`Tlb::promote`].
    ///
    /// Returns whether the page is entered, so that accesses need no walk.
    pub(crate) fn promote(&mut self, lin: u64, access: AccessKind, set: TlbSet) -> bool {
        match access {
            AccessKind::Read => self.reads.promote(lin, set),
            AccessKind::Write => self.writes.promote(lin, set),
            AccessKind::Fetch => self.fetches.promote(lin, set),
        }
    }

    /// Like [`Mmu::promote`], if the fast path of explicit accesses uses the set now.
    pub(crate) fn promote_fast(&mut self, lin: u64, access: AccessKind, set: TlbSet) -> bool {
        self.is_fast(set) && self.promote(lin, access, set)
    }

    /// Calls a method of each TLB.
    fn each(&mut self, f: impl Fn(&mut Tlb)) {
        self.flushed = true;
        for tlb in [
            &mut *self.reads as &mut Tlb,
            &mut *self.writes,
            &mut *self.fetches,
        ] {
            f(tlb);
        }
    }

    /// Makes the process context of a PCID current, as a load of CR3 does.
    ///
    /// Evicts its translations that are not global, unless `keep`. Call [`Mmu::set_rights`] next.
    pub(crate) fn load_context(&mut self, pcid: u16, keep: bool) -> ContextChange {
        let change = self.contexts.load(pcid, keep);
        self.each(|tlb| tlb.select(change.index, change.keeps));
        change
    }

    /// Evicts all translations; the current PCID is `pcid`.
    pub(crate) fn flush(&mut self, pcid: u16) {
        self.contexts.reset(pcid);
        self.each(Tlb::flush);
    }

    /// Evicts all translations that are not global; the current PCID is `pcid`.
    pub(crate) fn flush_locals(&mut self, pcid: u16) {
        self.contexts.reset(pcid);
        self.each(Tlb::flush_locals);
    }

    /// Evicts the translations that are not global of a process context that is not current.
    pub(crate) fn flush_other(&mut self, pcid: u16) {
        self.flushed = true;
        self.contexts.forget(pcid);
    }

    /// Evicts the page that contains a linear address, of any size, in all process contexts.
    ///
    /// Returns whether that page may be large.
    pub(crate) fn evict(&mut self, lin: u64) -> bool {
        self.flushed = true;
        let large = [
            self.reads.evict(lin),
            self.writes.evict(lin),
            self.fetches.evict(lin),
        ];
        large.contains(&true)
    }

    /// Whether translations were invalidated since the last call.
    pub(crate) fn take_flushed(&mut self) -> bool {
        std::mem::take(&mut self.flushed)
    }

    /// Counts an entry made in a TLB.
    pub(crate) fn count_fill(&mut self) {
        self.fills += 1;
    }

    /// Returns the number of entries made in the TLBs.
    pub(crate) fn fills(&self) -> u64 {
        self.fills
    }
}

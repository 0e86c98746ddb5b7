//! Paging: TLBs, page walks, and the rights of accesses.
//!
//! This module does not depend on the rest of the processor; the module `translate` connects them.

mod tlb;
mod walk;

pub(crate) use tlb::{FetchTlb, ReadTlb, SetOffset, Tlb, TlbSet, Translation, WriteTlb};
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
            fast: TlbSet::Supervisor.offset(),
            locked: TlbSet::Supervisor.offset(),
            ds: TlbSet::DebugStore.offset(),
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
        let unless = |slow: bool, set: TlbSet| if slow { SetOffset::EMPTY } else { set.offset() };
        self.rights = rights;
        self.fast = unless(every_access || transactions, rights);
        self.locked = unless(transactions, rights);
        self.ds = unless(transactions, TlbSet::DebugStore);
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
        set.offset() == self.fast && self.promote(lin, access, set)
    }

    /// Evicts all translations.
    pub(crate) fn flush(&mut self) {
        self.flushed = true;
        self.reads.flush();
        self.writes.flush();
        self.fetches.flush();
    }

    /// Evicts the translations that a load of CR3 invalidates: all but global ones.
    pub(crate) fn flush_locals(&mut self) {
        self.flushed = true;
        self.reads.flush_locals();
        self.writes.flush_locals();
        self.fetches.flush_locals();
    }

    /// Evicts the page that contains a linear address, of any size.
    pub(crate) fn evict(&mut self, lin: u64) {
        self.flushed = true;
        self.reads.evict(lin);
        self.writes.evict(lin);
        self.fetches.evict(lin);
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

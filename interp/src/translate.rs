//! Translation of linear addresses: the TLBs and page walks of [`crate::mmu`] over guest memory.

#![expect(
    unsafe_code,
    reason = "pages of guest memory are entered into the TLBs"
)]

use crate::core::Core;
use crate::fault::Fault;
use crate::memory::{MemoryHandle, PAGE};
use crate::mmu::{AccessKind, Paging, TableMemory, TlbSet, Translation};
use crate::transaction::state::Transaction;
use hindsight_regs::cr::Cr0;

/// Paging structures in guest memory, as the processor's transaction sees them.
struct GuestTables<'a> {
    memory: &'a MemoryHandle,
    transaction: &'a mut Transaction,
}

impl TableMemory for GuestTables<'_> {
    fn read_entry(&mut self, gpa: u64, wide: bool) -> u64 {
        self.transaction.walk_reads(&self.memory.shared, gpa);
        self.memory.read_entry(gpa, wide)
    }

    fn set_bits(&mut self, gpa: u64, wide: bool, old: u64, bits: u64) -> bool {
        self.memory.mark_entry(gpa, wide, old, bits)
    }
}

impl Core {
    /// Translates a linear address: checks rights, sets accessed and dirty bits.
    pub(crate) fn translate(
        &mut self,
        lin: u64,
        access: AccessKind,
        set: TlbSet,
    ) -> Result<Translation, Fault> {
        if !self.cr0(Cr0::PG) {
            return Ok(Translation {
                gpa: lin & 0xffff_ffff & self.mmu.phys_mask(),
                global: false,
                shift: 12,
            });
        }
        if let Some(known) = self.mmu.tlb(access).translation(lin, set) {
            return Ok(known);
        }
        loop {
            let paging = Paging {
                state: &self.state,
                pkru: match set {
                    TlbSet::DebugStore => 0,
                    _ => self.vec.pkru,
                },
                phys_mask: self.mmu.phys_mask(),
            };
            let mut tables = GuestTables {
                memory: &self.memory,
                transaction: &mut self.transaction,
            };
            let found = paging.find_page(lin, access, set, &mut tables);
            tables.transaction.check_walk()?;
            let leaf = found.map_err(|code| Fault::Page(code, lin))?;
            if let Some(translation) = paging.mark_page(&leaf, access, &mut tables) {
                return Ok(translation);
            }
        }
    }

    /// Loads the page-directory-pointer entries of PAE paging that `cr3` points to.
    pub(crate) fn load_pdptrs(&mut self, cr3: u64) -> Result<(), Fault> {
        let paging = Paging {
            state: &self.state,
            pkru: 0,
            phys_mask: self.mmu.phys_mask(),
        };
        let memory = &self.memory;
        let pdptrs = paging.read_pdptrs(cr3, |gpa| memory.read_entry(gpa, true));
        self.state.pdptr = pdptrs.ok_or(Fault::GP)?;
        Ok(())
    }

    /// Enters a translated page into a TLB, if it is not there yet and accesses of this kind to it
    /// have no side effects.
    pub(crate) fn enter_page(&mut self, lin: u64, t: Translation, access: AccessKind, set: TlbSet) {
        if self.mmu.promote(lin, access, set) {
            return;
        }
        self.mmu.count_fill();
        let Some(page) = self.memory.page(t.gpa) else {
            return;
        };
        let watched = self.debug.watching() && self.debug.watches_page(lin, &self.state.debug());
        match access {
            AccessKind::Fetch => self.mmu.fetches.insert(lin, set, t),
            AccessKind::Read => {
                // SAFETY: the page belongs to the memory that this processor keeps alive as long as
                // its TLBs.
                unsafe { self.mmu.reads.insert(lin, set, page.host(), t, watched) };
            }
            AccessKind::Write if page.writable && page.code_marks() == 0 => {
                page.set_dirty();
                // SAFETY: as above, and the page is writable.
                unsafe { self.mmu.writes.insert(lin, set, page.host(), t, watched) };
            }
            AccessKind::Write => {}
        }
    }

    /// Bytes from a linear address to the end of its page.
    pub(crate) fn page_rest(lin: u64) -> usize {
        usize::try_from(PAGE - lin % PAGE).unwrap_or(1)
    }
}

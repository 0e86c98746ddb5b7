//! Page walks. SDM Vol. 3A, "Paging".
//!
//! 4-level, PAE and 32-bit paging with WP, NX, SMEP, SMAP and protection keys. Not modelled:
//! 5-level paging, which CPUID does not report.

#![expect(
    clippy::cast_possible_truncation,
    reason = "page-table indices are cut on purpose"
)]

use super::tlb::{TlbSet, Translation};
use hindsight_cpu::state::CpuState;
use hindsight_regs::cr::{Cr0, Cr4, Efer};

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessKind {
    /// A load.
    Read,
    /// A store, or the load of a read-modify-write.
    Write,
    /// A fetch of code.
    Fetch,
}

/// Bits of a paging-structure entry.
pub(super) mod entry {
    pub(crate) const P: u64 = 1;
    pub(crate) const RW: u64 = 1 << 1;
    pub(crate) const US: u64 = 1 << 2;
    pub(crate) const A: u64 = 1 << 5;
    pub(crate) const D: u64 = 1 << 6;
    pub(crate) const PS: u64 = 1 << 7;
    pub(crate) const G: u64 = 1 << 8;
    pub(crate) const NX: u64 = 1 << 63;
}

/// Bits of a page fault's error code.
mod error_code {
    pub(super) const PROTECTION: u32 = 1;
    pub(super) const WRITE: u32 = 1 << 1;
    pub(super) const USER: u32 = 1 << 2;
    pub(super) const RESERVED: u32 = 1 << 3;
    pub(super) const FETCH: u32 = 1 << 4;
    pub(super) const KEY: u32 = 1 << 5;
}

use entry::{A, D, G, NX, P, PS, RW, US};

/// The memory that holds paging structures. Entries have 8 bytes, or 4 if not `wide`.
pub(crate) trait TableMemory {
    /// Reads an entry. An address that is not memory reads as all ones.
    fn read_entry(&mut self, gpa: u64, wide: bool) -> u64;
    /// Sets bits of an entry if it still has the value `old`; false if it has changed.
    fn set_bits(&mut self, gpa: u64, wide: bool, old: u64, bits: u64) -> bool;
}

/// The registers that determine how linear addresses are translated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paging<'a> {
    /// CR0, CR3, CR4, EFER and the PDPTEs.
    pub(crate) state: &'a CpuState,
    /// Rights by protection key.
    pub(crate) pkru: u32,
    /// Mask of the bits that a physical address may have.
    pub(crate) phys_mask: u64,
}

/// The page that a walk found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf {
    gpa: u64,
    /// R/W and U/S, combined by AND over the levels.
    rights: u64,
    no_execute: bool,
    key: u8,
    /// Address and value of the entry that maps the page.
    entry: (u64, u64),
    wide: bool,
    /// Binary logarithm of the size of the page.
    shift: u8,
}

/// Why a walk finds no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoPage {
    NotPresent,
    ReservedBit,
}

impl Paging<'_> {
    fn cr0(&self, bits: Cr0) -> bool {
        self.state.cr0 & bits.bits() != 0
    }

    fn cr4(&self, bits: Cr4) -> bool {
        self.state.cr4 & bits.bits() != 0
    }

    fn efer(&self, bits: Efer) -> bool {
        self.state.efer & bits.bits() != 0
    }

    /// Finds the page of a linear address with CR0.PG set, and checks an access to it.
    ///
    /// Sets the accessed bits of the entries above that of the page.
    ///
    /// # Errors
    /// The error code of the page fault.
    pub(crate) fn find_page(
        &self,
        lin: u64,
        access: AccessKind,
        set: TlbSet,
        tables: &mut impl TableMemory,
    ) -> Result<Leaf, u32> {
        debug_assert!(self.cr0(Cr0::PG));
        let user = matches!(set, TlbSet::User | TlbSet::UserAligned);
        let code = self.access_code(access, user);
        let leaf = self.walk(lin, tables).map_err(|no_page| match no_page {
            NoPage::NotPresent => code,
            NoPage::ReservedBit => code | error_code::PROTECTION | error_code::RESERVED,
        })?;
        self.check_rights(&leaf, access, set, user)
            .map_err(|denied| code | denied)?;
        Ok(leaf)
    }

    /// Sets accessed and dirty bits in the entry of a page that is accessed.
    ///
    /// Returns `None` if the entry has changed since the walk, which must then be repeated.
    pub(crate) fn mark_page(
        &self,
        leaf: &Leaf,
        access: AccessKind,
        tables: &mut impl TableMemory,
    ) -> Option<Translation> {
        let (at, entry) = leaf.entry;
        let marks = if access == AccessKind::Write {
            A | D
        } else {
            A
        };
        if entry & marks != marks && !tables.set_bits(at, leaf.wide, entry, marks) {
            return None;
        }
        debug_assert!(leaf.gpa & !self.phys_mask == 0);
        Some(Translation {
            gpa: leaf.gpa,
            global: entry & G != 0 && self.cr4(Cr4::PGE),
            shift: leaf.shift,
        })
    }

    /// Returns the bits of the error code that describe the access.
    fn access_code(&self, access: AccessKind, user: bool) -> u32 {
        let kind = match access {
            AccessKind::Read => 0,
            AccessKind::Write => error_code::WRITE,
            AccessKind::Fetch if self.efer(Efer::NXE) && self.cr4(Cr4::PAE) => error_code::FETCH,
            AccessKind::Fetch if self.cr4(Cr4::SMEP) => error_code::FETCH,
            AccessKind::Fetch => 0,
        };
        kind | if user { error_code::USER } else { 0 }
    }

    /// Checks the rights of an access to a page; the error holds further bits of the error code.
    fn check_rights(
        &self,
        leaf: &Leaf,
        access: AccessKind,
        set: TlbSet,
        user: bool,
    ) -> Result<(), u32> {
        let user_page = leaf.rights & US != 0;
        let writable = leaf.rights & RW != 0;
        let smap = set == TlbSet::Supervisor && self.cr4(Cr4::SMAP);
        let denied = match access {
            _ if user && !user_page => true,
            AccessKind::Fetch => leaf.no_execute || (!user && user_page && self.cr4(Cr4::SMEP)),
            _ if !user && user_page && smap => true,
            AccessKind::Write => !writable && (user || self.cr0(Cr0::WP)),
            AccessKind::Read => false,
        };
        // The error code reports the protection key, whatever else forbids the access.
        let key =
            access != AccessKind::Fetch && user_page && self.key_denies(leaf.key, access, user);
        match (denied, key) {
            (false, false) => Ok(()),
            (_, false) => Err(error_code::PROTECTION),
            (_, true) => Err(error_code::PROTECTION | error_code::KEY),
        }
    }

    /// Whether PKRU forbids a data access to a user page with this key.
    fn key_denies(&self, key: u8, access: AccessKind, user: bool) -> bool {
        debug_assert!(key < 16);
        if !self.cr4(Cr4::PKE) || !self.efer(Efer::LMA) {
            return false;
        }
        let rights = self.pkru >> (2 * key) & 3;
        let write_denied = rights & 2 != 0 && (user || self.cr0(Cr0::WP));
        rights & 1 != 0 || (access == AccessKind::Write && write_denied)
    }

    /// Walks the tables; sets the accessed bit in all entries but that of the page.
    fn walk(&self, lin: u64, tables: &mut impl TableMemory) -> Result<Leaf, NoPage> {
        if self.efer(Efer::LMA) {
            self.walk_wide(lin, self.state.cr3 & self.phys_mask & !0xfff, 4, tables)
        } else if self.cr4(Cr4::PAE) {
            let pdpte = self.state.pdptr[(lin >> 30 & 3) as usize];
            if pdpte & P == 0 {
                return Err(NoPage::NotPresent);
            }
            self.walk_wide(lin, pdpte & self.phys_mask & !0xfff, 2, tables)
        } else {
            self.walk_narrow(lin, tables)
        }
    }

    /// Walks tables of 512 entries of 8 bytes.
    fn walk_wide(
        &self,
        lin: u64,
        mut table: u64,
        levels: u32,
        tables: &mut impl TableMemory,
    ) -> Result<Leaf, NoPage> {
        let mut rights = RW | US;
        let mut no_execute = false;
        let mut reserved = !self.phys_mask & 0x000f_ffff_ffff_f000;
        if !self.efer(Efer::NXE) {
            reserved |= NX;
        }
        if levels == 2 {
            reserved |= 0x7ff0_0000_0000_0000;
        }
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let at = table + (lin >> shift & 0x1ff) * 8;
            let entry = tables.read_entry(at, true);
            if entry & P == 0 {
                return Err(NoPage::NotPresent);
            }
            let large = level > 0 && entry & PS != 0;
            if entry & reserved != 0 || (large && level == 3) {
                return Err(NoPage::ReservedBit);
            }
            let size = 1_u64 << shift;
            if large && entry & (size - 1) & 0x000f_ffff_ffff_e000 != 0 {
                return Err(NoPage::ReservedBit);
            }
            rights &= entry;
            no_execute |= entry & NX != 0;
            if level == 0 || large {
                let base = entry & self.phys_mask & !(size - 1);
                return Ok(Leaf {
                    gpa: base | (lin & (size - 1)),
                    rights,
                    no_execute,
                    key: (entry >> 59 & 0xf) as u8,
                    entry: (at, entry),
                    wide: true,
                    shift: shift as u8,
                });
            }
            mark_accessed(tables, at, true, entry);
            table = entry & self.phys_mask & !0xfff;
        }
        unreachable!("the entry of the last level maps a page")
    }

    /// Walks tables of 1024 entries of 4 bytes.
    fn walk_narrow(&self, lin: u64, tables: &mut impl TableMemory) -> Result<Leaf, NoPage> {
        let at = (self.state.cr3 & 0xffff_f000) + (lin >> 22 & 0x3ff) * 4;
        let pde = tables.read_entry(at, false) & 0xffff_ffff;
        if pde & P == 0 {
            return Err(NoPage::NotPresent);
        }
        if pde & PS != 0 && self.cr4(Cr4::PSE) {
            if pde & 1 << 21 != 0 {
                return Err(NoPage::ReservedBit);
            }
            let base = (pde & 0xffc0_0000) | (pde >> 13 & 0xff) << 32;
            return Ok(Leaf {
                gpa: (base | (lin & 0x3f_ffff)) & self.phys_mask,
                rights: pde,
                no_execute: false,
                key: 0,
                entry: (at, pde),
                wide: false,
                shift: 22,
            });
        }
        mark_accessed(tables, at, false, pde);
        let at = (pde & 0xffff_f000) + (lin >> 12 & 0x3ff) * 4;
        let pte = tables.read_entry(at, false) & 0xffff_ffff;
        if pte & P == 0 {
            return Err(NoPage::NotPresent);
        }
        Ok(Leaf {
            gpa: (pte & 0xffff_f000) | (lin & 0xfff),
            rights: pde & pte,
            no_execute: false,
            key: 0,
            entry: (at, pte),
            wide: false,
            shift: 12,
        })
    }

    /// Reads the page-directory-pointer entries of PAE paging to which `cr3` points.
    ///
    /// Returns `None` if one of them has a reserved bit set.
    pub(crate) fn read_pdptrs(
        &self,
        cr3: u64,
        mut read: impl FnMut(u64) -> u64,
    ) -> Option<[u64; 4]> {
        let reserved = 0x1e6 | !self.phys_mask;
        let mut pdptrs = [0; 4];
        for (i, pdptr) in (0_u64..).zip(&mut pdptrs) {
            let entry = read((cr3 & 0xffff_ffe0) + i * 8);
            if entry & P != 0 && entry & reserved != 0 {
                return None;
            }
            *pdptr = entry;
        }
        Some(pdptrs)
    }
}

/// Sets the accessed bit of an entry above that of the page.
fn mark_accessed(tables: &mut impl TableMemory, at: u64, wide: bool, entry: u64) {
    if entry & A == 0 {
        // If another processor has changed the entry meanwhile, the walk has used the old one.
        let _ = tables.set_bits(at, wide, entry, A);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Paging structures, as entries by address.
    #[derive(Default)]
    struct Tables {
        entries: HashMap<u64, u64>,
        /// An entry that another processor stores before the next bits are set.
        race: Option<(u64, u64)>,
    }

    impl TableMemory for Tables {
        fn read_entry(&mut self, gpa: u64, _: bool) -> u64 {
            self.entries.get(&gpa).copied().unwrap_or(0)
        }
        fn set_bits(&mut self, gpa: u64, _: bool, old: u64, bits: u64) -> bool {
            if let Some((at, value)) = self.race.take() {
                self.entries.insert(at, value);
            }
            let entry = self.entries.entry(gpa).or_default();
            let same = *entry == old;
            if same {
                *entry |= bits;
            }
            same
        }
    }

    const CR3: u64 = 0x1000;
    const PML4: u64 = 0x1000;
    const PDPT: u64 = 0x2000;
    const PD: u64 = 0x3000;
    const PT: u64 = 0x4000;
    /// Indices 1, 2, 3 and 4.
    const LIN: u64 = 1 << 39 | 2 << 30 | 3 << 21 | 4 << 12 | 0x123;

    fn long_mode() -> CpuState {
        let mut state = CpuState::reset();
        state.cr0 = (Cr0::PG | Cr0::PE | Cr0::WP).bits();
        state.cr3 = CR3;
        state.cr4 = (Cr4::PAE | Cr4::PGE).bits();
        state.efer = (Efer::LME | Efer::LMA | Efer::NXE).bits();
        state
    }

    fn tables(leaf: u64) -> Tables {
        let mut tables = Tables::default();
        for (at, value) in [
            (PML4 + 8, PDPT | P | RW | US),
            (PDPT + 16, PD | P | RW | US),
            (PD + 24, PT | P | RW | US),
            (PT + 32, leaf),
        ] {
            tables.entries.insert(at, value);
        }
        tables
    }

    /// A translation; `Err(None)` if the entry of the page changed.
    fn translate(
        state: &CpuState,
        access: AccessKind,
        set: TlbSet,
        tables: &mut Tables,
    ) -> Result<Translation, Option<u32>> {
        translate_at(LIN, state, access, set, tables)
    }

    fn translate_at(
        lin: u64,
        state: &CpuState,
        access: AccessKind,
        set: TlbSet,
        tables: &mut Tables,
    ) -> Result<Translation, Option<u32>> {
        let paging = Paging {
            state,
            pkru: 0b1000,
            phys_mask: (1 << 46) - 1,
        };
        let leaf = paging.find_page(lin, access, set, tables).map_err(Some)?;
        paging.mark_page(&leaf, access, tables).ok_or(None)
    }

    #[test]
    fn four_level_walk_sets_accessed_and_dirty_bits() {
        let mut tables = tables(0x7000 | P | RW | US | G);
        let state = long_mode();
        let walked = translate(&state, AccessKind::Read, TlbSet::User, &mut tables);
        let expected = Translation {
            gpa: 0x7123,
            global: true,
            shift: 12,
        };
        assert_eq!(walked, Ok(expected));
        assert_eq!(tables.entries[&(PD + 24)] & A, A);
        assert_eq!(tables.entries[&(PT + 32)] & (A | D), A);
        translate(&state, AccessKind::Write, TlbSet::User, &mut tables).unwrap();
        assert_eq!(tables.entries[&(PT + 32)] & (A | D), A | D);
    }

    #[test]
    fn large_page_is_mapped_by_its_directory_entry() {
        let mut tables = tables(0);
        tables.entries.insert(PD + 24, 0x60_0000 | P | RW | US | PS);
        let walked = translate(&long_mode(), AccessKind::Read, TlbSet::User, &mut tables);
        assert_eq!(walked.map(|w| (w.gpa, w.shift)), Ok((0x60_4123, 21)));
        tables.entries.insert(PD + 24, 0x60_2000 | P | RW | US | PS);
        let walked = translate(&long_mode(), AccessKind::Read, TlbSet::User, &mut tables);
        assert_eq!(walked, Err(Some(0b1101)), "a reserved bit");
    }

    #[test]
    fn error_codes_describe_the_access_and_why_it_is_denied() {
        let mut smap = long_mode();
        smap.cr4 |= (Cr4::SMEP | Cr4::SMAP | Cr4::PKE).bits();
        let (read, write, fetch) = (AccessKind::Read, AccessKind::Write, AccessKind::Fetch);
        let (user, supervisor) = (TlbSet::User, TlbSet::Supervisor);
        let key_1 = 1 << 59;
        for (name, leaf, access, set, expected) in [
            ("not present", 0, write, user, Some(0b110)),
            ("supervisor page", P | RW, read, user, Some(0b101)),
            ("read-only page", P | US, write, user, Some(0b111)),
            ("write protection", P, write, supervisor, Some(0b11)),
            ("no execute", P | RW | NX, fetch, supervisor, Some(0x11)),
            ("SMEP", P | RW | US, fetch, supervisor, Some(0x11)),
            ("SMAP", P | RW | US, read, supervisor, Some(1)),
            ("AC", P | RW | US, read, TlbSet::SupervisorNoSmap, None),
            ("key", P | RW | US | key_1, write, user, Some(0b10_0111)),
            ("readable key", P | RW | US | key_1, read, user, None),
            ("reserved", P | RW | US | 1 << 47, read, user, Some(0b1101)),
        ] {
            let walked = translate(&smap, access, set, &mut tables(0x7000 | leaf));
            assert_eq!(walked.err().flatten(), expected, "{name}: {walked:?}");
        }
    }

    #[test]
    fn entry_that_changes_during_the_walk_repeats_it() {
        let mut tables = tables(0x7000 | P | RW | US);
        for at in [PML4 + 8, PDPT + 16, PD + 24] {
            *tables.entries.get_mut(&at).unwrap() |= A;
        }
        tables.race = Some((PT + 32, 0));
        let walked = translate(&long_mode(), AccessKind::Read, TlbSet::User, &mut tables);
        assert_eq!(walked, Err(None));
    }

    #[test]
    fn narrow_walk_maps_4_mib_pages_above_4_gib() {
        let mut state = CpuState::reset();
        state.cr0 = (Cr0::PG | Cr0::PE).bits();
        state.cr3 = CR3;
        state.cr4 = Cr4::PSE.bits();
        let mut tables = Tables::default();
        // Index 3 of the directory; bits 20:13 of the entry are bits 39:32 of the page.
        tables
            .entries
            .insert(CR3 + 12, 0x40_0000 | 1 << 13 | P | RW | US | PS);
        let walked = translate(&state, AccessKind::Write, TlbSet::User, &mut tables);
        assert_eq!(walked, Err(Some(0b110)), "index 0 of 1024");
        let walked = translate_at(
            0xc0_1234,
            &state,
            AccessKind::Read,
            TlbSet::User,
            &mut tables,
        );
        assert_eq!(walked.map(|w| (w.gpa, w.shift)), Ok((0x1_0040_1234, 22)));
    }

    #[test]
    fn pdptrs_with_reserved_bits_are_refused() {
        let state = CpuState::reset();
        let paging = Paging {
            state: &state,
            pkru: 0,
            phys_mask: (1 << 46) - 1,
        };
        let read = |bad: u64| {
            move |at: u64| {
                if at == 0x1008 { 0x2001 | bad } else { 0 }
            }
        };
        assert_eq!(paging.read_pdptrs(0x1000, read(0)), Some([0, 0x2001, 0, 0]));
        assert_eq!(paging.read_pdptrs(0x1000, read(1 << 1)), None);
    }
}

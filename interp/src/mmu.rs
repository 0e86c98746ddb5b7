//! Paging. SDM Vol. 3A, "Paging".
//!
//! 4-level, PAE and 32-bit paging with accessed and dirty bits, WP, NX, SMEP, SMAP and protection
//! keys. Not modelled: 5-level paging, which CPUID does not show.

#![expect(
    clippy::cast_possible_truncation,
    reason = "page-table indices are cut on purpose"
)]

use crate::core::Core;
use crate::fault::Fault;
use crate::memory::PAGE;
use crate::tlb::{Set, Translation};
use hindsight_regs::cr::{Cr0, Cr4, Efer};

/// What an access wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    Read,
    Write,
    Fetch,
}

const P: u64 = 1;
const RW: u64 = 1 << 1;
const US: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const G: u64 = 1 << 8;
const NX: u64 = 1 << 63;

/// The result of a walk.
#[derive(Clone, Copy, Debug)]
struct Walk {
    gpa: u64,
    /// Conjunction of R/W and U/S over the levels.
    rights: u64,
    nx: bool,
    key: u8,
    leaf: (u64, u64),
    wide: bool,
    /// Binary logarithm of the page's size.
    shift: u8,
}

impl Core {
    /// Translates a linear address, with rights checked and A/D bits set.
    pub(crate) fn translate(
        &mut self,
        lin: u64,
        want: Want,
        set: Set,
    ) -> Result<Translation, Fault> {
        if !self.cr0(Cr0::PG) {
            return Ok(Translation {
                gpa: lin & 0xffff_ffff & self.phys_mask,
                global: false,
                shift: 12,
            });
        }
        let tlb = match want {
            Want::Read => &self.rd,
            Want::Write => &self.wr,
            Want::Fetch => &self.ex,
        };
        if let Some(known) = tlb.known(lin, set) {
            return Ok(known);
        }
        loop {
            let user = matches!(set, Set::User | Set::Never);
            let mut code = match want {
                Want::Read => 0,
                Want::Write => 2,
                Want::Fetch if self.efer(Efer::NXE) && self.cr4(Cr4::PAE) => 0x10,
                Want::Fetch if self.cr4(Cr4::SMEP) => 0x10,
                Want::Fetch => 0,
            };
            code |= if user { 4 } else { 0 };
            let walk = self.walk(lin);
            self.walked_in_region()?;
            let walk = match walk {
                Ok(Some(walk)) => walk,
                Ok(None) => return Err(Fault::Page(code, lin)),
                Err(()) => return Err(Fault::Page(code | 9, lin)),
            };
            self.check(&walk, want, set, user)
                .map_err(|c| Fault::Page(code | c, lin))?;
            let (at, entry) = walk.leaf;
            let set_bits = if want == Want::Write { A | D } else { A };
            if entry & set_bits != set_bits
                && !self.memory.mark_entry(at, walk.wide, entry, set_bits)
            {
                continue;
            }
            return Ok(Translation {
                gpa: walk.gpa,
                global: entry & G != 0 && self.cr4(Cr4::PGE),
                shift: walk.shift,
            });
        }
    }

    fn check(&self, w: &Walk, want: Want, set: Set, user: bool) -> Result<(), u32> {
        let user_page = w.rights & US != 0;
        let writable = w.rights & RW != 0;
        let denied = match want {
            _ if user && !user_page => true,
            Want::Fetch => w.nx || (!user && user_page && self.cr4(Cr4::SMEP)),
            _ if !user && user_page && set == Set::Supervisor && self.cr4(Cr4::SMAP) => true,
            Want::Write => !writable && (user || self.cr0(Cr0::WP)),
            Want::Read => false,
        };
        // The error code tells of the key whatever else forbids the access.
        let key = want != Want::Fetch && user_page && self.key_denies(w.key, want, user);
        if denied || key {
            return Err(1 | u32::from(key) << 5);
        }
        Ok(())
    }

    /// PKRU forbids a data access to a user page with this key.
    fn key_denies(&self, key: u8, want: Want, user: bool) -> bool {
        if !self.cr4(Cr4::PKE) || !self.lma() {
            return false;
        }
        let bits = self.vec.pkru >> (2 * key) & 3;
        let wd = bits & 2 != 0 && (user || self.cr0(Cr0::WP));
        bits & 1 != 0 || (want == Want::Write && wd)
    }

    /// Walks the tables; sets A in all but the leaf. None: not present; Err: a reserved bit.
    fn walk(&mut self, lin: u64) -> Result<Option<Walk>, ()> {
        if self.lma() {
            self.walk_wide(lin, self.st.cr3 & self.phys_mask & !0xfff, 4)
        } else if self.cr4(Cr4::PAE) {
            let pdpte = self.st.pdptr[(lin >> 30 & 3) as usize];
            if pdpte & P == 0 {
                return Ok(None);
            }
            self.walk_wide(lin, pdpte & self.phys_mask & !0xfff, 2)
        } else {
            self.walk_narrow(lin)
        }
    }

    fn walk_wide(&mut self, lin: u64, mut table: u64, levels: u32) -> Result<Option<Walk>, ()> {
        let mut rights = RW | US;
        let mut nx = false;
        let nxe = self.efer(Efer::NXE);
        let mut reserved = !self.phys_mask & 0x000f_ffff_ffff_f000;
        if !nxe {
            reserved |= NX;
        }
        if levels == 2 {
            reserved |= 0x7ff0_0000_0000_0000;
        }
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let at = table + (lin >> shift & 0x1ff) * 8;
            let entry = self.table_entry(at, true);
            if entry & P == 0 {
                return Ok(None);
            }
            let large = level > 0 && entry & PS != 0;
            if entry & reserved != 0 || (large && level == 3) {
                return Err(());
            }
            let size = 1_u64 << shift;
            if large && entry & (size - 1) & 0x000f_ffff_ffff_e000 != 0 {
                return Err(());
            }
            rights &= entry;
            nx |= entry & NX != 0;
            if level == 0 || large {
                let base = entry & self.phys_mask & !(size - 1);
                return Ok(Some(Walk {
                    gpa: base | (lin & (size - 1)),
                    rights,
                    nx,
                    key: (entry >> 59 & 0xf) as u8,
                    leaf: (at, entry),
                    wide: true,
                    shift: shift as u8,
                }));
            }
            self.touch(at, true, entry);
            table = entry & self.phys_mask & !0xfff;
        }
        Ok(None)
    }

    fn walk_narrow(&mut self, lin: u64) -> Result<Option<Walk>, ()> {
        let at = (self.st.cr3 & 0xffff_f000) + (lin >> 22 & 0x3ff) * 4;
        let pde = self.table_entry(at, false) & 0xffff_ffff;
        if pde & P == 0 {
            return Ok(None);
        }
        if pde & PS != 0 && self.cr4(Cr4::PSE) {
            if pde & 1 << 21 != 0 {
                return Err(());
            }
            let base = (pde & 0xffc0_0000) | (pde >> 13 & 0xff) << 32;
            return Ok(Some(Walk {
                gpa: (base | (lin & 0x3f_ffff)) & self.phys_mask,
                rights: pde,
                nx: false,
                key: 0,
                leaf: (at, pde),
                wide: false,
                shift: 22,
            }));
        }
        self.touch(at, false, pde);
        let at = (pde & 0xffff_f000) + (lin >> 12 & 0x3ff) * 4;
        let pte = self.table_entry(at, false) & 0xffff_ffff;
        if pte & P == 0 {
            return Ok(None);
        }
        Ok(Some(Walk {
            gpa: (pte & 0xffff_f000) | (lin & 0xfff),
            rights: pde & pte,
            nx: false,
            key: 0,
            leaf: (at, pte),
            wide: false,
            shift: 12,
        }))
    }

    /// Reads an entry of a paging structure.
    fn table_entry(&mut self, at: u64, wide: bool) -> u64 {
        self.walk_in_region(at);
        self.memory.read_entry(at, wide)
    }

    /// Sets the accessed bit of an entry above the leaf.
    fn touch(&self, at: u64, wide: bool, entry: u64) {
        if entry & A == 0 {
            // If the entry changed meanwhile, the walk read the old one in time.
            let _ = self.memory.mark_entry(at, wide, entry, A);
        }
    }

    /// Loads the page-directory-pointer entries of PAE paging from CR3.
    pub(crate) fn load_pdptrs(&mut self, cr3: u64) -> Result<(), Fault> {
        let mut fresh = [0; 4];
        for (i, slot) in (0_u64..).zip(&mut fresh) {
            let entry = self.memory.read_entry((cr3 & 0xffff_ffe0) + i * 8, true);
            let reserved = 0x1e6 | !self.phys_mask;
            if entry & P != 0 && entry & reserved != 0 {
                return Err(Fault::GP);
            }
            *slot = entry;
        }
        self.st.pdptr = fresh;
        Ok(())
    }

    /// Enters a translated page into a TLB if plain accesses of this kind need no further look.
    pub(crate) fn enter(&mut self, lin: u64, t: Translation, want: Want, set: Set) {
        self.tlb_fills += 1;
        let Some(page) = self.memory.page(t.gpa) else {
            return;
        };
        let host = page.host.as_ptr().expose_provenance() as u64;
        match want {
            Want::Fetch => self.ex.insert(lin, set, host, t),
            Want::Read if self.watched_page(lin) => self.rd.insert_watched(lin, set, host),
            Want::Read => self.rd.insert(lin, set, host, t),
            Want::Write if page.writable && page.code() == 0 => {
                page.set_dirty();
                if self.watched_page(lin) {
                    self.wr.insert_watched(lin, set, host);
                } else {
                    self.wr.insert(lin, set, host, t);
                }
            }
            _ => {}
        }
    }

    /// INVLPG.
    pub(crate) fn invalidate_page(&mut self, lin: u64) {
        self.flushed = true;
        self.rd.evict(lin);
        self.wr.evict(lin);
        self.ex.evict(lin);
        self.new_context();
    }

    /// Bytes left in the page of an address.
    pub(crate) fn page_rest(lin: u64) -> usize {
        (PAGE - lin % PAGE) as usize
    }
}

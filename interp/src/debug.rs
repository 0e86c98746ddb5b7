//! Debug registers, breakpoints and single-step. SDM Vol. 3B, "Debug, Branch Profile, TSC, and
//! Intel Resource Director Technology Features".
//!
//! Not modelled here: RTM, DEBUGCTL.BTF (the owner of DEBUGCTL sees to it).

use crate::core::{CR4_DE, Core, DB, Fault, GP0, UD_};
use crate::events::{Cause, Event, Shutdown};
use crate::flags::TF;

/// DR6.BD.
const BD: u64 = 1 << 13;
/// DR6.BS.
pub(crate) const BS: u64 = 1 << 14;
/// DR6.BT.
pub(crate) const BT: u64 = 1 << 15;
/// DR7.GD.
const GD: u64 = 1 << 13;

/// What a breakpoint watches: R/W field.
const EXECUTE: u64 = 0;
const IO: u64 = 2;

impl Core {
    fn armed(&self, n: usize) -> bool {
        self.st.dr7 >> (2 * n) & 3 != 0
    }

    fn kind(&self, n: usize) -> u64 {
        self.st.dr7 >> (16 + 4 * n) & 3
    }

    fn len(&self, n: usize) -> u64 {
        match self.st.dr7 >> (18 + 4 * n) & 3 {
            0 => 1,
            1 => 2,
            2 => 8,
            _ => 4,
        }
    }

    /// Recomputes what depends on DR0 to DR7: pages that are watched leave the TLB.
    pub(crate) fn update_debug(&mut self) {
        let watching =
            self.stops.watching || (0..4).any(|n| self.armed(n) && self.kind(n) & 1 != 0);
        if watching || self.watching {
            self.watching = watching;
            self.flush_tlb();
        }
    }

    /// The page holds a data breakpoint of the guest or a watch of the debugger.
    pub(crate) fn watched_page(&self, lin: u64) -> bool {
        self.watching
            && (self.stops.watches_page(lin)
                || (0..4).any(|n| {
                    self.armed(n) && self.kind(n) & 1 != 0 && (self.st.dr[n] ^ lin) & !0xfff == 0
                }))
    }

    fn hit(&self, n: usize, at: u64, len: u64) -> bool {
        let size = self.len(n);
        let from = self.st.dr[n] & !(size - 1);
        at < from.saturating_add(size) && from < at.saturating_add(len)
    }

    /// A data access was made.
    pub(crate) fn note_access(&mut self, lin: u64, len: u64, write: bool) {
        if self.stops.watching {
            self.stop_at_access(lin, len, write);
        }
        for n in 0..4 {
            let kind = self.kind(n);
            let matches = kind == 3 || (kind == 1 && write);
            if self.armed(n) && matches && self.hit(n, lin, len) {
                self.hits |= 1 << n;
                self.leave = true;
            }
        }
    }

    /// A port access was made.
    pub(crate) fn note_port(&mut self, port: u16, len: u64) {
        if !self.cr4(CR4_DE) {
            return;
        }
        for n in 0..4 {
            if self.armed(n) && self.kind(n) == IO && self.hit(n, port.into(), len) {
                self.hits |= 1 << n;
            }
        }
    }

    /// Some instruction breakpoint is armed.
    pub(crate) fn exec_breakpoints(&self) -> bool {
        self.st.dr7 & 0xff != 0 && (0..4).any(|n| self.armed(n) && self.kind(n) == EXECUTE)
    }

    /// DR6 bits of the instruction breakpoints at a linear address.
    pub(crate) fn exec_hits(&self, lin: u64) -> u64 {
        let hit = |n: usize| {
            self.armed(n) && self.kind(n) == EXECUTE && self.len(n) == 1 && self.st.dr[n] == lin
        };
        (0..4).filter(|&n| hit(n)).map(|n| 1 << n).sum()
    }

    /// Puts the conditions of a #DB into DR6.
    pub(crate) fn debug_bits(&mut self, bits: u64) {
        self.st.dr6 = (self.st.dr6 & !0xf) | bits | 1 << 16;
    }

    /// What every #DB does on entry.
    pub(crate) fn enter_debug(&mut self) {
        self.st.dr7 &= !GD;
        self.st.dr6 |= 1 << 16;
    }

    /// Delivers the #DB of the trap class that waits.
    pub(crate) fn deliver_trap(&mut self) -> Result<(), Shutdown> {
        let bits = std::mem::take(&mut self.trap);
        self.trap_pending = false;
        self.debug_bits(bits);
        self.deliver(Event {
            vector: DB,
            cause: Cause::Exception,
            code: None,
            rf: false,
        })
    }

    /// After an instruction that started with `tf` completed: what traps.
    pub(crate) fn after_instruction(&mut self, tf: bool) {
        let mut bits = std::mem::take(&mut self.hits);
        if tf {
            bits |= BS;
        }
        if self.st.events.mov_ss_shadow {
            self.st.events.deferred_db |= bits & 0xf;
        } else {
            bits |= std::mem::take(&mut self.st.events.deferred_db);
            if bits != 0 {
                self.trap |= bits;
                self.trap_pending = true;
            }
        }
    }

    /// TF is set.
    pub(crate) fn tf(&self) -> bool {
        self.flag(TF)
    }

    /// Checks common to reads and writes of DRn; answers the number without aliases.
    fn check_dr(&self, n: u8) -> Result<usize, Fault> {
        let n = usize::from(n);
        if n > 7 || (matches!(n, 4 | 5) && self.cr4(CR4_DE)) {
            return Err(UD_);
        }
        if self.cpl != 0 {
            return Err(GP0);
        }
        if self.st.dr7 & GD != 0 {
            return Err(Fault::Debug(BD));
        }
        Ok(if matches!(n, 4 | 5) { n + 2 } else { n })
    }

    pub(crate) fn read_dr(&self, n: u8) -> Result<u64, Fault> {
        Ok(match self.check_dr(n)? {
            6 => self.st.dr6,
            7 => self.st.dr7,
            n => self.st.dr[n & 3],
        })
    }

    pub(crate) fn write_dr(&mut self, n: u8, v: u64) -> Result<(), Fault> {
        let n = self.check_dr(n)?;
        let v = if self.code == 8 { v } else { v & 0xffff_ffff };
        if n >= 6 && v >> 32 != 0 {
            return Err(GP0);
        }
        match n {
            6 => self.st.dr6 = (v & 0xe00f) | 0xffff_0ff0,
            7 => self.st.dr7 = (v & 0xffff_23ff) | 0x400,
            n => self.st.dr[n & 3] = v,
        }
        self.update_debug();
        self.leave = true;
        Ok(())
    }
}

//! Translated code under a model of the caches.
//!
//! An access changes nothing in a cache if its line was the last one of its set that was used, and,
//! for a store, is dirty. Units count such accesses, and call back for others. Instructions that
//! cannot be counted like that are executed alone by the interpreter, which reports all of their
//! accesses.

use super::{Jit, UnitMode, rights_of};
use crate::core::Core;
use crate::fault::ExitReason;
use crate::mmu::AccessKind;
use crate::platform::MemoryAccess;
use crate::registers::Reg;
use crate::seg::canonical;
use hindsight_cpu::uarch::CacheAccess;
use hindsight_cpu::uarch::cache::{LINE, LINE_SHIFT};
use hindsight_translate::{AccessCounts, AccessFormat, UnitAccess};

impl Jit {
    /// Updates the lines of translated code after the interpreter reported accesses.
    pub(crate) fn accessed(&mut self, touches: &[MemoryAccess]) {
        let Some(translator) = &mut self.translator else {
            return;
        };
        for touch in touches.iter().filter(|t| t.cached) {
            let last = touch.gpa + u64::from(touch.len.max(1)) - 1;
            for line in touch.gpa >> LINE_SHIFT..=last >> LINE_SHIFT {
                match touch.kind {
                    CacheAccess::Code => translator.set_code_line(line),
                    _ => translator.remove_line(line << LINE_SHIFT),
                }
            }
        }
    }

    /// Drops what translated code knows about the caches.
    pub(crate) fn forget_lines(&mut self) {
        if let Some(translator) = &mut self.translator {
            translator.remove_lines();
            translator.remove_code_lines();
        }
    }
}

impl Core {
    /// Returns how units must report accesses now; `None` if no model observes them.
    pub(super) fn access_format(&self) -> Option<AccessFormat> {
        let counting = self.counters.counting();
        let fetches = counting.fetches;
        counting.accesses.map(|_| AccessFormat { fetches })
    }

    /// Runs a unit at RIP while a model observes all accesses, if one can be entered.
    ///
    /// If so, `exit.reason` says how to continue.
    pub(crate) fn run_counting_unit(&mut self) -> bool {
        if std::mem::take(&mut self.jit.steps_next) {
            return false;
        }
        let batches = self.counters.counts_accesses() && self.counters.counting().batches;
        if !batches
            || self.hot_after == u64::MAX
            || !self.mode.is_64bit()
            || self.checks_conflicts
            || self.needs_exact_events()
            || self.debug.stops.has_breakpoints()
        {
            return false;
        }
        let Some(entry) = self.find_jump().or_else(|| self.find_block(false).ok()) else {
            return false;
        };
        self.exit.reason = ExitReason::Lookup;
        self.enter_counting_unit(entry)
    }

    /// Applies what translated code counted, after it was left.
    pub(super) fn count_accesses(&mut self, accesses: AccessCounts, retired: u64) {
        let ring = self.counters.ring();
        let AccessCounts { loads, stores } = accesses;
        debug_assert!(loads.max(stores) <= retired);
        self.platform().accesses_of_block(ring, loads, stores);
        self.counters.spend_instructions(retired);
    }

    /// Reports an access of translated code, and returns its host address.
    pub(super) fn find_line(&mut self, linear: u64, access: UnitAccess) -> Option<u64> {
        let set = self.mmu.rights();
        let rights = rights_of(set)?;
        let len = usize::from(access.size);
        let within = linear % u64::from(LINE) + len as u64 <= u64::from(LINE);
        if !canonical(linear) || !within || !access.retires {
            return None;
        }
        let kind = if access.write {
            AccessKind::Write
        } else {
            AccessKind::Read
        };
        let host = match self.find_in_tlb(linear, len, access.write) {
            Some(host) => host,
            None => {
                if !self.mmu.promote(linear, kind, set) {
                    self.pieces(linear, len, kind, set).ok()?;
                }
                self.find_in_tlb(linear, len, access.write)?
            }
        };
        let page = host - (linear & 0xfff);
        if self.jit.translator.as_ref()?.is_excluded(page) {
            return None;
        }
        let gpa = self.mmu.tlb(kind).translation(linear, set)?.gpa;
        let ring = self.counters.ring();
        let kinds = [
            access.read.then_some(CacheAccess::Load),
            access.write.then_some(CacheAccess::Store),
        ];
        for kind in kinds.into_iter().flatten() {
            let access = MemoryAccess {
                linear,
                gpa,
                len: u32::from(access.size),
                kind,
                cached: true,
            };
            self.platform().line_access(ring, &access);
        }
        let line = host & !u64::from(LINE - 1);
        let translator = self.jit.translator.as_mut()?;
        translator.enter_line(rights, linear, line, access.write);
        Some(host)
    }

    /// Returns the host address of an access whose page is in the TLB.
    fn find_in_tlb(&self, linear: u64, len: usize, write: bool) -> Option<u64> {
        let set = self.mmu.offset_of(self.mmu.rights());
        if write {
            let found = self.mmu.writes.find_bytes(linear, len, set);
            found.map(crate::memory::GuestBytesMut::host)
        } else {
            let found = self.mmu.reads.find_bytes(linear, len, set);
            found.map(crate::memory::GuestBytes::host)
        }
    }

    /// Returns how units at the current privilege level must record branches and report accesses.
    pub(super) fn unit_mode(&self) -> UnitMode {
        UnitMode {
            records: self.branch_records(),
            accesses: self.access_format(),
        }
    }

    /// Continues after a unit was left at an instruction that must be executed alone.
    pub(super) fn leave_counting_unit(&mut self, rip: u64) -> crate::core::Next {
        self.regs.rip = rip;
        self.regs.set(Reg::BlockRip, rip);
        self.leave(ExitReason::Lookup)
    }
}

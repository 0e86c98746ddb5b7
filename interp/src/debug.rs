//! Debug registers, breakpoints and single-step. SDM Vol. 3B, "Debug, Branch Profile, TSC, and
//! Intel Resource Director Technology Features".
//!
//! Not modelled here: DEBUGCTL.BTF (the owner of DEBUGCTL sees to it).

use hindsight_cpu::debug::{DebugRegisters, MovDrContext, MovDrFault};
use hindsight_regs::dr::{BreakpointIndex, Condition, Dr7};

use crate::core::{CR4_DE, Core, DB, Fault, GP0, UD_};
use crate::events::{Cause, Event, Shutdown};
use crate::flags::TF;

/// DR6.BD.
const BD: u64 = 1 << 13;
/// DR6.BS.
pub(crate) const BS: u64 = 1 << 14;
/// DR6.BT.
pub(crate) const BT: u64 = 1 << 15;

impl Core {
    /// The debug registers, as their model has them.
    fn debug(&self) -> DebugRegisters {
        self.st.debug()
    }

    /// Changes the debug registers by their model.
    pub(crate) fn change_debug<R>(&mut self, f: impl FnOnce(&mut DebugRegisters) -> R) -> R {
        let mut registers = self.st.debug();
        let result = f(&mut registers);
        self.st.set_debug(&registers);
        result
    }

    /// Recomputes what depends on DR0 to DR7: pages that are watched leave the TLB.
    pub(crate) fn update_debug(&mut self) {
        let data = [Condition::Write, Condition::ReadWrite];
        let watching = self.stops.watching || self.debug().has_enabled(&data);
        if watching || self.watching {
            self.watching = watching;
            self.watched = self.watched_range();
            self.flush_tlb();
        }
    }

    /// The first and the last byte of all that is watched; the first is behind the last for nothing.
    fn watched_range(&self) -> (u64, u64) {
        let registers = self.debug();
        let control = Dr7(registers.control);
        let data = |slot| {
            matches!(
                control.condition(slot),
                Condition::Write | Condition::ReadWrite
            )
        };
        let slots = (0..).map(BreakpointIndex).zip(registers.addresses);
        let guest = slots.filter(|&(slot, _)| control.is_enabled(slot) && data(slot));
        // Whatever its length: eight bytes, aligned.
        let guest = guest.map(|(_, at)| (at & !7, at | 7));
        let all = guest.chain(self.stops.watched());
        all.fold((u64::MAX, 0), |(first, last), (from, to)| {
            (first.min(from), last.max(to))
        })
    }

    /// Something is watched, but none of these bytes; no transaction is open, and nobody is told of single accesses.
    pub(crate) fn passes_watches(&self, lin: u64, len: u64) -> bool {
        let (first, last) = self.watched;
        self.watching
            && (lin > last || lin.checked_add(len - 1).is_some_and(|end| end < first))
            && !self.counters.tells_accesses()
            && !self.careful
    }

    /// The page holds a data breakpoint of the guest or a watch of the debugger.
    pub(crate) fn watched_page(&self, lin: u64) -> bool {
        self.watching
            && (self.stops.watches_page(lin) || self.debug().has_data_breakpoint_on_page(lin))
    }

    /// A data access was made.
    pub(crate) fn note_access(&mut self, lin: u64, len: u64, write: bool) {
        if self.stops.watching {
            self.stop_at_access(lin, len, write);
        }
        let hits = self.debug().data_hits(lin, len, write);
        if hits != 0 {
            self.hits |= hits;
            self.leave = true;
        }
    }

    /// A port access was made.
    pub(crate) fn note_port(&mut self, port: u16, len: u64) {
        self.hits |= self.debug().io_hits(port, len, self.cr4(CR4_DE));
    }

    /// Some instruction breakpoint is armed.
    pub(crate) fn exec_breakpoints(&self) -> bool {
        self.st.dr7 & 0xff != 0 && self.debug().has_enabled(&[Condition::Execute])
    }

    /// DR6 bits of the instruction breakpoints at a linear address.
    pub(crate) fn exec_hits(&self, lin: u64) -> u64 {
        // Asked before every single step, and mostly none is on.
        if self.st.dr7 & 0xff == 0 {
            return 0;
        }
        self.debug().instruction_hits(lin)
    }

    /// Puts the conditions of a #DB into DR6.
    pub(crate) fn debug_bits(&mut self, bits: u64) {
        self.change_debug(|registers| registers.record_conditions(bits));
    }

    /// What every #DB does on entry.
    pub(crate) fn enter_debug(&mut self) {
        let in_region = self.take_debugged();
        self.change_debug(|registers| registers.deliver(in_region));
    }

    /// Delivers the #DB of the trap class that waits.
    pub(crate) fn deliver_trap(&mut self) -> Result<(), Shutdown> {
        let bits = std::mem::take(&mut self.trap);
        self.trap_pending = false;
        if self.in_region() {
            return self.debug_in_region(bits);
        }
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

    /// How MOV DR is executed now.
    fn debug_access(&self) -> MovDrContext {
        MovDrContext {
            cpl: self.cpl,
            cr4_de: self.cr4(CR4_DE),
            long: self.code == 8,
            rtm: self.features.has(iced_x86::CpuidFeature::RTM),
        }
    }

    pub(crate) fn read_dr(&self, n: u8) -> Result<u64, Fault> {
        self.debug().read(n, self.debug_access()).map_err(fault_of)
    }

    pub(crate) fn write_dr(&mut self, n: u8, v: u64) -> Result<(), Fault> {
        let access = self.debug_access();
        self.change_debug(|registers| registers.write(n, v, access))
            .map_err(fault_of)?;
        self.update_debug();
        self.leave = true;
        Ok(())
    }
}

fn fault_of(refusal: MovDrFault) -> Fault {
    match refusal {
        MovDrFault::Undefined => UD_,
        MovDrFault::Protection => GP0,
        MovDrFault::Detected => Fault::Debug(BD),
    }
}

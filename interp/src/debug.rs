//! Debug registers, breakpoints and single-step. SDM Vol. 3B, "Debug, Branch Profile, TSC, and
//! Intel Resource Director Technology Features".
//!
//! Not modelled here: DEBUGCTL, which is the platform's; its BTF arrives in
//! [`Observe::step_on_branch`](crate::Observe::step_on_branch).

use crate::core::Core;
use crate::events::{GuestEvent, Shutdown};
use crate::fault::Fault;
use hindsight_cpu::stops::StopConditions;

use hindsight_cpu::debug::{DebugRegisters, MovDrContext, MovDrFault};
use hindsight_regs::cr::Cr4;
use hindsight_regs::dr::{Condition, Dr6};
use hindsight_regs::vector::Vector;

/// Enable bits of DR7.
const DR7_ENABLES: u64 = 0xff;

impl Core {
    /// Calls `f` with the model of the debug registers, and stores its changes.
    pub(crate) fn change_debug_registers<R>(
        &mut self,
        f: impl FnOnce(&mut DebugRegisters) -> R,
    ) -> R {
        let mut registers = self.state.debug();
        let result = f(&mut registers);
        self.state.set_debug(&registers);
        result
    }

    /// Applies a change of DR0 to DR7, or of the debugger's watchpoints.
    ///
    /// Pages that are watched are evicted from the TLBs.
    pub(crate) fn update_debug(&mut self) {
        if self.debug.update_watched(&self.state.debug()) {
            self.flush_tlb();
        }
    }

    /// Sets the stop conditions of a debugger outside the guest.
    pub(crate) fn set_stops(&mut self, stops: &StopConditions) {
        let change = self.debug.stops.set(stops);
        if !change.new_offsets.is_empty() {
            self.code.kill_at(&change.new_offsets);
        }
        if change.breakpoints {
            self.new_code_context();
        }
        if change.watchpoints {
            self.update_debug();
            self.flush_tlb();
        }
    }

    /// Whether an access misses all watchpoints, and nothing else must observe it.
    ///
    /// Some memory is watched, but none of these bytes. No transaction is open, and no model
    /// observes single accesses.
    pub(crate) fn misses_watchpoints(&self, lin: u64, len: u64, write: bool) -> bool {
        self.debug.misses_watched(lin, len, write)
            && !self.counters.counts_accesses()
            && !self.checks_conflicts
    }

    /// Records the guest's breakpoints and the debugger's watchpoints that a data access has met.
    pub(crate) fn check_watchpoints(&mut self, lin: u64, len: u64, write: bool) {
        if self.debug.stops.record_access(lin, len, write) {
            self.exit.requested = true;
        }
        let hits = self.state.debug().data_hits(lin, len, write);
        if hits != 0 {
            self.debug.record_hits(hits);
            self.exit.requested = true;
        }
    }

    /// Records the guest's I/O breakpoints that a port access has met.
    ///
    /// The caller leaves the block after the access.
    pub(crate) fn check_port_breakpoints(&mut self, port: u16, len: u64) {
        let hits = self.state.debug().io_hits(port, len, self.cr4(Cr4::DE));
        self.debug.record_hits(hits);
    }

    /// Whether some instruction breakpoint of the guest is armed.
    pub(crate) fn has_exec_breakpoints(&self) -> bool {
        self.state.dr7 & DR7_ENABLES != 0 && self.state.debug().has_enabled(&[Condition::Execute])
    }

    /// Returns the DR6 bits of the instruction breakpoints at a linear address.
    pub(crate) fn exec_breakpoints_at(&self, lin: u64) -> u64 {
        // This is called before every single step, mostly without an enabled breakpoint.
        if self.state.dr7 & DR7_ENABLES == 0 {
            return 0;
        }
        self.state.debug().instruction_hits(lin)
    }

    /// Reports the conditions of a #DB in DR6.
    pub(crate) fn report_debug_conditions(&mut self, bits: u64) {
        self.change_debug_registers(|registers| registers.record_conditions(bits));
    }

    /// Changes the debug registers as the delivery of every #DB does.
    pub(crate) fn enter_debug_handler(&mut self) {
        let in_transaction = self.take_transaction_debugged();
        self.change_debug_registers(|registers| registers.deliver(in_transaction));
    }

    /// Delivers the #DB of the trap that is pending.
    pub(crate) fn deliver_trap(&mut self) -> Result<(), Shutdown> {
        let Some(bits) = self.debug.take_trap() else {
            return Ok(());
        };
        if self.in_transaction() {
            return self.debug_in_transaction(bits);
        }
        self.report_debug_conditions(bits);
        self.deliver(GuestEvent::exception(Vector::DB))
    }

    /// Returns the processor state that determines how MOV DR executes.
    fn debug_access(&self) -> MovDrContext {
        MovDrContext {
            cpl: self.mode.cpl(),
            cr4_de: self.cr4(Cr4::DE),
            long: self.mode.is_64bit(),
            rtm: self.features.has(iced_x86::CpuidFeature::RTM),
        }
    }

    /// MOV from DR`n`.
    pub(crate) fn read_dr(&self, n: u8) -> Result<u64, Fault> {
        let access = self.debug_access();
        self.state.debug().read(n, access).map_err(fault_of)
    }

    /// MOV to DR`n`.
    pub(crate) fn write_dr(&mut self, n: u8, v: u64) -> Result<(), Fault> {
        let access = self.debug_access();
        self.change_debug_registers(|registers| registers.write(n, v, access))
            .map_err(fault_of)?;
        self.update_debug();
        self.exit.requested = true;
        Ok(())
    }
}

fn fault_of(refusal: MovDrFault) -> Fault {
    match refusal {
        MovDrFault::Undefined => Fault::UD,
        MovDrFault::Protection => Fault::GP,
        MovDrFault::Detected => Fault::Debug(Dr6::BD.bits()),
    }
}

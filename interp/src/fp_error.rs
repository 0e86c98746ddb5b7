//! Errors of earlier x87 instructions: #MF, or FERR# with CR0.NE clear.
//!
//! SDM Vol. 1, "x87 FPU Exception Handling in Software". FERR# is asserted at the next waiting
//! instruction (deferred reporting).

use crate::core::Core;
use crate::fault::Fault;
use hindsight_cpu::state::Activity;
use hindsight_regs::cr::Cr0;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

impl Core {
    /// The check of a waiting x87 or MMX instruction for an error of an earlier one.
    pub(crate) fn check_x87_pending(&mut self) -> Result<(), Fault> {
        if !self.vec.x87_pending() {
            self.update_ferr();
            return Ok(());
        }
        if self.cr0(Cr0::NE) {
            return Err(Fault::NoCode(Vector::MF));
        }
        if self.in_transaction() {
            return Err(Fault::Frozen);
        }
        self.ferr = true;
        if self.platform().set_ferr(true) {
            Ok(())
        } else {
            Err(Fault::Frozen)
        }
    }

    /// Deasserts FERR# if no error is pending. Called after instructions that may clear one.
    pub(crate) fn update_ferr(&mut self) {
        if self.ferr && !self.vec.x87_pending() && !self.in_transaction() {
            self.ferr = false;
            self.platform().set_ferr(false);
        }
    }

    /// Stops before a waiting instruction until an interrupt comes, which returns to it.
    pub(crate) fn freeze(&mut self) {
        // The breakpoints of the instruction were reported.
        self.regs.set_flag(Rflags::RF, true);
        self.state.activity = Activity::Halted;
    }
}

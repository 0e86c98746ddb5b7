//! System-management mode: taking an SMI, and RSM. SDM Vol. 3C, "System Management Mode".

use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::ops::Done;
use hindsight_cpu::smm::{AREA_LEN, SaveArea};
use hindsight_cpu::state::CpuState;
use hindsight_regs::cr::{Cr0, Cr4};

impl Core {
    /// The processor is in system-management mode.
    pub(crate) fn in_smm(&self) -> bool {
        self.state.smm.active
    }

    /// Takes an SMI at an instruction boundary: saves the state and goes to the handler.
    pub(crate) fn enter_smm(&mut self) {
        self.report_branches();
        self.platform().smm(true);
        let mut state = CpuState::reset();
        self.store(&mut state);
        let area = state.enter_smm();
        for (gpa, byte) in (state.smm.area()..).zip(area.0) {
            self.write_phys(gpa, &[byte]);
        }
        self.load(&state);
        self.update_observe();
    }

    fn resume(&mut self) -> Result<(), Fault> {
        if !self.in_smm() {
            return Err(Fault::UD);
        }
        let mut area = SaveArea([0; AREA_LEN]);
        for (gpa, byte) in (self.state.smm.area()..).zip(&mut area.0) {
            self.read_phys(gpa, std::slice::from_mut(byte));
        }
        self.report_branches();
        let mut state = CpuState::reset();
        self.store(&mut state);
        state.leave_smm(&area).map_err(|_| Fault::Shutdown)?;
        self.load(&state);
        if !self.state.events.nmi_blocked {
            self.platform().nmis_unblocked();
        }
        if self.cr0(Cr0::PG) && self.cr4(Cr4::PAE) && !self.lma() {
            let loaded = self.load_pdptrs(self.state.cr3);
            loaded.map_err(|_| Fault::Shutdown)?;
        }
        self.platform().smm(false);
        self.update_observe();
        self.counters.record_rsm();
        // TF counts from the next instruction on.
        self.debug.suppress_step = true;
        Ok(())
    }
}

/// RSM.
pub(crate) fn rsm(c: &mut Core, _: &Op) -> Done {
    c.resume()
}

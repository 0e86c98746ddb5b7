//! What system-management mode does to branch recording and counters. SDM Vol. 3B,
//! "FREEZE_WHILE_SMM".

use hindsight_regs::branch::DebugCtl;
use hindsight_regs::msr as regs;
use serde::{Deserialize, Serialize};

use super::{MsrError, Msrs};
use crate::facility::Facilities;

/// What RSM restores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspended {
    /// IA32_DEBUGCTL.
    pub debugctl: u64,
    /// IA32_PERF_GLOBAL_CTRL, if it was cleared.
    pub global_control: Option<u64>,
}

impl Msrs {
    /// System-management interrupts reach the guest.
    pub const fn has_smm(&self) -> bool {
        self.config.facilities.contains(Facilities::SMM)
    }

    /// The processor is in system-management mode.
    pub const fn in_smm(&self) -> bool {
        self.suspended.is_some()
    }

    /// An SMI is taken; the counters are up to date (rules SMF-02, SMF-03, DS-12, MSR-44).
    pub fn enter_smm(&mut self) {
        let debugctl = self.branch.debugctl();
        let mut suspended = Suspended {
            debugctl: debugctl.bits(),
            global_control: None,
        };
        if debugctl.contains(DebugCtl::FREEZE_WHILE_SMM) {
            let recording = DebugCtl::LBR | DebugCtl::BTF | DebugCtl::TR | DebugCtl::BTS;
            self.branch.set_debugctl(debugctl.difference(recording));
            suspended.global_control = Some(self.pmu.read(regs::IA32_PERF_GLOBAL_CTRL));
            self.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, 0);
        }
        self.smis = self.smis.wrapping_add(1);
        self.suspended = Some(suspended);
    }

    /// RSM; the counters are up to date (rules SMF-04, SMF-05).
    pub fn leave_smm(&mut self) {
        let Some(suspended) = self.suspended.take() else {
            return;
        };
        let debugctl = DebugCtl::from_bits_retain(suspended.debugctl);
        self.branch.set_debugctl(debugctl);
        if let Some(value) = suspended.global_control {
            self.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, value);
        }
    }

    /// Whether a saved state can have suspended this.
    pub(super) fn check_suspended(&self, suspended: Option<Suspended>) -> Result<(), MsrError> {
        let Some(suspended) = suspended else {
            return Ok(());
        };
        let saved = [
            (regs::IA32_DEBUGCTL, Some(suspended.debugctl)),
            (regs::IA32_PERF_GLOBAL_CTRL, suspended.global_control),
        ];
        for (index, value) in saved {
            let spec = super::find(index);
            let reserved = spec.map_or(u64::MAX, |spec| spec.reserved_bits(&self.config));
            if let Some(value) = value.filter(|value| value & reserved != 0) {
                return Err(MsrError::Value { index, value });
            }
        }
        Ok(())
    }
}

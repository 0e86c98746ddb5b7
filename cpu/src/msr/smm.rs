//! The effect of system-management mode on branch recording and counters.
//!
//! SDM Vol. 3B, "Freezing LBR and Performance Counters on PMI" and "FREEZE_WHILE_SMM"; Vol. 3C,
//! "System Management Mode".

use hindsight_regs::branch::DebugCtl;
use hindsight_regs::msr as regs;

use super::{MsrStateError, Msrs};
use crate::facility::Facilities;

/// The register values that an SMI suspends and RSM restores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SmmSuspended {
    /// IA32_DEBUGCTL.
    pub debugctl: u64,
    /// IA32_PERF_GLOBAL_CTRL, if the SMI cleared it.
    pub global_control: Option<u64>,
}

impl Msrs {
    /// Whether system-management interrupts reach the guest.
    pub const fn has_smm(&self) -> bool {
        self.config.facilities.contains(Facilities::SMM)
    }

    /// Whether the processor is in system-management mode.
    pub const fn in_smm(&self) -> bool {
        self.suspended.is_some()
    }

    /// Enters system-management mode (rules SMF-02, SMF-03, DS-12, MSR-44).
    ///
    /// The caller has called [`Msrs::sync_counters`].
    pub fn enter_smm(&mut self) {
        debug_assert!(!self.in_smm(), "SMIs are blocked in SMM");
        let debugctl = self.branch.debugctl();
        let mut suspended = SmmSuspended {
            debugctl: debugctl.bits(),
            global_control: None,
        };
        if debugctl.contains(DebugCtl::FREEZE_WHILE_SMM) {
            let record_flags = DebugCtl::LBR | DebugCtl::BTF | DebugCtl::TR | DebugCtl::BTS;
            self.branch.set_debugctl(debugctl.difference(record_flags));
            suspended.global_control = Some(self.pmu.read(regs::IA32_PERF_GLOBAL_CTRL));
            self.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, 0);
        }
        self.smis = self.smis.wrapping_add(1);
        self.suspended = Some(suspended);
    }

    /// Leaves system-management mode by RSM (rules SMF-04, SMF-05).
    ///
    /// The caller has called [`Msrs::sync_counters`].
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

    /// Checks that an SMI can have suspended these values.
    pub(super) fn check_suspended(
        &self,
        suspended: Option<SmmSuspended>,
    ) -> Result<(), MsrStateError> {
        let Some(suspended) = suspended else {
            return Ok(());
        };
        let saved = [
            (regs::IA32_DEBUGCTL, Some(suspended.debugctl)),
            (regs::IA32_PERF_GLOBAL_CTRL, suspended.global_control),
        ];
        for (index, value) in saved {
            let spec = super::find(index);
            let reserved = spec.map_or(u64::MAX, |spec| spec.reserved_bits(index, &self.config));
            if let Some(value) = value.filter(|value| value & reserved != 0) {
                return Err(MsrStateError::Value { index, value });
            }
        }
        Ok(())
    }
}

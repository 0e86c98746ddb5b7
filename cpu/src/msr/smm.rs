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
    /// IA32_LBR_CTL.LBREn.
    pub lbr_enabled: bool,
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
            lbr_enabled: self.branch.disable_architectural(),
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
        self.branch.enable_architectural(suspended.lbr_enabled);
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

#[cfg(test)]
mod tests {
    use hindsight_regs::branch::LbrCtl;

    use super::*;
    use crate::model::CpuModel;
    use crate::msr::{MsrConfig, Now};

    /// Rule GEN-32.
    #[test]
    fn smi_suspends_architectural_lbr_and_rsm_resumes_it() {
        let model = CpuModel::SapphireRapids;
        let facilities = model.definition().facilities.union(Facilities::SMM);
        let config = MsrConfig {
            model,
            ..MsrConfig::new(facilities, 2_500_000_000)
        };
        for control in [LbrCtl::all(), LbrCtl::PASS] {
            let mut msrs = Msrs::new(config);
            let _ = msrs.write(regs::IA32_LBR_CTL, control.bits(), Now { ticks: 0 });
            msrs.enter_smm();
            assert!(!msrs.branch().records());
            let suspended = control - LbrCtl::ENABLE;
            assert_eq!(msrs.branch().read(regs::IA32_LBR_CTL), suspended.bits());
            let mut other = Msrs::new(config);
            other.restore(&msrs.save()).unwrap();
            other.leave_smm();
            assert_eq!(other.branch().read(regs::IA32_LBR_CTL), control.bits());
        }
    }
}

//! The state that KVM was loaded with last, to load only what has changed.

use hindsight_cpu::debug::DebugRegisters;
use hindsight_cpu::state::{CpuState, XsaveArea};
use hindsight_regs::msr as regs;
use kvm_bindings::kvm_sregs;

use crate::kvm::state;

/// The parts of the state that the interpreter often leaves unchanged. What KVM still has is not
/// loaded again.
#[derive(Debug, PartialEq)]
pub(super) struct LoadedState {
    pub(super) sregs: kvm_sregs,
    pub(super) pdptr: [u64; 4],
    pub(super) xcr0: u64,
    pub(super) xsave: XsaveArea,
    pub(super) msrs: BaseMsrs,
    pub(super) debug: DebugRegisters,
}

impl LoadedState {
    /// The parts of `state`. `apic_base` is the local APIC's.
    pub(super) fn of(state: &CpuState, apic_base: u64) -> Self {
        Self {
            sregs: state::export_sregs(state, apic_base),
            pdptr: state.pdptr,
            xcr0: state.xcr0,
            xsave: state.xsave.clone(),
            msrs: BaseMsrs::of(state),
            debug: state.debug(),
        }
    }
}

/// MSRs of the base architecture: those that [`CpuState::msrs`] holds, in its order, except FMASK,
/// which the MSR table owns.
pub(super) const BASE_MSRS: [u32; 8] = [
    regs::IA32_STAR,
    regs::IA32_LSTAR,
    regs::IA32_CSTAR,
    regs::IA32_KERNEL_GS_BASE,
    regs::IA32_SYSENTER_CS,
    regs::IA32_SYSENTER_ESP,
    regs::IA32_SYSENTER_EIP,
    regs::IA32_PAT,
];

/// The values of the MSRs of the base architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BaseMsrs(pub(super) [u64; BASE_MSRS.len()]);

impl BaseMsrs {
    /// The values in `state`.
    pub(super) const fn of(state: &CpuState) -> Self {
        let m = &state.msrs;
        Self([
            m.star,
            m.lstar,
            m.cstar,
            m.kernel_gs_base,
            m.sysenter_cs,
            m.sysenter_esp,
            m.sysenter_eip,
            m.pat,
        ])
    }

    /// Copies the values to `state`.
    pub(super) const fn store(self, state: &mut CpuState) {
        let m = &mut state.msrs;
        [
            m.star,
            m.lstar,
            m.cstar,
            m.kernel_gs_base,
            m.sysenter_cs,
            m.sysenter_esp,
            m.sysenter_eip,
            m.pat,
        ] = self.0;
    }
}

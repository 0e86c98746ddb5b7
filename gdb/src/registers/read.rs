//! Reading a register from a vCPU's state.

use hindsight_cpu::state::CpuState;

use super::location::RegisterLocation;
use super::xsave;
use crate::modes;

/// The value of a register as `len` little-endian bytes.
///
/// `None` for an MSR that the state does not hold: [`crate::DebugTarget::read_msrs`] has it.
pub fn read_register(state: &CpuState, location: RegisterLocation, len: usize) -> Option<Vec<u8>> {
    let segment = |i: usize| state.seg.get(i).copied().unwrap_or_default();
    let value: u64 = match location {
        RegisterLocation::Msr(_) => return None,
        RegisterLocation::Xsave {
            component,
            offset,
            len: stored,
        } => {
            let mut value = xsave::read(state, component, offset, stored);
            value.resize(len, 0);
            return Some(value);
        }
        RegisterLocation::FpuTags => xsave::full_tags(state).into(),
        RegisterLocation::Gpr(i) => state.gpr.get(i).copied().unwrap_or(0),
        RegisterLocation::LinearPc => modes::linear_pc(state, state.rip),
        RegisterLocation::Rip => state.rip,
        RegisterLocation::Flags => state.rflags,
        RegisterLocation::Selector(i) => segment(i).selector.into(),
        RegisterLocation::SegmentBase(i) => segment(i).base,
        RegisterLocation::SegmentLimit(i) => segment(i).limit.into(),
        RegisterLocation::SegmentAccess(i) => segment(i).access.into(),
        RegisterLocation::Control(0) => state.cr0,
        RegisterLocation::Control(2) => state.cr2,
        RegisterLocation::Control(3) => state.cr3,
        RegisterLocation::Control(4) => state.cr4,
        RegisterLocation::Control(_) => state.cr8,
        RegisterLocation::Efer => state.efer,
        RegisterLocation::Xcr0 => state.xcr0,
        RegisterLocation::GdtrBase => state.gdtr.base,
        RegisterLocation::GdtrLimit => state.gdtr.limit.into(),
        RegisterLocation::IdtrBase => state.idtr.base,
        RegisterLocation::IdtrLimit => state.idtr.limit.into(),
        RegisterLocation::LdtrSelector => state.ldtr.selector.into(),
        RegisterLocation::LdtrBase => state.ldtr.base,
        RegisterLocation::TrSelector => state.tr.selector.into(),
        RegisterLocation::TrBase => state.tr.base,
        RegisterLocation::Debug(6) => state.dr6,
        RegisterLocation::Debug(7) => state.dr7,
        RegisterLocation::Debug(i) => state.dr.get(usize::from(i)).copied().unwrap_or(0),
        RegisterLocation::KernelGsBase => state.msrs.kernel_gs_base,
        RegisterLocation::RestartedSystemCall => u64::MAX,
    };
    let mut value = value.to_le_bytes().to_vec();
    value.resize(len, 0);
    Some(value)
}

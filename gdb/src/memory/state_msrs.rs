//! The MSRs that are part of [`CpuState`].

use hindsight_cpu::state::{CpuState, canonical, seg};
use hindsight_regs::msr;

/// The value of an MSR that [`CpuState`] holds; `None` for any other.
pub fn read_state_msr(state: &CpuState, index: u32) -> Option<u64> {
    let msrs = &state.msrs;
    Some(match index {
        msr::IA32_EFER => state.efer,
        msr::IA32_STAR => msrs.star,
        msr::IA32_LSTAR => msrs.lstar,
        msr::IA32_CSTAR => msrs.cstar,
        msr::IA32_FS_BASE => state.seg[seg::FS].base,
        msr::IA32_GS_BASE => state.seg[seg::GS].base,
        msr::IA32_KERNEL_GS_BASE => msrs.kernel_gs_base,
        msr::IA32_SYSENTER_CS => msrs.sysenter_cs,
        msr::IA32_SYSENTER_ESP => msrs.sysenter_esp,
        msr::IA32_SYSENTER_EIP => msrs.sysenter_eip,
        msr::IA32_PAT => msrs.pat,
        _ => return None,
    })
}

/// Writes an MSR that [`CpuState`] holds; `None` if WRMSR would raise #GP.
///
/// IA32_EFER, whose bits depend on the mode, is written as a register instead.
pub fn write_state_msr(state: &mut CpuState, index: u32, value: u64) -> Option<()> {
    let msrs = &mut state.msrs;
    let (location, is_address) = match index {
        msr::IA32_STAR => (&mut msrs.star, false),
        msr::IA32_LSTAR => (&mut msrs.lstar, true),
        msr::IA32_CSTAR => (&mut msrs.cstar, true),
        msr::IA32_FS_BASE => (&mut state.seg[seg::FS].base, true),
        msr::IA32_GS_BASE => (&mut state.seg[seg::GS].base, true),
        msr::IA32_KERNEL_GS_BASE => (&mut msrs.kernel_gs_base, true),
        msr::IA32_SYSENTER_CS => (&mut msrs.sysenter_cs, false),
        msr::IA32_SYSENTER_ESP => (&mut msrs.sysenter_esp, true),
        msr::IA32_SYSENTER_EIP => (&mut msrs.sysenter_eip, true),
        msr::IA32_PAT => {
            // Types 2 and 3 and those above 7 are reserved.
            let bytes = value.to_le_bytes();
            let valid = bytes.iter().all(|kind| matches!(kind, 0 | 1 | 4..=7));
            msrs.pat = valid.then_some(value)?;
            return Some(());
        }
        _ => return None,
    };
    if is_address && !canonical(value) {
        return None;
    }
    *location = value;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_msr_takes_the_values_that_wrmsr_takes() {
        let mut state = CpuState::reset();
        for (index, value, taken) in [
            (msr::IA32_LSTAR, 0xffff_8000_0000_1000, true),
            (msr::IA32_LSTAR, 1 << 47, false),
            (msr::IA32_STAR, 1 << 47, true),
            (msr::IA32_PAT, 0x0007_0406_0007_0406, true),
            (msr::IA32_PAT, 2, false),
            (msr::IA32_EFER, 0, false),
        ] {
            let before = read_state_msr(&state, index);
            let written = write_state_msr(&mut state, index, value);
            assert_eq!(written.is_some(), taken, "{index:#x} {value:#x}");
            let expected = if taken { Some(value) } else { before };
            assert_eq!(read_state_msr(&state, index), expected, "{index:#x}");
        }
    }
}

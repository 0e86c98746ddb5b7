//! The mode that a vCPU is in, from its state.

use hindsight_cpu::state::{Activity, CpuState, seg};
use hindsight_regs::cr::{Cr0, Efer};
use hindsight_regs::rflags::Rflags;

/// Whether IA-32e mode is active: 64-bit code, or compatibility mode.
pub fn is_ia32e(state: &CpuState) -> bool {
    state.efer & Efer::LMA.bits() != 0
}

/// Whether the vCPU executes 64-bit code.
pub fn is_64bit(state: &CpuState) -> bool {
    is_ia32e(state) && state.seg[seg::CS].long()
}

/// The width of the code segment: 16, 32 or 64.
pub fn code_bits(state: &CpuState) -> u32 {
    match (is_64bit(state), state.seg[seg::CS].default_big()) {
        (true, _) => 64,
        (false, true) => 32,
        (false, false) => 16,
    }
}

/// The base that the processor adds to RIP.
pub fn code_base(state: &CpuState) -> u64 {
    if is_64bit(state) {
        0
    } else {
        state.seg[seg::CS].base
    }
}

/// The linear address of the instruction at `ip` in the code segment.
pub fn linear_pc(state: &CpuState, ip: u64) -> u64 {
    if is_64bit(state) {
        ip
    } else {
        code_base(state).wrapping_add(ip) & 0xffff_ffff
    }
}

/// What the vCPU does, in which mode, at which privilege level, in a few words.
pub(crate) fn summary(state: &CpuState) -> String {
    let activity = match state.activity {
        Activity::Running => "runs",
        Activity::Halted => "halted",
        Activity::WaitForSipi => "waits for SIPI",
        Activity::Shutdown => "shut down by a triple fault",
    };
    let protected = state.cr0 & Cr0::PE.bits() != 0;
    let code = state.seg[seg::CS];
    let mode = match (protected, is_ia32e(state)) {
        (false, _) => "real mode",
        (true, _) if state.rflags & Rflags::VM.bits() != 0 => "virtual-8086 mode",
        (true, true) if code.long() => "64-bit",
        (true, true) => "compatibility mode",
        (true, false) if code.default_big() => "32-bit",
        (true, false) => "16-bit protected mode",
    };
    format!("{activity}, {mode}, CPL {}", state.cpl())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_base_counts_outside_64_bit_code_only() {
        let mut state = CpuState::reset();
        assert_eq!(linear_pc(&state, state.rip), 0xffff_fff0);
        assert_eq!((code_bits(&state), code_base(&state)), (16, 0xffff_0000));
        state.efer = Efer::LMA.bits();
        state.seg[seg::CS].access |= 1 << 13;
        assert_eq!(linear_pc(&state, 1 << 40), 1 << 40);
        assert_eq!((code_bits(&state), code_base(&state)), (64, 0));
    }

    #[test]
    fn summary_names_activity_mode_and_level() {
        let mut state = CpuState::reset();
        assert_eq!(summary(&state), "runs, real mode, CPL 0");
        (state.activity, state.cr0) = (Activity::Halted, 0x11);
        state.seg[seg::CS].access |= 1 << 14;
        state.seg[seg::SS].access |= 3 << 5;
        assert_eq!(summary(&state), "halted, 32-bit, CPL 3");
    }
}

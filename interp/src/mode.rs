//! The execution mode, as segment registers, CR0, EFER, CPL and VM define it.

use crate::descriptor::is_open_data;
use hindsight_cpu::state::{CpuState, seg};
use hindsight_regs::cr::{Cr0, Efer};

/// The mode that the processor is in.
///
/// [`ExecutionMode::update`] derives all of it but the CPL.
///
/// Invariant: code size is 2, 4 or 8 bytes; the masks are those of the code and stack size.
#[derive(Debug)]
pub(crate) struct ExecutionMode {
    /// All bits set in 64-bit mode, else the low 32.
    ip_mask: u64,
    stack_mask: u64,
    cpl: u8,
    code_size: u8,
    protected: bool,
    /// One bit for each segment that [`is_open_data`].
    open: u8,
}

impl ExecutionMode {
    pub(crate) fn new() -> Self {
        Self {
            ip_mask: 0xffff_ffff,
            stack_mask: 0xffff,
            cpl: 0,
            code_size: 2,
            protected: false,
            open: 0,
        }
    }

    /// Derives everything but the CPL again.
    pub(crate) fn update(&mut self, state: &CpuState, v86: bool) {
        let cs = state.seg[seg::CS];
        self.protected = state.cr0 & Cr0::PE.bits() != 0 && !v86;
        let lma = state.efer & Efer::LMA.bits() != 0;
        self.code_size = match (lma && cs.long(), cs.default_big()) {
            (true, _) => 8,
            (_, true) => 4,
            _ => 2,
        };
        self.ip_mask = if self.is_64bit() {
            u64::MAX
        } else {
            0xffff_ffff
        };
        self.stack_mask = match (self.is_64bit(), state.seg[seg::SS].default_big()) {
            (true, _) => u64::MAX,
            (_, true) => 0xffff_ffff,
            _ => 0xffff,
        };
        self.open = 0;
        for (i, &segment) in state.seg.iter().enumerate() {
            self.open |= u8::from(is_open_data(segment)) << i;
        }
    }

    /// The current privilege level, 0 to 3: 0 in real-address mode, 3 in virtual-8086 mode.
    pub(crate) fn cpl(&self) -> u8 {
        self.cpl
    }

    /// Sets the CPL. The caller must update all state that depends on it.
    pub(crate) fn set_cpl(&mut self, cpl: u8) {
        debug_assert!(cpl < 4);
        self.cpl = cpl;
    }

    /// Returns the code size in bytes: 2, 4 or 8.
    ///
    /// Operands and addresses have this size if no prefix changes it, except that 64-bit code has
    /// operands of 4 bytes.
    pub(crate) fn code_size(&self) -> u8 {
        debug_assert!(matches!(self.code_size, 2 | 4 | 8));
        self.code_size
    }

    /// Whether the processor is in 64-bit mode.
    #[inline(always)]
    pub(crate) fn is_64bit(&self) -> bool {
        self.code_size == 8
    }

    /// Returns the size in bytes of the widest operands: 8 in 64-bit mode, else 4.
    pub(crate) fn wide_size(&self) -> u8 {
        if self.is_64bit() { 8 } else { 4 }
    }

    /// Whether the processor is in protected mode or IA-32e mode, and not in virtual-8086 mode.
    pub(crate) fn protected(&self) -> bool {
        self.protected
    }

    /// Enters protected mode, before the segment registers are loaded.
    pub(crate) fn set_protected(&mut self) {
        self.protected = true;
    }

    /// Returns the mask of RIP: 64 bits in 64-bit mode, else 32.
    #[inline(always)]
    pub(crate) fn ip_mask(&self) -> u64 {
        self.ip_mask
    }

    /// Returns the mask of the stack pointer.
    pub(crate) fn stack_mask(&self) -> u64 {
        self.stack_mask
    }

    /// Whether accesses to segment 0 to 5 need no check, except at the end of 4 GiB.
    pub(crate) fn is_open(&self, seg: usize) -> bool {
        debug_assert!(seg < 6);
        self.open >> seg & 1 != 0
    }

    /// Whether this is 32-bit code whose DS, ES and SS need no check: see [`Self::is_open`].
    pub(crate) fn is_flat_32bit(&self) -> bool {
        const USUAL: u8 = 1 << seg::DS | 1 << seg::ES | 1 << seg::SS;
        self.code_size == 4 && self.open & USUAL == USUAL
    }
}

#[cfg(test)]
impl ExecutionMode {
    /// Sets the code size independently of CS.
    pub(crate) fn set_code_size(&mut self, code_size: u8) {
        self.code_size = code_size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::state::Segment;

    fn segment(limit: u32, access: u16) -> Segment {
        Segment {
            limit,
            access,
            ..Segment::default()
        }
    }

    #[test]
    fn code_and_stack_size_follow_from_cs_and_ss() {
        const BIG: u16 = 0x409b;
        const LONG: u16 = 0x209b;
        let (protected, long) = (Cr0::PE.bits(), Efer::LMA.bits());
        for (cs, efer, ss, expected) in [
            (0x9b, 0, 0x93, (2, 0xffff_ffff, 0xffff)),
            (BIG, 0, 0x93, (4, 0xffff_ffff, 0xffff)),
            (0x9b, 0, 0x4093, (2, 0xffff_ffff, 0xffff_ffff)),
            (LONG, long, 0x93, (8, u64::MAX, u64::MAX)),
            (BIG, long, 0x4093, (4, 0xffff_ffff, 0xffff_ffff)),
            // Outside IA-32e mode the L bit has no effect.
            (LONG, 0, 0x93, (2, 0xffff_ffff, 0xffff)),
        ] {
            let mut state = CpuState::reset();
            (state.cr0, state.efer) = (protected, efer);
            state.seg[seg::CS] = segment(0xffff, cs);
            state.seg[seg::SS] = segment(0xffff, ss);
            let mut mode = ExecutionMode::new();
            mode.update(&state, false);
            let derived = (mode.code_size(), mode.ip_mask(), mode.stack_mask());
            assert_eq!(derived, expected, "{cs:#x} {efer:#x} {ss:#x}");
            assert!(mode.protected());
            mode.update(&state, true);
            assert!(!mode.protected(), "virtual-8086 mode");
        }
    }

    #[test]
    fn flat_32_bit_code_has_open_data_segments() {
        let mut state = CpuState::reset();
        state.seg = [segment(u32::MAX, 0xc093); 6];
        state.seg[seg::CS] = segment(u32::MAX, 0xc09b);
        let mut mode = ExecutionMode::new();
        mode.update(&state, false);
        assert!(mode.is_flat_32bit() && !mode.is_open(seg::CS));
        state.seg[seg::ES].limit -= 1;
        mode.update(&state, false);
        assert!(!mode.is_flat_32bit() && mode.is_open(seg::DS) && !mode.is_open(seg::ES));
    }
}

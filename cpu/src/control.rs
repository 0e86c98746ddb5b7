//! What values the control registers, RFLAGS and IA32_EFER take: the same rules for the guest's
//! instructions, a debugger and saved states. SDM Vol. 3A, "Control Registers" and "Extended
//! Feature Enable Register".

use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::rflags::Rflags;

use crate::cpuid::Regs;
use crate::state::CpuState;

/// Protection keys, which CR4 has beyond [`Cr4`].
const CR4_PKE: u64 = 1 << 22;

/// The bits that a processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Controls {
    /// Of CR4.
    pub cr4: u64,
    /// Of IA32_EFER, with LMA, whose value WRMSR ignores.
    pub efer: u64,
    /// Of a physical address.
    pub physical: u64,
}

impl Controls {
    /// All that any processor has.
    pub const WIDEST: Self = Self {
        // Up to PKS; bits beyond would be features of processors to come.
        cr4: 0x1ff_ffff,
        efer: Efer::all().bits(),
        physical: (1 << 52) - 1,
    };

    /// What CPUID, asked by leaf and sub-leaf, tells.
    pub fn of(cpuid: impl Fn(u32, u32) -> Regs) -> Self {
        let width = cpuid(0x8000_0008, 0)[0] & 0xff;
        let width = if (32..=52).contains(&width) {
            width
        } else {
            46
        };
        Self {
            cr4: cr4_bits(cpuid(1, 0), cpuid(7, 0)).bits(),
            efer: efer_bits(cpuid(0x8000_0001, 0)).bits(),
            physical: (1 << width) - 1,
        }
    }

    /// Whether MOV to CR4 takes a value in the mode that the processor is in.
    pub fn takes_cr4(&self, state: &CpuState, value: u64) -> bool {
        let turned_on = value & !state.cr4;
        let long = is_long(state);
        let pcid = long && state.cr3 & 0xfff == 0;
        value & !self.cr4 == 0
            && (!long || value & Cr4::PAE.bits() != 0)
            && (turned_on & Cr4::PCIDE.bits() == 0 || pcid)
    }

    /// Whether WRMSR to IA32_EFER takes a value in the mode that the processor is in.
    pub fn takes_efer(&self, state: &CpuState, value: u64) -> bool {
        let paging = state.cr0 & Cr0::PG.bits() != 0;
        let switched = (value ^ state.efer) & Efer::LME.bits() != 0;
        value & !self.efer == 0 && !(paging && switched)
    }
}

/// Whether CR0 can have a value at all. MOV ignores reserved bits of the lower half.
pub const fn takes_cr0(value: u64) -> bool {
    let (pe, pg) = (value & Cr0::PE.bits() != 0, value & Cr0::PG.bits() != 0);
    let (nw, cd) = (value & Cr0::NW.bits() != 0, value & Cr0::CD.bits() != 0);
    value >> 32 == 0 && (pe || !pg) && (cd || !nw)
}

/// Whether MOV to CR3 takes a value in the mode that the processor is in; `physical` are the bits of
/// a physical address.
pub const fn takes_cr3(state: &CpuState, physical: u64, value: u64) -> bool {
    let pcids = state.cr4 & Cr4::PCIDE.bits() != 0;
    let no_flush = if pcids { 1 << 63 } else { 0 };
    value & !(physical | no_flush) == 0
}

/// Whether MOV to CR8 takes a value.
pub const fn takes_cr8(value: u64) -> bool {
    value < 16
}

/// Whether RFLAGS can have a value in the mode that the processor is in: there is no virtual-8086
/// mode in real-address mode and in IA-32e mode.
pub fn takes_rflags(state: &CpuState, value: u64) -> bool {
    let virtual_8086 = value & Rflags::VM.bits() != 0;
    value & !Rflags::all().bits() == 0
        && value & Rflags::FIXED.bits() != 0
        && (!virtual_8086 || state.cr0 & Cr0::PE.bits() != 0 && !is_long(state))
}

/// IA-32e mode is active.
fn is_long(state: &CpuState) -> bool {
    state.efer & Efer::LMA.bits() != 0
}

fn cr4_bits(one: Regs, seven: Regs) -> Cr4 {
    let mut bits = Cr4::VME | Cr4::PVI | Cr4::TSD | Cr4::DE | Cr4::PSE | Cr4::PAE;
    bits |= Cr4::MCE | Cr4::PGE | Cr4::PCE | Cr4::OSFXSR | Cr4::OSXMMEXCPT;
    bits.set(Cr4::PCIDE, one[2] & 1 << 17 != 0);
    bits.set(Cr4::OSXSAVE, one[2] & 1 << 26 != 0);
    bits.set(Cr4::FSGSBASE, seven[1] & 1 != 0);
    bits.set(Cr4::SMEP, seven[1] & 1 << 7 != 0);
    bits.set(Cr4::SMAP, seven[1] & 1 << 20 != 0);
    bits.set(Cr4::UMIP, seven[2] & 1 << 2 != 0);
    bits.set(Cr4::from_bits_retain(CR4_PKE), seven[2] & 1 << 3 != 0);
    bits
}

fn efer_bits(extended: Regs) -> Efer {
    let mut bits = Efer::LMA;
    bits.set(Efer::SCE, extended[3] & 1 << 11 != 0);
    bits.set(Efer::NXE, extended[3] & 1 << 20 != 0);
    bits.set(Efer::LME, extended[3] & 1 << 29 != 0);
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SYSCALL, NX and long mode, PCID, 46 bits of physical address; nothing more.
    fn controls() -> Controls {
        Controls::of(|leaf, _| match leaf {
            1 => [0, 0, 1 << 17, 0],
            0x8000_0001 => [0, 0, 0, 1 << 11 | 1 << 20 | 1 << 29],
            0x8000_0008 => [46, 0, 0, 0],
            _ => [0; 4],
        })
    }

    fn long() -> CpuState {
        CpuState {
            cr0: 0x8000_0011,
            cr3: 0x1000,
            cr4: 0x20,
            efer: 0x500,
            ..CpuState::reset()
        }
    }

    #[test]
    fn bits_are_those_that_cpuid_tells() {
        assert_eq!(
            controls(),
            Controls {
                cr4: 0x0002_07ff,
                efer: 0xd01,
                physical: 0x3fff_ffff_ffff,
            }
        );
        assert_eq!(Controls::of(|_, _| [u32::MAX; 4]).cr4, 0x0077_0fff);
    }

    #[test]
    fn cr0_needs_protection_for_paging_and_cd_for_nw() {
        for (value, taken) in [
            (0x8001_0031, true),
            (0x6000_0010, true),
            (0x8000_0010, false),
            (0x2000_0011, false),
            (1 << 32, false),
        ] {
            assert_eq!(takes_cr0(value), taken, "{value:#x}");
        }
    }

    #[test]
    fn cr3_has_the_bits_of_a_physical_address() {
        let mut state = long();
        let physical = controls().physical;
        assert!(takes_cr3(&state, physical, 0x3fff_ffff_f000));
        assert!(!takes_cr3(&state, physical, 1 << 46));
        assert!(!takes_cr3(&state, physical, 1 << 63));
        state.cr4 |= Cr4::PCIDE.bits();
        assert!(takes_cr3(&state, physical, 1 << 63));
    }

    #[test]
    fn cr4_keeps_pae_in_long_mode_and_takes_pcide_only_there() {
        let (mut state, real) = (long(), CpuState::reset());
        for (value, taken, taken_in_real) in [
            (0x20, true, true),
            (0, false, true),
            (0x2_0020, true, false),
            (1 << 20 | 0x20, false, false),
        ] {
            assert_eq!(controls().takes_cr4(&state, value), taken, "{value:#x}");
            assert_eq!(
                controls().takes_cr4(&real, value),
                taken_in_real,
                "{value:#x}"
            );
        }
        state.cr3 |= 1;
        assert!(!controls().takes_cr4(&state, 0x2_0020), "a PCID is there");
    }

    #[test]
    fn efer_does_not_switch_lme_while_paging_is_on() {
        let (state, real) = (long(), CpuState::reset());
        for (value, taken, taken_in_real) in [
            (0x501, true, true),
            (0x400, false, true),
            (0x1500, false, false),
        ] {
            assert_eq!(controls().takes_efer(&state, value), taken, "{value:#x}");
            assert_eq!(
                controls().takes_efer(&real, value),
                taken_in_real,
                "{value:#x}"
            );
        }
    }

    #[test]
    fn virtual_8086_mode_is_one_of_protected_mode() {
        let mut state = long();
        let value = 0x2_0002;
        assert!(!takes_rflags(&state, value), "IA-32e mode");
        assert!(!takes_rflags(&CpuState::reset(), value), "real mode");
        state.efer = 0;
        assert!(takes_rflags(&state, value));
        assert!(!takes_rflags(&state, 0), "bit 1 is always set");
    }
}

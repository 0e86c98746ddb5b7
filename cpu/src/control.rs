//! Legal values of the control registers, RFLAGS and IA32_EFER.
//!
//! The same rules hold for the guest's instructions, for a debugger and for saved states. SDM
//! Vol. 3A, "Control Registers" and "Extended Feature Enable Register".

use hindsight_regs::cpuid::{CpuidOutput, Feature};
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::rflags::Rflags;

use crate::cpuid::CpuidRegs;
use crate::state::CpuState;

/// Physical-address bits of a processor whose CPUID does not say how many it has.
const PHYSICAL_BITS_DEFAULT: u32 = 46;
/// Bit 63 of the source operand of MOV to CR3: with CR4.PCIDE, keep the TLB entries.
const CR3_NO_FLUSH: u64 = 1 << 63;

/// The bits of the control registers that a processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlMasks {
    /// The writable bits of CR4.
    pub cr4: u64,
    /// The bits of IA32_EFER that WRMSR accepts, with LMA, whose value it ignores.
    pub efer: u64,
    /// The bits of a physical address.
    pub physical: u64,
}

impl ControlMasks {
    /// The bits of every processor that this version knows.
    pub const WIDEST: Self = Self {
        // Up to PKS, bit 24; later bits belong to features that do not exist here.
        cr4: (1 << 25) - 1,
        efer: Efer::all().bits(),
        physical: (1 << 52) - 1,
    };

    /// Returns the bits of a processor with this CPUID. `cpuid` takes leaf and sub-leaf.
    pub fn from_cpuid(cpuid: impl Fn(u32, u32) -> CpuidRegs) -> Self {
        let width = match cpuid(0x8000_0008, 0)[0] & 0xff {
            width @ 32..=52 => width,
            _ => PHYSICAL_BITS_DEFAULT,
        };
        Self {
            cr4: cr4_bits(cpuid(1, 0), cpuid(7, 0)).bits(),
            efer: efer_bits(cpuid(0x8000_0001, 0)).bits(),
            physical: (1 << width) - 1,
        }
    }

    /// Whether MOV to CR4 accepts `value` in the current mode; otherwise it raises #GP(0).
    pub fn accepts_cr4(&self, state: &CpuState, value: u64) -> bool {
        let turned_on = value & !state.cr4;
        let ia32e = is_ia32e(state);
        let pcid_allowed = ia32e && state.cr3 & 0xfff == 0;
        value & !self.cr4 == 0
            && (!ia32e || value & Cr4::PAE.bits() != 0)
            && (turned_on & Cr4::PCIDE.bits() == 0 || pcid_allowed)
    }

    /// Whether WRMSR to IA32_EFER accepts `value` in the current mode; otherwise #GP(0).
    pub fn accepts_efer(&self, state: &CpuState, value: u64) -> bool {
        let paging = state.cr0 & Cr0::PG.bits() != 0;
        let lme_changes = (value ^ state.efer) & Efer::LME.bits() != 0;
        value & !self.efer == 0 && !(paging && lme_changes)
    }
}

/// Whether CR0 can have this value. MOV ignores reserved bits of the lower half.
pub const fn accepts_cr0(value: u64) -> bool {
    let (pe, pg) = (value & Cr0::PE.bits() != 0, value & Cr0::PG.bits() != 0);
    let (nw, cd) = (value & Cr0::NW.bits() != 0, value & Cr0::CD.bits() != 0);
    value >> 32 == 0 && (pe || !pg) && (cd || !nw)
}

/// Whether MOV to CR3 accepts `value` in the current mode.
///
/// `physical` is the mask of physical-address bits, [`ControlMasks::physical`].
pub const fn accepts_cr3(state: &CpuState, physical: u64, value: u64) -> bool {
    let pcids = state.cr4 & Cr4::PCIDE.bits() != 0;
    let no_flush = if pcids { CR3_NO_FLUSH } else { 0 };
    value & !(physical | no_flush) == 0
}

/// Whether MOV to CR8 accepts `value`.
pub const fn accepts_cr8(value: u64) -> bool {
    value < 16
}

/// Whether RFLAGS can have this value in the current mode.
///
/// Virtual-8086 mode exists in legacy protected mode only.
pub fn accepts_rflags(state: &CpuState, value: u64) -> bool {
    let virtual_8086 = value & Rflags::VM.bits() != 0;
    value & !Rflags::all().bits() == 0
        && value & Rflags::FIXED.bits() != 0
        && (!virtual_8086 || state.cr0 & Cr0::PE.bits() != 0 && !is_ia32e(state))
}

/// Whether IA-32e mode is active.
fn is_ia32e(state: &CpuState) -> bool {
    state.efer & Efer::LMA.bits() != 0
}

/// Whether the registers of its leaf announce `feature`.
fn announces([eax, ebx, ecx, edx]: CpuidRegs, feature: Feature) -> bool {
    let register = match feature.output {
        CpuidOutput::Eax => eax,
        CpuidOutput::Ebx => ebx,
        CpuidOutput::Ecx => ecx,
        CpuidOutput::Edx => edx,
    };
    register >> feature.bit & 1 != 0
}

fn cr4_bits(leaf_1: CpuidRegs, leaf_7: CpuidRegs) -> Cr4 {
    let mut bits = Cr4::VME | Cr4::PVI | Cr4::TSD | Cr4::DE | Cr4::PSE | Cr4::PAE;
    bits |= Cr4::MCE | Cr4::PGE | Cr4::PCE | Cr4::OSFXSR | Cr4::OSXMMEXCPT;
    for (bit, leaf, feature) in [
        (Cr4::PCIDE, leaf_1, Feature::PCID),
        (Cr4::OSXSAVE, leaf_1, Feature::XSAVE),
        (Cr4::FSGSBASE, leaf_7, Feature::FSGSBASE),
        (Cr4::SMEP, leaf_7, Feature::SMEP),
        (Cr4::SMAP, leaf_7, Feature::SMAP),
        (Cr4::UMIP, leaf_7, Feature::UMIP),
        (Cr4::PKE, leaf_7, Feature::PKU),
    ] {
        bits.set(bit, announces(leaf, feature));
    }
    bits
}

fn efer_bits(extended: CpuidRegs) -> Efer {
    let mut bits = Efer::LMA;
    bits.set(Efer::SCE, announces(extended, Feature::SYSCALL));
    bits.set(Efer::NXE, announces(extended, Feature::NX));
    bits.set(Efer::LME, announces(extended, Feature::LONG_MODE));
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor with SYSCALL, NX, long mode, PCID and 46 bits of physical address.
    fn controls() -> ControlMasks {
        ControlMasks::from_cpuid(|leaf, _| match leaf {
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
    fn control_masks_follow_cpuid() {
        assert_eq!(
            controls(),
            ControlMasks {
                cr4: 0x0002_07ff,
                efer: 0xd01,
                physical: 0x3fff_ffff_ffff,
            }
        );
        assert_eq!(
            ControlMasks::from_cpuid(|_, _| [u32::MAX; 4]).cr4,
            0x0077_0fff
        );
    }

    #[test]
    fn cr0_with_paging_needs_protection_and_nw_needs_cd() {
        for (value, accepted) in [
            (0x8001_0031, true),
            (0x6000_0010, true),
            (0x8000_0010, false),
            (0x2000_0011, false),
            (1 << 32, false),
        ] {
            assert_eq!(accepts_cr0(value), accepted, "{value:#x}");
        }
    }

    #[test]
    fn cr3_rejects_bits_beyond_the_physical_address() {
        let mut state = long();
        let physical = controls().physical;
        assert!(accepts_cr3(&state, physical, 0x3fff_ffff_f000));
        assert!(!accepts_cr3(&state, physical, 1 << 46));
        assert!(!accepts_cr3(&state, physical, 1 << 63));
        state.cr4 |= Cr4::PCIDE.bits();
        assert!(accepts_cr3(&state, physical, 1 << 63));
    }

    #[test]
    fn cr4_requires_pae_in_ia32e_mode_and_allows_pcide_only_there() {
        let (mut state, real) = (long(), CpuState::reset());
        for (value, accepted, accepted_in_real) in [
            (0x20, true, true),
            (0, false, true),
            (0x2_0020, true, false),
            (1 << 20 | 0x20, false, false),
        ] {
            assert_eq!(
                controls().accepts_cr4(&state, value),
                accepted,
                "{value:#x}"
            );
            assert_eq!(
                controls().accepts_cr4(&real, value),
                accepted_in_real,
                "{value:#x}"
            );
        }
        state.cr3 |= 1;
        assert!(
            !controls().accepts_cr4(&state, 0x2_0020),
            "CR3 holds a PCID"
        );
    }

    #[test]
    fn efer_rejects_to_change_lme_while_paging_is_on() {
        let (state, real) = (long(), CpuState::reset());
        for (value, accepted, accepted_in_real) in [
            (0x501, true, true),
            (0x400, false, true),
            (0x1500, false, false),
        ] {
            assert_eq!(
                controls().accepts_efer(&state, value),
                accepted,
                "{value:#x}"
            );
            assert_eq!(
                controls().accepts_efer(&real, value),
                accepted_in_real,
                "{value:#x}"
            );
        }
    }

    #[test]
    fn rflags_vm_is_rejected_outside_legacy_protected_mode() {
        let mut state = long();
        let value = 0x2_0002;
        assert!(!accepts_rflags(&state, value), "IA-32e mode");
        assert!(!accepts_rflags(&CpuState::reset(), value), "real mode");
        state.efer = 0;
        assert!(accepts_rflags(&state, value));
        assert!(!accepts_rflags(&state, 0), "bit 1 is fixed to 1");
    }
}

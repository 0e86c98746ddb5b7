//! Classes of user-mode instructions, which are compared and counted together.

use crate::host_cpu::has_avx512;
use crate::user::kind::InsnKind;
use iced_x86::{Instruction, Mnemonic as M, OpKind};
use std::arch::is_x86_feature_detected as host_has;

/// A class of user-mode instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum InsnClass {
    /// Additions, logic, comparisons, exchanges with arithmetic, decimal adjustments.
    Alu,
    /// Shifts and rotates.
    Shift,
    /// Multiplications and divisions.
    Muldiv,
    /// Bit tests and scans, byte swaps, population counts, CRC32.
    Bits,
    /// String instructions with and without repetition, XLAT.
    String,
    /// PUSH, POP, ENTER, LEAVE.
    Stack,
    /// Near branches, taken and not taken, after random flags.
    Branch,
    /// MOV and its variants, conversions, LEA, CMOVcc, SETcc, hints.
    Mov,
    /// Instructions that access only flags.
    Flags,
    /// SSE to SSE4.2 in their legacy encoding.
    Sse,
    /// AVX, FMA and F16C.
    Avx,
    /// AVX2, gathers among them.
    Avx2,
    /// AVX-512.
    Avx512,
    /// x87.
    X87,
    /// MMX.
    Mmx,
    /// AES, PCLMULQDQ, SHA, GFNI and their vector forms.
    Crypto,
    /// BMI1, BMI2 and ADX.
    Bmi,
    /// Saving and restoring the extended state.
    Xsave,
    /// Integer instructions with segment overrides and 32-bit addresses.
    Address,
    /// LOCK and XCHG with memory.
    Lock,
    /// Accesses that fault, privileged instructions, software interrupts.
    Fault,
    /// Integer instructions in compatibility mode.
    Compat,
    /// Vector and x87 instructions in compatibility mode.
    CompatVector,
    /// Saving and restoring the extended state in compatibility mode.
    CompatXsave,
}

/// All classes, in the order of the reports.
pub const ALL_CLASSES: [InsnClass; 24] = [
    InsnClass::Alu,
    InsnClass::Shift,
    InsnClass::Muldiv,
    InsnClass::Bits,
    InsnClass::String,
    InsnClass::Stack,
    InsnClass::Branch,
    InsnClass::Mov,
    InsnClass::Flags,
    InsnClass::Sse,
    InsnClass::Avx,
    InsnClass::Avx2,
    InsnClass::Avx512,
    InsnClass::X87,
    InsnClass::Mmx,
    InsnClass::Crypto,
    InsnClass::Bmi,
    InsnClass::Xsave,
    InsnClass::Address,
    InsnClass::Lock,
    InsnClass::Fault,
    InsnClass::Compat,
    InsnClass::CompatVector,
    InsnClass::CompatXsave,
];

impl InsnClass {
    /// The name on the command line and in reports.
    pub fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .map_or_else(String::new, |v| v.get_name().to_owned())
    }

    /// Code size: 32 in compatibility mode, else 64.
    pub fn bits(self) -> u32 {
        if matches!(self, Self::Compat | Self::CompatVector | Self::CompatXsave) {
            32
        } else {
            64
        }
    }

    /// Whether the instructions save and restore the extended state.
    pub(super) fn saves_state(self) -> bool {
        matches!(self, Self::Xsave | Self::CompatXsave)
    }

    /// Whether x87 and MMX state is compared.
    pub(super) fn has_x87(self) -> bool {
        matches!(
            self,
            Self::X87 | Self::Mmx | Self::Xsave | Self::CompatVector | Self::CompatXsave
        )
    }

    /// Whether the instructions may use opmask and 512-bit vector registers on this host.
    pub(super) fn has_evex(self) -> bool {
        let holds_evex = matches!(self, Self::Avx512 | Self::Fault | Self::CompatVector);
        holds_evex && has_avx512()
    }

    /// Whether an instruction of this kind may appear in the class.
    pub(super) fn contains(self, of: InsnKind, i: &Instruction) -> bool {
        use InsnKind as K;
        let memory = i.op_kinds().any(|k| k == OpKind::Memory);
        match self {
            Self::Address => {
                let integer = matches!(
                    of,
                    K::Alu | K::Mov | K::Bits | K::Shift | K::String | K::Muldiv
                );
                integer && (memory || of == K::String)
            }
            Self::Lock => memory && can_lock(i),
            Self::Fault => {
                // The x87 registers are not loaded in this class.
                let other = matches!(of, K::Xsave | K::Branch | K::X87 | K::Mmx);
                of == K::Trap || (memory || of == K::Stack || of == K::String) && !other
            }
            Self::Compat => of.is_integer() && of != K::Xsave,
            Self::CompatVector => !of.is_integer() && of != K::Trap,
            Self::CompatXsave => of == K::Xsave,
            _ => class_of(of) == Some(self),
        }
    }

    /// Whether this host can execute instructions of the class.
    pub fn on_this_host(self) -> bool {
        match self {
            Self::Avx => host_has!("avx"),
            Self::Avx2 => host_has!("avx2"),
            Self::Avx512 => has_avx512(),
            Self::Crypto => host_has!("aes"),
            Self::Bmi => host_has!("bmi1"),
            Self::Xsave | Self::CompatXsave => host_has!("xsave"),
            _ => true,
        }
    }
}

/// The class to which the instructions of a kind belong by default.
fn class_of(kind: InsnKind) -> Option<InsnClass> {
    Some(match kind {
        InsnKind::Alu => InsnClass::Alu,
        InsnKind::Shift => InsnClass::Shift,
        InsnKind::Muldiv => InsnClass::Muldiv,
        InsnKind::Bits => InsnClass::Bits,
        InsnKind::String => InsnClass::String,
        InsnKind::Stack => InsnClass::Stack,
        InsnKind::Branch => InsnClass::Branch,
        InsnKind::Mov => InsnClass::Mov,
        InsnKind::Flags => InsnClass::Flags,
        InsnKind::Sse => InsnClass::Sse,
        InsnKind::Avx => InsnClass::Avx,
        InsnKind::Avx2 => InsnClass::Avx2,
        InsnKind::Avx512 => InsnClass::Avx512,
        InsnKind::X87 => InsnClass::X87,
        InsnKind::Mmx => InsnClass::Mmx,
        InsnKind::Crypto => InsnClass::Crypto,
        InsnKind::Bmi => InsnClass::Bmi,
        InsnKind::Xsave => InsnClass::Xsave,
        InsnKind::Trap => return None,
    })
}

/// Whether an instruction with a memory operand locks the bus by itself (XCHG) or may have a LOCK
/// prefix.
fn can_lock(i: &Instruction) -> bool {
    i.mnemonic() == M::Xchg || i.op_code().can_use_lock_prefix()
}

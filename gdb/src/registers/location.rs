//! The place of a register's value.

use hindsight_cpu::state::seg;
use hindsight_regs::msr;

/// Where the value of a register is: in which part of a vCPU's state, or in which MSR.
///
/// General and segment registers go by the numbers that instructions encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterLocation {
    /// A general register.
    Gpr(usize),
    /// The linear address of the next instruction.
    LinearPc,
    /// RIP, without the base of CS.
    Rip,
    /// RFLAGS.
    Flags,
    /// A segment's selector.
    Selector(usize),
    /// A segment's base.
    SegmentBase(usize),
    /// A segment's limit.
    SegmentLimit(usize),
    /// A segment's access rights.
    SegmentAccess(usize),
    /// Bytes of the XSAVE area.
    Xsave {
        /// The state component, as a bit of XCR0.
        component: u32,
        /// The offset in the standard format.
        offset: usize,
        /// The number of bytes.
        len: usize,
    },
    /// The x87 tag word in its full form.
    FpuTags,
    /// A control register.
    Control(u8),
    /// IA32_EFER.
    Efer,
    /// XCR0.
    Xcr0,
    /// The base in GDTR.
    GdtrBase,
    /// The limit in GDTR.
    GdtrLimit,
    /// The base in IDTR.
    IdtrBase,
    /// The limit in IDTR.
    IdtrLimit,
    /// The selector in LDTR.
    LdtrSelector,
    /// The base in LDTR.
    LdtrBase,
    /// The selector in TR.
    TrSelector,
    /// The base in TR.
    TrBase,
    /// A debug register.
    Debug(u8),
    /// IA32_KERNEL_GS_BASE.
    KernelGsBase,
    /// `orig_rax`, the system call that Linux would restart: always none. Writes have no effect.
    ///
    /// gdb requires it of a Linux thread to write a core file.
    RestartedSystemCall,
    /// An MSR that [`CpuState`](hindsight_cpu::state::CpuState) does not hold.
    Msr(u32),
}

impl RegisterLocation {
    /// The MSR whose value the register is, if it is one.
    pub const fn msr(self) -> Option<u32> {
        match self {
            Self::Msr(index) => Some(index),
            Self::Efer => Some(msr::IA32_EFER),
            Self::SegmentBase(seg::FS) => Some(msr::IA32_FS_BASE),
            Self::SegmentBase(seg::GS) => Some(msr::IA32_GS_BASE),
            Self::KernelGsBase => Some(msr::IA32_KERNEL_GS_BASE),
            _ => None,
        }
    }
}

//! Classes of system instructions.

/// A class of system instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum SystemClass {
    /// MOV to segment registers, LFS, LGS, LSS, PUSH and POP of segments.
    Segments,
    /// LAR, LSL, VERR, VERW, SLDT, STR, LLDT.
    Descriptors,
    /// Far JMP, CALL and RET, to code segments and through call gates.
    Far,
    /// IRETQ with frames of all kinds.
    Iret,
    /// INT n through gates of all kinds.
    Gates,
    /// MOV to and from control registers, LMSW, SMSW, CLTS.
    Control,
    /// MOV to and from debug registers.
    Debug,
    /// Accesses through page-table entries of all kinds: error codes, accessed and dirty bits.
    Paging,
    /// Exceptions with their error codes, from both privilege levels.
    Exceptions,
    /// Protected mode: loads of segments, far pointers, accesses through segments with limits.
    Segments32,
    /// Protected mode: LAR, LSL, VERR, VERW, ARPL, LLDT, LTR and related instructions.
    Descriptors32,
    /// Protected mode: far branches of both operand sizes, through call gates and to tasks.
    Far32,
    /// Protected mode: IRET of both operand sizes, also to virtual-8086 mode.
    Iret32,
    /// Protected mode: INT n through gates of both sizes and task gates, INT3, INTO, BOUND.
    Gates32,
    /// Protected mode: task switches of all kinds.
    Tasks,
    /// Virtual-8086 mode where it differs from protected mode, with and without CR4.VME.
    Virtual8086,
    /// 32-bit and PAE paging.
    Paging32,
}

/// The classes that can be compared with a processor through KVM: all but [`SystemClass::Tasks`].
///
/// KVM does task switches itself. It writes the old task in the format of the new one, and loses
/// the registers of a new task that faults.
pub const KVM_CLASSES: [SystemClass; 16] = [
    SystemClass::Segments,
    SystemClass::Descriptors,
    SystemClass::Far,
    SystemClass::Iret,
    SystemClass::Gates,
    SystemClass::Control,
    SystemClass::Debug,
    SystemClass::Paging,
    SystemClass::Exceptions,
    SystemClass::Segments32,
    SystemClass::Descriptors32,
    SystemClass::Far32,
    SystemClass::Iret32,
    SystemClass::Gates32,
    SystemClass::Virtual8086,
    SystemClass::Paging32,
];

impl SystemClass {
    /// The name on the command line.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// The name in the progress file.
    pub(super) fn key(self) -> String {
        format!("system-{}", self.name())
    }

    /// Whether the cases run in 64-bit mode, else in protected or virtual-8086 mode.
    pub(super) fn is_64_bit(self) -> bool {
        self < Self::Segments32
    }
}

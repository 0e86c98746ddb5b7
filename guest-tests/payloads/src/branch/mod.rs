//! Code with known branches, which runs with a value of IA32_DEBUGCTL at CPL 0 or 3.
//!
//! A [`BranchSequence`] is a few instructions with the list of their taken branches. [`run`] writes
//! IA32_DEBUGCTL by the last instruction before them and by the first one after them, so that the
//! recorded branches can be compared one by one.

use hindsight_guest::insn;
use hindsight_guest::regs::branch::DebugCtl;

pub mod recorder;
pub mod sequences;

pub use recorder::{BranchRun, run, run_checked, run_sequence};

/// IA32_DEBUGCTL: record branches in the LBR stack.
pub const LBR: u64 = DebugCtl::LBR.bits();
/// IA32_DEBUGCTL: single-step on branches.
pub const BTF: u64 = DebugCtl::BTF.bits();
/// IA32_DEBUGCTL: branch trace messages (BTMs).
pub const TR: u64 = DebugCtl::TR.bits();
/// IA32_DEBUGCTL: BTMs are stored in the BTS buffer.
pub const BTS: u64 = DebugCtl::BTS.bits();
/// IA32_DEBUGCTL: interrupt at the threshold of the BTS buffer.
pub const BTINT: u64 = DebugCtl::BTINT.bits();
/// IA32_DEBUGCTL: no BTMs at CPL 0.
pub const BTS_OFF_OS: u64 = DebugCtl::BTS_OFF_OS.bits();
/// IA32_DEBUGCTL: no BTMs at CPL 1 to 3.
pub const BTS_OFF_USR: u64 = DebugCtl::BTS_OFF_USR.bits();
/// IA32_DEBUGCTL: a PMI request freezes the LBR stack.
pub const FREEZE_LBRS_ON_PMI: u64 = DebugCtl::FREEZE_LBRS_ON_PMI.bits();
/// IA32_DEBUGCTL: a PMI request freezes the counters.
pub const FREEZE_PERFMON_ON_PMI: u64 = DebugCtl::FREEZE_PERFMON_ON_PMI.bits();
/// IA32_DEBUGCTL: uncore PMIs.
pub const UNCORE_PMI_EN: u64 = DebugCtl::UNCORE_PMI_EN.bits();
/// IA32_DEBUGCTL: SMM suspends the facilities.
pub const FREEZE_WHILE_SMM: u64 = DebugCtl::FREEZE_WHILE_SMM.bits();

/// Bits of IA32_DEBUGCTL that this processor has and that record no branches.
///
/// With performance counters these are the two freezes on a PMI and the PMIs of the uncore.
pub fn other_bits() -> u64 {
    let counters = insn::cpuid(0, 0).eax >= 0xa && insn::cpuid(0xa, 0).eax & 0xff >= 2;
    if counters {
        FREEZE_LBRS_ON_PMI | FREEZE_PERFMON_ON_PMI | UNCORE_PMI_EN
    } else {
        0
    }
}

/// Class of a conditional branch. Every class is a bit number of MSR_LBR_SELECT.
pub const JCC: u64 = 2;
/// Class of a near relative call.
pub const REL_CALL: u64 = 3;
/// Class of a near indirect call.
pub const IND_CALL: u64 = 4;
/// Class of a near return.
pub const RET: u64 = 5;
/// Class of a near indirect jump.
pub const IND_JMP: u64 = 6;
/// Class of a near relative jump.
pub const REL_JMP: u64 = 7;
/// Class of far branches, interrupts and exceptions.
pub const FAR: u64 = 8;
/// Class of the delivery of a #DB, which is not in the LBR stack.
pub const DEBUG: u64 = 0;

/// Flag of a branch that ends at CPL 0, at whatever level the sequence runs.
const INTO_0: u64 = 1 << 8;
/// Flag of a branch that begins at CPL 0, at whatever level the sequence runs.
const FROM_0: u64 = 1 << 9;

/// A taken branch, interrupt or exception.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenBranch {
    /// Address of the branch.
    pub from: u64,
    /// Address of the target.
    pub to: u64,
    /// Class, with the flags of the levels.
    class_and_flags: u64,
}

impl TakenBranch {
    /// A branch within the level at which the sequence runs.
    pub const fn new(from: u64, to: u64, class: u64) -> Self {
        Self {
            from,
            to,
            class_and_flags: class,
        }
    }

    /// The same branch, ending at CPL 0.
    pub const fn into_0(self) -> Self {
        Self {
            class_and_flags: self.class_and_flags | INTO_0,
            ..self
        }
    }

    /// The same branch, beginning at CPL 0.
    pub const fn from_0(self) -> Self {
        Self {
            class_and_flags: self.class_and_flags | FROM_0,
            ..self
        }
    }

    /// From and to.
    pub fn pair(&self) -> (u64, u64) {
        (self.from, self.to)
    }

    /// The class: a bit number of MSR_LBR_SELECT, or [`DEBUG`].
    pub fn class(&self) -> u64 {
        self.class_and_flags & 0xff
    }

    /// CPL before the branch, in a run at `level`.
    pub fn cpl_before(&self, level: u8) -> u8 {
        if self.class_and_flags & FROM_0 != 0 {
            0
        } else {
            level
        }
    }

    /// CPL after the branch, in a run at `level`.
    pub fn cpl_after(&self, level: u8) -> u8 {
        if self.class_and_flags & INTO_0 != 0 {
            0
        } else {
            level
        }
    }

    /// Whether the LBR stack records the branch with this MSR_LBR_SELECT, outside call-stack mode.
    pub fn passes(&self, select: u64, level: u8) -> bool {
        let cpl_bit = if self.cpl_after(level) == 0 { 1 } else { 2 };
        self.class() != DEBUG && select & (1 << self.class() | cpl_bit) == 0
    }

    /// Whether BTS stores the branch with the filters of `debugctl`.
    pub fn is_stored(&self, debugctl: u64, level: u8) -> bool {
        let off = if self.cpl_before(level) == 0 {
            BTS_OFF_OS
        } else {
            BTS_OFF_USR
        };
        debugctl & off == 0
    }
}

/// Maximum number of branches that a [`BranchList`] holds.
pub const LIST_MAX: usize = 160;

/// Branches in the order in which they were taken.
#[derive(Clone, Copy, Debug)]
pub struct BranchList {
    items: [TakenBranch; LIST_MAX],
    count: usize,
}

impl BranchList {
    /// An empty list.
    pub const fn new() -> Self {
        Self {
            items: [TakenBranch::new(0, 0, 0); LIST_MAX],
            count: 0,
        }
    }

    /// Appends a branch; more than [`LIST_MAX`] branches panic.
    pub fn push(&mut self, item: TakenBranch) {
        self.items[self.count] = item;
        self.count += 1;
    }

    /// The branches.
    pub fn items(&self) -> &[TakenBranch] {
        &self.items[..self.count]
    }

    /// The branches for which `keep` returns true.
    pub fn filtered(&self, keep: impl Fn(&TakenBranch) -> bool) -> Self {
        let mut out = Self::new();
        self.items()
            .iter()
            .filter(|item| keep(item))
            .for_each(|&item| out.push(item));
        out
    }
}

impl Default for BranchList {
    fn default() -> Self {
        Self::new()
    }
}

/// Instructions with known branches; [`sequence!`](crate::sequence!) defines them.
#[repr(C)]
#[derive(Debug)]
pub struct BranchSequence {
    code: u64,
    stop: u64,
    records: *const TakenBranch,
    count: usize,
}

impl BranchSequence {
    /// Address of the first instruction.
    pub fn code(&self) -> u64 {
        self.code
    }

    /// Address of the last instruction, the INT that ends the run.
    pub fn stop(&self) -> u64 {
        self.stop
    }

    /// The taken branches.
    pub fn records(&self) -> &'static [TakenBranch] {
        // SAFETY: `sequence!` puts this many records at this address, and nothing writes them.
        unsafe { core::slice::from_raw_parts(self.records, self.count) }
    }

    /// The taken branches with the branch into the sequence and the one out of it.
    pub fn all(&self, level: u8) -> BranchList {
        let mut list = BranchList::new();
        list.push(recorder::entry(level, self.code));
        self.records().iter().for_each(|&item| list.push(item));
        list.push(recorder::exit(self.stop));
        list
    }
}

/// Defines a function that returns a [`BranchSequence`].
///
/// The instructions are in Intel syntax. The taken branches follow as `[from, to, class]`.
/// Addresses are numeric labels from 20 to 79, each used once. Classes are `JCC`, `REL_CALL`,
/// `IND_CALL`, `RET_NEAR`, `IND_JMP`, `REL_JMP`, `FAR`, `FAR_IN` (ends at CPL 0), `FAR_OUT` (begins
/// at CPL 0), `FAR_0` (both) and `DEBUG_IN` (delivery of a #DB).
#[macro_export]
macro_rules! sequence {
    (
        $(#[$doc:meta])*
        $name:ident: $($line:literal),* $(,)?
        => $([$from:literal, $to:literal, $class:literal]),* $(,)?
    ) => {
        ::core::arch::global_asm!(
            concat!(".pushsection .text.sequence.", stringify!($name), ", \"ax\""),
            ".balign 64, 0xcc",
            "8:",
            $($line,)*
            "9: int 0x81",
            ".popsection",
            ".set JCC, 2",
            ".set REL_CALL, 3",
            ".set IND_CALL, 4",
            ".set RET_NEAR, 5",
            ".set IND_JMP, 6",
            ".set REL_JMP, 7",
            ".set FAR, 8",
            ".set FAR_IN, 0x108",
            ".set FAR_OUT, 0x208",
            ".set FAR_0, 0x308",
            ".set DEBUG_IN, 0x100",
            concat!(".pushsection .rodata.sequence.", stringify!($name), ", \"a\""),
            ".balign 8",
            "6:",
            $(concat!(".quad ", $from, ", ", $to, ", ", $class),)*
            "7:",
            concat!(".global ", stringify!($name)),
            concat!(stringify!($name), ":"),
            ".quad 8b, 9b, 6b, (7b - 6b) / 24",
            ".popsection",
        );
        $(#[$doc])*
        pub fn $name() -> &'static $crate::branch::BranchSequence {
            unsafe extern "C" {
                static $name: $crate::branch::BranchSequence;
            }
            // SAFETY: the assembly above defines it with this layout, and nothing writes it.
            unsafe { &$name }
        }
    };
}

//! Code whose every branch is known, run with a value of IA32_DEBUGCTL at CPL 0 or 3.
//!
//! A [`Sequence`] is a few instructions with the list of their taken branches beside them. [`run`]
//! arms the recording by the last instruction before it and disarms it by the first one after it, so
//! that what was recorded can be compared record for record.

use hindsight_guest::insn;

pub mod recorder;
pub mod sequences;

pub use recorder::{BranchRun, run, run_checked, run_sequence};

/// IA32_DEBUGCTL: record branches in the LBR stack.
pub const LBR: u64 = 1 << 0;
/// IA32_DEBUGCTL: single-step on branches.
pub const BTF: u64 = 1 << 1;
/// IA32_DEBUGCTL: branch trace messages.
pub const TR: u64 = 1 << 6;
/// IA32_DEBUGCTL: messages go to the BTS buffer.
pub const BTS: u64 = 1 << 7;
/// IA32_DEBUGCTL: interrupt at the threshold of the BTS buffer.
pub const BTINT: u64 = 1 << 8;
/// IA32_DEBUGCTL: no messages at CPL 0.
pub const BTS_OFF_OS: u64 = 1 << 9;
/// IA32_DEBUGCTL: no messages at CPL 1 to 3.
pub const BTS_OFF_USR: u64 = 1 << 10;
/// IA32_DEBUGCTL: a PMI request freezes the LBR stack.
pub const FREEZE_LBRS_ON_PMI: u64 = 1 << 11;
/// IA32_DEBUGCTL: a PMI request freezes the counters.
pub const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
/// IA32_DEBUGCTL: uncore PMIs.
pub const UNCORE_PMI_EN: u64 = 1 << 13;
/// IA32_DEBUGCTL: suspend the facilities in SMM.
pub const FREEZE_WHILE_SMM: u64 = 1 << 14;

/// Those bits of IA32_DEBUGCTL that record nothing and this processor has: the two freezes on a PMI and
/// the uncore's PMIs, which come with the counters.
pub fn other_bits() -> u64 {
    let counters = insn::cpuid(0, 0).eax >= 0xa && insn::cpuid(0xa, 0).eax & 0xff >= 2;
    if counters {
        FREEZE_LBRS_ON_PMI | FREEZE_PERFMON_ON_PMI | UNCORE_PMI_EN
    } else {
        0
    }
}

/// Class of a conditional branch: its bit in MSR_LBR_SELECT, as all classes here.
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
/// Not in the LBR stack: the delivery of a #DB.
pub const DEBUG: u64 = 0;

/// Flag of a transfer that ends at CPL 0 whatever the level of the run.
const INTO_0: u64 = 1 << 8;
/// Flag of a transfer that begins at CPL 0 whatever the level of the run.
const FROM_0: u64 = 1 << 9;

/// A transfer of control.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenBranch {
    /// Where it is.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// Class, with the flags of its levels.
    kind: u64,
}

impl TakenBranch {
    /// A transfer inside the level of the run.
    pub const fn new(from: u64, to: u64, class: u64) -> Self {
        Self {
            from,
            to,
            kind: class,
        }
    }

    /// The same, ending at CPL 0.
    pub const fn into_0(self) -> Self {
        Self {
            kind: self.kind | INTO_0,
            ..self
        }
    }

    /// The same, beginning at CPL 0.
    pub const fn from_0(self) -> Self {
        Self {
            kind: self.kind | FROM_0,
            ..self
        }
    }

    /// From and to.
    pub fn pair(&self) -> (u64, u64) {
        (self.from, self.to)
    }

    /// Its class: a bit number of MSR_LBR_SELECT, or [`DEBUG`].
    pub fn class(&self) -> u64 {
        self.kind & 0xff
    }

    /// CPL before it, in a run at `level`.
    pub fn cpl_before(&self, level: u8) -> u8 {
        if self.kind & FROM_0 != 0 { 0 } else { level }
    }

    /// CPL after it, in a run at `level`.
    pub fn cpl_after(&self, level: u8) -> u8 {
        if self.kind & INTO_0 != 0 { 0 } else { level }
    }

    /// Whether the LBR stack takes it with MSR_LBR_SELECT = `select` (without call-stack mode).
    pub fn passes(&self, select: u64, level: u8) -> bool {
        let cpl_bit = if self.cpl_after(level) == 0 { 1 } else { 2 };
        self.class() != DEBUG && select & (1 << self.class() | cpl_bit) == 0
    }

    /// Whether BTS takes it with the filters of `debugctl`.
    pub fn is_stored(&self, debugctl: u64, level: u8) -> bool {
        let off = if self.cpl_before(level) == 0 {
            BTS_OFF_OS
        } else {
            BTS_OFF_USR
        };
        debugctl & off == 0
    }
}

/// The most transfers a [`BranchList`] holds.
pub const LIST_MAX: usize = 160;

/// Transfers in order of time.
#[derive(Clone, Copy, Debug)]
pub struct BranchList {
    items: [TakenBranch; LIST_MAX],
    count: usize,
}

impl BranchList {
    /// No transfers.
    pub const fn new() -> Self {
        Self {
            items: [TakenBranch::new(0, 0, 0); LIST_MAX],
            count: 0,
        }
    }

    /// Appends one; more than [`LIST_MAX`] end the payload.
    pub fn push(&mut self, item: TakenBranch) {
        self.items[self.count] = item;
        self.count += 1;
    }

    /// The transfers.
    pub fn items(&self) -> &[TakenBranch] {
        &self.items[..self.count]
    }

    /// Those for which `keep` says so.
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

/// Instructions with known branches, as [`sequence!`](crate::sequence!) lays them out.
#[repr(C)]
#[derive(Debug)]
pub struct BranchSequence {
    code: u64,
    stop: u64,
    records: *const TakenBranch,
    count: usize,
}

impl BranchSequence {
    /// Its first instruction.
    pub fn code(&self) -> u64 {
        self.code
    }

    /// Its last instruction, the INT that ends the run.
    pub fn stop(&self) -> u64 {
        self.stop
    }

    /// Its taken branches.
    pub fn records(&self) -> &'static [TakenBranch] {
        // SAFETY: `sequence!` lays out so many of them at this address.
        unsafe { core::slice::from_raw_parts(self.records, self.count) }
    }

    /// The records with the transfer into the sequence and the one out of it.
    pub fn all(&self, level: u8) -> BranchList {
        let mut list = BranchList::new();
        list.push(recorder::entry(level, self.code));
        self.records().iter().for_each(|&item| list.push(item));
        list.push(recorder::exit(self.stop));
        list
    }
}

/// Lays out a [`BranchSequence`] and defines a function that returns it.
///
/// Instructions in Intel syntax, then the branches that are taken as `[from, to, class]`. Places are
/// numeric labels; use 20 to 79, each once. Classes are `JCC`, `REL_CALL`, `IND_CALL`, `RET_NEAR`,
/// `IND_JMP`, `REL_JMP`, `FAR`, `FAR_IN` (ends at CPL 0), `FAR_OUT` (begins at CPL 0), `FAR_0` (both) and
/// `DEBUG_IN` (delivery of a #DB).
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
            // SAFETY: the assembler laid it out, and nothing writes it.
            unsafe { &$name }
        }
    };
}

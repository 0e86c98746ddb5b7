//! The LBR stack: how to read, write and check it.

use hindsight_guest::prelude::*;
use hindsight_guest::regs::branch::{CYC_CNT_MAX, LBR_DEPTH, LbrInfo};
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr::{
    IA32_PERF_CAPABILITIES, MSR_LASTBRANCH_0_FROM_IP, MSR_LASTBRANCH_0_TO_IP, MSR_LASTBRANCH_TOS,
    MSR_LBR_INFO_0, MSR_LBR_SELECT, MSR_LER_FROM_LIP, MSR_LER_TO_LIP,
};
use hindsight_guest::{insn, msr};

use crate::branch::recorder::RunEvents;
use crate::branch::{BranchList, BranchSequence, LBR, TakenBranch, run_sequence};

/// Entries of the stack.
pub const ENTRIES: usize = LBR_DEPTH;
/// Bits of MSR_LBR_INFO that are 0 in every record outside a transaction.
pub const INFO_ZERO: u64 = !(LbrInfo::MISPRED.bits() | CYC_CNT_MAX);

/// Why a case is skipped without the facility.
pub const ABSENT: &str = "CPUID and IA32_PERF_CAPABILITIES report no LBR stack of format 5";

/// Whether the processor has an LBR stack of format 5.
pub fn present() -> bool {
    insn::has(Feature::PDCM) && msr::read(IA32_PERF_CAPABILITIES) & 0x3f == 5
}

/// The whole LBR stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbrStack {
    /// Index of the newest entry.
    pub tos: u64,
    /// Sources.
    pub from: [u64; ENTRIES],
    /// Destinations.
    pub to: [u64; ENTRIES],
    /// MSR_LBR_INFO of each entry: flags and elapsed cycles.
    pub info: [u64; ENTRIES],
}

fn read_all(first: u32) -> [u64; ENTRIES] {
    let mut index = first;
    [0; ENTRIES].map(|_: u64| {
        index += 1;
        msr::read(index - 1)
    })
}

fn write_all(first: u32, values: &[u64; ENTRIES]) {
    for (index, &value) in (first..).zip(values) {
        msr::write(index, value);
    }
}

impl LbrStack {
    /// An empty stack, as RESET leaves it.
    pub const EMPTY: Self = Self {
        tos: 0,
        from: [0; ENTRIES],
        to: [0; ENTRIES],
        info: [0; ENTRIES],
    };

    /// Reads the MSRs of the stack.
    pub fn read() -> Self {
        Self {
            tos: msr::read(MSR_LASTBRANCH_TOS),
            from: read_all(MSR_LASTBRANCH_0_FROM_IP),
            to: read_all(MSR_LASTBRANCH_0_TO_IP),
            info: read_all(MSR_LBR_INFO_0),
        }
    }

    /// Writes the MSRs of the stack.
    pub fn write(&self) {
        msr::write(MSR_LASTBRANCH_TOS, self.tos);
        write_all(MSR_LASTBRANCH_0_FROM_IP, &self.from);
        write_all(MSR_LASTBRANCH_0_TO_IP, &self.to);
        write_all(MSR_LBR_INFO_0, &self.info);
    }

    /// From and to of the entry that is `age` entries older than the newest.
    pub fn entry(&self, age: usize) -> (u64, u64) {
        let tos = usize::try_from(self.tos).unwrap_or(0);
        let at = tos.wrapping_sub(age) % ENTRIES;
        (self.from[at], self.to[at])
    }
}

/// Clears the stack, the last exception record and the filter.
pub fn reset() {
    LbrStack::EMPTY.write();
    msr::write(MSR_LBR_SELECT, 0);
    msr::write(MSR_LER_FROM_LIP, 0);
    msr::write(MSR_LER_TO_LIP, 0);
}

/// From and to of the last exception record.
pub fn ler() -> (u64, u64) {
    (msr::read(MSR_LER_FROM_LIP), msr::read(MSR_LER_TO_LIP))
}

/// Checks that the stack, which was empty before, holds exactly the records `expected`.
///
/// It checks TOS, the records from the newest on as far as they were not overwritten, that the
/// other entries are empty, and that no INFO has flags.
pub fn check_records(stack: &LbrStack, expected: &[TakenBranch]) -> bool {
    let count = expected.len() as u64;
    let mut equal = check_eq!(stack.tos, count % ENTRIES as u64, "TOS");
    for (age, record) in expected.iter().rev().take(ENTRIES).enumerate() {
        equal &= check_eq!(stack.entry(age), record.pair(), AGES[age]);
    }
    for (age, name) in AGES.iter().enumerate().skip(expected.len()) {
        equal &= check_eq!(stack.entry(age), (0, 0), name);
    }
    for info in stack.info {
        equal &= check_eq!(info & INFO_ZERO, 0, "bits of INFO that are always 0");
    }
    equal
}

/// Like [`check_records`], for the stack in the MSRs.
pub fn check_list(expected: &BranchList) -> bool {
    check_records(&LbrStack::read(), expected.items())
}

/// Runs the sequence with DEBUGCTL.LBR set, from an empty stack.
pub fn record(level: u8, sequence: &BranchSequence) -> Option<RunEvents> {
    reset();
    run_sequence(level, sequence, LBR)
}

/// Like [`record`], and checks the whole stack.
pub fn check_sequence(level: u8, sequence: &BranchSequence) -> Option<RunEvents> {
    let events = record(level, sequence)?;
    check_list(&sequence.all(level));
    Some(events)
}

/// Names of the entries, from the newest on.
const AGES: [&str; ENTRIES] = [
    "the newest entry",
    "entry -1",
    "entry -2",
    "entry -3",
    "entry -4",
    "entry -5",
    "entry -6",
    "entry -7",
    "entry -8",
    "entry -9",
    "entry -10",
    "entry -11",
    "entry -12",
    "entry -13",
    "entry -14",
    "entry -15",
    "entry -16",
    "entry -17",
    "entry -18",
    "entry -19",
    "entry -20",
    "entry -21",
    "entry -22",
    "entry -23",
    "entry -24",
    "entry -25",
    "entry -26",
    "entry -27",
    "entry -28",
    "entry -29",
    "entry -30",
    "entry -31",
];

/// Ends the case as skipped without the LBR stack.
#[macro_export]
macro_rules! need_lbr {
    ($ctx:expr) => {
        if !$crate::lbr::present() {
            hindsight_guest::skip!($ctx, $crate::lbr::ABSENT);
        }
    };
}

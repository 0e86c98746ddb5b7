//! Branch recording. SDM Vol. 3B, "Debug, Branch Profile, TSC, and Intel Resource Director
//! Technology Features".

use bitflags::bitflags;

bitflags! {
    /// IA32_DEBUGCTL. SDM Vol. 3B, "IA32_DEBUGCTL MSR".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DebugCtl: u64 {
        /// Record taken branches, interrupts and exceptions in the LBR stack.
        const LBR = 1 << 0;
        /// With EFLAGS.TF, single-step on taken branches.
        const BTF = 1 << 1;
        /// Branch trace messages.
        const TR = 1 << 6;
        /// Messages are stored in the BTS buffer.
        const BTS = 1 << 7;
        /// An interrupt when the BTS buffer reaches its threshold; else it is circular.
        const BTINT = 1 << 8;
        /// No messages for branches at CPL 0.
        const BTS_OFF_OS = 1 << 9;
        /// No messages for branches at CPL 1 to 3.
        const BTS_OFF_USR = 1 << 10;
        /// A PMI freezes the LBR stack.
        const FREEZE_LBRS_ON_PMI = 1 << 11;
        /// A PMI freezes all counters.
        const FREEZE_PERFMON_ON_PMI = 1 << 12;
        /// PMIs of the uncore are delivered.
        const UNCORE_PMI_EN = 1 << 13;
        /// Nothing is counted or recorded in SMM.
        const FREEZE_WHILE_SMM = 1 << 14;
        /// With DR7.RTM, advanced debugging of transactions.
        const RTM = 1 << 15;
    }
}

bitflags! {
    /// MSR_LBR_SELECT. SDM Vol. 3B, "Filtering of Last Branch Records".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct LbrSelect: u64 {
        /// Not branches that end at CPL 0.
        const CPL_EQ_0 = 1 << 0;
        /// Not branches that end at CPL 1 to 3.
        const CPL_NEQ_0 = 1 << 1;
        /// Not conditional branches.
        const JCC = 1 << 2;
        /// Not near relative calls.
        const NEAR_REL_CALL = 1 << 3;
        /// Not near indirect calls.
        const NEAR_IND_CALL = 1 << 4;
        /// Not near returns.
        const NEAR_RET = 1 << 5;
        /// Not near indirect jumps.
        const NEAR_IND_JMP = 1 << 6;
        /// Not near relative jumps.
        const NEAR_REL_JMP = 1 << 7;
        /// Not far branches, interrupts and exceptions.
        const FAR_BRANCH = 1 << 8;
        /// Call-stack mode: a return takes away what its call recorded.
        const EN_CALLSTACK = 1 << 9;
    }
}

bitflags! {
    /// The flags of MSR_LBR_INFO_x; bits 15:0 are CYC_CNT.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct LbrInfo: u64 {
        /// The record is that of a TSX abort.
        const TSX_ABORT = 1 << 61;
        /// The branch was inside of a transaction.
        const IN_TSX = 1 << 62;
        /// The branch was mispredicted.
        const MISPRED = 1 << 63;
    }
}

/// CYC_CNT of MSR_LBR_INFO_x: core cycles since the record before, at most this.
pub const CYC_CNT_MAX: u64 = 0xffff;

/// Entries of the LBR stack.
pub const LBR_DEPTH: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_values_are_those_of_the_manual() {
        assert_eq!(DebugCtl::all().bits(), 0xffc3);
        assert_eq!(DebugCtl::BTINT.bits(), 0x100);
        assert_eq!(LbrSelect::all().bits(), 0x3ff);
        assert_eq!(LbrInfo::all().bits(), 0xe000_0000_0000_0000);
    }
}

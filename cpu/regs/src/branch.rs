//! Branch recording. SDM Vol. 3B, "Debug, Branch Profile, TSC, and Intel Resource Director
//! Technology Features".

use bitflags::bitflags;

bitflags! {
    /// IA32_DEBUGCTL. SDM Vol. 3B, "IA32_DEBUGCTL MSR".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct DebugCtl: u64 {
        /// The LBR stack records taken branches, interrupts and exceptions.
        const LBR = 1 << 0;
        /// EFLAGS.TF single-steps on taken branches, not on instructions.
        const BTF = 1 << 1;
        /// Branch trace messages (BTMs) are sent.
        const TR = 1 << 6;
        /// Branch records are stored in the BTS buffer in place of messages on the bus.
        const BTS = 1 << 7;
        /// The BTS buffer interrupts at its threshold; otherwise it is circular.
        const BTINT = 1 << 8;
        /// Branches at CPL 0 are not traced.
        const BTS_OFF_OS = 1 << 9;
        /// Branches at CPL 1 to 3 are not traced.
        const BTS_OFF_USR = 1 << 10;
        /// A PMI freezes the LBR stack.
        const FREEZE_LBRS_ON_PMI = 1 << 11;
        /// A PMI freezes all counters.
        const FREEZE_PERFMON_ON_PMI = 1 << 12;
        /// The uncore may request performance-monitoring interrupts.
        const UNCORE_PMI_EN = 1 << 13;
        /// Counters and branch recording stop in system-management mode.
        const FREEZE_WHILE_SMM = 1 << 14;
        /// Together with DR7.RTM: advanced debugging of RTM regions.
        const RTM = 1 << 15;
    }
}

bitflags! {
    /// MSR_LBR_SELECT. SDM Vol. 3B, "Filtering of Last Branch Records".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct LbrSelect: u64 {
        /// Suppresses branches that end at CPL 0.
        const CPL_EQ_0 = 1 << 0;
        /// Suppresses branches that end at CPL 1 to 3.
        const CPL_NEQ_0 = 1 << 1;
        /// Suppresses conditional branches.
        const JCC = 1 << 2;
        /// Suppresses near relative calls.
        const NEAR_REL_CALL = 1 << 3;
        /// Suppresses near indirect calls.
        const NEAR_IND_CALL = 1 << 4;
        /// Suppresses near returns.
        const NEAR_RET = 1 << 5;
        /// Suppresses near indirect jumps.
        const NEAR_IND_JMP = 1 << 6;
        /// Suppresses near relative jumps.
        const NEAR_REL_JMP = 1 << 7;
        /// Suppresses far branches, interrupts and exceptions.
        const FAR_BRANCH = 1 << 8;
        /// Call-stack mode: a return pops the record of its call.
        const EN_CALLSTACK = 1 << 9;
    }
}

bitflags! {
    /// IA32_LBR_CTL. SDM Vol. 3B, "Last Branch Records", table "IA32_LBR_CTL".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct LbrCtl: u64 {
        /// LBREn: branches are recorded.
        const ENABLE = 1 << 0;
        /// Records branches that end at CPL 0.
        const OS = 1 << 1;
        /// Records branches that end at CPL 1 to 3.
        const USR = 1 << 2;
        /// Call-stack mode: a return removes the record of its call.
        const CALL_STACK = 1 << 3;
        /// Records conditional branches.
        const JCC = 1 << 16;
        /// Records near relative jumps.
        const NEAR_REL_JMP = 1 << 17;
        /// Records near indirect jumps.
        const NEAR_IND_JMP = 1 << 18;
        /// Records near relative calls.
        const NEAR_REL_CALL = 1 << 19;
        /// Records near indirect calls.
        const NEAR_IND_CALL = 1 << 20;
        /// Records near returns.
        const NEAR_RET = 1 << 21;
        /// Records far branches, interrupts, exceptions and transactional aborts.
        const OTHER_BRANCH = 1 << 22;
    }
}

impl LbrCtl {
    /// All bits that let records pass.
    pub const PASS: Self = Self::all().difference(Self::ENABLE.union(Self::CALL_STACK));
}

bitflags! {
    /// The flags of MSR_LBR_INFO_x; bits 15:0 are CYC_CNT. SDM Vol. 3B, "LBR Stack and
    /// IA32_DEBUGCTL MSR".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct LbrInfo: u64 {
        /// The record describes a transactional abort.
        const TSX_ABORT = 1 << 61;
        /// The branch retired inside a transaction.
        const IN_TSX = 1 << 62;
        /// The branch was mispredicted.
        const MISPRED = 1 << 63;
    }
}

/// What architectural LBR adds to the flags of IA32_LBR_x_INFO.
///
/// SDM Vol. 3B, "Last Branch Records", table "IA32_LBR_x_INFO".
pub mod arch_info {
    /// BR_TYPE, bits 59:56.
    pub const BR_TYPE_SHIFT: u32 = 56;
    /// The bits of BR_TYPE.
    pub const BR_TYPE: u64 = 0xf << BR_TYPE_SHIFT;
    /// CYC_CNT_VALID.
    pub const CYC_CNT_VALID: u64 = 1 << 60;
    /// BR_TYPE of a conditional branch.
    pub const JCC: u64 = 0;
    /// BR_TYPE of a near indirect jump.
    pub const NEAR_IND_JMP: u64 = 1;
    /// BR_TYPE of a near relative jump.
    pub const NEAR_REL_JMP: u64 = 2;
    /// BR_TYPE of a near indirect call.
    pub const NEAR_IND_CALL: u64 = 3;
    /// BR_TYPE of a near relative call.
    pub const NEAR_REL_CALL: u64 = 4;
    /// BR_TYPE of a near return.
    pub const NEAR_RET: u64 = 5;
    /// BR_TYPE of any other branch, interrupt or exception.
    pub const OTHER_BRANCH: u64 = 8;
}

/// Architectural LBR as a state component of XSAVES. SDM Vol. 1, "Architectural LBR State".
pub mod xsave {
    /// The component's number, a bit of IA32_XSS.
    pub const COMPONENT: u32 = 15;
    /// Bytes of the component: five registers, and three for each of 32 entries.
    pub const BYTES: u32 = 8 * (5 + 3 * 32);
}

/// Largest CYC_CNT of MSR_LBR_INFO_x: core cycles since the previous record, saturating.
pub const CYC_CNT_MAX: u64 = 0xffff;

/// Number of entries of the LBR stack.
pub const LBR_DEPTH: usize = 32;
/// The bits of MSR_LASTBRANCH_TOS that index the LBR stack.
pub const LBR_TOS_MASK: u64 = LBR_DEPTH as u64 - 1;

/// Byte offsets in the DS management area of what branch trace store uses, and its records.
///
/// SDM Vol. 3B, "64 Bit Format of the DS Save Area". The fields for PEBS are in
/// [`crate::pmu::pebs`].
pub mod bts {
    /// Linear address of the first record.
    pub const BASE: u64 = 0x00;
    /// Linear address of the next record to be written.
    pub const INDEX: u64 = 0x08;
    /// Linear address of the first byte after the buffer.
    pub const MAXIMUM: u64 = 0x10;
    /// Linear address at which an interrupt is requested.
    pub const THRESHOLD: u64 = 0x18;
    /// Bytes of a record: the address of the branch, that of its target, and flags, 8 bytes each.
    pub const RECORD: usize = 24;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bts_fields_match_the_manual() {
        let offsets = [bts::BASE, bts::INDEX, bts::MAXIMUM, bts::THRESHOLD];
        assert_eq!(offsets, [0x0, 0x8, 0x10, 0x18]);
        assert_eq!(bts::RECORD, 0x18);
    }

    #[test]
    fn branch_register_bits_match_the_manual() {
        assert_eq!(DebugCtl::all().bits(), 0xffc3);
        assert_eq!(DebugCtl::BTINT.bits(), 0x100);
        assert_eq!(LbrSelect::all().bits(), 0x3ff);
        assert_eq!(LbrCtl::all().bits(), 0x7f_000f);
        assert_eq!(LbrCtl::PASS.bits(), 0x7f_0006);
        assert_eq!(xsave::BYTES, 0x328);
        assert_eq!(LbrInfo::all().bits(), 0xe000_0000_0000_0000);
    }
}

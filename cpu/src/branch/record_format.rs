//! Where an LBR entry has its flags.

use hindsight_regs::branch::{CYC_CNT_MAX, LbrInfo, arch_info};

use super::BranchClass;
use crate::model::LbrModel;
use crate::state::canonical;

/// How the MSRs of an LBR entry hold the flags of the branch. SDM Vol. 3B, "LBR Stack".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordFormat {
    /// Format 2: FROM has no flags, and nothing else has.
    Address,
    /// Format 3: MISPRED is bit 63 of FROM.
    Mispredicted,
    /// Format 4: MISPRED, IN_TX and ABORT are bits 63:61 of FROM.
    Transactional,
    /// Format 4 of a processor without transactions.
    ///
    /// Bits 62:61 of FROM are 0 in records, but part of the address when software writes them.
    WithoutTransactions,
    /// Format 5: flags and cycles are in MSR_LBR_INFO_x.
    Info,
    /// Format 3FH, architectural LBR: IA32_LBR_x_INFO has the type of the branch, too.
    Architectural,
}

/// BR_TYPE of a branch of this class.
const fn branch_type(class: BranchClass) -> u64 {
    match class {
        BranchClass::Conditional | BranchClass::NotTaken => arch_info::JCC,
        BranchClass::DirectJump => arch_info::NEAR_REL_JMP,
        BranchClass::IndirectJump => arch_info::NEAR_IND_JMP,
        BranchClass::DirectCall | BranchClass::CallNext => arch_info::NEAR_REL_CALL,
        BranchClass::IndirectCall => arch_info::NEAR_IND_CALL,
        BranchClass::Return => arch_info::NEAR_RET,
        BranchClass::Far
        | BranchClass::Abort
        | BranchClass::SoftwareInterrupt
        | BranchClass::Exception
        | BranchClass::Debug
        | BranchClass::Interrupt => arch_info::OTHER_BRANCH,
    }
}

impl RecordFormat {
    pub(super) const fn of(model: &LbrModel, transactions: bool) -> Self {
        match (model.format, transactions) {
            (2, _) => Self::Address,
            (3, _) => Self::Mispredicted,
            (4, true) => Self::Transactional,
            (4, false) => Self::WithoutTransactions,
            (5, _) => Self::Info,
            _ => Self::Architectural,
        }
    }

    /// The bits of FROM that hold flags of a record.
    const fn flag_bits(self) -> u64 {
        match self {
            Self::Mispredicted => LbrInfo::MISPRED.bits(),
            Self::Transactional | Self::WithoutTransactions => LbrInfo::all().bits(),
            Self::Address | Self::Info | Self::Architectural => 0,
        }
    }

    /// The bits of INFO that exist; 0 without it.
    pub(super) const fn info_bits(self) -> u64 {
        match self {
            Self::Info => LbrInfo::all().bits() | CYC_CNT_MAX,
            Self::Architectural => {
                LbrInfo::all().bits() | CYC_CNT_MAX | arch_info::CYC_CNT_VALID | arch_info::BR_TYPE
            }
            _ => 0,
        }
    }

    /// FROM and INFO of a record of a branch of this class at `address`.
    pub(super) const fn record(
        self,
        class: BranchClass,
        address: u64,
        flags: LbrInfo,
        cycles: u64,
    ) -> (u64, u64) {
        match self {
            Self::Info => return (address, flags.bits() | cycles),
            Self::Architectural => {
                let class = branch_type(class) << arch_info::BR_TYPE_SHIFT;
                let info = flags.bits() | class | arch_info::CYC_CNT_VALID | cycles;
                return (address, info);
            }
            _ => {}
        }
        let bits = self.flag_bits();
        (address & !bits | flags.bits() & bits, 0)
    }

    /// Whether software can write `value` to FROM: the address in it is canonical.
    pub(super) const fn accepts(self, value: u64) -> bool {
        let flags = match self {
            Self::Address | Self::Info | Self::Architectural => 0,
            Self::Mispredicted | Self::WithoutTransactions => 1,
            Self::Transactional => 3,
        };
        canonical((value.cast_signed() << flags >> flags).cast_unsigned())
    }

    /// Whether FROM can hold `value`, written by software or recorded.
    pub(super) const fn accepts_saved(self, value: u64) -> bool {
        match self {
            Self::WithoutTransactions => {
                self.accepts(value) || Self::Transactional.accepts(value) && value >> 61 & 3 == 0
            }
            _ => self.accepts(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: u64 = 0xffff_ffff_8100_0000;
    const USER: u64 = 0x0000_7fff_ffff_f000;
    const ALL: LbrInfo = LbrInfo::all();

    #[test]
    fn flags_replace_the_highest_bits_of_from() {
        const CLASS: BranchClass = BranchClass::Return;
        let from = |format: RecordFormat, address, flags| format.record(CLASS, address, flags, 7).0;
        let none = LbrInfo::empty();
        use RecordFormat::{Mispredicted, Transactional};
        assert_eq!(from(Mispredicted, KERNEL, none), 0x7fff_ffff_8100_0000);
        assert_eq!(from(Mispredicted, KERNEL, ALL), KERNEL);
        assert_eq!(from(Mispredicted, USER, ALL), USER | 1 << 63);
        assert_eq!(from(Transactional, KERNEL, none), 0x1fff_ffff_8100_0000);
        let abort = LbrInfo::TSX_ABORT;
        assert_eq!(from(Transactional, USER, abort), USER | 1 << 61);
        assert_eq!(
            RecordFormat::Info.record(CLASS, KERNEL, ALL, 7),
            (KERNEL, 7 << 61 | 7)
        );
        assert_eq!(
            RecordFormat::Architectural.record(CLASS, KERNEL, ALL, 7),
            (KERNEL, 0xf5 << 56 | 7)
        );
        assert_eq!(Transactional.record(CLASS, USER, ALL, 7).1, 0);
        let address = RecordFormat::Address.record(CLASS, KERNEL, ALL, 7);
        assert_eq!(address, (KERNEL, 0));
    }

    #[test]
    fn software_writes_an_address_extended_up_to_the_flags() {
        let rows = [
            (RecordFormat::Info, [true, false, false, false]),
            (RecordFormat::Address, [true, false, false, false]),
            (RecordFormat::Mispredicted, [true, true, false, false]),
            (
                RecordFormat::WithoutTransactions,
                [true, true, false, false],
            ),
            (RecordFormat::Transactional, [true, true, true, false]),
        ];
        for (format, expected) in rows {
            let values = [KERNEL, KERNEL ^ 1 << 63, KERNEL ^ 7 << 61, KERNEL ^ 1 << 60];
            assert_eq!(
                values.map(|value| format.accepts(value)),
                expected,
                "{format:?}"
            );
        }
    }
}

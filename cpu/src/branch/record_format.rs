//! Where an LBR entry has its flags.

use hindsight_regs::branch::LbrInfo;

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
}

impl RecordFormat {
    pub(super) const fn of(model: &LbrModel, transactions: bool) -> Self {
        match (model.format, transactions) {
            (2, _) => Self::Address,
            (3, _) => Self::Mispredicted,
            (4, true) => Self::Transactional,
            (4, false) => Self::WithoutTransactions,
            _ => Self::Info,
        }
    }

    /// The bits of FROM that hold flags of a record.
    const fn flag_bits(self) -> u64 {
        match self {
            Self::Mispredicted => LbrInfo::MISPRED.bits(),
            Self::Transactional | Self::WithoutTransactions => LbrInfo::all().bits(),
            Self::Address | Self::Info => 0,
        }
    }

    /// FROM and INFO of a record of a branch at `address`.
    pub(super) const fn record(self, address: u64, flags: LbrInfo, cycles: u64) -> (u64, u64) {
        if let Self::Info = self {
            return (address, flags.bits() | cycles);
        }
        let bits = self.flag_bits();
        (address & !bits | flags.bits() & bits, 0)
    }

    /// Whether software can write `value` to FROM: the address in it is canonical.
    pub(super) const fn accepts(self, value: u64) -> bool {
        let flags = match self {
            Self::Address | Self::Info => 0,
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
        let from = |format: RecordFormat, address, flags| format.record(address, flags, 7).0;
        let none = LbrInfo::empty();
        use RecordFormat::{Mispredicted, Transactional};
        assert_eq!(from(Mispredicted, KERNEL, none), 0x7fff_ffff_8100_0000);
        assert_eq!(from(Mispredicted, KERNEL, ALL), KERNEL);
        assert_eq!(from(Mispredicted, USER, ALL), USER | 1 << 63);
        assert_eq!(from(Transactional, KERNEL, none), 0x1fff_ffff_8100_0000);
        let abort = LbrInfo::TSX_ABORT;
        assert_eq!(from(Transactional, USER, abort), USER | 1 << 61);
        assert_eq!(
            RecordFormat::Info.record(KERNEL, ALL, 7),
            (KERNEL, 7 << 61 | 7)
        );
        assert_eq!(Transactional.record(USER, ALL, 7).1, 0);
        assert_eq!(RecordFormat::Address.record(KERNEL, ALL, 7), (KERNEL, 0));
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

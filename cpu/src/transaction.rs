//! Restricted transactional memory: causes of aborts, and how the guest sees them.
//!
//! SDM Vol. 1, "Programming with Intel Transactional Synchronization Extensions".

/// Greatest nesting depth of XBEGIN.
pub const NEST_MAX: u8 = 7;

/// Bits of EAX after an abort.
///
/// SDM Vol. 1, "RTM Abort Status Definition".
pub mod status {
    /// XABORT, whose operand is in bits 31:24.
    pub const EXPLICIT: u32 = 1;
    /// The transaction may succeed on a retry.
    pub const RETRY: u32 = 1 << 1;
    /// Another processor accessed a line of the transaction.
    pub const CONFLICT: u32 = 1 << 2;
    /// The transaction accessed more lines than the caches hold.
    pub const CAPACITY: u32 = 1 << 3;
    /// A debug or breakpoint exception.
    pub const DEBUG: u32 = 1 << 4;
    /// The abort happened in a nested transaction.
    pub const NESTED: u32 = 1 << 5;
}

/// Cause of a transactional abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortCause {
    /// XABORT with this operand.
    Explicit(u8),
    /// Another processor or a device accessed a line of the transaction.
    Conflict,
    /// The transaction wrote more lines than the L1 holds.
    Writes,
    /// The transaction read more lines than the L2 holds.
    Reads,
    /// A condition for #DB or #BP.
    Debug,
    /// XBEGIN beyond [`NEST_MAX`].
    Nesting,
    /// An instruction or access that a transaction cannot contain, or an exception.
    Instruction,
    /// An interrupt, or an inspection of the vCPU by the monitor.
    Event,
}

impl AbortCause {
    /// EAX after the abort; `nested` if the nesting depth was above 1.
    pub const fn status(self, nested: bool) -> u32 {
        let bits = match self {
            Self::Explicit(operand) => status::EXPLICIT | (operand as u32) << 24,
            Self::Conflict => status::CONFLICT | status::RETRY,
            Self::Writes | Self::Reads => status::CAPACITY,
            Self::Debug => status::DEBUG,
            Self::Nesting | Self::Instruction => 0,
            Self::Event => status::RETRY,
        };
        bits | if nested { status::NESTED } else { 0 }
    }

    /// The abort information of a PEBS record; `cycles` is the duration of the transaction.
    ///
    /// SDM Vol. 3B, "Intel TSX and PEBS Support".
    pub const fn pebs_information(self, cycles: u64) -> u64 {
        const RTM: u64 = 1 << 33;
        const INSTRUCTION: u64 = 1 << 34;
        const OTHER: u64 = 1 << 35;
        const RETRY: u64 = 1 << 36;
        let cause = match self {
            Self::Explicit(_) | Self::Debug | Self::Nesting | Self::Instruction => INSTRUCTION,
            Self::Conflict => OTHER | RETRY | 1 << 37,
            Self::Writes => OTHER | 1 << 38,
            Self::Reads => OTHER | 1 << 39,
            Self::Event => OTHER | RETRY,
        };
        let cycles = if cycles > 0xffff_ffff {
            0xffff_ffff
        } else {
            cycles
        };
        RTM | cause | cycles
    }
}

/// Begin or end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionEvent {
    /// The outermost XBEGIN executed.
    Begun,
    /// The outermost XEND executed: the stores are visible.
    Committed,
    /// The transaction aborted: no store is visible.
    Aborted(AbortCause),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abort_status_matches_the_manual() {
        for (cause, expected) in [
            (AbortCause::Explicit(0xab), 0xab00_0001),
            (AbortCause::Conflict, 0b110),
            (AbortCause::Writes, 0b1000),
            (AbortCause::Reads, 0b1000),
            (AbortCause::Debug, 0b1_0000),
            (AbortCause::Nesting, 0),
            (AbortCause::Instruction, 0),
            (AbortCause::Event, 0b10),
        ] {
            assert_eq!(cause.status(false), expected, "{cause:?}");
            assert_eq!(cause.status(true), expected | 0b10_0000, "{cause:?}");
        }
    }

    #[test]
    fn pebs_information_has_the_cause_and_saturated_cycles() {
        let bits = |cause: AbortCause| cause.pebs_information(0) >> 32;
        assert_eq!(bits(AbortCause::Explicit(1)), 0b110);
        assert_eq!(bits(AbortCause::Conflict), 0b11_1010);
        assert_eq!(bits(AbortCause::Writes), 0b100_1010);
        assert_eq!(bits(AbortCause::Reads), 0b1000_1010);
        assert_eq!(bits(AbortCause::Event), 0b1_1010);
        assert_eq!(
            AbortCause::Event.pebs_information(u64::MAX) & 0xffff_ffff,
            0xffff_ffff
        );
        assert_eq!(AbortCause::Event.pebs_information(17) & 0xffff_ffff, 17);
    }
}

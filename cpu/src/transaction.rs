//! Restricted transactional memory: why transactions abort, and how that is shown. SDM Vol. 1,
//! "Programming with Intel Transactional Synchronization Extensions".

/// XBEGIN nests this deep.
pub const NEST_MAX: u8 = 7;

/// Bits of EAX after an abort. SDM Vol. 1, "RTM Abort Status Definition".
pub mod status {
    /// XABORT, whose operand is in bits 31:24.
    pub const EXPLICIT: u32 = 1;
    /// The transaction may succeed if it is tried again.
    pub const RETRY: u32 = 1 << 1;
    /// Another processor accessed a line of the transaction.
    pub const CONFLICT: u32 = 1 << 2;
    /// More lines than the caches hold.
    pub const CAPACITY: u32 = 1 << 3;
    /// A debug or breakpoint exception.
    pub const DEBUG: u32 = 1 << 4;
    /// It happened in a nested transaction.
    pub const NESTED: u32 = 1 << 5;
}

/// Why a transaction aborts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// XABORT with this operand.
    Explicit(u8),
    /// Another processor or a device accessed a line of the transaction.
    Conflict,
    /// It wrote more lines than the first level of cache holds.
    Writes,
    /// It read more lines than the second level of cache holds.
    Reads,
    /// A condition for #DB or #BP.
    Debug,
    /// XBEGIN beyond [`NEST_MAX`].
    Nesting,
    /// An instruction or an access that cannot be part of a transaction, or an exception.
    Instruction,
    /// An interrupt, or a look at the processor from outside.
    Event,
}

impl Cause {
    /// EAX after the abort.
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

    /// The abort information of a PEBS record; `cycles` is how long the transaction took. SDM Vol.
    /// 3B, "Intel TSX and PEBS Support".
    pub const fn information(self, cycles: u64) -> u64 {
        const RTM: u64 = 1 << 33;
        const INSTRUCTION: u64 = 1 << 34;
        const OTHER: u64 = 1 << 35;
        const RETRY: u64 = 1 << 36;
        let why = match self {
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
        RTM | why | cycles
    }
}

/// A step in the life of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The outermost XBEGIN.
    Begun,
    /// The outermost XEND: its stores are visible.
    Committed,
    /// Nothing of it happened.
    Aborted(Cause),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_each_cause() {
        for (cause, expected) in [
            (Cause::Explicit(0xab), 0xab00_0001),
            (Cause::Conflict, 0b110),
            (Cause::Writes, 0b1000),
            (Cause::Reads, 0b1000),
            (Cause::Debug, 0b1_0000),
            (Cause::Nesting, 0),
            (Cause::Instruction, 0),
            (Cause::Event, 0b10),
        ] {
            assert_eq!(cause.status(false), expected, "{cause:?}");
            assert_eq!(cause.status(true), expected | 0b10_0000, "{cause:?}");
        }
    }

    #[test]
    fn information_tells_what_and_how_long() {
        let bits = |cause: Cause| cause.information(0) >> 32;
        assert_eq!(bits(Cause::Explicit(1)), 0b110);
        assert_eq!(bits(Cause::Conflict), 0b11_1010);
        assert_eq!(bits(Cause::Writes), 0b100_1010);
        assert_eq!(bits(Cause::Reads), 0b1000_1010);
        assert_eq!(bits(Cause::Event), 0b1_1010);
        assert_eq!(
            Cause::Event.information(u64::MAX) & 0xffff_ffff,
            0xffff_ffff
        );
        assert_eq!(Cause::Event.information(17) & 0xffff_ffff, 17);
    }
}

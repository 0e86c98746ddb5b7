//! Debug registers. SDM Vol. 3B, "Debug Registers".

use bitflags::bitflags;

/// One of the four breakpoints, 0 to 3; a larger number names no breakpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakpointIndex(pub u8);

/// What kind of access a breakpoint watches: the field `R/Wn` of DR7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// 00: execution of the instruction at the address.
    Execute,
    /// 01: data writes.
    Write,
    /// 10: port input and output, with CR4.DE set.
    Io,
    /// 11: data reads and writes.
    ReadWrite,
}

impl Condition {
    /// The two bits of `R/Wn`.
    pub const fn bits(self) -> u64 {
        match self {
            Self::Execute => 0b00,
            Self::Write => 0b01,
            Self::Io => 0b10,
            Self::ReadWrite => 0b11,
        }
    }
}

/// How many bytes a breakpoint watches: the field `LENn` of DR7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// 00.
    One,
    /// 01.
    Two,
    /// 10.
    Eight,
    /// 11.
    Four,
}

impl Length {
    /// The two bits of `LENn`.
    pub const fn bits(self) -> u64 {
        match self {
            Self::One => 0b00,
            Self::Two => 0b01,
            Self::Eight => 0b10,
            Self::Four => 0b11,
        }
    }
}

/// DR7, debug control. SDM Vol. 3B, "Debug Control Register (DR7)".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dr7(pub u64);

impl Dr7 {
    /// Value after reset: only bit 10, which always reads as 1.
    pub const RESET: Self = Self(1 << 10);
    /// General detect enable.
    pub const GD: u64 = 1 << 13;
    /// Advanced debugging of RTM regions.
    pub const RTM: u64 = 1 << 11;

    /// This value with breakpoint `slot` enabled globally (`Gn`), and its `R/Wn` and `LENn` set.
    #[must_use]
    pub const fn with_breakpoint(
        self,
        slot: BreakpointIndex,
        condition: Condition,
        length: Length,
    ) -> Self {
        let BreakpointIndex(n) = slot;
        let shift = 16 + 4 * n;
        let cleared = self.0 & !(0b1111 << shift);
        let field = condition.bits() | length.bits() << 2;
        Self(cleared | field << shift | 0b10 << (2 * n))
    }

    /// `Ln | Gn`: bits 2n and 2n+1.
    pub const fn is_enabled(self, slot: BreakpointIndex) -> bool {
        let BreakpointIndex(n) = slot;
        (self.0 >> (2 * n)) & 0b11 != 0
    }

    /// `R/Wn`: two bits from bit 16 + 4n.
    pub const fn condition(self, slot: BreakpointIndex) -> Condition {
        let BreakpointIndex(n) = slot;
        match (self.0 >> (16 + 4 * n)) & 0b11 {
            0b00 => Condition::Execute,
            0b01 => Condition::Write,
            0b10 => Condition::Io,
            _ => Condition::ReadWrite,
        }
    }

    /// `LENn`: two bits from bit 18 + 4n.
    pub const fn length(self, slot: BreakpointIndex) -> Length {
        let BreakpointIndex(n) = slot;
        match (self.0 >> (18 + 4 * n)) & 0b11 {
            0b00 => Length::One,
            0b01 => Length::Two,
            0b10 => Length::Eight,
            _ => Length::Four,
        }
    }
}

bitflags! {
    /// DR6, debug status. SDM Vol. 3B, "Debug Status Register (DR6)".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Dr6: u64 {
        /// Condition of breakpoint 0 met.
        const B0 = 1 << 0;
        /// Condition of breakpoint 1 met.
        const B1 = 1 << 1;
        /// Condition of breakpoint 2 met.
        const B2 = 1 << 2;
        /// Condition of breakpoint 3 met.
        const B3 = 1 << 3;
        /// The next instruction accesses a debug register.
        const BD = 1 << 13;
        /// Single step.
        const BS = 1 << 14;
        /// Task switch.
        const BT = 1 << 15;
        /// Active low: 0 means inside an RTM region with advanced debugging.
        const RTM = 1 << 16;
    }
}

impl Dr6 {
    /// Value after reset, and after a write of 0, without RTM: the bits that always read as 1.
    pub const RESET: u64 = 0xffff_0ff0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dr7_fields_match_the_manual() {
        let dr7 = Dr7::RESET
            .with_breakpoint(BreakpointIndex(0), Condition::Write, Length::Four)
            .with_breakpoint(BreakpointIndex(3), Condition::ReadWrite, Length::Eight);
        assert_eq!(dr7.0, 0xb00d_0482);
        assert_eq!(dr7.condition(BreakpointIndex(3)), Condition::ReadWrite);
        assert_eq!(dr7.length(BreakpointIndex(3)), Length::Eight);
        assert!(dr7.is_enabled(BreakpointIndex(0)) && !dr7.is_enabled(BreakpointIndex(1)));
    }

    #[test]
    fn dr7_with_replaces_the_fields_of_the_slot() {
        let dr7 =
            Dr7::RESET.with_breakpoint(BreakpointIndex(1), Condition::ReadWrite, Length::Eight);
        assert_eq!(
            dr7.with_breakpoint(BreakpointIndex(1), Condition::Io, Length::Two)
                .0,
            0x0060_0408
        );
    }

    #[test]
    fn dr7_general_detect_matches_the_manual() {
        assert_eq!(Dr7::RESET.0 | Dr7::GD | Dr7::RTM, 0x2c00);
    }

    #[test]
    fn dr6_bits_match_the_manual() {
        assert_eq!(Dr6::all().bits(), 0x1_e00f);
        assert_eq!(Dr6::RESET | Dr6::BS.bits(), 0xffff_4ff0);
    }
}

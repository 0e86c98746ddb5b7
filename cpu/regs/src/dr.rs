//! Debug registers. SDM Vol. 3B, "Debug Registers".

use bitflags::bitflags;

/// Number of a hardware breakpoint, 0 to 3.
///
/// The methods that take an index check it in debug builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BreakpointIndex(pub u8);

impl BreakpointIndex {
    /// All four breakpoints, in order.
    pub const ALL: [Self; 4] = [Self(0), Self(1), Self(2), Self(3)];
}

/// Kind of access that meets a breakpoint: the field `R/Wn` of DR7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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

/// Bytes that a breakpoint covers: the field `LENn` of DR7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Length {
    /// 00: one byte; the only length of an instruction breakpoint.
    One,
    /// 01: two bytes.
    Two,
    /// 10: eight bytes.
    Eight,
    /// 11: four bytes.
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

    /// Number of bytes: 1, 2, 4 or 8.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// DR7, debug control. SDM Vol. 3B, "Debug Control Register (DR7)".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Dr7(pub u64);

impl Dr7 {
    /// Value after reset: only bit 10, which always reads as 1.
    pub const RESET: Self = Self(1 << 10);
    /// L0 to L3 and LE: the enables that a hardware task switch clears.
    pub const LOCAL_ENABLES: u64 = 0x155;
    /// Advanced debugging of RTM regions.
    pub const RTM: u64 = 1 << 11;
    /// General detect enable.
    pub const GD: u64 = 1 << 13;
    /// Bits that software can set without RTM; bit 10 is fixed, the others read as 0.
    pub const WRITABLE: u64 = 0xffff_23ff;

    /// This value with breakpoint `index` enabled globally (`Gn`), and its `R/Wn` and `LENn` set.
    #[must_use]
    pub const fn with_breakpoint(
        self,
        index: BreakpointIndex,
        condition: Condition,
        length: Length,
    ) -> Self {
        let BreakpointIndex(n) = index;
        debug_assert!(n < 4, "a hardware breakpoint is one of four");
        let shift = 16 + 4 * n;
        let cleared = self.0 & !(0b1111 << shift);
        let field = condition.bits() | length.bits() << 2;
        Self(cleared | field << shift | 0b10 << (2 * n))
    }

    /// Whether `Ln` or `Gn` is set: bits 2n and 2n+1.
    pub const fn is_enabled(self, index: BreakpointIndex) -> bool {
        let BreakpointIndex(n) = index;
        debug_assert!(n < 4, "a hardware breakpoint is one of four");
        (self.0 >> (2 * n)) & 0b11 != 0
    }

    /// The field `R/Wn`: two bits from bit 16 + 4n.
    pub const fn condition(self, index: BreakpointIndex) -> Condition {
        let BreakpointIndex(n) = index;
        debug_assert!(n < 4, "a hardware breakpoint is one of four");
        match (self.0 >> (16 + 4 * n)) & 0b11 {
            0b00 => Condition::Execute,
            0b01 => Condition::Write,
            0b10 => Condition::Io,
            _ => Condition::ReadWrite,
        }
    }

    /// The field `LENn`: two bits from bit 18 + 4n.
    pub const fn length(self, index: BreakpointIndex) -> Length {
        let BreakpointIndex(n) = index;
        debug_assert!(n < 4, "a hardware breakpoint is one of four");
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
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct Dr6: u64 {
        /// The condition of breakpoint 0 was met.
        const B0 = 1 << 0;
        /// The condition of breakpoint 1 was met.
        const B1 = 1 << 1;
        /// The condition of breakpoint 2 was met.
        const B2 = 1 << 2;
        /// The condition of breakpoint 3 was met.
        const B3 = 1 << 3;
        /// The next instruction accesses a debug register while DR7.GD is set.
        const BD = 1 << 13;
        /// Single step.
        const BS = 1 << 14;
        /// Task switch.
        const BT = 1 << 15;
        /// Active low: 0 for a #DB inside an RTM region with advanced debugging.
        const RTM = 1 << 16;
    }
}

impl Dr6 {
    /// Value after reset, and after a write of 0, without RTM: the bits that always read as 1.
    pub const RESET: u64 = 0xffff_0ff0;
    /// B0 to B3: the conditions of the breakpoints.
    pub const BREAKPOINTS: u64 = 0xf;
    /// Bits that software can set without RTM: B0 to B3, BD, BS and BT.
    pub const WRITABLE: u64 = 0xe00f;
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
    fn length_bytes_match_their_encodings() {
        use Length::{Eight, Four, One, Two};
        let encoded = [One, Two, Eight, Four].map(|length| (length.bits(), length.bytes()));
        assert_eq!(encoded, [(0, 1), (1, 2), (2, 8), (3, 4)]);
    }

    #[test]
    fn dr7_with_breakpoint_replaces_the_fields_of_its_index() {
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
        assert_eq!(Dr7::WRITABLE & (Dr7::RESET.0 | Dr7::RTM), 0);
    }

    #[test]
    fn dr6_bits_match_the_manual() {
        assert_eq!(Dr6::all().bits(), 0x1_e00f);
        assert_eq!(Dr6::RESET | Dr6::BS.bits(), 0xffff_4ff0);
        assert_eq!(Dr6::all().bits() & !Dr6::RTM.bits(), Dr6::WRITABLE);
    }
}

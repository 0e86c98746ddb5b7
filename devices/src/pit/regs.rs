//! Registers of the 8254. Intel 8254 data sheet (231164), "Programming the 8254".

use bitfield_struct::bitfield;

/// Counting mode of a channel: bits 3:1 of the control word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u8", into = "u8"))]
pub enum PitMode {
    /// Mode 0: OUT rises at terminal count.
    TerminalCount,
    /// Mode 1: a rising GATE starts a low pulse of the whole count.
    OneShot,
    /// Mode 2: OUT is low for the last clock of each period.
    RateGenerator,
    /// Mode 3: OUT is high for the first half of each period.
    SquareWave,
    /// Mode 4: OUT is low for one clock at terminal count.
    SoftwareStrobe,
    /// Mode 5: as mode 4, started by a rising GATE.
    HardwareStrobe,
}

impl PitMode {
    /// The mode that three bits encode; bit 2 is ignored in modes 2 and 3.
    const fn from_bits(bits: u8) -> Self {
        match bits & 0b111 {
            0b000 => Self::TerminalCount,
            0b001 => Self::OneShot,
            0b010 | 0b110 => Self::RateGenerator,
            0b011 | 0b111 => Self::SquareWave,
            0b100 => Self::SoftwareStrobe,
            _ => Self::HardwareStrobe,
        }
    }

    const fn into_bits(self) -> u8 {
        self as u8
    }

    /// Whether the channel reloads its count at the end of each period.
    pub(super) const fn is_periodic(self) -> bool {
        matches!(self, Self::RateGenerator | Self::SquareWave)
    }

    /// Whether a rising GATE starts the count.
    pub(super) const fn is_triggered(self) -> bool {
        matches!(self, Self::OneShot | Self::HardwareStrobe)
    }
}

impl From<PitMode> for u8 {
    fn from(mode: PitMode) -> Self {
        mode.into_bits()
    }
}

impl TryFrom<u8> for PitMode {
    type Error = &'static str;

    fn try_from(mode: u8) -> Result<Self, Self::Error> {
        if mode > 5 {
            return Err("the interval timer has modes 0 to 5");
        }
        Ok(Self::from_bits(mode))
    }
}

/// Bytes of a count that are read and written: bits 5:4 of the control word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u8", into = "u8"))]
pub enum PitAccess {
    /// 01: the least significant byte only.
    Low,
    /// 10: the most significant byte only.
    High,
    /// 11: the least significant byte, then the most significant one.
    Both,
}

impl PitAccess {
    /// The access that two bits encode; `None` for 00, the counter latch command.
    pub(super) const fn from_bits(bits: u8) -> Option<Self> {
        match bits & 0b11 {
            0b01 => Some(Self::Low),
            0b10 => Some(Self::High),
            0b11 => Some(Self::Both),
            _ => None,
        }
    }

    pub(super) const fn into_bits(self) -> u8 {
        match self {
            Self::Low => 0b01,
            Self::High => 0b10,
            Self::Both => 0b11,
        }
    }

    /// The byte that is read or written first.
    pub(super) const fn first_byte(self) -> Byte {
        match self {
            Self::High => Byte::High,
            Self::Low | Self::Both => Byte::Low,
        }
    }
}

impl From<PitAccess> for u8 {
    fn from(access: PitAccess) -> Self {
        access.into_bits()
    }
}

impl TryFrom<u8> for PitAccess {
    type Error = &'static str;

    fn try_from(access: u8) -> Result<Self, Self::Error> {
        Self::from_bits(access)
            .filter(|_| access <= 0b11)
            .ok_or("a channel of the interval timer has access 1 to 3")
    }
}

/// One byte of a 16-bit count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Byte {
    /// Bits 7:0.
    #[default]
    Low,
    /// Bits 15:8.
    High,
}

/// The control word of a channel, port 43H.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub(super) struct ControlWord {
    /// BCD: count in binary-coded decimal.
    pub(super) bcd: bool,
    #[bits(3)]
    pub(super) mode: PitMode,
    /// RW: 0 is the counter latch command, see [`PitAccess`].
    #[bits(2)]
    pub(super) access: u8,
    /// SC: the channel; 3 is the read-back command.
    #[bits(2)]
    pub(super) channel: u8,
}

/// The read-back command, port 43H.
#[bitfield(u8)]
pub(super) struct ReadBack {
    __: bool,
    /// Bit n selects channel n.
    #[bits(3)]
    pub(super) channels: u8,
    /// Active low: latch the status.
    pub(super) keep_status: bool,
    /// Active low: latch the count.
    pub(super) keep_count: bool,
    #[bits(2)]
    __: u8,
}

/// The status byte that the read-back command latches.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct PitStatus {
    /// The channel counts in binary-coded decimal.
    pub bcd: bool,
    /// The mode.
    #[bits(3)]
    pub mode: PitMode,
    /// The access, as in the control word.
    #[bits(2)]
    pub access: u8,
    /// No count is loaded yet.
    pub null_count: bool,
    /// Level of OUT.
    pub output: bool,
}

/// Port 61H, NMI status and control.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub(super) struct NmiStatusControl {
    /// GATE of channel 2.
    pub(super) gate2: bool,
    /// The speaker is connected to channel 2.
    pub(super) speaker: bool,
    /// Parity and I/O channel check enables.
    #[bits(2)]
    pub(super) checks: u8,
    /// Toggles at each memory refresh; read-only.
    pub(super) refresh: bool,
    /// OUT of channel 2; read-only.
    pub(super) output2: bool,
    #[bits(2)]
    __: u8,
}

impl NmiStatusControl {
    /// The writable bits.
    pub(super) const WRITABLE: u8 = 0xf;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_word_fields_match_the_data_sheet() {
        // Channel 1, low byte then high byte, mode 2, binary.
        let word = ControlWord::from(0x74);
        assert_eq!((word.channel(), word.bcd()), (1, false));
        assert_eq!(PitAccess::from_bits(word.access()), Some(PitAccess::Both));
        assert_eq!(word.mode(), PitMode::RateGenerator);
        // Mode 7 is mode 3.
        assert_eq!(ControlWord::from(0x3e).mode(), PitMode::SquareWave);
        assert_eq!(PitAccess::from_bits(ControlWord::from(0xc).access()), None);
    }

    #[test]
    fn read_back_and_status_fields_match_the_data_sheet() {
        // Latch count and status of channel 0.
        let command = ReadBack::from(0xc2);
        assert_eq!(command.channels(), 0b001);
        assert!(!command.keep_status() && !command.keep_count());
        let status = PitStatus::new()
            .with_output(true)
            .with_null_count(true)
            .with_access(3)
            .with_mode(PitMode::RateGenerator);
        assert_eq!(u8::from(status), 0xf4);
    }

    #[test]
    fn port_61h_fields_match_the_chipset() {
        let port = NmiStatusControl::new()
            .with_gate2(true)
            .with_refresh(true)
            .with_output2(true);
        assert_eq!(u8::from(port), 0x31);
    }

    #[test]
    fn saved_modes_and_accesses_are_checked() {
        for mode in 0..6 {
            assert_eq!(PitMode::try_from(mode).map(u8::from), Ok(mode));
        }
        assert!(PitMode::try_from(6).is_err());
        for access in 1..4 {
            assert_eq!(PitAccess::try_from(access).map(u8::from), Ok(access));
        }
        assert!(PitAccess::try_from(0).is_err() && PitAccess::try_from(5).is_err());
    }
}

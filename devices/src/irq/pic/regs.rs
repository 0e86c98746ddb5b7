//! Registers of the 8259A. Intel 8259A data sheet (231468), "Programming the 8259A".

use bitfield_struct::bitfield;

/// Initialization command word 1, at the command port; bit 4 is set.
#[bitfield(u8)]
pub(super) struct Icw1 {
    /// IC4: ICW4 follows.
    pub(super) needs_icw4: bool,
    /// SNGL: there is no cascade, and no ICW3.
    pub(super) single: bool,
    /// ADI: call address interval, of the MCS-80/85 only.
    __: bool,
    /// LTIM: all lines are level-triggered.
    pub(super) all_level: bool,
    /// Set in ICW1, clear in OCW2 and OCW3.
    pub(super) is_icw1: bool,
    #[bits(3)]
    __: u8,
}

/// Initialization command word 4.
#[bitfield(u8)]
pub(super) struct Icw4 {
    /// µPM: 8086 mode; always in effect here.
    pub(super) mode_8086: bool,
    /// AEOI: automatic end of interrupt.
    pub(super) auto_eoi: bool,
    #[bits(2)]
    __: u8,
    /// SFNM: special fully nested mode.
    pub(super) special_nested: bool,
    #[bits(3)]
    __: u8,
}

/// Operation command word 2, at the command port; bits 4:3 are clear.
#[bitfield(u8)]
pub(super) struct Ocw2 {
    /// L2 to L0: the line of a specific command.
    #[bits(3)]
    pub(super) line: u8,
    #[bits(2)]
    __: u8,
    /// R, SL and EOI.
    #[bits(3)]
    pub(super) command: EoiCommand,
}

/// What OCW2 does: its bits R, SL and EOI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EoiCommand {
    /// 000: rotate in automatic EOI mode, clear.
    ClearRotateOnAutoEoi,
    /// 001: non-specific EOI.
    NonSpecific,
    /// 010: no operation.
    Nop,
    /// 011: specific EOI.
    Specific,
    /// 100: rotate in automatic EOI mode, set.
    SetRotateOnAutoEoi,
    /// 101: rotate on non-specific EOI.
    RotateOnNonSpecific,
    /// 110: set priority.
    SetPriority,
    /// 111: rotate on specific EOI.
    RotateOnSpecific,
}

impl EoiCommand {
    const fn from_bits(bits: u8) -> Self {
        match bits & 0b111 {
            0b000 => Self::ClearRotateOnAutoEoi,
            0b001 => Self::NonSpecific,
            0b010 => Self::Nop,
            0b011 => Self::Specific,
            0b100 => Self::SetRotateOnAutoEoi,
            0b101 => Self::RotateOnNonSpecific,
            0b110 => Self::SetPriority,
            _ => Self::RotateOnSpecific,
        }
    }

    const fn into_bits(self) -> u8 {
        self as u8
    }
}

/// Operation command word 3, at the command port; bits 4:3 are 01.
#[bitfield(u8)]
pub(super) struct Ocw3 {
    /// RIS: reads return the ISR, not the IRR.
    pub(super) read_isr: bool,
    /// RR: RIS counts.
    pub(super) selects_read: bool,
    /// P: the next read is a poll.
    pub(super) poll: bool,
    /// Set in OCW3, clear in OCW2.
    pub(super) is_ocw3: bool,
    __: bool,
    /// SMM: special mask mode.
    pub(super) special_mask: bool,
    /// ESMM: SMM counts.
    pub(super) sets_special_mask: bool,
    __: bool,
}

/// The initialization command word that the data port expects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u8", into = "u8"))]
pub enum NextIcw {
    /// None: the chip is initialized, and the port is the interrupt mask.
    #[default]
    None,
    /// ICW2, the vector of line 0.
    Icw2,
    /// ICW3, the wiring of the cascade.
    Icw3,
    /// ICW4, the modes.
    Icw4,
}

impl From<NextIcw> for u8 {
    fn from(next: NextIcw) -> Self {
        match next {
            NextIcw::None => 0,
            NextIcw::Icw2 => 2,
            NextIcw::Icw3 => 3,
            NextIcw::Icw4 => 4,
        }
    }
}

impl TryFrom<u8> for NextIcw {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        match number {
            0 => Ok(Self::None),
            2 => Ok(Self::Icw2),
            3 => Ok(Self::Icw3),
            4 => Ok(Self::Icw4),
            _ => Err("an 8259A expects initialization command word 2, 3 or 4, or none (0)"),
        }
    }
}

/// A register of one of the two chips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PicRegister {
    /// ICW1, OCW2, OCW3; reads return the IRR, the ISR or a poll.
    Command,
    /// ICW2 to ICW4 and the interrupt mask.
    Data,
    /// Edge/level control.
    Elcr,
}

/// The chip (0 for the master) and the register of a port.
pub(super) fn decode(port: u16) -> Option<(usize, PicRegister)> {
    Some(match port {
        0x20 => (0, PicRegister::Command),
        0x21 => (0, PicRegister::Data),
        0xa0 => (1, PicRegister::Command),
        0xa1 => (1, PicRegister::Data),
        0x4d0 => (0, PicRegister::Elcr),
        0x4d1 => (1, PicRegister::Elcr),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initialization_words_match_the_data_sheet() {
        let icw1 = Icw1::from(0x11);
        assert!(icw1.is_icw1() && icw1.needs_icw4() && !icw1.single() && !icw1.all_level());
        assert!(Icw1::from(0x1a).all_level() && Icw1::from(0x12).single());
        let icw4 = Icw4::from(0x13);
        assert!(icw4.mode_8086() && icw4.auto_eoi() && icw4.special_nested());
    }

    #[test]
    fn operation_words_match_the_data_sheet() {
        let specific = Ocw2::from(0x66);
        assert_eq!(
            (specific.command(), specific.line()),
            (EoiCommand::Specific, 6)
        );
        for bits in 0..8 {
            let word = Ocw2::from(bits << 5);
            assert_eq!(word.command().into_bits(), bits);
        }
        let ocw3 = Ocw3::from(0x6f);
        assert!(ocw3.is_ocw3() && ocw3.poll() && ocw3.selects_read() && ocw3.read_isr());
        assert!(ocw3.sets_special_mask() && ocw3.special_mask());
    }

    #[test]
    fn saved_initialization_step_is_checked() {
        for number in [0, 2, 3, 4] {
            assert_eq!(NextIcw::try_from(number).map(u8::from), Ok(number));
        }
        assert!(NextIcw::try_from(1).is_err() && NextIcw::try_from(5).is_err());
    }
}

//! Registers and commands of the i8042. IBM PS/2 Hardware Interface Technical Reference.

use bitflags::bitflags;

bitflags! {
    /// Status register, port 64H.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct I8042Status: u8 {
        /// A byte is in the output buffer.
        const OUTPUT_FULL = 1 << 0;
        /// A byte is in the input buffer; never, as the controller takes no time.
        const INPUT_FULL = 1 << 1;
        /// The self-test passed.
        const SYSTEM = 1 << 2;
        /// The last write went to the command port.
        const COMMAND = 1 << 3;
        /// The keyboard is not locked.
        const UNLOCKED = 1 << 4;
        /// The byte in the output buffer is from the auxiliary device.
        const AUX_DATA = 1 << 5;
        /// A device did not respond.
        const TIMEOUT = 1 << 6;
        /// Parity error on a device's line.
        const PARITY = 1 << 7;
    }
}

bitflags! {
    /// Controller command byte, RAM location 0.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct CommandByte: u8 {
        /// Keyboard interrupt enable.
        const KEYBOARD_INTERRUPT = 1 << 0;
        /// Auxiliary device interrupt enable.
        const AUX_INTERRUPT = 1 << 1;
        /// The system flag of the status register.
        const SYSTEM = 1 << 2;
        /// The keyboard's clock is held low.
        const KEYBOARD_DISABLED = 1 << 4;
        /// The auxiliary device's clock is held low.
        const AUX_DISABLED = 1 << 5;
        /// Scan codes are translated to set 1.
        const TRANSLATE = 1 << 6;
    }
}

impl CommandByte {
    /// The value after reset: interrupts off, both devices disabled.
    pub(super) const RESET: Self = Self::SYSTEM
        .union(Self::KEYBOARD_DISABLED)
        .union(Self::AUX_DISABLED);
    /// The value that a BIOS leaves: the keyboard interrupts, with scan codes of set 1.
    pub(super) const AFTER_BIOS: Self = Self::KEYBOARD_INTERRUPT
        .union(Self::SYSTEM)
        .union(Self::AUX_DISABLED)
        .union(Self::TRANSLATE);
}

bitflags! {
    /// Controller output port.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct OutputPort: u8 {
        /// The processor's reset line, active low.
        const NO_RESET = 1 << 0;
        /// Address line 20 is enabled.
        const A20 = 1 << 1;
        /// The auxiliary device's data line.
        const AUX_DATA = 1 << 2;
        /// The auxiliary device's clock line.
        const AUX_CLOCK = 1 << 3;
        /// IRQ 1.
        const IRQ1 = 1 << 4;
        /// IRQ 12.
        const IRQ12 = 1 << 5;
        /// The keyboard's clock line.
        const KEYBOARD_CLOCK = 1 << 6;
        /// The keyboard's data line.
        const KEYBOARD_DATA = 1 << 7;
    }
}

/// A controller command, written to port 64H.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum I8042Command {
    /// 20H: read the command byte.
    ReadCommandByte,
    /// 60H: write the command byte.
    WriteCommandByte,
    /// A7H: disable the auxiliary device.
    DisableAux,
    /// A8H: enable the auxiliary device.
    EnableAux,
    /// A9H: test the auxiliary device's lines.
    TestAux,
    /// AAH: controller self-test.
    SelfTest,
    /// ABH: test the keyboard's lines.
    TestKeyboard,
    /// ADH: disable the keyboard.
    DisableKeyboard,
    /// AEH: enable the keyboard.
    EnableKeyboard,
    /// C0H: read the input port.
    ReadInputPort,
    /// D0H: read the output port.
    ReadOutputPort,
    /// D1H: write the output port.
    WriteOutputPort,
    /// D2H, D3H: return the parameter as if a device had sent it.
    Loop,
    /// D4H: send the parameter to the auxiliary device.
    SendAux,
    /// F0H to FFH: pulse the output port lines low whose bits in 3:0 are clear.
    Pulse(OutputPort),
}

impl I8042Command {
    /// The command of a byte; `None` if the controller ignores it.
    pub(super) fn decode(byte: u8) -> Option<Self> {
        Some(match byte {
            0x20 => Self::ReadCommandByte,
            0x60 => Self::WriteCommandByte,
            0xa7 => Self::DisableAux,
            0xa8 => Self::EnableAux,
            0xa9 => Self::TestAux,
            0xaa => Self::SelfTest,
            0xab => Self::TestKeyboard,
            0xad => Self::DisableKeyboard,
            0xae => Self::EnableKeyboard,
            0xc0 => Self::ReadInputPort,
            0xd0 => Self::ReadOutputPort,
            0xd1 => Self::WriteOutputPort,
            0xd2 | 0xd3 => Self::Loop,
            0xd4 => Self::SendAux,
            0xf0..=0xff => Self::Pulse(OutputPort::from_bits_truncate(!byte & 0xf)),
            _ => return None,
        })
    }
}

/// Response to the self-test: passed.
pub(super) const SELF_TEST_PASSED: u8 = 0x55;
/// Response to the keyboard's line test: no error.
pub(super) const KEYBOARD_LINES_GOOD: u8 = 0x00;
/// Response to the auxiliary device's line test: no device holds the clock line high.
pub(super) const AUX_CLOCK_STUCK_LOW: u8 = 0x01;
/// Response in place of a device that does not respond.
pub(super) const RESEND: u8 = 0xfe;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn register_bits_match_the_reference() {
        assert_eq!(CommandByte::RESET.bits(), 0x34);
        assert_eq!(CommandByte::AFTER_BIOS.bits(), 0x65);
        assert_eq!(I8042Status::all().bits(), 0xff);
        assert_eq!((OutputPort::NO_RESET | OutputPort::A20).bits(), 0x03);
    }

    #[test]
    fn pulse_command_selects_the_lines_with_clear_bits() {
        let reset = Some(I8042Command::Pulse(OutputPort::NO_RESET));
        assert_eq!(I8042Command::decode(0xfe), reset);
        let none = Some(I8042Command::Pulse(OutputPort::empty()));
        assert_eq!(I8042Command::decode(0xff), none);
        assert_eq!(I8042Command::decode(0x00), None);
    }
}

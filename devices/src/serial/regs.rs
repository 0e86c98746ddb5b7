//! Registers of the 16550A. PC16550D data sheet, "Registers".

use bitflags::bitflags;

/// Receiver buffer and transmitter holding register; DLL while DLAB is set.
pub(super) const DATA: u8 = 0;
/// Interrupt enable; DLM while DLAB is set.
pub(super) const IER: u8 = 1;
/// Interrupt identification (read) and FIFO control (write).
pub(super) const IIR_FCR: u8 = 2;
/// Line control.
pub(super) const LCR: u8 = 3;
/// Modem control.
pub(super) const MCR: u8 = 4;

bitflags! {
    /// Interrupt enable register.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct InterruptEnable: u8 {
        /// ERBFI: received data available.
        const RECEIVED = 1 << 0;
        /// ETBEI: transmitter holding register empty.
        const THR_EMPTY = 1 << 1;
        /// ELSI: receiver line status.
        const LINE_STATUS = 1 << 2;
        /// EDSSI: modem status.
        const MODEM_STATUS = 1 << 3;
    }
}

/// The pending interrupt with the highest priority: bits 3:0 of the IIR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InterruptId {
    /// No interrupt is pending.
    None = 0b0001,
    /// The transmitter holding register is empty.
    ThrEmpty = 0b0010,
    /// Received data is available.
    Received = 0b0100,
}

impl InterruptId {
    /// The IIR: the interrupt, and bits 7:6 set if the FIFOs are enabled.
    pub(super) const fn iir(self, fifo_enabled: bool) -> u8 {
        const FIFOS_ENABLED: u8 = 0b1100_0000;
        self as u8 | if fifo_enabled { FIFOS_ENABLED } else { 0 }
    }
}

bitflags! {
    /// FIFO control register.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct FifoControl: u8 {
        /// Enables both FIFOs.
        const ENABLE = 1 << 0;
        /// Clears the receive FIFO.
        const CLEAR_RECEIVER = 1 << 1;
        /// Clears the transmit FIFO.
        const CLEAR_TRANSMITTER = 1 << 2;
    }
}

bitflags! {
    /// Line control register.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct LineControl: u8 {
        /// WLS: word length less five bits, the low bit.
        const WORD_LENGTH_0 = 1 << 0;
        /// WLS: word length less five bits, the high bit.
        const WORD_LENGTH_1 = 1 << 1;
        /// STB: two stop bits.
        const TWO_STOP_BITS = 1 << 2;
        /// PEN: parity.
        const PARITY = 1 << 3;
        /// EPS: even parity.
        const EVEN_PARITY = 1 << 4;
        /// Stick parity.
        const STICK_PARITY = 1 << 5;
        /// Break.
        const BREAK = 1 << 6;
        /// DLAB: registers 0 and 1 are the divisor latch.
        const DIVISOR_LATCH = 1 << 7;
    }
}

bitflags! {
    /// Modem control register.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct ModemControl: u8 {
        /// Data terminal ready.
        const DTR = 1 << 0;
        /// Request to send.
        const RTS = 1 << 1;
        /// OUT1.
        const OUT1 = 1 << 2;
        /// OUT2: gates the interrupt on a PC.
        const OUT2 = 1 << 3;
        /// Loopback mode.
        const LOOP = 1 << 4;
    }
}

bitflags! {
    /// Line status register.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct LineStatus: u8 {
        /// DR: received data is available.
        const DATA_READY = 1 << 0;
        /// THRE: the transmitter holding register is empty.
        const THR_EMPTY = 1 << 5;
        /// TEMT: the transmitter is empty.
        const TRANSMITTER_EMPTY = 1 << 6;
    }
}

impl LineStatus {
    /// The status while nothing is received: transmission takes no time.
    pub(super) const IDLE: Self = Self::THR_EMPTY.union(Self::TRANSMITTER_EMPTY);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn register_bits_match_the_data_sheet() {
        assert_eq!(InterruptEnable::all().bits(), 0x0f);
        assert_eq!(FifoControl::all().bits(), 0x07);
        assert_eq!(LineControl::all().bits(), 0xff);
        assert_eq!(ModemControl::all().bits(), 0x1f);
        assert_eq!(LineStatus::IDLE.bits(), 0x60);
        assert_eq!(InterruptId::Received.iir(true), 0xc4);
        assert_eq!(InterruptId::None.iir(false), 0x01);
    }
}

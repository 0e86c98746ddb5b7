//! COM1, a 16550A UART, around `vm-superio`'s registers, receive FIFO and output.
//!
//! Follows the PC16550D data sheet ("Registers"). The interrupt identification and the interrupt
//! line are modelled here, level for level: ISA IRQ 4 is edge-triggered, so each new cause must
//! make a rising edge and each acknowledged one a falling edge, or a guest that handles one cause
//! per interrupt would hang. Transmission takes no time: the transmitter is always empty.
//!
//! Deviation: MCR.OUT2, which gates the interrupt on a PC, is set at reset, as firmware leaves it.
//! Not modelled: modem status changes, break, line errors, receive trigger levels, FIFO time-outs.

mod regs;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::io::{self, Write};
use std::mem;

use thiserror::Error;
use vm_superio::serial::{NoEvents, SerialState as UartState};
use vm_superio::{Serial as Uart, Trigger};

use crate::bus::Device;
use crate::hooks::IrqLine;
use crate::inspect::{FieldList, Inspect, InspectField};
use regs::{
    DATA, FifoControl, IER, IIR_FCR, InterruptEnable, InterruptId, LCR, LineControl, LineStatus,
    MCR, ModemControl,
};

/// First port of COM1.
pub const COM1_PORT: u16 = 0x3f8;
/// Number of ports of one UART.
pub const UART_PORTS: u16 = 8;
/// ISA interrupt of COM1.
pub const COM1_IRQ: u8 = 4;

/// Bytes of input that are kept beyond the FIFO for a guest that does not read them.
const BACKLOG_MAX: usize = 4096;
/// Bytes of the receive FIFO of `vm-superio`.
const FIFO_MAX: usize = 64;
/// Rate of the transmitter in bits per second with a divisor of 1.
const BIT_RATE_MAX: u32 = 115_200;

/// Ignores the interrupts of `vm-superio`, which this file derives itself.
#[derive(Debug)]
struct NoTrigger;

impl Trigger for NoTrigger {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// The destination of transmitted bytes.
type SerialOutput = Box<dyn Write + Send>;

/// A saved state that the UART rejects.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SerialError {
    /// The state has more unread input than the UART and its backlog hold.
    #[error("the saved serial port holds too much input: {fifo} bytes in the FIFO, {backlog} more")]
    TooMuchInput {
        /// Bytes in the FIFO.
        fifo: usize,
        /// Bytes of the backlog, which wait for the FIFO.
        backlog: usize,
    },
    /// The register has a bit that the hardware does not have.
    #[error("the saved serial port's interrupt enable register is {0:#x}")]
    InterruptEnable(u8),
}

/// The state of the UART as plain data.
///
/// All fields but the last four are registers, by their names in the data sheet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SerialState {
    /// Divisor latch, DLM in the high byte and DLL in the low one.
    pub divisor: u16,
    /// IER.
    pub interrupt_enable: u8,
    /// LCR.
    pub line_control: u8,
    /// MCR.
    pub modem_control: u8,
    /// SCR.
    pub scratch: u8,
    /// FCR bit 0: IIR bits 7:6 read as ones.
    pub fifo_enabled: bool,
    /// The transmitter became empty and IIR was not read since.
    pub thr_empty_pending: bool,
    /// The receive FIFO, the oldest byte first; at most 64 bytes.
    pub fifo: Vec<u8>,
    /// Input that waits for space in the FIFO; at most 4096 bytes.
    pub backlog: Vec<u8>,
}

/// A 16550A UART on 8 ports.
pub struct Serial {
    uart: Uart<NoTrigger, NoEvents, SerialOutput>,
    irq: IrqLine,
    level: bool,
    interrupt_enable: InterruptEnable,
    fifo_enabled: bool,
    thr_empty_pending: bool,
    backlog: VecDeque<u8>,
    output_failed: bool,
}

impl Serial {
    /// A UART after reset, which interrupts by `irq` and transmits to `output`.
    ///
    /// `output` is written and flushed byte by byte with the device locked: it should buffer, and
    /// must not block without end.
    pub fn new(irq: IrqLine, output: impl Write + Send + 'static) -> Self {
        let output: SerialOutput = Box::new(output);
        Self {
            uart: Uart::new(NoTrigger, output),
            irq,
            level: false,
            interrupt_enable: InterruptEnable::empty(),
            fifo_enabled: false,
            thr_empty_pending: false,
            backlog: VecDeque::new(),
            output_failed: false,
        }
    }

    /// Receives bytes. Returns how many were accepted.
    ///
    /// The others do not fit into the backlog of 4 KiB; the caller can drop them or try again.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let accepted = bytes.len().min(self.input_capacity());
        self.backlog.extend(&bytes[..accepted]);
        self.refill();
        self.update_line();
        accepted
    }

    /// The number of bytes that [`Serial::input`] would accept.
    pub fn input_capacity(&self) -> usize {
        debug_assert!(self.backlog.len() <= BACKLOG_MAX, "the backlog is bounded");
        BACKLOG_MAX - self.backlog.len()
    }

    /// The state as plain data, without output and interrupt line.
    pub fn save(&self) -> SerialState {
        let uart = self.uart.state();
        SerialState {
            divisor: u16::from_le_bytes([uart.baud_divisor_low, uart.baud_divisor_high]),
            interrupt_enable: self.interrupt_enable.bits(),
            line_control: uart.line_control,
            modem_control: uart.modem_control,
            scratch: uart.scratch,
            fifo_enabled: self.fifo_enabled,
            thr_empty_pending: self.thr_empty_pending,
            fifo: uart.in_buffer,
            backlog: self.backlog.iter().copied().collect(),
        }
    }

    /// Replaces the state by a saved one, and drives the interrupt line accordingly.
    ///
    /// # Errors
    /// The UART cannot be in this state; nothing was changed.
    pub fn restore(&mut self, state: &SerialState) -> Result<(), SerialError> {
        if state.fifo.len() > FIFO_MAX || state.backlog.len() > BACKLOG_MAX {
            return Err(SerialError::TooMuchInput {
                fifo: state.fifo.len(),
                backlog: state.backlog.len(),
            });
        }
        let Some(interrupt_enable) = InterruptEnable::from_bits(state.interrupt_enable) else {
            return Err(SerialError::InterruptEnable(state.interrupt_enable));
        };
        let mut line_status = LineStatus::IDLE;
        line_status.set(LineStatus::DATA_READY, !state.fifo.is_empty());
        let [baud_divisor_low, baud_divisor_high] = state.divisor.to_le_bytes();
        let uart = UartState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            line_control: state.line_control,
            line_status: line_status.bits(),
            modem_control: state.modem_control,
            scratch: state.scratch,
            in_buffer: state.fifo.clone(),
            ..UartState::default()
        };
        let output = mem::replace(self.uart.writer_mut(), Box::new(io::sink()));
        self.uart = Uart::from_state(&uart, NoTrigger, NoEvents, output)
            .expect("the FIFO fits, and no trigger fails");
        self.interrupt_enable = interrupt_enable;
        self.fifo_enabled = state.fifo_enabled;
        self.thr_empty_pending = state.thr_empty_pending;
        self.backlog = state.backlog.iter().copied().collect();
        self.level = self.asserted();
        self.irq.set(self.level);
        Ok(())
    }

    fn read_register(&mut self, register: u8) -> u8 {
        match register {
            DATA if !self.divisor_selected() => {
                let byte = self.uart.read(DATA);
                self.refill();
                byte
            }
            IIR_FCR => self.identify_interrupt(),
            _ => self.uart.read(register),
        }
    }

    fn write_register(&mut self, register: u8, value: u8) {
        match register {
            DATA if !self.divisor_selected() => self.transmit(value),
            IER if !self.divisor_selected() => {
                let enables = InterruptEnable::from_bits_truncate(value);
                let enabled = enables.difference(self.interrupt_enable);
                self.interrupt_enable = enables;
                self.write_uart(IER, value);
                // Enabling the interrupt while the transmitter is empty raises it.
                self.thr_empty_pending |= enabled.contains(InterruptEnable::THR_EMPTY);
            }
            IIR_FCR => self.write_fifo_control(FifoControl::from_bits_truncate(value)),
            _ => self.write_uart(register, value),
        }
    }

    fn transmit(&mut self, value: u8) {
        // The byte makes the holding register full, which withdraws the interrupt, and leaves it
        // at once, which raises it again: a new edge.
        self.thr_empty_pending = false;
        self.update_line();
        self.write_uart(DATA, value);
        self.thr_empty_pending = true;
    }

    fn write_fifo_control(&mut self, control: FifoControl) {
        let enable = control.contains(FifoControl::ENABLE);
        if enable != self.fifo_enabled || control.contains(FifoControl::CLEAR_RECEIVER) {
            // The FIFO can be drained only by the data register, which DLAB hides.
            let line_control = self.line_control();
            let visible = line_control.difference(LineControl::DIVISOR_LATCH);
            self.write_uart(LCR, visible.bits());
            while self.has_received() {
                self.uart.read(DATA);
            }
            self.write_uart(LCR, line_control.bits());
        }
        self.fifo_enabled = enable;
    }

    /// Reads IIR, which acknowledges an empty transmitter if that is the pending interrupt.
    fn identify_interrupt(&mut self) -> u8 {
        let id = self.pending_interrupt();
        if id == InterruptId::ThrEmpty {
            self.thr_empty_pending = false;
        }
        id.iir(self.fifo_enabled)
    }

    fn pending_interrupt(&self) -> InterruptId {
        if self.received_asserted() {
            InterruptId::Received
        } else if self.thr_empty_asserted() {
            InterruptId::ThrEmpty
        } else {
            InterruptId::None
        }
    }

    /// Writes a register of `vm-superio`. Output that fails is lost, as on an open line.
    fn write_uart(&mut self, register: u8, value: u8) {
        if let Err(error) = self.uart.write(register, value)
            && !mem::replace(&mut self.output_failed, true)
        {
            tracing::warn!("serial output is lost: {error}");
        }
    }

    /// Moves input from the backlog to the FIFO.
    fn refill(&mut self) {
        let count = self.uart.fifo_capacity().min(self.backlog.len());
        if count == 0 || self.modem_control().contains(ModemControl::LOOP) {
            return;
        }
        let bytes: Vec<u8> = self.backlog.drain(..count).collect();
        let queued = self.uart.enqueue_raw_bytes(&bytes);
        debug_assert!(matches!(queued, Ok(n) if n == count), "the bytes fit");
    }

    fn line_control(&mut self) -> LineControl {
        LineControl::from_bits_retain(self.uart.read(LCR))
    }

    fn modem_control(&mut self) -> ModemControl {
        ModemControl::from_bits_retain(self.uart.read(MCR))
    }

    fn divisor_selected(&mut self) -> bool {
        self.line_control().contains(LineControl::DIVISOR_LATCH)
    }

    fn has_received(&self) -> bool {
        self.uart.fifo_capacity() < FIFO_MAX
    }

    fn received_asserted(&self) -> bool {
        self.interrupt_enable.contains(InterruptEnable::RECEIVED) && self.has_received()
    }

    fn thr_empty_asserted(&self) -> bool {
        self.interrupt_enable.contains(InterruptEnable::THR_EMPTY) && self.thr_empty_pending
    }

    fn asserted(&mut self) -> bool {
        let control = self.modem_control();
        // In loopback mode the OUT2 pin is inactive.
        let gate = control.contains(ModemControl::OUT2) && !control.contains(ModemControl::LOOP);
        gate && self.pending_interrupt() != InterruptId::None
    }

    fn update_line(&mut self) {
        let level = self.asserted();
        if level != self.level {
            self.level = level;
            self.irq.set(level);
        }
    }
}

impl Device for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (byte, register) in data.iter_mut().zip(offset..) {
            *byte = u8::try_from(register).map_or(0xff, |register| self.read_register(register));
        }
        self.update_line();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (&byte, register) in data.iter().zip(offset..) {
            if let Ok(register) = u8::try_from(register) {
                self.write_register(register, byte);
            }
        }
        self.update_line();
    }
}

impl Inspect for Serial {
    fn inspect(&self) -> Vec<InspectField> {
        let state = self.save();
        let mut fields = FieldList::default();
        fields.push("divisor", state.divisor);
        match BIT_RATE_MAX.checked_div(state.divisor.into()) {
            Some(rate) => fields.push("rate", format_args!("{rate} baud")),
            None => fields.push("rate", "none"),
        }
        fields.flags("IER", self.interrupt_enable);
        fields.push("interrupt", format_args!("{:?}", self.pending_interrupt()));
        fields.flags("LCR", LineControl::from_bits_retain(state.line_control));
        fields.flags("MCR", ModemControl::from_bits_retain(state.modem_control));
        fields.hex("SCR", state.scratch);
        fields.flag("FIFOs enabled", self.fifo_enabled);
        fields.push("received bytes", state.fifo.len());
        fields.push("backlog bytes", state.backlog.len());
        fields.push("IRQ level", u8::from(self.level));
        fields.finish()
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serial")
            .field("state", &self.save())
            .finish_non_exhaustive()
    }
}

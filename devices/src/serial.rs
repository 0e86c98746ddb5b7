//! COM1, a 16550A UART, around `vm-superio`'s registers, receive FIFO and output.
//!
//! Follows the PC16550D data sheet ("Registers"). The interrupt identification and the interrupt
//! line are modelled here, level for level: ISA IRQ 4 is edge-triggered, so each new cause must make
//! a rising edge and each acknowledged one a falling edge, or a guest that looks at one cause for
//! each interrupt would hang. Transmission takes no time: the transmitter is always empty.
//!
//! Deviation: MCR.OUT2, which gates the interrupt on a PC, is set at reset, as firmware leaves it.
//! Left out: modem status changes, break, line errors, receive trigger levels, FIFO time-outs.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::io::{self, Write};
use std::mem;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_superio::serial::{NoEvents, SerialState as UartState};
use vm_superio::{Serial as Uart, Trigger};

use crate::bus::Device;
use crate::hooks::IrqLine;

/// First port of COM1.
pub const COM1_PORT: u16 = 0x3f8;
/// Ports of one UART.
pub const UART_PORTS: u16 = 8;
/// ISA interrupt of COM1.
pub const COM1_IRQ: u8 = 4;

/// Bytes of input kept for a guest that does not read them, beyond the FIFO.
const BACKLOG_MAX: usize = 4096;
/// The receive FIFO of `vm-superio`.
const FIFO_MAX: usize = 64;

const DATA: u8 = 0;
const IER: u8 = 1;
const IIR_FCR: u8 = 2;
const LCR: u8 = 3;
const MCR: u8 = 4;

const IER_RECEIVED: u8 = 1 << 0;
const IER_THR_EMPTY: u8 = 1 << 1;
const IER_MASK: u8 = 0x0f;
const IIR_NONE: u8 = 0b0001;
const IIR_THR_EMPTY: u8 = 0b0010;
const IIR_RECEIVED: u8 = 0b0100;
const IIR_FIFO: u8 = 0b1100_0000;
const FCR_ENABLE: u8 = 1 << 0;
const FCR_CLEAR_RECEIVER: u8 = 1 << 1;
const LCR_DLAB: u8 = 1 << 7;
const LSR_DATA_READY: u8 = 1 << 0;
const LSR_IDLE: u8 = 0b0110_0000;
const MCR_OUT2: u8 = 1 << 3;
const MCR_LOOP: u8 = 1 << 4;

/// Interrupts are derived in this file; `vm-superio`'s edges are not used.
#[derive(Debug)]
struct NoTrigger;

impl Trigger for NoTrigger {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Where transmitted bytes go.
type Output = Box<dyn Write + Send>;

/// Why a saved state is refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum SerialError {
    /// More unread input than the UART and its backlog hold.
    #[error("the saved serial port holds too much input: {fifo} bytes in the FIFO, {backlog} more")]
    TooMuchInput {
        /// Bytes in the FIFO.
        fifo: usize,
        /// Bytes behind it.
        backlog: usize,
    },
    /// The register holds a bit that the hardware does not have.
    #[error("the saved serial port's interrupt enable register is {0:#x}")]
    InterruptEnable(u8),
}

/// The state of the UART as plain data. Everything but the last four is a register by its name in the
/// data sheet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Input that waits for room in the FIFO; at most 4096 bytes.
    pub backlog: Vec<u8>,
}

/// A 16550A UART on 8 ports.
pub struct Serial {
    uart: Uart<NoTrigger, NoEvents, Output>,
    irq: IrqLine,
    level: bool,
    interrupt_enable: u8,
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
        let output: Output = Box::new(output);
        Self {
            uart: Uart::new(NoTrigger, output),
            irq,
            level: false,
            interrupt_enable: 0,
            fifo_enabled: false,
            thr_empty_pending: false,
            backlog: VecDeque::new(),
            output_failed: false,
        }
    }

    /// Takes input from outside; answers how many bytes were accepted. The rest does not fit into
    /// the backlog of 4 KiB and is the caller's to drop or to offer again.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let accepted = bytes.len().min(self.room());
        self.backlog.extend(&bytes[..accepted]);
        self.refill();
        self.update_line();
        accepted
    }

    /// How many bytes [`Serial::input`] would accept.
    pub fn room(&self) -> usize {
        BACKLOG_MAX - self.backlog.len()
    }

    /// The state as plain data; output and interrupt line are not part of it.
    pub fn save(&self) -> SerialState {
        let uart = self.uart.state();
        SerialState {
            divisor: u16::from_le_bytes([uart.baud_divisor_low, uart.baud_divisor_high]),
            interrupt_enable: self.interrupt_enable,
            line_control: uart.line_control,
            modem_control: uart.modem_control,
            scratch: uart.scratch,
            fifo_enabled: self.fifo_enabled,
            thr_empty_pending: self.thr_empty_pending,
            fifo: uart.in_buffer,
            backlog: self.backlog.iter().copied().collect(),
        }
    }

    /// Takes the state over and drives the interrupt line to match.
    ///
    /// # Errors
    /// A state that the UART cannot be in; it is left as it was.
    pub fn restore(&mut self, state: &SerialState) -> Result<(), SerialError> {
        if state.fifo.len() > FIFO_MAX || state.backlog.len() > BACKLOG_MAX {
            return Err(SerialError::TooMuchInput {
                fifo: state.fifo.len(),
                backlog: state.backlog.len(),
            });
        }
        if state.interrupt_enable & !IER_MASK != 0 {
            return Err(SerialError::InterruptEnable(state.interrupt_enable));
        }
        let [baud_divisor_low, baud_divisor_high] = state.divisor.to_le_bytes();
        let uart = UartState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            line_control: state.line_control,
            line_status: LSR_IDLE
                | if state.fifo.is_empty() {
                    0
                } else {
                    LSR_DATA_READY
                },
            modem_control: state.modem_control,
            scratch: state.scratch,
            in_buffer: state.fifo.clone(),
            ..UartState::default()
        };
        let output = mem::replace(self.uart.writer_mut(), Box::new(io::sink()));
        self.uart = Uart::from_state(&uart, NoTrigger, NoEvents, output)
            .expect("the FIFO fits, and no trigger fails");
        self.interrupt_enable = state.interrupt_enable;
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
                let enabled = value & !self.interrupt_enable;
                self.interrupt_enable = value & IER_MASK;
                self.forward(IER, value);
                // Enabling the interrupt while the transmitter is empty raises it.
                self.thr_empty_pending |= enabled & IER_THR_EMPTY != 0;
            }
            IIR_FCR => self.write_fifo_control(value),
            _ => self.forward(register, value),
        }
    }

    fn transmit(&mut self, value: u8) {
        // The byte makes the holding register full, which withdraws the interrupt, and leaves it
        // at once, which raises it again: a new edge.
        self.thr_empty_pending = false;
        self.update_line();
        self.forward(DATA, value);
        self.thr_empty_pending = true;
    }

    fn write_fifo_control(&mut self, value: u8) {
        let enable = value & FCR_ENABLE != 0;
        if enable != self.fifo_enabled || value & FCR_CLEAR_RECEIVER != 0 {
            // The data register is the only way to the FIFO, and DLAB hides it.
            let line_control = self.uart.read(LCR);
            self.forward(LCR, line_control & !LCR_DLAB);
            while self.has_received() {
                self.uart.read(DATA);
            }
            self.forward(LCR, line_control);
        }
        self.fifo_enabled = enable;
    }

    /// IIR: the pending cause of highest priority. Reading it acknowledges an empty transmitter.
    fn identify_interrupt(&mut self) -> u8 {
        let cause = if self.received_asserted() {
            IIR_RECEIVED
        } else if self.thr_empty_asserted() {
            self.thr_empty_pending = false;
            IIR_THR_EMPTY
        } else {
            IIR_NONE
        };
        cause | if self.fifo_enabled { IIR_FIFO } else { 0 }
    }

    /// A write that `vm-superio` acts on. Output that fails is lost, as on a line with no one at
    /// its end.
    fn forward(&mut self, register: u8, value: u8) {
        if let Err(error) = self.uart.write(register, value)
            && !mem::replace(&mut self.output_failed, true)
        {
            tracing::warn!("serial output is lost: {error}");
        }
    }

    fn refill(&mut self) {
        let count = self.uart.fifo_capacity().min(self.backlog.len());
        if count == 0 || self.uart.read(MCR) & MCR_LOOP != 0 {
            return;
        }
        let bytes: Vec<u8> = self.backlog.drain(..count).collect();
        let queued = self.uart.enqueue_raw_bytes(&bytes);
        debug_assert!(matches!(queued, Ok(n) if n == count));
    }

    fn divisor_selected(&mut self) -> bool {
        self.uart.read(LCR) & LCR_DLAB != 0
    }

    fn has_received(&self) -> bool {
        self.uart.fifo_capacity() < FIFO_MAX
    }

    fn received_asserted(&self) -> bool {
        self.interrupt_enable & IER_RECEIVED != 0 && self.has_received()
    }

    fn thr_empty_asserted(&self) -> bool {
        self.interrupt_enable & IER_THR_EMPTY != 0 && self.thr_empty_pending
    }

    fn asserted(&mut self) -> bool {
        // In loopback mode the OUT2 pin is inactive.
        let gate = self.uart.read(MCR) & (MCR_OUT2 | MCR_LOOP) == MCR_OUT2;
        gate && (self.received_asserted() || self.thr_empty_asserted())
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

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serial")
            .field("state", &self.save())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

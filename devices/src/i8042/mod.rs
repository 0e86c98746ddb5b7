//! The i8042 keyboard controller at ports 0x60 and 0x64, with a keyboard or without devices.
//!
//! Follows the IBM PS/2 Hardware Interface Technical Reference, "Keyboard and Auxiliary Device
//! Controller". Without a keyboard it exists for guests that reset the machine or enable A20 through it; a
//! driver that probes for devices gets each response at once and finds none, and there are no interrupts.
//! Deviation: A20 reads back, but is never masked.

mod keyboard;
pub mod keys;
mod regs;
#[cfg(test)]
mod tests;

use crate::bus::Device;
use crate::hooks::{IrqLine, MachineRequest, Requests};
use crate::inspect::{FieldList, Inspect, InspectField};
use thiserror::Error;

pub use keyboard::{KeyboardCommand, KeyboardState};

use regs::{
    AUX_CLOCK_STUCK_LOW, CommandByte, I8042Command, I8042Status, KEYBOARD_LINES_GOOD, OutputPort,
    RESEND, SELF_TEST_PASSED,
};

/// Data port; map it with first offset 0.
pub const I8042_DATA_PORT: u16 = 0x60;
/// Status and command port; map it with first offset 4.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// Offset of the command port, as the device receives it.
pub const I8042_COMMAND_OFFSET: u16 = 4;

/// A command that expects a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PendingCommand {
    /// 0x60: write the command byte.
    WriteControl,
    /// 0xd1: write the output port.
    WriteOutputPort,
    /// 0xd2, 0xd3: return the parameter as if a device had sent it.
    Loop,
    /// 0xd4: send the parameter to the auxiliary device.
    SendAux,
}

/// A saved state that the controller cannot have, or whose keyboard it lacks.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the state of the keyboard controller is invalid")]
pub struct I8042Error;

/// The state of the controller as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct I8042State {
    /// The command byte, RAM location 0.
    pub control: u8,
    /// The output port; bit 1 is A20.
    pub output_port: u8,
    /// The byte in the output buffer, for port 0x60.
    pub output: Option<u8>,
    /// The last byte in the output buffer replaced that of a device that did not respond.
    pub timed_out: bool,
    /// The last write went to the command port.
    pub last_was_command: bool,
    /// The command that expects a parameter.
    pub pending: Option<PendingCommand>,
    /// The byte in the output buffer is the keyboard's.
    #[cfg_attr(feature = "serde", serde(default))]
    pub from_keyboard: bool,
    /// The keyboard, if there is one.
    #[cfg_attr(feature = "serde", serde(default))]
    pub keyboard: Option<KeyboardState>,
}

impl Default for I8042State {
    fn default() -> Self {
        Self {
            control: CommandByte::RESET.bits(),
            output_port: (OutputPort::NO_RESET | OutputPort::A20).bits(),
            output: None,
            timed_out: false,
            last_was_command: false,
            pending: None,
            from_keyboard: false,
            keyboard: None,
        }
    }
}

/// The controller.
#[derive(Debug)]
pub struct I8042 {
    state: I8042State,
    /// IRQ 1.
    irq: IrqLine,
    requests: Requests,
}

impl I8042 {
    /// A controller after its self-test.
    pub fn new(requests: Requests) -> Self {
        Self {
            state: I8042State::default(),
            irq: IrqLine::unconnected(),
            requests,
        }
    }

    /// A controller with a keyboard, which drives IRQ 1.
    ///
    /// Without `firmware`, which would do it, interrupts and translation are on.
    pub fn with_keyboard(requests: Requests, irq: IrqLine, firmware: bool) -> Self {
        let control = if firmware {
            CommandByte::RESET
        } else {
            CommandByte::AFTER_BIOS
        };
        let state = I8042State {
            control: control.bits(),
            keyboard: Some(KeyboardState::default()),
            ..I8042State::default()
        };
        Self {
            state,
            irq,
            requests,
        }
    }

    /// The state as plain data.
    pub fn save(&self) -> I8042State {
        self.state.clone()
    }

    /// Replaces the state by a saved one. The interrupt line is restored by its controller.
    ///
    /// # Errors
    /// The keyboard's state is impossible, or only one of the two states has a keyboard.
    pub fn restore(&mut self, state: &I8042State) -> Result<(), I8042Error> {
        let given = state.from_keyboard && state.output.is_some();
        let keyboard = state.keyboard.as_ref();
        let valid = keyboard.is_none_or(|keyboard| keyboard.is_valid(given));
        if !valid || state.keyboard.is_some() != self.state.keyboard.is_some() {
            return Err(I8042Error);
        }
        self.state = state.clone();
        Ok(())
    }

    /// Presses and releases keys, given as codes of set 1. Returns how many bytes were taken: none without a
    /// keyboard, or while the guest has disabled it.
    pub fn key_input(&mut self, codes: &[u8]) -> usize {
        let translate = self.control().contains(CommandByte::TRANSLATE);
        let Some(keyboard) = &mut self.state.keyboard else {
            return 0;
        };
        let taken = keyboard.input(codes, translate);
        self.fill();
        taken
    }

    /// Whether the keyboard takes at least one more key.
    pub fn has_key_capacity(&self) -> bool {
        let keyboard = self.state.keyboard.as_ref();
        keyboard.is_some_and(KeyboardState::has_capacity)
    }

    const fn control(&self) -> CommandByte {
        CommandByte::from_bits_retain(self.state.control)
    }

    /// Moves the keyboard's next byte to the output buffer, if that is empty and the keyboard's clock runs.
    fn fill(&mut self) {
        let stopped = self.control().contains(CommandByte::KEYBOARD_DISABLED);
        if stopped || self.state.output.is_some() {
            return;
        }
        if let Some(byte) = self.state.keyboard.as_mut().and_then(KeyboardState::take) {
            self.state.output = Some(byte);
            self.state.from_keyboard = true;
            self.state.timed_out = false;
            self.interrupt();
        }
    }

    /// Makes an edge on IRQ 1 for the byte in the output buffer.
    fn interrupt(&self) {
        self.irq.set(false);
        self.drive();
    }

    /// Drives IRQ 1: asserted while a byte is in the output buffer and the interrupt is enabled.
    fn drive(&self) {
        let enabled = self.control().contains(CommandByte::KEYBOARD_INTERRUPT);
        self.irq.set(enabled && self.state.output.is_some());
    }

    fn status(&self) -> I8042Status {
        let mut status = I8042Status::SYSTEM | I8042Status::UNLOCKED;
        status.set(I8042Status::OUTPUT_FULL, self.state.output.is_some());
        status.set(I8042Status::COMMAND, self.state.last_was_command);
        status.set(I8042Status::TIMEOUT, self.state.timed_out);
        status
    }

    fn read_data(&mut self) -> u8 {
        self.state.timed_out = false;
        let byte = self.state.output.take();
        self.drive();
        self.fill();
        // The register keeps what was read last.
        let last = || Some(self.state.keyboard.as_ref()?.last());
        byte.or_else(last).unwrap_or(0)
    }

    fn respond(&mut self, byte: u8) {
        if let (true, Some(unread), Some(keyboard)) = (
            self.state.from_keyboard,
            self.state.output,
            &mut self.state.keyboard,
        ) {
            keyboard.give_back(unread);
        }
        self.state.from_keyboard = false;
        self.state.output = Some(byte);
        self.state.timed_out = false;
        self.interrupt();
    }

    /// Responds in place of a device that is absent.
    fn respond_without_device(&mut self) {
        self.respond(RESEND);
        self.state.timed_out = true;
    }

    fn set_control(&mut self, flag: CommandByte, value: bool) {
        let mut control = CommandByte::from_bits_retain(self.state.control);
        control.set(flag, value);
        self.state.control = control.bits();
    }

    fn command(&mut self, byte: u8) {
        self.state.last_was_command = true;
        self.state.pending = None;
        let Some(command) = I8042Command::decode(byte) else {
            return;
        };
        match command {
            I8042Command::ReadCommandByte => self.respond(self.state.control),
            I8042Command::WriteCommandByte => self.expect(PendingCommand::WriteControl),
            I8042Command::DisableAux => self.set_control(CommandByte::AUX_DISABLED, true),
            I8042Command::EnableAux => self.set_control(CommandByte::AUX_DISABLED, false),
            I8042Command::TestAux => self.respond(AUX_CLOCK_STUCK_LOW),
            I8042Command::SelfTest => self.respond(SELF_TEST_PASSED),
            I8042Command::TestKeyboard => self.respond(KEYBOARD_LINES_GOOD),
            I8042Command::DisableKeyboard => {
                self.set_control(CommandByte::KEYBOARD_DISABLED, true);
            }
            I8042Command::EnableKeyboard => {
                self.set_control(CommandByte::KEYBOARD_DISABLED, false);
            }
            I8042Command::ReadInputPort => self.respond(0),
            I8042Command::ReadOutputPort => self.respond(self.state.output_port),
            I8042Command::WriteOutputPort => self.expect(PendingCommand::WriteOutputPort),
            I8042Command::Loop => self.expect(PendingCommand::Loop),
            I8042Command::SendAux => self.expect(PendingCommand::SendAux),
            I8042Command::Pulse(lines) => {
                if lines.contains(OutputPort::NO_RESET) {
                    self.requests.send(MachineRequest::Reset);
                }
            }
        }
    }

    /// Takes the next byte at the data port as the parameter of a command.
    fn expect(&mut self, command: PendingCommand) {
        self.state.pending = Some(command);
    }

    fn write_data(&mut self, value: u8) {
        self.state.last_was_command = false;
        match self.state.pending.take() {
            Some(PendingCommand::WriteControl) => self.state.control = value,
            Some(PendingCommand::WriteOutputPort) => {
                let port = OutputPort::from_bits_retain(value);
                self.state.output_port = (port | OutputPort::NO_RESET).bits();
                if !port.contains(OutputPort::NO_RESET) {
                    self.requests.send(MachineRequest::Reset);
                }
            }
            Some(PendingCommand::Loop) => self.respond(value),
            Some(PendingCommand::SendAux) => self.respond_without_device(),
            None => self.write_keyboard(value),
        }
    }

    /// Sends a byte to the keyboard, which starts its clock.
    fn write_keyboard(&mut self, value: u8) {
        let translate = self.control().contains(CommandByte::TRANSLATE);
        match &mut self.state.keyboard {
            Some(keyboard) => {
                keyboard.write(value, translate);
                self.set_control(CommandByte::KEYBOARD_DISABLED, false);
            }
            None => self.respond_without_device(),
        }
    }
}

impl Device for I8042 {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let value = if offset < I8042_COMMAND_OFFSET.into() {
            self.read_data()
        } else {
            self.status().bits()
        };
        data.fill(value);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let Some(&value) = data.first() else { return };
        if offset < I8042_COMMAND_OFFSET.into() {
            self.write_data(value);
        } else {
            self.command(value);
        }
        self.drive();
        self.fill();
    }
}

impl Inspect for I8042 {
    fn inspect(&self) -> Vec<InspectField> {
        let state = &self.state;
        let mut fields = FieldList::default();
        fields.flags("status", self.status());
        fields.flags("command byte", CommandByte::from_bits_retain(state.control));
        fields.flags(
            "output port",
            OutputPort::from_bits_retain(state.output_port),
        );
        match state.output {
            Some(byte) => fields.hex("output buffer", byte),
            None => fields.push("output buffer", "empty"),
        }
        match state.pending {
            Some(command) => fields.push("pending command", format_args!("{command:?}")),
            None => fields.push("pending command", "none"),
        }
        if let Some(keyboard) = &state.keyboard {
            let waiting = keyboard.answers.len() + keyboard.codes.len();
            fields.push("keyboard", format_args!("{waiting} bytes wait"));
        }
        fields.finish()
    }
}

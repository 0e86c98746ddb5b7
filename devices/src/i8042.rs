//! The i8042 keyboard controller with nothing plugged in, at ports 0x60 and 0x64.
//!
//! Follows the IBM PS/2 Hardware Interface Technical Reference, "Keyboard and Auxiliary Device
//! Controller". It is there for the guests that reset the machine or enable A20 through it; a
//! driver that looks for devices gets each answer at once and finds none. Left out: interrupts,
//! because nothing ever sends by itself. Deviation: A20 reads back, but is never masked.

use serde::{Deserialize, Serialize};

use crate::bus::Device;
use crate::hooks::{MachineRequest, Requests};

/// Data port; map it with first offset 0.
pub const I8042_DATA_PORT: u16 = 0x60;
/// Status and command port; map it with first offset 4.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// The offset of the command port as the device sees it.
pub const I8042_COMMAND_OFFSET: u16 = 4;

const STATUS_OUTPUT_FULL: u8 = 1 << 0;
const STATUS_SYSTEM: u8 = 1 << 2;
const STATUS_COMMAND: u8 = 1 << 3;
const STATUS_UNLOCKED: u8 = 1 << 4;
const STATUS_TIMEOUT: u8 = 1 << 6;

const OUTPUT_PORT_NO_RESET: u8 = 1 << 0;
const OUTPUT_PORT_A20: u8 = 1 << 1;

/// Interrupts off, system flag set, both devices disabled.
const CONTROL_RESET: u8 = 0x34;
const CONTROL_KEYBOARD_DISABLED: u8 = 1 << 4;
const CONTROL_AUX_DISABLED: u8 = 1 << 5;

const SELF_TEST_PASSED: u8 = 0x55;
const KEYBOARD_LINES_GOOD: u8 = 0x00;
const AUX_CLOCK_STUCK_LOW: u8 = 0x01;
const RESEND: u8 = 0xfe;

/// A command whose parameter is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PendingCommand {
    /// 0x60: write the control byte.
    WriteControl,
    /// 0xd1: write the output port.
    WriteOutputPort,
    /// 0xd2, 0xd3: send the parameter back as if the device had sent it.
    Loop,
    /// 0xd4: send the parameter to the auxiliary device.
    SendAux,
}

/// The controller as plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct I8042State {
    /// The control ("command") byte, RAM location 0.
    pub control: u8,
    /// The output port; bit 1 is A20.
    pub output_port: u8,
    /// The byte that waits at port 0x60.
    pub output: Option<u8>,
    /// The last byte that waited was made up for a device that did not answer.
    pub timed_out: bool,
    /// The last write went to the command port.
    pub last_was_command: bool,
    /// The command that waits for its parameter.
    pub pending: Option<PendingCommand>,
}

impl Default for I8042State {
    fn default() -> Self {
        Self {
            control: CONTROL_RESET,
            output_port: OUTPUT_PORT_NO_RESET | OUTPUT_PORT_A20,
            output: None,
            timed_out: false,
            last_was_command: false,
            pending: None,
        }
    }
}

/// The controller.
#[derive(Debug)]
pub struct I8042 {
    state: I8042State,
    requests: Requests,
}

impl I8042 {
    /// A controller after its self-test.
    pub fn new(requests: Requests) -> Self {
        Self {
            state: I8042State::default(),
            requests,
        }
    }

    /// The state as plain data.
    pub fn save(&self) -> I8042State {
        self.state
    }

    /// Takes a saved state over; each of its values is possible.
    pub fn restore(&mut self, state: &I8042State) {
        self.state = *state;
    }

    fn status(&self) -> u8 {
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        STATUS_SYSTEM
            | STATUS_UNLOCKED
            | bit(self.state.output.is_some(), STATUS_OUTPUT_FULL)
            | bit(self.state.last_was_command, STATUS_COMMAND)
            | bit(self.state.timed_out, STATUS_TIMEOUT)
    }

    fn read_data(&mut self) -> u8 {
        self.state.timed_out = false;
        self.state.output.take().unwrap_or(0)
    }

    fn answer(&mut self, byte: u8) {
        self.state.output = Some(byte);
        self.state.timed_out = false;
    }

    /// What the controller says for a device that is not there.
    fn answer_for_no_device(&mut self) {
        self.state.output = Some(RESEND);
        self.state.timed_out = true;
    }

    fn command(&mut self, command: u8) {
        self.state.last_was_command = true;
        self.state.pending = None;
        match command {
            0x20 => self.answer(self.state.control),
            0x60 => self.state.pending = Some(PendingCommand::WriteControl),
            0xa7 => self.state.control |= CONTROL_AUX_DISABLED,
            0xa8 => self.state.control &= !CONTROL_AUX_DISABLED,
            0xa9 => self.answer(AUX_CLOCK_STUCK_LOW),
            0xaa => self.answer(SELF_TEST_PASSED),
            0xab => self.answer(KEYBOARD_LINES_GOOD),
            0xad => self.state.control |= CONTROL_KEYBOARD_DISABLED,
            0xae => self.state.control &= !CONTROL_KEYBOARD_DISABLED,
            0xc0 => self.answer(0),
            0xd0 => self.answer(self.state.output_port),
            0xd1 => self.state.pending = Some(PendingCommand::WriteOutputPort),
            0xd2 | 0xd3 => self.state.pending = Some(PendingCommand::Loop),
            0xd4 => self.state.pending = Some(PendingCommand::SendAux),
            // Pulse output lines low: line 0 is the reset of the processor.
            0xf0..=0xff if command & OUTPUT_PORT_NO_RESET == 0 => {
                self.requests.send(MachineRequest::Reset);
            }
            _ => {}
        }
    }

    fn write_data(&mut self, value: u8) {
        self.state.last_was_command = false;
        match self.state.pending.take() {
            Some(PendingCommand::WriteControl) => self.state.control = value,
            Some(PendingCommand::WriteOutputPort) => {
                self.state.output_port = value | OUTPUT_PORT_NO_RESET;
                if value & OUTPUT_PORT_NO_RESET == 0 {
                    self.requests.send(MachineRequest::Reset);
                }
            }
            Some(PendingCommand::Loop) => self.answer(value),
            Some(PendingCommand::SendAux) | None => self.answer_for_no_device(),
        }
    }
}

impl Device for I8042 {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let value = if offset < I8042_COMMAND_OFFSET.into() {
            self.read_data()
        } else {
            self.status()
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::test::recorder;

    fn get(controller: &mut I8042, offset: u64) -> u8 {
        let mut data = [0];
        controller.read(offset, &mut data);
        data[0]
    }

    /// Sends a command, with a parameter if it has one, and returns the answer if there is one.
    fn ask(controller: &mut I8042, command: u8, parameter: Option<u8>) -> Option<u8> {
        controller.write(4, &[command]);
        if let Some(parameter) = parameter {
            controller.write(0, &[parameter]);
        }
        (get(controller, 4) & STATUS_OUTPUT_FULL != 0).then(|| get(controller, 0))
    }

    #[test]
    fn pulse_of_the_reset_line_requests_a_reset() {
        let (requests, seen) = recorder();
        let mut controller = I8042::new(requests);
        assert_eq!(get(&mut controller, 4) & 0b11, 0, "ready for a command");
        controller.write(4, &[0xfe]);
        assert_eq!(seen(), [MachineRequest::Reset]);
        controller.write(4, &[0xff]);
        assert!(seen().is_empty());
    }

    #[test]
    fn output_port_write_resets_only_with_its_line_low() {
        let (requests, seen) = recorder();
        let mut controller = I8042::new(requests);
        assert_eq!(ask(&mut controller, 0xd1, Some(0xdf)), None);
        assert_eq!(ask(&mut controller, 0xd0, None), Some(0xdf));
        assert!(seen().is_empty());
        ask(&mut controller, 0xd1, Some(0xde));
        assert_eq!(seen(), [MachineRequest::Reset]);
    }

    #[test]
    fn driver_probe_finds_a_controller_without_devices() {
        let mut controller = I8042::new(recorder().0);
        assert_eq!(ask(&mut controller, 0xaa, None), Some(SELF_TEST_PASSED));
        assert_eq!(ask(&mut controller, 0x20, None), Some(CONTROL_RESET));
        assert_eq!(ask(&mut controller, 0x60, Some(0x47)), None);
        assert_eq!(ask(&mut controller, 0x20, None), Some(0x47));
        assert_eq!(ask(&mut controller, 0xa7, None), None);
        assert_eq!(ask(&mut controller, 0x20, None), Some(0x67));
        assert_eq!(ask(&mut controller, 0xa9, None), Some(AUX_CLOCK_STUCK_LOW));
        assert_eq!(ask(&mut controller, 0xd3, Some(0x5a)), Some(0x5a));
    }

    #[test]
    fn byte_for_a_missing_device_times_out_at_once() {
        let mut controller = I8042::new(recorder().0);
        controller.write(0, &[0xf2]);
        let full = STATUS_TIMEOUT | STATUS_OUTPUT_FULL;
        assert_eq!(get(&mut controller, 4) & full, full);
        assert_eq!(get(&mut controller, 0), RESEND);
        assert_eq!(get(&mut controller, 4) & full, 0);
    }

    #[test]
    fn restore_of_a_saved_state_is_the_identity() {
        let mut controller = I8042::new(recorder().0);
        controller.write(4, &[0xaa]);
        controller.write(4, &[0xd1]);
        let saved = controller.save();
        let mut other = I8042::new(recorder().0);
        assert_ne!(other.save(), saved);
        other.restore(&saved);
        assert_eq!(other.save(), saved);
    }
}

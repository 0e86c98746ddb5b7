//! Two ports of every PC: the POST code, 0x80, and system control port A, 0x92.

use crate::bus::Device;
use crate::hooks::{MachineRequest, Requests};

/// Port of the POST code; guests also write it as a delay.
pub const POST_CODE_PORT: u16 = 0x80;
/// Port of fast A20 and fast reset.
pub const CONTROL_A_PORT: u16 = 0x92;

const FAST_RESET: u8 = 1 << 0;
const A20: u8 = 1 << 1;

/// The POST code latch: reads back the last byte written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PostCode(pub u8);

impl Device for PostCode {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(self.0);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        if let Some(&code) = data.first() {
            self.0 = code;
        }
    }
}

/// System control port A.
///
/// Deviation: the A20 bit reads back, but address line 20 is never masked.
#[derive(Debug)]
pub struct ControlA {
    value: u8,
    requests: Requests,
}

impl ControlA {
    /// The port after reset, A20 enabled.
    pub fn new(requests: Requests) -> Self {
        Self {
            value: A20,
            requests,
        }
    }

    /// The last value written.
    pub fn save(&self) -> u8 {
        self.value
    }

    /// Sets a saved value; requests nothing.
    pub fn restore(&mut self, value: u8) {
        self.value = value;
    }
}

impl Device for ControlA {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(self.value);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        let Some(&value) = data.first() else { return };
        let rises = value & !self.value;
        self.value = value;
        if rises & FAST_RESET != 0 {
            self.requests.send(MachineRequest::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::test::collector;

    #[test]
    fn post_code_reads_back() {
        let mut port = PostCode::default();
        port.write(0, &[0x5a]);
        let mut data = [0];
        port.read(0, &mut data);
        assert_eq!(data, [0x5a]);
    }

    #[test]
    fn control_a_requests_reset_when_bit_zero_rises() {
        let (requests, sent) = collector();
        let mut port = ControlA::new(requests);
        let mut data = [0];
        port.read(0, &mut data);
        assert_eq!(data, [A20]);
        port.write(0, &[A20]);
        assert!(sent().is_empty());
        port.write(0, &[A20 | FAST_RESET]);
        assert_eq!(sent(), [MachineRequest::Reset]);
        port.write(0, &[FAST_RESET]);
        assert!(sent().is_empty());
        assert_eq!(port.save(), FAST_RESET);
    }

    #[test]
    fn control_a_restore_requests_nothing() {
        let (requests, sent) = collector();
        let mut port = ControlA::new(requests);
        port.restore(3);
        assert_eq!(port.save(), 3);
        assert!(sent().is_empty());
    }
}

//! The debug exit port, 0xf4: a write ends the machine.
//!
//! The convention is that of QEMU's `isa-debug-exit` with `iobase=0xf4,iosize=4`.

use crate::bus::Device;
use crate::hooks::{MachineRequest, Requests};

/// First port.
pub const DEBUG_EXIT_PORT: u16 = 0xf4;
/// Number of ports.
pub const DEBUG_EXIT_PORTS: u16 = 4;

/// The debug exit port, which has no state and reads as zero.
#[derive(Debug)]
pub struct DebugExit {
    requests: Requests,
}

impl DebugExit {
    /// A port that sends [`MachineRequest::Exit`] with each value written.
    pub fn new(requests: Requests) -> Self {
        Self { requests }
    }
}

impl Device for DebugExit {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        let mut value = [0; 4];
        for (to, from) in value.iter_mut().zip(data) {
            *to = *from;
        }
        self.requests
            .send(MachineRequest::Exit(u32::from_le_bytes(value)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::test::collector;

    #[test]
    fn write_of_each_size_requests_an_exit_with_the_value() {
        let (requests, sent) = collector();
        let mut port = DebugExit::new(requests);
        port.write(0, &[3]);
        port.write(0, &[0x34, 0x12]);
        port.write(0, &[0x78, 0x56, 0x34, 0x12]);
        assert_eq!(sent(), [0x3, 0x1234, 0x1234_5678].map(MachineRequest::Exit));
    }

    #[test]
    fn read_returns_zero_and_requests_nothing() {
        let (requests, sent) = collector();
        let mut data = [1; 4];
        DebugExit::new(requests).read(0, &mut data);
        assert_eq!(data, [0; 4]);
        assert!(sent().is_empty());
    }
}

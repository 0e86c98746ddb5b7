//! The test device of payloads: latches, interrupt lines and memory.
//!
//! | Address | Function |
//! | --- | --- |
//! | ports 0xe0-0xe3 | a 32-bit latch, accessed by bytes, words or as a whole |
//! | ports 0xe8-0xeb | four byte latches; 0xe9 is the debug console as well |
//! | ports 0x2000 + line | a write drives the interrupt line: low for zero, high for others |
//! | 0xff00_0000 | 64 KiB of memory behind MMIO exits |

use std::fmt;

use thiserror::Error;

use crate::bus::Device;
use crate::debugcon::{DEBUGCON_PORT, DebugCon};

/// First port of the 32-bit latch.
pub const LATCH_PORT: u16 = 0xe0;
/// Number of ports of either latch.
pub const LATCH_PORTS: u16 = 4;
/// First port of the byte latches.
pub const BYTE_LATCH_PORT: u16 = 0xe8;
/// Port of interrupt line 0.
pub const LINE_PORT: u16 = 0x2000;
/// Number of interrupt lines.
pub const LINES: u16 = 24;
/// Guest-physical address of the memory.
pub const TEST_MEMORY_BASE: u64 = 0xff00_0000;
/// Bytes of memory.
pub const TEST_MEMORY_LEN: u64 = 0x1_0000;

/// Four ports that read back what was last written to each.
///
/// Serves as the 32-bit latch and as the byte latches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Latch(pub [u8; 4]);

impl Device for Latch {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        copy_out(&self.0, offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        copy_in(&mut self.0, offset, data);
    }
}

/// The four byte latches, one of which is also the port of the debug console.
///
/// A single byte written to port 0xe9 is also written to the console. Until the first write the
/// port reads as 0xe9, by which guests detect the console.
#[derive(Debug)]
pub struct ByteLatches {
    latch: Latch,
    console: DebugCon,
}

impl ByteLatches {
    /// Latches that are zero, except the console's.
    pub fn new(console: DebugCon) -> Self {
        let mut latch = Latch::default();
        latch.0[CONSOLE_OFFSET] = DEBUGCON_PORT.to_le_bytes()[0];
        Self { latch, console }
    }

    /// The latches, without the output of the console.
    pub fn save(&self) -> Latch {
        self.latch
    }

    /// Sets saved latches; writes nothing to the console. Every value is possible.
    pub fn restore(&mut self, latch: Latch) {
        self.latch = latch;
    }
}

const CONSOLE_OFFSET: usize = (DEBUGCON_PORT - BYTE_LATCH_PORT) as usize;

impl Device for ByteLatches {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.latch.read(offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.latch.write(offset, data);
        if offset == CONSOLE_OFFSET as u64 && data.len() == 1 {
            self.console.write(0, data);
        }
    }
}

/// The ports that drive interrupt lines; they read as zero.
pub struct LinePorts {
    set: Box<dyn Fn(u8, bool) + Send>,
}

impl LinePorts {
    /// Ports that call `set` with a line, 0 to 23, and its level.
    pub fn new(set: impl Fn(u8, bool) + Send + 'static) -> Self {
        Self { set: Box::new(set) }
    }
}

impl Device for LinePorts {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Ok(line) = u8::try_from(offset)
            && u16::from(line) < LINES
        {
            (self.set)(line, data.iter().any(|&byte| byte != 0));
        }
    }
}

impl fmt::Debug for LinePorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LinePorts")
    }
}

/// A saved memory of the wrong size.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the saved test memory has {0:#x} bytes instead of {TEST_MEMORY_LEN:#x}")]
pub struct TestMemoryError(usize);

/// The memory at [`TEST_MEMORY_BASE`].
#[derive(Debug)]
pub struct TestMemory(Box<[u8]>);

impl Default for TestMemory {
    fn default() -> Self {
        Self(vec![0; 0x1_0000].into())
    }
}

impl TestMemory {
    /// Returns the bytes, to be saved.
    pub fn save(&self) -> Vec<u8> {
        self.0.to_vec()
    }

    /// Replaces the bytes.
    ///
    /// # Errors
    /// There are not exactly 64 KiB; nothing was changed.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), TestMemoryError> {
        if bytes.len() != self.0.len() {
            return Err(TestMemoryError(bytes.len()));
        }
        self.0.copy_from_slice(bytes);
        Ok(())
    }
}

impl Device for TestMemory {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        copy_out(&self.0, offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        copy_in(&mut self.0, offset, data);
    }
}

/// Copies from `bytes` at `offset` to `data`; bytes past the end read as ones.
pub(crate) fn copy_out(bytes: &[u8], offset: u64, data: &mut [u8]) {
    let from = usize::try_from(offset)
        .ok()
        .and_then(|from| bytes.get(from..))
        .unwrap_or_default();
    data.fill(0xff);
    for (to, from) in data.iter_mut().zip(from) {
        *to = *from;
    }
}

/// Copies `data` to `bytes` at `offset`; bytes past the end are dropped.
pub(crate) fn copy_in(bytes: &mut [u8], offset: u64, data: &[u8]) {
    let to = usize::try_from(offset)
        .ok()
        .and_then(|to| bytes.get_mut(to..))
        .unwrap_or_default();
    for (to, from) in to.iter_mut().zip(data) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn latch_reads_back_in_any_size() {
        let mut latch = Latch::default();
        latch.write(0, &[1, 2, 3, 4]);
        latch.write(2, &[9]);
        let mut data = [0; 2];
        latch.read(1, &mut data);
        assert_eq!(data, [2, 9]);
        assert_eq!(latch, Latch([1, 2, 9, 4]));
    }

    #[test]
    fn restored_byte_latches_read_back_and_print_nothing() {
        let mut latches = ByteLatches::new(DebugCon::new(std::io::sink()));
        latches.write(1, b"x");
        latches.write(3, &[7]);
        let saved = latches.save();
        assert_eq!(saved, Latch([0, b'x', 0, 7]));
        let mut printed = ByteLatches::new(DebugCon::new(PanickingOutput));
        printed.restore(saved);
        assert_eq!(printed.save(), saved);
    }

    struct PanickingOutput;

    impl std::io::Write for PanickingOutput {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            panic!("nothing is printed")
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn line_ports_set_the_line_of_the_port() {
        let (sender, levels) = mpsc::channel();
        let mut ports = LinePorts::new(move |line, level| sender.send((line, level)).unwrap());
        ports.write(5, &[1]);
        ports.write(5, &[0]);
        ports.write(23, &[0, 1]);
        ports.write(24, &[1]);
        assert_eq!(
            levels.try_iter().collect::<Vec<_>>(),
            [(5, true), (5, false), (23, true)]
        );
    }

    #[test]
    fn memory_reads_back_up_to_its_end() {
        let mut memory = TestMemory::default();
        memory.write(0xfff8, &[7; 8]);
        let mut data = [0; 8];
        memory.read(0xfffc, &mut data);
        assert_eq!(data, [7, 7, 7, 7, 0xff, 0xff, 0xff, 0xff]);
        memory.write(u64::MAX, &[1]);
    }

    #[test]
    fn memory_restore_accepts_only_its_size() {
        let mut memory = TestMemory::default();
        memory.write(3, &[7]);
        let saved = memory.save();
        let mut other = TestMemory::default();
        other.restore(&saved).unwrap();
        assert_eq!(other.save(), saved);
        assert_eq!(other.restore(&[0]), Err(TestMemoryError(1)));
        assert_eq!(other.save(), saved);
    }
}

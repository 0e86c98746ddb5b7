//! RAM for the tests of this crate.

use std::ops::Range;

use crate::target::PhysicalMemory;

/// RAM at address 0.
#[derive(Debug)]
pub(crate) struct FlatRam {
    pub(crate) bytes: Vec<u8>,
    ram: Range<u64>,
}

impl FlatRam {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let ram = 0..bytes.len() as u64;
        Self { bytes, ram }
    }

    pub(crate) fn write(&mut self, gpa: usize, bytes: &[u8]) {
        self.bytes[gpa..gpa + bytes.len()].copy_from_slice(bytes);
    }
}

impl PhysicalMemory for FlatRam {
    fn ram(&self) -> &[Range<u64>] {
        std::slice::from_ref(&self.ram)
    }

    fn read(&self, gpa: u64, buffer: &mut [u8]) -> usize {
        let from = usize::try_from(gpa).unwrap_or(usize::MAX);
        let rest = self.bytes.get(from..).unwrap_or(&[]);
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        len
    }
}

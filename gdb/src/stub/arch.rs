//! The architecture, for `gdbstub`.

use std::num::NonZeroUsize;

use gdbstub::arch::{Arch, RegId, Registers};

/// x86 in any mode. The client's register layout decides what the bytes of a packet mean.
#[derive(Debug)]
pub enum X86Arch {}

/// The contents of a `g` packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GeneralRegisterBytes(pub(super) Vec<u8>);

impl Registers for GeneralRegisterBytes {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        // Only conveniences of `gdbstub` that this crate does not use require it.
        0
    }

    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        for &byte in &self.0 {
            write_byte(Some(byte));
        }
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.0 = bytes.to_vec();
        Ok(())
    }
}

/// The number of a register in the client's layout.
#[derive(Clone, Copy, Debug)]
pub struct RegisterNumber(pub(crate) usize);

impl RegId for RegisterNumber {
    fn from_raw_id(id: usize) -> Option<(Self, Option<NonZeroUsize>)> {
        Some((Self(id), None))
    }

    fn to_raw_id(&self) -> Option<usize> {
        Some(self.0)
    }
}

impl Arch for X86Arch {
    type Usize = u64;
    type Registers = GeneralRegisterBytes;
    type RegId = RegisterNumber;
    type BreakpointKind = usize;
}

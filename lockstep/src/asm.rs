//! Encodes the few instructions that surround the compared ones.

#![expect(
    clippy::cast_possible_truncation,
    reason = "code and addresses of a region are below 2 GiB, register numbers below 32"
)]

use crate::layout::SCRATCH;

/// Code under construction at a fixed address.
#[derive(Debug)]
pub(crate) struct Asm {
    /// The code so far.
    pub(crate) bytes: Vec<u8>,
    /// Linear address of the region.
    pub(crate) base: u32,
    /// Linear address of the first byte.
    pub(crate) origin: u32,
    /// 64-bit code, else 32-bit.
    pub(crate) long: bool,
}

impl Asm {
    /// Linear address of the next instruction.
    pub(crate) fn here(&self) -> u32 {
        self.origin + self.bytes.len() as u32
    }

    /// ModRM and displacement for the absolute address of a cell of the region.
    fn absolute(&mut self, reg: u8, cell: u32) {
        if self.long {
            self.bytes.extend([(reg & 7) << 3 | 4, 0x25]);
        } else {
            self.bytes.push((reg & 7) << 3 | 5);
        }
        self.bytes.extend((self.base + cell).to_le_bytes());
    }

    fn rex(&mut self, reg: u8, wide: bool) {
        if self.long && (wide || reg > 7) {
            self.bytes
                .push(0x40 | u8::from(wide) << 3 | u8::from(reg > 7) << 2);
        }
    }

    fn gpr(&mut self, opcode: u8, reg: u8, cell: u32) {
        self.rex(reg, true);
        self.bytes.push(opcode);
        self.absolute(reg, cell);
    }

    /// MOV reg, \[cell\], as wide as the registers of the mode.
    pub(crate) fn load(&mut self, reg: u8, cell: u32) {
        self.gpr(0x8b, reg, cell);
    }

    /// MOV \[cell\], reg.
    pub(crate) fn store(&mut self, cell: u32, reg: u8) {
        self.gpr(0x89, reg, cell);
    }

    /// MOV dword \[cell\], imm.
    pub(crate) fn set(&mut self, cell: u32, value: u32) {
        self.bytes.push(0xc7);
        self.absolute(0, cell);
        self.bytes.extend(value.to_le_bytes());
    }

    /// An instruction of map 0FH on a cell.
    pub(crate) fn map_0f(&mut self, opcode: u8, reg: u8, cell: u32) {
        self.rex(reg, false);
        self.bytes.extend([0x0f, opcode]);
        self.absolute(reg, cell);
    }

    /// LDMXCSR.
    pub(crate) fn ldmxcsr(&mut self, cell: u32) {
        self.map_0f(0xae, 2, cell);
    }

    /// STMXCSR.
    pub(crate) fn stmxcsr(&mut self, cell: u32) {
        self.map_0f(0xae, 3, cell);
    }

    /// FXRSTOR.
    pub(crate) fn fxrstor(&mut self, cell: u32) {
        self.map_0f(0xae, 1, cell);
    }

    /// FXSAVE.
    pub(crate) fn fxsave(&mut self, cell: u32) {
        self.map_0f(0xae, 0, cell);
    }

    /// XRSTOR.
    pub(crate) fn xrstor(&mut self, cell: u32) {
        self.map_0f(0xae, 5, cell);
    }

    /// Loads or stores a vector register of 16, 32 or 64 bytes.
    pub(crate) fn vector(&mut self, store: bool, reg: u8, len: usize, cell: u32) {
        let opcode = 0x10 | u8::from(store);
        match len {
            16 => {
                self.map_0f(opcode, reg, cell);
                return;
            }
            32 => self
                .bytes
                .extend([0xc4, if reg > 7 { 0x61 } else { 0xe1 }, 0x7c, opcode]),
            _ => {
                let r = if reg & 8 == 0 { 0x80 } else { 0 };
                let r2 = if reg & 16 == 0 { 0x10 } else { 0 };
                self.bytes.extend([0x62, r | r2 | 0x61, 0x7c, 0x48, opcode]);
            }
        }
        self.absolute(reg, cell);
    }

    /// KMOVQ between an opmask register and a cell.
    pub(crate) fn opmask(&mut self, store: bool, reg: u8, cell: u32) {
        self.bytes
            .extend([0xc4, 0xe1, 0xf8, 0x90 | u8::from(store)]);
        self.absolute(reg, cell);
    }

    /// Stores the arithmetic flags in `mask`, as LAHF and SETO leave them in EAX, and clears the
    /// others.
    ///
    /// RAX and the flags in `mask` keep their values.
    pub(crate) fn store_flags(&mut self, cell: u32, mask: u32) {
        self.store(SCRATCH, 0);
        // LAHF; SETO AL; AND EAX, imm.
        self.bytes.extend([0x9f, 0x0f, 0x90, 0xc0, 0x25]);
        let defined = (mask & 0xd5) << 8 | mask >> 11 & 1;
        self.bytes.extend(defined.to_le_bytes());
        self.bytes.push(0x89);
        self.absolute(0, cell);
        // ADD AL, 7FH restores OF; SAHF restores the others.
        self.bytes.extend([0x04, 0x7f, 0x9e]);
        self.load(0, SCRATCH);
    }

    /// JMP far to 32-bit code that follows.
    pub(crate) fn jump_to_compat(&mut self, pointer: u32, selector: u32) {
        let at = self.bytes.len();
        // JMP m16:32. The code that sets the pointer goes before it, and its length decides the
        // target.
        self.bytes.push(0xff);
        self.absolute(5, pointer);
        let next = self.here();
        let mut set = Self {
            bytes: Vec::new(),
            base: self.base,
            origin: 0,
            long: true,
        };
        set.set(pointer, 0);
        set.set(pointer + 4, selector);
        let target = next + set.bytes.len() as u32;
        set.bytes.clear();
        set.set(pointer, target);
        set.set(pointer + 4, selector);
        self.bytes.splice(at..at, set.bytes);
        self.long = false;
    }

    /// JMP far to 64-bit code that follows.
    pub(crate) fn jump_to_long(&mut self, selector: u16) {
        self.bytes.push(0xea);
        let target = self.here() + 6;
        self.bytes.extend(target.to_le_bytes());
        self.bytes.extend(selector.to_le_bytes());
        self.long = true;
    }

    /// JMP through a cell: only in 64-bit code.
    pub(crate) fn jump_to_cell(&mut self, cell: u32) {
        self.bytes.push(0xff);
        self.absolute(4, cell);
    }
}

//! A small assembler for the code between the guest's instructions.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "instructions are made of bytes"
)]

/// A register of the host, by the number of its encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Host(pub(crate) u8);

pub(crate) const RAX: Host = Host(0);
pub(crate) const RCX: Host = Host(1);
pub(crate) const RDX: Host = Host(2);
/// Holds the host address of an operand.
pub(crate) const ADDR: Host = Host(10);
/// Holds an index, or the value of an operand.
pub(crate) const TEMP: Host = Host(11);

/// A register or memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rm {
    /// A register.
    Reg(Host),
    /// Memory at a register plus an 8-bit displacement.
    At(Host, i8),
    /// Memory at a fixed address within 2 GiB of the code.
    Fixed(u64),
    /// Memory at a fixed address below 2 GiB, plus eight times a register.
    Scaled(Host, u64),
    /// Memory at a fixed address below 2 GiB, plus a register.
    Offset(Host, u64),
}

/// The offset after a 32-bit displacement that must still be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Jump32(pub(crate) usize);

/// Code that is being assembled, and the address at which it will be placed.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    pub(crate) code: Vec<u8>,
    pub(crate) base: u64,
}

impl Assembler {
    pub(crate) fn at(base: u64) -> Self {
        Self {
            code: Vec::with_capacity(1024),
            base,
        }
    }

    /// Offset of the next byte.
    pub(crate) fn pos(&self) -> usize {
        self.code.len()
    }

    /// Address of the next byte.
    pub(crate) fn address(&self) -> u64 {
        self.base + self.code.len() as u64
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    /// Emits an instruction with operands of `size` bytes.
    ///
    /// `opcode` is that of the form for 16 to 64 bits; the form for bytes has the opcode before it.
    pub(crate) fn sized(&mut self, opcode: u8, size: u8, reg: u8, rm: Rm) {
        let opcode = if size == 1 { opcode - 1 } else { opcode };
        self.encode(&[opcode], size, reg, rm, 0);
    }

    /// Emits an instruction up to its immediate.
    ///
    /// The caller must add `immediate` bytes after it: an operand relative to RIP counts from their
    /// end.
    pub(crate) fn encode(&mut self, opcode: &[u8], size: u8, reg: u8, rm: Rm, immediate: u8) {
        if size == 2 {
            self.code.push(0x66);
        }
        let (base, index) = match rm {
            Rm::Reg(r) | Rm::At(r, _) => (r.0, 0),
            Rm::Fixed(_) => (0, 0),
            Rm::Scaled(i, _) | Rm::Offset(i, _) => (0, i.0),
        };
        let mut rex = u8::from(size == 8) << 3 | reg >> 3 << 2 | index >> 3 << 1 | base >> 3;
        let byte_register = |r: u8| size == 1 && (4..8).contains(&r);
        if rex != 0 || byte_register(reg) || matches!(rm, Rm::Reg(r) if byte_register(r.0)) {
            rex |= 0x40;
            self.code.push(rex);
        }
        self.bytes(opcode);
        let reg = (reg & 7) << 3;
        match rm {
            Rm::Reg(r) => self.code.push(0xc0 | reg | (r.0 & 7)),
            Rm::At(r, distance) => {
                let low = r.0 & 7;
                // RBP and R13 always have a displacement, RSP and R12 an index byte.
                let short = distance == 0 && low != 5;
                self.code.push(if short { 0 } else { 0x40 } | reg | low);
                if low == 4 {
                    self.code.push(0x24);
                }
                if !short {
                    self.code.push(distance.cast_unsigned());
                }
            }
            Rm::Fixed(address) => {
                self.code.push(reg | 5);
                let next = self.address() + 4 + u64::from(immediate);
                let distance = address.wrapping_sub(next) as i64;
                debug_assert!(i32::try_from(distance).is_ok());
                self.bytes(&(distance as i32).to_le_bytes());
            }
            Rm::Scaled(i, address) => {
                self.bytes(&[reg | 4, 3 << 6 | (i.0 & 7) << 3 | 5]);
                self.absolute(address);
            }
            Rm::Offset(i, address) => {
                self.bytes(&[reg | 4, (i.0 & 7) << 3 | 5]);
                self.absolute(address);
            }
        }
    }

    fn absolute(&mut self, address: u64) {
        debug_assert!(address < 1 << 31);
        self.bytes(&(address as u32).to_le_bytes());
    }

    /// Emits a MOV to a register.
    pub(crate) fn load(&mut self, size: u8, to: Host, from: Rm) {
        self.sized(0x8b, size, to.0, from);
    }

    /// Emits a MOV from a register.
    pub(crate) fn store(&mut self, size: u8, to: Rm, from: Host) {
        self.sized(0x89, size, from.0, to);
    }

    /// Emits a MOV of a sign-extended immediate to memory or a register.
    pub(crate) fn store_imm(&mut self, size: u8, to: Rm, value: i32) {
        let len = size.min(4);
        let opcode = if size == 1 { 0xc6 } else { 0xc7 };
        self.encode(&[opcode], size, 0, to, len);
        self.bytes(&value.to_le_bytes()[..usize::from(len)]);
    }

    /// Emits a load of a constant, which keeps the flags.
    pub(crate) fn constant(&mut self, to: Host, value: u64) {
        if let Ok(value) = u32::try_from(value) {
            if to.0 >= 8 {
                self.code.push(0x41);
            }
            self.code.push(0xb8 | (to.0 & 7));
            self.bytes(&value.to_le_bytes());
        } else if let Ok(value) = i32::try_from(value.cast_signed()) {
            self.store_imm(8, Rm::Reg(to), value);
        } else {
            self.bytes(&[0x48 | to.0 >> 3, 0xb8 | (to.0 & 7)]);
            self.bytes(&value.to_le_bytes());
        }
    }

    /// Emits an LEA of a register plus a displacement, which keeps the flags.
    pub(crate) fn lea(&mut self, to: Host, from: Host, distance: i32) {
        match i8::try_from(distance) {
            Ok(small) => self.encode(&[0x8d], 8, to.0, Rm::At(from, small), 0),
            Err(_) => {
                debug_assert!(from.0 & 7 != 4);
                self.bytes(&[0x48 | to.0 >> 3 << 2 | from.0 >> 3, 0x8d]);
                self.code.push(0x80 | (to.0 & 7) << 3 | (from.0 & 7));
                self.bytes(&distance.to_le_bytes());
            }
        }
    }

    /// Emits an arithmetic instruction on a register or memory and a register.
    ///
    /// `n` selects ADD (0), OR, ADC, SBB, AND, SUB, XOR or CMP (7).
    pub(crate) fn alu(&mut self, n: u8, size: u8, to: Rm, from: Host) {
        self.sized(n << 3 | 1, size, from.0, to);
    }

    /// Like [`Assembler::alu`]: on a register and a register or memory.
    pub(crate) fn alu_from(&mut self, n: u8, size: u8, to: Host, from: Rm) {
        self.sized(n << 3 | 3, size, to.0, from);
    }

    /// Like [`Assembler::alu`]: on a register or memory and a sign-extended immediate.
    pub(crate) fn alu_imm(&mut self, n: u8, size: u8, to: Rm, value: i32) {
        match i8::try_from(value) {
            _ if size == 1 => {
                self.encode(&[0x80], 1, n, to, 1);
                self.code.push(value as u8);
            }
            Ok(small) => {
                self.encode(&[0x83], size, n, to, 1);
                self.code.push(small.cast_unsigned());
            }
            Err(_) => {
                let len = size.min(4);
                self.encode(&[0x81], size, n, to, len);
                self.bytes(&value.to_le_bytes()[..usize::from(len)]);
            }
        }
    }

    /// Emits a SETcc.
    pub(crate) fn set(&mut self, condition: u8, to: Rm) {
        self.encode(&[0x0f, 0x90 | condition], 1, 0, to, 0);
    }

    /// Emits a jump or call whose target is set later.
    pub(crate) fn jump(&mut self, opcode: &[u8]) -> Jump32 {
        self.bytes(opcode);
        self.bytes(&[0; 4]);
        Jump32(self.pos())
    }

    /// Emits a jump that is taken if RCX is 0, or if it is not; it keeps the flags.
    pub(crate) fn jump_if_zero(&mut self, zero: bool) -> Jump32 {
        // JRCXZ has a short form only: it jumps over the jump, or over a short one to it.
        if zero {
            self.bytes(&[0xe3, 2, 0xeb, 5]);
        } else {
            self.bytes(&[0xe3, 5]);
        }
        self.jump(JMP)
    }

    /// Sets the target of a jump to the next byte.
    pub(crate) fn here(&mut self, jump: Jump32) {
        self.lead(jump, self.pos());
    }

    /// Sets the target of a jump to an offset in this code.
    pub(crate) fn lead(&mut self, jump: Jump32, to: usize) {
        let distance = (to as i64 - jump.0 as i64) as i32;
        self.code[jump.0 - 4..jump.0].copy_from_slice(&distance.to_le_bytes());
    }

    /// Emits a jump or call to an address.
    pub(crate) fn jump_to(&mut self, opcode: &[u8], address: u64) {
        let jump = self.jump(opcode);
        let distance = address.wrapping_sub(self.base + jump.0 as u64) as i64 as i32;
        self.code[jump.0 - 4..jump.0].copy_from_slice(&distance.to_le_bytes());
    }
}

/// Opcode of JMP.
pub(crate) const JMP: &[u8] = &[0xe9];
/// Opcode of CALL.
pub(crate) const CALL: &[u8] = &[0xe8];

/// Returns the opcode of Jcc.
pub(crate) const fn jcc(condition: u8) -> [u8; 2] {
    [0x0f, 0x80 | condition]
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    /// Emits the code of a test case.
    type Emit = Box<dyn FnOnce(&mut Assembler)>;

    fn text(f: impl FnOnce(&mut Assembler)) -> String {
        let mut asm = Assembler::at(0x1000_0000);
        f(&mut asm);
        let decoder = Decoder::with_ip(64, &asm.code, asm.base, DecoderOptions::NONE);
        let all: Vec<String> = decoder.into_iter().map(|i| format!("{i}")).collect();
        all.join("; ")
    }

    #[test]
    fn templates_decode_to_what_they_say() {
        let fixed = Rm::Fixed(0x1000_0100);
        let cases: Vec<(&str, Emit)> = vec![
            (
                "mov %r9,%r11",
                Box::new(|a| a.load(8, TEMP, Rm::Reg(Host(9)))),
            ),
            (
                "mov (%r10),%r11d",
                Box::new(|a| a.load(4, TEMP, Rm::At(ADDR, 0))),
            ),
            (
                "mov %sil,(%r12)",
                Box::new(|a| a.store(1, Rm::At(Host(12), 0), Host(6))),
            ),
            (
                "mov %cx,(%r13)",
                Box::new(|a| a.store(2, Rm::At(Host(13), 0), RCX)),
            ),
            (
                "movl $5,0x10000100",
                Box::new(move |a| a.store_imm(4, fixed, 5)),
            ),
            (
                "movq $0xFFFFFFFFFFFFFFFE,0x10000100",
                Box::new(move |a| a.store_imm(8, fixed, -2)),
            ),
            (
                "sub 0x10002000(,%r11,8),%r10",
                Box::new(|a| a.alu_from(5, 8, ADDR, Rm::Scaled(TEMP, 0x1000_2000))),
            ),
            (
                "cmp $0xFF8,%r10",
                Box::new(|a| a.alu_imm(7, 8, Rm::Reg(ADDR), 0xff8)),
            ),
            (
                "add $-1,%dil",
                Box::new(|a| a.alu_imm(0, 1, Rm::Reg(Host(7)), -1)),
            ),
            ("seto 0x10000100", Box::new(move |a| a.set(0, fixed))),
            (
                "movabs $0x123456789abc,%r10",
                Box::new(|a| a.constant(ADDR, 0x1234_5678_9abc)),
            ),
            (
                "jrcxz 0x0000000010000004; jmp 0x0000000010000009; jmp 0x0000000010000009",
                Box::new(|a| {
                    let jump = a.jump_if_zero(true);
                    a.here(jump);
                }),
            ),
            (
                "jrcxz 0x0000000010000007; jmp 0x0000000010000007",
                Box::new(|a| {
                    let jump = a.jump_if_zero(false);
                    a.here(jump);
                }),
            ),
            (
                "mov $0xFFFFFFFF81000000,%rax",
                Box::new(|a| a.constant(RAX, 0xffff_ffff_8100_0000)),
            ),
        ];
        for (expected, f) in cases {
            let got = text(f);
            assert_eq!(normal(&got), normal(expected));
        }
    }

    /// Normalizes a disassembly: no spaces, no capitals, one form of the immediate.
    fn normal(text: &str) -> String {
        text.replace(' ', "")
            .to_lowercase()
            .replace("$-1,", "$0xff,")
    }
}

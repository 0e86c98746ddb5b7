//! Computes guest addresses, looks up their host addresses, and handles the stack.

use super::{Emitter, Late, Retry, named};
use crate::analysis::UnitStep;
use crate::asm::{ADDR, Host, Rm, TEMP, jcc};
use crate::layout::{CacheLineTable, Context, LINES, TlbArrays, lines_offset};
use iced_x86::{Code, Instruction, MemoryOperand, OpKind, Register};
use std::mem::offset_of;

/// The host register that holds the guest's RSP.
pub(super) const STACK: Host = Host(15);
/// The host register that holds the guest's RBP.
const FRAME: Host = Host(5);

impl Emitter<'_> {
    /// Emits an instruction whose registers have been renamed.
    pub(super) fn encode(&mut self, i: &Instruction) -> Result<(), Retry> {
        if self.encoder.encode(i, self.asm.address()).is_err() {
            let _ = self.encoder.take_buffer();
            return self.cannot();
        }
        let mut bytes = self.encoder.take_buffer();
        self.asm.bytes(&bytes);
        bytes.clear();
        self.encoder.set_buffer(bytes);
        Ok(())
    }

    /// Returns the memory operand in terms of host registers.
    ///
    /// Loads a spilled base register into R10 and a spilled index register into R11.
    fn host_operand(&mut self, i: &Instruction) -> MemoryOperand {
        let mut part = |register: Register, scratch: Host| match register {
            Register::None => Register::None,
            r => match self.home(r) {
                Rm::Reg(host) => named(host, 8),
                spilled => {
                    self.asm.load(8, scratch, spilled);
                    named(scratch, 8)
                }
            },
        };
        let base = part(i.memory_base(), ADDR);
        let index = part(i.memory_index(), TEMP);
        let displacement = i.memory_displacement64().cast_signed();
        let small = i8::try_from(displacement).is_ok();
        let size = match (base, displacement) {
            (Register::None, _) => 8,
            (_, 0) => 0,
            _ if small => 1,
            _ => 8,
        };
        let scale = i.memory_index_scale();
        MemoryOperand::new(
            base,
            index,
            scale,
            displacement,
            size,
            false,
            Register::None,
        )
    }

    /// Computes the linear address of the memory operand in R10; clobbers R11.
    ///
    /// The flags are kept unless the operand is relative to FS or GS.
    pub(super) fn address(&mut self, i: &Instruction) -> Result<(), Retry> {
        let (base, index) = (i.memory_base(), i.memory_index());
        if base == Register::RIP || (base, index) == (Register::None, Register::None) {
            self.asm.constant(ADDR, i.memory_displacement64());
        } else {
            match self.home(base) {
                Rm::Reg(host)
                    if base != Register::None
                        && index == Register::None
                        && i.memory_displacement64() == 0 =>
                {
                    self.asm.load(8, ADDR, Rm::Reg(host));
                }
                _ => {
                    let operand = self.host_operand(i);
                    let lea = Instruction::with2(Code::Lea_r64_m, Register::R10, operand);
                    match lea {
                        Ok(lea) => self.encode(&lea)?,
                        Err(_) => return self.cannot(),
                    }
                }
            }
        }
        let segment = match i.segment_prefix() {
            Register::FS => 0,
            Register::GS => 8,
            _ => return Ok(()),
        };
        let base = self.context(offset_of!(Context, segment_base) + segment);
        self.asm.alu_from(0, 8, ADDR, base);
        self.valid = 0;
        Ok(())
    }

    /// Emits LEA, which keeps the flags.
    pub(super) fn lea(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let i = &step.insn;
        let size = i.op0_register().size();
        let target = self.home(i.op0_register());
        let to = match target {
            Rm::Reg(host) => host,
            _ => TEMP,
        };
        if i.memory_base() == Register::RIP
            || i.memory_index() == Register::None && i.memory_base() == Register::None
        {
            let value = i.memory_displacement64();
            let value = if size == 4 {
                value & 0xffff_ffff
            } else {
                value
            };
            self.asm.constant(to, value);
        } else {
            let operand = self.host_operand(i);
            let code = if size == 4 {
                Code::Lea_r32_m
            } else {
                Code::Lea_r64_m
            };
            match Instruction::with2(code, named(to, size), operand) {
                Ok(lea) => self.encode(&lea)?,
                Err(_) => return self.cannot(),
            }
        }
        if to == TEMP {
            self.asm.store(8, target, TEMP);
        }
        Ok(())
    }

    /// Replaces the linear address in R10 by the host address of `size` bytes there.
    ///
    /// Clobbers R11 and the flags. A TLB miss calls the callback.
    pub(super) fn find(&mut self, size: u8, write: bool) {
        let step = &self.analysis.steps[self.at];
        let point = self.instruction(step.block, step.index, Some(self.access(size, write)));
        let exit = self.exit(point);
        let by_line = self.source.access_format.is_some();
        let (tags, hosts) = self.lookup_tables(by_line, write);
        let (shift, bytes) = if by_line { (6, 64) } else { (12, 4096) };
        if self.addresses.bmi2 {
            // RORX R11, R10, shift
            self.asm.bytes(&[0xc4, 0x43, 0xfb, 0xf0, 0xda, shift]);
        } else {
            // MOV R11, R10; SHR R11D, shift
            self.asm.bytes(&[0x4d, 0x89, 0xd3, 0x41, 0xc1, 0xeb, shift]);
        }
        if by_line {
            let mask = i32::try_from(LINES - 1).unwrap_or(0);
            self.asm.alu_imm(4, 4, Rm::Reg(TEMP), mask);
        } else {
            // MOVZX R11D, R11B
            self.asm.bytes(&[0x45, 0x0f, 0xb6, 0xdb]);
        }
        self.asm.alu_from(5, 8, ADDR, Rm::Scaled(TEMP, tags));
        self.asm
            .alu_imm(7, 8, Rm::Reg(ADDR), bytes - i32::from(size));
        let from = self.asm.jump(&jcc(7));
        self.asm.alu_from(0, 8, ADDR, Rm::Scaled(TEMP, hosts));
        let back = self.asm.pos();
        self.late.push(Late::Find {
            from,
            back,
            exit,
            tags,
        });
        self.valid = 0;
    }

    /// Returns the addresses of the tags and of the host addresses that [`Emitter::find`] uses.
    fn lookup_tables(&self, by_line: bool, write: bool) -> (u64, u64) {
        let (tags, hosts) = match (by_line, write) {
            (false, false) => (
                offset_of!(TlbArrays, read_tag),
                offset_of!(TlbArrays, read_host),
            ),
            (false, true) => (
                offset_of!(TlbArrays, write_tag),
                offset_of!(TlbArrays, write_host),
            ),
            (true, false) => (
                offset_of!(CacheLineTable, read_tag),
                offset_of!(CacheLineTable, read_host),
            ),
            (true, true) => (
                offset_of!(CacheLineTable, write_tag),
                offset_of!(CacheLineTable, write_host),
            ),
        };
        let table = if by_line {
            self.addresses.data + lines_offset(self.source.rights) as u64
        } else {
            self.tlb()
        };
        (table + tags as u64, table + hosts as u64)
    }

    /// Computes the host address of the memory operand in R10.
    pub(super) fn operand(&mut self, i: &Instruction, write: bool) -> Result<(), Retry> {
        let Ok(size @ 1..=64) = u8::try_from(i.memory_size().size()) else {
            return self.cannot();
        };
        self.address(i)?;
        self.find(size, write);
        Ok(())
    }

    pub(super) fn push(&mut self, step: &UnitStep) -> Result<(), Retry> {
        self.asm.lea(ADDR, STACK, -8);
        self.find(8, true);
        let i = &step.insn;
        let to = Rm::At(ADDR, 0);
        if i.op0_kind() == OpKind::Register {
            let from = self.value(i.op0_register());
            self.asm.store(8, to, from);
        } else {
            match i32::try_from(i.immediate(0).cast_signed()) {
                Ok(value) => self.asm.store_imm(8, to, value),
                Err(_) => return self.cannot(),
            }
        }
        self.asm.lea(STACK, STACK, -8);
        Ok(())
    }

    /// Returns the host register of a guest register; loads a spilled one into R11.
    pub(super) fn value(&mut self, register: Register) -> Host {
        match self.home(register) {
            Rm::Reg(host) => host,
            spilled => {
                self.asm.load(8, TEMP, spilled);
                TEMP
            }
        }
    }

    pub(super) fn pop(&mut self, step: &UnitStep) -> Result<(), Retry> {
        if step.insn.op0_kind() != OpKind::Register {
            return self.cannot();
        }
        self.asm.load(8, ADDR, Rm::Reg(STACK));
        self.find(8, false);
        self.asm.lea(STACK, STACK, 8);
        match self.home(step.insn.op0_register()) {
            Rm::Reg(host) => self.asm.load(8, host, Rm::At(ADDR, 0)),
            spilled => {
                self.asm.load(8, TEMP, Rm::At(ADDR, 0));
                self.asm.store(8, spilled, TEMP);
            }
        }
        Ok(())
    }

    pub(super) fn leave_frame(&mut self) {
        self.asm.load(8, ADDR, Rm::Reg(FRAME));
        self.find(8, false);
        self.asm.lea(STACK, FRAME, 8);
        self.asm.load(8, FRAME, Rm::At(ADDR, 0));
    }
}

//! Emits arithmetic and other instructions that set the flags.

use super::flags::{A, B, Source, immediate, operand_size};
use super::same::redirect;
use super::{Emitter, Retry, named};
use crate::analysis::{StepKind, UnitStep, accesses_memory, is_high_byte};
use crate::asm::{ADDR, Jump32, RAX, RCX, Rm, TEMP, jcc};
use crate::flags::FlagKind;
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// The memory operand, whose host address is in R10.
pub(super) const MEMORY: Rm = Rm::At(ADDR, 0);

impl Emitter<'_> {
    /// Emits ADD, OR, ADC, SBB, AND, SUB, XOR or CMP.
    pub(super) fn arithmetic(&mut self, step: &UnitStep, n: u8) -> Result<(), Retry> {
        let i = &step.insn;
        let size = operand_size(i);
        let stores = self.stores_now();
        if is_high_byte(i.op0_register()) {
            return self.arithmetic_of_high_byte(step, n, stores);
        }
        if accesses_memory(i) {
            self.operand(i, i.op0_kind() == OpKind::Memory && n != 7)?;
        }
        self.need(step.flags.read)?;
        let (target, source) = self.memory_to_registers(i, size, stores);
        let first = match n {
            0 => Some(FlagKind::Add),
            2 => Some(FlagKind::Adc),
            3 => Some(FlagKind::Sbb),
            5 | 7 => Some(FlagKind::Sub),
            _ => None,
        };
        if let Some(kind) = first.filter(|_| stores) {
            self.store_operands(kind, size, target, source);
            if matches!(n, 2 | 3) {
                self.store_carry();
            }
        }
        self.compute(n, size, target, source);
        if i.op0_kind() == OpKind::Memory && target != MEMORY && n != 7 {
            self.asm.store(size, MEMORY, TEMP);
        }
        if first.is_none() && stores {
            self.store_field(A, target);
            self.store_record(FlagKind::Logic, size);
        }
        Ok(())
    }

    /// Emits arithmetic of AH, CH, DH or BH with an immediate.
    fn arithmetic_of_high_byte(
        &mut self,
        step: &UnitStep,
        n: u8,
        stores: bool,
    ) -> Result<(), Retry> {
        let i = &step.insn;
        let value = Source::Immediate(immediate(i, 1));
        let first = match n {
            0 => Some(FlagKind::Add),
            5 | 7 => Some(FlagKind::Sub),
            _ => None,
        };
        if let Some(kind) = first.filter(|_| stores) {
            self.copy_high_byte(TEMP, i.op0_register())?;
            self.store_operands(kind, 1, Rm::Reg(TEMP), value);
        }
        // The host has it in the same register.
        self.encode(i)?;
        if first.is_none() && stores {
            self.copy_high_byte(TEMP, i.op0_register())?;
            self.store_field(A, Rm::Reg(TEMP));
            self.store_record(FlagKind::Logic, 1);
        }
        Ok(())
    }

    /// Emits TEST.
    pub(super) fn test(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let i = &step.insn;
        let size = operand_size(i);
        let stores = self.stores_now();
        if is_high_byte(i.op0_register()) {
            if stores {
                self.copy_high_byte(TEMP, i.op0_register())?;
                let value = Source::Immediate(immediate(i, 1));
                self.store_operands(FlagKind::Test, 1, Rm::Reg(TEMP), value);
            }
            return self.encode(i);
        }
        if accesses_memory(i) {
            self.operand(i, false)?;
        }
        let (target, source) = self.memory_to_registers(i, size, stores);
        if stores {
            if source == Source::Rm(target) {
                self.store_field(A, target);
                self.store_record(FlagKind::Logic, size);
            } else {
                self.store_operands(FlagKind::Test, size, target, source);
            }
        }
        match (target, source) {
            (Rm::Reg(host), Source::Rm(memory @ Rm::Fixed(_))) => {
                // TEST has no form with a memory source, but its operands are interchangeable.
                self.asm.sized(0x85, size, host.0, memory);
            }
            _ => self.compare(StepKind::Test, size, target, source),
        }
        Ok(())
    }

    /// Returns both operands, with a memory operand loaded into R11 if `stores`.
    ///
    /// A second operand that is a spilled register is stored in the context here, because R11 is
    /// still free.
    fn memory_to_registers(&mut self, i: &Instruction, size: u8, stores: bool) -> (Rm, Source) {
        let value = |this: &mut Self| {
            if stores {
                this.asm.load(size, TEMP, MEMORY);
                Rm::Reg(TEMP)
            } else {
                MEMORY
            }
        };
        let source = match i.op1_kind() {
            OpKind::Register => Source::Rm(self.home(i.op1_register())),
            OpKind::Memory => Source::Rm(value(self)),
            _ => Source::Immediate(immediate(i, size)),
        };
        if i.op0_kind() != OpKind::Memory {
            return (self.home(i.op0_register()), source);
        }
        if let Source::Rm(spilled @ Rm::Fixed(_)) = source
            && stores
        {
            self.store_field(B, spilled);
        }
        (value(self), source)
    }

    /// Stores both operands and the flag record in the context.
    fn store_operands(&mut self, kind: FlagKind, size: u8, a: Rm, b: Source) {
        let in_temp = |rm| rm == Rm::Reg(TEMP);
        let b_in_temp = matches!(b, Source::Rm(rm) if in_temp(rm));
        // One scratch register is free, unless R11 holds a memory operand and the other operand is
        // a spilled register.
        let scratch = if b_in_temp { ADDR } else { TEMP };
        match b {
            Source::Rm(Rm::Fixed(_)) if in_temp(a) => {
                self.store_field(A, a);
                self.store_record(kind, size);
            }
            _ => {
                self.store_field_by(A, a, scratch);
                self.store_second(kind, size, b, scratch);
            }
        }
    }

    /// Emits the operation itself.
    fn compute(&mut self, n: u8, size: u8, target: Rm, source: Source) {
        match (target, source) {
            (_, Source::Immediate(value)) => self.asm.alu_imm(n, size, target, value),
            (Rm::Reg(host), Source::Rm(from)) => self.asm.alu_from(n, size, host, from),
            (_, Source::Rm(Rm::Reg(host))) => self.asm.alu(n, size, target, host),
            (_, Source::Rm(from)) => {
                let from_size = if matches!(from, Rm::Fixed(_)) {
                    8
                } else {
                    size
                };
                self.asm.load(from_size, TEMP, from);
                self.asm.alu(n, size, target, TEMP);
            }
        }
        if let Rm::Fixed(address) = target
            && size == 4
            && n != 7
        {
            // A 32-bit result clears the upper half.
            self.asm.store_imm(4, Rm::Fixed(address + 4), 0);
        }
    }

    /// Emits INC, DEC, NEG, shifts, multiplications, bit tests and bit counts.
    pub(super) fn producer(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let mut i = step.insn;
        let size = operand_size(&i);
        let stores = self.stores_now();
        let memory = accesses_memory(&i);
        let operand = (0..i.op_count()).find(|&n| i.op_kind(n) == OpKind::Memory);
        let writes = memory
            && operand == Some(0)
            && matches!(
                step.kind,
                StepKind::Step { .. } | StepKind::Neg | StepKind::Shift(..)
            );
        if memory {
            self.operand(&step.insn, writes)?;
            redirect(&mut i);
        }
        let mut value = None;
        if let Some(n) = operand.filter(|_| stores) {
            // Operate on a copy in R11, because the value is also stored for the flags.
            let width = u8::try_from(i.memory_size().size()).unwrap_or(8);
            self.asm.load(width, TEMP, MEMORY);
            i.set_op_kind(n, OpKind::Register);
            i.set_op_register(n, named(TEMP, width.into()));
            value = Some(Rm::Reg(TEMP));
        }
        let skipped = if stores {
            self.store_before(step, size, value)
        } else {
            None
        };
        if let Some(skipped) = skipped {
            self.asm.here(skipped);
        }
        if value.is_some() && self.uses_spilled(&step.insn) {
            return self.cannot();
        }
        self.run(step, i, memory)?;
        if writes && value.is_some() {
            self.asm.store(size, MEMORY, TEMP);
        }
        if stores {
            self.store_after(step, size, value);
        }
        Ok(())
    }

    /// Emits BSF or BSR. A source of 0 keeps the whole destination.
    pub(super) fn scan(&mut self, step: &UnitStep, reverse: bool) -> Result<(), Retry> {
        let i = &step.insn;
        let size = operand_size(i);
        if size < 4 {
            return self.cannot();
        }
        let stores = self.stores_now();
        if accesses_memory(i) {
            self.operand(i, false)?;
            self.asm.load(size, TEMP, MEMORY);
        } else {
            let source = self.home(i.op1_register());
            self.asm.load(size, TEMP, source);
        }
        if stores {
            self.store_field(A, Rm::Reg(TEMP));
            self.store_record(FlagKind::Scan, size);
        }
        let home = self.home(i.op0_register());
        let target = match home {
            Rm::Reg(host) => host,
            spilled => {
                self.asm.load(8, ADDR, spilled);
                ADDR
            }
        };
        let opcode = if reverse { 0xbd } else { 0xbc };
        self.asm
            .encode(&[0x0f, opcode], 8, target.0, Rm::Reg(TEMP), 0);
        if target == ADDR {
            self.asm.store(8, home, ADDR);
        }
        Ok(())
    }

    /// Whether an operand is a spilled register.
    fn uses_spilled(&self, i: &Instruction) -> bool {
        (0..i.op_count()).any(|n| {
            i.op_kind(n) == OpKind::Register && !matches!(self.home(i.op_register(n)), Rm::Reg(_))
        })
    }

    /// Stores the values for the flags that the instruction will overwrite.
    ///
    /// Returns a jump that skips the stores, for a shift by CL whose count may be 0.
    fn store_before(&mut self, step: &UnitStep, size: u8, value: Option<Rm>) -> Option<Jump32> {
        let i = &step.insn;
        let first = value.unwrap_or_else(|| self.home(i.op0_register()));
        match step.kind {
            StepKind::Neg => {
                self.store_field(A, first);
                self.store_record(FlagKind::Neg, size);
            }
            StepKind::Shift(n, count) => {
                let kind = match n {
                    4 => FlagKind::Shl,
                    5 => FlagKind::Shr,
                    _ => FlagKind::Sar,
                };
                let mut skip = None;
                let b = match count {
                    Some(count) => Source::Immediate(count.into()),
                    None => {
                        let mask = if size == 8 { 63 } else { 31 };
                        self.test_immediate(1, Rm::Reg(RCX), mask);
                        skip = Some(self.asm.jump(&jcc(4)));
                        self.valid = 0;
                        Source::Rm(Rm::Reg(RCX))
                    }
                };
                self.store_field(A, first);
                self.store_second(kind, size, b, TEMP);
                return skip;
            }
            StepKind::Count => {
                let kind = match i.mnemonic() {
                    M::Tzcnt => FlagKind::Tzcnt,
                    M::Lzcnt => FlagKind::Lzcnt,
                    _ => FlagKind::Popcnt,
                };
                let source = value.unwrap_or_else(|| self.home(i.op1_register()));
                self.store_field(A, source);
                self.store_record(kind, size);
            }
            _ => {}
        }
        None
    }

    /// Stores the values for the flags that the instruction has computed.
    fn store_after(&mut self, step: &UnitStep, size: u8, value: Option<Rm>) {
        let i = &step.insn;
        match step.kind {
            StepKind::Step { decrement } => {
                let result = value.unwrap_or_else(|| self.home(i.op0_register()));
                self.store_step(decrement, size, result);
            }
            StepKind::Product => {
                self.store_overflow();
                let low = match i.op_count() {
                    1 => Rm::Reg(RAX),
                    _ => self.home(i.op0_register()),
                };
                self.store_field(A, low);
                self.store_record(FlagKind::Product, size);
            }
            StepKind::Bit => self.store_bit(),
            _ => {}
        }
    }
}

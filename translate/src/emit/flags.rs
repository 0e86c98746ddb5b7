//! Stores the values for the arithmetic flags, and keeps host flags for readers.
//!
//! "Sunk" stores are those that are made at the unit's edges instead of after the instruction.

use super::{Emitter, Retry};
use crate::analysis::{
    ARITHMETIC, FlagVisibility, StepKind, UnitAnalysis, UnitStep, accesses_memory, is_high_byte,
};
use crate::asm::{CALL, Host, RAX, Rm, TEMP};
use crate::flags::{FlagKind, record, step_byte};
use crate::layout::Context;
use iced_x86::{Instruction, OpKind};
use std::mem::offset_of;

pub(super) const A: usize = offset_of!(Context, flag_a);
pub(super) const B: usize = offset_of!(Context, flag_b);
pub(super) const CARRY: usize = offset_of!(Context, flag_carry);
const STEP: usize = offset_of!(Context, flag_step);
const CF: usize = offset_of!(Context, flag_cf);
const RECORD: usize = offset_of!(Context, flag_record);
/// The flags that the stub loads: all but AF.
const LOADED_FLAGS: u32 = ARITHMETIC & !0x10;
const SAVED: usize = offset_of!(Context, saved_flags);

/// The second operand of arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Rm(Rm),
    Immediate(i32),
}

/// Returns the size of the first operand in bytes.
pub(super) fn operand_size(i: &Instruction) -> u8 {
    let size = match i.op0_kind() {
        OpKind::Register => i.op0_register().size(),
        _ => i.memory_size().size(),
    };
    u8::try_from(size).unwrap_or(8)
}

/// Returns the immediate second operand, sign-extended from `size` bytes.
#[expect(clippy::cast_possible_truncation, reason = "cut to the operand size")]
pub(super) fn immediate(i: &Instruction, size: u8) -> i32 {
    let value = i.immediate(1);
    match size {
        1 => i32::from(value as i8),
        2 => i32::from(value as i16),
        _ => value as i32,
    }
}

/// Whether a step overwrites all arithmetic flags.
const fn overwrites(step: &UnitStep) -> bool {
    step.flags.written & ARITHMETIC == ARITHMETIC
}

/// Returns for each step whether its flag values are stored at edges, not after the step.
///
/// An edge stores the flags of all sunk steps before it. So a later step that changes only some of
/// the flags, and stores them itself, must follow a step that has stored its own.
pub(super) fn sunk_steps(analysis: &UnitAnalysis) -> Vec<bool> {
    let steps = &analysis.steps;
    let mut sunk = vec![false; steps.len()];
    // Where the flags that are set before the current step are overwritten.
    let mut end = steps.len();
    // Whether a step before that stores some of the flags itself.
    let mut stored = false;
    for (at, step) in steps.iter().enumerate().rev() {
        sunk[at] = !stored && can_sink(analysis, at, end);
        if overwrites(step) {
            (end, stored) = (at, false);
        } else if step.flags.changed != 0 && step.visibility != FlagVisibility::No {
            stored |= !sunk[at];
        }
    }
    sunk
}

/// Whether the operands of a step, or its result, keep their values until its flags are overwritten
/// at `end`.
fn can_sink(analysis: &UnitAnalysis, at: usize, end: usize) -> bool {
    let step = &analysis.steps[at];
    let i = &step.insn;
    if step.visibility != FlagVisibility::AtEdges
        || accesses_memory(i)
        || is_high_byte(i.op0_register())
    {
        return false;
    }
    let two = match step.kind {
        StepKind::Alu(0 | 5) if i.op1_kind() == OpKind::Register => {
            if i.op1_register().full_register() == i.op0_register().full_register() {
                return false;
            }
            true
        }
        StepKind::Alu(7) | StepKind::Test => true,
        StepKind::Alu(0 | 1 | 4 | 5 | 6) | StepKind::Step { .. } => false,
        _ => return false,
    };
    let keeps = |r| analysis.keeps(r, at, end);
    keeps(i.op0_register()) && (!two || i.op1_kind() != OpKind::Register || keeps(i.op1_register()))
}

impl Emitter<'_> {
    /// Stores a value in a field of the context; clobbers R11 if it is in memory.
    pub(super) fn store_field(&mut self, field: usize, value: Rm) {
        self.store_field_by(field, value, TEMP);
    }

    /// Like [`Self::store_field`], but clobbers `scratch`.
    pub(super) fn store_field_by(&mut self, field: usize, value: Rm, scratch: Host) {
        let host = match value {
            Rm::Reg(host) => host,
            memory => {
                self.asm.load(8, scratch, memory);
                scratch
            }
        };
        let to = self.context(field);
        self.asm.store(8, to, host);
    }

    /// Stores the record of an operation, without a second operand in it.
    pub(super) fn store_record(&mut self, kind: FlagKind, size: u8) {
        let to = self.context(RECORD);
        self.asm.store_imm(4, to, record(kind, size, None));
    }

    /// Stores the second operand and the record of an operation; clobbers `scratch`.
    pub(super) fn store_second(&mut self, kind: FlagKind, size: u8, b: Source, scratch: Host) {
        let mut small = None;
        match b {
            Source::Immediate(value) => match i8::try_from(value) {
                Ok(value) => small = Some(value),
                Err(_) => {
                    let to = self.context(B);
                    self.asm.store_imm(8, to, value);
                }
            },
            Source::Rm(value) => self.store_field_by(B, value, scratch),
        }
        let to = self.context(RECORD);
        self.asm.store_imm(4, to, record(kind, size, small));
    }

    /// Stores the host's CF as the carry of the record.
    pub(super) fn store_carry(&mut self) {
        let to = self.context(CARRY);
        self.asm.set(2, to);
    }

    /// Stores the host's OF as the carry of the record.
    pub(super) fn store_overflow(&mut self) {
        let to = self.context(CARRY);
        self.asm.set(0, to);
    }

    /// Stores the host's CF on its own: a bit test keeps the other flags.
    pub(super) fn store_bit(&mut self) {
        let to = self.context(CF);
        self.asm.set(2, to);
        let to = self.context(RECORD + 3);
        self.asm.store_imm(1, to, 1);
    }

    /// Stores the result of INC or DEC.
    pub(super) fn store_step(&mut self, decrement: bool, size: u8, result: Rm) {
        self.store_field(STEP, result);
        let to = self.context(RECORD + 2);
        self.asm.store_imm(1, to, step_byte(decrement, size));
    }

    /// Returns the operands of an instruction without a memory operand.
    fn operands(&self, i: &Instruction) -> (Rm, Source) {
        let source = match i.op1_kind() {
            OpKind::Register => Source::Rm(self.home(i.op1_register())),
            _ => Source::Immediate(immediate(i, operand_size(i))),
        };
        (self.home(i.op0_register()), source)
    }

    /// Emits the sunk stores of an edge that comes after `before` steps.
    pub(super) fn sunk_stores(&mut self, before: usize) {
        let steps = &self.analysis.steps[..before];
        let first = steps.iter().rposition(overwrites).unwrap_or(0);
        for at in first..before {
            if self.sunk[at] {
                let step = self.analysis.steps[at];
                self.sunk_store(&step);
            }
        }
    }

    fn sunk_store(&mut self, step: &UnitStep) {
        let i = &step.insn;
        let size = operand_size(i);
        if let StepKind::Step { decrement } = step.kind {
            let result = self.home(i.op0_register());
            self.store_step(decrement, size, result);
            return;
        }
        let (a, b) = self.operands(i);
        self.store_field(A, a);
        match step.kind {
            StepKind::Alu(0) => self.store_second(FlagKind::AddResult, size, b, TEMP),
            StepKind::Alu(5) => self.store_second(FlagKind::SubResult, size, b, TEMP),
            StepKind::Alu(7) => self.store_second(FlagKind::Sub, size, b, TEMP),
            StepKind::Test if b == Source::Rm(a) => self.store_record(FlagKind::Logic, size),
            StepKind::Test => self.store_second(FlagKind::Test, size, b, TEMP),
            _ => self.store_record(FlagKind::Logic, size),
        }
    }

    /// Whether the current step stores its flag values itself.
    pub(super) fn stores_now(&self) -> bool {
        let visible = self.analysis.steps[self.at].visibility != FlagVisibility::No;
        visible && !self.sunk[self.at]
    }

    /// Emits code that gets these guest flags into the host's flags.
    ///
    /// Clobbers R11. If that is impossible, the unit must be emitted again, with the flags saved.
    pub(super) fn need(&mut self, flags: u32) -> Result<(), Retry> {
        if flags & !self.valid == 0 {
            return Ok(());
        }
        let Some(producer) = self.analysis.producer(self.at, flags) else {
            return self.load_flags(flags);
        };
        if let Some((saved, bits)) = self.saved
            && saved == producer
            && flags & !bits == 0
        {
            self.restore_flags();
            self.valid = bits & !self.changed_since(producer);
            return Ok(());
        }
        if self.compare_again(producer, flags) {
            return Ok(());
        }
        if self.saves.contains(&producer) {
            return self.cannot();
        }
        Err(Retry::Save(producer))
    }

    /// Emits a call of the stub that loads the flags from before the unit.
    ///
    /// The unit may be left there, so no step before the current one may change any flags: their
    /// values might not be stored yet. Nor may the step's access have been reported.
    fn load_flags(&mut self, flags: u32) -> Result<(), Retry> {
        let before = &self.analysis.steps[..self.at];
        if flags & !LOADED_FLAGS != 0 || before.iter().any(|s| s.flags.changed != 0) {
            return self.cannot();
        }
        let step = self.analysis.steps[self.at];
        if self.source.access_format.is_some() && accesses_memory(&step.insn) {
            return self.cannot();
        }
        let point = self.instruction(step.block, step.index, None);
        let exit = self.exit(point);
        self.asm.constant(TEMP, exit.into());
        self.asm.jump_to(CALL, self.addresses.load_flags);
        self.valid = LOADED_FLAGS;
        Ok(())
    }

    /// Emits a comparison again, if its operands still have their values.
    fn compare_again(&mut self, producer: usize, flags: u32) -> bool {
        let step = self.analysis.steps[producer];
        let i = &step.insn;
        let compares =
            matches!(step.kind, StepKind::Alu(7) | StepKind::Test) && !accesses_memory(i);
        if !compares
            || is_high_byte(i.op0_register())
            || flags & !(step.flags.written & !step.flags.undefined) != 0
        {
            return false;
        }
        let keeps = |r| self.analysis.keeps(r, producer, self.at);
        let second = i.op1_kind() != OpKind::Register || keeps(i.op1_register());
        if !keeps(i.op0_register()) || !second {
            return false;
        }
        let (a, b) = self.operands(i);
        self.compare(step.kind, operand_size(i), a, b);
        self.valid = step.flags.written & !step.flags.undefined & !self.changed_since(producer);
        true
    }

    /// Returns the flags that steps between `producer` and the current one may change.
    fn changed_since(&self, producer: usize) -> u32 {
        let later = &self.analysis.steps[producer + 1..self.at];
        later.iter().fold(0, |flags, s| flags | s.flags.changed)
    }

    /// Emits CMP or TEST of a register, which may be spilled; clobbers R11.
    pub(super) fn compare(&mut self, kind: StepKind, size: u8, a: Rm, b: Source) {
        let b = match b {
            Source::Rm(Rm::Reg(host)) => host,
            Source::Rm(memory) => {
                self.asm.load(8, TEMP, memory);
                TEMP
            }
            Source::Immediate(value) => {
                if kind == StepKind::Test {
                    self.test_immediate(size, a, value);
                } else {
                    self.asm.alu_imm(7, size, a, value);
                }
                return;
            }
        };
        match kind {
            StepKind::Test => self.asm.sized(0x85, size, b.0, a),
            _ => self.asm.alu(7, size, a, b),
        }
    }

    /// Emits TEST with an immediate.
    pub(super) fn test_immediate(&mut self, size: u8, a: Rm, value: i32) {
        let len = size.min(4);
        let opcode = if size == 1 { 0xf6 } else { 0xf7 };
        self.asm.encode(&[opcode], size, 0, a, len);
        self.asm.bytes(&value.to_le_bytes()[..usize::from(len)]);
    }

    /// Saves the host's flags after the current step, if a later step needs them.
    pub(super) fn save_flags(&mut self) {
        if !self.saves.contains(&self.at) {
            return;
        }
        self.asm.load(8, TEMP, Rm::Reg(RAX));
        // LAHF; SETO AL
        self.asm.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
        let to = self.context(SAVED);
        self.asm.store(2, to, RAX);
        self.asm.load(8, RAX, Rm::Reg(TEMP));
        self.saved = Some((self.at, self.valid));
    }

    /// Loads the host flags that `save_flags` saved. Clobbers R11, keeps R10.
    fn restore_flags(&mut self) {
        self.asm.load(8, TEMP, Rm::Reg(RAX));
        let from = self.context(SAVED);
        // MOVZX EAX, word; ADD AL, 7FH; SAHF
        self.asm.encode(&[0x0f, 0xb7], 4, RAX.0, from, 0);
        self.asm.bytes(&[0x04, 0x7f, 0x9e]);
        self.asm.load(8, RAX, Rm::Reg(TEMP));
    }
}

//! The stub that loads the guest's arithmetic flags into the host's.
//!
//! A unit that reads flags from before itself calls it. The stub repeats the operation that the
//! record in the context describes ([`crate::flags`]), and then an INC or DEC that followed it.

use crate::asm::{Assembler, JMP, Jump32, RAX, RCX, Rm, TEMP, jcc};
use crate::flags::{FlagKind, IMMEDIATE, KINDS, record, step_byte};
use crate::layout::{Context, Data};
use std::mem::offset_of;

/// Number of values of a record's first byte, without the bit for an immediate.
pub(crate) const KIND_BYTES: usize = IMMEDIATE as usize;
/// Number of values of a record's third byte.
pub(crate) const STEP_BYTES: usize = 64;

const A: usize = offset_of!(Context, flag_a);
const RECORD: usize = offset_of!(Context, flag_record);

/// Condition "equal".
const EQUAL: u8 = 4;
/// Condition "not equal".
const NOT_EQUAL: u8 = 5;

/// Addresses of the stub and of the code that it calls, by the first and third byte of a record.
#[derive(Clone, Debug)]
pub(crate) struct FlagStubs {
    /// Loads all arithmetic flags but AF.
    ///
    /// It takes the number of an exit in R11, through which the unit is left if the record is one
    /// that the stub does not know.
    pub(crate) load: u64,
    pub(crate) kinds: [u64; KIND_BYTES],
    pub(crate) steps: [u64; STEP_BYTES],
}

/// Emits the stub; `data` is the address of the context.
pub(crate) fn emit(asm: &mut Assembler, data: u64, leave_numbered: u64) -> FlagStubs {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let table = |offset: usize| data + offset as u64;

    // In the tables, for records that the stub does not know: drops its own return address.
    let unknown_called = asm.address();
    // ADD RSP, 8
    asm.bytes(&[0x48, 0x83, 0xc4, 8]);
    let unknown = asm.address();
    pop_scratch(asm);
    asm.bytes(&[0x48, 0x83, 0xc4, 8]);
    asm.jump_to(JMP, leave_numbered);

    let load = asm.address();
    asm.store(4, context(offset_of!(Context, exit)), TEMP);
    // PUSH RAX; PUSH RCX
    asm.bytes(&[0x50, 0x51]);
    asm.alu_imm(7, 1, context(RECORD + 3), 0);
    let sets_carry = asm.jump(&jcc(NOT_EQUAL));
    // MOVZX ECX, byte
    asm.encode(&[0x0f, 0xb6], 4, RCX.0, context(RECORD + 2), 0);
    asm.load(4, TEMP, context(RECORD));
    asm.load(8, RAX, context(offset_of!(Context, flag_b)));
    // TEST R11B, IMMEDIATE
    asm.encode(&[0xf6], 1, 0, Rm::Reg(TEMP), 1);
    asm.bytes(&[IMMEDIATE]);
    let in_memory = asm.jump(&jcc(EQUAL));
    // MOVSX RAX, byte
    asm.encode(&[0x0f, 0xbe], 8, RAX.0, context(RECORD + 1), 0);
    asm.here(in_memory);
    asm.alu_imm(4, 4, Rm::Reg(TEMP), i32::from(IMMEDIATE - 1));
    let kinds = table(offset_of!(Data, flag_kinds));
    asm.encode(&[0xff], 4, 2, Rm::Scaled(TEMP, kinds), 0);
    // JRCXZ over the next instruction keeps the flags.
    let from = asm.pos();
    asm.bytes(&[0xe3, 0]);
    let steps = table(offset_of!(Data, flag_steps));
    asm.encode(&[0xff], 4, 2, Rm::Scaled(RCX, steps), 0);
    asm.code[from + 1] = u8::try_from(asm.pos() - from - 2).unwrap_or(0);
    pop_scratch(asm);
    asm.bytes(&[0xc3]);
    far_to(asm, sets_carry, unknown);

    let mut stubs = FlagStubs {
        load,
        kinds: [unknown_called; KIND_BYTES],
        steps: [unknown_called; STEP_BYTES],
    };
    for kind in KINDS {
        for size in [1, 2, 4, 8] {
            let [first, ..] = record(kind, size, None).to_le_bytes();
            let code = asm.address();
            if emit_kind(asm, data, kind, size) {
                asm.bytes(&[0xc3]);
                stubs.kinds[usize::from(first)] = code;
            }
        }
    }
    stubs.emit_steps(asm, data);
    stubs
}

impl FlagStubs {
    /// Emits the INC and DEC of each size, of a result: they keep CF.
    fn emit_steps(&mut self, asm: &mut Assembler, data: u64) {
        let from = Rm::Fixed(data + offset_of!(Context, flag_step) as u64);
        for decrement in [false, true] {
            for size in [1, 2, 4, 8] {
                let index = usize::try_from(step_byte(decrement, size)).unwrap_or(0);
                self.steps[index] = asm.address();
                asm.load(8, TEMP, from);
                // The value before the instruction: LEA keeps CF too.
                asm.lea(TEMP, TEMP, if decrement { 1 } else { -1 });
                asm.sized(0xff, size, u8::from(decrement), Rm::Reg(TEMP));
                asm.bytes(&[0xc3]);
            }
        }
    }
}

fn pop_scratch(asm: &mut Assembler) {
    // POP RCX; POP RAX
    asm.bytes(&[0x59, 0x58]);
}

/// Makes a jump lead to code before it.
fn far_to(asm: &mut Assembler, jump: Jump32, address: u64) {
    let to = usize::try_from(address - asm.base).unwrap_or(0);
    asm.lead(jump, to);
}

/// Emits the operation of a kind, with `b` in RAX. Returns false if it emits nothing.
fn emit_kind(asm: &mut Assembler, data: u64, kind: FlagKind, size: u8) -> bool {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let a = Rm::Reg(TEMP);
    let carry = |asm: &mut Assembler| {
        // BT dword, 0
        let from = context(offset_of!(Context, flag_carry));
        asm.encode(&[0x0f, 0xba], 4, 4, from, 1);
        asm.bytes(&[0]);
    };
    let explicit = |asm: &mut Assembler, from: usize| {
        asm.load(8, RAX, context(from));
        // ADD AL, 7FH; SAHF
        asm.bytes(&[0x04, 0x7f, 0x9e]);
    };
    match kind {
        FlagKind::Caller => explicit(asm, offset_of!(Context, caller_flags)),
        FlagKind::Explicit | FlagKind::ExplicitLogic => explicit(asm, A),
        FlagKind::Shl
        | FlagKind::Shr
        | FlagKind::Sar
        | FlagKind::Product
        | FlagKind::Tzcnt
        | FlagKind::Lzcnt
        | FlagKind::Popcnt
        | FlagKind::Scan => return false,
        _ => {
            asm.load(8, TEMP, context(A));
            match kind {
                FlagKind::Add => asm.alu(0, size, a, RAX),
                FlagKind::Sub => asm.alu(7, size, a, RAX),
                FlagKind::Adc => {
                    carry(asm);
                    asm.alu(2, size, a, RAX);
                }
                FlagKind::Sbb => {
                    carry(asm);
                    asm.alu(3, size, a, RAX);
                }
                FlagKind::Logic => asm.sized(0x85, size, TEMP.0, a),
                FlagKind::Test => asm.sized(0x85, size, RAX.0, a),
                FlagKind::AddResult => {
                    asm.alu(5, size, a, RAX);
                    asm.alu(0, size, a, RAX);
                }
                FlagKind::SubResult => {
                    asm.alu(0, size, a, RAX);
                    asm.alu(5, size, a, RAX);
                }
                // NEG
                _ => asm.sized(0xf7, size, 3, a),
            }
        }
    }
    true
}

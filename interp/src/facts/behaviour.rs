//! The table of how instructions access operands and flags, and how they may end.

use super::{FlagFacts, OperandAccess, flow};
use crate::flags::ARITHMETIC;
use hindsight_regs::rflags::Rflags;
use iced_x86::{ConditionCode, Instruction, Mnemonic as M, OpKind};

/// How an instruction may end if it has no memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completion {
    /// It completes, and the next instruction follows.
    Always,
    /// It completes as above, or it faults.
    OrFault,
    /// It completes as above, faults, or leaves the dispatch loop.
    OrFaultOrExit,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Behaviour {
    /// Accesses to the explicit operands, in order.
    pub(super) access: [OperandAccess; 5],
    pub(super) flags: FlagFacts,
    pub(super) completion: Completion,
}

pub(super) const N: OperandAccess = OperandAccess::NONE;
pub(super) const R: OperandAccess = OperandAccess::READ;
pub(super) const W: OperandAccess = OperandAccess::WRITE;
pub(super) const RW: OperandAccess = OperandAccess::READ_WRITE;

const NO_FLAGS: Rflags = Rflags::empty();
const CF: Rflags = Rflags::CF;
const OF: Rflags = Rflags::OF;
const AF: Rflags = Rflags::AF;
const ZF: Rflags = Rflags::ZF;
const SF: Rflags = Rflags::SF;
const PF: Rflags = Rflags::PF;

pub(super) const fn flags(read: Rflags, written: Rflags, undefined: Rflags) -> FlagFacts {
    FlagFacts {
        read,
        written,
        changed: written,
        undefined,
    }
}

/// Returns the flags of an instruction that may keep the flags it would write.
pub(super) const fn conditionally(facts: FlagFacts) -> FlagFacts {
    FlagFacts {
        written: NO_FLAGS,
        ..facts
    }
}

/// The instruction neither reads nor changes flags.
pub(super) const KEEPS: FlagFacts = flags(NO_FLAGS, NO_FLAGS, NO_FLAGS);
/// The instruction writes all flags, with defined values.
pub(super) const WRITES: FlagFacts = flags(NO_FLAGS, ARITHMETIC, NO_FLAGS);
/// The instruction enters other code, which may read and change all flags.
pub(super) const TRANSFERS: FlagFacts = conditionally(flags(ARITHMETIC, ARITHMETIC, NO_FLAGS));
/// The instruction writes all flags; AF is undefined.
const LOGIC: FlagFacts = flags(NO_FLAGS, ARITHMETIC, AF);
/// The instruction writes CF; the interpreter keeps the undefined flags.
const BIT: FlagFacts = flags(NO_FLAGS, CF, OF.union(SF).union(AF).union(PF));
const PRODUCT: FlagFacts = flags(NO_FLAGS, ARITHMETIC, SF.union(ZF).union(AF).union(PF));

const fn row(a: [OperandAccess; 3], flags: FlagFacts, completion: Completion) -> Behaviour {
    Behaviour {
        access: [a[0], a[1], a[2], N, N],
        flags,
        completion,
    }
}

const fn plain(a: [OperandAccess; 3], flags: FlagFacts) -> Behaviour {
    row(a, flags, Completion::Always)
}

const fn faults(a: [OperandAccess; 3], flags: FlagFacts) -> Behaviour {
    row(a, flags, Completion::OrFault)
}

pub(super) const fn exits(a: [OperandAccess; 3], flags: FlagFacts) -> Behaviour {
    row(a, flags, Completion::OrFaultOrExit)
}

/// Returns the table's row for an instruction.
pub(super) fn of(i: &Instruction) -> Behaviour {
    arithmetic(i)
        .or_else(|| movement(i))
        .or_else(|| shift_or_bit(i))
        .or_else(|| flow::stack_or_string(i))
        .or_else(|| flow::branch(i))
        .or_else(|| flow::system(i))
        .unwrap_or_else(|| vector(i))
}

/// Returns the flags that a condition code reads.
fn condition_flags(condition: ConditionCode) -> Rflags {
    use ConditionCode as C;
    match condition {
        C::None => NO_FLAGS,
        C::o | C::no => OF,
        C::b | C::ae => CF,
        C::e | C::ne => ZF,
        C::be | C::a => CF.union(ZF),
        C::s | C::ns => SF,
        C::p | C::np => PF,
        C::l | C::ge => SF.union(OF),
        C::le | C::g => ZF.union(SF).union(OF),
    }
}

pub(super) fn condition_facts(i: &Instruction) -> FlagFacts {
    flags(condition_flags(i.condition_code()), NO_FLAGS, NO_FLAGS)
}

/// Returns the masked count of a shift or rotation; `None` if it is in CL.
fn shift_count(i: &Instruction) -> Option<u64> {
    let operand = i.op_count() - 1;
    if i.op_kind(operand) == OpKind::Register {
        return None;
    }
    let size = match i.op0_kind() {
        OpKind::Register => i.op0_register().size(),
        _ => i.memory_size().size(),
    };
    Some(i.immediate(operand) & if size == 8 { 63 } else { 31 })
}

/// Returns the flags of a shift or rotation.
///
/// OF is undefined unless the count is 1, and the flags of `undefined` always are. A count of 0
/// keeps all flags.
fn shift_flags(i: &Instruction, written: Rflags, undefined: Rflags) -> FlagFacts {
    match shift_count(i) {
        Some(0) => KEEPS,
        Some(1) => flags(NO_FLAGS, written, undefined),
        Some(_) => flags(NO_FLAGS, written, undefined.union(OF)),
        None => conditionally(flags(NO_FLAGS, written, undefined.union(OF))),
    }
}

/// Rows of integer arithmetic and logic.
fn arithmetic(i: &Instruction) -> Option<Behaviour> {
    const STEP: FlagFacts = flags(NO_FLAGS, ARITHMETIC.difference(CF), NO_FLAGS);
    Some(match i.mnemonic() {
        M::Add | M::Sub => plain([RW, R, N], WRITES),
        M::And | M::Or | M::Xor => plain([RW, R, N], LOGIC),
        M::Adc | M::Sbb => plain([RW, R, N], flags(CF, ARITHMETIC, NO_FLAGS)),
        M::Cmp => plain([R, R, N], WRITES),
        M::Test => plain([R, R, N], LOGIC),
        M::Inc | M::Dec => plain([RW, N, N], STEP),
        M::Neg => plain([RW, N, N], WRITES),
        M::Not => plain([RW, N, N], KEEPS),
        M::Mul => plain([R, N, N], PRODUCT),
        M::Imul => match i.op_count() {
            1 => plain([R, N, N], PRODUCT),
            2 => plain([RW, R, N], PRODUCT),
            _ => plain([W, R, R], PRODUCT),
        },
        // All flags are undefined; the interpreter keeps them.
        M::Div | M::Idiv => faults([R, N, N], flags(NO_FLAGS, NO_FLAGS, ARITHMETIC)),
        M::Aaa | M::Aas => plain(
            [N; 3],
            flags(AF, ARITHMETIC, OF.union(SF).union(ZF).union(PF)),
        ),
        M::Aad => plain(
            [R, N, N],
            flags(NO_FLAGS, ARITHMETIC, OF.union(AF).union(CF)),
        ),
        M::Aam => faults(
            [R, N, N],
            flags(NO_FLAGS, ARITHMETIC, OF.union(AF).union(CF)),
        ),
        M::Daa | M::Das => plain([N; 3], flags(AF.union(CF), ARITHMETIC, OF)),
        M::Xadd => plain([RW, RW, N], WRITES),
        M::Cmpxchg => plain([RW, R, N], WRITES),
        M::Cmpxchg8b | M::Cmpxchg16b => exits([RW, N, N], flags(NO_FLAGS, ZF, NO_FLAGS)),
        M::Adcx => plain([RW, R, N], flags(CF, CF, NO_FLAGS)),
        M::Adox => plain([RW, R, N], flags(OF, OF, NO_FLAGS)),
        M::Crc32 => plain([RW, R, N], KEEPS),
        _ => return None,
    })
}

/// Rows of moves, conditional moves, exchanges, changes of one flag, and hints.
fn movement(i: &Instruction) -> Option<Behaviour> {
    Some(match i.mnemonic() {
        M::Mov if control_or_debug(i) => exits([W, R, N], flags(NO_FLAGS, NO_FLAGS, ARITHMETIC)),
        M::Mov | M::Movzx | M::Movsx | M::Movsxd => plain([W, R, N], KEEPS),
        M::Movbe | M::Movnti => exits([W, R, N], KEEPS),
        M::Lea => plain([W, N, N], KEEPS),
        M::Bswap => plain([RW, N, N], KEEPS),
        M::Xchg => plain([RW, RW, N], KEEPS),
        M::Cbw | M::Cwde | M::Cdqe | M::Cwd | M::Cdq | M::Cqo => plain([N; 3], KEEPS),
        M::Xlatb => exits([R, N, N], KEEPS),
        M::Lahf => plain([N; 3], flags(ARITHMETIC.difference(OF), NO_FLAGS, NO_FLAGS)),
        M::Sahf => plain([N; 3], flags(NO_FLAGS, ARITHMETIC.difference(OF), NO_FLAGS)),
        M::Clc | M::Stc => plain([N; 3], flags(NO_FLAGS, CF, NO_FLAGS)),
        M::Cmc => plain([N; 3], flags(CF, CF, NO_FLAGS)),
        M::Salc => plain([N; 3], flags(CF, NO_FLAGS, NO_FLAGS)),
        M::Cld | M::Std => plain([N; 3], KEEPS),
        M::Nop | M::Reservednop | M::Pause | M::Endbr32 | M::Endbr64 => plain([N; 3], KEEPS),
        M::Prefetchit0 | M::Prefetchit1 | M::Prefetchnta => plain([N; 3], KEEPS),
        M::Prefetcht0 | M::Prefetcht1 | M::Prefetcht2 => plain([N; 3], KEEPS),
        M::Prefetch | M::Prefetchw | M::Prefetchwt1 => plain([N; 3], KEEPS),
        M::Mfence | M::Lfence | M::Sfence => plain([N; 3], KEEPS),
        _ if is_cmov(i) => plain([RW, R, N], condition_facts(i)),
        _ if is_setcc(i) => plain([W, N, N], condition_facts(i)),
        _ => return None,
    })
}

/// Whether an instruction moves to or from a control or debug register.
///
/// The architecture leaves the flags undefined then; the interpreter keeps them.
fn control_or_debug(i: &Instruction) -> bool {
    [i.op0_register(), i.op1_register()]
        .iter()
        .any(|r| r.is_cr() || r.is_dr())
}

/// Whether an instruction is CMOVcc.
pub(crate) fn is_cmov(i: &Instruction) -> bool {
    i.condition_code() != ConditionCode::None
        && i.op_count() == 2
        && i.op0_kind() == OpKind::Register
        && i.op0_register().is_gpr()
}

/// Whether an instruction is SETcc.
pub(crate) fn is_setcc(i: &Instruction) -> bool {
    i.condition_code() != ConditionCode::None
        && i.op_count() == 1
        && !i.is_jcc_short_or_near()
        && !i.is_loopcc()
}

/// Rows of shifts, rotations, bit tests, bit counts and the bit operations of BMI.
fn shift_or_bit(i: &Instruction) -> Option<Behaviour> {
    const SCANNED: Rflags = ARITHMETIC.difference(ZF);
    const COUNTED: Rflags = OF.union(SF).union(AF).union(PF);
    Some(match i.mnemonic() {
        M::Shl | M::Sal | M::Shr | M::Sar => plain([RW, R, N], shift_flags(i, ARITHMETIC, AF)),
        M::Rol | M::Ror => plain([RW, R, N], shift_flags(i, CF.union(OF), NO_FLAGS)),
        M::Rcl | M::Rcr => plain([RW, R, N], carry_rotation_flags(i)),
        M::Shld | M::Shrd => plain([RW, R, R], shift_flags(i, ARITHMETIC, AF)),
        M::Bt => plain([R, R, N], BIT),
        M::Bts | M::Btr | M::Btc => plain([RW, R, N], BIT),
        // A source of 0 keeps the destination.
        M::Bsf | M::Bsr => plain([RW, R, N], flags(NO_FLAGS, ARITHMETIC, SCANNED)),
        M::Tzcnt | M::Lzcnt => plain([W, R, N], flags(NO_FLAGS, ARITHMETIC, COUNTED)),
        M::Popcnt => plain([W, R, N], WRITES),
        // These run on the host's processor, in a thunk.
        M::Andn => exits([W, R, R], flags(NO_FLAGS, ARITHMETIC, AF.union(PF))),
        M::Bextr => exits(
            [W, R, R],
            flags(NO_FLAGS, ARITHMETIC, AF.union(SF).union(PF)),
        ),
        M::Bzhi => exits([W, R, R], flags(NO_FLAGS, ARITHMETIC, AF.union(PF))),
        M::Blsi | M::Blsmsk | M::Blsr => {
            exits([W, R, N], flags(NO_FLAGS, ARITHMETIC, AF.union(PF)))
        }
        M::Rorx | M::Sarx | M::Shlx | M::Shrx | M::Pdep | M::Pext => exits([W, R, R], KEEPS),
        M::Mulx => exits([W, W, R], KEEPS),
        _ => return None,
    })
}

/// Returns the flags of RCL and RCR.
///
/// A count that is a multiple of the rotated width keeps them.
fn carry_rotation_flags(i: &Instruction) -> FlagFacts {
    match shift_flags(i, CF.union(OF), NO_FLAGS) {
        KEEPS => KEEPS,
        facts => FlagFacts {
            read: CF,
            ..conditionally(facts)
        },
    }
}

/// The row of other instructions, such as x87: they read and write all operands.
fn vector(i: &Instruction) -> Behaviour {
    let facts = match i.mnemonic() {
        M::Comisd | M::Comiss | M::Ucomisd | M::Ucomiss => WRITES,
        M::Vcomisd | M::Vcomiss | M::Vucomisd | M::Vucomiss => WRITES,
        M::Ptest | M::Vptest | M::Vtestpd | M::Vtestps => WRITES,
        M::Pcmpestri | M::Pcmpestrm | M::Pcmpistri | M::Pcmpistrm => WRITES,
        M::Pcmpestri64 | M::Pcmpestrm64 | M::Vpcmpestri64 | M::Vpcmpestrm64 => WRITES,
        M::Vpcmpestri | M::Vpcmpestrm | M::Vpcmpistri | M::Vpcmpistrm => WRITES,
        M::Kortestb | M::Kortestw | M::Kortestd | M::Kortestq => WRITES,
        M::Ktestb | M::Ktestw | M::Ktestd | M::Ktestq => WRITES,
        M::Fcomi | M::Fcomip | M::Fucomi | M::Fucomip => WRITES,
        M::Fcmovb | M::Fcmovnb => flags(CF, NO_FLAGS, NO_FLAGS),
        M::Fcmove | M::Fcmovne => flags(ZF, NO_FLAGS, NO_FLAGS),
        M::Fcmovbe | M::Fcmovnbe => flags(CF.union(ZF), NO_FLAGS, NO_FLAGS),
        M::Fcmovu | M::Fcmovnu => flags(PF, NO_FLAGS, NO_FLAGS),
        _ => KEEPS,
    };
    Behaviour {
        access: [RW; 5],
        flags: facts,
        completion: Completion::OrFaultOrExit,
    }
}

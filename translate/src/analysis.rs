//! Analyses a unit: which instructions are translated, their exits and flags.

use crate::layout::{LINE_SHIFT, Rights};
use crate::vector::{self, VectorLevel};
use crate::x87;
use iced_x86::{
    Code, ConditionCode, Instruction, InstructionInfoFactory, Mnemonic as M, OpAccess, OpKind,
    Register,
};

/// CF, PF, AF, ZF, SF and OF.
pub(crate) const ARITHMETIC: u32 = 0x8d5;

/// How an instruction uses the arithmetic flags, as bits of RFLAGS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlagEffects {
    /// Flags that the instruction reads.
    pub read: u32,
    /// Flags that it always overwrites.
    pub written: u32,
    /// Flags that it may change.
    pub changed: u32,
    /// Flags that the architecture leaves undefined.
    pub undefined: u32,
}

/// An instruction of the guest.
#[derive(Clone, Copy, Debug)]
pub struct GuestInstruction {
    /// The decoded instruction, at its linear address.
    pub insn: Instruction,
    /// How the instruction uses the arithmetic flags.
    pub flags: FlagEffects,
    /// The caller must execute this instruction: it is never translated.
    pub foreign: bool,
    /// The caller executes this instruction together with the previous one.
    pub joined: bool,
    /// Whether a memory operand that is not aligned to its size faults.
    pub aligned: bool,
    /// Whether the instruction loads from memory.
    pub loads: bool,
    /// Whether the instruction stores to memory.
    pub stores: bool,
}

/// Which successor of a block the unit continues with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// The instruction after the block.
    Fall,
    /// The target of the block's branch.
    Taken,
}

/// A block of the guest: only its last instruction may branch.
#[derive(Clone, Debug)]
pub struct GuestBlock {
    /// RIP of the first instruction.
    pub rip: u64,
    /// Guest-physical address of the first instruction.
    pub gpa: u64,
    /// The instructions.
    pub insns: Vec<GuestInstruction>,
    /// Where the next block of the unit begins.
    pub follow: Follow,
    /// Number of the block's run counter: see [`crate::Translator::run_counter`].
    pub run_counter: u32,
}

impl GuestBlock {
    /// RIP of the instruction after the block.
    pub(crate) fn end(&self) -> u64 {
        self.insns.last().map_or(self.rip, |i| i.insn.next_ip())
    }

    /// Number of instructions.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.insns.len()).unwrap_or(u32::MAX)
    }

    /// Number of loads and of stores from an instruction on.
    pub(crate) fn accesses_from(&self, index: usize) -> AccessCounts {
        let rest = self.insns.get(index..).unwrap_or_default();
        let count = |f: fn(&GuestInstruction) -> bool| rest.iter().filter(|i| f(i)).count() as u64;
        AccessCounts {
            loads: count(|i| i.loads),
            stores: count(|i| i.stores),
        }
    }

    /// Returns the cache line of an instruction's first byte: its address divided by 64.
    pub(crate) fn line(&self, index: usize) -> u64 {
        let ip = self.insns.get(index).map_or(self.rip, |i| i.insn.ip());
        (self.gpa + ip.wrapping_sub(self.rip)) >> LINE_SHIFT
    }
}

/// Numbers of instructions that access memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// Instructions that load.
    pub loads: u64,
    /// Instructions that store.
    pub stores: u64,
}

/// How translated code reports accesses to memory for a model of the caches.
///
/// It counts loads and stores to lines that [`crate::Translator::enter_line`] has entered. The
/// callback is called for all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessFormat {
    /// Whether the unit must be left before it executes an instruction in another line than the
    /// last one, unless [`crate::Translator::set_code_line`] has entered that line.
    pub fetches: bool,
}

/// How translated code records branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchFormat {
    /// The last four bytes of a record, indexed by [`BranchKind`].
    pub words: [u32; 8],
    /// Whether conditional branches that are not taken are recorded.
    pub not_taken: bool,
    /// What is recorded.
    pub records: RecordKind,
}

/// What translated code records of branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Each branch: its address, its target, a time stamp and a word of [`BranchFormat::words`].
    Branches,
    /// Each branch, as a BTS record: its address, its target and 0.
    Bts,
    /// The way through the unit, from which the branches follow: see [`Translator::expand`](crate::Translator::expand).
    Paths,
}

/// The kinds of near branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum BranchKind {
    /// Jcc.
    Conditional,
    /// JMP to a constant.
    DirectJump,
    /// JMP through a register or memory.
    IndirectJump,
    /// CALL of a constant.
    DirectCall,
    /// CALL whose target is the next instruction, as in code that reads its own RIP.
    CallNext,
    /// CALL through a register or memory.
    IndirectCall,
    /// Near RET.
    Return,
    /// Jcc that is not taken.
    NotTaken,
}

/// The blocks that are translated into one unit.
#[derive(Clone, Debug)]
pub struct UnitSource {
    /// Blocks of one page, each the successor of the previous one.
    pub blocks: Vec<GuestBlock>,
    /// Index in the first block of the instruction at which the unit begins.
    pub start: usize,
    /// The rights with which the unit accesses memory.
    pub rights: Rights,
    /// How the unit records branches; `None` if it records none.
    pub branch_format: Option<BranchFormat>,
    /// How the unit reports accesses; `None` if it does not.
    pub access_format: Option<AccessFormat>,
}

impl UnitSource {
    /// Whether code must check the cache line of an instruction.
    ///
    /// It need not if the previous instruction of the block is in the same line.
    pub(crate) fn checks_line(&self, block: usize, index: usize) -> bool {
        let guest = &self.blocks[block];
        let begins = index == 0 || (block, index) == (0, self.start);
        self.access_format.is_some_and(|f| f.fetches)
            && (begins || guest.line(index) != guest.line(index - 1))
    }
}

/// Where the flags that an instruction sets can be observed outside the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagVisibility {
    /// Nowhere: only instructions of the unit read them.
    No,
    /// Only after the unit is left at one of its edges.
    AtEdges,
    /// At an exit before an instruction, too: a fault handler may read them.
    AtExits,
}

/// How the translator handles an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepKind {
    /// No code is emitted.
    Skip,
    /// Emitted as it is, with renamed registers and a host address.
    Same,
    Lea,
    /// ADD (0) to CMP (7).
    Alu(u8),
    Test,
    Step {
        decrement: bool,
    },
    Neg,
    /// SHL (4), SHR (5) or SAR (7), with a constant count or, if `None`, by CL.
    Shift(u8, Option<u8>),
    /// Like `Same`, but only translated if its flags are not visible outside the unit.
    Unseen,
    Product,
    Divide {
        signed: bool,
    },
    /// BSF or BSR.
    Scan {
        reverse: bool,
    },
    /// An atomic read-modify-write of memory: LOCK, XCHG, XADD or CMPXCHG.
    Atomic,
    Bit,
    /// TZCNT, LZCNT or POPCNT.
    Count,
    /// A vector instruction.
    Vector,
    X87,
    Push,
    Pop,
    Leave,
    Jcc(u8),
    /// LOOP.
    Loop,
    /// JRCXZ.
    JumpIfZero,
    Jump,
    JumpIndirect,
    Call,
    CallIndirect,
    Return,
}

impl StepKind {
    /// Whether it is a branch that may not be taken.
    pub(crate) const fn is_conditional(self) -> bool {
        matches!(self, Self::Jcc(_) | Self::Loop | Self::JumpIfZero)
    }
}

/// A guest instruction with the results of the analysis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitStep {
    /// Index of the block in the unit, and of the instruction in the block.
    pub(crate) block: usize,
    pub(crate) index: usize,
    pub(crate) insn: Instruction,
    pub(crate) flags: FlagEffects,
    pub(crate) kind: StepKind,
    /// The memory operand must be aligned to its size.
    pub(crate) aligned: bool,
    /// The unit may be left before this instruction, for example by a fault.
    pub(crate) exits: bool,
    /// Bit mask of the general registers that the instruction writes.
    pub(crate) writes: u16,
    pub(crate) visibility: FlagVisibility,
}

/// The analysis of a unit: the instructions to translate, and where the unit ends.
#[derive(Debug)]
pub(crate) struct UnitAnalysis {
    pub(crate) steps: Vec<UnitStep>,
    /// Block and index of the instruction before which the unit ends.
    ///
    /// The caller must execute that instruction. `None` if the unit ends with a block.
    pub(crate) stop: Option<(usize, usize)>,
    /// Number of blocks of the source that are translated, at least in part.
    pub(crate) blocks: usize,
    /// Whether the flags from before the unit can be read, by the unit or at an exit.
    pub(crate) sees_flags: bool,
    /// The vector registers that the unit uses.
    pub(crate) vectors: VectorLevel,
}

impl UnitAnalysis {
    /// Analyses a unit, which ends before its step `end` at the latest.
    pub(crate) fn new(source: &UnitSource, end: usize) -> Self {
        let mut factory = InstructionInfoFactory::new();
        let mut steps: Vec<UnitStep> = Vec::new();
        let mut stop = None;
        'all: for (block, guest) in source.blocks.iter().enumerate() {
            let start = if block == 0 { source.start } else { 0 };
            for (index, i) in guest.insns.iter().enumerate().skip(start) {
                let kind = if i.foreign { None } else { kind(&i.insn) };
                let Some(kind) = kind.filter(|_| steps.len() < end) else {
                    stop = Some((block, index));
                    break 'all;
                };
                steps.push(UnitStep {
                    block,
                    index,
                    insn: i.insn,
                    flags: i.flags,
                    kind,
                    aligned: i.aligned,
                    exits: exits(&i.insn, kind) || source.checks_line(block, index),
                    writes: written(&mut factory, &i.insn),
                    visibility: FlagVisibility::AtExits,
                });
            }
        }
        if let Some((block, index)) = stop
            && source.blocks[block].insns[index].joined
            && steps.pop().is_some()
        {
            stop = Some((block, index - 1));
        }
        let mut blocks = source.blocks.len();
        if let Some((block @ 1.., 0)) = stop {
            // The unit ends with the branch before that block.
            blocks = block;
            stop = None;
        }
        let mut analysis = Self {
            steps,
            stop,
            blocks,
            sees_flags: true,
            vectors: VectorLevel::None,
        };
        for at in 0..analysis.steps.len() {
            analysis.steps[at].visibility = analysis.visibility_from(at + 1);
        }
        let vectors = analysis.steps.iter().filter(|s| s.kind == StepKind::Vector);
        analysis.vectors = vectors
            .map(|s| VectorLevel::of(&s.insn))
            .max()
            .unwrap_or_default();
        analysis.sees_flags =
            analysis.visibility_from(0) != FlagVisibility::No || analysis.reads_incoming_flags();
        analysis
    }

    /// Where flags that are set before the step `from` can be observed.
    fn visibility_from(&self, from: usize) -> FlagVisibility {
        let mut visibility = FlagVisibility::No;
        for step in &self.steps[from..] {
            if step.exits {
                return FlagVisibility::AtExits;
            }
            if step.flags.written & ARITHMETIC == ARITHMETIC {
                return visibility;
            }
            if step.kind.is_conditional() {
                visibility = FlagVisibility::AtEdges;
            }
        }
        if self.stop.is_some() {
            return FlagVisibility::AtExits;
        }
        match self.steps.last().map(|s| s.kind) {
            Some(
                StepKind::Return | StepKind::JumpIndirect | StepKind::CallIndirect | StepKind::Call,
            ) => FlagVisibility::AtExits,
            _ => FlagVisibility::AtEdges,
        }
    }

    fn reads_incoming_flags(&self) -> bool {
        let mut missing = ARITHMETIC;
        for step in &self.steps {
            if step.flags.read & missing != 0 {
                return true;
            }
            missing &= !step.flags.written;
        }
        false
    }

    /// The last step before `at` that may change one of these flags.
    pub(crate) fn producer(&self, at: usize, flags: u32) -> Option<usize> {
        let before = &self.steps[..at];
        before.iter().rposition(|s| s.flags.changed & flags != 0)
    }

    /// Whether no step between `after` and `before` writes a register.
    pub(crate) fn keeps(&self, register: Register, after: usize, before: usize) -> bool {
        let bit = 1_u16 << (register.full_register().number() & 15);
        let between = self.steps.get(after + 1..before).unwrap_or_default();
        between.iter().all(|s| s.writes & bit == 0)
    }
}

fn written(factory: &mut InstructionInfoFactory, i: &Instruction) -> u16 {
    let mut mask = 0;
    for used in factory.info(i).used_registers() {
        let reads = matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
        if used.register().is_gpr() && !reads {
            mask |= 1 << (used.register().full_register().number() & 15);
        }
    }
    mask
}

/// Whether an instruction accesses memory through an explicit operand.
pub(crate) fn accesses_memory(i: &Instruction) -> bool {
    has_memory(i) && i.mnemonic() != M::Lea
}

fn has_memory(i: &Instruction) -> bool {
    (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory)
}

fn exits(i: &Instruction, kind: StepKind) -> bool {
    match kind {
        StepKind::Skip | StepKind::Lea => false,
        StepKind::Push
        | StepKind::Pop
        | StepKind::Leave
        | StepKind::Call
        | StepKind::CallIndirect
        | StepKind::Divide { .. }
        | StepKind::X87
        | StepKind::Return => true,
        _ => accesses_memory(i),
    }
}

/// Whether the translator can rename all operands of an integer instruction.
///
/// They are general registers, immediates, and memory with 64-bit addresses. AH, CH, DH and BH can
/// be moved to another register or to memory, and combined with an immediate.
fn is_plain(i: &Instruction) -> bool {
    let address = |r: Register| r == Register::None || r == Register::RIP || r.is_gpr64();
    let high_byte = |n: u32| match i.mnemonic() {
        M::Mov | M::Movzx | M::Movsx if n == 1 => true,
        M::Mov | M::Add | M::Or | M::And | M::Sub | M::Xor | M::Cmp | M::Test => {
            i.op1_kind() == OpKind::Immediate8
        }
        _ => false,
    };
    (0..i.op_count()).all(|n| match i.op_kind(n) {
        OpKind::Register => {
            let register = i.op_register(n);
            register.is_gpr() && (!is_high_byte(register) || high_byte(n))
        }
        OpKind::Memory => {
            address(i.memory_base())
                && address(i.memory_index())
                && (i.memory_base() != Register::None
                    || i.memory_index() != Register::None
                    || i.memory_displ_size() == 8
                    || i.memory_displ_size() == 4)
        }
        OpKind::Immediate8
        | OpKind::Immediate16
        | OpKind::Immediate32
        | OpKind::Immediate64
        | OpKind::Immediate8to16
        | OpKind::Immediate8to32
        | OpKind::Immediate8to64
        | OpKind::Immediate32to64 => true,
        _ => false,
    }) && !is_offset_form(i.code())
}

/// Whether a register is bits 8 to 15 of a general register.
pub(crate) fn is_high_byte(register: Register) -> bool {
    matches!(
        register,
        Register::AH | Register::CH | Register::DH | Register::BH
    )
}

/// Whether an instruction moves between the accumulator and an absolute address.
fn is_offset_form(code: Code) -> bool {
    matches!(
        code,
        Code::Mov_AL_moffs8
            | Code::Mov_AX_moffs16
            | Code::Mov_EAX_moffs32
            | Code::Mov_RAX_moffs64
            | Code::Mov_moffs8_AL
            | Code::Mov_moffs16_AX
            | Code::Mov_moffs32_EAX
            | Code::Mov_moffs64_RAX
    )
}

/// How an instruction is translated; `None` if it is not.
fn kind(i: &Instruction) -> Option<StepKind> {
    match i.mnemonic() {
        M::Nop | M::Reservednop | M::Pause | M::Endbr32 | M::Endbr64 => {
            return Some(StepKind::Skip);
        }
        M::Prefetchnta | M::Prefetcht0 | M::Prefetcht1 | M::Prefetcht2 | M::Prefetchw => {
            return Some(StepKind::Skip);
        }
        M::Cbw | M::Cwde | M::Cdqe | M::Cwd | M::Cdq | M::Cqo => return Some(StepKind::Same),
        M::Mfence | M::Lfence | M::Sfence => return Some(StepKind::Same),
        _ => {}
    }
    if let Some(kind) = branch_kind(i) {
        return Some(kind);
    }
    if i.code() == Code::Leaveq {
        return Some(StepKind::Leave);
    }
    if vector::is_translated(i) && i.mnemonic() != M::Crc32 {
        return Some(StepKind::Vector);
    }
    if x87::is_translated(i) {
        return Some(StepKind::X87);
    }
    if !is_plain(i) {
        return None;
    }
    let memory = has_memory(i);
    if matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc) {
        let by_register = memory && i.op1_kind() == OpKind::Register;
        let narrow = by_register && i.op1_register().size() == 2;
        // With an address of 32 bits, which no register shows here, the bit's offset wraps.
        let wraps = by_register
            && i.memory_base() == Register::None
            && i.memory_index() == Register::None
            && i.memory_displ_size() == 4;
        return (!narrow && !wraps).then_some(StepKind::Bit);
    }
    if i.has_lock_prefix() || memory && matches!(i.mnemonic(), M::Xchg | M::Xadd | M::Cmpxchg) {
        return is_atomic(i).then_some(StepKind::Atomic);
    }
    Some(match i.mnemonic() {
        M::Mov | M::Movzx | M::Movsx | M::Movsxd | M::Not => StepKind::Same,
        M::Movnti | M::Crc32 | M::Movbe => StepKind::Same,
        M::Bswap if i.op0_register().size() > 2 => StepKind::Same,
        M::Xchg if !memory => StepKind::Same,
        M::Rorx | M::Shlx | M::Shrx | M::Sarx | M::Pdep | M::Pext | M::Mulx => StepKind::Same,
        M::Andn | M::Bextr | M::Bzhi | M::Blsi | M::Blsmsk | M::Blsr => StepKind::Unseen,
        M::Shld | M::Shrd if i.op1_register().size() > 2 => StepKind::Unseen,
        M::Div => StepKind::Divide { signed: false },
        M::Idiv => StepKind::Divide { signed: true },
        M::Bsf => StepKind::Scan { reverse: false },
        M::Bsr => StepKind::Scan { reverse: true },
        M::Lea if i.op0_register().size() > 2 => StepKind::Lea,
        M::Push if i.stack_pointer_increment() == -8 && !memory => StepKind::Push,
        M::Pop if i.stack_pointer_increment() == 8 && !memory => StepKind::Pop,
        M::Inc => StepKind::Step { decrement: false },
        M::Dec => StepKind::Step { decrement: true },
        M::Neg => StepKind::Neg,
        M::Test => StepKind::Test,
        M::Tzcnt | M::Lzcnt | M::Popcnt => StepKind::Count,
        M::Mul | M::Imul => StepKind::Product,
        _ if i.condition_code() != ConditionCode::None && !i.is_jcc_short_or_near() => {
            StepKind::Same
        }
        _ => return alu_kind(i).or_else(|| shift_kind(i)),
    })
}

/// Whether an atomic read-modify-write of memory is translated.
fn is_atomic(i: &Instruction) -> bool {
    matches!(
        i.mnemonic(),
        M::Add | M::Or | M::Adc | M::Sbb | M::And | M::Sub | M::Xor | M::Inc | M::Dec | M::Not
    ) || matches!(i.mnemonic(), M::Neg | M::Xchg | M::Xadd | M::Cmpxchg)
}

fn alu_kind(i: &Instruction) -> Option<StepKind> {
    Some(StepKind::Alu(match i.mnemonic() {
        M::Add => 0,
        M::Or => 1,
        M::Adc => 2,
        M::Sbb => 3,
        M::And => 4,
        M::Sub => 5,
        M::Xor => 6,
        M::Cmp => 7,
        _ => return None,
    }))
}

fn shift_kind(i: &Instruction) -> Option<StepKind> {
    let shifts = [M::Shl, M::Sal, M::Shr, M::Sar, M::Rol, M::Ror];
    if !shifts.contains(&i.mnemonic()) {
        return None;
    }
    let by_cl = i.op1_kind() == OpKind::Register;
    let wide = match i.op0_kind() {
        OpKind::Register => i.op0_register().size() == 8,
        _ => i.memory_size().size() == 8,
    };
    let count = match by_cl {
        true => None,
        false => u8::try_from(i.immediate(1) & if wide { 63 } else { 31 }).ok(),
    };
    if count == Some(0) {
        return None;
    }
    Some(match i.mnemonic() {
        M::Shl | M::Sal => StepKind::Shift(4, count),
        M::Shr => StepKind::Shift(5, count),
        M::Sar => StepKind::Shift(7, count),
        M::Rol | M::Ror => StepKind::Unseen,
        _ => return None,
    })
}

fn branch_kind(i: &Instruction) -> Option<StepKind> {
    if i.is_jcc_short_or_near() && i.op0_kind() == OpKind::NearBranch64 {
        return Some(StepKind::Jcc(condition(i.condition_code())));
    }
    let indirect = match i.op0_kind() {
        OpKind::Register => i.op0_register().is_gpr64(),
        OpKind::Memory => is_plain(i) && i.memory_size().size() == 8,
        _ => false,
    };
    Some(match i.code() {
        Code::Loop_rel8_64_RCX => StepKind::Loop,
        Code::Jrcxz_rel8_64 => StepKind::JumpIfZero,
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64 => StepKind::Jump,
        Code::Call_rel32_64 => StepKind::Call,
        Code::Retnq | Code::Retnq_imm16 => StepKind::Return,
        Code::Jmp_rm64 if indirect => StepKind::JumpIndirect,
        Code::Call_rm64 if indirect => StepKind::CallIndirect,
        _ => return None,
    })
}

/// Returns the condition code as Jcc, SETcc and CMOVcc encode it.
pub(crate) fn condition(code: ConditionCode) -> u8 {
    (code as u8).wrapping_sub(1) & 15
}

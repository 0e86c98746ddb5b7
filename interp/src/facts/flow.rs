//! Rows of instructions that use the stack, branch, or change system state.

use super::behaviour::{
    Behaviour, KEEPS, N, R, RW, TRANSFERS, W, WRITES, condition_facts, conditionally, exits, flags,
};
use super::{FlagFacts, OperandAccess};
use crate::flags::ARITHMETIC;
use hindsight_regs::rflags::Rflags;
use iced_x86::{Instruction, Mnemonic as M};

const NO_FLAGS: Rflags = Rflags::empty();
/// Flags of segment checks such as VERR: they write ZF only.
const CHECKS: FlagFacts = flags(NO_FLAGS, Rflags::ZF, NO_FLAGS);

/// Whether an instruction that is no branch ends its block: other code may follow.
pub(super) fn changes_code(i: &Instruction) -> bool {
    matches!(i.mnemonic(), M::Xbegin | M::Xend | M::Rsm)
}

/// Returns the flags of CMPS or SCAS, which keeps them if it is repeated 0 times.
fn compare_string_flags(i: &Instruction) -> FlagFacts {
    if i.has_rep_prefix() || i.has_repne_prefix() {
        conditionally(WRITES)
    } else {
        WRITES
    }
}

/// Rows of stack, string and port instructions.
pub(super) fn stack_or_string(i: &Instruction) -> Option<Behaviour> {
    let string = i.is_string_instruction();
    Some(match i.mnemonic() {
        M::Push => exits([R, N, N], KEEPS),
        M::Pop => exits([W, N, N], KEEPS),
        M::Pusha | M::Pushad | M::Popa | M::Popad => exits([N; 3], KEEPS),
        M::Enter => exits([R, R, N], KEEPS),
        M::Leave => exits([N; 3], KEEPS),
        M::Pushf | M::Pushfd | M::Pushfq => exits([N; 3], flags(ARITHMETIC, NO_FLAGS, NO_FLAGS)),
        M::Popf | M::Popfd | M::Popfq => exits([N; 3], WRITES),
        M::Movsb | M::Movsw | M::Movsq => repeated(i, [W, R, N], KEEPS),
        M::Movsd if string => repeated(i, [W, R, N], KEEPS),
        M::Stosb | M::Stosw | M::Stosd | M::Stosq => repeated(i, [W, R, N], KEEPS),
        M::Lodsb | M::Lodsw | M::Lodsd | M::Lodsq => repeated(i, [W, R, N], KEEPS),
        M::Scasb | M::Scasw | M::Scasd | M::Scasq => exits([R, R, N], compare_string_flags(i)),
        M::Cmpsb | M::Cmpsw | M::Cmpsq => exits([R, R, N], compare_string_flags(i)),
        M::Cmpsd if string => exits([R, R, N], compare_string_flags(i)),
        M::Insb | M::Insw | M::Insd => repeated(i, [W, R, N], KEEPS),
        M::Outsb | M::Outsw | M::Outsd => exits([R, R, N], KEEPS),
        M::In => exits([W, R, N], KEEPS),
        M::Out => exits([R, R, N], KEEPS),
        _ => return None,
    })
}

/// Returns the row of a string instruction.
///
/// If it is repeated 0 times, it keeps its destination.
fn repeated(
    i: &Instruction,
    [destination, source, third]: [OperandAccess; 3],
    facts: FlagFacts,
) -> Behaviour {
    let destination = if i.has_rep_prefix() || i.has_repne_prefix() {
        RW
    } else {
        destination
    };
    exits([destination, source, third], facts)
}

/// Rows of branches, calls, returns and interrupts.
pub(super) fn branch(i: &Instruction) -> Option<Behaviour> {
    Some(match i.mnemonic() {
        _ if i.is_jcc_short_or_near() => exits([R, N, N], condition_facts(i)),
        M::Jmp | M::Call | M::Jcxz | M::Jecxz | M::Jrcxz | M::Loop => exits([R, N, N], KEEPS),
        M::Ret | M::Retf => exits([R, N, N], KEEPS),
        M::Loope | M::Loopne => exits([R, N, N], flags(Rflags::ZF, NO_FLAGS, NO_FLAGS)),
        M::Iret | M::Iretd | M::Iretq | M::Sysret | M::Sysretq | M::Rsm => exits([N; 3], TRANSFERS),
        M::Syscall | M::Sysenter | M::Sysexit | M::Sysexitq => exits([N; 3], TRANSFERS),
        M::Int | M::Int1 | M::Int3 | M::Into => exits([R, N, N], TRANSFERS),
        M::Ud0 | M::Ud1 | M::Ud2 => exits([N; 3], TRANSFERS),
        M::Xbegin | M::Xend => exits([R, N, N], TRANSFERS),
        M::Xabort => exits([R, N, N], TRANSFERS),
        M::Xtest => exits([N; 3], WRITES),
        M::Lds | M::Les | M::Lfs | M::Lgs | M::Lss => exits([W, R, N], KEEPS),
        _ => return None,
    })
}

/// Rows of instructions that read or change system state.
pub(super) fn system(i: &Instruction) -> Option<Behaviour> {
    Some(match i.mnemonic() {
        M::Hlt | M::Cli | M::Sti | M::Clac | M::Stac | M::Clts => exits([N; 3], KEEPS),
        M::Lmsw | M::Lldt | M::Ltr | M::Lgdt | M::Lidt => exits([R, N, N], KEEPS),
        M::Smsw | M::Sldt | M::Str | M::Sgdt | M::Sidt => exits([W, N, N], KEEPS),
        M::Invlpg => exits([N; 3], KEEPS),
        M::Clflush | M::Clflushopt | M::Clwb => exits([R, N, N], KEEPS),
        M::Invpcid => exits([R, R, N], KEEPS),
        M::Wbinvd | M::Invd | M::Wbnoinvd | M::Cpuid => exits([N; 3], KEEPS),
        M::Rdmsr | M::Wrmsr | M::Rdpmc | M::Rdtsc | M::Rdtscp => exits([N; 3], KEEPS),
        M::Rdpid | M::Rdfsbase | M::Rdgsbase => exits([W, N, N], KEEPS),
        M::Wrfsbase | M::Wrgsbase => exits([R, N, N], KEEPS),
        M::Swapgs | M::Wait | M::Xgetbv | M::Xsetbv => exits([N; 3], KEEPS),
        M::Rdpkru | M::Wrpkru | M::Monitor | M::Mwait => exits([N; 3], KEEPS),
        M::Verr | M::Verw => exits([R, N, N], CHECKS),
        // If the selector fails the checks, the destination keeps its value.
        M::Lar | M::Lsl | M::Arpl => exits([RW, R, N], CHECKS),
        M::Bound => exits([R, R, N], KEEPS),
        M::Rdrand | M::Rdseed => exits([W, N, N], WRITES),
        _ => return None,
    })
}

//! Which instructions KVM is asked to execute as well, and how it is made to stop behind them.

use hindsight_cpu::state::CpuState;
use hindsight_regs::rflags::Rflags;
use iced_x86::{Instruction, Mnemonic as M, OpAccess, OpKind, Register};

/// L0 to G3 of DR7.
const DR7_ENABLES: u64 = 0xff;

/// What this host's KVM can do for us, by doctor's probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Single-step at CPL 0.
    pub step_kernel: bool,
    /// Single-step at CPL 3.
    pub step_user: bool,
    /// A breakpoint of the debugger on execution.
    pub breakpoint: bool,
}

/// What the interpreter did in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Events {
    /// It delivered interrupts.
    pub interrupts: bool,
    /// It delivered exceptions; the step ends behind the first instruction of the handler.
    pub exceptions: bool,
}

/// What KVM does of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// It executes the instruction, and stops behind it by single-step.
    Step,
    /// It runs until this instruction, and stops by a breakpoint.
    Until(u64),
    /// It executes nothing, and takes over registers: the instruction writes no memory.
    Registers,
    /// It executes nothing, and takes over registers and memory.
    Memory,
}

/// Decides about the step from `before` to `after`, which began with `instruction`.
pub(super) fn plan(
    abilities: Abilities,
    before: &CpuState,
    after: &CpuState,
    instruction: Option<&Instruction>,
    events: Events,
) -> Plan {
    let debugs = before.rflags & Rflags::TF.bits() != 0 || before.dr7 & DR7_ENABLES != 0;
    if events.interrupts || debugs {
        return Plan::Memory;
    }
    let until = match (abilities.breakpoint, before.rip == after.rip) {
        (true, false) => Plan::Until(after.rip),
        _ => Plan::Memory,
    };
    let Some(instruction) = instruction.filter(|_| !events.exceptions) else {
        return until;
    };
    let steps = match before.cpl() {
        0 => abilities.step_kernel,
        _ => abilities.step_user,
    };
    match instruction.mnemonic() {
        // Of the outside, of time and chance, or of what KVM makes the processor look like.
        M::In | M::Out | M::Hlt | M::Rdtsc | M::Rdtscp | M::Cpuid | M::Rdrand | M::Rdseed => {
            Plan::Registers
        }
        M::Rdmsr | M::Wrmsr | M::Rdpmc | M::Monitor | M::Mwait | M::Xsetbv => Plan::Registers,
        // IA32_FMASK is with the models.
        M::Syscall => Plan::Registers,
        M::Mov if touches(instruction, |r| r.is_dr() || r == Register::CR8) => Plan::Registers,
        // A shadow, in which no step stops.
        M::Mov | M::Pop | M::Lss if writes_ss(instruction) => Plan::Registers,
        M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => Plan::Memory,
        M::Vmcall | M::Vmmcall | M::Rsm => Plan::Memory,
        // They store or load RFLAGS, in which the step would be seen.
        M::Pushf | M::Pushfd | M::Pushfq | M::Int | M::Int1 | M::Int3 | M::Into => until,
        M::Iret | M::Iretd | M::Iretq | M::Sti | M::Sysenter => until,
        _ if steps => Plan::Step,
        _ => until,
    }
}

fn touches(instruction: &Instruction, wanted: impl Fn(Register) -> bool) -> bool {
    (0..instruction.op_count())
        .filter(|&n| instruction.op_kind(n) == OpKind::Register)
        .any(|n| wanted(instruction.op_register(n)))
}

fn writes_ss(instruction: &Instruction) -> bool {
    let mut factory = iced_x86::InstructionInfoFactory::new();
    let used = factory.info(instruction).used_registers();
    let write = [OpAccess::Write, OpAccess::CondWrite, OpAccess::ReadWrite];
    used.iter()
        .any(|used| used.register() == Register::SS && write.contains(&used.access()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    const ALL: Abilities = Abilities {
        step_kernel: true,
        step_user: true,
        breakpoint: true,
    };
    const QUIET: Events = Events {
        interrupts: false,
        exceptions: false,
    };

    fn planned(abilities: Abilities, code: &[u8], events: Events, dpl: u16) -> Plan {
        let mut before = CpuState::reset();
        before.seg[hindsight_cpu::state::seg::SS].access |= dpl << 5;
        let mut after = before.clone();
        after.rip += 1;
        let instruction = Decoder::new(64, code, DecoderOptions::NONE).decode();
        plan(abilities, &before, &after, Some(&instruction), events)
    }

    #[test]
    fn what_both_can_do_is_stepped_and_the_rest_taken_over() {
        let until = Plan::Until(CpuState::reset().rip + 1);
        for (code, expected) in [
            (&[0x01_u8, 0xc8][..], Plan::Step),
            (&[0xf3, 0xa4], Plan::Step),
            (&[0x9d], Plan::Step),
            (&[0x9c], until),
            (&[0x48, 0xcf], until),
            (&[0x0f, 0x31], Plan::Registers),
            (&[0xec], Plan::Registers),
            (&[0x6c], Plan::Memory),
            // mov ss, eax; mov eax, ss; mov db7, rax; mov cr8, rax; mov cr3, rax
            (&[0x8e, 0xd0], Plan::Registers),
            (&[0x8c, 0xd0], Plan::Step),
            (&[0x0f, 0x23, 0xf8], Plan::Registers),
            (&[0x44, 0x0f, 0x22, 0xc0], Plan::Registers),
            (&[0x0f, 0x22, 0xd8], Plan::Step),
        ] {
            assert_eq!(planned(ALL, code, QUIET, 0), expected, "{code:x?}");
        }
    }

    #[test]
    fn events_need_a_breakpoint_and_interrupts_are_taken_over() {
        let exceptions = Events {
            exceptions: true,
            ..QUIET
        };
        let until = Plan::Until(CpuState::reset().rip + 1);
        assert_eq!(planned(ALL, &[0x90], exceptions, 0), until);
        let none = Abilities {
            breakpoint: false,
            ..ALL
        };
        assert_eq!(planned(none, &[0x90], exceptions, 0), Plan::Memory);
        let interrupts = Events {
            interrupts: true,
            ..QUIET
        };
        assert_eq!(planned(ALL, &[0x90], interrupts, 0), Plan::Memory);
    }

    #[test]
    fn each_level_needs_its_single_step() {
        let kernel = Abilities {
            step_user: false,
            breakpoint: false,
            ..ALL
        };
        assert_eq!(planned(kernel, &[0x90], QUIET, 0), Plan::Step);
        assert_eq!(planned(kernel, &[0x90], QUIET, 3), Plan::Memory);
    }
}

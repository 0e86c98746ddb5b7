//! Chooses the instructions that KVM executes too, and how it stops after each.

use hindsight_cpu::state::CpuState;
use hindsight_regs::rflags::Rflags;
use iced_x86::{Instruction, Mnemonic as M, OpAccess, OpKind, Register};

/// L0 to G3 of DR7.
const DR7_ENABLES: u64 = 0xff;

/// What this host's KVM can do, by doctor's probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvmAbilities {
    /// Single-step at CPL 0.
    pub step_kernel: bool,
    /// Single-step at CPL 3.
    pub step_user: bool,
    /// A debugger's execution breakpoint.
    pub breakpoint: bool,
}

/// What the interpreter delivered in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepEvents {
    /// Whether the interpreter delivered interrupts.
    pub interrupts: bool,
    /// Whether it delivered exceptions. The step ends after the first instruction of the handler.
    pub exceptions: bool,
}

/// How KVM follows one step of the interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FollowAction {
    /// KVM single-steps the instruction.
    Step,
    /// KVM runs to a breakpoint on the next instruction.
    RunToBreakpoint,
    /// KVM executes nothing; the registers are copied. The instruction writes no memory.
    CopyRegisters,
    /// KVM executes nothing; registers and memory are copied.
    CopyMemory,
}

impl FollowAction {
    /// The action for the step from `before` to `after`, which began with `instruction`.
    pub fn of(
        abilities: KvmAbilities,
        before: &CpuState,
        after: &CpuState,
        instruction: Option<&Instruction>,
        events: StepEvents,
    ) -> Self {
        let guest_debugs = before.rflags & Rflags::TF.bits() != 0 || before.dr7 & DR7_ENABLES != 0;
        if events.interrupts || guest_debugs {
            return Self::CopyMemory;
        }
        let run = match (abilities.breakpoint, before.rip == after.rip) {
            (true, false) => Self::RunToBreakpoint,
            _ => Self::CopyMemory,
        };
        let Some(instruction) = instruction.filter(|_| !events.exceptions) else {
            return run;
        };
        let can_step = match before.cpl() {
            0 => abilities.step_kernel,
            _ => abilities.step_user,
        };
        match instruction.mnemonic() {
            // They depend on devices, on time, on randomness, or on the CPUID that KVM presents.
            M::In | M::Out | M::Hlt | M::Rdtsc | M::Rdtscp | M::Cpuid | M::Rdrand | M::Rdseed => {
                Self::CopyRegisters
            }
            M::Rdmsr | M::Wrmsr | M::Rdpmc | M::Monitor | M::Mwait | M::Xsetbv => {
                Self::CopyRegisters
            }
            // Its mask, IA32_FMASK, is in our vCPU model.
            M::Syscall => Self::CopyRegisters,
            M::Mov if has_register_operand(instruction, |r| r.is_dr() || r == Register::CR8) => {
                Self::CopyRegisters
            }
            // No single-step stops in the interrupt shadow after it.
            M::Mov | M::Pop | M::Lss if writes_ss(instruction) => Self::CopyRegisters,
            M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => Self::CopyMemory,
            M::Vmcall | M::Vmmcall | M::Rsm => Self::CopyMemory,
            // They store or load RFLAGS, where the single-step's TF would be visible.
            M::Pushf | M::Pushfd | M::Pushfq | M::Int | M::Int1 | M::Int3 | M::Into => run,
            M::Iret | M::Iretd | M::Iretq | M::Sti | M::Sysenter => run,
            _ if can_step => Self::Step,
            _ => run,
        }
    }
}

fn has_register_operand(instruction: &Instruction, predicate: impl Fn(Register) -> bool) -> bool {
    (0..instruction.op_count())
        .filter(|&n| instruction.op_kind(n) == OpKind::Register)
        .any(|n| predicate(instruction.op_register(n)))
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
    use hindsight_cpu::state::seg;
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;

    const ALL: KvmAbilities = KvmAbilities {
        step_kernel: true,
        step_user: true,
        breakpoint: true,
    };
    const NO_EVENTS: StepEvents = StepEvents {
        interrupts: false,
        exceptions: false,
    };

    fn action(abilities: KvmAbilities, code: &[u8], events: StepEvents, cpl: u16) -> FollowAction {
        let mut before = CpuState::reset();
        before.seg[seg::SS].access |= cpl << 5;
        let mut after = before.clone();
        after.rip += 1;
        let instruction = Decoder::new(64, code, DecoderOptions::NONE).decode();
        FollowAction::of(abilities, &before, &after, Some(&instruction), events)
    }

    #[test]
    fn action_depends_on_the_instruction() {
        for (code, expected) in [
            // add eax, ecx; rep movsb; popf
            (&[0x01_u8, 0xc8][..], FollowAction::Step),
            (&[0xf3, 0xa4], FollowAction::Step),
            (&[0x9d], FollowAction::Step),
            // pushf; iretq
            (&[0x9c], FollowAction::RunToBreakpoint),
            (&[0x48, 0xcf], FollowAction::RunToBreakpoint),
            // rdtsc; in al, dx; insb
            (&[0x0f, 0x31], FollowAction::CopyRegisters),
            (&[0xec], FollowAction::CopyRegisters),
            (&[0x6c], FollowAction::CopyMemory),
            // mov ss, eax; mov eax, ss; mov db7, rax; mov cr8, rax; mov cr3, rax
            (&[0x8e, 0xd0], FollowAction::CopyRegisters),
            (&[0x8c, 0xd0], FollowAction::Step),
            (&[0x0f, 0x23, 0xf8], FollowAction::CopyRegisters),
            (&[0x44, 0x0f, 0x22, 0xc0], FollowAction::CopyRegisters),
            (&[0x0f, 0x22, 0xd8], FollowAction::Step),
        ] {
            assert_eq!(action(ALL, code, NO_EVENTS, 0), expected, "{code:x?}");
        }
    }

    #[test]
    fn exceptions_need_a_breakpoint_and_interrupts_are_copied() {
        let exceptions = StepEvents {
            exceptions: true,
            ..NO_EVENTS
        };
        let nop = &[0x90];
        assert_eq!(
            action(ALL, nop, exceptions, 0),
            FollowAction::RunToBreakpoint
        );
        let no_breakpoint = KvmAbilities {
            breakpoint: false,
            ..ALL
        };
        assert_eq!(
            action(no_breakpoint, nop, exceptions, 0),
            FollowAction::CopyMemory
        );
        let interrupts = StepEvents {
            interrupts: true,
            ..NO_EVENTS
        };
        assert_eq!(action(ALL, nop, interrupts, 0), FollowAction::CopyMemory);
    }

    #[test]
    fn each_privilege_level_needs_its_own_single_step() {
        let kernel_only = KvmAbilities {
            step_user: false,
            breakpoint: false,
            ..ALL
        };
        assert_eq!(
            action(kernel_only, &[0x90], NO_EVENTS, 0),
            FollowAction::Step
        );
        assert_eq!(
            action(kernel_only, &[0x90], NO_EVENTS, 3),
            FollowAction::CopyMemory
        );
    }
}

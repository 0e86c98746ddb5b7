//! Single steps: the host's by KVM_SET_GUEST_DEBUG, and the guest's own by RFLAGS.TF.

use hindsight_regs::dr::Dr6;
use hindsight_regs::vector::Vector;
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP};

use crate::probe::context::{ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::code::code;
use crate::probe::guest::*;

const STEP: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
/// Stops after which a probe gives up.
const STOPS_MAX: usize = 100;
const DR6_BS: u64 = Dr6::BS.bits();

code! {
    fn mixed_cpl0 {
        "nop", "nop", "cpuid", "nop", "rdtsc", "nop", "out 0xd2, al", "nop", "nop",
        "mov ss, esi", "nop", "nop", "hlt", "nop", "nop", "out 0xd1, al",
    }
    fn mixed_cpl3 {
        "nop", "nop", "cpuid", "nop", "rdtsc", "nop", "out 0xd2, al", "nop", "nop",
        "mov ss, esi", "nop", "nop", "out 0xd1, al",
    }
    fn pushes_flags { "nop", "pushfq", "pop rax", "out 0xd1, al" }
    fn trap_flag_cpl0 @ 7 {
        "pushfq", "or qword ptr [rsp], 0x100", "popfq", "nop", "7:", "nop", "out 0xd1, al",
    }
    fn trap_flag_cpl3 @ 7 {
        crate::probe::guest::code::to_cpl3!(), "2:",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq", "nop", "7:", "nop", "out 0xd1, al",
    }
    fn shadow_cpl0 @ 7 {
        "mov ecx, ss", "pushfq", "or qword ptr [rsp], 0x100", "popfq", "mov ss, ecx", "nop",
        "7:", "nop", "out 0xd1, al",
    }
    fn shadow_cpl3 @ 7 {
        crate::probe::guest::code::to_cpl3!(), "2:",
        "mov ecx, ss", "pushfq", "or qword ptr [rsp], 0x100", "popfq", "mov ss, ecx", "nop",
        "7:", "nop", "out 0xd1, al",
    }
}

/// The probes of this module.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "step-cpl0",
        "KVM_GUESTDBG_SINGLESTEP stops after every instruction at CPL0",
        |c| step(c, StartLevel::Kernel, mixed_cpl0()),
    ),
    Probe::new(
        "step-cpl3",
        "KVM_GUESTDBG_SINGLESTEP stops after every instruction at CPL3",
        |c| step(c, StartLevel::User, mixed_cpl3()),
    ),
    Probe::new(
        "step-hides-tf",
        "PUSHFQ under KVM_GUESTDBG_SINGLESTEP stores TF = 0",
        hides_tf,
    ),
    Probe::new(
        "tf-cpl0",
        "the guest's own TF gives #DB after one instruction at CPL0",
        |c| trap_flag(c, trap_flag_cpl0()),
    ),
    Probe::new(
        "tf-cpl3",
        "the guest's own TF gives #DB after one instruction at CPL3",
        |c| trap_flag(c, trap_flag_cpl3()),
    ),
    Probe::new(
        "shadow-cpl0",
        "no #DB of the guest's own TF between MOV SS and the next instruction at CPL0",
        |c| trap_flag(c, shadow_cpl0()),
    ),
    Probe::new(
        "shadow-cpl3",
        "no #DB of the guest's own TF between MOV SS and the next instruction at CPL3",
        |c| trap_flag(c, shadow_cpl3()),
    ),
];

/// One instruction, and how often stepping stopped after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SteppedInstruction {
    mnemonic: Mnemonic,
    /// Address of the next instruction.
    next: u64,
    stops: usize,
}

fn instructions(code: GuestCode) -> Vec<SteppedInstruction> {
    Decoder::with_ip(64, code.bytes(), CODE, DecoderOptions::NONE)
        .into_iter()
        .map(|i| SteppedInstruction {
            mnemonic: i.mnemonic(),
            next: i.next_ip(),
            stops: 0,
        })
        .collect()
}

fn step(
    context: &ProbeContext,
    level: StartLevel,
    code: GuestCode,
) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(level, code)?;
    guest.debug(STEP, 0, 0)?;
    let mut run = instructions(code);
    let mut end = GuestStop::Hung;
    let mut halts = 0;
    for _ in 0..STOPS_MAX {
        end = guest.run();
        match end {
            GuestStop::Debug { rip, .. } => {
                if let Some(instruction) =
                    run.iter_mut().find(|instruction| instruction.next == rip)
                {
                    instruction.stops += 1;
                }
            }
            GuestStop::Out { .. } => {}
            // The exit counts as the stop after HLT.
            GuestStop::Halt => {
                halts += 1;
                if let Some(instruction) = run.iter_mut().find(|p| p.mnemonic == Mnemonic::Hlt) {
                    instruction.stops += 1;
                }
            }
            _ => break,
        }
    }
    Ok(judge(&run, halts, &end))
}

/// Judges the stops of a stepped run. The last instruction is the OUT that ends it.
fn judge(instructions: &[SteppedInstruction], halts: usize, end: &GuestStop) -> Finding {
    let instructions = &instructions[..instructions.len().saturating_sub(1)];
    if instructions
        .iter()
        .all(|instruction| instruction.stops == 0)
    {
        return match end {
            GuestStop::Done => Finding::broken("never stops"),
            stop => Finding::broken(format!("{stop}, no debug exit")),
        };
    }
    let name =
        |instruction: &SteppedInstruction| format!("{:?}", instruction.mnemonic).to_uppercase();
    let is_shadow = |instruction: &SteppedInstruction| instruction.mnemonic == Mnemonic::Mov;
    let mut facts = Vec::new();
    let lost: Vec<_> = instructions
        .iter()
        .filter(|p| p.stops == 0 && !is_shadow(p))
        .map(name)
        .collect();
    if !lost.is_empty() {
        facts.push(format!("lost after {}", lost.join(", ")));
    }
    let mut twice: Vec<_> = instructions
        .iter()
        .filter(|p| p.stops > 1)
        .map(name)
        .collect();
    twice.dedup();
    if !twice.is_empty() {
        facts.push(format!(
            "duplicate stops at one RIP after {}",
            twice.join(", ")
        ));
    }
    if instructions
        .iter()
        .any(|instruction| is_shadow(instruction) && instruction.stops > 0)
    {
        facts.push("no MOV SS shadow".to_owned());
    }
    if halts == 0
        && instructions
            .iter()
            .any(|instruction| instruction.mnemonic == Mnemonic::Hlt)
    {
        facts.push("HLT exit replaced by a stop".to_owned());
    }
    if *end != GuestStop::Done {
        return Finding::broken(format!("stops; {}; ends: {end}", facts.join("; ")));
    }
    if facts.is_empty() {
        Finding::works("exact")
    } else {
        Finding::differs(format!("stops; {}", facts.join("; ")))
    }
}

fn hides_tf(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut facts = Vec::new();
    let mut visible = false;
    for level in [StartLevel::Kernel, StartLevel::User] {
        let mut guest = context.guest(level, pushes_flags())?;
        guest.debug(STEP, 0, 0)?;
        let mut stops = 0;
        let end = loop {
            match guest.run() {
                GuestStop::Debug { .. } if stops < STOPS_MAX => stops += 1,
                end => break end,
            }
        };
        let fact = match end {
            GuestStop::Done if stops == 0 => "never stops".to_owned(),
            GuestStop::Done if guest.regs()?.rax & TF == 0 => "hidden".to_owned(),
            GuestStop::Done => {
                visible = true;
                "TF visible in the PUSHFQ image".to_owned()
            }
            GuestStop::Trap(t) if t.is(Vector::DB) => "cannot be stepped".to_owned(),
            stop => stop.to_string(),
        };
        facts.push(format!("{level}: {fact}"));
    }
    let hidden = facts.iter().any(|fact| fact.ends_with("hidden"));
    let detail = facts.join("; ");
    Ok(match (visible, hidden) {
        (true, _) => Finding::broken(detail),
        (false, true) => Finding::works(detail),
        (false, false) => Finding::absent(detail),
    })
}

fn trap_flag(context: &ProbeContext, code: GuestCode) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, code)?;
    match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::DB) && t.rip == guest.mark() => {
            let dr6 = guest.dr6()?;
            guest.set_trap_rflags(t, t.rflags & !TF)?;
            let then = guest.run();
            Ok(if dr6 & DR6_BS == 0 {
                Finding::broken(format!(
                    "#DB in the right instruction, DR6 {dr6:#x} without BS"
                ))
            } else if then != GuestStop::Done {
                Finding::broken(format!("#DB with DR6.BS; then {then}"))
            } else {
                Finding::works("#DB after one instruction, DR6.BS")
            })
        }
        GuestStop::Trap(t) if t.is(Vector::DB) => {
            let off = t.rip.wrapping_sub(guest.mark()).cast_signed();
            Ok(Finding::broken(format!(
                "#DB {off:+} bytes from where it belongs"
            )))
        }
        stop => Ok(Finding::broken(format!("no #DB: {stop}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_of(stops: &[(Mnemonic, usize)]) -> Vec<SteppedInstruction> {
        stops
            .iter()
            .map(|&(mnemonic, stops)| SteppedInstruction {
                mnemonic,
                next: 0,
                stops,
            })
            .collect()
    }

    #[test]
    fn instructions_are_decoded_from_the_code() {
        let run = instructions(pushes_flags());
        assert_eq!(run.len(), 4);
        assert_eq!(run[0].next, CODE + 1);
        assert_eq!(run[1].mnemonic, Mnemonic::Pushfq);
    }

    #[test]
    fn one_stop_after_each_instruction_but_mov_ss_is_exact() {
        use Mnemonic::{Mov, Nop, Out};
        let run = run_of(&[(Nop, 1), (Mov, 0), (Nop, 1), (Out, 0)]);
        assert_eq!(judge(&run, 0, &GuestStop::Done), Finding::works("exact"));
    }

    #[test]
    fn lost_duplicate_and_shadowed_stops_are_named() {
        use Mnemonic::{Cpuid, Mov, Nop, Out};
        let run = run_of(&[(Cpuid, 2), (Nop, 1), (Out, 0), (Mov, 1), (Out, 0)]);
        assert_eq!(
            judge(&run, 0, &GuestStop::Done),
            Finding::differs(
                "stops; lost after OUT; duplicate stops at one RIP after CPUID; no MOV SS shadow"
            )
        );
    }

    #[test]
    fn run_without_stops_is_broken() {
        let run = run_of(&[(Mnemonic::Nop, 0), (Mnemonic::Out, 0)]);
        assert_eq!(
            judge(&run, 0, &GuestStop::Done),
            Finding::broken("never stops")
        );
    }
}

//! Single-step: by KVM_SET_GUEST_DEBUG from outside, and by RFLAGS.TF from inside.

use hindsight_regs::dr::Dr6;
use hindsight_regs::vector::Vector;
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP};

use crate::probe::code::code;
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::*;

const STEP: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
/// Stops after which a probe gives up.
const STOPS_MAX: usize = 100;
/// DR6.BS.
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
        crate::probe::code::to_cpl3!(), "2:",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq", "nop", "7:", "nop", "out 0xd1, al",
    }
    fn shadow_cpl0 @ 7 {
        "mov ecx, ss", "pushfq", "or qword ptr [rsp], 0x100", "popfq", "mov ss, ecx", "nop",
        "7:", "nop", "out 0xd1, al",
    }
    fn shadow_cpl3 @ 7 {
        crate::probe::code::to_cpl3!(), "2:",
        "mov ecx, ss", "pushfq", "or qword ptr [rsp], 0x100", "popfq", "mov ss, ecx", "nop",
        "7:", "nop", "out 0xd1, al",
    }
}

/// The rows of this file.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "step-cpl0",
        "KVM_GUESTDBG_SINGLESTEP stops after every instruction at CPL0",
        |b| step(b, Level::Kernel, mixed_cpl0()),
    ),
    Probe::new(
        "step-cpl3",
        "KVM_GUESTDBG_SINGLESTEP stops after every instruction at CPL3",
        |b| step(b, Level::User, mixed_cpl3()),
    ),
    Probe::new(
        "step-hides-tf",
        "PUSHFQ under KVM_GUESTDBG_SINGLESTEP stores TF = 0",
        hides_tf,
    ),
    Probe::new(
        "tf-cpl0",
        "the guest's own TF gives #DB after one instruction at CPL0",
        |b| trap_flag(b, trap_flag_cpl0()),
    ),
    Probe::new(
        "tf-cpl3",
        "the guest's own TF gives #DB after one instruction at CPL3",
        |b| trap_flag(b, trap_flag_cpl3()),
    ),
    Probe::new(
        "shadow-cpl0",
        "no #DB of the guest's own TF between MOV SS and the next instruction at CPL0",
        |b| trap_flag(b, shadow_cpl0()),
    ),
    Probe::new(
        "shadow-cpl3",
        "no #DB of the guest's own TF between MOV SS and the next instruction at CPL3",
        |b| trap_flag(b, shadow_cpl3()),
    ),
];

/// One instruction and how often stepping stopped behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    mnemonic: Mnemonic,
    next: u64,
    stops: usize,
}

fn places(code: Code) -> Vec<Place> {
    Decoder::with_ip(64, code.bytes(), CODE, DecoderOptions::NONE)
        .into_iter()
        .map(|i| Place {
            mnemonic: i.mnemonic(),
            next: i.next_ip(),
            stops: 0,
        })
        .collect()
}

fn step(bench: &Bench, level: Level, code: Code) -> Result<Finding, Refused> {
    let mut guest = bench.guest(level, code)?;
    guest.debug(STEP, 0, 0)?;
    let mut places = places(code);
    let mut end = Stop::Hung;
    let mut halts = 0;
    for _ in 0..STOPS_MAX {
        end = guest.run();
        match end {
            Stop::Debug { rip, .. } => {
                if let Some(place) = places.iter_mut().find(|place| place.next == rip) {
                    place.stops += 1;
                }
            }
            Stop::Out { .. } => {}
            // The exit is the stop behind HLT.
            Stop::Halt => {
                halts += 1;
                if let Some(place) = places.iter_mut().find(|p| p.mnemonic == Mnemonic::Hlt) {
                    place.stops += 1;
                }
            }
            _ => break,
        }
    }
    Ok(judge(&places, halts, &end))
}

/// What the stops of a stepped run mean. The last place is the OUT that ends it.
fn judge(places: &[Place], halts: usize, end: &Stop) -> Finding {
    let places = &places[..places.len().saturating_sub(1)];
    if places.iter().all(|place| place.stops == 0) {
        return match end {
            Stop::Done => Finding::broken("never stops"),
            stop => Finding::broken(format!("{stop}, no debug exit")),
        };
    }
    let name = |place: &Place| format!("{:?}", place.mnemonic).to_uppercase();
    let is_shadow = |place: &Place| place.mnemonic == Mnemonic::Mov;
    let mut facts = Vec::new();
    let lost: Vec<_> = places
        .iter()
        .filter(|p| p.stops == 0 && !is_shadow(p))
        .map(name)
        .collect();
    if !lost.is_empty() {
        facts.push(format!("lost after {}", lost.join(", ")));
    }
    let mut twice: Vec<_> = places.iter().filter(|p| p.stops > 1).map(name).collect();
    twice.dedup();
    if !twice.is_empty() {
        facts.push(format!(
            "duplicate stops at one RIP after {}",
            twice.join(", ")
        ));
    }
    if places
        .iter()
        .any(|place| is_shadow(place) && place.stops > 0)
    {
        facts.push("no MOV SS shadow".to_owned());
    }
    if halts == 0 && places.iter().any(|place| place.mnemonic == Mnemonic::Hlt) {
        facts.push("HLT exit replaced by a stop".to_owned());
    }
    if *end != Stop::Done {
        return Finding::broken(format!("stops; {}; ends: {end}", facts.join("; ")));
    }
    if facts.is_empty() {
        Finding::works("exact")
    } else {
        Finding::differs(format!("stops; {}", facts.join("; ")))
    }
}

fn hides_tf(bench: &Bench) -> Result<Finding, Refused> {
    let mut seen = Vec::new();
    let mut visible = false;
    for level in [Level::Kernel, Level::User] {
        let mut guest = bench.guest(level, pushes_flags())?;
        guest.debug(STEP, 0, 0)?;
        let mut stops = 0;
        let end = loop {
            match guest.run() {
                Stop::Debug { .. } if stops < STOPS_MAX => stops += 1,
                end => break end,
            }
        };
        let fact = match end {
            Stop::Done if stops == 0 => "never stops".to_owned(),
            Stop::Done if guest.regs()?.rax & TF == 0 => "hidden".to_owned(),
            Stop::Done => {
                visible = true;
                "TF visible in the PUSHFQ image".to_owned()
            }
            Stop::Trap(t) if t.is(Vector::DB) => "cannot be stepped".to_owned(),
            stop => stop.to_string(),
        };
        seen.push(format!("{level}: {fact}"));
    }
    let hidden = seen.iter().any(|fact| fact.ends_with("hidden"));
    let detail = seen.join("; ");
    Ok(match (visible, hidden) {
        (true, _) => Finding::broken(detail),
        (false, true) => Finding::works(detail),
        (false, false) => Finding::absent(detail),
    })
}

fn trap_flag(bench: &Bench, code: Code) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, code)?;
    match guest.run() {
        Stop::Trap(t) if t.is(Vector::DB) && t.rip == guest.mark() => {
            let dr6 = guest.dr6()?;
            guest.set_trap_rflags(t, t.rflags & !TF)?;
            let then = guest.run();
            Ok(if dr6 & DR6_BS == 0 {
                Finding::broken(format!("#DB in the right place, DR6 {dr6:#x} without BS"))
            } else if then != Stop::Done {
                Finding::broken(format!("#DB with DR6.BS; then {then}"))
            } else {
                Finding::works("#DB after one instruction, DR6.BS")
            })
        }
        Stop::Trap(t) if t.is(Vector::DB) => {
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

    fn places_of(stops: &[(Mnemonic, usize)]) -> Vec<Place> {
        stops
            .iter()
            .map(|&(mnemonic, stops)| Place {
                mnemonic,
                next: 0,
                stops,
            })
            .collect()
    }

    #[test]
    fn places_follow_the_code() {
        let places = places(pushes_flags());
        assert_eq!(places.len(), 4);
        assert_eq!(places[0].next, CODE + 1);
        assert_eq!(places[1].mnemonic, Mnemonic::Pushfq);
    }

    #[test]
    fn steps_one_each_but_after_mov_ss_are_exact() {
        use Mnemonic::{Mov, Nop, Out};
        let run = places_of(&[(Nop, 1), (Mov, 0), (Nop, 1), (Out, 0)]);
        assert_eq!(judge(&run, 0, &Stop::Done), Finding::works("exact"));
    }

    #[test]
    fn steps_lost_doubled_and_in_the_shadow_are_named() {
        use Mnemonic::{Cpuid, Mov, Nop, Out};
        let run = places_of(&[(Cpuid, 2), (Nop, 1), (Out, 0), (Mov, 1), (Out, 0)]);
        assert_eq!(
            judge(&run, 0, &Stop::Done),
            Finding::differs(
                "stops; lost after OUT; duplicate stops at one RIP after CPUID; no MOV SS shadow"
            )
        );
    }

    #[test]
    fn steps_that_never_come_are_broken() {
        let run = places_of(&[(Mnemonic::Nop, 0), (Mnemonic::Out, 0)]);
        assert_eq!(judge(&run, 0, &Stop::Done), Finding::broken("never stops"));
    }
}

//! Which instructions run at CPL0, where some KVMs emulate every instruction.

use hindsight_regs::cr::Cr4;
use hindsight_regs::vector::Vector;
use kvm_bindings::kvm_xcrs;

use crate::probe::context::{NameCall, ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe, ProbeVerdict};
use crate::probe::guest::code::{GuestCode, code};
use crate::probe::guest::{GuestStop, ProbeGuest, StartLevel};

/// CPUID.1:ECX.
const XSAVE: u32 = 1 << 26;
const POPCNT: u32 = 1 << 23;
const AVX: u32 = 1 << 28;
/// CPUID.7.0:EBX.
const BMI1: u32 = 1 << 3;
const AVX2: u32 = 1 << 5;
const BMI2: u32 = 1 << 8;
const AVX512F: u32 = 1 << 16;
/// XCR0: x87, SSE and AVX state; opmask and both parts of ZMM.
const XCR0_AVX: u64 = 0b111;
const XCR0_AVX512: u64 = 0b1110_0111;

code! {
    fn movdqa { "movdqa xmm0, [r9]", "movdqa [r9 + 16], xmm0", "out 0xd1, al" }
    fn movdqu { "movdqu xmm0, [r9 + 1]", "movdqu [r9 + 17], xmm0", "out 0xd1, al" }
    fn movdqa_registers { "movdqa xmm0, xmm1", "out 0xd1, al" }
    fn movaps { "movaps xmm0, [r9]", "out 0xd1, al" }
    fn movups { "movups xmm0, [r9]", "out 0xd1, al" }
    fn movq { "movq xmm0, rax", "out 0xd1, al" }
    fn pxor { "pxor xmm0, xmm0", "out 0xd1, al" }
    fn paddd { "paddd xmm0, xmm1", "out 0xd1, al" }
    fn addsd { "addsd xmm0, xmm1", "out 0xd1, al" }
    fn cvtsi2sd { "cvtsi2sd xmm0, rax", "out 0xd1, al" }
    fn ldmxcsr { "mov dword ptr [r9], 0x1f80", "ldmxcsr [r9]", "out 0xd1, al" }
    fn fxsave { "fxsave [r9]", "fxrstor [r9]", "out 0xd1, al" }
    fn vmovdqu { "vmovdqu ymm0, [r9]", "out 0xd1, al" }
    fn vpxor { "vpxor xmm0, xmm1, xmm2", "out 0xd1, al" }
    fn vpaddd { "vpaddd ymm0, ymm1, ymm2", "out 0xd1, al" }
    fn vpaddd_512 { "vpaddd zmm0, zmm1, zmm2", "out 0xd1, al" }
    fn andn { "mov ecx, 0xf0", "mov edx, 0xff", "andn eax, ecx, edx", "out 0xd1, al" }
    fn blsr { "mov ecx, 0xc", "blsr eax, ecx", "out 0xd1, al" }
    /// With a source of 0, the result differs if TZCNT is executed as BSF.
    fn tzcnt { "xor ecx, ecx", "mov eax, 7", "tzcnt eax, ecx", "out 0xd1, al" }
    fn shlx { "mov ecx, 3", "mov edx, 4", "shlx eax, ecx, edx", "out 0xd1, al" }
    fn pdep { "mov ecx, 3", "mov edx, 0x81", "pdep eax, ecx, edx", "out 0xd1, al" }
    fn popcnt { "mov ecx, 0xff", "popcnt eax, ecx", "out 0xd1, al" }
    fn xgetbv { "xor ecx, ecx", "xgetbv", "out 0xd1, al" }
    fn xsave { "mov eax, 3", "xor edx, edx", "xsave [r9]", "out 0xd1, al" }
    fn xrstor { "mov eax, 3", "xor edx, edx", "xrstor [r9]", "out 0xd1, al" }
}

/// One instruction to try.
#[derive(Debug, Clone, Copy)]
struct InstructionCase {
    name: &'static str,
    code: fn() -> GuestCode,
    /// The expected RAX.
    rax: Option<u64>,
}

const fn runs(name: &'static str, code: fn() -> GuestCode) -> InstructionCase {
    InstructionCase {
        name,
        code,
        rax: None,
    }
}

const fn gives(name: &'static str, code: fn() -> GuestCode, rax: u64) -> InstructionCase {
    InstructionCase {
        name,
        code,
        rax: Some(rax),
    }
}

/// Instructions that fail in the same manner.
#[derive(Debug)]
struct FailedInstructions {
    how: String,
    is_undefined: bool,
    names: Vec<&'static str>,
}

/// The probes of this module. Instructions that CPUID does not report are tried too: some KVMs run
/// them.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new("sse-cpl0", "SSE and SSE2 instructions at CPL0", |c| {
        let cases: &[InstructionCase] = &[
            runs("MOVDQA load and store", movdqa),
            runs("MOVDQU load and store", movdqu),
            runs("MOVDQA between registers", movdqa_registers),
            runs("MOVAPS", movaps),
            runs("MOVUPS", movups),
            runs("MOVQ", movq),
            runs("PXOR", pxor),
            runs("PADDD", paddd),
            runs("ADDSD", addsd),
            runs("CVTSI2SD", cvtsi2sd),
            runs("LDMXCSR", ldmxcsr),
            runs("FXSAVE, FXRSTOR", fxsave),
        ];
        run(c, cases, 0, true)
    }),
    Probe::new("avx-cpl0", "AVX and AVX2 instructions at CPL0", |c| {
        let offered = c.supported(1, 0, 2) & AVX != 0 && c.supported(7, 0, 1) & AVX2 != 0;
        let cases: &[InstructionCase] = &[
            runs("VPXOR", vpxor),
            runs("VMOVDQU", vmovdqu),
            runs("VPADDD", vpaddd),
        ];
        run(c, cases, XCR0_AVX, offered)
    }),
    Probe::new("avx512-cpl0", "an AVX-512 instruction at CPL0", |c| {
        let offered = c.supported(7, 0, 1) & AVX512F != 0;
        run(c, &[runs("VPADDD zmm", vpaddd_512)], XCR0_AVX512, offered)
    }),
    Probe::new("bmi-cpl0", "BMI1 and BMI2 instructions at CPL0", |c| {
        let offered = c.supported(7, 0, 1) & (BMI1 | BMI2) == BMI1 | BMI2;
        let cases: &[InstructionCase] = &[
            gives("ANDN", andn, 0xf),
            gives("BLSR", blsr, 8),
            gives("TZCNT", tzcnt, 32),
            gives("SHLX", shlx, 48),
            gives("PDEP", pdep, 0x81),
        ];
        run(c, cases, 0, offered)
    }),
    Probe::new("popcnt-cpl0", "POPCNT at CPL0", |c| {
        run(
            c,
            &[gives("POPCNT", popcnt, 8)],
            0,
            c.supported(1, 0, 2) & POPCNT != 0,
        )
    }),
    Probe::new("xsave-cpl0", "XGETBV, XSAVE and XRSTOR at CPL0", |c| {
        let cases: &[InstructionCase] = &[
            gives("XGETBV", xgetbv, 3),
            runs("XSAVE", xsave),
            runs("XRSTOR", xrstor),
        ];
        run(c, cases, 0b11, c.supported(1, 0, 2) & XSAVE != 0)
    }),
];

/// Runs each case in a guest of its own. `xcr0` other than 0 enables XSAVE with those components.
fn run(
    context: &ProbeContext,
    cases: &[InstructionCase],
    xcr0: u64,
    offered: bool,
) -> Result<Finding, RefusedCall> {
    let mut works = Vec::new();
    let mut failures: Vec<FailedInstructions> = Vec::new();
    for case in cases {
        let mut guest = context.guest(StartLevel::Kernel, (case.code)())?;
        if xcr0 != 0 {
            let enabled = enable_xsave(&guest, xcr0);
            if offered {
                enabled?;
            }
        }
        let stop = guest.run();
        let how = match &stop {
            GuestStop::Done
                if case
                    .rax
                    .is_none_or(|rax| guest.regs().is_ok_and(|r| r.rax == rax)) =>
            {
                works.push(case.name);
                continue;
            }
            GuestStop::Done => "wrong result".to_owned(),
            // The case already names the instruction.
            GuestStop::Internal { suberror, .. } => GuestStop::Internal {
                suberror: *suberror,
                instruction: String::new(),
            }
            .to_string(),
            stop => stop.to_string(),
        };
        let is_undefined = matches!(stop, GuestStop::Trap(trap) if trap.is(Vector::UD));
        match failures.iter_mut().find(|failure| failure.how == how) {
            Some(failure) => failure.names.push(case.name),
            None => failures.push(FailedInstructions {
                how,
                is_undefined,
                names: vec![case.name],
            }),
        }
    }
    Ok(judge(&works, &failures, offered))
}

fn enable_xsave(guest: &ProbeGuest<'_>, xcr0: u64) -> Result<(), RefusedCall> {
    guest.edit_sregs(|sregs| sregs.cr4 |= Cr4::OSXSAVE.bits())?;
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = xcr0;
    guest.vm.vcpu().set_xcrs(&xcrs).named("KVM_SET_XCRS")
}

fn judge(works: &[&str], failures: &[FailedInstructions], offered: bool) -> Finding {
    let mut facts = Vec::new();
    if !offered {
        facts.push("not offered".to_owned());
    }
    facts.extend(
        failures
            .iter()
            .map(|f| format!("{}: {}", f.how, f.names.join(", "))),
    );
    if !works.is_empty() {
        facts.push(format!("runs: {}", works.join(", ")));
    }
    let refused = failures.iter().all(|failure| failure.is_undefined);
    let verdict = match (failures.is_empty(), offered) {
        (true, true) => ProbeVerdict::Works,
        (true, false) => ProbeVerdict::Differs,
        (false, false) if refused => ProbeVerdict::Absent,
        (false, _) => ProbeVerdict::Broken,
    };
    Finding::new(verdict, facts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(how: &str, is_undefined: bool, name: &'static str) -> FailedInstructions {
        FailedInstructions {
            how: how.to_owned(),
            is_undefined,
            names: vec![name],
        }
    }

    #[test]
    fn undefined_instructions_that_are_not_offered_are_absent() {
        let finding = judge(&[], &[failure("guest gets #UD", true, "VPXOR")], false);
        assert_eq!(
            finding,
            Finding::absent("not offered; guest gets #UD: VPXOR")
        );
    }

    #[test]
    fn one_failing_instruction_makes_the_verdict_broken() {
        let finding = judge(&["MOVAPS"], &[failure("triple fault", false, "PXOR")], true);
        assert_eq!(finding, Finding::broken("triple fault: PXOR; runs: MOVAPS"));
    }
}

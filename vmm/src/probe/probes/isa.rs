//! Which instructions run at CPL0, where some KVMs emulate every one.

use hindsight_regs::cr::Cr4;
use hindsight_regs::vector::Vector;
use kvm_bindings::kvm_xcrs;

use crate::probe::code::{Code, code};
use crate::probe::finding::{Finding, Probe, Verdict};
use crate::probe::guest::{Bench, Guest, Level, Named, Refused, Stop};

const CR4_OSXSAVE: u64 = Cr4::OSXSAVE.bits();
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
    /// Where TZCNT is taken for BSF, a source of 0 shows it.
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
struct Row {
    name: &'static str,
    code: fn() -> Code,
    /// What it must leave in RAX.
    rax: Option<u64>,
}

const fn row(name: &'static str, code: fn() -> Code) -> Row {
    Row {
        name,
        code,
        rax: None,
    }
}

const fn gives(name: &'static str, code: fn() -> Code, rax: u64) -> Row {
    Row {
        name,
        code,
        rax: Some(rax),
    }
}

/// A way to fail, and who does.
#[derive(Debug)]
struct Failure {
    how: String,
    is_undefined: bool,
    names: Vec<&'static str>,
}

/// The rows of this file. What CPUID does not offer is tried all the same: some KVMs run it.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new("sse-cpl0", "SSE and SSE2 instructions at CPL0", |b| {
        let rows: &[Row] = &[
            row("MOVDQA load and store", movdqa),
            row("MOVDQU load and store", movdqu),
            row("MOVDQA between registers", movdqa_registers),
            row("MOVAPS", movaps),
            row("MOVUPS", movups),
            row("MOVQ", movq),
            row("PXOR", pxor),
            row("PADDD", paddd),
            row("ADDSD", addsd),
            row("CVTSI2SD", cvtsi2sd),
            row("LDMXCSR", ldmxcsr),
            row("FXSAVE, FXRSTOR", fxsave),
        ];
        run(b, rows, 0, true)
    }),
    Probe::new("avx-cpl0", "AVX and AVX2 instructions at CPL0", |b| {
        let offered = b.offered(1, 0, 2) & AVX != 0 && b.offered(7, 0, 1) & AVX2 != 0;
        let rows: &[Row] = &[
            row("VPXOR", vpxor),
            row("VMOVDQU", vmovdqu),
            row("VPADDD", vpaddd),
        ];
        run(b, rows, XCR0_AVX, offered)
    }),
    Probe::new("avx512-cpl0", "an AVX-512 instruction at CPL0", |b| {
        let offered = b.offered(7, 0, 1) & AVX512F != 0;
        run(b, &[row("VPADDD zmm", vpaddd_512)], XCR0_AVX512, offered)
    }),
    Probe::new("bmi-cpl0", "BMI1 and BMI2 instructions at CPL0", |b| {
        let offered = b.offered(7, 0, 1) & (BMI1 | BMI2) == BMI1 | BMI2;
        let rows: &[Row] = &[
            gives("ANDN", andn, 0xf),
            gives("BLSR", blsr, 8),
            gives("TZCNT", tzcnt, 32),
            gives("SHLX", shlx, 48),
            gives("PDEP", pdep, 0x81),
        ];
        run(b, rows, 0, offered)
    }),
    Probe::new("popcnt-cpl0", "POPCNT at CPL0", |b| {
        run(
            b,
            &[gives("POPCNT", popcnt, 8)],
            0,
            b.offered(1, 0, 2) & POPCNT != 0,
        )
    }),
    Probe::new("xsave-cpl0", "XGETBV, XSAVE and XRSTOR at CPL0", |b| {
        let rows: &[Row] = &[
            gives("XGETBV", xgetbv, 3),
            row("XSAVE", xsave),
            row("XRSTOR", xrstor),
        ];
        run(b, rows, 0b11, b.offered(1, 0, 2) & XSAVE != 0)
    }),
];

/// Runs each row in a guest of its own; `xcr0` other than 0 enables XSAVE with that state.
fn run(bench: &Bench, rows: &[Row], xcr0: u64, offered: bool) -> Result<Finding, Refused> {
    let mut works = Vec::new();
    let mut failures: Vec<Failure> = Vec::new();
    for row in rows {
        let mut guest = bench.guest(Level::Kernel, (row.code)())?;
        if xcr0 != 0 {
            let enabled = enable_xsave(&guest, xcr0);
            if offered {
                enabled?;
            }
        }
        let stop = guest.run();
        let how = match &stop {
            Stop::Done
                if row
                    .rax
                    .is_none_or(|rax| guest.regs().is_ok_and(|r| r.rax == rax)) =>
            {
                works.push(row.name);
                continue;
            }
            Stop::Done => "wrong result".to_owned(),
            // Which instruction is the row's name already.
            Stop::Internal { suberror, .. } => Stop::Internal {
                suberror: *suberror,
                instruction: String::new(),
            }
            .to_string(),
            stop => stop.to_string(),
        };
        let is_undefined = matches!(stop, Stop::Trap(trap) if trap.is(Vector::UD));
        match failures.iter_mut().find(|failure| failure.how == how) {
            Some(failure) => failure.names.push(row.name),
            None => failures.push(Failure {
                how,
                is_undefined,
                names: vec![row.name],
            }),
        }
    }
    Ok(judge(&works, &failures, offered))
}

fn enable_xsave(guest: &Guest<'_>, xcr0: u64) -> Result<(), Refused> {
    guest.edit_sregs(|sregs| sregs.cr4 |= CR4_OSXSAVE)?;
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = xcr0;
    guest.tiny.vcpu.set_xcrs(&xcrs).named("KVM_SET_XCRS")
}

fn judge(works: &[&str], failures: &[Failure], offered: bool) -> Finding {
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
        (true, true) => Verdict::Works,
        (true, false) => Verdict::Differs,
        (false, false) if refused => Verdict::Absent,
        (false, _) => Verdict::Broken,
    };
    Finding::new(verdict, facts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(how: &str, is_undefined: bool, name: &'static str) -> Failure {
        Failure {
            how: how.to_owned(),
            is_undefined,
            names: vec![name],
        }
    }

    #[test]
    fn instructions_not_offered_that_fault_are_absent() {
        let finding = judge(&[], &[failure("guest gets #UD", true, "VPXOR")], false);
        assert_eq!(
            finding,
            Finding::absent("not offered; guest gets #UD: VPXOR")
        );
    }

    #[test]
    fn one_failing_instruction_breaks_the_row() {
        let finding = judge(&["MOVAPS"], &[failure("triple fault", false, "PXOR")], true);
        assert_eq!(finding, Finding::broken("triple fault: PXOR; runs: MOVAPS"));
    }
}

//! Which instructions run at CPL0, where some KVMs emulate every one.

use kvm_bindings::kvm_xcrs;

use super::super::code::{Code, code};
use super::super::guest::{Bench, Guest, Level, Named, Refused, Stop, Trap};
use super::super::probe::{Finding, Probe, Verdict};

const CR4_OSXSAVE: u64 = 1 << 18;
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
    fn andn { "andn eax, ecx, edx", "out 0xd1, al" }
    fn blsr { "blsr eax, ecx", "out 0xd1, al" }
    fn tzcnt { "mov ecx, 8", "tzcnt eax, ecx", "out 0xd1, al" }
    fn shlx { "shlx eax, ecx, edx", "out 0xd1, al" }
    fn pdep { "pdep eax, ecx, edx", "out 0xd1, al" }
    fn popcnt { "mov ecx, 0xff", "popcnt eax, ecx", "out 0xd1, al" }
    fn xgetbv { "xor ecx, ecx", "xgetbv", "out 0xd1, al" }
    fn xsave { "mov eax, 3", "xor edx, edx", "xsave [r9]", "out 0xd1, al" }
    fn xrstor { "mov eax, 3", "xor edx, edx", "xrstor [r9]", "out 0xd1, al" }
}

/// A name and the code that runs it.
type Row = (&'static str, fn() -> Code);

/// The rows of this file. What CPUID does not offer is tried all the same: some KVMs run it.
pub(in crate::doctor) const PROBES: &[Probe] = &[
    Probe::new("sse-cpl0", "SSE and SSE2 instructions at CPL0", |b| {
        let rows: &[Row] = &[
            ("MOVDQA load and store", movdqa),
            ("MOVDQU load and store", movdqu),
            ("MOVDQA between registers", movdqa_registers),
            ("MOVAPS", movaps),
            ("MOVUPS", movups),
            ("MOVQ", movq),
            ("PXOR", pxor),
            ("PADDD", paddd),
            ("ADDSD", addsd),
            ("CVTSI2SD", cvtsi2sd),
            ("LDMXCSR", ldmxcsr),
            ("FXSAVE, FXRSTOR", fxsave),
        ];
        run(b, rows, 0, true)
    }),
    Probe::new("avx-cpl0", "AVX and AVX2 instructions at CPL0", |b| {
        let offered = b.offered(1, 0, 2) & AVX != 0 && b.offered(7, 0, 1) & AVX2 != 0;
        let rows: &[Row] = &[("VPXOR", vpxor), ("VMOVDQU", vmovdqu), ("VPADDD", vpaddd)];
        run(b, rows, XCR0_AVX, offered)
    }),
    Probe::new("avx512-cpl0", "an AVX-512 instruction at CPL0", |b| {
        let offered = b.offered(7, 0, 1) & AVX512F != 0;
        run(b, &[("VPADDD zmm", vpaddd_512)], XCR0_AVX512, offered)
    }),
    Probe::new("bmi-cpl0", "BMI1 and BMI2 instructions at CPL0", |b| {
        let offered = b.offered(7, 0, 1) & (BMI1 | BMI2) == BMI1 | BMI2;
        let rows: &[Row] = &[
            ("ANDN", andn),
            ("BLSR", blsr),
            ("TZCNT", tzcnt),
            ("SHLX", shlx),
            ("PDEP", pdep),
        ];
        run(b, rows, 0, offered)
    }),
    Probe::new("popcnt-cpl0", "POPCNT at CPL0", |b| {
        run(
            b,
            &[("POPCNT", popcnt)],
            0,
            b.offered(1, 0, 2) & POPCNT != 0,
        )
    }),
    Probe::new("xsave-cpl0", "XGETBV, XSAVE and XRSTOR at CPL0", |b| {
        let rows: &[Row] = &[("XGETBV", xgetbv), ("XSAVE", xsave), ("XRSTOR", xrstor)];
        run(b, rows, 0b11, b.offered(1, 0, 2) & XSAVE != 0)
    }),
];

/// Runs each row in a guest of its own; `xcr0` other than 0 enables XSAVE with that state.
fn run(bench: &Bench, rows: &[Row], xcr0: u64, offered: bool) -> Result<Finding, Refused> {
    let mut works = Vec::new();
    let mut fails: Vec<(Stop, Vec<&str>)> = Vec::new();
    for &(name, code) in rows {
        let mut guest = bench.guest(Level::Kernel, code())?;
        if xcr0 != 0 {
            let enabled = enable_xsave(&guest, xcr0);
            if offered {
                enabled?;
            }
        }
        let stop = match guest.run() {
            Stop::Done => {
                works.push(name);
                continue;
            }
            // Which instruction is the row's name already.
            Stop::Internal { suberror, .. } => Stop::Internal {
                suberror,
                instruction: String::new(),
            },
            // Only the vector tells failures apart.
            Stop::Trap(trap) => Stop::Trap(Trap {
                vector: trap.vector,
                ..Trap::default()
            }),
            stop => stop,
        };
        match fails.iter_mut().find(|(other, _)| *other == stop) {
            Some((_, names)) => names.push(name),
            None => fails.push((stop, vec![name])),
        }
    }
    Ok(judge(&works, &fails, offered))
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

fn judge(works: &[&str], fails: &[(Stop, Vec<&str>)], offered: bool) -> Finding {
    let mut facts = Vec::new();
    if !offered {
        facts.push("not offered".to_owned());
    }
    facts.extend(
        fails
            .iter()
            .map(|(stop, names)| format!("{stop}: {}", names.join(", "))),
    );
    if !works.is_empty() {
        facts.push(format!("runs: {}", works.join(", ")));
    }
    let refused = fails
        .iter()
        .all(|(stop, _)| matches!(stop, Stop::Trap(t) if t.vector == 6));
    let verdict = match (fails.is_empty(), offered) {
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

    #[test]
    fn instructions_not_offered_that_fault_are_absent() {
        let undefined = Stop::Trap(Trap {
            vector: 6,
            ..Trap::default()
        });
        let finding = judge(&[], &[(undefined, vec!["VPXOR"])], false);
        assert_eq!(
            finding,
            Finding::absent("not offered; guest gets #UD: VPXOR")
        );
    }

    #[test]
    fn one_failing_instruction_breaks_the_row() {
        let finding = judge(&["MOVAPS"], &[(Stop::Shutdown, vec!["PXOR"])], true);
        assert_eq!(finding, Finding::broken("triple fault: PXOR; runs: MOVAPS"));
    }
}

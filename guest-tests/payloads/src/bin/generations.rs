//! The models of other generations: their LBR stack, PEBS records, freezes, registers and instructions.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::catch;
use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::pebs;
use hindsight_guest::regs::vector::Vector;
use hindsight_guest::report;
use hindsight_payloads::branch::{FREEZE_LBRS_ON_PMI, FREEZE_PERFMON_ON_PMI, LBR};
use hindsight_payloads::counted;
use hindsight_payloads::pmu::{self, INT, ON, PebsArea};

payload!("generations");

/// What differs between the models.
struct Generation {
    /// IA32_PERF_CAPABILITIES.
    capabilities: u64,
    /// Bytes of a PEBS record.
    bytes: usize,
    /// How many of [`INSTRUCTIONS`] it has.
    instructions: usize,
    /// Whether it has AVX512_VNNI, of the models that have AVX-512.
    vnni: Option<bool>,
}

impl Generation {
    const fn lbr_format(&self) -> u64 {
        self.capabilities & 0x3f
    }

    /// Whether it is Core 2, whose LBR format no other model has.
    const fn is_core_2(&self) -> bool {
        self.lbr_format() == 2
    }

    /// Entries of the LBR stack.
    const fn entries(&self) -> u32 {
        match self.lbr_format() {
            2 => 4,
            5 => 32,
            _ => 16,
        }
    }

    /// The MSRs of the source and the target of LBR entry 0.
    const fn stack(&self) -> (u32, u32) {
        if self.is_core_2() {
            (reg::CORE_LASTBRANCH_0_FROM_IP, reg::CORE_LASTBRANCH_0_TO_IP)
        } else {
            (reg::MSR_LASTBRANCH_0_FROM_IP, reg::MSR_LASTBRANCH_0_TO_IP)
        }
    }

    /// Perfmon version 4: freezes are bits of IA32_PERF_GLOBAL_STATUS.
    const fn freezes_by_status(&self) -> bool {
        self.lbr_format() == 5
    }
}

fn check_generation(generation: &Generation) {
    check_eq!(
        msr::read(reg::IA32_PERF_CAPABILITIES),
        generation.capabilities,
        "IA32_PERF_CAPABILITIES"
    );
    check_registers(generation);
    check_branch(generation);
    check_written_addresses(generation);
    check_record(generation);
    check_freezes(generation);
    check_instructions(generation);
    if generation.is_core_2() {
        check_core_2();
    }
    if let Some(exists) = generation.vnni {
        check_vnni(exists);
    }
}

/// Checks which registers exist (rules GEN-01, GEN-04, GEN-05, GEN-10, GEN-11, GEN-13, GEN-14).
fn check_registers(generation: &Generation) {
    let (deep, version_4) = (generation.entries() == 32, generation.freezes_by_status());
    let (last, (from, to)) = (generation.entries() - 1, generation.stack());
    let core_2 = generation.is_core_2();
    for (index, exists) in [
        (from + last, true),
        (to + last, true),
        (reg::CORE_LASTBRANCH_0_FROM_IP, core_2),
        (reg::CORE_LASTBRANCH_0_TO_IP + 3, core_2),
        (reg::CORE_LASTBRANCH_0_TO_IP + 4, false),
        (reg::MSR_LASTBRANCH_0_FROM_IP, !core_2),
        (reg::MSR_LBR_SELECT, !core_2),
        (reg::IA32_PMC0 + 1, true),
        (reg::IA32_PMC0 + 2, !core_2),
        (reg::IA32_PERFEVTSEL0 + 3, !core_2),
        (reg::MSR_PEBS_LD_LAT_THRESHOLD, !core_2),
        (reg::MSR_LASTBRANCH_0_FROM_IP + 16, deep),
        (reg::MSR_LASTBRANCH_0_TO_IP + 31, deep),
        (reg::MSR_LBR_INFO_0, deep),
        (reg::IA32_PERF_GLOBAL_STATUS_SET, version_4),
        (reg::IA32_PERF_GLOBAL_INUSE, version_4),
        (reg::IA32_A_PMC0, generation.capabilities >> 13 & 1 != 0),
    ] {
        if !check_eq!(
            msr::read_safe(index).is_ok(),
            exists,
            "whether a register exists"
        ) {
            report::measurement("msr", u64::from(index));
        }
    }
    let written = |index, value| msr::write_safe(index, value).is_ok();
    check_eq!(written(reg::MSR_LASTBRANCH_TOS, 16), deep, "TOS of 16");
    check_eq!(
        written(reg::MSR_LBR_SELECT, 1 << 9),
        generation.lbr_format() >= 4,
        "EN_CALLSTACK"
    );
    check_eq!(
        written(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 58),
        version_4,
        "LBR_FRZ"
    );
    check_eq!(
        written(reg::MSR_LASTBRANCH_TOS, u64::from(generation.entries())),
        false,
        "TOS above the last entry"
    );
    msr::write(reg::MSR_LASTBRANCH_TOS, 0);
    if !core_2 {
        msr::write(reg::MSR_LBR_SELECT, 0);
    }
}

/// Checks which bits of its registers Core 2 has (rules GEN-14 to GEN-17).
fn check_core_2() {
    /// Both freezes, FREEZE_WHILE_SMM, BTS_OFF_OS and BTS_OFF_USR.
    const DEBUGCTL: u64 = 0b101_1110 << 8;
    for (index, value, accepted) in [
        (reg::IA32_PERF_GLOBAL_CTRL, 0x7_0000_0003, true),
        (reg::IA32_PERF_GLOBAL_CTRL, 1 << 2, false),
        (reg::IA32_PERF_GLOBAL_CTRL, 0, true),
        (reg::IA32_PERFEVTSEL0 + 1, 0xdf_00c0, true),
        (reg::IA32_PERFEVTSEL0 + 1, 1 << 21, false),
        (reg::IA32_FIXED_CTR_CTRL, 0xbbb, true),
        (reg::IA32_FIXED_CTR_CTRL, 1 << 6, false),
        (reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 61, false),
        (reg::IA32_FIXED_CTR0, (1 << 40) - 1, true),
        (reg::IA32_FIXED_CTR0, 1 << 40, false),
        (reg::IA32_PEBS_ENABLE, 1 << 1, false),
        (reg::IA32_PEBS_ENABLE, 1 << 32, false),
        (reg::IA32_DEBUGCTL, DEBUGCTL, true),
        (reg::IA32_DEBUGCTL, 1 << 13, false),
    ] {
        if !check_eq!(
            msr::write_safe(index, value).is_ok(),
            accepted,
            "a write to Core 2's register"
        ) {
            report::measurement("msr", u64::from(index));
        }
    }
    for index in [
        reg::IA32_DEBUGCTL,
        reg::IA32_FIXED_CTR_CTRL,
        reg::IA32_FIXED_CTR0,
        reg::IA32_PERFEVTSEL0 + 1,
    ] {
        msr::write(index, 0);
    }
    msr::write(reg::IA32_PMC0, 10_u64.wrapping_neg());
    check_eq!(
        msr::read(reg::IA32_PMC0),
        (1 << 40) - 10,
        "a counter of 40 bits"
    );
    pmu::select(0, 0xc0, 0, ON);
    counted!(1, ".rept 20", "nop", ".endr");
    check_eq!(pmu::status(), 1, "overflow after 40 bits");
    check_eq!(msr::read(reg::IA32_PMC0) < 100, true, "the counter wraps");
    pmu::select(0, 0, 0, 0);
    msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1);
}

/// Records as many jumps as the stack has entries and one more (rule GEN-01).
fn check_branch(generation: &Generation) {
    let (from, to): (u64, u64);
    let (from_0, to_0) = generation.stack();
    msr::write(reg::MSR_LASTBRANCH_TOS, u64::from(generation.entries() - 1));
    // SAFETY: the payload owns the machine; the registers are named.
    unsafe {
        asm!(
            "wrmsr",
            "2: jmp 3f",
            "nop",
            "3: xor eax, eax",
            "wrmsr",
            "lea r8, [rip + 2b]",
            "lea r9, [rip + 3b]",
            in("ecx") reg::IA32_DEBUGCTL,
            inout("eax") 1_u32 => _,
            in("edx") 0,
            out("r8") from,
            out("r9") to,
        );
    }
    check_eq!(msr::read(reg::MSR_LASTBRANCH_TOS), 0, "TOS, which wraps");
    check_eq!(msr::read(from_0) & !(1 << 63), from, "FROM without MISPRED");
    check_eq!(msr::read(to_0), to, "TO");
}

/// Checks which values software can write to FROM (rules GEN-02, GEN-03, GEN-13).
fn check_written_addresses(generation: &Generation) {
    const ADDRESS: u64 = 0xffff_8000_0000_1000;
    let index = generation.stack().0 + 3;
    let old = matches!(generation.lbr_format(), 3 | 4);
    for (value, accepted) in [
        (ADDRESS, true),
        (ADDRESS & !(1 << 63), old),
        (1 << 63 | 0x1000, old),
        (ADDRESS & !(1 << 62), false),
        (ADDRESS & !(1 << 60), false),
    ] {
        let answer = msr::write_safe(index, value);
        let expected = if accepted {
            Ok::<(), MsrFault>(())
        } else {
            Err(GP)
        };
        if !check_eq!(answer, expected, "a write to FROM") {
            report::measurement("value", value);
        }
    }
    check_eq!(
        msr::read(index) & !(1 << 63),
        if old { 0x1000 } else { ADDRESS & !(1 << 63) },
        "FROM"
    );
}

/// Takes a PEBS record at the sixth of some instructions (rules GEN-06, GEN-07, GEN-16).
fn check_record(generation: &Generation) {
    const CLEAN: u64 = 0xa5a5_a5a5_a5a5_a5a5;
    let ds = PebsArea::new(4, 4, [1000_u64.wrapping_neg(); 4]);
    msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0);
    msr::write(reg::IA32_PMC0, 5_u64.wrapping_neg());
    pmu::select(0, 0xc0, 0, ON);
    msr::write(reg::IA32_PEBS_ENABLE, 1);
    counted!(1, ".rept 20", "nop", ".endr");
    msr::write(reg::IA32_PEBS_ENABLE, 0);
    pmu::select(0, 0, 0, 0);
    check_eq!(
        ds.field(pebs::INDEX) - ds.base(),
        generation.bytes as u64,
        "bytes of the record"
    );
    let bytes = generation.bytes;
    if bytes > pebs::record::COUNTERS {
        check_eq!(ds.record(0, pebs::record::COUNTERS), 1, "field 90H");
    }
    check_eq!(
        ds.record(0, bytes - 8) == CLEAN,
        false,
        "the last word of the record"
    );
    check_eq!(ds.record(0, bytes), CLEAN, "the word after the record");
    msr::write(reg::IA32_DS_AREA, 0);
}

/// Overflows a counter with both freezes on (rules GEN-08, GEN-09).
fn check_freezes(generation: &Generation) {
    msr::write(reg::IA32_PMC0, 10_u64.wrapping_neg());
    pmu::select(0, 0xc0, 0, ON | INT);
    msr::write(
        reg::IA32_DEBUGCTL,
        LBR | FREEZE_LBRS_ON_PMI | FREEZE_PERFMON_ON_PMI,
    );
    pmu::start(1);
    for _ in 0..20 {
        core::hint::spin_loop();
    }
    let control = msr::read(reg::IA32_PERF_GLOBAL_CTRL);
    let lbr = msr::read(reg::IA32_DEBUGCTL) & LBR;
    let status = pmu::status();
    pmu::select(0, 0, 0, 0);
    msr::write(reg::IA32_DEBUGCTL, 0);
    msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0);
    let (enabled, frozen) = if generation.freezes_by_status() {
        ((1, LBR), 0b11 << 58)
    } else {
        ((0, 0), 0)
    };
    check_eq!((control, lbr), enabled, "GLOBAL_CTRL and LBR");
    check_eq!(status, 1 | frozen, "status");
    msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 | frozen);
}

/// Runs one instruction, which may change RAX and read or flush the memory at RDI.
macro_rules! execute {
    ($text:literal $(, $at:expr)?) => {
        // SAFETY: the instruction changes RAX and flags only.
        unsafe { asm!($text, out("rax") _, $(in("rdi") $at)?) }
    };
}
/// Instructions in the order of the generations that brought them: POPCNT, CRC32, RDRAND, MOVBE,
/// RDSEED, CLFLUSHOPT, CLWB.
const INSTRUCTIONS: [fn(u64); 7] = [
    |at| execute!("popcnt rax, rdi", at),
    |at| execute!("crc32 rax, rdi", at),
    |_| execute!("rdrand rax"),
    |at| execute!("movbe rax, [rdi]", at),
    |_| execute!("rdseed rax"),
    |at| execute!("clflushopt [rdi]", at),
    |at| execute!("clwb [rdi]", at),
];

/// Checks that the model has the first instructions of the list only (rule GEN-12).
fn check_instructions(generation: &Generation) {
    let data = 0_u64;
    let at = &raw const data as u64;
    for (n, instruction) in INSTRUCTIONS.into_iter().enumerate() {
        let raised = catch::catch(|| instruction(at)).map(|exception| exception.vector);
        let expected = (n >= generation.instructions).then_some(Vector::UD.0);
        if !check_eq!(
            raised == expected,
            true,
            "#UD of an instruction that the model lacks"
        ) {
            report::measurement("instruction", n as u64);
        }
    }
}

/// The accumulator and sources of a dot product, and its result with wrapping and with saturation.
type DotProduct = (u32, u32, u32, u32, u32);

/// Products of unsigned and signed bytes.
const BYTES: [DotProduct; 3] = [
    (
        0x7fff_ffff,
        0xffff_ffff,
        0x7f7f_7f7f,
        0x8001_fa03,
        0x7fff_ffff,
    ),
    (0, 0xff00_0080, 0xff55_aa80, 0xffff_bf01, 0xffff_bf01),
    (
        0x8000_0000,
        0x0000_0001,
        0x0000_00ff,
        0x7fff_ffff,
        0x8000_0000,
    ),
];
/// Products of signed words.
const WORDS: [DotProduct; 3] = [
    (
        0x8000_0000,
        0x8000_8000,
        0x7fff_7fff,
        0x0001_0000,
        0x8000_0000,
    ),
    (0, 0x8000_8000, 0x8000_8000, 0x8000_0000, 0x7fff_ffff),
    (
        0xffff_ffff,
        0x8000_8000,
        0x8000_8000,
        0x7fff_ffff,
        0x7fff_ffff,
    ),
];

/// Runs one instruction of AVX512_VNNI on ZMM0 to ZMM2. The payload uses no vector registers.
macro_rules! dot_product {
    ($name:literal) => {
        |sum: u32, a: u32, b: u32| -> u32 {
            let result;
            // SAFETY: the compiler uses no vector registers for this target.
            unsafe {
                asm!(
                    "vpbroadcastd zmm0, {sum:e}",
                    "vpbroadcastd zmm1, {a:e}",
                    "vpbroadcastd zmm2, {b:e}",
                    concat!($name, " zmm0, zmm1, zmm2"),
                    "valignd zmm0, zmm0, zmm0, 15",
                    "vmovd {result:e}, xmm0",
                    sum = in(reg) sum,
                    a = in(reg) a,
                    b = in(reg) b,
                    result = out(reg) result,
                );
            }
            result
        }
    };
}

/// Checks the instructions of AVX512_VNNI, or their absence (rule GEN-18).
fn check_vnni(exists: bool) {
    const X87_TO_ZMM: u32 = 0xe7;
    let announced = cpuid(7, 0).ecx >> 11 & 1 != 0;
    check_eq!(announced, exists, "CPUID.AVX512_VNNI");
    insn::write_cr4(insn::read_cr4() | (Cr4::OSFXSR | Cr4::OSXSAVE).bits());
    // SAFETY: CPUID reports these components of XCR0 together with AVX-512.
    unsafe { asm!("xsetbv", in("ecx") 0, in("eax") X87_TO_ZMM, in("edx") 0) };
    type Execute = fn(u32, u32, u32) -> u32;
    let instructions: [(Execute, [DotProduct; 3], bool); 4] = [
        (dot_product!("vpdpbusd"), BYTES, false),
        (dot_product!("vpdpbusds"), BYTES, true),
        (dot_product!("vpdpwssd"), WORDS, false),
        (dot_product!("vpdpwssds"), WORDS, true),
    ];
    for (execute, rows, saturates) in instructions {
        for (sum, a, b, wrapped, saturated) in rows {
            let mut found = 0;
            let raised = catch::catch(|| found = execute(sum, a, b));
            let expected = if saturates { saturated } else { wrapped };
            if exists {
                check_eq!(found, expected, "a dot product");
            } else {
                let raised = raised.map(|exception| exception.vector);
                check_eq!(raised == Some(Vector::UD.0), true, "#UD of a dot product");
            }
        }
    }
}

/// The case of one model: its name, its signature, and what it has.
macro_rules! generation {
    ($name:literal, $signature:literal, $generation:expr $(, $rule:literal)*) => {
        case! {
            name: $name, cpl: [0],
            rules: ["GEN-01", "GEN-02", "GEN-03", "GEN-04", "GEN-05", "GEN-06", "GEN-07", "GEN-08", "GEN-09", "GEN-10",
                "GEN-11", "GEN-12" $(, $rule)*],
            needs: ["msr-exit"], cpu: $name,
            about: "what the model has, and that it lacks what came later",
            fn body(ctx) {
                if cpuid(0x4000_0000, 0).ebx != u32::from_le_bytes(*b"Hind") {
                    skip!(ctx, "models are Hindsight's");
                }
                require_eq!(cpuid(1, 0).eax, $signature, "the signature");
                if !insn::has(Feature::PDCM) {
                    skip!(ctx, "KVM alone has no performance monitor");
                }
                check_generation(&$generation);
            }
        }
    };
}

generation! {
    "core2", 0x10676,
    Generation { capabilities: 0x10c2, bytes: 144, instructions: 0, vnni: None },
    "GEN-13", "GEN-14", "GEN-15", "GEN-16", "GEN-17"
}

generation! {
    "nehalem", 0x106a5,
    Generation { capabilities: 0x11c3, bytes: 176, instructions: 2, vnni: None }
}

generation! {
    "westmere", 0x206c2,
    Generation { capabilities: 0x11c3, bytes: 176, instructions: 2, vnni: None }
}

generation! {
    "sandybridge", 0x206a7,
    Generation { capabilities: 0x11c3, bytes: 176, instructions: 2, vnni: None }
}

generation! {
    "ivybridge", 0x306a9,
    Generation { capabilities: 0x31c3, bytes: 176, instructions: 3, vnni: None }
}

generation! {
    "haswell", 0x306c3,
    Generation { capabilities: 0x32c4, bytes: 192, instructions: 4, vnni: None }
}

generation! {
    "broadwell", 0x306d4,
    Generation { capabilities: 0x32c4, bytes: 192, instructions: 5, vnni: None }
}

generation! {
    "skylake", 0x506e3,
    Generation { capabilities: 0x33c5, bytes: 200, instructions: 6, vnni: None }
}

generation! {
    "skylake-server", 0x50654,
    Generation { capabilities: 0x33c5, bytes: 200, instructions: 7, vnni: Some(false) },
    "GEN-18"
}

generation! {
    "icelake-server", 0x606a6,
    Generation { capabilities: 0xf4c5, bytes: 32, instructions: 7, vnni: Some(true) },
    "GEN-18", "GEN-25", "GEN-26"
}

generation! {
    "cascadelake", 0x50657,
    Generation { capabilities: 0x33c5, bytes: 200, instructions: 7, vnni: Some(true) },
    "GEN-18"
}

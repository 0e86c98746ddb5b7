//! What Ice Lake's performance monitor adds: version 5, eight counters, slots, metrics and adaptive PEBS.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::pebs::{self, DataConfig, groups};
use hindsight_guest::regs::pmu::{EventSelect, FixedControl, Metrics, global};
use hindsight_guest::report;
use hindsight_payloads::counted;
use hindsight_payloads::pmu::{self, ON, PebsArea};

payload!("icelake");

/// Family 6 model 6AH stepping 6.
const SIGNATURE: u32 = 0x606a6;
/// The bits of the existing counters in the global registers.
const COUNTERS: u64 = 0xf_0000_00ff;
/// Slots of a core cycle.
const SLOTS: u64 = 5;

/// Ends the case as skipped unless it runs on Hindsight's model with its performance monitor.
macro_rules! need_icelake {
    ($ctx:expr) => {
        if cpuid(0x4000_0000, 0).ebx != u32::from_le_bytes(*b"Hind") {
            skip!($ctx, "models are Hindsight's");
        }
        require_eq!(cpuid(1, 0).eax, SIGNATURE, "the signature");
        if !insn::has(Feature::PDCM) {
            skip!($ctx, "KVM alone has no performance monitor");
        }
    };
}

/// Checks which values an MSR takes, and leaves 0 in it.
fn check_writes(rows: &[(u32, u64, bool)]) {
    for &(index, value, accepted) in rows {
        if !check_eq!(
            msr::write_safe(index, value).is_ok(),
            accepted,
            "a write to a register"
        ) {
            report::measurement("msr", u64::from(index));
            report::measurement("value", value);
        }
        msr::write(index, 0);
    }
}

/// RDPMC, without a check for exceptions.
fn rdpmc(index: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller passes the index of an existing counter.
    unsafe { asm!("rdpmc", in("ecx") index, out("eax") low, out("edx") high) };
    u64::from(high) << 32 | u64::from(low)
}

case! {
    name: "version_5", cpl: [0], rules: ["GEN-19", "GEN-20"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "CPUID.0AH, the bits of twelve counters, and no AnyThread",
    fn body(ctx) {
        need_icelake!(ctx);
        let leaf = cpuid(0xa, 0);
        check_eq!(leaf.eax, 0x0830_0805, "CPUID.0AH:EAX");
        check_eq!((leaf.ebx, leaf.ecx), (0, 0xf), "CPUID.0AH:EBX, ECX");
        check_eq!(leaf.edx, 0x8604, "CPUID.0AH:EDX");
        check_writes(&[
            (reg::IA32_PERF_GLOBAL_CTRL, COUNTERS, true),
            (reg::IA32_PERF_GLOBAL_CTRL, 1 << 8, false),
            (reg::IA32_PERF_GLOBAL_CTRL, 1 << 36, false),
            (reg::IA32_PERF_GLOBAL_STATUS_RESET, COUNTERS, true),
            (reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 36, false),
            (reg::IA32_PERF_GLOBAL_STATUS_SET, 1 << 36, false),
            (reg::IA32_PERFEVTSEL0, 1 << 21, false),
            (reg::IA32_PERFEVTSEL0 + 7, 1 << 21, false),
            (reg::IA32_PERFEVTSEL0 + 7, 0xffd7_ffff, true),
            (reg::IA32_FIXED_CTR_CTRL, 0xbbbb, true),
            (reg::IA32_FIXED_CTR_CTRL, 1 << 2, false),
            (reg::IA32_FIXED_CTR_CTRL, 1 << 14, false),
            (reg::IA32_FIXED_CTR_CTRL, 1 << 16, false),
            (reg::IA32_A_PMC0 + 7, pmu::MAX, true),
            (reg::IA32_A_PMC0 + 7, 1 << 48, false),
            (reg::IA32_FIXED_CTR0 + 3, pmu::MAX, true),
            (reg::IA32_FIXED_CTR0 + 3, 1 << 48, false),
        ]);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, COUNTERS);
        check_eq!(pmu::status(), COUNTERS, "status");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, COUNTERS);
        check_eq!(pmu::status(), 0, "status");
    }
}

case! {
    name: "slots", cpl: [0], rules: ["GEN-20", "GEN-21"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "fixed counter 3 and event A4H/01H count five slots in each cycle",
    fn body(ctx) {
        need_icelake!(ctx);
        pmu::reset();
        pmu::select(7, 0xa4, 0x01, ON);
        pmu::select(6, 0xc0, 0x00, ON);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0x3030);
        counted!(0xa_0000_00c0, ".rept 96", "nop", ".endr");
        let cycles = pmu::fixed(1);
        check_eq!(pmu::get(6), 96 + pmu::OVERHEAD, "instructions");
        check_eq!(cycles, 96 + pmu::OVERHEAD, "cycles");
        check_eq!(pmu::fixed(3), SLOTS * cycles, "slots in the fixed counter");
        check_eq!(pmu::get(7), SLOTS * cycles, "slots in counter 7");
        check_eq!(rdpmc(0x4000_0003), SLOTS * cycles, "slots by RDPMC");
        // The second of two cycles passes the end of the counter.
        msr::write(reg::IA32_FIXED_CTR0 + 3, 7_u64.wrapping_neg() & pmu::MAX);
        counted!(1 << 35, "nop");
        check_eq!(pmu::status(), 1 << 35, "overflow");
        check_eq!(pmu::fixed(3), SLOTS * (1 + pmu::OVERHEAD) - 7, "what is left");
        msr::write(reg::IA32_FIXED_CTR0 + 3, 0);
        pmu::select(6, 0, 0, 0);
        pmu::select(7, 0, 0, 0);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, COUNTERS);
        pmu::reset();
    }
}

/// The words of the PEBS buffer before records are stored.
const CLEAN: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// A value of 64 bits for a register.
const VALUE: u64 = 0x1111_2222_3333_4444;
/// The reset value of every counter.
const RESET: u64 = 1000_u64.wrapping_neg() & pmu::MAX;
/// 32 LBR entries in MSR_PEBS_DATA_CFG.
const ALL_ENTRIES: u64 = 31 << DataConfig::LBR_ENTRIES_SHIFT;

/// A counter that records the sixth instruction that it counts.
struct Sampler {
    /// Its bit in the global registers.
    bit: u32,
    /// Event select and unit mask of a general-purpose counter.
    event: (u8, u8),
    /// What is left to count.
    left: u64,
}

/// A precise event records the one after the overflow; others, and fixed counters, the one that overflows.
const SAMPLERS: [Sampler; 7] = [
    Sampler {
        bit: 0,
        event: (0xc0, 0),
        left: 5,
    },
    Sampler {
        bit: 7,
        event: (0xc0, 0),
        left: 5,
    },
    Sampler {
        bit: 3,
        event: (0x3c, 0),
        left: 6,
    },
    Sampler {
        bit: 5,
        event: (0xa4, 1),
        left: 26,
    },
    Sampler {
        bit: 32,
        event: (0, 0),
        left: 6,
    },
    Sampler {
        bit: 33,
        event: (0, 0),
        left: 6,
    },
    Sampler {
        bit: 35,
        event: (0, 0),
        left: 30,
    },
];

/// The area with reset values of all counters.
fn pebs_area() -> PebsArea {
    let ds = PebsArea::new(pmu::RECORDS, pmu::RECORDS, [RESET; 4]);
    for offset in (pebs::RESET..pebs::RESET_FIXED + 32).step_by(8) {
        ds.put(offset, RESET);
    }
    ds
}

/// Turns a counter on with PEBS, with adaptive records or basic ones.
fn arm(sampler: &Sampler, adaptive: bool) {
    let left = sampler.left.wrapping_neg() & pmu::MAX;
    if let Some(fixed) = sampler.bit.checked_sub(32) {
        let adaptive = if adaptive {
            FixedControl::adaptive_record(fixed as usize)
        } else {
            0
        };
        msr::write(reg::IA32_FIXED_CTR0 + fixed, left);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11 << (4 * fixed) | adaptive);
    } else {
        let adaptive = if adaptive {
            EventSelect::ADAPTIVE_RECORD
        } else {
            0
        };
        pmu::set(sampler.bit, left);
        pmu::select(sampler.bit, sampler.event.0, sampler.event.1, ON | adaptive);
    }
    msr::write(reg::IA32_PEBS_ENABLE, 1 << sampler.bit);
}

/// Turns everything off.
fn disarm() {
    pmu::stop();
    for index in [
        reg::IA32_PEBS_ENABLE,
        reg::MSR_PEBS_DATA_CFG,
        reg::MSR_PERF_METRICS,
        reg::IA32_FIXED_CTR_CTRL,
        reg::IA32_DEBUGCTL,
        reg::IA32_DS_AREA,
    ] {
        msr::write(index, 0);
    }
    for n in 0..8 {
        pmu::select(n, 0, 0, 0);
        pmu::set(n, 0);
    }
    for n in 0..4 {
        msr::write(reg::IA32_FIXED_CTR0 + n, 0);
    }
    msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 62 | COUNTERS);
}

/// Counts some instructions, of which the fourth is a jump and the sixth a NOP. Returns the addresses of the
/// jump, of its target, and of the NOP.
fn sampled(global: u64) -> (u64, u64, u64) {
    let (jump, target, nop): (u64, u64, u64);
    insn::write_cr4(insn::read_cr4() | Cr4::OSFXSR.bits());
    counted!(global,
        "mov r12, {value}", "movq xmm5, r12", "2: jmp 3f", "nop", "3: nop", "4: nop",
        ".rept 20", "nop", ".endr", "lea r8, [rip + 2b]", "lea r9, [rip + 3b]", "lea r10, [rip + 4b]";
        value = const VALUE, out("r8") jump, out("r9") target, out("r10") nop, out("r12") _,);
    (jump, target, nop)
}

/// Checks the record that a counter takes with these groups.
fn check_record(sampler: &Sampler, config: DataConfig, adaptive: bool) {
    let ds = pebs_area();
    msr::write(reg::MSR_PEBS_DATA_CFG, config.0);
    msr::write(reg::IA32_DEBUGCTL, 1);
    arm(sampler, adaptive);
    let (jump, target, nop) = sampled(1 << sampler.bit);
    let groups = if adaptive { config } else { DataConfig(0) };
    let bytes = groups.record_bytes();
    let word = |at: usize| ds.record(0, at);
    let good = check_eq!(
        ds.field(pebs::INDEX) - ds.base(),
        bytes as u64,
        "bytes of the record"
    ) & check_eq!(word(0), groups.0 | (bytes as u64) << 48, "format and size")
        & check_eq!(word(8), nop, "the eventing RIP")
        & check_eq!(word(16), 1 << sampler.bit, "applicable counters")
        & check_eq!(word(24) == CLEAN, false, "the TSC")
        & check_eq!(word(bytes), CLEAN, "the word after the record");
    let mut at = groups::BASIC;
    if groups.has(DataConfig::MEMORY) {
        check_eq!(
            (word(at), word(at + 24)),
            (0, 0),
            "no access and no transaction"
        );
        at += groups::MEMORY;
    }
    if groups.has(DataConfig::GPRS) {
        check_eq!(word(at + 8), nop + 1, "RIP");
        check_eq!(word(at + 8 * (2 + 12)), VALUE, "R12");
        check_eq!(
            word(at + 8 * (2 + 1)),
            u64::from(reg::IA32_PERF_GLOBAL_CTRL),
            "RCX, the second"
        );
        at += groups::GPRS;
    }
    if groups.has(DataConfig::XMMS) {
        check_eq!((word(at + 80), word(at + 88)), (VALUE, 0), "XMM5");
        at += groups::XMMS;
    }
    if groups.has(DataConfig::LBRS) {
        check_eq!(
            (word(at), word(at + 8)),
            (jump, target),
            "the newest LBR entry"
        );
    }
    let left = match sampler.bit.checked_sub(32) {
        Some(fixed) => pmu::fixed(fixed),
        None => pmu::get(sampler.bit),
    };
    let counted = left.wrapping_sub(RESET) & pmu::MAX;
    if !check!(
        counted < 200,
        "the counter has its reset value and counts on"
    ) | !good
    {
        report::measurement("counter", u64::from(sampler.bit));
        report::measurement("groups", groups.0);
    }
    disarm();
}

case! {
    name: "pebs_registers", cpl: [0], rules: ["GEN-22", "GEN-23"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "the bits of extended and adaptive PEBS, and those that are reserved",
    fn body(ctx) {
        need_icelake!(ctx);
        check_writes(&[
            (reg::IA32_PEBS_ENABLE, COUNTERS, true),
            (reg::IA32_PEBS_ENABLE, 1 << 8, false),
            (reg::IA32_PEBS_ENABLE, 1 << 36, false),
            (reg::IA32_PEBS_ENABLE, 1 << 63, false),
            (reg::MSR_PEBS_DATA_CFG, 0xff00_000f, true),
            (reg::MSR_PEBS_DATA_CFG, 1 << 4, false),
            (reg::MSR_PEBS_DATA_CFG, 1 << 23, false),
            (reg::MSR_PEBS_DATA_CFG, 1 << 32, false),
            (reg::IA32_PERFEVTSEL0, 1 << 34, true),
            (reg::IA32_PERFEVTSEL0 + 7, 1 << 34, true),
            (reg::IA32_PERFEVTSEL0, 1 << 35, false),
            (reg::IA32_FIXED_CTR_CTRL, 0x1111_0000_bbbb, true),
            (reg::IA32_FIXED_CTR_CTRL, 1 << 33, false),
            (reg::IA32_FIXED_CTR_CTRL, 1 << 48, false),
        ]);
    }
}

case! {
    name: "adaptive", cpl: [0], rules: ["GEN-23", "GEN-24", "GEN-25"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "every counter takes records with the groups of MSR_PEBS_DATA_CFG, or basic ones",
    fn body(ctx) {
        need_icelake!(ctx);
        disarm();
        for sampler in &SAMPLERS {
            for groups in 0..=0xf {
                check_record(sampler, DataConfig(groups | ALL_ENTRIES), true);
            }
            check_record(sampler, DataConfig(0xf), false);
            check_record(sampler, DataConfig(DataConfig::LBRS), true);
        }
    }
}

case! {
    name: "adaptive_memory", cpl: [0], rules: ["GEN-24", "GEN-25"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "the memory group has the address of the load; a record that does not fit is dropped",
    fn body(ctx) {
        need_icelake!(ctx);
        disarm();
        let data = [1_u64, 2];
        let at = data.as_ptr() as u64;
        for (entries, bytes) in [(0, groups::BASIC + groups::MEMORY), (0xff << 24 | DataConfig::LBRS, 0)] {
            let ds = pebs_area();
            msr::write(reg::MSR_PEBS_DATA_CFG, DataConfig::MEMORY | entries);
            arm(&Sampler { bit: 6, event: (0xd0, 0x81), left: 1 }, true);
            counted!(1 << 6, "mov r8, [r9]", "mov r8, [r9 + 8]", "nop"; in("r9") at, out("r8") _,);
            check_eq!(ds.field(pebs::INDEX) - ds.base(), bytes as u64, "bytes of the record");
            let address = if bytes == 0 { CLEAN } else { at + 8 };
            check_eq!(ds.record(0, groups::BASIC), address, "the address");
            check_eq!(pmu::get(6), RESET, "the counter is reloaded");
            disarm();
        }
    }
}

case! {
    name: "pebs_together", cpl: [0], rules: ["GEN-23", "GEN-25"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "counters that are due together share a record, which is adaptive if one of them is",
    fn body(ctx) {
        need_icelake!(ctx);
        disarm();
        let ds = pebs_area();
        msr::write(reg::MSR_PEBS_DATA_CFG, DataConfig::GPRS);
        arm(&Sampler { bit: 32, event: (0, 0), left: 6 }, true);
        arm(&Sampler { bit: 7, event: (0xc0, 0), left: 5 }, false);
        msr::write(reg::IA32_PEBS_ENABLE, 1 << 32 | 1 << 7);
        let (.., nop) = sampled(1 << 32 | 1 << 7);
        let bytes = groups::BASIC + groups::GPRS;
        check_eq!(ds.field(pebs::INDEX) - ds.base(), bytes as u64, "bytes of the record");
        check_eq!((ds.record(0, 8), ds.record(0, 16)), (nop, 1 << 32 | 1 << 7), "RIP and counters");
        disarm();
    }
}

case! {
    name: "pebs_reference_cycles", cpl: [0], rules: ["GEN-23"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "the fixed counter of reference cycles takes records, too",
    fn body(ctx) {
        need_icelake!(ctx);
        disarm();
        let ds = pebs_area();
        arm(&Sampler { bit: 34, event: (0, 0), left: 1000 }, false);
        pmu::start(1 << 34);
        for _ in 0..100_000 {
            if ds.field(pebs::INDEX) != ds.base() {
                break;
            }
            core::hint::spin_loop();
        }
        pmu::stop();
        check_eq!(ds.record(0, 16), 1 << 34, "applicable counters");
        disarm();
    }
}

/// All fixed counters, at every privilege level.
const ALL_FIXED: u64 = 0x3333;
/// Fixed counters 0, 1 and 3, the metrics, and general-purpose counters 0 and 1.
const METRICS: u64 = 0xb_0000_0003 | global::PERF_METRICS;

/// What the metrics of the counted cycles must be, by the pipeline of rule GEN-27.
fn expected_metrics() -> Metrics {
    let (instructions, cycles) = (pmu::fixed(0), pmu::fixed(1));
    let (mispredicted, missed) = (pmu::get(0), pmu::get(1));
    let slots = SLOTS * cycles;
    let fraction = |part: u64| u8::try_from(part * 255 / slots).unwrap_or(255);
    let retiring = fraction(instructions);
    let bad_speculation = fraction(4 * mispredicted);
    let backend_bound = fraction(4 * missed + SLOTS * (cycles - instructions));
    Metrics {
        retiring,
        bad_speculation,
        frontend_bound: 255 - retiring - bad_speculation - backend_bound,
        backend_bound,
        ..Metrics::default()
    }
}

/// Checks MSR_PERF_METRICS against the counters, and returns it.
fn check_metrics() -> Metrics {
    let found = msr::read(reg::MSR_PERF_METRICS);
    check_eq!(found, expected_metrics().bits(), "the metrics");
    check_eq!(rdpmc(0x2000_0000), found, "the metrics by RDPMC");
    check_eq!(pmu::fixed(3), SLOTS * pmu::fixed(1), "the slots");
    Metrics::from_bits(found)
}

/// Prepares the counters of a program whose metrics are checked.
fn prepare_metrics() {
    disarm();
    // Mispredicted branches, and loads that missed the L1.
    pmu::select(0, 0xc5, 0x00, ON);
    pmu::select(1, 0xd1, 0x08, ON);
    msr::write(reg::IA32_FIXED_CTR_CTRL, ALL_FIXED);
}

case! {
    name: "metrics_registers", cpl: [0], rules: ["GEN-26"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "MSR_PERF_METRICS and its bit of the global registers",
    fn body(ctx) {
        need_icelake!(ctx);
        disarm();
        check_writes(&[
            (reg::MSR_PERF_METRICS, 0xffff_ffff, true),
            (reg::MSR_PERF_METRICS, 1 << 32, false),
            (reg::IA32_PERF_GLOBAL_CTRL, global::PERF_METRICS | COUNTERS, true),
            (reg::IA32_PERF_GLOBAL_CTRL, 1 << 49, false),
            (reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 49, false),
        ]);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, global::PERF_METRICS);
        check_eq!(pmu::status(), global::PERF_METRICS, "status");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, global::PERF_METRICS);
        msr::write(reg::IA32_FIXED_CTR0 + 3, 1000);
        msr::write(reg::MSR_PERF_METRICS, 0x3399_0033);
        check_eq!(msr::read(reg::MSR_PERF_METRICS), 0x3399_0033, "what was written");
        disarm();
        check_eq!(msr::read(reg::MSR_PERF_METRICS), 0, "after a write of 0");
    }
}

case! {
    name: "metrics", cpl: [0], rules: ["GEN-26", "GEN-27"], needs: ["msr-exit"], cpu: "icelake-server",
    about: "the metrics are those of the pipeline, for straight code, strings, misses and mispredictions",
    fn body(ctx) {
        need_icelake!(ctx);
        let mut data = [0_u8; 256];
        let at = data.as_mut_ptr() as u64;

        prepare_metrics();
        counted!(METRICS, ".rept 96", "nop", ".endr");
        let found = check_metrics();
        check_eq!((found.retiring, found.frontend_bound), (51, 204), "of straight code");

        prepare_metrics();
        counted!(METRICS, "mov rdi, r8", "mov ecx, 200", "rep stosb"; in("r8") at, out("rdi") _,);
        check!(check_metrics().backend_bound > 200, "a string instruction is backend bound");

        prepare_metrics();
        counted!(METRICS, ".rept 50", "clflush [r8]", "mov r9, [r8]", ".endr"; in("r8") at, out("r9") _,);
        check!(pmu::get(1) >= 50, "loads missed");
        check!(check_metrics().backend_bound > 90, "loads that miss are backend bound");

        prepare_metrics();
        // The directions are the bits of a random number.
        counted!(METRICS, "mov r8, {number}", "mov r9d, 256",
            "2: imul r8, r8, 0x5851f42d", "add r8, 0x7f2d", "bt r8, 40", "jc 3f", "3: dec r9d", "jnz 2b";
            number = const VALUE, out("r8") _, out("r9") _,);
        check!(pmu::get(0) >= 20, "branches were mispredicted");
        check!(check_metrics().bad_speculation > 5, "mispredicted branches are bad speculation");

        // Without the bit of the metrics, or without fixed counter 3, they stand still.
        prepare_metrics();
        counted!(METRICS & !global::PERF_METRICS, "nop");
        check_eq!(msr::read(reg::MSR_PERF_METRICS), 0, "without their bit");
        counted!(METRICS & !global::FIXED_3, "nop");
        check_eq!(msr::read(reg::MSR_PERF_METRICS), 0, "without fixed counter 3");
        disarm();
    }
}

//! What Ice Lake's performance monitor adds: version 5, eight counters and slots.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::report;
use hindsight_payloads::counted;
use hindsight_payloads::pmu::{self, ON};

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

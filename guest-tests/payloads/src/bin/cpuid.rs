//! CPUID: the model, and the consistency of what it reports.
//!
//! A facility that CPUID does not report is not demanded.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::insn::{self, cpuid, has};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::{Feature, LEAF_FREQUENCY, LEAF_HYPERVISOR, LEAF_TSC};
use hindsight_payloads::clock;

payload!("cpuid");

/// Whether this is the model of the rules, and not a host's processor or QEMU's.
fn is_skylake_server() -> bool {
    cpuid(1, 0).eax == 0x0005_0654
}

fn leaf(leaf: u32, subleaf: u32) -> [u32; 4] {
    let found = cpuid(leaf, subleaf);
    [found.eax, found.ebx, found.ecx, found.edx]
}

case! {
    name: "model", cpl: [0], rules: ["CPU-01", "CPU-02"], needs: [],
    about: "the signature, and a highest leaf that includes the frequency leaves",
    fn body(ctx) {
        if !is_skylake_server() {
            skip!(ctx, "the CPU model is not skylake-server");
        }
        check!(cpuid(0, 0).eax >= 0x16, "highest basic leaf at least 16H");
        check_eq!(cpuid(1, 0).eax, 0x0005_0654, "family, model and stepping");
    }
}

case! {
    name: "same_for_users", cpl: [3], rules: ["CPU-01", "CPU-02"],
    needs: ["cpuid", "iretq-cpl3"],
    about: "CPUID returns the same values at CPL 3 and CPL 0",
    fn body(ctx) {
        for number in [0, 1, 7, 0xa, LEAF_TSC, LEAF_HYPERVISOR, 0x8000_0001, 0x8000_0007] {
            let expected = leaf(number, 0);
            let mut found = [0; 4];
            let fault = ctx.run(|| found = leaf(number, 0));
            check!(fault.is_none(), "no exception");
            check_eq!(found, expected, "values of the leaf");
        }
    }
}

case! {
    name: "base_features", cpl: [0], rules: ["CPU-03", "CPU-04", "CPU-05", "CPU-19", "CPU-20"],
    needs: [],
    about: "basic features of the model are reported",
    fn body(ctx) {
        if !is_skylake_server() {
            skip!(ctx, "the CPU model is not skylake-server");
        }
        for (feature, name) in [
            (Feature::X2APIC, "x2APIC"),
            (Feature::DE, "DE"),
            (Feature::TSC, "TSC"),
            (Feature::MSR, "MSR"),
            (Feature::APIC, "APIC"),
            (Feature::TSC_ADJUST, "TSC_ADJUST"),
            (Feature::SYSCALL, "SYSCALL"),
            (Feature::NX, "NX"),
            (Feature::LONG_MODE, "long mode"),
            (Feature::INVARIANT_TSC, "invariant TSC"),
        ] {
            check!(has(feature), name);
        }
    }
}

case! {
    name: "absent_features", cpl: [0], rules: ["CPU-06", "CPU-07", "CPU-21", "CPU-23"], needs: [],
    about: "features that this model lacks are not reported",
    fn body(ctx) {
        if !is_skylake_server() {
            skip!(ctx, "the CPU model is not skylake-server");
        }
        for (feature, name) in [
            (Feature::RDPID, "RDPID"),
            (Feature::ARCH_LBR, "architectural LBR"),
            (Feature::PT, "processor trace"),
            (Feature::SDBG, "debug interface"),
            (Feature::HLE, "HLE"),
            (Feature::RTM, "RTM"),
        ] {
            check!(!has(feature), name);
        }
        check_eq!(leaf(0x14, 0), [0; 4], "leaf 14H");
    }
}

case! {
    name: "monitoring_is_all_or_nothing", cpl: [0],
    rules: ["CPU-03", "CPU-04", "CPU-08", "CPU-09", "CPU-10"], needs: [],
    about: "debug store, PDCM and leaf 0AH agree with each other",
    fn body(ctx) {
        if !is_skylake_server() {
            skip!(ctx, "the CPU model is not skylake-server");
        }
        check_eq!(has(Feature::DTES64), has(Feature::DS), "DTES64 equals DS");
        check_eq!(has(Feature::DS_CPL), has(Feature::DS), "DS-CPL equals DS");
        let pmu = leaf(0xa, 0);
        if pmu[0] & 0xff == 0 {
            check_eq!(pmu, [0; 4], "leaf 0AH without counters");
        } else {
            check_eq!(pmu, [0x0730_0404, 0, 0, 0x603], "leaf 0AH");
        }
    }
}

case! {
    name: "resource_director", cpl: [0],
    rules: ["CPU-05", "CPU-11", "CPU-12", "CPU-13", "CPU-14", "CPU-15", "CPU-16", "CPU-22"],
    needs: [],
    about: "leaves 0FH and 10H are as specified, or zero if the facility is not reported",
    fn body(ctx) {
        if !is_skylake_server() {
            skip!(ctx, "the CPU model is not skylake-server");
        }
        if has(Feature::RDT_M) {
            let rmids = leaf(0xf, 0)[1];
            check_eq!(leaf(0xf, 0), [0, rmids, 0, 2], "leaf 0FH.0");
            let upscale = leaf(0xf, 1)[1];
            check_eq!(leaf(0xf, 1), [0, upscale, rmids, 7], "leaf 0FH.1");
        } else {
            check_eq!(leaf(0xf, 0), [0; 4], "leaf 0FH.0");
            check_eq!(leaf(0xf, 1), [0; 4], "leaf 0FH.1");
        }
        if has(Feature::RDT_A) {
            check_eq!(leaf(0x10, 1), [0xa, 0x600, 4, 0xf], "leaf 10H.1");
            check_eq!(leaf(0x10, 3), [0x59, 0, 4, 7], "leaf 10H.3");
        } else {
            for subleaf in 0..4 {
                check_eq!(leaf(0x10, subleaf), [0; 4], "leaf 10H");
            }
        }
        check_eq!(leaf(0xf, 9), [0; 4], "leaf 0FH.9");
        check_eq!(leaf(0x10, 9), [0; 4], "leaf 10H.9");
    }
}

case! {
    name: "frequencies", cpl: [0], rules: ["CPU-17", "CPU-18", "ART-01", "ART-03", "ART-06", "OP-29"],
    needs: [],
    about: "leaves 15H and 16H report the frequency of the TSC, in numbers that Linux can multiply",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG has no leaf 15H");
        }
        let [denominator, numerator, crystal, _] = leaf(LEAF_TSC, 0);
        check_eq!(crystal, 25_000_000, "frequency of the crystal in Hz");
        check!(denominator != 0 && numerator != 0, "ratio is not zero");
        check!(u64::from(crystal / 1000) * u64::from(numerator) < 1 << 32, "product fits in 32 bits");
        let hz = require_some!(clock::tsc_hz(), "TSC frequency reported");
        let [base, max, bus, _] = leaf(LEAF_FREQUENCY, 0);
        check_eq!(u64::from(base), (hz + 500_000) / 1_000_000, "base MHz");
        check!(max >= base, "maximum MHz");
        check_eq!(bus, 100, "bus MHz");
    }
}

case! {
    name: "hypervisor", cpl: [0], rules: ["CPU-25"], needs: [],
    about: "a hypervisor is reported and has a leaf with its signature",
    fn body(_ctx) {
        if check!(has(Feature::HYPERVISOR), "CPUID.1:ECX[31]") {
            let found = leaf(LEAF_HYPERVISOR, 0);
            check!(found[0] >= LEAF_HYPERVISOR, "highest hypervisor leaf");
            check!(found[1] != 0, "signature");
        }
    }
}

case! {
    name: "rax_upper_half", cpl: [0, 3], rules: [], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "CPUID clears bits 63:32 of RAX, RBX, RCX and RDX",
    fn body(ctx) {
        let mut upper = u64::MAX;
        let fault = ctx.run(|| {
            let (a, b, c, d): (u64, u64, u64, u64);
            // SAFETY: CPUID changes only registers. RBX, which the compiler may use, is restored.
            unsafe {
                asm!(
                    "mov {b}, rbx",
                    "mov rbx, -1",
                    "cpuid",
                    "xchg {b}, rbx",
                    b = out(reg) b,
                    inout("rax") 0xffff_ffff_0000_0001_u64 => a,
                    inout("rcx") 0xffff_ffff_0000_0000_u64 => c,
                    inout("rdx") u64::MAX => d,
                    options(nomem, nostack),
                );
            }
            upper = (a | b | c | d) >> 32;
        });
        check!(fault.is_none(), "no exception");
        check_eq!(upper, 0, "bits 63:32 of the four registers");
    }
}

case! {
    name: "apic_id", cpl: [0], rules: [], needs: [],
    about: "the initial APIC ID is that of the local APIC",
    fn body(_ctx) {
        check_eq!(leaf(1, 0)[1] >> 24, hindsight_guest::apic::id(), "CPUID.1:EBX[31:24]");
    }
}

case! {
    name: "cache", cpl: [0], rules: ["CPU-24"], needs: ["gd"],
    about: "leaf 4 describes the ways and the size of the L3 cache as leaves 0FH and 10H do",
    fn body(ctx) {
        if !is_skylake_server() {
            skip!(ctx, "the CPU model is not skylake-server");
        }
        let level3 = (0..8).map(|n| leaf(4, n)).find(|[eax, ..]| eax & 0x1f != 0 && eax >> 5 & 7 == 3);
        let [_, ebx, sets, _] = require_some!(level3, "L3 cache reported");
        let ways = u64::from(ebx >> 22) + 1;
        let partitions = u64::from(ebx >> 12 & 0x3ff) + 1;
        let line = u64::from(ebx & 0xfff) + 1;
        check_eq!(ways, 11, "ways");
        check_eq!(ways * partitions * line * (u64::from(sets) + 1), 73_728 * 352, "bytes");
        let [allocation, ..] = leaf(0x10, 1);
        if allocation != 0 {
            check_eq!(u64::from(allocation & 0x1f) + 1, ways, "length of the masks");
        }
        let [_, upscale, ..] = leaf(0x0f, 1);
        if upscale != 0 {
            check_eq!(upscale, 73_728, "bytes per unit of monitoring");
        }
    }
}

//! Processors that lack a facility or have one more: CPUID, capability bits and MSRs say the same.

#![no_std]
#![no_main]

use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::report;

payload!("profiles");

const BTS_UNAVAILABLE: u64 = 1 << 11;
const PEBS_UNAVAILABLE: u64 = 1 << 12;

/// Checks that none of the `count` MSRs from `first` on exists.
fn absent(first: u32, count: u32) {
    for index in first..first + count {
        let answers = (msr::read_safe(index).err(), msr::write_safe(index, 0).err());
        if !check_eq!(answers, (Some(GP), Some(GP)), "an absent register") {
            report::measurement("msr", u64::from(index));
        }
    }
}

/// Checks that IA32_DEBUGCTL refuses each of the bits.
fn reserved_in_debugctl(bits: impl IntoIterator<Item = u32>) {
    for bit in bits {
        let answer = msr::write_safe(reg::IA32_DEBUGCTL, 1 << bit);
        if !check_eq!(answer, Err(GP), "a bit of a facility that is absent") {
            report::measurement("bit", u64::from(bit));
        }
    }
}

fn misc_enable(mask: u64) -> u64 {
    msr::read(reg::IA32_MISC_ENABLE) & mask
}

macro_rules! on_hindsight {
    ($ctx:ident) => {
        let found = cpuid(0x4000_0000, 0);
        if found.ebx != u32::from_le_bytes(*b"Hind") {
            skip!($ctx, "profiles are Hindsight's");
        }
    };
}

case! {
    name: "no_pebs", cpl: [0], rules: ["PCAP-04", "MSR-39", "MSR-05"], needs: ["msr-exit", "guestbp-io"], cpu: "-pebs",
    about: "without PEBS: capability bits, registers and the bit in IA32_MISC_ENABLE go together",
    fn body(ctx) {
        on_hindsight!(ctx);
        check_eq!(msr::read_safe(reg::IA32_PERF_CAPABILITIES), Ok::<u64, MsrFault>(0x3005), "IA32_PERF_CAPABILITIES");
        check_eq!(misc_enable(BTS_UNAVAILABLE | PEBS_UNAVAILABLE), PEBS_UNAVAILABLE, "IA32_MISC_ENABLE");
        absent(reg::IA32_PEBS_ENABLE, 1);
        absent(reg::MSR_PEBS_LD_LAT_THRESHOLD, 2);
        check!(msr::read_safe(reg::IA32_DS_AREA).is_ok(), "the DS area, which BTS uses");
        check!(insn::has(Feature::DS), "DS");
    }
}

case! {
    name: "no_lbr", cpl: [0], rules: ["PCAP-04", "MSR-39"], needs: ["msr-exit", "guestbp-io"], cpu: "-lbr",
    about: "without the LBR stack: format 0, no registers of it, and no LBR in IA32_DEBUGCTL",
    fn body(ctx) {
        on_hindsight!(ctx);
        let found = msr::read(reg::IA32_PERF_CAPABILITIES);
        check_eq!(found & 0x3f, 0, "the LBR format");
        absent(reg::MSR_LBR_SELECT, 2);
        absent(reg::MSR_LER_FROM_LIP, 2);
        absent(reg::MSR_LASTBRANCH_0_FROM_IP, 32);
        absent(reg::MSR_LASTBRANCH_0_TO_IP, 32);
        absent(reg::MSR_LBR_INFO_0, 32);
        reserved_in_debugctl([0]);
    }
}

case! {
    name: "no_bts", cpl: [0], rules: ["PCAP-04", "MSR-05", "MSR-39"], needs: ["msr-exit", "guestbp-io"], cpu: "-bts,-pebs",
    about: "without BTS and PEBS there is no DS area",
    fn body(ctx) {
        on_hindsight!(ctx);
        check!(!insn::has(Feature::DS) && !insn::has(Feature::DS_CPL) && !insn::has(Feature::DTES64), "DS in CPUID");
        check_eq!(misc_enable(BTS_UNAVAILABLE | PEBS_UNAVAILABLE), BTS_UNAVAILABLE | PEBS_UNAVAILABLE, "IA32_MISC_ENABLE");
        absent(reg::IA32_DS_AREA, 1);
        reserved_in_debugctl(6..=10);
    }
}

case! {
    name: "no_pmu", cpl: [0], rules: ["PCAP-04", "MSR-05", "MSR-39"], needs: ["msr-exit", "guestbp-io"], cpu: "-pmu,-pebs",
    about: "without counters: no leaf 0AH, no registers, no freezing in IA32_DEBUGCTL",
    fn body(ctx) {
        on_hindsight!(ctx);
        let leaf = cpuid(0xa, 0);
        check_eq!([leaf.eax, leaf.ebx, leaf.ecx, leaf.edx], [0; 4], "leaf 0AH");
        check_eq!(msr::read(reg::IA32_PERF_CAPABILITIES), 5, "IA32_PERF_CAPABILITIES");
        check_eq!(misc_enable(1 << 7), 0, "performance monitoring available");
        absent(reg::IA32_PMC0, 8);
        absent(reg::IA32_PERFEVTSEL0, 8);
        absent(reg::IA32_FIXED_CTR0, 3);
        absent(reg::IA32_FIXED_CTR_CTRL, 6);
        absent(reg::IA32_A_PMC0, 8);
        absent(reg::IA32_PEBS_ENABLE, 1);
        reserved_in_debugctl(11..=14);
    }
}

case! {
    name: "eight_counters", cpl: [0], rules: ["PMU-03", "CPU-08", "MSR-03", "MSR-04", "MSR-15", "MSR-16", "MSR-22"],
    needs: ["msr-exit", "guestbp-io"], cpu: "pmu=8",
    about: "a processor with one thread in each core has eight counters, of which four take PEBS records",
    fn body(ctx) {
        on_hindsight!(ctx);
        check_eq!(cpuid(0xa, 0).eax, 0x0730_0804, "leaf 0AH");
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_CTRL), 0xff, "RESET value of IA32_PERF_GLOBAL_CTRL");
        check_eq!(msr::write_safe(reg::IA32_PERF_GLOBAL_CTRL, 0x7_0000_01ff), Err(GP), "a ninth counter");
        check_eq!(msr::write_safe(reg::IA32_PEBS_ENABLE, 1 << 4), Err(GP), "PEBS of the fifth counter");
        for n in 4..8 {
            check!(msr::write_safe(reg::IA32_A_PMC0 + n, 0x1234_5678_9abc).is_ok(), "a full-width write");
            check_eq!(msr::read(reg::IA32_PMC0 + n), 0x1234_5678_9abc, "the counter");
            msr::write(reg::IA32_PMC0 + n, 0);
        }
        absent(reg::IA32_PMC0 + 8, 1);
        absent(reg::IA32_A_PMC0 + 8, 1);
        // The last counter counts retired instructions.
        msr::write(reg::IA32_PERFEVTSEL0 + 7, 0x43_00c0);
        for _ in 0..10 {
            core::hint::spin_loop();
        }
        msr::write(reg::IA32_PERFEVTSEL0 + 7, 0);
        check!(msr::read(reg::IA32_PMC0 + 7) >= 10, "the eighth counter counted");
        msr::write(reg::IA32_PMC0 + 7, 0);
    }
}

case! {
    name: "no_rdt", cpl: [0], rules: ["RDT-01", "RDT-11"], needs: ["msr-exit", "guestbp-io"], cpu: "-rdt",
    about: "without resource control there are neither leaves nor registers",
    fn body(ctx) {
        on_hindsight!(ctx);
        check!(!insn::has(Feature::RDT_M) && !insn::has(Feature::RDT_A), "CPUID.7.0:EBX");
        for leaf in [0xf, 0x10] {
            for subleaf in 0..4 {
                let found = cpuid(leaf, subleaf);
                check_eq!([found.eax, found.ebx, found.ecx, found.edx], [0; 4], "leaves 0FH and 10H");
            }
        }
        absent(reg::IA32_L3_QOS_CFG, 2);
        absent(reg::IA32_QM_EVTSEL, 3);
        absent(reg::IA32_L3_QOS_MASK_0, 16);
        absent(reg::IA32_L2_QOS_MASK_0, 8);
        absent(reg::IA32_L2_QOS_EXT_BW_THRTL_0, 8);
    }
}

case! {
    name: "only_delays", cpl: [0], rules: ["RDT-06", "RDT-11", "CAT-01"], needs: ["msr-exit", "guestbp-io"], cpu: "-cmt,-mbm,-l3cat,-cdp",
    about: "with delay values alone: eight classes and no RMID",
    fn body(ctx) {
        on_hindsight!(ctx);
        check!(!insn::has(Feature::RDT_M) && insn::has(Feature::RDT_A), "CPUID.7.0:EBX");
        check_eq!(cpuid(0x10, 0).ebx, 1 << 3, "leaf 10H");
        check_eq!(msr::write_safe(reg::IA32_PQR_ASSOC, 1), Err(GP), "an RMID");
        check_eq!(msr::write_safe(reg::IA32_PQR_ASSOC, 8 << 32), Err(GP), "class 8");
        check!(msr::write_safe(reg::IA32_PQR_ASSOC, 7 << 32).is_ok(), "class 7");
        msr::write(reg::IA32_PQR_ASSOC, 0);
        absent(reg::IA32_QM_EVTSEL, 2);
        absent(reg::IA32_L3_QOS_MASK_0, 16);
    }
}

case! {
    name: "no_x2apic_no_deadline", cpl: [0], rules: ["MSR-26", "MSR-39"], needs: ["msr-exit", "tsc-deadline-exit", "guestbp-io"],
    cpu: "-x2apic,-tsc-deadline,-tsc-adjust,-rdtscp",
    about: "what a processor without the features of the foundation lacks",
    fn body(ctx) {
        on_hindsight!(ctx);
        for feature in [Feature::X2APIC, Feature::TSC_DEADLINE, Feature::TSC_ADJUST, Feature::RDTSCP] {
            check!(!insn::has(feature), "a feature that was left out");
        }
        for index in [reg::IA32_TSC_DEADLINE, reg::IA32_TSC_ADJUST, reg::IA32_TSC_AUX] {
            absent(index, 1);
        }
    }
}

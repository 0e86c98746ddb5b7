//! The registers of the performance monitor: enumeration, reset values, reserved bits, writes.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::{EventSelect, FixedControl, global};
use hindsight_payloads::pmu::{self, MAX, ON, OVERHEAD};
use hindsight_payloads::{counted, need_pebs, need_pmu};

payload!("pmu");

case! {
    name: "cpuid", cpl: [0], rules: ["PMU-01", "CPU-08", "CPU-09", "CPU-10"], needs: [],
    about: "CPUID.0AH shows version 4 with four and three counters of 48 bits",
    fn body(ctx) {
        need_pmu!(ctx);
        let leaf = insn::cpuid(0xa, 0);
        check_eq!(leaf.eax, 0x0730_0404, "EAX");
        check_eq!(leaf.ebx, 0, "EBX: all seven events");
        check_eq!(leaf.ecx, 0, "ECX");
        check_eq!(leaf.edx, 0x603, "EDX");
    }
}

case! {
    name: "capabilities", cpl: [0], rules: ["PCAP-01", "PCAP-02", "PCAP-03", "PEBS-01", "MSR-12"], needs: [],
    about: "IA32_PERF_CAPABILITIES is there with PDCM, complete and read-only",
    fn body(ctx) {
        need_pebs!(ctx);
        check!(insn::has(Feature::PDCM), "CPUID.1:ECX[15]");
        check_eq!(msr::read(reg::IA32_PERF_CAPABILITIES), 0x33c5, "345H");
        check_eq!(msr::write_safe(reg::IA32_PERF_CAPABILITIES, 0x33c5), Err(GP), "a write");
        check_eq!(msr::write_safe(reg::IA32_PERF_CAPABILITIES, 0), Err(GP), "a write of 0");
    }
}

case! {
    name: "after_reset", cpl: [0], rules: ["PMU-02", "PMU-03", "PEBS-15", "RST-08", "RST-09", "MSR-03",
        "MSR-11", "MSR-18", "MSR-20", "MSR-21", "MSR-40"],
    needs: [], about: "values after RESET",
    fn body(ctx) {
        if !pmu::present() {
            skip!(ctx, "CPUID.0AH shows no performance monitor of version 4");
        }
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_CTRL), 0xf, "GLOBAL_CTRL");
        for (first, count) in [(0xc1, 4), (0x186, 4), (0x1a6, 2), (0x309, 3), (0x38d, 2), (0x392, 1), (0x4c1, 4)] {
            for index in first..first + count {
                check_eq!(msr::read(index), 0, "zero after RESET");
            }
        }
        if pmu::has_pebs() {
            for index in [0x3f1, 0x3f6, 0x3f7] {
                check_eq!(msr::read(index), 0, "zero after RESET");
            }
        }
    }
}

/// (first, count, bits that may be written, bits that then read back).
const BITS: &[(u32, u32, u64, u64)] = &[
    (0x186, 4, 0xffff_ffff, 0xfff7_ffff),
    (0x1a6, 2, 0x3f_ffff_8fff, 0x3f_ffff_8fff),
    (0x309, 3, MAX, MAX),
    (0x38d, 1, 0xfff, 0xfff),
    (0x38f, 1, 0x7_0000_000f, 0x7_0000_000f),
    (0x390, 1, 0xfc00_0007_0000_000f, 0),
    (0x391, 1, 0x7c00_0007_0000_000f, 0),
    (0x4c1, 4, MAX, MAX),
];

case! {
    name: "every_bit", cpl: [0], rules: ["PMU-09", "PMU-12", "PMU-13", "PMU-14", "PMU-15", "PMU-16", "PMU-19",
        "PMU-24", "MSR-04", "MSR-13", "MSR-15", "MSR-16", "MSR-17", "MSR-22", "OP-31"],
    needs: [], timeout_ms: 10000, about: "each bit of each register is stored, dropped or refused",
    fn body(ctx) {
        need_pmu!(ctx);
        for &(first, count, writable, read_back) in BITS {
            for index in first..first + count {
                for bit in (0..64).map(|n| 1_u64 << n) {
                    let expected = if writable & bit == 0 { Err(GP) } else { Ok(()) };
                    if !check_eq!(msr::write_safe(index, bit), expected, "WRMSR of one bit") {
                        hindsight_guest::report::measurement("msr", index.into());
                        hindsight_guest::report::measurement("value", bit);
                    }
                    if expected.is_ok() {
                        check_eq!(msr::read(index), bit & read_back, "what reads back");
                    }
                }
                msr::write(index, 0);
            }
        }
        pmu::reset();
    }
}

case! {
    name: "every_bit_of_pebs", cpl: [0], rules: ["PEBS-15", "PEBS-32", "MSR-19", "MSR-20", "MSR-21"],
    needs: [], timeout_ms: 10000, about: "each bit of the registers of PEBS is stored or refused",
    fn body(ctx) {
        need_pebs!(ctx);
        for (index, writable) in [(0x3f1, 0xf_0000_000f), (0x3f6, 0xffff), (0x3f7, 0x7f_ff17_u64)] {
            for bit in (0..64).map(|n| 1_u64 << n) {
                let expected = if writable & bit == 0 { Err(GP) } else { Ok(()) };
                check_eq!(msr::write_safe(index, bit), expected, "WRMSR of one bit");
                check_eq!(msr::read(index) & bit, writable & bit, "what reads back");
            }
            msr::write(index, 0);
        }
    }
}

case! {
    name: "read_only", cpl: [0], rules: ["PMU-17", "MSR-14", "MSR-18"], needs: [],
    about: "GLOBAL_STATUS and GLOBAL_INUSE refuse every write",
    fn body(ctx) {
        need_pmu!(ctx);
        for index in [reg::IA32_PERF_GLOBAL_STATUS, reg::IA32_PERF_GLOBAL_INUSE] {
            for value in [0, 1, u64::MAX] {
                check_eq!(msr::write_safe(index, value), Err(GP), "a write");
            }
        }
    }
}

case! {
    name: "absent", cpl: [0], rules: ["PMU-25", "MSR-39"], needs: [],
    about: "counters beyond the fourth and the third do not exist",
    fn body(ctx) {
        need_pmu!(ctx);
        for first in [0xc5, 0x18a, 0x4c5] {
            for index in first..first + 4 {
                check_eq!(msr::read_safe(index), Err(GP), "RDMSR");
                check_eq!(msr::write_safe(index, 0), Err(GP), "WRMSR");
            }
        }
        check_eq!(msr::read_safe(0x30c), Err(GP), "a fourth fixed counter");
    }
}

case! {
    name: "privilege", cpl: [3], rules: ["PMU-27"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "RDMSR and WRMSR of the performance monitor raise #GP(0) at CPL 3",
    fn body(ctx) {
        need_pmu!(ctx);
        for index in [0xc1, 0x186, 0x309, 0x38d, 0x38e, 0x38f, 0x390, 0x391, 0x392, 0x4c1] {
            let read = ctx.run(|| { msr::read(index); });
            check_eq!(read.map(|e| e.code()), Some(GP), "RDMSR");
            let write = ctx.run(|| msr::write(index, 0));
            check_eq!(write.map(|e| e.code()), Some(GP), "WRMSR");
        }
    }
}

case! {
    name: "legacy_write", cpl: [0], rules: ["PMU-08", "PMU-10", "PMU-11", "MSR-03"], needs: [],
    about: "IA32_PMCx takes 32 bits with their sign, IA32_A_PMCx is the same counter",
    fn body(ctx) {
        need_pmu!(ctx);
        for (written, read) in [
            (0xffff_fff0, 0xffff_ffff_fff0),
            (0x7fff_ffff, 0x7fff_ffff),
            (0x8000_0000, 0xffff_8000_0000),
            (0x1234_5678_0000_0001, 1),
            (u64::MAX, MAX),
        ] {
            for n in 0..4 {
                msr::write(reg::IA32_PMC0 + n, written);
                check_eq!(msr::read(reg::IA32_PMC0 + n), read, "IA32_PMCx");
                check_eq!(msr::read(reg::IA32_A_PMC0 + n), read, "IA32_A_PMCx");
            }
        }
        pmu::reset();
    }
}

/// Returns how far 100 NOPs advance counter 0 and fixed counter 0.
fn hundred(global: u64) -> (u64, u64) {
    pmu::set(0, 0);
    msr::write(reg::IA32_FIXED_CTR0, 0);
    counted!(global, ".rept 100", "nop", ".endr");
    (pmu::get(0), pmu::fixed(0))
}

case! {
    name: "enables", cpl: [0], rules: ["PMU-05", "PMU-06", "PMU-07", "PMU-29", "EVT-16"], needs: [],
    about: "a counter counts with all of its switches on, and keeps its value with one off",
    fn body(ctx) {
        need_pmu!(ctx);
        let counted = 100 + OVERHEAD;
        for (bits, control, global, expected) in [
            (ON, 0b11, 1 | 1 << 32, (counted, counted)),
            (pmu::OS, 0b01, 1 | 1 << 32, (counted, counted)),
            (pmu::USR, 0b10, 1 | 1 << 32, (0, 0)),
            (EventSelect::ENABLE, 0, 1 | 1 << 32, (0, 0)),
            (ON & !EventSelect::ENABLE, 0b11, 1, (0, 0)),
            (ON, 0b11, 1 << 32, (0, counted)),
            (ON, 0b11, 1, (counted, 0)),
            (ON, 0b11, 0b1110 | 0b110 << 32, (0, 0)),
        ] {
            pmu::select(0, 0xc0, 0, bits);
            msr::write(reg::IA32_FIXED_CTR_CTRL, control);
            check_eq!(hundred(global), expected, "counted");
        }
        pmu::select(0, 0xc0, 0, ON);
        hundred(1);
        pmu::select(0, 0xc0, 0, ON & !EventSelect::ENABLE);
        check_eq!(pmu::get(0), counted, "kept after EN is cleared");
        pmu::reset();
    }
}

case! {
    name: "frozen", cpl: [0], rules: ["PMU-05", "PMU-06", "PMU-18", "PMU-20", "PMU-29"], needs: [],
    about: "CTR_FRZ set by software stops all counters, cleared it lets them run",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, global::CTR_FRZ);
        check_eq!(hundred(1 | 1 << 32), (0, 0), "while frozen");
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_CTRL), 0, "GLOBAL_CTRL is as written");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, global::CTR_FRZ);
        let counted = 100 + OVERHEAD;
        check_eq!(hundred(1 | 1 << 32), (counted, counted), "thawed");
        pmu::reset();
    }
}

case! {
    name: "status_bits", cpl: [0], rules: ["PMU-18", "PMU-20", "PMU-24", "PEBS-11"], needs: [],
    about: "STATUS_SET and STATUS_RESET move exactly the bits that are written, with no interrupt",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, 0x7c00_0007_0000_000f);
        check_eq!(pmu::status(), 0x7c00_0007_0000_000f, "all set");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 0x4000_0002_0000_0001);
        check_eq!(pmu::status(), 0x3c00_0005_0000_000e, "three cleared");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 0);
        check_eq!(pmu::status(), 0x3c00_0005_0000_000e, "none cleared");
        check_eq!(pmu::pmi_state().taken, 0, "count of interrupts");
        pmu::mask_pmi();
        pmu::reset();
        check_eq!(pmu::status(), 0, "all cleared");
    }
}

case! {
    name: "in_use", cpl: [0], rules: ["PMU-21", "PMU-22", "PMU-23"], needs: [],
    about: "GLOBAL_INUSE follows selections, fixed controls and interrupts",
    fn body(ctx) {
        need_pmu!(ctx);
        let in_use = || msr::read(reg::IA32_PERF_GLOBAL_INUSE);
        check_eq!(in_use(), 0, "nothing");
        for n in 0..4_u32 {
            pmu::select(n, 0x3c, 0, 0);
            check_eq!(in_use(), 1 << n, "an event");
            pmu::select(n, 0, 0xff, ON);
            check_eq!(in_use(), 0, "a unit mask alone");
            pmu::select(n, 0, 0, pmu::INT);
            check_eq!(in_use(), 1 << 63, "INT");
            pmu::select(n, 0, 0, 0);
        }
        for i in 0..3 {
            for (field, expected) in [
                (FixedControl::OS, 1 << (32 + i)),
                (FixedControl::USR, 1 << (32 + i)),
                (FixedControl::PMI, 1 << 63),
                (FixedControl::ANY_THREAD, 0),
            ] {
                msr::write(reg::IA32_FIXED_CTR_CTRL, field << (4 * i));
                check_eq!(in_use(), expected, "a fixed counter");
            }
        }
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0);
        if pmu::has_pebs() {
            msr::write(reg::IA32_PEBS_ENABLE, 4);
            check_eq!(in_use(), 1 << 63, "PEBS");
        }
        pmu::reset();
    }
}

case! {
    name: "write_while_running", cpl: [0], rules: ["PMU-28"], needs: [],
    about: "a counter goes on from the value that is written while it runs",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON);
        counted!(1,
            ".rept 50", "nop", ".endr",
            "mov ecx, 0x4c1", "mov eax, 1000", "xor edx, edx", "wrmsr",
            ".rept 10", "nop", ".endr");
        // The WRMSR itself, ten NOPs, and three before the last WRMSR.
        check_eq!(pmu::get(0), 1000 + 1 + 10 + 3, "counted from 1000 on");
        pmu::reset();
    }
}

case! {
    name: "inverted_without_mask", cpl: [0], rules: ["PMU-30"], needs: [],
    about: "with CMASK 0, INV has no effect",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON | EventSelect::INVERT);
        check_eq!(hundred(1).0, 100 + OVERHEAD, "counted");
        pmu::reset();
    }
}

case! {
    name: "unknown_combinations", cpl: [0], rules: ["PMU-31", "EVT-09", "EVT-15"], needs: [],
    about: "other edges and masks, and other events, count nothing and are no error",
    fn body(ctx) {
        need_pmu!(ctx);
        for (event, umask, bits) in [
            (0xc0, 0, EventSelect::EDGE),
            (0xc0, 0, 1 << 24),
            (0xc4, 0, EventSelect::INVERT | 0x10 << 24),
            (0xb7, 1, 0),
            (0xbb, 1, 0),
            (0xff, 0xff, 0),
            (0x00, 0x00, 0),
        ] {
            pmu::select(0, event, umask, ON | bits);
            check_eq!(hundred(1).0, 0, "counted");
        }
        pmu::reset();
    }
}

case! {
    name: "misc_enable", cpl: [0], rules: ["PMU-26", "DS-13", "MSR-05"], needs: [],
    about: "IA32_MISC_ENABLE says that counters are there, whatever is written",
    fn body(ctx) {
        need_pmu!(ctx);
        let value = msr::read(reg::IA32_MISC_ENABLE);
        check!(value & 1 << 7 != 0, "performance monitoring available");
        check_eq!(msr::write_safe(reg::IA32_MISC_ENABLE, value & !(1 << 7)), Ok(()), "a write");
        check_eq!(msr::read(reg::IA32_MISC_ENABLE), value, "ignored");
        if pmu::has_pebs() {
            check_eq!(value & 1 << 12, 0, "PEBS_UNAVAILABLE");
        }
    }
}

//! The MSRs of branch recording: reset values, legal values, and values that raise #GP(0).

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_payloads::need_lbr;

payload!("branch_msrs");

/// Values of the MSRs `first` to `first + count - 1`.
struct MsrValues {
    first: u32,
    count: u32,
    /// Legal values.
    legal: &'static [u64],
    /// Values that raise #GP(0).
    illegal: &'static [u64],
}

/// The first and last canonical addresses of 48 bits.
const CANONICAL: &[u64] = &[0xffff_8000_0000_0000, u64::MAX, 0x7fff_ffff_ffff, 1, 0];
const NOT_CANONICAL: &[u64] = &[
    0x8000_0000_0000,
    0xffff_7fff_ffff_ffff,
    1 << 48,
    1 << 63,
    1 << 62,
    0x7fff_ffff_ffff_ffff,
];

const MSRS: &[MsrValues] = &[
    // MSR-06
    MsrValues {
        first: 0x1c8,
        count: 1,
        legal: &[0x3ff, 1, 0x200, 0],
        illegal: &[1 << 10, 1 << 31, 1 << 32, 1 << 63, 0x7ff],
    },
    // MSR-07
    MsrValues {
        first: 0x1c9,
        count: 1,
        legal: &[0x1f, 1, 0x10, 0],
        illegal: &[0x20, 0x3f, 1 << 31, 1 << 32, 1 << 63],
    },
    // MSR-09, MSR-10
    MsrValues {
        first: 0x1dd,
        count: 2,
        legal: CANONICAL,
        illegal: NOT_CANONICAL,
    },
    // MSR-23
    MsrValues {
        first: 0x600,
        count: 1,
        legal: CANONICAL,
        illegal: NOT_CANONICAL,
    },
    // MSR-24
    MsrValues {
        first: 0x680,
        count: 32,
        legal: CANONICAL,
        illegal: NOT_CANONICAL,
    },
    // MSR-25
    MsrValues {
        first: 0x6c0,
        count: 32,
        legal: CANONICAL,
        illegal: NOT_CANONICAL,
    },
    // MSR-36
    MsrValues {
        first: 0xdc0,
        count: 32,
        legal: &[0xe000_0000_0000_ffff, 1 << 61, 1 << 62, 1 << 63, 0xffff, 0],
        illegal: &[1 << 16, 1 << 60, 1 << 32, 0x1fff_ffff_ffff_0000, u64::MAX],
    },
];

/// Reports the MSR of a check that failed.
fn report_msr(passed: bool, index: u32) {
    if !passed {
        hindsight_guest::report::measurement("msr", u64::from(index));
    }
}

fn registers() -> impl Iterator<Item = (u32, &'static MsrValues)> {
    MSRS.iter()
        .flat_map(|row| (row.first..row.first + row.count).map(move |index| (index, row)))
        .filter(|&(index, _)| index != reg::IA32_DS_AREA || insn::has(Feature::DS))
}

case! {
    name: "reset_values", cpl: [0],
    rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-10", "MSR-23", "MSR-24", "MSR-25", "MSR-36", "RST-07", "RST-09"],
    needs: [],
    about: "all MSRs are 0 after RESET",
    fn body(ctx) {
        need_lbr!(ctx);
        for (index, _) in registers() {
            report_msr(check_eq!(msr::read_safe(index), Ok::<u64, MsrFault>(0), "value after RESET"), index);
        }
    }
}

case! {
    name: "legal_values", cpl: [0],
    rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-10", "MSR-23", "MSR-24", "MSR-25", "MSR-36", "LBR-25", "LER-06"],
    needs: [],
    about: "legal values read back unchanged",
    fn body(ctx) {
        need_lbr!(ctx);
        for (index, row) in registers() {
            for &value in row.legal {
                report_msr(check_eq!(msr::write_safe(index, value), Ok::<(), MsrFault>(()), "write"), index);
                report_msr(check_eq!(msr::read_safe(index), Ok::<u64, MsrFault>(value), "value read back"), index);
            }
        }
    }
}

case! {
    name: "refused_values", cpl: [0],
    rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-10", "MSR-23", "MSR-24", "MSR-25", "MSR-36", "LBR-26", "LBR-27",
        "LBR-28", "LSEL-07", "DS-03", "OP-31"],
    needs: [],
    about: "reserved bits and non-canonical values raise #GP(0) and change nothing",
    fn body(ctx) {
        need_lbr!(ctx);
        for (index, row) in registers() {
            msr::write(index, row.legal[0]);
            for &value in row.illegal {
                report_msr(check_eq!(msr::write_safe(index, value), Err(GP), "write"), index);
            }
            report_msr(check_eq!(msr::read_safe(index), Ok::<u64, MsrFault>(row.legal[0]), "value after the writes"), index);
            msr::write(index, 0);
        }
    }
}

/// MSRs next to the entries, and MSRs of other models; 6E0H is left out, which is the TSC deadline.
const ABSENT: &[(u32, u32)] = &[
    (0x40, 0x47),
    (0x60, 0x67),
    (0x1ce, 0x1cf),
    (0x14ce, 0x14ce),
    (0x1db, 0x1dc),
    (0x6a0, 0x6af),
    (0x6e1, 0x6ef),
    (0xde0, 0xdef),
    (0x560, 0x561),
    (0x570, 0x572),
    (0x580, 0x587),
];

case! {
    name: "absent", cpl: [0], rules: ["MSR-39", "LBR-29", "LBR-30"], needs: [],
    about: "entries beyond 31, P6's last-branch registers and those of other models raise #GP(0)",
    fn body(ctx) {
        need_lbr!(ctx);
        for index in ABSENT.iter().flat_map(|&(first, last)| first..=last) {
            report_msr(check_eq!(msr::read_safe(index), Err(GP), "RDMSR"), index);
            report_msr(check_eq!(msr::write_safe(index, 0), Err(GP), "WRMSR"), index);
        }
        if insn::has(Feature::TSC_DEADLINE) {
            check!(msr::read_safe(reg::IA32_TSC_DEADLINE).is_ok(), "6E0H is IA32_TSC_DEADLINE");
        }
    }
}

case! {
    name: "user_access", cpl: [3], rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-23", "MSR-24", "MSR-25", "MSR-36"],
    needs: [],
    about: "at CPL 3 every access raises #GP(0)",
    fn body(ctx) {
        need_lbr!(ctx);
        for row in MSRS {
            let index = row.first;
            let fault = ctx.run(|| { msr::read(index); });
            report_msr(check_eq!(fault.map(|e| e.code()), Some(GP), "RDMSR"), index);
            let fault = ctx.run(|| msr::write(index, 0));
            report_msr(check_eq!(fault.map(|e| e.code()), Some(GP), "WRMSR"), index);
        }
    }
}

case! {
    name: "capabilities", cpl: [0], rules: ["PCAP-01", "PCAP-02", "PCAP-03", "PCAP-04", "MSR-12", "LBR-01", "SMF-01"],
    needs: [],
    about: "IA32_PERF_CAPABILITIES reports branch recording and is read-only",
    fn body(ctx) {
        need_lbr!(ctx);
        let value = msr::read(reg::IA32_PERF_CAPABILITIES);
        check_eq!(value & 0x3f, 5, "LBR format");
        // With PEBS the whole value is known; a profile without PEBS clears its fields.
        if insn::has(Feature::DS) && msr::read(reg::IA32_MISC_ENABLE) & (1 << 12) == 0 {
            check_eq!(value, 0x33c5, "IA32_PERF_CAPABILITIES");
        } else {
            check_eq!(value & 0xfc0, 0, "fields of PEBS");
        }
        for written in [0, value, u64::MAX] {
            check_eq!(msr::write_safe(reg::IA32_PERF_CAPABILITIES, written), Err(GP), "write");
        }
    }
}

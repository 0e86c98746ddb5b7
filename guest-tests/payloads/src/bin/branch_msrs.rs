//! The MSRs of branch recording, by the table: reset value, what may be written, what is refused.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_payloads::need_lbr;

payload!("branch_msrs");

/// Registers `first` to `first + count - 1`.
struct Row {
    first: u32,
    count: u32,
    /// Legal values.
    stored: &'static [u64],
    /// Values that raise #GP(0).
    refused: &'static [u64],
}

/// The edges of the canonical addresses of 48 bits.
const CANONICAL: &[u64] = &[0xffff_8000_0000_0000, u64::MAX, 0x7fff_ffff_ffff, 1, 0];
const NOT_CANONICAL: &[u64] = &[
    0x8000_0000_0000,
    0xffff_7fff_ffff_ffff,
    1 << 48,
    1 << 63,
    1 << 62,
    0x7fff_ffff_ffff_ffff,
];

const ROWS: &[Row] = &[
    // MSR-06
    Row {
        first: 0x1c8,
        count: 1,
        stored: &[0x3ff, 1, 0x200, 0],
        refused: &[1 << 10, 1 << 31, 1 << 32, 1 << 63, 0x7ff],
    },
    // MSR-07
    Row {
        first: 0x1c9,
        count: 1,
        stored: &[0x1f, 1, 0x10, 0],
        refused: &[0x20, 0x3f, 1 << 31, 1 << 32, 1 << 63],
    },
    // MSR-09, MSR-10
    Row {
        first: 0x1dd,
        count: 2,
        stored: CANONICAL,
        refused: NOT_CANONICAL,
    },
    // MSR-23
    Row {
        first: 0x600,
        count: 1,
        stored: CANONICAL,
        refused: NOT_CANONICAL,
    },
    // MSR-24
    Row {
        first: 0x680,
        count: 32,
        stored: CANONICAL,
        refused: NOT_CANONICAL,
    },
    // MSR-25
    Row {
        first: 0x6c0,
        count: 32,
        stored: CANONICAL,
        refused: NOT_CANONICAL,
    },
    // MSR-36
    Row {
        first: 0xdc0,
        count: 32,
        stored: &[0xe000_0000_0000_ffff, 1 << 61, 1 << 62, 1 << 63, 0xffff, 0],
        refused: &[1 << 16, 1 << 60, 1 << 32, 0x1fff_ffff_ffff_0000, u64::MAX],
    },
];

/// Says which register the failures before it are about.
fn name(good: bool, index: u32) {
    if !good {
        hindsight_guest::report::measurement("msr", u64::from(index));
    }
}

fn registers() -> impl Iterator<Item = (u32, &'static Row)> {
    ROWS.iter()
        .flat_map(|row| (row.first..row.first + row.count).map(move |index| (index, row)))
        .filter(|&(index, _)| index != reg::IA32_DS_AREA || insn::has(Feature::DS))
}

case! {
    name: "reset_values", cpl: [0],
    rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-10", "MSR-23", "MSR-24", "MSR-25", "MSR-36", "RST-07", "RST-09"],
    needs: [],
    about: "all are 0 after RESET",
    fn body(ctx) {
        need_lbr!(ctx);
        for (index, _) in registers() {
            name(check_eq!(msr::read_safe(index), Ok::<u64, MsrFault>(0), "after reset"), index);
        }
    }
}

case! {
    name: "legal_values", cpl: [0],
    rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-10", "MSR-23", "MSR-24", "MSR-25", "MSR-36", "LBR-25", "LER-06"],
    needs: [],
    about: "legal values are kept as they are",
    fn body(ctx) {
        need_lbr!(ctx);
        for (index, row) in registers() {
            for &value in row.stored {
                name(check_eq!(msr::write_safe(index, value), Ok::<(), MsrFault>(()), "the write"), index);
                name(check_eq!(msr::read_safe(index), Ok::<u64, MsrFault>(value), "read back"), index);
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
            msr::write(index, row.stored[0]);
            for &value in row.refused {
                name(check_eq!(msr::write_safe(index, value), Err(GP), "the write"), index);
            }
            name(check_eq!(msr::read_safe(index), Ok::<u64, MsrFault>(row.stored[0]), "the value after that"), index);
            msr::write(index, 0);
        }
    }
}

/// What is beside the entries and in the places of other models' registers. Of these only the deadline
/// register, 6E0H, exists.
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
            name(check_eq!(msr::read_safe(index), Err(GP), "RDMSR"), index);
            name(check_eq!(msr::write_safe(index, 0), Err(GP), "WRMSR"), index);
        }
        if insn::has(Feature::TSC_DEADLINE) {
            check!(msr::read_safe(reg::IA32_TSC_DEADLINE).is_ok(), "6E0H is the deadline register");
        }
    }
}

case! {
    name: "user_access", cpl: [3], rules: ["MSR-06", "MSR-07", "MSR-09", "MSR-23", "MSR-24", "MSR-25", "MSR-36"],
    needs: [],
    about: "at CPL 3 every access raises #GP(0)",
    fn body(ctx) {
        need_lbr!(ctx);
        for row in ROWS {
            let index = row.first;
            let fault = ctx.run(|| { msr::read(index); });
            name(check_eq!(fault.map(|e| e.code()), Some(GP), "RDMSR"), index);
            let fault = ctx.run(|| msr::write(index, 0));
            name(check_eq!(fault.map(|e| e.code()), Some(GP), "WRMSR"), index);
        }
    }
}

case! {
    name: "capabilities", cpl: [0], rules: ["PCAP-01", "PCAP-02", "PCAP-03", "PCAP-04", "MSR-12", "LBR-01", "SMF-01"],
    needs: [],
    about: "IA32_PERF_CAPABILITIES: the fields of branch recording, read-only",
    fn body(ctx) {
        need_lbr!(ctx);
        let value = msr::read(reg::IA32_PERF_CAPABILITIES);
        check_eq!(value & 0x3f, 5, "LBR format");
        // The whole value where PEBS is there too; less where a profile lacks some of it.
        if insn::has(Feature::DS) && msr::read(reg::IA32_MISC_ENABLE) & (1 << 12) == 0 {
            check_eq!(value, 0x33c5, "IA32_PERF_CAPABILITIES");
        } else {
            check_eq!(value & 0xfc0, 0, "the fields of PEBS");
        }
        for written in [0, value, u64::MAX] {
            check_eq!(msr::write_safe(reg::IA32_PERF_CAPABILITIES, written), Err(GP), "a write");
        }
    }
}

//! Model-specific registers: values after reset, reserved bits, absent registers, privilege.

#![no_std]
#![no_main]

use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::{insn, report};

payload!("msr");

/// What the specification says of one register.
struct Row {
    index: u32,
    /// Announces the register; without it every access faults.
    feature: Option<Feature>,
    /// Value after reset, and the bits of it that are compared.
    reset: Option<(u64, u64)>,
    /// Values that must be refused and change nothing.
    refused: &'static [u64],
    /// Values that must be stored as they are.
    stored: &'static [u64],
    /// Bits that writes leave alone.
    read_only: u64,
}

const ALL: u64 = u64::MAX;

const ROWS: &[Row] = &[
    // MSR-02, ADJ-01, ADJ-07
    Row {
        index: reg::IA32_TSC_ADJUST,
        feature: Some(Feature::TSC_ADJUST),
        reset: Some((0, ALL)),
        refused: &[],
        stored: &[],
        read_only: 0,
    },
    // MSR-38, TAX-03, TAX-05
    Row {
        index: reg::IA32_TSC_AUX,
        feature: Some(Feature::RDTSCP),
        reset: Some((0, ALL)),
        refused: &[1 << 32, 1 << 63, 0x1_0000_0001],
        stored: &[0xffff_ffff, 0x1234_5678, 0],
        read_only: 0,
    },
    // MSR-26, TDL-10; outside deadline mode a write is ignored (TDL-05)
    Row {
        index: reg::IA32_TSC_DEADLINE,
        feature: Some(Feature::TSC_DEADLINE),
        reset: Some((0, ALL)),
        refused: &[],
        stored: &[0],
        read_only: 0,
    },
    // The base at FEE00000H, enabled, bootstrap processor
    Row {
        index: reg::IA32_APIC_BASE,
        feature: Some(Feature::APIC),
        reset: Some((0xfee0_0900, ALL)),
        refused: &[0xfee0_0901, 0x4000_0000_fee0_0900, 0xfee0_0b00],
        stored: &[0xfee0_0900],
        read_only: 0,
    },
    // MSR-05
    Row {
        index: reg::IA32_MISC_ENABLE,
        feature: None,
        reset: Some((0x5_0009, 0x4_0045_0009)),
        refused: &[0x5_000b, 1 << 63, 1 << 1],
        stored: &[0x45_0009, 0x5_0009],
        read_only: 1 << 7 | 1 << 11 | 1 << 12,
    },
    // MSR-08: bits 5:2 and 63:16 in every profile
    Row {
        index: reg::IA32_DEBUGCTL,
        feature: None,
        reset: Some((0, ALL)),
        refused: &[1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 16, 1 << 63],
        stored: &[0],
        read_only: 0,
    },
    // MSR-37
    Row {
        index: reg::IA32_FMASK,
        feature: None,
        reset: Some((0, ALL)),
        refused: &[1 << 32, ALL],
        stored: &[0x4_7700, 0xffff_ffff, 0],
        read_only: 0,
    },
    // MSR-12
    Row {
        index: reg::IA32_PERF_CAPABILITIES,
        feature: Some(Feature::PDCM),
        reset: None,
        refused: &[0, 1, 0x33c5],
        stored: &[],
        read_only: 0,
    },
    // MSR-42, MSR-43, MSR-44
    Row {
        index: reg::IA32_PLATFORM_ID,
        feature: None,
        reset: Some((0, ALL)),
        refused: &[0, 1],
        stored: &[],
        read_only: 0,
    },
    Row {
        index: reg::MSR_PLATFORM_INFO,
        feature: None,
        reset: None,
        refused: &[0, 1],
        stored: &[],
        read_only: 0,
    },
    Row {
        index: reg::MSR_SMI_COUNT,
        feature: None,
        reset: Some((0, ALL)),
        refused: &[0, 1],
        stored: &[],
        read_only: 0,
    },
];

fn present(row: &Row) -> bool {
    row.feature.is_none_or(insn::has)
}

/// Says which register the failures before it are about.
fn name(failed: bool, index: u32) {
    if failed {
        report::measurement("msr", u64::from(index));
    }
}

case! {
    name: "reset_values", cpl: [0],
    rules: ["MSR-02", "MSR-05", "MSR-08", "MSR-26", "MSR-37", "MSR-38", "MSR-42", "MSR-44", "ADJ-01",
        "TAX-05", "TDL-10"],
    needs: ["msr-exit"],
    about: "the values after reset",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "firmware ran before");
        }
        for row in ROWS {
            let Some((value, mask)) = row.reset else { continue };
            if present(row) {
                let found = msr::read_safe(row.index).map(|found| found & mask);
                name(!check_eq!(found, Ok::<u64, MsrFault>(value & mask), "value after reset"), row.index);
            }
        }
    }
}

case! {
    name: "reserved_bits", cpl: [0],
    rules: ["MSR-05", "MSR-08", "MSR-12", "MSR-37", "MSR-38", "MSR-42", "MSR-43", "MSR-44", "TAX-03"],
    needs: ["msr-exit"],
    about: "a write with a reserved bit raises #GP(0) and changes nothing",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG takes most values");
        }
        for row in ROWS.iter().filter(|row| present(row)) {
            let before = msr::read_safe(row.index);
            for &value in row.refused {
                let answer = msr::write_safe(row.index, value);
                name(!check_eq!(answer, Err(GP), "the write"), row.index);
                let after = msr::read_safe(row.index);
                name(!check_eq!(after, before, "value after the refused write"), row.index);
            }
        }
    }
}

case! {
    name: "writable_bits", cpl: [0], rules: ["MSR-05", "MSR-08", "MSR-37", "MSR-38"],
    needs: ["msr-exit"],
    about: "legal values are stored as they are",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stores other bits");
        }
        for row in ROWS.iter().filter(|row| present(row)) {
            let before = msr::read_safe(row.index);
            for &value in row.stored {
                let answer = msr::write_safe(row.index, value);
                name(!check_eq!(answer, Ok::<(), MsrFault>(()), "the write"), row.index);
                let after = msr::read_safe(row.index).map(|after| after & !row.read_only);
                name(!check_eq!(after, Ok::<u64, MsrFault>(value), "value read back"), row.index);
            }
            if let Ok(before) = before {
                // The last of a row's values is one that may stay; a read-only row refuses this.
                let _ = msr::write_safe(row.index, before);
            }
        }
    }
}

case! {
    name: "misc_enable_read_only_bits", cpl: [0], rules: ["MSR-05"], needs: ["msr-exit"],
    about: "writes to bits 7, 11 and 12 of IA32_MISC_ENABLE are ignored",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stores all bits");
        }
        const READ_ONLY: u64 = 1 << 7 | 1 << 11 | 1 << 12;
        let before = msr::read(reg::IA32_MISC_ENABLE);
        let answer = msr::write_safe(reg::IA32_MISC_ENABLE, before ^ READ_ONLY);
        check_eq!(answer, Ok::<(), MsrFault>(()), "the write");
        check_eq!(msr::read(reg::IA32_MISC_ENABLE), before, "the value");
        if insn::has(Feature::DS) {
            check_eq!(before & (1 << 11), 0, "BTS_UNAVAILABLE");
        } else {
            check_eq!(before & (1 << 11), 1 << 11, "BTS_UNAVAILABLE");
        }
    }
}

/// Runs of registers that no profile has: MSR-39, MSR-45, MSR-46 and MSR-48.
const ABSENT: &[(u32, u32)] = &[
    (0x40, 0x47),
    (0x60, 0x67),
    (0x1ce, 0x1cf),
    (0x14ce, 0x14ce),
    (0x1db, 0x1dc),
    (0xc5, 0xc8),
    (0x18a, 0x18d),
    (0x4c5, 0x4c8),
    (0x30c, 0x30c),
    (0x6a0, 0x6af),
    (0x6e1, 0x6ef),
    (0xde0, 0xdef),
    (0x560, 0x561),
    (0x570, 0x572),
    (0x580, 0x587),
    (0x1a2, 0x1a2),
    (0x1ad, 0x1ad),
    (0x1b0, 0x1b0),
    (0x1aa, 0x1aa),
    (0x35, 0x35),
    (0x4e, 0x4f),
    (0x3fc, 0x3fe),
    (0x60d, 0x60d),
    (0x606, 0x641),
    (0x64e, 0x64e),
    (0x140, 0x140),
];

fn check_absent(index: u32) {
    name(
        !check_eq!(
            msr::read_safe(index),
            Err(GP),
            "RDMSR of an absent register"
        ),
        index,
    );
    name(
        !check_eq!(
            msr::write_safe(index, 0),
            Err(GP),
            "WRMSR of an absent register"
        ),
        index,
    );
}

case! {
    name: "absent", cpl: [0], rules: ["MSR-39", "MSR-48"], needs: ["msr-exit"], timeout_ms: 4000,
    about: "registers that this processor does not have raise #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG answers them");
        }
        for &(first, last) in ABSENT {
            (first..=last).for_each(check_absent);
        }
    }
}

case! {
    name: "absent_by_cpuid", cpl: [0], rules: ["MSR-45", "MSR-46", "TAX-01"], needs: ["msr-exit", "cpuid"],
    about: "registers whose CPUID bit is clear raise #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG answers them");
        }
        let by_feature = [
            (Feature::APERFMPERF, 0xe7),
            (Feature::APERFMPERF, 0xe8),
            (Feature::SDBG, 0xc80),
            (Feature::RDTSCP, reg::IA32_TSC_AUX),
            (Feature::TSC_ADJUST, reg::IA32_TSC_ADJUST),
            (Feature::PDCM, reg::IA32_PERF_CAPABILITIES),
            (Feature::DS, reg::IA32_DS_AREA),
            (Feature::RDT_M, reg::IA32_QM_EVTSEL),
            (Feature::RDT_A, reg::IA32_L3_QOS_MASK_0),
            (Feature::ARCH_CAPABILITIES, reg::IA32_ARCH_CAPABILITIES),
        ];
        for (feature, index) in by_feature {
            if !insn::has(feature) {
                check_absent(index);
            }
        }
    }
}

case! {
    name: "absent_deadline", cpl: [0], rules: ["MSR-26"], needs: ["msr-exit", "cpuid", "tsc-deadline-exit"],
    about: "IA32_TSC_DEADLINE without its CPUID bit raises #GP(0); some KVMs swallow the write",
    fn body(_ctx) {
        if !insn::has(Feature::TSC_DEADLINE) {
            check_absent(reg::IA32_TSC_DEADLINE);
        }
    }
}

case! {
    name: "unassigned", cpl: [0], rules: ["MSR-49"], needs: ["msr-exit"],
    about: "addresses that no manual assigns raise #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG answers them");
        }
        for index in [0x2, 0x5, 0x1fff, 0x1234_5678, 0x4000_0000, 0xbfff_ffff, 0xc000_0200, u32::MAX] {
            check_absent(index);
        }
    }
}

case! {
    name: "microcode_revision", cpl: [0], rules: ["MSR-41"], needs: ["msr-exit"],
    about: "IA32_BIOS_SIGN_ID takes a write of 0 and has a revision of at least 02000014H",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "the revision is of the model Skylake");
        }
        check_eq!(msr::write_safe(reg::IA32_BIOS_SIGN_ID, 0), Ok::<(), MsrFault>(()), "a write of 0");
        let revision = msr::read_safe(reg::IA32_BIOS_SIGN_ID).unwrap_or(0) >> 32;
        check!(revision >= 0x0200_0014, "the revision is new enough");
    }
}

case! {
    name: "user_access", cpl: [3], rules: ["MSR-01", "MSR-02", "MSR-37"], needs: ["exceptions", "iretq-cpl3"],
    about: "RDMSR and WRMSR at CPL 3 raise #GP(0), also for registers that exist",
    fn body(ctx) {
        for index in [reg::IA32_TIME_STAMP_COUNTER, reg::IA32_FMASK, reg::IA32_DEBUGCTL, 0x1234_5678] {
            let fault = ctx.run(|| { msr::read(index); });
            name(!check_eq!(fault.map(|e| e.code()), Some(GP), "RDMSR"), index);
            let fault = ctx.run(|| msr::write(index, 0));
            name(!check_eq!(fault.map(|e| e.code()), Some(GP), "WRMSR"), index);
        }
    }
}

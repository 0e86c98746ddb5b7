//! Model-specific registers: values after reset, reserved bits, absent registers, privilege.

#![no_std]
#![no_main]

use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::{insn, report};

payload!("msr");

/// The behaviour of one register that the specification defines.
struct MsrExpectation {
    index: u32,
    /// The CPUID bit of the register; without it every access faults.
    feature: Option<Feature>,
    /// The value after reset, and a mask of the bits that the case compares.
    reset: Option<(u64, u64)>,
    /// Values whose write must raise #GP(0) and change nothing.
    illegal: &'static [u64],
    /// Values that a write must store unchanged.
    legal: &'static [u64],
    /// Bits that writes do not change.
    read_only: u64,
}

const ALL: u64 = u64::MAX;

const EXPECTATIONS: &[MsrExpectation] = &[
    // MSR-02, ADJ-01, ADJ-07
    MsrExpectation {
        index: reg::IA32_TSC_ADJUST,
        feature: Some(Feature::TSC_ADJUST),
        reset: Some((0, ALL)),
        illegal: &[],
        legal: &[],
        read_only: 0,
    },
    // MSR-38, TAX-03, TAX-05
    MsrExpectation {
        index: reg::IA32_TSC_AUX,
        feature: Some(Feature::RDTSCP),
        reset: Some((0, ALL)),
        illegal: &[1 << 32, 1 << 63, 0x1_0000_0001],
        legal: &[0xffff_ffff, 0x1234_5678, 0],
        read_only: 0,
    },
    // MSR-26, TDL-10; outside deadline mode a write is ignored (TDL-05)
    MsrExpectation {
        index: reg::IA32_TSC_DEADLINE,
        feature: Some(Feature::TSC_DEADLINE),
        reset: Some((0, ALL)),
        illegal: &[],
        legal: &[0],
        read_only: 0,
    },
    // The base at FEE00000H, enabled, bootstrap processor
    MsrExpectation {
        index: reg::IA32_APIC_BASE,
        feature: Some(Feature::APIC),
        reset: Some((0xfee0_0900, ALL)),
        illegal: &[0xfee0_0901, 0x4000_0000_fee0_0900, 0xfee0_0b00],
        legal: &[0xfee0_0900],
        read_only: 0,
    },
    // MSR-05
    MsrExpectation {
        index: reg::IA32_MISC_ENABLE,
        feature: None,
        reset: Some((0x9, 0x4_0045_0009)),
        illegal: &[
            0xb,
            1 << 63,
            1 << 1,
            0x9 | 1 << 16,
            0x9 | 1 << 18,
            0x9 | 1 << 22,
            0x9 | 1 << 34,
            0x9 | 1 << 38,
        ],
        legal: &[0x1, 0x9],
        read_only: 1 << 7 | 1 << 11 | 1 << 12,
    },
    // MSR-08: bits 5:2 and 63:16 in every profile
    MsrExpectation {
        index: reg::IA32_DEBUGCTL,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 16, 1 << 63],
        legal: &[0],
        read_only: 0,
    },
    // MSR-37
    MsrExpectation {
        index: reg::IA32_FMASK,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[1 << 32, ALL],
        legal: &[0x4_7700, 0xffff_ffff, 0],
        read_only: 0,
    },
    // MSR-12
    MsrExpectation {
        index: reg::IA32_PERF_CAPABILITIES,
        feature: Some(Feature::PDCM),
        reset: None,
        illegal: &[0, 1, 0x33c5],
        legal: &[],
        read_only: 0,
    },
    // MSR-50
    MsrExpectation {
        index: reg::IA32_MTRR_PHYSBASE0 + 2,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[2, 3, 7, 0xff, 0x106, 0x806, 1 << 52, 1 << 63],
        legal: &[6, 0x1234_5000, 0x1234_5004, 0],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::IA32_MTRR_PHYSBASE0 + 3,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[1, 0x400, 1 << 52, 1 << 63],
        legal: &[0x800, 0xf_fff0_0000, 0],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::IA32_MTRR_FIX64K_00000,
        feature: None,
        reset: Some((0x0606_0606_0606_0606, ALL)),
        illegal: &[2, 0x0606_0606_0706_0606, 0xff00_0000_0000_0000],
        legal: &[0x0605_0401_0006_0504],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::IA32_MTRR_DEF_TYPE,
        feature: None,
        reset: Some((0xc06, ALL)),
        illegal: &[2, 7, 0xcff, 0x1c06, 0xd06, 1 << 63],
        legal: &[0x806, 0xc00, 0xc06],
        read_only: 0,
    },
    // MSR-51
    MsrExpectation {
        index: reg::IA32_FEATURE_CONTROL,
        feature: None,
        reset: Some((1, ALL)),
        illegal: &[0, 1, 5],
        legal: &[],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::MSR_MISC_FEATURES_ENABLES,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[1, 2, 1 << 63],
        legal: &[0],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::IA32_THERM_STATUS,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[1, 1 << 63],
        legal: &[0],
        read_only: 0,
    },
    // MSR-52
    MsrExpectation {
        index: reg::IA32_SPEC_CTRL,
        feature: Some(Feature::SPEC_CTRL),
        reset: Some((0, ALL)),
        illegal: &[8, 1 << 63],
        legal: &[7, 1, 0],
        read_only: 0,
    },
    // MSR-42, MSR-43, MSR-44
    MsrExpectation {
        index: reg::IA32_PLATFORM_ID,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[0, 1],
        legal: &[],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::MSR_PLATFORM_INFO,
        feature: None,
        reset: None,
        illegal: &[0, 1],
        legal: &[],
        read_only: 0,
    },
    MsrExpectation {
        index: reg::MSR_SMI_COUNT,
        feature: None,
        reset: Some((0, ALL)),
        illegal: &[0, 1],
        legal: &[],
        read_only: 0,
    },
];

fn is_present(msr: &MsrExpectation) -> bool {
    msr.feature.is_none_or(insn::has)
}

/// Reports the register after a check of it failed.
fn report_msr(failed: bool, index: u32) {
    if failed {
        report::measurement("msr", u64::from(index));
    }
}

case! {
    name: "reset_values", cpl: [0],
    rules: ["MSR-02", "MSR-05", "MSR-08", "MSR-26", "MSR-37", "MSR-38", "MSR-42", "MSR-44", "MSR-50",
        "MSR-51", "MSR-52", "ADJ-01", "TAX-05", "TDL-10"],
    needs: ["msr-exit"],
    about: "the values after reset",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "firmware ran before");
        }
        for expectation in EXPECTATIONS.iter().filter(|msr| is_present(msr)) {
            let Some((value, mask)) = expectation.reset else { continue };
            let index = expectation.index;
            let actual = msr::read_safe(index).map(|actual| actual & mask);
            let expected = Ok::<u64, MsrFault>(value & mask);
            report_msr(!check_eq!(actual, expected, "value after reset"), index);
        }
    }
}

case! {
    name: "reserved_bits", cpl: [0],
    rules: ["MSR-05", "MSR-08", "MSR-12", "MSR-37", "MSR-38", "MSR-42", "MSR-43", "MSR-44", "MSR-50",
        "MSR-51", "MSR-52", "TAX-03"],
    needs: ["msr-exit"],
    about: "a write with a reserved bit raises #GP(0) and changes nothing",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG accepts most values");
        }
        for expectation in EXPECTATIONS.iter().filter(|msr| is_present(msr)) {
            let index = expectation.index;
            let before = msr::read_safe(index);
            for &value in expectation.illegal {
                let written = msr::write_safe(index, value);
                report_msr(!check_eq!(written, Err(GP), "exception of the write"), index);
                let after = msr::read_safe(index);
                report_msr(!check_eq!(after, before, "value after the write"), index);
            }
        }
    }
}

case! {
    name: "writable_bits", cpl: [0], rules: ["MSR-05", "MSR-08", "MSR-37", "MSR-38", "MSR-50", "MSR-52"],
    needs: ["msr-exit"],
    about: "a write stores a legal value unchanged",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stores other bits");
        }
        for expectation in EXPECTATIONS.iter().filter(|msr| is_present(msr)) {
            let index = expectation.index;
            let before = msr::read_safe(index);
            for &value in expectation.legal {
                let written = msr::write_safe(index, value);
                let succeeded = Ok::<(), MsrFault>(());
                report_msr(!check_eq!(written, succeeded, "exception of the write"), index);
                let after = msr::read_safe(index).map(|after| after & !expectation.read_only);
                let expected = Ok::<u64, MsrFault>(value);
                report_msr(!check_eq!(after, expected, "value read back"), index);
            }
            if let Ok(before) = before {
                // Fails for read-only registers, where there is nothing to restore.
                let _ = msr::write_safe(index, before);
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
        let written = msr::write_safe(reg::IA32_MISC_ENABLE, before ^ READ_ONLY);
        check_eq!(written, Ok::<(), MsrFault>(()), "exception of the write");
        check_eq!(msr::read(reg::IA32_MISC_ENABLE), before, "value after the write");
        check_eq!(before & (1 << 11) != 0, !insn::has(Feature::DS), "BTS_UNAVAILABLE");
    }
}

/// Ranges of registers that no profile has: MSR-39, MSR-45, MSR-46 and MSR-48.
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
    (0x1b0, 0x1b0),
    (0x35, 0x35),
    (0x4f, 0x4f),
    (0x606, 0x60c),
    (0x60e, 0x641),
    (0x64e, 0x64e),
];

fn check_absent(index: u32) {
    let read = msr::read_safe(index);
    report_msr(
        !check_eq!(read, Err(GP), "RDMSR of an absent register"),
        index,
    );
    let written = msr::write_safe(index, 0);
    report_msr(
        !check_eq!(written, Err(GP), "WRMSR of an absent register"),
        index,
    );
}

case! {
    name: "absent", cpl: [0], rules: ["MSR-39", "MSR-48"], needs: ["msr-exit"], timeout_ms: 4000,
    about: "an access to a register that no modelled processor has raises #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG implements some of them");
        }
        for &(first, last) in ABSENT {
            (first..=last).for_each(check_absent);
        }
    }
}

case! {
    name: "absent_by_cpuid", cpl: [0], rules: ["MSR-45", "MSR-46", "TAX-01"], needs: ["msr-exit", "cpuid"],
    about: "an access to a register whose CPUID bit is clear raises #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG implements some of them");
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
            (Feature::SPEC_CTRL, reg::IA32_SPEC_CTRL),
            (Feature::SPEC_CTRL, reg::IA32_PRED_CMD),
            (Feature::L1D_FLUSH, reg::IA32_FLUSH_CMD),
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
    about: "an access to IA32_TSC_DEADLINE without its CPUID bit raises #GP(0); some versions of \
        KVM ignore the write",
    fn body(_ctx) {
        if !insn::has(Feature::TSC_DEADLINE) {
            check_absent(reg::IA32_TSC_DEADLINE);
        }
    }
}

case! {
    name: "unassigned", cpl: [0], rules: ["MSR-49"], needs: ["msr-exit"],
    about: "an access to an MSR number that no manual assigns raises #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG implements some of them");
        }
        let unassigned = [
            0x2, 0x5, 0x1fff, 0x1234_5678, 0x4000_0000, 0xbfff_ffff, 0xc000_0200, u32::MAX,
        ];
        unassigned.into_iter().for_each(check_absent);
    }
}

case! {
    name: "microcode_revision", cpl: [0], rules: ["MSR-41"], needs: ["msr-exit"],
    about: "IA32_BIOS_SIGN_ID accepts a write of 0 and reports a revision of at least 02000014H",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG reports another revision");
        }
        let written = msr::write_safe(reg::IA32_BIOS_SIGN_ID, 0);
        check_eq!(written, Ok::<(), MsrFault>(()), "exception of a write of 0");
        let revision = msr::read_safe(reg::IA32_BIOS_SIGN_ID).unwrap_or(0) >> 32;
        check!(revision >= 0x0200_0014, "revision");
    }
}

case! {
    name: "user_access", cpl: [3], rules: ["MSR-01", "MSR-02", "MSR-37"], needs: ["exceptions", "iretq-cpl3"],
    about: "RDMSR and WRMSR at CPL 3 raise #GP(0), for existing and absent registers",
    fn body(ctx) {
        let existing = [reg::IA32_TIME_STAMP_COUNTER, reg::IA32_FMASK, reg::IA32_DEBUGCTL];
        for index in existing.into_iter().chain([0x1234_5678]) {
            let fault = ctx.run(|| { msr::read(index); });
            report_msr(!check_eq!(fault.map(|e| e.code()), Some(GP), "RDMSR"), index);
            let fault = ctx.run(|| msr::write(index, 0));
            report_msr(!check_eq!(fault.map(|e| e.code()), Some(GP), "WRMSR"), index);
        }
    }
}

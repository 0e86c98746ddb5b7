//! MSRs that are shown as registers.

use hindsight_regs::msr;

/// An MSR that is shown as a register where the machine has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrRegister {
    /// The MSR's index.
    pub index: u32,
    /// The name under which the client shows the MSR.
    pub name: String,
    /// The register's type in the target description.
    pub(super) kind: &'static str,
}

const SINGLE: [(u32, &str, &str); 17] = [
    (msr::IA32_DEBUGCTL, "debugctl", "hs_debugctl"),
    (msr::MSR_LBR_SELECT, "lbr_select", "hs_lbr_select"),
    (msr::MSR_LASTBRANCH_TOS, "lbr_tos", "uint64"),
    (msr::MSR_LER_FROM_LIP, "ler_from", "code_ptr"),
    (msr::MSR_LER_TO_LIP, "ler_to", "code_ptr"),
    (msr::IA32_DS_AREA, "ds_area", "data_ptr"),
    (
        msr::IA32_PERF_GLOBAL_CTRL,
        "perf_global_ctrl",
        "hs_perf_global",
    ),
    (
        msr::IA32_PERF_GLOBAL_STATUS,
        "perf_global_status",
        "hs_perf_global",
    ),
    (msr::IA32_FIXED_CTR_CTRL, "fixed_ctr_ctrl", "uint64"),
    (msr::IA32_PEBS_ENABLE, "pebs_enable", "uint64"),
    (msr::IA32_PERF_CAPABILITIES, "perf_capabilities", "uint64"),
    (msr::IA32_TIME_STAMP_COUNTER, "tsc", "uint64"),
    (msr::IA32_TSC_ADJUST, "tsc_adjust", "int64"),
    (msr::IA32_TSC_AUX, "tsc_aux", "uint64"),
    (msr::IA32_TSC_DEADLINE, "tsc_deadline", "uint64"),
    (msr::IA32_APIC_BASE, "apic_base", "uint64"),
    (msr::IA32_MISC_ENABLE, "misc_enable", "uint64"),
];

/// First index, count, and what the names begin with.
const NUMBERED: [(u32, u32, &str, &str); 6] = [
    (msr::IA32_PMC0, 8, "pmc", "uint64"),
    (msr::IA32_PERFEVTSEL0, 8, "perfevtsel", "hs_perfevtsel"),
    (msr::IA32_FIXED_CTR0, 3, "fixed_ctr", "uint64"),
    (msr::MSR_LASTBRANCH_0_FROM_IP, 32, "lbr_from", "uint64"),
    (msr::MSR_LASTBRANCH_0_TO_IP, 32, "lbr_to", "uint64"),
    (msr::MSR_LBR_INFO_0, 32, "lbr_info", "hs_lbr_info"),
];

/// The MSRs that are shown as registers: those of debugging, monitoring and time.
pub fn msr_registers() -> Vec<MsrRegister> {
    let single = SINGLE.iter().map(|&(index, name, kind)| MsrRegister {
        index,
        name: name.to_owned(),
        kind,
    });
    let numbered = NUMBERED.iter().flat_map(|&(first, count, name, kind)| {
        (0..count).map(move |i| MsrRegister {
            index: first + i,
            name: format!("{name}{i}"),
            kind,
        })
    });
    single.chain(numbered).collect()
}

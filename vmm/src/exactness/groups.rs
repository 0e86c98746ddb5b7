//! Which built-in cases measure which group of facilities.

use std::arch::x86_64::__cpuid_count;

use crate::harness::select::TestJob;
use crate::kvm::exactness::FacilityGroup::{self, *};

/// The payloads of each group. `demo` and `workload` assert nothing, `hello` nothing of a facility,
/// `arming` what the payloads of single facilities assert, and `choices` and `debugger` run with
/// options of their own.
const PAYLOADS: &[(FacilityGroup, &[&str])] = &[
    (SingleStep, &["tf", "shadow"]),
    (
        DebugRegisters,
        &["d6", "db", "debug_basic", "dr", "gd", "keeps", "rf", "wp"],
    ),
    (IoBreakpoints, &["iob"]),
    (
        Exceptions,
        &[
            "exceptions",
            "far",
            "gates",
            "protection",
            "swi",
            "task",
            "tasks",
            "v86",
        ],
    ),
    (
        SystemRegisters,
        &[
            "cpuid", "modes", "modes16", "msr", "paging", "profiles", "sysregs",
        ],
    ),
    (Time, &["timer", "tsc", "tsc_smp", "tsc_sync"]),
    (
        Interrupts,
        &[
            "apic",
            "apic_timer",
            "devices",
            "hlt",
            "ioapic_pic",
            "ipi_smp",
            "stress_exits",
        ],
    ),
    (
        Branches,
        &[
            "branch_init",
            "branch_modes",
            "branch_msrs",
            "branch_trace",
            "btf",
            "btm",
            "bts",
            "bts_pmi",
            "call_stack",
            "debugctl",
            "ds_area",
            "ler",
            "lbr",
            "lbr_events",
            "lbr_select",
        ],
    ),
    (
        Counters,
        &[
            "freeze",
            "models",
            "pebs",
            "pmi",
            "pmi_storm",
            "pmu",
            "pmu_events",
            "rdpmc",
        ],
    ),
    (Rdt, &["rdt", "rdt_cache"]),
    (Transactions, &["rtm"]),
    (Smm, &["smm"]),
];

/// Payloads that belong to no group.
#[cfg(test)]
const UNGROUPED: &[&str] = &["arming", "choices", "debugger", "demo", "hello", "workload"];

/// Cases of other payloads that use single-stepping.
const STEPPING: &[&str] = &["debug_basic/int1", "debug_basic/single_step"];

/// The short set, in the order in which its cases run: those first that fail most often and harm no
/// host.
const SHORT: &[&str] = &[
    "debug_basic/int1 cpl=0",
    "shadow/step_comes_later cpl=0",
    "tf/emulated_instructions cpl=0",
    "tf/hlt cpl=0",
    "tf/sysret_into_step cpl=3",
    "tf/branch_targets cpl=3",
    "rf/fault_images cpl=0",
    "dr/either_enable cpl=3",
    "gd/setting_completes cpl=0",
    "iob/repeated cpl=0",
    "swi/",
    "task/",
    "exceptions/",
    "tsc/",
    "hlt/",
    "lbr/",
    "pmu/",
    "rdt/",
];

/// Hosts on which measuring a group ends more than the measuring process: the hypervisor by its CPUID
/// signature (leaf 40000000H), the group, and what happens.
const HARMFUL: &[(&[u8; 12], FacilityGroup, &str)] = &[
    (QEMU_TCG, DebugRegisters, QEMU_TCG_ENDS),
    (QEMU_TCG, IoBreakpoints, QEMU_TCG_ENDS),
];
const QEMU_TCG: &[u8; 12] = b"TCGTCGTCGTCG";
const QEMU_TCG_ENDS: &str = "QEMU's TCG ends when a nested guest arms debug registers";

/// The group that a job measures.
fn group_of(job: &TestJob) -> Option<FacilityGroup> {
    if STEPPING.contains(&job.name().as_str()) {
        return Some(SingleStep);
    }
    PAYLOADS
        .iter()
        .find(|(_, payloads)| payloads.contains(&job.image.name.as_str()))
        .map(|(group, _)| *group)
}

/// The jobs of `group` among `all`: those that a machine with the default options runs. With `short`,
/// those of the short set, in its order.
pub(super) fn jobs_of(group: FacilityGroup, all: &[TestJob], short: bool) -> Vec<TestJob> {
    let chosen = all.iter().filter(|job| {
        let in_interpreter_anyway = job.case.as_ref().is_none_or(|case| {
            case.virtual_clock || case.cpu.is_some_and(|cpu| cpu.needs_interpreter())
        });
        group_of(job) == Some(group) && !in_interpreter_anyway
    });
    let mut chosen: Vec<_> = chosen.cloned().collect();
    if short {
        let first_of = |name: &&str| {
            chosen
                .iter()
                .find(|job| job.id().starts_with(*name))
                .cloned()
        };
        return SHORT.iter().filter_map(first_of).collect();
    }
    chosen.sort_by_key(|job| !SHORT.iter().any(|name| job.id().starts_with(name)));
    chosen
}

/// Why `group` must not be measured alone on this host; `None` if it can be.
pub(super) fn harm(group: FacilityGroup) -> Option<&'static str> {
    let leaf = __cpuid_count(1, 0);
    // Bit 31 of ECX: a hypervisor is present, and leaf 40000000H has its signature.
    if leaf.ecx >> 31 == 0 {
        return None;
    }
    let leaf = __cpuid_count(0x4000_0000, 0);
    let signature: Vec<u8> = [leaf.ebx, leaf.ecx, leaf.edx]
        .iter()
        .flat_map(|register| register.to_le_bytes())
        .collect();
    let row = HARMFUL
        .iter()
        .find(|row| row.0.as_slice() == signature && row.1 == group);
    row.map(|row| row.2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::BUILTIN_PAYLOADS;
    use crate::harness::builtin::builtin_jobs;

    #[test]
    fn every_payload_is_in_one_group_or_listed_as_ungrouped() {
        let grouped: Vec<_> = PAYLOADS.iter().flat_map(|(_, names)| *names).collect();
        for (name, _) in BUILTIN_PAYLOADS {
            let count = grouped.iter().filter(|grouped| **grouped == name).count();
            let expected = usize::from(!UNGROUPED.contains(name));
            assert_eq!(count, expected, "{name}");
        }
    }

    #[test]
    fn every_name_of_the_short_set_has_a_case() {
        let jobs = builtin_jobs().unwrap();
        for name in SHORT {
            assert!(jobs.iter().any(|job| job.id().starts_with(name)), "{name}");
        }
        for name in STEPPING {
            assert!(jobs.iter().any(|job| job.name() == *name), "{name}");
        }
    }
}

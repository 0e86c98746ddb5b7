//! Which built-in cases measure which group of facilities.

use std::arch::x86_64::__cpuid_count;

use crate::harness::select::TestJob;
use crate::kvm::exactness::FacilityGroup::{self, *};

/// The payloads of each group. `UNGROUPED` lists the payloads that belong to none.
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
///
/// `demo` and `workload` assert nothing, and `hello` asserts nothing about a facility. `arming`
/// repeats what other payloads assert. `choices` and `debugger` run with options of their own, and
/// `generations`, `icelake`, `sapphirerapids` and `sapphirerapids_pmu` with processor models that only the interpreter has.
#[cfg(test)]
const UNGROUPED: &[&str] = &[
    "arming",
    "choices",
    "debugger",
    "demo",
    "generations",
    "hello",
    "icelake",
    "sapphirerapids",
    "sapphirerapids_pmu",
    "workload",
];

/// Cases that belong to the group of single-stepping, although their payload does not.
const STEPPING: &[&str] = &["debug_basic/int1", "debug_basic/single_step"];

/// The short set, in the order in which its cases run.
///
/// The cases come first that fail on most hosts and harm none.
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

/// Cases that must not run under KVM on some hosts, because they can crash the host.
struct Harm {
    /// The hypervisor by its CPUID signature (leaf 40000000H).
    host: &'static [u8; 12],
    /// A case with one of these needs is harmful.
    needs: &'static [&'static str],
    /// A case whose name begins with one of these is harmful too.
    names: &'static [&'static str],
    /// What such a case does to the host, for the verdict.
    reason: &'static str,
}

const HARMFUL: &[Harm] = &[Harm {
    host: QEMU_TCG,
    needs: &[
        "guestbp-data",
        "guestbp-disabled",
        "guestbp-exec-cpl0",
        "guestbp-exec-cpl3",
        "shadow-int3-cpl3",
    ],
    // Payloads of which cases without these needs arm debug registers too.
    names: &[
        "branch_",
        "btf/",
        "btm/",
        "bts",
        "debugctl/",
        "ds_area/",
        "iob/",
        "keeps/",
        "lbr_events/",
        "modes/",
        "pebs/",
        "pmi_storm/",
        "rtm/",
        "smm/",
        "swi/",
        "task/",
        "tasks/",
    ],
    reason: "QEMU's TCG ends when a nested guest arms debug registers",
}];
const QEMU_TCG: &[u8; 12] = b"TCGTCGTCGTCG";

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

/// Returns the jobs of `group`, without those that always run in the interpreter.
///
/// With `short`, returns only the jobs of the short set, in its order.
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

/// Why a job must not run under KVM in a guest of this hypervisor; `None` if it may.
///
/// `signature` is that of the hypervisor, from [`hypervisor_signature`].
pub(super) fn harm(job: &TestJob, signature: &[u8]) -> Option<&'static str> {
    let case = job.case.as_ref()?;
    let is_named = |harm: &Harm| harm.names.iter().any(|name| job.id().starts_with(name));
    let needs = |harm: &Harm| {
        case.needs_at(job.cpl)
            .any(|need| harm.needs.contains(&need))
    };
    let found = HARMFUL
        .iter()
        .find(|harm| harm.host.as_slice() == signature && (is_named(harm) || needs(harm)));
    found.map(|harm| harm.reason)
}

/// The CPUID signature of the hypervisor in which this host runs; empty if there is none.
pub(super) fn hypervisor_signature() -> Vec<u8> {
    let leaf = __cpuid_count(1, 0);
    // Bit 31 of ECX: a hypervisor is present, and leaf 40000000H has its signature.
    if leaf.ecx >> 31 == 0 {
        return Vec::new();
    }
    let leaf = __cpuid_count(0x4000_0000, 0);
    [leaf.ebx, leaf.ecx, leaf.edx]
        .iter()
        .flat_map(|register| register.to_le_bytes())
        .collect()
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

    /// Cases of several groups arm debug registers. The case of `modes` once ended QEMU.
    #[test]
    fn cases_that_arm_debug_registers_are_harmful_in_qemu_tcg_alone() {
        let jobs = builtin_jobs().unwrap();
        let harmful = |name: &str, signature: &[u8]| {
            let job = jobs.iter().find(|job| job.id() == name).unwrap();
            harm(job, signature).is_some()
        };
        for name in [
            "modes/instruction_breakpoints cpl=0",
            "wp/repeated_store cpl=0",
            "iob/repeated cpl=0",
        ] {
            assert!(harmful(name, QEMU_TCG), "{name}");
            assert!(!harmful(name, b"KVMKVMKVM\0\0\0"), "{name}");
            assert!(!harmful(name, b""), "{name}");
        }
        for name in ["exceptions/int_n_gate_dpl cpl=3", "debug_basic/int1 cpl=0"] {
            assert!(!harmful(name, QEMU_TCG), "{name}");
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

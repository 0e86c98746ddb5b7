//! Tests over all rows of the table.

use super::*;
use crate::facility::Facilities;
use crate::model::CpuModel;
use crate::msr::{MsrEffect, Msrs, Now, RdmsrOutcome, WrmsrOutcome};

const NOW: Now = Now { ticks: 1_000 };

fn configs() -> impl Iterator<Item = MsrConfig> {
    [
        (Facilities::empty(), CpuModel::SkylakeServer),
        (Facilities::KVM, CpuModel::SkylakeServer),
        (Facilities::INTERP_DEFAULT, CpuModel::SkylakeServer),
        (Facilities::INTERP, CpuModel::SkylakeServer),
        (Facilities::INTERP, CpuModel::SapphireRapids),
    ]
    .into_iter()
    .map(|(facilities, model)| MsrConfig {
        facilities,
        tsc_hz: 2_500_000_000,
        physical_bits: 46,
        speculation: if facilities.contains(Facilities::RDTSCP) {
            u32::MAX
        } else {
            0
        },
        uarch: true,
        firmware: false,
        model,
    })
}

/// Every row with every configuration, and a processor that has it.
fn rows() -> impl Iterator<Item = (&'static MsrSpec, MsrConfig, Msrs)> {
    configs()
        .flat_map(|config| TABLE.iter().map(move |spec| (spec, config)))
        .map(|(spec, config)| (spec, config, Msrs::new(config)))
}

/// Whether this crate serves the accesses to a row.
fn is_ours(spec: &MsrSpec) -> bool {
    !matches!(spec.owner, Owner::Apic | Owner::Processor(_))
}

#[test]
fn rows_are_sorted_and_do_not_overlap() {
    for pair in TABLE.windows(2) {
        let [before, after] = pair else { continue };
        let end = before.index + before.count;
        assert!(end <= after.index, "{} {}", before.name, after.name);
    }
}

#[test]
fn find_returns_the_row_of_each_index_and_no_other() {
    for spec in TABLE {
        for index in spec.indices() {
            assert_eq!(find(index).map(|s| s.index), Some(spec.index), "{index:#x}");
        }
        let beside = [spec.index.wrapping_sub(1), spec.index + spec.count];
        for index in beside {
            let found = find(index).map(|s| s.index);
            assert_ne!(found, Some(spec.index), "{} {index:#x}", spec.name);
        }
    }
}

#[test]
fn msr_names_are_distinct() {
    let mut names: Vec<_> = TABLE.iter().map(|spec| spec.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

#[test]
fn absent_register_faults_on_every_access() {
    for (spec, config, mut msrs) in
        rows().filter(|(spec, config, _)| !spec.is_present(spec.index, config))
    {
        let before = msrs.save();
        for index in spec.indices() {
            let facilities = config.facilities;
            assert_eq!(
                msrs.read(index, NOW),
                RdmsrOutcome::Fault,
                "{} {facilities:?}",
                spec.name
            );
            assert_eq!(
                msrs.write(index, 0, NOW),
                WrmsrOutcome::Fault,
                "{}",
                spec.name
            );
        }
        assert_eq!(msrs.save(), before, "{}", spec.name);
    }
}

#[test]
fn present_register_is_answered_by_its_owner() {
    for (spec, _, msrs) in rows().filter(|(spec, config, _)| spec.is_present(spec.index, config)) {
        for index in spec.indices() {
            let outcome = msrs.read(index, NOW);
            let expected = match spec.owner {
                Owner::Apic => outcome == RdmsrOutcome::Apic,
                Owner::Processor(_) => outcome == RdmsrOutcome::Processor,
                Owner::Command => outcome == RdmsrOutcome::Fault,
                _ => matches!(outcome, RdmsrOutcome::Value(_)),
            };
            assert!(expected, "{} {index:#x}: {outcome:?}", spec.name);
        }
    }
}

#[test]
fn reset_value_reads_back() {
    for (spec, config, msrs) in
        rows().filter(|(spec, config, _)| spec.is_present(spec.index, config))
    {
        if matches!(spec.owner, Owner::Stored | Owner::Constant) {
            let expected = RdmsrOutcome::Value(spec.reset_value(&config));
            for index in spec.indices() {
                assert_eq!(msrs.read(index, NOW), expected, "{}", spec.name);
            }
        }
    }
}

#[test]
fn reset_value_of_a_stored_register_has_no_reserved_bit() {
    for (spec, config, _) in rows().filter(|(spec, ..)| spec.owner == Owner::Stored) {
        let reserved = spec.reserved_bits(spec.index, &config) & !spec.read_only;
        assert_eq!(spec.reset_value(&config) & reserved, 0, "{}", spec.name);
    }
}

#[test]
fn reserved_bit_faults_and_changes_nothing() {
    for (spec, config, mut msrs) in
        rows().filter(|(spec, config, _)| spec.is_present(spec.index, config))
    {
        let before = msrs.save();
        let reserved = spec.reserved_bits(spec.index, &config) & !spec.read_only;
        for bit in (0..64).filter(|bit| reserved >> bit & 1 != 0) {
            let outcome = msrs.write(spec.index, 1 << bit, NOW);
            assert_eq!(outcome, WrmsrOutcome::Fault, "{} bit {bit}", spec.name);
        }
        assert_eq!(msrs.save(), before, "{}", spec.name);
    }
}

#[test]
fn rejected_write_faults_even_for_the_current_value() {
    for (spec, _, mut msrs) in rows().filter(|(spec, ..)| spec.writes == WritePolicy::Fault) {
        if let RdmsrOutcome::Value(value) = msrs.read(spec.index, NOW) {
            assert_eq!(
                msrs.write(spec.index, value, NOW),
                WrmsrOutcome::Fault,
                "{}",
                spec.name
            );
            assert_eq!(
                msrs.write(spec.index, 0, NOW),
                WrmsrOutcome::Fault,
                "{}",
                spec.name
            );
        }
    }
}

#[test]
fn ignored_and_read_only_bits_keep_their_values() {
    for (spec, config, mut msrs) in
        rows().filter(|(spec, config, _)| spec.is_present(spec.index, config))
    {
        let preserved = match spec.writes {
            WritePolicy::Ignored => u64::MAX,
            _ => spec.read_only,
        };
        let RdmsrOutcome::Value(before) = msrs.read(spec.index, NOW) else {
            continue;
        };
        for written in [preserved, 0]
            .map(|bits| bits & !spec.reserved_bits(spec.index, &config) | bits & preserved)
        {
            if let WrmsrOutcome::Done(_) = msrs.write(spec.index, written, NOW) {
                let after = msrs.read(spec.index, NOW);
                let RdmsrOutcome::Value(after) = after else {
                    panic!("{}: {after:?}", spec.name)
                };
                assert_eq!(
                    after & preserved,
                    before & preserved,
                    "{} {written:#x}",
                    spec.name
                );
            }
        }
    }
}

#[test]
fn accepted_write_of_a_stored_register_reads_back() {
    for (spec, config, mut msrs) in
        rows().filter(|(spec, config, _)| spec.is_present(spec.index, config))
    {
        if spec.owner != Owner::Stored {
            continue;
        }
        // Of memory types some bits are writable together that are no type.
        let writable = [u64::MAX, !0xf9, 0x0606_0606_0606_0606]
            .map(|bits| bits & !spec.reserved_bits(spec.index, &config))
            .into_iter()
            .find(|&value| (spec.valid)(value))
            .unwrap_or_else(|| panic!("{}", spec.name));
        for index in spec.indices() {
            let outcome = msrs.write(index, writable, NOW);
            assert!(
                matches!(outcome, WrmsrOutcome::Done(_)),
                "{index:#x}: {outcome:?}"
            );
            let RdmsrOutcome::Value(value) = msrs.read(index, NOW) else {
                panic!("{index:#x}")
            };
            assert_eq!(
                value & !spec.read_only,
                writable & !spec.read_only,
                "{index:#x}"
            );
        }
    }
}

#[test]
fn mirrored_write_reports_the_new_value_and_others_do_not() {
    for (spec, _, mut msrs) in
        rows().filter(|(spec, config, _)| spec.is_present(spec.index, config))
    {
        let WrmsrOutcome::Done(effect) = msrs.write(spec.index, 0, NOW) else {
            continue;
        };
        let MsrEffect { mirror, .. } = effect;
        let expected = match msrs.read(spec.index, NOW) {
            RdmsrOutcome::Value(value) if spec.kvm == KvmRole::Mirrored => Some(value),
            _ => None,
        };
        assert_eq!(mirror, expected, "{}", spec.name);
    }
}

#[test]
fn register_that_kvm_answers_is_part_of_the_processor_state() {
    for spec in TABLE {
        let passthrough = matches!(spec.kvm, KvmRole::Passthrough(_));
        let processor = matches!(spec.owner, Owner::Processor(_));
        assert_eq!(passthrough, processor, "{}", spec.name);
        let updated = spec.update != UpdateBefore::Nothing;
        assert!(!updated || is_ours(spec), "{}", spec.name);
    }
}

#[test]
fn kvm_state_msrs_are_distinct_fields_of_the_state() {
    let mut state = crate::state::CpuState::reset();
    for (value, (_, msr)) in (1..).zip(KVM_STATE_MSRS) {
        *state.msr_mut(msr) = value;
    }
    let values = KVM_STATE_MSRS.map(|(_, msr)| state.msr(msr));
    assert!((1..).zip(values).all(|(expected, value)| value == expected));
    assert_eq!(KVM_STATE_MSRS.len(), 8);
}

#[test]
fn counters_are_updated_before_every_access_that_shows_or_changes_them() {
    for spec in TABLE {
        let counts = matches!(spec.owner, Owner::Pmu | Owner::Branch);
        assert_eq!(
            spec.update == UpdateBefore::Counters,
            counts,
            "{}",
            spec.name
        );
    }
    let shows = |index| find(index).map(|spec| spec.update);
    assert_eq!(shows(regs::IA32_QM_CTR), Some(UpdateBefore::CacheOccupancy));
}

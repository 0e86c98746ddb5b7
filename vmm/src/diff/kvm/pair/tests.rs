//! The comparison of a payload's run, on hosts with KVM.

use std::io;

use hindsight_cpu::cpuid::CpuModel;

use super::*;
use crate::boot::LoadRequest;
use crate::diff::kvm::{KvmDiffVerdict, compare_with_kvm};
use crate::harness::BUILTIN_PAYLOADS;
use crate::kvm::KvmError;
use crate::machine::{MachineConfig, PreparedMachine};
use crate::platform::Sinks;
use crate::state::Pages;
use crate::vcpu::engine::policy::Engine;

fn deterministic_machine(cpus: usize) -> DeterministicMachine {
    let payload = BUILTIN_PAYLOADS
        .iter()
        .find(|(name, _)| *name == "workload");
    let request = LoadRequest {
        image: payload.unwrap().1,
        ..LoadRequest::default()
    };
    let config = MachineConfig {
        memory: 16 << 20,
        huge_pages: false,
        cpus,
        cpu: CpuModel::PortableV1.into(),
        engine: Engine::Interp,
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let prepared = PreparedMachine::new(&config, &request)
        .unwrap()
        .deterministic(0);
    prepared
        .build(None, sinks)
        .unwrap()
        .into_deterministic()
        .unwrap()
}

/// Returns `None` on a host without KVM.
fn engine_pair() -> Option<EnginePair> {
    match EnginePair::new(deterministic_machine(1)) {
        Ok(pair) => Some(pair),
        Err(KvmDiffError::Kvm(KvmError::Missing | KvmError::NotPermitted)) => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn engines_agree_about_a_payload() {
    let Some(pair) = engine_pair() else { return };
    let mut progress_reports = 0;
    let mut branches = Vec::new();
    let verdict = compare_with_kvm(pair.leader, 3000, 100, &mut |_, taken| {
        progress_reports += 1;
        branches.extend(taken.iter().map(|branch| (branch.from, branch.to)));
    });
    let verdict = verdict.unwrap();
    let KvmDiffVerdict::Same { compared, ended } = verdict else {
        panic!("{verdict:?}");
    };
    assert_eq!((compared.icount, ended), (3000, false));
    assert!(compared.executed > 1000, "{compared:?}");
    assert_eq!(progress_reports, 30);
    let mut machine = deterministic_machine(1);
    assert_eq!(machine.run_to(3000), RunStop::Reached);
    let last = machine.last_branches(0);
    let last: Vec<_> = last.iter().map(|branch| (branch.from, branch.to)).collect();
    assert!(!last.is_empty());
    assert!(branches.ends_with(&last), "{last:x?} {branches:x?}");
}

#[test]
fn register_that_differs_is_found_after_the_next_instruction() {
    let Some(mut pair) = engine_pair() else {
        return;
    };
    assert!(matches!(pair.run_to(10, false), Ok(StrideEnd::Reached)));
    let mut changed = pair.interp_state();
    changed.gpr[15] ^= 1 << 40;
    pair.follower.load(&changed).unwrap();
    let Ok(StrideEnd::Different(found)) = pair.run_to(2000, false) else {
        panic!("no difference was found");
    };
    assert!(found.step.is_some());
    assert_eq!(found.differences.len(), 1, "{:?}", found.differences);
    assert_eq!(found.differences[0].name, "gpr.r15");
}

#[test]
fn vector_register_that_differs_is_found_before_the_first_copy() {
    let Some(mut pair) = engine_pair() else {
        return;
    };
    let mut changed = pair.interp_state();
    // XMM0, and XSTATE_BV's bits for x87 and SSE state.
    changed.xsave.0[160] ^= 1;
    changed.xsave.0[512] |= 3;
    pair.follower.load(&changed).unwrap();
    let Ok(StrideEnd::Different(found)) = pair.run_to(100_000, false) else {
        panic!("no difference was found");
    };
    assert!(found.step.is_some());
    assert_eq!(found.differences.len(), 1, "{:?}", found.differences);
    assert_eq!(pair.compared.copied, 0);
}

#[test]
fn memory_that_differs_is_found_when_all_is_compared() {
    let Some(mut pair) = engine_pair() else {
        return;
    };
    assert!(matches!(pair.run_to(2000, false), Ok(StrideEnd::Reached)));
    assert_eq!(pair.compare_all().unwrap(), []);
    assert!(matches!(pair.run_to(4000, false), Ok(StrideEnd::Reached)));
    let memory = pair.leader.save().unwrap().memory;
    let written = memory.differing(&pair.base.memory);
    let mut page = *memory.get(written[0]).unwrap();
    page[8] ^= 2;
    let mut pages = Pages::default();
    pages.set(written[0], &page);
    pair.follower.copy_pages(&pages, [written[0]]).unwrap();
    let found = pair.compare_all().unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].name, format!("memory {:#x}", written[0] + 8));
}

#[test]
fn more_than_one_vcpu_cannot_be_compared() {
    let error = EnginePair::new(deterministic_machine(2)).err().unwrap();
    assert!(matches!(
        error,
        KvmDiffError::NotComparable(NotComparable::SeveralVcpus)
    ));
}

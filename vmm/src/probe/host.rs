//! This host's KVM as the engine policy and the debugger need to know it, measured by probes.

use std::sync::OnceLock;

use hindsight_cpu::armed::Armed;

use super::{ProbeVerdict, findings, unmet};
use crate::kvm;
use crate::kvm::host_support::{HostKvm, HwBreakpointSupport};

/// Probes that a KVM fails when it emulates ring 0 instead of running it: INT n, and SSE.
const RING0_PROBES: [&str; 2] = ["intn-cpl0", "sse-cpl0"];
/// The probe that measures whether KVM exits on MOV DR.
const MOV_DR_PROBE: &str = "gd-host";
/// Probes that fail if RDTSC or RDTSCP return the host's values under KVM instead of the guest's.
const TIME_PROBES: [&str; 3] = ["tsc-offset", "tsd-cpl3", "tsc-aux"];

/// Measures whether this host's KVM runs guests, and whether it exits on MOV DR. Uses this boot's
/// cached findings if there are any. How exact it is, [`crate::exactness`] measures.
pub fn measure_kvm() -> HostKvm {
    if let Err(error) = kvm::open_device() {
        return HostKvm::Unusable(error.to_string());
    }
    let ring0 = RING0_PROBES.map(|probe| (probe, HostKvm::EmulatesRing0 as fn(_) -> _));
    let time = TIME_PROBES.map(|probe| (probe, HostKvm::ForeignTime as fn(_) -> _));
    for (probe, failed) in ring0.into_iter().chain(time) {
        match unmet(probe) {
            Ok(None) => {}
            Ok(Some(found)) => return failed(format!("{probe}: {found}")),
            Err(error) => return HostKvm::Unusable(error.to_string()),
        }
    }
    match unmet(MOV_DR_PROBE) {
        Ok(found) => HostKvm::Usable {
            exact: Armed::empty(),
            detects_mov_dr: found.is_none(),
            deviations: Vec::new(),
        },
        Err(error) => HostKvm::Unusable(error.to_string()),
    }
}

/// Measures what this host's KVM does for a debugger. Uses this boot's cached findings if there are
/// any.
///
/// With `exact`, the interpreter can take over, so a step that the guest can observe counts as
/// unsupported.
///
/// It is measured once. A confined thread cannot open /dev/kvm: a run measures before its sandbox.
pub fn measure_hw_breakpoints(exact: bool) -> HwBreakpointSupport {
    static MEASURED: [OnceLock<HwBreakpointSupport>; 2] = [const { OnceLock::new() }; 2];
    let measured = &MEASURED[usize::from(exact)];
    measured.get_or_init(|| probe_hw_breakpoints(exact)).clone()
}

fn probe_hw_breakpoints(exact: bool) -> HwBreakpointSupport {
    let works = |names: &[&str]| first_unmet(names, |verdict| verdict == ProbeVerdict::Works);
    let step = if exact {
        works(&["step-cpl0", "step-cpl3", "step-hides-tf"])
    } else {
        first_unmet(&["step-cpl0", "step-cpl3"], |verdict| {
            matches!(verdict, ProbeVerdict::Works | ProbeVerdict::Differs)
        })
    };
    // Without general detect, a guest that arms its own breakpoints overwrites the debugger's
    // undetected.
    HwBreakpointSupport {
        execute: works(&["hostbp-exec-cpl0", "hostbp-exec-cpl3", "gd-host"]),
        data: works(&["hostbp-data", "gd-host"]),
        step,
    }
}

/// Succeeds if the verdicts of all probes are acceptable. Otherwise returns the first probe whose
/// verdict is not, with its finding.
fn first_unmet(names: &[&str], acceptable: impl Fn(ProbeVerdict) -> bool) -> Result<(), String> {
    let findings = findings(names.iter().copied()).map_err(|error| error.to_string())?;
    let unmet = names.iter().find_map(|name| {
        let finding = findings.get(*name)?;
        (!acceptable(finding.verdict)).then(|| format!("{name}: {}", finding.detail))
    });
    unmet.map_or(Ok(()), Err)
}

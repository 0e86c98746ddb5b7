//! What the engine policy and the debugger must know of this host's KVM, by the probes that tell.

use hindsight_cpu::armed::Armed;

use super::{ProbeError, Verdict, findings, unmet};
use crate::kvm;
use crate::kvm::host_support::{GUEST_BREAKPOINTS, HostKvm, HwBreakpointSupport};

/// Probes that a KVM fails when it emulates ring 0 instead of running it: INT n, and SSE.
const RING0_PROBES: [&str; 2] = ["intn-cpl0", "sse-cpl0"];
/// The probe that shows whether a KVM exits on MOV DR.
const MOV_DR_PROBE: &str = "gd-host";
/// Probes of what a guest does with debug registers that it sets natively: [`GUEST_BREAKPOINTS`].
const BREAKPOINT_PROBES: [&str; 4] = [
    "guestbp-exec-cpl0",
    "guestbp-exec-cpl3",
    "gd",
    "guestbp-data",
];
/// Probes that a KVM fails under which RDTSC or RDTSCP is the host's, whatever the guest's MSRs say.
const TIME_PROBES: [&str; 3] = ["tsc-offset", "tsd-cpl3", "tsc-aux"];

/// Measures this host's KVM. Findings of this boot are reused.
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
    match measure_breakpoints() {
        Ok((exact, detects_mov_dr)) => HostKvm::Usable {
            exact,
            detects_mov_dr,
        },
        Err(error) => HostKvm::Unusable(error.to_string()),
    }
}

/// Which of a guest's breakpoints this KVM handles exactly, and whether it exits on MOV DR. Where it
/// does not exit, a native guest sets breakpoints unseen; one that has set them in the interpreter
/// stays there.
fn measure_breakpoints() -> Result<(Armed, bool), ProbeError> {
    let detects_mov_dr = unmet(MOV_DR_PROBE)?.is_none();
    for probe in BREAKPOINT_PROBES {
        if unmet(probe)?.is_some() {
            // A guest that may arm some of them natively can arm the others unseen: none are exact.
            return Ok((Armed::empty(), detects_mov_dr));
        }
    }
    Ok((GUEST_BREAKPOINTS, detects_mov_dr))
}

/// Measures what this host's KVM does for a debugger. Findings of this boot are reused. `exact`: the
/// interpreter can take over, so steps that the guest can notice are left to it.
pub fn measure_hw_breakpoints(exact: bool) -> HwBreakpointSupport {
    let works = |names: &[&str]| first_unmet(names, |verdict| verdict == Verdict::Works);
    let step = if exact {
        works(&["step-cpl0", "step-cpl3", "step-hides-tf"])
    } else {
        first_unmet(&["step-cpl0", "step-cpl3"], |verdict| {
            matches!(verdict, Verdict::Works | Verdict::Differs)
        })
    };
    // Without general detect, a guest that arms its own breakpoints overwrites the debugger's unseen.
    HwBreakpointSupport {
        execute: works(&["hostbp-exec-cpl0", "hostbp-exec-cpl3", "gd-host"]),
        data: works(&["hostbp-data", "gd-host"]),
        step,
    }
}

/// Succeeds if the verdicts of all these probes are acceptable; otherwise names the first that is
/// not, with its finding.
fn first_unmet(names: &[&str], acceptable: impl Fn(Verdict) -> bool) -> Result<(), String> {
    let findings = findings(names.iter().copied()).map_err(|error| error.to_string())?;
    let unmet = names.iter().find_map(|name| {
        let finding = findings.get(*name)?;
        (!acceptable(finding.verdict)).then(|| format!("{name}: {}", finding.detail))
    });
    unmet.map_or(Ok(()), Err)
}

//! What this host's KVM supports, as plain data.
//!
//! [`crate::probe`] measures it; the engine policy and the debugger decide by it.

use hindsight_cpu::armed::Armed;

use super::exactness::FacilityGroup;

/// What a guest can arm in its debug registers. KVM checks no access against I/O breakpoints; the
/// monitor checks those accesses that exit.
pub const GUEST_BREAKPOINTS: Armed = Armed::CODE_BREAKPOINT
    .union(Armed::DATA_BREAKPOINT)
    .union(Armed::GENERAL_DETECT);

/// Whether and how well this host's KVM runs guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKvm {
    /// KVM cannot be used, for this reason.
    Unusable(String),
    /// KVM runs ring 0 on the processor itself.
    Usable {
        /// The facilities that KVM handles by itself, as exactly as the interpreter does.
        exact: Armed,
        /// KVM exits on MOV DR before the instruction executes, while general detect is set.
        detects_mov_dr: bool,
        /// The groups of facilities that deviate, or may, before the monitor can tell that the guest
        /// uses them, each with the reason. Empty on a KVM that was measured to be exact.
        deviations: Vec<(FacilityGroup, String)>,
    },
    /// KVM emulates ring 0 instead of running it: the probe that failed, with its finding.
    EmulatesRing0(String),
    /// Guests read the host's TSC instead of their own: the probe that failed, with its finding.
    ForeignTime(String),
}

impl HostKvm {
    /// A KVM that is taken to be exact in all that it can do, without measuring it.
    pub const fn usable() -> Self {
        Self::Usable {
            exact: GUEST_BREAKPOINTS.union(Armed::SINGLE_STEP),
            detects_mov_dr: false,
            deviations: Vec::new(),
        }
    }
}

/// What this host's KVM does for a debugger, by KVM_SET_GUEST_DEBUG. An error holds the reason why
/// a facility cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HwBreakpointSupport {
    /// Execution breakpoints.
    pub execute: Result<(), String>,
    /// Data breakpoints.
    pub data: Result<(), String>,
    /// Single steps.
    pub step: Result<(), String>,
}

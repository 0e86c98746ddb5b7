//! What this host's KVM was measured to do, as data: [`crate::probe`] fills it in, the engine policy
//! and the debugger decide by it.

use hindsight_cpu::armed::Armed;

/// What a guest can arm in its debug registers. KVM checks no access for I/O breakpoints; where an
/// access exits, the monitor does.
pub const GUEST_BREAKPOINTS: Armed = Armed::CODE_BREAKPOINT
    .union(Armed::DATA_BREAKPOINT)
    .union(Armed::GENERAL_DETECT);

/// What is known of the host's KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKvm {
    /// It cannot be used, for this reason.
    Unusable(String),
    /// It runs ring 0 as the processor does.
    Native {
        /// The facilities that it handles by itself, as exactly as the interpreter.
        exact: Armed,
        /// It exits on MOV DR before the instruction executes, where general detect is set.
        detects_mov_dr: bool,
    },
    /// It does not run ring 0 natively: the probe that showed it, with its finding.
    EmulatesRing0(String),
    /// It shows guests another time than their processor's: the probe, with its finding.
    ForeignTime(String),
}

impl HostKvm {
    /// A KVM that runs ring 0 natively, of which nothing else is known.
    pub const fn native() -> Self {
        Self::Native {
            exact: GUEST_BREAKPOINTS,
            detects_mov_dr: false,
        }
    }
}

/// What this host's KVM was measured to do for a debugger, by KVM_SET_GUEST_DEBUG; where it does
/// not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HwBreakpointSupport {
    /// Breakpoints on execution.
    pub execute: Result<(), String>,
    /// Breakpoints on data.
    pub data: Result<(), String>,
    /// Single steps.
    pub step: Result<(), String>,
}

//! The debugger's data, and the settings that the user changes.

use std::collections::VecDeque;

use hindsight_cpu::control::ControlMasks;
use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::{ResumeAction, StopConditions};
use rustix::fd::BorrowedFd;

use super::error::DebugError;
use crate::breakpoints::BreakpointSet;
use crate::btrace::TracePosition;
use crate::cancel::CancelFlag;
use crate::client_file::ClientFile;
use crate::registers::{AvailableRegisters, CodeModel, RegisterLayout, msr_registers};
use crate::target::{DebugTarget, StopCause};

/// Settings that the user changes by monitor commands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DebugSettings {
    /// Addresses are guest-physical.
    pub(crate) physical: bool,
    /// Steps enter the handlers of interrupts.
    pub(crate) step_into_interrupts: bool,
}

/// Why the machine last stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DebugStop {
    /// The vCPU that stopped.
    pub vcpu: usize,
    /// Why the vCPU stopped; `None` if the debugger paused the machine.
    pub cause: Option<StopCause>,
}

/// The debugger's side of a machine. One client at a time drives it, by a
/// [`ClientSession`](crate::ClientSession).
pub struct Debugger {
    pub(crate) target: Box<dyn DebugTarget>,
    pub(super) paused: bool,
    /// The states of the vCPUs, read at most once a pause.
    pub(super) states: Vec<Option<Box<CpuState>>>,
    pub(crate) breakpoints: BreakpointSet,
    /// The stop conditions that each vCPU resumed with last.
    pub(super) applied: Vec<StopConditions>,
    /// What each vCPU does when the machine resumes. A vCPU without an action does not run.
    pub(super) actions: Vec<Option<ResumeAction>>,
    /// The vCPUs that the client gave an action, a bit each.
    pub(super) explicit_actions: u64,
    pub(crate) settings: DebugSettings,
    /// Maximum number of branches that a trace keeps, if the client has set it.
    pub(super) trace_limit: Option<usize>,
    /// The position up to which the client has read each vCPU's trace.
    pub(super) trace_positions: Vec<Option<TracePosition>>,
    pub(super) available: AvailableRegisters,
    layout: RegisterLayout,
    /// The values that control registers take.
    pub(crate) controls: ControlMasks,
    /// Whether the run is deterministic, so that the debugger can go back in it.
    pub(super) reversible: bool,
    /// Stops that have not been reported to the client.
    pub(crate) pending: VecDeque<DebugStop>,
    pub(crate) last_stop: DebugStop,
    /// The vCPU that the client has selected.
    pub(crate) selected: usize,
    /// The vCPU of the next reverse step, if it differs from the one that gdbstub assumes.
    pub(crate) step_back_vcpu: Option<usize>,
    /// Resuming has no effect: see [`crate::session`].
    pub(crate) suppress_resume: bool,
    /// The file that the client has open.
    pub(crate) open_file: Option<ClientFile>,
    /// Why the last request of `gdbstub` failed.
    pub(crate) error_text: Option<String>,
    /// Set when the server must end: long work stops then.
    pub(crate) cancel: CancelFlag,
}

impl std::fmt::Debug for Debugger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Debugger")
            .field("paused", &self.paused)
            .field("last_stop", &self.last_stop)
            .finish_non_exhaustive()
    }
}

/// The components of XCR0 that CPUID announces. SDM Vol. 1, "XSAVE-Supported Features".
fn xcr0(target: &dyn DebugTarget) -> u64 {
    let [eax, _, _, edx] = target.cpuid(0xd, 0);
    u64::from(edx) << 32 | u64::from(eax)
}

impl Debugger {
    /// A debugger without breakpoints. It leaves the machine paused or running, as it is.
    pub fn new(mut target: Box<dyn DebugTarget>) -> Self {
        let count = target.vcpu_count();
        let available = AvailableRegisters {
            xcr0: xcr0(&*target),
            msrs: Vec::new(),
        };
        let layout = RegisterLayout::new(CodeModel::default(), &available);
        let controls = ControlMasks::from_cpuid(|leaf, subleaf| target.cpuid(leaf, subleaf));
        let reversible = target.reverse().is_ok();
        Self {
            target,
            paused: false,
            states: vec![None; count],
            breakpoints: BreakpointSet::default(),
            applied: vec![StopConditions::default(); count],
            actions: vec![Some(ResumeAction::Run); count],
            explicit_actions: 0,
            settings: DebugSettings::default(),
            trace_limit: None,
            trace_positions: vec![None; count],
            available,
            layout,
            controls,
            reversible,
            pending: VecDeque::new(),
            last_stop: DebugStop {
                vcpu: 0,
                cause: None,
            },
            selected: 0,
            step_back_vcpu: None,
            suppress_resume: false,
            open_file: None,
            error_text: None,
            cancel: CancelFlag::default(),
        }
    }

    /// The machine that is debugged.
    pub fn target(&mut self) -> &mut dyn DebugTarget {
        &mut *self.target
    }

    /// The number of vCPUs.
    pub fn vcpu_count(&self) -> usize {
        self.states.len()
    }

    /// Whether the debugger has paused the machine.
    pub const fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether the run is deterministic, so that the debugger can go back in it.
    pub const fn is_reversible(&self) -> bool {
        self.reversible
    }

    /// Why the machine last stopped.
    pub const fn last_stop(&self) -> &DebugStop {
        &self.last_stop
    }

    /// Whether a stop waits for [`Debugger::collect`] although the machine's stop event may not be
    /// readable.
    pub fn has_pending_stop(&self) -> bool {
        !self.pending.is_empty()
    }

    /// [`DebugTarget::stop_event`] of the machine.
    pub fn stop_event(&self) -> BorrowedFd<'_> {
        self.target.stop_event()
    }

    /// The registers as the client sees them.
    pub fn layout(&self) -> &RegisterLayout {
        &self.layout
    }

    /// Shows the registers of this kind of code.
    pub fn set_code_model(&mut self, model: CodeModel) {
        self.layout = RegisterLayout::new(model, &self.available);
    }

    /// Finds out which MSRs the vCPUs have.
    pub(super) fn probe_msrs(&mut self) -> Result<(), DebugError> {
        let indices: Vec<u32> = msr_registers().iter().map(|row| row.index).collect();
        let values = self.target.read_msrs(0, &indices)?;
        let present = indices.into_iter().zip(values);
        let present = present.filter_map(|(index, value)| value.map(|_| index));
        self.available.msrs = present.collect();
        self.set_code_model(self.layout.model());
        Ok(())
    }

    /// Ends the machine.
    pub fn kill(&mut self) {
        self.target.kill();
    }
}

//! Abilities that a machine may have.

use super::error::TargetError;

/// Going back in a run that can be repeated exactly.
///
/// A machine with this ability also carries out [`StepBack`](hindsight_cpu::stops::ResumeAction::StepBack)
/// and [`RunBack`](hindsight_cpu::stops::ResumeAction::RunBack). All methods are called while the
/// machine is paused.
pub trait ReverseExecution {
    /// The number of instructions that all vCPUs have retired in this run.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn icount(&mut self) -> Result<u64, TargetError>;

    /// Goes to the boundary before instruction `icount`, forwards or backwards.
    ///
    /// `false`: the run ends earlier, and the machine stands at its end.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn go_to(&mut self, icount: u64) -> Result<bool, TargetError>;
}

/// How many branches a client's trace keeps unless the client says otherwise.
pub const TRACE_LIMIT_DEFAULT: usize = 0x1_0000;

/// Recording of the branches that vCPUs take: gdb's `record btrace bts`.
///
/// All methods are called while the machine is paused.
pub trait BranchTrace {
    /// Records the last `limit` branches of a vCPU from now on.
    ///
    /// No effect if they are recorded already, because the user requested that when the machine was
    /// started, or because the client did.
    ///
    /// # Errors
    ///
    /// When no engine of this machine can record branches.
    fn start(&mut self, vcpu: usize, limit: usize) -> Result<(), TargetError>;

    /// Ends a recording that [`BranchTrace::start`] began; other recordings continue.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn stop(&mut self, vcpu: usize) -> Result<(), TargetError>;

    /// How many branches of a vCPU are kept at most; `None` if they are not recorded.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn limit(&mut self, vcpu: usize) -> Result<Option<usize>, TargetError>;

    /// The branches of a vCPU that are kept now; `None` if they are not recorded.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn branches(&mut self, vcpu: usize) -> Result<Option<RecordedBranches>, TargetError>;
}

/// The recorded branches of one vCPU, as of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedBranches {
    /// From where to where each taken branch went, the oldest first. Addresses are linear. Interrupts
    /// and exceptions count as branches.
    pub branches: Vec<(u64, u64)>,
    /// How many branches were recorded in all, those that are no longer kept included.
    pub total: u64,
    /// The linear address at which the recording began.
    pub start: u64,
    /// How many branches within the recording were left out, because they repeated what was before.
    pub left_out: u64,
    /// The linear address at which the recording ended; `None` if it goes on.
    pub end: Option<u64>,
}

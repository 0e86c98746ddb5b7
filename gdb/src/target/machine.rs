//! The one trait that a machine must implement.

use hindsight_cpu::cpuid::CpuidRegs;
use hindsight_cpu::state::CpuState;
use rustix::fd::BorrowedFd;

use super::abilities::{BranchTrace, ReverseExecution};
use super::commands::MachineCommands;
use super::error::{ResumeError, TargetError, Unavailable};
use super::memory::PhysicalMemory;
use super::stop::{VcpuResume, VcpuStop};

/// A virtual machine that can be debugged.
///
/// All methods are called by one thread, that of the server. vCPUs are numbered from 0. Methods that
/// take a vCPU are called only while the machine is paused, with a number below
/// [`DebugTarget::vcpu_count`]; unless they say otherwise, they return when the request is done.
///
/// The debugger pauses the machine before it accesses it and resumes it afterwards. It never changes
/// guest memory for a breakpoint: what a vCPU stops for arrives as
/// [`StopConditions`](hindsight_cpu::stops::StopConditions) in [`DebugTarget::resume`], which can
/// also say that the machine lacks something.
///
/// `examples/toy` implements it for a small machine, all abilities included.
pub trait DebugTarget: Send {
    /// The monitor's name, with which messages to the user begin.
    fn name(&self) -> &str;

    /// The number of vCPUs, 1 to 64.
    fn vcpu_count(&self) -> usize;

    /// CPUID as the guest executes it: EAX, EBX, ECX and EDX of a leaf and sub-leaf.
    fn cpuid(&self, leaf: u32, subleaf: u32) -> CpuidRegs;

    /// The machine's RAM. It may be read while the machine runs.
    fn memory(&self) -> &dyn PhysicalMemory;

    /// Writes RAM while the machine is paused; all of `bytes` is RAM.
    ///
    /// Discards whatever the machine derived from the old contents, such as decoded instructions and
    /// checkpoints of a later time.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn write_memory(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), TargetError>;

    /// Pauses all vCPUs, each between two instructions, and returns when none runs any more.
    ///
    /// No effect on a machine that is paused.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn pause(&mut self) -> Result<(), TargetError>;

    /// Resumes the machine. `vcpus` has one element for each vCPU; one without a value stays where it
    /// is until a later resume.
    ///
    /// Does not wait for the vCPUs to run. A vCPU that meets one of its conditions, completes its
    /// action or cannot continue waits, queues a [`VcpuStop`] and notifies
    /// [`DebugTarget::stop_event`]; the others run until the debugger pauses them.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Refused`] when the machine cannot do what one vCPU is to do, say because no
    /// engine has that many breakpoints. No vCPU has then resumed.
    fn resume(&mut self, vcpus: &[Option<VcpuResume>]) -> Result<(), ResumeError>;

    /// A file descriptor that is readable while [`DebugTarget::take_stops`] may have something: see
    /// [`super::Notifier`].
    fn stop_event(&self) -> BorrowedFd<'_>;

    /// Takes the queued reports of vCPUs that stopped by themselves, in order.
    ///
    /// Where there are any, the machine is paused when this returns.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn take_stops(&mut self) -> Result<Vec<VcpuStop>, TargetError>;

    /// Whether the machine is paused until its first client resumes it.
    fn starts_paused(&self) -> bool {
        false
    }

    /// A client begins to hold the machine paused, or ends that. Limits of the run's time should not count
    /// meanwhile.
    fn set_held(&mut self, _held: bool) {}

    /// Ends the machine, whether it is paused or not; does not wait for that.
    fn kill(&mut self);

    /// The state of a vCPU.
    ///
    /// # Errors
    ///
    /// When the machine has ended, or the hypervisor does not return the state.
    fn state(&mut self, vcpu: usize) -> Result<Box<CpuState>, TargetError>;

    /// Replaces the state of a vCPU. The debugger has checked that a processor can be in this state.
    ///
    /// # Errors
    ///
    /// When the machine has ended, or the hypervisor does not accept the state.
    fn set_state(&mut self, vcpu: usize, state: &CpuState) -> Result<(), TargetError>;

    /// Reads MSRs that [`CpuState`] does not hold, as RDMSR does but without its side effects. `None`
    /// for each MSR that this vCPU lacks.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    fn read_msrs(&mut self, vcpu: usize, indices: &[u32]) -> Result<Vec<Option<u64>>, TargetError>;

    /// Writes an MSR that [`CpuState`] does not hold, as WRMSR does. `false`: the guest would get
    /// #GP(0), and nothing was written.
    ///
    /// # Errors
    ///
    /// When the machine has ended, or the hypervisor refuses.
    fn write_msr(&mut self, vcpu: usize, index: u32, value: u64) -> Result<bool, TargetError>;

    /// Reverse execution, if this machine supports it. Called once, when a debugger is set up, and then for each use.
    ///
    /// # Errors
    ///
    /// When it cannot.
    fn reverse(&mut self) -> Result<&mut dyn ReverseExecution, Unavailable> {
        Err(Unavailable("this machine cannot go back".into()))
    }

    /// Recording of branches, if this machine has it.
    fn branch_trace(&mut self) -> Option<&mut dyn BranchTrace> {
        None
    }

    /// Monitor commands about this machine, if it has any.
    fn commands(&mut self) -> Option<&mut dyn MachineCommands> {
        None
    }
}

//! What the interpreter needs from the machine around the processor.

pub use hindsight_cpu::branch::{Branch, BranchClass, Observe};
pub use hindsight_cpu::pmu::EngineCounting as Counting;
use hindsight_cpu::pmu::Ring;
use hindsight_cpu::pmu::pebs::PebsOutcome as Stored;
pub use hindsight_cpu::transaction::{AbortCause as Cause, TransactionEvent as Step};
pub use hindsight_cpu::uarch::InstructionAccesses as Accesses;

/// The access raises #GP(0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gp;

/// What waits for the processor at an instruction boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// A maskable interrupt whose priority is above the processor's.
    pub interrupt: bool,
    /// A non-maskable interrupt. [`Platform::acknowledge_nmi`] takes it.
    pub nmi: bool,
    /// A system-management interrupt. [`Platform::acknowledge_smi`] takes it.
    pub smi: bool,
    /// Anything that the caller of [`crate::Vcpu::run`] must see to: INIT, start-up IPI, a stop.
    pub leave: bool,
}

/// The machine around one virtual processor.
///
/// Every call that may depend on time is preceded by [`Platform::retired`].
pub trait Platform {
    /// IN and INS: 1, 2 or 4 bytes from a port.
    fn port_read(&mut self, port: u16, data: &mut [u8]);
    /// OUT and OUTS: 1, 2 or 4 bytes to a port.
    fn port_write(&mut self, port: u16, data: &[u8]);
    /// A read of guest-physical memory that is not RAM: 1 to 8 bytes.
    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]);
    /// A write to guest-physical memory that is not writable RAM: 1 to 8 bytes.
    fn mmio_write(&mut self, gpa: u64, data: &[u8]);
    /// RDMSR of an MSR that the interpreter does not hold itself.
    ///
    /// # Errors
    /// [`Gp`] where the processor raises #GP(0).
    fn rdmsr(&mut self, index: u32) -> Result<u64, Gp>;
    /// WRMSR of an MSR that the interpreter does not hold itself.
    ///
    /// # Errors
    /// [`Gp`] where the processor raises #GP(0).
    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), Gp>;
    /// RDPMC; the default has no counters.
    ///
    /// # Errors
    /// [`Gp`] where the processor raises #GP(0).
    fn rdpmc(&mut self, _index: u32) -> Result<u64, Gp> {
        Err(Gp)
    }
    /// CPUID: EAX, EBX, ECX, EDX. The bits that follow CR4 and XCR0 are put in by the interpreter.
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Whether results must be the same on every host: then estimates and transcendental functions
    /// are not left to the host's processor. Asked once.
    fn portable(&self) -> bool {
        false
    }
    /// The time-stamp counter as RDTSC shows it.
    fn tsc(&mut self) -> u64;
    /// IA32_TSC_AUX.
    fn tsc_aux(&mut self) -> u32;
    /// 64 random bits for RDRAND and RDSEED.
    fn random(&mut self) -> u64;
    /// The task priority: TPR bits `[7:4]` of the local APIC.
    fn cr8(&mut self) -> u8;
    /// MOV to CR8.
    fn set_cr8(&mut self, priority: u8);
    /// What waits. Polled at block boundaries at a bounded interval, and after anything that may
    /// change it.
    fn pending(&mut self) -> Pending;
    /// Acknowledges the interrupt controller's highest interrupt.
    fn acknowledge(&mut self) -> Option<u8>;
    /// Takes the pending NMI.
    fn acknowledge_nmi(&mut self) {}
    /// Takes the pending system-management interrupt.
    fn acknowledge_smi(&mut self) {}
    /// The processor enters system-management mode, or leaves it.
    fn smm(&mut self, _entered: bool) {}
    /// Retired instructions since [`crate::Vcpu::new`], how many of them at CPL 1 to 3, and core
    /// cycles: before a call that may depend on time. An instruction belongs to the level that it
    /// starts at. A cycle is a retired instruction, or one more iteration of a repeated string
    /// instruction.
    fn retired(&mut self, _count: u64, _user: u64, _cycles: u64) {}
    /// What must be reported. Asked at the start of a run, after each WRMSR that is the platform's,
    /// and after the calls below.
    fn observe(&mut self) -> Observe {
        Observe::default()
    }
    /// Branches in order, as [`Observe`] asks for them: before anything that could look at them,
    /// and at the end of every run.
    fn branches(&mut self, _branches: &mut [Branch]) {}

    /// Told before [`Platform::branches`]: the base of CS, as it counts, of the code that these
    /// branches are in. Where a far branch changed it, that one is the first, and the base is the one
    /// that it went to.
    fn code_base(&mut self, _base: u64) {}
    /// A #DB is about to be delivered; only told when [`Observe::debug_exceptions`] is set.
    fn debug_exception(&mut self) {}
    /// Moves the performance counters up to now, and says how far they let the processor run and
    /// what they are told. Asked when [`Platform::observe`] is, and where the last answer ends.
    fn counting(&mut self) -> Counting {
        Counting::NONE
    }
    /// An instruction accessed memory; told if [`Counting::accesses`] asks for it. Answers how much
    /// of that quota it has used, at least 1.
    fn accessed(&mut self, _ring: Ring, _accesses: &Accesses<'_>) -> u64 {
        1
    }
    /// The line at a guest-physical address, or everything, was flushed from the caches.
    fn flushed(&mut self, _gpa: Option<u64>) {}
    /// The PEBS record of [`Counting::record`] was stored, or could not be.
    fn pebs_stored(&mut self, _stored: &Stored) {}
    /// A transaction begins or ends. [`Platform::branches`] was told all branches before.
    fn transaction(&mut self, _step: Step, _ring: Ring) {}
    /// Whether transactions may go on at all; otherwise each aborts at its XBEGIN.
    fn may_transact(&self) -> bool {
        true
    }
    /// The BTS buffer is at its threshold: a performance-monitoring interrupt is due.
    fn request_pmi(&mut self) {}
}

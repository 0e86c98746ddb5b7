//! What surrounds the processor: the traits that the user of the interpreter implements.

pub use hindsight_cpu::branch::{Branch, BranchClass, Observe};
use hindsight_cpu::pmu::pebs::PebsOutcome;
pub use hindsight_cpu::pmu::{EngineCounting as Counting, Ring};
pub use hindsight_cpu::transaction::{AbortCause, TransactionEvent};
pub use hindsight_cpu::uarch::InstructionAccesses as Accesses;
pub use hindsight_regs::vector::GpFault;
use hindsight_regs::vector::Vector;

/// What is pending for the processor at an instruction boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// A maskable interrupt whose priority is above the processor's:
    /// [`InterruptSource::acknowledge`] takes it.
    pub interrupt: bool,
    /// A non-maskable interrupt: [`InterruptSource::acknowledge_nmi`] takes it.
    pub nmi: bool,
    /// A system-management interrupt: [`InterruptSource::acknowledge_smi`] takes it.
    pub smi: bool,
    /// Anything that the caller of [`crate::Vcpu::run`] must handle: INIT, a start-up IPI, a stop.
    pub leave: bool,
}

/// How far the processor has come since [`crate::Vcpu::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RetiredCounts {
    /// Retired instructions. A repeated string instruction counts once.
    pub instructions: u64,
    /// Of these, the ones that started at CPL 1 to 3.
    pub user: u64,
    /// Core cycles: a retired instruction is one, and so is each iteration of a repeated string
    /// instruction beyond its first.
    pub cycles: u64,
}

impl RetiredCounts {
    /// The progress from `earlier`, which comes from the same processor, to `self`.
    #[must_use]
    pub const fn since(&self, earlier: &Self) -> Self {
        Self {
            instructions: self.instructions.saturating_sub(earlier.instructions),
            user: self.user.saturating_sub(earlier.user),
            cycles: self.cycles.saturating_sub(earlier.cycles),
        }
    }

    /// The cycles that count for CPL 1 to 3; the rest counts for CPL 0.
    ///
    /// Deviation: cycles are divided in proportion to the instructions, which is exact unless a
    /// repeated string instruction and a change of the privilege level are in the same interval.
    pub fn user_cycles(&self) -> u64 {
        let share = u128::from(self.cycles) * u128::from(self.user);
        let share = share.checked_div(u128::from(self.instructions));
        u64::try_from(share.unwrap_or(0)).map_or(self.cycles, |share| share.min(self.cycles))
    }
}

/// An event that changes the state of the system, for [`Observer::system_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SystemEvent {
    /// MOV to a control register completed.
    ControlRegister {
        /// Its number.
        number: u8,
        /// The value that was written.
        value: u64,
    },
    /// RDMSR of an MSR that the interpreter holds itself completed.
    MsrRead {
        /// MSR number.
        index: u32,
        /// The value that was read.
        value: u64,
    },
    /// WRMSR to such an MSR completed.
    MsrWritten {
        /// MSR number.
        index: u32,
        /// The value that was written.
        value: u64,
    },
}

/// What raised an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryKind {
    /// A fault or trap of the processor.
    Exception,
    /// INT n, INT3, INTO or INT1.
    Software,
    /// A maskable interrupt or NMI.
    External,
}

/// The fault that the delivery of an event met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveryFault {
    /// Its vector.
    pub vector: Vector,
    /// Its error code.
    pub code: Option<u32>,
    /// CR2 of a page fault.
    pub cr2: Option<u64>,
}

/// An event that the processor delivered through the IDT, or failed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// What raised it.
    pub kind: DeliveryKind,
    /// Its vector.
    pub vector: Vector,
    /// Its error code.
    pub code: Option<u32>,
    /// CS selector and RIP of the instruction that was interrupted or raised it.
    pub at: (u16, u64),
    /// The privilege level there.
    pub cpl: u8,
    /// CR2, which a page fault has set.
    pub cr2: u64,
    /// Linear address of its IDT entry.
    pub entry: u64,
    /// Size of an IDT entry in bytes.
    pub entry_size: u8,
    /// Limit of the IDT.
    pub idt_limit: u32,
    /// It was raised by the fault of the delivery before it.
    pub nested: bool,
    /// CS selector and RIP of the handler, or what prevented the delivery.
    pub outcome: Result<(u16, u64), DeliveryFault>,
}

/// I/O ports and memory-mapped devices.
pub trait Bus {
    /// IN and INS: reads 1, 2 or 4 bytes from a port.
    fn port_read(&mut self, port: u16, data: &mut [u8]);
    /// OUT and OUTS: writes 1, 2 or 4 bytes to a port.
    fn port_write(&mut self, port: u16, data: &[u8]);
    /// Reads 1 to 8 bytes of guest-physical addresses that are not RAM or ROM.
    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]);
    /// Writes 1 to 8 bytes to guest-physical addresses that are not RAM.
    fn mmio_write(&mut self, gpa: u64, data: &[u8]);
}

/// Model-specific registers and CPUID.
pub trait MsrHandler {
    /// RDMSR of an MSR that the interpreter does not hold itself. It holds IA32_EFER, IA32_STAR,
    /// IA32_LSTAR, IA32_CSTAR, IA32_PAT, IA32_SYSENTER_CS, IA32_SYSENTER_ESP, IA32_SYSENTER_EIP and
    /// the bases of FS and GS.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn rdmsr(&mut self, index: u32) -> Result<u64, GpFault>;
    /// WRMSR of such an MSR.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), GpFault>;
    /// RDPMC.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn rdpmc(&mut self, index: u32) -> Result<u64, GpFault>;
    /// IA32_TSC_AUX, for RDTSCP and RDPID.
    fn tsc_aux(&mut self) -> u32;
    /// CPUID: EAX, EBX, ECX, EDX. The interpreter sets the bits that follow from CR4 and XCR0. What
    /// it cannot execute must not be shown: see [`crate::supported_cpuid`].
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Whether results must be the same on every host: estimates and transcendental functions are
    /// then computed in software. Called once.
    fn portable_results(&self) -> bool;
}

/// Interrupts, system-management mode and time.
pub trait InterruptSource {
    /// What is pending. Called at block boundaries at a bounded interval, and after anything that
    /// may change it.
    fn pending(&mut self) -> Pending;
    /// Acknowledges the interrupt controller's highest interrupt; returns its vector.
    fn acknowledge(&mut self) -> Option<u8>;
    /// Takes the pending NMI.
    fn acknowledge_nmi(&mut self);
    /// NMIs are no longer blocked: of those that arrived meanwhile one is pending.
    fn nmis_unblocked(&mut self);
    /// Takes the pending system-management interrupt.
    fn acknowledge_smi(&mut self);
    /// The processor enters system-management mode, or leaves it.
    fn smm(&mut self, entered: bool);
    /// The task priority: TPR bits `[7:4]` of the local APIC.
    fn cr8(&mut self) -> u8;
    /// MOV to CR8, with a value below 16.
    fn set_cr8(&mut self, priority: u8);
    /// The processor has come so far. Called before every call that may depend on time.
    fn advance(&mut self, counts: RetiredCounts);
    /// The time-stamp counter, as RDTSC shows it.
    fn tsc(&mut self) -> u64;
    /// Drives the FERR# pin, with CR0.NE clear. Returns whether the IGNNE# pin is asserted.
    fn set_ferr(&mut self, asserted: bool) -> bool;
    /// 64 random bits for RDRAND and RDSEED; `None` if there are none now, which CF then shows.
    fn random(&mut self) -> Option<u64>;
}

/// Models that follow the guest: branch recording, performance counters, caches.
pub trait Observer {
    /// What must be reported. Called at the start of a run, after each WRMSR that is the platform's,
    /// and after the methods of this trait that report something.
    fn observe(&mut self) -> Observe;
    /// Receives branches in the order of execution, as far as [`Observe`] requests them: always
    /// before an operation that can read their records, and at the end of every run.
    ///
    /// `cs_base` is the effective base of CS after these branches. Only the first one can be a far
    /// branch that changed it.
    fn branches(&mut self, cs_base: u64, branches: &mut [Branch]);
    /// An event was delivered, or its delivery faulted. By default that is of no interest.
    fn delivery(&mut self, _: &Delivery) {}
    /// A #DB is about to be delivered. Called if [`Observe::debug_exceptions`] is set.
    fn debug_exception(&mut self);
    /// Updates the performance counters. Returns how far the processor may run before the next update,
    /// and the events that it must report for them. Called together with [`Observer::observe`], and
    /// when that limit is reached.
    fn counting(&mut self) -> Counting;
    /// Reports the memory accesses of an instruction. Called if [`Counting::accesses`] is a quota.
    /// Returns how much of the quota they have used, at least 1.
    fn accesses(&mut self, ring: Ring, accesses: &Accesses<'_>) -> u64;
    /// The cache line at a guest-physical address was flushed, or, for `None`, all of them.
    fn caches_flushed(&mut self, gpa: Option<u64>);
    /// The PEBS record of [`Counting::record`] was stored, or could not be.
    fn pebs_stored(&mut self, stored: &PebsOutcome);
    /// The BTS buffer is at its threshold: a performance-monitoring interrupt is due.
    fn request_pmi(&mut self);
    /// Whether transactions may be executed; otherwise each one aborts at its XBEGIN.
    fn allows_transactions(&self) -> bool;
    /// A transaction begins or ends. All branches before it were reported.
    fn transaction(&mut self, event: TransactionEvent, ring: Ring);
    /// Reports a system event. Called if [`Observe::system_events`] is set.
    fn system_event(&mut self, event: SystemEvent);
}

/// Everything that surrounds one virtual processor.
///
/// It is implemented for every type that implements its parts.
pub trait Platform: Bus + MsrHandler + InterruptSource + Observer {}

impl<T: Bus + MsrHandler + InterruptSource + Observer> Platform for T {}

//! The platform of a processor: traits that the interpreter's user implements.

pub use hindsight_cpu::branch::{Branch, BranchClass, Observe};
use hindsight_cpu::pmu::pebs::{PebsLbr, PebsOutcome};
pub use hindsight_cpu::pmu::{EngineCounting as Counting, Ring};
pub use hindsight_cpu::transaction::{AbortCause, TransactionEvent};
pub use hindsight_cpu::uarch::{InstructionAccesses as Accesses, MemoryAccess};
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
    /// The caller of [`crate::Vcpu::run`] must act: an INIT, a start-up IPI or a stop.
    pub leave: bool,
}

/// Instructions and cycles of the processor since [`crate::Vcpu::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RetiredCounts {
    /// Retired instructions. A repeated string instruction counts once.
    pub instructions: u64,
    /// Those that started at CPL 1 to 3.
    pub user: u64,
    /// Core cycles: a retired instruction is one, and so is each iteration of a repeated string
    /// instruction beyond its first.
    pub cycles: u64,
}

impl RetiredCounts {
    /// Returns the difference from `earlier`, which comes from the same processor.
    #[must_use]
    pub const fn since(&self, earlier: &Self) -> Self {
        Self {
            instructions: self.instructions.saturating_sub(earlier.instructions),
            user: self.user.saturating_sub(earlier.user),
            cycles: self.cycles.saturating_sub(earlier.cycles),
        }
    }

    /// Returns the cycles spent at CPL 1 to 3; the others are those of CPL 0.
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
    /// RDMSR of an MSR that the interpreter itself stores completed.
    MsrRead {
        /// MSR number.
        index: u32,
        /// The value that was read.
        value: u64,
    },
    /// WRMSR to an MSR that the interpreter itself stores completed.
    MsrWritten {
        /// MSR number.
        index: u32,
        /// The value that was written.
        value: u64,
    },
}

/// The source of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryKind {
    /// A fault or trap of the processor.
    Exception,
    /// INT n, INT3, INTO or INT1.
    Software,
    /// A maskable interrupt or NMI.
    External,
}

/// The fault that prevented the delivery of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveryFault {
    /// Its vector.
    pub vector: Vector,
    /// Its error code.
    pub code: Option<u32>,
    /// CR2, if it is a page fault.
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
    /// Whether a fault of the previous delivery raised it.
    pub nested: bool,
    /// CS selector and RIP of the handler, or the fault that prevented the delivery.
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
    /// Handles RDMSR of an MSR that the interpreter does not store itself.
    ///
    /// It stores IA32_EFER, IA32_STAR, IA32_LSTAR, IA32_CSTAR, IA32_PAT, IA32_SYSENTER_CS,
    /// IA32_SYSENTER_ESP, IA32_SYSENTER_EIP and the bases of FS and GS.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn rdmsr(&mut self, index: u32) -> Result<u64, GpFault>;
    /// Handles WRMSR of an MSR that the interpreter does not store itself.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), GpFault>;
    /// RDPMC.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn rdpmc(&mut self, index: u32) -> Result<u64, GpFault>;
    /// Returns IA32_TSC_AUX, for RDTSCP and RDPID.
    fn tsc_aux(&mut self) -> u32;
    /// Returns EAX, EBX, ECX and EDX of a CPUID leaf.
    ///
    /// The interpreter sets the bits that follow from CR4 and XCR0. CPUID must not report what the
    /// interpreter cannot execute: see [`crate::supported_cpuid`].
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Whether results must be the same on every host. Called once.
    ///
    /// If so, estimates and transcendental functions are computed in software.
    fn portable_results(&self) -> bool;
}

/// Interrupts, system-management mode and time.
pub trait InterruptSource {
    /// Returns the events that are pending for the processor.
    ///
    /// Called at block boundaries at a bounded interval, and after anything that may change the
    /// result.
    fn pending(&mut self) -> Pending;
    /// Acknowledges the interrupt controller's highest interrupt; returns its vector.
    fn acknowledge(&mut self) -> Option<u8>;
    /// Acknowledges the pending NMI.
    fn acknowledge_nmi(&mut self);
    /// Reports that NMIs are no longer blocked.
    ///
    /// Of the NMIs that arrived while they were blocked, one is pending.
    fn nmis_unblocked(&mut self);
    /// Acknowledges the pending system-management interrupt.
    fn acknowledge_smi(&mut self);
    /// Reports that the processor enters or leaves system-management mode.
    fn smm(&mut self, entered: bool);
    /// Returns the task priority: TPR bits `[7:4]` of the local APIC.
    fn cr8(&mut self) -> u8;
    /// Sets the task priority, on MOV to CR8; it is below 16.
    fn set_cr8(&mut self, priority: u8);
    /// Reports how far the processor has run.
    ///
    /// Called before every call that may depend on time.
    fn advance(&mut self, counts: RetiredCounts);
    /// Returns the time-stamp counter, as RDTSC shows it.
    fn tsc(&mut self) -> u64;
    /// Drives the FERR# pin, with CR0.NE clear. Returns whether the IGNNE# pin is asserted.
    fn set_ferr(&mut self, asserted: bool) -> bool;
    /// Returns 64 random bits for RDRAND and RDSEED.
    ///
    /// `None` if there are none now; the instruction then clears CF.
    fn random(&mut self) -> Option<u64>;
}

/// Models that observe the guest: branch recording, performance counters, caches.
pub trait Observer {
    /// Returns what the processor must report to the platform.
    ///
    /// Called at the start of a run, after each WRMSR that the platform handles, and after the
    /// methods of this trait that report something.
    fn observe(&mut self) -> Observe;
    /// Receives the branches that [`Observe`] requests, in the order of execution.
    ///
    /// Called before every operation that can read their records, and at the end of every run.
    ///
    /// `cs_base` is the effective base of CS after these branches. Only the first one can be a far
    /// branch that changed it.
    fn branches(&mut self, cs_base: u64, branches: &mut [Branch]);
    /// Reports the number of near branches before those that [`Observer::branches`] receives next.
    ///
    /// Called if [`Observe::newest`] allows that. The default implementation ignores it.
    fn skip_branches(&mut self, _count: u64) {}
    /// Reports the number of near branches of a class at privilege levels of a ring, instead of the
    /// branches.
    ///
    /// Called if [`Observe::counted`] allows that. The default implementation ignores it.
    fn count_branches(&mut self, _ring: Ring, _class: BranchClass, _count: u64) {}
    /// Ends the reports of [`Observer::count_branches`], unless [`Observer::branches`] does: the
    /// counters can be brought up to date.
    fn counted_branches(&mut self) {}
    /// Reports that an event was delivered, or that its delivery faulted.
    ///
    /// The default implementation ignores it.
    fn delivery(&mut self, _: &Delivery) {}
    /// Reports that a #DB is about to be delivered.
    ///
    /// Called if [`Observe::debug_exceptions`] is set.
    fn debug_exception(&mut self);
    /// Updates the performance counters.
    ///
    /// Returns how far the processor may run before the next update, and the events that it must
    /// report for them. Called together with [`Observer::observe`], and when that limit is reached.
    fn counting(&mut self) -> Counting;
    /// Reports the memory accesses of an instruction.
    ///
    /// Called if [`Counting::accesses`] is a quota. Returns how much of the quota they have used,
    /// at least 1.
    fn accesses(&mut self, ring: Ring, accesses: &Accesses<'_>) -> u64;
    /// Reports an access within one line, of an instruction that will retire.
    ///
    /// Called if [`Counting::batches`], with [`Observer::accesses_of_block`] soon after it.
    fn line_access(&mut self, ring: Ring, access: &MemoryAccess);
    /// Reports how many instructions of a block loaded, and how many stored.
    ///
    /// None of them was locked or accessed two lines. The accesses that were not passed to
    /// [`Observer::line_access`] were to the line of their set in the L1 that was used last, and
    /// stores had written that line before.
    fn accesses_of_block(&mut self, ring: Ring, loads: u64, stores: u64);
    /// Reports that a cache line was flushed, or all of them if `gpa` is `None`.
    fn caches_flushed(&mut self, gpa: Option<u64>);
    /// Returns the LBR stack for a PEBS record, of which all branches have been reported.
    fn pebs_lbr(&mut self) -> PebsLbr;
    /// Reports that the PEBS record of [`Counting::record`] was or was not stored.
    fn pebs_stored(&mut self, stored: &PebsOutcome);
    /// Requests a PMI, because the BTS buffer is at its threshold.
    fn request_pmi(&mut self);
    /// Whether transactions may execute; otherwise each one aborts at its XBEGIN.
    fn allows_transactions(&self) -> bool;
    /// Reports that a transaction begins or ends.
    ///
    /// All branches before it have been reported.
    fn transaction(&mut self, event: TransactionEvent, ring: Ring);
    /// Reports a system event. Called if [`Observe::system_events`] is set.
    fn system_event(&mut self, event: SystemEvent);
}

/// The whole platform of one virtual processor.
///
/// It is implemented for every type that implements its parts.
pub trait Platform: Bus + MsrHandler + InterruptSource + Observer {}

impl<T: Bus + MsrHandler + InterruptSource + Observer> Platform for T {}

//! A complete platform for one processor, made of the models of `hindsight-cpu`.

mod observer;
mod parts;
#[cfg(test)]
mod tests;

pub use parts::{InterruptController, NoDevices, NoInterrupts};

use hindsight_cpu::armed::Armed;
use hindsight_cpu::cpuid::{CpuModel, CpuidConfig, CpuidTable};
use hindsight_cpu::msr::{MsrConfig, Msrs, Now, RdmsrOutcome, UpdateBefore, WrmsrOutcome, find};
use hindsight_cpu::pmu::{EventKind, EventTotals};
use hindsight_cpu::uarch::{CacheGeometry, CacheModel, CoreUarch};
use hindsight_regs::msr as regs;

use crate::platform::{Bus, GpFault, InterruptSource, MsrHandler, Pending, RetiredCounts, Ring};
use crate::supported::supported_cpuid;

/// A [`Platform`](crate::Platform) of one processor with the models of `hindsight-cpu`.
///
/// It gives the guest CPUID, the MSRs, the time-stamp counter, branch recording, the
/// performance-monitoring unit and, with [`MsrConfig::uarch`], a branch predictor and caches. The
/// user supplies the devices as a [`Bus`], and an [`InterruptController`].
///
/// Time is virtual: one core cycle is one tick of the TSC, so that every run of a guest is the
/// same as long as the bus and the interrupt controller behave the same. Branch trace messages
/// (IA32_DEBUGCTL.TR without BTS) are dropped. A monitor that requires host time, several
/// processors, or the messages implements the four traits of [`Platform`](crate::Platform) itself.
#[derive(Debug)]
pub struct ModelPlatform<B, I> {
    /// I/O ports and memory-mapped devices.
    pub bus: B,
    /// The source of interrupts.
    pub interrupts: I,
    msrs: Msrs,
    cpuid: CpuidTable,
    uarch: CoreUarch,
    l3: CacheModel,
    totals: EventTotals,
    /// The counts at the last call of `advance`.
    counts: RetiredCounts,
    /// Ticks since the platform was created.
    ticks: u64,
    random: u64,
}

impl<B: Bus, I: InterruptController> ModelPlatform<B, I> {
    /// A platform whose processor is in its state after RESET.
    ///
    /// CPUID shows the intersection of `model` with what the interpreter executes on this host, and
    /// the facilities of `config`, which must be a subset of
    /// [`Facilities::INTERP`](hindsight_cpu::facility::Facilities::INTERP).
    pub fn new(model: CpuModel, config: MsrConfig, bus: B, interrupts: I) -> Self {
        let cpuid = CpuidConfig::new(model, config.facilities, config.tsc_hz);
        let cpuid = CpuidTable::new(&cpuid, supported_cpuid);
        Self {
            bus,
            interrupts,
            msrs: Msrs::new(config.with_cpuid(&cpuid)),
            cpuid,
            uarch: CoreUarch::default(),
            l3: CacheModel::new(CacheGeometry::L3),
            totals: EventTotals::default(),
            counts: RetiredCounts::default(),
            ticks: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// The MSR models, as of the last access or run.
    pub const fn msrs(&self) -> &Msrs {
        &self.msrs
    }

    /// The CPUID table of the processor.
    pub const fn cpuid_table(&self) -> &CpuidTable {
        &self.cpuid
    }

    /// The facilities that the guest's MSRs arm.
    ///
    /// Those of DR7 and RFLAGS.TF come from [`Vcpu::armed`](crate::Vcpu::armed).
    pub fn armed(&self) -> Armed {
        self.msrs.armed()
    }

    /// Ticks of the virtual clock since the platform was created.
    pub const fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Advances the clock by `ticks`, in which the processor was halted, and counts one wake-up.
    ///
    /// The time-stamp counter advances; the performance counters count no cycles. Call it after
    /// [`Exit::Halted`](crate::Exit::Halted), for timers to become due.
    pub fn advance_halted(&mut self, ticks: u64) {
        self.totals.add(EventKind::Wake, Ring::Os, 1);
        self.ticks = self.ticks.wrapping_add(ticks);
        self.report_time();
    }

    const fn now(&self) -> Now {
        Now { ticks: self.ticks }
    }

    /// The time-stamp counter, as the guest reads it.
    fn read_tsc(&self) -> u64 {
        self.msrs.tsc().read(self.ticks)
    }

    /// Adds core cycles, each of which is a tick of the clock.
    const fn add_cycles(&mut self, ring: Ring, count: u64) {
        self.totals.add(EventKind::Cycle, ring, count);
        self.totals.add(EventKind::TscTick, ring, count);
    }

    fn report_time(&mut self) {
        let tsc = self.read_tsc();
        self.interrupts.advance(self.ticks, tsc);
    }

    /// Advances the performance counters to the totals.
    fn sync_counters(&mut self) {
        if self.msrs.sync_counters(&self.totals) {
            self.interrupts.request_pmi();
        }
    }

    /// Updates what an access to MSR `index` depends on, as its row in the table says.
    fn update_before(&mut self, index: u32) {
        match find(index).map_or(UpdateBefore::Nothing, |spec| spec.update) {
            UpdateBefore::Counters => self.sync_counters(),
            UpdateBefore::CacheOccupancy => {
                if let Some(rmid) = self.msrs.monitored_rmid() {
                    self.msrs.set_occupied_lines(self.l3.lines_of(rmid));
                }
            }
            UpdateBefore::Nothing => {}
        }
    }
}

impl<B: Bus, I> Bus for ModelPlatform<B, I> {
    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        self.bus.port_read(port, data);
    }

    fn port_write(&mut self, port: u16, data: &[u8]) {
        self.bus.port_write(port, data);
    }

    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]) {
        self.bus.mmio_read(gpa, data);
    }

    fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        self.bus.mmio_write(gpa, data);
    }
}

impl<B: Bus, I: InterruptController> MsrHandler for ModelPlatform<B, I> {
    fn rdmsr(&mut self, index: u32) -> Result<u64, GpFault> {
        self.update_before(index);
        match self.msrs.read(index, self.now()) {
            RdmsrOutcome::Value(value) => Ok(value),
            RdmsrOutcome::Apic => self.interrupts.rdmsr(index),
            // The interpreter holds the MSRs of the processor state and does not ask for them.
            RdmsrOutcome::Processor | RdmsrOutcome::Fault | RdmsrOutcome::Unclaimed => Err(GpFault),
        }
    }

    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), GpFault> {
        self.update_before(index);
        match self.msrs.write(index, value, self.now()) {
            WrmsrOutcome::Done(effect) => {
                if effect.tsc_moved {
                    self.report_time();
                }
                Ok(())
            }
            WrmsrOutcome::Apic => self.interrupts.wrmsr(index, value),
            // As for RDMSR.
            WrmsrOutcome::Processor | WrmsrOutcome::Fault | WrmsrOutcome::Unclaimed => Err(GpFault),
        }
    }

    fn rdpmc(&mut self, index: u32) -> Result<u64, GpFault> {
        self.sync_counters();
        self.msrs.rdpmc(index)
    }

    fn tsc_aux(&mut self) -> u32 {
        match self.msrs.read(regs::IA32_TSC_AUX, self.now()) {
            RdmsrOutcome::Value(value) => u32::try_from(value & 0xffff_ffff).unwrap_or(0),
            _ => 0,
        }
    }

    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.cpuid.query(leaf, subleaf, 0, 0, 0)
    }

    fn portable_results(&self) -> bool {
        self.cpuid.model().is_portable()
    }
}

impl<B: Bus, I: InterruptController> InterruptSource for ModelPlatform<B, I> {
    fn pending(&mut self) -> Pending {
        let pending = self.interrupts.pending();
        Pending {
            smi: pending.smi && self.msrs.has_smm(),
            ..pending
        }
    }

    fn acknowledge(&mut self) -> Option<u8> {
        self.interrupts.acknowledge()
    }

    fn acknowledge_nmi(&mut self) {
        self.interrupts.acknowledge_nmi();
    }

    fn nmis_unblocked(&mut self) {
        self.interrupts.nmis_unblocked();
    }

    fn acknowledge_smi(&mut self) {
        self.interrupts.acknowledge_smi();
    }

    fn smm(&mut self, entered: bool) {
        self.sync_counters();
        if entered {
            self.msrs.enter_smm();
        } else {
            self.msrs.leave_smm();
        }
    }

    fn cr8(&mut self) -> u8 {
        self.interrupts.cr8()
    }

    fn set_cr8(&mut self, priority: u8) {
        self.interrupts.set_cr8(priority);
    }

    fn advance(&mut self, counts: RetiredCounts) {
        debug_assert!(counts.cycles >= self.counts.cycles, "time does not go back");
        let new = counts.since(&self.counts);
        self.counts = counts;
        let system = new.instructions.saturating_sub(new.user);
        self.totals.add(EventKind::Instruction, Ring::Os, system);
        self.totals
            .add(EventKind::Instruction, Ring::User, new.user);
        let user = new.user_cycles();
        self.add_cycles(Ring::User, user);
        self.add_cycles(Ring::Os, new.cycles - user);
        if new.cycles != 0 {
            self.ticks = self.ticks.wrapping_add(new.cycles);
            self.report_time();
        }
    }

    fn tsc(&mut self) -> u64 {
        self.read_tsc()
    }

    fn set_ferr(&mut self, asserted: bool) -> bool {
        self.interrupts.set_ferr(asserted)
    }

    fn random(&mut self) -> Option<u64> {
        // SplitMix64, whose state is a counter: reproducible, and not for cryptography.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(mixed ^ mixed >> 31)
    }
}

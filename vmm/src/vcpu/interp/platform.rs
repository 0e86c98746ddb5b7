//! The platform of a vCPU in the interpreter: devices, MSRs, interrupts, time and observers.

use hindsight_cpu::branch::{Branch, BranchClass, Observe};
use hindsight_cpu::msr::{ArmedScope, RdmsrOutcome, WrmsrOutcome};
use hindsight_cpu::pmu::pebs::{PebsLbr, PebsOutcome};
use hindsight_cpu::pmu::{EngineCounting, EventQuota, Ring};
use hindsight_interp::{
    Accesses, Bus, Delivery, DeliveryKind, GpFault, InterruptSource, MemoryAccess, MsrHandler,
    Observer, Pending, RetiredCounts, SystemEvent, TransactionEvent,
};
use hindsight_regs::apic::ApicBase;
use hindsight_regs::cpuid::Feature;
use hindsight_regs::msr as regs;
use hindsight_trace::EventKinds;

use super::deliveries::{DeliveryChain, DeliveryText};
use super::host_random::HostRandom;
use super::run_log::{LoggedEvent, RunLog};
use crate::vcpu::hex_bytes::HexBytes;
use crate::vcpu::model::VcpuModel;
use crate::vcpu::recorder::{ExitKind, RecordedKind};

/// The APM control port of Intel chipsets: a write raises an SMI on the processor that makes it.
const APM_CONTROL: u16 = 0xb2;

/// Maximum number of TSC ticks that an instruction is assumed to take. With it a limit in cycles
/// becomes a limit in instructions; when that is reached, the cycles are checked again.
const TICKS_PER_INSTRUCTION: u64 = 16;
/// The fewest instructions between two such checks.
const INSTRUCTIONS_MIN: u64 = 128;

/// The platform of one vCPU in the interpreter.
#[derive(Debug)]
pub(crate) struct InterpPlatform {
    pub(crate) model: VcpuModel,
    /// The source of RDRAND and RDSEED outside of deterministic mode.
    random: HostRandom,
    /// Present in deterministic mode.
    pub(crate) log: Option<RunLog>,
    /// A #DB was raised since the run loop last asked.
    debug_exception: bool,
    /// The last exception and those that its delivery raised.
    pub(super) deliveries: DeliveryChain,
}

impl InterpPlatform {
    /// The platform of the vCPU that `model` belongs to.
    pub(super) fn new(model: VcpuModel) -> Self {
        Self {
            model,
            random: HostRandom::default(),
            log: None,
            debug_exception: false,
            deliveries: DeliveryChain::default(),
        }
    }

    /// Whether a #DB was raised since the last call.
    pub(super) fn take_debug_exception(&mut self) -> bool {
        std::mem::take(&mut self.debug_exception)
    }

    /// Serves an event that would be an exit under KVM, and records it.
    pub(super) fn served<T>(
        &mut self,
        kind: ExitKind,
        serve: impl FnOnce(&mut VcpuModel) -> T,
    ) -> T {
        self.model.record(RecordedKind::Exit(kind));
        let answer = serve(&mut self.model);
        self.model.record(RecordedKind::Enter);
        answer
    }

    /// Adds an event to the event hash of deterministic mode.
    fn log_event(&mut self, event: LoggedEvent, operand: u64, data: &[u8]) {
        if let Some(log) = &mut self.log {
            log.add_event(event, self.model.board.time.clock.now(), operand, data);
        }
    }

    /// Passes branches to the log, the models and the trace.
    fn pass_branches(&mut self, cs_base: u64, branches: &mut [Branch]) {
        if let Some(history) = &mut self.model.history {
            history.set_base(cs_base);
        }
        if let Some(log) = &mut self.log {
            log.branches.extend(branches);
        }
        if self.model.msrs.observe().branches || self.model.history.is_some() {
            self.model.branches(branches);
        }
        self.model.trace_branches(cs_base, branches);
    }

    /// Whether a timer is due before the end of this run, so that the run must end early. Only in
    /// deterministic mode.
    fn timer_is_earlier(&self) -> bool {
        let deadline = self.log.as_ref().map_or(0, |log| log.deadline);
        deadline != 0
            && self
                .model
                .board
                .buses
                .irq
                .next_event()
                .is_some_and(|due| due < deadline)
    }
}

impl Bus for InterpPlatform {
    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        self.served(ExitKind::PortRead(port), |model| {
            model.board.buses.ports.read(port, data);
        });
        self.model.trace_port(port, data, false);
        self.log_event(LoggedEvent::PortRead, port.into(), data);
        tracing::trace!(target: "io", "cpu {} in {port:#x} = {}", self.model.id, HexBytes(data));
    }

    fn port_write(&mut self, port: u16, data: &[u8]) {
        tracing::trace!(target: "io", "cpu {} out {port:#x} = {}", self.model.id, HexBytes(data));
        self.log_event(LoggedEvent::PortWrite, port.into(), data);
        self.model.trace_port(port, data, true);
        self.served(ExitKind::PortWrite(port), |model| {
            model.board.buses.ports.write(port, data);
        });
        if port == APM_CONTROL && self.model.msrs.has_smm() {
            self.model.board.buses.irq.inject_smi(self.model.id);
        }
    }

    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]) {
        self.served(ExitKind::MmioRead(gpa), |model| model.mmio_read(gpa, data));
        self.model.trace_mmio(gpa, data, false);
        self.log_event(LoggedEvent::MmioRead, gpa, data);
    }

    fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        self.log_event(LoggedEvent::MmioWrite, gpa, data);
        self.model.trace_mmio(gpa, data, true);
        self.served(ExitKind::MmioWrite(gpa), |model| {
            model.mmio_write(gpa, data)
        });
    }
}

impl MsrHandler for InterpPlatform {
    fn rdmsr(&mut self, index: u32) -> Result<u64, GpFault> {
        let value = self.served(ExitKind::Rdmsr(index), |model| match model.rdmsr(index) {
            RdmsrOutcome::Value(value) => Some(value),
            RdmsrOutcome::Apic => model.rdmsr_apic(index).ok(),
            // The interpreter answers MSRs of the processor state itself.
            RdmsrOutcome::Processor | RdmsrOutcome::Fault | RdmsrOutcome::Unclaimed => None,
        });
        self.model.record(RecordedKind::Rdmsr {
            index,
            answer: value,
        });
        self.model.trace_rdmsr(index, value);
        tracing::trace!(target: "msr", "cpu {} rdmsr {index:#x} = {value:x?}", self.model.id);
        let logged = value.unwrap_or(0);
        self.log_event(LoggedEvent::Rdmsr, index.into(), &logged.to_le_bytes());
        value.ok_or(GpFault)
    }

    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), GpFault> {
        self.log_event(LoggedEvent::Wrmsr, index.into(), &value.to_le_bytes());
        let effect = self.served(ExitKind::Wrmsr(index), |model| {
            match model.wrmsr(index, value) {
                WrmsrOutcome::Done(effect) => Some(effect),
                WrmsrOutcome::Apic => model.wrmsr_apic(index, value).ok(),
                // The interpreter answers MSRs of the processor state itself.
                WrmsrOutcome::Processor | WrmsrOutcome::Fault | WrmsrOutcome::Unclaimed => None,
            }
        });
        self.model.record(RecordedKind::Wrmsr {
            index,
            value,
            accepted: effect.is_some(),
        });
        self.model.trace_wrmsr(index, value, effect.is_some());
        let id = self.model.id;
        tracing::trace!(target: "msr", "cpu {id} wrmsr {index:#x} = {value:#x}: {effect:x?}");
        // The run loop reports what is armed at its next checkpoint.
        let control = &self.model.board.run.vcpus;
        match effect.ok_or(GpFault)?.armed {
            Some(ArmedScope::Vcpu) => control.doorbell(id).ring(),
            Some(ArmedScope::Package) => control.ring_all(),
            None => {}
        }
        Ok(())
    }

    fn rdpmc(&mut self, index: u32) -> Result<u64, GpFault> {
        let answer = self.model.rdpmc(index);
        let logged = answer.unwrap_or(0);
        self.log_event(LoggedEvent::Rdmsr, index.into(), &logged.to_le_bytes());
        answer
    }

    fn tsc_aux(&mut self) -> u32 {
        match self.model.rdmsr(regs::IA32_TSC_AUX) {
            RdmsrOutcome::Value(value) => u32::try_from(value & 0xffff_ffff).unwrap_or(0),
            _ => 0,
        }
    }

    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let id = u32::try_from(self.model.id).unwrap_or(0);
        let mut regs = self
            .model
            .board
            .package
            .cpuid
            .query(leaf, subleaf, id, 0, 0);
        if leaf == 1
            && self.model.board.buses.irq.apic_base(self.model.id) & ApicBase::EN.bits() == 0
        {
            regs[3] &= !Feature::APIC.mask();
        }
        regs
    }

    fn portable_results(&self) -> bool {
        self.model.board.package.cpuid.model().is_portable()
    }
}

impl InterruptSource for InterpPlatform {
    fn pending(&mut self) -> Pending {
        let (id, board) = (self.model.id, &self.model.board);
        let pending = board.buses.irq.pending(id);
        if pending.smi && !self.model.msrs.has_smm() {
            // A processor without system-management mode drops it (rule SMF-10).
            board.buses.irq.take_smi(id);
        }
        Pending {
            interrupt: pending.interrupt,
            nmi: pending.nmi,
            smi: pending.smi && self.model.msrs.has_smm(),
            leave: pending.init && !self.model.msrs.in_smm()
                || pending.sipi.is_some()
                || board.run.vcpus.doorbell(id).is_rung()
                || self.timer_is_earlier(),
        }
    }

    fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.model.board.buses.irq.acknowledge(self.model.id);
        tracing::trace!(target: "irq", "cpu {} interrupt {vector:x?}", self.model.id);
        if let Some(vector) = vector {
            self.model.wake();
            self.model.record(RecordedKind::Interrupt { vector });
            self.log_event(LoggedEvent::Interrupt, vector.into(), &[]);
        }
        vector
    }

    fn acknowledge_nmi(&mut self) {
        self.model.board.buses.irq.take_nmi(self.model.id);
        self.model.wake();
        self.log_event(LoggedEvent::Nmi, 2, &[]);
    }

    fn nmis_unblocked(&mut self) {
        self.model.board.buses.irq.merge_nmis(self.model.id);
    }

    fn acknowledge_smi(&mut self) {
        self.model.board.buses.irq.take_smi(self.model.id);
        self.model.wake();
        self.log_event(LoggedEvent::Smi, 0, &[]);
    }

    fn smm(&mut self, entered: bool) {
        self.model.smm(entered);
    }

    fn cr8(&mut self) -> u8 {
        u8::try_from(self.model.board.buses.irq.cr8(self.model.id)).unwrap_or(0)
    }

    fn set_cr8(&mut self, priority: u8) {
        self.model
            .board
            .buses
            .irq
            .set_cr8(self.model.id, priority.into());
    }

    fn advance(&mut self, counts: RetiredCounts) {
        let RetiredCounts {
            instructions,
            user,
            cycles,
        } = counts;
        self.model.pmu_totals().retired(instructions, user);
        if let Some(counter) = &mut self.model.counter {
            counter.set_retired(instructions, user);
        }
        if let Some(log) = &mut self.log {
            log.retired = instructions;
            let new = cycles.saturating_sub(log.cycles);
            if new != 0 {
                log.cycles = cycles;
                self.model.board.time.clock.advance(new);
            }
        } else {
            self.model.pmu_totals().set_core_cycles(cycles);
        }
    }

    fn tsc(&mut self) -> u64 {
        match self.model.rdmsr(regs::IA32_TIME_STAMP_COUNTER) {
            RdmsrOutcome::Value(value) => value,
            _ => 0,
        }
    }

    fn set_ferr(&mut self, asserted: bool) -> bool {
        self.model.board.buses.set_ferr(self.model.id, asserted)
    }

    fn random(&mut self) -> Option<u64> {
        if let Some(log) = &mut self.log {
            let value = log.random();
            self.log_event(LoggedEvent::Random, value, &[]);
            return Some(value);
        }
        self.random.next_u64()
    }
}

impl Observer for InterpPlatform {
    fn observe(&mut self) -> Observe {
        let required = self.model.msrs.observe();
        // The run hash of a deterministic run covers every branch.
        let traced = self.model.traced_kinds();
        let counter = self.model.counter.as_ref();
        let in_regions = counter.is_some_and(|counter| counter.has_regions());
        let records = self.model.history.is_some() || self.log.is_some();
        let mut observe = required;
        observe.branches |= records || traced.needs_branches() || counter.is_some();
        observe.not_taken |= counter.is_some();
        if records || traced.needs_branches() || counter.is_some() {
            observe.newest = 0;
            observe.counted = false;
        }
        if in_regions {
            observe.every = 1;
        }
        observe.system_events = traced.needs_system_events();
        observe
    }

    fn branches(&mut self, cs_base: u64, branches: &mut [Branch]) {
        self.model.count_branches(cs_base, branches);
        if self.model.counter.is_some() && !self.model.msrs.observe().not_taken {
            // Nothing else has requested those that were not taken.
            let taken = |branch: &&Branch| branch.class != BranchClass::NotTaken;
            let mut taken: Vec<_> = branches.iter().filter(taken).copied().collect();
            self.pass_branches(cs_base, &mut taken);
        } else {
            self.pass_branches(cs_base, branches);
        }
    }

    fn skip_branches(&mut self, count: u64) {
        self.model.msrs.skip_branches(count);
    }

    fn count_branches(&mut self, ring: Ring, class: BranchClass, count: u64) {
        self.model.pmu_totals.totals.add_class(class, ring, count);
    }

    fn counted_branches(&mut self) {
        self.model.count();
    }

    fn delivery(&mut self, delivery: &Delivery) {
        self.deliveries.add(delivery);
        self.model.trace_delivery(delivery);
        if let Some(counter) = &mut self.model.counter {
            counter.delivery(delivery);
        }
        if let (Some(history), DeliveryKind::Exception, Ok((_, handler))) =
            (&mut self.model.history, delivery.kind, &delivery.outcome)
        {
            history.exception(delivery.vector.0, *handler);
        }
        // Interrupts are events of the kind `irq`, unless something goes wrong.
        if delivery.kind != DeliveryKind::External || delivery.outcome.is_err() {
            let id = self.model.id;
            tracing::trace!(target: "exception", "cpu {id} {}", DeliveryText(delivery));
        }
    }

    fn debug_exception(&mut self) {
        self.model.msrs.debug_exception();
        self.debug_exception = true;
    }

    fn counting(&mut self) -> EngineCounting {
        // The limits are relative to the counters, so the counters are brought up to date first.
        if !self.model.msrs.pmu().needs().is_empty() {
            self.model.count();
        }
        let counting = self.model.counting();
        let limits = self.model.msrs.pmu().limits();
        let ticks = if self.log.is_some() {
            // An instruction is a tick of the clock.
            limits.ticks
        } else {
            let instructions = |ticks: u64| (ticks / TICKS_PER_INSTRUCTION).max(INSTRUCTIONS_MIN);
            limits.ticks.map(instructions)
        };
        // An instruction is at least one cycle.
        let as_instructions = limits.cycles.min(&ticks);
        let counter = self.model.counter.as_ref();
        let counted = counter.is_some_and(|counter| counter.counts_accesses());
        let traced_accesses = self.model.traced_kinds().contains(EventKinds::ACCESSES);
        let traced = counted || traced_accesses;
        EngineCounting {
            instructions: counting.instructions.min(&as_instructions),
            accesses: counting.accesses.or(traced.then_some(EventQuota::NONE)),
            fetches: counting.fetches || counted,
            cache_models: counting.cache_models | u8::from(counted) << 1,
            batches: counting.batches && !traced_accesses,
            ..counting
        }
    }

    fn accesses(&mut self, ring: Ring, accesses: &Accesses<'_>) -> u64 {
        self.model.trace_accesses(accesses);
        self.model.count_accesses(ring, accesses);
        // Without a counter or a cache model, the accesses are for the trace only.
        match self.model.counting().accesses {
            Some(_) => self.model.accessed(ring, accesses),
            None => 1,
        }
    }

    fn line_access(&mut self, ring: Ring, access: &MemoryAccess) {
        self.model.count_line_access(ring, access);
        if self.model.counting().accesses.is_some() {
            self.model.line_accessed(ring, access);
        }
    }

    fn accesses_of_block(&mut self, ring: Ring, loads: u64, stores: u64) {
        self.model.count_block_accesses(ring, loads, stores);
        if self.model.counting().accesses.is_some() {
            self.model.block_accessed(ring, loads, stores);
        }
    }

    fn caches_flushed(&mut self, gpa: Option<u64>) {
        self.model.flushed(gpa);
        if let Some(counter) = &mut self.model.counter {
            counter.flushed(gpa);
        }
    }

    fn pebs_lbr(&mut self) -> PebsLbr {
        self.model.msrs.pebs_lbr()
    }

    fn pebs_stored(&mut self, stored: &PebsOutcome) {
        self.model.pebs_stored(stored);
    }

    fn request_pmi(&mut self) {
        self.model.bts_requests_pmi();
    }

    fn allows_transactions(&self) -> bool {
        // When another thread aborts a transaction depends on host timing.
        self.log.is_none()
    }

    fn transaction(&mut self, event: TransactionEvent, ring: Ring) {
        self.model.transaction(event, ring);
    }

    fn system_event(&mut self, event: SystemEvent) {
        self.model.trace_system_event(event);
    }
}

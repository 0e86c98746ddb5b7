//! The models of one vCPU. An MSR access goes through the MSR table to the model that owns it.

use std::sync::Arc;

use hindsight_cpu::branch::Branch;
use hindsight_cpu::msr::{
    MsrEffect, MsrStateError, Msrs, MsrsState, Now, RdmsrOutcome, UpdateBefore, WrmsrOutcome, find,
};
use hindsight_cpu::pmu::pebs::PebsOutcome;
use hindsight_cpu::pmu::{EngineCounting, PmuNeeds, Ring};
use hindsight_cpu::state::CpuState;
use hindsight_cpu::transaction::TransactionEvent;
use hindsight_cpu::uarch::{
    AccessEvents, CacheModel, CoreUarch, InstructionAccesses, MemoryAccess,
};
use hindsight_regs::apic::ApicBase;
use hindsight_regs::msr as regs;
use hindsight_regs::vector::GpFault;
use hindsight_trace::{Event, EventKinds, VcpuTracer};

use crate::vcpu::board::Board;
use crate::vcpu::branch_history::BranchHistory;
use crate::vcpu::debug::stop::DebugRequests;
use crate::vcpu::hex_bytes::HexBytes;
use crate::vcpu::kernel_function::KernelFunction;
use crate::vcpu::pmu_totals::PmuTotals;
use crate::vcpu::process_tracker::ProcessTracker;
use crate::vcpu::recorder::{RecordedKind, Recorder};
use crate::vcpu::run_counter::RunCounter;
use crate::vcpu::stats::ExitCounts;
use crate::vcpu::translation::TranslationPolicy;

/// The models of one vCPU, and the board of its machine. The plain register state is with the engine.
#[derive(Debug)]
pub struct VcpuModel {
    /// The number of the vCPU, which is also its APIC ID.
    pub id: usize,
    /// The MSRs.
    pub msrs: Msrs,
    /// The rest of the machine.
    pub board: Arc<Board>,
    /// Records the events of this vCPU, for `hindsight demo`.
    pub recorder: Option<Arc<Recorder>>,
    /// The last branches, for a debugger.
    pub history: Option<Box<BranchHistory>>,
    /// The function of the guest's kernel that ends the recording, until it is found.
    pub record_stop: Option<Arc<KernelFunction>>,
    /// Branches are recorded from the start of the run, with or without a debugger.
    pub recorded_from_start: bool,
    /// Traces the events of this vCPU, for `hindsight trace`.
    pub tracer: Option<Box<VcpuTracer>>,
    /// Reads what a Linux guest runs, for `hindsight trace`.
    pub processes: Option<Arc<ProcessTracker>>,
    /// When the interpreter translates code.
    pub translation: TranslationPolicy,
    /// Counts what this vCPU does, for `hindsight stat`.
    pub counter: Option<Box<RunCounter>>,
    /// What a debugger requires of this vCPU.
    pub debug: DebugRequests,
    /// The number of exits of each kind.
    pub exits: ExitCounts,
    /// The event totals behind the performance counters.
    pub(super) pmu_totals: PmuTotals,
    /// The branch predictor, and the caches of the core.
    pub(crate) unit: CoreUarch,
    /// The state after a reset of the machine; `None` if a reset ends the run.
    pub at_reset: Option<Box<ResetState>>,
    /// The address of the local APIC page; `None` unless the APIC is in xAPIC mode.
    apic_page: Option<u64>,
}

/// The state of a vCPU after a reset of the machine.
#[derive(Clone, Debug)]
pub struct ResetState {
    /// The registers.
    pub cpu: CpuState,
    /// The MSRs.
    pub msrs: MsrsState,
}

impl VcpuModel {
    /// The models of vCPU `id`, with these MSRs.
    pub fn new(id: usize, msrs: Msrs, board: Arc<Board>) -> Self {
        let apic_page = ApicBase::page(board.buses.irq.apic_base(id));
        Self {
            id,
            msrs,
            board,
            recorder: None,
            history: None,
            record_stop: None,
            recorded_from_start: false,
            tracer: None,
            processes: None,
            translation: TranslationPolicy::default(),
            counter: None,
            debug: DebugRequests::default(),
            exits: ExitCounts::default(),
            pmu_totals: PmuTotals::default(),
            unit: CoreUarch::default(),
            at_reset: None,
            apic_page,
        }
    }

    /// Restores saved MSRs. The local APIC must have been restored before.
    ///
    /// # Errors
    ///
    /// Rejects a state that this processor cannot have, and leaves the MSRs as they were.
    pub fn restore(&mut self, state: &MsrsState) -> Result<(), MsrStateError> {
        self.msrs.restore(state)?;
        self.apic_page = ApicBase::page(self.board.buses.irq.apic_base(self.id));
        Ok(())
    }

    /// Counts an exit, and passes the event to the recorder, if there is one.
    pub fn record(&mut self, event: RecordedKind) {
        if let RecordedKind::Exit(kind) = event {
            self.exits.count(kind);
            self.board.run.engine.count_exit();
        }
        if let Some(recorder) = &self.recorder {
            recorder.record(self.id, event);
        }
    }

    /// Reads guest-physical addresses that are not memory.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.in_apic_page(address) {
            Some(offset) => self.board.buses.irq.lapic_read(self.id, offset, data),
            None => self.board.buses.mmio.read(address, data),
        }
        let bytes = HexBytes(data);
        tracing::trace!(target: "io", "cpu {} read {address:#x} = {bytes}", self.id);
    }

    /// Writes to guest-physical addresses that are not memory.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        let bytes = HexBytes(data);
        tracing::trace!(target: "io", "cpu {} write {address:#x} = {bytes}", self.id);
        match self.in_apic_page(address) {
            Some(offset) => self.board.buses.irq.lapic_write(self.id, offset, data),
            None => self.board.buses.mmio.write(address, data),
        }
    }

    fn in_apic_page(&self, address: u64) -> Option<u64> {
        address
            .checked_sub(self.apic_page?)
            .filter(|&offset| offset < 0x1000)
    }

    /// Passes branches that an engine reports, in order, to all models that use them.
    pub fn branches(&mut self, branches: &mut [Branch]) {
        if self.msrs.needs_predictor() {
            self.unit.resolve(branches);
        }
        self.msrs.record_branches(branches);
        if self.msrs.pmu().needs().contains(PmuNeeds::BRANCHES) {
            self.pmu_totals.totals.add_branches(branches);
            self.count();
        }
        if let Some(history) = &mut self.history {
            history.push(branches);
        }
        let unit = self.msrs.branch();
        if let (true, Some(sink)) = (unit.sends_btm(), &self.board.buses.btm) {
            sink.send(
                self.id,
                branches.iter().filter(|b| unit.sends_btm_at(b.cpl)),
            );
        }
    }

    /// Counts the memory accesses of an instruction, and updates the cache models if they are in use.
    /// Returns an upper bound of the events of one kind. A request that a memory-bandwidth delay value
    /// holds back takes time on a virtual clock; on a host clock it takes none.
    pub fn accessed(&mut self, ring: Ring, accesses: &InstructionAccesses<'_>) -> u64 {
        let threshold = self.msrs.pmu().latency_threshold();
        let mut shared = self
            .msrs
            .needs_cache_model()
            .then(|| self.board.package.cache());
        let l3: Option<&mut CacheModel> = shared.as_deref_mut();
        let events = AccessEvents {
            totals: &mut self.pmu_totals.totals,
            ring,
            late_threshold: threshold,
        };
        let requester = self.msrs.requester();
        let used = self.unit.access(accesses, l3, &requester, events);
        let rdt = self.msrs.rdt();
        self.unit
            .take_memory_traffic(|rmid| rdt.package().add_traffic(rmid.into(), 1));
        drop(shared);
        self.take_delay();
        used
    }

    /// Advances a virtual clock by the time for which requests were delayed.
    fn take_delay(&mut self) {
        let delayed = self.unit.take_delay_cycles();
        if delayed != 0 && self.board.time.clock.is_virtual() {
            self.board.time.clock.advance(delayed);
            // A timer or a cycle counter may now be due before the current run ends.
            self.board.run.vcpus.doorbell(self.id).ring();
        }
    }

    /// Applies an access of a block, as [`hindsight_interp::Observer::line_access`] has it.
    pub fn line_accessed(&mut self, ring: Ring, access: &MemoryAccess) {
        let mut shared = self
            .msrs
            .needs_cache_model()
            .then(|| self.board.package.cache());
        let events = AccessEvents {
            totals: &mut self.pmu_totals.totals,
            ring,
            late_threshold: self.msrs.pmu().latency_threshold(),
        };
        let requester = self.msrs.requester();
        self.unit
            .access_line(access, shared.as_deref_mut(), &requester, events);
        let rdt = self.msrs.rdt();
        self.unit
            .take_memory_traffic(|rmid| rdt.package().add_traffic(rmid.into(), 1));
        drop(shared);
        // Another processor may have set a delay of the whole package since the unit was entered.
        self.take_delay();
    }

    /// Counts the accesses of a block.
    pub fn block_accessed(&mut self, ring: Ring, loads: u64, stores: u64) {
        let events = AccessEvents {
            totals: &mut self.pmu_totals.totals,
            ring,
            late_threshold: self.msrs.pmu().latency_threshold(),
        };
        let cached = self.msrs.needs_cache_model();
        self.unit.count_block(loads, stores, cached, events);
    }

    /// Brings the occupancy that IA32_QM_CTR shows up to date.
    fn update_occupancy(&mut self) {
        if let Some(rmid) = self.msrs.monitored_rmid() {
            let lines = self.board.package.cache().lines_of(rmid);
            self.msrs.set_occupied_lines(lines);
        }
    }

    /// Flushes the line at `gpa`, or all lines, from the cache models.
    pub fn flushed(&mut self, gpa: Option<u64>) {
        if self.unit.caches_are_cold() {
            return;
        }
        let mut last = self.board.package.cache();
        match gpa {
            Some(gpa) => self.unit.flush(&mut last, gpa),
            None => {
                self.unit.flush_all();
                last.clear(|_| ());
            }
        }
    }

    /// What the engine must count and report for the performance counters. Cycles are not included.
    pub fn counting(&self) -> EngineCounting {
        let mut counting = self.msrs.engine_counting();
        if let Some(due) = &mut counting.record {
            due.data = self
                .msrs
                .pmu()
                .due_access()
                .map(|access| self.unit.data(access));
        }
        counting
    }

    /// The event totals, for an engine to update.
    pub fn pmu_totals(&mut self) -> &mut PmuTotals {
        &mut self.pmu_totals
    }

    /// Updates the performance counters, and requests a PMI if one has overflowed.
    pub fn count(&mut self) {
        let totals = self.pmu_totals.up_to(self.board.time.clock.now());
        if self.msrs.sync_counters(&totals) {
            self.board.buses.irq.request_pmi(self.id);
        }
    }

    /// Requests the performance-monitoring interrupt of the branch trace store.
    pub fn bts_requests_pmi(&mut self) {
        self.count();
        self.msrs.bts_requests_pmi();
        self.board.buses.irq.request_pmi(self.id);
    }

    /// Handles the outcome of storing the PEBS record that was due.
    pub fn pebs_stored(&mut self, outcome: &PebsOutcome) {
        if self.msrs.pebs_record_done(outcome) {
            self.board.buses.irq.request_pmi(self.id);
        }
    }

    /// Counts the beginning or the end of a transaction.
    pub fn transaction(&mut self, event: TransactionEvent, ring: Ring) {
        let counting = !self.msrs.pmu().needs().is_empty();
        if counting {
            self.count();
        }
        self.msrs.transaction(event);
        self.pmu_totals.totals.add_transaction_event(event, ring);
        if counting {
            self.count();
        }
    }

    /// Enters or leaves system-management mode.
    pub fn smm(&mut self, entered: bool) {
        self.count();
        if entered {
            self.msrs.enter_smm();
        } else {
            self.msrs.leave_smm();
        }
    }

    /// Marks the vCPU as halted, if it is not yet.
    pub fn halt(&mut self) {
        if self.pmu_totals.halt(self.board.time.clock.now()) {
            self.trace(EventKinds::MODE, Event::Halt);
        }
    }

    /// Marks the vCPU as running.
    pub fn wake(&mut self) {
        if self.pmu_totals.wake(self.board.time.clock.now()) {
            self.count();
        }
    }

    /// RDPMC.
    ///
    /// # Errors
    ///
    /// [`GpFault`] for a counter that does not exist.
    pub fn rdpmc(&mut self, index: u32) -> Result<u64, GpFault> {
        self.count();
        self.msrs.rdpmc(index)
    }

    /// Updates the models that an access to MSR `index` depends on, as its row says.
    fn update_before(&mut self, index: u32) {
        match find(index).map_or(UpdateBefore::Nothing, |spec| spec.update) {
            UpdateBefore::Nothing => {}
            UpdateBefore::Counters => self.count(),
            UpdateBefore::CacheOccupancy => self.update_occupancy(),
        }
    }

    /// The current time of the machine, for the models.
    pub fn now(&self) -> Now {
        Now {
            ticks: self.board.time.clock.now(),
        }
    }

    /// RDMSR by the table, for every engine.
    ///
    /// For [`RdmsrOutcome::Apic`] the caller calls [`VcpuModel::rdmsr_apic`].
    pub fn rdmsr(&mut self, index: u32) -> RdmsrOutcome {
        self.update_before(index);
        let outcome = self.msrs.read(index, self.now());
        if outcome == RdmsrOutcome::Unclaimed {
            self.trace_unclaimed("rdmsr", index);
        }
        outcome
    }

    /// The value that RDMSR would return, without a trace.
    ///
    /// `None` for an MSR that faults, and for one that is part of the processor state.
    pub fn peek_msr(&mut self, index: u32) -> Option<u64> {
        if find(index).is_some_and(|spec| spec.update == UpdateBefore::CacheOccupancy) {
            self.update_occupancy();
        }
        match self.msrs.read(index, self.now()) {
            RdmsrOutcome::Value(value) => Some(value),
            RdmsrOutcome::Apic => self.rdmsr_apic(index).ok(),
            RdmsrOutcome::Processor | RdmsrOutcome::Fault | RdmsrOutcome::Unclaimed => None,
        }
    }

    /// WRMSR by the table, for every engine.
    ///
    /// For [`WrmsrOutcome::Apic`] the caller calls [`VcpuModel::wrmsr_apic`].
    pub fn wrmsr(&mut self, index: u32, value: u64) -> WrmsrOutcome {
        self.update_before(index);
        let outcome = self.msrs.write(index, value, self.now());
        match outcome {
            WrmsrOutcome::Done(effect) if effect.tsc_moved => {
                let offset = self.msrs.tsc().offset();
                self.board.buses.irq.tsc_offset_changed(self.id, offset);
            }
            WrmsrOutcome::Unclaimed => self.trace_unclaimed("wrmsr", index),
            _ => {}
        }
        outcome
    }

    /// RDMSR of an MSR of the local APIC.
    ///
    /// # Errors
    ///
    /// [`GpFault`] where the guest gets #GP(0).
    pub fn rdmsr_apic(&self, index: u32) -> Result<u64, GpFault> {
        let irq = &self.board.buses.irq;
        match index {
            regs::IA32_APIC_BASE => Ok(irq.apic_base(self.id)),
            regs::IA32_TSC_DEADLINE => Ok(irq.tsc_deadline(self.id)),
            _ => irq.x2apic_read(self.id, index),
        }
    }

    /// WRMSR of an MSR of the local APIC. Returns the effect to apply.
    ///
    /// # Errors
    ///
    /// [`GpFault`] where the guest gets #GP(0).
    pub fn wrmsr_apic(&mut self, index: u32, value: u64) -> Result<MsrEffect, GpFault> {
        let irq = &self.board.buses.irq;
        match index {
            regs::IA32_APIC_BASE => {
                irq.set_apic_base(self.id, value)?;
                self.apic_page = ApicBase::page(value);
                return Ok(MsrEffect::mirror(value));
            }
            regs::IA32_TSC_DEADLINE => {
                irq.set_tsc_deadline(self.id, value, self.msrs.tsc().offset());
            }
            _ => irq.x2apic_write(self.id, index, value)?,
        }
        Ok(MsrEffect::NONE)
    }

    /// Logs an access to an MSR that no row covers; the guest gets #GP(0).
    fn trace_unclaimed(&self, access: &'static str, index: u32) {
        tracing::debug!(target: "msr", "cpu {} {access} {index:#x}: no such MSR, #GP(0)", self.id);
    }
}

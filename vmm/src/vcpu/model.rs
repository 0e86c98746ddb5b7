//! One processor's models, and the MSR path: the table first, then the owner.

use std::sync::Arc;

use hindsight_cpu::branch::Branch;
use hindsight_cpu::msr::{
    Effect, MsrError, Msrs, MsrsState, Now, Owner, RdmsrOutcome, WrmsrOutcome, find,
};
use hindsight_cpu::pmu::pebs::Stored;
use hindsight_cpu::pmu::{Counting, Needs, Ring};
use hindsight_cpu::transaction::Step;
use hindsight_cpu::uarch::{Accesses, Cache, Unit};
use hindsight_regs::msr as regs;

use crate::vcpu::board::Board;
use crate::vcpu::branch_history::BranchHistory;
use crate::vcpu::debug::stop::DebugRequests;
use crate::vcpu::hex_bytes::HexBytes;
use crate::vcpu::pmu_totals::PmuTotals;
use crate::vcpu::recorder::{RecordedKind, Recorder};
use crate::vcpu::stats::ExitCounts;

/// The guest asked for #GP(0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gp;

/// What one processor has besides its plain state: the MSR models, and the board it sits on.
#[derive(Debug)]
pub struct VcpuModel {
    /// Which processor; also its APIC id.
    pub id: usize,
    /// The MSRs.
    pub msrs: Msrs,
    /// The rest of the machine.
    pub board: Arc<Board>,
    /// Keeps what happens to this processor, if somebody wants to know.
    pub recorder: Option<Arc<Recorder>>,
    /// Keeps its last branches for a debugger.
    pub history: Option<Box<BranchHistory>>,
    /// The history is kept from the start, with or without a debugger.
    pub recorded_from_start: bool,
    /// What a debugger wants of this processor.
    pub debug: DebugRequests,
    /// How often it stopped running the guest, and why.
    pub exits: ExitCounts,
    /// What performance counters count.
    pmu_totals: PmuTotals,
    /// The branch predictor, and the caches of the core.
    pub(crate) unit: Unit,
    /// Where this processor sees its local APIC, while that has a page.
    apic_page: Option<u64>,
}

/// The page of a local APIC in xAPIC mode. SDM Vol. 3A, "Local APIC Status and Location".
fn apic_page(apic_base: u64) -> Option<u64> {
    const ENABLE: u64 = 1 << 11;
    const X2APIC: u64 = 1 << 10;
    (apic_base & (ENABLE | X2APIC) == ENABLE).then_some(apic_base & !0xfff)
}

impl VcpuModel {
    /// The models of processor `id` round these MSRs.
    pub fn new(id: usize, msrs: Msrs, board: Arc<Board>) -> Self {
        let apic_page = apic_page(board.buses.irq.apic_base(id));
        Self {
            id,
            msrs,
            board,
            recorder: None,
            history: None,
            recorded_from_start: false,
            debug: DebugRequests::default(),
            exits: ExitCounts::default(),
            pmu_totals: PmuTotals::default(),
            unit: Unit::default(),
            apic_page,
        }
    }

    /// Takes over saved MSRs. The local APIC is restored before.
    ///
    /// # Errors
    ///
    /// Refuses a state that this processor cannot have; nothing was changed.
    pub fn restore(&mut self, state: &MsrsState) -> Result<(), MsrError> {
        self.msrs.restore(state)?;
        self.apic_page = apic_page(self.board.buses.irq.apic_base(self.id));
        Ok(())
    }

    /// Counts an exit, and tells the recorder, if there is one.
    pub fn record(&mut self, what: RecordedKind) {
        if let RecordedKind::Exit(kind) = what {
            self.exits.count(kind);
            self.board.run.engine.count_exit();
        }
        if let Some(recorder) = &self.recorder {
            recorder.record(self.id, what);
        }
    }

    /// A read where there is no memory.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.in_apic_page(address) {
            Some(offset) => self.board.buses.irq.lapic_read(self.id, offset, data),
            None => self.board.buses.mmio.read(address, data),
        }
        let shown = HexBytes(data);
        tracing::trace!(target: "io", "cpu {} read {address:#x} = {shown}", self.id);
    }

    /// A write where there is no memory.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        let shown = HexBytes(data);
        tracing::trace!(target: "io", "cpu {} write {address:#x} = {shown}", self.id);
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

    /// Takes the branches that an engine observed, in order.
    pub fn branches(&mut self, branches: &mut [Branch]) {
        if self.msrs.wants_predictor() {
            self.unit.resolve(branches);
        }
        self.msrs.branches(branches);
        if self.msrs.pmu().needs().contains(Needs::BRANCHES) {
            self.pmu_totals.totals.add_branches(branches);
            self.count();
        }
        if let Some(history) = &mut self.history {
            history.push(branches);
        }
        let unit = self.msrs.branch();
        if let (true, Some(sink)) = (unit.messages(), &self.board.buses.btm) {
            sink.send(self.id, branches.iter().filter(|b| unit.sends(b.cpl)));
        }
    }

    /// An instruction accessed memory: counts that, and has the caches follow if somebody wants to
    /// know. Answers how many events of one kind it was at most. Requests that a delay value holds back
    /// take time on a virtual clock; a clock of the host's cannot be made to.
    pub fn accessed(&mut self, ring: Ring, accesses: &Accesses<'_>) -> u64 {
        let threshold = self.msrs.pmu().latency_threshold();
        let mut shared = self.msrs.wants_caches().then(|| self.board.package.cache());
        let last: Option<&mut Cache> = shared.as_deref_mut();
        let told = (&mut self.pmu_totals.totals, ring, threshold);
        let used = self.unit.access(accesses, last, &self.msrs.who(), told);
        let rdt = self.msrs.rdt();
        self.unit
            .take_moved(|rmid| rdt.package().moved(rmid.into(), 1));
        let held_back = self.unit.take_held_back();
        if held_back != 0 && self.board.time.clock.is_virtual() {
            self.board.time.clock.advance(held_back);
            // A timer or a counter of cycles may be due before the run under way ends.
            self.board.run.vcpus.doorbell(self.id).ring();
        }
        used
    }

    /// IA32_QM_CTR shows what the caches hold now.
    fn look_at_caches(&mut self, index: u32) {
        if index == regs::IA32_QM_CTR
            && let Some(rmid) = self.msrs.monitored()
        {
            let lines = self.board.package.cache().lines_of(rmid);
            self.msrs.set_occupied(lines);
        }
    }

    /// A line, or everything, was flushed from the caches.
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

    /// What the engine does for the counters, but for cycles.
    pub fn counting(&self) -> Counting {
        let mut counting = self.msrs.counting();
        if let Some(due) = &mut counting.record {
            due.data = self.msrs.pmu().due_data().map(|of| self.unit.data(of));
        }
        counting
    }

    /// What has happened so far, for an engine that tells it.
    pub fn pmu_totals(&mut self) -> &mut PmuTotals {
        &mut self.pmu_totals
    }

    /// Moves the performance counters up to now, and requests the interrupt that follows.
    pub fn count(&mut self) {
        let totals = self.pmu_totals.up_to(self.board.time.clock.now());
        if self.msrs.count(&totals) {
            self.board.buses.irq.request_pmi(self.id);
        }
    }

    /// Branch trace store requests a performance-monitoring interrupt.
    pub fn trace_interrupts(&mut self) {
        self.count();
        self.msrs.trace_interrupts();
        self.board.buses.irq.request_pmi(self.id);
    }

    /// The PEBS record that was due was stored, or could not be.
    pub fn pebs_stored(&mut self, stored: &Stored) {
        if self.msrs.pebs_stored(stored) {
            self.board.buses.irq.request_pmi(self.id);
        }
    }

    /// A transaction begins or ends.
    pub fn transaction(&mut self, step: Step, ring: Ring) {
        let counting = !self.msrs.pmu().needs().is_empty();
        if counting {
            self.count();
        }
        self.msrs.transaction(step);
        self.pmu_totals.totals.add_step(step, ring);
        if counting {
            self.count();
        }
    }

    /// The processor enters system-management mode, or leaves it.
    pub fn smm(&mut self, entered: bool) {
        self.count();
        if entered {
            self.msrs.enter_smm();
        } else {
            self.msrs.leave_smm();
        }
    }

    /// The processor halts, if it did not before.
    pub fn halt(&mut self) {
        self.pmu_totals.halt(self.board.time.clock.now());
    }

    /// The processor is not halted any more.
    pub fn wake(&mut self) {
        if self.pmu_totals.wake(self.board.time.clock.now()) {
            self.count();
        }
    }

    /// RDPMC; `None` asks for #GP(0).
    pub fn rdpmc(&mut self, index: u32) -> Option<u64> {
        self.count();
        self.msrs.rdpmc(index)
    }

    /// The counters must be at their newest before such an MSR is looked at or changed.
    fn count_before(&mut self, index: u32) {
        if find(index).is_some_and(|spec| matches!(spec.owner, Owner::Pmu | Owner::Branch)) {
            self.count();
        }
    }

    /// The time, for the models.
    pub fn now(&self) -> Now {
        Now {
            ticks: self.board.time.clock.now(),
        }
    }

    /// RDMSR, whichever way the guest runs. `None`: part of the processor state, not ours.
    ///
    /// # Errors
    ///
    /// [`Gp`] where the guest gets #GP(0).
    pub fn rdmsr(&mut self, index: u32) -> Result<Option<u64>, Gp> {
        self.count_before(index);
        self.look_at_caches(index);
        match self.msrs.read(index, self.now()) {
            RdmsrOutcome::Value(value) => Ok(Some(value)),
            RdmsrOutcome::Apic => self.rdmsr_apic(index).map(Some),
            RdmsrOutcome::Processor => Ok(None),
            RdmsrOutcome::Fault => Err(Gp),
            RdmsrOutcome::Unclaimed => {
                self.unclaimed("rdmsr", index);
                Err(Gp)
            }
        }
    }

    /// What RDMSR would show, without a trace. `None`: no such MSR, or part of the processor state.
    pub fn peek_msr(&mut self, index: u32) -> Option<u64> {
        self.look_at_caches(index);
        match self.msrs.read(index, self.now()) {
            RdmsrOutcome::Value(value) => Some(value),
            RdmsrOutcome::Apic => self.rdmsr_apic(index).ok(),
            RdmsrOutcome::Processor | RdmsrOutcome::Fault | RdmsrOutcome::Unclaimed => None,
        }
    }

    /// WRMSR, whichever way the guest runs. `None`: part of the processor state, not ours.
    ///
    /// # Errors
    ///
    /// [`Gp`] where the guest gets #GP(0).
    pub fn wrmsr(&mut self, index: u32, value: u64) -> Result<Option<Effect>, Gp> {
        self.count_before(index);
        match self.msrs.write(index, value, self.now()) {
            WrmsrOutcome::Done(effect) => {
                if effect == Effect::TscMoved {
                    self.board
                        .buses
                        .irq
                        .tsc_offset_changed(self.id, self.msrs.tsc().offset());
                }
                Ok(Some(effect))
            }
            WrmsrOutcome::Apic => self.wrmsr_apic(index, value).map(Some),
            WrmsrOutcome::Processor => Ok(None),
            WrmsrOutcome::Fault => Err(Gp),
            WrmsrOutcome::Unclaimed => {
                self.unclaimed("wrmsr", index);
                Err(Gp)
            }
        }
    }

    fn rdmsr_apic(&self, index: u32) -> Result<u64, Gp> {
        let irq = &self.board.buses.irq;
        match index {
            regs::IA32_APIC_BASE => Ok(irq.apic_base(self.id)),
            regs::IA32_TSC_DEADLINE => Ok(irq.tsc_deadline(self.id)),
            _ => irq.x2apic_read(self.id, index).map_err(|_| Gp),
        }
    }

    fn wrmsr_apic(&mut self, index: u32, value: u64) -> Result<Effect, Gp> {
        let irq = &self.board.buses.irq;
        let effect = match index {
            regs::IA32_APIC_BASE => {
                irq.set_apic_base(self.id, value).map_err(|_| Gp)?;
                self.apic_page = apic_page(value);
                Effect::Mirror(value)
            }
            regs::IA32_TSC_DEADLINE => {
                irq.set_tsc_deadline(self.id, value, self.msrs.tsc().offset());
                Effect::None
            }
            _ => {
                irq.x2apic_write(self.id, index, value).map_err(|_| Gp)?;
                Effect::None
            }
        };
        Ok(effect)
    }

    /// The one policy for MSRs that no row claims: #GP(0), as the processor does, and a line in the
    /// trace.
    fn unclaimed(&self, access: &'static str, index: u32) {
        tracing::debug!(target: "msr", "cpu {} {access} {index:#x}: no such MSR, #GP(0)", self.id);
    }
}

//! The observed way to run: the loop round the interpreter.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hindsight_cpu::armed::Armed;
use hindsight_cpu::branch::{Branch, Observe};
use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::msr::Effect;
use hindsight_cpu::pmu::pebs::Stored;
use hindsight_cpu::pmu::{Counting, Ring};
use hindsight_cpu::state::{Activity, CpuState, seg};
use hindsight_interp::{Accesses, Exit, Gp, Memory, Pending, Platform, Step, Stops, Vcpu};
use hindsight_regs::apic::ApicBase;
use hindsight_regs::msr as regs;

use super::attend::{Attended, Plan, Report, Request, Stop};
use super::control::{Checkpoint, Doorbell, Place};
use super::determined::{Noted, Track};
use super::dispatch::{Bytes, CrashCause};
use super::mode::Engine;
use super::models::Models;
use super::record::{Kind, What};
use super::report::{Crash, LastState};
use super::stats::VcpuStats;
use super::switch::Ended;
use crate::kvm::KvmError;
use crate::machine::{Board, Outcome};

/// Instructions between two looks at the doorbell by the run loop itself.
const BUDGET: u64 = 1 << 24;

/// CPUID.01H:EDX.APIC.
const EDX1_APIC: u32 = 1 << 9;

/// The APM control port of Intel chipsets: a write raises an SMI on the processor that makes it.
const APM_CONTROL: u16 = 0xb2;

/// Ticks of the TSC that an instruction takes here, as an upper bound: a limit in cycles becomes
/// one in instructions, which is looked at again where that ends.
const TICKS_PER_INSTRUCTION: u64 = 16;
/// The fewest instructions between two such looks.
const INSTRUCTIONS_MIN: u64 = 128;

/// A processor that runs in the interpreter.
#[derive(Debug)]
pub struct ObservedVcpu {
    pub(super) vcpu: Vcpu,
    pub(super) around: Around,
    /// What is armed, as the machine was told; `None`: nothing was told yet.
    armed: Option<Armed>,
    /// The machine is to change its engine, and something is under way here.
    unsettled: bool,
    /// Why the guest cannot go on, while a debugger looks at it.
    pub(super) crashed: Option<CrashCause>,
}

/// The machine around the processor, as the interpreter sees it.
#[derive(Debug)]
pub(super) struct Around {
    pub(super) models: Models,
    random: u64,
    /// There in deterministic mode.
    pub(super) track: Option<Track>,
}

impl Around {
    /// Serves what would be an exit under KVM, and tells the recorder so.
    fn served<T>(&mut self, kind: Kind, serve: impl FnOnce(&mut Models) -> T) -> T {
        self.models.record(What::Exit(kind));
        let answer = serve(&mut self.models);
        self.models.record(What::Enter);
        answer
    }

    /// Puts an event into the hash of deterministic mode.
    fn note(&mut self, noted: Noted, place: u64, data: &[u8]) {
        if let Some(track) = &mut self.track {
            track.note(noted, self.models.board.clock.now(), place, data);
        }
    }

    /// The run must end: a timer became due before its end, in deterministic mode.
    fn timer_is_earlier(&self) -> bool {
        let until = self.track.as_ref().map_or(0, |track| track.until);
        until != 0
            && self
                .models
                .board
                .irq
                .next_event()
                .is_some_and(|due| due < until)
    }
}

impl Platform for Around {
    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        self.served(Kind::PortRead(port), |models| {
            models.board.ports.read(port, data);
        });
        self.note(Noted::PortRead, port.into(), data);
        tracing::trace!(target: "io", "cpu {} in {port:#x} = {}", self.models.id, Bytes(data));
    }

    fn port_write(&mut self, port: u16, data: &[u8]) {
        tracing::trace!(target: "io", "cpu {} out {port:#x} = {}", self.models.id, Bytes(data));
        self.note(Noted::PortWrite, port.into(), data);
        self.served(Kind::PortWrite(port), |models| {
            models.board.ports.write(port, data);
        });
        if port == APM_CONTROL && self.models.msrs.has_smm() {
            self.models.board.irq.inject_smi(self.models.id);
        }
    }

    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]) {
        self.served(Kind::MmioRead(gpa), |models| models.mmio_read(gpa, data));
        self.note(Noted::MmioRead, gpa, data);
    }

    fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        self.note(Noted::MmioWrite, gpa, data);
        self.served(Kind::MmioWrite(gpa), |models| models.mmio_write(gpa, data));
    }

    fn rdmsr(&mut self, index: u32) -> Result<u64, Gp> {
        let answer = self.served(Kind::Rdmsr(index), |models| models.rdmsr(index));
        self.models.record(What::Rdmsr {
            index,
            answer: answer.ok().flatten(),
        });
        tracing::trace!(target: "msr", "cpu {} rdmsr {index:#x} = {answer:x?}", self.models.id);
        let shown = answer.ok().flatten().unwrap_or(0);
        self.note(Noted::Rdmsr, index.into(), &shown.to_le_bytes());
        answer.ok().flatten().ok_or(Gp)
    }

    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), Gp> {
        self.note(Noted::Wrmsr, index.into(), &value.to_le_bytes());
        let answer = self.served(Kind::Wrmsr(index), |models| models.wrmsr(index, value));
        self.models.record(What::Wrmsr {
            index,
            value,
            accepted: matches!(answer, Ok(Some(_))),
        });
        let id = self.models.id;
        tracing::trace!(target: "msr", "cpu {id} wrmsr {index:#x} = {value:#x}: {answer:x?}");
        let effect = answer.ok().flatten().ok_or(Gp)?;
        // The run loop looks round soon, and tells the machine.
        let control = &self.models.board.control;
        match effect {
            Effect::Armed => control.doorbell(id).ring(),
            Effect::PackageArmed => control.ring_all(),
            _ => {}
        }
        Ok(())
    }

    fn observe(&mut self) -> Observe {
        let wanted = self.models.msrs.observe();
        // Deterministic mode has the way of the guest in its hash.
        let kept = self.models.history.is_some() || self.track.is_some();
        Observe {
            branches: wanted.branches || kept,
            ..wanted
        }
    }

    fn code_base(&mut self, base: u64) {
        if let Some(history) = &mut self.models.history {
            history.set_base(base);
        }
    }

    fn branches(&mut self, branches: &mut [Branch]) {
        if let Some(track) = &mut self.track {
            track.follow(branches);
        }
        if self.models.msrs.observe().branches || self.models.history.is_some() {
            self.models.branches(branches);
        }
    }

    fn debug_exception(&mut self) {
        self.models.msrs.debug_exception();
    }

    fn transaction(&mut self, step: Step, ring: Ring) {
        self.models.transaction(step, ring);
    }

    fn may_transact(&self) -> bool {
        // When one is aborted from outside would depend on who looks at the machine.
        self.track.is_none()
    }

    fn request_pmi(&mut self) {
        self.models.trace_interrupts();
    }

    fn counting(&mut self) -> Counting {
        // The limits count from where the counters stand: they must stand where the processor does.
        if !self.models.msrs.pmu().needs().is_empty() {
            self.models.count();
        }
        let counting = self.models.counting();
        let cycles = self.models.msrs.pmu().limits().cycles;
        let as_instructions = if self.track.is_some() {
            // An instruction is a tick of the clock.
            cycles
        } else {
            cycles.map(|ticks| (ticks / TICKS_PER_INSTRUCTION).max(INSTRUCTIONS_MIN))
        };
        Counting {
            instructions: counting.instructions.min(&as_instructions),
            ..counting
        }
    }

    fn accessed(&mut self, ring: Ring, accesses: &Accesses<'_>) -> u64 {
        self.models.accessed(ring, accesses)
    }

    fn flushed(&mut self, gpa: Option<u64>) {
        self.models.flushed(gpa);
    }

    fn pebs_stored(&mut self, stored: &Stored) {
        self.models.pebs_stored(stored);
    }

    fn rdpmc(&mut self, index: u32) -> Result<u64, Gp> {
        let answer = self.models.rdpmc(index);
        let shown = answer.unwrap_or(0);
        self.note(Noted::Rdmsr, index.into(), &shown.to_le_bytes());
        answer.ok_or(Gp)
    }

    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let id = u32::try_from(self.models.id).unwrap_or(0);
        let mut regs = self.models.board.cpuid.query(leaf, subleaf, id, 0, 0);
        if leaf == 1 && self.models.board.irq.apic_base(self.models.id) & ApicBase::EN.bits() == 0 {
            regs[3] &= !EDX1_APIC;
        }
        regs
    }

    fn portable(&self) -> bool {
        self.models.board.cpuid.model() == CpuModel::PortableV1
    }

    fn tsc(&mut self) -> u64 {
        let answer = self.models.rdmsr(regs::IA32_TIME_STAMP_COUNTER);
        answer.ok().flatten().unwrap_or(0)
    }

    fn tsc_aux(&mut self) -> u32 {
        let answer = self.models.rdmsr(regs::IA32_TSC_AUX);
        let value = answer.ok().flatten().unwrap_or(0);
        u32::try_from(value & 0xffff_ffff).unwrap_or(0)
    }

    fn random(&mut self) -> u64 {
        if let Some(track) = &mut self.track {
            let value = track.random();
            self.note(Noted::Random, value, &[]);
            return value;
        }
        // An LCG step mixed with the time: enough for a guest whose host is trusted anyway.
        self.random = self
            .random
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(self.models.board.clock.now() | 1);
        self.random ^ self.random >> 29
    }

    fn cr8(&mut self) -> u8 {
        u8::try_from(self.models.board.irq.cr8(self.models.id)).unwrap_or(0)
    }

    fn set_cr8(&mut self, priority: u8) {
        self.models
            .board
            .irq
            .set_cr8(self.models.id, priority.into());
    }

    fn pending(&mut self) -> Pending {
        let (id, board) = (self.models.id, &self.models.board);
        let pending = board.irq.pending(id);
        if pending.smi && !self.models.msrs.has_smm() {
            // Without system-management mode nobody takes it (rule SMF-10).
            board.irq.take_smi(id);
        }
        Pending {
            interrupt: pending.interrupt,
            nmi: pending.nmi,
            smi: pending.smi && self.models.msrs.has_smm(),
            leave: pending.init && !self.models.msrs.in_smm()
                || pending.sipi.is_some()
                || board.control.doorbell(id).is_rung()
                || self.timer_is_earlier(),
        }
    }

    fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.models.board.irq.acknowledge(self.models.id);
        tracing::trace!(target: "irq", "cpu {} interrupt {vector:x?}", self.models.id);
        if let Some(vector) = vector {
            self.models.wake();
            self.models.record(What::Interrupt { vector });
            self.note(Noted::Interrupt, vector.into(), &[]);
        }
        vector
    }

    fn acknowledge_nmi(&mut self) {
        self.models.board.irq.take_nmi(self.models.id);
        self.models.wake();
        self.note(Noted::Nmi, 2, &[]);
    }

    fn acknowledge_smi(&mut self) {
        self.models.board.irq.take_smi(self.models.id);
        self.models.wake();
        self.note(Noted::Smi, 0, &[]);
    }

    fn smm(&mut self, entered: bool) {
        self.models.smm(entered);
    }

    fn retired(&mut self, count: u64, user: u64, cycles: u64) {
        self.models.events().retired(count, user);
        if let Some(track) = &mut self.track {
            track.retired = count;
            let new = cycles.saturating_sub(track.cycles);
            if new != 0 {
                track.cycles = cycles;
                self.models.board.clock.advance(new);
            }
        }
    }
}

impl ObservedVcpu {
    /// A processor in `state`.
    pub fn new(memory: Arc<Memory>, models: Models, state: &CpuState) -> Self {
        Self::from_parts(Vcpu::new(memory), models, state)
    }

    /// A processor in `state`, which goes on in an interpreter that was used before.
    pub fn from_parts(mut vcpu: Vcpu, mut models: Models, state: &CpuState) -> Self {
        vcpu.load(state);
        vcpu.take_flushed();
        vcpu.set_stops(&models.orders.stops);
        if state.activity == Activity::Running {
            models.wake();
        }
        let random = models.board.clock.now() ^ 0x9e37_79b9_7f4a_7c15;
        Self {
            vcpu,
            around: Around {
                models,
                random,
                track: None,
            },
            armed: None,
            unsettled: false,
            crashed: None,
        }
    }

    /// The interpreter, and the models.
    pub fn into_parts(self) -> (Vcpu, Models) {
        (self.vcpu, self.around.models)
    }

    /// Which processor.
    pub const fn id(&self) -> usize {
        self.around.models.id
    }

    pub(super) const fn models_mut(&mut self) -> &mut Models {
        &mut self.around.models
    }

    /// Runs until the machine stops or changes its engine. It has then ended the machine where the
    /// guest cannot go on.
    pub(super) fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> Ended {
        if let Some(ended) = self.checkpoint(board) {
            return ended;
        }
        loop {
            self.start_signals();
            let exit = match self.around.models.orders.plan {
                // A shadow or a trap under way is over after one, but for those that begin the next.
                Plan::Run if self.unsettled => self.vcpu.run(&mut self.around, 1),
                Plan::Run | Plan::StepBack { .. } | Plan::RunBack => {
                    self.vcpu.run(&mut self.around, BUDGET)
                }
                Plan::Step { quiet, .. } => self.vcpu.step(&mut self.around, quiet),
            };
            match exit {
                Exit::Budget | Exit::Kicked | Exit::Leave => {}
                Exit::Halted => self.around.served(Kind::Halt, |models| {
                    models.halt();
                    doorbell.sleep(Duration::from_secs(3600));
                }),
                exit => {
                    if let Some(stop) = self.why_stopped(&exit)
                        && !self.report(board, stop)
                    {
                        return Ended::Stopped;
                    }
                }
            }
            self.tell_armed();
            if doorbell.is_rung() || self.unsettled {
                doorbell.answer();
                if let Some(ended) = self.checkpoint(board) {
                    return ended;
                }
                if let Some(cause) = self.crashed.take() {
                    self.crash(board, cause);
                    return Ended::Stopped;
                }
            }
        }
    }

    /// Executes one instruction and delivers what it raises. Less, when an INIT or a start-up IPI
    /// waits: it then shows again.
    pub(super) fn run_one(&mut self, board: &Arc<Board>) {
        loop {
            let exit = self.vcpu.step(&mut self.around, true);
            if let Some(Stop::Crash(cause)) = self.why_stopped(&exit) {
                self.crash(board, cause);
                return;
            }
            if exit != Exit::Stepped || self.vcpu.at_clean_boundary() {
                return;
            }
        }
    }

    /// What an exit is to a debugger; `None` if the processor just runs on.
    fn why_stopped(&mut self, exit: &Exit) -> Option<Stop> {
        match exit {
            Exit::Budget | Exit::Kicked | Exit::Leave | Exit::Halted => None,
            Exit::Shutdown => Some(Stop::Crash(CrashCause::TripleFault)),
            Exit::Missing { bytes, .. } => Some(Stop::Crash(CrashCause::Missing(bytes.to_vec()))),
            Exit::Stop(hit) => Some(Stop::Hit(*hit)),
            Exit::Stepped => {
                let at = self.vcpu.code_address();
                (!self.around.models.orders.in_range(at)).then_some(Stop::Stepped)
            }
        }
    }

    /// Tells the debugger why the processor stopped, and has it wait at the next checkpoint.
    /// `false`: there is no debugger, and the guest cannot go on.
    fn report(&mut self, board: &Arc<Board>, stop: Stop) -> bool {
        if let Stop::Crash(cause) = &stop {
            if !board.reports.wanted() {
                self.crash(board, cause.clone());
                return false;
            }
            self.crashed = Some(cause.clone());
        }
        let id = self.around.models.id;
        board.control.hold(id);
        let state = Attended::state(self).ok().map(Box::new);
        board.reports.put(Report { id, stop, state });
        true
    }

    /// Tells the machine what is armed, if that is news. MSR writes change it, and so do debug
    /// exceptions and the debug registers.
    fn tell_armed(&mut self) {
        let armed = self.around.models.msrs.armed() | self.vcpu.armed_by_dr7();
        if self.armed != Some(armed) {
            self.armed = Some(armed);
            let models = &self.around.models;
            models.board.arm(models.id, armed);
        }
    }

    /// Comes to a checkpoint, if that is wanted.
    fn checkpoint(&mut self, board: &Board) -> Option<Ended> {
        let (id, control) = (self.around.models.id, &board.control);
        self.unsettled = false;
        if !control.wants_checkpoint(id..id + 1) {
            return None;
        }
        let since = Instant::now();
        // What must stay in the interpreter says so before it can be moved out.
        self.tell_armed();
        loop {
            let movable = control
                .wants_change()
                .then(|| self.vcpu.at_clean_boundary());
            let place = Place {
                ids: id..id + 1,
                engine: Engine::Interp,
                movable,
            };
            self.unsettled = movable == Some(false);
            let serve = &mut |_, request: Request| request(self);
            return match control.checkpoint(place, serve) {
                Checkpoint::Again => continue,
                Checkpoint::Run => None,
                Checkpoint::Stop => Some(Ended::Stopped),
                Checkpoint::Change(to) => Some(Ended::Change(to, since)),
            };
        }
    }

    pub(super) fn last_state(&mut self, board: &Board) -> LastState {
        let state = self.state();
        LastState::new(self.around.models.id, state, &board.memory)
    }

    pub(super) fn stats(&self) -> VcpuStats {
        VcpuStats {
            cpu: self.around.models.id,
            exits: self.around.models.exits,
            interpreter: Some(self.vcpu.stats()),
            mix: self.vcpu.mix(),
        }
    }

    /// INIT and start-up IPIs.
    pub(super) fn start_signals(&mut self) {
        let (id, board) = (self.around.models.id, self.around.models.board.clone());
        let pending = board.irq.pending(id);
        // INIT waits for the end of system-management mode.
        if pending.init && !self.around.models.msrs.in_smm() && board.irq.take_init(id) {
            let mut state = self.state();
            state.init();
            if id != 0 {
                state.activity = Activity::WaitForSipi;
            }
            self.around.models.wake();
            self.around.models.msrs.init();
            self.vcpu.load(&state);
        }
        if let Some(vector) = pending.sipi.and_then(|_| board.irq.take_sipi(id)) {
            let mut state = self.state();
            if state.activity == Activity::WaitForSipi {
                state.start_up(vector);
                if let Some(history) = &mut self.around.models.history {
                    history.restart(state.seg[seg::CS].base);
                }
                self.around.models.wake();
                self.vcpu.load(&state);
            }
        }
    }

    pub(super) fn state(&mut self) -> CpuState {
        let mut state = CpuState::reset();
        self.vcpu.store(&mut state);
        state
    }

    pub(super) fn crash(&mut self, board: &Arc<Board>, cause: CrashCause) {
        let state = self.state();
        let crash = Crash::new(self.around.models.id, cause, state, &board.memory);
        board.finish(Outcome::Crash(Box::new(crash)));
    }
}

impl Attended for ObservedVcpu {
    fn engine(&self) -> Engine {
        Engine::Interp
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        let mut state = ObservedVcpu::state(self);
        state.cr8 = self.around.models.board.irq.cr8(self.around.models.id);
        Ok(state)
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        let models = &self.around.models;
        models.board.irq.set_cr8(models.id, state.cr8);
        self.vcpu.load(state);
        Ok(())
    }

    fn models(&mut self) -> &mut Models {
        &mut self.around.models
    }

    fn set_plan(&mut self, plan: Plan) {
        self.around.models.orders.plan = plan;
    }

    fn set_stops(&mut self, stops: &Stops) {
        self.vcpu.set_stops(stops);
        self.around.models.orders.stops.clone_from(stops);
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        let done = Platform::wrmsr(&mut self.around, index, value).is_ok();
        // What the interpreter derives from MSRs is derived anew.
        let state = ObservedVcpu::state(self);
        self.vcpu.load(&state);
        Ok(done)
    }

    fn memory_written(&mut self, at: u64, len: u64) {
        self.vcpu.code_changed(at, len);
    }

    fn retired(&self) -> Option<u64> {
        Some(self.vcpu.stats().retired)
    }

    fn stats(&mut self) -> VcpuStats {
        ObservedVcpu::stats(self)
    }
}

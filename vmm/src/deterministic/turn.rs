//! One vCPU's turn, and its saved state.

use hindsight_cpu::stops::StopHit;
use std::sync::Arc;

use hindsight_cpu::branch::{Branch, BranchClass};
use hindsight_cpu::pmu::{EventKind, Ring};
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, InterruptSource, RetiredCounts};

use super::stop::StopHandle;
use crate::state::{RestoreError, RunLogState, VcpuState};
use crate::vcpu::board::Board;
use crate::vcpu::crash::CrashCause;
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::interp::run_log::{LoggedEvent, RunLog};
use crate::vcpu::run_control::{Checkpoint, CheckpointState};

/// Instructions in a turn.
pub const QUANTUM: u64 = 10_000;

/// Maximum number of retired instructions of a snapshot: a machine that runs on from there never
/// counts beyond 64 bits.
const COUNT_MAX: u64 = 1 << 62;

/// How a turn ended, or why it was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnEnd {
    /// The turn ended; instructions were executed.
    Ran,
    /// The turn ended; the vCPU was halted throughout.
    Idle,
    /// Interrupted: the allowed number of instructions is retired.
    Limit,
    /// Interrupted: the vCPU reached what a debugger stops for.
    Hit(StopHit),
    /// Interrupted: an exception was delivered while a debugger steps.
    Delivered,
    /// The guest cannot continue, and a debugger inspects it.
    Crashed,
    /// The guest has ended the run, and a debugger keeps the machine paused at the end.
    AtEnd,
    /// Interrupted: a debugger pauses the machine.
    Paused,
    /// The guest requested a reset, which the machine makes before anything else.
    Reset,
    /// Interrupted: devices have served requests that they had left for later.
    Served,
    /// The machine stops.
    Stop,
}

/// The checkpoint of the one thread that runs all vCPUs. It never changes its engine.
pub(super) const fn checkpoint_state() -> CheckpointState {
    CheckpointState {
        ids: 0..1,
        engine: Engine::Interp,
        movable: Some(false),
    }
}

impl InterpVcpu {
    /// Makes this a vCPU of deterministic mode, see [`super`].
    pub fn make_deterministic(&mut self, seed: u64) {
        self.platform.log = Some(RunLog::new(seed, self.platform.model.id));
    }

    /// Retired instructions.
    pub(crate) fn retired(&self) -> u64 {
        self.vcpu.stats().retired
    }

    /// Continues a turn, of which `used` instructions are executed, to its end.
    ///
    /// A turn ends after [`QUANTUM`] instructions, or when the vCPU halts. At most `limit`
    /// instructions are retired now.
    ///
    /// The limit must not change the run, wherever it interrupts a turn. So everything that logs
    /// events or changes the platform comes after the check of the limit.
    ///
    /// `stop` ends a turn only while no instruction retires: within a repeated instruction, which can
    /// have 2^64 iterations, or while each exception's handler raises the next one.
    pub(super) fn run_turn(&mut self, used: &mut u64, limit: u64, stop: &StopHandle) -> TurnEnd {
        let board = self.platform.model.board.clone();
        let first = self.retired();
        let mut halted = false;
        loop {
            // The reset belongs to the instruction that requested it.
            if board.run.end.take_reset() {
                return TurnEnd::Reset;
            }
            if let Some(end) = self.must_stop(&board) {
                return end;
            }
            let allowed = limit.saturating_sub(self.retired().wrapping_sub(first));
            if allowed == 0 {
                return TurnEnd::Limit;
            }
            if board.run.end.held().is_some() {
                return TurnEnd::AtEnd;
            }
            // No instruction is executed before the last of the requests: where the run was
            // interrupted does not matter.
            if board.buses.serve_backlog() {
                return TurnEnd::Served;
            }
            let now = board.time.clock.now();
            if board.buses.irq.next_event().is_some_and(|due| due <= now) {
                self.log_boundary();
                board.buses.irq.advance(now);
                halted = false;
            }
            self.start_signals();
            let left = QUANTUM.saturating_sub(*used);
            if halted && *used == 0 {
                return TurnEnd::Idle;
            }
            if halted || left == 0 {
                self.log_boundary();
                return TurnEnd::Ran;
            }
            let before = self.retired();
            let exit = self.run_until(&board, left.min(allowed));
            let retired = self.retired().wrapping_sub(before);
            *used += retired;
            match exit {
                Exit::Halted => halted = true,
                Exit::Budget | Exit::Leave if retired == 0 && stop.take() => {
                    return TurnEnd::Paused;
                }
                Exit::Budget | Exit::Kicked | Exit::Leave => {}
                Exit::Stepped => return TurnEnd::Delivered,
                Exit::Stop(hit) => return TurnEnd::Hit(hit),
                Exit::Shutdown => return self.end_in_crash(&board, CrashCause::TripleFault),
                Exit::Missing { bytes, .. } => {
                    return self.end_in_crash(&board, CrashCause::Missing(bytes.to_vec()));
                }
            }
        }
    }

    /// Whether the machine is stopped, or a debugger pauses it. Waits for the end of any other
    /// pause.
    fn must_stop(&self, board: &Board) -> Option<TurnEnd> {
        let rung = board.run.vcpus.doorbell(self.platform.model.id).answer();
        if !rung
            || !board
                .run
                .vcpus
                .checkpoint_requested(0..board.run.vcpus.cpus())
        {
            return None;
        }
        if board.run.stops.requested() {
            return Some(TurnEnd::Paused);
        }
        let checkpoint = board
            .run
            .vcpus
            .checkpoint(checkpoint_state(), &mut |_, _| {});
        (checkpoint == Checkpoint::Stop).then_some(TurnEnd::Stop)
    }

    /// Ends the run because the guest cannot continue. A debugger inspects the crash first.
    pub(super) fn end_in_crash(&mut self, board: &Arc<Board>, cause: CrashCause) -> TurnEnd {
        if board.run.reset_after(&cause) && board.run.end.take_reset() {
            return TurnEnd::Reset;
        }
        if board.run.stops.requested() {
            self.crashed = Some(cause);
            return TurnEnd::Crashed;
        }
        self.crash(board, cause);
        TurnEnd::Stop
    }

    /// Runs at most `limit` instructions, and not beyond the next timer.
    fn run_until(&mut self, board: &Board, limit: u64) -> Exit {
        let now = board.time.clock.now();
        let due = board.buses.irq.next_event().unwrap_or(u64::MAX);
        let budget = limit.min(due.saturating_sub(now)).max(1);
        if let Some(log) = &mut self.platform.log {
            log.deadline = if due > now {
                now.saturating_add(budget)
            } else {
                0
            };
        }
        let exit = self.run_tracked(budget);
        let stats = self.vcpu.stats();
        self.platform.advance(RetiredCounts {
            instructions: stats.retired,
            user: stats.user,
            cycles: self.vcpu.cycles(),
        });
        if exit == Exit::Halted {
            self.platform.model.halt();
        }
        exit
    }

    /// Adds the registers to the event hash.
    fn log_boundary(&mut self) {
        if let Some(log) = &mut self.platform.log {
            self.vcpu.store(&mut log.scratch);
            log.add_boundary(self.platform.model.board.time.clock.now());
        }
    }

    /// The hash of all events and of the current registers; 0 outside of deterministic mode.
    ///
    /// It does not add the registers to the event hash itself.
    pub(super) fn digest(&mut self) -> u128 {
        let now = self.platform.model.board.time.clock.now();
        let Some(log) = &mut self.platform.log else {
            return 0;
        };
        self.vcpu.store(&mut log.scratch);
        log.digest_at(now)
    }

    /// The architectural state.
    pub(super) fn cpu_state(&mut self) -> CpuState {
        let mut state = CpuState::reset();
        self.vcpu.store(&mut state);
        state.cr8 = self.platform.cr8().into();
        state
    }

    /// Sets the architectural state, for a debugger or a comparison.
    pub(super) fn set_cpu_state(&mut self, state: &CpuState) {
        self.vcpu.load(state);
    }

    /// The state for a snapshot. Flushes the TLB.
    pub(super) fn save(&mut self) -> VcpuState {
        self.vcpu.forget_translations();
        VcpuState {
            cpu: self.cpu_state(),
            msrs: self.platform.model.msrs.save(),
            events: self.platform.model.pmu_totals().save(),
            unit: self.platform.model.unit.save(),
            log: self
                .platform
                .log
                .as_ref()
                .map(RunLog::save)
                .unwrap_or_default(),
        }
    }

    /// Restores a saved state. The interrupt controllers must be restored before.
    pub(super) fn restore(&mut self, state: &VcpuState) -> Result<(), RestoreError> {
        let cpu = self.platform.model.id;
        let vcpu = |source| RestoreError::Vcpu { cpu, source };
        state.cpu.check().map_err(vcpu)?;
        let user = state.events.totals.get(EventKind::Instruction, Ring::User);
        if state.log.retired > COUNT_MAX || user > state.log.retired {
            return Err(RestoreError::Counts(cpu));
        }
        let msrs = |source| RestoreError::Msrs { cpu, source };
        self.platform.model.restore(&state.msrs).map_err(msrs)?;
        self.platform.model.unit.restore(&state.unit)?;
        self.vcpu.load(&state.cpu);
        self.crashed = None;
        let events = self.platform.model.pmu_totals();
        events.restore(&state.events);
        let RunLogState {
            retired, cycles, ..
        } = state.log;
        self.vcpu.set_retired(retired, events.user(), cycles);
        if let Some(log) = &mut self.platform.log {
            log.restore(&state.log);
        }
        Ok(())
    }

    /// Adds an event to the event hash. `operand` is the address, MSR, vector or number of the
    /// event.
    pub(super) fn log_event(&mut self, event: LoggedEvent, operand: u64, data: &[u8]) {
        let now = self.platform.model.board.time.clock.now();
        if let Some(log) = &mut self.platform.log {
            log.add_event(event, now, operand, data);
        }
    }

    /// The last branches since the vCPU was created or restored, the oldest first.
    pub(super) fn last_branches(&self) -> Vec<Branch> {
        let log = self.platform.log.as_ref();
        log.map_or_else(Vec::new, |log| log.branches.recent().to_vec())
    }

    /// Interrupts delivered since the vCPU was created or restored.
    pub(super) fn interrupts(&self) -> u64 {
        self.delivered().0
    }

    /// The number of retired instructions when an interrupt was last delivered at `rip`.
    ///
    /// Returns `None` if the last delivery at `rip` was an exception, or is too long ago.
    pub(super) fn interrupted_at(&self, rip: u64) -> Option<u64> {
        let log = self.platform.log.as_ref()?;
        let delivery = log.branches.last_delivery_from(rip)?;
        // A branch has the low half of the count; fewer than 2^32 instructions retired since then.
        let low = u32::try_from(self.retired() & u64::from(u32::MAX)).ok()?;
        let since = low.wrapping_sub(delivery.at);
        let retired = self.retired().checked_sub(since.into());
        retired.filter(|_| delivery.class == BranchClass::Interrupt)
    }

    /// Interrupts and exceptions delivered since the vCPU was created or restored.
    pub(super) fn delivered(&self) -> (u64, u64) {
        let log = self.platform.log.as_ref();
        log.map_or((0, 0), |log| log.branches.delivered())
    }

    /// Guest memory as the interpreter accesses it.
    pub(crate) fn memory(&self) -> &Arc<hindsight_interp::Memory> {
        self.vcpu.memory()
    }
}

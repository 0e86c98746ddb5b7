//! One processor's turn, and what is saved of it.

use std::sync::Arc;

use hindsight_cpu::branch::{Branch, BranchClass};
use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::StopHit;
use hindsight_interp::{Exit, Platform};

use super::QUANTUM;
use crate::state::RunLogState;
use crate::state::{RestoreError, VcpuState};
use crate::vcpu::board::Board;
use crate::vcpu::crash::CrashCause;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::interp::run_log::{LoggedEvent, RunLog};
use crate::vcpu::run_control::Checkpoint;

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Instructions were executed.
    Ran,
    /// The processor is halted and stayed so.
    Idle,
    /// As many instructions as were allowed are retired; the turn is not over.
    Limit,
    /// What a debugger stops for was reached; the turn is not over.
    Hit(StopHit),
    /// An exception was delivered while a debugger steps; the turn is not over.
    Delivered,
    /// The guest cannot go on, and a debugger looks at that.
    Crashed,
    /// The guest has ended the run, and a debugger holds that.
    AtEnd,
    /// A debugger pauses the machine; the turn is not over.
    Paused,
    /// The machine stops.
    Stop,
}

impl InterpVcpu {
    /// Makes this a processor of deterministic mode, see [`super`].
    pub fn make_deterministic(&mut self, seed: u64) {
        self.platform.log = Some(RunLog::new(seed, self.platform.model.id));
    }

    /// Retired instructions.
    pub(crate) fn retired(&self) -> u64 {
        self.vcpu.stats().retired
    }

    /// Runs a turn, of which `used` instructions are over, to its end: [`QUANTUM`] instructions,
    /// fewer if the processor halts. `limit` instructions at most are retired now.
    ///
    /// Wherever a limit cuts a turn, what follows is what would have followed: whatever is noted,
    /// and all that moves but the processor, comes after the look at the limit.
    pub(crate) fn turn(&mut self, used: &mut u64, limit: u64) -> Turn {
        let board = self.platform.model.board.clone();
        let first = self.retired();
        let mut halted = false;
        loop {
            if let Some(end) = self.must_stop(&board) {
                return end;
            }
            let allowed = limit.saturating_sub(self.retired().wrapping_sub(first));
            if allowed == 0 {
                return Turn::Limit;
            }
            if board.run.end.held().is_some() {
                return Turn::AtEnd;
            }
            let now = board.time.clock.now();
            if board.buses.irq.next_event().is_some_and(|due| due <= now) {
                self.note_boundary();
                board.buses.irq.advance(now);
                halted = false;
            }
            self.start_signals();
            let left = QUANTUM.saturating_sub(*used);
            if halted && *used == 0 {
                return Turn::Idle;
            }
            if halted || left == 0 {
                self.note_boundary();
                return Turn::Ran;
            }
            let before = self.retired();
            let exit = self.run_until(&board, left.min(allowed));
            *used += self.retired().wrapping_sub(before);
            match exit {
                Exit::Halted => halted = true,
                Exit::Budget | Exit::Kicked | Exit::Leave => {}
                Exit::Stepped => return Turn::Delivered,
                Exit::Stop(hit) => return Turn::Hit(hit),
                Exit::Shutdown => return self.cannot_go_on(&board, CrashCause::TripleFault),
                Exit::Missing { bytes, .. } => {
                    return self.cannot_go_on(&board, CrashCause::Missing(bytes.to_vec()));
                }
            }
        }
    }

    /// The machine is stopped, or a debugger pauses it. Waits out any other pause.
    fn must_stop(&self, board: &Board) -> Option<Turn> {
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
            return Some(Turn::Paused);
        }
        let checkpoint = board
            .run
            .vcpus
            .checkpoint(super::checkpoint_state(), &mut |_, _| {});
        (checkpoint == Checkpoint::Stop).then_some(Turn::Stop)
    }

    pub(crate) fn cannot_go_on(&mut self, board: &Arc<Board>, cause: CrashCause) -> Turn {
        if board.run.stops.requested() {
            self.crashed = Some(cause);
            return Turn::Crashed;
        }
        self.crash(board, cause);
        Turn::Stop
    }

    /// Runs `limit` instructions at most, and not beyond the next timer.
    fn run_until(&mut self, board: &Board, limit: u64) -> Exit {
        let now = board.time.clock.now();
        let due = board.buses.irq.next_event().unwrap_or(u64::MAX);
        let budget = limit.min(due.saturating_sub(now)).max(1);
        if let Some(log) = &mut self.platform.log {
            log.until = if due > now {
                now.saturating_add(budget)
            } else {
                0
            };
        }
        let exit = self.vcpu.run(&mut self.platform, budget);
        let stats = self.vcpu.stats();
        let cycles = self.vcpu.cycles();
        self.platform.retired(stats.retired, stats.user, cycles);
        if exit == Exit::Halted {
            self.platform.model.halt();
        }
        exit
    }

    /// Puts the registers into the hash.
    fn note_boundary(&mut self) {
        if let Some(log) = &mut self.platform.log {
            self.vcpu.store(&mut log.scratch);
            log.note_boundary(self.platform.model.board.time.clock.now());
        }
    }

    /// The hash of all that this processor did, and of where it is; 0 outside of deterministic
    /// mode. The hash itself stays as it was.
    pub(crate) fn digest(&mut self) -> u128 {
        let now = self.platform.model.board.time.clock.now();
        let Some(log) = &mut self.platform.log else {
            return 0;
        };
        self.vcpu.store(&mut log.scratch);
        log.digest_at(now)
    }

    /// The architectural state.
    pub(crate) fn cpu_state(&mut self) -> CpuState {
        let mut state = CpuState::reset();
        self.vcpu.store(&mut state);
        state.cr8 = self.platform.cr8().into();
        state
    }

    /// Takes over an architectural state, from outside: a debugger's, say.
    pub(crate) fn set_cpu_state(&mut self, state: &CpuState) {
        self.vcpu.load(state);
    }

    /// The state, to be saved; forgets all translations.
    pub(crate) fn save(&mut self) -> VcpuState {
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

    /// Takes over a state. The interrupt controllers are restored before.
    pub(crate) fn restore(&mut self, state: &VcpuState) -> Result<(), RestoreError> {
        let cpu = self.platform.model.id;
        let vcpu = |source| RestoreError::Vcpu { cpu, source };
        state.cpu.check().map_err(vcpu)?;
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

    /// Puts an event into the hash.
    pub(crate) fn note(&mut self, noted: LoggedEvent, place: u64, data: &[u8]) {
        let now = self.platform.model.board.time.clock.now();
        if let Some(log) = &mut self.platform.log {
            log.note(noted, now, place, data);
        }
    }

    /// Its last branches, the oldest first: as many as are kept since it was made or restored.
    pub(crate) fn last_branches(&self) -> Vec<Branch> {
        let log = self.platform.log.as_ref();
        log.map_or_else(Vec::new, |log| log.recent.clone())
    }

    /// Interrupts it took since it was made or restored.
    pub(crate) fn interrupts(&self) -> u64 {
        self.platform.log.as_ref().map_or(0, |log| log.interrupts)
    }

    /// Instructions it had retired when it was last interrupted at `rip`, if that was by an interrupt: see [`RunLog::events`].
    pub(crate) fn interrupted(&self, rip: u64) -> Option<u64> {
        let log = self.platform.log.as_ref()?;
        let event = log.events.iter().rev().find(|event| event.from == rip)?;
        // The low half of a count that has not gone on by 2^32 since.
        let low = u32::try_from(self.retired() & u64::from(u32::MAX)).ok()?;
        let since = low.wrapping_sub(event.at);
        let retired = self.retired().checked_sub(since.into());
        retired.filter(|_| event.class == BranchClass::Interrupt)
    }

    /// Interrupts and exceptions it took since it was made or restored.
    pub(crate) fn delivered(&self) -> (u64, u64) {
        let log = self.platform.log.as_ref();
        log.map_or((0, 0), |log| (log.interrupts, log.exceptions))
    }

    /// Guest memory as the interpreter reaches it.
    pub(crate) fn memory(&self) -> &Arc<hindsight_interp::Memory> {
        self.vcpu.memory()
    }
}

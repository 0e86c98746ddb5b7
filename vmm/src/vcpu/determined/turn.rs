//! One processor's turn, and what is saved of it.

use std::sync::Arc;

use hindsight_cpu::branch::{Branch, BranchClass};
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Hit, Platform};

use super::{Noted, QUANTUM, Track, TrackState};
use crate::machine::Board;
use crate::snapshot::{RestoreError, VcpuState};
use crate::vcpu::control::Checkpoint;
use crate::vcpu::dispatch::CrashCause;
use crate::vcpu::observed::ObservedVcpu;

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Instructions were executed.
    Ran,
    /// The processor is halted and stayed so.
    Idle,
    /// As many instructions as were allowed are retired; the turn is not over.
    Limit,
    /// What a debugger stops for was reached; the turn is not over.
    Hit(Hit),
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

impl ObservedVcpu {
    /// Makes this a processor of deterministic mode, see [`super`].
    pub fn determine(&mut self, seed: u64) {
        self.around.track = Some(Track::new(seed, self.around.models.id));
    }

    /// Retired instructions.
    pub(super) fn retired(&self) -> u64 {
        self.vcpu.stats().retired
    }

    /// Runs a turn, of which `used` instructions are over, to its end: [`QUANTUM`] instructions,
    /// fewer if the processor halts. `limit` instructions at most are retired now.
    ///
    /// Wherever a limit cuts a turn, what follows is what would have followed: whatever is noted,
    /// and all that moves but the processor, comes after the look at the limit.
    pub(super) fn turn(&mut self, used: &mut u64, limit: u64) -> Turn {
        let board = self.around.models.board.clone();
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
            if board.held_end().is_some() {
                return Turn::AtEnd;
            }
            let now = board.clock.now();
            if board.irq.next_event().is_some_and(|due| due <= now) {
                self.note_boundary();
                board.irq.advance(now);
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
        let rung = board.control.doorbell(self.around.models.id).answer();
        if !rung || !board.control.wants_checkpoint(0..board.control.cpus()) {
            return None;
        }
        if board.reports.wanted() {
            return Some(Turn::Paused);
        }
        let checkpoint = board.control.checkpoint(super::place(), &mut |_, _| {});
        (checkpoint == Checkpoint::Stop).then_some(Turn::Stop)
    }

    pub(super) fn cannot_go_on(&mut self, board: &Arc<Board>, cause: CrashCause) -> Turn {
        if board.reports.wanted() {
            self.crashed = Some(cause);
            return Turn::Crashed;
        }
        self.crash(board, cause);
        Turn::Stop
    }

    /// Runs `limit` instructions at most, and not beyond the next timer.
    fn run_until(&mut self, board: &Board, limit: u64) -> Exit {
        let now = board.clock.now();
        let due = board.irq.next_event().unwrap_or(u64::MAX);
        let budget = limit.min(due.saturating_sub(now)).max(1);
        if let Some(track) = &mut self.around.track {
            track.until = if due > now {
                now.saturating_add(budget)
            } else {
                0
            };
        }
        let exit = self.vcpu.run(&mut self.around, budget);
        let stats = self.vcpu.stats();
        let cycles = self.vcpu.cycles();
        self.around.retired(stats.retired, stats.user, cycles);
        if exit == Exit::Halted {
            self.around.models.halt();
        }
        exit
    }

    /// Puts the registers into the hash.
    fn note_boundary(&mut self) {
        if let Some(track) = &mut self.around.track {
            self.vcpu.store(&mut track.scratch);
            track.note_boundary(self.around.models.board.clock.now());
        }
    }

    /// The hash of all that this processor did, and of where it is; 0 outside of deterministic
    /// mode. The hash itself stays as it was.
    pub(super) fn digest(&mut self) -> u128 {
        let now = self.around.models.board.clock.now();
        let Some(track) = &mut self.around.track else {
            return 0;
        };
        self.vcpu.store(&mut track.scratch);
        track.digest_at(now)
    }

    /// The architectural state.
    pub(super) fn cpu_state(&mut self) -> CpuState {
        let mut state = CpuState::reset();
        self.vcpu.store(&mut state);
        state.cr8 = self.around.cr8().into();
        state
    }

    /// Takes over an architectural state, from outside: a debugger's, say.
    pub(super) fn set_cpu_state(&mut self, state: &CpuState) {
        self.vcpu.load(state);
    }

    /// The state, to be saved; forgets all translations.
    pub(super) fn save(&mut self) -> VcpuState {
        self.vcpu.forget_translations();
        VcpuState {
            cpu: self.cpu_state(),
            msrs: self.around.models.msrs.save(),
            events: self.around.models.events().save(),
            unit: self.around.models.unit.save(),
            track: self
                .around
                .track
                .as_ref()
                .map(Track::save)
                .unwrap_or_default(),
        }
    }

    /// Takes over a state. The interrupt controllers are restored before.
    pub(super) fn restore(&mut self, state: &VcpuState) -> Result<(), RestoreError> {
        let cpu = self.around.models.id;
        let vcpu = |source| RestoreError::Vcpu { cpu, source };
        state.cpu.check().map_err(vcpu)?;
        let msrs = |source| RestoreError::Msrs { cpu, source };
        self.around.models.restore(&state.msrs).map_err(msrs)?;
        self.around.models.unit.restore(&state.unit)?;
        self.vcpu.load(&state.cpu);
        self.crashed = None;
        let events = self.around.models.events();
        events.restore(&state.events);
        let TrackState {
            retired, cycles, ..
        } = state.track;
        self.vcpu.set_retired(retired, events.user(), cycles);
        if let Some(track) = &mut self.around.track {
            track.restore(&state.track);
        }
        Ok(())
    }

    /// Puts an event into the hash.
    pub(super) fn note(&mut self, noted: Noted, place: u64, data: &[u8]) {
        let now = self.around.models.board.clock.now();
        if let Some(track) = &mut self.around.track {
            track.note(noted, now, place, data);
        }
    }

    /// Its last branches, the oldest first: as many as are kept since it was made or restored.
    pub(super) fn last_branches(&self) -> Vec<Branch> {
        let track = self.around.track.as_ref();
        track.map_or_else(Vec::new, |track| track.recent.clone())
    }

    /// Interrupts it took since it was made or restored.
    pub(super) fn interrupts(&self) -> u64 {
        self.around
            .track
            .as_ref()
            .map_or(0, |track| track.interrupts)
    }

    /// Instructions it had retired when it was last interrupted at `rip`, if that was by an interrupt: see [`Track::events`].
    pub(super) fn interrupted(&self, rip: u64) -> Option<u64> {
        let track = self.around.track.as_ref()?;
        let event = track.events.iter().rev().find(|event| event.from == rip)?;
        // The low half of a count that has not gone on by 2^32 since.
        let low = u32::try_from(self.retired() & u64::from(u32::MAX)).ok()?;
        let since = low.wrapping_sub(event.at);
        let retired = self.retired().checked_sub(since.into());
        retired.filter(|_| event.class == BranchClass::Interrupt)
    }

    /// Interrupts and exceptions it took since it was made or restored.
    pub(super) fn delivered(&self) -> (u64, u64) {
        let track = self.around.track.as_ref();
        track.map_or((0, 0), |track| (track.interrupts, track.exceptions))
    }

    /// Guest memory as the interpreter reaches it.
    pub(super) fn memory(&self) -> &Arc<hindsight_interp::Memory> {
        self.vcpu.memory()
    }
}

//! One processor's turn, and what is saved of it.

use std::sync::Arc;

use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Hit, Platform};

use super::{Noted, QUANTUM, Track};
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
            if self.must_stop(&board) {
                return Turn::Stop;
            }
            let allowed = limit.saturating_sub(self.retired().wrapping_sub(first));
            if allowed == 0 {
                return Turn::Limit;
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
                Exit::Budget | Exit::Kicked | Exit::Leave | Exit::Stepped => {}
                Exit::Stop(hit) => return Turn::Hit(hit),
                Exit::Shutdown => {
                    self.crash(&board, CrashCause::TripleFault);
                    return Turn::Stop;
                }
                Exit::Missing { bytes, .. } => {
                    self.crash(&board, CrashCause::Missing(bytes.to_vec()));
                    return Turn::Stop;
                }
            }
        }
    }

    /// The machine is stopped. Waits out a pause.
    fn must_stop(&self, board: &Board) -> bool {
        board.control.doorbell(self.around.models.id).answer()
            && board.control.wants_checkpoint(0..1)
            && board.control.checkpoint(super::place(), &mut |_, _| {}) == Checkpoint::Stop
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
        self.around.retired(stats.retired, stats.user);
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
        let saved = self.around.track.as_ref().map(Track::save);
        self.note_boundary();
        let digest = self.around.track.as_ref().map_or(0, Track::digest);
        if let (Some(track), Some(saved)) = (&mut self.around.track, saved) {
            track.restore(&saved);
        }
        digest
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
        self.vcpu.load(&state.cpu);
        let events = self.around.models.events();
        events.restore(&state.events);
        self.vcpu.set_retired(state.track.retired, events.user());
        if let Some(track) = &mut self.around.track {
            track.restore(&state.track);
        }
        Ok(())
    }

    /// Puts an event into the hash.
    #[expect(dead_code, reason = "input is noted by it")]
    pub(super) fn note(&mut self, noted: Noted, place: u64, data: &[u8]) {
        let now = self.around.models.board.clock.now();
        if let Some(track) = &mut self.around.track {
            track.note(noted, now, place, data);
        }
    }

    /// Guest memory as the interpreter reaches it.
    pub(super) fn memory(&self) -> &Arc<hindsight_interp::Memory> {
        self.vcpu.memory()
    }
}

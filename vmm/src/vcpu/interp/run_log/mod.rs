//! The run log of one vCPU in deterministic mode: its event hash, counters and random numbers.

mod branches;
mod event_hash;
mod rng;

use hindsight_cpu::state::CpuState;
use hindsight_devices::clock::Ticks;

use crate::state::RunLogState;
use branches::BranchPath;
pub(crate) use event_hash::LoggedEvent;
use event_hash::{BOUNDARY_WORDS, EventHash};
use rng::SplitMix64;

/// The run log of one vCPU.
pub(crate) struct RunLog {
    hash: EventHash,
    rng: SplitMix64,
    /// The last branches, interrupts and exceptions of the vCPU.
    pub(crate) branches: BranchPath,
    /// Retired instructions.
    pub(crate) retired: u64,
    /// Core cycles by which the vCPU has advanced the clock.
    pub(crate) cycles: u64,
    /// When the current run of the interpreter ends; a timer that becomes due earlier interrupts
    /// it. 0 if none can.
    pub(crate) deadline: Ticks,
    /// Reused, so that a boundary allocates nothing.
    pub(crate) scratch: Box<CpuState>,
}

impl std::fmt::Debug for RunLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunLog")
            .field("retired", &self.retired)
            .finish_non_exhaustive()
    }
}

impl RunLog {
    /// The log of vCPU `id` in a machine with this seed.
    pub(crate) fn new(seed: u64, id: usize) -> Self {
        Self {
            hash: EventHash::default(),
            rng: SplitMix64::for_vcpu(seed, id),
            branches: BranchPath::default(),
            retired: 0,
            cycles: 0,
            deadline: 0,
            scratch: Box::new(CpuState::reset()),
        }
    }

    /// The state for a snapshot.
    pub(crate) fn save(&self) -> RunLogState {
        RunLogState {
            digest: self.hash.halves(),
            random: self.rng.state,
            retired: self.retired,
            cycles: self.cycles,
            path: self.branches.hash(),
        }
    }

    /// Restores a saved state.
    pub(crate) fn restore(&mut self, state: &RunLogState) {
        self.hash = EventHash::from_halves(state.digest);
        self.rng.state = state.random;
        self.branches = BranchPath::with_hash(state.path);
        self.retired = state.retired;
        self.cycles = state.cycles;
        self.deadline = 0;
    }

    /// 64 bits for RDRAND and RDSEED.
    pub(crate) const fn random(&mut self) -> u64 {
        self.rng.next_u64()
    }

    /// Adds an event to the hash. `operand` is its address, MSR, vector or number.
    pub(crate) fn add_event(&mut self, event: LoggedEvent, now: Ticks, operand: u64, data: &[u8]) {
        self.hash.add(event, (self.retired, now), operand, data);
    }

    /// Adds the registers in [`RunLog::scratch`] to the hash.
    pub(crate) fn add_boundary(&mut self, now: Ticks) {
        let state = &self.scratch;
        let mut words = [0; BOUNDARY_WORDS * 8];
        let path = self.branches.hash();
        let values = state.gpr.iter();
        let values = values.chain([&state.rflags, &state.cr3, &path]);
        for (word, value) in words.chunks_exact_mut(8).zip(values) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        let rip = state.rip;
        self.add_event(LoggedEvent::Boundary, now, rip, &words);
    }

    /// The digest of all events so far and of the registers in [`RunLog::scratch`]. The hash itself
    /// does not change.
    pub(crate) fn digest_at(&mut self, now: Ticks) -> u128 {
        let before = self.hash;
        self.add_boundary(now);
        std::mem::replace(&mut self.hash, before).digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_log_continues_as_the_saved_one() {
        let mut log = RunLog::new(3, 1);
        log.add_event(LoggedEvent::PortRead, 5, 6, &[7]);
        log.random();
        let mut other = RunLog::new(0, 0);
        other.restore(&log.save());
        for log in [&mut log, &mut other] {
            log.add_event(LoggedEvent::PortRead, 8, 9, &[10]);
        }
        assert_eq!(other.save(), log.save());
        assert_eq!(other.random(), log.random());
    }
}

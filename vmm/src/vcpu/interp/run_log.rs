//! What deterministic mode keeps of one processor: its hash, its place, its random numbers.
//!
//! The hash is a chain: the digest of the digest before and of one event. So it can be saved
//! between any two events.

use std::collections::VecDeque;

use hindsight_cpu::branch::{Branch, BranchClass};
use hindsight_cpu::state::CpuState;
use hindsight_devices::clock::Ticks;
use xxhash_rust::xxh3::xxh3_128;

use crate::state::RunLogState;

/// What goes into the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum LoggedEvent {
    PortRead,
    PortWrite,
    MmioRead,
    MmioWrite,
    Rdmsr,
    Wrmsr,
    Interrupt,
    Nmi,
    Boundary,
    Random,
    Input,
    Smi,
}

/// What a [`LoggedEvent::Boundary`] tells of a processor: its general registers, RFLAGS, CR3, and the way it
/// came.
const WORDS: usize = 19;

/// Branches kept to be shown.
const RECENT: usize = 16;

/// Interrupts and exceptions kept, to know which handler a processor returns from.
const EVENTS: usize = 256;

/// Bytes of an event that go into one link of the chain.
const DATA_MAX: usize = WORDS * 8;

/// What deterministic mode keeps of one processor.
pub(crate) struct RunLog {
    digest: u128,
    random: u64,
    /// Retired instructions.
    pub(crate) retired: u64,
    /// Core cycles by which the clock was moved.
    pub(crate) cycles: u64,
    /// See [`RunLogState::path`].
    path: u64,
    /// The last branches, at most [`RECENT`].
    pub(crate) recent: Vec<Branch>,
    /// The last interrupts and exceptions since the log was made or restored, at most [`EVENTS`].
    pub(crate) events: VecDeque<Branch>,
    /// Interrupts taken since the log was made or restored.
    pub(crate) interrupts: u64,
    /// Exceptions, likewise.
    pub(crate) exceptions: u64,
    /// When the run in progress ends; an earlier timer interrupts it. 0: no timer does.
    pub(crate) until: Ticks,
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

/// One step of the SplitMix64 generator.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

impl RunLog {
    /// For processor `id` of a machine with this seed.
    pub(crate) fn new(seed: u64, id: usize) -> Self {
        let mut random = seed;
        for _ in 0..=id {
            random = split_mix(&mut random);
        }
        Self {
            digest: 0,
            random,
            retired: 0,
            cycles: 0,
            path: 0,
            recent: Vec::new(),
            events: VecDeque::new(),
            interrupts: 0,
            exceptions: 0,
            until: 0,
            scratch: Box::new(CpuState::reset()),
        }
    }

    /// The state, to be saved.
    pub(crate) fn save(&self) -> RunLogState {
        let low = self.digest & u128::from(u64::MAX);
        let half = |half: u128| u64::try_from(half).unwrap_or(0);
        RunLogState {
            digest: [half(low), half(self.digest >> 64)],
            random: self.random,
            retired: self.retired,
            cycles: self.cycles,
            path: self.path,
        }
    }

    /// Takes over a state.
    pub(crate) fn restore(&mut self, state: &RunLogState) {
        let [low, high] = state.digest.map(u128::from);
        self.digest = high << 64 | low;
        self.random = state.random;
        self.retired = state.retired;
        self.cycles = state.cycles;
        self.path = state.path;
        self.recent.clear();
        self.events.clear();
        self.interrupts = 0;
        self.exceptions = 0;
        self.until = 0;
    }

    /// Puts branches into the hash: where a block begins, and after how many instructions. It makes no
    /// difference in what portions they come.
    pub(crate) fn follow(&mut self, branches: &[Branch]) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut path = self.path;
        for branch in branches {
            let place = u64::from(branch.at).wrapping_mul(0xd6e8_feb8_6659_fd93);
            let interrupt = branch.class == BranchClass::Interrupt;
            self.interrupts += u64::from(interrupt);
            let event = interrupt || !branch.class.is_instruction();
            self.exceptions += u64::from(!interrupt && event);
            if event {
                self.keep_event(*branch);
            }
            path = (path.rotate_left(23) ^ branch.to.wrapping_add(place)).wrapping_mul(ODD);
        }
        self.path = path;
        let kept = RECENT.saturating_sub(branches.len());
        let old = self.recent.len().saturating_sub(kept);
        self.recent.drain(..old);
        let new = branches.len().saturating_sub(RECENT);
        self.recent.extend_from_slice(&branches[new..]);
    }

    #[cold]
    fn keep_event(&mut self, event: Branch) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// 64 bits for RDRAND and RDSEED.
    pub(crate) fn random(&mut self) -> u64 {
        split_mix(&mut self.random)
    }

    /// Puts an event into the hash, with its place in this processor's instructions and its time.
    pub(crate) fn note(&mut self, noted: LoggedEvent, now: Ticks, place: u64, data: &[u8]) {
        let mut head = [0; 32];
        head[0] = noted as u8;
        head[1..8].copy_from_slice(&data.len().to_le_bytes()[..7]);
        head[8..16].copy_from_slice(&self.retired.to_le_bytes());
        head[16..24].copy_from_slice(&now.to_le_bytes());
        head[24..].copy_from_slice(&place.to_le_bytes());
        let mut chunks = data.chunks(DATA_MAX);
        self.link(&head, chunks.next().unwrap_or_default());
        chunks.for_each(|chunk| self.link(&[0; 32], chunk));
    }

    fn link(&mut self, head: &[u8; 32], data: &[u8]) {
        let mut bytes = [0; 48 + DATA_MAX];
        bytes[..16].copy_from_slice(&self.digest.to_le_bytes());
        bytes[16..48].copy_from_slice(head);
        bytes[48..48 + data.len()].copy_from_slice(data);
        self.digest = xxh3_128(&bytes[..48 + data.len()]);
    }

    /// Puts the registers in [`RunLog::scratch`] into the hash.
    pub(crate) fn note_boundary(&mut self, now: Ticks) {
        let state = &self.scratch;
        let mut words = [0; WORDS * 8];
        let values = state.gpr.iter();
        let values = values.chain([&state.rflags, &state.cr3, &self.path]);
        for (word, value) in words.chunks_exact_mut(8).zip(values) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        let rip = state.rip;
        self.note(LoggedEvent::Boundary, now, rip, &words);
    }

    /// The hash of all events so far and of the registers in [`RunLog::scratch`]; nothing is noted.
    pub(crate) fn digest_at(&mut self, now: Ticks) -> u128 {
        let before = self.digest;
        self.note_boundary(now);
        std::mem::replace(&mut self.digest, before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_and_seeds_have_random_numbers_of_their_own() {
        let numbers = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(seed, id)| {
            let mut log = RunLog::new(seed, id);
            [log.random(), log.random()]
        });
        let mut all: Vec<_> = numbers.concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 8);
        assert_eq!(RunLog::new(0, 0).random(), RunLog::new(0, 0).random());
    }

    #[test]
    fn hash_depends_on_place_time_and_data() {
        let digest = |retired, now, place, data: &[u8]| {
            let mut log = RunLog::new(0, 0);
            log.retired = retired;
            log.note(LoggedEvent::PortWrite, now, place, data);
            log.digest
        };
        let base = digest(1, 2, 3, &[4]);
        assert_eq!(base, digest(1, 2, 3, &[4]));
        for other in [
            digest(9, 2, 3, &[4]),
            digest(1, 9, 3, &[4]),
            digest(1, 2, 9, &[4]),
            digest(1, 2, 3, &[9]),
            digest(1, 2, 3, &[4, 0]),
        ] {
            assert_ne!(base, other);
        }
        let long = |last| digest(1, 2, 3, &[&[0; 3 * DATA_MAX][..], &[last]].concat());
        assert_ne!(long(1), long(2));
    }

    #[test]
    fn path_depends_on_each_branch_and_not_on_portions() {
        let branch = |to, at| Branch {
            from: 1,
            to,
            at,
            class: hindsight_cpu::branch::BranchClass::Return,
            cpl: 0,
            to_cpl: 0,
            mispredicted: false,
        };
        let branches: Vec<_> = (0..50).map(|n| branch(n * 8, 3)).collect();
        let follow = |portions: &[&[Branch]]| {
            let mut log = RunLog::new(0, 0);
            portions.iter().for_each(|portion| log.follow(portion));
            assert_eq!(log.recent, branches[50 - RECENT..]);
            log.path
        };
        let whole = follow(&[&branches]);
        assert_eq!(
            whole,
            follow(&[&branches[..7], &[], &branches[7..9], &branches[9..]])
        );
        for changed in [branch(1, 3), branch(0, 4)] {
            let mut other = branches.clone();
            other[0] = changed;
            assert_ne!(whole, follow(&[&other]));
        }
    }

    #[test]
    fn restored_track_goes_on_as_the_saved_one() {
        let mut log = RunLog::new(3, 1);
        log.note(LoggedEvent::PortRead, 5, 6, &[7]);
        log.random();
        let mut other = RunLog::new(0, 0);
        other.restore(&log.save());
        for log in [&mut log, &mut other] {
            log.note(LoggedEvent::PortRead, 8, 9, &[10]);
        }
        assert_eq!(other.save(), log.save());
        assert_eq!(other.random(), log.random());
    }
}

//! Deterministic mode: one thread runs all processors in turn, on a clock that only they move.
//!
//! One retired instruction is one tick of the clock. A turn is a fixed number of instructions; it
//! is cut short only by a halt, and interrupted where a timer is due, so that a timer fires at its
//! instruction. When all processors are halted, the clock jumps to the next timer. Nothing in here
//! may depend on the host's time or on another thread, except for the end of the run.

use std::sync::Arc;

use hindsight_cpu::state::CpuState;
use hindsight_devices::clock::Ticks;
use xxhash_rust::xxh3::Xxh3;

use super::dispatch::CrashCause;
use super::guard::LoopGuard;
use super::observed::ObservedVcpu;
use super::report::LastState;
use crate::machine::Board;
use crate::vcpu::control::Checkpoint;

/// Ticks of the virtual clock that count as one second: a tick is a nanosecond.
pub const TSC_HZ: u64 = 1_000_000_000;

/// Instructions of a turn.
pub const QUANTUM: u64 = 10_000;

/// What the real-time clock shows at the start: 2000-01-01, in seconds since 1970.
pub const RTC_EPOCH: i64 = 946_684_800;

/// What goes into the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Noted {
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
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Instructions were executed.
    Ran,
    /// The processor is halted and stayed so.
    Idle,
    /// The machine stops.
    Stop,
}

/// What deterministic mode keeps of one processor: its hash, its place, its random numbers.
pub(super) struct Track {
    hash: Box<Xxh3>,
    random: u64,
    /// Retired instructions by which the clock was moved.
    pub(super) retired: u64,
    /// When the run in progress ends; an earlier timer interrupts it. 0: no timer does.
    pub(super) until: Ticks,
    /// Reused, so that a boundary allocates nothing.
    pub(super) scratch: Box<CpuState>,
}

impl std::fmt::Debug for Track {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Track")
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

impl Track {
    /// For processor `id` of a machine with this seed.
    pub(super) fn new(seed: u64, id: usize) -> Self {
        let mut random = seed;
        for _ in 0..=id {
            random = split_mix(&mut random);
        }
        Self {
            hash: Box::new(Xxh3::new()),
            random,
            retired: 0,
            until: 0,
            scratch: Box::new(CpuState::reset()),
        }
    }

    /// 64 bits for RDRAND and RDSEED.
    pub(super) fn random(&mut self) -> u64 {
        split_mix(&mut self.random)
    }

    /// Puts an event into the hash, with its place in this processor's instructions and its time.
    pub(super) fn note(&mut self, noted: Noted, now: Ticks, place: u64, data: &[u8]) {
        let mut head = [0; 32];
        head[0] = noted as u8;
        head[1..8].copy_from_slice(&data.len().to_le_bytes()[..7]);
        head[8..16].copy_from_slice(&self.retired.to_le_bytes());
        head[16..24].copy_from_slice(&now.to_le_bytes());
        head[24..].copy_from_slice(&place.to_le_bytes());
        self.hash.update(&head);
        self.hash.update(data);
    }

    /// Puts the registers in [`Track::scratch`] into the hash.
    pub(super) fn note_boundary(&mut self, now: Ticks) {
        let state = &self.scratch;
        let mut words = [0; 18 * 8];
        let values = state.gpr.iter().chain([&state.rflags, &state.cr3]);
        for (word, value) in words.chunks_exact_mut(8).zip(values) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        let rip = state.rip;
        self.note(Noted::Boundary, now, rip, &words);
    }

    /// The hash of all events so far.
    pub(super) fn digest(&self) -> u128 {
        self.hash.digest128()
    }
}

/// Runs all processors of a machine until it stops, on the calling thread. Gives the states they
/// stopped in where the board asks for them.
pub fn thread(mut vcpus: Vec<ObservedVcpu>, board: &Arc<Board>) -> Vec<LastState> {
    let guard = LoopGuard { id: 0, board };
    if board.control.checkpoint(0..1, &mut |_, _| {}) == Checkpoint::Run {
        run(&mut vcpus, board);
    }
    drop(guard);
    let mut whole = Xxh3::new();
    for vcpu in &mut vcpus {
        whole.update(&vcpu.close_track().to_le_bytes());
        board.add_stats(vcpu.stats());
    }
    board.set_trace_hash(whole.digest128());
    let wanted = board.wants_last_state();
    let last = vcpus.iter_mut().filter(|_| wanted);
    last.map(|vcpu| vcpu.last_state(board)).collect()
}

fn run(vcpus: &mut [ObservedVcpu], board: &Arc<Board>) {
    loop {
        let mut idle = true;
        for vcpu in &mut *vcpus {
            match vcpu.turn(board, QUANTUM) {
                Turn::Ran => idle = false,
                Turn::Idle => {}
                Turn::Stop => return,
            }
        }
        if !idle {
            continue;
        }
        let Some(due) = board.irq.next_event() else {
            // Nothing from outside can wake them: there is no input.
            if let Some(first) = vcpus.first_mut() {
                first.crash(board, CrashCause::Asleep);
            }
            return;
        };
        board.clock.advance(due.saturating_sub(board.clock.now()));
        board.irq.advance(board.clock.now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_and_seeds_have_random_numbers_of_their_own() {
        let numbers = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(seed, id)| {
            let mut track = Track::new(seed, id);
            [track.random(), track.random()]
        });
        let mut all: Vec<_> = numbers.concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 8);
        assert_eq!(Track::new(0, 0).random(), Track::new(0, 0).random());
    }

    #[test]
    fn hash_depends_on_place_time_and_data() {
        let digest = |retired, now, place, data: &[u8]| {
            let mut track = Track::new(0, 0);
            track.retired = retired;
            track.note(Noted::PortWrite, now, place, data);
            track.digest()
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
    }
}

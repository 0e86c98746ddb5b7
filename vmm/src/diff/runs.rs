//! Compares two deterministic runs.
//!
//! Both runs advance side by side, compared by their trace hashes. Where those differ, a bisection
//! over the whole state of both machines finds the instruction count, with the timelines'
//! checkpoints: before that instruction the machines were the same, after it they are not.

use hindsight_cpu::state::CpuState;

use super::difference::DifferenceList;
use super::divergence::{DivergedMachine, Divergence, ExecutedInstruction, code_at_rip};
use crate::deterministic::{RunStop, Timeline};
use crate::state::{RestoreError, Snapshot};

/// How far the search is, in instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiffProgress {
    /// No difference up to this instruction count.
    SameUntil(u64),
    /// The difference lies between these instruction counts.
    Between(u64, u64),
}

/// The result of a comparison of two runs.
#[derive(Debug)]
pub enum DiffVerdict {
    /// No difference.
    Same {
        /// How many instructions were compared.
        icount: u64,
        /// Whether both runs ended there.
        ended: bool,
    },
    /// The first difference.
    Different(Box<Divergence>),
}

/// Compares two runs from where the timelines begin up to instruction `limit`.
///
/// The hashes are compared every `stride` instructions.
///
/// # Errors
///
/// When guest memory cannot be read or written.
pub fn compare(
    timelines: [Timeline; 2],
    limit: u64,
    stride: u64,
    progress: &mut dyn FnMut(DiffProgress),
) -> Result<DiffVerdict, RestoreError> {
    let mut runs = RunPair::new(timelines)?;
    if let Some(divergence) = runs.divergence_at_start()? {
        return Ok(DiffVerdict::Different(Box::new(divergence)));
    }
    let mut same_until: u64 = runs.timelines[0].begin();
    loop {
        let next = same_until.saturating_add(stride.max(1)).min(limit);
        let (stops, icounts) = runs.go_to(next)?;
        let hashes_differ = runs.trace_hash(0) != runs.trace_hash(1);
        let differ = stops[0] != stops[1] || icounts[0] != icounts[1] || hashes_differ;
        let finished = stops[0] != RunStop::Reached || next == limit;
        // The hash covers only logged events. A difference that no event has shown yet is found
        // in the whole state at the end.
        if differ || finished && !runs.states_equal()? {
            let icount = runs.bisect(same_until, next, progress)?;
            return Ok(DiffVerdict::Different(Box::new(runs.explain(icount)?)));
        }
        if finished {
            return Ok(DiffVerdict::Same {
                icount: icounts[0],
                ended: stops[0] != RunStop::Reached,
            });
        }
        same_until = next;
        progress(DiffProgress::SameUntil(same_until));
    }
}

/// The two runs.
struct RunPair {
    timelines: [Timeline; 2],
    /// Memory was the same at the start.
    compare_memory: bool,
}

impl RunPair {
    fn new(mut timelines: [Timeline; 2]) -> Result<Self, RestoreError> {
        let [a, b] = &mut timelines;
        let same = a.machine().save()?.memory == b.machine().save()?.memory;
        Ok(Self {
            timelines,
            compare_memory: same,
        })
    }

    /// Brings both runs to `icount`. Returns why each stopped, and at which instruction count.
    fn go_to(&mut self, icount: u64) -> Result<([RunStop; 2], [u64; 2]), RestoreError> {
        let [a, b] = &mut self.timelines;
        let stops = [a.go_to(icount)?, b.go_to(icount)?];
        Ok((stops, [a.icount(), b.icount()]))
    }

    fn trace_hash(&mut self, run: usize) -> u128 {
        self.timelines[run].machine().trace_hash()
    }

    fn snapshots(&mut self) -> Result<[Snapshot; 2], RestoreError> {
        let [a, b] = &mut self.timelines;
        let mut snapshots = [a.machine().save()?, b.machine().save()?];
        // The random number generators of runs with different seeds always differ. That matters
        // only once the guest has read a number, and then a register differs too.
        for vcpu in snapshots.iter_mut().flat_map(|save| &mut save.vcpus) {
            vcpu.log.random = 0;
        }
        Ok(snapshots)
    }

    fn states_equal(&mut self) -> Result<bool, RestoreError> {
        let compare_memory = self.compare_memory;
        let [a, b] = self.snapshots()?;
        Ok(a.vcpus == b.vcpus
            && (a.ticks, a.schedule) == (b.ticks, b.schedule)
            && a.interrupts == b.interrupts
            && a.devices == b.devices
            && (!compare_memory || a.memory == b.memory))
    }

    /// The difference between the machines before the first instruction.
    fn divergence_at_start(&mut self) -> Result<Option<Divergence>, RestoreError> {
        let begin = self.timelines[0].begin();
        if self.states_equal()? {
            return Ok(None);
        }
        self.divergence_at(begin, None).map(Some)
    }

    /// The first instruction count in `same + 1 ..= different` from which the machines differ.
    fn bisect(
        &mut self,
        same: u64,
        different: u64,
        progress: &mut dyn FnMut(DiffProgress),
    ) -> Result<u64, RestoreError> {
        let (mut low, mut high) = (same, different);
        self.go_to(low)?;
        if !self.states_equal()? {
            // The hashes were the same at `same`, but the machines had diverged before.
            low = self.timelines[0].begin();
        }
        while high - low > 1 {
            progress(DiffProgress::Between(low, high));
            let middle = low + (high - low) / 2;
            let (stops, icounts) = self.go_to(middle)?;
            if stops[0] == stops[1] && icounts[0] == icounts[1] && self.states_equal()? {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(high)
    }

    /// The divergence at `icount`, with the instruction that led to it.
    fn explain(&mut self, icount: u64) -> Result<Divergence, RestoreError> {
        self.go_to(icount.saturating_sub(1))?;
        let machine = self.timelines[0].machine();
        let retired_before = machine.retired();
        let vcpus = 0..retired_before.len();
        let states: Vec<_> = vcpus.map(|cpu| machine.state(cpu)).collect();
        self.go_to(icount)?;
        let machine = self.timelines[0].machine();
        let retired = machine.retired();
        let mut counts = retired_before.iter().zip(&retired);
        let executed = counts.position(|(before, after)| before != after);
        let cpu = executed.unwrap_or(machine.current());
        let instruction = states.into_iter().nth(cpu).flatten().map(|before| {
            let code = code_at_rip(&machine.board().ram.map, &before);
            ExecutedInstruction::new(cpu, before, &code)
        });
        self.divergence_at(icount, instruction)
    }

    fn divergence_at(
        &mut self,
        icount: u64,
        instruction: Option<ExecutedInstruction>,
    ) -> Result<Divergence, RestoreError> {
        let (stops, _) = self.go_to(icount)?;
        let [a, b] = self.snapshots()?;
        let mut list = DifferenceList::of_snapshots(&a, &b);
        if self.compare_memory {
            list.add_memory(&a, &b);
        }
        let cpu = instruction.as_ref().map_or(0, |executed| executed.cpu);
        let [a, b] = &mut self.timelines;
        let diverged = |timeline: &mut Timeline, stop| {
            let machine = timeline.machine();
            DivergedMachine {
                ended: stop != RunStop::Reached,
                state: machine.state(cpu).unwrap_or_else(CpuState::reset),
                branches: machine.last_branches(cpu),
            }
        };
        let machines = [diverged(a, stops[0]), diverged(b, stops[1])];
        Ok(Divergence {
            icount,
            instruction,
            differences: list.differences,
            truncated: list.truncated,
            machines,
            memory_ignored: !self.compare_memory,
        })
    }
}

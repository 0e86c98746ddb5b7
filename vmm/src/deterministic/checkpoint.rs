//! The checkpoints of a run, some of which hold what a debugger wrote.
//!
//! A debugger's write divides the run into stretches. The checkpoint after the write begins a new
//! stretch; the stretch before it ends at the instruction count of the write. Re-execution that
//! reaches this count continues with the checkpoint, so that the write happens again, and going
//! back across it undoes it.

use hindsight_devices::flash::FLASH_BLOCK;

use super::machine::DeterministicMachine;
use crate::state::{PAGE, Snapshot};

/// The registers of a vCPU that a debugger saves and restores when it calls a guest function.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GeneralRegisters {
    gpr: [u64; 16],
    rip: u64,
    rflags: u64,
}

/// The general registers of all vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AllRegisters(Vec<GeneralRegisters>);

impl AllRegisters {
    /// The current registers of a machine.
    pub(super) fn of(machine: &mut DeterministicMachine) -> Self {
        let states = machine.vcpus.iter_mut().map(|vcpu| vcpu.cpu_state());
        let registers = states.map(|state| GeneralRegisters {
            gpr: state.gpr,
            rip: state.rip,
            rflags: state.rflags,
        });
        Self(registers.collect())
    }

    /// Whether some vCPU has another instruction pointer in `other`.
    fn jumps_to(&self, other: &Self) -> bool {
        let mut pairs = self.0.iter().zip(&other.0);
        pairs.any(|(one, two)| one.rip != two.rip)
    }
}

/// What a debugger wrote during one pause.
#[derive(Clone, Debug)]
pub(super) struct DebuggerWrite {
    /// The instruction count at which the stretch before the write ends.
    pub(super) icount: u64,
    before: AllRegisters,
    after: AllRegisters,
}

impl DebuggerWrite {
    pub(super) const fn new(icount: u64, before: AllRegisters, after: AllRegisters) -> Self {
        Self {
            icount,
            before,
            after,
        }
    }

    /// The same write with further writes, made before any instruction followed it.
    pub(super) fn extended(self, after: AllRegisters) -> Self {
        Self { after, ..self }
    }

    /// Whether this write began the call of a guest function that `last` ends.
    ///
    /// Then this write moved the instruction pointer, and `last` restores all registers.
    pub(super) fn is_call_ended_by(&self, last: &Self) -> bool {
        self.before.jumps_to(&self.after)
            && last.before.jumps_to(&last.after)
            && self.before == last.after
    }
}

/// A checkpoint of a run.
#[derive(Debug)]
pub(super) struct RunCheckpoint {
    pub(super) snapshot: Snapshot,
    /// Number of pages that it does not share with the checkpoint before it, and of blocks of the
    /// flash chip, which are as large and never shared.
    pages: usize,
    /// The debugger's write after which the checkpoint was taken, if any.
    pub(super) write: Option<DebuggerWrite>,
}

impl RunCheckpoint {
    pub(super) fn icount(&self) -> u64 {
        self.snapshot.icount()
    }
}

/// The checkpoints of a run, in ascending order of their instruction counts. Never empty.
#[derive(Debug)]
pub(super) struct CheckpointList(Vec<RunCheckpoint>);

impl CheckpointList {
    /// The checkpoint with which a run begins.
    pub(super) fn new(begin: Snapshot) -> Self {
        let begin = RunCheckpoint {
            snapshot: begin,
            pages: 0,
            write: None,
        };
        Self(vec![begin])
    }

    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &RunCheckpoint> {
        self.0.iter()
    }

    pub(super) fn get(&self, index: usize) -> Option<&RunCheckpoint> {
        self.0.get(index)
    }

    /// The instruction count of the last checkpoint.
    pub(super) fn last_icount(&self) -> u64 {
        self.0.last().map_or(0, RunCheckpoint::icount)
    }

    /// The index of the last checkpoint at or before `icount`; the first one if there is none.
    pub(super) fn before(&self, icount: u64) -> usize {
        let count = self
            .0
            .partition_point(|checkpoint| checkpoint.icount() <= icount);
        count.saturating_sub(1)
    }

    /// The index of the checkpoint that begins the stretch of checkpoint `index`.
    pub(super) fn stretch_of(&self, index: usize) -> usize {
        let mut upto = self.0.iter().take(index.saturating_add(1));
        let begins = upto.rposition(|checkpoint| checkpoint.write.is_some());
        begins.unwrap_or(0)
    }

    /// Finds the write that ends the stretch which begins at checkpoint `stretch`.
    ///
    /// Returns the index of the write's checkpoint, and the instruction count of the write.
    pub(super) fn write_after(&self, stretch: usize) -> Option<(usize, u64)> {
        let later = self.0.iter().enumerate().skip(stretch.saturating_add(1));
        let mut writes = later.filter_map(|(index, checkpoint)| {
            let write = checkpoint.write.as_ref()?;
            Some((index, write.icount))
        });
        writes.next()
    }

    /// Drops checkpoints after `icount` in the stretch that begins at checkpoint `stretch`.
    pub(super) fn truncate_after(&mut self, stretch: usize, icount: u64) {
        let begins = stretch.saturating_add(1);
        let later = self.0.iter().enumerate().skip(begins);
        let mut dropped = later.filter_map(|(index, checkpoint)| {
            (checkpoint.icount() >= icount || checkpoint.write.is_some()).then_some(index)
        });
        let count = dropped.next().unwrap_or(self.0.len());
        self.0.truncate(count);
    }

    /// Drops the checkpoints from `index` on, which the caller replaces at once, and returns the
    /// write of the first of them.
    pub(super) fn replace_from(&mut self, index: usize) -> Option<DebuggerWrite> {
        let write = self.0.get(index).and_then(|first| first.write.clone());
        self.0.truncate(index);
        write
    }

    /// The index of the checkpoint, at most `stretch`, whose write began the call that `last` ends.
    pub(super) fn call_ended_by(&self, stretch: usize, last: &DebuggerWrite) -> Option<usize> {
        let mut upto = self.0.iter().take(stretch.saturating_add(1));
        upto.rposition(|checkpoint| {
            let write = checkpoint.write.as_ref();
            write.is_some_and(|write| write.is_call_ended_by(last))
        })
    }

    /// Adds a checkpoint after all others.
    pub(super) fn push(&mut self, snapshot: Snapshot, write: Option<DebuggerWrite>) {
        let last = self.0.last();
        debug_assert!(
            last.is_none_or(|last| last.icount() <= snapshot.icount()),
            "checkpoints are in ascending order"
        );
        let pages = last.map_or(0, |last| unshared(&snapshot, &last.snapshot));
        self.0.push(RunCheckpoint {
            snapshot,
            pages,
            write,
        });
    }

    /// Number of pages that the checkpoints hold in addition to those of the first one.
    pub(super) fn pages(&self) -> usize {
        self.0
            .iter()
            .skip(1)
            .map(|checkpoint| checkpoint.pages)
            .sum()
    }

    /// Drops every second checkpoint, except the last one and those that hold writes.
    ///
    /// If all hold writes, drops the first, so that the run begins later. Returns whether the
    /// spacing of new checkpoints should grow.
    pub(super) fn thin(&mut self) -> bool {
        let count = self.0.len();
        let last = count - 1;
        let mut index = 0;
        self.0.retain(|checkpoint| {
            let keep = index % 2 == 0 || (index == last && last > 1) || checkpoint.write.is_some();
            index += 1;
            keep
        });
        let thinned = self.0.len() < count;
        if thinned {
            self.count_pages();
        } else {
            self.0.remove(0);
        }
        thinned
    }

    fn count_pages(&mut self) {
        for index in 1..self.0.len() {
            let (earlier, later) = self.0.split_at_mut(index);
            if let (Some(old), Some(new)) = (earlier.last(), later.first_mut()) {
                new.pages = unshared(&new.snapshot, &old.snapshot);
            }
        }
    }
}

const _: () = assert!(FLASH_BLOCK == PAGE);

/// Number of pages and blocks of the flash chip that `new` does not share with `old`.
fn unshared(new: &Snapshot, old: &Snapshot) -> usize {
    let flash = new.devices.flash.as_ref();
    let blocks = flash.map_or(0, |flash| flash.changed.len());
    new.memory.unshared(&old.memory) + blocks
}

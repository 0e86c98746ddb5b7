//! Goes to any instruction of a run, forwards or backwards, by checkpoints and re-execution.

use super::machine::DeterministicMachine;
use super::stop::RunStop;
use crate::state::{PAGE, RestoreError, Snapshot};

/// How many checkpoints a [`Timeline`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointLimits {
    /// Instructions between two checkpoints, at least 1. Grows with the length of the run.
    pub spacing: u64,
    /// Most checkpoints, at least 2.
    pub count: usize,
    /// Most bytes of pages that the checkpoints hold in addition to those of the first one.
    pub bytes: u64,
}

impl Default for CheckpointLimits {
    /// In a short run, going back takes about as long as 5 million instructions.
    fn default() -> Self {
        Self {
            spacing: 5_000_000,
            count: 256,
            bytes: Self::BYTES,
        }
    }
}

impl CheckpointLimits {
    /// The default of [`CheckpointLimits::bytes`].
    pub const BYTES: u64 = 1 << 30;
}

/// A deterministic machine with the checkpoints of its run.
#[derive(Debug)]
pub struct Timeline {
    machine: DeterministicMachine,
    limits: CheckpointLimits,
    /// In ascending order of their instruction counts; the first is the beginning of the timeline.
    checkpoints: Vec<Snapshot>,
    /// The highest instruction count that the run has reached. Console output of earlier
    /// instructions was written already.
    furthest: u64,
}

impl Timeline {
    /// A timeline that begins at the machine's current instruction.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read.
    pub fn new(
        mut machine: DeterministicMachine,
        limits: CheckpointLimits,
    ) -> Result<Self, RestoreError> {
        let checkpoints = vec![machine.save()?];
        let limits = CheckpointLimits {
            spacing: limits.spacing.max(1),
            count: limits.count.max(2),
            ..limits
        };
        Ok(Self {
            furthest: machine.icount(),
            machine,
            limits,
            checkpoints,
        })
    }

    /// The machine at its current instruction.
    pub const fn machine(&mut self) -> &mut DeterministicMachine {
        &mut self.machine
    }

    /// Returns the machine.
    pub fn into_machine(self) -> DeterministicMachine {
        self.machine
    }

    /// The current instruction count of all vCPUs.
    pub fn icount(&self) -> u64 {
        self.machine.icount()
    }

    /// The lowest instruction count that [`Timeline::go_to`] can reach.
    pub fn begin(&self) -> u64 {
        self.checkpoints.first().map_or(0, Snapshot::icount)
    }

    /// The instruction counts of the checkpoints, ascending.
    pub fn checkpoints(&self) -> impl Iterator<Item = u64> {
        self.checkpoints.iter().map(Snapshot::icount)
    }

    /// Goes to instruction count `icount`, or to the end of the run if that comes first.
    ///
    /// Below [`Timeline::begin`], it goes to the beginning.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read or written.
    pub fn go_to(&mut self, icount: u64) -> Result<RunStop, RestoreError> {
        let icount = icount.max(self.begin());
        let now = self.machine.icount();
        let nearest = self.checkpoint_before(icount);
        if icount < now || nearest.is_some_and(|nearest| nearest.icount() > now) {
            return self.return_to(icount);
        }
        self.run_to(icount)
    }

    /// The last checkpoint at or before `icount`.
    fn checkpoint_before(&self, icount: u64) -> Option<&Snapshot> {
        let count = self
            .checkpoints
            .partition_point(|checkpoint| checkpoint.icount() <= icount);
        self.checkpoints.get(count.checked_sub(1)?)
    }

    /// Goes to `icount` from a checkpoint, even if that is the current instruction count.
    ///
    /// Events between the last instruction before `icount` and the present are undone then: traps
    /// and interrupts that were delivered without retiring an instruction.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read or written.
    pub fn return_to(&mut self, icount: u64) -> Result<RunStop, RestoreError> {
        let icount = icount.max(self.begin());
        let count = self
            .checkpoints
            .partition_point(|checkpoint| checkpoint.icount() <= icount);
        let nearest = count
            .checked_sub(1)
            .and_then(|last| self.checkpoints.get(last));
        if let Some(nearest) = nearest {
            self.machine.restore(nearest)?;
        }
        self.run_to(icount)
    }

    /// Runs forwards to `icount`, and stops on the way for what the machine's stops request.
    ///
    /// If the machine is already past `icount`, it does not run. Consoles get only the output that
    /// they have not got before.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read.
    pub fn run_to(&mut self, icount: u64) -> Result<RunStop, RestoreError> {
        loop {
            let last = self.checkpoints.last().map_or(0, Snapshot::icount);
            let next = last.saturating_add(self.limits.spacing);
            let repeats = self.machine.icount() < self.furthest;
            let until = if repeats { self.furthest } else { u64::MAX };
            self.machine.board().buses.mute.set(repeats);
            let stop = self.machine.run_to(icount.min(next).min(until));
            self.furthest = self.furthest.max(self.machine.icount());
            if stop != RunStop::Reached {
                return Ok(stop);
            }
            if self.machine.icount() >= next {
                self.add_checkpoint()?;
            }
            if self.machine.icount() >= icount {
                return Ok(RunStop::Reached);
            }
        }
    }

    /// Discards all later checkpoints, because a debugger's write made this a different run.
    pub fn discard_future(&mut self) {
        let now = self.machine.icount();
        self.furthest = now;
        let count = self
            .checkpoints
            .partition_point(|checkpoint| checkpoint.icount() < now);
        self.checkpoints.truncate(count.max(1));
    }

    fn add_checkpoint(&mut self) -> Result<(), RestoreError> {
        let checkpoint = self.machine.save()?;
        debug_assert!(
            self.checkpoints
                .last()
                .is_none_or(|last| last.icount() < checkpoint.icount()),
            "checkpoints are in ascending order"
        );
        self.checkpoints.push(checkpoint);
        while self.checkpoints.len() > self.limits.count || self.exceeds_bytes() {
            self.drop_every_second();
        }
        Ok(())
    }

    fn exceeds_bytes(&self) -> bool {
        let pairs = self.checkpoints.iter().zip(self.checkpoints.iter().skip(1));
        let pages: usize = pairs
            .map(|(old, new)| new.memory.unshared(&old.memory))
            .sum();
        pages as u64 > self.limits.bytes / PAGE as u64
    }

    /// Drops every second checkpoint but the last, and doubles the spacing of new ones.
    fn drop_every_second(&mut self) {
        let last = self.checkpoints.len() - 1;
        let mut index = 0;
        self.checkpoints.retain(|_| {
            let keep = index % 2 == 0 || (index == last && last > 1);
            index += 1;
            keep
        });
        self.limits.spacing = self.limits.spacing.saturating_mul(2);
    }
}

//! Going to any instruction of a run, forwards or back: checkpoints and re-execution.

use crate::deterministic::{DeterministicMachine, RunStop};
use crate::state::{PAGE, RestoreError, Snapshot};

/// How many checkpoints a [`Timeline`] keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointLimits {
    /// Instructions between two checkpoints, at least 1; grows as the run gets longer.
    pub spacing: u64,
    /// Most checkpoints, at least 2.
    pub count: usize,
    /// Most bytes of pages that checkpoints keep beyond those of the first one.
    pub bytes: u64,
}

impl Default for CheckpointLimits {
    /// Going back takes about as long as 5 million instructions in a short run.
    fn default() -> Self {
        Self {
            spacing: 5_000_000,
            count: 256,
            bytes: Self::BYTES,
        }
    }
}

impl CheckpointLimits {
    /// [`CheckpointLimits::bytes`] by default.
    pub const BYTES: u64 = 1 << 30;
}

/// A deterministic machine with checkpoints behind it.
#[derive(Debug)]
pub struct Timeline {
    machine: DeterministicMachine,
    limits: CheckpointLimits,
    /// In order of their places; the first is where the timeline begins.
    kept: Vec<Snapshot>,
    /// How far this run came: what it writes before that was written.
    furthest: u64,
}

impl Timeline {
    /// A timeline that begins where `machine` is.
    ///
    /// # Errors
    ///
    /// When memory cannot be read.
    pub fn new(
        mut machine: DeterministicMachine,
        limits: CheckpointLimits,
    ) -> Result<Self, RestoreError> {
        let kept = vec![machine.save()?];
        let limits = CheckpointLimits {
            spacing: limits.spacing.max(1),
            count: limits.count.max(2),
            ..limits
        };
        Ok(Self {
            furthest: machine.place(),
            machine,
            limits,
            kept,
        })
    }

    /// The machine as it is now.
    pub const fn machine(&mut self) -> &mut DeterministicMachine {
        &mut self.machine
    }

    /// Gives the machine back.
    pub fn into_machine(self) -> DeterministicMachine {
        self.machine
    }

    /// Where it is: instructions retired by all processors.
    pub fn place(&self) -> u64 {
        self.machine.place()
    }

    /// The first place it can go to.
    pub fn begin(&self) -> u64 {
        self.kept.first().map_or(0, Snapshot::retired)
    }

    /// The places of the checkpoints, in order.
    pub fn checkpoints(&self) -> impl Iterator<Item = u64> {
        self.kept.iter().map(Snapshot::retired)
    }

    /// Goes to instruction `place`, or to the end of the run if that comes first; before
    /// [`Timeline::begin`] there is nothing, and that is where it stops.
    ///
    /// # Errors
    ///
    /// When memory cannot be read or written.
    pub fn go_to(&mut self, place: u64) -> Result<RunStop, RestoreError> {
        let place = place.max(self.begin());
        let now = self.machine.place();
        if place < now
            || self
                .nearest(place)
                .is_some_and(|nearest| nearest.retired() > now)
        {
            return self.return_to(place);
        }
        self.run_to(place)
    }

    /// The last checkpoint that is not behind a place.
    fn nearest(&self, place: u64) -> Option<&Snapshot> {
        let behind = self.kept.partition_point(|kept| kept.retired() <= place);
        self.kept.get(behind.checked_sub(1)?)
    }

    /// As [`Timeline::go_to`], from a checkpoint: what came between the last instruction before `place` and the present, where
    /// that is the same place, is undone.
    ///
    /// # Errors
    ///
    /// When memory cannot be read or written.
    pub fn return_to(&mut self, place: u64) -> Result<RunStop, RestoreError> {
        let place = place.max(self.begin());
        let behind = self.kept.partition_point(|kept| kept.retired() <= place);
        if let Some(nearest) = behind.checked_sub(1).and_then(|last| self.kept.get(last)) {
            self.machine.restore(nearest)?;
        }
        self.run_to(place)
    }

    /// Runs to instruction `place` from where it is, past everything on the way: what the machine
    /// stops for is met. A place that is over is reached at once. Consoles get what they had not yet.
    ///
    /// # Errors
    ///
    /// When memory cannot be read.
    pub fn run_to(&mut self, place: u64) -> Result<RunStop, RestoreError> {
        loop {
            let last = self.kept.last().map_or(0, Snapshot::retired);
            let next = last.saturating_add(self.limits.spacing);
            let again = self.machine.place() < self.furthest;
            let until = if again { self.furthest } else { u64::MAX };
            self.machine.board().buses.mute.set(again);
            let stop = self.machine.run_to(place.min(next).min(until));
            self.furthest = self.furthest.max(self.machine.place());
            if stop != RunStop::Reached {
                return Ok(stop);
            }
            if self.machine.place() >= next {
                self.keep()?;
            }
            if self.machine.place() >= place {
                return Ok(RunStop::Reached);
            }
        }
    }

    /// Forgets the checkpoints after the present: what was written to the machine from outside
    /// has made another future.
    pub fn forget_future(&mut self) {
        let now = self.machine.place();
        self.furthest = now;
        let behind = self.kept.partition_point(|kept| kept.retired() < now);
        self.kept.truncate(behind.max(1));
    }

    fn keep(&mut self) -> Result<(), RestoreError> {
        self.kept.push(self.machine.save()?);
        while self.kept.len() > self.limits.count || self.too_large() {
            self.thin();
        }
        Ok(())
    }

    fn too_large(&self) -> bool {
        let pairs = self.kept.iter().zip(self.kept.iter().skip(1));
        let pages: usize = pairs
            .map(|(old, new)| new.memory.unshared(&old.memory))
            .sum();
        pages as u64 > self.limits.bytes / PAGE as u64
    }

    /// Drops every second checkpoint, and makes new ones half as often. The first one stays.
    fn thin(&mut self) {
        let last = self.kept.len() - 1;
        let mut index = 0;
        self.kept.retain(|_| {
            let keep = index % 2 == 0 || (index == last && last > 1);
            index += 1;
            keep
        });
        self.limits.spacing = self.limits.spacing.saturating_mul(2);
    }
}

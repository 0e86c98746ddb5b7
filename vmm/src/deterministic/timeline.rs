//! Goes to any instruction of a run, forwards or backwards, by checkpoints and re-execution.

use super::checkpoint::{AllRegisters, CheckpointList, DebuggerWrite, RunCheckpoint};
use super::machine::DeterministicMachine;
use super::stop::RunStop;
use crate::state::{PAGE, RestoreError, Snapshot};

/// How many checkpoints a [`Timeline`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointLimits {
    /// Instructions between two checkpoints, at least 1. Grows with the length of the run.
    pub spacing: u64,
    /// Maximum number of checkpoints, at least 2.
    pub count: usize,
    /// Maximum number of bytes of guest memory and flash memory that the checkpoints hold in addition
    /// to those of the first one.
    pub bytes: u64,
}

impl Default for CheckpointLimits {
    /// Returns the default limits. Going back in a short run takes as long as 5 million
    /// instructions.
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
    checkpoints: CheckpointList,
    /// Index of the checkpoint that begins the stretch in which the machine is: the beginning of
    /// the timeline, or the last debugger's write.
    stretch: usize,
    /// The registers before the first debugger's write since the machine ran.
    before_write: Option<AllRegisters>,
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
        let checkpoints = CheckpointList::new(machine.save()?);
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
            stretch: 0,
            before_write: None,
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
        self.checkpoints.get(0).map_or(0, RunCheckpoint::icount)
    }

    /// The highest instruction count before the current one that is in the timeline.
    ///
    /// The instructions of a guest function that a debugger called are not. Nor is the state before
    /// a debugger's write at the current instruction count: going back undoes the write and the
    /// instruction before it.
    pub fn previous(&self) -> Option<u64> {
        let now = self.machine.icount();
        let stretch = self.checkpoints.get(self.stretch);
        let write = stretch
            .filter(|begin| begin.icount() == now)
            .and_then(|begin| begin.write.as_ref());
        write.map_or(now, |write| write.icount).checked_sub(1)
    }

    /// The instruction counts of the checkpoints, ascending.
    pub fn checkpoints(&self) -> impl Iterator<Item = u64> {
        self.checkpoints.iter().map(RunCheckpoint::icount)
    }

    /// Goes to instruction count `icount`, or to the end of the run if that comes first.
    ///
    /// Below [`Timeline::begin`], it goes to the beginning. Between the counts at which a guest
    /// function was called by a debugger and returned, it goes to the call.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read or written.
    pub fn go_to(&mut self, icount: u64) -> Result<RunStop, RestoreError> {
        self.commit_write()?;
        let icount = icount.max(self.begin());
        let now = self.machine.icount();
        let nearest = self.checkpoints.get(self.checkpoints.before(icount));
        if icount < now || nearest.is_some_and(|nearest| nearest.icount() > now) {
            return self.return_to(icount);
        }
        self.run_to(icount)
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
        self.commit_write()?;
        let icount = icount.max(self.begin());
        self.restore(self.checkpoints.before(icount))?;
        self.run_to(icount)
    }

    /// Restores `snapshot`, with which another timeline begins. Input that follows it is forgotten.
    ///
    /// # Errors
    ///
    /// The snapshot does not fit the machine or is invalid; nothing has changed.
    pub fn restart_from(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        self.machine.restore(snapshot)?;
        self.machine.forget_later_input();
        self.checkpoints = CheckpointList::new(self.machine.save()?);
        self.stretch = 0;
        self.before_write = None;
        self.furthest = self.machine.icount();
        Ok(())
    }

    /// Sends input to the machine: see [`DeterministicMachine::send_input`].
    ///
    /// Input makes another future: checkpoints of the old one are dropped.
    pub fn send_input(&mut self, bytes: &[u8]) -> bool {
        if self.machine.icount() < self.furthest {
            self.prepare_write();
        }
        self.machine.send_input(bytes)
    }

    fn restore(&mut self, index: usize) -> Result<(), RestoreError> {
        if let Some(checkpoint) = self.checkpoints.get(index) {
            self.machine.restore(&checkpoint.snapshot)?;
            self.stretch = self.checkpoints.stretch_of(index);
        }
        Ok(())
    }

    /// Runs forwards to `icount`, and stops on the way for what the machine's stops request.
    ///
    /// If the machine is already past `icount`, it does not run. Output that a console has received
    /// before is not repeated.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read.
    pub fn run_to(&mut self, icount: u64) -> Result<RunStop, RestoreError> {
        self.commit_write()?;
        self.repeat_write(icount)?;
        loop {
            let write = self.checkpoints.write_after(self.stretch);
            let write = write.map_or(u64::MAX, |(_, icount)| icount);
            let last = self.checkpoints.last_icount();
            let next = last.saturating_add(self.limits.spacing);
            let repeats = self.machine.icount() < self.furthest;
            let until = if repeats { self.furthest } else { u64::MAX };
            self.machine.board().buses.mute.set(repeats);
            let until = icount.min(next).min(until).min(write);
            let stop = self.machine.run_to(until);
            self.furthest = self.furthest.max(self.machine.icount());
            if stop != RunStop::Reached {
                return Ok(stop);
            }
            if self.machine.icount() >= next {
                self.add_checkpoint(None)?;
            }
            if self.machine.icount() >= icount.min(write) && !self.repeat_write(icount)? {
                return Ok(RunStop::Reached);
            }
        }
    }

    /// Repeats the debugger's write that ends the current stretch, if the machine has reached it.
    ///
    /// The write is not repeated if `icount` lies before the checkpoint after it. Returns whether
    /// the write was repeated.
    fn repeat_write(&mut self, icount: u64) -> Result<bool, RestoreError> {
        let Some((index, end)) = self.checkpoints.write_after(self.stretch) else {
            return Ok(false);
        };
        let after = self.checkpoints.get(index).map_or(0, RunCheckpoint::icount);
        let repeat = self.machine.icount() >= end && icount >= after;
        if repeat {
            self.restore(index)?;
        }
        Ok(repeat)
    }

    /// Saves the registers before a debugger's write.
    ///
    /// The write invalidates the run after the current instruction: [`Self::commit_write`] then
    /// drops the later checkpoints.
    pub fn prepare_write(&mut self) {
        if self.before_write.is_none() {
            self.before_write = Some(AllRegisters::of(&mut self.machine));
        }
    }

    /// Adds a checkpoint after a debugger's writes, if there were any since the machine last ran.
    ///
    /// When the writes end the call of a guest function, the instructions of the function leave the
    /// timeline, and what they did becomes a part of the write that began the call.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read.
    pub fn commit_write(&mut self) -> Result<(), RestoreError> {
        let Some(before) = self.before_write.take() else {
            return Ok(());
        };
        if self.machine.has_ended() {
            // No instruction follows, and going back undoes the write.
            return Ok(());
        }
        let now = self.machine.icount();
        let after = AllRegisters::of(&mut self.machine);
        self.furthest = now;
        let mut write = DebuggerWrite::new(now, before, after.clone());
        let call = self.checkpoints.call_ended_by(self.stretch, &write);
        let stretch = self.checkpoints.get(self.stretch);
        let replaced = match call {
            None if stretch.is_some_and(|begin| begin.icount() == now) => Some(self.stretch),
            call => call,
        };
        match replaced {
            Some(index) => {
                let first = self.checkpoints.replace_from(index);
                write = first.map_or(write, |first| first.extended(after));
            }
            None => self.checkpoints.truncate_after(self.stretch, now),
        }
        self.stretch = self.checkpoints.len();
        self.add_checkpoint(Some(write))
    }

    fn add_checkpoint(&mut self, write: Option<DebuggerWrite>) -> Result<(), RestoreError> {
        self.checkpoints.push(self.machine.save()?, write);
        while self.checkpoints.len() > self.limits.count || self.exceeds_bytes() {
            if self.checkpoints.thin() {
                self.limits.spacing = self.limits.spacing.saturating_mul(2);
            }
            // A checkpoint with a write is dropped only when it is the first.
            self.stretch = self.checkpoints.stretch_of(self.checkpoints.len() - 1);
        }
        Ok(())
    }

    fn exceeds_bytes(&self) -> bool {
        self.checkpoints.pages() as u64 > self.limits.bytes / PAGE as u64
    }
}

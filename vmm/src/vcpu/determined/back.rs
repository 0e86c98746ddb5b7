//! A deterministic machine under a debugger: going back.
//!
//! Going back is going to an earlier instruction of the same run ([`crate::snapshot::Timeline`]). To
//! go back to what the debugger stops for, the stretches between checkpoints are run again, the last
//! one first, and the last stop in one of them is it.

use std::ops::ControlFlow;

use hindsight_interp::{Hit, Stops};

use super::Stop as Ended;
use super::debugged::Debugged;
use crate::snapshot::RestoreError;
use crate::vcpu::attend::Stop;

/// Place, processor and cause of a stop, if there was one; to break is to be interrupted.
type LastStop = ControlFlow<(), Option<(u64, usize, Hit)>>;

impl Debugged {
    /// Goes to a place without stopping on the way; `false` if it was interrupted.
    fn travel(&mut self, place: u64) -> Result<bool, RestoreError> {
        self.timeline.machine().set_stops(&Stops::default());
        let ended = self.timeline.go_to(place)?;
        self.arm(true);
        Ok(ended == Ended::Reached)
    }

    /// Goes to a place while the machine is paused: whoever rings a doorbell meanwhile (an interrupt
    /// does) interrupts it for nothing.
    pub(super) fn travel_paused(&mut self, place: u64) -> Result<bool, RestoreError> {
        for cpu in 0..self.cpus() {
            self.board.control.doorbell(cpu).answer();
        }
        loop {
            let before = self.timeline.place();
            if self.travel(place)? {
                return Ok(true);
            }
            if self.board.control.is_stopped() || self.timeline.place() == before {
                return Ok(false);
            }
        }
    }

    /// Back to before the last instruction of a processor.
    pub(super) fn step_back(&mut self, cpu: usize) -> Result<Option<(usize, Stop)>, RestoreError> {
        let (now, begin) = (self.timeline.place(), self.timeline.begin());
        if now <= begin {
            return Ok(Some((cpu, Stop::Begin)));
        }
        let retired = self.retired(cpu);
        if !self.travel(now - 1)? {
            return Ok(None);
        }
        // Others had their turn: the last place with fewer instructions of this one.
        let (mut low, mut high) = (begin, now - 1);
        while self.retired(cpu) == retired && low < high {
            let middle = low + (high - low) / 2;
            if !self.travel(middle)? {
                return Ok(None);
            }
            if self.retired(cpu) < retired {
                if !self.travel(middle + 1)? {
                    return Ok(None);
                }
                if self.retired(cpu) == retired {
                    if !self.travel(middle)? {
                        return Ok(None);
                    }
                    break;
                }
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(Some((cpu, Stop::Stepped)))
    }

    /// Back to the last thing that is stopped for.
    pub(super) fn run_back(&mut self, cpu: usize) -> Result<Option<(usize, Stop)>, RestoreError> {
        let mut end = self.timeline.place();
        let now = end;
        let mut starts: Vec<u64> = self.timeline.checkpoints().collect();
        starts.retain(|&start| start < now);
        for start in starts.into_iter().rev() {
            match self.last_stop(start, end, now)? {
                ControlFlow::Break(()) => return Ok(None),
                ControlFlow::Continue(Some((place, cpu, hit))) => {
                    let there = self.travel(place)? && self.deliver(cpu, hit)?;
                    return Ok(there.then_some((cpu, Stop::Hit(hit))));
                }
                ControlFlow::Continue(None) => end = start,
            }
        }
        let begin = self.timeline.begin();
        let there = self.travel(begin)?;
        Ok(there.then_some((cpu, Stop::Begin)))
    }

    /// The last stop from `start` to `end` that is before `now`: its place, the processor, and what
    /// it is. To break is to be interrupted.
    fn last_stop(&mut self, start: u64, end: u64, now: u64) -> Result<LastStop, RestoreError> {
        if !self.travel(start)? {
            return Ok(ControlFlow::Break(()));
        }
        let mut last = None;
        loop {
            self.arm(true);
            match self.timeline.run_to(end)? {
                Ended::Hit { cpu, hit } => {
                    let at = self.timeline.place();
                    // Backwards, an access is met before it was made.
                    let before = matches!(hit, Hit::Execute(_) | Hit::Exception { .. });
                    let place = if before { at } else { at.saturating_sub(1) };
                    if place < now {
                        last = Some((place, cpu, hit));
                    }
                    if before {
                        self.arm(false);
                        match self.timeline.run_to(at + 1)? {
                            Ended::Interrupted => return Ok(ControlFlow::Break(())),
                            Ended::Hit { cpu, hit } if at < now => last = Some((at, cpu, hit)),
                            _ => {}
                        }
                    }
                    if self.timeline.place() >= end {
                        return Ok(ControlFlow::Continue(last));
                    }
                }
                Ended::Interrupted => return Ok(ControlFlow::Break(())),
                Ended::Reached | Ended::Ended | Ended::AtEnd | Ended::Crashed { .. } => {
                    return Ok(ControlFlow::Continue(last));
                }
            }
        }
    }

    /// A breakpoint at the first instruction of a handler is reached at the place of the instruction
    /// that was interrupted: delivers what interrupts it. `false` if it was interrupted itself.
    fn deliver(&mut self, cpu: usize, hit: Hit) -> Result<bool, RestoreError> {
        let Hit::Execute(at) = hit else {
            return Ok(true);
        };
        if self.frame(cpu).0 == at {
            return Ok(true);
        }
        let next = self.timeline.place().wrapping_add(1);
        let ended = self.timeline.run_to(next)?;
        Ok(ended != Ended::Interrupted)
    }
}

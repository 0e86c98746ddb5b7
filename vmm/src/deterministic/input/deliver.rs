//! Delivers input to a deterministic machine, and advances its clock while all vCPUs are halted.

use std::time::Duration;

use hindsight_devices::clock::Ticks;

use super::log::InputEvent;
use super::queue::{Accepting, InputDevice};
use crate::deterministic::machine::DeterministicMachine;
use crate::vcpu::crash::CrashCause;
use crate::vcpu::interp::run_log::LoggedEvent;
use crate::vcpu::run_control::{Outcome, RunError};

impl DeterministicMachine {
    /// All vCPUs are halted: advances the clock to the next timer or input, whichever is earlier.
    ///
    /// Returns `false` if neither can come, which ends the run.
    pub(in crate::deterministic) fn advance_idle_clock(&mut self) -> bool {
        let board = &self.board;
        if let Some((cpu, rip)) = self.halted_for_good() {
            if board.run.halts.ends_run() {
                board.run.finish(Outcome::Halted { cpu, rip });
                return false;
            }
            // The user of a recorded run may still end it, as the log of a replayed one does.
            if !self.feed.is_live() && self.feed.logged(self.schedule.inputs).is_none() {
                self.end_asleep();
                return false;
            }
        }
        let now = board.time.clock.now();
        let due = board.buses.irq.next_event();
        let logged = self.feed.logged(self.schedule.inputs);
        let to = match logged {
            Some(input) if input.round == self.schedule.round => {
                Some(input.ticks.min(due.unwrap_or(u64::MAX)))
            }
            Some(_) => due,
            None => self.await_live_input(now, due),
        };
        let Some(to) = to else {
            self.end_asleep();
            return false;
        };
        board.time.clock.advance(to.saturating_sub(now));
        board.buses.irq.advance(board.time.clock.now());
        true
    }

    /// Ends the run: nothing can wake the guest.
    fn end_asleep(&mut self) {
        let board = self.board.clone();
        if let Some(first) = self.vcpus.first_mut() {
            first.end_in_crash(&board, CrashCause::Asleep);
        }
    }

    /// The boot processor and its RIP, if all processors halted with interrupts off and nothing else
    /// can wake them.
    fn halted_for_good(&self) -> Option<(usize, u64)> {
        let first = self.vcpus.first()?;
        let deaf = self
            .vcpus
            .iter()
            .all(|vcpu| !vcpu.vcpu.interrupts_enabled());
        let for_good = deaf && !self.board.buses.irq.can_wake_without_interrupts();
        for_good.then(|| (first.id(), first.vcpu.rip()))
    }

    /// Waits for live input or the next timer, and returns to which tick to advance the clock.
    ///
    /// While input is recorded and all vCPUs are halted, the clock follows the host's.
    fn await_live_input(&self, now: Ticks, due: Option<Ticks>) -> Option<Ticks> {
        let board = &self.board;
        let nanos = |ticks| Duration::from_nanos(board.time.clock.ns_from_ticks(ticks));
        let limit = due.map(|due| nanos(due.saturating_sub(now)));
        let stopped = || board.run.vcpus.is_stopped();
        let accepting = Accepting {
            serial: board.buses.serial_has_capacity(),
            keyboard: board.buses.keyboard_has_capacity(),
        };
        let Some(waited) = self.feed.wait(limit, accepting, stopped) else {
            return due;
        };
        let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        let woken = now.saturating_add(board.time.clock.ticks_from_ns(nanos));
        Some(woken.min(due.unwrap_or(u64::MAX)))
    }

    /// At the beginning of a round, delivers the input that is due. Returns `false` if that ends
    /// the run.
    pub(in crate::deterministic) fn deliver_input(&mut self) -> bool {
        if (self.schedule.turn, self.schedule.used) != (0, 0) {
            return true;
        }
        let now = (
            self.schedule.round,
            self.icount(),
            self.board.time.clock.now(),
        );
        loop {
            let replayed = self.feed.logged(self.schedule.inputs).is_some();
            let event = match self.feed.logged(self.schedule.inputs) {
                Some(input) if input.round > now.0 => return true,
                Some(input) if (input.round, input.icount, input.ticks) != now => {
                    return self.refuse_input(now);
                }
                Some(input) => {
                    let event = input.event.clone();
                    let (taken, len) = match &event {
                        InputEvent::Serial(bytes) => {
                            (self.board.buses.serial_input(bytes), bytes.len())
                        }
                        InputEvent::Keys(codes) => (self.board.buses.key_input(codes), codes.len()),
                        InputEvent::Quit => (0, 0),
                    };
                    if taken != len {
                        return self.refuse_input(now);
                    }
                    event
                }
                None => {
                    let board = self.board.clone();
                    let accept = |device, bytes: &[u8]| match device {
                        InputDevice::Serial => board.buses.serial_input(bytes),
                        InputDevice::Keyboard => board.buses.key_input(bytes),
                    };
                    match self.feed.take_live(now, accept) {
                        Ok(None) => return true,
                        Ok(Some(event)) => event,
                        Err(error) => return self.fail(RunError::InputLog(error)),
                    }
                }
            };
            self.schedule.inputs += 1;
            let bytes = match &event {
                InputEvent::Serial(bytes) | InputEvent::Keys(bytes) => &**bytes,
                InputEvent::Quit => &[],
            };
            if let Some(first) = self.vcpus.first_mut() {
                first.log_event(LoggedEvent::Input, self.schedule.inputs, bytes);
            }
            if event == InputEvent::Quit {
                self.board.run.finish_by_input(replayed);
                return false;
            }
        }
    }

    /// Ends the run because the next entry of the log does not belong to this run.
    fn refuse_input(&self, (round, icount, ticks): (u64, u64, Ticks)) -> bool {
        let entry = self.feed.logged(self.schedule.inputs);
        self.fail(RunError::ForeignInput {
            round,
            icount,
            ticks,
            entry: entry.map(ToString::to_string).unwrap_or_default(),
        })
    }

    fn fail(&self, error: RunError) -> bool {
        self.board.run.finish(error);
        false
    }
}

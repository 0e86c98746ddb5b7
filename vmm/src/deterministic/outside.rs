//! What comes to a deterministic machine from outside: input, and time while nobody runs.

use std::time::Duration;

use hindsight_devices::clock::Ticks;

use super::DeterministicMachine;
use crate::deterministic::input_log::InputEvent;
use crate::vcpu::crash::CrashCause;
use crate::vcpu::interp::run_log::LoggedEvent;
use crate::vcpu::run_control::RunError;

impl DeterministicMachine {
    /// Nobody runs: the clock goes to the next timer, or to the next input if that comes first.
    /// `false`: neither can come.
    pub(super) fn let_time_pass(&mut self) -> bool {
        let board = &self.board;
        let now = board.time.clock.now();
        let due = board.buses.irq.next_event();
        let known = self.feed.known(self.schedule.inputs);
        let to = match known {
            Some(input) if input.round == self.schedule.round => {
                Some(input.ticks.min(due.unwrap_or(u64::MAX)))
            }
            Some(_) => due,
            None => self.await_input(now, due),
        };
        let Some(to) = to else {
            let board = board.clone();
            if let Some(first) = self.vcpus.first_mut() {
                first.cannot_go_on(&board, CrashCause::Asleep);
            }
            return false;
        };
        board.time.clock.advance(to.saturating_sub(now));
        board.buses.irq.advance(board.time.clock.now());
        true
    }

    /// Where input is recorded, time passes as on the host while nothing runs: up to which tick.
    fn await_input(&self, now: Ticks, due: Option<Ticks>) -> Option<Ticks> {
        let board = &self.board;
        let nanos = |ticks| Duration::from_nanos(board.time.clock.ns_from_ticks(ticks));
        let limit = due.map(|due| nanos(due.saturating_sub(now)));
        let stopped = || board.run.vcpus.is_stopped();
        let Some(waited) = self
            .feed
            .wait(limit, board.buses.serial_has_capacity(), stopped)
        else {
            return due;
        };
        let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        let woken = now.saturating_add(board.time.clock.ticks_from_ns(nanos));
        Some(woken.min(due.unwrap_or(u64::MAX)))
    }

    /// At the beginning of a round: takes the input that comes here. `false`: it ends the run.
    pub(super) fn take_input(&mut self) -> bool {
        if (self.schedule.turn, self.schedule.used) != (0, 0) {
            return true;
        }
        let place = (
            self.schedule.round,
            self.place(),
            self.board.time.clock.now(),
        );
        loop {
            let recorded = self.feed.known(self.schedule.inputs).is_some();
            let event = match self.feed.known(self.schedule.inputs) {
                Some(input) if input.round > place.0 => return true,
                Some(input) if (input.round, input.place, input.ticks) != place => {
                    return self.lost_input(place);
                }
                Some(input) => {
                    let event = input.event.clone();
                    if let InputEvent::Serial(bytes) = &event
                        && self.board.buses.serial_input(bytes) != bytes.len()
                    {
                        return self.lost_input(place);
                    }
                    event
                }
                None => {
                    let board = self.board.clone();
                    let accept = |bytes: &[u8]| board.buses.serial_input(bytes);
                    match self.feed.take_live(place, accept) {
                        Ok(None) => return true,
                        Ok(Some(event)) => event,
                        Err(error) => return self.fail(RunError::InputLog(error)),
                    }
                }
            };
            self.schedule.inputs += 1;
            let bytes = match &event {
                InputEvent::Serial(bytes) => &**bytes,
                InputEvent::Quit => &[],
            };
            if let Some(first) = self.vcpus.first_mut() {
                first.note(LoggedEvent::Input, self.schedule.inputs, bytes);
            }
            if event == InputEvent::Quit {
                self.board.run.finish_by_input(recorded);
                return false;
            }
        }
    }

    /// The log says what cannot be in this run.
    fn lost_input(&self, (round, place, ticks): (u64, u64, Ticks)) -> bool {
        let entry = self.feed.known(self.schedule.inputs);
        self.fail(RunError::ForeignInput {
            round,
            icount: place,
            ticks,
            entry: entry.map(ToString::to_string).unwrap_or_default(),
        })
    }

    fn fail(&self, error: RunError) -> bool {
        self.board.run.finish(error);
        false
    }
}

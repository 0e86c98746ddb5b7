//! Stops of a vCPU at the functions of a Linux kernel that report what it runs, for `hindsight trace`,
//! and the search for the one that ends a recording of branches.

use std::sync::Arc;

use hindsight_cpu::stops::{StopConditions, StopHit};
use hindsight_interp::{Exit, InterruptSource, RetiredCounts};
use hindsight_regs::msr as regs;
use hindsight_trace::EventKinds;

use super::InterpVcpu;
use crate::vcpu::kernel_function::{FunctionSearch, KernelFunction};
use crate::vcpu::process_tracker::{ProcessTracker, TrackedEvents};

impl InterpVcpu {
    /// Traces what a Linux guest runs from now on. No debugger may set stop conditions.
    pub(crate) fn track_processes(&mut self, tracker: Arc<ProcessTracker>) {
        self.vcpu.set_stops(&tracker.stops());
        self.platform.model.processes = Some(tracker);
    }

    /// Runs like [`hindsight_interp::Vcpu::run`], and serves the stops of the process tracker.
    pub(crate) fn run_tracked(&mut self, budget: u64) -> Exit {
        let exit = self.run_to_tracked_stop(budget);
        if let Some(function) = self.platform.model.record_stop.take() {
            self.find_record_stop(function);
        }
        exit
    }

    /// Searches for the function that ends the recording of branches.
    fn find_record_stop(&mut self, function: Arc<KernelFunction>) {
        let search = function.search(&self.state());
        let model = &mut self.platform.model;
        match (search, &mut model.history) {
            (FunctionSearch::Pending, _) => model.record_stop = Some(function),
            (FunctionSearch::Found(address), Some(history)) => history.stop_at(address),
            _ => {}
        }
    }

    fn run_to_tracked_stop(&mut self, budget: u64) -> Exit {
        let exit = self.vcpu.run(&mut self.platform, budget);
        let (Exit::Stop(hit), Some(tracker)) = (&exit, &self.platform.model.processes) else {
            return exit;
        };
        let tracker = tracker.clone();
        if !self.traces_processes() {
            // The trace has ended: nothing stops the vCPU any more.
            self.vcpu.set_stops(&StopConditions::default());
            self.platform.model.processes = None;
            let is_own = match *hit {
                StopHit::Msr { index, .. } => index == regs::IA32_LSTAR,
                StopHit::Execute(at) => tracker.stops().execute.contains(&at),
                _ => false,
            };
            return if is_own { Exit::Budget } else { exit };
        }
        let stats = self.vcpu.stats();
        self.platform.advance(RetiredCounts {
            instructions: stats.retired,
            user: stats.user,
            cycles: self.vcpu.cycles(),
        });
        let state = self.state();
        match *hit {
            StopHit::Msr { index, .. } if index == regs::IA32_LSTAR => {
                let events = tracker.entry_set(&state);
                if events.found {
                    self.vcpu.set_stops(&tracker.stops());
                }
                self.trace_tracked(events);
                Exit::Budget
            }
            StopHit::Execute(at) => {
                let Some(events) = tracker.reached(at, &state) else {
                    return self.step_over(exit, &tracker, at);
                };
                self.trace_tracked(events);
                self.step_over(exit, &tracker, at)
            }
            _ => exit,
        }
    }

    fn traces_processes(&self) -> bool {
        let tracer = self.platform.model.tracer.as_ref();
        tracer.is_some_and(|tracer| tracer.kinds().contains(EventKinds::PROCESSES))
    }

    /// Executes the instruction at a breakpoint of the tracker; the exit of others remains.
    fn step_over(&mut self, exit: Exit, tracker: &ProcessTracker, at: u64) -> Exit {
        if !tracker.stops().execute.contains(&at) {
            return exit;
        }
        match self.vcpu.step(&mut self.platform, false) {
            Exit::Stepped => Exit::Budget,
            other => other,
        }
    }

    fn trace_tracked(&mut self, events: TrackedEvents) {
        let model = &mut self.platform.model;
        for event in events.log {
            model.trace_process(event);
        }
        if let Some(event) = events.task {
            model.trace(EventKinds::PROCESSES, event);
        }
    }
}

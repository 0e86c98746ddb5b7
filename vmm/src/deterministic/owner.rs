//! What the owner of a deterministic machine does between runs: input, traces, and its end.

use hindsight_gdb::modes;
use hindsight_trace::TraceWriter;

use super::machine::DeterministicMachine;
use crate::vcpu::crash::{Crash, CrashCause};
use crate::vcpu::run_control::GuestEnd;

impl DeterministicMachine {
    /// Makes the machine wait where its guest ends the run or cannot continue, instead of ending.
    ///
    /// The state there can be read, and an earlier one restored.
    pub fn hold_end(&mut self) {
        self.board.run.stops.request();
        self.board.run.end.hold();
    }

    /// How the guest ended the run, if it did, and the machine waits there.
    pub fn held_end(&self) -> Option<GuestEnd> {
        self.board.run.end.held()
    }

    /// Why the guest cannot continue, if that is so, and the machine waits there.
    pub fn held_crash(&mut self) -> Option<Crash> {
        let cpu = self.crashed()?;
        let cause = self.vcpus.get(cpu)?.crashed.clone()?;
        let state = self.state(cpu)?;
        Some(Crash::new(cpu, cause, state, &self.board.ram.map))
    }

    /// Queues bytes for COM1. The guest gets them from the next round of turns on, as fast as it
    /// takes them. Returns `false`, and queues none, if they do not all fit.
    ///
    /// None fit in a machine whose feed is not [`super::input::InputFeed::owned`]. Input that was
    /// logged for later instructions is forgotten.
    pub fn send_input(&mut self, bytes: &[u8]) -> bool {
        if !self.feed.send(bytes) {
            return false;
        }
        self.forget_later_input();
        for vcpu in &mut self.vcpus {
            if vcpu.crashed == Some(CrashCause::Asleep) {
                vcpu.crashed = None;
            }
        }
        true
    }

    /// Forgets input that was logged for later instructions: the run is another one from here on.
    pub fn forget_later_input(&mut self) {
        self.feed.forget_from(self.schedule.inputs);
    }

    /// Drops input that was sent and that the guest has not taken.
    pub fn drop_queued_input(&mut self) {
        self.feed.drop_queued();
    }

    /// The linear address of the next instruction of vCPU `cpu`, if it exists.
    pub fn code_address(&self, cpu: usize) -> Option<u64> {
        self.vcpus.get(cpu).map(|vcpu| vcpu.vcpu.code_address())
    }

    /// Traces the events of all vCPUs until [`DeterministicMachine::stop_trace`].
    ///
    /// A trace cannot go back: restore no earlier state meanwhile.
    pub fn trace(&mut self, writer: &TraceWriter) {
        for (cpu, vcpu) in (0_u32..).zip(&mut self.vcpus) {
            let state = vcpu.cpu_state();
            let mut tracer = writer.tracer(cpu);
            tracer.restart(modes::code_base(&state));
            vcpu.platform.model.tracer = Some(Box::new(tracer));
        }
    }

    /// Stops the trace. The writer can be finished then.
    pub fn stop_trace(&mut self) {
        for vcpu in &mut self.vcpus {
            vcpu.platform.model.tracer = None;
        }
    }
}

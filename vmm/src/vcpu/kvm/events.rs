//! What interrupts a vCPU under KVM: INIT, start-up IPIs, NMIs, interrupts, and the clock.

use hindsight_cpu::state::Activity;
use hindsight_devices::irq::PendingInterrupts;

use super::KvmVcpu;
use crate::kvm::KvmError;
use crate::log_limit::LogLimit;
use crate::vcpu::board::Board;
use crate::vcpu::recorder::RecordedKind;

impl KvmVcpu {
    /// Delivers pending events to the vCPU. `false`: it has nothing to run and sleeps.
    pub(super) fn deliver_events(&mut self) -> Result<bool, KvmError> {
        let (id, board) = (self.model.id, self.model.board.clone());
        let irq = &board.buses.irq;
        self.follow_clock(&board);
        let pending = irq.pending(id);
        if pending.init && irq.take_init(id) {
            self.init()?;
        }
        if let Some(vector) = pending.sipi.and_then(|_| irq.take_sipi(id)) {
            self.start_up(vector)?;
        }
        if matches!(self.activity, Activity::WaitForSipi | Activity::Shutdown) {
            board.time.poll_window(id, false);
            return Ok(false);
        }
        if self.model.debug.masks_interrupts() {
            board.time.poll_window(id, false);
            return Ok(self.activity == Activity::Running);
        }
        // KVM merges them as a processor does.
        while pending.nmi && irq.take_nmi(id) {
            tracing::trace!(target: "irq", "cpu {id} NMI");
            self.fd.inject_nmi()?;
            self.activity = Activity::Running;
        }
        self.offer_interrupt(pending, &board)?;
        let cr8 = irq.cr8(id);
        if cr8 != self.cr8 {
            self.cr8 = cr8;
            self.fd.set_cr8(cr8);
        }
        Ok(self.activity == Activity::Running)
    }

    /// Injects the pending interrupt, or requests an interrupt window for it.
    fn offer_interrupt(
        &mut self,
        pending: PendingInterrupts,
        board: &Board,
    ) -> Result<(), KvmError> {
        let (id, waiting) = (self.model.id, pending.interrupt);
        let mut window = false;
        if waiting && self.accepts_interrupt() {
            // An instruction that is half done may still fault, and its handler may run with
            // interrupts off: complete it, after which KVM reports anew whether it accepts one.
            self.complete()?;
        }
        if waiting && self.accepts_interrupt() {
            if let Some(vector) = board.buses.irq.acknowledge(id) {
                tracing::trace!(target: "irq", "cpu {id} interrupt {vector:#x}");
                self.model.record(RecordedKind::Interrupt { vector });
                self.fd.inject_interrupt(vector)?;
                // KVM accepts no second one before it runs.
                self.accepts_interrupt = Some(false);
                self.activity = Activity::Running;
            }
            window = board.buses.irq.pending(id).interrupt;
        } else if waiting {
            window = true;
        }
        // A halted vCPU opens no window: where it cannot be interrupted now, it never can.
        let runs = self.activity == Activity::Running;
        self.fd.request_interrupt_window(window && runs);
        // Some KVMs do not exit when CR8 is lowered either.
        let poll = window || pending.held || self.unsettled;
        board.time.poll_window(id, runs && poll);
        Ok(())
    }

    fn accepts_interrupt(&mut self) -> bool {
        self.accepts_interrupt
            .unwrap_or_else(|| self.fd.ready_for_interrupt())
    }

    /// Sets KVM's TSC offset anew after the machine's clock was started or paused.
    fn follow_clock(&mut self, board: &Board) {
        let base = board.time.clock.host_base();
        if base != self.tsc_base {
            self.tsc_base = base;
            self.set_tsc_offset(board);
        }
    }

    /// Sets KVM's TSC offset from the clock and the guest's own offset.
    pub(super) fn set_tsc_offset(&mut self, board: &Board) {
        let Some(base) = board.time.clock.host_base() else {
            return;
        };
        let offset = self.model.msrs.tsc().offset().wrapping_sub(base);
        if let Err(error) = self.fd.set_tsc_offset(offset) {
            static LIMIT: LogLimit = LogLimit::new();
            if let Some(suppressed) = LIMIT.admit() {
                let id = self.model.id;
                tracing::warn!("the TSC of vCPU {id} under KVM is wrong: {error}{suppressed}");
            }
        }
    }

    /// INIT: the boot processor starts at the reset vector, the others wait for a start-up IPI.
    fn init(&mut self) -> Result<(), KvmError> {
        tracing::trace!(target: "irq", "cpu {} INIT", self.model.id);
        let mut state = self.state()?;
        state.init();
        state.activity = if self.model.id == 0 {
            Activity::Running
        } else {
            Activity::WaitForSipi
        };
        self.model.msrs.init();
        self.report_armed();
        self.set_state(&state)
    }

    /// A start-up IPI, which only a vCPU that waits for one accepts.
    fn start_up(&mut self, vector: u8) -> Result<(), KvmError> {
        if self.activity != Activity::WaitForSipi {
            return Ok(());
        }
        tracing::trace!(target: "irq", "cpu {} SIPI {vector:#x}", self.model.id);
        let mut state = self.state()?;
        state.start_up(vector);
        self.set_state(&state)
    }
}

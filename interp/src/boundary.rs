//! Delivers events between two instructions: traps, NMIs, interrupts, SMIs, halts.

use crate::core::Core;
use crate::events::{EventSource, GuestEvent, Shutdown};
use crate::interpreter::Exit;
use crate::platform::AbortCause;
use hindsight_cpu::state::{Activity, PendingException};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

/// The result of a part of a run: an exit, or `None` if the run continues.
pub(crate) type RunResult = Result<Option<Exit>, Shutdown>;

impl Core {
    /// Shuts the processor down, and returns the exit.
    pub(crate) fn shut_down(&mut self) -> Exit {
        self.state.activity = Activity::Shutdown;
        Exit::Shutdown
    }

    /// Returns the exit for the debugger's condition that was met, if any.
    pub(crate) fn take_stop(&mut self) -> Option<Exit> {
        self.debug.stops.take_hit().map(Exit::Stop)
    }

    /// Delivers an exception that was part of a loaded state.
    pub(crate) fn deliver_saved(&mut self, e: PendingException) -> Result<(), Shutdown> {
        let vector = Vector(e.vector);
        match (vector, e.payload) {
            (Vector::PF, Some(cr2)) => self.state.cr2 = cr2,
            (Vector::DB, Some(bits)) => self.report_debug_conditions(bits),
            _ => {}
        }
        self.state.activity = Activity::Running;
        let trap_or_abort = matches!(vector, Vector::DB | Vector::BP | Vector::OF | Vector::DF);
        self.debug.stops.skip_exception = true;
        self.deliver(GuestEvent {
            vector,
            source: EventSource::Exception,
            code: e.error_code,
            rf: !trap_or_abort,
        })
    }

    /// Delivers all events that are pending between two instructions.
    pub(crate) fn boundary(&mut self) -> RunResult {
        self.poll_transaction();
        self.poll_counters();
        loop {
            self.report_due_branches();
            if matches!(
                self.state.activity,
                Activity::WaitForSipi | Activity::Shutdown
            ) {
                return Ok(Some(Exit::Halted));
            }
            if self.debug.pending_trap().is_some() {
                self.state.activity = Activity::Running;
                self.deliver_trap()?;
                continue;
            }
            if self.debug.stops.hit().is_some() {
                return Ok(None);
            }
            if let Some(vector) = self.state.events.interrupt.take() {
                self.deliver_interrupt(vector)?;
                continue;
            }
            match self.deliver_pending()? {
                Pended::Delivered => {}
                Pended::Leave => return Ok(Some(Exit::Leave)),
                Pended::Nothing => {
                    let halted = self.state.activity == Activity::Halted;
                    return Ok(halted.then_some(Exit::Halted));
                }
            }
        }
    }

    /// Delivers the SMI, NMI or interrupt of the highest priority that is pending and not blocked.
    fn deliver_pending(&mut self) -> Result<Pended, Shutdown> {
        let events = self.state.events;
        let masked = self.debug.stops.mask_interrupts && self.state.activity == Activity::Running;
        let open = !masked && !events.mov_ss_shadow && !events.sti_shadow;
        let pending = self.platform().pending();
        if pending.leave {
            return Ok(Pended::Leave);
        }
        if pending.smi && open && !self.in_smm() {
            self.platform().acknowledge_smi();
            self.abort_if_open(AbortCause::Event);
            self.enter_smm();
            return Ok(Pended::Delivered);
        }
        if open && !events.nmi_blocked && (pending.nmi || events.nmi_pending) {
            self.abort_if_open(AbortCause::Event);
            self.deliver_nmi()?;
            return Ok(Pended::Delivered);
        }
        if pending.interrupt
            && open
            && self.regs.flag(Rflags::IF)
            && let Some(vector) = self.platform().acknowledge()
        {
            self.abort_if_open(AbortCause::Event);
            self.deliver_interrupt(vector)?;
            return Ok(Pended::Delivered);
        }
        Ok(Pended::Nothing)
    }

    /// Ends the blocking of NMIs.
    pub(crate) fn unblock_nmis(&mut self) {
        if std::mem::take(&mut self.state.events.nmi_blocked) {
            self.platform().nmis_unblocked();
        }
    }

    fn deliver_nmi(&mut self) -> Result<(), Shutdown> {
        if self.state.events.nmi_pending {
            self.state.events.nmi_pending = false;
        } else {
            self.platform().acknowledge_nmi();
        }
        self.state.events.nmi_blocked = true;
        self.deliver_external(Vector::NMI)
    }

    fn deliver_interrupt(&mut self, vector: u8) -> Result<(), Shutdown> {
        self.deliver_external(Vector(vector))
    }

    fn deliver_external(&mut self, vector: Vector) -> Result<(), Shutdown> {
        self.state.activity = Activity::Running;
        self.deliver(GuestEvent {
            vector,
            source: EventSource::External,
            code: None,
            rf: self.regs.flag(Rflags::RF),
        })
    }
}

/// What [`Core::deliver_pending`] did.
enum Pended {
    Delivered,
    /// The caller of the interpreter must act.
    Leave,
    Nothing,
}

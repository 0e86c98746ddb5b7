//! Messages that a local APIC sends and receives, and its local interrupts.
//!
//! SDM Vol. 3A, "Issuing Interprocessor Interrupts", "Determining IPI Destination" and "Local
//! Vector Table".

use hindsight_regs::apic::{DeliveryMode, Esr, LvtEntry, Shorthand, Svr, VECTOR_MIN};

use super::regs::lvt;
use super::{Lapic, LapicEffect, LapicState};
use crate::irq::message::{Destination, DestinationId, InterruptMessage};

/// DFR bits 31:28: the flat model of logical destinations.
const DFR_FLAT: u32 = 0xf;
/// DFR bits 31:28: the cluster model of logical destinations.
const DFR_CLUSTER: u32 = 0x0;

impl Lapic {
    /// Sends the message that the ICR describes.
    pub(super) fn send_icr(&mut self) -> LapicEffect {
        let icr = self.s.icr;
        let id = if self.is_x2apic() {
            DestinationId::X2apic(icr.x2apic_destination())
        } else {
            DestinationId::Xapic(icr.xapic_destination())
        };
        let destination = match icr.shorthand() {
            Shorthand::None if icr.is_logical() => Destination::Logical(id),
            Shorthand::None => Destination::Physical(id),
            Shorthand::Myself => Destination::Myself,
            Shorthand::All => Destination::All,
            Shorthand::Others => Destination::Others,
        };
        match icr.delivery_mode() {
            None | Some(DeliveryMode::ExtInt) => LapicEffect::None,
            // A de-asserted INIT only synchronizes arbitration IDs, which no longer exist.
            Some(DeliveryMode::Init) if icr.is_level() && !icr.is_asserted() => LapicEffect::None,
            Some(delivery) => self.send_message(destination, delivery, icr.vector()),
        }
    }

    /// Sends an IPI. IPIs are edge-triggered whatever the trigger mode says.
    pub(super) fn send_message(
        &mut self,
        destination: Destination,
        delivery: DeliveryMode,
        vector: u8,
    ) -> LapicEffect {
        if delivery.is_vectored() && vector < VECTOR_MIN {
            self.report_error(Esr::SEND_ILLEGAL_VECTOR);
            return LapicEffect::None;
        }
        LapicEffect::Send(InterruptMessage {
            destination,
            delivery,
            vector,
            level: false,
        })
    }

    /// LDR: in x2APIC mode it follows from the ID.
    pub(super) fn logical_id(&self) -> u32 {
        if self.is_x2apic() {
            (self.id >> 4) << 16 | 1 << (self.id & 0xf)
        } else {
            self.s.ldr
        }
    }

    /// Whether a message is addressed to this APIC; `from_self` if this APIC sent it.
    pub fn matches(&self, destination: Destination, from_self: bool) -> bool {
        self.is_enabled()
            && match destination {
                Destination::Myself => from_self,
                Destination::All => true,
                Destination::Others => !from_self,
                Destination::Physical(id) => id.is_broadcast() || id.value() == self.id,
                Destination::Logical(id) => self.matches_logical(id),
            }
    }

    fn matches_logical(&self, id: DestinationId) -> bool {
        let (value, own) = (id.value(), self.logical_id());
        if id.is_broadcast() {
            return true;
        }
        if self.is_x2apic() {
            return value >> 16 == own >> 16 && value & own & 0xffff != 0;
        }
        if value > 0xff {
            return false;
        }
        let own = own >> 24;
        match self.s.dfr >> 28 {
            DFR_FLAT => value & own & 0xff != 0,
            DFR_CLUSTER => value >> 4 == own >> 4 && value & own & 0xf != 0,
            _ => false,
        }
    }

    /// Whether this APIC takes part in lowest-priority delivery.
    pub fn is_candidate(&self) -> bool {
        self.is_software_enabled()
    }

    /// Receives a message that [`Lapic::matches`]. Returns whether the APIC accepted it.
    pub fn receive(&mut self, delivery: DeliveryMode, vector: u8, level: bool) -> bool {
        match delivery {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => {
                return self.accept(vector, level);
            }
            DeliveryMode::Smi => self.s.smi = true,
            DeliveryMode::Nmi => self.inject_nmi(),
            DeliveryMode::Init => {
                self.s.init = true;
                self.s.sipi = None;
            }
            DeliveryMode::StartUp => {
                let waits = self.s.wait_for_sipi || self.s.init && !self.is_bsp();
                if waits && self.s.sipi.is_none() {
                    self.s.sipi = Some(vector);
                }
            }
            DeliveryMode::ExtInt => {
                if !self.is_software_enabled() {
                    return false;
                }
                self.s.ext_int = true;
            }
        }
        true
    }

    /// Requests a vectored interrupt. Returns whether the APIC accepted it.
    pub(super) fn accept(&mut self, vector: u8, level: bool) -> bool {
        if !self.is_software_enabled() {
            return false;
        }
        if vector < VECTOR_MIN {
            self.report_error(Esr::RECEIVE_ILLEGAL_VECTOR);
            return false;
        }
        self.s.irr.set(vector, true);
        self.s.tmr.set(vector, level);
        true
    }

    /// Adds an error. The error interrupt is raised once until software writes the ESR.
    pub(super) fn report_error(&mut self, error: Esr) {
        let first = self.s.errors == 0;
        self.s.errors |= error.bits();
        let entry = self.s.lvt[lvt::ERROR];
        if first && !entry.is_masked() {
            self.accept(entry.vector(), false);
        }
    }

    /// Requests a performance-monitoring interrupt through the LVT.
    ///
    /// SDM Vol. 3B, "Generating an Interrupt on Overflow": delivery masks the entry; a masked entry
    /// loses the request.
    pub fn request_pmi(&mut self) {
        let entry = self.s.lvt[lvt::PMC];
        if entry.is_masked() || !self.is_software_enabled() {
            return;
        }
        self.s.lvt[lvt::PMC] = entry.with(LvtEntry::MASKED);
        if let Some(mode @ (DeliveryMode::Fixed | DeliveryMode::Smi | DeliveryMode::Nmi)) =
            entry.delivery_mode()
        {
            self.receive(mode, entry.vector(), false);
        }
    }

    /// Drives the LINT0 (`pin` 0) or LINT1 (1) pin; other pins do not exist.
    pub fn set_lint(&mut self, pin: usize, level: bool) {
        let Some(line) = self.s.lint.get_mut(pin) else {
            return;
        };
        let rising = level && !std::mem::replace(line, level);
        *line = level;
        if !self.is_enabled() {
            // LINT0 is INTR, see `ext_int`; LINT1 is NMI.
            if rising && pin == 1 {
                self.inject_nmi();
            }
            return;
        }
        let entry = self.s.lvt[lvt::LINT0 + pin];
        self.deliver_lint_level(lvt::LINT0 + pin);
        if !rising || entry.is_masked() {
            return;
        }
        match entry.delivery_mode() {
            Some(DeliveryMode::Fixed) if !entry.is_level() => {
                self.accept(entry.vector(), false);
            }
            Some(mode @ (DeliveryMode::Smi | DeliveryMode::Nmi | DeliveryMode::Init)) => {
                self.receive(mode, 0, false);
            }
            _ => {}
        }
    }

    /// Requests a LINT pin's level-triggered fixed interrupt while the pin is asserted.
    pub(super) fn deliver_lint_level(&mut self, index: usize) {
        let entry = self.s.lvt[index];
        let requested = self.s.lint[index - lvt::LINT0]
            && !entry.is_masked()
            && !entry.remote_irr()
            && entry.is_level()
            && entry.delivery_mode() == Some(DeliveryMode::Fixed);
        if requested && self.accept(entry.vector(), true) {
            self.s.lvt[index] = self.s.lvt[index].with(LvtEntry::REMOTE_IRR);
        }
    }

    /// Enables the APIC by software, with LINT0 as ExtINT and LINT1 as NMI.
    pub fn set_virtual_wire(&mut self) {
        const EXT_INT: u32 = 0b111 << 8;
        const NMI: u32 = 0b100 << 8;
        self.s.svr |= Svr::ENABLE.bits();
        self.s.lvt[lvt::LINT0] = LvtEntry(EXT_INT);
        self.s.lvt[lvt::LINT1] = LvtEntry(NMI);
    }

    /// The state, with the pending events.
    pub fn state(&self) -> &LapicState {
        &self.s
    }

    /// Raises an NMI whatever the LVT contains.
    ///
    /// Two can be pending: the processor serves the first and latches the second meanwhile.
    pub fn inject_nmi(&mut self) {
        self.s.second_nmi |= self.s.nmi;
        self.s.nmi = true;
    }

    /// Gives the processor an NMI. Returns whether one was pending.
    pub fn take_nmi(&mut self) -> bool {
        let second = std::mem::take(&mut self.s.second_nmi);
        std::mem::replace(&mut self.s.nmi, second)
    }

    /// Merges two pending NMIs into one: the processor, which serves an NMI, latches one more only.
    pub fn merge_nmis(&mut self) {
        self.s.second_nmi = false;
    }

    /// Raises an SMI whatever the LVT contains.
    pub fn inject_smi(&mut self) {
        self.s.smi = true;
    }

    /// Gives the processor an SMI. Returns whether one was pending.
    pub fn take_smi(&mut self) -> bool {
        std::mem::take(&mut self.s.smi)
    }

    /// Gives the processor an INIT, which resets this APIC. Returns whether one was pending.
    pub fn take_init(&mut self) -> bool {
        let taken = self.s.init;
        if taken {
            self.init();
        }
        taken
    }

    /// Gives the processor a start-up IPI; the processor then no longer waits for one.
    ///
    /// `None` while an INIT is pending: the INIT comes first, and would undo the start.
    pub fn take_sipi(&mut self) -> Option<u8> {
        if self.s.init {
            return None;
        }
        let vector = self.s.sipi.take()?;
        self.s.wait_for_sipi = false;
        Some(vector)
    }

    /// Sets whether the processor waits for a start-up IPI; if not, start-up IPIs are dropped.
    pub fn set_wait_for_sipi(&mut self, waits: bool) {
        self.s.wait_for_sipi = waits;
    }
}

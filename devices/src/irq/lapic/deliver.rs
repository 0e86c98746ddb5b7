//! What a local APIC sends and receives: IPIs, messages, and its local interrupts.
//!
//! SDM Vol. 3A, "Issuing Interprocessor Interrupts", "Determining IPI Destination" and "Local Vector
//! Table".

use super::regs::{self, lvt};
use super::{Effect, Lapic, LapicState, delivery, set};
use crate::irq::message::{Address, Delivery, Destination, Message};

impl Lapic {
    // ---- sending ----

    /// Sends what the ICR says.
    pub(super) fn send(&mut self) -> Effect {
        let low = (self.s.icr & 0xffff_ffff) as u32;
        let address = if self.is_x2apic() {
            Address::Wide((self.s.icr >> 32) as u32)
        } else {
            Address::Narrow((self.s.icr >> 56) as u8)
        };
        let destination = match (low >> 18) & 3 {
            0 if low & (1 << 11) == 0 => Destination::Physical(address),
            0 => Destination::Logical(address),
            1 => Destination::Myself,
            2 => Destination::All,
            _ => Destination::Others,
        };
        let Some(delivery) = Delivery::from_bits(low >> 8) else {
            return Effect::None;
        };
        let asserted = low & (1 << 14) != 0;
        let level = low & (1 << 15) != 0;
        // A de-asserted INIT only synchronizes arbitration IDs, which do not exist any more; other
        // messages are edges whatever the trigger mode says.
        match delivery {
            Delivery::ExtInt => Effect::None,
            Delivery::Init if level && !asserted => Effect::None,
            _ => self.send_message(destination, delivery, (low & 0xff) as u8, false),
        }
    }

    pub(super) fn send_message(
        &mut self,
        destination: Destination,
        delivery: Delivery,
        vector: u8,
        level: bool,
    ) -> Effect {
        let vectored = matches!(delivery, Delivery::Fixed | Delivery::LowestPriority);
        if vectored && vector < 16 {
            self.error(regs::ESR_SEND_ILLEGAL_VECTOR);
            return Effect::None;
        }
        Effect::Send(Message {
            destination,
            delivery,
            vector,
            level,
        })
    }

    // ---- receiving ----

    /// LDR: in x2APIC mode it follows from the ID.
    pub(super) fn logical_id(&self) -> u32 {
        if self.is_x2apic() {
            (self.id >> 4) << 16 | 1 << (self.id & 0xf)
        } else {
            self.s.ldr
        }
    }

    /// Whether a message reaches this APIC. `myself` says that this APIC sent it.
    pub fn matches(&self, destination: Destination, myself: bool) -> bool {
        self.is_enabled()
            && match destination {
                Destination::Myself => myself,
                Destination::All => true,
                Destination::Others => !myself,
                Destination::Physical(address) => {
                    address.is_broadcast() || address.value() == self.id
                }
                Destination::Logical(address) => self.matches_logical(address),
            }
    }

    fn matches_logical(&self, address: Address) -> bool {
        let (value, own) = (address.value(), self.logical_id());
        if address.is_broadcast() {
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
            0xf => value & own & 0xff != 0,
            0x0 => value >> 4 == own >> 4 && value & own & 0xf != 0,
            _ => false,
        }
    }

    /// Whether this APIC takes part in lowest-priority delivery.
    pub fn is_candidate(&self) -> bool {
        self.is_software_enabled()
    }

    /// A message that [`Lapic::matches`] arrives. Says whether it was accepted.
    pub fn receive(&mut self, delivery: Delivery, vector: u8, level: bool) -> bool {
        match delivery {
            Delivery::Fixed | Delivery::LowestPriority => return self.accept(vector, level),
            Delivery::Smi => self.s.smi = true,
            Delivery::Nmi => self.s.nmi = true,
            Delivery::Init => {
                self.s.init = true;
                self.s.sipi = None;
            }
            Delivery::StartUp => {
                let bsp = self.s.apic_base & regs::BASE_BSP != 0;
                let waits = self.s.wait_for_sipi || self.s.init && !bsp;
                if waits && self.s.sipi.is_none() {
                    self.s.sipi = Some(vector);
                }
            }
            Delivery::ExtInt => {
                if !self.is_software_enabled() {
                    return false;
                }
                self.s.ext_int = true;
            }
        }
        true
    }

    /// A vectored interrupt arrives.
    pub(super) fn accept(&mut self, vector: u8, level: bool) -> bool {
        if !self.is_software_enabled() {
            return false;
        }
        if vector < 16 {
            self.error(regs::ESR_RECEIVE_ILLEGAL_VECTOR);
            return false;
        }
        set(&mut self.s.irr, vector, true);
        set(&mut self.s.tmr, vector, level);
        true
    }

    /// Logs an error. Its interrupt is raised once until software writes the ESR.
    pub(super) fn error(&mut self, bit: u32) {
        let armed = self.s.errors == 0;
        self.s.errors |= bit;
        if armed {
            let entry = self.s.lvt[lvt::ERROR];
            if entry & lvt::MASKED == 0 {
                self.accept((entry & 0xff) as u8, false);
            }
        }
    }

    // ---- local interrupts ----

    /// A performance-monitoring interrupt is requested. SDM Vol. 3B, "Generating an Interrupt on
    /// Overflow": delivery masks the entry; a masked entry loses the request.
    pub fn request_pmi(&mut self) {
        let entry = self.s.lvt[lvt::PERF];
        if entry & lvt::MASKED != 0 || !self.is_software_enabled() {
            return;
        }
        self.s.lvt[lvt::PERF] |= lvt::MASKED;
        let vector = (entry & 0xff) as u8;
        let mode = delivery(entry);
        if let Some(mode @ (Delivery::Fixed | Delivery::Smi | Delivery::Nmi)) = mode {
            self.receive(mode, vector, false);
        }
    }

    /// Drives the LINT0 (`pin` 0) or LINT1 (1) pin.
    pub fn set_lint(&mut self, pin: usize, level: bool) {
        let Some(old) = self.s.lint.get_mut(pin) else {
            return;
        };
        let rising = level && !std::mem::replace(old, level);
        *old = level;
        if !self.is_enabled() {
            // LINT0 is INTR, see `ext_int`; LINT1 is NMI.
            self.s.nmi |= rising && pin == 1;
            return;
        }
        let entry = self.s.lvt[lvt::LINT0 + pin];
        self.deliver_lint_level(lvt::LINT0 + pin);
        if !rising || entry & lvt::MASKED != 0 {
            return;
        }
        match delivery(entry) {
            Some(Delivery::Fixed) if entry & lvt::LEVEL == 0 => {
                self.accept((entry & 0xff) as u8, false);
            }
            Some(mode @ (Delivery::Smi | Delivery::Nmi | Delivery::Init)) => {
                self.receive(mode, 0, false);
            }
            _ => {}
        }
    }

    /// Raises a level-triggered fixed interrupt of a LINT pin if its pin asks for one.
    pub(super) fn deliver_lint_level(&mut self, index: usize) {
        let entry = self.s.lvt[index];
        let wanted = self.s.lint[index - lvt::LINT0]
            && entry & (lvt::MASKED | lvt::REMOTE_IRR) == 0
            && entry & lvt::LEVEL != 0
            && delivery(entry) == Some(Delivery::Fixed);
        if wanted && self.accept((entry & 0xff) as u8, true) {
            self.s.lvt[index] |= lvt::REMOTE_IRR;
        }
    }

    /// Software-enabled, LINT0 as ExtINT, LINT1 as NMI.
    pub fn set_virtual_wire(&mut self) {
        self.s.svr |= regs::SVR_ENABLE;
        self.s.lvt[lvt::LINT0] = 0x700;
        self.s.lvt[lvt::LINT1] = 0x400;
    }

    // ---- events for the processor ----

    /// The events that wait for the processor.
    pub fn events(&self) -> &LapicState {
        &self.s
    }

    /// Raises an NMI, whatever the LVT says.
    pub fn inject_nmi(&mut self) {
        self.s.nmi = true;
    }

    /// The processor takes an NMI.
    pub fn take_nmi(&mut self) -> bool {
        std::mem::take(&mut self.s.nmi)
    }

    /// Raises an SMI, whatever the LVT says.
    pub fn inject_smi(&mut self) {
        self.s.smi = true;
    }

    /// The processor takes an SMI.
    pub fn take_smi(&mut self) -> bool {
        std::mem::take(&mut self.s.smi)
    }

    /// The processor takes an INIT, which resets this APIC.
    pub fn take_init(&mut self) -> bool {
        let taken = self.s.init;
        if taken {
            self.init();
        }
        taken
    }

    /// The processor takes a start-up IPI and waits no more. None while an INIT waits, which comes
    /// first: or else that would undo the start.
    pub fn take_sipi(&mut self) -> Option<u8> {
        if self.s.init {
            return None;
        }
        let vector = self.s.sipi.take()?;
        self.s.wait_for_sipi = false;
        Some(vector)
    }

    /// Says whether the processor waits for a start-up IPI; otherwise they are dropped.
    pub fn set_wait_for_sipi(&mut self, waits: bool) {
        self.s.wait_for_sipi = waits;
    }
}

impl Address {
    fn value(self) -> u32 {
        match self {
            Self::Narrow(value) => value.into(),
            Self::Wide(value) => value,
        }
    }

    fn is_broadcast(self) -> bool {
        matches!(self, Self::Narrow(0xff) | Self::Wide(u32::MAX))
    }
}

//! Priorities, acceptance by the processor, and end of interrupt.
//!
//! SDM Vol. 3A, "Task and Processor Priorities" and "Signaling Interrupt Servicing Completion".

use hindsight_regs::apic::{DeliveryMode, LvtEntry, Svr};

use super::regs::lvt;
use super::vectors::PRIORITY_CLASS;
use super::{Lapic, LapicEffect};

/// The interrupt that the processor has acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledged {
    /// This vector, now in service.
    Vector(u8),
    /// A vector from the 8259 pair.
    ExtInt,
}

impl Lapic {
    /// The task priority register.
    pub fn tpr(&self) -> u8 {
        self.s.tpr
    }

    /// Sets the task priority register. CR8 is its bits 7:4.
    pub fn set_tpr(&mut self, value: u8) {
        self.s.tpr = value;
    }

    /// The processor priority register.
    pub fn ppr(&self) -> u8 {
        let in_service = self.s.isr.highest_class();
        if self.s.tpr & PRIORITY_CLASS >= in_service {
            self.s.tpr
        } else {
            in_service
        }
    }

    pub(super) fn arbitration_priority(&self) -> u8 {
        let requested = self.s.irr.highest_class();
        let in_service = self.s.isr.highest_class();
        let task = self.s.tpr & PRIORITY_CLASS;
        if task >= requested && task > in_service {
            self.s.tpr
        } else {
            task.max(requested).max(in_service)
        }
    }

    /// The requested vector whose class is above the processor priority.
    fn deliverable(&self) -> Option<u8> {
        let vector = self.s.irr.highest()?;
        let above = vector & PRIORITY_CLASS > self.ppr() & PRIORITY_CLASS;
        (self.is_enabled() && above).then_some(vector)
    }

    /// Whether the task priority alone inhibits an interrupt.
    pub fn has_held_interrupt(&self) -> bool {
        let class = self.s.irr.highest_class();
        self.is_enabled()
            && class > self.s.isr.highest_class()
            && class <= self.s.tpr & PRIORITY_CLASS
    }

    fn ext_int(&self) -> bool {
        let lint0 = self.s.lvt[lvt::LINT0];
        let enabled = !self.is_enabled()
            || self.s.ext_int
            || !lint0.is_masked() && lint0.delivery_mode() == Some(DeliveryMode::ExtInt);
        enabled && self.s.lint[0]
    }

    /// Whether a maskable interrupt is pending for the processor.
    pub fn has_interrupt(&self) -> bool {
        self.deliverable().is_some() || self.ext_int()
    }

    /// Gives the processor an interrupt: the APIC's own first, then one from the 8259 pair.
    pub fn acknowledge(&mut self) -> Option<Acknowledged> {
        if let Some(vector) = self.deliverable() {
            self.s.irr.set(vector, false);
            self.s.isr.set(vector, true);
            return Some(Acknowledged::Vector(vector));
        }
        if self.ext_int() {
            self.s.ext_int = false;
            return Some(Acknowledged::ExtInt);
        }
        None
    }

    pub(super) fn eoi(&mut self) -> LapicEffect {
        let Some(vector) = self.s.isr.highest() else {
            return LapicEffect::None;
        };
        self.s.isr.set(vector, false);
        if !self.s.tmr.contains(vector) {
            return LapicEffect::None;
        }
        for index in [lvt::LINT0, lvt::LINT1] {
            let entry = self.s.lvt[index];
            if entry.remote_irr() && entry.vector() == vector {
                self.s.lvt[index] = entry.without(LvtEntry::REMOTE_IRR);
                self.deliver_lint_level(index);
            }
        }
        if self.s.svr_flags().contains(Svr::NO_EOI_BROADCAST) {
            return LapicEffect::None;
        }
        LapicEffect::Eoi(vector)
    }
}

//! Inspection of a local APIC.

use hindsight_regs::apic::{Esr, LvtEntry};

use super::Lapic;
use super::regs::lvt;
use crate::inspect::{FieldList, Inspect, InspectField};

/// Names of the local vector table's entries.
const LVT_NAMES: [&str; lvt::COUNT] = ["timer", "thermal", "PMC", "LINT0", "LINT1", "error"];

impl Inspect for Lapic {
    fn inspect(&self) -> Vec<InspectField> {
        let mut copy = self.clone();
        let current = copy.current_count(self.advanced_to);
        let s = &self.s;
        let mut fields = FieldList::default();
        fields.push("ID", self.id);
        let mode = match (self.is_enabled(), self.is_x2apic()) {
            (false, _) => "disabled",
            (true, false) => "xAPIC",
            (true, true) => "x2APIC",
        };
        fields.push("mode", mode);
        fields.hex("APIC_BASE", s.apic_base);
        fields.hex("TPR", s.tpr);
        fields.hex("PPR", self.ppr());
        fields.hex("LDR", self.logical_id());
        fields.hex("DFR", s.dfr);
        fields.hex("spurious vector", s.svr.to_le_bytes()[0]);
        fields.flags("SVR", s.svr_flags());
        fields.vectors("ISR", &s.isr.0);
        fields.vectors("IRR", &s.irr.0);
        fields.vectors("TMR", &s.tmr.0);
        fields.flags("ESR", Esr::from_bits_truncate(s.esr));
        fields.hex("ICR", s.icr.0);
        for (name, entry) in LVT_NAMES.iter().zip(s.lvt) {
            fields.push(format!("LVT {name}"), describe_lvt(entry));
        }
        fields.push("timer mode", format_args!("{:?}", self.timer_mode()));
        fields.push("initial count", s.initial_count);
        fields.push("current count", current);
        fields.push("divide by", s.divide.divisor());
        fields.push("TSC deadline", s.tsc_deadline);
        for (pin, level) in s.lint.into_iter().enumerate() {
            fields.push(format!("LINT{pin} level"), u8::from(level));
        }
        let pending = [
            (s.nmi, "NMI"),
            (s.smi, "SMI"),
            (s.init, "INIT"),
            (s.sipi.is_some(), "SIPI"),
            (self.has_interrupt(), "INTR"),
        ];
        fields.names("pending", &pending);
        fields.finish()
    }
}

/// An entry as its fields: vector, delivery mode, trigger mode and mask.
fn describe_lvt(entry: LvtEntry) -> String {
    let delivery = entry
        .delivery_mode()
        .map_or_else(|| "reserved".to_owned(), |mode| format!("{mode:?}"));
    let flags = [
        (entry.is_level(), " level"),
        (entry.remote_irr(), " remote-IRR"),
        (entry.is_masked(), " masked"),
    ];
    let mut text = format!("vector {:#04x} {delivery}", entry.vector());
    for (_, name) in flags.iter().filter(|(set, _)| *set) {
        text.push_str(name);
    }
    text
}

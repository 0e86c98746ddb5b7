//! Deliveries of exceptions, in words: for `--trace exception`, and for the report of a triple
//! fault.

use std::fmt;

use hindsight_interp::{Delivery, DeliveryFault, DeliveryKind};
use hindsight_regs::vector::Vector;

/// An exception, a double fault and the fault that shuts the processor down; benign exceptions may
/// come before them.
const CHAIN_MAX: usize = 6;

/// Error codes: bit 1 names an entry of the IDT.
const CODE_IDT: u32 = 1 << 1;

/// The last event, and those that its delivery raised.
#[derive(Debug, Default)]
pub(super) struct DeliveryChain(Vec<Delivery>);

impl DeliveryChain {
    /// Adds a delivery. One that no other raised begins a new chain.
    pub(super) fn add(&mut self, delivery: &Delivery) {
        if !delivery.nested {
            self.0.clear();
        }
        if delivery.outcome.is_err() && self.0.len() < CHAIN_MAX {
            self.0.push(*delivery);
        }
    }

    /// A line for each failed delivery.
    pub(super) fn chain(&self) -> Vec<String> {
        let lines = self.0.iter();
        lines.map(|d| DeliveryText(d).to_string()).collect()
    }
}

/// A delivery in one line.
pub(super) struct DeliveryText<'a>(pub(super) &'a Delivery);

impl fmt::Display for DeliveryText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery {
            kind,
            vector,
            code,
            at: (cs, rip),
            cpl,
            cr2,
            outcome,
            ..
        } = self.0;
        match kind {
            DeliveryKind::Exception => write_vector(f, *vector, *code)?,
            DeliveryKind::Software => write!(f, "INT {:#x}", vector.0)?,
            DeliveryKind::External => write!(f, "interrupt {:#x}", vector.0)?,
        }
        write!(f, " at {cs:#x}:{rip:#x}, cpl {cpl}")?;
        if *vector == Vector::PF && *kind == DeliveryKind::Exception {
            write!(f, ", cr2 {cr2:#x}")?;
        }
        match outcome {
            Ok((cs, rip)) => write!(f, ": handler {cs:#x}:{rip:#x}"),
            Err(fault) => {
                f.write_str(": the delivery met ")?;
                write_vector(f, fault.vector, fault.code)?;
                write!(f, ": {}", Reason(self.0, fault))
            }
        }
    }
}

fn write_vector(f: &mut fmt::Formatter<'_>, vector: Vector, code: Option<u32>) -> fmt::Result {
    match code {
        Some(code) => write!(f, "{vector}({code:#x})"),
        None => write!(f, "{vector}"),
    }
}

/// Formats the reason for which a delivery failed.
struct Reason<'a>(&'a Delivery, &'a DeliveryFault);

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(delivery, fault) = self;
        let (entry, limit) = (delivery.entry, delivery.idt_limit);
        let size = u64::from(delivery.entry_size);
        let last = (u64::from(delivery.vector.0) + 1) * size - 1;
        let code = fault.code.unwrap_or(0);
        let in_entry = |address: u64| (entry..entry.saturating_add(size)).contains(&address);
        match (fault.vector, fault.cr2) {
            (Vector::PF, Some(cr2)) if in_entry(cr2) => {
                write!(f, "the IDT entry at {entry:#x} is not mapped")
            }
            (Vector::PF, cr2) => {
                let cr2 = cr2.unwrap_or(0);
                write!(
                    f,
                    "{cr2:#x}, for the stack or a descriptor, is not accessible"
                )
            }
            _ if last > u64::from(limit) => {
                write!(
                    f,
                    "the IDT entry at {entry:#x} is beyond the IDT's limit {limit:#x}"
                )
            }
            (Vector::NP, _) if code & CODE_IDT != 0 => {
                write!(f, "the IDT entry at {entry:#x} is not present")
            }
            _ if code & CODE_IDT != 0 => write!(f, "the IDT entry at {entry:#x} is no gate for it"),
            (Vector::SS, _) => {
                f.write_str("the handler's stack is beyond its segment or not canonical")
            }
            (Vector::TS, _) => {
                write!(
                    f,
                    "the task-state segment or its stack {:#x} is invalid",
                    code & !7
                )
            }
            _ if code & !7 == 0 => f.write_str("the handler's segment or address is invalid"),
            _ => write!(f, "the handler's segment {:#x} is invalid", code & !7),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(vector: Vector, fault: Vector, code: u32, cr2: Option<u64>) -> Delivery {
        Delivery {
            kind: DeliveryKind::Exception,
            vector,
            code: vector.has_error_code().then_some(0),
            at: (0x10, 0x10_0000),
            cpl: 0,
            cr2: 0x1234,
            entry: 0x5000 + u64::from(vector.0) * 16,
            entry_size: 16,
            idt_limit: 0xfff,
            nested: false,
            outcome: Err(DeliveryFault {
                vector: fault,
                code: Some(code),
                cr2,
            }),
        }
    }

    #[test]
    fn failed_delivery_says_what_it_met() {
        let short = Delivery {
            idt_limit: 0x2f,
            ..failed(Vector::UD, Vector::GP, 0x32, None)
        };
        for (delivery, text) in [
            (
                short,
                "#UD at 0x10:0x100000, cpl 0: the delivery met #GP(0x32): the IDT entry at 0x5060 is \
                 beyond the IDT's limit 0x2f",
            ),
            (
                failed(Vector::PF, Vector::PF, 0, Some(0x50e8)),
                "#PF(0x0) at 0x10:0x100000, cpl 0, cr2 0x1234: the delivery met #PF(0x0): the IDT entry \
                 at 0x50e0 is not mapped",
            ),
            (
                failed(Vector::DE, Vector::PF, 2, Some(0x7ff8)),
                "#DE at 0x10:0x100000, cpl 0: the delivery met #PF(0x2): 0x7ff8, for the stack or a \
                 descriptor, is not accessible",
            ),
            (
                failed(Vector::DE, Vector::NP, 2, None),
                "#DE at 0x10:0x100000, cpl 0: the delivery met #NP(0x2): the IDT entry at 0x5000 is not \
                 present",
            ),
            (
                failed(Vector::DE, Vector::GP, 2, None),
                "#DE at 0x10:0x100000, cpl 0: the delivery met #GP(0x2): the IDT entry at 0x5000 is no \
                 gate for it",
            ),
            (
                failed(Vector::DE, Vector::GP, 0x18, None),
                "#DE at 0x10:0x100000, cpl 0: the delivery met #GP(0x18): the handler's segment 0x18 is \
                 invalid",
            ),
        ] {
            assert_eq!(DeliveryText(&delivery).to_string(), text);
        }
    }

    #[test]
    fn chain_has_the_failed_deliveries_of_one_event() {
        let mut chain = DeliveryChain::default();
        let first = failed(Vector::UD, Vector::GP, 0x32, None);
        for _ in 0..2 * CHAIN_MAX {
            chain.add(&first);
        }
        assert_eq!(chain.chain().len(), 1);
        for _ in 0..2 * CHAIN_MAX {
            chain.add(&Delivery {
                nested: true,
                ..first
            });
        }
        assert_eq!(chain.chain().len(), CHAIN_MAX);
        chain.add(&Delivery {
            outcome: Ok((0x10, 0)),
            ..first
        });
        assert!(chain.chain().is_empty());
    }
}

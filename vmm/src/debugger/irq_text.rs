//! The interrupt controllers as text.

use std::fmt::Write as _;

use hindsight_devices::irq::ioapic::IoapicState;
use hindsight_devices::irq::lapic::LapicState;

/// How an interrupt is delivered: the lower half of an entry of the local vector table or of the I/O
/// APIC's redirection table. SDM Vol. 3A, "Local Vector Table".
fn delivery(raw: u32) -> String {
    let vector = raw & 0xff;
    let mut text = match raw >> 8 & 7 {
        0 => format!("vector {vector:#04x}"),
        1 => format!("vector {vector:#04x}, lowest priority"),
        2 => "SMI".to_owned(),
        4 => "NMI".to_owned(),
        5 => "INIT".to_owned(),
        7 => "ExtINT".to_owned(),
        reserved => format!("reserved delivery mode {reserved}"),
    };
    for (bit, word) in [
        (16, "masked"),
        (15, "level-triggered"),
        (14, "remote IRR"),
        (13, "active low"),
        (12, "send pending"),
    ] {
        if raw >> bit & 1 != 0 {
            let _ = write!(text, ", {word}");
        }
    }
    text
}

/// The vectors whose bits are set, as text.
fn vectors(bits: &[u32; 8]) -> String {
    let set = (0..256).filter(|&vector| bits[vector / 32] >> (vector % 32) & 1 != 0);
    let names: Vec<String> = set.map(|vector| format!("{vector:#04x}")).collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(" ")
    }
}

/// The state of vCPU `cpu`'s local APIC as text.
pub(super) fn lapic_text(cpu: usize, state: &LapicState) -> String {
    let mode = match state.apic_base >> 10 & 3 {
        0b11 => "x2APIC",
        0b10 => "xAPIC",
        _ => "disabled by IA32_APIC_BASE",
    };
    let enabled = if state.svr >> 8 & 1 != 0 {
        "enabled"
    } else {
        "disabled"
    };
    let mut text = format!(
        "cpu {cpu}: {mode}, base {:#x}, {enabled} by software\n",
        state.apic_base & !0xfff
    );
    let _ = writeln!(
        text,
        "TPR {:#04x}  LDR {:#010x}  DFR {:#010x}  SVR {:#x}  ESR {:#x}  ICR {:#x}",
        state.tpr, state.ldr, state.dfr, state.svr, state.esr, state.icr.0
    );
    let names = ["timer", "thermal", "PMC", "LINT0", "LINT1", "error"];
    for (name, entry) in names.iter().zip(state.lvt.map(|entry| entry.0)) {
        let _ = write!(text, "LVT {name:8} {entry:#07x}  {}", delivery(entry));
        if *name == "timer" {
            let modes = ["one-shot", "periodic", "TSC deadline", "reserved mode"];
            let _ = write!(text, ", {}", modes[(entry >> 17 & 3) as usize]);
        }
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "timer: initial count {}, divided by {}, {}",
        state.initial_count,
        state.divide.divisor(),
        match (state.tsc_deadline, state.zero_at) {
            (0, None) => "stopped".to_owned(),
            (0, Some(_)) => "running".to_owned(),
            (deadline, _) => format!("fires when the TSC is {deadline:#x}"),
        }
    );
    let _ = writeln!(text, "in service (ISR): {}", vectors(&state.isr.0));
    let _ = writeln!(text, "requested (IRR): {}", vectors(&state.irr.0));
    let _ = writeln!(text, "level-triggered (TMR): {}", vectors(&state.tmr.0));
    let pending: Vec<&str> = [
        (state.nmi, "NMI"),
        (state.smi, "SMI"),
        (state.init, "INIT"),
        (state.sipi.is_some(), "start-up IPI"),
        (state.ext_int, "ExtINT"),
    ]
    .into_iter()
    .filter_map(|(pending, name)| pending.then_some(name))
    .collect();
    if !pending.is_empty() {
        let _ = writeln!(text, "pending: {}", pending.join(" "));
    }
    if state.wait_for_sipi {
        text.push_str("waits for a start-up IPI\n");
    }
    text
}

/// The state of the I/O APIC as text.
pub(super) fn ioapic_text(state: &IoapicState) -> String {
    let mut text = format!("ID {}\n", state.id);
    for (pin, entry) in state.entries.map(u64::from).into_iter().enumerate() {
        let mode = if entry >> 11 & 1 != 0 {
            "logical"
        } else {
            "physical"
        };
        let level = if state.levels >> pin & 1 != 0 {
            ", pin high"
        } else {
            ""
        };
        let low = u32::try_from(entry & 0xffff_ffff).unwrap_or(0);
        let _ = writeln!(
            text,
            "pin {pin:2} {entry:#018x}  {}, {mode} destination {:#x}{level}",
            delivery(low),
            entry >> 56
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirection_entry_is_described_in_words() {
        assert_eq!(delivery(0x30), "vector 0x30");
        assert_eq!(delivery(0x1_0000), "vector 0x00, masked");
        assert_eq!(delivery(0x400), "NMI");
        assert_eq!(
            delivery(0xa131),
            "vector 0x31, lowest priority, level-triggered, active low"
        );
    }

    #[test]
    fn set_vectors_are_listed_by_number() {
        let mut bits = [0; 8];
        assert_eq!(vectors(&bits), "none");
        (bits[1], bits[7]) = (1 << 16, 1 << 15);
        assert_eq!(vectors(&bits), "0x30 0xef");
    }
}

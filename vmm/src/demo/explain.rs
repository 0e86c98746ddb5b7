//! Explains outcomes: of MSR accesses by the one table, of exceptions by the vector, the error code
//! and the instruction.

use hindsight_cpu::msr::{KvmRole, MsrConfig, MsrSpec, Owner, find};
use hindsight_regs::msr as regs;
use hindsight_regs::vector::Vector;
use iced_x86::{Code, Instruction};

use crate::demo::log::CaughtException;

/// An access to an MSR, with its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrAccess {
    /// MSR number.
    pub index: u32,
    /// EDX:EAX of a WRMSR; `None` for RDMSR.
    pub written: Option<u64>,
    /// EDX:EAX after RDMSR, 0 after WRMSR; `None` for #GP(0).
    pub answer: Option<u64>,
}

/// The manual's name of an MSR.
pub fn msr_name(index: u32) -> String {
    match find(index) {
        Some(spec) => spec.name.to_owned(),
        // MSRs that the guest accesses and the table lacks.
        None if (0x680..0x6a0).contains(&index) => "LASTBRANCH_FROM_IP".to_owned(),
        None => "unknown".to_owned(),
    }
}

/// Explains the outcome of an access.
pub fn msr(access: &MsrAccess, config: &MsrConfig) -> String {
    let Some(spec) = find(access.index) else {
        return "no such MSR".to_owned();
    };
    if access.answer.is_some() {
        return completed(spec, access.written.is_some());
    }
    if !spec.is_present(access.index, config) {
        return "absent, says CPUID".to_owned();
    }
    let reserved = access.written.map_or(0, |value| {
        value & spec.reserved_bits(access.index, config) & !spec.read_only
    });
    match (spec.owner, reserved) {
        (Owner::Constant | Owner::Smm, _) => "read-only".to_owned(),
        (Owner::Apic, 0) => "local APIC: reserved bit".to_owned(),
        (_, 0) => "refused by its owner".to_owned(),
        (_, bits) => reserved_bits(bits),
    }
}

/// Names the model that completes an access to an MSR.
fn completed(spec: &MsrSpec, write: bool) -> String {
    let owner = match (spec.owner, spec.index) {
        (Owner::Tsc, regs::IA32_TSC_ADJUST) if write => "TSC model; TSC moves too",
        (Owner::Tsc, _) => "TSC model",
        (Owner::Branch, regs::IA32_DEBUGCTL) if write => {
            "branch model; what is observed may change"
        }
        (Owner::Branch, _) => "branch model",
        (Owner::Pmu, _) => "performance monitor",
        (Owner::Apic, _) => "local APIC",
        (Owner::Processor(_), _) => "processor state",
        (Owner::Stored, _) => "stored",
        (Owner::Rdt, _) => "the resource director",
        (Owner::Smm | Owner::Constant, _) => "constant",
        (Owner::Command, _) => "command",
    };
    let also = if write && spec.kvm == KvmRole::Mirrored {
        ", and to KVM"
    } else {
        ""
    };
    format!("{owner}{also}")
}

fn reserved_bits(bits: u64) -> String {
    let list: Vec<_> = (0..64)
        .filter(|n| bits & 1 << n != 0)
        .map(|n: u32| n.to_string())
        .collect();
    match list.as_slice() {
        [one] => format!("bit {one} is reserved"),
        [first, .., last] if list.len() > 4 => format!("bits {first} to {last} are reserved"),
        _ => format!("bits {} are reserved", list.join(", ")),
    }
}

/// The manual's mnemonic of an exception.
pub fn mnemonic(vector: u8) -> String {
    match Vector(vector) {
        Vector::NMI => "NMI".to_owned(),
        vector if vector.mnemonic().is_some() => vector.to_string(),
        _ => "#?".to_owned(),
    }
}

/// Explains an exception.
pub fn exception(caught: &CaughtException, instruction: Option<&Instruction>) -> String {
    match Vector(caught.vector) {
        Vector::DE => "divide error".to_owned(),
        Vector::UD => "invalid opcode".to_owned(),
        Vector::GP => general_protection(caught, instruction).to_owned(),
        Vector::PF => page_fault(caught),
        _ => format!("error code {:#x}", caught.error),
    }
}

/// Explains #GP. In 64-bit mode, a plain load or store raises #GP(0) only for a non-canonical
/// address.
fn general_protection(caught: &CaughtException, instruction: Option<&Instruction>) -> &'static str {
    match instruction.map(Instruction::code) {
        Some(Code::Rdmsr | Code::Wrmsr) if caught.cpl != 0 => "privileged, at ring 3",
        Some(Code::Mov_r8_rm8 | Code::Mov_rm8_r8 | Code::Mov_r64_rm64 | Code::Mov_rm64_r64) => {
            "non-canonical address"
        }
        _ => "general protection",
    }
}

/// Explains #PF by its error code. SDM Vol. 3A, "Page-Fault Exceptions".
fn page_fault(caught: &CaughtException) -> String {
    const PRESENT: u64 = 1;
    const WRITE: u64 = 1 << 1;
    const FETCH: u64 = 1 << 4;
    let access = match caught.error & (WRITE | FETCH) {
        0 => "read",
        WRITE => "write",
        _ => "fetch",
    };
    let page = if caught.error & PRESENT != 0 {
        "forbidden"
    } else {
        "no page"
    };
    format!("{access} at {:#x}: {page}", caught.cr2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::facility::Facilities;

    const CONFIG: MsrConfig = MsrConfig::new(Facilities::KVM, 2_000_000_000).with_uarch(true);

    #[test]
    fn msr_outcomes_are_explained_by_the_table() {
        let rows = [
            (0x560, None, None, "no such MSR"),
            (0x680, None, None, "absent, says CPUID"),
            (0x345, None, None, "absent, says CPUID"),
            (0xce, Some(1), None, "read-only"),
            (0x1d9, Some(1 << 2), None, "bit 2 is reserved"),
            (0xc000_0084, Some(3 << 33), None, "bits 33, 34 are reserved"),
            (0x1b, Some(1), None, "local APIC: reserved bit"),
            (0x1b, Some(0xfee0_0900), Some(0), "local APIC, and to KVM"),
            (0x3b, None, Some(0), "TSC model"),
            (0x3b, Some(1), Some(0), "TSC model; TSC moves too"),
        ];
        for (index, written, answer, expected) in rows {
            let access = MsrAccess {
                index,
                written,
                answer,
            };
            assert_eq!(msr(&access, &CONFIG), expected, "{access:x?}");
        }
    }

    #[test]
    fn page_fault_is_explained_by_access_and_cause() {
        let caught = |error| CaughtException {
            vector: 14,
            error,
            rip: 0,
            cpl: 3,
            cr2: 0x1000,
        };
        assert_eq!(exception(&caught(4), None), "read at 0x1000: no page");
        assert_eq!(exception(&caught(7), None), "write at 0x1000: forbidden");
        assert_eq!(exception(&caught(0x14), None), "fetch at 0x1000: no page");
    }
}

//! Guests that are hostile or faulty: the VMM neither panics nor hangs, and reports how they ended.
//! They run in the interpreter, and where KVM can be used, there too.

mod devices;
mod faults;
mod interrupts;
mod virtio;

use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::guest::wrmsr;

/// The end of an interrupt handler in x2APIC mode: EOI and IRETQ. It preserves all registers.
fn end_of_interrupt(a: &mut CodeAssembler) -> Result<(), IcedError> {
    for register in [rax, rcx, rdx] {
        a.push(register)?;
    }
    wrmsr(a, 0x80b, 0)?;
    for register in [rdx, rcx, rax] {
        a.pop(register)?;
    }
    a.iretq()
}

/// Enables the local APIC in x2APIC mode.
fn enable_apic(a: &mut CodeAssembler) -> Result<(), IcedError> {
    wrmsr(a, 0x1b, 0xfee0_0d00)?;
    wrmsr(a, 0x80f, 0x1ff)
}

fn assert_exit(outcome: &Outcome, code: u32) {
    assert!(
        matches!(outcome, Outcome::Exit(found) if *found == code),
        "{outcome:?}"
    );
}

//! An x87 error with CR0.NE clear, from FERR# to IRQ 13 and back.

use std::time::Duration;

use hindsight_cpu::profile::CpuProfile;
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use crate::guest::{COUNTERS, exit, machine_with_model, with_idt};

/// Both 8259As with their vectors from 20H on; only IRQ 2 and IRQ 13 are enabled.
fn program_pics(a: &mut CodeAssembler) -> Result<(), iced_x86::IcedError> {
    let master = [
        (0x20, 0x11),
        (0x21, 0x20),
        (0x21, 4),
        (0x21, 1),
        (0x21, 0xfb),
    ];
    let slave = [
        (0xa0, 0x11),
        (0xa1, 0x28),
        (0xa1, 2),
        (0xa1, 1),
        (0xa1, 0xdf),
    ];
    for (port, value) in master.into_iter().chain(slave) {
        a.mov(eax, value)?;
        a.out(port, al)?;
    }
    Ok(())
}

#[test]
fn x87_error_arrives_as_irq_13() {
    const CONTROL: u64 = COUNTERS + 0x100;
    let image = with_idt(
        |a| {
            // The handler ends the request, counts, clears the error, and ends the interrupt.
            a.push(rax)?;
            a.xor(eax, eax)?;
            a.out(0xf0, al)?;
            a.inc(qword_ptr(COUNTERS))?;
            a.fnclex()?;
            a.mov(eax, 0x20)?;
            a.out(0xa0, al)?;
            a.out(0x20, al)?;
            a.pop(rax)?;
            a.iretq()
        },
        |a| {
            program_pics(a)?;
            a.mov(rax, cr0)?;
            a.and(rax, !0x20)?;
            a.mov(cr0, rax)?;
            a.sti()?;
            a.fninit()?;
            a.mov(word_ptr(CONTROL), 0x37b)?;
            a.fldcw(word_ptr(CONTROL))?;
            for _ in 0..3 {
                a.fld1()?;
                a.fldz()?;
                a.fdivp(st1, st0)?;
                a.wait()?;
            }
            a.cli()?;
            a.mov(rax, qword_ptr(COUNTERS))?;
            a.out(0xf4, eax)?;
            exit(a, 0x78)
        },
    );
    let machine = machine_with_model(CpuProfile::default(), &image, EntryMode::Long);
    let outcome = machine.run(Some(Duration::from_secs(10)), || {}).unwrap();
    assert!(matches!(outcome, Outcome::Exit(3)), "{outcome:?}");
}

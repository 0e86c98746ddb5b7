//! Guests with interrupts at the highest rate, or where they must not be delivered.

use std::time::{Duration, Instant};

use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use super::super::guest::{EXIT, engines, exit, long, run, run_on, with_idt, wrmsr};
use super::{assert_exit, enable_apic, end_of_interrupt};

/// The machine ends at its time limit, and not much later.
fn assert_times_out(image: &[u8]) {
    let start = Instant::now();
    let outcome = run(image, 0.3);
    assert!(matches!(outcome, Outcome::Timeout(_)), "{outcome:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn timer_of_one_tick_neither_hangs_nor_ends_the_machine() {
    for (halts, masked) in [(false, false), (true, false), (false, true)] {
        assert_times_out(&with_idt(end_of_interrupt, |a| {
            let mut again = a.create_label();
            enable_apic(a)?;
            wrmsr(a, 0x83e, 0b1011)?;
            wrmsr(a, 0x832, 0x2_0040 | u64::from(masked) << 16)?;
            wrmsr(a, 0x838, 1)?;
            a.sti()?;
            a.set_label(&mut again)?;
            if halts {
                a.hlt()?;
            }
            a.jmp(again)
        }));
    }
}

#[test]
fn interrupt_storms_neither_hang_nor_end_the_machine() {
    // Self-IPIs.
    assert_times_out(&with_idt(end_of_interrupt, |a| {
        let mut again = a.create_label();
        enable_apic(a)?;
        a.sti()?;
        a.set_label(&mut again)?;
        wrmsr(a, 0x83f, 0x40)?;
        a.jmp(again)
    }));
    // All ISA lines, through an 8259 pair in automatic EOI mode.
    assert_times_out(&with_idt(end_of_interrupt, |a| {
        let mut again = a.create_label();
        enable_apic(a)?;
        for (port, value) in [
            (0x20, 0x11_u32),
            (0x21, 0x20),
            (0x21, 4),
            (0x21, 3),
            (0x21, 0),
            (0xa0, 0x11),
            (0xa1, 0x28),
            (0xa1, 2),
            (0xa1, 3),
            (0xa1, 0),
        ] {
            a.mov(eax, value)?;
            a.out(port, al)?;
        }
        a.sti()?;
        a.set_label(&mut again)?;
        for line in 0..24 {
            a.mov(edx, 0x2000 + line)?;
            a.mov(eax, 1)?;
            a.out(dx, al)?;
            a.xor(eax, eax)?;
            a.out(dx, al)?;
        }
        a.jmp(again)
    }));
}

/// A timer interrupt may become pending while an instruction faults. The fault's handler runs with
/// IF clear, so the interrupt must wait.
#[test]
fn interrupts_are_never_delivered_with_if_clear() {
    const FAULTS: u32 = 3000;
    let image = with_idt(
        |a| {
            let mut allowed = a.create_label();
            a.test(dword_ptr(rsp + 16), 1 << 9)?;
            a.jnz(allowed)?;
            a.mov(eax, 0x11)?;
            a.out(EXIT, eax)?;
            a.set_label(&mut allowed)?;
            a.inc(r8)?;
            end_of_interrupt(a)
        },
        |a| {
            let mut again = a.create_label();
            enable_apic(a)?;
            // A periodic timer of 40 us.
            wrmsr(a, 0x83e, 0b1011)?;
            wrmsr(a, 0x832, 0x2_0040)?;
            wrmsr(a, 0x838, 1000)?;
            a.xor(r8d, r8d)?;
            a.mov(ebx, FAULTS)?;
            a.sti()?;
            a.set_label(&mut again)?;
            // This MSR does not exist: RDMSR faults.
            a.mov(ecx, 0x7fff_ffff)?;
            a.rdmsr()?;
            a.sub(ebx, 1)?;
            a.jns(again)?;
            // Without interrupts the test would prove nothing.
            a.cmp(r8, 10)?;
            a.jb(again)?;
            exit(a, 0)
        },
    );
    for _ in 0..5 {
        assert_exit(&run(&image, 30.0), 0);
    }
}

#[test]
fn init_restarts_the_bootstrap_processor_at_the_reset_vector() {
    let image = long(|a| {
        let mut again = a.create_label();
        enable_apic(a)?;
        // INIT to vCPU 0.
        wrmsr(a, 0x830, 0x4500)?;
        a.set_label(&mut again)?;
        a.jmp(again)
    });
    for engine in engines() {
        let outcome = run_on(engine, &image, 0.5);
        // There is no firmware at the reset vector: reads give all ones, or KVM cannot read it.
        let expected = matches!(outcome, Outcome::Crash(_) | Outcome::Timeout(_));
        assert!(expected, "{engine:?}: {outcome:?}");
    }
}

//! Guests that access every port, device register and MSR.

use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::super::guest::{exit, long, run, with_idt};
use super::{assert_exit, enable_apic, end_of_interrupt};

/// A guest that executes `access` for every port except for those that end the run.
fn guest_for_every_port(
    width: u32,
    access: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    // The i8042 command port, port 0x92, debug exit, reset control, ACPI power management.
    let ending = [
        (0x64, 0x64),
        (0x92, 0x92),
        (0xf4, 0xf7),
        (0xcf9, 0xcf9),
        (0x600, 0x60f),
    ];
    long(|a| {
        let (mut next, mut skip) = (a.create_label(), a.create_label());
        a.xor(ebx, ebx)?;
        a.set_label(&mut next)?;
        for (first, last) in ending {
            let mut allowed = a.create_label();
            a.cmp(ebx, first - (width - 1))?;
            a.jb(allowed)?;
            a.cmp(ebx, last)?;
            a.jbe(skip)?;
            a.set_label(&mut allowed)?;
        }
        a.mov(edx, ebx)?;
        access(a)?;
        a.set_label(&mut skip)?;
        a.inc(ebx)?;
        a.cmp(ebx, 0x1_0000 - (width - 1))?;
        a.jb(next)?;
        exit(a, 0x2a)
    })
}

#[test]
fn every_port_can_be_written() {
    for (width, value) in [
        (1, 0xffff_ffff_u32),
        (1, 0),
        (2, 0xa55a_c33c),
        (4, 0xffff_ffff),
    ] {
        let image = guest_for_every_port(width, |a| {
            a.mov(eax, value)?;
            match width {
                1 => a.out(dx, al),
                2 => a.out(dx, ax),
                _ => a.out(dx, eax),
            }
        });
        assert_exit(&run(&image, 60.0), 0x2a);
    }
}

#[test]
fn every_port_can_be_read() {
    for width in [1, 2, 4] {
        let image = guest_for_every_port(width, |a| match width {
            1 => a.in_(al, dx),
            2 => a.in_(ax, dx),
            _ => a.in_(eax, dx),
        });
        assert_exit(&run(&image, 60.0), 0x2a);
    }
}

#[test]
fn reset_ports_end_the_run_with_a_reset() {
    for (port, value) in [(0x64, 0xfe_u32), (0x92, 1), (0xcf9, 6)] {
        let image = long(|a| {
            a.mov(edx, port)?;
            a.mov(eax, value)?;
            a.out(dx, al)?;
            exit(a, 1)
        });
        let outcome = run(&image, 10.0);
        assert!(matches!(outcome, Outcome::Reset), "{port:#x}: {outcome:?}");
    }
}

#[test]
fn device_memory_can_be_accessed_in_all_sizes() {
    for value in [0_u64, u64::MAX, 0x5a5a_5a5a_5a5a_5a5a] {
        // A stride that reaches many pages at many offsets; then each byte of the I/O APIC's
        // registers, and of the local APIC's first 1 KiB.
        for (first, last, step) in [
            (0xc000_0000_u64, 0xffff_fff0_u64, 0x10_1007_u32),
            (0xfec0_0000, 0xfec0_0040, 1),
            (0xfee0_0000, 0xfee0_0400, 1),
        ] {
            let image = long(|a| {
                let mut next = a.create_label();
                a.mov(rbx, first)?;
                a.mov(rsi, last)?;
                a.mov(rdx, value)?;
                a.set_label(&mut next)?;
                a.mov(byte_ptr(rbx), dl)?;
                a.mov(word_ptr(rbx), dx)?;
                a.mov(dword_ptr(rbx), edx)?;
                a.mov(qword_ptr(rbx), rdx)?;
                a.mov(al, byte_ptr(rbx))?;
                a.mov(ax, word_ptr(rbx))?;
                a.mov(eax, dword_ptr(rbx))?;
                a.mov(rax, qword_ptr(rbx))?;
                a.add(rbx, i32::try_from(step).unwrap())?;
                a.cmp(rbx, rsi)?;
                a.jb(next)?;
                exit(a, 0x2a)
            });
            assert_exit(&run(&image, 60.0), 0x2a);
        }
    }
}

#[test]
fn every_msr_of_the_apic_can_be_read_and_written() {
    for value in [0_u64, u64::MAX, 0xff, 0x0000_00ff_0000_00fe] {
        let image = with_idt(end_of_interrupt, |a| {
            let (mut next, mut skip) = (a.create_label(), a.create_label());
            enable_apic(a)?;
            a.mov(ebx, 0x800)?;
            a.set_label(&mut next)?;
            a.mov(ecx, ebx)?;
            a.rdmsr()?;
            // A write to the ICR sends an IPI, some with an illegal vector.
            a.mov(eax, u32::try_from(value & 0xffff_ffff).unwrap())?;
            a.mov(edx, u32::try_from(value >> 32).unwrap())?;
            a.wrmsr()?;
            a.set_label(&mut skip)?;
            a.inc(ebx)?;
            a.cmp(ebx, 0x900)?;
            a.jb(next)?;
            exit(a, 0x2a)
        });
        assert_exit(&run(&image, 60.0), 0x2a);
    }
}

#[test]
fn every_msr_in_the_architectural_ranges_can_be_read_and_written() {
    for (first, last) in [(0_u32, 0x7ff_u32), (0xc000_0000, 0xc000_0200)] {
        let image = with_idt(end_of_interrupt, |a| {
            let mut next = a.create_label();
            a.mov(ebx, first)?;
            a.set_label(&mut next)?;
            a.mov(ecx, ebx)?;
            a.rdmsr()?;
            // Write the value that was read, so that 64-bit mode stays on.
            a.wrmsr()?;
            a.inc(ebx)?;
            a.cmp(ebx, last)?;
            a.jb(next)?;
            exit(a, 0x2a)
        });
        assert_exit(&run(&image, 60.0), 0x2a);
    }
}

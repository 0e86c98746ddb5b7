//! Guests that mean harm or know no better: whatever they do, the monitor neither panics nor hangs,
//! and says how they ended.

use std::time::{Duration, Instant};

use super::guest::{
    EXIT, LONG, MEMORY, REAL, assemble, exit, has_kvm, long, machine, machine_on, run, run_on,
    with_idt, wrmsr,
};
use hindsight_cpu::state::Activity;
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::crash::CrashCause;
use hindsight_vmm::vcpu::engine::policy::Engine;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// End of interrupt in x2APIC mode, keeping all registers.
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

/// x2APIC mode, software-enabled.
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

/// The machine ends at its limit, and not much later.
fn assert_times_out(image: &[u8]) {
    let start = Instant::now();
    let outcome = run(image, 0.3);
    assert!(matches!(outcome, Outcome::Timeout(_)), "{outcome:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn triple_fault_ends_with_the_state_before_it() {
    if !has_kvm("triple_fault_ends_with_the_state_before_it") {
        return;
    }
    let image = long(|a| {
        a.mov(rax, 0x1234_5678_u64)?;
        a.ud2()
    });
    let outcome = run(&image, 10.0);
    let Outcome::Crash(crash) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(*crash.cause(), CrashCause::TripleFault);
    assert_eq!(crash.state().gpr[0], 0x1234_5678);
    assert!(crash.to_string().contains("ud2"), "{crash}");
}

#[test]
fn guest_halted_for_good_waits_for_the_limit() {
    if !has_kvm("guest_halted_for_good_waits_for_the_limit") {
        return;
    }
    let image = long(|a| {
        a.cli()?;
        a.hlt()
    });
    let outcome = run(&image, 0.2);
    let Outcome::Timeout(last) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(last.len(), 1);
    assert_eq!(last[0].state().activity, Activity::Halted);
    assert_eq!(last[0].state().rip, LONG + 2);
}

/// A loop over all ports but those that end the run: for each, `access`.
fn every_port(width: u32, access: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    // i8042 command, port 0x92, debug exit, reset control, ACPI power management.
    let ends = [
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
        for (first, last) in ends {
            let mut fine = a.create_label();
            a.cmp(ebx, first - (width - 1))?;
            a.jb(fine)?;
            a.cmp(ebx, last)?;
            a.jbe(skip)?;
            a.set_label(&mut fine)?;
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
    if !has_kvm("every_port_can_be_written") {
        return;
    }
    for (width, value) in [
        (1, 0xffff_ffff_u32),
        (1, 0),
        (2, 0xa55a_c33c),
        (4, 0xffff_ffff),
    ] {
        let image = every_port(width, |a| {
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
    if !has_kvm("every_port_can_be_read") {
        return;
    }
    for width in [1, 2, 4] {
        let image = every_port(width, |a| match width {
            1 => a.in_(al, dx),
            2 => a.in_(ax, dx),
            _ => a.in_(eax, dx),
        });
        assert_exit(&run(&image, 60.0), 0x2a);
    }
}

#[test]
fn ports_that_end_the_run_say_how() {
    if !has_kvm("ports_that_end_the_run_say_how") {
        return;
    }
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
fn device_space_can_be_read_and_written_in_all_sizes() {
    if !has_kvm("device_space_can_be_read_and_written_in_all_sizes") {
        return;
    }
    for value in [0_u64, u64::MAX, 0x5a5a_5a5a_5a5a_5a5a] {
        // Steps that hit many pages, at many offsets; then each byte of the APICs' first 1 KiB.
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
    if !has_kvm("every_msr_of_the_apic_can_be_read_and_written") {
        return;
    }
    for value in [0_u64, u64::MAX, 0xff, 0x0000_00ff_0000_00fe] {
        let image = with_idt(end_of_interrupt, |a| {
            let (mut next, mut skip) = (a.create_label(), a.create_label());
            enable_apic(a)?;
            a.mov(ebx, 0x800)?;
            a.set_label(&mut next)?;
            a.mov(ecx, ebx)?;
            a.rdmsr()?;
            // ICR: 0 and such are IPIs with impossible vectors, which is fine.
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
    if !has_kvm("every_msr_in_the_architectural_ranges_can_be_read_and_written") {
        return;
    }
    for (first, last) in [(0_u32, 0x7ff_u32), (0xc000_0000, 0xc000_0200)] {
        let image = with_idt(end_of_interrupt, |a| {
            let mut next = a.create_label();
            a.mov(ebx, first)?;
            a.set_label(&mut next)?;
            a.mov(ecx, ebx)?;
            a.rdmsr()?;
            // What was read, so that 64-bit mode stays on.
            a.wrmsr()?;
            a.inc(ebx)?;
            a.cmp(ebx, last)?;
            a.jb(next)?;
            exit(a, 0x2a)
        });
        assert_exit(&run(&image, 60.0), 0x2a);
    }
}

#[test]
fn timer_of_one_tick_neither_hangs_nor_ends_the_machine() {
    if !has_kvm("timer_of_one_tick_neither_hangs_nor_ends_the_machine") {
        return;
    }
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
fn storms_of_interrupts_neither_hang_nor_end_the_machine() {
    if !has_kvm("storms_of_interrupts_neither_hang_nor_end_the_machine") {
        return;
    }
    // IPIs to itself.
    assert_times_out(&with_idt(end_of_interrupt, |a| {
        let mut again = a.create_label();
        enable_apic(a)?;
        a.sti()?;
        a.set_label(&mut again)?;
        wrmsr(a, 0x83f, 0x40)?;
        a.jmp(again)
    }));
    // All ISA lines, through an 8259 pair that ends interrupts by itself.
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

/// An interrupt that becomes due while an instruction is half done, which then faults, must not be
/// taken where the fault's handler has interrupts off.
#[test]
fn interrupts_never_come_where_they_are_off() {
    const ROUNDS: u32 = 3000;
    if !has_kvm("interrupts_never_come_where_they_are_off") {
        return;
    }
    let image = with_idt(
        |a| {
            let mut fine = a.create_label();
            a.test(dword_ptr(rsp + 16), 1 << 9)?;
            a.jnz(fine)?;
            a.mov(eax, 0x11)?;
            a.out(EXIT, eax)?;
            a.set_label(&mut fine)?;
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
            a.mov(ebx, ROUNDS)?;
            a.sti()?;
            a.set_label(&mut again)?;
            // No such MSR.
            a.mov(ecx, 0x7fff_ffff)?;
            a.rdmsr()?;
            a.sub(ebx, 1)?;
            a.jns(again)?;
            // Some must have come, or this shows nothing.
            a.cmp(r8, 10)?;
            a.jb(again)?;
            exit(a, 0)
        },
    );
    for _ in 0..5 {
        assert_exit(&run(&image, 30.0), 0);
    }
}

/// Numbers that look random and are the same at each run (xorshift64).
fn noise(seed: u64) -> impl Iterator<Item = u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state.to_le_bytes()[3])
    })
}

#[test]
fn garbage_as_code_ends_in_a_guests_ways_only() {
    if !has_kvm("garbage_as_code_ends_in_a_guests_ways_only") {
        return;
    }
    let limit = Some(Duration::from_millis(20));
    let engines = [Engine::Kvm, Engine::Interp];
    let modes = [EntryMode::Real, EntryMode::Protected, EntryMode::Long];
    for (engine, mode) in engines.into_iter().flat_map(|e| modes.map(|m| (e, m))) {
        for seed in 0..80 {
            let name = format!("{engine:?} {mode:?} {seed}");
            let image: Vec<u8> = noise(seed).take(0x1000).collect();
            let start = Instant::now();
            let machine = machine_on(engine, &image, mode, 1);
            let outcome = machine.run(limit, || {}).unwrap();
            assert!(
                !matches!(outcome, Outcome::Failed(_)),
                "{name}: {outcome:?}"
            );
            assert!(start.elapsed() < Duration::from_secs(5), "{name}");
            if let Outcome::Crash(crash) = outcome {
                assert!(crash.to_string().starts_with("cpu 0: "), "{crash}");
            }
        }
    }
}

/// Garbage behind code that turns on all that the processor has to go wrong with.
#[test]
fn garbage_in_descriptor_and_page_tables_ends_in_a_guests_ways_only() {
    if !has_kvm("garbage_in_descriptor_and_page_tables_ends_in_a_guests_ways_only") {
        return;
    }
    for seed in 0..40 {
        let mut image = long(|a| {
            a.mov(rax, LONG + 0x200)?;
            a.lidt(ptr(rax))?;
            a.lgdt(ptr(rax + 16))?;
            a.mov(rbx, MEMORY - 0x1000 * (seed + 1))?;
            if seed % 2 == 0 {
                a.mov(cr3, rbx)?;
            }
            a.mov(eax, 0x18)?;
            a.mov(ds, ax)?;
            a.mov(ss, ax)?;
            a.int3()?;
            a.jmp(rbx)
        });
        image.resize(0x200, 0x90);
        image.extend(noise(seed).take(0x1000));
        let limit = Some(Duration::from_millis(20));
        for engine in [Engine::Kvm, Engine::Interp] {
            let machine = machine_on(engine, &image, EntryMode::Long, 1);
            let outcome = machine.run(limit, || {}).unwrap();
            assert!(
                !matches!(outcome, Outcome::Failed(_)),
                "{seed}: {outcome:?}"
            );
        }
    }
}

#[test]
fn init_of_the_boot_processor_ends_at_the_reset_vector() {
    if !has_kvm("init_of_the_boot_processor_ends_at_the_reset_vector") {
        return;
    }
    let image = long(|a| {
        let mut again = a.create_label();
        enable_apic(a)?;
        // INIT to processor 0.
        wrmsr(a, 0x830, 0x4500)?;
        a.set_label(&mut again)?;
        a.jmp(again)
    });
    for engine in [Engine::Kvm, Engine::Interp] {
        let outcome = run_on(engine, &image, 0.5);
        // All ones, or nothing at all, is what is there.
        let expected = matches!(outcome, Outcome::Crash(_) | Outcome::Timeout(_));
        assert!(expected, "{engine:?}: {outcome:?}");
    }
}

#[test]
fn real_mode_code_can_leave_through_the_debug_exit_port() {
    if !has_kvm("real_mode_code_can_leave_through_the_debug_exit_port") {
        return;
    }
    let image = assemble(16, REAL, |a| exit(a, 9));
    let outcome = machine(&image, EntryMode::Real, 1);
    let outcome = outcome.run(Some(Duration::from_secs(10)), || {}).unwrap();
    assert_exit(&outcome, 9);
}

//! Guests that triple-fault, halt, or execute garbage.

use std::time::{Duration, Instant};

use hindsight_cpu::state::Activity;
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::crash::CrashCause;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use super::super::guest::{LONG, MEMORY, REAL, assemble, engines, exit, long, machine_on, run};
use super::assert_exit;

#[test]
fn crash_report_of_a_triple_fault_has_the_state_before_it() {
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
fn guest_halted_with_if_clear_runs_until_the_time_limit() {
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

/// Pseudorandom bytes, the same in each run (xorshift64).
fn pseudorandom_bytes(seed: u64) -> impl Iterator<Item = u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state.to_le_bytes()[3])
    })
}

#[test]
fn garbage_code_never_makes_the_vmm_fail() {
    let limit = Some(Duration::from_millis(20));
    let modes = [EntryMode::Real, EntryMode::Protected, EntryMode::Long];
    for (engine, mode) in engines().into_iter().flat_map(|e| modes.map(|m| (e, m))) {
        for seed in 0..80 {
            let name = format!("{engine:?} {mode:?} {seed}");
            let image: Vec<u8> = pseudorandom_bytes(seed).take(0x1000).collect();
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

/// The guest loads garbage as IDT, GDT and page tables, and executes garbage.
#[test]
fn garbage_in_descriptor_and_page_tables_never_makes_the_vmm_fail() {
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
        image.extend(pseudorandom_bytes(seed).take(0x1000));
        let limit = Some(Duration::from_millis(20));
        for engine in engines() {
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
fn real_mode_code_can_exit_through_the_debug_exit_port() {
    let image = assemble(16, REAL, |a| exit(a, 9));
    for engine in engines() {
        let machine = machine_on(engine, &image, EntryMode::Real, 1);
        let outcome = machine.run(Some(Duration::from_secs(10)), || {}).unwrap();
        assert_exit(&outcome, 9);
    }
}

//! Pause, resume, stop and kick, from other threads while guests run.

use std::thread;
use std::time::{Duration, Instant};

use super::guest::{COUNTERS, Running, assemble, exit, has_kvm, long, machine, wrmsr};
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::engine::policy::Engine;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

/// Counts in memory for ever, with no exit.
fn counting() -> Vec<u8> {
    long(|a| {
        let mut again = a.create_label();
        a.mov(rbx, COUNTERS)?;
        a.set_label(&mut again)?;
        a.inc(qword_ptr(rbx))?;
        a.jmp(again)
    })
}

fn halted() -> Vec<u8> {
    long(|a| {
        let mut again = a.create_label();
        a.mov(rbx, COUNTERS)?;
        a.mov(dword_ptr(rbx), 1)?;
        a.cli()?;
        a.set_label(&mut again)?;
        a.hlt()?;
        a.jmp(again)
    })
}

#[test]
fn paused_guest_stands_still_and_goes_on_a_thousand_times() {
    if !has_kvm("paused_guest_stands_still_and_goes_on_a_thousand_times") {
        return;
    }
    for engine in [Engine::Kvm, Engine::Interp] {
        let guest = Running::start(engine, &counting(), 1);
        guest.wait_for(COUNTERS, 1);
        for _ in 0..1000 {
            assert!(guest.board.pause());
            let before = guest.word(COUNTERS);
            thread::yield_now();
            assert_eq!(guest.word(COUNTERS), before);
            guest.board.resume();
        }
        guest.wait_for(COUNTERS, guest.word(COUNTERS) + 1);
        guest.board.run.finish(Outcome::Quit);
        assert!(matches!(guest.end(), Outcome::Quit));
    }
}

#[test]
fn halted_guest_pauses_and_resumes_at_once() {
    if !has_kvm("halted_guest_pauses_and_resumes_at_once") {
        return;
    }
    for engine in [Engine::Kvm, Engine::Interp] {
        let guest = Running::start(engine, &halted(), 2);
        guest.wait_for(COUNTERS, 1);
        let start = Instant::now();
        for _ in 0..1000 {
            assert!(guest.board.pause());
            guest.board.resume();
        }
        assert!(start.elapsed() < Duration::from_secs(20));
        guest.board.run.finish(Outcome::Quit);
        assert!(matches!(guest.end(), Outcome::Quit));
    }
}

#[test]
fn guest_makes_progress_while_it_is_kicked() {
    if !has_kvm("guest_makes_progress_while_it_is_kicked") {
        return;
    }
    for engine in [Engine::Kvm, Engine::Interp] {
        let guest = Running::start(engine, &counting(), 1);
        guest.wait_for(COUNTERS, 1);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        guest.board.run.vcpus.doorbell(0).ring();
                    }
                });
            }
        });
        guest.wait_for(COUNTERS, guest.word(COUNTERS) + 1000);
        assert!(guest.board.pause());
        guest.board.run.vcpus.stop();
        guest.board.run.finish(Outcome::Quit);
        assert!(matches!(guest.end(), Outcome::Quit));
    }
}

#[test]
fn paused_machine_can_be_stopped() {
    if !has_kvm("paused_machine_can_be_stopped") {
        return;
    }
    for engine in [Engine::Kvm, Engine::Interp] {
        let guest = Running::start(engine, &counting(), 2);
        guest.wait_for(COUNTERS, 1);
        assert!(guest.board.pause());
        guest.board.run.finish(Outcome::Quit);
        assert!(matches!(guest.end(), Outcome::Quit));
    }
}

/// A ring that nobody heard must not make all later ones silent.
#[test]
fn machine_rung_before_its_threads_start_still_stops() {
    if !has_kvm("machine_rung_before_its_threads_start_still_stops") {
        return;
    }
    let machine = machine(&counting(), EntryMode::Long, 1);
    machine.board().run.vcpus.doorbell(0).ring();
    let (done, ended) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let _ = done.send(machine.run(Some(Duration::from_millis(300)), || {}));
    });
    let outcome = ended.recv_timeout(Duration::from_secs(20));
    assert!(matches!(outcome, Ok(Ok(Outcome::Timeout(_)))), "it hangs");
}

#[test]
fn paused_time_stands_still_for_the_guests_timers() {
    if !has_kvm("paused_time_stands_still_for_the_guests_timers") {
        return;
    }
    let guest = Running::start(Engine::Kvm, &halted(), 1);
    guest.wait_for(COUNTERS, 1);
    assert!(guest.board.pause());
    let before = guest.board.time.clock.now();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.board.time.clock.now(), before);
    guest.board.resume();
    thread::sleep(Duration::from_millis(1));
    let passed = guest
        .board
        .time
        .clock
        .ns_from_ticks(guest.board.time.clock.now() - before);
    assert!((1_000_000..5_000_000_000).contains(&passed), "{passed} ns");
    guest.board.run.finish(Outcome::Quit);
    let _ = guest.end();
}

/// INIT and SIPI to all; each application processor counts up in real mode.
#[test]
fn sixty_four_processors_start() {
    const CPUS: u32 = 64;
    const ENTRY: u64 = 0x8000;
    const COUNT: u64 = 0x9000;
    if !has_kvm("sixty_four_processors_start") {
        return;
    }
    let start = assemble(16, 0, |a| {
        let mut sleep = a.create_label();
        a.xor(ax, ax)?;
        a.mov(ds, ax)?;
        a.lock().inc(dword_ptr(COUNT))?;
        a.set_label(&mut sleep)?;
        a.hlt()?;
        a.jmp(sleep)
    });
    let image = long(|a| {
        let mut again = a.create_label();
        for (at, &byte) in (ENTRY..).zip(&start) {
            a.mov(rdi, at)?;
            a.mov(byte_ptr(rdi), u32::from(byte))?;
        }
        // x2APIC mode; then INIT and SIPI to all but ourselves.
        wrmsr(a, 0x1b, 0xfee0_0d00)?;
        wrmsr(a, 0x830, 0xc_4500)?;
        wrmsr(a, 0x830, 0xc_4600 | ENTRY >> 12)?;
        a.mov(rdi, COUNT)?;
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(dword_ptr(rdi), CPUS - 1)?;
        a.jne(again)?;
        exit(a, 0)
    });
    let machine = machine(&image, EntryMode::Long, CPUS as usize);
    let outcome = machine.run(Some(Duration::from_secs(30)), || {}).unwrap();
    assert!(matches!(outcome, Outcome::Exit(0)), "{outcome:?}");
}

/// INIT reaches processors that run and that halt, again and again.
#[test]
fn running_and_halted_processors_take_init() {
    const ENTRY: u64 = 0x8000;
    const COUNT: u64 = 0x9000;
    const ROUNDS: u32 = 50;
    if !has_kvm("running_and_halted_processors_take_init") {
        return;
    }
    // Processor 1 spins, processor 2 halts.
    let start = assemble(16, 0, |a| {
        let (mut spin, mut sleep) = (a.create_label(), a.create_label());
        a.xor(ax, ax)?;
        a.mov(ds, ax)?;
        a.mov(eax, 1)?;
        a.lock().xadd(dword_ptr(COUNT), eax)?;
        a.test(eax, 1)?;
        a.jz(sleep)?;
        a.set_label(&mut spin)?;
        a.jmp(spin)?;
        a.set_label(&mut sleep)?;
        a.cli()?;
        a.hlt()?;
        a.jmp(sleep)
    });
    let image = long(|a| {
        let (mut round, mut wait) = (a.create_label(), a.create_label());
        for (at, &byte) in (ENTRY..).zip(&start) {
            a.mov(rdi, at)?;
            a.mov(byte_ptr(rdi), u32::from(byte))?;
        }
        a.mov(rdi, COUNT)?;
        a.xor(esi, esi)?;
        wrmsr(a, 0x1b, 0xfee0_0d00)?;
        a.set_label(&mut round)?;
        wrmsr(a, 0x830, 0xc_4500)?;
        wrmsr(a, 0x830, 0xc_4600 | ENTRY >> 12)?;
        a.add(esi, 2)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(rdi), esi)?;
        a.jne(wait)?;
        a.cmp(esi, 2 * ROUNDS)?;
        a.jb(round)?;
        exit(a, 0)
    });
    let machine = machine(&image, EntryMode::Long, 3);
    let outcome = machine.run(Some(Duration::from_secs(30)), || {}).unwrap();
    assert!(matches!(outcome, Outcome::Exit(0)), "{outcome:?}");
}

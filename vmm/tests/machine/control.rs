//! Other threads pause, resume, stop and kick a machine while its guest runs.

use std::thread;
use std::time::{Duration, Instant};

use super::guest::{COUNTERS, RunningGuest, assemble, exit, has_kvm, long, machine, wrmsr};
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::engine::policy::Engine;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

/// Increments a counter in memory for ever, without an exit.
fn counting_guest() -> Vec<u8> {
    long(|a| {
        let mut again = a.create_label();
        a.mov(rbx, COUNTERS)?;
        a.set_label(&mut again)?;
        a.inc(qword_ptr(rbx))?;
        a.jmp(again)
    })
}

/// Halts with interrupts off.
fn halted_guest() -> Vec<u8> {
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
fn guest_can_be_paused_and_resumed_a_thousand_times() {
    if !has_kvm("guest_can_be_paused_and_resumed_a_thousand_times") {
        return;
    }
    for engine in [Engine::Kvm, Engine::Interp] {
        let guest = RunningGuest::start(engine, &counting_guest(), 1);
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
fn halted_guest_is_paused_and_resumed_at_once() {
    if !has_kvm("halted_guest_is_paused_and_resumed_at_once") {
        return;
    }
    for engine in [Engine::Kvm, Engine::Interp] {
        let guest = RunningGuest::start(engine, &halted_guest(), 2);
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
        let guest = RunningGuest::start(engine, &counting_guest(), 1);
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
        let guest = RunningGuest::start(engine, &counting_guest(), 2);
        guest.wait_for(COUNTERS, 1);
        assert!(guest.board.pause());
        guest.board.run.finish(Outcome::Quit);
        assert!(matches!(guest.end(), Outcome::Quit));
    }
}

/// A doorbell that rings before its vCPU's thread exists must still work later.
#[test]
fn doorbell_works_after_a_ring_before_the_threads_start() {
    if !has_kvm("doorbell_works_after_a_ring_before_the_threads_start") {
        return;
    }
    let machine = machine(&counting_guest(), EntryMode::Long, 1);
    machine.board().run.vcpus.doorbell(0).ring();
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let _ = sender.send(machine.run(Some(Duration::from_millis(300)), || {}));
    });
    let outcome = receiver.recv_timeout(Duration::from_secs(20));
    assert!(
        matches!(outcome, Ok(Ok(Outcome::Timeout(_)))),
        "the machine hangs"
    );
}

#[test]
fn guest_time_stands_still_while_the_machine_is_paused() {
    if !has_kvm("guest_time_stands_still_while_the_machine_is_paused") {
        return;
    }
    let guest = RunningGuest::start(Engine::Kvm, &halted_guest(), 1);
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

/// Each application processor increments a counter in real mode.
#[test]
fn sixty_four_vcpus_start() {
    const CPUS: u32 = 64;
    const ENTRY: u64 = 0x8000;
    const COUNT: u64 = 0x9000;
    if !has_kvm("sixty_four_vcpus_start") {
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
        // x2APIC mode; then INIT and SIPI to all other vCPUs.
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

#[test]
fn init_resets_running_and_halted_vcpus() {
    const ENTRY: u64 = 0x8000;
    const COUNT: u64 = 0x9000;
    const ITERATIONS: u32 = 50;
    if !has_kvm("init_resets_running_and_halted_vcpus") {
        return;
    }
    // In each iteration, one vCPU spins and the other halts.
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
        let (mut again, mut wait) = (a.create_label(), a.create_label());
        for (at, &byte) in (ENTRY..).zip(&start) {
            a.mov(rdi, at)?;
            a.mov(byte_ptr(rdi), u32::from(byte))?;
        }
        a.mov(rdi, COUNT)?;
        a.xor(esi, esi)?;
        wrmsr(a, 0x1b, 0xfee0_0d00)?;
        a.set_label(&mut again)?;
        wrmsr(a, 0x830, 0xc_4500)?;
        wrmsr(a, 0x830, 0xc_4600 | ENTRY >> 12)?;
        a.add(esi, 2)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(rdi), esi)?;
        a.jne(wait)?;
        a.cmp(esi, 2 * ITERATIONS)?;
        a.jb(again)?;
        exit(a, 0)
    });
    let machine = machine(&image, EntryMode::Long, 3);
    let outcome = machine.run(Some(Duration::from_secs(30)), || {}).unwrap();
    assert!(matches!(outcome, Outcome::Exit(0)), "{outcome:?}");
}

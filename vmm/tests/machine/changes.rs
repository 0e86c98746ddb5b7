//! Machines that change their engine while they run.

use std::time::Duration;

use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::engine::ForcedSwitch;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use super::guest::{COUNTERS, Running, exit, has_kvm, long, machine, machine_changing, wrmsr};

const DEBUGCTL: u32 = 0x1d9;
const LBR_TOS: u32 = 0x1c9;
const LBR_FROM: u32 = 0x680;
/// Where the guest leaves the source of a branch, and where it waits for a word.
const FROM: u64 = COUNTERS + 8;
const GO: u64 = COUNTERS + 16;

/// Records the branch between arming and disarming, then waits to be let go.
fn recording_guest() -> Vec<u8> {
    long(|a| {
        let mut target = a.create_label();
        let mut wait = a.create_label();
        wrmsr(a, DEBUGCTL, 1)?;
        a.jmp(target)?;
        a.int1()?;
        a.set_label(&mut target)?;
        wrmsr(a, DEBUGCTL, 0)?;
        a.mov(ecx, LBR_TOS)?;
        a.rdmsr()?;
        a.lea(ecx, dword_ptr(rax + i64::from(LBR_FROM)))?;
        a.rdmsr()?;
        a.mov(rbx, FROM)?;
        a.mov(dword_ptr(rbx), eax)?;
        a.mov(rbx, GO)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(rbx), 0)?;
        a.je(wait)?;
        exit(a, 0)
    })
}

/// Rule LBR-01, on a machine that began natively.
#[test]
fn guest_that_arms_is_observed_at_once_and_goes_back_when_it_disarmed() {
    if !has_kvm("guest_that_arms_is_observed_at_once_and_goes_back_when_it_disarmed") {
        return;
    }
    let image = recording_guest();
    let guest = Running::start_machine(machine_changing(&image, EntryMode::Long, 1, None));
    guest.wait_for(FROM, 1);
    // Four instructions of WRMSR, 5 + 5 + 5 + 2 bytes: the jump is behind them.
    assert_eq!(guest.word(FROM), super::guest::LONG + 17);
    for _ in 0..1000 {
        if guest
            .board
            .run
            .engine
            .stats()
            .is_some_and(|stats| stats.cooled_down == 1)
        {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let stats = guest.board.run.engine.stats().unwrap();
    assert_eq!((stats.armed, stats.cooled_down, stats.test), (1, 1, 0));
    guest.put_word(GO, 1);
    assert!(matches!(guest.end(), Outcome::Exit(0)));
}

/// Counts in memory, with an exit now and then.
fn counting_guest() -> Vec<u8> {
    long(|a| {
        let mut again = a.create_label();
        a.mov(rbx, COUNTERS)?;
        a.set_label(&mut again)?;
        a.inc(qword_ptr(rbx))?;
        // The old value of a delay port: an exit that changes nothing.
        a.in_(al, 0x80)?;
        a.jmp(again)
    })
}

#[test]
fn pause_holds_a_machine_that_keeps_changing() {
    if !has_kvm("pause_holds_a_machine_that_keeps_changing") {
        return;
    }
    let machine = machine_changing(
        &counting_guest(),
        EntryMode::Long,
        1,
        Some(ForcedSwitch::Exits(3)),
    );
    let guest = Running::start_machine(machine);
    let mut before = 0;
    for _ in 0..20 {
        guest.wait_for(COUNTERS, before + 50);
        assert!(guest.board.pause());
        before = guest.word(COUNTERS);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(guest.word(COUNTERS), before, "it runs while it is paused");
        guest.board.resume();
    }
    assert!(guest.board.run.engine.stats().unwrap().test > 100);
    guest.board.run.finish(Outcome::Quit);
    assert!(matches!(guest.end(), Outcome::Quit));
}

/// A guest that arms nothing has the same exits on a machine that could change, and never moves.
#[test]
fn guest_that_arms_nothing_has_not_one_exit_more() {
    if !has_kvm("guest_that_arms_nothing_has_not_one_exit_more") {
        return;
    }
    let image = long(|a| {
        let mut again = a.create_label();
        a.mov(esi, 100)?;
        a.set_label(&mut again)?;
        // BTS without TR arms nothing, nor does 0.
        wrmsr(a, DEBUGCTL, 0)?;
        a.in_(al, 0x80)?;
        a.dec(esi)?;
        a.jne(again)?;
        exit(a, 0)
    });
    let exits = |machine: hindsight_vmm::machine::Machine| {
        let board = machine.board().clone();
        let limit = Some(Duration::from_secs(60));
        assert!(matches!(machine.run(limit, || {}), Ok(Outcome::Exit(0))));
        let changes = board.run.engine.stats();
        assert_eq!(changes.map_or(0, |stats| stats.count()), 0);
        board.run.stats()[0].exits.to_string()
    };
    let plain = exits(machine(&image, EntryMode::Long, 1));
    assert_eq!(
        exits(machine_changing(&image, EntryMode::Long, 1, None)),
        plain
    );
    assert!(plain.contains("WRMSR 100"), "{plain}");
}

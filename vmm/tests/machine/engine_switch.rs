//! Machines that switch their engine while they run.

use std::time::Duration;

use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::engine::ForcedSwitch;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use super::guest::{
    COUNTERS, RunningGuest, exit, has_kvm, long, machine, switching_machine, wrmsr,
};

const DEBUGCTL: u32 = 0x1d9;
const LBR_TOS: u32 = 0x1c9;
const LBR_FROM: u32 = 0x680;
/// Where the guest stores the source of a branch.
const FROM: u64 = COUNTERS + 8;
/// The guest exits when this word is not zero.
const MAY_EXIT: u64 = COUNTERS + 16;

/// Records a branch in the LBR stack, disarms LBRs, and waits for [`MAY_EXIT`].
fn lbr_guest() -> Vec<u8> {
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
        a.mov(rbx, MAY_EXIT)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(rbx), 0)?;
        a.je(wait)?;
        exit(a, 0)
    })
}

/// Rule LBR-01, on a machine that started in KVM.
#[test]
fn armed_guest_runs_in_the_interpreter_until_it_disarms() {
    if !has_kvm("armed_guest_runs_in_the_interpreter_until_it_disarms") {
        return;
    }
    let image = lbr_guest();
    let guest = RunningGuest::start_machine(switching_machine(&image, EntryMode::Long, 1, None));
    guest.wait_for(FROM, 1);
    // The jump follows the code that writes the MSR, of 5 + 5 + 5 + 2 bytes.
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
    guest.write_word(MAY_EXIT, 1);
    assert!(matches!(guest.end(), Outcome::Exit(0)));
}

/// Increments a counter in memory, with an exit in each iteration.
fn counting_guest() -> Vec<u8> {
    long(|a| {
        let mut again = a.create_label();
        a.mov(rbx, COUNTERS)?;
        a.set_label(&mut again)?;
        a.inc(qword_ptr(rbx))?;
        // A read of the delay port exits and changes nothing.
        a.in_(al, 0x80)?;
        a.jmp(again)
    })
}

#[test]
fn paused_machine_stands_still_despite_frequent_switches() {
    if !has_kvm("paused_machine_stands_still_despite_frequent_switches") {
        return;
    }
    let machine = switching_machine(
        &counting_guest(),
        EntryMode::Long,
        1,
        Some(ForcedSwitch::Exits(3)),
    );
    let guest = RunningGuest::start_machine(machine);
    let mut before = 0;
    for _ in 0..20 {
        guest.wait_for(COUNTERS, before + 50);
        assert!(guest.board.pause());
        before = guest.word(COUNTERS);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(guest.word(COUNTERS), before, "it ran while it was paused");
        guest.board.resume();
    }
    assert!(guest.board.run.engine.stats().unwrap().test > 100);
    guest.board.run.finish(Outcome::Quit);
    assert!(matches!(guest.end(), Outcome::Quit));
}

/// A guest that arms nothing has the same exits as on a machine that stays in KVM.
#[test]
fn guest_that_arms_nothing_has_no_additional_exits() {
    if !has_kvm("guest_that_arms_nothing_has_no_additional_exits") {
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
        let switches = board.run.engine.stats();
        assert_eq!(switches.map_or(0, |stats| stats.count()), 0);
        board.run.stats()[0].exits.to_string()
    };
    let plain = exits(machine(&image, EntryMode::Long, 1));
    assert_eq!(
        exits(switching_machine(&image, EntryMode::Long, 1, None)),
        plain
    );
    assert!(plain.contains("WRMSR 100"), "{plain}");
}

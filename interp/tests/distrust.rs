//! Tests code that was changed while the interpreter did not run the guest.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, long_mode, state, vcpu};
use hindsight_interp::{Exit, Vcpu};

/// inc eax; jmp over the rest of the page; there: inc ebx; hlt. Two blocks, linked.
fn two_blocks(ram: &Ram) {
    ram.write(CODE, &[0xff, 0xc0, 0xe9, 0xf9, 0x0f, 0, 0]);
    ram.write(CODE + 0x1000, &[0xff, 0xc3, 0xf4]);
}

/// Runs from the start to HLT, and returns EAX and EBX.
fn run(cpu: &mut Vcpu) -> (u64, u64) {
    let mut st = state(cpu);
    (st.gpr[0], st.gpr[3], st.rip) = (0, 0, CODE as u64);
    st.activity = hindsight_cpu::state::Activity::Running;
    cpu.load(&st);
    assert_eq!(cpu.run(&mut Machine::default(), 100), Exit::Halted);
    let st = state(cpu);
    (st.gpr[0], st.gpr[3])
}

#[test]
fn code_that_stayed_is_not_decoded_again() {
    let ram = Ram::new(4 << 20);
    let mut cpu = vcpu(&ram, &long_mode(&ram, 0));
    two_blocks(&ram);
    assert_eq!(run(&mut cpu), (1, 1));
    let decoded = cpu.stats().blocks;
    for _ in 0..3 {
        cpu.distrust_code();
        assert_eq!(run(&mut cpu), (1, 1));
    }
    assert_eq!(cpu.stats().blocks, decoded);
}

#[test]
fn code_changed_unseen_runs_as_changed_behind_a_link_too() {
    let ram = Ram::new(4 << 20);
    let mut cpu = vcpu(&ram, &long_mode(&ram, 0));
    two_blocks(&ram);
    assert_eq!(run(&mut cpu), (1, 1));
    assert_eq!(run(&mut cpu), (1, 1));
    // dec ebx, in the second block only.
    ram.write(CODE + 0x1001, &[0xcb]);
    cpu.distrust_code();
    assert_eq!(run(&mut cpu), (1, 0xffff_ffff));
    // And back, after it was known twice over.
    ram.write(CODE + 0x1001, &[0xc3]);
    cpu.distrust_code();
    assert_eq!(run(&mut cpu), (1, 1));
}

#[test]
fn code_across_a_page_is_compared_in_both_pages() {
    let ram = Ram::new(4 << 20);
    let mut cpu = vcpu(&ram, &long_mode(&ram, 0));
    // jmp to the last two bytes of the page: mov eax, imm32 that continues in the next page; hlt.
    ram.write(CODE, &[0xe9, 0xf9, 0x0f, 0, 0]);
    ram.write(CODE + 0xffe, &[0xb8, 1, 0, 0, 0, 0xf4]);
    assert_eq!(run(&mut cpu).0, 1);
    ram.write(CODE + 0x1002, &[0x20]);
    cpu.distrust_code();
    assert_eq!(run(&mut cpu).0, 0x2000_0001);
    let decoded = cpu.stats().blocks;
    cpu.distrust_code();
    assert_eq!(run(&mut cpu).0, 0x2000_0001);
    assert_eq!(cpu.stats().blocks, decoded);
}

/// Shadows end after one instruction, a deferred trap is delivered: a clean boundary is near.
#[test]
fn clean_boundary_is_an_instruction_or_two_away() {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    // mov ss, ax; sti; nop; hlt
    st.gpr[0] = 16;
    ram.write(CODE, &[0x8e, 0xd0, 0xfb, 0x90, 0xf4]);
    let mut cpu = vcpu(&ram, &st);
    assert!(cpu.at_clean_boundary());
    let clean: Vec<_> = (0..3)
        .map(|_| {
            assert_eq!(cpu.run(&mut Machine::default(), 1), Exit::Budget);
            cpu.at_clean_boundary()
        })
        .collect();
    assert_eq!(clean, [false, false, true]);
}

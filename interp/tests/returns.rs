//! How much of RSP a return to another code segment writes. SDM Vol. 2, "IRET/IRETD/IRETQ", "RET".
//!
//! The values are those of a processor (AMD, family 1AH).

mod common;

use common::{CODE, GDT, Machine, Ram, long_mode, segment, state, vcpu};
use hindsight_cpu::state::{CpuState, seg};

const IRETQ: &[u8] = &[0x48, 0xcf];
const RETFQ: &[u8] = &[0x48, 0xcb];
const TARGET: u64 = CODE as u64 + 0x1000;
const POPPED_RSP: u64 = 0x1234_5678_9abc_def0;

/// Selectors of user segments: 32-bit code, 64-bit code, a stack of 32 bits and one of 16 bits.
const CODE32: u64 = 0x1b;
const CODE64: u64 = 0x2b;
const STACK32: u64 = 0x23;
const STACK16: u64 = 0x3b;

/// RSP after a return from 64-bit code at level `cpl` with this frame, which lies where RSP is
/// `rsp`; and RSP as it was.
fn rsp_after(code: &[u8], cpl: u8, ss: Option<u16>, frame: &[u64]) -> (u64, u64) {
    let ram = Ram::new(4 << 20);
    let mut st: CpuState = long_mode(&ram, cpl);
    ram.write_u64(GDT + 0x38, 0x008f_f300_0000_ffff);
    // The frame ends at a multiple of 64 KiB, and is reached with any value in bits 63:32.
    let at = 0x20_0000 - 8 * frame.len();
    for (n, &value) in frame.iter().enumerate() {
        ram.write_u64(at + 8 * n, value);
    }
    map_high(&ram);
    st.gpr[4] = HIGH + at as u64;
    if let Some(selector) = ss {
        st.seg[seg::SS] = segment(selector, 0x80f3);
    }
    ram.write(CODE, code);
    ram.write(CODE + 0x1000, &[0x90, 0x90]);
    let mut cpu = vcpu(&ram, &st);
    let _ = cpu.run(&mut Machine::default(), 1);
    let after = state(&mut cpu);
    assert_eq!(after.rip, TARGET);
    (after.gpr[4], st.gpr[4])
}

/// The lowest GiB is mapped here too.
const HIGH: u64 = 0x7f80_0000_0000;

fn map_high(ram: &Ram) {
    let lowest = ram.read_u64(common::TABLES);
    ram.write_u64(common::TABLES + 255 * 8, lowest);
}

#[test]
fn iretq_to_a_16_bit_stack_loads_sp_alone() {
    let frame = [TARGET, CODE32, 0x202, POPPED_RSP, STACK16];
    let (after, before) = rsp_after(IRETQ, 0, None, &frame);
    assert_eq!(after, before & !0xffff | 0xdef0);
    let (after, before) = rsp_after(IRETQ, 3, None, &frame);
    assert_eq!(after, before & !0xffff | 0xdef0);
}

#[test]
fn iretq_to_a_32_bit_stack_loads_esp() {
    let frame = [TARGET, CODE32, 0x202, POPPED_RSP, STACK32];
    assert_eq!(rsp_after(IRETQ, 0, None, &frame).0, 0x9abc_def0);
}

#[test]
fn iretq_to_64_bit_code_loads_rsp_whatever_the_stack_segment() {
    let frame = [TARGET, CODE64, 0x202, POPPED_RSP, STACK16];
    assert_eq!(rsp_after(IRETQ, 0, None, &frame).0, POPPED_RSP);
}

#[test]
fn retfq_to_an_outer_level_loads_as_much_as_the_stack_has() {
    let to = |code, stack| [TARGET, code, POPPED_RSP, stack];
    let (after, before) = rsp_after(RETFQ, 0, None, &to(CODE32, STACK16));
    assert_eq!(after, before & !0xffff | 0xdef0);
    assert_eq!(
        rsp_after(RETFQ, 0, None, &to(CODE32, STACK32)).0,
        0x9abc_def0
    );
    assert_eq!(
        rsp_after(RETFQ, 0, None, &to(CODE64, STACK16)).0,
        POPPED_RSP
    );
}

#[test]
fn retfq_at_the_same_level_moves_as_much_as_the_stack_has() {
    let frame = [TARGET, CODE32];
    let (after, before) = rsp_after(RETFQ, 3, Some(0x3b), &frame);
    assert_eq!(after, before & !0xffff, "SP has wrapped round");
    assert_eq!(rsp_after(RETFQ, 3, None, &frame).0, 0x20_0000);
    let (after, before) = rsp_after(RETFQ, 3, Some(0x3b), &[TARGET, CODE64]);
    assert_eq!(after, before + 16);
}

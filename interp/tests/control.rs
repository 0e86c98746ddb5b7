//! What control registers and the flags of virtual interrupts cause beyond their own change.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, STACK, gate, long_mode, segment, state, vcpu};
use hindsight_cpu::state::{CpuState, seg};
use hindsight_interp::Exit;

const HANDLERS: usize = CODE + 0x4000;
const HLT: u8 = 0xf4;
const GP: u64 = 13;
const UD: u64 = 6;
const VIF: u64 = 1 << 19;
const VIP: u64 = 1 << 20;
const IOPL3: u64 = 3 << 12;
const CR4_VME: u64 = 1;
const CR4_PVI: u64 = 1 << 1;
const PDPTES: usize = 0x4000;

/// PDPTE 3 after `code` ran in protected mode with PAE paging and memory held another PDPTE 3 than
/// the processor.
fn pdpte_after(code: &[u8]) -> u64 {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    (st.cr0, st.cr3, st.cr4, st.efer) = (0x8000_0011, PDPTES as u64, 0x20, 0);
    st.seg[seg::CS] = segment(8, 0xc09b);
    // The page directory of `long_mode`, whose entries are of 2 MiB.
    let first = common::TABLES as u64 + 0x2001;
    // Of the supervisor, because of SMEP.
    ram.write_u64(common::TABLES + 0x2000, 0x83);
    ram.write_u64(PDPTES, first);
    ram.write_u64(PDPTES + 24, first);
    st.pdptr = [first, 0, 0, 0];
    ram.write(CODE, &[code, &[HLT]].concat());
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut Machine::default(), 100), Exit::Halted);
    state(&mut cpu).pdptr[3]
}

#[test]
fn mov_to_cr0_and_cr4_reloads_pdptes_for_the_bits_of_the_manual() {
    let cr0 = |bit: u8| {
        [
            &[0x0f, 0x20, 0xc0, 0x0f, 0xba, 0xf8, bit][..],
            &[0x0f, 0x22, 0xc0],
        ]
        .concat()
    };
    let cr4 = |bit: u8| {
        [
            &[0x0f, 0x20, 0xe0, 0x0f, 0xba, 0xf8, bit][..],
            &[0x0f, 0x22, 0xe0],
        ]
        .concat()
    };
    // CR0.CD; CR4.PSE, PGE and SMEP.
    for code in [cr0(30), cr4(4), cr4(7), cr4(20)] {
        assert_ne!(pdpte_after(&code), 0, "{code:x?}");
    }
    // CR0.NW with CD, from CD alone.
    let both = [
        &[0x0f, 0x20, 0xc0, 0x0d, 0, 0, 0, 0x60][..],
        &[0x0f, 0x22, 0xc0],
    ]
    .concat();
    assert_ne!(pdpte_after(&both), 0);
    // CR0.WP and EM; CR4.TSD.
    for code in [cr0(16), cr0(2), cr4(2)] {
        assert_eq!(pdpte_after(&code), 0, "{code:x?}");
    }
}

/// The vector that NOP and UD2 at CPL 3 of 64-bit mode come to, and the RIP in its frame.
fn user_exception(cr4: u64, rflags: u64) -> (u64, u64) {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 3);
    for vector in 0..32 {
        gate(&ram, vector, (HANDLERS + vector) as u64, 0);
    }
    ram.write(HANDLERS, &[HLT; 32]);
    ram.write(CODE, &[0x90, 0x0f, 0x0b]);
    st.cr4 |= cr4;
    st.rflags |= rflags;
    let (vector, frame) = halted(&ram, &st);
    let code = if vector == GP { 8 } else { 0 };
    (vector, ram.read_u64(frame + code) - CODE as u64)
}

fn halted(ram: &Ram, st: &CpuState) -> (u64, usize) {
    let mut cpu = vcpu(ram, st);
    assert_eq!(cpu.run(&mut Machine::default(), 100), Exit::Halted);
    let st = state(&mut cpu);
    let vector = st.rip - 1 - HANDLERS as u64;
    (vector, usize::try_from(st.gpr[4]).unwrap())
}

#[test]
fn pending_virtual_interrupt_raises_gp_before_the_next_instruction_under_pvi() {
    assert_eq!(user_exception(CR4_PVI, VIF | VIP), (GP, 0));
    for (cr4, rflags) in [
        (CR4_PVI, VIF),
        (CR4_PVI, VIP),
        (CR4_PVI, VIF | VIP | IOPL3),
        (CR4_VME, VIF | VIP),
        (0, VIF | VIP),
    ] {
        assert_eq!(user_exception(cr4, rflags), (UD, 1), "{cr4:x} {rflags:x}");
    }
}

#[test]
fn iret_to_virtual_8086_mode_with_a_pending_virtual_interrupt_raises_gp_at_its_target() {
    for (cr4, vector, ip) in [(CR4_VME, GP, 0), (0, UD, 1)] {
        let ram = Ram::new(4 << 20);
        let mut st = long_mode(&ram, 0);
        (st.cr0, st.cr4, st.efer) = (0x11, cr4, 0);
        st.seg[seg::CS] = segment(8, 0xc09b);
        ram.write_u64(common::GDT + 8, 0x00cf_9b00_0000_ffff);
        for vector in 0..32_usize {
            let gate = 0x8e00_u64 << 32 | (HANDLERS + vector) as u64 & 0xffff | 8 << 16;
            ram.write_u64(common::IDT + 8 * vector, gate | 1 << 48);
        }
        ram.write(HANDLERS, &[HLT; 32]);
        // The stack of CPL 0 for the handler.
        ram.write(common::TSS + 8, &[0x10, 0]);
        ram.write(CODE, &[0xcf]);
        ram.write(0x3_0000, &[0x90, 0x0f, 0x0b]);
        let eflags = u32::try_from(1 << 17 | VIF | VIP | 2).unwrap();
        for (n, v) in [0, 0x3000, eflags, 0x8000, 0x4000, 0, 0, 0, 0]
            .into_iter()
            .enumerate()
        {
            ram.write(STACK + 4 * n, &u32::to_le_bytes(v));
        }
        let (raised, frame) = halted(&ram, &st);
        let code = if raised == GP { 4 } else { 0 };
        let saved = ram.read(frame + code, 1)[0];
        assert_eq!((raised, saved), (vector, ip), "{cr4:x}");
    }
}

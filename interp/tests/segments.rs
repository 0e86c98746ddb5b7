//! Tests accesses of 32-bit code through segments of every shape.
//!
//! They check where the limit ends, and where addresses wrap. SDM Vol. 3A, "Limit Checking" and
//! "Type Checking".

mod common;

use common::{CODE, Machine, Ram, long_mode, segment, state, vcpu};
use hindsight_cpu::state::{CpuState, Segment, seg};
use hindsight_interp::Exit;

/// Types of segments: present, ring 0, 32-bit, in pages.
const DATA: u16 = 0xc093;
const READ_ONLY: u16 = 0xc091;
const EXPAND_DOWN: u16 = 0xc097;
const CODE_READ: u16 = 0xc09b;
const CODE_ONLY: u16 = 0xc099;

/// Protected mode without paging. No exception has a handler.
fn protected(ram: &Ram, ds: Segment, at: u32) -> CpuState {
    let mut st = long_mode(ram, 0);
    (st.cr0, st.cr4, st.efer) = (0x11, 0, 0);
    st.idtr.limit = 0;
    st.seg[seg::CS] = segment(8, CODE_READ);
    st.seg[seg::DS] = ds;
    st.gpr[3] = at.into();
    st
}

/// Whether an access of four bytes is allowed.
///
/// An access in the middle of the page precedes it, so that the TLB has the page.
fn allowed(ds: Segment, at: u32, write: bool) -> bool {
    let ram = Ram::new(4 << 20);
    let mut st = protected(&ram, ds, at);
    // mov eax, [esi]; mov [ebx], eax or mov eax, [ebx]; hlt
    let code = [0x8b, 0x06, if write { 0x89 } else { 0x8b }, 0x03, 0xf4];
    ram.write(CODE, &code);
    let linear = (ds.base + u64::from(at)) & 0xffff_ffff;
    let middle = (linear & !0xfff) + 0x800;
    st.gpr[6] = middle.wrapping_sub(ds.base) & 0xffff_ffff;
    let mut cpu = vcpu(&ram, &st);
    match cpu.run(&mut Machine::default(), 100) {
        Exit::Halted => true,
        Exit::Shutdown => {
            assert!(state(&mut cpu).rip <= CODE as u64 + 2);
            false
        }
        other => panic!("{other:?}"),
    }
}

fn ds(base: u64, limit: u32, access: u16) -> Segment {
    Segment {
        base,
        limit,
        ..segment(16, access)
    }
}

#[test]
fn limits_and_types_are_checked_to_the_byte() {
    const ALL: u32 = u32::MAX;
    // Segment, offset, whether a read and a write are allowed.
    let rows = [
        (ds(0, ALL, DATA), 0x2_0ffc, true, true),
        (ds(0x3000, ALL, DATA), 0x1234, true, true),
        // Round the end of linear addresses, not that of the segment.
        (ds(0x3000, ALL, DATA), 0xffff_e004, true, true),
        (ds(0x3000, ALL, DATA), 0xffff_fffd, false, false),
        // Over the end of the segment, within a page.
        (ds(0x3002, ALL, DATA), 0xffff_fffe, false, false),
        (ds(0x3002, ALL, DATA), 0xffff_fffc, true, true),
        (ds(0x4000, ALL - 1, DATA), 0xffff_fffc, false, false),
        (ds(0x4000, ALL - 1, DATA), 0xffff_fffb, true, true),
        (ds(0, 0x2_0fff, DATA), 0x2_0ffc, true, true),
        (ds(0, 0x2_0fff, DATA), 0x2_0ffd, false, false),
        (ds(0, ALL, READ_ONLY), 0x2_0000, true, false),
        (ds(0, ALL, CODE_READ), 0x2_0000, true, false),
        (ds(0, ALL, CODE_ONLY), 0x2_0000, false, false),
        // An expand-down segment is what is above its limit: here nothing.
        (ds(0, ALL, EXPAND_DOWN), 0x2_0000, false, false),
        (ds(0, 0x1_ffff, EXPAND_DOWN), 0x2_0000, true, true),
        (ds(0, 0x2_0000, EXPAND_DOWN), 0x2_0000, false, false),
        (
            Segment {
                unusable: true,
                ..ds(0, ALL, DATA)
            },
            0x2_0000,
            false,
            false,
        ),
    ];
    for (ds, at, read, write) in rows {
        assert_eq!(
            (allowed(ds, at, false), allowed(ds, at, true)),
            (read, write),
            "{ds:x?} at {at:#x}"
        );
    }
}

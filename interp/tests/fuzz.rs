//! Arbitrary bytes as guest code in every mode: the processor answers, and never panics.

mod common;

use common::{CODE, Machine, Ram, gate, long_mode, state, vcpu};
use hindsight_cpu::state::{CpuState, Segment, seg};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Mode {
    Real,
    Protected16,
    Protected32,
    Paged32,
    Pae,
    Compatibility,
    Long,
    Virtual8086,
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![
        Just(Mode::Real),
        Just(Mode::Protected16),
        Just(Mode::Protected32),
        Just(Mode::Paged32),
        Just(Mode::Pae),
        Just(Mode::Compatibility),
        Just(Mode::Long),
        Just(Mode::Virtual8086),
    ]
}

/// The state to start from, with tables that make most faults deliverable.
fn start(ram: &Ram, mode: Mode, cpl: u8) -> CpuState {
    let mut st = long_mode(ram, cpl);
    let code = |st: &mut CpuState, access: u16| {
        st.seg[seg::CS].access = (st.seg[seg::CS].access & 0xff) | access;
    };
    match mode {
        Mode::Long => {}
        Mode::Compatibility => code(&mut st, 0xc000),
        Mode::Paged32 | Mode::Pae | Mode::Protected32 => {
            st.efer = 0;
            st.cr4 &= !0x20;
            st.cr0 &= !0x8000_0000;
            code(&mut st, 0xc000);
            if let Mode::Paged32 = mode {
                // One table of 4 MiB pages.
                st.cr0 |= 0x8000_0000;
                st.cr3 = 0x5000;
                for (i, at) in (0_u32..1024).zip((0x5000..).step_by(4)) {
                    ram.write(at, &(i << 22 | 0x87).to_le_bytes());
                }
            }
            if let Mode::Pae = mode {
                st.cr0 |= 0x8000_0000;
                st.cr4 |= 0x20;
                st.pdptr = [0x3001, 0, 0, 0];
            }
        }
        Mode::Protected16 => {
            st.efer = 0;
            st.cr4 &= !0x20;
            st.cr0 &= !0x8000_0000;
            code(&mut st, 0);
        }
        Mode::Real | Mode::Virtual8086 => {
            st = CpuState::reset();
            let v86 = matches!(mode, Mode::Virtual8086);
            let access = if v86 { 0xf3 } else { 0x93 };
            st.seg = [Segment {
                selector: 0x100,
                base: 0x1000,
                limit: 0xffff,
                access,
                unusable: false,
            }; 6];
            st.seg[seg::CS].selector = 0x1000;
            st.seg[seg::CS].base = CODE as u64;
            st.rip = 0;
            st.gpr[4] = 0x8000;
            if v86 {
                st.cr0 |= 1;
                st.rflags |= 0x2_0000;
            }
        }
    }
    st
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_code_never_panics(
        bytes in prop::collection::vec(any::<u8>(), 1..200),
        gpr in any::<[u64; 16]>(),
        near in any::<u16>(),
        mode in mode(),
        user in any::<bool>(),
        low in prop::collection::vec(any::<u64>(), 32),
        flags in any::<u64>(),
        debug in any::<(u64, u64)>(),
    ) {
        let ram = Ram::new(4 << 20);
        let mut st = start(&ram, mode, if user { 3 } else { 0 });
        for v in 0..16 {
            gate(&ram, v, CODE as u64 + (v * 8) as u64, 3);
        }
        for (i, v) in low.iter().enumerate() {
            ram.write_u64(common::TSS + i * 8, *v);
        }
        ram.write(CODE, &bytes);
        let sp = st.gpr[4];
        st.gpr = gpr;
        for (i, g) in st.gpr.iter_mut().enumerate() {
            if i % 2 == 0 {
                *g = u64::from(near) * 8;
            }
        }
        st.gpr[4] = sp;
        st.rflags |= flags & 0x20_7dd5;
        st.dr = [debug.0, CODE as u64 + (debug.0 & 0xff), debug.1 & 0xffff, 0x20];
        st.dr7 = 0x400 | (debug.1 & 0xffff_23ff);
        let mut cpu = vcpu(&ram, &st);
        let mut machine = Machine::default();
        for _ in 0..4 {
            let _ = cpu.run(&mut machine, 300);
            machine.interrupts.push(0x20 | (near.to_le_bytes()[0] & 15));
        }
        let mix: u64 = cpu.mix().iter().map(|(_, count)| count).sum();
        prop_assert_eq!(mix, cpu.stats().retired);
        let end = state(&mut cpu);
        // What was stored can be loaded again.
        cpu.load(&end);
        prop_assert_eq!(state(&mut cpu).gpr, end.gpr);
    }
}

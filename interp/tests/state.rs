//! FXSAVE and the XSAVE family: which registers, which bytes, and which fault.

mod common;

use common::{CODE, Machine, Ram, gate, host_cpuid, long_mode, segment, state, vcpu};
use hindsight_cpu::state::{CpuState, seg};
use hindsight_interp::Exit;

const AREA: usize = 0x20_0000;
const HANDLER: usize = CODE + 0x3000;
const NON_CANONICAL: u64 = 0x8000_0000_0000_0000;

/// Instructions with the operand `[rdi]` or `[edi]`.
const FXSAVE: &[u8] = &[0x0f, 0xae, 0x07];
const FXRSTOR: &[u8] = &[0x0f, 0xae, 0x0f];
const XSAVE: &[u8] = &[0x0f, 0xae, 0x27];
const XRSTOR: &[u8] = &[0x0f, 0xae, 0x2f];
const XSAVEOPT: &[u8] = &[0x0f, 0xae, 0x37];
const XSAVEC: &[u8] = &[0x0f, 0xc7, 0x27];

/// x87, SSE and AVX.
const COMPONENTS: u64 = 7;
const CR0_EM: u64 = 1 << 2;
const CR0_TS: u64 = 1 << 3;
const CR4_OSXSAVE: u64 = 1 << 18;

/// 64-bit or 32-bit code with all components of [`COMPONENTS`] enabled and requested; register n of
/// the vector registers is full of the byte n + 1.
fn start(ram: &Ram, long: bool) -> CpuState {
    let mut st = long_mode(ram, 0);
    if !long {
        st.seg[seg::CS] = segment(8, 0xc09b);
    }
    st.cr4 |= CR4_OSXSAVE;
    st.xcr0 = COMPONENTS;
    (st.gpr[0], st.gpr[2], st.gpr[7]) = (COMPONENTS, 0, AREA as u64);
    for n in 0..16 {
        let byte = u8::try_from(n + 1).unwrap_or(0);
        st.xsave.0[160 + 16 * n..][..16].fill(byte);
        st.xsave.0[576 + 16 * n..][..16].fill(byte);
    }
    st.xsave.0[512] = 6;
    for vector in 0..32 {
        gate(ram, vector, (HANDLER + vector) as u64, 0);
    }
    ram.write(HANDLER, &[0xf4; 32]);
    st
}

/// Executes an instruction; the vector of its exception, or the state after it.
fn execute(ram: &Ram, st: &CpuState, machine: &mut Machine, code: &[u8]) -> Result<CpuState, u64> {
    ram.write(CODE, &[code, &[0xf4]].concat());
    let mut cpu = vcpu(ram, st);
    assert_eq!(cpu.run(machine, 100), Exit::Halted);
    let after = state(&mut cpu);
    match after.rip.checked_sub(HANDLER as u64 + 1) {
        Some(vector) if vector < 32 => Err(vector),
        _ => Ok(after),
    }
}

fn vector_of(st: &CpuState, ram: &Ram, code: &[u8]) -> Option<u64> {
    execute(ram, st, &mut Machine::default(), code).err()
}

fn registers(st: &CpuState, n: usize) -> [u8; 2] {
    [st.xsave.0[160 + 16 * n], st.xsave.0[576 + 16 * n]]
}

#[test]
fn save_in_32_bit_code_leaves_the_bytes_of_registers_8_to_15() {
    for code in [FXSAVE, XSAVE, XSAVEOPT, XSAVEC] {
        let ram = Ram::new(4 << 20);
        let st = start(&ram, false);
        ram.write(AREA, &[0xcc; 1024]);
        execute(&ram, &st, &mut Machine::default(), code).expect("no fault");
        let area = ram.read(AREA, 1024);
        assert_eq!(area[160 + 7 * 16], 8, "{code:x?}: XMM7");
        assert!(
            area[288..416].iter().all(|&b| b == 0xcc),
            "{code:x?}: XMM8-15"
        );
        if code != FXSAVE {
            assert_eq!(area[576 + 7 * 16], 8, "{code:x?}: YMM7");
            assert!(
                area[704..832].iter().all(|&b| b == 0xcc),
                "{code:x?}: YMM8-15"
            );
        }
    }
}

#[test]
fn restore_in_32_bit_code_leaves_registers_8_to_15() {
    // From memory, and to the initial state.
    for (code, present) in [(FXRSTOR, 0), (XRSTOR, 7), (XRSTOR, 0)] {
        let ram = Ram::new(4 << 20);
        let st = start(&ram, false);
        ram.write(AREA, &[0x55; 832]);
        ram.write(AREA + 24, &[0x80, 0x1f, 0, 0, 0xff, 0xff, 0, 0]);
        ram.write(AREA + 512, &[0; 64]);
        ram.write_u64(AREA + 512, present);
        let after = execute(&ram, &st, &mut Machine::default(), code).expect("no fault");
        let loaded = if present == 0 && code == XRSTOR {
            0
        } else {
            0x55
        };
        let upper = if code == FXRSTOR { 8 } else { loaded };
        assert_eq!(registers(&after, 7), [loaded, upper], "{code:x?} {present}");
        for n in 8..16 {
            assert_eq!(
                registers(&after, n),
                registers(&st, n),
                "{code:x?} {present}: {n}"
            );
        }
    }
}

#[test]
fn save_in_32_bit_code_reports_what_it_can_save_as_in_use() {
    let ram = Ram::new(4 << 20);
    let mut st = start(&ram, false);
    for at in [160, 576] {
        st.xsave.0[at..at + 128].fill(0);
    }
    execute(&ram, &st, &mut Machine::default(), XSAVE).expect("no fault");
    assert_eq!(ram.read_u64(AREA + 512), 0);
    st.seg[seg::CS] = segment(8, 0xa09b);
    execute(&ram, &st, &mut Machine::default(), XSAVE).expect("no fault");
    assert_eq!(ram.read_u64(AREA + 512), 6);
}

#[test]
fn xsave_without_rex_w_stores_32_bit_pointers() {
    let ram = Ram::new(4 << 20);
    let mut st = start(&ram, true);
    st.xsave.0[8..24].fill(0x77);
    st.xsave.0[512] = 7;
    for (prefix, upper) in [(None, 0), (Some(0x48), 0x7777_7777)] {
        let code: Vec<u8> = prefix.iter().chain(XSAVE).copied().collect();
        execute(&ram, &st, &mut Machine::default(), &code).expect("no fault");
        for at in [8, 16] {
            assert_eq!(
                ram.read_u64(AREA + at),
                upper << 32 | 0x7777_7777,
                "{code:x?}"
            );
        }
    }
}

#[test]
fn missing_facility_ranks_above_a_bad_address() {
    const UD: Option<u64> = Some(6);
    const NM: Option<u64> = Some(7);
    const GP: Option<u64> = Some(13);
    let ram = Ram::new(4 << 20);
    let mut st = start(&ram, true);
    for address in [NON_CANONICAL, AREA as u64 + 1] {
        st.gpr[7] = address;
        for code in [FXSAVE, FXRSTOR] {
            for (cr0, expected) in [(0, GP), (CR0_TS, NM), (CR0_EM, NM)] {
                let mut st = st.clone();
                st.cr0 |= cr0;
                assert_eq!(vector_of(&st, &ram, code), expected, "{code:x?} {cr0:#x}");
            }
        }
        for code in [XSAVE, XRSTOR, XSAVEOPT, XSAVEC] {
            for (cr0, cr4, expected) in [
                (0, CR4_OSXSAVE, GP),
                (CR0_TS, CR4_OSXSAVE, NM),
                (CR0_TS, 0, UD),
                (0, 0, UD),
            ] {
                let mut st = st.clone();
                st.cr0 |= cr0;
                st.cr4 = st.cr4 & !CR4_OSXSAVE | cr4;
                assert_eq!(
                    vector_of(&st, &ram, code),
                    expected,
                    "{code:x?} {cr0:#x} {cr4:#x}"
                );
            }
        }
    }
}

#[test]
fn xsaveopt_does_not_write_components_in_their_initial_state() {
    let ram = Ram::new(4 << 20);
    let mut st = start(&ram, true);
    st.xsave.0[160..416].fill(0);
    for (instruction, written) in [(XSAVE, true), (XSAVEOPT, false)] {
        ram.write(AREA, &[0xcc; 1024]);
        let after = execute(&ram, &st, &mut Machine::default(), instruction);
        assert!(after.is_ok());
        let area = ram.read(AREA, 1024);
        let is_written = |from: usize, to: usize| area[from..to].iter().any(|&b| b != 0xcc);
        assert_eq!(is_written(0, 24), written, "x87 of {instruction:x?}");
        assert_eq!(
            is_written(32, 416),
            written,
            "registers of {instruction:x?}"
        );
        assert_eq!(
            area[24..28],
            [0x80, 0x1f, 0, 0],
            "MXCSR is saved with either component"
        );
        assert_eq!(area[576], 1, "AVX is in use");
        assert_eq!(
            area[512..520],
            [0xcc & !7 | 4, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc]
        );
    }
}

/// CPUID of the host without XSAVEC.
fn without_xsavec(leaf: u32, subleaf: u32) -> [u32; 4] {
    let mut regs = host_cpuid(leaf, subleaf);
    if (leaf, subleaf) == (0xd, 1) {
        regs[0] &= !2;
    }
    regs
}

#[test]
fn compacted_area_faults_without_xsavec() {
    let ram = Ram::new(4 << 20);
    let st = start(&ram, true);
    ram.write_u64(AREA + 520, 1 << 63 | COMPONENTS);
    let result = |cpuid: Option<fn(u32, u32) -> [u32; 4]>| {
        let mut machine = Machine {
            cpuid,
            ..Machine::default()
        };
        execute(&ram, &st, &mut machine, XRSTOR).err()
    };
    assert_eq!(result(None), None);
    assert_eq!(result(Some(without_xsavec)), Some(13));
}

#[test]
fn extended_region_must_lie_in_the_segment() {
    let ram = Ram::new(4 << 20);
    let mut st = start(&ram, false);
    st.seg[seg::DS].access = 0x4093;
    for (limit, expected) in [(AREA + 703, None), (AREA + 702, Some(13))] {
        st.seg[seg::DS].limit = u32::try_from(limit).unwrap_or(0);
        for code in [XSAVE, XRSTOR] {
            assert_eq!(vector_of(&st, &ram, code), expected, "{code:x?} {limit:#x}");
        }
        ram.write(AREA, &[0; 1024]);
        ram.write_u64(AREA + 512, 7);
    }
}

//! Gathers, scatters and byte-masked stores: what they load and store, and what a fault leaves.
#![allow(unsafe_code, reason = "the programs are assembly")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, between, gate, host_cpuid, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;

std::arch::global_asm!(
    ".global el_gather, el_gather32, el_scatter, el_bytes, el_mmx, el_same, el_end",
    "el_gather:",
    "vpgatherdd ymm1, [rax + ymm2*4], ymm3",
    "hlt",
    "el_gather32:",
    "vpgatherqd xmm1, [eax + ymm2*1 + 8], xmm3",
    "hlt",
    "el_scatter:",
    "vpscatterdq [rax + ymm2*8] {{k1}}, zmm1",
    "hlt",
    "el_bytes:",
    "maskmovdqu xmm1, xmm2",
    "hlt",
    "el_mmx:",
    "movq mm0, [rax]",
    "movq mm1, [rax + 8]",
    "maskmovq mm0, mm1",
    "hlt",
    "el_same:",
    // VPGATHERDD whose index is its destination.
    ".byte 0xc4, 0xe2, 0x65, 0x90, 0x0c, 0x88",
    "hlt",
    "el_end:",
);

unsafe extern "C" {
    fn el_gather();
    fn el_gather32();
    fn el_scatter();
    fn el_bytes();
    fn el_mmx();
    fn el_same();
    static el_end: u8;
}

const DATA: usize = 0x20_0000;
/// A page that is not mapped.
const ABSENT: usize = 0x60_0000;
/// The page-fault handler: a HLT.
const HANDLER: usize = 0xf000;

/// A processor with AVX and AVX-512, whatever the host has.
fn wide(leaf: u32, sub: u32) -> [u32; 4] {
    let mut v = host_cpuid(leaf, sub);
    match (leaf, sub) {
        (1, _) => v[2] |= 1 << 26 | 1 << 28,
        (7, 0) => v[1] |= 1 << 5 | 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31,
        _ => {}
    }
    v
}

fn machine() -> (Ram, CpuState) {
    let ram = Ram::new(16 << 20);
    let mut st = long_mode(&ram, 0);
    // The 2 MiB page of ABSENT.
    ram.write_u64(common::TABLES + 0x2000 + 8 * 3, 0);
    ram.write(HANDLER, &[0xf4]);
    gate(&ram, 14, HANDLER as u64, 0);
    gate(&ram, 6, HANDLER as u64, 0);
    let entry = el_gather as *const () as usize;
    // SAFETY: labels of one section.
    ram.write(CODE, unsafe {
        between(entry as *const u8, &raw const el_end)
    });
    for (i, address) in (0_u64..1024).zip((DATA..).step_by(8)) {
        ram.write_u64(address, i << 32 | (i + 7000));
    }
    st.cr4 |= 1 << 18;
    st.xcr0 = 0xe7;
    (ram, st)
}

fn at(label: unsafe extern "C" fn()) -> u64 {
    (CODE + label as usize - el_gather as *const () as usize) as u64
}

/// Sets the low 32 bytes of vector register `n` below 16.
fn set_vector(st: &mut CpuState, n: usize, bytes: [u8; 32]) {
    st.xsave.0[512] |= 6;
    st.xsave.0[160 + 16 * n..176 + 16 * n].copy_from_slice(&bytes[..16]);
    st.xsave.0[576 + 16 * n..592 + 16 * n].copy_from_slice(&bytes[16..]);
}

fn vector(st: &CpuState, n: usize) -> [u8; 32] {
    let mut v = [0; 32];
    v[..16].copy_from_slice(&st.xsave.0[160 + 16 * n..176 + 16 * n]);
    v[16..].copy_from_slice(&st.xsave.0[576 + 16 * n..592 + 16 * n]);
    v
}

fn words(v: [i32; 8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (element, v) in bytes.chunks_mut(4).zip(v) {
        element.copy_from_slice(&v.to_le_bytes());
    }
    bytes
}

fn run(ram: &Ram, st: &CpuState) -> CpuState {
    let mut cpu = vcpu(ram, st);
    let mut machine = Machine {
        cpuid: Some(wide),
        ..Machine::default()
    };
    assert_eq!(cpu.run(&mut machine, 1000), Exit::Halted);
    state(&mut cpu)
}

#[test]
fn gather_loads_the_chosen_elements_and_clears_its_mask() {
    let (ram, mut st) = machine();
    st.rip = at(el_gather);
    st.gpr[0] = DATA as u64 + 0x100;
    set_vector(&mut st, 1, words([-1; 8]));
    set_vector(&mut st, 2, words([0, 2, -2, 4, 100, -64, 6, 8]));
    set_vector(
        &mut st,
        3,
        words([-1, 0, i32::MIN, -1, -1, -1, 0x7fff_ffff, -1]),
    );
    let st = run(&ram, &st);
    let value = |index: i32| 7000 + 32 + index / 2;
    let expected = [
        value(0),
        -1,
        value(-2),
        value(4),
        value(100),
        value(-64),
        -1,
        value(8),
    ];
    assert_eq!(vector(&st, 1), words(expected));
    assert_eq!(vector(&st, 3), [0; 32], "the mask");
}

#[test]
fn fault_in_a_gather_keeps_the_elements_before_it() {
    let (ram, mut st) = machine();
    st.rip = at(el_gather);
    st.gpr[0] = DATA as u64;
    let far = i32::try_from((ABSENT - DATA) / 4).unwrap();
    set_vector(&mut st, 1, words([-1; 8]));
    set_vector(&mut st, 2, words([2, 4, far, 6, 8, 10, 12, 14]));
    set_vector(&mut st, 3, words([-1; 8]));
    let st = run(&ram, &st);
    assert_eq!(st.cr2, ABSENT as u64);
    assert_eq!(vector(&st, 1), words([7001, 7002, -1, -1, -1, -1, -1, -1]));
    assert_eq!(
        vector(&st, 3),
        words([0, 0, -1, -1, -1, -1, -1, -1]),
        "the mask"
    );
}

#[test]
fn gather_with_short_addresses_wraps_at_four_gigabytes() {
    let (ram, mut st) = machine();
    st.rip = at(el_gather32);
    st.gpr[0] = 0xffff_0000_0000_0000 | (DATA as u64);
    set_vector(&mut st, 1, words([-1; 8]));
    // Qwords: 0, 2^32 + 8, -8, 16.
    set_vector(&mut st, 2, words([0, 0, 8, 1, -8, -1, 16, 0]));
    set_vector(&mut st, 3, words([-1, -1, -1, 0, 0, 0, 0, 0]));
    let st = run(&ram, &st);
    assert_eq!(vector(&st, 1), words([7001, 7002, 7000, -1, 0, 0, 0, 0]));
}

#[test]
fn gather_into_its_own_index_is_undefined() {
    let (ram, mut st) = machine();
    st.rip = at(el_same);
    st.gpr[0] = DATA as u64;
    let st = run(&ram, &st);
    assert_eq!(st.rip, HANDLER as u64 + 1);
}

#[test]
fn scatter_stores_in_order_and_stops_at_a_fault() {
    let (ram, mut st) = machine();
    st.rip = at(el_scatter);
    st.gpr[0] = DATA as u64;
    let far = i32::try_from((ABSENT - DATA) / 8).unwrap();
    // Elements 1 and 2 go to the same place; 3 is masked, 5 faults.
    set_vector(&mut st, 2, words([1, 2, 2, far, 3, far, 4, 5]));
    st.xsave.0[512] |= 0xe0;
    st.xsave.0[1088 + 8] = 0b1111_0111;
    for n in 0..4_u8 {
        // Qwords 0 to 3 of ZMM1 are 10, 11, ..; 4 to 7 are in the upper half.
        let low = if n < 2 { 160 + 16 } else { 576 + 16 };
        st.xsave.0[low + 8 * usize::from(n % 2)] = 10 + n;
        st.xsave.0[1152 + 32 + 8 * usize::from(n)] = 14 + n;
    }
    st.xsave.0[512] |= 6;
    let st = run(&ram, &st);
    assert_eq!(st.cr2, ABSENT as u64);
    let stored = [1, 2, 3].map(|n| ram.read_u64(DATA + 8 * n));
    assert_eq!(stored, [10, 12, 14], "the last of two stores counts");
    assert_eq!(ram.read_u64(DATA + 32), 4 << 32 | 7004, "after the fault");
    assert_eq!(st.xsave.0[1088 + 8], 0b1110_0000, "what is left");
}

#[test]
fn byte_masked_store_touches_only_the_chosen_bytes() {
    let (ram, mut st) = machine();
    st.rip = at(el_bytes);
    // The last chosen byte is the last one before the absent page.
    st.gpr[7] = ABSENT as u64 - 4;
    set_vector(&mut st, 1, [0x5a; 32]);
    let mut mask = [0x7f; 32];
    (mask[1], mask[3]) = (0x80, 0xff);
    set_vector(&mut st, 2, mask);
    let st = run(&ram, &st);
    assert_eq!(st.cr2, 0);
    assert_eq!(ram.read(ABSENT - 4, 5), [0, 0x5a, 0, 0x5a, 0]);
}

#[test]
fn faulting_byte_masked_store_stores_nothing() {
    let (ram, mut st) = machine();
    st.rip = at(el_bytes);
    st.gpr[7] = ABSENT as u64 - 4;
    set_vector(&mut st, 1, [0x5a; 32]);
    set_vector(&mut st, 2, [0xff; 32]);
    let st = run(&ram, &st);
    assert_eq!(st.cr2, ABSENT as u64);
    assert_eq!(ram.read(ABSENT - 4, 4), [0; 4]);
}

#[test]
fn mmx_byte_masked_store_sets_the_tags() {
    let (ram, mut st) = machine();
    st.rip = at(el_mmx);
    ram.write_u64(DATA, 0x8877_6655_4433_2211);
    ram.write_u64(DATA + 8, 0x8000_0000_0000_80ff);
    st.gpr[0] = DATA as u64;
    st.gpr[7] = DATA as u64 + 0x800;
    ram.write_u64(DATA + 0x800, 0);
    let st = run(&ram, &st);
    assert_eq!(ram.read_u64(DATA + 0x800), 0x8800_0000_0000_2211);
    assert_eq!(
        (st.xsave.0[4], st.xsave.0[3] & 0x38),
        (0xff, 0),
        "tags and TOP"
    );
}

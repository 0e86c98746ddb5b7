//! Masked memory operands of EVEX-encoded instructions: what is accessed, what faults, what meets a
//! breakpoint. Each program runs in software too, and so do VZEROUPPER and VZEROALL.
#![allow(unsafe_code, reason = "the programs are assembly")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, between, gate, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;

std::arch::global_asm!(
    ".global mk_load, mk_store, mk_compress, mk_compare, mk_broadcast, mk_shuffle, mk_extract",
    ".global mk_aligned, mk_tiny, mk_product, mk_zero_upper, mk_zero_all, mk_end",
    "mk_load:",
    "vmovdqu32 xmm1 {{k1}}, [rax]",
    "hlt",
    "mk_store:",
    "vmovdqu32 [rax] {{k1}}, xmm1",
    "hlt",
    "mk_compress:",
    "vpcompressd [rax] {{k1}}, xmm1",
    "hlt",
    "mk_compare:",
    "vcmppd k2 {{k1}}, ymm1, qword ptr [rax]{{1to4}}, 0",
    "hlt",
    "mk_broadcast:",
    "vbroadcastf32x4 zmm1 {{k1}}, [rax]",
    "hlt",
    "mk_shuffle:",
    "vpshufd xmm1 {{k1}}, [rax], 0",
    "hlt",
    "mk_extract:",
    "vextracti32x4 [rax] {{k1}}, zmm1, 0",
    "hlt",
    "mk_aligned:",
    "vmovaps xmm1 {{k1}}, [rax]",
    "hlt",
    "mk_tiny:",
    "vmulps zmm1, zmm1, zmm1, {{rn-sae}}",
    "hlt",
    "mk_product:",
    "vmulss xmm1, xmm1, xmm1",
    "hlt",
    "mk_zero_upper:",
    "vzeroupper",
    "vmovups [rax], ymm1",
    "hlt",
    "mk_zero_all:",
    "vzeroall",
    "vmovups [rax], ymm1",
    "hlt",
    "mk_end:",
);

unsafe extern "C" {
    fn mk_load();
    fn mk_store();
    fn mk_compress();
    fn mk_compare();
    fn mk_broadcast();
    fn mk_shuffle();
    fn mk_extract();
    fn mk_aligned();
    fn mk_tiny();
    fn mk_product();
    fn mk_zero_upper();
    fn mk_zero_all();
    static mk_end: u8;
}

const DATA: u64 = 0x20_0000;
/// A page that is not mapped.
const ABSENT: u64 = 0x60_0000;
/// An address beyond the guest's memory.
const MMIO: u64 = 32 << 20;
/// Exception handlers, one each 16 bytes by vector: HLT.
const HANDLERS: usize = 0xf000;
const GP: u64 = 13;
const PF: u64 = 14;

/// A machine that executes the program at `label`, with k1 and the doublewords of XMM1 1, 2, 3, 4.
fn machine(label: unsafe extern "C" fn(), rax: u64, k1: u64) -> (Ram, CpuState) {
    let ram = Ram::new(16 << 20);
    let mut st = long_mode(&ram, 0);
    // The 2 MiB page of ABSENT.
    ram.write_u64(common::TABLES + 0x2000 + 8 * 3, 0);
    for vector in 0..32 {
        let handler = HANDLERS + vector * 16;
        ram.write(handler, &[0xf4]);
        gate(&ram, vector, handler as u64, 0);
    }
    let entry = mk_load as *const () as usize;
    // SAFETY: labels of one section.
    ram.write(CODE, unsafe {
        between(entry as *const u8, &raw const mk_end)
    });
    st.rip = (CODE + label as usize - entry) as u64;
    st.gpr[0] = rax;
    st.xsave.0[512] |= 0x26;
    st.xsave.0[1088 + 8..1088 + 16].copy_from_slice(&k1.to_le_bytes());
    for n in 0..4_u8 {
        st.xsave.0[160 + 16 + 4 * usize::from(n)] = n + 1;
    }
    (ram, st)
}

/// Runs a program with vector instructions in software, and then as this host can.
///
/// Returns the second result, which must equal the first.
fn run(ram: &Ram, st: &CpuState) -> (CpuState, Machine) {
    let [soft, any] = [true, false].map(|software| {
        let mut cpu = vcpu(ram, st);
        cpu.set_software_vectors(software);
        let mut machine = Machine::default();
        assert_eq!(cpu.run(&mut machine, 1000), Exit::Halted);
        (state(&mut cpu), machine)
    });
    let result = |st: &CpuState| (st.rip, st.gpr, st.cr2, st.dr6, st.xsave.0.to_vec());
    assert!(result(&soft.0) == result(&any.0), "the host differs");
    assert_eq!(soft.1.mmio, any.1.mmio);
    assert_eq!(soft.1.mmio_reads, any.1.mmio_reads);
    any
}

/// The vector of the exception that ended the program, if one did.
fn exception(st: &CpuState) -> Option<u64> {
    let halted = st.rip - 1;
    let at = halted.checked_sub(HANDLERS as u64)?;
    (at < 32 * 16).then_some(at / 16)
}

/// The error code of the exception that ended the program.
fn error_code(ram: &Ram, st: &CpuState) -> u64 {
    ram.read_u64(usize::try_from(st.gpr[4]).unwrap())
}

/// The doublewords of XMM1.
fn doublewords(st: &CpuState) -> [u32; 4] {
    [0, 4, 8, 12].map(|at| {
        let bytes = &st.xsave.0[160 + 16 + at..][..4];
        u32::from_le_bytes(bytes.try_into().unwrap())
    })
}

#[test]
fn masked_load_does_not_read_the_other_elements() {
    let (ram, st) = machine(mk_load, ABSENT - 8, 0b11);
    let at = usize::try_from(ABSENT).unwrap() - 8;
    ram.write_u64(at, 20 << 32 | 10);
    let (st, _) = run(&ram, &st);
    assert_eq!(exception(&st), None);
    assert_eq!(doublewords(&st), [10, 20, 3, 4]);
}

#[test]
fn masked_load_faults_at_the_first_selected_element() {
    let (ram, st) = machine(mk_load, ABSENT - 4, 0b1101);
    let (st, _) = run(&ram, &st);
    assert_eq!((exception(&st), st.cr2), (Some(PF), ABSENT + 4));
    assert_eq!(doublewords(&st), [1, 2, 3, 4], "nothing is loaded");
}

#[test]
fn empty_mask_suppresses_a_non_canonical_address() {
    let (ram, st) = machine(mk_load, 1 << 62, 0xf0);
    let (st, _) = run(&ram, &st);
    assert_eq!(exception(&st), None);
}

#[test]
fn masked_store_reports_a_write() {
    let (ram, st) = machine(mk_store, ABSENT - 8, 0b101);
    let (st, _) = run(&ram, &st);
    assert_eq!((exception(&st), st.cr2), (Some(PF), ABSENT));
    assert_eq!(error_code(&ram, &st), 2);
    let at = usize::try_from(ABSENT).unwrap() - 8;
    assert_eq!(ram.read_u64(at), 0, "nothing is stored");
}

#[test]
fn masked_accesses_reach_only_their_devices_registers() {
    let (ram, st) = machine(mk_load, MMIO, 0b101);
    let (_, machine_after) = run(&ram, &st);
    assert_eq!(machine_after.mmio_reads, [(MMIO, 4), (MMIO + 8, 4)]);

    let (ram, st) = machine(mk_store, MMIO, 0b101);
    let (_, machine_after) = run(&ram, &st);
    assert_eq!(machine_after.mmio_reads, [], "a store reads nothing");
    let written = [(MMIO, vec![1, 0, 0, 0]), (MMIO + 8, vec![3, 0, 0, 0])];
    assert_eq!(machine_after.mmio, written);
}

#[test]
fn compressed_store_writes_as_many_elements_as_the_mask_selects() {
    let (ram, st) = machine(mk_compress, ABSENT - 8, 0b1010);
    let (st, _) = run(&ram, &st);
    assert_eq!(exception(&st), None);
    let at = usize::try_from(ABSENT).unwrap() - 8;
    assert_eq!(ram.read_u64(at), 4 << 32 | 2);
}

#[test]
fn embedded_broadcast_is_read_if_the_mask_selects_a_lane() {
    for (k1, faults) in [(0b1000, true), (0b1_0000, false)] {
        let (ram, st) = machine(mk_compare, ABSENT, k1);
        let (st, _) = run(&ram, &st);
        assert_eq!(exception(&st) == Some(PF), faults, "k1 {k1:#x}");
    }
}

#[test]
fn broadcast_reads_what_any_lane_needs() {
    // Lane 9 needs element 1, which is the last one before the page that is not mapped.
    for (k1, faults) in [(1 << 9, false), (1 << 10, true)] {
        let (ram, st) = machine(mk_broadcast, ABSENT - 8, k1);
        let (st, _) = run(&ram, &st);
        assert_eq!(exception(&st) == Some(PF), faults, "k1 {k1:#x}");
    }
}

#[test]
fn instruction_without_fault_suppression_reads_all() {
    let (ram, st) = machine(mk_shuffle, ABSENT - 8, 0);
    let (st, _) = run(&ram, &st);
    assert_eq!((exception(&st), st.cr2), (Some(PF), ABSENT));
}

#[test]
fn extraction_checks_all_and_writes_the_selected_elements() {
    let (ram, st) = machine(mk_extract, ABSENT - 8, 0b1);
    let (st, _) = run(&ram, &st);
    assert_eq!((exception(&st), st.cr2), (Some(PF), ABSENT));

    let (ram, st) = machine(mk_extract, DATA, 0b10);
    let (st, _) = run(&ram, &st);
    assert_eq!(exception(&st), None);
    let at = usize::try_from(DATA).unwrap();
    assert_eq!([ram.read_u64(at), ram.read_u64(at + 8)], [2 << 32, 0]);
}

#[test]
fn aligned_move_checks_alignment_whatever_the_mask() {
    for k1 in [0, 1] {
        let (ram, st) = machine(mk_aligned, DATA + 4, k1);
        let (st, _) = run(&ram, &st);
        assert_eq!(exception(&st), Some(GP), "k1 {k1}");
    }
}

#[test]
fn breakpoint_is_met_by_selected_elements_only() {
    for (k1, hit) in [(0b1011, false), (0b0100, true)] {
        for label in [mk_load, mk_store] {
            let (ram, mut st) = machine(label, DATA, k1);
            // Reads and writes of four bytes.
            (st.dr[0], st.dr7) = (DATA + 8, 0x000f_0402);
            let (st, _) = run(&ram, &st);
            assert_eq!(exception(&st) == Some(1), hit, "k1 {k1:#x}");
        }
    }
}

#[test]
fn unmasked_exception_precedes_any_result() {
    for (masked_off, expected) in [(0x80, None), (0x1000, None), (0x800, Some(19))] {
        let (ram, mut st) = machine(mk_product, DATA, 0);
        // One exception is unmasked; 2^-70 squared underflows.
        let mxcsr: u32 = 0x1f80 & !masked_off;
        st.xsave.0[24..28].copy_from_slice(&mxcsr.to_le_bytes());
        st.cr4 |= 1 << 10;
        let small = (127_u32 - 70) << 23;
        st.xsave.0[160 + 16..160 + 20].copy_from_slice(&small.to_le_bytes());
        let (st, _) = run(&ram, &st);
        assert_eq!(exception(&st), expected, "without {masked_off:#x}");
        let result = if expected.is_some() { small } else { 1 << 9 };
        assert_eq!(doublewords(&st)[0], result, "without {masked_off:#x}");
    }
}

#[test]
fn suppressed_underflow_keeps_a_denormal_result() {
    let (ram, mut st) = machine(mk_tiny, DATA, 0);
    // Underflow is unmasked.
    st.xsave.0[24..28].copy_from_slice(&0x1780_u32.to_le_bytes());
    // 2^-70, whose square is the denormal 2^-140.
    let small = (127_u32 - 70) << 23;
    st.xsave.0[160 + 16..160 + 20].copy_from_slice(&small.to_le_bytes());
    let (st, _) = run(&ram, &st);
    assert_eq!(exception(&st), None);
    assert_eq!(doublewords(&st)[0], 1 << 9);
}

#[test]
fn registers_are_cleared_without_the_instruction_of_the_host() {
    let low = [2 << 32 | 1, 4 << 32 | 3];
    for (label, expected) in [
        (mk_zero_upper as unsafe extern "C" fn(), low),
        (mk_zero_all, [0, 0]),
    ] {
        let (ram, mut st) = machine(label, DATA, 0);
        // The high half of YMM1.
        st.xsave.0[576 + 16..576 + 32].fill(0xff);
        let (st, _) = run(&ram, &st);
        assert_eq!(exception(&st), None);
        let at = usize::try_from(DATA).unwrap();
        let stored = [0, 8, 16, 24].map(|offset| ram.read_u64(at + offset));
        assert_eq!(stored, [expected[0], expected[1], 0, 0]);
    }
}

//! Two process contexts map different memory and code at the same addresses.

use super::{CODE, COUNTING, Machine, PLAIN, STACK, machine};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;
use hindsight_regs::cr::Cr4;

/// Rounds of each loop.
const ROUNDS: u64 = 3000;
/// The linear address of the page of data; that of code follows it.
const PAGE: u64 = 0x40_0000;
/// The tables that map the pages, one for each context.
const TABLES: [u64; 2] = [0xa000, 0xc000];
/// Descriptors of INVPCID for both pages of the first context.
const DESCRIPTORS: u64 = 0xd000;
/// Bit 63 of the source of MOV to CR3.
const NO_FLUSH: u64 = 1 << 63;

/// Reads the page of data in both contexts and calls the page of code, [`ROUNDS`] times.
fn rounds() -> Vec<u8> {
    let mut code = vec![0x48, 0xc7, 0xc1];
    code.extend(u32::try_from(ROUNDS).unwrap_or(0).to_le_bytes());
    let start = code.len();
    for (cr3, add) in [(0xd8, [0x48, 0x01, 0xc3]), (0xd9, [0x49, 0x01, 0xc2])] {
        // mov cr3, r8 or r9; mov rax, [rsi]; lea r11, [r11 + 1]; add rbx or r10, rax; call r15
        code.extend([0x41, 0x0f, 0x22, cr3, 0x48, 0x8b, 0x06]);
        code.extend([0x4d, 0x8d, 0x5b, 1]);
        code.extend(add);
        code.extend([0x41, 0xff, 0xd7]);
    }
    // dec rcx; jne to the start
    code.extend([0x48, 0xff, 0xc9, 0x0f, 0x85]);
    let back = start.wrapping_sub(code.len() + 4) as u32;
    code.extend(back.to_le_bytes());
    code
}

/// A function that adds `n` to R13.
fn function(n: u8) -> [u8; 13] {
    // lea r11, [r11 + 1]; lea r13, [r13 + n]; lea r11, [r11 + 1]; ret
    [
        0x4d, 0x8d, 0x5b, 1, 0x4d, 0x8d, 0x6d, n, 0x4d, 0x8d, 0x5b, 1, 0xc3,
    ]
}

/// Runs the rounds, maps other pages in the first context, invalidates, and runs them again.
fn run(invalidate: &[u8], no_flush: u64, after_runs: u64, seed: u64) -> (Machine, CpuState) {
    let mut code = rounds();
    // mov [rdi], r12; mov [rdi + 8], r14
    code.extend([0x4c, 0x89, 0x27, 0x4c, 0x89, 0x77, 8]);
    code.extend(invalidate);
    code.extend(rounds());
    code.push(0xf4);
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    state.cr4 |= Cr4::PCIDE.bits();
    state.gpr[2] = 0;
    state.gpr[3] = 0;
    state.gpr[5] = DESCRIPTORS;
    state.gpr[6] = PAGE;
    state.gpr[7] = TABLES[0];
    state.gpr[8] = 0x1000 | 1 | no_flush;
    state.gpr[9] = 0x8000 | 2 | no_flush;
    state.gpr[10] = 0;
    state.gpr[12] = 0x13_0003;
    state.gpr[13] = 0;
    state.gpr[14] = 0x13_1003;
    state.gpr[15] = PAGE + 0x1000;
    let mut machine = machine(&code, &state, seed, after_runs);
    let memory = &machine.2;
    let word = |at: u64, value: u64| assert!(memory.write(at, &value.to_le_bytes()));
    word(0x8000, 0x9003);
    word(0x9000, 0xb003);
    word(0xb000, 0x83);
    for (n, (directory, table)) in (1..).zip([(0x3000, TABLES[0]), (0xb000, TABLES[1])]) {
        word(directory + 16, table | 3);
        for page in 0..2 {
            word(table + page * 8, (n << 16) + (page << 12) + 0x10_0003);
        }
    }
    for (n, value) in (1..).zip([3_u64, 5, 7]) {
        word(0x10_0000 + (n << 16), value);
        let added = u8::try_from(value).unwrap_or(0);
        assert!(memory.write(0x10_1000 + (n << 16), &function(added)));
    }
    for page in 0..2 {
        word(DESCRIPTORS + page * 16, 1);
        word(DESCRIPTORS + page * 16 + 8, PAGE + (page << 12));
    }
    assert_eq!(machine.0.run(&mut machine.1, 1 << 24), Exit::Halted);
    let mut end = CpuState::reset();
    machine.0.store(&mut end);
    (machine, end)
}

/// Ways to invalidate both pages of the first context, while the second one is current.
fn invalidations() -> Vec<(&'static str, Vec<u8>)> {
    // mov edx, n; invpcid rdx, [rbp]; invpcid rdx, [rbp + 16]
    let invpcid = |n: u8| {
        let mut code = vec![0xba, n, 0, 0, 0, 0x66, 0x0f, 0x38, 0x82, 0x55, 0];
        code.extend([0x66, 0x0f, 0x38, 0x82, 0x55, 16]);
        code
    };
    vec![
        // mov cr3, r8; invlpg [rsi]; invlpg [r15]
        (
            "INVLPG",
            vec![
                0x41, 0x0f, 0x22, 0xd8, 0x0f, 0x01, 0x3e, 0x41, 0x0f, 0x01, 0x3f,
            ],
        ),
        // btr r8, 63
        ("MOV to CR3", vec![0x49, 0x0f, 0xba, 0xf0, 63]),
        ("INVPCID of an address", invpcid(0)),
        ("INVPCID of a context", invpcid(1)),
        ("INVPCID of everything", invpcid(2)),
        ("INVPCID of everything but global pages", invpcid(3)),
    ]
}

#[test]
fn each_context_finds_its_own_pages_and_what_was_invalidated_is_gone() {
    for (name, code) in invalidations() {
        for (after_runs, seed) in [(u64::MAX, PLAIN), (2, PLAIN), (2, COUNTING)] {
            let (machine, end) = run(&code, NO_FLUSH, after_runs, seed);
            let case = format!("{name}, seed {seed}, translation after {after_runs} runs");
            assert_eq!(end.gpr[3], ROUNDS * (3 + 7), "{case}: data, first context");
            assert_eq!(
                end.gpr[10],
                ROUNDS * (5 + 5),
                "{case}: data, second context"
            );
            assert_eq!(end.gpr[13], ROUNDS * (3 + 5 + 7 + 5), "{case}: code");
            let stats = machine.0.stats();
            if !name.starts_with("MOV") && seed == PLAIN {
                assert!(stats.tlb_fills < 100, "{case}: {} fills", stats.tlb_fills);
                assert!(stats.lookups < 200, "{case}: {} look-ups", stats.lookups);
            }
            let translated = stats.translated > stats.retired / 2;
            assert_eq!(translated, after_runs == 2, "{case}");
        }
    }
}

#[test]
fn context_that_is_flushed_at_each_load_is_walked_again() {
    let (_, code) = invalidations().swap_remove(1);
    for after_runs in [u64::MAX, 2] {
        let (machine, end) = run(&code, 0, after_runs, PLAIN);
        assert_eq!(end.gpr[13], ROUNDS * (3 + 5 + 7 + 5));
        assert!(machine.0.stats().tlb_fills > ROUNDS);
    }
}

/// A page is mapped elsewhere again and again, by stores to another set of the L1.
#[test]
fn line_of_an_invalidated_page_is_not_read_again() {
    const PASSES: u64 = 8;
    // mov ecx, ROUNDS; mov rax, [rsi]; mov [rsi + 8], rbx; add rbx, rax; dec rcx; jne
    let mut code = vec![0xb9];
    code.extend(u32::try_from(ROUNDS).unwrap_or(0).to_le_bytes());
    code.extend([0x48, 0x8b, 0x06, 0x48, 0x89, 0x5e, 8, 0x48, 0x01, 0xc3]);
    code.extend([0x48, 0xff, 0xc9, 0x75, 0xf1]);
    // mov [rdi], r12; xchg r12, r13; invlpg [rsi]; dec rdx; jne to the start; hlt
    code.extend([0x4c, 0x89, 0x27, 0x4d, 0x87, 0xec, 0x0f, 0x01, 0x3e]);
    code.extend([0x48, 0xff, 0xca, 0x75, 0xdc, 0xf4]);
    for (after_runs, seed) in [(u64::MAX, PLAIN), (2, PLAIN), (2, COUNTING)] {
        let mut state = CpuState::long_mode(0x1000, CODE, STACK);
        state.gpr[2] = PASSES;
        state.gpr[3] = 0;
        state.gpr[6] = PAGE + 0x140;
        state.gpr[7] = TABLES[0];
        state.gpr[12] = 0x13_0003;
        state.gpr[13] = 0x11_0003;
        let mut machine = machine(&code, &state, seed, after_runs);
        let word = |at: u64, value: u64| assert!(machine.2.write(at, &value.to_le_bytes()));
        word(0x3000 + 16, TABLES[0] | 3);
        word(TABLES[0], 0x11_0003);
        word(0x11_0140, 3);
        word(0x13_0140, 7);
        assert_eq!(machine.0.run(&mut machine.1, 1 << 24), Exit::Halted);
        let mut end = CpuState::reset();
        machine.0.store(&mut end);
        assert_eq!(end.gpr[3], ROUNDS * (3 + 7) * PASSES / 2, "seed {seed}");
    }
}

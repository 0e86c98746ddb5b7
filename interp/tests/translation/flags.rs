//! Units that begin with a reader of the flags that were set before them.

use super::{CODE, COUNTING, COUNTING_HITS, DATA, PLAIN, STACK, machine, snapshot};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;

/// The forms of an instruction for operands of 1, 2, 4 and 8 bytes, with the opcode for bytes.
fn sizes(opcode: &[u8], rest: &[u8]) -> Vec<Vec<u8>> {
    let mut wide = opcode.to_vec();
    *wide.last_mut().expect("an opcode") |= 1;
    [
        (&[][..], opcode),
        (&[0x66], &wide),
        (&[], &wide),
        (&[0x48], &wide),
    ]
    .iter()
    .map(|(prefix, opcode)| [prefix, *opcode, rest].concat())
    .collect()
}

/// Instructions that set flags from RAX, RBX or memory at RSI.
fn producers() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for n in 0..8 {
        // ADD, OR, ADC, SBB, AND, SUB, XOR, CMP: of registers, with an immediate, to memory.
        all.extend(sizes(&[n << 3], &[0xd8]));
        all.extend(sizes(&[n << 3], &[0x1e]));
        all.push(vec![0x83, 0xc0 | n << 3, 0x85]);
        all.push(vec![0x48, 0x81, 0xc0 | n << 3, 0x12, 0x34, 0x56, 0x87]);
    }
    // TEST, NEG, INC, DEC, SHL, SHR and SAR by 3, SHL by CL
    all.extend(sizes(&[0x84], &[0xd8]));
    for group in [0xd8, 0xe0, 0xf0] {
        all.extend(sizes(&[0xf6], &[group]));
    }
    for (opcode, modrm) in [
        (0xfe, 0xc0),
        (0xfe, 0xc8),
        (0xc0, 0xe0),
        (0xc0, 0xe8),
        (0xc0, 0xf8),
    ] {
        let count: &[u8] = if opcode == 0xc0 { &[3] } else { &[] };
        all.extend(sizes(&[opcode], &[&[modrm][..], count].concat()));
    }
    all.extend(sizes(&[0xd2], &[0xe0]));
    // BT, BSF, POPCNT, TZCNT, LZCNT, IMUL, XADD
    for code in [
        &[0x0f, 0xa3, 0xd8][..],
        &[0x48, 0x0f, 0xbc, 0xc3],
        &[0xf3, 0x48, 0x0f, 0xb8, 0xc3],
        &[0xf3, 0x48, 0x0f, 0xbc, 0xc3],
        &[0xf3, 0x48, 0x0f, 0xbd, 0xc3],
        &[0x0f, 0xaf, 0xc3],
        &[0xf0, 0x0f, 0xc1, 0x1e],
    ] {
        all.push(code.to_vec());
    }
    // INC or DEC of any size after each, and BT after it.
    let alone = all.clone();
    for (n, code) in alone.iter().enumerate() {
        let step: &[u8] = match n % 4 {
            0 => &[0xfe, 0xc0],
            1 => &[0x66, 0xff, 0xc8],
            2 => &[0xff, 0xc0],
            _ => &[0x48, 0xff, 0xc8],
        };
        all.push([code, step].concat());
        all.push([code, step, &[0x0f, 0xa3, 0xd8][..]].concat());
    }
    all
}

/// A loop that begins with readers of the flags that its last instructions set.
fn code(producer: &[u8]) -> Vec<u8> {
    // adc r8, [rdi]; setc [rdi]; seto [rdi+1]; sets [rdi+2]; setz [rdi+3]; setp [rdi+4];
    // lea rdi, [rdi+64]
    let mut code = vec![
        0x4c, 0x13, 0x07, 0x0f, 0x92, 0x07, 0x0f, 0x90, 0x47, 1, 0x0f, 0x98, 0x47, 2, 0x0f, 0x94,
        0x47, 3, 0x0f, 0x9a, 0x47, 4, 0x48, 0x8d, 0x7f, 64,
    ];
    // rol r8, 7; imul rbp, rbp, 0x10dcd; add rbp, 12345; mov rax, rbp; mov rbx, rbp;
    // ror rbx, 13; mov ecx, ebp; mov [rsi], rbx
    code.extend([
        0x49, 0xc1, 0xc0, 7, 0x48, 0x69, 0xed, 0xcd, 0x0d, 0x01, 0, 0x48, 0x81, 0xc5, 0x39, 0x30,
        0, 0, 0x48, 0x89, 0xe8, 0x48, 0x89, 0xeb, 0x48, 0xc1, 0xcb, 13, 0x89, 0xe9, 0x48, 0x89,
        0x1e,
    ]);
    code.extend(producer);
    let back = -i8::try_from(code.len() + 2).expect("a short loop");
    code.extend([0xeb, back.cast_unsigned()]);
    code
}

#[test]
fn units_read_flags_that_were_set_before_them() {
    let mut translated = 0;
    let producers = producers().into_iter();
    for (producer, seed) in
        producers.flat_map(|p| [PLAIN, COUNTING, COUNTING_HITS].map(|seed| (p.clone(), seed)))
    {
        let code = code(&producer);
        let mut state = CpuState::long_mode(0x1000, CODE, STACK);
        state.gpr[5] = 0x0123_4567_89ab_cdef;
        state.gpr[6] = DATA + 0x100;
        state.gpr[7] = DATA;
        let run = |after_runs| {
            let mut machine = machine(&code, &state, seed, after_runs);
            // Slices of odd lengths enter the loop with all kinds of flags, too.
            for slice in 1..60 {
                machine.0.run(&mut machine.1, 97 * slice % 2000);
            }
            let translated = machine.0.stats().translated;
            (snapshot(&mut machine), translated)
        };
        let (interpreted, _) = run(u64::MAX);
        let (both, by_units) = run(2);
        assert!(interpreted == both, "seed {seed}: {producer:x?}");
        translated += u64::from(seed == PLAIN && by_units > 40_000);
    }
    assert!(translated > 150, "{translated}");
}

#[test]
fn block_that_reads_flags_of_the_one_before_it_is_translated() {
    let code = [
        0x48, 0x83, 0xc3, 0x03, // 00: add rbx, 3
        0x48, 0x83, 0xe9, 0x01, // 04: sub rcx, 1
        0x72, 0x12, // 08: jb 1c
        0xf6, 0xc3, 0x01, // 0a: test bl, 1
        0x48, 0x8d, 0x52, 0x01, // 0d: lea rdx, [rdx+1]
        0x74, 0xed, // 11: je 00
        0x48, 0x8d, 0x40, 0x01, // 13: lea rax, [rax+1]
        0x78, 0x02, // 17: js 1b
        0x75, 0xe5, // 19: jne 00
        0xf4, // 1b: hlt
        0xf4, // 1c: hlt
    ];
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    state.gpr[1] = 100_000;
    let (mut vcpu, mut platform, _) = machine(&code, &state, PLAIN, 10);
    assert_eq!(vcpu.run(&mut platform, 10_000_000), Exit::Halted);
    let stats = vcpu.stats();
    assert!(stats.unit_exits.edges < 1_000, "{stats:?}");
}

//! Paths of units beside counters: what the units report late must not change what those see.

use super::*;

/// LBR without the branch predictor: see `has_ring_alone`.
const RING_ALONE: u64 = 0;
/// An address without memory.
const DEVICE: u64 = 0x20_0000;

/// Where [`ring_and_counters`] has IA32_PERF_GLOBAL_STATUS.
const STATUS: usize = 99;

/// Returns LBR MSRs and counters.
fn ring_and_counters(platform: &mut ModelPlatform<NoDevices, NoInterrupts>) -> Vec<u64> {
    let mut read = |index| platform.rdmsr(index).expect("the MSR exists");
    let mut found: Vec<_> = (0..32)
        .flat_map(|n| {
            [
                msr::MSR_LASTBRANCH_0_FROM_IP + n,
                msr::MSR_LASTBRANCH_0_TO_IP + n,
                msr::MSR_LBR_INFO_0 + n,
            ]
        })
        .map(&mut read)
        .collect();
    found.extend(
        [
            msr::MSR_LASTBRANCH_TOS,
            msr::IA32_FIXED_CTR0,
            msr::IA32_FIXED_CTR0 + 1,
            msr::IA32_PERF_GLOBAL_STATUS,
            msr::IA32_TIME_STAMP_COUNTER,
        ]
        .map(read),
    );
    found
}

/// Runs a program to its HLT, with these values of MSRs.
fn run(code: &[u8], state: &CpuState, msrs: &[(u32, u64)], after_runs: u64) -> (Vec<u64>, u64) {
    let (mut vcpu, mut platform, memory) = machine(code, state, RING_ALONE, after_runs);
    // The second large page, which has no memory.
    assert!(memory.write(0x3008, &(DEVICE | 0x83).to_le_bytes()));
    for &(index, value) in msrs {
        assert!(platform.wrmsr(index, value).is_ok());
    }
    assert_eq!(vcpu.run(&mut platform, 10_000_000), Exit::Halted);
    (ring_and_counters(&mut platform), vcpu.stats().translated)
}

#[test]
fn counts_are_exact_where_a_unit_is_left_within_a_block() {
    // mov ecx, 100; l: dec ecx; jnz l
    let mut code = vec![0xb9, 100, 0, 0, 0, 0xff, 0xc9, 0x75, 0xfc];
    for _ in 0..6 {
        code.extend([0x48, 0x83, 0xc3, 1]);
    }
    // mov eax, [rsi], which is a device, and instructions after it in the block.
    code.extend([0x8b, 0x06]);
    code.extend([0x90; 20]);
    // dec r8; jnz to the start; hlt
    code.extend([0x49, 0xff, 0xc8]);
    let back = 0_u8.wrapping_sub(code.len() as u8 + 2);
    code.extend([0x75, back, 0xf4]);
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    (state.gpr[6], state.gpr[8]) = (DEVICE, 1000);
    let msrs = [
        (msr::IA32_FIXED_CTR_CTRL, 0x33),
        (msr::IA32_PERF_GLOBAL_CTRL, 3 << 32),
    ];
    let (expected, _) = run(&code, &state, &msrs, u64::MAX);
    let (found, translated) = run(&code, &state, &msrs, 2);
    assert!(translated > 100_000);
    assert_eq!(found, expected);
}

#[test]
fn overflow_freezes_the_ring_after_its_newest_branches() {
    // l: dec ecx; jnz l; hlt
    let code = [0xff, 0xc9, 0x75, 0xfc, 0xf4];
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    state.gpr[1] = 1000;
    for before in [401, 402, 403, 404, 600, 998, 1000] {
        let freeze = DebugCtl::LBR | DebugCtl::FREEZE_LBRS_ON_PMI;
        let msrs = [
            (msr::IA32_FIXED_CTR_CTRL, 0xb),
            (msr::IA32_FIXED_CTR0, (1 << 48) - before),
            (msr::IA32_PERF_GLOBAL_CTRL, 1 << 32),
            (msr::IA32_DEBUGCTL, freeze.bits()),
        ];
        let (expected, _) = run(&code, &state, &msrs, u64::MAX);
        let (found, translated) = run(&code, &state, &msrs, 2);
        assert!(translated > 300);
        assert_eq!(found, expected, "{before} instructions before the overflow");
    }
}

/// Runs a loop of 80 000 branches of several kinds, with a counter of branches that overflows and
/// then freezes all counters.
fn run_to_overflow(event: u64, before: u64, after_runs: u64) -> (Vec<u64>, u64) {
    // l: call f; test cl, 3; jz m; nop; m: dec ecx; jnz l; hlt; f: ret
    let code = [
        0xe8, 11, 0, 0, 0, 0xf6, 0xc1, 3, 0x74, 1, 0x90, 0xff, 0xc9, 0x75, 0xf1, 0xf4, 0xc3,
    ];
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    state.gpr[1] = 20_000;
    let msrs = [
        (msr::IA32_FIXED_CTR_CTRL, 3),
        (msr::IA32_PERFEVTSEL0, event | 0x53_0000),
        (msr::IA32_A_PMC0, (1 << 48) - before),
        (msr::IA32_PERF_GLOBAL_CTRL, 1 << 32 | 1),
        (msr::IA32_DEBUGCTL, DebugCtl::FREEZE_PERFMON_ON_PMI.bits()),
    ];
    run(&code, &state, &msrs, after_runs)
}

#[test]
fn counter_of_branches_overflows_at_the_same_instruction() {
    for (event, all) in [
        (0x00c4, 80_000),
        (0x01c4, 40_000),
        (0x20c4, 64_999),
        (0x08c4, 20_000),
    ] {
        for before in [all - 1, all - 2, all / 2, 17_431, 17_000, 1024, 3] {
            let (expected, _) = run_to_overflow(event, before, u64::MAX);
            let (found, translated) = run_to_overflow(event, before, 2);
            assert!(translated > 10_000, "{translated}");
            assert_eq!(expected[STATUS] & 1, 1, "the counter overflows");
            assert_eq!(
                found, expected,
                "event {event:x}, {before} before the overflow"
            );
        }
    }
}

#[test]
fn overflow_of_instructions_freezes_a_counter_of_branches_with_all_of_them() {
    // l: call f; rdtsc; jmp m; m: dec ecx; jnz l; hlt; f: ret. No unit has RDTSC.
    let code = [
        0xe8, 9, 0, 0, 0, 0x0f, 0x31, 0xeb, 0, 0xff, 0xc9, 0x75, 0xf3, 0xf4, 0xc3,
    ];
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    state.gpr[1] = 2000;
    for before in [3000, 3001, 3002, 5003, 8000, 9005] {
        let msrs = [
            (msr::IA32_FIXED_CTR_CTRL, 0xb),
            (msr::IA32_FIXED_CTR0, (1 << 48) - before),
            (msr::IA32_PERFEVTSEL0, 0x43_00c4),
            (msr::IA32_PERF_GLOBAL_CTRL, 1 << 32 | 1),
            (msr::IA32_DEBUGCTL, DebugCtl::FREEZE_PERFMON_ON_PMI.bits()),
        ];
        let results = [u64::MAX, 2, 3, 7].map(|after_runs| {
            let (mut vcpu, mut platform, _) = machine(&code, &state, RING_ALONE, after_runs);
            for (index, value) in msrs {
                assert!(platform.wrmsr(index, value).is_ok());
            }
            assert_eq!(vcpu.run(&mut platform, 10_000_000), Exit::Halted);
            [msr::IA32_PMC0, msr::IA32_FIXED_CTR0].map(|index| platform.rdmsr(index))
        });
        assert!(
            results.iter().all(|r| r == &results[0]),
            "{before}: {results:?}"
        );
    }
}

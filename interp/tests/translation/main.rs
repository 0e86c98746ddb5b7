//! Compares translated code with the interpreter on random programs.
//!
//! Both tiers run each program in slices of random length. At the end of each slice, registers,
//! flags, memory and recorded branches must be the same.
#![cfg(not(any(miri, hindsight_sanitizer)))]
#![expect(
    clippy::cast_possible_truncation,
    reason = "random numbers are cut to the width of operands"
)]

mod codes;
mod contexts;
mod flags;
mod paths;
mod program;
mod random;
mod vectors;
mod x87;

use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Memory, ModelPlatform, MsrHandler, NoDevices, NoInterrupts, Vcpu};
use hindsight_regs::branch::DebugCtl;
use hindsight_regs::msr;
use iced_x86::{Code, Instruction, Register};
use program::Program;
use random::Random;
use std::sync::Arc;

const RAM: u64 = 0x20_0000;
const CODE: u64 = 0x5000;
const DATA: u64 = 0x10_0000;
const STACK: u64 = 0x18_0000;
const BTS_BUFFER: u64 = 0x15_0100;
/// A seed with which nothing is recorded or counted.
const PLAIN: u64 = 15;
/// A seed with which misses of the caches are counted.
const COUNTING: u64 = 1;
/// A seed with which loads that hit the first level are counted.
const COUNTING_HITS: u64 = 13;

/// A seed, modulo 16, with which nothing but counters of branches is on.
const COUNTED_BRANCHES: u64 = 14;

/// Returns a random program, and the state in which it begins.
fn program(seed: u64) -> (Vec<u8>, CpuState) {
    let mut random = Random(seed);
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    for (n, r) in state.gpr.iter_mut().enumerate() {
        if n != 4 {
            *r = random.value();
        }
    }
    let mut numbers = [0_u32, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    for n in 0..2_usize {
        let other = n + usize::try_from(random.below(numbers.len() as u64 - n as u64)).unwrap_or(0);
        numbers.swap(n, other);
    }
    let (base, counter) = (Register::RAX + numbers[0], Register::RAX + numbers[1]);
    state.gpr[numbers[0] as usize] = DATA;
    state.gpr[numbers[1] as usize] = 40 + random.below(40);
    vectors::enable(&mut state, &mut random);
    x87::enable(&mut state, &mut random);
    let length = 3 + random.below(30);
    let mut program = Program {
        random,
        code: Vec::new(),
        base,
        counter,
    };
    for _ in 0..length {
        if seed.is_multiple_of(3) && program.random.chance(2) {
            vectors::add_instruction(&mut program);
        } else if seed % 5 == 1 && program.random.chance(2) {
            x87::add_instruction(&mut program);
        } else {
            program.instruction();
        }
    }
    // dec counter; jnz to the start; hlt
    program.add(Instruction::with1(Code::Dec_rm64, counter));
    program.add(Instruction::with_branch(Code::Jne_rel32_64, CODE));
    program.code.push(0xf4);
    (program.code, state)
}

/// Returns the events that are counted, as event number and unit mask.
fn counted(seed: u64) -> &'static [u16] {
    match seed % 16 {
        // References and misses of the last cache, loads from memory, lines filled into the L1.
        1 | 4 | 5 | 9 => &[0x4f2e, 0x412e, 0x20d1, 0x0151],
        // Loads, stores, loads that hit the L1, split loads.
        13 => &[0x81d0, 0x82d0, 0x01d1, 0x41d0],
        6 => &[0x81d0, 0x82d0, 0x42d0, 0x41d0],
        // With BTS: requests of data beyond the L2, and stores.
        3 => &[0x01b7, 0x82d0],
        // Branches: units count those of their paths. All, conditional, returns, taken ones; or
        // calls, those that are not taken, and far ones.
        COUNTED_BRANCHES if seed.is_multiple_of(3) => &[0x00c4, 0x01c4, 0x08c4, 0x20c4],
        COUNTED_BRANCHES => &[0x02c4, 0x08c4, 0x40c4],
        _ => &[],
    }
}

/// Returns what a program records: last branches, branch trace records, or nothing.
fn debugctl(seed: u64) -> DebugCtl {
    let bts = DebugCtl::TR | DebugCtl::BTS;
    match seed % 16 {
        COUNTED_BRANCHES => DebugCtl::empty(),
        n if n.is_multiple_of(2) => DebugCtl::LBR,
        3 | 5 => bts,
        7 => bts | DebugCtl::BTINT,
        11 => bts | DebugCtl::BTS_OFF_OS,
        _ => DebugCtl::empty(),
    }
}

/// Whether a program has the LBR stack on without the branch predictor: units record paths.
fn has_ring_alone(seed: u64) -> bool {
    matches!(seed % 16, 0 | 8 | 10)
}

/// Returns the address of the DS save area, if branch trace records are stored.
fn bts_area(seed: u64) -> Option<u64> {
    let area = match seed % 16 {
        // The program accesses the first pages of the data.
        5 => DATA + 0x17c0,
        // Records overwrite the area.
        7 if seed.is_multiple_of(5) => BTS_BUFFER + 0x400,
        _ => BTS_BUFFER - 0x40,
    };
    debugctl(seed).contains(DebugCtl::BTS).then_some(area)
}

type Machine = (Vcpu, ModelPlatform<NoDevices, NoInterrupts>, Arc<Memory>);

fn machine(code: &[u8], state: &CpuState, seed: u64, after_runs: u64) -> Machine {
    let memory = Arc::new(Memory::allocate(&[(0, RAM)]).expect("the host has memory"));
    for (table, entry) in [(0x1000, 0x2003_u64), (0x2000, 0x3003), (0x3000, 0x83)] {
        assert!(memory.write(table, &entry.to_le_bytes()));
    }
    assert!(memory.write(CODE, code));
    let mut random = Random(!seed);
    for at in (DATA..DATA + 0x3000).step_by(8) {
        assert!(memory.write(at, &random.value().to_le_bytes()));
    }
    let mut config = MsrConfig::new(Facilities::INTERP_DEFAULT, 1_000_000_000);
    config.uarch = !has_ring_alone(seed);
    let model = CpuModel::SkylakeServer;
    let mut platform = ModelPlatform::new(model, config, NoDevices, NoInterrupts::default());
    if let Some(area) = bts_area(seed) {
        let fields = [BTS_BUFFER, BTS_BUFFER, BTS_BUFFER + 9000, BTS_BUFFER + 7000];
        for (n, field) in (0..).zip(fields) {
            assert!(memory.write(area + 8 * n, &field.to_le_bytes()));
        }
        assert!(platform.wrmsr(msr::IA32_DS_AREA, area).is_ok());
    }
    // Demand reads of data, from all sources.
    let _ = platform.wrmsr(msr::MSR_OFFCORE_RSP_0, 0x1_0001);
    let mut debugctl = debugctl(seed);
    if has_ring_alone(seed) {
        // Instructions and cycles; in some programs their overflow freezes the LBR stack.
        let freezes = seed.is_multiple_of(3);
        let control = if freezes { 0xbb } else { 0x33 };
        debugctl.set(DebugCtl::FREEZE_LBRS_ON_PMI, freezes);
        for (index, value) in [
            (msr::IA32_FIXED_CTR_CTRL, control),
            (msr::IA32_FIXED_CTR0, (1 << 48) - 1 - seed / 7 % 5000),
            (msr::IA32_PERF_GLOBAL_CTRL, 3 << 32),
        ] {
            assert!(platform.wrmsr(index, value).is_ok());
        }
    }
    let debugctl = debugctl.bits();
    assert!(platform.wrmsr(msr::IA32_DEBUGCTL, debugctl).is_ok());
    for (n, event) in (0..).zip(counted(seed)) {
        let value = u64::from(*event) | 3 << 16 | 1 << 22;
        assert!(platform.wrmsr(msr::IA32_PERFEVTSEL0 + n, value).is_ok());
        assert!(platform.wrmsr(msr::IA32_PERF_GLOBAL_CTRL, 0xf).is_ok());
    }
    let mut vcpu = Vcpu::new(Arc::clone(&memory));
    vcpu.set_translation(after_runs, 1 << 22);
    vcpu.load(state);
    (vcpu, platform, memory)
}

fn snapshot((vcpu, platform, memory): &mut Machine) -> (CpuState, Vec<u64>, Vec<u8>) {
    let mut state = CpuState::reset();
    vcpu.store(&mut state);
    let mut registers = vec![platform.rdmsr(msr::MSR_LASTBRANCH_TOS).unwrap_or(0)];
    for n in 0..32 {
        registers.push(
            platform
                .rdmsr(msr::MSR_LASTBRANCH_0_FROM_IP + n)
                .unwrap_or(0),
        );
        registers.push(platform.rdmsr(msr::MSR_LASTBRANCH_0_TO_IP + n).unwrap_or(0));
        registers.push(platform.rdmsr(msr::MSR_LBR_INFO_0 + n).unwrap_or(0));
    }
    for n in 0..4 {
        registers.push(platform.rdmsr(msr::IA32_PMC0 + n).unwrap_or(0));
    }
    for index in [
        msr::IA32_FIXED_CTR0,
        msr::IA32_FIXED_CTR0 + 1,
        msr::IA32_PERF_GLOBAL_STATUS,
        msr::IA32_TIME_STAMP_COUNTER,
    ] {
        registers.push(platform.rdmsr(index).unwrap_or(0));
    }
    let mut data = vec![0; 0x6000];
    let (program, records) = data.split_at_mut(0x3000);
    assert!(memory.read(DATA, program));
    assert!(memory.read(BTS_BUFFER & !0xfff, records));
    (state, registers, data)
}

/// Runs a program in both tiers, and compares the results after each slice.
///
/// Returns how many instructions ran in translated code, and how many in all.
fn compare(seed: u64) -> (u64, u64) {
    let (code, state) = program(seed);
    let mut interpreted = machine(&code, &state, seed, u64::MAX);
    let mut translated = machine(&code, &state, seed, 1 + seed % 5);
    let mut random = Random(seed ^ 0x5555);
    for _ in 0..2000 {
        let budget = match random.below(3) {
            0 => 1 + random.below(40),
            1 => 1 + random.below(300),
            _ => 1 + random.below(20_000),
        };
        let expected = interpreted.0.run(&mut interpreted.1, budget);
        let got = translated.0.run(&mut translated.1, budget);
        assert_eq!(got, expected, "seed {seed}: exit; code {code:02x?}");
        let (a, b) = (snapshot(&mut interpreted), snapshot(&mut translated));
        assert_eq!(b.0, a.0, "seed {seed}: state; code {code:02x?}");
        for (n, (x, y)) in b.1.iter().zip(&a.1).enumerate() {
            assert_eq!(
                x,
                y,
                "seed {seed}: value {n} of {} translated, interpreted {}",
                a.1.len(),
                translated.0.stats().retired
            );
        }
        assert!(b.2 == a.2, "seed {seed}: memory; code {code:02x?}");
        assert_eq!(translated.0.stats().retired, interpreted.0.stats().retired);
        if expected != Exit::Budget {
            break;
        }
    }
    assert_eq!(translated.0.mix(), interpreted.0.mix(), "seed {seed}");
    let stats = translated.0.stats();
    (stats.translated, stats.retired)
}

#[test]
fn random_programs_do_the_same_in_both_tiers() {
    let count = std::env::var("TRANSLATION_PROGRAMS")
        .ok()
        .and_then(|n| n.parse().ok());
    let first: u64 = std::env::var("TRANSLATION_SEED")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    // Sums of translated and of all instructions, for programs that record nothing, last branches,
    // and branch trace records, and for those whose accesses are counted.
    let mut sums = [(0, 0); 4];
    for seed in first..first + count.unwrap_or(3000) {
        let (translated, all) = compare(seed);
        let kind = match (counted(seed), bts_area(seed)) {
            ([_, ..], _) if seed % 16 != COUNTED_BRANCHES => 3,
            (_, Some(_)) => 2,
            (_, None) => usize::from(!debugctl(seed).is_empty()),
        };
        sums[kind] = (sums[kind].0 + translated, sums[kind].1 + all);
    }
    // The interpreter executes each instruction whose access is not counted in translated code.
    for ((translated, all), percent) in sums.into_iter().zip([40, 40, 40, 20]) {
        assert!(
            translated > all * percent / 100,
            "{translated} of {all} instructions were translated"
        );
    }
    let total = sums.iter().fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    assert!(total.0 > total.1 * 2 / 5, "{sums:?}");
}

#[test]
fn bit_offset_wraps_with_an_address_of_32_bits() {
    // addr32 bts [0xfff00000], eax; inc rax; dec rcx; jne to the start; hlt
    let code = [
        0x67, 0x0f, 0xab, 0x04, 0x25, 0, 0, 0xf0, 0xff, 0x48, 0xff, 0xc0, 0x48, 0xff, 0xc9, 0x75,
        0xef, 0xf4,
    ];
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    // Bit 0 of the data is 2 MiB after the operand.
    (state.gpr[0], state.gpr[1]) = (0x100_0000, 128);
    for after_runs in [2, u64::MAX] {
        let (mut vcpu, mut platform, memory) = machine(&code, &state, PLAIN, after_runs);
        // Another page is where the address would be without the wrap.
        let other = DATA + 0x1000;
        for (table, entry) in [
            (0x2000 + 8 * 4, 0x4003),
            (0x4000, 0x7003),
            (0x7000 + 8 * (DATA >> 12), other | 3),
        ] {
            assert!(memory.write(table, &entry.to_le_bytes()));
        }
        assert_eq!(vcpu.run(&mut platform, 10_000), Exit::Halted);
        let mut data = [0; 16];
        assert!(memory.read(DATA, &mut data));
        assert_eq!(data, [0xff; 16], "{after_runs}");
    }
}

#[test]
fn address_that_is_not_canonical_faults_in_translated_code() {
    // mov rax, [rbx]; dec rcx; cmp rcx, 20; cmove rbx, rdx; test rcx, rcx; jne; hlt
    let code = [
        0x48, 0x8b, 0x03, 0x48, 0xff, 0xc9, 0x48, 0x83, 0xf9, 20, 0x48, 0x0f, 0x44, 0xda, 0x48,
        0x85, 0xc9, 0x75, 0xed, 0xf4,
    ];
    for bit in 47..64 {
        for page in (0..256).step_by(17) {
            let mut state = CpuState::long_mode(0x1000, CODE, STACK);
            state.gpr[3] = DATA;
            state.gpr[2] = 1 << bit | page << 12;
            state.gpr[1] = 100;
            let (mut vcpu, mut platform, _) = machine(&code, &state, PLAIN, 2);
            assert_eq!(
                vcpu.run(&mut platform, 10_000),
                Exit::Shutdown,
                "bit {bit} page {page}"
            );
            assert_eq!(vcpu.stats().retired, 80 * 6);
        }
    }
}

#[test]
fn code_is_translated_at_each_address_where_it_is_mapped() {
    // dec rcx; jne to the start; hlt
    let code = [0x48, 0xff, 0xc9, 0x48, 0x8d, 0x40, 1, 0x75, 0xf7, 0xf4];
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    let (mut vcpu, mut platform, memory) = machine(&code, &state, PLAIN, 10);
    for page in 1..8_u64 {
        assert!(memory.write(0x3000 + page * 8, &0x83_u64.to_le_bytes()));
    }
    for page in [0, 1, 2, 1, 0, 5] {
        state.rip = CODE + page * 0x20_0000;
        state.gpr[0] = 0;
        state.gpr[1] = 10_000;
        vcpu.load(&state);
        let before = vcpu.stats();
        assert_eq!(vcpu.run(&mut platform, 100_000), Exit::Halted);
        let after = vcpu.stats();
        let retired = after.retired - before.retired;
        let translated = after.translated - before.translated;
        assert_eq!(retired, 30_001);
        assert!(translated > 29_000, "page {page}: {translated}");
    }
}

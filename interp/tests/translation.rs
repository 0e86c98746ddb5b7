//! Translated code does what the interpreter does: random programs run in both, in slices of random
//! length, and have the same registers, flags, memory and branches at the end of each slice.
#![cfg(not(any(miri, hindsight_sanitizer)))]
#![expect(
    clippy::cast_possible_truncation,
    reason = "random numbers are cut to the width of operands"
)]

use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Memory, ModelPlatform, MsrHandler, NoDevices, NoInterrupts, Vcpu};
use hindsight_regs::branch::DebugCtl;
use hindsight_regs::msr;
use iced_x86::{Code, Encoder, Instruction, MemoryOperand, Register};
use std::sync::Arc;

const RAM: u64 = 0x20_0000;
const CODE: u64 = 0x5000;
const DATA: u64 = 0x10_0000;
const STACK: u64 = 0x18_0000;

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap_or(0)]
    }

    /// A number that is often small, a power of two, or close to an end of its range.
    fn value(&mut self) -> u64 {
        match self.below(5) {
            0 => self.below(4),
            1 => 1 << self.below(64),
            2 => (1_u64 << self.below(64)).wrapping_sub(1),
            3 => self.next() as u32 as u64,
            _ => self.next(),
        }
    }
}

/// A random program: a loop whose body is random instructions.
struct Program {
    random: Random,
    code: Vec<u8>,
    base: Register,
    counter: Register,
}

const SIZES: [usize; 4] = [1, 2, 4, 8];

impl Program {
    fn add(&mut self, i: Result<Instruction, iced_x86::IcedError>) -> bool {
        let Ok(i) = i else { return false };
        let mut encoder = Encoder::new(64);
        let at = CODE + self.code.len() as u64;
        match encoder.encode(&i, at) {
            Ok(_) => {
                self.code.extend(encoder.take_buffer());
                true
            }
            Err(_) => false,
        }
    }

    /// A general register that may be written.
    fn register(&mut self, size: usize) -> Register {
        loop {
            let n = u32::try_from(self.random.below(16)).unwrap_or(0);
            let full = Register::RAX + n;
            if full == self.base || full == self.counter || full == Register::RSP {
                continue;
            }
            return sized(full, size);
        }
    }

    fn memory(&mut self) -> MemoryOperand {
        if self.random.chance(300) {
            // Most often not canonical, or beyond what is mapped: the program ends there.
            return MemoryOperand::with_base_index(self.base, self.register(8));
        }
        let displacement = match self.random.below(12) {
            0 => 0xffc,
            1 => 0x1fff,
            _ => self.random.below(0x1800),
        };
        MemoryOperand::with_base_displ(self.base, displacement.cast_signed())
    }

    fn instruction(&mut self) {
        let size = self.random.pick(&SIZES);
        let index = SIZES.iter().position(|s| *s == size).unwrap_or(0);
        let (a, b) = (self.register(size), self.register(size));
        let choice = self.random.below(30);
        let n = usize::try_from(self.random.below(8)).unwrap_or(0);
        match choice {
            0..=5 => {
                let code = RM_R[n][index];
                if choice < 3 {
                    self.add(Instruction::with2(code, a, b));
                } else {
                    let m = self.memory();
                    self.add(Instruction::with2(code, m, b));
                }
            }
            6..=8 => {
                let m = self.memory();
                self.add(Instruction::with2(R_RM[n][index], a, m));
            }
            9..=11 => {
                let value = self.random.value() as i8 as i32;
                let code = RM_IMM[n][index];
                if choice == 9 {
                    let m = self.memory();
                    self.add(Instruction::with2(code, m, value));
                } else {
                    self.add(Instruction::with2(code, a, value));
                }
            }
            12 => self.unary(a, index),
            13 => self.shift(a, index),
            14 => self.extend(a, b, n),
            15..=18 => self.move_wide(a, b, choice < 17),
            19 => self.address(a, b, n),
            20 | 21 => self.conditional(a, b),
            22 => self.multiply(a, b),
            23 => self.count(a, b, n),
            24 => {
                let value = self.random.next() as i32;
                self.add(Instruction::with2(
                    Code::Mov_rm64_imm32,
                    a.full_register(),
                    value,
                ));
            }
            25 => {
                let (x, y) = (a.full_register(), b.full_register());
                self.add(Instruction::with1(Code::Push_r64, x));
                self.add(Instruction::with1(Code::Pop_r64, y));
            }
            26 => self.call(),
            27 => self.test(a, b, n),
            // Executed by the interpreter: code is left and entered.
            28 => {
                self.add(Instruction::with2(
                    Code::Xchg_rm64_r64,
                    self.base_memory(),
                    b.full_register(),
                ));
            }
            _ => self.skip(),
        }
    }

    fn extend(&mut self, a: Register, b: Register, n: usize) {
        let code = [
            Code::Movzx_r32_rm8,
            Code::Movsx_r64_rm16,
            Code::Movzx_r32_rm16,
            Code::Movsxd_r64_rm32,
        ][n % 4];
        let to = sized(a.full_register(), [4, 8, 4, 8][n % 4]);
        if self.random.chance(2) {
            let from = sized(b.full_register(), [1, 2, 2, 4][n % 4]);
            self.add(Instruction::with2(code, to, from));
        } else {
            let m = self.memory();
            self.add(Instruction::with2(code, to, m));
        }
    }

    fn address(&mut self, a: Register, b: Register, n: usize) {
        let operand = MemoryOperand::with_base_index_scale_displ_size(
            a.full_register(),
            b.full_register(),
            [1, 2, 4, 8][n % 4],
            i64::from(self.random.next() as i16),
            8,
        );
        let to = self.register(8);
        self.add(Instruction::with2(Code::Lea_r64_m, to, operand));
    }

    fn count(&mut self, a: Register, b: Register, n: usize) {
        let code = [
            Code::Tzcnt_r64_rm64,
            Code::Popcnt_r64_rm64,
            Code::Lzcnt_r64_rm64,
            Code::Bt_rm64_r64,
        ][n % 4];
        self.add(Instruction::with2(
            code,
            a.full_register(),
            b.full_register(),
        ));
    }

    fn test(&mut self, a: Register, b: Register, n: usize) {
        let code = [Code::Test_rm64_r64, Code::Test_rm32_r32, Code::Test_rm8_r8][n % 3];
        let size = [8, 4, 1][n % 3];
        let (x, y) = (
            sized(a.full_register(), size),
            sized(b.full_register(), size),
        );
        self.add(Instruction::with2(code, x, y));
    }

    fn move_wide(&mut self, a: Register, b: Register, load: bool) {
        let m = self.memory();
        if load {
            self.add(Instruction::with2(Code::Mov_r64_rm64, a.full_register(), m));
        } else {
            self.add(Instruction::with2(Code::Mov_rm64_r64, m, b.full_register()));
        }
    }

    fn base_memory(&self) -> MemoryOperand {
        MemoryOperand::with_base_displ(self.base, 0x40)
    }

    fn unary(&mut self, a: Register, index: usize) {
        let kind = usize::try_from(self.random.below(4)).unwrap_or(0);
        let code = UNARY[kind][index];
        if self.random.chance(2) {
            let m = self.memory();
            self.add(Instruction::with1(code, m));
        } else {
            self.add(Instruction::with1(code, a));
        }
    }

    fn shift(&mut self, a: Register, index: usize) {
        let kind = usize::try_from(self.random.below(5)).unwrap_or(0);
        if self.random.chance(3) {
            let code = SHIFT_CL[kind][index];
            self.add(Instruction::with2(code, a, Register::CL));
        } else {
            let count = self.random.below(66) as i32;
            let code = SHIFT[kind][index];
            if self.random.chance(3) {
                let m = self.memory();
                self.add(Instruction::with2(code, m, count));
            } else {
                self.add(Instruction::with2(code, a, count));
            }
        }
    }

    fn conditional(&mut self, a: Register, b: Register) {
        let n = usize::try_from(self.random.below(16)).unwrap_or(0);
        match self.random.below(3) {
            0 => {
                let to = sized(a.full_register(), 1);
                self.add(Instruction::with1(SET[n], to));
            }
            1 => {
                let m = self.memory();
                self.add(Instruction::with2(CMOV[n], a.full_register(), m));
            }
            _ => {
                self.add(Instruction::with2(
                    CMOV[n],
                    a.full_register(),
                    b.full_register(),
                ));
            }
        }
    }

    fn multiply(&mut self, a: Register, b: Register) {
        let (x, y) = (a.full_register(), b.full_register());
        match self.random.below(3) {
            0 => self.add(Instruction::with2(Code::Imul_r64_rm64, x, y)),
            1 => {
                let (x, y) = (sized(x, 4), sized(y, 4));
                self.add(Instruction::with3(Code::Imul_r32_rm32_imm32, x, y, 0x1357))
            }
            _ => {
                let taken = [Register::RAX, Register::RDX];
                !taken.contains(&self.base)
                    && !taken.contains(&self.counter)
                    && self.add(Instruction::with1(Code::Mul_rm64, y))
            }
        };
    }

    /// A call of the next instruction but one, which returns.
    fn call(&mut self) {
        // call +2; jmp over the function; function: inc of a register; ret
        self.code.extend([0xe8, 2, 0, 0, 0, 0xeb, 4]);
        self.code.extend([0x48, 0xff, 0xc0 | self.free_low(), 0xc3]);
    }

    /// The number of one of the first registers that may be written.
    fn free_low(&self) -> u8 {
        let free = [0_u8, 1, 2, 3].into_iter().find(|n| {
            let r = Register::RAX + u32::from(*n);
            r != self.base && r != self.counter
        });
        free.unwrap_or(0)
    }

    /// A conditional branch over the next instruction.
    fn skip(&mut self) {
        let condition = self.random.below(16) as u8;
        self.code.extend([0x70 | condition, 0]);
        let at = self.code.len();
        let (a, b) = (self.register(8), self.register(8));
        self.add(Instruction::with2(Code::Add_rm64_r64, a, b));
        if self.random.chance(2) {
            self.add(Instruction::with2(Code::Mov_rm64_r64, a, b));
        }
        self.code[at - 1] = u8::try_from(self.code.len() - at).unwrap_or(0);
    }
}

fn sized(full: Register, size: usize) -> Register {
    let n = u32::try_from(full.number()).unwrap_or(0);
    match size {
        8 => full,
        4 => Register::EAX + n,
        2 => Register::AX + n,
        _ if n < 4 => Register::AL + n,
        _ => Register::SPL + (n - 4),
    }
}

macro_rules! codes {
    ($($suffix:ident: $($name:ident)*);* $(;)?) => { [$([$(Code::$name),*]),*] };
}

#[rustfmt::skip]
const RM_R: [[Code; 4]; 8] = codes!(
    a: Add_rm8_r8 Add_rm16_r16 Add_rm32_r32 Add_rm64_r64; b: Or_rm8_r8 Or_rm16_r16 Or_rm32_r32 Or_rm64_r64;
    c: Adc_rm8_r8 Adc_rm16_r16 Adc_rm32_r32 Adc_rm64_r64; d: Sbb_rm8_r8 Sbb_rm16_r16 Sbb_rm32_r32 Sbb_rm64_r64;
    e: And_rm8_r8 And_rm16_r16 And_rm32_r32 And_rm64_r64; f: Sub_rm8_r8 Sub_rm16_r16 Sub_rm32_r32 Sub_rm64_r64;
    g: Xor_rm8_r8 Xor_rm16_r16 Xor_rm32_r32 Xor_rm64_r64; h: Cmp_rm8_r8 Cmp_rm16_r16 Cmp_rm32_r32 Cmp_rm64_r64;
);
#[rustfmt::skip]
const R_RM: [[Code; 4]; 8] = codes!(
    a: Add_r8_rm8 Add_r16_rm16 Add_r32_rm32 Add_r64_rm64; b: Or_r8_rm8 Or_r16_rm16 Or_r32_rm32 Or_r64_rm64;
    c: Adc_r8_rm8 Adc_r16_rm16 Adc_r32_rm32 Adc_r64_rm64; d: Sbb_r8_rm8 Sbb_r16_rm16 Sbb_r32_rm32 Sbb_r64_rm64;
    e: And_r8_rm8 And_r16_rm16 And_r32_rm32 And_r64_rm64; f: Sub_r8_rm8 Sub_r16_rm16 Sub_r32_rm32 Sub_r64_rm64;
    g: Xor_r8_rm8 Xor_r16_rm16 Xor_r32_rm32 Xor_r64_rm64; h: Cmp_r8_rm8 Cmp_r16_rm16 Cmp_r32_rm32 Cmp_r64_rm64;
);
#[rustfmt::skip]
const RM_IMM: [[Code; 4]; 8] = codes!(
    a: Add_rm8_imm8 Add_rm16_imm8 Add_rm32_imm8 Add_rm64_imm8; b: Or_rm8_imm8 Or_rm16_imm8 Or_rm32_imm8 Or_rm64_imm8;
    c: Adc_rm8_imm8 Adc_rm16_imm8 Adc_rm32_imm8 Adc_rm64_imm8; d: Sbb_rm8_imm8 Sbb_rm16_imm8 Sbb_rm32_imm8 Sbb_rm64_imm8;
    e: And_rm8_imm8 And_rm16_imm8 And_rm32_imm8 And_rm64_imm8; f: Sub_rm8_imm8 Sub_rm16_imm8 Sub_rm32_imm8 Sub_rm64_imm8;
    g: Xor_rm8_imm8 Xor_rm16_imm8 Xor_rm32_imm8 Xor_rm64_imm8; h: Cmp_rm8_imm8 Cmp_rm16_imm8 Cmp_rm32_imm8 Cmp_rm64_imm32;
);
#[rustfmt::skip]
const UNARY: [[Code; 4]; 4] = codes!(
    a: Inc_rm8 Inc_rm16 Inc_rm32 Inc_rm64; b: Dec_rm8 Dec_rm16 Dec_rm32 Dec_rm64;
    c: Neg_rm8 Neg_rm16 Neg_rm32 Neg_rm64; d: Not_rm8 Not_rm16 Not_rm32 Not_rm64;
);
#[rustfmt::skip]
const SHIFT: [[Code; 4]; 5] = codes!(
    a: Shl_rm8_imm8 Shl_rm16_imm8 Shl_rm32_imm8 Shl_rm64_imm8; b: Shr_rm8_imm8 Shr_rm16_imm8 Shr_rm32_imm8 Shr_rm64_imm8;
    c: Sar_rm8_imm8 Sar_rm16_imm8 Sar_rm32_imm8 Sar_rm64_imm8; d: Rol_rm8_imm8 Rol_rm16_imm8 Rol_rm32_imm8 Rol_rm64_imm8;
    e: Ror_rm8_imm8 Ror_rm16_imm8 Ror_rm32_imm8 Ror_rm64_imm8;
);
#[rustfmt::skip]
const SHIFT_CL: [[Code; 4]; 5] = codes!(
    a: Shl_rm8_CL Shl_rm16_CL Shl_rm32_CL Shl_rm64_CL; b: Shr_rm8_CL Shr_rm16_CL Shr_rm32_CL Shr_rm64_CL;
    c: Sar_rm8_CL Sar_rm16_CL Sar_rm32_CL Sar_rm64_CL; d: Rol_rm8_CL Rol_rm16_CL Rol_rm32_CL Rol_rm64_CL;
    e: Ror_rm8_CL Ror_rm16_CL Ror_rm32_CL Ror_rm64_CL;
);
#[rustfmt::skip]
const SET: [Code; 16] = [
    Code::Seto_rm8, Code::Setno_rm8, Code::Setb_rm8, Code::Setae_rm8, Code::Sete_rm8, Code::Setne_rm8, Code::Setbe_rm8,
    Code::Seta_rm8, Code::Sets_rm8, Code::Setns_rm8, Code::Setp_rm8, Code::Setnp_rm8, Code::Setl_rm8, Code::Setge_rm8,
    Code::Setle_rm8, Code::Setg_rm8,
];
#[rustfmt::skip]
const CMOV: [Code; 16] = [
    Code::Cmovo_r64_rm64, Code::Cmovno_r64_rm64, Code::Cmovb_r64_rm64, Code::Cmovae_r64_rm64, Code::Cmove_r64_rm64,
    Code::Cmovne_r64_rm64, Code::Cmovbe_r64_rm64, Code::Cmova_r64_rm64, Code::Cmovs_r64_rm64, Code::Cmovns_r64_rm64,
    Code::Cmovp_r64_rm64, Code::Cmovnp_r64_rm64, Code::Cmovl_r64_rm64, Code::Cmovge_r64_rm64, Code::Cmovle_r64_rm64,
    Code::Cmovg_r64_rm64,
];

/// A program and the registers with which it begins.
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
    let length = 3 + random.below(30);
    let mut program = Program {
        random,
        code: Vec::new(),
        base,
        counter,
    };
    for _ in 0..length {
        program.instruction();
    }
    // dec counter; jnz to the start; hlt
    program.add(Instruction::with1(Code::Dec_rm64, counter));
    program.add(Instruction::with_branch(Code::Jne_rel32_64, CODE));
    program.code.push(0xf4);
    (program.code, state)
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
    let config = MsrConfig::new(Facilities::INTERP_DEFAULT, 1_000_000_000);
    let model = CpuModel::SkylakeServer;
    let mut platform = ModelPlatform::new(model, config, NoDevices, NoInterrupts::default());
    if seed.is_multiple_of(2) {
        assert!(
            platform
                .wrmsr(msr::IA32_DEBUGCTL, DebugCtl::LBR.bits())
                .is_ok()
        );
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
    }
    let mut data = vec![0; 0x3000];
    assert!(memory.read(DATA, &mut data));
    (state, registers, data)
}

/// Runs a program in both tiers; returns how many instructions ran in translated code, and how many
/// in all.
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
        assert_eq!(b.1, a.1, "seed {seed}: branches; code {code:02x?}");
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
    let ran: Vec<(u64, u64)> = (first..first + count.unwrap_or(3000))
        .map(compare)
        .collect();
    let all: u64 = ran.iter().map(|r| r.1).sum();
    let translated: u64 = ran.iter().map(|r| r.0).sum();
    assert!(
        translated > all / 2,
        "{translated} of {all} instructions were translated"
    );
}

#[test]
fn address_that_is_not_canonical_faults_in_translated_code() {
    // mov rax, [rbx]; dec rcx; cmp rcx, 20; cmove rbx, rdx; test rcx, rcx; jne; hlt
    let code = [
        0x48, 0x8b, 0x03, 0x48, 0xff, 0xc9, 0x48, 0x83, 0xf9, 20, 0x48, 0x0f, 0x44, 0xda, 0x48,
        0x85, 0xc9, 0x75, 0xed, 0xf4,
    ];
    for bit in 47..64 {
        for page in 0..256 {
            let mut state = CpuState::long_mode(0x1000, CODE, STACK);
            state.gpr[3] = DATA;
            state.gpr[2] = 1 << bit | page << 12;
            state.gpr[1] = 100;
            let (mut vcpu, mut platform, _) = machine(&code, &state, 1, 2);
            assert_eq!(
                vcpu.run(&mut platform, 10_000),
                Exit::Shutdown,
                "bit {bit} page {page}"
            );
            assert_eq!(vcpu.stats().retired, 80 * 6);
        }
    }
}

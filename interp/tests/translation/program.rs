//! Generates random programs.

use super::CODE;
use super::codes::{
    BIT_IMM, BIT_REGISTER, BITS, CMOV, EXCHANGE, R_RM, RM_IMM, RM_R, SET, SHIFT, SHIFT_CL, UNARY,
};
use super::random::Random;
use iced_x86::{Code, Encoder, Instruction, MemoryOperand, Register};

/// A random program: a loop with a body of random instructions.
pub struct Program {
    pub random: Random,
    pub code: Vec<u8>,
    pub base: Register,
    pub counter: Register,
}

const SIZES: [usize; 4] = [1, 2, 4, 8];

impl Program {
    pub fn add(&mut self, i: Result<Instruction, iced_x86::IcedError>) -> bool {
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

    /// Returns a random general register that programs may write.
    pub fn register(&mut self, size: usize) -> Register {
        loop {
            let n = u32::try_from(self.random.below(16)).unwrap_or(0);
            let full = Register::RAX + n;
            if full == self.base || full == self.counter || full == Register::RSP {
                continue;
            }
            return sized(full, size);
        }
    }

    pub fn memory(&mut self) -> MemoryOperand {
        if self.random.chance(300) {
            // The address is most often not canonical or not mapped: the program then ends here.
            return MemoryOperand::with_base_index(self.base, self.register(8));
        }
        let displacement = match self.random.below(12) {
            0 => 0xffc,
            1 => 0x1fff,
            _ => self.random.below(0x1800),
        };
        MemoryOperand::with_base_displ(self.base, displacement.cast_signed())
    }

    pub fn instruction(&mut self) {
        let size = self.random.pick(&SIZES);
        let index = SIZES.iter().position(|s| *s == size).unwrap_or(0);
        let (a, b) = (self.register(size), self.register(size));
        let choice = self.random.below(37);
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
            // The interpreter executes this instruction, so translated code is left and entered.
            28 => {
                self.add(Instruction::with2(
                    Code::Xchg_rm64_r64,
                    self.base_memory(),
                    b.full_register(),
                ));
            }
            29 => self.atomic(b, n, index),
            30 => self.divide(b),
            31 => self.bits(a, b),
            34 => self.count_down(a, b),
            35 => self.memory_bit(a),
            36 => self.skip_if_zero(a, b),
            _ => self.skip(),
        }
    }

    /// Adds a locked instruction, or one that exchanges with memory.
    fn atomic(&mut self, register: Register, n: usize, index: usize) {
        let size = SIZES[index] as u64;
        let aligned = !self.random.chance(20);
        let at = self.random.below(0x1800) & if aligned { !(size - 1) } else { !0 };
        let memory = MemoryOperand::with_base_displ(self.base, at.cast_signed());
        let exchange = usize::try_from(self.random.below(3)).unwrap_or(0);
        let unary = usize::try_from(self.random.below(4)).unwrap_or(0);
        let instruction = match self.random.below(3) {
            0 => Instruction::with2(EXCHANGE[exchange][index], memory, register),
            1 => Instruction::with1(UNARY[unary][index], memory),
            // CMP has no locked form.
            _ => Instruction::with2(RM_R[n % 7][index], memory, register),
        };
        let often = self.random.chance(2);
        self.add(instruction.map(|mut i| {
            let exchanges = EXCHANGE.iter().flatten().any(|c| *c == i.code());
            i.set_has_lock_prefix(!exchanges || often);
            i
        }));
    }

    /// Adds a division, whose quotient most often fits.
    fn divide(&mut self, divisor: Register) {
        let taken = [Register::RAX, Register::RDX];
        if taken.contains(&self.base) || taken.contains(&self.counter) {
            return;
        }
        let size = self.random.pick(&[4, 8]);
        let signed = self.random.chance(2);
        let code = match (size, signed) {
            (4, true) => Code::Idiv_rm32,
            (4, false) => Code::Div_rm32,
            (_, true) => Code::Idiv_rm64,
            _ => Code::Div_rm64,
        };
        let divisor = sized(divisor.full_register(), size);
        if !self.random.chance(10) {
            let one = sized(divisor.full_register(), 8);
            self.add(Instruction::with2(Code::Or_rm64_imm8, one, 1));
        }
        if signed {
            let extend = if size == 4 { Code::Cdq } else { Code::Cqo };
            self.add(Ok(Instruction::with(extend)));
        } else {
            self.add(Instruction::with2(
                Code::Xor_rm32_r32,
                Register::EDX,
                Register::EDX,
            ));
        }
        if self.random.chance(3) {
            let memory = self.memory();
            self.add(Instruction::with1(code, memory));
        } else {
            self.add(Instruction::with1(code, divisor));
        }
    }

    /// Adds a bit scan or another instruction on bits.
    fn bits(&mut self, a: Register, b: Register) {
        let code = self.random.pick(&BITS);
        let info = code.op_code();
        let size = if info.operand_size() == 64 || info.is_wig() || info.w() == 1 {
            8
        } else {
            4
        };
        let (x, y) = (
            sized(a.full_register(), size),
            sized(b.full_register(), size),
        );
        let instruction = match info.op_count() {
            2 if self.random.chance(2) => Instruction::with2(code, x, self.memory()),
            2 => Instruction::with2(code, x, y),
            _ if matches!(code, Code::Shld_rm64_r64_imm8 | Code::Shrd_rm32_r32_imm8) => {
                Instruction::with3(code, x, y, self.random.below(66) as i32)
            }
            _ => {
                let third = self.register(8);
                Instruction::with3(code, x, y, sized(third, size))
            }
        };
        self.add(instruction);
    }

    /// Adds JRCXZ over the next instruction.
    fn skip_if_zero(&mut self, a: Register, b: Register) {
        let (a, b) = (a.full_register(), b.full_register());
        self.code.extend([0xe3, 0]);
        let at = self.code.len();
        self.add(Instruction::with2(Code::Add_rm64_r64, a, b));
        self.code[at - 1] = (self.code.len() - at) as u8;
    }

    /// Adds a short loop that ends with LOOP.
    fn count_down(&mut self, a: Register, b: Register) {
        let (a, b) = (a.full_register(), b.full_register());
        if [self.base, self.counter, a].contains(&Register::RCX) {
            return;
        }
        let turns = 1 + self.random.below(9) as i32;
        self.add(Instruction::with2(
            Code::Mov_r32_imm32,
            Register::ECX,
            turns,
        ));
        let at = self.code.len();
        for _ in 0..1 + self.random.below(3) {
            let code =
                self.random
                    .pick(&[Code::Add_rm64_r64, Code::Adc_rm64_r64, Code::Mov_r64_rm64]);
            self.add(Instruction::with2(code, a, b));
        }
        let back = self.code.len() + 2 - at;
        self.code.extend([0xe2, (back as u8).wrapping_neg()]);
    }

    /// Adds BT, BTS, BTR or BTC of memory, most often with a bit near the operand.
    fn memory_bit(&mut self, a: Register) {
        let full = a.full_register();
        let size = self.random.pick(&[2, 4, 8]);
        let n = usize::try_from(self.random.below(4)).unwrap_or(0);
        let memory = self.memory();
        let instruction = if size == 2 || self.random.chance(2) {
            let bit = self.random.below(256) as u32;
            Instruction::with2(BIT_IMM[n][size / 4], memory, bit)
        } else {
            if !self.random.chance(50) {
                let byte = sized(full, 1);
                self.add(Instruction::with2(Code::Movsx_r64_rm8, full, byte));
            }
            Instruction::with2(BIT_REGISTER[n][size / 8], memory, sized(full, size))
        };
        // BT has no locked form.
        let locked = n != 0 && self.random.chance(3);
        self.add(instruction.map(|mut i| {
            i.set_has_lock_prefix(locked);
            i
        }));
    }

    /// Moves or changes AH, CH, DH or BH.
    fn use_high_byte(&mut self, a: Register) {
        let from = Register::AH + self.random.below(4) as u32;
        let instruction = match self.random.below(8) {
            4 => Instruction::with2(Code::Mov_r8_imm8, from, self.random.value() as i8 as i32),
            5..=7 => {
                let codes = [
                    Code::Add_rm8_imm8,
                    Code::Or_rm8_imm8,
                    Code::Adc_rm8_imm8,
                    Code::And_rm8_imm8,
                    Code::Sub_rm8_imm8,
                    Code::Xor_rm8_imm8,
                    Code::Cmp_rm8_imm8,
                    Code::Test_rm8_imm8,
                ];
                let value = self.random.value() as i8 as i32;
                Instruction::with2(self.random.pick(&codes), from, value)
            }
            0 => Instruction::with2(Code::Movzx_r32_rm8, sized(a.full_register(), 4), from),
            1 => Instruction::with2(Code::Movsx_r32_rm8, sized(a.full_register(), 4), from),
            2 => Instruction::with2(Code::Mov_rm8_r8, sized(a.full_register(), 1), from),
            _ => {
                let m = self.memory();
                Instruction::with2(Code::Mov_rm8_r8, m, from)
            }
        };
        // Registers that need a REX prefix cannot be combined with these.
        if self.add(instruction) && self.random.chance(2) {
            self.skip();
        }
    }

    fn extend(&mut self, a: Register, b: Register, n: usize) {
        if self.random.chance(4) {
            return self.use_high_byte(a);
        }
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

    /// Adds a function that returns, and a call of it.
    fn call(&mut self) {
        // call +2; jmp over the function; function: inc of a register; ret
        self.code.extend([0xe8, 2, 0, 0, 0, 0xeb, 4]);
        self.code.extend([0x48, 0xff, 0xc0 | self.free_low(), 0xc3]);
    }

    /// Returns the number of the first register that programs may write.
    fn free_low(&self) -> u8 {
        let free = [0_u8, 1, 2, 3].into_iter().find(|n| {
            let r = Register::RAX + u32::from(*n);
            r != self.base && r != self.counter
        });
        free.unwrap_or(0)
    }

    /// Adds a conditional branch over the next instruction.
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

//! A batch: the code of many slots, each around one compared instruction.
//!
//! A slot loads the registers that its instruction needs from cells, executes it, and notes what
//! it wrote. An exception goes on behind the instruction. Both sides run exactly this code, from
//! the same linear address, on the same memory; their data and their notes must then be equal.
//! State flows from slot to slot, so that one instruction works on what others left.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in a region are below 2 GiB"
)]

use crate::class::{Class, has_avx512};
use crate::emit::Asm;
use crate::layout::*;
use crate::native::gs_base;
use crate::rng::{Rng, mix};
use crate::stems::Stems;
use crate::values::Value;
use iced_x86::{Formatter, GasFormatter, Instruction};

/// 64-bit user code on Linux.
pub const CS64: u16 = 0x33;
/// 32-bit user code on Linux.
pub const CS32: u16 = 0x23;
/// User data on Linux.
pub const DS: u16 = 0x2b;

/// State components of AVX-512: opmask registers, upper halves of ZMM registers, ZMM16 to 31.
const AVX512_COMPONENTS: u32 = 0xe0;

/// A note of a slot.
#[derive(Clone, Debug)]
pub struct Note {
    /// What was noted.
    pub what: What,
    /// Where, in the region.
    pub at: u32,
    /// Bytes.
    pub len: u32,
}

/// What a note holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A general register.
    Gpr(u8),
    /// The arithmetic flags that are defined.
    Flags,
    /// A vector register.
    Vector(u8),
    /// An opmask register.
    Opmask(u8),
    /// MXCSR.
    Mxcsr,
    /// x87 and SSE as FXSAVE writes them.
    Fx,
    /// What the instruction wrote to memory, or a mark that it was jumped over.
    Memory,
}

/// One compared instruction.
#[derive(Clone, Debug)]
pub struct Slot {
    /// The instruction, at its place.
    pub insn: Instruction,
    /// Its linear address.
    pub rip: u32,
    /// What it noted.
    pub notes: Vec<Note>,
}

impl Slot {
    /// The instruction in assembly.
    pub fn text(&self) -> String {
        let mut text = String::new();
        GasFormatter::new().format(&self.insn, &mut text);
        text
    }
}

/// Code and what it needs.
#[derive(Debug)]
pub struct Batch {
    /// Class of the instructions.
    pub class: Class,
    /// All of it follows from this, the class and the region.
    pub seed: u64,
    /// Linear address of the region.
    pub base: u32,
    /// The instructions.
    pub slots: Vec<Slot>,
    /// The code, from [`CODE`].
    pub code: Vec<u8>,
    /// Cells and what to fill them with.
    pub(crate) values: Vec<(u32, Value)>,
    /// Linear addresses behind the instructions, and of the end.
    pub(crate) post: Vec<u32>,
    /// Parts of the region that are not compared.
    pub(crate) ignored: Vec<(u32, u32)>,
    /// End of the notes.
    pub(crate) log_end: u32,
    /// End of the cells.
    pub(crate) values_end: u32,
    /// Alignment checks may be on.
    pub(crate) alignment_checks: bool,
}

impl Batch {
    /// The batch of a seed with its first `count` slots.
    pub fn new(stems: &Stems, class: Class, seed: u64, base: u32, count: usize) -> Self {
        crate::build::build(stems, class, seed, base, count)
    }

    /// Writes what is the same in all runs: the code, and data that is only read.
    pub fn install(&self, region: &mut [u8]) {
        region[CODE as usize..][..self.code.len()].copy_from_slice(&self.code);
        for chunk in region[READ_ONLY as usize..][..0x1000].chunks_exact_mut(8) {
            chunk.copy_from_slice(&mix(self.seed).to_le_bytes());
        }
        for (i, post) in self.post.iter().enumerate() {
            region[POST as usize + i * 4..][..4].copy_from_slice(&post.to_le_bytes());
        }
    }

    /// Fills parameters and data for the run with this number.
    pub fn fill(&self, run: u64, region: &mut [u8]) {
        let mut rng = Rng::new(mix(self.seed) ^ run.wrapping_mul(0x9e37_79b9));
        for chunk in region[DATA as usize..][..DATA_LEN as usize].chunks_exact_mut(8) {
            chunk.copy_from_slice(&rng.float().to_le_bytes());
        }
        self.fill_start(&mut rng, region);
        for &(cell, value) in &self.values {
            let (before, here) = region.split_at_mut(cell as usize);
            let here = &mut here[..value.size() as usize];
            value.fill(&mut rng, self.base, here, |at| word(before, at));
        }
        region[FAULTS as usize..][..SLOTS * FAULT_LEN as usize].fill(0);
    }

    fn fill_start(&self, rng: &mut Rng, region: &mut [u8]) {
        let mut put = |at: u32, v: u64| {
            region[at as usize..][..8].copy_from_slice(&v.to_le_bytes());
        };
        for i in 0..16 {
            let v = rng.value();
            put(
                START + i * 8,
                if self.class.bits() == 32 {
                    v & 0xffff_ffff
                } else {
                    v
                },
            );
        }
        let direction = if rng.one_in(4) { 0x400 } else { 0 };
        let align = if self.alignment_checks { 0x4_0000 } else { 0 };
        put(START + 0x80, 0x202 | rng.bits() & 0x8d5 | direction | align);
        put(START + 0x88, crate::values::mxcsr(rng).into());
        for (reg, len) in vectors(self.class) {
            for at in (0..len as u32).step_by(8) {
                put(START_VECTORS + u32::from(reg) * 64 + at, rng.float());
            }
        }
        for i in 0..8 {
            put(START_OPMASKS + i * 8, rng.value());
        }
    }

    /// The encoding of a slot's instruction.
    pub fn bytes_of(&self, slot: &Slot) -> &[u8] {
        let at = (slot.rip - self.base - CODE) as usize;
        &self.code[at..at + slot.insn.len()]
    }

    /// The parts of the region that a run may change and that must then be equal.
    pub fn compared(&self) -> [(usize, usize); 2] {
        [
            (DATA as usize, (DATA + DATA_LEN) as usize),
            (LOG as usize, self.log_end as usize),
        ]
    }
}

/// Eight bytes of a region.
pub fn word(region: &[u8], at: u32) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&region[at as usize..][..8]);
    u64::from_le_bytes(bytes)
}

/// Loads everything to start with. In 64-bit code.
pub(crate) fn prologue(asm: &mut Asm, class: Class) {
    // MOV EAX, DS; MOV DS, EAX; MOV ES, EAX.
    asm.bytes.push(0xb8);
    asm.bytes.extend(u32::from(DS).to_le_bytes());
    asm.bytes.extend([0x8e, 0xd8, 0x8e, 0xc0]);
    if class == Class::Address && gs_base() {
        asm.bytes.push(0xb8);
        asm.bytes.extend((GS_BASE as u32).to_le_bytes());
        // WRGSBASE RAX.
        asm.bytes.extend([0xf3, 0x48, 0x0f, 0xae, 0xd8]);
    }
    for (reg, len) in vectors(class) {
        asm.vector(false, reg, len, START_VECTORS + u32::from(reg) * 64);
    }
    if class.has_evex() {
        for k in 0..8 {
            asm.opmask(false, k, START_OPMASKS + u32::from(k) * 8);
        }
    }
    if class == Class::Xsave && has_avx512() {
        // XGETBV reports which components are in use. The lockstep process itself uses these, and
        // the guest does not: put them into their initial state.
        // MOV EAX, imm; XOR EDX, EDX; XRSTOR.
        asm.bytes.push(0xb8);
        asm.bytes.extend(AVX512_COMPONENTS.to_le_bytes());
        asm.bytes.extend([0x31, 0xd2]);
        asm.map_0f(0xae, 5, ZEROS);
    }
    asm.ldmxcsr(START + 0x88);
    // MOV ESP, imm; POPFQ.
    asm.bytes.push(0xbc);
    asm.bytes.extend((asm.base + START + 0x80).to_le_bytes());
    asm.bytes.push(0x9d);
    for reg in 0..16 {
        asm.load(reg, START + u32::from(reg) * 8);
    }
    if class.bits() == 32 {
        asm.to_compat(FAR, CS32.into());
    }
}

/// Notes everything that is left and leaves.
pub(crate) fn epilogue(asm: &mut Asm, class: Class) {
    let narrow = class.bits() == 32;
    if narrow {
        for reg in 0..8 {
            asm.store(FINAL + u32::from(reg) * 8, reg);
        }
        asm.to_long(CS64);
    } else {
        for reg in 0..16 {
            asm.store(FINAL + u32::from(reg) * 8, reg);
        }
    }
    // MOV ESP, imm; PUSHFQ.
    asm.bytes.push(0xbc);
    asm.bytes.extend((asm.base + FINAL + 0x90).to_le_bytes());
    asm.bytes.push(0x9c);
    asm.stmxcsr(FINAL + 0x98);
    for (reg, len) in vectors(class) {
        asm.vector(true, reg, len, FINAL_VECTORS + 0x40 * u32::from(reg));
    }
    if class.has_evex() {
        for k in 0..8 {
            asm.opmask(true, k, FINAL_OPMASKS + u32::from(k) * 8);
        }
    }
    asm.load(4, SAVED_RSP);
    asm.jump_to_cell(RESUME);
}

/// Vector registers that count in a class, and their length.
fn vectors(class: Class) -> Vec<(u8, usize)> {
    let len = vector_len(class);
    let count = match (class.bits(), len) {
        (32, _) => 8,
        (_, 64) => 32,
        _ => 16,
    };
    (0..count).map(|reg| (reg, len)).collect()
}

/// Length of vector registers as far as a class knows them.
pub(crate) fn vector_len(class: Class) -> usize {
    if class.has_evex() {
        64
    } else if std::arch::is_x86_feature_detected!("avx") {
        32
    } else {
        16
    }
}

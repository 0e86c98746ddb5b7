//! A batch: the code of many slots, each around one compared instruction.
//!
//! A slot loads the registers that its instruction needs from cells, executes it, and stores what
//! it wrote. After an exception execution continues behind the instruction. Host and guest run
//! exactly this code, from the same linear address, on the same memory; their data and results must
//! then be equal. State flows from slot to slot, so that one instruction works on the results of
//! others.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in a region are below 2 GiB"
)]

use crate::host_cpu::has_avx;
use crate::layout::*;
use crate::rng::{Rng, mix};
use crate::user::class::InsnClass;
use crate::user::values::{CellValue, random_mxcsr};
use iced_x86::{Formatter, GasFormatter, Instruction};

/// Selector of 64-bit user code on Linux.
pub(crate) const CS64: u16 = 0x33;
/// Selector of 32-bit user code on Linux.
pub(crate) const CS32: u16 = 0x23;
/// Selector of user data on Linux.
pub(crate) const DS: u16 = 0x2b;

/// A part of the log that a slot writes.
#[derive(Clone, Debug)]
pub(crate) struct SlotResult {
    /// What the slot stores there.
    pub(crate) source: ResultSource,
    /// Offset in the region.
    pub(crate) at: u32,
    /// Bytes.
    pub(crate) len: u32,
}

/// What a [`SlotResult`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResultSource {
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
    /// x87 and SSE state as FXSAVE writes them.
    Fxsave,
    /// What the instruction wrote to memory, or a mark that the branch did not jump over.
    Memory,
}

/// One compared instruction.
#[derive(Clone, Debug)]
pub(crate) struct InsnSlot {
    /// The instruction, decoded at its address.
    pub(crate) insn: Instruction,
    /// The instruction's linear address.
    pub(crate) rip: u32,
    /// The results that it stores.
    pub(crate) results: Vec<SlotResult>,
}

impl InsnSlot {
    /// The instruction in assembly.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        GasFormatter::new().format(&self.insn, &mut text);
        text
    }
}

/// Code, and what to fill memory with before it runs.
///
/// Only [`crate::user::build`] makes batches, and nothing changes them afterwards. So a `Batch` is
/// a proof that its code accesses only the region or faults, and that it ends by a jump through
/// [`RESUME`].
#[derive(Debug)]
pub(crate) struct Batch {
    /// Class of the instructions.
    pub(in crate::user) class: InsnClass,
    /// Code and data follow from the seed, the class and the region's address.
    pub(in crate::user) seed: u64,
    /// Linear address of the region.
    pub(in crate::user) base: u32,
    /// The instructions.
    pub(in crate::user) slots: Vec<InsnSlot>,
    /// The code, from [`CODE`].
    pub(in crate::user) code: Vec<u8>,
    /// Cells and what to fill them with.
    pub(in crate::user) values: Vec<(u32, CellValue)>,
    /// Linear addresses behind the instructions, and of the end.
    pub(in crate::user) post: Vec<u32>,
    /// Parts of the region that are not compared: offset and length.
    pub(in crate::user) ignored: Vec<(u32, u32)>,
    /// End of the results.
    pub(in crate::user) log_end: u32,
    /// End of the cells.
    pub(in crate::user) values_end: u32,
    /// EFLAGS.AC is set.
    pub(in crate::user) alignment_checks: bool,
}

/// Class, seed and length of a batch, from which all of it follows.
pub(in crate::user) type BatchId = (InsnClass, u64, usize);

impl Batch {
    /// The identity of the batch in a region.
    pub(in crate::user) fn id(&self) -> BatchId {
        (self.class, self.seed, self.slots.len())
    }

    /// Writes what is the same in all runs: the code, and data that is only read.
    pub(in crate::user) fn install(&self, region: &mut [u8]) {
        region[CODE as usize..][..self.code.len()].copy_from_slice(&self.code);
        for chunk in region[READ_ONLY as usize..][..0x1000].chunks_exact_mut(8) {
            chunk.copy_from_slice(&mix(self.seed).to_le_bytes());
        }
        for (i, post) in self.post.iter().enumerate() {
            region[POST as usize + i * 4..][..4].copy_from_slice(&post.to_le_bytes());
        }
    }

    /// Fills parameters and data for the run with this number.
    pub(in crate::user) fn fill(&self, run: u64, region: &mut [u8]) {
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
        put(START + 0x88, random_mxcsr(rng).into());
        for (reg, len) in vector_registers(self.class) {
            for at in (0..len as u32).step_by(8) {
                put(START_VECTORS + u32::from(reg) * 64 + at, rng.float());
            }
        }
        for i in 0..8 {
            put(START_OPMASKS + i * 8, rng.value());
        }
    }

    /// The encoding of a slot's instruction.
    pub(in crate::user) fn bytes_of(&self, slot: &InsnSlot) -> &[u8] {
        let at = (slot.rip - self.base - CODE) as usize;
        &self.code[at..at + slot.insn.len()]
    }

    /// The parts of the region that a run may change and that must then be equal: from and to.
    pub(in crate::user) fn compared(&self) -> [(usize, usize); 2] {
        [
            (DATA as usize, (DATA + DATA_LEN) as usize),
            (LOG as usize, self.log_end as usize),
        ]
    }
}

/// Eight bytes of a region.
fn word(region: &[u8], at: u32) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&region[at as usize..][..8]);
    u64::from_le_bytes(bytes)
}

/// Makes the exception records of host and guest comparable.
///
/// Linux sets the protection bit of the error code for every #PF in the kernel's half, mapped or
/// not.
pub(in crate::user) fn normalize_faults(region: &mut [u8]) {
    let at = FAULTS as usize;
    for record in region[at..][..SLOTS * FAULT_LEN as usize].chunks_exact_mut(FAULT_LEN as usize) {
        let mut cr2 = [0; 8];
        cr2.copy_from_slice(&record[8..16]);
        // A record begins with vector + 1, and #PF has the vector 14.
        if record[0] == 15 && u64::from_le_bytes(cr2) >= 0x7fff_ffff_f000 {
            record[4] |= 1;
        }
    }
}

/// The vector registers that a class compares, and their length.
pub(in crate::user) fn vector_registers(class: InsnClass) -> Vec<(u8, usize)> {
    let len = vector_len(class);
    let count = match (class.bits(), len) {
        (32, _) => 8,
        (_, 64) => 32,
        _ => 16,
    };
    (0..count).map(|reg| (reg, len)).collect()
}

/// Length of the vector registers that a class compares.
pub(in crate::user) fn vector_len(class: InsnClass) -> usize {
    if class.has_evex() {
        64
    } else if has_avx() {
        32
    } else {
        16
    }
}

//! The code that stores what an instruction wrote.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and lengths of registers are small"
)]

use crate::user::batch::{InsnSlot, ResultSource, vector_len};
use crate::user::build::builder::{BatchBuilder, number};
use crate::user::build::special::FX_IGNORED;
use crate::user::class::InsnClass;
use crate::user::kind::{undefined_flags, writes};
use iced_x86::{Instruction, InstructionInfo};

impl BatchBuilder<'_> {
    /// Stores what the instruction wrote and ends the slot.
    pub(super) fn finish_slot(&mut self, insn: Instruction, rip: u32, info: &InstructionInfo) {
        self.post.push(self.asm.here());
        self.store_results(&insn, info);
        let results = std::mem::take(&mut self.results);
        self.slots.push(InsnSlot { insn, rip, results });
    }

    fn store_results(&mut self, insn: &Instruction, info: &InstructionInfo) {
        let mut stored = 0_u32;
        for used in info.used_registers() {
            let r = used.register();
            if !writes(used.access()) {
                continue;
            }
            if r.is_gpr() && stored >> number(r) & 1 == 0 {
                stored |= 1 << number(r);
                let at = self.result(ResultSource::Gpr(number(r)), 8);
                self.asm.store(at, number(r));
            } else if r.is_vector_register() {
                let len = vector_len(self.class);
                let at = self.result(ResultSource::Vector(r.number() as u8), len as u32);
                self.asm.vector(true, r.number() as u8, len, at);
            } else if r.is_k() {
                let at = self.result(ResultSource::Opmask(r.number() as u8), 8);
                self.asm.opmask(true, r.number() as u8, at);
            }
        }
        let changed = insn.rflags_modified() != 0;
        let undefined = undefined_flags(insn);
        if undefined != 0 || changed && !self.rng.one_in(4) {
            let at = self.result(ResultSource::Flags, 4);
            self.asm.store_flags(at, 0x8d5 & !undefined);
        }
        let vector = matches!(
            self.class,
            InsnClass::Sse | InsnClass::Avx | InsnClass::Avx2 | InsnClass::Avx512
        );
        if vector && self.rng.one_in(2) {
            let at = self.result(ResultSource::Mxcsr, 4);
            self.asm.stmxcsr(at);
        }
        if self.class.has_x87() {
            let at = self.result(ResultSource::Fxsave, 512);
            self.asm.fxsave(at);
            self.ignored
                .extend(FX_IGNORED.iter().map(|&(from, len)| (at + from, len)));
        }
    }
}

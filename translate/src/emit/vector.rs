//! Emits vector instructions. Vector registers keep their names on the host.

use super::flags::A;
use super::same::redirect;
use super::{Emitter, ExitPoint, Late, Retry};
use crate::analysis::{ARITHMETIC, AccessCounts, UnitStep, accesses_memory};
use crate::asm::{ADDR, Jump32, RAX, Rm, TEMP, jcc};
use crate::flags::FlagKind;
use crate::layout::Context;
use crate::vector::VectorLevel;
use iced_x86::OpKind;
use std::mem::offset_of;

/// Condition "below".
const BELOW: u8 = 2;
/// Condition "not equal".
const NOT_EQUAL: u8 = 5;

impl Emitter<'_> {
    /// Emits the check at a unit's entry that its vector registers are loaded.
    pub(super) fn need_vectors(&mut self) {
        let level = self.analysis.vectors;
        if level == VectorLevel::None {
            return;
        }
        let loaded = self.context(offset_of!(Context, vectors_loaded));
        self.asm.alu_imm(7, 4, loaded, level as i32);
        let from = self.asm.jump(&jcc(BELOW));
        let exit = self.exit(ExitPoint::Instruction {
            block: 0,
            index: self.source.start,
            give_back: self.rest(0),
            path: None,
            access: None,
            uncounted: AccessCounts::default(),
        });
        self.late.push(Late::LoadVectors { from, exit });
    }

    /// Emits the call that loads the vector registers.
    ///
    /// The call leaves the unit if the guest may not use them. The run of the first block is
    /// counted in both cases, so the code continues at `entry`, after the count.
    pub(super) fn load_vectors(&mut self, from: Jump32, exit: u32, entry: usize) {
        self.asm.here(from);
        self.count_run(0);
        self.asm.constant(TEMP, exit.into());
        let load = self.addresses.load_vectors[self.analysis.vectors as usize - 1];
        self.asm.jump_to(crate::asm::CALL, load);
        let jump = self.asm.jump(crate::asm::JMP);
        self.asm.lead(jump, entry);
    }

    /// Emits a vector instruction.
    pub(super) fn vector(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let mut i = step.insn;
        let stores = step.flags.changed != 0 && self.stores_now();
        debug_assert!(step.flags.read == 0);
        let memory = accesses_memory(&i);
        if memory {
            let write = i.op0_kind() == OpKind::Memory && step.flags.changed == 0;
            self.operand(&step.insn, write)?;
            if step.aligned {
                self.check_alignment(step);
            }
            redirect(&mut i);
        }
        self.run(step, i, memory)?;
        if stores {
            debug_assert!(step.flags.written == ARITHMETIC);
            self.store_explicit(FlagKind::Explicit);
        }
        Ok(())
    }

    /// Leaves the unit before an instruction whose operand at R10 is not aligned.
    fn check_alignment(&mut self, step: &UnitStep) {
        let Ok(mask) = i32::try_from(step.insn.memory_size().size()) else {
            return;
        };
        self.test_immediate(1, Rm::Reg(ADDR), mask - 1);
        self.leave_if(step, NOT_EQUAL);
    }

    /// Stores the host's flags as those of the guest, and keeps them; clobbers R11.
    pub(super) fn store_explicit(&mut self, kind: FlagKind) {
        self.asm.load(8, TEMP, Rm::Reg(RAX));
        // LAHF; SETO AL
        self.asm.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
        let to = self.context(A);
        self.asm.store(8, to, RAX);
        self.asm.load(8, RAX, Rm::Reg(TEMP));
        self.store_record(kind, 8);
    }
}

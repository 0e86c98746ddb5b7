//! Emits what units do for a model of the caches: counts, and checks of the lines of code.

use super::Emitter;
use super::flow::NOT_EQUAL;
use crate::analysis::{StepKind, UnitStep};
use crate::asm::{Rm, TEMP, jcc};
use crate::layout::{Context, code_line_offset};
use crate::unit::UnitAccess;
use std::mem::offset_of;

/// Condition "equal".
const EQUAL: u8 = 4;

impl Emitter<'_> {
    /// Adds the loads and stores of a block to the counts, if the unit reports accesses.
    pub(super) fn count_accesses(&mut self, block: usize) {
        if self.source.access_format.is_none() {
            return;
        }
        let start = if block == 0 { self.source.start } else { 0 };
        let counts = self.source.blocks[block].accesses_from(start);
        for (count, field) in [
            (counts.loads, offset_of!(Context, loads)),
            (counts.stores, offset_of!(Context, stores)),
        ] {
            if count != 0 {
                let count = i32::try_from(count).unwrap_or(0);
                let field = self.context(field);
                self.asm.alu_imm(0, 8, field, count);
            }
        }
        self.valid = 0;
    }

    /// Leaves the unit before a step if fetching its line of code may change the cache.
    pub(super) fn check_line(&mut self, step: &UnitStep) {
        let line = self.source.blocks[step.block].line(step.index);
        let last = self.context(offset_of!(Context, fetch_line));
        self.asm.constant(TEMP, line);
        self.asm.alu(7, 8, last, TEMP);
        let same = self.asm.jump(&jcc(EQUAL));
        let newest = Rm::Fixed(self.addresses.data + code_line_offset(line) as u64);
        self.asm.alu(7, 8, newest, TEMP);
        self.leave_if(step, NOT_EQUAL);
        self.asm.store(8, last, TEMP);
        self.asm.here(same);
        self.valid = 0;
    }

    /// Returns the access of the current step.
    pub(super) fn access(&self, size: u8, write: bool) -> UnitAccess {
        let step = &self.analysis.steps[self.at];
        let guest = &self.source.blocks[step.block].insns[step.index];
        let two = step.kind == StepKind::CallIndirect;
        UnitAccess {
            size,
            write,
            read: if two { !write } else { guest.loads },
            retires: !matches!(
                step.kind,
                StepKind::Return | StepKind::JumpIndirect | StepKind::CallIndirect
            ) && !matches!(step.kind, StepKind::Divide { .. } | StepKind::X87)
                && !step.aligned,
        }
    }
}

//! Emits atomic read-modify-writes of memory, most of them locked.

use super::flags::operand_size;
use super::same::redirect;
use super::{Emitter, Retry};
use crate::analysis::{StepKind, UnitStep};
use crate::asm::{ADDR, Rm, TEMP};
use crate::flags::FlagKind;
use iced_x86::Mnemonic as M;

/// Condition "not equal".
const NOT_EQUAL: u8 = 5;

impl Emitter<'_> {
    /// Emits an instruction with LOCK, or XCHG, XADD or CMPXCHG, on memory.
    ///
    /// An operand that is not aligned leaves the unit before the instruction: the caller has its
    /// own way to make such accesses atomic.
    pub(super) fn atomic(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let mut i = step.insn;
        let size = operand_size(&i);
        debug_assert!(step.kind == StepKind::Atomic);
        let steps = matches!(i.mnemonic(), M::Inc | M::Dec);
        let stores = step.flags.changed != 0 && self.stores_now();
        self.operand(&step.insn, true)?;
        if size > 1 {
            self.test_immediate(1, Rm::Reg(ADDR), i32::from(size) - 1);
            self.leave_if(step, NOT_EQUAL);
        }
        redirect(&mut i);
        if steps {
            self.atomic_step(i.mnemonic() == M::Dec, size, stores);
            return Ok(());
        }
        self.need(step.flags.read)?;
        self.run(step, i, true)?;
        if stores {
            let logic = matches!(i.mnemonic(), M::And | M::Or | M::Xor);
            self.store_explicit(if logic {
                FlagKind::ExplicitLogic
            } else {
                FlagKind::Explicit
            });
        }
        Ok(())
    }

    /// Emits a locked INC or DEC as LOCK XADD.
    ///
    /// XADD returns the old value, from which the result for the flags is computed.
    fn atomic_step(&mut self, decrement: bool, size: u8, stores: bool) {
        self.asm
            .constant(TEMP, if decrement { u64::MAX } else { 1 });
        let opcode = if size == 1 { 0xc0 } else { 0xc1 };
        self.asm.bytes(&[0xf0]);
        self.asm
            .encode(&[0x0f, opcode], size, TEMP.0, Rm::At(ADDR, 0), 0);
        let operation = u8::from(decrement);
        self.asm.sized(0xff, size, operation, Rm::Reg(TEMP));
        if stores {
            self.store_step(decrement, size, Rm::Reg(TEMP));
        }
    }
}

//! Emits instructions as they are, with renamed registers and a host address.

use super::{Emitter, Retry, named};
use crate::analysis::{FlagVisibility, UnitStep, accesses_memory, is_high_byte};
use crate::asm::{ADDR, Host, Rm, TEMP};
use iced_x86::{Code, Instruction, Mnemonic as M, OpKind, Register};

/// Replaces the memory operand by the memory at R10.
pub(super) fn redirect(i: &mut Instruction) {
    i.set_segment_prefix(Register::None);
    i.set_memory_base(Register::R10);
    i.set_memory_index(Register::None);
    i.set_memory_index_scale(1);
    i.set_memory_displ_size(0);
    i.set_memory_displacement64(0);
}

/// Whether the first operand is memory that the instruction writes.
fn writes_memory(i: &Instruction) -> bool {
    i.op0_kind() == OpKind::Memory && !matches!(i.mnemonic(), M::Bt | M::Mul | M::Imul)
}

impl Emitter<'_> {
    /// Emits an instruction that sets no flags that are visible outside the unit.
    pub(super) fn same(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let mut i = step.insn;
        let memory = accesses_memory(&i);
        if memory {
            self.operand(&step.insn, writes_memory(&i))?;
            redirect(&mut i);
        }
        self.need(step.flags.read)?;
        self.run(step, i, memory)
    }

    /// Emits an instruction whose flags must not be visible outside the unit.
    pub(super) fn unseen(&mut self, step: &UnitStep) -> Result<(), Retry> {
        if step.visibility == FlagVisibility::No {
            self.same(step)
        } else {
            self.cannot()
        }
    }

    /// Emits an instruction with renamed registers; with `memory`, R10 is in use.
    ///
    /// Loads and stores spilled registers around the instruction.
    pub(super) fn run(
        &mut self,
        step: &UnitStep,
        mut i: Instruction,
        memory: bool,
    ) -> Result<(), Retry> {
        let mut free = [Some(TEMP), (!memory).then_some(ADDR)]
            .into_iter()
            .flatten();
        let mut loaded: Vec<(Register, Host)> = Vec::new();
        for n in 0..i.op_count() {
            // The value of a memory operand may have been loaded into R11 already.
            if i.op_kind(n) != OpKind::Register || step.insn.op_kind(n) != OpKind::Register {
                continue;
            }
            let register = i.op_register(n);
            if !register.is_gpr() {
                continue;
            }
            if is_high_byte(register) && n == 0 {
                // The host has it in the same register, and no other operand needs a REX prefix.
                continue;
            }
            if is_high_byte(register) {
                let Some(host) = free.next() else {
                    return self.cannot();
                };
                self.copy_high_byte(host, register)?;
                i.set_op_register(n, named(host, 1));
                continue;
            }
            let full = register.full_register();
            let host = match self.home(register) {
                Rm::Reg(host) => host,
                spilled => match loaded.iter().find(|(r, _)| *r == full) {
                    Some((_, host)) => *host,
                    None => {
                        let Some(host) = free.next() else {
                            return self.cannot();
                        };
                        self.asm.load(8, host, spilled);
                        loaded.push((full, host));
                        host
                    }
                },
            };
            i.set_op_register(n, named(host, register.size()));
        }
        self.encode(&i)?;
        for (register, host) in loaded {
            if step.writes >> (register.number() & 15) & 1 != 0 {
                let home = self.home(register);
                self.asm.store(8, home, host);
            }
        }
        Ok(())
    }

    /// Copies AH, CH, DH or BH to the low byte of a host register, without changing the flags.
    pub(super) fn copy_high_byte(&mut self, to: Host, from: Register) -> Result<(), Retry> {
        if !self.addresses.bmi2 {
            return self.cannot();
        }
        let code = Code::VEX_Rorx_r32_rm32_imm8;
        let from = from.full_register32();
        let rotate = Instruction::with3(code, named(to, 4), from, 8_u32);
        self.encode(&rotate.map_err(|_| Retry::End(self.at))?)
    }
}

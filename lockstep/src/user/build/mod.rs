//! Makes batches: random instructions, and the code that surrounds each of them.

mod branch;
mod builder;
mod frame;
mod operands;
mod results;
mod special;

use crate::asm::Asm;
use crate::layout::*;
use crate::rng::Rng;
use crate::user::batch::Batch;
use crate::user::class::InsnClass;
use crate::user::kind::{InsnKind, kind};
use crate::user::stems::Stems;
use builder::BatchBuilder;
use frame::{epilogue, prologue};
use iced_x86::{FlowControl, Instruction, Mnemonic as M, Register};

/// The batch of a seed with its first `count` slots, for a region at `base`.
pub(in crate::user) fn build(
    stems: &Stems,
    class: InsnClass,
    seed: u64,
    base: u32,
    count: usize,
) -> Batch {
    let mut rng = Rng::new(seed);
    let alignment_checks = class == InsnClass::Fault && rng.one_in(2);
    let asm = Asm {
        bytes: Vec::with_capacity(CODE_LEN as usize),
        base,
        origin: base + CODE,
        long: true,
    };
    let mut builder = BatchBuilder::new(class, asm, &mut rng);
    prologue(&mut builder.asm, class);
    while builder.slots.len() < count.min(SLOTS) && builder.has_capacity() {
        let (insn, bytes) = stems.generate(builder.rng);
        if alignment_checks && !checks_alignment(&insn) {
            continue;
        }
        builder.slot(insn, &bytes);
    }
    // An exception of the epilogue has the last record for itself.
    builder.asm.set(CURRENT, LAST_SLOT);
    let end = builder.asm.here();
    epilogue(&mut builder.asm, class);
    let mut post = builder.post;
    post.resize(SLOTS, end);
    Batch {
        class,
        seed,
        base,
        slots: builder.slots,
        code: builder.asm.bytes,
        values: builder.values,
        post,
        ignored: builder.ignored,
        log_end: builder.log_end,
        values_end: builder.values_end,
        alignment_checks,
    }
}

/// The number of the last slot, which has no instruction.
const LAST_SLOT: u32 = 63;
const _: () = assert!(LAST_SLOT as usize == SLOTS - 1);

/// Whether processors agree in how they check the operands' alignment: they differ for wide ones.
fn checks_alignment(insn: &Instruction) -> bool {
    let agreed = |k: InsnKind| k.is_integer() && k != InsnKind::String;
    kind(insn).is_some_and(agreed) && insn.mnemonic() != M::Enter
}

impl BatchBuilder<'_> {
    /// Emits one slot. Instructions that cannot be compared are left out.
    fn slot(&mut self, mut insn: Instruction, bytes: &[u8]) {
        if operands::bit_number_is_address(&insn)
            || operands::order_differs(&insn) && insn.segment_prefix() == Register::CS
        {
            return;
        }
        // A register that is both base and index does not lead to the target exactly.
        let is_inexact = insn.memory_base().is_gpr()
            && insn.memory_base().full_register() == insn.memory_index().full_register();
        // Bytes beside the operand's cell may set bit 17 of MXCSR, which only some processors have.
        if is_inexact && matches!(insn.mnemonic(), M::Ldmxcsr | M::Vldmxcsr) {
            return;
        }
        self.start_slot();
        self.empty_mask = self.empty_mask_of(&insn);
        let index = self.next_index();
        self.asm.set(CURRENT, index);
        let info = self.factory.info(&insn).clone();
        self.extended_state(&insn);
        if insn.flow_control() != FlowControl::Next && kind(&insn) == Some(InsnKind::Branch) {
            // A call would push its return address among the cells that other slots load.
            let pushes = insn.stack_pointer_increment() < 0
                && insn.memory_base().full_register() == Register::RSP;
            if !is_inexact && !pushes {
                self.branch(insn);
            }
            return;
        }
        self.fixed_operand(&insn);
        for memory in info.used_memory() {
            self.address(&insn, memory, None);
        }
        self.registers(&insn, &info);
        self.equal_operand(&insn);
        if operands::compares_strings(&insn) {
            // If neither operand of an element can be read, processors differ in which one they try
            // first.
            self.ignored.push((FAULTS + index * FAULT_LEN + 8, 8));
        }
        let rip = self.asm.here();
        let mut bytes = bytes.to_vec();
        self.fix_displacement(&mut bytes, rip);
        self.decode_at(&bytes, rip, &mut insn);
        self.asm.bytes.extend(&bytes);
        self.finish_slot(insn, rip, &info);
    }
}

//! The batch under construction.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in a region and slot numbers are small"
)]

use crate::asm::Asm;
use crate::layout::*;
use crate::rng::Rng;
use crate::user::batch::{InsnSlot, ResultSource, SlotResult};
use crate::user::class::InsnClass;
use crate::user::values::CellValue;
use iced_x86::{Decoder, DecoderOptions, Instruction, InstructionInfoFactory, Register};

/// The most that a slot takes: code, cells and results.
const SLOT_CODE: usize = 700;
const SLOT_VALUES: u32 = 0x800;
const SLOT_RESULTS: u32 = 0xc00;
/// The most code that the epilogue takes.
const EPILOGUE_CODE: usize = 400;

/// A batch under construction, and the slot that is being added to it.
pub(super) struct BatchBuilder<'a> {
    pub(super) class: InsnClass,
    pub(super) rng: &'a mut Rng,
    pub(super) asm: Asm,
    pub(super) values: Vec<(u32, CellValue)>,
    pub(super) values_end: u32,
    pub(super) log_end: u32,
    pub(super) ignored: Vec<(u32, u32)>,
    pub(super) post: Vec<u32>,
    pub(super) slots: Vec<InsnSlot>,
    pub(super) factory: InstructionInfoFactory,
    /// General registers that this slot has loaded, one bit each.
    pub(super) loaded: u32,
    /// Results that this slot stores.
    pub(super) results: Vec<SlotResult>,
    /// Offset of this slot's memory operand, if it must not be in the data.
    pub(super) operand: Option<u32>,
    /// An address of this slot may be one that faults.
    pub(super) has_wild_address: bool,
    /// Whether this slot's mask may select no element.
    pub(super) empty_mask: EmptyMask,
}

/// Whether the mask may select no element, in which case vendors differ in how they treat a
/// misaligned operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmptyMask {
    /// The mask may select no element: vendors agree.
    Allowed,
    /// The mask may select no element: the operand is aligned.
    Aligned,
    /// The mask selects an element: the operand may be misaligned.
    Avoided,
}

impl<'a> BatchBuilder<'a> {
    /// A batch without slots whose code begins with what `asm` holds.
    pub(super) fn new(class: InsnClass, asm: Asm, rng: &'a mut Rng) -> Self {
        Self {
            class,
            rng,
            asm,
            values: Vec::new(),
            values_end: VALUES,
            log_end: RESULTS,
            ignored: Vec::new(),
            post: Vec::new(),
            slots: Vec::new(),
            factory: InstructionInfoFactory::new(),
            loaded: 0,
            results: Vec::new(),
            operand: None,
            has_wild_address: false,
            empty_mask: EmptyMask::Allowed,
        }
    }

    /// Whether one more slot and the epilogue fit.
    pub(super) fn has_capacity(&self) -> bool {
        self.asm.bytes.len() + SLOT_CODE + EPILOGUE_CODE < CODE_LEN as usize
            && self.values_end + SLOT_VALUES < PARAMS + PARAMS_LEN
            && self.log_end + SLOT_RESULTS < LOG + LOG_LEN
    }

    /// Linear address of the region.
    pub(super) fn base(&self) -> u32 {
        self.asm.base
    }

    /// The number of the slot under construction.
    pub(super) fn next_index(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Forgets the slot before.
    pub(super) fn start_slot(&mut self) {
        self.loaded = 0;
        self.results.clear();
        self.operand = None;
        self.has_wild_address = false;
    }

    /// Allocates a cell that is filled with `value` before each run.
    pub(super) fn cell(&mut self, value: CellValue) -> u32 {
        let at = self.values_end.next_multiple_of(value.align());
        self.values_end = at + value.size();
        self.values.push((at, value));
        at
    }

    /// Allocates a part of the log for a result of this slot.
    pub(super) fn result(&mut self, source: ResultSource, len: u32) -> u32 {
        let at = self.log_end.next_multiple_of(if len > 8 { 64 } else { 8 });
        self.log_end = at + len;
        self.results.push(SlotResult { source, at, len });
        at
    }

    /// Loads a general register, once in a slot; returns the cell that it is loaded from.
    pub(super) fn load(&mut self, reg: u8, value: CellValue) -> Option<u32> {
        if self.loaded >> reg & 1 != 0 {
            return None;
        }
        self.loaded |= 1 << reg;
        let cell = self.cell(value);
        self.asm.load(reg, cell);
        Some(cell)
    }

    /// Decodes `bytes` as an instruction of the class at `rip`.
    pub(super) fn decode_at(&self, bytes: &[u8], rip: u32, insn: &mut Instruction) {
        Decoder::with_ip(self.class.bits(), bytes, rip.into(), DecoderOptions::NONE)
            .decode_out(insn);
    }
}

/// The number of the general register that `r` is a part of.
pub(super) fn number(r: Register) -> u8 {
    r.full_register().number() as u8
}

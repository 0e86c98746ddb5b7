//! Builds batches: what surrounds each instruction.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and offsets in a region are small"
)]

use crate::batch::{Batch, Note, Slot, What, epilogue, prologue, vector_len};
use crate::class::{Class, Kind, alignment_depends_on_mask, kind, reads, undefined_flags, writes};
use crate::emit::Asm;
use crate::layout::*;
use crate::native::gs_base;
use crate::rng::Rng;
use crate::stems::Stems;
use crate::values::{Address, Value};
use iced_x86::{
    Code, CpuidFeature, Decoder, DecoderOptions, Encoder, FlowControl, Instruction,
    InstructionInfo, InstructionInfoFactory, MemoryOperand, Mnemonic as M, OpKind, Register,
    UsedMemory,
};

/// Room that a slot may take, in code, cells and notes.
const SLOT_CODE: usize = 700;
const SLOT_VALUES: u32 = 0x800;
const SLOT_NOTES: u32 = 0xc00;

struct Builder<'a> {
    class: Class,
    base: u32,
    rng: &'a mut Rng,
    asm: Asm,
    values: Vec<(u32, Value)>,
    values_end: u32,
    log_end: u32,
    ignored: Vec<(u32, u32)>,
    post: Vec<u32>,
    slots: Vec<Slot>,
    /// Registers that the slot under construction has loaded, as bits.
    loaded: u32,
    notes: Vec<Note>,
    /// Where the memory operand must be, if not in the data.
    operand: Option<u32>,
    /// An address of this slot may be one that faults.
    was_wild: bool,
    /// For the slot under construction.
    empty_mask: EmptyMask,
    factory: InstructionInfoFactory,
}

/// Whether the mask may select no element, where vendors differ in what then becomes of a misaligned
/// operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EmptyMask {
    /// It may: vendors agree.
    Allowed,
    /// It may: the operand is aligned.
    Aligned,
    /// It may not: the operand may be misaligned.
    Avoided,
}

/// The batch of a seed with its first `count` slots.
pub fn build(stems: &Stems, class: Class, seed: u64, base: u32, count: usize) -> Batch {
    let mut rng = Rng::new(seed);
    let alignment_checks = class == Class::Fault && rng.one_in(2);
    let mut b = Builder {
        class,
        base,
        rng: &mut rng,
        asm: Asm {
            bytes: Vec::with_capacity(CODE_LEN as usize),
            base,
            origin: base + CODE,
            long: true,
        },
        values: Vec::new(),
        values_end: VALUES,
        log_end: RESULTS,
        ignored: Vec::new(),
        post: Vec::new(),
        slots: Vec::new(),
        loaded: 0,
        notes: Vec::new(),
        operand: None,
        was_wild: false,
        empty_mask: EmptyMask::Allowed,
        factory: InstructionInfoFactory::new(),
    };
    prologue(&mut b.asm, class);
    while b.slots.len() < count.min(SLOTS) && b.room() {
        let (insn, bytes) = stems.generate(b.rng);
        // Processors differ in whether wide operands are checked for alignment.
        let checked = |k: Kind| k.integer() && k != Kind::String && insn.mnemonic() != M::Enter;
        if alignment_checks && !kind(&insn).is_some_and(checked) {
            continue;
        }
        b.slot(insn, &bytes);
    }
    b.asm.set(CURRENT, SLOTS as u32 - 1);
    let end = b.asm.here();
    epilogue(&mut b.asm, class);
    let (code, mut post) = (b.asm.bytes, b.post);
    post.resize(SLOTS, end);
    Batch {
        class,
        seed,
        base,
        slots: b.slots,
        code,
        values: b.values,
        post,
        ignored: b.ignored,
        log_end: b.log_end,
        values_end: b.values_end,
        alignment_checks,
    }
}

/// CMPS with a count: the elements may lead both operands to where nothing is.
fn compares_strings(i: &Instruction) -> bool {
    let counted = i.has_rep_prefix() || i.has_repne_prefix();
    counted
        && matches!(i.mnemonic(), M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq)
        && i.is_string_instruction()
}

/// BT and its relatives with a register bit number: it leads far from the operand.
fn bit_index(i: &Instruction) -> bool {
    matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
        && i.op0_kind() == OpKind::Memory
        && i.op1_kind() == OpKind::Register
}

/// A bit string whose bit number is an address: it leads to memory that only the host has.
fn reaches_out(i: &Instruction) -> bool {
    let same = |r: Register| r.full_register() == i.op1_register().full_register();
    bit_index(i) && (same(i.memory_base()) || same(i.memory_index()))
}

fn number(r: Register) -> u8 {
    r.full_register().number() as u8
}

impl Builder<'_> {
    fn room(&self) -> bool {
        self.asm.bytes.len() + SLOT_CODE + 400 < CODE_LEN as usize
            && self.values_end + SLOT_VALUES < PARAMS + PARAMS_LEN
            && self.log_end + SLOT_NOTES < LOG + LOG_LEN
    }

    fn cell(&mut self, value: Value) -> u32 {
        let align = value.align();
        let at = (self.values_end + align - 1) & !(align - 1);
        self.values_end = at + value.size();
        self.values.push((at, value));
        at
    }

    fn note(&mut self, what: What, len: u32) -> u32 {
        let align = if len > 8 { 64 } else { 8 };
        let at = (self.log_end + align - 1) & !(align - 1);
        self.log_end = at + len;
        self.notes.push(Note { what, at, len });
        at
    }

    /// Loads a general register once in a slot.
    fn load(&mut self, reg: u8, value: Value) -> Option<u32> {
        if self.loaded >> reg & 1 != 0 {
            return None;
        }
        self.loaded |= 1 << reg;
        let cell = self.cell(value);
        self.asm.load(reg, cell);
        Some(cell)
    }

    fn slot(&mut self, mut insn: Instruction, bytes: &[u8]) {
        if reaches_out(&insn) || order_differs(&insn) && insn.segment_prefix() == Register::CS {
            return;
        }
        self.loaded = 0;
        self.notes.clear();
        self.operand = None;
        self.was_wild = false;
        self.empty_mask = self.empty_mask_of(&insn);
        let index = self.slots.len() as u32;
        self.asm.set(CURRENT, index);
        let info = self.factory.info(&insn).clone();
        self.extended_state(&insn);
        if insn.flow_control() != FlowControl::Next && kind(&insn) == Some(Kind::Branch) {
            // A register that counts several times does not lead to the target exactly.
            let twice = insn.memory_base().is_gpr()
                && insn.memory_base().full_register() == insn.memory_index().full_register();
            // A call would push its return address among the cells that other slots load.
            let pushes = insn.stack_pointer_increment() < 0
                && insn.memory_base().full_register() == Register::RSP;
            if !twice && !pushes {
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
        if compares_strings(&insn) {
            // Where neither operand of an element can be read, processors differ in which one they try first.
            self.ignored.push((FAULTS + index * FAULT_LEN + 8, 8));
        }
        let rip = self.asm.here();
        let mut bytes = bytes.to_vec();
        self.fix_displacement(&mut bytes, rip);
        let mut decoder =
            Decoder::with_ip(self.class.bits(), &bytes, rip.into(), DecoderOptions::NONE);
        decoder.decode_out(&mut insn);
        self.asm.bytes.extend(&bytes);
        self.finish(insn, rip, &info);
    }

    /// Notes what the instruction wrote and ends the slot.
    fn finish(&mut self, insn: Instruction, rip: u32, info: &InstructionInfo) {
        self.post.push(self.asm.here());
        self.note_registers(&insn, info);
        let notes = std::mem::take(&mut self.notes);
        self.slots.push(Slot { insn, rip, notes });
    }

    /// Random x87 state or MXCSR, where the class is about them.
    fn extended_state(&mut self, insn: &Instruction) {
        if self.class.has_x87() {
            let cell = self.cell(Value::Fx);
            self.asm.fxrstor(cell);
        }
        let vector = matches!(
            self.class,
            Class::Sse | Class::Avx | Class::Avx2 | Class::Avx512 | Class::Fault
        );
        // A dot product is several steps, and one that faults keeps the others from happening.
        let steps = matches!(insn.mnemonic(), M::Dpps | M::Dppd | M::Vdpps | M::Vdppd);
        if steps || vector && self.rng.one_in(2) {
            let cell = self.cell(if steps { Value::Masked } else { Value::Mxcsr });
            self.asm.ldmxcsr(cell);
        }
        if self.class == Class::Xsave && vector_len(self.class) >= 32 {
            for reg in [0, 7] {
                let cell = self.cell(Value::Vector(32));
                self.asm.vector(false, reg, 32, cell);
            }
        }
    }

    fn empty_mask_of(&mut self, insn: &Instruction) -> EmptyMask {
        let (base, index) = (insn.memory_base(), insn.memory_index());
        let can_align = base.is_gpr() && base.full_register() != index.full_register();
        match alignment_depends_on_mask(insn) {
            false => EmptyMask::Allowed,
            true if can_align && self.rng.one_in(2) => EmptyMask::Aligned,
            true => EmptyMask::Avoided,
        }
    }

    /// Registers that make the address of a memory operand: in the data, or this cell.
    fn address(&mut self, insn: &Instruction, memory: &UsedMemory, to: Option<u32>) {
        let (base, index) = (memory.base(), memory.index());
        let narrow = memory.address_size() == iced_x86::CodeSize::Code32 || self.class.bits() == 32;
        let size = memory.memory_size().size().max(1) as u64;
        let mut address = Address {
            plus: memory.displacement(),
            index: None,
            times: 1,
            align: if size >= 16 {
                64
            } else {
                size.next_power_of_two()
            },
            strict: insn.cpuid_features().contains(&CpuidFeature::SHA)
                || self.empty_mask == EmptyMask::Aligned,
            wild: if order_differs(insn) {
                0
            } else {
                self.wild(insn)
            },
            narrow,
            to,
        };
        if memory.segment() == Register::GS && self.class == Class::Address && gs_base() {
            address.plus = address.plus.wrapping_add(GS_BASE);
        }
        let scale = u64::from(memory.scale());
        if index.is_vector_register() {
            let element = insn.memory_size().size().clamp(4, 8);
            let element = if index_width(insn) == 8 {
                8
            } else {
                element.min(4)
            };
            let cell = self.cell(Value::Indices(element));
            let len = vector_len(self.class);
            self.asm.vector(false, index.number() as u8, len, cell);
        } else if index.is_gpr() && index.full_register() != base.full_register() {
            let value = if insn.mnemonic() == M::Xlatb || index.size() == 1 {
                Value::Random
            } else if bit_index(insn) {
                Value::Small(64)
            } else {
                Value::Small(0x80)
            };
            let cell = self.load(number(index), value).filter(|_| index.size() > 1);
            address.index = cell.map(|cell| (cell, scale));
        }
        if base.is_gpr() {
            if index.full_register() == base.full_register() {
                address.times += scale;
                if size >= 16 {
                    // No such register makes the target aligned.
                    address.wild = 0;
                }
            }
            self.load(number(base), Value::Address(address));
        }
    }

    /// How often an address is one that faults: one of an instruction, as the order in which two
    /// are accessed is not defined.
    fn wild(&mut self, insn: &Instruction) -> u64 {
        if std::mem::replace(&mut self.was_wild, true) {
            return 0;
        }
        match self.class {
            Class::Fault => 2,
            Class::Branch | Class::Xsave => 0,
            // The mask decides what faults.
            _ if insn.has_op_mask() => 8,
            _ => 100,
        }
    }

    /// Other registers that the instruction reads.
    fn registers(&mut self, insn: &Instruction, info: &InstructionInfo) {
        let divides = matches!(insn.mnemonic(), M::Div | M::Idiv);
        if insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix()) {
            self.load(1, Value::Count);
        }
        if bit_index(insn) {
            self.load(number(insn.op1_register()), Value::Small(512));
        }
        if divides && !self.rng.one_in(4) {
            self.load(2, Value::Small(4));
        }
        let len = vector_len(self.class);
        for used in info.used_registers() {
            let r = used.register();
            if !reads(used.access()) {
                continue;
            }
            if r.is_gpr() && number(r) != 4 && self.rng.one_in(2) {
                self.load(number(r), Value::Random);
            } else if r.is_vector_register() && self.rng.one_in(2) && !index_of(insn, r) {
                let legacy = insn.encoding() == iced_x86::EncodingKind::Legacy;
                let len = if legacy { 16 } else { len };
                let cell = self.cell(Value::Vector(len));
                self.asm.vector(false, r.number() as u8, len, cell);
            } else if r.is_k() && r == insn.op_mask() && self.empty_mask == EmptyMask::Avoided {
                let cell = self.cell(Value::Odd);
                self.asm.opmask(false, r.number() as u8, cell);
            } else if r.is_k() && r != Register::K0 && self.rng.one_in(2) {
                let cell = self.cell(Value::Random);
                self.asm.opmask(false, r.number() as u8, cell);
            }
        }
    }

    /// Leads instructions with memory operands of a special format to such memory.
    fn fixed_operand(&mut self, insn: &Instruction) {
        let mut to_cell = None;
        let mut ignore: &[(u32, u32)] = &[];
        let mut to_note = 0;
        match insn.mnemonic() {
            M::Popf | M::Popfd | M::Popfq => to_cell = Some(Value::Flags),
            M::Xrstor | M::Xrstor64 => to_cell = Some(Value::Xsave),
            M::Fxrstor | M::Fxrstor64 | M::Frstor | M::Fldenv => to_cell = Some(Value::Fx),
            M::Ldmxcsr | M::Vldmxcsr => to_cell = Some(Value::Loaded),
            M::Fxsave | M::Fxsave64 | M::Xsave | M::Xsave64 | M::Xsavec | M::Xsavec64 => {
                to_note = 1024;
                ignore = &FX_IGNORED;
            }
            M::Fnstenv | M::Fnsave => {
                to_note = 128;
                ignore = environment(insn);
            }
            _ => return,
        }
        if matches!(
            insn.mnemonic(),
            M::Xsave | M::Xsave64 | M::Xsavec | M::Xsavec64 | M::Xrstor | M::Xrstor64
        ) {
            self.load(0, Value::Components);
            self.load(2, Value::Fixed(0));
        }
        let to = match to_cell {
            Some(value) => self.cell(value),
            None if to_note > 0 => self.note(What::Memory, to_note),
            None => return,
        };
        self.ignored
            .extend(ignore.iter().map(|&(at, len)| (to + at, len)));
        let info = self.factory.info(insn).clone();
        let Some(memory) = info.used_memory().first() else {
            return;
        };
        self.operand = Some(to);
        if !memory.base().is_gpr() && memory.index().is_gpr() {
            self.load(number(memory.index()), Value::Fixed(0));
        }
        self.address(insn, memory, Some(to));
    }

    /// CMPXCHG compares equal half of the time: loads the accumulator from the operand.
    fn equal_operand(&mut self, insn: &Instruction) {
        let wide = matches!(insn.mnemonic(), M::Cmpxchg8b | M::Cmpxchg16b);
        let plain = insn.memory_base().is_gpr()
            && insn.memory_base().size() == self.class.bits() as usize / 8;
        let uses = [insn.memory_base(), insn.memory_index()];
        let clash = uses
            .iter()
            .any(|r| r.is_gpr() && matches!(number(*r), 0 | 2));
        if !(wide || insn.mnemonic() == M::Cmpxchg) || self.class == Class::Fault {
            return;
        }
        if insn.op0_kind() != OpKind::Memory || !plain || clash || self.rng.one_in(2) {
            return;
        }
        let part = insn.memory_size().size() / if wide { 2 } else { 1 };
        let (code, low, high) = match part {
            8 => (Code::Mov_r64_rm64, Register::RAX, Register::RDX),
            4 => (Code::Mov_r32_rm32, Register::EAX, Register::EDX),
            2 => (Code::Mov_r16_rm16, Register::AX, Register::DX),
            _ => (Code::Mov_r8_rm8, Register::AL, Register::DL),
        };
        let operand = |plus: i64| {
            MemoryOperand::new(
                insn.memory_base(),
                insn.memory_index(),
                insn.memory_index_scale(),
                insn.memory_displacement64()
                    .wrapping_add(plus.cast_unsigned())
                    .cast_signed(),
                4,
                false,
                insn.segment_prefix(),
            )
        };
        let mut encoder = Encoder::new(self.class.bits());
        let mut made = vec![Instruction::with2(code, low, operand(0))];
        if wide {
            made.push(Instruction::with2(code, high, operand(part as i64)));
        }
        for insn in made.into_iter().flatten() {
            if encoder.encode(&insn, 0).is_err() {
                return;
            }
        }
        if !self.rng.one_in(64) {
            self.asm.bytes.extend(encoder.take_buffer());
        }
    }

    /// Absolute and RIP-relative operands lead to the data.
    fn fix_displacement(&mut self, bytes: &mut [u8], rip: u32) {
        let mut decoder =
            Decoder::with_ip(self.class.bits(), bytes, rip.into(), DecoderOptions::NONE);
        let insn = decoder.decode();
        let offsets = decoder.get_constant_offsets(&insn);
        let no_base = insn.memory_base() == Register::None;
        let relative = insn.is_ip_rel_memory_operand();
        if !offsets.has_displacement() || !(no_base || relative) {
            return;
        }
        let mut to = u64::from(self.base + DATA) + 0x400 + (self.rng.below(0x1800) & !63);
        if self.class == Class::Fault && self.rng.one_in(2) {
            to = u64::from(self.base + DATA + DATA_LEN) - 8 + self.rng.below(16);
        }
        if let Some(at) = self.operand {
            to = (self.base + at).into();
        }
        let v = if relative {
            to.wrapping_sub(insn.next_ip())
        } else if insn.segment_prefix() == Register::GS && self.class == Class::Address && gs_base()
        {
            to - GS_BASE
        } else {
            to
        };
        let (at, len) = (offsets.displacement_offset(), offsets.displacement_size());
        bytes[at..at + len].copy_from_slice(&v.to_le_bytes()[..len]);
    }

    fn note_registers(&mut self, insn: &Instruction, info: &InstructionInfo) {
        let mut noted = 0_u32;
        for used in info.used_registers() {
            let r = used.register();
            if !writes(used.access()) {
                continue;
            }
            if r.is_gpr() && noted >> number(r) & 1 == 0 {
                noted |= 1 << number(r);
                let at = self.note(What::Gpr(number(r)), 8);
                self.asm.store(at, number(r));
            } else if r.is_vector_register() {
                let len = vector_len(self.class);
                let at = self.note(What::Vector(r.number() as u8), len as u32);
                self.asm.vector(true, r.number() as u8, len, at);
            } else if r.is_k() {
                let at = self.note(What::Opmask(r.number() as u8), 8);
                self.asm.opmask(true, r.number() as u8, at);
            }
        }
        let changed = insn.rflags_modified() != 0;
        let undefined = undefined_flags(insn);
        if undefined != 0 || changed && !self.rng.one_in(4) {
            let at = self.note(What::Flags, 4);
            self.asm.note_flags(at, 0x8d5 & !undefined);
        }
        let vector = matches!(
            self.class,
            Class::Sse | Class::Avx | Class::Avx2 | Class::Avx512
        );
        if vector && self.rng.one_in(2) {
            let at = self.note(What::Mxcsr, 4);
            self.asm.stmxcsr(at);
        }
        if self.class.has_x87() {
            let at = self.note(What::Fx, 512);
            self.asm.fxsave(at);
            self.ignored
                .extend(FX_IGNORED.iter().map(|&(from, len)| (at + from, len)));
        }
    }

    /// A near branch to the end of the slot, over an instruction that leaves a mark.
    fn branch(&mut self, mut insn: Instruction) {
        if self.rng.one_in(2) {
            self.flag_source();
            // What the branch itself needs is loaded after that.
            self.loaded = 0;
        }
        let info = self.factory.info(&insn).clone();
        let mark = self.note(What::Memory, 8);
        let target_cell = self.cell(Value::Fixed(0));
        let register = insn.op_count() > 0 && insn.op0_kind() == OpKind::Register;
        let returns = insn.flow_control() == FlowControl::Return;
        for memory in info.used_memory() {
            let operand = insn.op_count() > 0
                && insn.op0_kind() == OpKind::Memory
                && memory.base() == insn.memory_base()
                && memory.displacement() == insn.memory_displacement64();
            if operand || returns {
                self.address(&insn, memory, Some(target_cell));
            } else {
                self.address(&insn, memory, None);
            }
        }
        if matches!(
            insn.mnemonic(),
            M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz
        ) {
            self.load(1, Value::Small(3));
        }
        if register {
            let reg = number(insn.op0_register());
            self.loaded |= 1 << reg;
            self.asm.load(reg, target_cell);
        }
        let rip = self.asm.here();
        let long = self.asm.long;
        let bits = self.class.bits();
        // INC dword [mark] has 7 bytes, 6 in 32-bit code.
        let skip = if long { 7 } else { 6 };
        if insn.is_jcc_short_or_near() || direct(&insn) {
            insn.set_near_branch64((rip + insn.len() as u32 + skip).into());
        }
        let mut encoder = Encoder::new(bits);
        let encoded = encoder.encode(&insn, rip.into()).is_ok();
        let mut bytes = encoder.take_buffer();
        if !encoded {
            bytes = vec![0x90];
        }
        // The length may have changed: once more, with the right one.
        if insn.is_jcc_short_or_near() || direct(&insn) {
            insn.set_near_branch64((rip + bytes.len() as u32 + skip).into());
            let mut again = Encoder::new(bits);
            if again.encode(&insn, rip.into()).is_ok() {
                bytes = again.take_buffer();
            }
        }
        let mut decoder = Decoder::with_ip(bits, &bytes, rip.into(), DecoderOptions::NONE);
        decoder.decode_out(&mut insn);
        self.asm.bytes.extend(&bytes);
        self.asm.bytes.push(0xff);
        let displacement = (self.base + mark).to_le_bytes();
        let modrm: &[u8] = if long { &[4, 0x25] } else { &[5] };
        self.asm.bytes.extend(modrm);
        self.asm.bytes.extend(displacement);
        let end = self.asm.here();
        let wild = self.rng.one_in(32);
        if let Some(v) = self.values.iter_mut().find(|v| v.0 == target_cell) {
            v.1 = Value::Fixed(if wild { 0x10 } else { end.into() });
        }
        self.finish(insn, rip, &info);
    }

    /// A comparison right before a conditional branch: the interpreter may fuse them.
    fn flag_source(&mut self) {
        let reg = self.rng.byte() & 7;
        let reg = if reg == 4 { 0 } else { reg };
        self.load(reg, Value::Random);
        // CMP, TEST, ADD, SUB, AND with a register; CMP with a small number.
        let opcode = *self.rng.pick(&[0x39, 0x85, 0x01, 0x29, 0x21, 0x38, 0x84]);
        let other = (self.rng.byte() & 7) % 4;
        self.asm.bytes.extend([opcode, 0xc0 | other << 3 | reg]);
        if self.rng.one_in(2) {
            let small = self.rng.byte();
            let group = *self.rng.pick(&[0xf8, 0xe0, 0xc0, 0xe8]);
            self.asm.bytes.extend([0x83, group | reg, small]);
        }
    }
}

fn direct(insn: &Instruction) -> bool {
    insn.op_count() > 0
        && matches!(
            insn.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        )
}

/// Processors differ in which address a masked store reports and in what it leaves of x87 state when it faults, in
/// how far PUSHA and POPA come before they fault, and in what they check first where GS makes an address canonical.
fn order_differs(insn: &Instruction) -> bool {
    let all = matches!(insn.mnemonic(), M::Popa | M::Popad | M::Pusha | M::Pushad);
    let masked = matches!(
        insn.mnemonic(),
        M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu
    );
    all || masked || insn.segment_prefix() == Register::GS
}

/// Bytes of a gather's index.
fn index_width(insn: &Instruction) -> usize {
    let name = format!("{:?}", insn.mnemonic()).to_lowercase();
    if name.contains("gatherq") || name.contains("scatterq") {
        8
    } else {
        4
    }
}

/// The register is the index vector of the instruction.
fn index_of(insn: &Instruction, r: Register) -> bool {
    insn.is_vsib() && insn.memory_index().number() == r.number()
}

/// FOP, FIP and FDP, the mask of MXCSR, and what is reserved in an FXSAVE image.
const FX_IGNORED: [(u32, u32); 10] = [
    (6, 18),
    (28, 4),
    (42, 6),
    (58, 6),
    (74, 6),
    (90, 6),
    (106, 6),
    (122, 6),
    (138, 6),
    (154, 6),
];

/// FIP, FCS, FOP, FDP and FDS in the environment of FNSTENV, and its reserved words.
fn environment(insn: &Instruction) -> &'static [(u32, u32)] {
    match insn.code() {
        Code::Fnstenv_m14byte | Code::Fnsave_m94byte => &[(6, 8)],
        _ => &[(2, 2), (6, 2), (10, 18)],
    }
}

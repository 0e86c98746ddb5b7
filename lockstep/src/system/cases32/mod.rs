//! Cases in 16- and 32-bit protected mode and virtual-8086 mode, and task switches.
//!
//! Each case runs at CPL 0, 1 or 3, or in virtual-8086 mode, and ends with an event whose handler
//! stores the results: see [`crate::system::kernel32`]. Every stack that a case at CPL 0 could load
//! is flat, so that the event can be delivered.

#![expect(
    clippy::cast_possible_truncation,
    reason = "levels and prefixes are small numbers"
)]

mod instructions;
mod tables;

use crate::asm::Asm;
use crate::layout::{CODE, CURRENT, DATA, SLOTS};
use crate::rng::Rng;
use crate::system::batch::{KernelMode, RESET, SystemBatch, SystemSlot};
use crate::system::class::SystemClass;
use crate::system::kernel32::{GDT, LEVELS};
use hindsight_regs::rflags::Rflags;
use tables::{control_registers, patches, selector};

/// The stack of cases at CPL 1 and 3 and in virtual-8086 mode.
const USER_STACK: u32 = DATA + 0x1800;
/// Where a case keeps its memory operand.
const OPERAND: u32 = DATA + 0x2800;
/// The bytes that accesses may reach, from the bottom of memory and from the data; none of them is
/// the kernel's.
const REACH: u64 = 0x3000;
/// EFLAGS.VM.
const VM: u32 = Rflags::VM.bits() as u32;

/// The mode and privilege level in which a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CaseLevel {
    /// 32-bit code at this CPL.
    Ring(u8),
    /// Virtual-8086 mode.
    V86,
}

struct CaseBuilder32<'a> {
    rng: &'a mut Rng,
    asm: Asm,
    class: SystemClass,
    level: CaseLevel,
}

/// The batch of a seed with its first `count` slots.
pub(super) fn build(class: SystemClass, seed: u64, count: usize) -> SystemBatch {
    let mut rng = Rng::new(seed);
    let control = control_registers(&mut rng, class);
    let patches = patches(&mut rng, class, control);
    let asm = Asm {
        bytes: Vec::new(),
        base: 0,
        origin: CODE,
        long: false,
    };
    let mut b = CaseBuilder32 {
        rng: &mut rng,
        asm,
        class,
        level: CaseLevel::Ring(0),
    };
    let (mut slots, mut post) = (Vec::new(), Vec::new());
    for index in 0..count.min(SLOTS - 1) {
        b.asm.set(CURRENT, index as u32);
        let text = b.slot();
        let text = format!("{text}, {:?}", b.level);
        b.raw(&[0xcd, RESET]);
        post.push(b.asm.here());
        slots.push(SystemSlot { text });
    }
    b.asm.set(CURRENT, SLOTS as u32 - 1);
    // OUT F4H, AL ends the batch, at CPL 0.
    b.raw(&[0xe6, 0xf4]);
    let end = b.asm.here() - 2;
    post.resize(SLOTS, end);
    SystemBatch {
        slots,
        code: b.asm.bytes,
        descriptors: Vec::new(),
        gates: Vec::new(),
        entries: Vec::new(),
        post,
        log_end: 0,
        uses_window: class == SystemClass::Paging32,
        switches_tasks: class == SystemClass::Tasks,
        kernel: KernelMode::Protected,
        patches,
        control,
    }
}

impl CaseBuilder32<'_> {
    fn raw(&mut self, bytes: &[u8]) {
        self.asm.bytes.extend_from_slice(bytes);
    }

    /// Chooses one of these encodings.
    fn choose<'a>(&mut self, list: &[&'a [u8]]) -> &'a [u8] {
        let at = self.rng.below(list.len() as u64);
        list[at as usize]
    }

    /// PUSH imm32.
    fn push(&mut self, v: u32) {
        self.raw(&[0x68]);
        self.raw(&v.to_le_bytes());
    }

    /// PUSH imm16 with an operand-size prefix, or PUSH imm32.
    fn push_sized(&mut self, v: u32, short: bool) {
        if short {
            self.raw(&[0x66, 0x68]);
            self.raw(&v.to_le_bytes()[..2]);
        } else {
            self.push(v);
        }
    }

    /// MOV reg, imm32.
    fn imm(&mut self, reg: u8, v: u32) {
        self.raw(&[0xb8 + reg]);
        self.raw(&v.to_le_bytes());
    }

    /// Writes a far pointer to [`OPERAND`].
    fn pointer(&mut self, offset: u32, selector: u16, short: bool) {
        self.asm.set(OPERAND, offset);
        let at = if short { 2 } else { 4 };
        // MOV word [OPERAND + at], imm16.
        self.raw(&[0x66, 0xc7, 0x05]);
        self.raw(&(OPERAND + at).to_le_bytes());
        self.raw(&selector.to_le_bytes());
    }

    /// Chooses a level and enters it by IRET.
    fn enter(&mut self) {
        self.level = match self.class {
            SystemClass::Virtual8086 => CaseLevel::V86,
            _ => CaseLevel::Ring(*self.rng.pick(&[0, 0, 1, 3, 3])),
        };
        let iopl = (self.rng.below(4) as u32) << 12;
        match self.level {
            CaseLevel::Ring(0) => {}
            CaseLevel::Ring(cpl) => {
                let (cs, ss) = LEVELS[usize::from(cpl)];
                self.push(ss.into());
                self.push(USER_STACK);
                self.push(iopl | 2);
                self.push(cs.into());
                let to = self.asm.here() + 6;
                self.push(to);
                self.raw(&[0xcf]);
            }
            CaseLevel::V86 => {
                for segment in [0, 0, 0x1000, 0x1000, 0x1000] {
                    self.push(segment);
                }
                self.push(0x1800);
                self.push(VM | iopl | 2);
                self.push(CODE >> 4);
                let to = self.asm.here() + 6 - CODE;
                self.push(to);
                self.raw(&[0xcf]);
            }
        }
    }

    fn slot(&mut self) -> String {
        if self.class == SystemClass::Paging32 {
            return self.paging();
        }
        if self.class == SystemClass::Tasks && self.rng.one_in(2) {
            // Makes a task busy: only IRET with NT set may switch to it.
            let at = [0x5d, 0x65][self.rng.below(2) as usize];
            self.raw(&[0x80, 0x0d]);
            self.raw(&(GDT as u32 + at).to_le_bytes());
            self.raw(&[2]);
        }
        self.enter();
        match self.class {
            SystemClass::Segments32 => self.segments(),
            SystemClass::Descriptors32 => self.descriptors(),
            SystemClass::Far32 => {
                let selector = selector(self.rng);
                self.far(selector)
            }
            SystemClass::Iret32 => self.iret(),
            SystemClass::Gates32 => self.interrupt(),
            SystemClass::Tasks => self.task(),
            _ => self.virtual8086(),
        }
    }
}

//! Cases of 16- and 32-bit protected mode, virtual-8086 mode and task switches.
//!
//! Each case runs at CPL 0, 1 or 3, or in virtual-8086 mode, and ends with an event, which notes what it left:
//! see [`crate::protected`]. What a case at CPL 0 could make its stack is flat, so that its end can be delivered.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in the first MiB, selectors and immediates are cut on purpose"
)]

use crate::emit::Asm;
use crate::layout::{CODE, CURRENT, DATA, SLOTS};
use crate::protected::{
    DIRECTORY, GDT, LEVELS, PAD, POINTERS, STACKS, TASK_SELECTORS, TASK16, TASK32, TSS, TSS_LIMIT,
    gate_at, window,
};
use crate::rng::Rng;
use crate::system::{
    Control, GATE_COUNT, GATES, Kernel, RANDOM, RESET, SystemBatch, SystemClass, SystemSlot,
    WINDOW, WINDOW_PAGES,
};

/// Random descriptors, 8 bytes each.
const COUNT: u16 = 48;
/// The stack of cases at CPL 1 and 3 and in virtual-8086 mode.
const USER_STACK: u32 = DATA + 0x1800;
/// Where a case keeps its memory operand.
const OPERAND: u32 = DATA + 0x2800;
/// Offsets of accesses: all of it is scratch, from the bottom of memory and from the data.
const REACH: u64 = 0x3000;
const VM: u32 = 1 << 17;

/// Where a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// At this CPL, in 32-bit code.
    Ring(u8),
    /// In virtual-8086 mode.
    V86,
}

struct Builder<'a> {
    rng: &'a mut Rng,
    asm: Asm,
    class: SystemClass,
    level: Level,
}

/// The batch of a seed with its first `count` slots.
pub fn build(class: SystemClass, seed: u64, count: usize) -> SystemBatch {
    let mut rng = Rng::new(seed);
    let control = control(&mut rng, class);
    let patches = patches(&mut rng, class, control);
    let asm = Asm {
        bytes: Vec::new(),
        base: 0,
        origin: CODE,
        long: false,
    };
    let mut b = Builder {
        rng: &mut rng,
        asm,
        class,
        level: Level::Ring(0),
    };
    let (mut slots, mut post) = (Vec::new(), Vec::new());
    for index in 0..count.min(SLOTS - 1) {
        b.asm.set(CURRENT, index as u32);
        let text = b.slot();
        let text = format!("{text}, {:?}", b.level);
        b.raw(&[0xcd, RESET]);
        post.push(b.asm.here());
        slots.push(SystemSlot {
            text,
            notes: Vec::new(),
        });
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
        window: class == SystemClass::Paging32,
        tasks: class == SystemClass::Tasks,
        kernel: Kernel::Narrow,
        patches,
        control,
    }
}

/// No paging, 32-bit or PAE paging; CR4.VME by chance.
fn control(rng: &mut Rng, class: SystemClass) -> Control {
    let vme = u64::from(rng.one_in(2));
    let how = if class == SystemClass::Paging32 {
        1 + rng.below(2)
    } else {
        rng.below(3)
    };
    let cr4 = 0x610 | vme;
    match how {
        0 => Control {
            cr0: 0x33,
            cr3: 0,
            cr4,
        },
        1 => Control {
            cr0: 0x8001_0033,
            cr3: DIRECTORY as u64,
            cr4,
        },
        _ => Control {
            cr0: 0x8001_0033,
            cr3: POINTERS as u64,
            cr4: cr4 | 0x20,
        },
    }
}

/// Random descriptors, gates, tasks and page-table entries.
fn patches(rng: &mut Rng, class: SystemClass, control: Control) -> Vec<(usize, Vec<u8>)> {
    let word = |d: u64| d.to_le_bytes().to_vec();
    let mut list = Vec::new();
    for n in 0..usize::from(COUNT) {
        list.push((
            GDT + usize::from(RANDOM) + n * 8,
            word(descriptor(rng, class)),
        ));
    }
    for n in 0..GATE_COUNT {
        list.push((gate_at(GATES + n), word(gate(rng, class))));
    }
    let tss = |at: usize, kind: u64, limit: u64, dpl: u64| {
        word(limit | (at as u64) << 16 | (0x80 | kind | dpl << 5) << 40)
    };
    list.push((GDT + 0x40, tss(TSS, 11, TSS_LIMIT.into(), 0)));
    // Now and then too short.
    let short = u64::from(rng.one_in(8));
    list.push((GDT + 0x58, tss(TASK32, 9, 0x67 - short, rng.below(4))));
    list.push((GDT + 0x60, tss(TASK16, 1, 0x2b - short, rng.below(4))));
    let to = TASK_SELECTORS[rng.below(2) as usize];
    let task_gate = 0x85 << 40 | rng.below(4) << 45 | u64::from(to) << 16;
    list.push((GDT + 0x68, word(task_gate)));
    if !switches_tasks(class) {
        for (at, descriptor) in &mut list {
            if (GDT + 0x58..=GDT + 0x68).contains(at) {
                descriptor.fill(0);
            }
        }
    }
    list.push((TSS, kernel_tss(rng, control)));
    list.push((TASK32, task32(rng, control)));
    list.push((TASK16, task16(rng)));
    for pae in [false, true] {
        let (at, len) = window(pae);
        for n in 0..WINDOW_PAGES {
            let page = u64::from(WINDOW + n * 0x1000) | rng.bits() & 0x67;
            list.push((at + n as usize * len, word(page)[..len].to_vec()));
        }
    }
    list
}

/// Task switches are a class of their own: under KVM no processor does them, but KVM itself.
fn switches_tasks(class: SystemClass) -> bool {
    // These name tasks and do not go there.
    let names = [SystemClass::Segments32, SystemClass::Descriptors32];
    class == SystemClass::Tasks || names.contains(&class)
}

/// A descriptor of any kind.
fn descriptor(rng: &mut Rng, class: SystemClass) -> u64 {
    let present = u64::from(!rng.one_in(6)) << 47;
    let dpl = rng.below(4);
    let limit = rng.below(REACH);
    match rng.below(6) {
        // System descriptors and gates.
        0 => {
            let at = *rng.pick(&[TSS, TASK32, TASK16, GDT + RANDOM as usize]) as u64;
            let limit = *rng.pick(&[0x2a, 0x2b, 0x66, 0x67, 0x8f, 0x17f]);
            let kind = match rng.below(16) {
                1 | 5 | 9 if !switches_tasks(class) => 0,
                kind => kind,
            };
            present | dpl << 45 | kind << 40 | at << 16 | limit
        }
        1 => {
            let kind = *rng.pick(&[4, 12, 12]) << 40;
            let count = rng.below(32) << 32;
            present | dpl << 45 | kind | count | u64::from(selector(rng)) << 16 | pad()
        }
        // Code is flat, of 16 or 32 bits, now and then too short for what it should run.
        2 | 3 => {
            let size = rng.below(2) << 54;
            let kind = (0x18 | rng.below(8)) << 40;
            let limit = if rng.one_in(4) {
                limit
            } else {
                0x000f_0000_0000_ffff | 1 << 55
            };
            present | dpl << 45 | kind | size | limit
        }
        _ => {
            let kind = 0x10 | rng.below(8);
            let size = rng.below(2) << 54;
            // IRET to a stack that is not present raises #SS, as Linux has met it; emulators raise #NP.
            let present = if class == SystemClass::Iret32 {
                1 << 47
            } else {
                present
            };
            if dpl == 0 && kind & 2 != 0 {
                // A stack of CPL 0.
                return present | (0x12 | kind & 1) << 40 | 0x00cf_0000_0000_ffff;
            }
            present | dpl << 45 | kind << 40 | size | u64::from(DATA) << 16 | limit
        }
    }
}

/// The offset fields of a gate to the pad.
fn pad() -> u64 {
    u64::from(PAD & 0xffff) | u64::from(PAD & 0xffff_0000) << 32
}

fn gate(rng: &mut Rng, class: SystemClass) -> u64 {
    let present = u64::from(!rng.one_in(6)) << 47;
    let kind = match *rng.pick(&[14, 14, 15, 6, 7, 6, 5, 5, 12, 0, 9]) {
        5 if !switches_tasks(class) => 14,
        kind => kind,
    };
    let selector = match (kind, rng.below(3)) {
        (5, 0 | 1) => TASK_SELECTORS[rng.below(2) as usize],
        (_, 0 | 1) => 0x10,
        _ => selector(rng),
    };
    kind << 40 | present | rng.below(4) << 45 | u64::from(selector) << 16 | pad()
}

fn selector(rng: &mut Rng) -> u16 {
    let rpl = rng.below(4) as u16;
    match rng.below(12) {
        0 => rpl,
        1 => rng.bits() as u16,
        2 => 0x40 + rpl,
        n @ 3..=5 => {
            let (code, stack) = LEVELS[[0, 1, 3][n as usize - 3]];
            if rng.one_in(2) { code } else { stack }
        }
        _ => (RANDOM + rng.below(u64::from(COUNT) + 4) as u16 * 8) | rpl,
    }
}

/// What tasks load into DS, ES, FS and GS.
fn data_selector(rng: &mut Rng) -> u16 {
    if rng.one_in(2) { 0x2b } else { selector(rng) }
}

fn put(bytes: &mut [u8], at: usize, v: u32) {
    bytes[at..at + 4].copy_from_slice(&v.to_le_bytes());
}

fn put16(bytes: &mut [u8], at: usize, v: u16) {
    bytes[at..at + 2].copy_from_slice(&v.to_le_bytes());
}

fn stacks(bytes: &mut [u8]) {
    for (n, sp) in STACKS.iter().enumerate() {
        put(bytes, 4 + n * 8, *sp);
        put(bytes, 8 + n * 8, [0x18, 0x39, 0][n]);
    }
}

fn kernel_tss(rng: &mut Rng, control: Control) -> Vec<u8> {
    let mut bytes = vec![0; 0x90];
    stacks(&mut bytes);
    // IRET with NT set goes there.
    put16(&mut bytes, 0, TASK_SELECTORS[rng.below(2) as usize]);
    put(&mut bytes, 0x1c, control.cr3 as u32);
    put16(&mut bytes, 0x66, 0x88);
    for byte in &mut bytes[0x68..0x88] {
        *byte = rng.byte();
    }
    // The interrupt that ends cases is never the virtual-8086 program's own.
    bytes[0x68 + usize::from(RESET / 8)] |= 1 << (RESET % 8);
    bytes[0x88..].fill(0xff);
    bytes
}

fn task32(rng: &mut Rng, control: Control) -> Vec<u8> {
    let mut bytes = vec![0; 0x68];
    stacks(&mut bytes);
    put(&mut bytes, 0x1c, control.cr3 as u32);
    put(&mut bytes, 0x20, PAD);
    put(&mut bytes, 0x24, rng.bits() as u32 & 0x3cd5 | 2);
    for n in 0..8 {
        put(&mut bytes, 0x28 + n * 4, rng.bits() as u32);
    }
    let (cs, ss) = LEVELS[*rng.pick(&[0, 1, 3])];
    put(&mut bytes, 0x38, USER_STACK);
    for (n, s) in [data_selector(rng), cs, ss].into_iter().enumerate() {
        put16(&mut bytes, 0x48 + n * 4, s);
    }
    for n in 3..6 {
        put16(&mut bytes, 0x48 + n * 4, data_selector(rng));
    }
    bytes
}

fn task16(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0; 0x2c];
    for (n, sp) in STACKS.iter().enumerate().take(2) {
        put16(&mut bytes, 2 + n * 4, *sp as u16);
        put16(&mut bytes, 4 + n * 4, [0x18, 0x39][n]);
    }
    put16(&mut bytes, 0x0e, PAD as u16);
    put16(&mut bytes, 0x10, rng.bits() as u16 & 0x3cd5 | 2);
    for n in 0..8 {
        put16(&mut bytes, 0x12 + n * 2, rng.bits() as u16);
    }
    // At CPL 0 the stack is in the scratch memory at the bottom.
    put16(&mut bytes, 0x1a, 0x1800);
    for (n, s) in [data_selector(rng), 0x10, 0x18, data_selector(rng)]
        .into_iter()
        .enumerate()
    {
        put16(&mut bytes, 0x22 + n * 2, s);
    }
    bytes
}

impl Builder<'_> {
    fn raw(&mut self, bytes: &[u8]) {
        self.asm.bytes.extend_from_slice(bytes);
    }

    /// One of these encodings.
    fn choose<'a>(&mut self, list: &[&'a [u8]]) -> &'a [u8] {
        let at = self.rng.below(list.len() as u64);
        list[at as usize]
    }

    /// PUSH imm32.
    fn push(&mut self, v: u32) {
        self.raw(&[0x68]);
        self.raw(&v.to_le_bytes());
    }

    /// PUSH of the operand size that a prefix asks for.
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

    /// A far pointer in memory at [`OPERAND`].
    fn pointer(&mut self, offset: u32, selector: u16, short: bool) {
        self.asm.set(OPERAND, offset);
        let at = if short { 2 } else { 4 };
        // MOV word [OPERAND + at], imm16.
        self.raw(&[0x66, 0xc7, 0x05]);
        self.raw(&(OPERAND + at).to_le_bytes());
        self.raw(&selector.to_le_bytes());
    }

    /// Chooses a level and goes there.
    fn enter(&mut self) {
        self.level = match self.class {
            SystemClass::Virtual8086 => Level::V86,
            _ => Level::Ring(*self.rng.pick(&[0, 0, 1, 3, 3])),
        };
        let iopl = (self.rng.below(4) as u32) << 12;
        match self.level {
            Level::Ring(0) => {}
            Level::Ring(cpl) => {
                let (cs, ss) = LEVELS[usize::from(cpl)];
                self.push(ss.into());
                self.push(USER_STACK);
                self.push(iopl | 2);
                self.push(cs.into());
                let to = self.asm.here() + 6;
                self.push(to);
                self.raw(&[0xcf]);
            }
            Level::V86 => {
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
            // A busy task: IRET with NT may go there, nothing else.
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

    fn segments(&mut self) -> String {
        let selector = selector(self.rng);
        let segment = *self.rng.pick(&[0_u8, 2, 3, 4, 5]);
        match self.rng.below(4) {
            0 => {
                self.imm(0, selector.into());
                self.raw(&[0x8e, 0xc0 | segment << 3]);
                format!("mov {selector:#x} to segment {segment}")
            }
            1 => {
                let short = self.rng.one_in(3);
                self.pointer(0x1234_5678, selector, short);
                let opcode: &[u8] = self.choose(&[
                    &[0xc4][..],
                    &[0xc5],
                    &[0x0f, 0xb2],
                    &[0x0f, 0xb4],
                    &[0x0f, 0xb5],
                ]);
                if short {
                    self.raw(&[0x66]);
                }
                self.raw(opcode);
                self.raw(&[0x1d]);
                self.raw(&OPERAND.to_le_bytes());
                format!("far-pointer {opcode:02x?} {selector:#x} short {short}")
            }
            2 => {
                let short = self.rng.one_in(3);
                self.push_sized(selector.into(), short);
                let opcode: &[u8] =
                    self.choose(&[&[0x07][..], &[0x17], &[0x1f], &[0x0f, 0xa1], &[0x0f, 0xa9]]);
                if short {
                    self.raw(&[0x66]);
                }
                self.raw(opcode);
                format!("pop {opcode:02x?} {selector:#x} short {short}")
            }
            _ => {
                // Through ES: MOV EAX, [at]; MOV [at], EAX; INC byte [at].
                let at = self.rng.below(REACH) as u32;
                self.imm(0, selector.into());
                self.raw(&[0x8e, 0xc0]);
                let how: &[u8] =
                    self.choose(&[&[0x26, 0xa1][..], &[0x26, 0xa3], &[0x26, 0xfe, 0x05]]);
                self.raw(how);
                self.raw(&at.to_le_bytes());
                format!("access {how:02x?} {at:#x} in {selector:#x}")
            }
        }
    }

    fn descriptors(&mut self) -> String {
        let selector = selector(self.rng);
        self.imm(0, selector.into());
        self.imm(2, 0x1234_5678);
        let bytes: &[u8] = self.choose(&[
            &[0x0f, 0x02, 0xd0][..], // LAR EDX, EAX
            &[0x66, 0x0f, 0x02, 0xd0],
            &[0x0f, 0x03, 0xd0], // LSL EDX, EAX
            &[0x66, 0x0f, 0x03, 0xd0],
            &[0x0f, 0x00, 0xe0],       // VERR AX
            &[0x0f, 0x00, 0xe8],       // VERW AX
            &[0x63, 0xc2],             // ARPL DX, AX
            &[0x66, 0x0f, 0x00, 0xc2], // SLDT DX
            &[0x66, 0x0f, 0x00, 0xca], // STR DX
            &[0x0f, 0x00, 0xd0],       // LLDT AX
            &[0x0f, 0x00, 0xd8],       // LTR AX
            &[0x0f, 0x01, 0xe2],       // SMSW EDX
            &[0x0f, 0x06],             // CLTS
        ]);
        self.raw(bytes);
        // SETZ BL.
        self.raw(&[0x0f, 0x94, 0xc3]);
        format!("{bytes:02x?} {selector:#x}")
    }

    fn far(&mut self, selector: u16) -> String {
        let short = self.rng.one_in(3);
        let prefix: &[u8] = if short { &[0x66] } else { &[] };
        match self.rng.below(3) {
            0 => {
                let opcode = *self.rng.pick(&[0xea, 0x9a]);
                self.raw(prefix);
                self.raw(&[opcode]);
                self.raw(&PAD.to_le_bytes()[..if short { 2 } else { 4 }]);
                self.raw(&selector.to_le_bytes());
                format!("far-direct {opcode:02x} {selector:#x} short {short}")
            }
            1 => {
                let group = *self.rng.pick(&[0x2d, 0x1d]);
                self.pointer(PAD, selector, short);
                self.raw(prefix);
                self.raw(&[0xff, group]);
                self.raw(&OPERAND.to_le_bytes());
                format!("far-memory {group:02x} {selector:#x} short {short}")
            }
            _ => {
                let pop = u16::from(self.rng.one_in(2)) * 8;
                let stack = crate::narrow::selector(self.rng);
                self.push_sized(stack.into(), short);
                self.push_sized(USER_STACK, short);
                for _ in 0..pop / if short { 2 } else { 4 } {
                    self.push_sized(0x77, short);
                }
                self.push_sized(selector.into(), short);
                self.push_sized(PAD, short);
                self.raw(prefix);
                self.raw(&[0xca]);
                self.raw(&pop.to_le_bytes());
                format!("retf {selector:#x} stack {stack:#x} pop {pop} short {short}")
            }
        }
    }

    fn iret(&mut self) -> String {
        let short = self.rng.one_in(3);
        let (mut cs, mut ss) = (selector(self.rng), selector(self.rng));
        // Neither TF nor virtual interrupts: what is left may be popped.
        let mut flags = self.rng.bits() as u32 & 0x25_7ed5 | 2;
        if self.rng.one_in(2) {
            (cs, ss) = LEVELS[*self.rng.pick(&[0, 1, 3])];
        }
        if self.level == Level::Ring(0) && !short && self.rng.one_in(4) {
            flags |= VM;
            (cs, ss) = (0x8000, 0x1000);
            for _ in 0..4 {
                let segment = self.rng.bits() as u16;
                self.push(segment.into());
            }
        }
        if !self.rng.one_in(8) {
            flags &= !0x4000;
        }
        self.push_sized(ss.into(), short);
        self.push_sized(USER_STACK & 0xffff, short);
        self.push_sized(flags, short);
        self.push_sized(cs.into(), short);
        let to = if flags & VM != 0 { PAD & 0xffff } else { PAD };
        self.push_sized(to, short);
        if short {
            self.raw(&[0x66]);
        }
        self.raw(&[0xcf]);
        format!("iret cs {cs:#x} ss {ss:#x} flags {flags:#x} short {short}")
    }

    fn interrupt(&mut self) -> String {
        match self.rng.below(8) {
            0 => {
                self.raw(&[0xcc]);
                "int3".to_owned()
            }
            1 => {
                // MOV AL, 7FH; INC AL; INTO.
                self.raw(&[0xb0, 0x7f, 0xfe, 0xc0, 0xce]);
                "into".to_owned()
            }
            2 => {
                let (low, high) = (self.rng.bits() as u32, self.rng.bits() as u32);
                self.asm.set(OPERAND, low);
                self.asm.set(OPERAND + 4, high);
                let v = self.rng.bits() as u32;
                self.imm(0, v);
                self.raw(&[0x62, 0x05]);
                self.raw(&OPERAND.to_le_bytes());
                format!("bound {v:#x} in {low:#x} {high:#x}")
            }
            _ => {
                let vector = GATES + self.rng.below(GATE_COUNT.into()) as u8;
                self.raw(&[0xcd, vector]);
                format!("int {vector:#x}")
            }
        }
    }

    fn task(&mut self) -> String {
        match self.rng.below(4) {
            0 => {
                // PUSHFD; OR byte [ESP + 1], 40H; POPFD; IRETD.
                self.raw(&[0x9c, 0x80, 0x4c, 0x24, 0x01, 0x40, 0x9d, 0xcf]);
                "iret-task".to_owned()
            }
            1 => self.interrupt(),
            _ => {
                let rpl = self.rng.below(4) as u16;
                let to = *self.rng.pick(&TASK_SELECTORS) | rpl;
                self.far(to)
            }
        }
    }

    fn virtual8086(&mut self) -> String {
        let v = self.rng.bits() as u16 & !0x100;
        let [low, high] = v.to_le_bytes();
        let vector = GATES + self.rng.below(GATE_COUNT.into()) as u8;
        let port = self.rng.byte() & 0x3f;
        let near = (self.rng.below(REACH) as u16).to_le_bytes();
        let choice: &[&[u8]] = &[
            &[0xfa],                                             // CLI
            &[0xfb, 0x90],                                       // STI
            &[0x9c, 0x58],                                       // PUSHF; POP AX
            &[0x68, low, high, 0x9d, 0x9c, 0x58],                // PUSH imm; POPF; PUSHF; POP AX
            &[0x66, 0x9c, 0x66, 0x58],                           // PUSHFD; POP EAX
            &[0xcd, vector],                                     // INT n
            &[0xcd, low],                                        // INT n
            &[0xcc],                                             // INT3
            &[0xb0, 0x7f, 0xfe, 0xc0, 0xce],                     // INTO with OF
            &[0xe4, port],                                       // IN AL, n
            &[0xe7, port],                                       // OUT n, AX
            &[0xf4],                                             // HLT
            &[0xb8, low, high, 0x8e, 0xd8],                      // MOV DS, AX
            &[0xb8, low, high, 0x8e, 0xc0],                      // MOV ES, AX
            &[0xa1, near[0], near[1]],                           // MOV AX, [near]
            &[0xa3, near[0], near[1]],                           // MOV [near], AX
            &[0xa1, 0xff, 0xff],                                 // MOV AX, [FFFFH]
            &[0x66, 0xa1, 0xfd, 0xff],                           // MOV EAX, [FFFDH]
            &[0xbc, 1, 0, 0x50],                                 // MOV SP, 1; PUSH AX
            &[0xbc, 5, 0, 0x60],                                 // MOV SP, 5; PUSHA
            &[0xea, 0xf0, 0xff, 0, 0],                           // JMP 0:FFF0
            &[0x9a, 0xf0, 0xff, 0, 0x80],                        // CALL 8000:FFF0
            &[0x68, 0, 0x80, 0x68, 0xf0, 0xff, 0xcb],            // RETF
            &[0x68, low, high, 0x6a, 0, 0x68, 0xf0, 0xff, 0xcf], // IRET
            &[0xc5, 0x1e, 0, 0x28],                              // LDS BX, [2800H]
            &[0x0f, 0xb4, 0x1e, 0, 0x28],                        // LFS BX, [2800H]
            &[0x63, 0xc2],                                       // ARPL: #UD
            &[0x0f, 0x02, 0xc2],                                 // LAR: #UD
            &[0x0f, 0x00, 0xc2],                                 // SLDT: #UD
            &[0x0f, 0x20, 0xc0],                                 // MOV EAX, CR0
            &[0x0f, 0x01, 0xe2],                                 // SMSW DX
            &[0x0f, 0x06],                                       // CLTS
            &[0x62, 0x06, 0, 0x28],                              // BOUND AX, [2800H]
            &[0xf7, 0xf3],                                       // DIV BX
        ];
        let bytes = self.choose(choice);
        self.raw(bytes);
        format!("{bytes:02x?}")
    }

    fn paging(&mut self) -> String {
        let page = self.rng.below(WINDOW_PAGES.into()) as u32;
        let mut at = WINDOW + page * 0x1000 + self.rng.below(0xff8) as u32;
        if self.rng.one_in(8) && page + 1 < WINDOW_PAGES {
            at |= 0xffd;
        }
        // INVLPG of both pages.
        for at in [at, at + 4] {
            self.raw(&[0x0f, 0x01, 0x3d]);
            self.raw(&at.to_le_bytes());
        }
        self.enter();
        self.imm(0, 0x1111_1111);
        let how: &[u8] = self.choose(&[
            &[0x8b, 0x05][..], // MOV EAX, [at]
            &[0x89, 0x05],     // MOV [at], EAX
            &[0x01, 0x05],     // ADD [at], EAX
            &[0x0f, 0xb1, 0x05],
        ]);
        self.raw(how);
        self.raw(&at.to_le_bytes());
        format!("{how:02x?} {at:#x}")
    }
}

//! System instructions: the interpreter against KVM, at CPL 0 and 3 of 64-bit mode.
//!
//! The same kernel as for user code, but the slots run in it. Each works on random descriptors,
//! gates, page-table entries or control registers, notes what it left, and ends with an interrupt
//! that brings segments, flags and privilege back to what the next slot expects. A batch is one
//! KVM_RUN, as steps are slow; what differs is bisected.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in a region and selectors are small"
)]

use crate::batch::{Note, What};
use crate::emit::Asm;
use crate::layout::*;
use crate::rng::Rng;
use crate::{kernel, narrow, protected};
use hindsight_cpu::state::CpuState;

/// Offset in guest memory of the descriptors that slots use: a page of the kernel's.
pub const DESCRIPTORS: usize = 0xc000;
/// First selector of random descriptors in the GDT.
pub const RANDOM: u16 = 0x100;
/// How many there are, 16 bytes each.
pub const COUNT: u16 = 32;
/// First vector of random gates.
pub const GATES: u8 = 0x90;
/// How many there are.
pub const GATE_COUNT: u8 = 32;
/// Vector that ends a slot.
pub const RESET: u8 = 0x81;
/// Linear address of pages whose entries are random.
pub const WINDOW: u32 = 0xb_0000;
/// How many there are.
pub const WINDOW_PAGES: u32 = 16;

/// A class of system instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum SystemClass {
    /// MOV to segment registers, LFS, LGS, LSS, PUSH and POP of segments.
    Segments,
    /// LAR, LSL, VERR, VERW, SLDT, STR, LLDT.
    Descriptors,
    /// Far JMP, CALL and RET, direct descriptors and call gates.
    Far,
    /// IRETQ with frames of all kinds.
    Iret,
    /// INT n through gates of all kinds.
    Gates,
    /// MOV to and from control registers, LMSW, SMSW, CLTS.
    Control,
    /// MOV to and from debug registers.
    Debug,
    /// Accesses through page-table entries of all kinds: error codes, accessed and dirty bits.
    Paging,
    /// Exceptions with their error codes, from both privilege levels.
    Exceptions,
    /// Protected mode: loads of segments, far pointers, accesses through segments with limits.
    Segments32,
    /// Protected mode: LAR, LSL, VERR, VERW, ARPL, LLDT, LTR and their like.
    Descriptors32,
    /// Protected mode: far branches of both sizes, call gates, tasks.
    Far32,
    /// Protected mode: IRET of both sizes, also to virtual-8086 mode.
    Iret32,
    /// Protected mode: INT n through gates of both sizes and task gates, INT3, INTO, BOUND.
    Gates32,
    /// Protected mode: task switches of all kinds.
    Tasks,
    /// What virtual-8086 mode does otherwise, with and without CR4.VME.
    Virtual8086,
    /// 32-bit and PAE paging.
    Paging32,
}

/// The classes that a processor can be asked about through KVM: KVM does task switches itself, writes the old task in
/// the format of the new one, and loses the registers of a new task that faults.
pub const SYSTEM: [SystemClass; 16] = [
    SystemClass::Segments,
    SystemClass::Descriptors,
    SystemClass::Far,
    SystemClass::Iret,
    SystemClass::Gates,
    SystemClass::Control,
    SystemClass::Debug,
    SystemClass::Paging,
    SystemClass::Exceptions,
    SystemClass::Segments32,
    SystemClass::Descriptors32,
    SystemClass::Far32,
    SystemClass::Iret32,
    SystemClass::Gates32,
    SystemClass::Virtual8086,
    SystemClass::Paging32,
];

impl SystemClass {
    /// Its name on the command line.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Its name in a state.
    pub fn key(self) -> String {
        format!("system-{}", self.name())
    }
}

/// The kernels that batches run under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// 64-bit mode.
    Long,
    /// Protected mode of 16 and 32 bits, and virtual-8086 mode.
    Narrow,
}

/// Control registers to start with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Control {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
}

impl Kernel {
    /// Writes everything but a batch to guest memory that is all zero.
    pub fn install(self, ram: &mut [u8]) {
        match self {
            Self::Long => kernel::install(ram, FIRST),
            Self::Narrow => protected::install(ram),
        }
    }

    /// Writes a batch.
    pub fn load(self, ram: &mut [u8], batch: &SystemBatch) {
        match self {
            Self::Long => kernel::load(ram, FIRST, batch),
            Self::Narrow => protected::load(ram, batch),
        }
    }

    /// The state to start from.
    pub fn start(self, batch: &SystemBatch) -> CpuState {
        match self {
            Self::Long => kernel::start(FIRST),
            Self::Narrow => protected::start(batch),
        }
    }

    /// What must be equal after a run: parts of guest memory with their names.
    pub fn compared(self, batch: &SystemBatch) -> Vec<(&'static str, usize, usize)> {
        match self {
            Self::Long => kernel::compared(FIRST, batch).to_vec(),
            Self::Narrow => protected::compared(),
        }
    }
}

/// One case.
#[derive(Clone, Debug)]
pub struct SystemSlot {
    /// The instruction.
    pub text: String,
    /// What it noted.
    pub notes: Vec<Note>,
}

impl SystemSlot {
    /// Its instruction without operands, or its bytes.
    pub fn kind(&self) -> &str {
        match self.text.strip_prefix('[') {
            Some(bytes) => bytes.split(']').next().unwrap_or_default(),
            None => self.text.split_whitespace().next().unwrap_or_default(),
        }
    }
}

/// Code and tables of many cases.
#[derive(Debug)]
pub struct SystemBatch {
    /// The cases.
    pub slots: Vec<SystemSlot>,
    /// The code, from [`CODE`].
    pub code: Vec<u8>,
    /// Random descriptors, from [`RANDOM`].
    pub descriptors: Vec<u64>,
    /// Random gates, from [`GATES`].
    pub gates: Vec<u64>,
    /// Entries of the window's pages.
    pub entries: Vec<u64>,
    /// Where each slot goes on.
    pub post: Vec<u32>,
    /// End of the notes.
    pub log_end: u32,
    /// The pages of the window are used.
    pub window: bool,
    /// Tasks are switched.
    pub tasks: bool,
    /// What it runs under.
    pub kernel: Kernel,
    /// For [`Kernel::Narrow`]: what else to write to guest memory, and where.
    pub patches: Vec<(usize, Vec<u8>)>,
    /// For [`Kernel::Narrow`]: what to start with.
    pub control: Control,
}

/// CR4 of the kernel: PSE, PAE, PGE, OSFXSR, OSXMMEXCPT.
pub const CR4: u32 = 0x6b0;

struct Builder<'a> {
    rng: &'a mut Rng,
    asm: Asm,
    base: u32,
    slots: Vec<SystemSlot>,
    notes: Vec<Note>,
    log_end: u32,
    post: Vec<u32>,
    /// The slot runs at CPL 3.
    user: bool,
}

/// The batch of a seed with its first `count` slots.
pub fn build(class: SystemClass, seed: u64, count: usize) -> SystemBatch {
    if class >= SystemClass::Segments32 {
        return narrow::build(class, seed, count);
    }
    let base = FIRST;
    let mut rng = Rng::new(seed);
    let descriptors = (0..COUNT)
        .flat_map(|_| descriptor(&mut rng, class, base))
        .collect();
    let gates = (0..GATE_COUNT).flat_map(|_| gate(&mut rng)).collect();
    let entries = (0..WINDOW_PAGES)
        .map(|_| rng.bits() & (1 << 63 | 0x67))
        .collect();
    let mut b = Builder {
        rng: &mut rng,
        asm: Asm {
            bytes: Vec::new(),
            base,
            origin: base + CODE,
            long: true,
        },
        base,
        slots: Vec::new(),
        notes: Vec::new(),
        log_end: RESULTS,
        post: Vec::new(),
        user: false,
    };
    // The interrupt that ends slots starts the first one, too.
    b.reset();
    for index in 0..count.min(SLOTS - 1) {
        b.asm.set(CURRENT, index as u32);
        b.user = b.rng.one_in(3) && !matches!(class, SystemClass::Control | SystemClass::Debug);
        if b.user {
            b.enter_user();
        }
        let text = b.case(class);
        b.post.push(b.asm.here());
        b.finish();
        let notes = std::mem::take(&mut b.notes);
        b.slots.push(SystemSlot { text, notes });
    }
    b.asm.set(CURRENT, SLOTS as u32 - 1);
    let end = b.asm.here();
    b.asm.bytes.extend([0xcd, 0x80]);
    let (code, mut post, slots, log_end) = (b.asm.bytes, b.post, b.slots, b.log_end);
    post.resize(SLOTS, end);
    SystemBatch {
        slots,
        code,
        descriptors,
        gates,
        entries,
        post,
        log_end,
        window: class == SystemClass::Paging,
        tasks: false,
        kernel: Kernel::Long,
        patches: Vec::new(),
        control: Control::default(),
    }
}

/// A descriptor of any kind, and what may be its upper half. Code is 64-bit code, so that what
/// follows can run.
fn descriptor(rng: &mut Rng, class: SystemClass, base: u32) -> [u64; 2] {
    let present = u64::from(!rng.one_in(6)) << 47;
    let dpl = rng.below(4) << 45;
    let kind = match rng.below(4) {
        // System descriptors, LDT, TSS and call gates among them.
        0 => rng.below(16) << 40,
        1 => {
            // A call gate to the end of a slot does not exist: it leads to the middle of nowhere
            // or to a random descriptor, whose faults count.
            let selector = selector(rng);
            let low = 0x0c << 40 | present | dpl | u64::from(selector) << 16;
            let to = u64::from(base + CODE + CODE_LEN - 16);
            return [low | (to & 0xffff) | (to & 0xffff_0000) << 32, 0];
        }
        // Data and code.
        _ => (0x10 | rng.below(16)) << 40,
    };
    // IRET to a stack that is not present raises #SS, as Linux has met it; emulators raise #NP.
    let (present, high) = match class {
        SystemClass::Iret => (1 << 47, 1 << 47),
        _ => (present, 0),
    };
    let code = kind >> 43 & 3 == 3;
    let size = if code { 1 << 53 } else { rng.below(2) << 54 };
    let limit = rng.bits() & 0x000f_0000_0000_ffff | rng.below(2) << 55;
    let address = if code {
        0
    } else {
        rng.bits() & 0xff00_00ff_ffff_0000
    };
    // Whether LAR and LSL look at the type in the upper half is not defined.
    let upper = match class {
        SystemClass::Descriptors => 0xffff_ffff,
        _ => 0x1f00_ffff_ffff,
    };
    [
        kind | present | dpl | size | limit | address,
        rng.bits() & upper | high,
    ]
}

fn gate(rng: &mut Rng) -> [u64; 2] {
    let present = u64::from(!rng.one_in(6)) << 47;
    let kind = *rng.pick(&[14, 14, 15, 15, 12, 5, 6, 7, 0, 9]) << 40;
    // A handler in conforming code stays at CPL 3 and may not write to a stack of the kernel's, which
    // emulators let it: only the kernel's own code has one by IST.
    let (selector, ist) = if rng.one_in(2) {
        (0x10, 1)
    } else {
        (selector(rng), 0)
    };
    // Offset 0 of the kernel's stub is put in when the batch is installed.
    [
        kind | present | rng.below(4) << 45 | u64::from(selector) << 16 | ist << 32,
        0,
    ]
}

fn selector(rng: &mut Rng) -> u16 {
    let rpl = rng.below(4) as u16;
    match rng.below(8) {
        0 => rpl,
        1 => 0x10 | rpl,
        2 => 0x18 | rpl,
        3 => 0x28 | rpl,
        4 => 0x30 | rpl,
        5 => rng.bits() as u16,
        _ => (RANDOM + rng.below(u64::from(COUNT) * 2) as u16 * 8) | rpl,
    }
}

impl Builder<'_> {
    fn note(&mut self, what: What, len: u32) -> u32 {
        let at = self.log_end;
        self.log_end += len.next_multiple_of(8);
        self.notes.push(Note { what, at, len });
        at
    }

    /// Back to the kernel's segments, flags and privilege.
    fn reset(&mut self) {
        self.asm.bytes.extend([0xcd, RESET]);
    }

    /// MOV reg, imm32.
    fn imm(&mut self, reg: u8, v: u32) {
        self.asm.bytes.push(0xb8 + reg);
        self.asm.bytes.extend(v.to_le_bytes());
    }

    /// PUSH imm32.
    fn push(&mut self, v: u32) {
        self.asm.bytes.push(0x68);
        self.asm.bytes.extend(v.to_le_bytes());
    }

    /// IRETQ to CPL 3, right behind it.
    fn enter_user(&mut self) {
        self.push(0x2b);
        self.push(self.base + DATA + 0x1000);
        self.push(0x202);
        self.push(0x33);
        let target = self.asm.here() + 7;
        self.push(target);
        self.asm.bytes.extend([0x48, 0xcf]);
    }

    /// Notes a register before it changes.
    fn keep(&mut self, reg: u8) {
        let at = self.note(What::Gpr(reg), 8);
        self.asm.store(at, reg);
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.asm.bytes.extend_from_slice(bytes);
    }

    /// Notes segments, flags and registers, and ends the slot.
    fn finish(&mut self) {
        // ESP is wherever the case left it: no stack here.
        for reg in [0, 1, 2, 3] {
            let at = self.note(What::Gpr(reg), 8);
            self.asm.store(at, reg);
        }
        let at = self.note(What::Gpr(4), 8);
        self.asm.store(at, 4);
        for segment in 0..6_u8 {
            let at = self.note(What::Memory, 8);
            // MOV EAX, Sreg.
            self.raw(&[0x8c, 0xc0 | segment << 3]);
            self.asm.store(at, 0);
        }
        let at = self.note(What::Flags, 4);
        self.asm.note_flags(at, 0x8d5);
        self.reset();
    }

    fn case(&mut self, class: SystemClass) -> String {
        match class {
            SystemClass::Segments => self.segments(),
            SystemClass::Descriptors => self.descriptors(),
            SystemClass::Far => self.far(),
            SystemClass::Iret => self.iret(),
            SystemClass::Gates => self.interrupt(),
            SystemClass::Control => self.control(),
            SystemClass::Debug => self.debug(),
            SystemClass::Paging => self.paging(),
            _ => self.exception(),
        }
    }

    fn segments(&mut self) -> String {
        let selector = selector(self.rng);
        let user = self.user;
        match self.rng.below(3) {
            0 => {
                self.imm(0, selector.into());
                let segment = *self.rng.pick(&[0, 2, 3, 4, 5]);
                self.raw(&[0x8e, 0xc0 | segment << 3]);
                format!("mov {selector:#x} to segment {segment}, user {user}")
            }
            1 => {
                // A far pointer on the stack: LSS, LFS or LGS RAX, [RSP].
                self.raw(&[0x6a, 0]);
                self.push(selector.into());
                let opcode = *self.rng.pick(&[0xb2, 0xb4, 0xb5]);
                self.raw(&[0x0f, opcode, 0x44, 0x24, 0xfc]);
                format!("load far pointer 0f{opcode:02x} {selector:#x}, user {user}")
            }
            _ => {
                self.push(selector.into());
                let opcode = *self.rng.pick(&[0xa1, 0xa9]);
                self.raw(&[0x0f, opcode]);
                format!("pop 0f{opcode:02x} {selector:#x}, user {user}")
            }
        }
    }

    fn descriptors(&mut self) -> String {
        let selector = selector(self.rng);
        let user = self.user;
        self.imm(0, selector.into());
        self.imm(2, 0x1234_5678);
        let bytes: &[u8] = match self.rng.below(10) {
            0 => &[0x0f, 0x02, 0xd0],          // LAR EDX, EAX
            1 => &[0x0f, 0x03, 0xd0],          // LSL EDX, EAX
            2 => &[0x0f, 0x00, 0xe0],          // VERR AX
            3 => &[0x0f, 0x00, 0xe8],          // VERW AX
            4 => &[0x0f, 0x00, 0xc2],          // SLDT EDX
            5 => &[0x0f, 0x00, 0xca],          // STR EDX
            6 if !user => &[0x0f, 0x00, 0xd0], // LLDT AX
            7 => &[0x48, 0x0f, 0x02, 0xd0],    // LAR RDX, RAX
            8 => &[0x48, 0x0f, 0x03, 0xd0],    // LSL RDX, RAX
            _ => &[0x66, 0x0f, 0x02, 0xd0],    // LAR DX, AX
        };
        self.raw(bytes);
        format!("{bytes:02x?} {selector:#x}, user {user}")
    }

    fn far(&mut self) -> String {
        let selector = selector(self.rng);
        let user = self.user;
        match self.rng.below(3) {
            0 => {
                // RETFQ to the end; to an outer level it also pops a stack.
                self.push(0x2b);
                self.push(self.base + DATA + 0x1000);
                self.push(selector.into());
                let target = self.asm.here() + 5 + 2;
                self.push(target);
                self.raw(&[0x48, 0xcb]);
                format!("retfq to {selector:#x}, user {user}")
            }
            n => {
                // JMP or CALL m16:32 on the stack; RAX as filler.
                self.push(selector.into());
                self.raw(&[0x48, 0x83, 0xec, 4]);
                let target = self.asm.here() + 7 + 3;
                // MOV dword [RSP], imm32.
                self.raw(&[0xc7, 0x04, 0x24]);
                self.raw(&target.to_le_bytes());
                let group = if n == 1 { 0x2c } else { 0x1c };
                self.raw(&[0xff, group, 0x24]);
                let name = if n == 1 { "jmp" } else { "call" };
                format!("far {name} to {selector:#x}, user {user}")
            }
        }
    }

    fn iret(&mut self) -> String {
        let (cs, ss) = (selector(self.rng), selector(self.rng));
        // Neither TF, IF, NT nor VM: what is left may be popped.
        let flags = self.rng.bits() as u32 & 0x1_3cd5 | 2;
        let user = self.user;
        self.push(ss.into());
        self.push(self.base + DATA + 0x1000);
        self.push(flags);
        self.push(cs.into());
        let target = self.asm.here() + 7;
        self.push(target);
        self.raw(&[0x48, 0xcf]);
        format!("iretq cs {cs:#x} ss {ss:#x} flags {flags:#x}, user {user}")
    }

    fn interrupt(&mut self) -> String {
        let vector = GATES + self.rng.below(GATE_COUNT.into()) as u8;
        self.raw(&[0xcd, vector]);
        format!("int {vector:#x}, user {}", self.user)
    }

    fn control(&mut self) -> String {
        let bit = self.rng.below(64);
        match self.rng.below(5) {
            0 => {
                // MOV RAX, CR0; BTC RAX, n; MOV CR0, RAX. Not CD and NW: KVM keeps them.
                let bit = *self.rng.pick(&[1, 2, 3, 4, 5, 16, 18, 0, 31, 32, 40, 63]);
                self.raw(&[
                    0x0f, 0x20, 0xc0, 0x48, 0x0f, 0xba, 0xf8, bit, 0x0f, 0x22, 0xc0,
                ]);
                self.raw(&[0x0f, 0x20, 0xc3]);
                self.keep(3);
                self.raw(&[0xb8]);
                self.raw(&0x8005_0033_u32.to_le_bytes());
                self.raw(&[0x0f, 0x22, 0xc0]);
                format!("flip bit {bit} of CR0")
            }
            1 => {
                let bit = *self
                    .rng
                    .pick(&[2, 3, 4, 5, 7, 8, 9, 10, 19, 26, 27, 28, 31, 32, 63]);
                self.raw(&[
                    0x0f, 0x20, 0xe0, 0x48, 0x0f, 0xba, 0xf8, bit, 0x0f, 0x22, 0xe0,
                ]);
                self.raw(&[0x0f, 0x20, 0xe3]);
                self.keep(3);
                self.raw(&[0xb8]);
                self.raw(&CR4.to_le_bytes());
                self.raw(&[0x0f, 0x22, 0xe0]);
                format!("flip bit {bit} of CR4")
            }
            2 => {
                let v = self.rng.bits() as u32 & 0xf | 1;
                self.imm(0, v);
                // LMSW AX; SMSW EBX.
                self.raw(&[0x0f, 0x01, 0xf0, 0x0f, 0x01, 0xe3]);
                self.keep(3);
                self.raw(&[0xb8]);
                self.raw(&0x8005_0033_u32.to_le_bytes());
                self.raw(&[0x0f, 0x22, 0xc0]);
                format!("lmsw {v:#x}")
            }
            3 => {
                self.raw(&[0x0f, 0x06, 0x0f, 0x20, 0xc3]);
                "clts".to_owned()
            }
            _ => {
                let v = 1_u64 << bit;
                self.raw(&[0x48, 0xb8]);
                self.raw(&v.to_le_bytes());
                // MOV CR2, RAX; MOV RBX, CR2.
                self.raw(&[0x0f, 0x22, 0xd0, 0x0f, 0x20, 0xd3]);
                format!("mov {v:#x} to CR2")
            }
        }
    }

    fn debug(&mut self) -> String {
        let n = self.rng.below(8) as u8;
        let v = match n {
            // No breakpoint enabled, no GD: the batch goes on.
            5 | 7 => self.rng.bits() & 0xffff_d000 | u64::from(self.rng.one_in(8)) << 40,
            6 | 4 => self.rng.value(),
            _ => self.rng.value(),
        };
        self.raw(&[0x48, 0xb8]);
        self.raw(&v.to_le_bytes());
        // MOV DRn, RAX; MOV RBX, DRn.
        self.raw(&[0x0f, 0x23, 0xc0 | n << 3, 0x0f, 0x21, 0xc3 | n << 3]);
        format!("mov {v:#x} to DR{n}")
    }

    fn paging(&mut self) -> String {
        let page = self.rng.below(WINDOW_PAGES.into()) as u32;
        let mut at = self.base + WINDOW + page * 0x1000 + self.rng.below(0xff8) as u32;
        if self.rng.one_in(8) {
            at |= 0xffd;
        }
        if !self.user {
            // INVLPG.
            self.raw(&[0x0f, 0x01, 0x3c, 0x25]);
            self.raw(&at.to_le_bytes());
        }
        let how: &[u8] = match self.rng.below(4) {
            0 => &[0x8b, 0x04, 0x25],             // MOV EAX, [at]
            1 => &[0x89, 0x04, 0x25],             // MOV [at], EAX
            2 => &[0x83, 0x04, 0x25],             // ADD dword [at], imm8
            _ => &[0x48, 0x0f, 0xb1, 0x04, 0x25], // CMPXCHG [at], RAX
        };
        self.imm(0, 0x1111_1111);
        self.raw(how);
        self.raw(&at.to_le_bytes());
        if how[0] == 0x83 {
            self.raw(&[1]);
        }
        format!("{how:02x?} {at:#x}, user {}", self.user)
    }

    fn exception(&mut self) -> String {
        let user = self.user;
        let bytes: &[u8] = match self.rng.below(9) {
            0 => &[0x0f, 0x0b],                                  // UD2
            1 => &[0xcc],                                        // INT3
            2 => &[0x31, 0xc9, 0xf7, 0xf1],                      // DIV by 0
            3 => &[0x0f, 0x22, 0xc8],                            // MOV CR1
            4 => &[0xa1, 0, 0, 0, 0, 0, 0, 0, 0x80],             // not canonical
            5 => &[0x50, 0x8b, 0x04, 0x25, 0, 0, 0, 0, 0x58],    // page 0
            6 => &[0x0f, 0x01, 0x3c, 0x25, 0, 0, 0, 0],          // INVLPG
            7 => &[0xcd, 0x0d],                                  // INT 13
            _ => &[0x48, 0xbc, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x50], // stack not canonical
        };
        self.raw(bytes);
        format!("{bytes:02x?}, user {user}")
    }
}

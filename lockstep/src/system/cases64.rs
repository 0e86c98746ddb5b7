//! Cases in 64-bit mode, at CPL 0 and 3.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in a region and selectors are small"
)]

use crate::asm::Asm;
use crate::kernel_parts::{CR0_64, CR4_64};
use crate::layout::*;
use crate::rng::Rng;
use crate::system::batch::{
    ControlRegisters, GATE_COUNT, GATES, KernelMode, RANDOM, RESET, SystemBatch, SystemSlot,
    WINDOW, WINDOW_PAGES,
};
use crate::system::class::SystemClass;

/// Number of random descriptors, of 16 bytes each.
const DESCRIPTOR_COUNT: u16 = 32;
/// Vector of the INT n that ends a batch.
const LEAVE: u8 = 0x80;

struct CaseBuilder64<'a> {
    rng: &'a mut Rng,
    asm: Asm,
    base: u32,
    log_end: u32,
    /// The case runs at CPL 3.
    user: bool,
}

/// The batch of a seed with its first `count` slots.
pub(super) fn build(class: SystemClass, seed: u64, count: usize) -> SystemBatch {
    let base = REGION_BASE;
    let mut rng = Rng::new(seed);
    let descriptors = (0..DESCRIPTOR_COUNT)
        .flat_map(|_| descriptor(&mut rng, class, base))
        .collect();
    let gates = (0..GATE_COUNT).flat_map(|_| gate(&mut rng)).collect();
    let entries = (0..WINDOW_PAGES)
        .map(|_| rng.bits() & (1 << 63 | 0x67))
        .collect();
    let mut b = CaseBuilder64 {
        rng: &mut rng,
        asm: Asm {
            bytes: Vec::new(),
            base,
            origin: base + CODE,
            long: true,
        },
        base,
        log_end: RESULTS,
        user: false,
    };
    let (mut slots, mut post) = (Vec::new(), Vec::new());
    // The interrupt that ends a slot also starts the first one.
    b.reset();
    for index in 0..count.min(SLOTS - 1) {
        b.asm.set(CURRENT, index as u32);
        b.user = b.rng.one_in(3) && !matches!(class, SystemClass::Control | SystemClass::Debug);
        if b.user {
            b.enter_user();
        }
        let text = b.case(class);
        post.push(b.asm.here());
        b.finish_case();
        slots.push(SystemSlot { text });
    }
    b.asm.set(CURRENT, SLOTS as u32 - 1);
    let end = b.asm.here();
    b.asm.bytes.extend([0xcd, LEAVE]);
    post.resize(SLOTS, end);
    SystemBatch {
        slots,
        code: b.asm.bytes,
        descriptors,
        gates,
        entries,
        post,
        log_end: b.log_end,
        uses_window: class == SystemClass::Paging,
        switches_tasks: false,
        kernel: KernelMode::Long,
        patches: Vec::new(),
        control: ControlRegisters::default(),
    }
}

/// A random descriptor, and eight bytes that may be its upper half.
///
/// Code segments are 64-bit, so that the code after a far branch can run.
fn descriptor(rng: &mut Rng, class: SystemClass, base: u32) -> [u64; 2] {
    let present = u64::from(!rng.one_in(6)) << 47;
    let dpl = rng.below(4) << 45;
    let kind = match rng.below(4) {
        // System descriptors, LDT, TSS and call gates among them.
        0 => rng.below(16) << 40,
        1 => {
            // A call gate leads to an invalid instruction in a random code segment: the exceptions
            // are compared.
            let selector = selector(rng);
            let low = 0x0c << 40 | present | dpl | u64::from(selector) << 16;
            let to = u64::from(base + CODE + CODE_LEN - 16);
            return [low | (to & 0xffff) | (to & 0xffff_0000) << 32, 0];
        }
        // Data and code.
        _ => (0x10 | rng.below(16)) << 40,
    };
    // IRET to a stack that is not present raises #SS on processors, and #NP in emulators.
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
    // It is not defined whether LAR and LSL check the type field in the upper half.
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
    // A handler in conforming code stays at CPL 3, where it may not write to the kernel's stack.
    // Emulators allow that, so only gates to the kernel's own code have an IST.
    let (selector, ist) = if rng.one_in(2) {
        (0x10, 1)
    } else {
        (selector(rng), 0)
    };
    // The offset is put in when the batch is written to guest memory.
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
        _ => (RANDOM + rng.below(u64::from(DESCRIPTOR_COUNT) * 2) as u16 * 8) | rpl,
    }
}

impl CaseBuilder64<'_> {
    /// Allocates 8 bytes of the log for a result.
    fn result(&mut self) -> u32 {
        let at = self.log_end;
        self.log_end += 8;
        at
    }

    /// Restores the kernel's segments, flags and privilege level.
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

    /// IRETQ to the next instruction at CPL 3.
    fn enter_user(&mut self) {
        self.push(0x2b);
        self.push(self.base + DATA + 0x1000);
        self.push(0x202);
        self.push(0x33);
        let target = self.asm.here() + 7;
        self.push(target);
        self.asm.bytes.extend([0x48, 0xcf]);
    }

    /// Stores a general register.
    fn store_result(&mut self, reg: u8) {
        let at = self.result();
        self.asm.store(at, reg);
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.asm.bytes.extend_from_slice(bytes);
    }

    /// Stores registers, segments and flags, and ends the slot.
    fn finish_case(&mut self) {
        // The case may have changed ESP, so the code does not use a stack.
        for reg in [0, 1, 2, 3, 4] {
            self.store_result(reg);
        }
        for segment in 0..6_u8 {
            // MOV EAX, Sreg.
            self.raw(&[0x8c, 0xc0 | segment << 3]);
            self.store_result(0);
        }
        let at = self.result();
        self.asm.store_flags(at, 0x8d5);
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
                // RETFQ to the end of the case; a return to an outer level also pops SS:RSP.
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
        // TF, IF, NT and VM are clear; the other flags may be set.
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
                // MOV RAX, CR0; BTC RAX, n; MOV CR0, RAX. CD and NW are left out, because KVM does
                // not let them change.
                let bit = *self.rng.pick(&[1, 2, 3, 4, 5, 16, 18, 0, 31, 32, 40, 63]);
                self.raw(&[
                    0x0f, 0x20, 0xc0, 0x48, 0x0f, 0xba, 0xf8, bit, 0x0f, 0x22, 0xc0,
                ]);
                self.raw(&[0x0f, 0x20, 0xc3]);
                self.store_result(3);
                self.raw(&[0xb8]);
                self.raw(&(CR0_64 as u32).to_le_bytes());
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
                self.store_result(3);
                self.raw(&[0xb8]);
                self.raw(&(CR4_64 as u32).to_le_bytes());
                self.raw(&[0x0f, 0x22, 0xe0]);
                format!("flip bit {bit} of CR4")
            }
            2 => {
                let v = self.rng.bits() as u32 & 0xf | 1;
                self.imm(0, v);
                // LMSW AX; SMSW EBX.
                self.raw(&[0x0f, 0x01, 0xf0, 0x0f, 0x01, 0xe3]);
                self.store_result(3);
                self.raw(&[0xb8]);
                self.raw(&(CR0_64 as u32).to_le_bytes());
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
            // No breakpoint is enabled and GD is clear, because a #DB would end the case.
            5 | 7 => self.rng.bits() & 0xffff_d000 | u64::from(self.rng.one_in(8)) << 40,
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
        let access: &[u8] = match self.rng.below(4) {
            0 => &[0x8b, 0x04, 0x25],             // MOV EAX, [at]
            1 => &[0x89, 0x04, 0x25],             // MOV [at], EAX
            2 => &[0x83, 0x04, 0x25],             // ADD dword [at], imm8
            _ => &[0x48, 0x0f, 0xb1, 0x04, 0x25], // CMPXCHG [at], RAX
        };
        self.imm(0, 0x1111_1111);
        self.raw(access);
        self.raw(&at.to_le_bytes());
        if access[0] == 0x83 {
            self.raw(&[1]);
        }
        format!("{access:02x?} {at:#x}, user {}", self.user)
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

//! The instructions of the cases, by class.

#![expect(
    clippy::cast_possible_truncation,
    reason = "selectors, addresses and immediates are cut to their width on purpose"
)]

use crate::system::batch::{GATE_COUNT, GATES, WINDOW, WINDOW_PAGES};
use crate::system::cases32::{CaseBuilder32, CaseLevel, OPERAND, REACH, USER_STACK, VM, selector};
use crate::system::kernel32::{LEVELS, PAD, TASK_SELECTORS};

impl CaseBuilder32<'_> {
    pub(super) fn segments(&mut self) -> String {
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
                let access: &[u8] =
                    self.choose(&[&[0x26, 0xa1][..], &[0x26, 0xa3], &[0x26, 0xfe, 0x05]]);
                self.raw(access);
                self.raw(&at.to_le_bytes());
                format!("access {access:02x?} {at:#x} in {selector:#x}")
            }
        }
    }

    pub(super) fn descriptors(&mut self) -> String {
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

    pub(super) fn far(&mut self, selector: u16) -> String {
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
                let stack = crate::system::cases32::selector(self.rng);
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

    pub(super) fn iret(&mut self) -> String {
        let short = self.rng.one_in(3);
        let (mut cs, mut ss) = (selector(self.rng), selector(self.rng));
        // TF, VIF and VIP are clear; the other flags may be set.
        let mut flags = self.rng.bits() as u32 & 0x25_7ed5 | 2;
        if self.rng.one_in(2) {
            (cs, ss) = LEVELS[*self.rng.pick(&[0, 1, 3])];
        }
        if self.level == CaseLevel::Ring(0) && !short && self.rng.one_in(4) {
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

    pub(super) fn interrupt(&mut self) -> String {
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

    pub(super) fn task(&mut self) -> String {
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

    pub(super) fn virtual8086(&mut self) -> String {
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

    pub(super) fn paging(&mut self) -> String {
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
        let access: &[u8] = self.choose(&[
            &[0x8b, 0x05][..], // MOV EAX, [at]
            &[0x89, 0x05],     // MOV [at], EAX
            &[0x01, 0x05],     // ADD [at], EAX
            &[0x0f, 0xb1, 0x05],
        ]);
        self.raw(access);
        self.raw(&at.to_le_bytes());
        format!("{access:02x?} {at:#x}")
    }
}

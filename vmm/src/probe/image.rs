//! What a guest finds in memory and in its registers: the layout, tables, handlers and 64-bit mode.
//!
//! Linear addresses equal physical ones in the first 2 MiB; memory ends at [`MEMORY`], what is
//! above it exits as MMIO, and what is above 2 MiB is not mapped. Everything may be used at CPL3.

use std::fmt;

use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;
use kvm_bindings::{kvm_segment, kvm_sregs};

use crate::probe::code::code;

/// Where the processor enters system-management mode: SMBASE after reset, and 0x8000.
pub(crate) const SMM_HANDLER: u64 = 0x3_8000;
/// Size of guest memory in bytes: room for the SMM state save area.
pub(crate) const MEMORY: usize = 0x4_0000;
pub(crate) const GDT: u64 = 0x1000;
pub(crate) const IDT: u64 = 0x2000;
pub(crate) const TSS: u64 = 0x3000;
pub(crate) const PML4: u64 = 0x4000;
pub(crate) const PDPT: u64 = 0x5000;
pub(crate) const PD: u64 = 0x6000;
pub(crate) const STUBS: u64 = 0x7000;
/// A page for the guest's data; R9 at the start.
pub(crate) const DATA: u64 = 0x8000;
pub(crate) const DATA_START: usize = 0x8000;
/// Top of the stack that exceptions use.
pub(crate) const HANDLER_STACK: u64 = 0xa000;
/// Top of the stack: RSP at the start.
pub(crate) const STACK: u64 = 0xb000;
/// Top of a second stack, for the way to CPL3; R8 at the start.
pub(crate) const USER_STACK: u64 = 0xbf00;
/// Where the probe's code is.
pub(crate) const CODE: u64 = 0xc000;
/// A page behind which there is no memory, only MMIO.
pub(crate) const MMIO: u64 = 0x10_0000;
/// A linear address that is not mapped.
pub(crate) const UNMAPPED: u64 = 0x4000_0000;

/// Handlers write here.
pub(crate) const PORT_REPORT: u16 = 0xd0;
/// Guest code writes here when it has got where it should.
pub(crate) const PORT_DONE: u16 = 0xd1;

pub(crate) const KERNEL_CS: u16 = 0x08;
pub(crate) const KERNEL_SS: u16 = 0x10;
pub(crate) const USER_SS: u16 = 0x1b;
pub(crate) const USER_CS: u16 = 0x23;
pub(crate) const TSS_SELECTOR: u16 = 0x28;
/// The TSS proper, an I/O map for 0x400 ports, and its closing byte of ones.
pub(crate) const TSS_LIMIT: u32 = 0x67 + 0x80 + 1;

/// RFLAGS.TF.
pub(crate) const TF: u64 = Rflags::TF.bits();
/// RFLAGS.IF.
pub(crate) const IF: u64 = Rflags::IF.bits();
/// RFLAGS.RF.
pub(crate) const RF: u64 = Rflags::RF.bits();
pub(crate) const IOPL3: u64 = Rflags::IOPL.bits();

code! {
    /// A handler. The host knows the vector by where it is.
    fn handler { "out 0xd0, al", "iretq" }
    /// The same where the processor pushes an error code.
    fn handler_with_error { "out 0xd0, al", "add rsp, 8", "iretq" }
}

/// Where a guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// CPL 0.
    Kernel,
    /// CPL 3, with I/O allowed.
    User,
}

impl Level {
    /// Code and stack segment selectors.
    pub(crate) fn selectors(self) -> (u16, u16) {
        match self {
            Self::Kernel => (KERNEL_CS, KERNEL_SS),
            Self::User => (USER_CS, USER_SS),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "CPL0",
            Self::User => "CPL3",
        })
    }
}

pub(crate) fn has_error_code(vector: u64) -> bool {
    u8::try_from(vector).is_ok_and(|vector| Vector(vector).has_error_code())
}

/// What every guest finds in memory from 0 on: tables and handlers.
pub(crate) fn image() -> Vec<u8> {
    const PRESENT_WRITE_USER: u64 = 0b111;
    const LARGE_PAGE: u64 = 1 << 7;
    let mut image = vec![0; DATA_START];
    let mut put = |address: u64, bytes: &[u8]| {
        let at = usize::try_from(address).expect("an address below DATA fits");
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    let bytes = |words: &[u64]| {
        words
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    put(PML4, &bytes(&[PDPT | PRESENT_WRITE_USER]));
    put(PDPT, &bytes(&[PD | PRESENT_WRITE_USER]));
    put(PD, &bytes(&[LARGE_PAGE | PRESENT_WRITE_USER]));
    // Null, code and data at 0, data and code at 3, TSS: access bytes 0x9b 0x93 0xf3 0xfb 0x8b.
    let gdt = [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        0x0000_8b00_0000_0000 | (TSS << 16) | u64::from(TSS_LIMIT),
        0,
    ];
    put(GDT, &bytes(&gdt));
    // RSP0 at 4, IST1 at 36, the I/O map base at 102; the map allows every port it covers.
    put(TSS + 4, &STACK.to_le_bytes());
    put(TSS + 36, &HANDLER_STACK.to_le_bytes());
    put(TSS + 102, &0x68_u16.to_le_bytes());
    put(TSS + u64::from(TSS_LIMIT), &[0xff]);
    for vector in 0..256 {
        let code = if has_error_code(vector) {
            handler_with_error()
        } else {
            handler()
        };
        let handler = STUBS + vector * 16;
        put(handler, code.bytes());
        // An interrupt gate that INT n may use from CPL3, on IST1.
        put(
            IDT + vector * 16,
            &bytes(&[handler | (u64::from(KERNEL_CS) << 16) | (0xee01 << 32)]),
        );
    }
    image
}

pub(crate) fn segment(selector: u16, kind: u8) -> kvm_segment {
    let code = kind & 8 != 0;
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl: u8::try_from(selector & 3).unwrap_or(0),
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

pub(crate) fn long_mode(sregs: &mut kvm_sregs, level: Level) {
    let (cs, ss) = level.selectors();
    sregs.cs = segment(cs, 0xb);
    sregs.ss = segment(ss, 0x3);
    sregs.ds = segment(ss, 0x3);
    sregs.es = sregs.ds;
    sregs.fs = sregs.ds;
    sregs.gs = sregs.ds;
    sregs.tr = kvm_segment {
        base: TSS,
        limit: TSS_LIMIT,
        selector: TSS_SELECTOR,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 0x37;
    sregs.idt.base = IDT;
    sregs.idt.limit = 0xfff;
    // PE, MP, ET, NE, WP, PG.
    sregs.cr0 = 0x8001_0033;
    sregs.cr3 = PML4;
    // DE, PAE, OSFXSR, OSXMMEXCPT.
    sregs.cr4 = 0x628;
    // SCE, LME, LMA.
    sregs.efer = 0x501;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_fit_their_places() {
        assert!(handler().bytes().len() <= 16);
        assert!(handler_with_error().bytes().len() <= 16);
    }

    #[test]
    fn gates_lead_to_their_handlers() {
        let image = image();
        let gate = |vector: usize| {
            let at = 0x2000 + vector * 16;
            (
                u16::from_le_bytes([image[at], image[at + 1]]),
                image[at + 4],
                image[at + 5],
            )
        };
        assert_eq!(gate(0), (0x7000, 1, 0xee));
        assert_eq!(gate(255), (0x7ff0, 1, 0xee));
    }
}

//! The memory and registers of a guest: the layout, tables, handlers and 64-bit mode.
//!
//! The first 2 MiB are mapped one to one and can be accessed at CPL3. Memory ends at [`MEMORY`];
//! accesses above it exit as MMIO. Addresses above 2 MiB are not mapped.

use std::fmt;

use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;
use kvm_bindings::{kvm_segment, kvm_sregs};

use crate::probe::guest::code::code;

/// The entry of system-management mode: SMBASE after reset, plus 0x8000.
pub(crate) const SMM_HANDLER: u64 = 0x3_8000;
/// Size of guest memory in bytes, including the SMM state save area.
pub(crate) const MEMORY: usize = 0x4_0000;
pub(crate) const GDT: u64 = 0x1000;
pub(crate) const IDT: u64 = 0x2000;
pub(crate) const TSS: u64 = 0x3000;
pub(crate) const PML4: u64 = 0x4000;
pub(crate) const PDPT: u64 = 0x5000;
pub(crate) const PD: u64 = 0x6000;
pub(crate) const STUBS: u64 = 0x7000;
/// A page for the guest's data. R9 points to it at the start.
pub(crate) const DATA: u64 = 0x8000;
pub(crate) const DATA_START: usize = 0x8000;
/// Top of the stack that exceptions use.
pub(crate) const HANDLER_STACK: u64 = 0xa000;
/// Top of the stack; RSP at the start.
pub(crate) const STACK: u64 = 0xb000;
/// Top of the stack at CPL3. R8 points to it at the start.
pub(crate) const USER_STACK: u64 = 0xbf00;
/// Address of the probe's code.
pub(crate) const CODE: u64 = 0xc000;
/// A mapped page without memory: accesses exit as MMIO.
pub(crate) const MMIO: u64 = 0x10_0000;
/// A linear address that is not mapped.
pub(crate) const UNMAPPED: u64 = 0x4000_0000;

/// The port that handlers write to.
pub(crate) const PORT_REPORT: u16 = 0xd0;
/// The port that guest code writes to when it is done.
pub(crate) const PORT_DONE: u16 = 0xd1;

pub(crate) const KERNEL_CS: u16 = 0x08;
pub(crate) const KERNEL_SS: u16 = 0x10;
pub(crate) const USER_SS: u16 = 0x1b;
pub(crate) const USER_CS: u16 = 0x23;
pub(crate) const TSS_SELECTOR: u16 = 0x28;
/// Limit of the TSS with an I/O map for 0x400 ports and its final byte of ones.
pub(crate) const TSS_LIMIT: u32 = 0x67 + 0x80 + 1;

pub(crate) const TF: u64 = Rflags::TF.bits();
pub(crate) const IF: u64 = Rflags::IF.bits();
pub(crate) const RF: u64 = Rflags::RF.bits();
pub(crate) const IOPL3: u64 = Rflags::IOPL.bits();

code! {
    /// A handler. The host derives the vector from its address.
    fn handler { "out 0xd0, al", "iretq" }
    /// A handler of an exception with an error code.
    fn handler_with_error { "out 0xd0, al", "add rsp, 8", "iretq" }
}

/// The privilege level at which a guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartLevel {
    /// CPL 0.
    Kernel,
    /// CPL 3, with I/O allowed.
    User,
}

impl StartLevel {
    /// Code and stack segment selectors.
    pub(crate) fn selectors(self) -> (u16, u16) {
        match self {
            Self::Kernel => (KERNEL_CS, KERNEL_SS),
            Self::User => (USER_CS, USER_SS),
        }
    }
}

impl fmt::Display for StartLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "CPL0",
            Self::User => "CPL3",
        })
    }
}

/// Whether an exception pushes an error code.
pub(crate) fn has_error_code(vector: u64) -> bool {
    u8::try_from(vector).is_ok_and(|vector| Vector(vector).has_error_code())
}

/// The memory of every guest from 0 on: tables and handlers.
pub(crate) fn guest_image() -> Vec<u8> {
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
    // Null, CPL0 code and data, CPL3 data and code, TSS: access bytes 0x9b 0x93 0xf3 0xfb 0x8b.
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
    // RSP0 at 4, IST1 at 36, the I/O map base at 102. The map allows every port that it covers.
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
        // An interrupt gate with IST1, and DPL 3 for INT n at CPL3.
        put(
            IDT + vector * 16,
            &bytes(&[handler | (u64::from(KERNEL_CS) << 16) | (0xee01 << 32)]),
        );
    }
    image
}

/// A flat segment of type `kind`, with the privilege level of its selector.
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

/// Sets up 64-bit mode at `level`.
pub(crate) fn long_mode(sregs: &mut kvm_sregs, level: StartLevel) {
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
    sregs.cr0 = (Cr0::PE | Cr0::MP | Cr0::ET | Cr0::NE | Cr0::WP | Cr0::PG).bits();
    sregs.cr3 = PML4;
    sregs.cr4 = (Cr4::DE | Cr4::PAE | Cr4::OSFXSR | Cr4::OSXMMEXCPT).bits();
    sregs.efer = (Efer::SCE | Efer::LME | Efer::LMA).bits();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_fit_in_16_bytes() {
        assert!(handler().bytes().len() <= 16);
        assert!(handler_with_error().bytes().len() <= 16);
    }

    #[test]
    fn gates_point_to_their_handlers() {
        let image = guest_image();
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

//! Control registers, EFER, segments, privilege changes and paging: the basics.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::catch::user_with_flags;
use hindsight_guest::gdt::{KERNEL_CODE, KERNEL_DATA, USER_CODE, USER_DATA};
use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::paging::{self, D, P, RW, US};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::{Cr0, Cr4, Efer};
use hindsight_guest::regs::msr::{IA32_EFER, IA32_FS_BASE, IA32_KERNEL_GS_BASE};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_payloads::access::{self, ScratchPage};

payload!("sysregs");

// Two probes stand for more than their name says: a host on which INT n works at CPL 3 has there the
// guest's own selectors and flags, and one on which INT n works at CPL 0 checks all bits of CR0 and
// CR4.

static FIRST: ScratchPage = ScratchPage::new();
static SECOND: ScratchPage = ScratchPage::new();

case! {
    name: "mode", cpl: [0], rules: ["RST-05"], needs: [],
    about: "CR0, CR4 and EFER show 64-bit mode, as the payload set it up",
    fn body(_ctx) {
        let cr0 = Cr0::from_bits_retain(insn::read_cr0());
        check!(cr0.contains(Cr0::PE | Cr0::PG | Cr0::WP | Cr0::NE | Cr0::ET), "CR0");
        check_eq!(insn::read_cr4() & (Cr4::DE | Cr4::TSD | Cr4::PCE).bits(), 0, "CR4.DE, TSD and PCE");
        check!(insn::read_cr4() & Cr4::PAE.bits() != 0, "CR4.PAE");
        let efer = Efer::from_bits_retain(msr::read(IA32_EFER));
        check!(efer.contains(Efer::LME | Efer::LMA | Efer::NXE), "EFER");
    }
}

case! {
    name: "cr0_refused", cpl: [0], rules: [], needs: ["exceptions"],
    about: "illegal values of CR0 raise #GP(0) and change nothing",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not check them");
        }
        let cr0 = insn::read_cr0();
        for (value, label) in [
            (cr0 & !Cr0::PE.bits(), "paging without protection"),
            (cr0 | Cr0::NW.bits(), "NW without CD"),
        ] {
            let fault = ctx.run(|| insn::write_cr0(value));
            check_eq!(fault.map(|e| e.code()), Some(GP), label);
            check_eq!(insn::read_cr0(), cr0, "CR0 afterwards");
        }
    }
}

case! {
    name: "cr4_refused", cpl: [0], rules: [], needs: ["exceptions"],
    about: "reserved bits of CR4, and clearing PAE in IA-32e mode, raise #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not check them");
        }
        let cr4 = insn::read_cr4();
        for (value, label) in [(cr4 | 1 << 15, "bit 15"), (cr4 & !Cr4::PAE.bits(), "PAE")] {
            let fault = ctx.run(|| insn::write_cr4(value));
            check_eq!(fault.map(|e| e.code()), Some(GP), label);
            check_eq!(insn::read_cr4(), cr4, "CR4 afterwards");
        }
    }
}

case! {
    name: "control_upper_bits", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "bits 63:32 of CR0 and CR4 raise #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not check them");
        }
        for bit in [32, 63] {
            let fault = ctx.run(|| insn::write_cr0(insn::read_cr0() | 1 << bit));
            check_eq!(fault.map(|e| e.code()), Some(GP), "CR0");
            let fault = ctx.run(|| insn::write_cr4(insn::read_cr4() | 1 << bit));
            check_eq!(fault.map(|e| e.code()), Some(GP), "CR4");
        }
    }
}

case! {
    name: "efer_refused", cpl: [0], rules: [], needs: ["exceptions"],
    about: "reserved bits of EFER, and changing LME while paging is on, raise #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not check them");
        }
        let efer = msr::read(IA32_EFER);
        for (value, label) in [(efer | 1 << 1, "bit 1"), (efer & !Efer::LME.bits(), "LME")] {
            check_eq!(msr::write_safe(IA32_EFER, value), Err(GP), label);
            check_eq!(msr::read(IA32_EFER), efer, "EFER afterwards");
        }
    }
}

case! {
    name: "cr2_holds_any_value", cpl: [0], rules: [], needs: [],
    about: "CR2 reads back what was written",
    fn body(_ctx) {
        for value in [0x1234_5678_9abc_def0, u64::MAX, 0] {
            insn::write_cr2(value);
            check_eq!(insn::read_cr2(), value, "CR2");
        }
    }
}

case! {
    name: "cr8", cpl: [0], rules: [], needs: ["exceptions"],
    about: "CR8 holds four bits; others raise #GP(0)",
    fn body(ctx) {
        for value in [5, 15, 0] {
            insn::write_cr8(value);
            check_eq!(insn::read_cr8(), value, "CR8");
        }
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not check CR8's reserved bits");
        }
        let fault = ctx.run(|| insn::write_cr8(16));
        check_eq!(fault.map(|e| e.code()), Some(GP), "bit 4");
    }
}

fn selectors() -> (u16, u16) {
    let (cs, ss): (u16, u16);
    // SAFETY: reading selectors touches no memory.
    unsafe {
        asm!("mov {:x}, cs", "mov {:x}, ss", out(reg) cs, out(reg) ss, options(nomem, nostack))
    };
    (cs, ss)
}

case! {
    name: "selectors", cpl: [0, 3], rules: [], needs: [], needs_cpl3: ["iretq-cpl3", "intn-cpl3"],
    about: "CS and SS at each level; IRETQ loads those of CPL 3",
    fn body(ctx) {
        let mut found = (0, 0);
        let fault = ctx.run(|| found = selectors());
        check!(fault.is_none(), "no exception");
        let expected = if ctx.cpl == 3 { (USER_CODE, USER_DATA) } else { (KERNEL_CODE, KERNEL_DATA) };
        check_eq!(found, expected, "CS and SS");
    }
}

case! {
    name: "user_flags", cpl: [3], rules: [], needs: ["iretq-cpl3", "intn-cpl3"],
    about: "IRETQ loads the flags; POPFQ at CPL 3 changes neither IF nor IOPL",
    fn body(_ctx) {
        let entry = (Rflags::FIXED | Rflags::CF | Rflags::ID).bits();
        let (mut first, mut second) = (0, 0);
        let fault = user_with_flags(entry, || {
            first = insn::rflags();
            // SAFETY: the stack is as before when the sequence ends.
            unsafe {
                asm!("pushfq", "or qword ptr [rsp], 0x3200", "popfq", "pushfq", "pop {}", out(reg) second);
            }
        });
        check!(fault.is_none(), "no exception");
        check_eq!(first & Rflags::ID.bits(), Rflags::ID.bits(), "ID as loaded");
        check_eq!(second & (Rflags::IF | Rflags::IOPL).bits(), 0, "IF and IOPL after POPFQ");
    }
}

case! {
    name: "user_stack_switch", cpl: [3], rules: [], needs: ["exceptions", "iretq-cpl3"],
    about: "an exception at CPL 3 arrives on the stack of the TSS, with the user's SS and RSP saved",
    fn body(ctx) {
        let mut rsp = 0_u64;
        let fault = ctx.run(|| {
            // SAFETY: RSP is read only; UD2 ends the closure.
            unsafe {
                asm!("mov [{}], rsp", in(reg) &raw mut rsp);
                asm!("ud2");
            }
        });
        let fault = require_some!(fault, "exception raised");
        check_eq!(fault.code(), (6, 0), "vector");
        check_eq!(fault.frame.ss, u64::from(USER_DATA), "saved SS");
        check_eq!(fault.frame.rsp, rsp, "saved RSP");
    }
}

case! {
    name: "fs_base", cpl: [0, 3], rules: [], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "IA32_FS_BASE is the base of FS accesses at each level",
    fn body(ctx) {
        access::store(FIRST.address() + 0x123, 0x5a);
        msr::write(IA32_FS_BASE, FIRST.address() + 0x100);
        check_eq!(msr::read(IA32_FS_BASE), FIRST.address() + 0x100, "the MSR reads back");
        let mut found = 0_u8;
        let fault = ctx.run(|| {
            // SAFETY: the load is from the page.
            unsafe { asm!("mov {}, fs:[0x23]", out(reg_byte) found, options(nostack)) };
        });
        msr::write(IA32_FS_BASE, 0);
        check!(fault.is_none(), "no exception");
        check_eq!(found, 0x5a, "the byte at FS:23H");
    }
}

case! {
    name: "bases_are_canonical", cpl: [0], rules: [], needs: ["exceptions", "gd"],
    about: "a non-canonical value of FS_BASE or KERNEL_GS_BASE raises #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG takes it");
        }
        for index in [IA32_FS_BASE, IA32_KERNEL_GS_BASE] {
            let before = msr::read(index);
            check_eq!(msr::write_safe(index, 1 << 63), Err(GP), "the write");
            check_eq!(msr::read(index), before, "the value afterwards");
        }
    }
}

case! {
    name: "alias", cpl: [0, 3], rules: ["DR-21"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "two linear pages on one frame show the same memory; INVLPG drops the old translation",
    fn body(ctx) {
        access::store(FIRST.address(), 1);
        access::store(SECOND.address(), 2);
        let old = paging::map(SECOND.address(), FIRST.address(), P | RW | US);
        let mut found = 0;
        let fault = ctx.run(|| {
            found = access::load(SECOND.address());
            access::store(SECOND.address(), 3);
        });
        paging::restore(SECOND.address(), old);
        check!(fault.is_none(), "no exception");
        check_eq!(found, 1, "the frame of the first page through the second");
        check_eq!(access::load(FIRST.address()), 3, "the store through the second");
        check_eq!(access::load(SECOND.address()), 2, "the second page's own frame again");
    }
}

case! {
    name: "dirty_bit", cpl: [0, 3], rules: [], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "a store sets the dirty bit, a load only the accessed bit",
    fn body(ctx) {
        let address = FIRST.address();
        let old = paging::map(address, address, P | RW | US);
        let entry = paging::entry(address);
        // SAFETY: it is the entry of a page of ours.
        let flags = || unsafe { entry.read_volatile() } & (paging::A | D);
        let fault = ctx.run(|| { access::load(address); });
        check!(fault.is_none(), "no exception");
        check_eq!(flags(), paging::A, "after a load");
        let fault = ctx.run(|| access::store(address, 9));
        check!(fault.is_none(), "no exception");
        check_eq!(flags(), paging::A | D, "after a store");
        paging::restore(address, old);
    }
}

case! {
    name: "page_fault_and_retry", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a handler that maps the page lets the access go on",
    fn body(ctx) {
        access::store(FIRST.address(), 0x77);
        let old = paging::unmap(FIRST.address());
        hindsight_guest::trap::set_handler(14, |frame| {
            // The frame is checked by its error code only; a second fault would loop.
            check_eq!(frame.error & 1, 0, "the page is absent");
            paging::map(FIRST.address(), FIRST.address(), P | RW | US);
        });
        let mut found = 0;
        let fault = ctx.run(|| found = access::load(FIRST.address()));
        hindsight_guest::trap::clear_handler(14);
        paging::restore(FIRST.address(), old);
        check!(fault.is_none(), "the access completed");
        check_eq!(found, 0x77, "the byte");
    }
}

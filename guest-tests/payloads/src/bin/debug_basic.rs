//! Debug registers, single-step, breakpoints and breakpoint instructions: the basics.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

use hindsight_guest::catch::logged;
use hindsight_guest::insn;
use hindsight_guest::msr::GP;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length, BreakpointIndex};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::vectors::with_gate;
use hindsight_payloads::access::{self, Page};

payload!("debug_basic");

// The probe of general detect also stands for a host whose processor is complete: QEMU's emulated one
// lacks it, and the other details of the cases that name it.

static PAGE: Page = Page::new();

/// #DB, as a bit of a set of vectors.
const DB: u32 = 1 << 1;
/// #BP, as a bit of a set of vectors.
const BP: u32 = 1 << 3;
/// DR6 less its always-one bits.
fn conditions(dr6: u64) -> u64 {
    dr6 & (Dr6::all().bits() & !Dr6::RTM.bits())
}

/// Arms breakpoint `slot` alone.
fn arm(slot: u8, address: u64, condition: Condition, length: Length) {
    insn::write_dr(slot, address);
    insn::write_dr6(Dr6::RESET);
    insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(slot), condition, length).0);
}

fn disarm() {
    insn::write_dr7(Dr7::RESET.0);
}

fn address_of(f: unsafe extern "C" fn()) -> u64 {
    f as *const () as u64
}

// Two instructions with an effect, for execute breakpoints: the breakpoint goes on the second.
global_asm!(
    ".global debug_two_steps, debug_second_step",
    "debug_two_steps:",
    "mov byte ptr [rdi], 1",
    "debug_second_step:",
    "mov byte ptr [rdi + 1], 1",
    "ret",
    // One store, for data breakpoints.
    ".global debug_store, debug_after_store",
    "debug_store:",
    "mov byte ptr [rdi], 2",
    "debug_after_store:",
    "ret",
    // A stretch that sets TF and clears it again.
    ".global debug_stepped, debug_step1, debug_step2, debug_step3, debug_step4, debug_step5",
    "debug_stepped:",
    "pushfq",
    "or qword ptr [rsp], 0x100",
    "popfq",
    "nop",
    "debug_step1:",
    "nop",
    "debug_step2:",
    "pushfq",
    "debug_step3:",
    "and qword ptr [rsp], -257",
    "debug_step4:",
    "popfq",
    "debug_step5:",
    "ret",
    // Breakpoint instructions.
    ".global debug_int3, debug_after_int3, debug_int1, debug_after_int1",
    "debug_int3:",
    "int3",
    "debug_after_int3:",
    "ret",
    "debug_int1:",
    ".byte 0xf1", // INT1, for which the assembler has no name
    "debug_after_int1:",
    "ret",
    // A read of a debug register, for general detect.
    ".global debug_read_dr0",
    "debug_read_dr0:",
    "mov rax, dr0",
    "ret",
);

unsafe extern "C" {
    fn debug_two_steps(bytes: *mut u8);
    fn debug_second_step();
    fn debug_store(byte: *mut u8);
    fn debug_after_store();
    fn debug_stepped();
    fn debug_step1();
    fn debug_step2();
    fn debug_step3();
    fn debug_step4();
    fn debug_step5();
    fn debug_int3();
    fn debug_after_int3();
    fn debug_int1();
    fn debug_after_int1();
    fn debug_read_dr0();
}

fn two_steps() {
    // SAFETY: it stores to the first two bytes of the page.
    unsafe { debug_two_steps(PAGE.address() as *mut u8) };
}

fn store_byte() {
    // SAFETY: it stores to the first byte of the page.
    unsafe { debug_store(PAGE.address() as *mut u8) };
}

case! {
    name: "reset_values", cpl: [0], rules: ["DR-01", "RST-01", "RST-02", "RST-03"], needs: [],
    about: "DR0 to DR3, DR6 and DR7 after reset",
    fn body(_ctx) {
        let addresses = [insn::read_dr0(), insn::read_dr1(), insn::read_dr2(), insn::read_dr3()];
        check_eq!(addresses, [0; 4], "DR0 to DR3");
        check_eq!(insn::read_dr6(), 0xffff_0ff0, "DR6");
        check_eq!(insn::read_dr7(), 0x400, "DR7");
    }
}

case! {
    name: "dr6_fixed_bits", cpl: [0], rules: ["DR-02", "DR-03"], needs: ["gd"],
    about: "the fixed bits of DR6 read back, whatever is written",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stores bit 12");
        }
        insn::write_dr6(0);
        check_eq!(insn::read_dr6() & !Dr6::RTM.bits(), 0xfffe_0ff0, "after a write of 0");
        insn::write_dr6(0xffff_ffff);
        check_eq!(insn::read_dr6(), 0xffff_efff, "after a write of all ones");
    }
}

case! {
    name: "dr7_fixed_bits", cpl: [0], rules: ["DR-04", "DR-05"], needs: ["gd"],
    about: "the fixed bits of DR7 read back, whatever is written",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stores the reserved bits");
        }
        insn::write_dr7(0);
        check_eq!(insn::read_dr7(), 0x400, "after a write of 0");
        // Far above all memory that is used: with every breakpoint enabled none must match.
        (0..4).for_each(|slot| insn::write_dr(slot, 0x7000_0000_0000 + u64::from(slot)));
        insn::write_dr7(0xffff_dfff);
        let found = insn::read_dr7();
        insn::write_dr7(0x400);
        check_eq!(found & !Dr7::RTM, 0xffff_07ff, "after a write of all ones but GD");
    }
}

case! {
    name: "upper_bits_refused", cpl: [0], rules: ["DR-06"], needs: ["exceptions", "gd"],
    about: "bits 63:32 of DR6 and DR7 raise #GP(0), and the register stays",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG ignores them");
        }
        for bit in [32, 47, 63] {
            let fault = ctx.run(|| insn::write_dr6(1 << bit));
            check_eq!(fault.map(|e| e.code()), Some(GP), "DR6");
            let fault = ctx.run(|| insn::write_dr7(1 << bit | 0x400));
            check_eq!(fault.map(|e| e.code()), Some(GP), "DR7");
        }
        check_eq!(insn::read_dr6(), 0xffff_0ff0, "DR6 afterwards");
        check_eq!(insn::read_dr7(), 0x400, "DR7 afterwards");
    }
}

case! {
    name: "addresses_take_any_value", cpl: [0], rules: ["DR-07"], needs: [],
    about: "DR0 to DR3 hold any 64-bit value, also a non-canonical one",
    fn body(ctx) {
        for value in [0x8000_0000_0000_0000, 0x1234_5678_9abc_def0, u64::MAX, 0] {
            let fault = ctx.run(|| (0..4).for_each(|slot| insn::write_dr(slot, value)));
            check!(fault.is_none(), "no exception");
            let found = [insn::read_dr0(), insn::read_dr1(), insn::read_dr2(), insn::read_dr3()];
            check_eq!(found, [value; 4], "read back");
        }
    }
}

fn read_dr4() -> u64 {
    let value;
    // SAFETY: reading a register touches no memory.
    unsafe { asm!("mov {}, dr4", out(reg) value, options(nomem, nostack)) };
    value
}

fn read_dr5() -> u64 {
    let value;
    // SAFETY: reading a register touches no memory.
    unsafe { asm!("mov {}, dr5", out(reg) value, options(nomem, nostack)) };
    value
}

fn read_dr8() {
    // SAFETY: it raises #UD.
    unsafe { asm!("mov rax, dr8", out("rax") _, options(nomem, nostack)) };
}

case! {
    name: "dr4_dr5", cpl: [0], rules: ["DR-11", "DR-12", "DR-18"], needs: ["exceptions"],
    about: "DR4 and DR5 are aliases with CR4.DE clear, and raise #UD with it set",
    fn body(ctx) {
        let cr4 = insn::read_cr4() & !Cr4::DE.bits();
        insn::write_cr4(cr4);
        let mut found = (0, 0);
        let fault = ctx.run(|| found = (read_dr4(), read_dr5()));
        check!(fault.is_none(), "no exception with DE clear");
        check_eq!(found, (0xffff_0ff0, 0x400), "the values of DR6 and DR7");
        insn::write_cr4(cr4 | Cr4::DE.bits());
        for read in [read_dr4, read_dr5] {
            let fault = ctx.run(|| { read(); });
            check_eq!(fault.map(|e| e.code()), Some((6, 0)), "with DE set");
        }
        insn::write_cr4(cr4);
    }
}

// At CPL 3 the order of the two checks is a choice of the specification (class C), and every host seen
// so far checks the privilege first. No KVM meets the need: it stands for an engine of our own.
case! {
    name: "dr8_is_undefined", cpl: [0, 3], rules: ["DR-13", "DR-16"], needs: ["exceptions"],
    needs_cpl3: ["iretq-cpl3", "guestbp-io"],
    about: "DR8 to DR15 raise #UD, at CPL 3 too",
    fn body(ctx) {
        if insn::is_qemu_tcg() && ctx.cpl == 3 {
            skip!(ctx, "QEMU TCG checks the privilege first");
        }
        let fault = ctx.run(read_dr8);
        check_eq!(fault.map(|e| e.code()), Some((6, 0)), "vector and error code");
    }
}

case! {
    name: "user_access", cpl: [3], rules: ["DR-14"], needs: ["exceptions", "iretq-cpl3"],
    about: "MOV to or from a debug register at CPL 3 raises #GP(0)",
    fn body(ctx) {
        for read in [insn::read_dr0, insn::read_dr3, insn::read_dr6, insn::read_dr7] {
            let fault = ctx.run(|| { read(); });
            check_eq!(fault.map(|e| e.code()), Some(GP), "read");
        }
        for write in [insn::write_dr0, insn::write_dr3, insn::write_dr6, insn::write_dr7] {
            let fault = ctx.run(|| write(0x400));
            check_eq!(fault.map(|e| e.code()), Some(GP), "write");
        }
    }
}

case! {
    name: "execute_breakpoint", cpl: [0, 3], rules: ["DB-01", "DB-10", "RF-08", "DR-17", "DR-19", "DR-27"],
    needs: [], needs_cpl0: ["guestbp-exec-cpl0"], needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "#DB comes before the instruction, with its address, RF clear and B0 set",
    fn body(ctx) {
        let bytes = PAGE.address();
        access::store(bytes, 0);
        access::store(bytes + 1, 0);
        arm(0, address_of(debug_second_step), Condition::Execute, Length::One);
        let fault = ctx.run(two_steps);
        disarm();
        let fault = require_some!(fault, "an exception");
        check_eq!(fault.code(), (1, 0), "vector");
        check_eq!(fault.rip, address_of(debug_second_step), "saved RIP");
        check_eq!(conditions(fault.dr6), Dr6::B0.bits(), "DR6");
        check_eq!(fault.rflags & Rflags::RF.bits(), 0, "RF in the image");
        check_eq!((access::load(bytes), access::load(bytes + 1)), (1, 0), "only the first store happened");
        let fault = ctx.run(two_steps);
        check!(fault.is_none(), "disarmed, nothing happens");
    }
}

case! {
    name: "execute_breakpoint_resume", cpl: [0, 3], rules: ["DB-03", "RF-01", "RF-02", "RF-03"],
    needs: [], needs_cpl0: ["guestbp-exec-cpl0"], needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "returning with RF set executes the instruction once without the breakpoint",
    fn body(ctx) {
        let bytes = PAGE.address();
        access::store(bytes + 1, 0);
        arm(1, address_of(debug_second_step), Condition::Execute, Length::One);
        let log = logged(DB, || {
            ctx.run(two_steps);
            ctx.run(two_steps);
        });
        disarm();
        check_eq!(log.count(), 2, "one #DB for each execution");
        for event in log.events() {
            check_eq!(event.rip, address_of(debug_second_step), "saved RIP");
            check_eq!(conditions(event.dr6), Dr6::B1.bits(), "DR6");
        }
        check_eq!(access::load(bytes + 1), 1, "the instruction was executed");
    }
}

case! {
    name: "write_breakpoint", cpl: [0, 3], rules: ["WP-01", "WP-02", "WP-04", "WP-17", "DB-10"],
    needs: ["guestbp-data"], needs_cpl3: ["iretq-cpl3"],
    about: "#DB comes after the store, also of the same value; a load does not match",
    fn body(ctx) {
        let byte = PAGE.address();
        access::store(byte, 0);
        arm(2, byte, Condition::Write, Length::One);
        let log = logged(DB, || {
            ctx.run(|| { access::load(byte); });
            ctx.run(store_byte);
            ctx.run(store_byte);
        });
        disarm();
        check_eq!(log.count(), 2, "one #DB for each store");
        for event in log.events() {
            check_eq!(event.rip, address_of(debug_after_store), "saved RIP");
            check_eq!(conditions(event.dr6), Dr6::B2.bits(), "DR6");
        }
        check_eq!(access::load(byte), 2, "the store happened");
    }
}

case! {
    name: "access_breakpoint", cpl: [0, 3], rules: ["WP-03", "WP-05", "WP-06", "WP-07"],
    needs: ["guestbp-data"], needs_cpl3: ["iretq-cpl3"],
    about: "loads and stores match in the aligned range, and not beside it",
    fn body(ctx) {
        let base = PAGE.address() + 0x100;
        arm(3, base + 6, Condition::ReadWrite, Length::Four);
        let log = logged(DB, || {
            ctx.run(|| { access::load(base + 3); });
            ctx.run(|| { access::load(base + 4); });
            ctx.run(|| access::store(base + 7, 1));
            ctx.run(|| { access::load(base + 8); });
        });
        disarm();
        check_eq!(log.count(), 2, "the accesses to bytes 4 and 7");
        for event in log.events() {
            check_eq!(conditions(event.dr6), Dr6::B3.bits(), "DR6");
        }
    }
}

case! {
    name: "io_breakpoint", cpl: [0], rules: ["IOB-01", "IOB-03"], needs: ["guestbp-io"],
    about: "with CR4.DE set an I/O breakpoint reports after IN and OUT",
    fn body(ctx) {
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | Cr4::DE.bits());
        arm(0, 0xe8, Condition::Io, Length::Two);
        let log = logged(DB, || {
            ctx.run(|| hindsight_guest::port::outb(0xe8, 1));
            ctx.run(|| { hindsight_guest::port::inb(0xe9); });
            ctx.run(|| { hindsight_guest::port::inb(0xea); });
        });
        disarm();
        insn::write_cr4(cr4);
        check_eq!(log.count(), 2, "the two ports of the range");
        for event in log.events() {
            check_eq!(conditions(event.dr6), Dr6::B0.bits(), "DR6");
        }
    }
}

case! {
    name: "single_step", cpl: [0, 3],
    rules: ["TF-01", "TF-02", "TF-03", "TF-04", "TF-19", "TF-20", "TF-21", "DB-10", "DB-11", "RF-07"],
    needs: [], needs_cpl0: ["tf-cpl0"], needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "TF steps every instruction after the one that sets it, up to the one that clears it",
    fn body(ctx) {
        let log = logged(DB, || {
            ctx.run(|| {
                // SAFETY: it changes TF for its own length only.
                unsafe { debug_stepped() }
            });
        });
        check_eq!(log.count(), 5, "steps");
        let steps = [debug_step1, debug_step2, debug_step3, debug_step4, debug_step5];
        for (event, step) in log.events().iter().zip(steps) {
            check_eq!(event.rip, address_of(step), "saved RIP");
            check_eq!(conditions(event.dr6), Dr6::BS.bits(), "DR6");
            check_eq!(event.cpl(), ctx.cpl, "level");
        }
        let images = log.events().iter().map(|e| e.rflags & (Rflags::TF | Rflags::RF).bits());
        let expected = [0x100, 0x100, 0x100, 0x100, 0];
        for (image, expected) in images.zip(expected) {
            check_eq!(image, expected, "TF and RF in the image");
        }
    }
}

case! {
    name: "general_detect", cpl: [0], rules: ["GD-01", "GD-02", "GD-04", "GD-07"], needs: ["gd"],
    about: "with DR7.GD set a read of DR0 raises #DB before it executes; delivery clears GD",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG has no general detect");
        }
        let fault = ctx.run(|| {
            insn::write_dr7(Dr7::RESET.0 | Dr7::GD);
            // SAFETY: it clobbers RAX only, as a C function may.
            unsafe { debug_read_dr0() };
        });
        let after = insn::read_dr7();
        let fault = require_some!(fault, "an exception");
        check_eq!(fault.code(), (1, 0), "vector");
        check_eq!(fault.rip, address_of(debug_read_dr0), "saved RIP");
        check_eq!(conditions(fault.dr6), Dr6::BD.bits(), "DR6");
        check_eq!(after & Dr7::GD, 0, "GD afterwards");
    }
}

case! {
    name: "int3", cpl: [0, 3], rules: ["SWI-01", "D6-08"], needs: [], needs_cpl0: ["int3-cpl0"],
    needs_cpl3: ["int3-cpl3", "iretq-cpl3"],
    about: "INT3 raises #BP with the address after it, and leaves DR6 alone",
    fn body(ctx) {
        insn::write_dr6(Dr6::RESET);
        let log = logged(BP, || {
            ctx.run(|| {
                // SAFETY: the exception is logged and resumed.
                unsafe { debug_int3() }
            });
        });
        check_eq!(log.count(), 1, "exceptions");
        for event in log.events() {
            check_eq!(event.code(), (3, 0), "vector");
            check_eq!(event.rip, address_of(debug_after_int3), "saved RIP");
        }
        check_eq!(insn::read_dr6(), Dr6::RESET, "DR6");
    }
}

case! {
    name: "int1", cpl: [0], rules: ["SWI-03"], needs: ["int1-cpl0", "gd"],
    about: "INT1 raises #DB with the address after it, and sets no condition in DR6",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stops for its own debugger");
        }
        insn::write_dr6(Dr6::RESET);
        let log = logged(DB, || {
            ctx.run(|| {
                // SAFETY: the exception is logged and resumed.
                unsafe { debug_int1() }
            });
        });
        check_eq!(log.count(), 1, "exceptions");
        for event in log.events() {
            check_eq!(event.rip, address_of(debug_after_int1), "saved RIP");
            check_eq!(conditions(event.dr6), 0, "DR6");
        }
    }
}

case! {
    name: "int3_gate_dpl", cpl: [3], rules: ["SWI-02"], needs: ["int3-cpl3", "intn-cpl3", "iretq-cpl3", "gd"],
    about: "INT3 through a gate of DPL 0 raises #GP with error code 1AH",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG shifts the vector by four bits");
        }
        let fault = with_gate(3, |gate| gate.with_dpl(0), || ctx.run(|| {
            // SAFETY: it faults.
            unsafe { debug_int3() }
        }));
        check_eq!(fault.map(|e| e.code()), Some((13, 0x1a)), "vector and error code");
        check_eq!(fault.map(|e| e.rip), Some(address_of(debug_int3)), "saved RIP");
    }
}

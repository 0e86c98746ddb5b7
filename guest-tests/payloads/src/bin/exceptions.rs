//! Exceptions: vectors, error codes and saved addresses, at both levels.
//!
//! SDM Vol. 3A, "Interrupt and Exception Handling". The cases have no rule numbers, because the
//! specification presupposes them.

#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::gdt::{ABSENT_DATA, KERNEL_DATA};
use hindsight_guest::insn;
use hindsight_guest::paging::{self, NX, RW, US};
use hindsight_guest::prelude::*;
use hindsight_guest::trap;
use hindsight_payloads::access::{self, ScratchPage};

payload!("exceptions");

/// Above the 4 GiB that are mapped.
const UNMAPPED: u64 = 0x1_4000_0123;
const NON_CANONICAL: u64 = 0x8000_0000_0000_0000;
/// #PF error code: the page is present.
const PRESENT: u64 = 1 << 0;
/// #PF error code: a write.
const WRITE: u64 = 1 << 1;
/// #PF error code: an instruction fetch.
const FETCH: u64 = 1 << 4;

static PAGE: ScratchPage = ScratchPage::new();

/// The user bit of a #PF error code, for an access at `cpl`.
fn user_bit(cpl: u8) -> u64 {
    if cpl == 3 { 1 << 2 } else { 0 }
}

fn load_ds(selector: u16) {
    // SAFETY: 64-bit code does not use DS, and a load that faults changes nothing.
    unsafe { asm!("mov ds, {:x}", in(reg) selector, options(nostack)) };
}

fn load_ss(selector: u16) {
    // SAFETY: callers pass only selectors whose load faults.
    unsafe { asm!("mov ss, {:x}", in(reg) selector, options(nostack)) };
}

fn expect_page_fault(ctx: &Ctx, fault: Option<CaughtException>, address: u64, error: u64) {
    check_eq!(
        fault.map(|e| e.code()),
        Some((14, error)),
        "vector and error code"
    );
    check_eq!(fault.map(|e| e.cr2), Some(address), "CR2");
    check_eq!(fault.map(|e| e.cpl()), Some(ctx.cpl), "level");
}

case! {
    name: "ud2", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "UD2 raises #UD",
    fn body(ctx) {
        let fault = ctx.run(insn::ud2);
        check_eq!(fault.map(|e| e.code()), Some((6, 0)), "vector and error code");
        check_eq!(fault.map(|e| e.cpl()), Some(ctx.cpl), "level");
    }
}

case! {
    name: "divide_by_zero", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "DIV by zero raises #DE",
    fn body(ctx) {
        let fault = ctx.run(|| {
            // SAFETY: the instruction accesses only registers.
            unsafe { asm!("div {:e}", in(reg) 0, inout("eax") 1 => _, inout("edx") 0 => _) };
        });
        check_eq!(fault.map(|e| e.code()), Some((0, 0)), "vector and error code");
    }
}

case! {
    name: "divide_overflow", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a quotient that does not fit raises #DE and does not change the registers",
    fn body(ctx) {
        let fault = ctx.run(|| {
            // SAFETY: the instruction accesses only registers.
            unsafe { asm!("div {:e}", in(reg) 2, inout("eax") 7 => _, inout("edx") 9 => _) };
        });
        let fault = require_some!(fault, "exception raised");
        check_eq!(fault.code(), (0, 0), "vector and error code");
        check_eq!((fault.frame.rax, fault.frame.rdx), (7, 9), "RAX and RDX");
    }
}

case! {
    name: "pf_read_absent", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a load from an absent page raises #PF",
    fn body(ctx) {
        let fault = ctx.run(|| { access::load(UNMAPPED); });
        expect_page_fault(ctx, fault, UNMAPPED, user_bit(ctx.cpl));
    }
}

case! {
    name: "pf_write_absent", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a store to an absent page raises #PF",
    fn body(ctx) {
        let fault = ctx.run(|| access::store(UNMAPPED, 1));
        expect_page_fault(ctx, fault, UNMAPPED, WRITE | user_bit(ctx.cpl));
    }
}

case! {
    name: "pf_fetch_absent", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a fetch from an absent page raises #PF",
    fn body(ctx) {
        let fault = ctx.run(|| access::call(UNMAPPED));
        expect_page_fault(ctx, fault, UNMAPPED, FETCH | user_bit(ctx.cpl));
        check_eq!(fault.map(|e| e.rip), Some(UNMAPPED), "saved RIP");
    }
}

case! {
    name: "pf_write_read_only", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a store to a read-only page raises #PF, with CR0.WP at CPL 0 too",
    fn body(ctx) {
        let old = paging::change(PAGE.address(), 0, RW);
        access::load(PAGE.address());
        let fault = ctx.run(|| access::store(PAGE.address() + 5, 1));
        paging::restore(PAGE.address(), old);
        expect_page_fault(ctx, fault, PAGE.address() + 5, PRESENT | WRITE | user_bit(ctx.cpl));
    }
}

case! {
    name: "pf_supervisor_page", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a load from a supervisor page raises #PF at CPL 3",
    fn body(ctx) {
        let old = paging::change(PAGE.address(), 0, US);
        let fault = ctx.run(|| { access::load(PAGE.address() + 7); });
        paging::restore(PAGE.address(), old);
        if ctx.cpl == 0 {
            check!(fault.is_none(), "no exception at CPL 0");
        } else {
            expect_page_fault(ctx, fault, PAGE.address() + 7, PRESENT | user_bit(3));
        }
    }
}

case! {
    name: "pf_execute_disabled", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a fetch from a page with XD set raises #PF",
    fn body(ctx) {
        access::store(PAGE.address(), 0xc3);
        let old = paging::change(PAGE.address(), NX, 0);
        let fault = ctx.run(|| access::call(PAGE.address()));
        paging::restore(PAGE.address(), old);
        expect_page_fault(ctx, fault, PAGE.address(), PRESENT | FETCH | user_bit(ctx.cpl));
        let fault = ctx.run(|| access::call(PAGE.address()));
        check!(fault.is_none(), "no exception with XD clear");
    }
}

case! {
    name: "gp_non_canonical", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a load from a non-canonical address raises #GP(0)",
    fn body(ctx) {
        let fault = ctx.run(|| { access::load(NON_CANONICAL); });
        check_eq!(fault.map(|e| e.code()), Some((13, 0)), "vector and error code");
    }
}

case! {
    name: "ss_non_canonical", cpl: [0, 3], rules: [], needs: ["exceptions", "gd"], needs_cpl3: ["iretq-cpl3"],
    about: "a load from a non-canonical address relative to RBP raises #SS(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG raises #GP");
        }
        let fault = ctx.run(|| {
            // SAFETY: the load faults, and the return to the catch restores RBP.
            unsafe {
                asm!("push rbp", "mov rbp, {}", "mov al, [rbp]", "pop rbp",
                    in(reg) NON_CANONICAL, out("al") _);
            }
        });
        check_eq!(fault.map(|e| e.code()), Some((12, 0)), "vector and error code");
    }
}

case! {
    name: "gp_bad_selector", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "a selector beyond the GDT raises #GP with the selector as its error code",
    fn body(ctx) {
        let fault = ctx.run(|| load_ds(0xfff8));
        check_eq!(fault.map(|e| e.code()), Some((13, 0xfff8)), "vector and error code");
    }
}

case! {
    name: "np_absent_segment", cpl: [0], rules: [], needs: ["exceptions"],
    about: "an absent segment raises #NP for DS and #SS for SS",
    fn body(ctx) {
        let absent = u64::from(ABSENT_DATA);
        let fault = ctx.run(|| load_ds(ABSENT_DATA));
        check_eq!(fault.map(|e| e.code()), Some((11, absent)), "DS");
        let fault = ctx.run(|| load_ss(ABSENT_DATA));
        check_eq!(fault.map(|e| e.code()), Some((12, absent)), "SS");
    }
}

case! {
    name: "gp_kernel_segment", cpl: [3], rules: [], needs: ["exceptions", "iretq-cpl3"],
    about: "a load of a data segment of CPL 0 at CPL 3 raises #GP",
    fn body(ctx) {
        let fault = ctx.run(|| load_ds(KERNEL_DATA));
        check_eq!(fault.map(|e| e.code()), Some((13, u64::from(KERNEL_DATA))), "vector and error code");
    }
}

case! {
    name: "gp_privileged", cpl: [3], rules: ["DR-14"], needs: ["exceptions", "iretq-cpl3"],
    about: "privileged instructions at CPL 3 raise #GP(0)",
    fn body(ctx) {
        let privileged: [(&str, fn()); 9] = [
            ("HLT", insn::hlt),
            ("CLI", insn::cli),
            ("STI", insn::sti),
            ("MOV from CR0", || { insn::read_cr0(); }),
            ("MOV to CR2", || insn::write_cr2(0)),
            ("MOV from DR7", || { insn::read_dr7(); }),
            ("MOV to DR0", || insn::write_dr0(0)),
            ("RDMSR", || { hindsight_guest::msr::read(0x10); }),
            ("IN", || { hindsight_guest::port::inb(0x80); }),
        ];
        for (name, f) in privileged {
            let fault = ctx.run(f);
            check_eq!(fault.map(|e| e.code()), Some((13, 0)), name);
        }
    }
}

case! {
    name: "double_fault", cpl: [0], rules: ["DB-17"], needs: ["exceptions"],
    about: "a page fault in the delivery of a page fault raises #DF, on a stack of its own",
    fn body(ctx) {
        let fault = ctx.run(|| {
            // SAFETY: the return to the catch restores RSP.
            unsafe { asm!("mov rsp, {}", "ud2", in(reg) UNMAPPED & !0xf, options(noreturn)) };
        });
        check_eq!(fault.map(|e| e.code()), Some((8, 0)), "vector and error code");
    }
}

/// CPL of the interrupted code, and above it the vector.
static LAST_EVENT: AtomicU64 = AtomicU64::new(0);

fn record_event(frame: &mut TrapFrame) {
    LAST_EVENT.store(frame.cs & 3 | frame.vector << 8, Ordering::Release);
}

case! {
    name: "int_n", cpl: [0, 3], rules: [], needs: [], needs_cpl0: ["intn-cpl0"],
    needs_cpl3: ["intn-cpl3", "iretq-cpl3"],
    about: "INT 80H enters a gate of DPL 3 from both levels",
    fn body(ctx) {
        trap::set_handler(0x80, record_event);
        LAST_EVENT.store(0, Ordering::Release);
        let fault = ctx.run(|| {
            // SAFETY: the handler changes no register and returns to the next instruction.
            unsafe { asm!("int 0x80") };
        });
        check!(fault.is_none(), "no exception");
        check_eq!(LAST_EVENT.load(Ordering::Acquire), u64::from(ctx.cpl) | 0x8000, "vector and level");
    }
}

case! {
    name: "int_n_gate_dpl", cpl: [3], rules: ["SWI-02"], needs: ["intn-cpl3", "iretq-cpl3", "gd"],
    about: "INT 20H through a gate of DPL 0 raises #GP with the vector in its error code",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG shifts the vector by four bits");
        }
        let fault = ctx.run(|| {
            // SAFETY: it faults, and the exception is caught.
            unsafe { asm!("int 0x20") };
        });
        check_eq!(fault.map(|e| e.code()), Some((13, 0x102)), "vector and error code");
    }
}

//! Data breakpoints.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic;
use hindsight_guest::catch::logged;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, DEFAULT_BASE};
use hindsight_guest::regs::dr::{Condition, Dr6, Length};
use hindsight_guest::regs::msr::{IA32_FS_BASE, IA32_GS_BASE};
use hindsight_guest::{insn, paging, trap};
use hindsight_payloads::access::{self, ScratchPage};
use hindsight_payloads::debug::{self, DB, arm, at, conditions, event, events};
use hindsight_payloads::{check_events, snippet};

payload!("wp");

static PAGE: ScratchPage = ScratchPage::new();
static OTHER: ScratchPage = ScratchPage::new();

const B0: u64 = Dr6::B0.bits();
const B1: u64 = Dr6::B1.bits();
const B2: u64 = Dr6::B2.bits();
const B3: u64 = Dr6::B3.bits();

macro_rules! accesses {
    ($($load:ident $store:ident $pointer:literal $register:literal;)+) => {
        $(
            snippet! { $load [] concat!("mov ", $register, ", ", $pointer, " ptr [rdi]"), "ret" }
            snippet! { $store [] concat!("mov ", $pointer, " ptr [rdi], ", $register), "ret" }
        )+
    };
}

accesses! {
    load1 store1 "byte" "al";
    load2 store2 "word" "ax";
    load4 store4 "dword" "eax";
    load8 store8 "qword" "rax";
}

snippet! { add_zero [add_zero_next] "add dword ptr [rdi], 0", "add_zero_next:", "ret" }
snippet! { lock_xadd [lock_xadd_next] "xor eax, eax", "lock xadd [rdi], eax", "lock_xadd_next:", "ret" }
snippet! { exchange [exchange_next] "xor eax, eax", "xchg [rdi], eax", "exchange_next:", "ret" }
snippet! { compare_fails [compare_fails_next] "mov eax, [rdi + 64]", "not eax", "cmpxchg [rdi], ecx",
    "compare_fails_next:", "ret"
}
snippet! { rep_none [] "xor ecx, ecx", "rep stosb", "xor ecx, ecx", "mov rsi, rdi", "rep lodsb", "ret" }
snippet! { no_access [] "lea rax, [rdi]", "nop dword ptr [rdi]", "prefetcht0 [rdi]", "prefetchnta [rdi]",
    "ret"
}
snippet! { flush_lines [] "clflush [rdi]", "ret" }
snippet! { invalidate [] "invlpg [rdi]", "ret" }
snippet! { call_code [] "sub rsp, 8", "call rdi", "add rsp, 8", "ret" }
// RDI: a stack.
snippet! { stack_push [stack_push_next] "xchg rsp, rdi", "push rax", "stack_push_next:", "add rsp, 8",
    "xchg rsp, rdi", "ret"
}
snippet! { stack_pop [stack_pop_next] "xchg rsp, rdi", "sub rsp, 8", "pop rax", "stack_pop_next:",
    "xchg rsp, rdi", "ret"
}
snippet! { stack_call [stack_called] "xchg rsp, rdi", "call stack_called", "stack_called:", "add rsp, 8",
    "xchg rsp, rdi", "ret"
}
snippet! { stack_ret [stack_returned] "lea rax, [rip + stack_returned]", "mov [rdi - 8], rax",
    "xchg rsp, rdi", "sub rsp, 8",
    "ret", "stack_returned:", "xchg rsp, rdi", "ret"
}
snippet! { stack_enter [stack_enter_next] "mov rax, rbp", "xchg rsp, rdi", "enter 0, 0",
    "stack_enter_next:", "add rsp, 8", "xchg rsp, rdi", "mov rbp, rax", "ret"
}
snippet! { rep_store [rep_store_insn rep_store_next] "mov rcx, rsi", "xor eax, eax", "rep_store_insn:",
    "rep stosb", "rep_store_next:", "ret"
}
snippet! { rep_copy [rep_copy_insn rep_copy_next] "mov ecx, 6", "rep_copy_insn:", "rep movsw",
    "rep_copy_next:", "ret"
}
snippet! { fs_store [fs_store_next] "mov byte ptr fs:[rsi], 3", "fs_store_next:", "ret" }
snippet! { gs_load [gs_load_next] "mov al, gs:[rsi]", "gs_load_next:", "ret" }
snippet! { mmio_load [mmio_load_next] "mov eax, [rdi]", "mmio_load_next:", "ret" }
snippet! { mmio_store [mmio_store_next] "mov [rdi], esi", "mmio_store_next:", "ret" }

/// The conditions that one run of a sequence reports, 0 if it reports nothing.
fn reported(ctx: &hindsight_guest::case::Ctx, code: debug::SnippetFn, first: u64) -> u64 {
    let log = logged(DB, || {
        debug::run(ctx, code, first, 0);
    });
    event(log, 0).1
}

case! {
    name: "worked_example", cpl: [0, 3], rules: ["WP-02", "WP-03", "WP-05", "WP-06", "WP-07", "WP-09"],
    needs: ["guestbp-data"], needs_cpl3: ["iretq-cpl3"],
    about: "the accesses of the manual's example match as it says",
    fn body(ctx) {
        // The addresses of the example, with the pages that it leaves out close together.
        let base = PAGE.address();
        let (ten, thirty, forty) = (base + 0x100, base + 0x300, base + 0x400);
        arm(0, ten + 1, Condition::ReadWrite, Length::One);
        debug::arm_also(1, ten + 2, Condition::Write, Length::One);
        debug::arm_also(2, thirty + 2, Condition::ReadWrite, Length::Two);
        debug::arm_also(3, forty + 5, Condition::Write, Length::Four);
        let table: [(&str, debug::SnippetFn, u64, u64); 16] = [
            ("read 1 byte at 10001H", load1, ten + 1, B0),
            ("read 4 bytes at 10000H", load4, ten, B0),
            ("write 2 bytes at 10001H", store2, ten + 1, B0 | B1),
            ("write 8 bytes at 0FFFAH", store8, ten - 6, B0),
            ("read 4 bytes at 30000H", load4, thirty, B2),
            ("read 2 bytes at 30000H", load2, thirty, 0),
            ("write 1 byte at 40004H", store1, forty + 4, B3),
            ("write 4 bytes at 40000H", store4, forty, 0),
            ("write 8 bytes at 40007H", store8, forty + 7, B3),
            ("read 1 byte at 10002H", load1, ten + 2, 0),
            ("write 1 byte at 10002H", store1, ten + 2, B1),
            ("write 1 byte at 30003H", store1, thirty + 3, B2),
            ("read 8 bytes at 40000H", load8, forty, 0),
            ("write 8 bytes at 40000H", store8, forty, B3),
            ("write 1 byte at 40008H", store1, forty + 8, 0),
            ("write 1 byte at 10000H", store1, ten, 0),
        ];
        for (label, code, address, expected) in table {
            check_eq!(reported(ctx, code, address), expected, label);
        }
    }
}

case! {
    name: "two_at_once", cpl: [0, 3], rules: ["WP-08", "WP-09", "DB-12"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "two breakpoints cover a region that is not aligned, and one access may meet both",
    fn body(ctx) {
        let base = PAGE.address() + 0x40;
        arm(0, base + 6, Condition::Write, Length::Two);
        debug::arm_also(1, base + 8, Condition::Write, Length::Two);
        for (address, code, expected) in [
            (base + 6, store4 as debug::SnippetFn, B0 | B1),
            (base + 7, store2, B0 | B1),
            (base + 5, store1, 0),
            (base + 9, store1, B1),
            (base + 10, store4, 0),
        ] {
            check_eq!(reported(ctx, code, address), expected, "conditions");
        }
    }
}

case! {
    name: "every_range", cpl: [0], rules: ["WP-05", "WP-06", "WP-07", "DR-23"], needs: ["guestbp-data"],
    about: "every length at every offset, with accesses of every size around it, matches by overlap",
    fn body(ctx) {
        let base = PAGE.address() + 0x80;
        let sizes = [(1, store1 as debug::SnippetFn), (2, store2), (4, store4), (8, store8)];
        for (length, bytes) in [(Length::One, 1), (Length::Two, 2), (Length::Four, 4), (Length::Eight, 8)] {
            for offset in [0, 3, 6] {
                arm(2, base + offset, Condition::Write, length);
                let from = (base + offset) & !(bytes - 1);
                for (size, code) in sizes {
                    for address in base - 9..base + 17 {
                        let overlaps = address < from + bytes && from < address + size;
                        let expected = if overlaps { B2 } else { 0 };
                        require_eq!(reported(ctx, code, address), expected, "conditions");
                    }
                }
            }
        }
    }
}

case! {
    name: "read_modify_write", cpl: [0, 3], rules: ["WP-10", "WP-15", "WP-04", "DR-30"],
    needs: ["guestbp-data"], needs_cpl3: ["iretq-cpl3"],
    about: "ADD, LOCK XADD, XCHG and a failing CMPXCHG match as reads and as writes",
    fn body(ctx) {
        let address = PAGE.address();
        for (code, next) in [
            (add_zero as debug::SnippetFn, add_zero_next as debug::SnippetLabel),
            (lock_xadd, lock_xadd_next),
            (exchange, exchange_next),
            (compare_fails, compare_fails_next),
        ] {
            for condition in [Condition::Write, Condition::ReadWrite] {
                arm(0, address, condition, Length::Four);
                check_events!(events(ctx, code, address, 0), [(at(next), B0)], "one #DB");
            }
        }
    }
}

case! {
    name: "stack", cpl: [0, 3], rules: ["WP-11"], needs: ["guestbp-data"], needs_cpl3: ["iretq-cpl3"],
    about: "PUSH, CALL and ENTER match as writes, POP and RET as reads",
    fn body(ctx) {
        let stack = PAGE.address() + 0x800;
        for (code, next, offset, condition) in [
            (stack_push as debug::SnippetFn, stack_push_next as debug::SnippetLabel, 8, Condition::Write),
            (stack_call, stack_called, 8, Condition::Write),
            (stack_enter, stack_enter_next, 8, Condition::Write),
            (stack_pop, stack_pop_next, 8, Condition::ReadWrite),
        ] {
            arm(1, stack - offset, condition, Length::Eight);
            check_events!(events(ctx, code, stack, 0), [(at(next), B1)], "one #DB");
        }
        arm(1, stack - 8, Condition::ReadWrite, Length::Eight);
        let log = events(ctx, stack_ret, stack, 0);
        check_eq!(log.count(), 2, "the store of the address, and RET");
        check_eq!(event(log, 1), (at(stack_returned), B1), "RET");
    }
}

case! {
    name: "repeated_store", cpl: [0, 3], rules: ["WP-12", "WP-13", "WP-14", "OP-44"],
    needs: ["guestbp-data", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "REP STOSB stops after exactly the iteration that touched the byte",
    fn body(ctx) {
        let base = PAGE.address() + 0x200;
        for touched in 0..5 {
            arm(0, base + touched, Condition::Write, Length::One);
            let log = events(ctx, rep_store, base, 5);
            let rip = if touched == 4 { at(rep_store_next) } else { at(rep_store_insn) };
            check_events!(log, [(rip, B0)], "one #DB");
            let registers = log.events().first().map(|e| (e.frame.rcx, e.frame.rdi));
            check_eq!(registers, Some((4 - touched, base + touched + 1)), "RCX and RDI");
        }
    }
}

case! {
    name: "repeated_copy", cpl: [0, 3], rules: ["WP-12", "WP-13"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "REP MOVSW that touches a watched source has consistent registers, and ends complete",
    fn body(ctx) {
        let (from, to) = (PAGE.address() + 0x300, OTHER.address() + 0x300);
        for n in 0..12 {
            access::store(from + n, 0x30 + u8::try_from(n).unwrap_or(0));
            access::store(to + n, 0);
        }
        arm(3, from + 4, Condition::ReadWrite, Length::Two);
        let log = logged(DB, || { debug::run(ctx, rep_copy, to, from); });
        debug::disarm();
        require_eq!(log.count(), 1, "count of #DBs");
        let Some(e) = log.events().first() else { return };
        let done = 6 - e.frame.rcx;
        check!(done >= 3, "the count is at or past the iteration");
        check_eq!((e.frame.rsi, e.frame.rdi), (from + 2 * done, to + 2 * done), "RSI and RDI");
        check_eq!(e.rip, if done == 6 { at(rep_copy_next) } else { at(rep_copy_insn) }, "saved RIP");
        check_eq!([0, 4, 11].map(|n| access::load(to + n)), [0x30, 0x34, 0x3b], "the copy");
    }
}

case! {
    name: "no_access_no_match", cpl: [0, 3], rules: ["WP-15", "WP-16", "OP-04"],
    needs: ["guestbp-data", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "REP with RCX=0, LEA, NOP, PREFETCH, CLFLUSH, INVLPG and page walks do not match",
    fn body(ctx) {
        let address = PAGE.address();
        for code in [rep_none as debug::SnippetFn, no_access, flush_lines] {
            arm(0, address, Condition::ReadWrite, Length::Eight);
            check_events!(events(ctx, code, address, 0), [], "no #DB");
        }
        // A page walk reads the entry, and sets its accessed bit.
        let entry = paging::entry(OTHER.address()) as u64;
        paging::change(OTHER.address(), 0, paging::A | paging::D);
        arm(0, entry, Condition::ReadWrite, Length::Eight);
        check_events!(events(ctx, store1, OTHER.address(), 0), [], "a page walk");
        if ctx.cpl == 0 {
            arm(0, address, Condition::ReadWrite, Length::Eight);
            check_events!(events(ctx, invalidate, address, 0), [], "INVLPG");
        }
    }
}

case! {
    name: "fetches_do_not_match", cpl: [0, 3], rules: ["WP-03", "D6-09"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "R/W=11 on code does not match its execution, only an access to it",
    fn body(ctx) {
        let code = PAGE.address() + 0x500;
        access::store(code, 0x90);
        access::store(code + 1, 0xc3);
        arm(0, code, Condition::ReadWrite, Length::Two);
        check_events!(events(ctx, call_code, code, 0), [], "executed");
        arm(0, code, Condition::ReadWrite, Length::Two);
        check_eq!(reported(ctx, load1, code), B0, "read");
        debug::disarm();
    }
}

case! {
    name: "segments", cpl: [0, 3], rules: ["WP-17"], needs: ["guestbp-data", "gd"],
    needs_cpl3: ["iretq-cpl3"],
    about: "accesses through FS and GS match by their linear address",
    fn body(ctx) {
        let gs = msr::read(IA32_GS_BASE);
        let fs = msr::read(IA32_FS_BASE);
        let address = PAGE.address() + 0x60;
        msr::write(IA32_FS_BASE, address - 0x1234);
        arm(0, address, Condition::Write, Length::One);
        check_events!(events(ctx, fs_store, 0, 0x1234), [(at(fs_store_next), B0)], "FS");
        msr::write(IA32_FS_BASE, fs);
        arm(0, address, Condition::ReadWrite, Length::One);
        check_events!(events(ctx, gs_load, 0, address.wrapping_sub(gs)), [(at(gs_load_next), B0)], "GS");
    }
}

static HANDLER_VALUE: AtomicU64 = AtomicU64::new(0);

fn record_value(_frame: &mut TrapFrame) {
    HANDLER_VALUE.store(
        u64::from(access::load(PAGE.address())) << 32 | conditions(insn::read_dr6()),
        Ordering::Relaxed,
    );
    debug::disarm();
}

case! {
    name: "old_value_is_gone", cpl: [0, 3], rules: ["WP-18", "WP-01"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "the handler finds the new value in memory",
    fn body(ctx) {
        access::store(PAGE.address(), 11);
        trap::set_handler(1, record_value);
        arm(0, PAGE.address(), Condition::Write, Length::One);
        ctx.run(|| access::store(PAGE.address(), 22));
        check_eq!(HANDLER_VALUE.load(Ordering::Relaxed), 22 << 32 | B0, "value and conditions in the handler");
    }
}

case! {
    name: "device_memory", cpl: [0, 3], rules: ["WP-19", "IOB-07"], needs: ["guestbp-data", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "loads and stores of a device's registers match like others, and are done",
    fn body(ctx) {
        let register = DEFAULT_BASE + u64::from(ApicRegister::TPR.0);
        arm(0, register, Condition::ReadWrite, Length::Four);
        check_events!(events(ctx, mmio_load, register, 0), [(at(mmio_load_next), B0)], "load");
        arm(0, register, Condition::Write, Length::Four);
        check_events!(events(ctx, mmio_store, register, 0x20), [(at(mmio_store_next), B0)], "store");
        check_eq!(apic::read(ApicRegister::TPR), 0x20, "the register");
        apic::write(ApicRegister::TPR, 0);
        arm(0, register, Condition::Write, Length::Four);
        check_events!(events(ctx, mmio_load, register, 0), [], "a load with R/W=01");
    }
}

snippet! { one_int3 [] "int3", "ret" }
snippet! { one_ud2 [] "ud2" }

case! {
    name: "pushes_of_events", cpl: [3], rules: ["OP-08"],
    needs: ["guestbp-data", "guestbp-io", "iretq-cpl3"],
    about: "a breakpoint that the frame of INT3 meets reports at the entry of its handler; that of an \
        exception is lost",
    fn body(ctx) {
        let top = PAGE.address() + 4096;
        let old = hindsight_guest::cpu::set_rsp0(top);
        arm(0, top - 8, Condition::Write, Length::Eight);
        let log = logged(DB | debug::BP, || { debug::run(ctx, one_int3, 0, 0); });
        check_eq!(event(log, 0), (hindsight_guest::vectors::entry(3), B0), "at the handler");
        check_eq!(log.events().get(1).map(|e| e.vector), Some(3), "then the #BP");
        // The end of the call writes to the frame too: what counts is the entry of the handler.
        let log = logged(DB, || { debug::run(ctx, one_ud2, 0, 0); });
        let at_handler = |e: &hindsight_guest::exception::CaughtException| e.rip == hindsight_guest::vectors::entry(6);
        check!(!log.events().iter().any(at_handler), "none at the handler of #UD");
        debug::disarm();
        hindsight_guest::cpu::set_rsp0(old);
    }
}

snippet! { load_es [] "mov es, di", "xor eax, eax", "mov es, eax", "ret" }

case! {
    name: "descriptor_tables", cpl: [0, 3], rules: ["OP-04"], needs: ["guestbp-data", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "the processor's own reads of the GDT do not match",
    fn body(ctx) {
        let mut pointer = [0_u8; 10];
        // SAFETY: it stores ten bytes.
        unsafe { core::arch::asm!("sgdt [{}]", in(reg) &raw mut pointer, options(nostack)) };
        let base = pointer[2..].iter().rev().fold(0, |base, byte| base << 8 | u64::from(*byte));
        let selector = u64::from(hindsight_guest::gdt::USER_DATA);
        arm(0, base + (selector & !7), Condition::ReadWrite, Length::Eight);
        check_events!(events(ctx, load_es, selector, 0), [], "no #DB");
    }
}

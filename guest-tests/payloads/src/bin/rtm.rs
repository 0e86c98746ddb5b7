//! Transactions: what commits, what aborts and how that shows in registers, memory, debug
//! exceptions, branch records and counters.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hindsight_guest::case::Ctx;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_SELF};
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::EventSelect;
use hindsight_guest::regs::pmu::pebs::record;
use hindsight_guest::trap;
use hindsight_guest::{apic, insn, msr, smp};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{self, BS, SnippetFn, arm, arm_at, at, conditions, saved_rf};
use hindsight_payloads::lbr::LbrStack;
use hindsight_payloads::pmu::{self, ON, PebsArea};
use hindsight_payloads::{need_lbr, need_pebs, need_pmu, snippet};

payload!("rtm");

/// The EAX of a sequence whose transaction was not aborted.
const STARTED: u64 = 0xffff_ffff;
const EXPLICIT: u64 = 1;
const RETRY: u64 = 1 << 1;
const CONFLICT: u64 = 1 << 2;
const CAPACITY: u64 = 1 << 3;
const DEBUG: u64 = 1 << 4;
const NESTED: u64 = 1 << 5;

/// DR6.RTM, DR7.RTM and IA32_DEBUGCTL.RTM.
const DR6_RTM: u64 = Dr6::RTM.bits();
const DR7_RTM: u64 = Dr7::RTM;
const CTL_RTM: u64 = 1 << 15;

/// LBR_INFO: the record of an abort, and a branch in a transaction.
const TSX_ABORT: u64 = 1 << 61;
const IN_TSX: u64 = 1 << 62;

static PAGE: ScratchPage = ScratchPage::new();
static PAGES: [ScratchPage; 9] = [const { ScratchPage::new() }; 9];

// Each sequence is given an address in RDI, and returns EAX: its value before XBEGIN, or the
// status of the abort.
snippet! { store [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "xend", "9:", "ret" }
snippet! { store_abort [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "mov rdi, 5", "xabort 0x5a", "xend",
    "9:", "mov [rsi], rdi", "ret"
}
snippet! { store_plain [plain_next] "mov byte ptr [rdi], 1", "plain_next:", "mov eax, -1", "ret" }
snippet! { test_inside [] "xor eax, eax", "xtest", "setz al", "xbegin 9f", "xtest", "setz ah", "xend",
    "9:", "ret"
}
snippet! { nested_abort [] "mov eax, -1", "xbegin 9f", "xbegin 8f", "mov byte ptr [rdi], 1", "xabort 7", "xend",
    "8:", "xend", "9:", "ret"
}
snippet! { nested_seven [] "mov eax, -1", ".rept 7", "xbegin 9f", ".endr", "mov byte ptr [rdi], 1",
    ".rept 7", "xend", ".endr", "9:", "ret"
}
snippet! { nested_eight [] "mov eax, -1", ".rept 8", "xbegin 9f", ".endr", "mov byte ptr [rdi], 1",
    ".rept 8", "xend", ".endr", "9:", "ret"
}
snippet! { pages [] "mov eax, -1", "xbegin 9f", "2:", "mov byte ptr [rdi], 1", "add rdi, 4096", "dec esi", "jnz 2b",
    "xend", "9:", "ret"
}
snippet! { outside [] "xabort 1", "mov eax, -1", "xend", "ret" }
snippet! { pause [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "pause", "xend", "9:", "ret" }
snippet! { cpuid [] "push rbx", "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "cpuid", "xend", "9:",
    "pop rbx", "ret"
}
snippet! { undefined [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "ud2", "xend", "9:", "ret" }
snippet! { no_page [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "mov rcx, 0x1000000000000000",
    "mov al, [rcx]", "xend", "9:", "ret"
}
snippet! { port [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "in al, 0x80", "xend", "9:", "ret" }
snippet! { device [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "mov ecx, 0xfee00020",
    "mov ecx, [rcx]", "xend", "9:", "ret"
}
snippet! { x87 [] "mov eax, -1", "xbegin 9f", "mov byte ptr [rdi], 1", "fld1", "xend", "9:", "ret" }
snippet! { interrupted [] "mov eax, -1", "sti", "xbegin 9f", "mov byte ptr [rdi], 1", "xend", "9:", "cli", "ret" }
snippet! { watch [] "mov eax, -1", "xbegin 9f", "2:", "mov rcx, [rdi]", "cmp rcx, [rdi]", "je 2b", "xend", "9:",
    "ret"
}
snippet! { count_one [] "mov eax, -1", "xbegin 9f", "inc qword ptr [rdi]", "xend", "9:", "ret" }

// For debug exceptions: a store and a breakpoint instruction in a transaction, with labels.
snippet! { stored [stored_begin stored_end] "mov eax, -1", "stored_begin:", "xbegin 9f", "mov byte ptr [rdi], 1",
    "stored_end:", "xend", "9:", "ret"
}
snippet! { int3_inside [int3_begin] "mov eax, -1", "int3_begin:", "xbegin 9f", "mov byte ptr [rdi], 1", "int3",
    "xend", "9:", "ret"
}
snippet! { int1_inside [int1_begin] "mov eax, -1", "int1_begin:", "xbegin 9f", "mov byte ptr [rdi], 1",
    ".byte 0xf1", "xend", "9:", "ret"
}
snippet! { int3_outside [] "int3", "mov eax, -1", "ret" }
// TF is set where it begins: the step of XBEGIN is the first in the transaction. Whoever calls it
// clears TF.
snippet! { stepped [stepped_begin] "mov eax, -1", "pushfq", "pushfq", "or qword ptr [rsp], 0x100", "popfq",
    "stepped_begin:", "xbegin 9f", "mov byte ptr [rdi], 1", "xend", "9:", "popfq", "ret"
}
// For branch records and counters.
snippet! { jump_abort [jump_from abort_from abort_to] "mov eax, -1", "xbegin abort_to", "jump_from:", "jmp abort_from",
    "abort_from:", "xabort 0", "xend", "abort_to:", "ret"
}
snippet! { ten_nops [] "mov eax, -1", "xbegin 9f", ".rept 10", "nop", ".endr", "xend", "9:", "ret" }
snippet! { ten_nops_abort [nops_begin nops_to] "mov eax, -1", "nops_begin:", "xbegin nops_to", ".rept 10", "nop",
    ".endr", "xabort 0", "nops_to:", "ret"
}

macro_rules! need_rtm {
    ($ctx:ident) => {
        need_feature!($ctx, RTM);
    };
}

fn address() -> u64 {
    PAGE.address()
}

/// The byte that the sequences write, which becomes 0 again.
fn written() -> u8 {
    let at = address() as *mut u8;
    // SAFETY: a page of this payload.
    unsafe { core::ptr::replace(at, 0) }
}

/// Runs a sequence at the level of this run, and returns EAX.
fn eax(ctx: &Ctx, code: SnippetFn, second: u64) -> u64 {
    let mut found = 0;
    // SAFETY: sequences keep the C rules.
    let ended = ctx.run(|| found = unsafe { code(address(), second) });
    check!(ended.is_none(), "no exception is delivered");
    found & 0xffff_ffff
}

case! {
    name: "announced", cpl: [0], rules: ["CPU-05"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "CPUID shows RTM and HLE together",
    fn body(ctx) {
        need_rtm!(ctx);
        check!(insn::has(Feature::HLE), "HLE");
    }
}

case! {
    name: "commit", cpl: [0, 3], rules: [], needs: ["guestbp-io"], cpu: "+rtm",
    about: "stores become visible at XEND; XTEST tells inside from outside; XABORT outside does nothing, XEND faults",
    fn body(ctx) {
        need_rtm!(ctx);
        check_eq!(eax(ctx, store, 0), STARTED, "EAX");
        check_eq!(written(), 1, "the store");
        check_eq!(eax(ctx, test_inside, 0), 1, "ZF outside, and inside");
        let ended = debug::run(ctx, outside, 0, 0);
        check_eq!(ended.map(|e| (e.vector, e.error)), Some((13, 0)), "XEND outside");
    }
}

case! {
    name: "xabort", cpl: [0, 3], rules: [], needs: ["guestbp-io"], cpu: "+rtm",
    about: "XABORT takes registers and memory back, and its operand is in EAX",
    fn body(ctx) {
        need_rtm!(ctx);
        let mut stored = 0_u64;
        let found = eax(ctx, store_abort, (&raw mut stored) as u64);
        check_eq!(found, 0x5a00_0000 | EXPLICIT, "EAX");
        // SAFETY: a variable of this frame.
        check_eq!(unsafe { (&raw const stored).read_volatile() }, address(), "RDI at the fallback address");
        check_eq!(written(), 0, "the store");
        check_eq!(eax(ctx, nested_abort, 0), 0x0700_0000 | EXPLICIT | NESTED, "in a nested region");
        check_eq!(written(), 0, "the nested store");
    }
}

case! {
    name: "virtual_clock", cpl: [0, 3], rules: ["RTM-09"], needs: ["guestbp-io"], cpu: "portable-v1,+rtm", clock: "virtual",
    about: "in a deterministic run every XBEGIN aborts at once, with 0 in EAX",
    fn body(ctx) {
        need_rtm!(ctx);
        check_eq!(eax(ctx, store, 0), 0, "EAX");
        check_eq!(written(), 0, "the store");
        check_eq!(eax(ctx, test_inside, 0) & 0xff, 0, "EAX of another one");
    }
}

case! {
    name: "nesting", cpl: [0, 3], rules: [], needs: ["guestbp-io"], cpu: "+rtm",
    about: "seven regions nest, eight do not",
    fn body(ctx) {
        need_rtm!(ctx);
        check_eq!(eax(ctx, nested_seven, 0), STARTED, "seven");
        check_eq!(written(), 1, "their store");
        check_eq!(eax(ctx, nested_eight, 0) & !CAPACITY, NESTED, "eight");
        check_eq!(written(), 0, "their store");
    }
}

case! {
    name: "capacity", cpl: [0, 3], rules: [], needs: ["guestbp-io"], cpu: "+rtm",
    about: "more written lines of one set than the first level of cache has ways",
    fn body(ctx) {
        need_rtm!(ctx);
        let first = PAGES[0].address();
        for (count, capacity) in [(8, 0), (9, CAPACITY)] {
            let mut found = 0;
            // SAFETY: the sequence keeps the C rules; the pages are this payload's.
            ctx.run(|| found = unsafe { pages(first, count) });
            if capacity == 0 {
                check_eq!(found, STARTED, "as many as there are ways");
            } else {
                check_eq!(found & (EXPLICIT | CONFLICT | CAPACITY | DEBUG), CAPACITY, "one more");
            }
        }
    }
}

case! {
    name: "unfit", cpl: [0, 3], rules: [], needs: ["guestbp-io"], cpu: "+rtm",
    about: "instructions and accesses that abort, and exceptions that are not delivered",
    fn body(ctx) {
        need_rtm!(ctx);
        let codes: [SnippetFn; 7] = [pause, cpuid, undefined, no_page, port, device, x87];
        for code in codes {
            check_eq!(eax(ctx, code, 0) & !RETRY, 0, "EAX");
            check_eq!(written(), 0, "the store");
        }
    }
}

static TAKEN: AtomicU32 = AtomicU32::new(0);
const VECTOR: u8 = 0x61;

fn count(_: &mut TrapFrame) {
    TAKEN.fetch_add(1, Ordering::AcqRel);
    apic::eoi();
}

case! {
    name: "interrupt", cpl: [0], rules: [], needs: ["guestbp-io"], cpu: "+rtm",
    about: "an interrupt aborts, and is delivered at the fallback address",
    fn body(ctx) {
        need_rtm!(ctx);
        TAKEN.store(0, Ordering::Release);
        trap::set_handler(VECTOR, count);
        apic::enable();
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(VECTOR));
        check_eq!(eax(ctx, interrupted, 0) & !RETRY, 0, "EAX");
        check_eq!(written(), 0, "the store");
        check_eq!(TAKEN.load(Ordering::Acquire), 1, "count of interrupts");
        apic::disable();
        trap::clear_handler(VECTOR);
    }
}

/// Lines of their own.
#[repr(align(64))]
struct Line(AtomicU64);

static SHARED: Line = Line(AtomicU64::new(0));
static OTHER: Line = Line(AtomicU64::new(0));
static STOP: AtomicU32 = AtomicU32::new(0);

/// Writes to the cache line that processor 0 reads, until processor 0 ends the test.
fn disturb(_: usize) {
    while STOP.load(Ordering::Acquire) == 0 {
        SHARED.0.fetch_add(1, Ordering::AcqRel);
        insn::pause();
    }
}

case! {
    name: "conflict", cpl: [0], rules: [], needs: ["guestbp-io"], vcpus: 2, cpu: "+rtm", timeout_ms: 20000,
    about: "a store of another processor to a line that was read aborts with the conflict bit",
    fn body(ctx) {
        need_rtm!(ctx);
        require!(smp::start(2), "the second processor");
        STOP.store(0, Ordering::Release);
        smp::run(1, disturb);
        let mut found = 0;
        while found & CONFLICT == 0 {
            // SAFETY: the sequence keeps the C rules, and only reads.
            found = unsafe { watch((&raw const SHARED) as u64, 0) };
            if found == STARTED {
                break;
            }
        }
        STOP.store(1, Ordering::Release);
        smp::wait(1);
        check_eq!(found & !RETRY, CONFLICT, "EAX; two loads of a region never differ");
    }
}

/// How often each processor counts.
const ROUNDS: u64 = 500;

/// Counts in transactions, and in another place with LOCK where that does not work.
fn count_up(_: usize) {
    for _ in 0..ROUNDS {
        // SAFETY: the sequence keeps the C rules.
        let found = unsafe { count_one((&raw const SHARED) as u64, 0) };
        if found & 0xffff_ffff != STARTED {
            OTHER.0.fetch_add(1, Ordering::AcqRel);
        }
    }
}

case! {
    name: "isolation", cpl: [0], rules: [], needs: ["guestbp-io"], vcpus: 2, cpu: "+rtm", timeout_ms: 20000,
    about: "what two processors count in transactions is not lost",
    fn body(ctx) {
        need_rtm!(ctx);
        require!(smp::start(2), "the second processor");
        SHARED.0.store(0, Ordering::Release);
        OTHER.0.store(0, Ordering::Release);
        smp::run(1, count_up);
        count_up(0);
        smp::wait(1);
        let sum = SHARED.0.load(Ordering::Acquire) + OTHER.0.load(Ordering::Acquire);
        check_eq!(sum, 2 * ROUNDS, "both counts");
    }
}

/// Sets the two enable bits of advanced debugging.
fn enable(dr7: bool, ctl: bool) {
    let bit = if dr7 { DR7_RTM } else { 0 };
    insn::write_dr7(insn::read_dr7() & !DR7_RTM | bit);
    msr::write(reg::IA32_DEBUGCTL, if ctl { CTL_RTM } else { 0 });
}

fn disable() {
    debug::disarm();
    msr::write(reg::IA32_DEBUGCTL, 0);
}

case! {
    name: "debug_aborts", cpl: [0, 3], rules: ["RTM-01", "RTM-02", "D6-08"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "without both enable bits, #DB and #BP conditions only abort",
    fn body(ctx) {
        need_rtm!(ctx);
        for (dr7, ctl) in [(false, false), (true, false), (false, true)] {
            for kind in 0..5 {
                insn::write_dr7(Dr7::RESET.0);
                insn::write_dr6(Dr6::RESET);
                let code: SnippetFn = match kind {
                    0 => int3_inside,
                    1 => int1_inside,
                    2 => stepped,
                    _ => stored,
                };
                match kind {
                    3 => arm(0, address(), Condition::Write, Length::One),
                    4 => arm_at(1, stored_end),
                    _ => {}
                }
                enable(dr7, ctl);
                let found = if kind == 2 { step_over(ctx) } else { eax(ctx, code, 0) };
                debug::disarm();
                check_eq!(found & !RETRY, DEBUG, "EAX");
                check_eq!(written(), 0, "the store");
                if kind != 2 {
                    check_eq!(conditions(insn::read_dr6()), 0, "DR6");
                }
            }
        }
        disable();
    }
}

/// Runs [`stepped`] with a handler for the steps outside its region, and returns EAX.
fn step_over(ctx: &Ctx) -> u64 {
    let mut found = 0;
    trap::set_handler(1, |_| {});
    // SAFETY: the sequence keeps the C rules.
    let ended = ctx.run(|| found = unsafe { stepped(address(), 0) });
    trap::clear_handler(1);
    check!(ended.is_none(), "no other exception");
    found & 0xffff_ffff
}

case! {
    name: "advanced", cpl: [0, 3], rules: ["RTM-02", "RTM-03", "RTM-04", "RTM-05", "RTM-06", "D6-07"],
    needs: ["guestbp-io"], cpu: "+rtm",
    about: "with both enable bits the state goes back to XBEGIN, and #DB is delivered there with DR6.RTM clear",
    fn body(ctx) {
        need_rtm!(ctx);
        for kind in 0..4 {
            insn::write_dr7(Dr7::RESET.0);
            insn::write_dr6(Dr6::RESET);
            let (code, begin, cause): (SnippetFn, _, _) = match kind {
                0 => (int3_inside, at(int3_begin), 0),
                1 => (int1_inside, at(int1_begin), 0),
                2 => (stored, at(stored_begin), Dr6::B0.bits()),
                _ => (stored, at(stored_begin), Dr6::B1.bits()),
            };
            match kind {
                2 => arm(0, address(), Condition::Write, Length::One),
                3 => arm_at(1, stored_end),
                _ => {}
            }
            enable(true, true);
            let ended = debug::run(ctx, code, address(), 0);
            debug::disarm();
            let event = require_some!(ended, "exception raised");
            check_eq!((event.vector, event.rip), (1, begin), "#DB at XBEGIN");
            check_eq!(event.dr6 & DR6_RTM, 0, "DR6.RTM");
            check_eq!(conditions(event.dr6), cause, "the conditions");
            check_eq!(event.frame.rax & 0xffff_ffff, STARTED, "EAX");
            check!(!saved_rf(&event), "RF");
            check_eq!(written(), 0, "the store");
        }
        disable();
    }
}

case! {
    name: "advanced_step", cpl: [0, 3], rules: ["RTM-03", "RTM-05", "D6-07"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "a single step in a region, with both enable bits: #DB at XBEGIN with BS and DR6.RTM clear",
    fn body(ctx) {
        need_rtm!(ctx);
        insn::write_dr6(Dr6::RESET);
        enable(true, true);
        // The step that ends at XBEGIN is a plain one: the handler lets it pass.
        HANDLER_DR6.store(0, Ordering::Release);
        trap::set_handler(1, first_in_region);
        let ended = debug::run(ctx, stepped, address(), 0);
        trap::clear_handler(1);
        check!(ended.is_none(), "no other exception");
        let dr6 = HANDLER_DR6.load(Ordering::Acquire);
        check_eq!(dr6 & (DR6_RTM | BS), BS, "DR6");
        check_eq!(HANDLER_RIP.load(Ordering::Acquire), at(stepped_begin), "RIP");
        disable();
    }
}

static HANDLER_DR6: AtomicU64 = AtomicU64::new(0);
static HANDLER_RIP: AtomicU64 = AtomicU64::new(0);

/// Keeps DR6 of the first #DB about a region, and ends the stepping there.
fn first_in_region(frame: &mut TrapFrame) {
    let dr6 = insn::read_dr6();
    if dr6 & DR6_RTM == 0 {
        HANDLER_DR6.store(dr6, Ordering::Release);
        HANDLER_RIP.store(frame.rip, Ordering::Release);
        frame.rflags &= !0x100;
    }
    // Rule RTM-08.
    insn::write_dr6(Dr6::RESET);
}

case! {
    name: "outside_a_region", cpl: [0, 3], rules: ["RTM-07", "RTM-08", "D6-07"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "outside a region the enable bits change nothing; #DB sets DR6.RTM; software sets it as well",
    fn body(ctx) {
        need_rtm!(ctx);
        arm(0, address(), Condition::Write, Length::One);
        enable(true, true);
        insn::write_dr6(Dr6::RESET & !DR6_RTM);
        check_eq!(insn::read_dr6() & DR6_RTM, 0, "DR6.RTM as software wrote it");
        let event = require_some!(debug::run(ctx, store_plain, address(), 0), "exception raised");
        check_eq!((event.vector, event.rip), (1, at(plain_next)), "#DB behind the store");
        check_eq!(event.dr6 & DR6_RTM, DR6_RTM, "DR6.RTM");
        debug::disarm();
        enable(true, true);
        let event = require_some!(debug::run(ctx, int3_outside, 0, 0), "exception raised");
        check_eq!(event.vector, 3, "#BP");
        insn::write_dr6(Dr6::RESET);
        check_eq!(insn::read_dr6() & DR6_RTM, DR6_RTM, "set again");
        disable();
        written();
    }
}

case! {
    name: "registers", cpl: [0], rules: ["DR-02", "DR-05", "DCTL-02", "DCTL-03", "PMU-13", "MSR-04", "MSR-08"],
    needs: ["guestbp-io"], cpu: "+rtm",
    about: "the bits that come with RTM: DR6, DR7, IA32_DEBUGCTL, IA32_PERFEVTSELx",
    fn body(ctx) {
        need_rtm!(ctx);
        need_pmu!(ctx);
        insn::write_dr6(0);
        check_eq!(insn::read_dr6(), 0xfffe_0ff0, "DR6 after a write of 0");
        insn::write_dr6(0xffff_ffff);
        check_eq!(insn::read_dr6(), 0xffff_efff, "DR6 after a write of ones");
        insn::write_dr7(0xffff_dfff);
        let dr7 = insn::read_dr7();
        debug::disarm();
        check_eq!(dr7, 0xffff_0fff, "DR7 after a write of all ones but GD");
        check!(msr::write_safe(reg::IA32_DEBUGCTL, CTL_RTM).is_ok(), "DEBUGCTL.RTM");
        check_eq!(msr::read(reg::IA32_DEBUGCTL), CTL_RTM, "its value");
        check_eq!(msr::write_safe(reg::IA32_DEBUGCTL, 1 << 16), Err(msr::GP), "bit 16");
        disable();
        for counter in 0..4 {
            let select = reg::IA32_PERFEVTSEL0 + counter;
            check!(msr::write_safe(select, EventSelect::IN_TX).is_ok(), "IN_TX");
            let answer = msr::write_safe(select, EventSelect::IN_TXCP);
            check_eq!(answer.is_ok(), counter == 2, "IN_TXCP");
            check_eq!(msr::write_safe(select, 1 << 34), Err(msr::GP), "bit 34");
        }
        pmu::reset();
    }
}

case! {
    name: "branch_records", cpl: [0], rules: ["LBR-03"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "IN_TSX for a branch in a region, TSX_ABORT for its abort, with the places of both",
    fn body(ctx) {
        need_rtm!(ctx);
        need_lbr!(ctx);
        msr::write(reg::IA32_DEBUGCTL, 1);
        debug::call(jump_abort, 0, 0);
        msr::write(reg::IA32_DEBUGCTL, 0);
        let stack = LbrStack::read();
        let abort = stack.info.iter().position(|info| info & TSX_ABORT != 0);
        let abort = require_some!(abort, "a record of the abort");
        check_eq!((stack.from[abort], stack.to[abort]), (at(abort_from), at(abort_to)), "its places");
        let jump = (abort + 31) % 32;
        check_eq!((stack.from[jump], stack.to[jump]), (at(jump_from), at(abort_from)), "the jump before it");
        check_eq!(stack.info[jump] & (IN_TSX | TSX_ABORT), IN_TSX, "its flags");
        let inside = stack.info.iter().filter(|&info| info & IN_TSX != 0).count();
        check_eq!(inside, 2, "records with IN_TSX");
    }
}

case! {
    name: "counters", cpl: [0], rules: ["PMU-13"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "RTM_RETIRED counts starts, commits and aborts; IN_TX and IN_TXCP choose what is counted",
    fn body(ctx) {
        need_rtm!(ctx);
        need_pmu!(ctx);
        pmu::select(0, 0xc9, 1, ON);
        pmu::select(1, 0xc9, 2, ON);
        pmu::select(2, 0xc0, 0, ON | EventSelect::IN_TX | EventSelect::IN_TXCP);
        pmu::select(3, 0xc0, 0, ON | EventSelect::IN_TX);
        pmu::start(0b1111);
        for code in [ten_nops as SnippetFn, ten_nops_abort, ten_nops, ten_nops_abort, ten_nops_abort] {
            debug::call(code, 0, 0);
        }
        pmu::stop();
        check_eq!(pmu::get(0), 5, "starts");
        check_eq!(pmu::get(1), 2, "commits");
        let (committed, inside) = (pmu::get(2), pmu::get(3));
        // The manual does not say whether XBEGIN and XEND count.
        check!((20..=24).contains(&committed), "instructions of what committed");
        check!((50..=60).contains(&inside), "instructions in regions");
        pmu::reset();
        pmu::select(0, 0xc9, 4, ON);
        pmu::start(1);
        debug::call(ten_nops_abort, 0, 0);
        debug::call(ten_nops, 0, 0);
        pmu::stop();
        check_eq!(pmu::get(0), 1, "aborts");
        pmu::reset();
    }
}

case! {
    name: "pebs_abort", cpl: [0], rules: ["PEBS-17", "PEBS-19"], needs: ["guestbp-io"], cpu: "+rtm",
    about: "the record of an abort tells of the XBEGIN, the fallback address and why",
    fn body(ctx) {
        need_rtm!(ctx);
        need_pebs!(ctx);
        let ds = PebsArea::new(4, 4, [1000_u64.wrapping_neg(); 4]);
        pmu::preset(0, 1);
        pmu::select(0, 0xc9, 4, ON);
        msr::write(reg::IA32_PEBS_ENABLE, 1);
        pmu::start(1);
        for _ in 0..3 {
            debug::call(ten_nops_abort, 0, 0);
        }
        pmu::stop();
        require_eq!(ds.count(), 1, "records");
        check_eq!(ds.record(0, record::EVENTING_RIP), at(nops_begin), "the XBEGIN");
        check_eq!(ds.record(0, record::RIP), at(nops_to), "the fallback address");
        let about = ds.record(0, record::TX);
        check_eq!(about >> 32 & 0b1110, 0b0110, "RTM, aborted by an instruction");
        check!(about & 0xffff_ffff >= 10, "cycles");
        pmu::reset();
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

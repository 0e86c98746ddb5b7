//! #DB: instruction breakpoints, priorities, combination and delivery.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic;
use hindsight_guest::catch::logged;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, DEFAULT_BASE, ICR_ASSERT, ICR_NMI};
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, paging, trap, vectors};
use hindsight_payloads::access::{self, ScratchPage};
use hindsight_payloads::debug::{
    self, BD, BS, DB, arm, arm_at, at, call, conditions, events, saved_rf,
};
use hindsight_payloads::{check_events, check_steps, clear_tf, set_tf, snippet};

payload!("db");

static PAGE: ScratchPage = ScratchPage::new();
static OTHER: ScratchPage = ScratchPage::new();

const B0: u64 = Dr6::B0.bits();
const B1: u64 = Dr6::B1.bits();
/// LBR and BTF of IA32_DEBUGCTL.
const LBR_BTF: u64 = DebugCtl::LBR.union(DebugCtl::BTF).bits();
/// A vector for self-IPIs.
const VECTOR: u8 = 0x61;

snippet! { undefined [ud2_insn] "ud2_insn:", "ud2", "ret" }
snippet! { load [load_insn load_done] "load_insn:", "mov al, [rdi]", "load_done:", "ret" }
snippet! { rep_store [rep_store_insn rep_store_done] "mov rcx, rsi", "rep_store_insn:", "rep stosb",
    "rep_store_done:", "ret"
}
snippet! { copy_byte [copy_done] "movsb", "copy_done:", "ret" }
snippet! { step_copy [step_copy_done] set_tf!(), "movsb", "step_copy_done:", clear_tf!(), "ret" }
snippet! { step_onto [step_onto_insn step_onto_done] set_tf!(), "nop", "step_onto_insn:", "nop",
    "step_onto_done:", clear_tf!(), "ret"
}
snippet! { read_dr3 [read_dr3_insn read_dr3_done] "read_dr3_insn:", "mov rax, dr3", "read_dr3_done:",
    "ret"
}
// RDI points to a page that holds a RET.
snippet! { call_page [] "sub rsp, 8", "call rdi", "add rsp, 8", "ret" }
// IRETQ to the next instruction with the flags of RSI.
snippet! { iret_to_nop [iret_target]
    "mov rax, rsp", "mov ecx, ss", "push rcx", "push rax", "push rsi", "mov ecx, cs", "push rcx",
    "lea rax, [rip + iret_target]", "push rax", "iretq", "iret_target:", "nop", "ret"
}
// RDI holds the new CR8, with which an interrupt is delivered.
snippet! { step_cr8 [step_cr8_done] "sti", set_tf!(), "mov cr8, rdi", "step_cr8_done:", "cli", clear_tf!(),
    "ret"
}
// RDI points to the low half of the APIC's ICR, RSI holds the value for it.
snippet! { step_icr [step_icr_done] set_tf!(), "mov [rdi], esi", "step_icr_done:", "nop", clear_tf!(),
    "ret"
}

case! {
    name: "before_other_faults", cpl: [0, 3], rules: ["DB-02", "DB-10"], needs: ["exceptions"],
    needs_cpl0: ["guestbp-exec-cpl0"], needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "an instruction breakpoint on UD2 or on a load that page-faults is delivered before the fault",
    fn body(ctx) {
        paging::change(OTHER.address(), 0, paging::P);
        let snippets: [(debug::SnippetFn, debug::SnippetLabel, u8); 2] =
            [(undefined, ud2_insn, 6), (load, load_insn, 14)];
        for (code, label, vector) in snippets {
            arm_at(1, label);
            let mut fault = None;
            let log = logged(DB, || fault = debug::run(ctx, code, OTHER.address(), 0));
            debug::disarm();
            check_events!(log, [(at(label), B1)], "breakpoint before the fault");
            check_eq!(fault.map(|e| e.vector), Some(vector), "vector of the fault");
            check_eq!(fault.map(|e| e.rip), Some(at(label)), "RIP that the fault saved");
        }
        paging::change(OTHER.address(), paging::P, 0);
    }
}

case! {
    name: "repeats_without_rf", cpl: [0, 3], rules: ["DB-03"], needs: [], needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "after a return with RF clear the same #DB is raised again",
    fn body(ctx) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        fn set_rf_at_third(frame: &mut TrapFrame) {
            if COUNT.fetch_add(1, Ordering::Relaxed) == 2 {
                frame.rflags |= Rflags::RF.bits();
            }
        }
        COUNT.store(0, Ordering::Relaxed);
        trap::set_handler(1, set_rf_at_third);
        arm_at(0, load_insn);
        debug::run(ctx, load, PAGE.address(), 0);
        check_eq!(COUNT.load(Ordering::Relaxed), 3, "count of #DBs");
    }
}

case! {
    name: "iret_target", cpl: [0, 3], rules: ["DB-05", "DB-21", "RF-01", "RF-03"], needs: ["gd"],
    needs_cpl0: ["guestbp-exec-cpl0"], needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "a breakpoint on the target of IRET raises #DB if RF is clear, and does not change DR6 if it is set",
    fn body(ctx) {
        arm_at(0, iret_target);
        check_events!(events(ctx, iret_to_nop, 0, 2), [(at(iret_target), B0)], "RF clear");
        arm_at(0, iret_target);
        check_events!(events(ctx, iret_to_nop, 0, 2 | Rflags::RF.bits()), [], "RF set");
        check_eq!(insn::read_dr6(), Dr6::RESET, "DR6");
    }
}

case! {
    name: "repeated_string", cpl: [0, 3], rules: ["DB-06"], needs: [], needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "a breakpoint on REP STOSB is raised once, before the first iteration",
    fn body(ctx) {
        arm_at(2, rep_store_insn);
        let log = events(ctx, rep_store, PAGE.address(), 5);
        check_events!(log, [(at(rep_store_insn), Dr6::B2.bits())], "one #DB");
        check_eq!(log.events().first().map(|e| e.frame.rcx), Some(5), "RCX");
    }
}

/// Handles a page fault: counts it, records the flags, and makes OTHER present.
fn map_other(frame: &mut TrapFrame) {
    FAULTS.fetch_add(1, Ordering::Relaxed);
    FAULT_FLAGS.store(frame.rflags, Ordering::Relaxed);
    paging::change(OTHER.address(), paging::P, 0);
}

static FAULTS: AtomicU64 = AtomicU64::new(0);
static FAULT_FLAGS: AtomicU64 = AtomicU64::new(0);

case! {
    name: "absent_page", cpl: [0, 3], rules: ["DB-07", "OP-02", "RF-04", "RF-13"],
    needs: ["gd", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "a breakpoint on a page that is not present raises #DB before the page fault, and not after it",
    fn body(ctx) {
        access::store(OTHER.address(), 0xc3);
        paging::change(OTHER.address(), 0, paging::P);
        FAULTS.store(0, Ordering::Relaxed);
        trap::set_handler(14, map_other);
        arm(0, OTHER.address(), Condition::Execute, Length::One);
        let log = events(ctx, call_page, OTHER.address(), 0);
        check_events!(log, [(OTHER.address(), B0)], "one #DB");
        check_eq!(FAULTS.load(Ordering::Relaxed), 1, "count of page faults");
        let flags = FAULT_FLAGS.load(Ordering::Relaxed);
        check!(flags & Rflags::RF.bits() != 0, "RF in the flags that the page fault saved");
    }
}

case! {
    name: "flags_at_entry", cpl: [0, 3], rules: ["DB-11", "TF-04"], needs: ["gd"],
    needs_cpl0: ["guestbp-exec-cpl0"], needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "delivery saves TF and NT, and clears TF, RF and NT; IF only through an interrupt gate",
    fn body(ctx) {
        static INSIDE: AtomicU64 = AtomicU64::new(0);
        static IMAGE: AtomicU64 = AtomicU64::new(0);
        fn record_flags(frame: &mut TrapFrame) {
            INSIDE.store(insn::rflags(), Ordering::Relaxed);
            IMAGE.store(frame.rflags, Ordering::Relaxed);
            let cleared = Rflags::NT | Rflags::TF | Rflags::IF;
            frame.rflags = frame.rflags & !cleared.bits() | Rflags::RF.bits();
        }
        trap::set_handler(1, record_flags);
        let mask = (Rflags::TF | Rflags::IF | Rflags::NT | Rflags::RF).bits();
        for trap_gate in [false, true] {
            let change = |gate: vectors::Gate| if trap_gate { gate.as_trap() } else { gate };
            arm_at(0, load_insn);
            let enter = (Rflags::FIXED | Rflags::IF | Rflags::NT).bits();
            vectors::with_gate(1, change, || if ctx.cpl == 3 {
                hindsight_guest::catch::user_with_flags(enter, || call(load, PAGE.address(), 0));
            } else {
                catch(|| call(with_if_and_nt, PAGE.address(), 0));
            });
            debug::disarm();
            let image = IMAGE.load(Ordering::Relaxed) & mask;
            check_eq!(image, (Rflags::IF | Rflags::NT).bits(), "saved flags");
            let inside = INSIDE.load(Ordering::Relaxed) & mask;
            check_eq!(inside, if trap_gate { Rflags::IF.bits() } else { 0 }, "flags in the handler");
        }
    }
}

snippet! { with_if_and_nt [] "pushfq", "or qword ptr [rsp], 0x4200", "popfq", "jmp load_insn" }

case! {
    name: "conditions_together", cpl: [0, 3], rules: ["DB-12"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "one #DB reports the two breakpoints that one MOVSB hits",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::ReadWrite, Length::One);
        debug::arm_also(3, OTHER.address(), Condition::Write, Length::One);
        let log = events(ctx, copy_byte, OTHER.address(), PAGE.address());
        check_events!(log, [(at(copy_done), B0 | Dr6::B3.bits())], "one #DB");
    }
}

case! {
    name: "step_and_data_together", cpl: [0, 3], rules: ["DB-13"], needs: ["guestbp-data"],
    needs_cpl0: ["tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "a single step over an access that hits a data breakpoint raises one #DB with BS and Bn",
    fn body(ctx) {
        arm(1, OTHER.address(), Condition::Write, Length::One);
        let log = events(ctx, step_copy, OTHER.address(), PAGE.address());
        check_steps!(log, [(at(step_copy_done), BS | B1)], "one #DB");
    }
}

case! {
    name: "step_onto_breakpoint", cpl: [0, 3], rules: ["DB-14", "OP-03"], needs: ["guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "a single step that ends at an instruction breakpoint raises #DB with BS, then #DB with Bn",
    fn body(ctx) {
        arm_at(0, step_onto_insn);
        let log = events(ctx, step_onto, 0, 0);
        let here = at(step_onto_insn);
        check_steps!(log, [(here, BS), (here, B0), (at(step_onto_done), BS)], "two #DBs, then the next step");
    }
}

case! {
    name: "breakpoint_on_detected", cpl: [0], rules: ["DB-15", "GD-05"], needs: ["gd", "guestbp-io"],
    about: "a breakpoint on a MOV DR with GD set raises #DB with Bn, and with RF set #DB with BD",
    fn body(ctx) {
        static CONDITIONS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
        static COUNT: AtomicU64 = AtomicU64::new(0);
        fn arm_detect_again(frame: &mut TrapFrame) {
            let n = COUNT.fetch_add(1, Ordering::Relaxed);
            if let Some(recorded) = usize::try_from(n).ok().and_then(|n| CONDITIONS.get(n)) {
                recorded.store(conditions(insn::read_dr6()), Ordering::Relaxed);
            }
            insn::write_dr6(Dr6::RESET);
            frame.rflags |= Rflags::RF.bits();
            if n == 0 {
                insn::write_dr7(insn::read_dr7() | Dr7::GD);
            }
        }
        COUNT.store(0, Ordering::Relaxed);
        trap::set_handler(1, arm_detect_again);
        arm_at(0, read_dr3_insn);
        insn::write_dr7(insn::read_dr7() | Dr7::GD);
        debug::run(ctx, read_dr3, 0, 0);
        check_eq!(COUNT.load(Ordering::Relaxed), 2, "count of #DBs");
        let found = CONDITIONS.each_ref().map(|c| c.load(Ordering::Relaxed));
        check_eq!(found, [B0, BD], "conditions of the #DBs");
    }
}

static ORDER: AtomicU64 = AtomicU64::new(0);
static INTERRUPTED: AtomicU64 = AtomicU64::new(0);

/// Records an event as a decimal digit.
fn record_event(digit: u64) {
    let order = ORDER.load(Ordering::Relaxed);
    ORDER.store(order * 10 + digit, Ordering::Relaxed);
}

fn record_step(_frame: &mut TrapFrame) {
    insn::write_dr6(Dr6::RESET);
    record_event(1);
}

fn record_interrupt(frame: &mut TrapFrame) {
    INTERRUPTED.store(frame.rip, Ordering::Relaxed);
    record_event(2);
    apic::eoi();
}

fn record_nmi(frame: &mut TrapFrame) {
    INTERRUPTED.store(frame.rip, Ordering::Relaxed);
    record_event(3);
}

case! {
    name: "before_interrupts", cpl: [0], rules: ["DB-16", "TF-07", "TF-06"],
    needs: ["tf-cpl0", "gd", "irq-window-cpl0"],
    about: "#DB of a single step precedes a pending interrupt, whose handler is not single-stepped",
    fn body(_ctx) {
        apic::enable();
        trap::set_handler(1, record_step);
        trap::set_handler(VECTOR, record_interrupt);
        ORDER.store(0, Ordering::Relaxed);
        insn::write_cr8(15);
        apic::send(apic::id(), ICR_ASSERT | u32::from(VECTOR));
        call(step_cr8, 0, 0);
        apic::disable();
        // MOV CR8, then the interrupt, then CLI, PUSHFQ, AND, POPFQ.
        check_eq!(ORDER.load(Ordering::Relaxed), 121_111, "order of #DB (1) and interrupt (2)");
        check_eq!(INTERRUPTED.load(Ordering::Relaxed), at(step_cr8_done), "RIP that the interrupt saved");
    }
}

case! {
    name: "before_nmi", cpl: [0], rules: ["DB-16"], needs: ["tf-cpl0", "gd", "guestbp-io"],
    about: "#DB of a single step precedes an NMI that the step requests, which interrupts the #DB handler",
    fn body(_ctx) {
        apic::enable();
        trap::set_handler(1, record_step);
        trap::set_handler(2, record_nmi);
        ORDER.store(0, Ordering::Relaxed);
        let icr = DEFAULT_BASE + u64::from(ApicRegister::ICR.0);
        apic::write(ApicRegister::ICR_HIGH, apic::id() << 24);
        call(step_icr, icr, u64::from(ICR_NMI | ICR_ASSERT));
        apic::disable();
        // The NMI is delivered at the first instruction of the #DB handler, before it records anything.
        check_eq!(ORDER.load(Ordering::Relaxed), 311_111, "order of #DB (1) and NMI (3)");
        check_eq!(INTERRUPTED.load(Ordering::Relaxed), vectors::entry(1), "RIP that the NMI saved");
    }
}

/// Space for an IDT whose first gates are on another page than the rest.
#[repr(C, align(4096))]
struct SplitIdt(core::cell::UnsafeCell<[u8; 8192]>);

// SAFETY: one case uses it, on one CPU.
unsafe impl Sync for SplitIdt {}

static IDT: SplitIdt = SplitIdt(core::cell::UnsafeCell::new([0; 8192]));

/// The first vector on the second page.
const FIRST_PRESENT: u64 = 8;

/// Runs `f` with an IDT whose gates below 8 are on a page that is not present.
///
/// It returns the address of the IDT.
fn with_split_idt(f: impl FnOnce()) -> u64 {
    let page = IDT.0.get() as u64;
    let base = page + 4096 - 16 * FIRST_PRESENT;
    let mut old = [0_u8; 10];
    // SAFETY: the new IDT is a copy of the first 64 gates and fits in the pages. The first gates
    // become not present on purpose.
    unsafe {
        core::arch::asm!("sidt [{}]", in(reg) &raw mut old);
        for vector in 0..=255_u8 {
            let gate = (base + 16 * u64::from(vector)) as *mut vectors::Gate;
            if u64::from(vector) < 64 {
                gate.write_volatile(vectors::gate(vector));
            }
        }
        let limit = 64_u64 * 16 - 1;
        let new: [u64; 2] = [limit | base << 16, base >> 48];
        core::arch::asm!("lidt [{}]", in(reg) &raw const new);
    }
    paging::change(page, 0, paging::P);
    f();
    paging::change(page, paging::P, 0);
    // SAFETY: it loads the IDTR that SIDT stored.
    unsafe { core::arch::asm!("lidt [{}]", in(reg) &raw const old) };
    base
}

case! {
    name: "fault_in_delivery", cpl: [0, 3], rules: ["DB-17", "DB-18"], needs: ["gd", "guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "a page fault on the gate of #DB is delivered as #PF, after DR6 has changed",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::ReadWrite, Length::One);
        let mut fault = None;
        // At CPL 3 the call would end with #UD, whose gate is not present either; the #PF ends it first.
        let base = with_split_idt(|| fault = debug::run(ctx, load, PAGE.address(), 0));
        let dr6 = insn::read_dr6();
        debug::disarm();
        let fault = require_some!(fault, "exception raised");
        check_eq!(fault.code(), (14, 0), "vector and error code");
        check_eq!(fault.cr2, base + 16, "CR2, the address of gate 1");
        check_eq!(fault.rip, at(load_done), "saved RIP");
        check_eq!(conditions(dr6), B0, "DR6");
    }
}

case! {
    name: "ignores_gate_dpl", cpl: [3], rules: ["DB-22"], needs: ["guestbp-data", "iretq-cpl3"],
    about: "#DB at CPL 3 is delivered through a gate of DPL 0",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::ReadWrite, Length::One);
        let log = vectors::with_gate(1, |gate| gate.with_dpl(0), || events(ctx, load, PAGE.address(), 0));
        check_events!(log, [(at(load_done), B0)], "gate of DPL 0");
        check_eq!(log.events().first().map(|e| e.cpl()), Some(3), "CPL of the interrupted code");
    }
}

case! {
    name: "clears_debugctl_and_gd", cpl: [0, 3], rules: ["DB-23", "DCTL-06", "GD-04"], needs: ["guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "every #DB clears LBR and BTF of IA32_DEBUGCTL and DR7.GD",
    fn body(ctx) {
        for condition in [Condition::Execute, Condition::ReadWrite] {
            let address = if condition == Condition::Execute { at(load_insn) } else { PAGE.address() };
            arm(0, address, condition, Length::One);
            msr::write(IA32_DEBUGCTL, LBR_BTF);
            insn::write_dr7(insn::read_dr7() | Dr7::GD);
            let fault = debug::run(ctx, load, PAGE.address(), 0);
            check_eq!(msr::read(IA32_DEBUGCTL), 0, "IA32_DEBUGCTL");
            let fault = require_some!(fault, "exception raised");
            check_eq!((fault.code(), conditions(fault.dr6)), ((1, 0), B0), "vector, error code and conditions");
            check!(!saved_rf(&fault), "RF clear in the saved flags");
            check_eq!(insn::read_dr7() & Dr7::GD, 0, "GD");
        }
    }
}

//! The resume flag: what it blocks, who sets it in an image, and who clears it.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic;
use hindsight_guest::catch::logged;
use hindsight_guest::exception::{ExceptionLog, TrapFrame};
use hindsight_guest::gdt::{KERNEL_CODE, USER_DATA};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, DEFAULT_BASE, ICR_ASSERT};
use hindsight_guest::regs::cr::Cr0;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, paging, trap};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{
    self, BD, BP, BS, DB, arm, arm_at, at, call, conditions, event_saved_rf, events, saved_rf,
};
use hindsight_payloads::{check_events, clear_tf, set_tf, snippet, syscall};

payload!("rf");

static PAGE: ScratchPage = ScratchPage::new();
static OTHER: ScratchPage = ScratchPage::new();

const B0: u64 = Dr6::B0.bits();
const B1: u64 = Dr6::B1.bits();
const RF: u64 = Rflags::RF.bits();
/// RFLAGS with RF set, and what is always set.
const WITH_RF: u64 = RF | Rflags::FIXED.bits();
/// A vector for interrupts to oneself.
const VECTOR: u8 = 0x63;

// IRETQ with the flags of RSI to the instruction that follows; RDI stays.
macro_rules! iret_next {
    ($label:literal) => {
        concat!(
            "mov rax, rsp\nmov ecx, ss\npush rcx\npush rax\npush rsi\nmov ecx, cs\npush rcx\nlea rax, [rip + ", $label,
            "]\npush rax\niretq\n", $label, ":"
        )
    };
}

snippet! { to_store [rf_store rf_store_done] iret_next!("rf_store"), "mov byte ptr [rdi], 1",
    "rf_store_done:", "nop", "ret"
}
snippet! { to_nops [rf_nop rf_nop2] iret_next!("rf_nop"), "nop", "rf_nop2:", "nop", "ret" }
snippet! { to_pushf [rf_pushf] iret_next!("rf_pushf"), "pushfq", "pop rax", "mov [rdi], rax", "ret" }
snippet! { to_ud2 [rf_ud2] iret_next!("rf_ud2"), "ud2" }
snippet! { to_load [rf_load] iret_next!("rf_load"), "mov al, [rdi]", "ret" }
snippet! { to_mov_dr [rf_mov_dr] iret_next!("rf_mov_dr"), "mov rax, dr0", "ret" }
snippet! { to_syscall [rf_syscall] "xor r10d, r10d", iret_next!("rf_syscall"), "syscall", "mov [rdi], r9",
    "ret"
}
snippet! { to_in [rf_in rf_in_done] "mov edx, 0xe8", iret_next!("rf_in"), "in al, dx", "rf_in_done:", "nop",
    "ret"
}
snippet! { to_rdmsr [rf_rdmsr] iret_next!("rf_rdmsr"), "mov ecx, 0x570", "rdmsr", "ret" }
// R10: what SYSRET adds to RFLAGS.
snippet! { sysret_with_rf [rf_sysret_target] "mov r10d, 0x10000", "syscall", "rf_sysret_target:", "nop",
    "ret"
}
snippet! { popf_rf [rf_popf_next] "push rsi", "popfq", "rf_popf_next:", "nop", "ret" }
snippet! { one_load [one_load_insn] "one_load_insn:", "mov al, [rdi]", "ret" }
snippet! { bad_load [] "mov rax, 0x8000000000000000", "mov al, [rax]", "ret" }
snippet! { one_ud2 [] "ud2" }
snippet! { one_fwait [] "fwait", "ret" }
snippet! { one_mov_dr [] "mov rax, dr0", "ret" }
snippet! { rep_store [rf_rep rf_rep_done] "mov rcx, rsi", "xor eax, eax", "rf_rep:", "rep stosb",
    "rf_rep_done:", "ret"
}
snippet! { step_rep [rf_step_rep rf_step_rep_done] "mov rcx, rsi", "xor eax, eax", set_tf!(),
    "rf_step_rep:", "rep stosb", "rf_step_rep_done:", clear_tf!(), "ret"
}
// RDI: the APIC's interrupt command register, RSI: the command.
snippet! { rep_icr [rf_rep_icr rf_rep_icr_done] "mov eax, esi", "mov ecx, 3", "sti", "nop", "rf_rep_icr:",
    "rep stosd", "rf_rep_icr_done:", "nop", "cli", "ret"
}
snippet! { one_int3 [] "int3", "ret" }
snippet! { step_nop [rf_step_nop] set_tf!(), "nop", "rf_step_nop:", clear_tf!(), "ret" }
snippet! { wait_interrupt [] "sti", "nop", "nop", "nop", "cli", "ret" }

case! {
    name: "one_instruction", cpl: [0, 3], rules: ["RF-01", "RF-02", "RF-03"], needs: [],
    needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "RF that IRET loads protects its target, and not the instruction after it",
    fn body(ctx) {
        arm_at(0, rf_nop);
        debug::arm_also(1, at(rf_nop2), Condition::Execute, Length::One);
        check_events!(events(ctx, to_nops, 0, WITH_RF), [(at(rf_nop2), B1)], "the second only");
    }
}

/// The exception that a sequence ends with, and whether its image has RF.
fn fault_of(
    ctx: &hindsight_guest::case::Ctx,
    code: debug::SnippetFn,
    first: u64,
) -> Option<(u8, bool)> {
    debug::run(ctx, code, first, WITH_RF).map(|e| (e.vector, saved_rf(&e)))
}

case! {
    name: "fault_images", cpl: [0, 3], rules: ["RF-04"], needs: ["exceptions", "gd-rf"],
    needs_cpl3: ["iretq-cpl3"],
    about: "#PF, #GP, #UD, #NM and general detect push RF=1",
    fn body(ctx) {
        paging::change(OTHER.address(), 0, paging::P);
        check_eq!(fault_of(ctx, one_load, OTHER.address()), Some((14, true)), "#PF");
        paging::change(OTHER.address(), paging::P, 0);
        check_eq!(fault_of(ctx, bad_load, 0), Some((13, true)), "#GP");
        check_eq!(fault_of(ctx, one_ud2, 0), Some((6, true)), "#UD");
        let cr0 = insn::read_cr0();
        insn::write_cr0(cr0 | (Cr0::TS | Cr0::MP).bits());
        check_eq!(fault_of(ctx, one_fwait, 0), Some((7, true)), "#NM");
        insn::write_cr0(cr0);
        if ctx.cpl == 0 {
            insn::write_dr7(Dr7::RESET.0 | Dr7::GD);
            check_eq!(fault_of(ctx, one_mov_dr, 0), Some((1, true)), "general detect");
        }
    }
}

static AT: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

fn record_interrupt(frame: &mut TrapFrame) {
    for (cell, value) in AT.iter().zip([frame.rip, frame.rflags, frame.rcx]) {
        cell.store(value, Ordering::Relaxed);
    }
    apic::eoi();
}

/// RIP, RF and RCX at the last interrupt.
fn interrupted() -> (u64, (bool, u64)) {
    let [rip, flags, rcx] = [0, 1, 2].map(|n: usize| AT[n].load(Ordering::Relaxed));
    (rip, (flags & RF != 0, rcx))
}

case! {
    name: "interrupt_in_string", cpl: [0], rules: ["RF-05"], needs: ["gd", "guestbp-io"],
    about: "an interrupt that the first of three iterations of REP STOSD requests pushes RF=1",
    fn body(_ctx) {
        apic::enable();
        trap::set_handler(VECTOR, record_interrupt);
        apic::write(ApicRegister::ICR_HIGH, apic::id() << 24);
        // The other two iterations write to the unused rest of the register's 16 bytes.
        call(rep_icr, DEFAULT_BASE + 0x300, u64::from(ICR_ASSERT | u32::from(VECTOR)));
        apic::disable();
        check_eq!(interrupted(), (at(rf_rep_icr), (true, 2)), "RIP, RF and RCX");
    }
}

case! {
    name: "traps_in_string", cpl: [0, 3], rules: ["RF-06", "TF-12", "WP-12"],
    needs: ["guestbp-data", "gd-rf"], needs_cpl3: ["iretq-cpl3"],
    about: "a data breakpoint and a step push RF=1 after an iteration that is not the last, else RF=0",
    fn body(ctx) {
        for (offset, rip, flag) in [(1, at(rf_rep), true), (2, at(rf_rep_done), false)] {
            arm(0, PAGE.address() + offset, Condition::Write, Length::One);
            let log = events(ctx, rep_store, PAGE.address(), 3);
            check_events!(log, [(rip, B0)], "the data breakpoint");
            check_eq!(event_saved_rf(log, 0), flag, "RF");
        }
        let log = events(ctx, step_rep, PAGE.address(), 3);
        let expected = [(at(rf_step_rep), true), (at(rf_step_rep), true), (at(rf_step_rep_done), false)];
        for (n, expected) in expected.into_iter().enumerate() {
            check_eq!(debug::event(log, n), (expected.0, BS), "a step");
            check_eq!(event_saved_rf(log, n), expected.1, "RF of a step");
        }
    }
}

/// Whether the log has one event, and its RF.
fn only_rf(log: &ExceptionLog) -> (usize, bool) {
    (log.count(), event_saved_rf(log, 0))
}

case! {
    name: "other_images", cpl: [0, 3], rules: ["RF-07", "RF-08"], needs: ["guestbp-data", "gd"],
    needs_cpl0: ["tf-cpl0", "int3-cpl0"], needs_cpl3: ["tf-cpl3", "int3-cpl3", "iretq-cpl3"],
    about: "instruction and data breakpoints, steps, INT3 and interrupts push RF=0",
    fn body(ctx) {
        arm_at(0, one_load_insn);
        check_eq!(only_rf(events(ctx, one_load, PAGE.address(), 0)), (1, false), "instruction breakpoint");
        arm(0, PAGE.address(), Condition::ReadWrite, Length::One);
        check_eq!(only_rf(events(ctx, one_load, PAGE.address(), 0)), (1, false), "data breakpoint");
        check!(!event_saved_rf(events(ctx, step_nop, 0, 0), 0), "single step");
        let log = logged(BP, || { debug::run(ctx, one_int3, 0, 0); });
        check_eq!(only_rf(log), (1, false), "INT3");
        if ctx.cpl == 0 {
            apic::enable();
            trap::set_handler(VECTOR, record_interrupt);
            AT[1].store(RF, Ordering::Relaxed);
            apic::send(apic::id(), ICR_ASSERT | u32::from(VECTOR));
            call(wait_interrupt, 0, 0);
            apic::disable();
            check_eq!(AT[1].load(Ordering::Relaxed) & RF, 0, "interrupt");
        }
    }
}

case! {
    name: "pushf_and_popf", cpl: [0, 3], rules: ["RF-09"], needs: ["gd"], needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "PUSHFQ that starts with RF set stores 0; POPFQ does not set it",
    fn body(ctx) {
        let place = PAGE.address() + 64;
        // SAFETY: the page is ours.
        unsafe { (place as *mut u64).write_volatile(u64::MAX) };
        let fault = debug::run(ctx, to_pushf, place, WITH_RF);
        check!(fault.is_none(), "no exception");
        // SAFETY: as above.
        let image = unsafe { (place as *mut u64).read_volatile() };
        check_eq!(image & RF, 0, "RF in the image of PUSHFQ");
        arm_at(0, rf_popf_next);
        check_events!(events(ctx, popf_rf, 0, WITH_RF), [(at(rf_popf_next), B0)], "after POPFQ");
    }
}

case! {
    name: "syscall", cpl: [3], rules: ["RF-11"],
    needs: ["gd-rf", "syscall-cpl3", "guestbp-exec-cpl3", "iretq-cpl3"],
    about: "SYSCALL that starts with RF set saves R11 without; SYSRET does not set it",
    fn body(ctx) {
        let place = PAGE.address() + 72;
        // SAFETY: the page is ours.
        unsafe { (place as *mut u64).write_volatile(u64::MAX) };
        let mut log = None;
        syscall::with(0, || {
            let fault = debug::run(ctx, to_syscall, place, WITH_RF);
            check!(fault.is_none(), "no exception");
            arm_at(0, rf_sysret_target);
            log = Some(events(ctx, sysret_with_rf, 0, 0));
        });
        // SAFETY: as above.
        check_eq!(unsafe { (place as *mut u64).read_volatile() } & RF, 0, "RF in R11");
        check_events!(require_some!(log, "a log"), [(at(rf_sysret_target), B0)], "at the target of SYSRET");
    }
}

case! {
    name: "blocks_nothing_else", cpl: [0, 3], rules: ["RF-12", "GD-03"], needs: ["guestbp-data", "gd-rf"],
    needs_cpl3: ["iretq-cpl3"],
    about: "with RF set data breakpoints, steps, general detect and #UD come as ever",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::Write, Length::One);
        check_events!(events(ctx, to_store, PAGE.address(), WITH_RF), [(at(rf_store_done), B0)], "data breakpoint");
        let log = logged(DB, || {
            // The handler ends the stepping at the first step.
            trap::set_handler(1, |frame| {
                AT[0].store(frame.rip, Ordering::Relaxed);
                frame.rflags &= !Rflags::TF.bits();
            });
            debug::run(ctx, to_nops, 0, WITH_RF | Rflags::TF.bits());
            trap::clear_handler(1);
        });
        check_eq!((log.count(), AT[0].load(Ordering::Relaxed)), (0, at(rf_nop2)), "single step");
        check_eq!(fault_of(ctx, to_ud2, 0), Some((6, true)), "#UD");
        if ctx.cpl == 0 {
            insn::write_dr6(Dr6::RESET);
            insn::write_dr7(Dr7::RESET.0 | Dr7::GD);
            let fault = debug::run(ctx, to_mov_dr, 0, WITH_RF);
            let found = fault.map(|e| (e.rip, (conditions(e.dr6), saved_rf(&e))));
            check_eq!(found, Some((at(rf_mov_dr), (BD, true))), "general detect");
        }
    }
}

static FAULTS: AtomicU64 = AtomicU64::new(0);

fn map_other(frame: &mut TrapFrame) {
    FAULTS.fetch_add(1 + u64::from(frame.rflags & RF != 0), Ordering::Relaxed);
    paging::change(OTHER.address(), paging::P, 0);
}

case! {
    name: "restart_after_fault", cpl: [0, 3], rules: ["RF-13"], needs: ["exceptions"],
    needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "an instruction that starts with RF set and faults is exempt again when it is executed again",
    fn body(ctx) {
        paging::change(OTHER.address(), 0, paging::P);
        FAULTS.store(0, Ordering::Relaxed);
        trap::set_handler(14, map_other);
        arm_at(0, rf_load);
        check_events!(events(ctx, to_load, OTHER.address(), WITH_RF), [], "no #DB");
        check_eq!(FAULTS.load(Ordering::Relaxed), 2, "one page fault, with RF set");
    }
}

case! {
    name: "emulated_instruction", cpl: [0], rules: ["RF-15"], needs: ["guestbp-exec-cpl0", "gd"],
    about: "RF protects IN as any instruction and is clear after it; a refused RDMSR pushes RF=1",
    fn body(ctx) {
        arm_at(0, rf_in);
        debug::arm_also(1, at(rf_in_done), Condition::Execute, Length::One);
        check_events!(events(ctx, to_in, 0, WITH_RF), [(at(rf_in_done), B1)], "after IN");
        check_eq!(fault_of(ctx, to_rdmsr, 0), Some((13, true)), "#GP of RDMSR");
        check_eq!(msr::read_safe(0x570), Err(msr::GP), "the MSR is absent");
    }
}

// IRET with a 16-bit operand size, at an address below 64 KiB: SP, SS, IP, CS and FLAGS are 16 bits
// each.
core::arch::global_asm!(
    ".pushsection .rodata.iret16, \"a\"",
    ".global iret16_begin, iret16_target, iret16_end",
    "iret16_begin:",
    "mov r8, rsp",
    "mov ecx, ss",
    "mov esp, 0x7f00",
    "push cx",
    ".byte 0x66, 0x68", // PUSH imm16
    ".word 0x7f00",
    ".byte 0x66, 0x68",
    ".word 2",
    "mov ecx, cs",
    "push cx",
    ".byte 0x66, 0x68",
    ".word 0x7000 + iret16_target - iret16_begin",
    ".byte 0x66, 0xcf",
    "iret16_target:",
    "mov rsp, r8",
    "ret",
    "iret16_end:",
    ".popsection",
);

unsafe extern "C" {
    static iret16_begin: u8;
    static iret16_target: u8;
    static iret16_end: u8;
}

case! {
    name: "iret16", cpl: [0, 3], rules: ["RF-10"], needs: ["gd"],
    needs_cpl0: ["guestbp-exec-cpl0", "guestbp-io"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "IRET with 16-bit operands leaves RF clear: the breakpoint on its target is met",
    fn body(ctx) {
        let base = 0x7000_u64;
        // SAFETY: the low page is free; both symbols bound one array of bytes.
        let target = unsafe {
            let begin = &raw const iret16_begin;
            let length = (&raw const iret16_end).offset_from_unsigned(begin);
            core::ptr::copy_nonoverlapping(begin, base as *mut u8, length);
            base + (&raw const iret16_target).offset_from_unsigned(begin) as u64
        };
        arm(3, target, Condition::Execute, Length::One);
        // SAFETY: the copied code keeps the C rules.
        let code = unsafe { core::mem::transmute::<u64, debug::SnippetFn>(base) };
        check_events!(events(ctx, code, 0, 0), [(target, Dr6::B3.bits())], "at the target");
    }
}

snippet! { do_sysenter [sysenter_target sysexit_target] "mov rcx, rsp", "lea rdx, [rip + sysexit_target]",
    "sysenter",
    "sysenter_target:", ".byte 0x48", "sysexit", "sysexit_target:", "nop", "ret"
}

/// Runs `f` with SYSENTER set up to enter at `sysenter_target`.
fn with_sysenter(f: impl FnOnce()) {
    let values = [
        (0x174, u64::from(KERNEL_CODE)),
        (0x175, PAGE.address() + 4096),
        (0x176, at(sysenter_target)),
    ];
    let old = values.map(|(index, _)| (index, msr::read(index)));
    for (index, value) in values {
        msr::write(index, value);
    }
    f();
    for (index, value) in old {
        msr::write(index, value);
    }
}

case! {
    name: "sysexit", cpl: [3], rules: ["RF-11"], needs: ["guestbp-io", "iretq-cpl3"],
    about: "after SYSEXIT RF is clear: the breakpoint on its target is met",
    fn body(ctx) {
        /// Records the RIP of the #DB, disarms the breakpoint, and sets SS for the IRET.
        ///
        /// SYSEXIT has set SS to a selector whose GDT entry is no stack segment: IRET would fault.
        fn record_and_disarm(frame: &mut TrapFrame) {
            AT[0].store(frame.rip, Ordering::Relaxed);
            frame.ss = u64::from(USER_DATA);
            debug::disarm();
        }
        AT[0].store(0, Ordering::Relaxed);
        trap::set_handler(1, record_and_disarm);
        arm_at(0, sysexit_target);
        with_sysenter(|| { debug::run(ctx, do_sysenter, 0, 0); });
        check_eq!(AT[0].load(Ordering::Relaxed), at(sysexit_target), "saved RIP");
    }
}

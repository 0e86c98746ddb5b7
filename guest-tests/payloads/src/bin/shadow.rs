//! The shadow of MOV SS: what it delays, and how it ends.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic;
use hindsight_guest::catch::logged;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::gdt::{KERNEL_DATA, USER_DATA};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_NMI};
use hindsight_guest::regs::dr::{Condition, Dr6, Length};
use hindsight_guest::{insn, smp, trap, vectors};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{self, BP, BS, DB, arm, arm_at, at, call, events};
use hindsight_payloads::{check_events, check_steps, clear_tf, clock, set_tf, snippet, syscall};

payload!("shadow");

static PAGE: ScratchPage = ScratchPage::new();

const B0: u64 = Dr6::B0.bits();
/// A vector for interrupts to oneself.
const VECTOR: u8 = 0x62;
/// A selector beyond the GDT.
const BAD_SELECTOR: u64 = 0xfff0;

// RDI: the selector, RSI: an address.
snippet! { step_ss [step_ss_next] set_tf!(), "mov ss, di", "nop", "step_ss_next:", "nop", clear_tf!(),
    "ret"
}
snippet! { load_ss [load_ss_nop load_ss_next] "mov ss, word ptr [rsi]", "load_ss_nop:", "nop",
    "load_ss_next:", "ret"
}
snippet! { load_ss_ud2 [load_ss_ud2_insn] "mov ss, word ptr [rsi]", "load_ss_ud2_insn:", "ud2" }
snippet! { load_ss_int3 [load_ss_int3_next] "mov ss, word ptr [rsi]", "int3", "load_ss_int3_next:", "ret" }
snippet! { load_ss_int80 [load_ss_int80_next] "mov ss, word ptr [rsi]", "int 0x80", "load_ss_int80_next:",
    "ret"
}
snippet! { load_ss_int1 [load_ss_int1_next] "mov ss, word ptr [rsi]", ".byte 0xf1", "load_ss_int1_next:", "ret" }
snippet! { load_ss_syscall [] "xor r10d, r10d", "mov ss, word ptr [rsi]", "syscall", "ret" }
snippet! { two_loads [two_loads_second two_loads_next] set_tf!(), "mov ss, di", "mov ss, di",
    "two_loads_second:", "nop", "two_loads_next:", clear_tf!(), "ret"
}
// RSI: 32 bits of offset, 16 of selector.
snippet! { step_lss [step_lss_next] set_tf!(), "lss eax, [rsi]", "step_lss_next:", clear_tf!(), "ret" }
snippet! { bad_ss [bad_ss_insn] "bad_ss_insn:", "mov ss, di", "ret" }
snippet! { pop_ss [] "push rdi", ".byte 0x17", "add rsp, 8", "ret" }
snippet! { step_sti [step_sti_next] set_tf!(), "sti", "step_sti_next:", "cli", clear_tf!(), "ret" }
snippet! { sti_then_ss [sti_then_ss_nop sti_then_ss_next] "sti", "mov ss, di", "sti_then_ss_nop:", "nop",
    "sti_then_ss_next:", "cli", "ret"
}
snippet! { ss_loop [ss_loop_nop] "mov ecx, 20", "2: mov ss, di", "ss_loop_nop:", "nop", "dec ecx", "jnz 2b",
    "ret"
}
snippet! { load_ss_cpuid [load_ss_cpuid_next] "mov r8, rbx", "mov ss, word ptr [rsi]", "cpuid",
    "load_ss_cpuid_next:", "mov rbx, r8", "ret"
}
snippet! { load_ss_in [load_ss_in_next] "mov edx, 0xe8", "mov ss, word ptr [rsi]", "in al, dx",
    "load_ss_in_next:", "ret"
}
snippet! { load_ss_rdmsr [load_ss_rdmsr_next] "mov ecx, 0x3b", "mov ss, word ptr [rsi]", "rdmsr",
    "load_ss_rdmsr_next:", "ret"
}
snippet! { step_ss_cpuid [step_ss_cpuid_next] "mov r8, rbx", set_tf!(), "mov ss, di", "cpuid",
    "step_ss_cpuid_next:", clear_tf!(), "mov rbx, r8", "ret"
}

/// The stack selector of this run's level.
fn selector(ctx: &hindsight_guest::case::Ctx) -> u64 {
    u64::from(if ctx.cpl == 3 { USER_DATA } else { KERNEL_DATA })
}

/// Puts the stack selector into the watched word, and watches it.
fn watch_selector(ctx: &hindsight_guest::case::Ctx) -> u64 {
    let address = PAGE.address() + 16;
    // SAFETY: the page is ours.
    unsafe { (address as *mut u64).write_volatile(selector(ctx)) };
    arm(0, address, Condition::ReadWrite, Length::Two);
    address
}

case! {
    name: "step_comes_later", cpl: [0, 3], rules: ["SHD-03", "TF-13", "SHD-12"], needs: ["gd"],
    needs_cpl0: ["tf-cpl0", "shadow-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3", "shadow-cpl3", "intn-cpl3"],
    about: "no step follows MOV SS; one follows the instruction after it",
    fn body(ctx) {
        let log = events(ctx, step_ss, selector(ctx), 0);
        check_eq!(debug::event(log, 0), (at(step_ss_next), BS), "the first step");
        check_eq!(log.count(), 2 + debug::CLEAR_TF_STEPS, "count of steps");
    }
}

case! {
    name: "data_breakpoint_comes_later", cpl: [0, 3], rules: ["SHD-04"], needs: ["guestbp-data", "gd"],
    needs_cpl0: ["shadow-cpl0"], needs_cpl3: ["iretq-cpl3", "shadow-cpl3"],
    about: "a breakpoint on the operand of MOV SS reports after the next instruction",
    fn body(ctx) {
        let address = watch_selector(ctx);
        check_events!(events(ctx, load_ss, 0, address), [(at(load_ss_next), B0)], "one #DB");
    }
}

case! {
    name: "lost_by_a_fault", cpl: [0, 3], rules: ["SHD-05", "D6-01"], needs: ["guestbp-data", "gd"],
    needs_cpl0: ["shadow-cpl0"], needs_cpl3: ["iretq-cpl3", "shadow-cpl3"],
    about: "the deferred breakpoint is lost when the next instruction faults",
    fn body(ctx) {
        let address = watch_selector(ctx);
        let mut fault = None;
        let log = logged(DB, || fault = debug::run(ctx, load_ss_ud2, 0, address));
        check_eq!(insn::read_dr6(), Dr6::RESET, "DR6");
        debug::disarm();
        check_events!(log, [], "no #DB");
        check_eq!(fault.map(|e| (e.vector, e.rip)), Some((6, at(load_ss_ud2_insn))), "the fault");
    }
}

case! {
    name: "at_entry_of_software_interrupt", cpl: [0, 3], rules: ["SHD-06", "DB-20"],
    needs: ["guestbp-data", "gd"],
    needs_cpl0: ["shadow-cpl0", "int3-cpl0", "intn-cpl0"],
    needs_cpl3: ["int3-cpl3", "intn-cpl3", "iretq-cpl3", "shadow-cpl3", "shadow-int3-cpl3"],
    about: "before INT3 and INT n the deferred breakpoint reports at the entry of their handler",
    fn body(ctx) {
        fn ignore(_frame: &mut TrapFrame) {}
        let address = watch_selector(ctx);
        let log = logged(DB | BP, || { debug::run(ctx, load_ss_int3, 0, address); });
        debug::disarm();
        check_eq!(log.count(), 2, "#DB and #BP");
        check_eq!(debug::event(log, 0), (vectors::entry(3), B0), "first the #DB at the handler");
        check_eq!(log.events().first().map(|e| (e.vector, e.cpl())), Some((1, 0)), "at CPL 0");
        check_eq!(log.events().get(1).map(|e| (e.vector, e.rip)), Some((3, at(load_ss_int3_next))), "then the #BP");

        trap::set_handler(0x80, ignore);
        let address = watch_selector(ctx);
        let log = events(ctx, load_ss_int80, 0, address);
        check_events!(log, [(vectors::entry(0x80), B0)], "INT n");
    }
}

case! {
    name: "before_int1", cpl: [0, 3], rules: ["SHD-06", "DB-20"], needs: ["guestbp-data", "guestbp-io"],
    about: "the #DB of INT1 reports the deferred breakpoint, and there is no second one",
    fn body(ctx) {
        let address = watch_selector(ctx);
        check_events!(events(ctx, load_ss_int1, 0, address), [(at(load_ss_int1_next), B0)], "INT1");
    }
}

case! {
    name: "at_entry_of_syscall", cpl: [3], rules: ["SHD-07"],
    needs: ["guestbp-data", "gd", "syscall-cpl3", "iretq-cpl3", "shadow-cpl3"],
    about: "before SYSCALL the deferred breakpoint reports at IA32_LSTAR",
    fn body(ctx) {
        let address = watch_selector(ctx);
        let mut log = None;
        syscall::with(0, || log = Some(events(ctx, load_ss_syscall, 0, address)));
        let log = require_some!(log, "a log");
        check_events!(log, [(syscall::entry(), B0)], "one #DB");
        check_eq!(log.events().first().map(|e| e.cpl()), Some(0), "at CPL 0");
    }
}

case! {
    name: "suppresses_breakpoint", cpl: [0, 3], rules: ["SHD-08", "DB-04"], needs: ["gd"],
    needs_cpl0: ["shadow-cpl0", "guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3", "shadow-cpl3"],
    about: "an instruction breakpoint right after MOV SS is suppressed, one instruction later it is not",
    fn body(ctx) {
        let address = watch_selector(ctx);
        arm_at(1, load_ss_nop);
        check_events!(events(ctx, load_ss, 0, address), [], "right after");
        arm_at(1, load_ss_next);
        check_events!(events(ctx, load_ss, 0, address), [(at(load_ss_next), Dr6::B1.bits())], "one later");
    }
}

case! {
    name: "second_load", cpl: [0, 3], rules: ["SHD-09", "OP-42"], needs: ["guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "the second of two SS loads has no shadow",
    fn body(ctx) {
        let log = events(ctx, two_loads, selector(ctx), 0);
        check_steps!(log, [(at(two_loads_second), BS), (at(two_loads_next), BS)], "after the second load");
    }
}

case! {
    name: "lss", cpl: [0, 3], rules: ["SHD-10"], needs: ["gd"], needs_cpl0: ["shadow-cpl0", "tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3", "shadow-cpl3"],
    about: "a step follows LSS at once",
    fn body(ctx) {
        let address = PAGE.address();
        // SAFETY: the page is ours.
        unsafe { (address as *mut u64).write_volatile(selector(ctx) << 32) };
        check_steps!(events(ctx, step_lss, 0, address), [(at(step_lss_next), BS)], "at once");
    }
}

case! {
    name: "faulting_load", cpl: [0, 3], rules: ["SHD-11"], needs: ["gd", "guestbp-exec-cpl0"],
    needs_cpl0: ["shadow-cpl0"], needs_cpl3: ["iretq-cpl3", "shadow-cpl3"],
    about: "a MOV SS that faults has no shadow: a breakpoint on the handler's first instruction is met",
    fn body(ctx) {
        arm(2, vectors::entry(13), Condition::Execute, Length::One);
        let mut fault = None;
        let log = logged(DB, || fault = debug::run(ctx, bad_ss, BAD_SELECTOR, 0));
        debug::disarm();
        check_events!(log, [(vectors::entry(13), Dr6::B2.bits())], "at the handler");
        check_eq!(fault.map(|e| (e.code(), e.rip)), Some(((13, BAD_SELECTOR), at(bad_ss_insn))), "#GP");
    }
}

case! {
    name: "pop_ss_is_undefined", cpl: [0, 3], rules: ["SHD-12"], needs: ["exceptions"],
    needs_cpl3: ["iretq-cpl3"],
    about: "POP SS raises #UD in 64-bit mode",
    fn body(ctx) {
        let fault = debug::run(ctx, pop_ss, selector(ctx), 0);
        check_eq!(fault.map(|e| e.code()), Some((6, 0)), "vector and error code");
    }
}

case! {
    name: "sti", cpl: [0], rules: ["SHD-13"], needs: ["tf-cpl0", "gd"],
    about: "a step follows STI at once",
    fn body(ctx) {
        let log = events(ctx, step_sti, 0, 0);
        check_eq!(debug::event(log, 0), (at(step_sti_next), BS), "the first step");
        // STI and CLI, and what clears TF.
        check_eq!(log.count(), 2 + debug::CLEAR_TF_STEPS, "count of steps");
    }
}

static INTERRUPTED: AtomicU64 = AtomicU64::new(0);

fn record_rip(frame: &mut TrapFrame) {
    INTERRUPTED.store(frame.rip, Ordering::Relaxed);
    apic::eoi();
}

case! {
    name: "holds_interrupts", cpl: [0], rules: ["SHD-01"], needs: ["gd", "shadow-cpl0"],
    about: "a pending interrupt is taken after the instruction that follows MOV SS",
    fn body(_ctx) {
        apic::enable();
        trap::set_handler(VECTOR, record_rip);
        INTERRUPTED.store(0, Ordering::Relaxed);
        apic::send(apic::id(), ICR_ASSERT | u32::from(VECTOR));
        // The shadow of STI covers MOV SS, and that of MOV SS the NOP.
        call(sti_then_ss, u64::from(KERNEL_DATA), 0);
        apic::disable();
        check_eq!(INTERRUPTED.load(Ordering::Relaxed), at(sti_then_ss_next), "saved RIP");
    }
}

static NMIS: AtomicU64 = AtomicU64::new(0);
static IN_SHADOW: AtomicU64 = AtomicU64::new(0);

fn record_nmi(frame: &mut TrapFrame) {
    NMIS.fetch_add(1, Ordering::Relaxed);
    if frame.rip == at(ss_loop_nop) {
        IN_SHADOW.fetch_add(1, Ordering::Relaxed);
    }
}

/// Number of NMIs after which the loop of SS loads ends.
const ENOUGH_NMIS: u64 = 100;

case! {
    name: "holds_nmi", cpl: [0], rules: ["SHD-02"], needs: ["gd", "shadow-cpl0"], vcpus: 2,
    timeout_ms: 10000,
    about: "NMIs that another processor sends are never taken right after MOV SS",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        NMIS.store(0, Ordering::Relaxed);
        IN_SHADOW.store(0, Ordering::Relaxed);
        trap::set_handler(2, record_nmi);
        smp::run(1, |_| while NMIS.load(Ordering::Relaxed) < ENOUGH_NMIS {
            apic::send(0, ICR_NMI | ICR_ASSERT);
        });
        let enough = clock::wait_until(8000, || {
            call(ss_loop, u64::from(KERNEL_DATA), 0);
            NMIS.load(Ordering::Relaxed) >= ENOUGH_NMIS
        });
        NMIS.store(ENOUGH_NMIS, Ordering::Relaxed);
        smp::wait(1);
        // One more may be on its way. A virtual processor may look for it only once in some
        // thousand instructions, and time passes without instructions where the host runs something
        // else.
        (0..10_000).for_each(|_| insn::pause());
        clock::wait(5);
        check!(enough, "the NMIs came");
        check_eq!(IN_SHADOW.load(Ordering::Relaxed), 0, "NMIs right after MOV SS");
    }
}

case! {
    name: "emulated_instruction", cpl: [0], rules: ["SHD-14", "RF-15"], needs: ["gd", "shadow-cpl0"],
    needs_cpl0: ["guestbp-data", "guestbp-io"],
    about: "CPUID, IN and RDMSR in the shadow end it, and the deferred breakpoint reports after them",
    fn body(ctx) {
        require!(msr::read_safe(0x3b).is_ok(), "the MSR is there");
        let codes = [
            (load_ss_cpuid as debug::SnippetFn, load_ss_cpuid_next as debug::SnippetLabel),
            (load_ss_in, load_ss_in_next),
            (load_ss_rdmsr, load_ss_rdmsr_next),
        ];
        for (code, next) in codes {
            let address = watch_selector(ctx);
            check_events!(events(ctx, code, 0, address), [(at(next), B0)], "after the instruction");
        }
        let log = events(ctx, step_ss_cpuid, selector(ctx), 0);
        check_steps!(log, [(at(step_ss_cpuid_next), BS)], "single step");
    }
}

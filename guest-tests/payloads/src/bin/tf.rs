//! Single step.

#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::catch::logged;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::gdt::MAX_CPUS;
use hindsight_guest::gdt::{FIRST_TSS, KERNEL_CODE};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, DEFAULT_BASE};
use hindsight_guest::regs::dr::Dr6;
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, paging, trap};
use hindsight_payloads::access::{self, ScratchPage};
use hindsight_payloads::debug::{self, BS, CLEAR_TF_STEPS, DB, at, event, events};
use hindsight_payloads::{check_steps, clear_tf, set_tf, snippet, syscall};

payload!("tf");

static PAGE: ScratchPage = ScratchPage::new();
static OTHER: ScratchPage = ScratchPage::new();

const TF: u64 = Rflags::TF.bits();
const IA32_DEBUGCTL: u32 = 0x1d9;
/// DEBUGCTL.BTF.
const BTF: u64 = 2;

snippet! { step_ud2 [step_ud2_insn] set_tf!(), "step_ud2_insn:", "ud2" }
snippet! { step_load [step_load_next] set_tf!(), "mov al, [rdi]", "step_load_next:", clear_tf!(), "ret" }
snippet! { step_branches [step_taken step_not_taken step_called step_returned]
    "cmp eax, eax", set_tf!(), "jmp step_taken", "nop", "step_taken:", "jne step_branches", "step_not_taken:", "call step_called", "step_returned:",
    "jmp 3f", "step_called:", "ret", "3:", clear_tf!(), "ret"
}
snippet! { step_rep [step_rep_insn step_rep_next] "mov rcx, rsi", set_tf!(), "step_rep_insn:", "rep stosb",
    "step_rep_next:", clear_tf!(), "ret"
}
snippet! { step_hlt [step_hlt_next] set_tf!(), "hlt", "step_hlt_next:", clear_tf!(), "ret" }
snippet! { step_syscall [step_syscall_insn step_syscall_next] "xor r10d, r10d", set_tf!(),
    "step_syscall_insn:", "syscall", "step_syscall_next:", "mov [rdi], r9", clear_tf!(), "ret"
}
snippet! { sysret_into_step [sysret_into_step_next] "mov r10d, 0x100", "syscall", "sysret_into_step_next:",
    "nop", clear_tf!(), "ret"
}
snippet! { step_pushf [step_pushf_next] set_tf!(), "pushfq", "step_pushf_next:", "pop rax", clear_tf!(),
    "mov [rdi], rax", "ret"
}
snippet! { step_jump_btf [btf_target] set_tf!(), "nop", "nop", "jmp btf_target", "btf_target:", clear_tf!(),
    "ret"
}

// Instructions that the monitor may complete, each with the label after it. RDI is a device's register.
macro_rules! stepped {
    ($($code:ident $next:ident [$($line:expr),+];)+) => {
        $(
            snippet! { $code [$next] "mov r8, rbx", set_tf!(), $($line,)+ concat!(stringify!($next), ":"), clear_tf!(), "mov rbx, r8", "ret" }
        )+
        /// Each sequence, and the address after its instruction.
        fn emulated() -> impl Iterator<Item = (debug::SnippetFn, u64)> {
            [$(($code as debug::SnippetFn, at($next))),+].into_iter()
        }
    };
}

stepped! {
    cpuid cpuid_next ["cpuid"];
    rdtsc rdtsc_next ["rdtsc"];
    input input_next ["in al, 0x61"];
    output output_next ["out 0xe8, al"];
    device_load device_load_next ["mov eax, [rdi]"];
    device_store device_store_next ["mov dword ptr [rdi], 0"];
    read_cr3 read_cr3_next ["mov rax, cr3"];
    read_dr7 read_dr7_next ["mov rax, dr7"];
    invlpg invlpg_next ["invlpg [rdi]"];
    // RSI: IA32_TSC_AUX.
    rdmsr_insn rdmsr_next ["mov ecx, esi", "rdmsr"];
}

case! {
    name: "no_step_after_fault", cpl: [0, 3], rules: ["TF-05"], needs: ["exceptions"],
    needs_cpl0: ["tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "an instruction that faults under TF is not followed by a step; its image holds TF",
    fn body(ctx) {
        let mut fault = None;
        let log = logged(DB, || fault = debug::run(ctx, step_ud2, 0, 0));
        check_eq!(log.count(), 0, "count of steps");
        check_eq!(fault.map(|e| (e.vector, (e.rip, e.rflags & TF))), Some((6, (at(step_ud2_insn), TF))), "#UD, and TF in its image");
        check_eq!(insn::read_dr6(), Dr6::RESET, "DR6");
    }
}

static FLAGS: AtomicU64 = AtomicU64::new(0);

fn map_other(_frame: &mut TrapFrame) {
    FLAGS.store(insn::rflags(), Ordering::Relaxed);
    paging::change(OTHER.address(), paging::P, 0);
}

case! {
    name: "restarted_instruction", cpl: [0, 3], rules: ["TF-05", "TF-04"], needs: ["exceptions"],
    needs_cpl0: ["tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "the handler of a fault runs with TF clear; the instruction is stepped when it is executed again",
    fn body(ctx) {
        paging::change(OTHER.address(), 0, paging::P);
        FLAGS.store(TF, Ordering::Relaxed);
        trap::set_handler(14, map_other);
        check_steps!(events(ctx, step_load, OTHER.address(), 0), [(at(step_load_next), BS)], "one step");
        check_eq!(FLAGS.load(Ordering::Relaxed) & TF, 0, "TF in the handler");
    }
}

case! {
    name: "branch_targets", cpl: [0, 3], rules: ["TF-01", "DR-30"], needs: [], needs_cpl0: ["tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "saved RIP is the next instruction in program flow",
    fn body(ctx) {
        let log = events(ctx, step_branches, 0, 0);
        let expected = [step_taken, step_not_taken, step_called, step_returned];
        for (n, label) in expected.into_iter().enumerate() {
            check_eq!(event(log, n), (at(label), BS), "a step");
        }
        check_eq!(log.count(), 5 + CLEAR_TF_STEPS, "count of steps");
    }
}

case! {
    name: "repeated_string", cpl: [0, 3], rules: ["TF-12"], needs: [], needs_cpl0: ["tf-cpl0", "intn-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "each iteration of REP STOSB is a step; with RCX=0 the instruction is one",
    fn body(ctx) {
        let (here, next) = (at(step_rep_insn), at(step_rep_next));
        let log = events(ctx, step_rep, PAGE.address(), 3);
        check_steps!(log, [(here, BS), (here, BS), (next, BS)], "three iterations");
        let counts = [0, 1, 2].map(|n: usize| log.events().get(n).map_or(99, |e| e.frame.rcx));
        check_eq!(counts, [2, 1, 0], "RCX");
        check_steps!(events(ctx, step_rep, PAGE.address(), 0), [(next, BS)], "none");
    }
}

case! {
    name: "hlt", cpl: [0], rules: ["TF-15"], needs: ["tf-cpl0", "guestbp-io"],
    about: "HLT under TF is stepped, and the processor goes on",
    fn body(ctx) {
        check_steps!(events(ctx, step_hlt, 0, 0), [(at(step_hlt_next), BS)], "one step");
    }
}

case! {
    name: "syscall_masked", cpl: [3], rules: ["TF-09", "TF-11", "MSR-37"],
    needs: ["tf-cpl3", "syscall-cpl3", "iretq-cpl3", "gd-rf"],
    about: "SYSCALL that clears TF is not stepped and R11 has TF; SYSRET that restores it is followed by #DB at once",
    fn body(ctx) {
        let address = PAGE.address() + 8;
        let mut log = None;
        syscall::with(TF, || log = Some(events(ctx, step_syscall, address, 0)));
        let log = require_some!(log, "a log");
        check_eq!(event(log, 0), (at(step_syscall_next), BS), "the first step: after SYSRET");
        // The store and what clears TF.
        check_eq!(log.count(), 2 + CLEAR_TF_STEPS, "count of steps");
        // SAFETY: the page is ours.
        let r11 = unsafe { (address as *const u64).read_volatile() };
        check_eq!(r11 & TF, TF, "TF in R11");
    }
}

case! {
    name: "syscall_unmasked", cpl: [3], rules: ["TF-10"], needs: ["tf-cpl3", "syscall-cpl3", "iretq-cpl3"],
    about: "SYSCALL that keeps TF is followed by #DB at IA32_LSTAR, at CPL 0",
    fn body(ctx) {
        let mut log = None;
        syscall::with(0, || log = Some(events(ctx, step_syscall, PAGE.address(), 0)));
        let log = require_some!(log, "a log");
        for (n, rip) in [syscall::entry(), syscall::second(), syscall::sysret(), at(step_syscall_next)].into_iter().enumerate() {
            check_eq!(event(log, n), (rip, BS), "a step");
        }
        let levels = [0, 1, 2, 3].map(|n: usize| log.events().get(n).map_or(9, |e| u64::from(e.cpl())));
        check_eq!(levels, [0, 0, 0, 3], "levels");
    }
}

case! {
    name: "sysret_into_step", cpl: [3], rules: ["TF-11"],
    needs: ["tf-cpl3", "syscall-cpl3", "iretq-cpl3", "gd-rf"],
    about: "SYSRET that sets TF is followed by #DB before any instruction of CPL 3",
    fn body(ctx) {
        let mut log = None;
        syscall::with(0, || log = Some(events(ctx, sysret_into_step, 0, 0)));
        let log = require_some!(log, "a log");
        check_eq!(event(log, 0), (at(sysret_into_step_next), BS), "at the target");
        check_eq!(log.events().first().map(|e| e.cpl()), Some(3), "its level");
        check_eq!(log.count(), 2 + CLEAR_TF_STEPS, "count of steps");
    }
}

static STEP: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Records the RIP of the first step, and ends the stepping.
fn end_stepping(frame: &mut TrapFrame) {
    STEP[0].store(frame.rip, Ordering::Relaxed);
    STEP[1].store(frame.cs & 3, Ordering::Relaxed);
    frame.rflags &= !TF;
}

fn step_seen() -> (u64, u64) {
    (
        STEP[0].load(Ordering::Relaxed),
        STEP[1].load(Ordering::Relaxed),
    )
}

/// A slot of the GDT that belongs to the last possible processor, which these cases do not start.
#[expect(clippy::cast_possible_truncation, reason = "MAX_CPUS is 64")]
const GATE: u16 = FIRST_TSS + 16 * (MAX_CPUS as u16 - 1);

snippet! { step_call_gate [call_gate_target]
    "sub rsp, 24", "mov dword ptr [rsp], 0", "mov word ptr [rsp + 4], si", set_tf!(), "call fword ptr [rsp]", "add rsp, 24", "ret",
    "call_gate_target:", ".byte 0x48", "retf"
}

/// Puts a call gate for CPL 3 into the GDT.
fn set_call_gate(target: u64) {
    let mut pointer = [0_u8; 10];
    // SAFETY: the slot is inside the GDT, and unused.
    unsafe {
        asm!("sgdt [{}]", in(reg) &raw mut pointer, options(nostack));
        let base = (&raw const pointer)
            .cast::<u8>()
            .add(2)
            .cast::<u64>()
            .read_unaligned();
        let slot = (base + u64::from(GATE)) as *mut u64;
        let low = target & 0xffff
            | u64::from(KERNEL_CODE) << 16
            | 0xec << 40
            | (target >> 16 & 0xffff) << 48;
        slot.write_volatile(low);
        slot.add(1).write_volatile(target >> 32);
    }
}

case! {
    name: "call_gate", cpl: [3], rules: ["TF-08"], needs: ["tf-cpl3", "iretq-cpl3", "gd-rf"],
    about: "a far CALL through a call gate keeps TF: the step after it is at the inner level",
    fn body(ctx) {
        set_call_gate(at(call_gate_target));
        trap::set_handler(1, end_stepping);
        debug::run(ctx, step_call_gate, 0, u64::from(GATE) | 3);
        check_eq!(step_seen(), (at(call_gate_target), 0), "RIP and level of the step");
    }
}

snippet! { step_sysenter [step_sysenter_target step_sysexit_target]
    "mov rcx, rsp", "lea rdx, [rip + step_sysexit_target]", set_tf!(), "sysenter",
    "step_sysenter_target:", "sub rcx, 0", ".byte 0x48", "sysexit", "step_sysexit_target:", "ret"
}

case! {
    name: "sysenter", cpl: [3], rules: ["TF-08"], needs: ["tf-cpl3", "iretq-cpl3", "guestbp-io"],
    about: "SYSENTER keeps TF: the step after it is at CPL 0",
    fn body(ctx) {
        let values = [(0x174, u64::from(KERNEL_CODE)), (0x175, PAGE.address() + 4096), (0x176, at(step_sysenter_target))];
        let old = values.map(|(index, _)| (index, msr::read(index)));
        for (index, value) in values {
            msr::write(index, value);
        }
        trap::set_handler(1, end_stepping);
        debug::run(ctx, step_sysenter, 0, 0);
        for (index, value) in old {
            msr::write(index, value);
        }
        check_eq!(step_seen(), (at(step_sysenter_target), 0), "RIP and level of the step");
    }
}

case! {
    name: "branches_only", cpl: [0, 3], rules: ["TF-17"], needs: ["guestbp-io"], needs_cpl3: ["iretq-cpl3"],
    about: "with DEBUGCTL.BTF set only the branch is stepped, and the #DB clears BTF",
    fn body(ctx) {
        msr::write(IA32_DEBUGCTL, BTF);
        check_steps!(events(ctx, step_jump_btf, 0, 0), [(at(btf_target), BS)], "the branch");
        check_eq!(msr::read(IA32_DEBUGCTL), 0, "IA32_DEBUGCTL");
    }
}

case! {
    name: "emulated_instructions", cpl: [0], rules: ["TF-18", "RF-15"],
    needs: ["tf-cpl0", "gd", "guestbp-io"],
    about: "CPUID, IN, OUT, device accesses, RDMSR and their like are each one step",
    fn body(ctx) {
        let register = DEFAULT_BASE + u64::from(ApicRegister::TPR.0);
        for (code, next) in emulated() {
            let log = events(ctx, code, register, 0xc000_0103);
            let step = log.events().iter().position(|e| e.rip == next);
            check!(step.is_some_and(|n| n < 2), "a step after the instruction");
            let n = step.unwrap_or(0);
            check_eq!(event(log, n), (next, BS), "RIP and conditions");
            check_eq!(log.count(), n + 1 + CLEAR_TF_STEPS, "count of steps");
        }
    }
}

case! {
    name: "pushf_shows_tf", cpl: [0, 3], rules: ["TF-19"], needs: [], needs_cpl0: ["tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "PUSHFQ under TF stores an image with TF",
    fn body(ctx) {
        let address = PAGE.address() + 24;
        let log = events(ctx, step_pushf, address, 0);
        check_eq!(event(log, 0), (at(step_pushf_next), BS), "the step");
        check_eq!(access::load(address + 1) & 1, 1, "TF in the image");
    }
}

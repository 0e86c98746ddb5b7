//! Single-stepping on branches (BTF).
//!
//! The handler of #DB records RIP, DR6 and IA32_DEBUGCTL. Then it writes a value that the case
//! chose to IA32_DEBUGCTL, and returns with TF unchanged.

#![no_std]
#![no_main]

use core::arch::global_asm;

use hindsight_guest::insn;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::regs::rflags::Rflags;
use hindsight_payloads::branch::recorder::AsmHandler;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{BTF, BranchRun, BranchSequence, LBR, run_checked};
use hindsight_payloads::{need_lbr, sequence};

payload!("btf");

/// Why a case is skipped without the facility.
const ABSENT: &str = "IA32_DEBUGCTL does not accept BTF";

macro_rules! need_btf {
    ($ctx:expr) => {
        if hindsight_guest::msr::write_safe(IA32_DEBUGCTL, BTF).is_err()
            || hindsight_guest::msr::read(IA32_DEBUGCTL) != BTF
        {
            skip!($ctx, ABSENT);
        }
        hindsight_guest::msr::write(IA32_DEBUGCTL, 0);
    };
}

/// The most #DBs that are recorded.
const STEPS_MAX: usize = 64;

global_asm!(
    ".pushsection .text.btf, \"ax\"",
    ".global btf_handler",
    "btf_handler:",
    "push rax",
    "push rcx",
    "push rdx",
    "push rbx",
    "mov rbx, [rip + btf_log]",
    "cmp rbx, {steps_max}",
    "jae 2f",
    "inc qword ptr [rip + btf_log]",
    "shl rbx, 5",
    "lea rax, [rip + btf_log]",
    "lea rbx, [rax + rbx + 16]",
    "mov rax, [rsp + 32]",
    "mov [rbx], rax",
    "mov rax, dr6",
    "mov [rbx + 8], rax",
    "mov ecx, 0x1d9",
    "rdmsr",
    "shl rdx, 32",
    "or rax, rdx",
    "mov [rbx + 16], rax",
    "mov rax, [rsp + 48]",
    "mov [rbx + 24], rax",
    "2:",
    // RF keeps an instruction breakpoint from raising #DB again.
    "or qword ptr [rsp + 48], 0x10000",
    "mov eax, 0xffff0ff0",
    "mov dr6, rax",
    "mov ecx, 0x1d9",
    "mov eax, [rip + btf_log + 8]",
    "xor edx, edx",
    "wrmsr",
    "pop rbx",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "iretq",
    ".popsection",
    ".pushsection .bss.btf, \"aw\", @nobits",
    ".balign 8",
    ".global btf_log",
    "btf_log: .fill 16 + 32 * {steps_max}, 1, 0",
    ".popsection",
    steps_max = const STEPS_MAX,
);

/// A #DB, as the handler records it.
#[repr(C)]
#[derive(Clone, Copy)]
struct RecordedDb {
    rip: u64,
    dr6: u64,
    debugctl: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DbLog {
    count: usize,
    /// The value that the handler writes to IA32_DEBUGCTL.
    rearm: u64,
    steps: [RecordedDb; STEPS_MAX],
}

impl DbLog {
    fn steps(&self) -> &[RecordedDb] {
        &self.steps[..self.count.min(STEPS_MAX)]
    }
}

unsafe extern "C" {
    fn btf_handler();
    static mut btf_log: DbLog;
}

const HANDLERS: &[(u8, AsmHandler)] = &[(1, btf_handler)];

/// Runs the sequence with this IA32_DEBUGCTL; the handler of #DB writes `rearm` to it.
fn step(level: u8, sequence: &BranchSequence, debugctl: u64, rearm: u64) -> Option<DbLog> {
    // SAFETY: only a run accesses it otherwise, and none runs now.
    unsafe {
        (&raw mut btf_log.count).write_volatile(0);
        (&raw mut btf_log.rearm).write_volatile(rearm);
    }
    insn::write_dr6(Dr6::RESET);
    run_checked(BranchRun {
        handlers: HANDLERS,
        ..BranchRun::new(level, sequence, debugctl)
    })?;
    // SAFETY: the run is over, so no handler writes it.
    Some(unsafe { (&raw const btf_log).read_volatile() })
}

/// Checks that a #DB followed each branch of the sequence.
///
/// Each #DB saved the target, had only BS in DR6, and found BTF and LBR clear.
fn check_steps(log: &DbLog, sequence: &BranchSequence) {
    let expected = sequence.records();
    check_eq!(log.count, expected.len(), "count of #DBs");
    for (n, (step, record)) in (0_u64..).zip(log.steps().iter().zip(expected)) {
        check_eq!(
            (n, step.rip),
            (n, record.to),
            "number of the #DB, saved RIP"
        );
        check_eq!(step.dr6 & 0xe00f, Dr6::BS.bits(), "DR6");
        check_eq!(step.debugctl & (BTF | LBR), 0, "BTF and LBR in the handler");
    }
}

sequence! {
    /// Branches and other instructions with TF set. A #DB must follow each record: a taken branch.
    walk:
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "nop",
        "xor eax, eax",
        "jnz 40f",
        "20: jz 21f", "40: ud2",
        "21: nop",
        "22: jmp 23f", "ud2",
        "23: nop",
        "24: call 50f",
        "25: lea rax, [rip + 27f]",
        "26: jmp rax", "ud2",
        "50: nop",
        "51: ret",
        "27: mov ecx, 3",
        "28: loop 28b",
        "29: nop",
        "mov ecx, 1", "loop 28b",
        "sub rsp, 64", "mov rdi, rsp", "mov ecx, 64", "rep stosb",
        "mov rsi, rsp", "mov rdi, rsp", "mov ecx, 64", "repe cmpsb", "add rsp, 64",
        "pushfq", "and qword ptr [rsp], -257", "popfq",
        "jmp 30f", "ud2",
        "30: nop",
    => ["20b", "21b", "JCC"], ["22b", "23b", "REL_JMP"], ["24b", "50b", "REL_CALL"],
        ["51b", "25b", "RET_NEAR"], ["26b", "27b", "IND_JMP"],
        ["28b", "28b", "JCC"], ["28b", "28b", "JCC"],
}

case! {
    name: "near_branches", cpl: [0, 3], rules: ["BTF-01", "BTF-02", "BTF-04", "BTF-06", "BTF-10", "BTF-11", "TF-17"],
    needs: [],
    about: "#DB with BS follows only taken branches: no other instruction and no REP iteration",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(ctx.cpl, walk(), BTF, BTF), "no unhandled exception");
        check_steps(&log, walk());
    }
}

case! {
    name: "clears_lbr_too", cpl: [0, 3], rules: ["BTF-04", "DCTL-06"], needs: [],
    about: "each #DB clears BTF and LBR",
    fn body(ctx) {
        need_btf!(ctx);
        need_lbr!(ctx);
        let log = require_some!(step(ctx.cpl, walk(), BTF | LBR, BTF | LBR), "no unhandled exception");
        check_steps(&log, walk());
    }
}

sequence! {
    /// Far branches with TF set: jump, call, return, and an IRET that keeps TF.
    far_walk:
        "mov rbp, rsp", "sub rsp, 16", "mov word ptr [rsp + 4], cs",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "lea rax, [rip + 21f]", "mov [rsp], eax",
        "20: .byte 0xff, 0x2c, 0x24", "ud2",
        "21: lea rax, [rip + 23f]", "mov [rsp], eax",
        "22: lcall fword ptr [rsp]",
        "24: mov rax, rsp",
        "mov ecx, ss", "push rcx", "push rax", "pushfq", "mov ecx, cs", "push rcx",
        "lea rcx, [rip + 26f]", "push rcx",
        "25: iretq", "ud2",
        "23: retf",
        "26: pushfq", "and qword ptr [rsp], -257", "popfq",
        "mov rsp, rbp",
    => ["20b", "21b", "FAR"], ["22b", "23b", "FAR"], ["23b", "24b", "FAR"], ["25b", "26b", "FAR"],
}

case! {
    name: "far_branches", cpl: [0, 3], rules: ["BTF-01", "BTF-06"], needs: [],
    about: "#DB follows far JMP, CALL, RET and IRET",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(ctx.cpl, far_walk(), BTF, BTF), "no unhandled exception");
        check_steps(&log, far_walk());
    }
}

sequence! {
    /// Branches without TF.
    without_tf:
        "20: jmp 21f", "ud2", "21: call 22f", "22: pop rax", "int 0x82", "nop",
    =>
}

case! {
    name: "needs_tf", cpl: [0, 3], rules: ["BTF-03"], needs: [],
    about: "BTF without TF raises no #DB",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(ctx.cpl, without_tf(), BTF, 0), "no unhandled exception");
        check_eq!(log.count, 0, "count of #DBs");
    }
}

sequence! {
    /// A branch and other instructions. A #DB must follow each record if the handler of the first
    /// one leaves BTF clear.
    resumes_stepping:
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "nop",
        "20: jmp 21f", "ud2",
        "21: nop",
        "22: nop",
        "23: pushfq",
        "24: and qword ptr [rsp], -257",
        "25: popfq",
        "26: nop",
    => ["20b", "21b", "REL_JMP"], ["21b", "22b", "0"], ["22b", "23b", "0"], ["23b", "24b", "0"],
        ["24b", "25b", "0"], ["25b", "26b", "0"],
}

case! {
    name: "handler_without_btf", cpl: [0, 3], rules: ["BTF-05", "BTF-04", "TF-03"], needs: [],
    about: "if the handler leaves BTF clear, single-stepping of every instruction follows",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(ctx.cpl, resumes_stepping(), BTF, 0), "no unhandled exception");
        check_steps(&log, resumes_stepping());
    }
}

sequence! {
    /// A software interrupt and a fault with TF set, and a branch after each.
    events:
        "mov r14, rsp",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "int 0x82",
        "nop",
        "20: jmp 21f", "ud2",
        "21: ud2",
        "nop",
        "22: jmp 23f", "ud2",
        "23: pushfq", "and qword ptr [rsp], -257", "popfq",
    => ["20b", "21b", "REL_JMP"], ["22b", "23b", "REL_JMP"],
}

case! {
    name: "interrupts_and_exceptions", cpl: [0, 3], rules: ["BTF-07", "BTF-08", "OP-16"], needs: [],
    about: "they clear TF and raise no #DB; nor does the IRET that restores TF, but the next branch does",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(ctx.cpl, events(), BTF, BTF), "no unhandled exception");
        check_steps(&log, events());
    }
}

case! {
    name: "iret_to_tf", cpl: [3], rules: ["BTF-08"], needs: [],
    about: "an IRET that sets TF with BTF set raises no #DB; the first branch after it does",
    fn body(ctx) {
        need_btf!(ctx);
        // SAFETY: only a run accesses it otherwise, and none runs now.
        unsafe {
            (&raw mut btf_log.count).write_volatile(0);
            (&raw mut btf_log.rearm).write_volatile(BTF);
        }
        let sequence = iret_target();
        let flags = Rflags::TF.bits();
        let run = BranchRun { handlers: HANDLERS, flags, ..BranchRun::new(3, sequence, BTF) };
        require!(run_checked(run).is_some(), "no unhandled exception");
        // SAFETY: the run is over, so no handler writes it.
        let log = unsafe { (&raw const btf_log).read_volatile() };
        check_steps(&log, sequence);
    }
}

sequence! {
    /// A branch; the sequence is entered with TF set.
    iret_target:
        "nop", "nop",
        "20: jmp 21f", "ud2",
        "21: pushfq", "and qword ptr [rsp], -257", "popfq",
    => ["20b", "21b", "REL_JMP"],
}

sequence! {
    /// Executes with TF set: a store to RSP-128, a CALL that pushes to RSP-8, and an IN.
    breakpoints:
        "mov rbp, rsp",
        "mov esp, 0x03d00000",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "20: mov byte ptr [rsp - 128], 1",
        "21: nop",
        "22: call 23f", "ud2",
        "23: nop",
        "24: nop",
        "add rsp, 8",
        "pushfq", "and qword ptr [rsp], -257", "popfq",
        "mov rsp, rbp",
    => ["20b", "21b", "0"], ["22b", "23b", "REL_CALL"], ["23b", "24b", "0"],
}

case! {
    name: "breakpoints", cpl: [0, 3], rules: ["BTF-09"], needs: [],
    about: "breakpoints on any instruction raise #DB and clear BTF; BS is set only after a taken branch",
    fn body(ctx) {
        need_btf!(ctx);
        let records = breakpoints().records();
        insn::write_dr0(seq::UNMAPPED - 128);
        insn::write_dr1(seq::UNMAPPED - 8);
        insn::write_dr2(records[2].to);
        let dr7 = Dr7::RESET
            .with_breakpoint(BreakpointIndex(0), Condition::Write, Length::One)
            .with_breakpoint(BreakpointIndex(2), Condition::Execute, Length::One);
        insn::write_dr7(dr7.0);
        let log = require_some!(step(ctx.cpl, breakpoints(), BTF, BTF), "no unhandled exception");
        insn::write_dr7(Dr7::RESET.0);
        // The store (B0 alone), the call (BS alone), the instruction (B2 alone).
        let expected = [(records[0].to, 1), (records[1].to, Dr6::BS.bits()), (records[2].to, 4)];
        check_eq!(log.count, 3, "count of #DBs");
        for (step, (rip, conditions)) in log.steps().iter().zip(expected) {
            check_eq!((step.rip, step.dr6 & 0xe00f), (rip, conditions), "saved RIP, DR6");
            check_eq!(step.debugctl, 0, "IA32_DEBUGCTL in the handler");
        }
    }
}

case! {
    name: "breakpoint_on_a_branch", cpl: [0, 3], rules: ["BTF-09"], needs: [],
    about: "a call whose push hits a data breakpoint reports both",
    fn body(ctx) {
        need_btf!(ctx);
        let records = breakpoints().records();
        insn::write_dr1(seq::UNMAPPED - 8);
        insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(1), Condition::Write, Length::Eight).0);
        let log = require_some!(step(ctx.cpl, breakpoints(), BTF, BTF), "no unhandled exception");
        insn::write_dr7(Dr7::RESET.0);
        // PUSHF before and after the call stores to the same address, which raises #DBs too.
        let call = log.steps().iter().find(|step| step.rip == records[1].to);
        check_eq!(call.map(|step| step.dr6 & 0xe00f), Some(2 | Dr6::BS.bits()), "DR6 after the call");
        for step in log.steps().iter().filter(|step| step.rip != records[1].to) {
            check_eq!(step.dr6 & 0xe00f, 2, "DR6 after the other stores");
        }
    }
}

sequence! {
    /// An IN with TF set.
    port_input:
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "20: in al, 0x80",
        "21: nop",
        "pushfq", "and qword ptr [rsp], -257", "popfq",
    => ["20b", "21b", "0"],
}

case! {
    name: "io_breakpoint", cpl: [0, 3], rules: ["BTF-09"], needs: [],
    about: "an I/O breakpoint raises #DB without BS, although TF and BTF are set",
    fn body(ctx) {
        need_btf!(ctx);
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | Cr4::DE.bits());
        insn::write_dr3(0x80);
        insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(3), Condition::Io, Length::One).0);
        let log = step(ctx.cpl, port_input(), BTF, BTF);
        insn::write_dr7(Dr7::RESET.0);
        insn::write_cr4(cr4);
        let log = require_some!(log, "no unhandled exception");
        let found = log.steps().first().map(|step| (step.rip, step.dr6 & 0xe00f));
        check_eq!(found, Some((port_input().records()[0].to, 8)), "saved RIP, DR6");
        check_eq!(log.count, 1, "count of #DBs");
    }
}

sequence! {
    /// WRMSR sets BTF under TF: #DB follows the WRMSR and then only taken branches.
    sets_btf:
        "mov ecx, 0x1d9", "xor edx, edx", "mov eax, 2",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "20: wrmsr",
        "21: nop",
        "22: jmp 23f", "ud2",
        "23: pushfq", "and qword ptr [rsp], -257", "popfq",
    => ["20b", "21b", "0"], ["22b", "23b", "REL_JMP"],
}

sequence! {
    /// WRMSR clears BTF under TF: no #DB follows the WRMSR, but every instruction after it.
    clears_btf:
        "mov ecx, 0x1d9", "xor edx, edx", "xor eax, eax",
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "20: wrmsr",
        "21: nop",
        "22: nop",
        "23: pushfq",
        "24: and qword ptr [rsp], -257",
        "25: popfq",
        "26: nop",
    => ["21b", "22b", "0"], ["22b", "23b", "0"], ["23b", "24b", "0"], ["24b", "25b", "0"], ["25b", "26b", "0"],
}

case! {
    name: "wrmsr_under_tf", cpl: [0], rules: ["BTF-12", "OP-41"], needs: [],
    about: "the value of BTF before a WRMSR decides whether #DB follows the WRMSR",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(0, sets_btf(), 0, BTF), "no unhandled exception");
        check_steps(&log, sets_btf());
        let log = require_some!(step(0, clears_btf(), BTF, 0), "no unhandled exception");
        check_steps(&log, clears_btf());
    }
}

case! {
    name: "flags_in_the_image", cpl: [0, 3], rules: ["BTF-01", "BTF-04"], needs: [],
    about: "each #DB saves TF = 1, with which its handler returns",
    fn body(ctx) {
        need_btf!(ctx);
        let log = require_some!(step(ctx.cpl, walk(), BTF, BTF), "no unhandled exception");
        check!(log.count > 0, "at least one #DB");
        for step in log.steps() {
            check_eq!(step.flags & 0x1_0100, 0x100, "TF and RF in the saved flags");
        }
    }
}

//! What interrupts and exceptions leave in the LBR stack, and what a #DB does not.

#![no_std]
#![no_main]

use hindsight_guest::apic;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_NMI, ICR_SELF, ApicRegister as Apic};
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length, BreakpointIndex};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, paging};
use hindsight_payloads::branch::recorder::{self, IRQ_VECTOR};
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    DEBUG, FAR, LBR, List, Run, Sequence, Transfer, other_bits, run, run_sequence,
};
use hindsight_payloads::{lbr, need_lbr, sequence};

payload!("lbr_events");

case! {
    name: "software_interrupts", cpl: [0, 3], rules: ["LBR-10"], needs: [],
    about: "INT n and INT3: from the first byte of the instruction to the handler; then the IRET",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::software_interrupts());
    }
}

case! {
    name: "fast_calls", cpl: [3], rules: ["LBR-04", "LBR-10"], needs: [],
    about: "SYSCALL with SYSRET, SYSENTER with SYSEXIT",
    fn body(ctx) {
        need_lbr!(ctx);
        seq::set_fast_calls();
        lbr::check_sequence(3, seq::syscall_sysret());
        lbr::check_sequence(3, seq::sysenter_sysexit());
    }
}

case! {
    name: "faults", cpl: [0, 3], rules: ["LBR-10"], needs: [],
    about: "a fault: from the faulting instruction to the handler; then the IRET",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::faults());
    }
}

case! {
    name: "branches_that_fault", cpl: [0, 3], rules: ["LBR-14"], needs: [],
    about: "a branch that faults gives only the record of the exception",
    fn body(ctx) {
        need_lbr!(ctx);
        let old = paging::unmap(seq::UNMAPPED);
        lbr::check_sequence(ctx.cpl, seq::faulting_branches());
        paging::restore(seq::UNMAPPED, old);
    }
}

case! {
    name: "branches_to_an_unmapped_page", cpl: [0, 3], rules: ["LBR-10", "LBR-14"], needs: [],
    about: "the branch is recorded, then the page fault of the fetch, from the target",
    fn body(ctx) {
        need_lbr!(ctx);
        let old = paging::unmap(seq::UNMAPPED);
        lbr::check_sequence(ctx.cpl, seq::branches_to_nowhere());
        paging::restore(seq::UNMAPPED, old);
    }
}

fn pend_interrupt() {
    apic::enable();
    apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(IRQ_VECTOR));
}

case! {
    name: "interrupt", cpl: [0, 3], rules: ["LBR-11"], needs: [],
    about: "a hardware interrupt: from the saved RIP to the handler",
    fn body(ctx) {
        need_lbr!(ctx);
        pend_interrupt();
        let sequence = seq::interrupt_after_nop();
        let seen = require_some!(lbr::check_sequence(ctx.cpl, sequence), "the run ended well");
        check_eq!(seen.irqs, 1, "interrupts");
        check_eq!(seen.irq_rip, sequence.records()[0].from, "saved RIP");
    }
}

case! {
    name: "interrupt_after_branch", cpl: [0, 3], rules: ["LBR-12"], needs: [],
    about: "a branch and an interrupt at once: the branch first, the interrupt from its target",
    fn body(ctx) {
        need_lbr!(ctx);
        pend_interrupt();
        let sequence = seq::interrupt_after_branch();
        let seen = require_some!(lbr::check_sequence(ctx.cpl, sequence), "the run ended well");
        check_eq!(seen.irqs, 1, "interrupts");
        check_eq!(seen.irq_rip, sequence.records()[0].to, "saved RIP");
    }
}

case! {
    name: "interrupt_after_iret", cpl: [3], rules: ["LBR-11", "LBR-12"], needs: [],
    about: "an interrupt right after the IRET to CPL 3 comes from the first user instruction",
    fn body(ctx) {
        need_lbr!(ctx);
        pend_interrupt();
        lbr::reset();
        let sequence = seq::not_taken();
        let flags = Rflags::IF.bits();
        let answer = run(Run { flags, ..Run::new(ctx.cpl, sequence, LBR) });
        check_eq!(answer.map(|seen| (seen.irqs, seen.irq_rip)).ok(), Some((1, sequence.code())), "interrupts, saved RIP");
        let mut expected = List::new();
        expected.push(recorder::entry(3, sequence.code()));
        let (irq, back) = (seq::interrupt_after_nop().records()[0], seq::interrupt_after_nop().records()[1]);
        expected.push(Transfer::new(sequence.code(), irq.to, FAR));
        expected.push(Transfer::new(back.from, sequence.code(), FAR));
        expected.push(recorder::exit(sequence.stop()));
        lbr::check_list(&expected);
    }
}

sequence! {
    /// An NMI to this processor itself, by the APIC's page. At CPL 0.
    nmi_to_self:
        "mov eax, 0xfee00300",
        "mov dword ptr [rax], 0x4400",
        "20: nop",
    => ["20b", "recorder_nmi", "FAR_IN"], ["recorder_nmi_return", "20b", "FAR_OUT"],
}

case! {
    name: "nmi", cpl: [0], rules: ["LBR-11"], needs: [],
    about: "an NMI: from the saved RIP to the handler",
    fn body(ctx) {
        need_lbr!(ctx);
        apic::enable();
        apic::write(Apic::ICR_HIGH, apic::id() << 24);
        check_eq!(ICR_NMI | ICR_ASSERT, 0x4400, "the command in the sequence");
        let sequence = nmi_to_self();
        let seen = require_some!(lbr::record(0, sequence), "the run ended well");
        require_eq!(seen.irqs, 1, "NMIs");
        // It may be recognized some instructions later.
        let mut expected = sequence.all(0);
        if seen.irq_rip != sequence.records()[0].from {
            let moved = Transfer::new(seen.irq_rip, sequence.records()[0].to, FAR);
            let back = Transfer::new(sequence.records()[1].from, seen.irq_rip, FAR);
            expected = List::new();
            [recorder::entry(0, sequence.code()), moved, back, recorder::exit(sequence.stop())]
                .into_iter()
                .for_each(|item| expected.push(item));
        }
        lbr::check_list(&expected);
    }
}

/// What is in the LBR stack when the run ends at its first #DB.
fn until_debug(list: &List) -> List {
    let mut out = List::new();
    for &item in list.items().iter().take_while(|item| item.class() != DEBUG) {
        out.push(item);
    }
    out
}

sequence! {
    /// One step by TF, over a branch; then two more branches.
    debug_by_step:
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "20: jmp 21f", "ud2",
        "21: jmp 22f", "ud2",
        "22: call 23f", "23: pop rax",
    => ["20b", "21b", "REL_JMP"],
        ["20b", "recorder_debug", "DEBUG_IN"], ["recorder_debug_return", "21b", "FAR_OUT"],
        ["21b", "22b", "REL_JMP"], ["22b", "23b", "REL_CALL"],
}

sequence! {
    /// INT1 between two branches.
    debug_by_int1:
        "20: jmp 21f", "ud2",
        "21: .byte 0xf1",
        "22: jmp 23f", "ud2",
        "23: nop",
    => ["20b", "21b", "REL_JMP"],
        ["21b", "recorder_debug", "DEBUG_IN"], ["recorder_debug_return", "22b", "FAR_OUT"],
        ["22b", "23b", "REL_JMP"],
}

sequence! {
    /// Two branches with an instruction between them that has a breakpoint: an execution breakpoint at
    /// the target of the first branch.
    debug_by_execution:
        "20: jmp 21f", "ud2",
        "21: nop",
        "22: jmp 23f", "ud2",
        "23: nop",
    => ["20b", "21b", "REL_JMP"],
        ["21b", "recorder_debug", "DEBUG_IN"], ["recorder_debug_return", "21b", "FAR_OUT"],
        ["22b", "23b", "REL_JMP"],
}

sequence! {
    /// A call with a write breakpoint on the word that it pushes: RSP at 3D00000H before.
    debug_by_push:
        "mov rbp, rsp",
        "mov esp, 0x03d00000",
        "20: call 21f", "ud2",
        "21: mov rsp, rbp",
        "22: jmp 23f", "ud2",
        "23: nop",
    => ["20b", "21b", "REL_CALL"],
        ["20b", "recorder_debug", "DEBUG_IN"], ["recorder_debug_return", "21b", "FAR_OUT"],
        ["22b", "23b", "REL_JMP"],
}

/// Runs a sequence with one #DB in it, with LBR and other bits set, and checks what LBR-15 says.
fn check_debug(level: u8, sequence: &Sequence, condition: u64) {
    let others = other_bits();
    lbr::reset();
    let Some(seen) = run_sequence(level, sequence, LBR | others) else {
        return;
    };
    insn::write_dr7(Dr7::RESET.0);
    check_eq!(seen.debugs, 1, "#DBs");
    check_eq!(seen.dr6 & 0xe00f, condition, "DR6");
    check_eq!(seen.debugctl, others, "IA32_DEBUGCTL in the handler");
    lbr::check_list(&until_debug(&sequence.all(level)));
}

case! {
    name: "debug_exception_by_step", cpl: [0, 3], rules: ["LBR-15", "LBR-16", "DCTL-06"], needs: [],
    about: "a single-step #DB adds no record and clears LBR; the branch before it stays",
    fn body(ctx) {
        need_lbr!(ctx);
        insn::write_dr6(Dr6::RESET);
        check_debug(ctx.cpl, debug_by_step(), Dr6::BS.bits());
    }
}

case! {
    name: "debug_exception_by_int1", cpl: [0, 3], rules: ["LBR-15", "LBR-16", "DCTL-06"], needs: [],
    about: "INT1 adds no record and clears LBR",
    fn body(ctx) {
        need_lbr!(ctx);
        insn::write_dr6(Dr6::RESET);
        check_debug(ctx.cpl, debug_by_int1(), 0);
    }
}

case! {
    name: "debug_exception_by_breakpoint", cpl: [0, 3], rules: ["LBR-15", "LBR-16", "DCTL-06"], needs: [],
    about: "a breakpoint, execution or data, adds no record and clears LBR",
    fn body(ctx) {
        need_lbr!(ctx);
        let sequence = debug_by_execution();
        insn::write_dr6(Dr6::RESET);
        insn::write_dr0(sequence.records()[0].to);
        insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::Execute, Length::One).0);
        check_debug(ctx.cpl, sequence, 1);
        insn::write_dr6(Dr6::RESET);
        insn::write_dr0(seq::UNMAPPED - 8);
        insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::Write, Length::Eight).0);
        check_debug(ctx.cpl, debug_by_push(), 1);
    }
}

sequence! {
    /// A wait for a write in a state deeper than C1, which a pending interrupt ends at once.
    deep_wait:
        "20: jmp 21f", "ud2",
        "21: mov rax, rsp", "xor ecx, ecx", "xor edx, edx",
        "monitor",
        "mov eax, 0x20", "mov ecx, 1",
        "mwait",
        "22: jmp 23f", "ud2",
        "23: nop",
    => ["20b", "21b", "REL_JMP"], ["22b", "23b", "REL_JMP"],
}

case! {
    name: "deep_wait", cpl: [0], rules: ["LBR-32"], needs: [],
    about: "MWAIT for a state deeper than C1 keeps the stack",
    fn body(ctx) {
        need_lbr!(ctx);
        need_feature!(ctx, MONITOR);
        pend_interrupt();
        lbr::check_sequence(0, deep_wait());
    }
}

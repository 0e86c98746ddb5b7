//! Interrupts and exceptions in the LBR stack, and #DB, which adds no record.

#![no_std]
#![no_main]

use hindsight_guest::apic;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister as Apic, ICR_ASSERT, ICR_NMI, ICR_SELF};
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, paging};
use hindsight_payloads::branch::recorder::{self, IRQ_VECTOR};
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BranchList, BranchRun, BranchSequence, DEBUG, FAR, LBR, TakenBranch, other_bits, run,
    run_sequence,
};
use hindsight_payloads::{lbr, need_lbr, sequence};

payload!("lbr_events");

case! {
    name: "software_interrupts", cpl: [0, 3], rules: ["LBR-10"], needs: [],
    about: "INT n and INT3 are recorded from their first byte to the handler, then the IRET",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::software_interrupts());
    }
}

case! {
    name: "fast_calls", cpl: [3], rules: ["LBR-04", "LBR-10"], needs: [],
    about: "SYSCALL and SYSRET, and SYSENTER and SYSEXIT are recorded",
    fn body(ctx) {
        need_lbr!(ctx);
        seq::set_fast_calls();
        lbr::check_sequence(3, seq::syscall_sysret());
        lbr::check_sequence(3, seq::sysenter_sysexit());
    }
}

case! {
    name: "faults", cpl: [0, 3], rules: ["LBR-10"], needs: [],
    about: "a fault is recorded from the faulting instruction to the handler, then the IRET",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::faults());
    }
}

case! {
    name: "branches_that_fault", cpl: [0, 3], rules: ["LBR-14"], needs: [],
    about: "for a branch that faults only the exception is recorded",
    fn body(ctx) {
        need_lbr!(ctx);
        let old = paging::unmap(seq::UNMAPPED);
        lbr::check_sequence(ctx.cpl, seq::faulting_branches());
        paging::restore(seq::UNMAPPED, old);
    }
}

case! {
    name: "branches_to_an_unmapped_page", cpl: [0, 3], rules: ["LBR-10", "LBR-14"], needs: [],
    about: "the branch is recorded, then the page fault of the fetch from the target",
    fn body(ctx) {
        need_lbr!(ctx);
        let old = paging::unmap(seq::UNMAPPED);
        lbr::check_sequence(ctx.cpl, seq::branches_to_unmapped());
        paging::restore(seq::UNMAPPED, old);
    }
}

fn pend_interrupt() {
    apic::enable();
    apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(IRQ_VECTOR));
}

case! {
    name: "interrupt", cpl: [0, 3], rules: ["LBR-11"], needs: [],
    about: "a hardware interrupt is recorded from the saved RIP to the handler",
    fn body(ctx) {
        need_lbr!(ctx);
        pend_interrupt();
        let sequence = seq::interrupt_after_nop();
        let events = require_some!(lbr::check_sequence(ctx.cpl, sequence), "no unhandled exception");
        check_eq!(events.irqs, 1, "count of interrupts");
        check_eq!(events.irq_rip, sequence.records()[0].from, "saved RIP");
    }
}

case! {
    name: "interrupt_after_branch", cpl: [0, 3], rules: ["LBR-12"], needs: [],
    about: "a branch with an interrupt after it is recorded before the interrupt, whose FROM is the target",
    fn body(ctx) {
        need_lbr!(ctx);
        pend_interrupt();
        let sequence = seq::interrupt_after_branch();
        let events = require_some!(lbr::check_sequence(ctx.cpl, sequence), "no unhandled exception");
        check_eq!(events.irqs, 1, "count of interrupts");
        check_eq!(events.irq_rip, sequence.records()[0].to, "saved RIP");
    }
}

case! {
    name: "interrupt_after_iret", cpl: [3], rules: ["LBR-11", "LBR-12"], needs: [],
    about: "the FROM of an interrupt directly after the IRET to CPL 3 is the first user instruction",
    fn body(ctx) {
        need_lbr!(ctx);
        pend_interrupt();
        lbr::reset();
        let sequence = seq::not_taken();
        let flags = Rflags::IF.bits();
        let result = run(BranchRun { flags, ..BranchRun::new(ctx.cpl, sequence, LBR) });
        let found = result.map(|events| (events.irqs, events.irq_rip)).ok();
        check_eq!(found, Some((1, sequence.code())), "count of interrupts, saved RIP");
        let mut expected = BranchList::new();
        expected.push(recorder::entry(3, sequence.code()));
        let records = seq::interrupt_after_nop().records();
        let (irq, back) = (records[0], records[1]);
        expected.push(TakenBranch::new(sequence.code(), irq.to, FAR));
        expected.push(TakenBranch::new(back.from, sequence.code(), FAR));
        expected.push(recorder::exit(sequence.stop()));
        lbr::check_list(&expected);
    }
}

sequence! {
    /// An NMI to this CPU itself, by the ICR in xAPIC mode. At CPL 0.
    nmi_to_self:
        "mov eax, 0xfee00300",
        "mov dword ptr [rax], 0x4400",
        "20: nop",
    => ["20b", "recorder_nmi", "FAR_IN"], ["recorder_nmi_return", "20b", "FAR_OUT"],
}

case! {
    name: "nmi", cpl: [0], rules: ["LBR-11"], needs: [],
    about: "an NMI is recorded from the saved RIP to the handler",
    fn body(ctx) {
        need_lbr!(ctx);
        apic::enable();
        apic::write(Apic::ICR_HIGH, apic::id() << 24);
        check_eq!(ICR_NMI | ICR_ASSERT, 0x4400, "command in the sequence");
        let sequence = nmi_to_self();
        let events = require_some!(lbr::record(0, sequence), "no unhandled exception");
        require_eq!(events.irqs, 1, "count of NMIs");
        // The NMI may be recognized some instructions later.
        let mut expected = sequence.all(0);
        if events.irq_rip != sequence.records()[0].from {
            let moved = TakenBranch::new(events.irq_rip, sequence.records()[0].to, FAR);
            let back = TakenBranch::new(sequence.records()[1].from, events.irq_rip, FAR);
            expected = BranchList::new();
            [recorder::entry(0, sequence.code()), moved, back, recorder::exit(sequence.stop())]
                .into_iter()
                .for_each(|item| expected.push(item));
        }
        lbr::check_list(&expected);
    }
}

/// The branches before the first #DB of a list.
fn until_debug(list: &BranchList) -> BranchList {
    let mut out = BranchList::new();
    for &item in list.items().iter().take_while(|item| item.class() != DEBUG) {
        out.push(item);
    }
    out
}

sequence! {
    /// A single step over a branch, then two more branches.
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
    /// Two branches; the target of the first one gets an instruction breakpoint.
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
    /// A call with RSP = 3D00000H, whose push hits a data breakpoint.
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

/// Runs a sequence with one #DB, with LBR and other bits set, and checks rule LBR-15.
fn check_debug(level: u8, sequence: &BranchSequence, condition: u64) {
    let others = other_bits();
    lbr::reset();
    let Some(events) = run_sequence(level, sequence, LBR | others) else {
        return;
    };
    insn::write_dr7(Dr7::RESET.0);
    check_eq!(events.debugs, 1, "count of #DBs");
    check_eq!(events.dr6 & 0xe00f, condition, "DR6");
    check_eq!(events.debugctl, others, "IA32_DEBUGCTL in the handler");
    lbr::check_list(&until_debug(&sequence.all(level)));
}

case! {
    name: "debug_exception_by_step", cpl: [0, 3], rules: ["LBR-15", "LBR-16", "DCTL-06"], needs: [],
    about: "#DB of a single step adds no record and clears LBR; the record of the branch before it stays",
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
    about: "#DB of an instruction or data breakpoint adds no record and clears LBR",
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
    /// MWAIT for a state deeper than C1, which a pending interrupt ends at once.
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
    about: "MWAIT for a state deeper than C1 does not change the LBR stack",
    fn body(ctx) {
        need_lbr!(ctx);
        need_feature!(ctx, MONITOR);
        pend_interrupt();
        lbr::check_sequence(0, deep_wait());
    }
}

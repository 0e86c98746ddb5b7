//! The last exception record: the last branch before an interrupt or exception.

#![no_std]
#![no_main]

use hindsight_guest::apic;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_SELF};
use hindsight_guest::regs::dr::Dr6;
use hindsight_guest::regs::msr::{MSR_LBR_SELECT, MSR_LER_FROM_LIP, MSR_LER_TO_LIP};
use hindsight_guest::{insn, paging};
use hindsight_payloads::branch::recorder::{AsmHandler, IRQ_VECTOR, STOP};
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{BranchRun, BranchSequence, LBR, run_checked};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::{need_lbr, sequence};

payload!("ler");

/// Values of LER before a run.
const BEFORE: (u64, u64) = (0x1111_0000, 0x2222_0000);

/// Runs the sequence with `handlers`, one of which ends it.
fn run_to(
    level: u8,
    sequence: &BranchSequence,
    debugctl: u64,
    handlers: &'static [(u8, AsmHandler)],
) -> bool {
    msr::write(MSR_LER_FROM_LIP, BEFORE.0);
    msr::write(MSR_LER_TO_LIP, BEFORE.1);
    run_checked(BranchRun {
        handlers,
        ..BranchRun::new(level, sequence, debugctl)
    })
    .is_some()
}

/// Checks LER, and the newest two records of the LBR stack: the exception and the branch before it.
fn check_ler(branch: (u64, u64), source: u64) {
    check_eq!(
        lbr::ler(),
        branch,
        "LER, the last branch before the exception"
    );
    let stack = LbrStack::read();
    check_eq!(
        stack.entry(0).0,
        source,
        "source of the newest record, the exception"
    );
    check_eq!(stack.entry(1), branch, "record before the newest");
}

sequence! {
    /// Branches, and then a UD2.
    branch_then_fault:
        "xor eax, eax",
        "20: jz 21f", "ud2",
        "21: jmp 22f", "ud2",
        "22: nop",
        "23: ud2",
    => ["20b", "21b", "JCC"], ["21b", "22b", "REL_JMP"], ["23b", "recorder_stop", "FAR_IN"],
}

case! {
    name: "fault", cpl: [0, 3], rules: ["LER-01", "LER-02"], needs: [],
    about: "in the handler LER holds the branch before the fault, and the newest LBR record the fault",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        let sequence = branch_then_fault();
        require!(run_to(ctx.cpl, sequence, LBR, &[(6, STOP)]), "no unhandled exception");
        let records = sequence.records();
        check_ler(records[1].pair(), records[2].from);
        check_eq!(LbrStack::read().tos, 4, "TOS after four records: entry, two branches, exception");
    }
}

case! {
    name: "second_fault", cpl: [0, 3], rules: ["LER-01"], needs: [],
    about: "the IRET of an earlier handler is the last branch before the next exception",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        let sequence = seq::faults();
        require!(run_to(ctx.cpl, sequence, LBR, &[(0, STOP)]), "no unhandled exception");
        check_ler(sequence.records()[1].pair(), sequence.records()[2].from);
    }
}

case! {
    name: "page_fault_of_a_fetch", cpl: [0, 3], rules: ["LER-01", "LER-02"], needs: [],
    about: "after a jump to an unmapped page LER holds the jump",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        let old = paging::unmap(seq::UNMAPPED);
        let sequence = seq::branches_to_unmapped();
        let ended = run_to(ctx.cpl, sequence, LBR, &[(14, STOP)]);
        paging::restore(seq::UNMAPPED, old);
        require!(ended, "no unhandled exception");
        check_ler(sequence.records()[0].pair(), seq::UNMAPPED);
    }
}

case! {
    name: "interrupt", cpl: [0, 3], rules: ["LER-01"], needs: [],
    about: "a hardware interrupt updates LER",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        apic::enable();
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(IRQ_VECTOR));
        let sequence = seq::interrupt_after_branch();
        require!(run_to(ctx.cpl, sequence, LBR, &[(IRQ_VECTOR, STOP)]), "no unhandled exception");
        apic::eoi();
        check_ler(sequence.records()[0].pair(), sequence.records()[0].to);
    }
}

case! {
    name: "software_interrupts", cpl: [0, 3], rules: ["LER-08"], needs: [],
    about: "INT n and INT3 update LER",
    fn body(ctx) {
        need_lbr!(ctx);
        let sequence = seq::software_interrupts();
        lbr::reset();
        require!(run_to(ctx.cpl, sequence, LBR, &[(3, STOP)]), "no unhandled exception");
        check_ler(sequence.records()[1].pair(), sequence.records()[2].from);
        lbr::reset();
        require!(run_to(ctx.cpl, sequence, LBR, &[(0x82, STOP)]), "no unhandled exception");
        check_ler(LbrStack::read().entry(1), sequence.records()[0].from);
    }
}

sequence! {
    /// A branch, and then INT1.
    branch_then_debug:
        "20: jmp 21f", "ud2",
        "21: .byte 0xf1",
        "nop",
    => ["20b", "21b", "REL_JMP"],
}

case! {
    name: "debug_exception", cpl: [0, 3], rules: ["LER-03"], needs: [],
    about: "#DB does not update LER",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        require!(run_to(ctx.cpl, branch_then_debug(), LBR, &[(1, STOP)]), "no unhandled exception");
        insn::write_dr6(Dr6::RESET);
        check_eq!(lbr::ler(), BEFORE, "LER");
        check_eq!(LbrStack::read().entry(0), branch_then_debug().records()[0].pair(), "newest LBR record");
    }
}

case! {
    name: "filtered_branches", cpl: [0, 3], rules: ["LER-04", "OP-13"], needs: [],
    about: "with a filter LER holds the last branch that was recorded (OP-13)",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        // The filter excludes relative jumps.
        msr::write(MSR_LBR_SELECT, 1 << 7);
        let sequence = branch_then_fault();
        require!(run_to(ctx.cpl, sequence, LBR, &[(6, STOP)]), "no unhandled exception");
        check_ler(sequence.records()[0].pair(), sequence.records()[2].from);
    }
}

case! {
    name: "not_without_lbr", cpl: [0, 3], rules: ["LER-07"], needs: [],
    about: "with LBR clear LER is not updated",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        require!(run_to(ctx.cpl, branch_then_fault(), 0, &[(6, STOP)]), "no unhandled exception");
        check_eq!(lbr::ler(), BEFORE, "LER");
    }
}

case! {
    name: "written_values", cpl: [0], rules: ["LER-06", "MSR-09", "MSR-10"], needs: [],
    about: "canonical values read back, others raise #GP(0)",
    fn body(ctx) {
        need_lbr!(ctx);
        for index in [MSR_LER_FROM_LIP, MSR_LER_TO_LIP] {
            for value in [0xffff_8000_0000_0000, u64::MAX, 0x7fff_ffff_ffff, 0x1234] {
                msr::write(index, value);
                check_eq!(msr::read(index), value, "canonical value");
            }
            for value in [0x8000_0000_0000, 0xffff_7fff_ffff_ffff, 1 << 63, 1 << 48] {
                check_eq!(msr::write_safe(index, value), Err(GP), "write of a non-canonical value");
                check_eq!(msr::read(index), 0x1234, "value after the write");
            }
        }
    }
}

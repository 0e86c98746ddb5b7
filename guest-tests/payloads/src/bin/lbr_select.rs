//! MSR_LBR_SELECT: the filter by class and privilege level.

#![no_std]
#![no_main]

use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::{MSR_LASTBRANCH_TOS, MSR_LBR_SELECT};
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{BranchSequence, LBR, run_sequence};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::{need_lbr, sequence};

payload!("lbr_select");

const CPL_EQ_0: u64 = 1 << 0;
const CPL_NEQ_0: u64 = 1 << 1;

/// Runs the sequence with a filter and checks that exactly the branches that pass it are recorded.
fn check_filtered(level: u8, sequence: &BranchSequence, select: u64) -> bool {
    lbr::reset();
    msr::write(MSR_LBR_SELECT, select);
    if run_sequence(level, sequence, LBR).is_none() {
        return false;
    }
    let expected = sequence
        .all(level)
        .filtered(|item| item.passes(select, level));
    lbr::check_list(&expected)
}

case! {
    name: "each_bit", cpl: [0, 3], rules: ["LSEL-02", "LSEL-03", "LSEL-05"], needs: [],
    about: "each bit excludes its class and no other",
    fn body(ctx) {
        need_lbr!(ctx);
        for bit in 0..9 {
            if !check_filtered(ctx.cpl, seq::one_of_each(), 1 << bit) {
                hindsight_guest::report::measurement("select", 1 << bit);
            }
        }
    }
}

case! {
    name: "each_but_one", cpl: [0, 3], rules: ["LSEL-02", "LSEL-04"], needs: [],
    about: "with all class bits but one set, exactly that class is recorded",
    fn body(ctx) {
        need_lbr!(ctx);
        for bit in 2..9 {
            if !check_filtered(ctx.cpl, seq::one_of_each(), 0x1fc & !(1 << bit)) {
                hindsight_guest::report::measurement("class", bit);
            }
        }
    }
}

case! {
    name: "all_combinations", cpl: [0, 3], rules: ["LSEL-03", "LSEL-04", "LSEL-06"], needs: [],
    timeout_ms: 20000,
    about: "with each of the 512 combinations of the nine bits, the branches that pass are recorded",
    fn body(ctx) {
        need_lbr!(ctx);
        for select in 0..512 {
            if !check_filtered(ctx.cpl, seq::one_of_each(), select) {
                hindsight_guest::report::measurement("select", select);
                return;
            }
        }
    }
}

case! {
    name: "level_of_the_destination", cpl: [3], rules: ["LSEL-05", "OP-37"], needs: [],
    about: "a branch between levels is filtered by the level at which it ends",
    fn body(ctx) {
        need_lbr!(ctx);
        seq::set_fast_calls();
        for select in [CPL_EQ_0, CPL_NEQ_0] {
            let sequences =
                [seq::syscall_sysret(), seq::sysenter_sysexit(), seq::software_interrupts(), seq::faults()];
            for sequence in sequences {
                check_filtered(3, sequence, select);
            }
        }
        // With CPL_EQ_0 the SYSCALL of user code is excluded, and the SYSRET is recorded.
        check_filtered(3, seq::syscall_sysret(), CPL_EQ_0);
        let sysret = seq::syscall_sysret().records()[1].pair();
        check_eq!(LbrStack::read().entry(0), sysret, "newest record");
    }
}

case! {
    name: "both_levels", cpl: [0, 3], rules: ["LSEL-06", "LSEL-03"], needs: [],
    about: "with both CPL bits neither an entry nor TOS changes",
    fn body(ctx) {
        need_lbr!(ctx);
        require!(lbr::record(ctx.cpl, seq::conditionals()).is_some(), "no unhandled exception");
        let before = LbrStack::read();
        msr::write(MSR_LBR_SELECT, CPL_EQ_0 | CPL_NEQ_0);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), LBR).is_some(), "no unhandled exception");
        check!(LbrStack::read() == before, "LBR stack unchanged");
    }
}

case! {
    name: "other_sequences", cpl: [0, 3], rules: ["LSEL-02", "LSEL-04"], needs: [],
    about: "each bit excludes its class among conditional branches, jumps, calls, far branches and faults",
    fn body(ctx) {
        need_lbr!(ctx);
        let sequences = [seq::conditionals(), seq::jumps(), seq::calls(), seq::far_transfers(), seq::faults()];
        for (number, sequence) in (0..).zip(sequences) {
            for bit in 2..9 {
                if !check_filtered(ctx.cpl, sequence, 1 << bit) {
                    hindsight_guest::report::measurement("sequence and bit", number << 8 | bit);
                    return;
                }
            }
        }
    }
}

case! {
    name: "reserved_bits", cpl: [0], rules: ["LSEL-07", "MSR-06", "OP-31"], needs: [],
    about: "bits 63:10 raise #GP(0) and change nothing; bits 9:0 read back",
    fn body(ctx) {
        need_lbr!(ctx);
        for value in [0x3ff, 0x155, 0x2aa, 0] {
            msr::write(MSR_LBR_SELECT, value);
            check_eq!(msr::read(MSR_LBR_SELECT), value, "legal value");
        }
        msr::write(MSR_LBR_SELECT, 0x111);
        for bit in 10..64 {
            check_eq!(msr::write_safe(MSR_LBR_SELECT, 1 << bit), Err(GP), "write of a reserved bit");
        }
        check_eq!(msr::read(MSR_LBR_SELECT), 0x111, "value after the writes");
    }
}

sequence! {
    /// Jumps between which WRMSR sets and clears the filter in MSR_LBR_SELECT (1C8H).
    filter_changes:
        "20: jmp 21f", "ud2",
        "21: mov ecx, 0x1c8", "mov eax, 0x80", "xor edx, edx", "wrmsr",
        "22: jmp 23f", "ud2",
        "23: call 24f", "24: pop rax",
        "25: mov ecx, 0x1c8", "xor eax, eax", "xor edx, edx", "wrmsr",
        "26: jmp 27f", "ud2",
        "27: nop",
    => ["20b", "21b", "REL_JMP"], ["23b", "24b", "REL_CALL"], ["26b", "27b", "REL_JMP"],
}

case! {
    name: "takes_effect_at_once", cpl: [0], rules: ["LSEL-09"], needs: [],
    about: "a write takes effect with the next branch and changes neither entries nor TOS",
    fn body(ctx) {
        need_lbr!(ctx);
        require!(lbr::record(0, seq::jumps()).is_some(), "no unhandled exception");
        let before = LbrStack::read();
        msr::write(MSR_LBR_SELECT, 0x1fc);
        check!(LbrStack::read() == before, "LBR stack unchanged");
        check_eq!(msr::read(MSR_LASTBRANCH_TOS), before.tos, "TOS");
        lbr::check_sequence(0, filter_changes());
    }
}

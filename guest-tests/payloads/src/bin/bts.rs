//! The branch trace store (BTS): which branches are stored, and where.
//!
//! Every case compares all records, the management area, and the bytes around the buffer.

#![no_std]
#![no_main]

use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_SELF};
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::dr::Dr6;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::{apic, insn, msr, paging};
use hindsight_payloads::branch::recorder::IRQ_VECTOR;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BTINT, BTS, BTS_OFF_OS, BTS_OFF_USR, BranchList, BranchSequence, LBR, TR, run_sequence,
};
use hindsight_payloads::ds::{self, DsArea, DsPages, RECORD_BYTES};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::{need_bts, sequence};

payload!("bts");

static PAGES: DsPages = DsPages::new();

/// Runs the sequence with TR, BTS and these bits and a large buffer, and checks all records.
fn check_stored(level: u8, sequence: &BranchSequence, bits: u64) -> bool {
    let debugctl = TR | BTS | bits;
    let area = PAGES.arm(100);
    if run_sequence(level, sequence, debugctl).is_none() {
        return false;
    }
    let expected = sequence
        .all(level)
        .filtered(|item| item.is_stored(debugctl, level));
    PAGES.check_stored(&area, expected.items())
}

case! {
    name: "branches", cpl: [0, 3],
    rules: ["BTS-01", "BTS-02", "BTS-16", "BTS-17", "BTS-26", "DS-01", "DS-11", "OP-36"], needs: [],
    about: "every kind of taken branch after the WRMSR is stored; LBR need not be set",
    fn body(ctx) {
        need_bts!(ctx);
        let sequences =
            [seq::one_of_each(), seq::conditionals(), seq::jumps(), seq::calls(), seq::far_transfers()];
        for sequence in sequences {
            check_stored(ctx.cpl, sequence, 0);
        }
    }
}

case! {
    name: "not_taken", cpl: [0, 3], rules: ["BTS-03"], needs: [],
    about: "not-taken branches and REP iterations store nothing",
    fn body(ctx) {
        need_bts!(ctx);
        check_stored(ctx.cpl, seq::not_taken(), 0);
    }
}

case! {
    name: "exceptions", cpl: [0, 3], rules: ["BTS-01", "BTS-02", "BTS-25"], needs: [],
    about: "software interrupts, faults and faulting branches are stored, with the IRETs of their handlers",
    fn body(ctx) {
        need_bts!(ctx);
        let old = paging::unmap(seq::UNMAPPED);
        let sequences =
            [seq::software_interrupts(), seq::faults(), seq::faulting_branches(), seq::branches_to_unmapped()];
        for sequence in sequences {
            check_stored(ctx.cpl, sequence, 0);
        }
        paging::restore(seq::UNMAPPED, old);
    }
}

fn pend_interrupt() {
    apic::enable();
    apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(IRQ_VECTOR));
}

case! {
    name: "interrupts", cpl: [0, 3], rules: ["BTS-01", "BTS-19", "BTS-25"], needs: [],
    about: "an interrupt directly after a branch is stored after the branch",
    fn body(ctx) {
        need_bts!(ctx);
        pend_interrupt();
        check_stored(ctx.cpl, seq::interrupt_after_branch(), 0);
        pend_interrupt();
        check_stored(ctx.cpl, seq::interrupt_after_nop(), 0);
    }
}

case! {
    name: "levels", cpl: [0, 3], rules: ["BTS-13"], needs: [],
    about: "BTS_OFF_OS and BTS_OFF_USR exclude the branches of their levels",
    fn body(ctx) {
        need_bts!(ctx);
        for bits in [BTS_OFF_OS, BTS_OFF_USR, BTS_OFF_OS | BTS_OFF_USR] {
            check_stored(ctx.cpl, seq::conditionals(), bits);
            check_stored(ctx.cpl, seq::one_of_each(), bits);
        }
    }
}

case! {
    name: "crossing_levels", cpl: [3], rules: ["BTS-14", "OP-10"], needs: [],
    about: "a branch between levels is filtered by the level at which it starts (OP-10)",
    fn body(ctx) {
        need_bts!(ctx);
        seq::set_fast_calls();
        let sequences =
            [seq::syscall_sysret(), seq::sysenter_sysexit(), seq::software_interrupts(), seq::faults()];
        for sequence in sequences {
            for bits in [0, BTS_OFF_OS, BTS_OFF_USR] {
                check_stored(ctx.cpl, sequence, bits);
            }
        }
    }
}

case! {
    name: "lbr_stack_untouched", cpl: [0, 3], rules: ["BTS-17", "LBR-33"], needs: [],
    about: "BTS does not change the LBR stack, and MSR_LBR_SELECT does not filter BTS",
    fn body(ctx) {
        need_bts!(ctx);
        if !lbr::present() {
            skip!(ctx, lbr::ABSENT);
        }
        lbr::reset();
        msr::write(reg::MSR_LBR_SELECT, 0x1ff);
        check_stored(ctx.cpl, seq::one_of_each(), 0);
        check!(LbrStack::read() == LbrStack::EMPTY, "LBR stack unchanged");
        // LBR and BTS at the same time.
        lbr::reset();
        check_stored(ctx.cpl, seq::one_of_each(), LBR);
        lbr::check_list(&seq::one_of_each().all(ctx.cpl));
    }
}

case! {
    name: "needs_both_bits", cpl: [0, 3], rules: ["BTS-18", "BTM-04", "BTM-02"], needs: [],
    about: "without TR or without BTS nothing is stored, whatever the other bits",
    fn body(ctx) {
        need_bts!(ctx);
        let values =
            [BTS, TR, BTINT, BTS_OFF_OS, BTS_OFF_USR, BTS | BTINT, BTS | BTS_OFF_OS, BTINT | TR];
        for debugctl in values {
            let area = PAGES.arm(100);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), debugctl).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, &[]);
        }
    }
}

sequence! {
    /// Branches between which WRMSR clears TR and later BTS, and sets them again. At CPL 0.
    switched_off:
        "20: jmp 21f", "ud2",
        "21: mov ecx, 0x1d9", "mov eax, 0x80", "xor edx, edx", "wrmsr",
        "jmp 22f", "ud2",
        "22: mov ecx, 0x1d9", "mov eax, 0xc0", "xor edx, edx", "wrmsr",
        "23: jmp 24f", "ud2",
        "24: mov ecx, 0x1d9", "mov eax, 0x40", "xor edx, edx", "wrmsr",
        "jmp 25f", "ud2",
        "25: mov ecx, 0x1d9", "mov eax, 0xc0", "xor edx, edx", "wrmsr",
    => ["20b", "21b", "REL_JMP"], ["23b", "24b", "REL_JMP"],
}

case! {
    name: "stops_at_once", cpl: [0], rules: ["BTS-24", "BTS-26"], needs: [],
    about: "clearing TR or BTS takes effect with the next instruction, setting them with the next branch",
    fn body(ctx) {
        need_bts!(ctx);
        check_stored(0, switched_off(), 0);
        let area = PAGES.area();
        require!(run_sequence(0, seq::conditionals(), 0).is_some(), "no unhandled exception");
        check!(PAGES.area() == area, "area unchanged without TR and BTS");
    }
}

sequence! {
    /// INT1 between two branches.
    debug_exception:
        "20: jmp 21f", "ud2",
        "21: .byte 0xf1",
        "22: jmp 23f", "ud2",
        "23: nop",
    => ["20b", "21b", "REL_JMP"],
        ["21b", "recorder_debug", "DEBUG_IN"], ["recorder_debug_return", "22b", "FAR_OUT"],
        ["22b", "23b", "REL_JMP"],
}

case! {
    name: "debug_exceptions", cpl: [0, 3], rules: ["BTS-15", "DCTL-06", "BTM-03", "OP-11"], needs: [],
    about: "the delivery of a #DB and the branches after it are stored: TR and BTS stay set",
    fn body(ctx) {
        need_bts!(ctx);
        let sequence = debug_exception();
        let area = PAGES.arm(100);
        let events = run_sequence(ctx.cpl, sequence, TR | BTS | LBR);
        let events = require_some!(events, "no unhandled exception");
        insn::write_dr6(Dr6::RESET);
        check_eq!(events.debugctl, TR | BTS, "IA32_DEBUGCTL in the handler");
        // INT1 is a trap, whose record names the INT1 as the source.
        PAGES.check_stored(&area, sequence.all(ctx.cpl).items());
    }
}

/// Checks a circular buffer of `count` records after the branches `expected`.
fn check_circular(area: &DsArea, count: u64, expected: &BranchList) {
    let total = expected.items().len() as u64;
    check_eq!(
        PAGES.area().index.wrapping_sub(area.base),
        total % count * RECORD_BYTES,
        "offset of the index from the base"
    );
    for (n, item) in (0..total).zip(expected.items()) {
        if n + count >= total {
            let found = PAGES.record(area.base + n % count * RECORD_BYTES);
            check_eq!(
                (n % count, (found.from, found.to)),
                (n % count, item.pair()),
                "record: number, from, to"
            );
            check_eq!(found.flags, 0, "flags");
        }
    }
    let end = usize::try_from(count * RECORD_BYTES).unwrap_or(0);
    let beyond = (end..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL);
    check!(beyond, "bytes from the maximum on unchanged");
    check!(
        DsArea {
            index: 0,
            ..PAGES.area()
        } == DsArea { index: 0, ..*area },
        "other fields of the area unchanged"
    );
}

case! {
    name: "circular", cpl: [0, 3], rules: ["BTS-04", "BTS-05", "BTS-06", "BTS-10"], needs: [],
    about: "with BTINT clear new records overwrite the oldest, for all sizes from 1 to 40 records",
    fn body(ctx) {
        need_bts!(ctx);
        let sequence = seq::loop_33();
        for count in 1..=40 {
            let area = PAGES.arm(count);
            require!(run_sequence(ctx.cpl, sequence, TR | BTS).is_some(), "no unhandled exception");
            check_circular(&area, count, &sequence.all(ctx.cpl));
        }
    }
}

case! {
    name: "one_more_than_fits", cpl: [0, 3], rules: ["BTS-05", "BTS-06", "OP-34"], needs: [],
    about: "after n+1 branches record 0 is the newest and the index is base+24; after n it is the base",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(apic_pmc(), u32::from(IRQ_VECTOR));
        let all = seq::one_of_each().all(ctx.cpl);
        let n = all.items().len() as u64;
        let area = PAGES.arm(n - 1);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS).is_some(), "no unhandled exception");
        check_eq!(PAGES.area().index - area.base, RECORD_BYTES, "index after n+1");
        let newest = PAGES.record(area.base);
        check_eq!((newest.from, newest.to), all.items()[all.items().len() - 1].pair(), "record 0");
        let area = PAGES.arm(n);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS).is_some(), "no unhandled exception");
        check_eq!(PAGES.area().index, area.base, "index after n");
        check_eq!(apic::read(apic_pmc()), u32::from(IRQ_VECTOR), "LVT entry, which a PMI would have masked");
    }
}

fn apic_pmc() -> hindsight_guest::regs::apic::ApicRegister {
    hindsight_guest::regs::apic::ApicRegister::LVT_PMC
}

case! {
    name: "full_with_interrupt", cpl: [0, 3], rules: ["BTS-08", "BTS-09", "BTS-10", "OP-35"], needs: [],
    about: "with BTINT records are stored beyond the threshold up to the maximum, and then dropped",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::one_of_each().all(ctx.cpl);
        for count in 1..=all.items().len() {
            let mut area = PAGES.arm(count as u64);
            area.threshold = area.base + RECORD_BYTES * (count as u64).div_ceil(2);
            PAGES.set_area(area);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS | BTINT).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, &all.items()[..count]);
        }
    }
}

case! {
    name: "maximum_conventions", cpl: [0, 3], rules: ["BTS-21", "BTS-10"], needs: [],
    about: "a buffer holds n records for every maximum from base + 24 n to below base + 24 (n + 1)",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::one_of_each().all(ctx.cpl);
        for extra in [0, 1, 7, 23] {
            let mut area = PAGES.arm(5);
            area.maximum += extra;
            PAGES.set_area(area);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS | BTINT).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, &all.items()[..5]);
        }
    }
}

case! {
    name: "odd_addresses", cpl: [0, 3], rules: ["BTS-22", "BTS-10"], needs: [],
    about: "base, index and maximum need not be aligned; records may cross a page",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::one_of_each().all(ctx.cpl);
        for offset in [1, 3, 4, 12, 4096 - 24 * 5 - 1, 4096 - 24 * 5 - 13, 4096 - 24 * 5 - 20] {
            let area = PAGES.arm_at(PAGES.buffer_address() + offset, 40);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, all.items());
        }
    }
}

case! {
    name: "odd_indexes", cpl: [0, 3], rules: ["BTS-22"], needs: [],
    about: "an index below the base is used; one at or beyond the maximum wraps, or drops with BTINT",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::one_of_each().all(ctx.cpl);
        let n = all.items().len() as u64;
        // Below the base: records are stored at the index.
        let area = PAGES.arm_at(PAGES.buffer_address() + 4096, 40);
        let area = DsArea { index: area.base - 10 * RECORD_BYTES, ..area };
        PAGES.set_area(area);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS).is_some(), "no unhandled exception");
        PAGES.check_stored(&area, all.items());
        // At and beyond the maximum, circular: records are stored from the base on.
        for beyond in [0, 1, RECORD_BYTES, 1 << 40] {
            let area = PAGES.arm(40);
            PAGES.set_area(DsArea { index: area.maximum + beyond, ..area });
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, all.items());
            check_eq!(PAGES.area().index - area.base, n * RECORD_BYTES, "offset of the index from the base");
        }
        // At and beyond the maximum, with BTINT: records are dropped.
        for beyond in [0, 1, RECORD_BYTES, 1 << 40] {
            let area = PAGES.arm(40);
            let area = DsArea { index: area.maximum + beyond, ..area };
            PAGES.set_area(area);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS | BTINT).is_some(), "no unhandled exception");
            check!(PAGES.area() == area, "index unchanged");
            check!((0..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL), "buffer unchanged");
        }
    }
}

case! {
    name: "degenerate_buffers", cpl: [0, 3], rules: ["BTS-09", "BTS-10", "BTS-22"], needs: [],
    about: "nothing is stored in a buffer shorter than a record or with its fields in the wrong order",
    fn body(ctx) {
        need_bts!(ctx);
        let base = PAGES.buffer_address();
        let fields = [(base, base), (base, base + 23), (base, base - 1), (base + 100, base), (base, 0)];
        for (index, maximum) in fields {
            for bits in [0, BTINT] {
                let area = DsArea { index, maximum, ..PAGES.arm(1) };
                PAGES.set_area(area);
                require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS | bits).is_some(), "no unhandled exception");
                check!(PAGES.area() == area, "area unchanged");
                check!((0..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL), "buffer unchanged");
            }
        }
    }
}

case! {
    name: "branch_trace_while_frozen", cpl: [0, 3], rules: ["BTS-12", "OP-19", "FRZ-10"], needs: [],
    about: "LBR_FRZ and CTR_FRZ do not stop BTS (OP-19), and BTS sets no status bit",
    fn body(ctx) {
        need_bts!(ctx);
        if insn::cpuid(0xa, 0).eax & 0xff < 4 {
            skip!(ctx, "CPUID leaf 0AH reports no version 4, which has LBR_FRZ");
        }
        let frozen = 1 << 58 | 1 << 59;
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, frozen);
        check_stored(ctx.cpl, seq::one_of_each(), 0);
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_STATUS), frozen, "IA32_PERF_GLOBAL_STATUS");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, frozen);
        check_stored(ctx.cpl, seq::one_of_each(), 0);
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_STATUS), 0, "IA32_PERF_GLOBAL_STATUS");
    }
}

case! {
    name: "announced", cpl: [0], rules: ["DS-01", "DS-13"], needs: [],
    about: "CPUID reports DS, DTES64 and DS-CPL; the unavailable bits are clear and read-only",
    fn body(ctx) {
        need_feature!(ctx, DS);
        check!(insn::has(Feature::DTES64), "DTES64");
        check!(insn::has(Feature::DS_CPL), "DS-CPL");
        let before = msr::read(reg::IA32_MISC_ENABLE);
        check_eq!(before & (1 << 11), 0, "BTS_UNAVAILABLE");
        let written = msr::write_safe(reg::IA32_MISC_ENABLE, before ^ (1 << 11 | 1 << 12));
        check_eq!(written, Ok::<(), _>(()), "write of the read-only bits");
        check_eq!(msr::read(reg::IA32_MISC_ENABLE), before, "IA32_MISC_ENABLE after the write");
    }
}

//! The interrupt of the branch trace store: when it is requested, how it is delivered, and masking.

#![no_std]
#![no_main]

use core::sync::atomic::AtomicU64;

use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister as Apic, LVT_MASKED};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{apic, insn, msr};
use hindsight_payloads::branch::recorder::IRQ_VECTOR;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BTINT, BTS, BranchList, BranchRun, BranchSequence, FAR, FREEZE_LBRS_ON_PMI,
    FREEZE_PERFMON_ON_PMI, LBR, TR, TakenBranch, run_checked, run_sequence,
};
use hindsight_payloads::ds::{DsArea, DsPages, RECORD_BYTES};
use hindsight_payloads::lbr;
use hindsight_payloads::pmu::LVT_NMI;
use hindsight_payloads::{need_bts, sequence};

payload!("bts_pmi");

static PAGES: DsPages = DsPages::new();

/// LVT entry of a fixed interrupt.
const LVT_FIXED: u32 = IRQ_VECTOR as u32;

/// Prepares a buffer of `count` records with the threshold after `threshold` of them.
fn arm(count: u64, threshold: u64) -> DsArea {
    let area = PAGES.arm(count);
    let area = DsArea {
        threshold: area.base + threshold * RECORD_BYTES,
        ..area
    };
    PAGES.set_area(area);
    area
}

fn is_requested() -> bool {
    apic::has_vector(Apic::IRR, IRQ_VECTOR)
}

/// Lets a pending interrupt be delivered, so that the next run begins without one.
fn deliver_pending() {
    run_sequence(0, seq::interrupt_after_nop(), 0);
}

case! {
    name: "requested_at_the_threshold", cpl: [0, 3],
    rules: ["BTS-07", "BTS-08", "BTS-11", "DS-15", "OVF-08", "OVF-10"], needs: [],
    about: "an interrupt is requested only if the index reaches the threshold; it masks the LVT entry",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let all = seq::one_of_each().all(ctx.cpl);
        let n = all.items().len() as u64;
        for threshold in 1..n + 2 {
            apic::write(Apic::LVT_PMC, LVT_FIXED);
            let area = arm(50, threshold);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS | BTINT).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, all.items());
            check_eq!(is_requested(), threshold <= n, "interrupt requested");
            let masked = if threshold <= n { LVT_MASKED } else { 0 };
            check_eq!(apic::read(Apic::LVT_PMC), LVT_FIXED | masked, "LVT entry");
            if is_requested() {
                deliver_pending();
            }
        }
    }
}

case! {
    name: "requested_by_any_position", cpl: [0, 3], rules: ["BTS-07"], needs: [],
    about: "a threshold between two records or below the base is reached when the index passes it",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let all = seq::jumps().all(ctx.cpl);
        let n = all.items().len() as u64;
        let base = PAGES.buffer_address();
        let end = base + n * RECORD_BYTES;
        let reached = [0, base, base + 1, end - 1, end].map(|threshold| (threshold, true));
        let beyond = [end + 1, u64::MAX].map(|threshold| (threshold, false));
        for (threshold, expected) in reached.into_iter().chain(beyond) {
            apic::write(Apic::LVT_PMC, LVT_FIXED);
            let area = DsArea { threshold, ..PAGES.arm(50) };
            PAGES.set_area(area);
            require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "no unhandled exception");
            PAGES.check_stored(&area, all.items());
            check_eq!(is_requested(), expected, "interrupt requested");
            if is_requested() {
                deliver_pending();
            }
        }
    }
}

/// The records of a run with an interrupt after record `at`.
///
/// The interrupt handler is at `handler`, and its IRET at `back`.
fn interrupted(all: &BranchList, at: usize, handler: u64, back: u64) -> BranchList {
    let mut out = BranchList::new();
    for (n, &item) in (1..).zip(all.items()) {
        out.push(item);
        if n == at {
            out.push(TakenBranch::new(item.to, handler, FAR));
            out.push(TakenBranch::new(back, item.to, FAR));
        }
    }
    out
}

/// Runs the sequence with each threshold and checks that the interrupt follows that branch.
fn check_delivery(
    level: u8,
    lvt: u32,
    handler: u64,
    back: u64,
    flags: u64,
    sequence: &BranchSequence,
) {
    let all = sequence.all(level);
    for at in 1..all.items().len() {
        // Handlers run with interrupts disabled, so a fixed interrupt waits for the IRET.
        let in_handler = all.items()[at - 1].cpl_after(level) != level;
        if in_handler || (level == 0 && lvt == LVT_FIXED) {
            continue;
        }
        apic::write(Apic::LVT_PMC, lvt);
        let area = arm(50, at as u64);
        let run = BranchRun {
            flags,
            ..BranchRun::new(level, sequence, TR | BTS | BTINT)
        };
        let Some(events) = run_checked(run) else {
            return;
        };
        check_eq!(events.irqs, 1, "count of interrupts");
        check_eq!(
            events.irq_rip,
            all.items()[at - 1].to,
            "saved RIP: the target of the branch"
        );
        PAGES.check_stored(&area, interrupted(&all, at, handler, back).items());
        check_eq!(
            apic::read(Apic::LVT_PMC),
            lvt | LVT_MASKED,
            "LVT entry, masked"
        );
    }
}

case! {
    name: "fixed_delivery", cpl: [3], rules: ["BTS-11", "BTS-25", "OVF-06", "OVF-09", "OVF-10"], needs: [],
    about: "a fixed interrupt is delivered once, directly after the branch, and is stored too",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let records = seq::interrupt_after_nop().records();
        let flags = Rflags::IF.bits();
        for sequence in [seq::jumps(), seq::calls(), seq::far_transfers(), seq::conditionals()] {
            check_delivery(ctx.cpl, LVT_FIXED, records[0].to, records[1].from, flags, sequence);
        }
    }
}

sequence! {
    /// Never runs: its records hold the addresses of the NMI handler.
    nmi_handler:
        "20: nop",
    => ["20b", "recorder_nmi", "FAR_IN"], ["recorder_nmi_return", "20b", "FAR_OUT"],
}

case! {
    name: "nmi_delivery", cpl: [0, 3], rules: ["BTS-11", "BTS-25", "OVF-09", "OVF-13"], needs: [],
    about: "an NMI is delivered directly after the branch, also with interrupts disabled",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let records = nmi_handler().records();
        for sequence in [seq::jumps(), seq::calls(), seq::conditionals()] {
            check_delivery(ctx.cpl, LVT_NMI, records[0].to, records[1].from, 0, sequence);
        }
    }
}

sequence! {
    /// Branches with IF set, at CPL 0; the sequence sets and clears IF itself.
    with_interrupts_on:
        "sti",
        "nop",
        "20: jmp 21f", "ud2",
        "21: jmp 22f", "ud2",
        "22: cli",
    => ["20b", "21b", "REL_JMP"], ["21b", "22b", "REL_JMP"],
}

case! {
    name: "fixed_delivery_at_level_0", cpl: [0], rules: ["BTS-11", "OVF-06", "OVF-10", "OVF-13"], needs: [],
    about: "a fixed interrupt is delivered directly after the branch at CPL 0, or when IF is set",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let sequence = with_interrupts_on();
        let all = sequence.all(0);
        let records = seq::interrupt_after_nop().records();
        for at in [2, 3] {
            apic::write(Apic::LVT_PMC, LVT_FIXED);
            let area = arm(50, at as u64);
            let events = run_sequence(0, sequence, TR | BTS | BTINT);
            let events = require_some!(events, "no unhandled exception");
            let found = (events.irqs, events.irq_rip);
            check_eq!(found, (1, all.items()[at - 1].to), "count of interrupts, saved RIP");
            PAGES.check_stored(&area, interrupted(&all, at, records[0].to, records[1].from).items());
        }
        // The jump into the sequence reaches the threshold with IF clear: delivery is after STI; NOP.
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        arm(50, 1);
        let events = run_sequence(0, sequence, TR | BTS | BTINT);
        let events = require_some!(events, "no unhandled exception");
        let found = (events.irqs, events.irq_rip);
        check_eq!(found, (1, sequence.records()[0].from), "count of interrupts, saved RIP");
    }
}

case! {
    name: "masked", cpl: [0, 3], rules: ["BTS-23", "OVF-11"], needs: [],
    about: "requests are lost while the LVT entry is masked; the next record after that requests again",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_FIXED | LVT_MASKED);
        let area = arm(50, 2);
        let all = seq::jumps().all(ctx.cpl);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "no unhandled exception");
        PAGES.check_stored(&area, all.items());
        check!(!is_requested(), "no request while masked");
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        check!(!is_requested(), "no request after unmasking");
        require!(run_sequence(ctx.cpl, seq::jumps(), 0).is_some(), "no unhandled exception");
        check!(!is_requested(), "no request by branches that are not stored");
        let mut twice = BranchList::new();
        all.items().iter().chain(all.items()).for_each(|&item| twice.push(item));
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "no unhandled exception");
        PAGES.check_stored(&area, twice.items());
        check!(is_requested(), "request by the next record");
        deliver_pending();
    }
}

case! {
    name: "full_buffer_requests_nothing", cpl: [0, 3], rules: ["BTS-09", "BTS-23"], needs: [],
    about: "a dropped record requests no interrupt",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        let area = arm(4, 1);
        PAGES.set_area(DsArea { index: area.maximum, ..area });
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "no unhandled exception");
        check!(!is_requested(), "no interrupt requested");
        check_eq!(apic::read(Apic::LVT_PMC), LVT_FIXED, "LVT entry");
    }
}

case! {
    name: "circular_requests_nothing", cpl: [0, 3], rules: ["BTS-04"], needs: [],
    about: "with BTINT clear no interrupt is requested, whatever the threshold",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        arm(4, 1);
        require!(run_sequence(ctx.cpl, seq::loop_33(), TR | BTS).is_some(), "no unhandled exception");
        check!(!is_requested(), "no interrupt requested");
        check_eq!(apic::read(Apic::LVT_PMC), LVT_FIXED, "LVT entry");
    }
}

case! {
    name: "disabled_apic", cpl: [0], rules: ["DS-18", "OVF-12"], needs: [],
    about: "a disabled APIC delivers no interrupt; records are stored nevertheless",
    fn body(ctx) {
        need_bts!(ctx);
        apic::disable();
        let area = arm(50, 1);
        require!(run_sequence(0, seq::jumps(), TR | BTS | BTINT).is_some(), "no unhandled exception");
        PAGES.check_stored(&area, seq::jumps().all(0).items());
        check!(!is_requested(), "no interrupt requested");
    }
}

case! {
    name: "status_and_debugctl", cpl: [0, 3], rules: ["BTS-12", "DCTL-13", "DCTL-07", "DS-14"], needs: [],
    about: "the interrupt sets no status bit and does not change IA32_DEBUGCTL; only the index shows it",
    fn body(ctx) {
        need_bts!(ctx);
        if !lbr::present() {
            skip!(ctx, lbr::ABSENT);
        }
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_NMI);
        let area = arm(50, 2);
        lbr::reset();
        let sequence = seq::jumps();
        let events = run_sequence(ctx.cpl, sequence, TR | BTS | BTINT | LBR);
        let events = require_some!(events, "no unhandled exception");
        check_eq!(events.irqs, 1, "count of NMIs");
        // LBR stayed set: the LBR stack and BTS recorded the same branches.
        let records = nmi_handler().records();
        let expected = interrupted(&sequence.all(ctx.cpl), 2, records[0].to, records[1].from);
        PAGES.check_stored(&area, expected.items());
        lbr::check_list(&expected);
        if insn::cpuid(0xa, 0).eax & 0xff >= 2 {
            check_eq!(msr::read(reg::IA32_PERF_GLOBAL_STATUS), 0, "IA32_PERF_GLOBAL_STATUS");
        }
        check!(PAGES.area().index >= area.threshold, "index at or beyond the threshold");
    }
}

case! {
    name: "freezes_the_lbr_stack", cpl: [0, 3], rules: ["BTS-12", "DCTL-13", "LBR-03"], needs: [],
    about: "with FREEZE_LBRS_ON_PMI the request freezes the LBR stack, which lacks the interrupt itself",
    fn body(ctx) {
        need_bts!(ctx);
        if insn::cpuid(0xa, 0).eax & 0xff < 4 || !lbr::present() {
            skip!(ctx, "CPUID leaf 0AH reports no version 4, which has LBR_FRZ");
        }
        apic::enable();
        for (bits, status) in [(FREEZE_LBRS_ON_PMI, 1 << 58), (FREEZE_PERFMON_ON_PMI, 1 << 59)] {
            apic::write(Apic::LVT_PMC, LVT_NMI);
            let area = arm(50, 2);
            lbr::reset();
            let sequence = seq::jumps();
            let events = run_sequence(ctx.cpl, sequence, TR | BTS | BTINT | LBR | bits);
            check_eq!(events.map(|events| events.irqs), Some(1), "count of NMIs");
            check_eq!(msr::read(reg::IA32_PERF_GLOBAL_STATUS), status, "IA32_PERF_GLOBAL_STATUS");
            let all = sequence.all(ctx.cpl);
            let records = nmi_handler().records();
            let expected = interrupted(&all, 2, records[0].to, records[1].from);
            PAGES.check_stored(&area, expected.items());
            if bits == FREEZE_LBRS_ON_PMI {
                lbr::check_records(&lbr::LbrStack::read(), &all.items()[..2]);
            } else {
                lbr::check_list(&expected);
            }
            msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, status);
        }
    }
}

/// IA32_PERFEVTSELx: all retired branches at CPL 3, enabled.
const BRANCHES_USER: u64 = 1 << 22 | 1 << 16 | 0xc4;
/// Bytes of a PEBS record of format 3.
const PEBS_BYTES: u64 = 200;

static PEBS_BUFFER: [AtomicU64; 100] = [const { AtomicU64::new(0) }; 100];

/// Whether the processor has PEBS of format 3.
fn has_pebs() -> bool {
    msr::read(reg::IA32_MISC_ENABLE) & (1 << 12) == 0
        && lbr::present()
        && msr::read(reg::IA32_PERF_CAPABILITIES) >> 8 & 0xf == 3
}

case! {
    name: "together_with_pebs", cpl: [3], rules: ["BTS-20", "DS-14", "PEBS-23"], needs: [],
    about: "if one branch triggers BTS and PEBS, the interrupt is delivered after both records",
    fn body(ctx) {
        need_bts!(ctx);
        if !has_pebs() {
            skip!(ctx, "IA32_PERF_CAPABILITIES reports no PEBS of format 3");
        }
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_NMI);
        let area = arm(50, 49);
        let base = PEBS_BUFFER.as_ptr() as u64;
        let mut pebs = area.pebs;
        pebs[..4].copy_from_slice(&[base, base, base + 4 * PEBS_BYTES, base + PEBS_BYTES]);
        PAGES.set_area(DsArea { pebs, ..area });
        msr::write(reg::IA32_PERFEVTSEL0, BRANCHES_USER);
        // The third branch overflows the counter, and the branch after it stores the PEBS record.
        msr::write(reg::IA32_A_PMC0, (1 << 48) - 3);
        msr::write(reg::IA32_PEBS_ENABLE, 1);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 1);
        let sequence = seq::conditionals();
        let events = run_sequence(ctx.cpl, sequence, TR | BTS | BTINT);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0);
        msr::write(reg::IA32_PEBS_ENABLE, 0);
        msr::write(reg::IA32_PERFEVTSEL0, 0);
        let events = require_some!(events, "no unhandled exception");
        check_eq!(events.irqs, 1, "count of interrupts");
        check_eq!(PAGES.area().pebs[1], base + PEBS_BYTES, "PEBS index");
        // Which branch it is depends on whether the IRET to the sequence counts as one of CPL 3.
        let all = sequence.all(ctx.cpl);
        let at = all.items().iter().position(|item| item.to == events.irq_rip).map_or(0, |n| n + 1);
        check!((4..=5).contains(&at), "interrupt after the fourth or fifth branch");
        let records = nmi_handler().records();
        let expected = interrupted(&all, at, records[0].to, records[1].from);
        PAGES.check_stored(&DsArea { pebs: PAGES.area().pebs, ..area }, expected.items());
    }
}

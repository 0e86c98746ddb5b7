//! The interrupt of the branch trace store: when it is requested, how it is delivered, and what
//! becomes of it while it is masked.

#![no_std]
#![no_main]

use core::sync::atomic::AtomicU64;

use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{LVT_MASKED, ApicRegister as Apic};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{apic, insn, msr};
use hindsight_payloads::branch::recorder::IRQ_VECTOR;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BTINT, BTS, FAR, FREEZE_LBRS_ON_PMI, FREEZE_PERFMON_ON_PMI, LBR, List, Run, Sequence, TR,
    Transfer, run_checked, run_sequence,
};
use hindsight_payloads::ds::{Area, RECORD_BYTES, Store};
use hindsight_payloads::lbr;
use hindsight_payloads::{need_bts, sequence};

payload!("bts_pmi");

static STORE: Store = Store::new();

/// LVT: delivery mode NMI.
const LVT_NMI: u32 = 0b100 << 8;
/// A fixed interrupt.
const LVT_FIXED: u32 = IRQ_VECTOR as u32;

/// A buffer of `count` records whose threshold is after `threshold` of them.
fn arm(count: u64, threshold: u64) -> Area {
    let area = STORE.arm(count);
    let area = Area {
        threshold: area.base + threshold * RECORD_BYTES,
        ..area
    };
    STORE.set_area(area);
    area
}

fn is_requested() -> bool {
    apic::has_vector(Apic::IRR, IRQ_VECTOR)
}

/// Takes a requested interrupt, so that the next run begins without one.
fn take_requested() {
    let sequence = seq::interrupt_after_nop();
    run_sequence(0, sequence, 0);
}

case! {
    name: "requested_at_the_threshold", cpl: [0, 3], rules: ["BTS-07", "BTS-08", "BTS-11", "DS-15", "OVF-08", "OVF-10"],
    needs: [],
    about: "with interrupts off: requested exactly if the index reaches the threshold; the LVT entry is then masked",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let all = seq::one_of_each().all(ctx.cpl);
        let n = all.items().len() as u64;
        for threshold in 1..n + 2 {
            apic::write(Apic::LVT_PMC, LVT_FIXED);
            let area = arm(50, threshold);
            require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS | BTINT).is_some(), "the run ended well");
            STORE.check_stored(&area, all.items());
            check_eq!(is_requested(), threshold <= n, "the interrupt is requested");
            let masked = if threshold <= n { LVT_MASKED } else { 0 };
            check_eq!(apic::read(Apic::LVT_PMC), LVT_FIXED | masked, "the LVT entry");
            if is_requested() {
                take_requested();
            }
        }
    }
}

case! {
    name: "requested_by_any_position", cpl: [0, 3], rules: ["BTS-07"], needs: [],
    about: "a threshold between two records or below the base counts as reached when the index has passed it",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let all = seq::jumps().all(ctx.cpl);
        let n = all.items().len() as u64;
        let base = STORE.buffer_address();
        let end = base + n * RECORD_BYTES;
        for (threshold, expected) in
            [(0, true), (base, true), (base + 1, true), (end - 1, true), (end, true), (end + 1, false), (u64::MAX, false)]
        {
            apic::write(Apic::LVT_PMC, LVT_FIXED);
            let area = Area { threshold, ..STORE.arm(50) };
            STORE.set_area(area);
            require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "the run ended well");
            STORE.check_stored(&area, all.items());
            check_eq!(is_requested(), expected, "the interrupt is requested");
            if is_requested() {
                take_requested();
            }
        }
    }
}

/// The records of a run in which the interrupt comes right after record `at`, with handler `handler`
/// returning by the IRET `back`.
fn interrupted(all: &List, at: usize, handler: u64, back: u64) -> List {
    let mut out = List::new();
    for (n, &item) in (1..).zip(all.items()) {
        out.push(item);
        if n == at {
            out.push(Transfer::new(item.to, handler, FAR));
            out.push(Transfer::new(back, item.to, FAR));
        }
    }
    out
}

/// Records before which the interrupt can come when code of CPL 3 runs with interrupts on: all but
/// the last, at whose end they are off.
fn check_delivery(level: u8, lvt: u32, handler: u64, back: u64, flags: u64, sequence: &Sequence) {
    let all = sequence.all(level);
    for at in 1..all.items().len() {
        // Interrupts are off in handlers: a fixed interrupt waits for the IRET.
        let in_handler = all.items()[at - 1].cpl_after(level) != level;
        if in_handler || (level == 0 && lvt == LVT_FIXED) {
            continue;
        }
        apic::write(Apic::LVT_PMC, lvt);
        let area = arm(50, at as u64);
        let what = Run {
            flags,
            ..Run::new(level, sequence, TR | BTS | BTINT)
        };
        let Some(seen) = run_checked(what) else {
            return;
        };
        check_eq!(seen.irqs, 1, "interrupts");
        check_eq!(
            seen.irq_rip,
            all.items()[at - 1].to,
            "saved RIP: the boundary after the branch"
        );
        STORE.check_stored(&area, interrupted(&all, at, handler, back).items());
        check_eq!(
            apic::read(Apic::LVT_PMC),
            lvt | LVT_MASKED,
            "the LVT entry is masked"
        );
    }
}

case! {
    name: "fixed_delivery", cpl: [3], rules: ["BTS-11", "BTS-25", "OVF-06", "OVF-09", "OVF-10"], needs: [],
    about: "as a fixed interrupt it comes right after the branch, once, and is itself recorded",
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
    /// An NMI to this processor itself: only for the addresses of its handler. Not run.
    nmi_handler:
        "20: nop",
    => ["20b", "recorder_nmi", "FAR_IN"], ["recorder_nmi_return", "20b", "FAR_OUT"],
}

case! {
    name: "nmi_delivery", cpl: [0, 3], rules: ["BTS-11", "BTS-25", "OVF-09", "OVF-13"], needs: [],
    about: "as an NMI it comes right after the branch, with interrupts off too",
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
    /// Branches with interrupts on, at CPL 0. The interrupt flag goes off again before the end.
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
    about: "the same at CPL 0; while IF is clear it waits",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        let sequence = with_interrupts_on();
        let all = sequence.all(0);
        let records = seq::interrupt_after_nop().records();
        for at in [2, 3] {
            apic::write(Apic::LVT_PMC, LVT_FIXED);
            let area = arm(50, at as u64);
            let seen = require_some!(run_sequence(0, sequence, TR | BTS | BTINT), "the run ended well");
            check_eq!((seen.irqs, seen.irq_rip), (1, all.items()[at - 1].to), "interrupts, saved RIP");
            STORE.check_stored(&area, interrupted(&all, at, records[0].to, records[1].from).items());
        }
        // Reached by the jump into the sequence, where IF is clear: taken after STI and NOP.
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        arm(50, 1);
        let seen = require_some!(run_sequence(0, sequence, TR | BTS | BTINT), "the run ended well");
        check_eq!((seen.irqs, seen.irq_rip), (1, sequence.records()[0].from), "interrupts, saved RIP");
    }
}

case! {
    name: "masked", cpl: [0, 3], rules: ["BTS-23", "OVF-11"], needs: [],
    about: "while the LVT entry is masked requests are lost; the next record after that requests again",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_FIXED | LVT_MASKED);
        let area = arm(50, 2);
        let all = seq::jumps().all(ctx.cpl);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "the run ended well");
        STORE.check_stored(&area, all.items());
        check!(!is_requested(), "nothing is requested while masked");
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        check!(!is_requested(), "nor by unmasking");
        require!(run_sequence(ctx.cpl, seq::jumps(), 0).is_some(), "the run ended well");
        check!(!is_requested(), "nor by branches that are not stored");
        let mut twice = List::new();
        all.items().iter().chain(all.items()).for_each(|&item| twice.push(item));
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "the run ended well");
        STORE.check_stored(&area, twice.items());
        check!(is_requested(), "by the next record");
        take_requested();
    }
}

case! {
    name: "full_buffer_requests_nothing", cpl: [0, 3], rules: ["BTS-09", "BTS-23"], needs: [],
    about: "a dropped record requests nothing",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_FIXED);
        let area = arm(4, 1);
        STORE.set_area(Area { index: area.maximum, ..area });
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "the run ended well");
        check!(!is_requested(), "nothing is requested");
        check_eq!(apic::read(Apic::LVT_PMC), LVT_FIXED, "the LVT entry");
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
        require!(run_sequence(ctx.cpl, seq::loop_33(), TR | BTS).is_some(), "the run ended well");
        check!(!is_requested(), "nothing is requested");
        check_eq!(apic::read(Apic::LVT_PMC), LVT_FIXED, "the LVT entry");
    }
}

case! {
    name: "disabled_apic", cpl: [0], rules: ["DS-18", "OVF-12"], needs: [],
    about: "a disabled APIC delivers nothing; records are stored all the same",
    fn body(ctx) {
        need_bts!(ctx);
        apic::disable();
        let area = arm(50, 1);
        require!(run_sequence(0, seq::jumps(), TR | BTS | BTINT).is_some(), "the run ended well");
        STORE.check_stored(&area, seq::jumps().all(0).items());
        check!(!is_requested(), "nothing is requested");
    }
}

case! {
    name: "status_and_debugctl", cpl: [0, 3], rules: ["BTS-12", "DCTL-13", "DCTL-07", "DS-14"], needs: [],
    about: "the interrupt sets no status bit, and leaves IA32_DEBUGCTL as it is; the index is its only sign",
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
        let seen = require_some!(run_sequence(ctx.cpl, sequence, TR | BTS | BTINT | LBR), "the run ended well");
        check_eq!(seen.irqs, 1, "NMIs");
        // LBR stayed on: both recorders saw the same.
        let records = nmi_handler().records();
        let expected = interrupted(&sequence.all(ctx.cpl), 2, records[0].to, records[1].from);
        STORE.check_stored(&area, expected.items());
        lbr::check_list(&expected);
        if insn::cpuid(0xa, 0).eax & 0xff >= 2 {
            check_eq!(msr::read(reg::IA32_PERF_GLOBAL_STATUS), 0, "IA32_PERF_GLOBAL_STATUS");
        }
        check!(STORE.area().index >= area.threshold, "the index has reached the threshold");
    }
}

case! {
    name: "freezes_the_lbr_stack", cpl: [0, 3], rules: ["BTS-12", "DCTL-13", "LBR-03"], needs: [],
    about: "with FREEZE_LBRS_ON_PMI the request freezes the LBR stack: the interrupt itself is not in it",
    fn body(ctx) {
        need_bts!(ctx);
        if insn::cpuid(0xa, 0).eax & 0xff < 4 || !lbr::present() {
            skip!(ctx, "CPUID leaf 0AH announces no version 4, which has LBR_FRZ");
        }
        apic::enable();
        for (bits, status) in [(FREEZE_LBRS_ON_PMI, 1 << 58), (FREEZE_PERFMON_ON_PMI, 1 << 59)] {
            apic::write(Apic::LVT_PMC, LVT_NMI);
            let area = arm(50, 2);
            lbr::reset();
            let sequence = seq::jumps();
            let seen = run_sequence(ctx.cpl, sequence, TR | BTS | BTINT | LBR | bits);
            check_eq!(seen.map(|seen| seen.irqs), Some(1), "NMIs");
            check_eq!(msr::read(reg::IA32_PERF_GLOBAL_STATUS), status, "IA32_PERF_GLOBAL_STATUS");
            let all = sequence.all(ctx.cpl);
            let records = nmi_handler().records();
            let expected = interrupted(&all, 2, records[0].to, records[1].from);
            STORE.check_stored(&area, expected.items());
            if bits == FREEZE_LBRS_ON_PMI {
                lbr::check_records(&lbr::Stack::read(), &all.items()[..2]);
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
    about: "where one branch triggers both, the interrupt comes when both records are there",
    fn body(ctx) {
        need_bts!(ctx);
        if !has_pebs() {
            skip!(ctx, "IA32_PERF_CAPABILITIES announces no PEBS of format 3");
        }
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_NMI);
        let area = arm(50, 49);
        let base = PEBS_BUFFER.as_ptr() as u64;
        let mut pebs = area.pebs;
        pebs[..4].copy_from_slice(&[base, base, base + 4 * PEBS_BYTES, base + PEBS_BYTES]);
        STORE.set_area(Area { pebs, ..area });
        msr::write(reg::IA32_PERFEVTSEL0, BRANCHES_USER);
        // The third branch overflows, the one after it gives the record.
        msr::write(reg::IA32_A_PMC0, (1 << 48) - 3);
        msr::write(reg::IA32_PEBS_ENABLE, 1);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 1);
        let sequence = seq::conditionals();
        let seen = run_sequence(ctx.cpl, sequence, TR | BTS | BTINT);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0);
        msr::write(reg::IA32_PEBS_ENABLE, 0);
        msr::write(reg::IA32_PERFEVTSEL0, 0);
        let seen = require_some!(seen, "the run ended well");
        check_eq!(seen.irqs, 1, "interrupts");
        check_eq!(STORE.area().pebs[1], base + PEBS_BYTES, "the PEBS index");
        // Which branch it was depends on whether the IRET to the sequence counts as one of CPL 3.
        let all = sequence.all(ctx.cpl);
        let at = all.items().iter().position(|item| item.to == seen.irq_rip).map_or(0, |n| n + 1);
        check!((4..=5).contains(&at), "it came after the fourth or fifth branch");
        let records = nmi_handler().records();
        let expected = interrupted(&all, at, records[0].to, records[1].from);
        STORE.check_stored(&Area { pebs: STORE.area().pebs, ..area }, expected.items());
    }
}

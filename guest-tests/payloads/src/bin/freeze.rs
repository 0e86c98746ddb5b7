//! The freezes of counters and of the LBR stack at a PMI request.

#![no_std]
#![no_main]

use hindsight_guest::apic;
use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, LVT_MASKED};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::global::{CTR_FRZ, LBR_FRZ};
use hindsight_payloads::branch::{
    FREEZE_LBRS_ON_PMI as FREEZE_LBRS, FREEZE_PERFMON_ON_PMI as FREEZE_COUNTERS, LBR,
};
use hindsight_payloads::pmu::{self, INT, MAX, ON};
use hindsight_payloads::{counted, need_pmu};

payload!("freeze");

/// Whether IA32_PERF_CAPABILITIES reports an LBR stack.
fn has_lbr() -> bool {
    msr::read(reg::IA32_PERF_CAPABILITIES) & 0x3f != 0
}

/// Counts 64 NOPs with counters 0 and 1, of which counter 0 overflows after 10 instructions.
fn overflow(debugctl: u64, bits: u64) {
    pmu::select(0, 0xc0, 0, bits);
    pmu::select(1, 0xc0, 0, ON);
    pmu::preset(0, 10);
    pmu::set(1, 0);
    msr::write(reg::IA32_DEBUGCTL, debugctl);
    counted!(3, ".rept 64", "nop", ".endr");
}

case! {
    name: "counters", cpl: [0], rules: ["FRZ-01", "FRZ-05", "FRZ-11", "FRZ-12"], needs: [],
    about: "with FREEZE_PERFMON_ON_PMI all counters stop at the overflow; the control MSRs do not change",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::select(1, 0xc0, 0, ON);
        pmu::preset(0, 10);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11);
        msr::write(reg::IA32_DEBUGCTL, FREEZE_COUNTERS);
        pmu::start(3 | 1 << 32);
        for _ in 0..100 {
            core::hint::spin_loop();
        }
        let pmi = pmu::pmi_state();
        check_eq!(pmi.taken, 1, "count of interrupts");
        check_eq!(pmi.status, CTR_FRZ | 1, "status in the handler");
        check_eq!(pmi.readings, [0, 0], "counter 0 in the handler, read twice");
        check_eq!(pmu::get(1), 10, "counter 1");
        check_eq!(pmu::fixed(0), 10, "fixed counter 0");
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_CTRL), 3 | 1 << 32, "GLOBAL_CTRL");
        check_eq!(msr::read(reg::IA32_FIXED_CTR_CTRL), 0b11, "FIXED_CTR_CTRL");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "thaw", cpl: [0], rules: ["FRZ-03", "FRZ-08"], needs: [],
    about: "STATUS_RESET unfreezes the counters at once, clearing the control bit does not",
    fn body(ctx) {
        need_pmu!(ctx);
        overflow(FREEZE_COUNTERS, ON | INT);
        check_eq!(pmu::status(), CTR_FRZ | 1, "status after the overflow");
        msr::write(reg::IA32_DEBUGCTL, 0);
        check_eq!(pmu::status(), CTR_FRZ | 1, "status with the control bit clear");
        counted!(3, ".rept 64", "nop", ".endr");
        check_eq!(pmu::get(1), 10, "counter 1, frozen");
        pmu::start(3);
        counted!(3, "mov ecx, 0x390", "xor eax, eax", "mov edx, 0x08000000", "wrmsr", ".rept 64", "nop", ".endr");
        // The WRMSR that unfreezes, the NOPs, and three instructions before the last WRMSR.
        check_eq!(pmu::get(1), 10 + 1 + 64 + 3, "counter 1, unfrozen");
        pmu::reset();
    }
}

case! {
    name: "not_asked_for", cpl: [0], rules: ["FRZ-04", "FRZ-06"], needs: [],
    about: "no counter freezes without the control bits or without INT",
    fn body(ctx) {
        need_pmu!(ctx);
        overflow(0, ON | INT);
        check_eq!(pmu::status(), 1, "status without the control bits");
        check_eq!(pmu::get(1), 64 + pmu::OVERHEAD, "counter 1, not frozen");
        pmu::reset();
        let freeze = if has_lbr() { FREEZE_COUNTERS | FREEZE_LBRS } else { FREEZE_COUNTERS };
        overflow(freeze, ON);
        check_eq!(pmu::status(), 1, "status without INT");
        check_eq!(pmu::get(1), 64 + pmu::OVERHEAD, "counter 1, not frozen");
        pmu::reset();
    }
}

case! {
    name: "masked", cpl: [0], rules: ["FRZ-07"], needs: [],
    about: "a request freezes the counters even if the LVT entry is masked",
    fn body(ctx) {
        need_pmu!(ctx);
        apic::enable();
        apic::write(ApicRegister::LVT_PMC, LVT_MASKED | pmu::LVT_NMI);
        overflow(FREEZE_COUNTERS, ON | INT);
        check_eq!(pmu::status(), CTR_FRZ | 1, "status");
        check_eq!(pmu::get(1), 10, "counter 1");
        apic::disable();
        pmu::reset();
    }
}

case! {
    name: "lbrs", cpl: [0], rules: ["FRZ-02", "FRZ-03", "FRZ-07", "FRZ-08", "FRZ-11", "FRZ-12"], needs: [],
    about: "with FREEZE_LBRS_ON_PMI the LBR stack stops at the request, before it records the interrupt",
    fn body(ctx) {
        need_pmu!(ctx);
        if !has_lbr() {
            skip!(ctx, "IA32_PERF_CAPABILITIES reports no LBR stack");
        }
        pmu::unmask_pmi(true);
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::preset(0, 8);
        msr::write(reg::IA32_DEBUGCTL, LBR | FREEZE_LBRS);
        let (first, second): (u64, u64);
        counted!(1,
            "jmp 2f", "2: .rept 64", "nop", ".endr",
            "lea r8, [rip + 2b]", "jmp 3f", "3: lea r9, [rip + 3b]";
            out("r8") first, out("r9") second);
        let pmi = pmu::pmi_state();
        let tos = (msr::read(reg::MSR_LASTBRANCH_TOS) & 31) as u32;
        let to = msr::read(reg::MSR_LASTBRANCH_0_TO_IP + tos);
        check_eq!(pmi.taken, 1, "count of interrupts");
        check_eq!(pmi.status, LBR_FRZ | 1, "status in the handler");
        check_eq!(msr::read(reg::IA32_DEBUGCTL), LBR | FREEZE_LBRS, "IA32_DEBUGCTL");
        check_eq!(to, first, "target of the newest record, the last branch before the overflow");
        check!(pmu::get(0) > 50, "counter 0, not frozen");
        msr::write(reg::IA32_DEBUGCTL, LBR);
        check_eq!(pmu::status() & LBR_FRZ, LBR_FRZ, "LBR_FRZ with the control bit clear");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, LBR_FRZ);
        core::hint::spin_loop();
        let to = {
            counted!(0, "jmp 2f", "2: nop");
            msr::write(reg::IA32_DEBUGCTL, 0);
            let tos = (msr::read(reg::MSR_LASTBRANCH_TOS) & 31) as u32;
            msr::read(reg::MSR_LASTBRANCH_0_TO_IP + tos)
        };
        check!(to != first && to != second, "target of the newest record after STATUS_RESET");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "frozen_by_software", cpl: [0], rules: ["PMU-20", "FRZ-12"], needs: [],
    about: "LBR_FRZ set by software stops the LBR stack and no counter",
    fn body(ctx) {
        need_pmu!(ctx);
        if !has_lbr() {
            skip!(ctx, "IA32_PERF_CAPABILITIES reports no LBR stack");
        }
        msr::write(reg::MSR_LASTBRANCH_TOS, 5);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, LBR_FRZ);
        msr::write(reg::IA32_DEBUGCTL, LBR);
        pmu::select(0, 0xc0, 0, ON);
        counted!(1, ".rept 10", "jmp 2f", "2:", ".endr");
        msr::write(reg::IA32_DEBUGCTL, 0);
        check_eq!(msr::read(reg::MSR_LASTBRANCH_TOS), 5, "TOS");
        check_eq!(pmu::get(0), 10 + pmu::OVERHEAD, "count of instructions");
        pmu::reset();
    }
}

case! {
    name: "user", cpl: [3], rules: ["FRZ-01", "FRZ-05"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "an overflow at CPL 3 freezes a counter of CPL 0 before the handler runs",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        pmu::select(0, 0xc0, 0, pmu::OS);
        pmu::select(1, 0xc0, 0, pmu::USR | INT);
        pmu::preset(1, 50);
        msr::write(reg::IA32_DEBUGCTL, FREEZE_COUNTERS);
        pmu::start(3);
        let fault = ctx.run(|| {
            for _ in 0..200 {
                core::hint::spin_loop();
            }
        });
        let kernel = pmu::get(0);
        check!(fault.is_none(), "no exception");
        check_eq!(pmu::pmi_state().taken, 1, "count of interrupts");
        check_eq!(pmu::pmi_state().readings, [kernel, kernel], "counter 0 in the handler and after it");
        check_eq!(pmu::get(1) & MAX, 0, "counter 1");
        insn::cli();
        pmu::mask_pmi();
        pmu::reset();
    }
}

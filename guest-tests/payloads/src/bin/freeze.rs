//! Freezing of counters and of the LBR stack when an interrupt is requested.

#![no_std]
#![no_main]

use hindsight_guest::apic;
use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{LVT_MASKED, ApicRegister};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::global::{CTR_FRZ, LBR_FRZ};
use hindsight_payloads::pmu::{self, INT, MAX, ON};
use hindsight_payloads::{counted, need_pmu};

payload!("freeze");

const FREEZE_LBRS: u64 = 1 << 11;
const FREEZE_COUNTERS: u64 = 1 << 12;
const LBR: u64 = 1;

/// There is an LBR stack: the format that IA32_PERF_CAPABILITIES tells.
fn has_lbr() -> bool {
    msr::read(reg::IA32_PERF_CAPABILITIES) & 0x3f != 0
}

/// Counter 0 with INT and counter 1 without count instructions; 0 overflows after 10. Then 64 NOPs.
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
    about: "with FREEZE_PERFMON_ON_PMI all counters stop at the overflow; the controls stay",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::listen(true);
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::select(1, 0xc0, 0, ON);
        pmu::preset(0, 10);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11);
        msr::write(reg::IA32_DEBUGCTL, FREEZE_COUNTERS);
        pmu::start(3 | 1 << 32);
        for _ in 0..100 {
            core::hint::spin_loop();
        }
        let seen = pmu::seen();
        check_eq!(seen.taken, 1, "interrupts");
        check_eq!(seen.status, CTR_FRZ | 1, "status in the handler");
        check_eq!(seen.readings, [0, 0], "counter 0 stands still");
        check_eq!(pmu::get(1), 10, "counter 1 stopped with it");
        check_eq!(pmu::fixed(0), 10, "and fixed counter 0");
        check_eq!(msr::read(reg::IA32_PERF_GLOBAL_CTRL), 3 | 1 << 32, "GLOBAL_CTRL");
        check_eq!(msr::read(reg::IA32_FIXED_CTR_CTRL), 0b11, "FIXED_CTR_CTRL");
        pmu::deafen();
        pmu::reset();
    }
}

case! {
    name: "thaw", cpl: [0], rules: ["FRZ-03", "FRZ-08"], needs: [],
    about: "STATUS_RESET lets counters run again, clearing the control bit does not",
    fn body(ctx) {
        need_pmu!(ctx);
        overflow(FREEZE_COUNTERS, ON | INT);
        check_eq!(pmu::status(), CTR_FRZ | 1, "frozen");
        msr::write(reg::IA32_DEBUGCTL, 0);
        check_eq!(pmu::status(), CTR_FRZ | 1, "still frozen");
        counted!(3, ".rept 64", "nop", ".endr");
        check_eq!(pmu::get(1), 10, "counter 1 stands still");
        pmu::start(3);
        counted!(3, "mov ecx, 0x390", "xor eax, eax", "mov edx, 0x08000000", "wrmsr", ".rept 64", "nop", ".endr");
        // The WRMSR that thaws, the NOPs, and three before the last WRMSR.
        check_eq!(pmu::get(1), 10 + 1 + 64 + 3, "at once");
        pmu::reset();
    }
}

case! {
    name: "not_asked_for", cpl: [0], rules: ["FRZ-04", "FRZ-06"], needs: [],
    about: "nothing freezes without the control bits, nor without INT",
    fn body(ctx) {
        need_pmu!(ctx);
        overflow(0, ON | INT);
        check_eq!(pmu::status(), 1, "status without the control bits");
        check_eq!(pmu::get(1), 64 + pmu::OVERHEAD, "counter 1 counts on");
        pmu::reset();
        let freeze = if has_lbr() { FREEZE_COUNTERS | FREEZE_LBRS } else { FREEZE_COUNTERS };
        overflow(freeze, ON);
        check_eq!(pmu::status(), 1, "status without INT");
        check_eq!(pmu::get(1), 64 + pmu::OVERHEAD, "counter 1 counts on");
        pmu::reset();
    }
}

case! {
    name: "masked", cpl: [0], rules: ["FRZ-07"], needs: [],
    about: "the request freezes even if the LVT entry is masked",
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
    about: "with FREEZE_LBRS_ON_PMI the stack stops at the request, before the interrupt is in it",
    fn body(ctx) {
        need_pmu!(ctx);
        if !has_lbr() {
            skip!(ctx, "IA32_PERF_CAPABILITIES shows no LBR stack");
        }
        pmu::listen(true);
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::preset(0, 8);
        msr::write(reg::IA32_DEBUGCTL, LBR | FREEZE_LBRS);
        let (first, second): (u64, u64);
        counted!(1,
            "jmp 2f", "2: .rept 64", "nop", ".endr",
            "lea r8, [rip + 2b]", "jmp 3f", "3: lea r9, [rip + 3b]";
            out("r8") first, out("r9") second);
        let seen = pmu::seen();
        let tos = (msr::read(reg::MSR_LASTBRANCH_TOS) & 31) as u32;
        let to = msr::read(reg::MSR_LASTBRANCH_0_TO_IP + tos);
        check_eq!(seen.taken, 1, "interrupts");
        check_eq!(seen.status, LBR_FRZ | 1, "status in the handler");
        check_eq!(msr::read(reg::IA32_DEBUGCTL), LBR | FREEZE_LBRS, "IA32_DEBUGCTL");
        check_eq!(to, first, "the last branch before the overflow is the newest");
        check!(pmu::get(0) > 50, "counters run on");
        msr::write(reg::IA32_DEBUGCTL, LBR);
        check_eq!(pmu::status() & LBR_FRZ, LBR_FRZ, "clearing the control bit thaws nothing");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, LBR_FRZ);
        core::hint::spin_loop();
        let to = {
            counted!(0, "jmp 2f", "2: nop");
            msr::write(reg::IA32_DEBUGCTL, 0);
            let tos = (msr::read(reg::MSR_LASTBRANCH_TOS) & 31) as u32;
            msr::read(reg::MSR_LASTBRANCH_0_TO_IP + tos)
        };
        check!(to != first && to != second, "the stack records again");
        pmu::deafen();
        pmu::reset();
    }
}

case! {
    name: "frozen_by_software", cpl: [0], rules: ["PMU-20", "FRZ-12"], needs: [],
    about: "LBR_FRZ set by software stops the stack and no counter",
    fn body(ctx) {
        need_pmu!(ctx);
        if !has_lbr() {
            skip!(ctx, "IA32_PERF_CAPABILITIES shows no LBR stack");
        }
        msr::write(reg::MSR_LASTBRANCH_TOS, 5);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, LBR_FRZ);
        msr::write(reg::IA32_DEBUGCTL, LBR);
        pmu::select(0, 0xc0, 0, ON);
        counted!(1, ".rept 10", "jmp 2f", "2:", ".endr");
        msr::write(reg::IA32_DEBUGCTL, 0);
        check_eq!(msr::read(reg::MSR_LASTBRANCH_TOS), 5, "TOS");
        check_eq!(pmu::get(0), 10 + pmu::OVERHEAD, "instructions");
        pmu::reset();
    }
}

case! {
    name: "user", cpl: [3], rules: ["FRZ-01", "FRZ-05"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "an overflow at CPL 3 freezes a counter of CPL 0 before the handler runs",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::listen(true);
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
        check_eq!(pmu::seen().taken, 1, "interrupts");
        check_eq!(pmu::seen().readings, [kernel, kernel], "counter 0 in the handler and after it");
        check_eq!(pmu::get(1) & MAX, 0, "counter 1");
        insn::cli();
        pmu::deafen();
        pmu::reset();
    }
}

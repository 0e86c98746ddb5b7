//! Overflow, and the interrupt it requests through the local APIC.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::apic;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, LVT_MASKED, SVR_ENABLE};
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::trap;
use hindsight_payloads::pmu::{self, INT, MAX, ON, VECTOR};
use hindsight_payloads::{counted, need_lbr, need_pmu};

payload!("pmi");

/// Runs 64 NOPs with counter 0 on; gives the address of the first one.
fn nops() -> u64 {
    let first: u64;
    counted!(1,
        "2: .rept 64", "nop", ".endr",
        "lea r8, [rip + 2b]"; out("r8") first);
    first
}

case! {
    name: "status", cpl: [0], rules: ["OVF-01", "OVF-02", "OVF-03", "OVF-04"], needs: [],
    about: "overflow sets the status bit with or without INT; the counter goes on; a write never does",
    fn body(ctx) {
        need_pmu!(ctx);
        for bits in [ON, ON | INT] {
            for n in 0..4 {
                pmu::select(n, 0xc0, 0, bits);
                pmu::set(n, MAX);
                pmu::set(n, 0);
                check_eq!(pmu::status(), 0, "after writes");
                pmu::preset(n, 10);
                counted!(1 << n, ".rept 50", "nop", ".endr");
                check_eq!(pmu::get(n), 50 + pmu::OVERHEAD - 10, "counted on");
                check_eq!(pmu::status(), 1 << n, "one bit");
                counted!(1 << n, ".rept 50", "nop", ".endr");
                check_eq!(pmu::status(), 1 << n, "it stays");
                pmu::reset();
            }
        }
        for i in 0..3 {
            msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11 << (4 * i));
            msr::write(reg::IA32_FIXED_CTR0 + i, MAX);
            counted!(1 << (32 + i), ".rept 500", "nop", ".endr");
            check_eq!(pmu::status(), 1 << (32 + i), "one bit");
            pmu::reset();
        }
    }
}

case! {
    name: "exact", cpl: [0], rules: ["OVF-05", "OVF-06", "OVF-09", "OVF-13", "EVT-16", "OP-38"], needs: [],
    about: "the interrupt comes right after the instruction that overflows, fixed or NMI",
    fn body(ctx) {
        need_pmu!(ctx);
        for nmi in [false, true] {
            pmu::unmask_pmi(nmi);
            pmu::select(0, 0xc0, 0, ON | INT);
            insn::sti();
            for events in [1, 2, 10, 60] {
                pmu::preset(0, events);
                msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1);
                apic::write(ApicRegister::LVT_PMC, if nmi { pmu::LVT_NMI } else { VECTOR.into() });
                let taken = pmu::pmi_state().taken;
                let first = nops();
                let state = pmu::pmi_state();
                check_eq!(state.taken, taken + 1, "count of interrupts");
                // The WRMSR is the first event.
                check_eq!(state.rip - first, events - 1, "instructions after the WRMSR");
                check_eq!(state.status & MAX, 1, "status in the handler");
            }
            insn::cli();
            pmu::mask_pmi();
            pmu::reset();
        }
    }
}

/// Counts 5 000 instructions of a loop with these bits of IA32_DEBUGCTL: interrupts, where the interrupt came, and
/// how far the counter was on in its handler.
fn in_a_loop(debugctl: u64) -> ((u64, u64), u64) {
    pmu::unmask_pmi(false);
    pmu::select(0, 0xc0, 0, ON | INT);
    pmu::preset(0, 5000);
    msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1);
    apic::write(ApicRegister::LVT_PMC, VECTOR.into());
    msr::write(reg::IA32_DEBUGCTL, debugctl);
    insn::sti();
    let before = pmu::pmi_state().taken;
    let first: u64;
    counted!(1, "mov r9d, 4000", "2: dec r9d", "jnz 2b", "lea r8, [rip + 2b]";
        out("r8") first, out("r9") _);
    insn::cli();
    let state = pmu::pmi_state();
    pmu::mask_pmi();
    pmu::reset();
    let offset = state.rip.wrapping_sub(first);
    ((state.taken - before, offset), state.readings[0])
}

case! {
    name: "exact_with_branches_recorded", cpl: [0], rules: ["OVF-05", "OVF-06", "OVF-09"], needs: [],
    about: "thousands of recorded branches on the way do not put the interrupt off",
    fn body(ctx) {
        need_pmu!(ctx);
        need_lbr!(ctx);
        let plain = in_a_loop(0);
        // Event 1 is the WRMSR, event 2 the MOV, and each round has two.
        check_eq!(plain.0, (1, 0), "one interrupt, at the top of the loop");
        check_eq!(in_a_loop(DebugCtl::LBR.bits()), plain, "the same with the LBR stack on");
    }
}

case! {
    name: "exact_branches", cpl: [3], rules: ["OVF-05", "OVF-06", "EVT-06"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "with N conditional branches to go at CPL 3, the NMI comes right after the N-th",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc4, 1, pmu::USR);
        // How many there are before the loop, on the way to CPL 3.
        let go = |ctx: &Ctx| {
            let mut registers = (0, 0);
            pmu::start(1);
            let fault = ctx.run(|| {
                let (left, after): (u64, u64);
                // SAFETY: registers only.
                unsafe {
                    asm!("lea {after}, [rip + 3f]", "rdpmc", "mov r9, rax", "mov ecx, 100",
                        "2: sub ecx, 1", "jnz 2b", "3: nop",
                        after = out(reg) after, inout("ecx") 0 => _, out("rax") _, out("rdx") _,
                        out("r9") left, options(nomem, nostack));
                }
                registers = (left, after);
            });
            pmu::stop();
            check!(fault.is_none(), "no exception");
            registers
        };
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | hindsight_guest::regs::cr::Cr4::PCE.bits());
        pmu::set(0, 0);
        let (before, after) = go(ctx);
        check_eq!(pmu::get(0) >= before + 100, true, "the branches of the loop");
        pmu::select(0, 0xc4, 1, pmu::USR | INT);
        for events in [1, 50, 99, 100] {
            pmu::unmask_pmi(true);
            pmu::preset(0, before + events);
            let _ = go(ctx);
            let state = pmu::pmi_state();
            check_eq!(state.taken, 1, "one NMI");
            // SUB and JNZ are five bytes; the last JNZ falls through.
            let expected = if events == 100 { after } else { after - 5 };
            check_eq!(state.rip, expected, "after the branch");
            check_eq!(state.readings[0], state.readings[1], "nothing counts at CPL 0");
            check_eq!(state.readings[0], 0, "right at the overflow");
            pmu::mask_pmi();
        }
        insn::write_cr4(cr4);
        pmu::reset();
    }
}

case! {
    name: "no_int_no_interrupt", cpl: [0], rules: ["OVF-05", "OVF-01"], needs: [],
    about: "without INT an overflow interrupts nobody",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        pmu::select(0, 0xc0, 0, ON);
        pmu::preset(0, 5);
        nops();
        check_eq!(pmu::pmi_state().taken, 0, "count of interrupts");
        check_eq!(pmu::status(), 1, "status");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "fixed_counter", cpl: [0], rules: ["OVF-05", "OVF-06"], needs: [],
    about: "a fixed counter with its PMI bit interrupts too",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b1011);
        msr::write(reg::IA32_FIXED_CTR0, MAX - 19);
        let first: u64;
        counted!(1 << 32, "2: .rept 64", "nop", ".endr", "lea r8, [rip + 2b]"; out("r8") first);
        let state = pmu::pmi_state();
        check_eq!(state.taken, 1, "count of interrupts");
        check_eq!(state.rip - first, 19, "instructions after the WRMSR");
        check_eq!(state.status & (MAX | 7 << 32), 1 << 32, "status");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "again", cpl: [0], rules: ["OVF-07", "OVF-04", "OP-30"], needs: [],
    about: "an overflow with the status bit still set interrupts again",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON | INT);
        for round in 1..4_u64 {
            if round == 1 {
                pmu::unmask_pmi(true);
            }
            apic::write(ApicRegister::LVT_PMC, pmu::LVT_NMI);
            pmu::preset(0, 5);
            nops();
            check_eq!(pmu::pmi_state().taken, round, "count of interrupts");
            check_eq!(pmu::status(), 1, "the bit is still set");
        }
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "lvt", cpl: [0], rules: ["OVF-08", "OVF-16"], needs: [],
    about: "the LVT entry is masked after RESET, in both modes of the APIC, and announced",
    fn body(ctx) {
        need_pmu!(ctx);
        check_eq!(apic::read(ApicRegister::LVT_PMC), LVT_MASKED, "340H");
        check!(apic::read(ApicRegister::VERSION) >> 16 & 0xff >= 4, "the version register");
        if insn::has(Feature::X2APIC) {
            apic::enter_x2apic();
            check_eq!(msr::read(0x834), u64::from(LVT_MASKED), "834H");
            check_eq!(msr::write_safe(0x834, 1 << 17), Err(GP), "a reserved bit");
            apic::leave_x2apic();
        }
    }
}

case! {
    name: "mask_on_delivery", cpl: [0], rules: ["OVF-10", "OVF-11"], needs: [],
    about: "delivery masks the entry; what is requested while it is masked is lost",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON | INT);
        for nmi in [true, false] {
            pmu::unmask_pmi(nmi);
            insn::sti();
            pmu::preset(0, 5);
            nops();
            let state = pmu::pmi_state();
            check_eq!(state.taken, 1, "count of interrupts");
            check!(state.lvt & u64::from(LVT_MASKED) != 0, "masked in the handler");
            pmu::preset(0, 5);
            nops();
            check_eq!(pmu::pmi_state().taken, 1, "none while masked");
            let entry = apic::read(ApicRegister::LVT_PMC);
            apic::write(ApicRegister::LVT_PMC, entry & !LVT_MASKED);
            counted!(0, "nop", "nop");
            check_eq!(pmu::pmi_state().taken, 1, "none later");
            pmu::preset(0, 5);
            nops();
            check_eq!(pmu::pmi_state().taken, 2, "a new one");
            insn::cli();
            pmu::mask_pmi();
        }
        pmu::reset();
    }
}

case! {
    name: "apic_disabled", cpl: [0], rules: ["OVF-12"], needs: [],
    about: "a local APIC that is disabled by software delivers nothing",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        pmu::select(0, 0xc0, 0, ON | INT);
        apic::write(ApicRegister::SVR, 0xff);
        pmu::preset(0, 5);
        nops();
        apic::write(ApicRegister::SVR, SVR_ENABLE | 0xff);
        nops();
        check_eq!(pmu::pmi_state().taken, 0, "count of interrupts");
        check_eq!(pmu::status(), 1, "status");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "waits_for_if", cpl: [0], rules: ["OVF-13"], needs: [],
    about: "a fixed interrupt waits for IF and for the task priority, an NMI for neither",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::unmask_pmi(false);
        pmu::preset(0, 5);
        nops();
        check_eq!(pmu::pmi_state().taken, 0, "not with IF clear");
        insn::write_cr8(u64::from(VECTOR >> 4));
        insn::sti();
        core::hint::spin_loop();
        check_eq!(pmu::pmi_state().taken, 0, "not with CR8 as high");
        insn::write_cr8(0);
        core::hint::spin_loop();
        insn::cli();
        check_eq!(pmu::pmi_state().taken, 1, "then");
        pmu::unmask_pmi(true);
        insn::write_cr8(15);
        pmu::preset(0, 5);
        nops();
        insn::write_cr8(0);
        check_eq!(pmu::pmi_state().taken, 1, "an NMI");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "several_at_once", cpl: [0], rules: ["OVF-14"], needs: [],
    about: "counters that overflow at one instruction give one interrupt and all their bits",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        for n in 0..4 {
            pmu::select(n, 0xc0, 0, ON | INT);
            pmu::preset(n, 20);
        }
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b1011);
        msr::write(reg::IA32_FIXED_CTR0, MAX - 19);
        counted!(0xf | 1 << 32, ".rept 64", "nop", ".endr");
        let state = pmu::pmi_state();
        check_eq!(state.taken, 1, "count of interrupts");
        check_eq!(state.status & (0xf | 7 << 32), 0xf | 1 << 32, "status");
        pmu::mask_pmi();
        pmu::reset();
    }
}

case! {
    name: "wakes", cpl: [0], rules: ["OVF-15"], needs: [],
    about: "an interrupt that the HLT itself overflows into wakes it",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON | INT);
        for nmi in [true, false] {
            pmu::unmask_pmi(nmi);
            // WRMSR, STI or NOP, HLT.
            pmu::preset(0, 3);
            if nmi {
                counted!(1, "nop", "hlt");
            } else {
                counted!(1, "sti", "hlt", "cli");
            }
            check_eq!(pmu::pmi_state().taken, 1, "woken by the interrupt");
            pmu::mask_pmi();
        }
        pmu::reset();
    }
}

/// How many storms were taken.
static STORMS: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);

/// Takes an interrupt of a counter that overflows at every instruction outside of the handler.
fn on_storm(_: &mut TrapFrame) {
    pmu::stop();
    let taken = STORMS.fetch_add(1, core::sync::atomic::Ordering::AcqRel);
    apic::write(ApicRegister::LVT_PMC, pmu::LVT_NMI);
    if taken < 500 {
        pmu::preset(0, 8);
        pmu::start(1);
    }
}

case! {
    name: "storm", cpl: [0], rules: ["OVF-05", "OVF-10"], needs: [], timeout_ms: 10000,
    about: "a counter that overflows again on the way out of each handler: every one is taken",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::unmask_pmi(true);
        trap::set_handler(2, on_storm);
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::preset(0, 5);
        pmu::start(1);
        for _ in 0..20_000 {
            core::hint::spin_loop();
        }
        pmu::mask_pmi();
        check_eq!(STORMS.load(core::sync::atomic::Ordering::Acquire), 501, "count of interrupts");
        pmu::reset();
    }
}

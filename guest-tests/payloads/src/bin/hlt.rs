//! HLT and the events that end it.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::insn::{self, rdtsc};
use hindsight_guest::msr::GP;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, ICR_ASSERT, ICR_NMI, LVT_TIMER_PERIODIC};
use hindsight_guest::trap;

payload!("hlt");

const VECTOR: u8 = 0x62;

static TAKEN: AtomicU64 = AtomicU64::new(0);
static SAVED_RIP: AtomicU64 = AtomicU64::new(0);

fn count(frame: &mut TrapFrame) {
    SAVED_RIP.store(frame.rip, Ordering::Release);
    TAKEN.fetch_add(1, Ordering::AcqRel);
    if frame.vector != 2 {
        apic::eoi();
    }
}

fn taken() -> u64 {
    TAKEN.load(Ordering::Acquire)
}

/// Starts the APIC timer in `mode` with `initial` ticks of its undivided clock.
fn start_timer(mode: u32, initial: u32) {
    TAKEN.store(0, Ordering::Release);
    apic::enable();
    trap::set_handler(VECTOR, count);
    apic::write(ApicRegister::TIMER_DIVIDE, 0b1011); // by 1
    apic::write(ApicRegister::LVT_TIMER, mode | u32::from(VECTOR));
    apic::write(ApicRegister::TIMER_INITIAL, initial);
}

case! {
    name: "timer_wakes", cpl: [0], rules: [], needs: ["hlt-exit", "interrupt"],
    about: "an interrupt of the APIC timer ends HLT; execution continues behind it",
    fn body(_ctx) {
        start_timer(0, 50_000);
        insn::sti_hlt();
        insn::cli();
        apic::disable();
        check_eq!(taken(), 1, "count of interrupts");
    }
}

case! {
    name: "periodic_timer_wakes", cpl: [0], rules: [], needs: ["hlt-exit", "interrupt"],
    about: "each period of the timer ends one HLT",
    fn body(_ctx) {
        start_timer(LVT_TIMER_PERIODIC, 100_000);
        for _ in 0..5 {
            let before = taken();
            while taken() == before {
                insn::sti_hlt();
                insn::cli();
            }
        }
        apic::disable();
        check!(taken() >= 5, "at least five interrupts");
    }
}

case! {
    name: "time_goes_on", cpl: [0], rules: ["TSC-07"], needs: ["hlt-exit", "interrupt"],
    about: "the TSC counts while the CPU is halted",
    fn body(_ctx) {
        let before = rdtsc();
        start_timer(0, 250_000);
        insn::sti_hlt();
        insn::cli();
        apic::disable();
        // 250,000 ticks of a timer of at most 1 GHz are at least 250 us.
        check!(rdtsc().wrapping_sub(before) > 250_000 / 4, "ticks of the TSC");
    }
}

case! {
    name: "pending_interrupt", cpl: [0], rules: [], needs: ["hlt-exit", "interrupt"],
    about: "an interrupt that is pending before STI; HLT ends the halt",
    fn body(_ctx) {
        TAKEN.store(0, Ordering::Release);
        apic::enable();
        trap::set_handler(VECTOR, count);
        apic::send(apic::id(), ICR_ASSERT | u32::from(VECTOR));
        insn::sti_hlt();
        insn::cli();
        check_eq!(taken(), 1, "count of interrupts");
        apic::disable();
    }
}

case! {
    name: "nmi_wakes", cpl: [0], rules: [], needs: ["hlt-exit", "nmi"],
    about: "an NMI ends HLT with interrupts disabled",
    fn body(_ctx) {
        TAKEN.store(0, Ordering::Release);
        apic::enable();
        trap::set_handler(2, count);
        apic::send(apic::id(), ICR_NMI | ICR_ASSERT);
        // If the NMI was delivered already, HLT would wait without an end.
        if taken() == 0 {
            insn::hlt();
        }
        check_eq!(taken(), 1, "count of NMIs");
        apic::disable();
    }
}

case! {
    name: "user_access", cpl: [3], rules: [], needs: ["exceptions", "iretq-cpl3"],
    about: "HLT at CPL 3 raises #GP(0)",
    fn body(ctx) {
        let fault = ctx.run(insn::hlt);
        check_eq!(fault.map(|e| e.code()), Some(GP), "vector and error code");
    }
}

//! The timer of the local APIC: one-shot, periodic and TSC-deadline mode.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic::{self, read, write};
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::insn::{self, rdtsc};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{
    ApicRegister, LVT_MASKED, LVT_TIMER_DEADLINE, LVT_TIMER_PERIODIC,
};
use hindsight_guest::regs::msr::{IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST, IA32_TSC_DEADLINE};
use hindsight_guest::trap;
use hindsight_payloads::clock::{ticks, wait, wait_until};

payload!("apic_timer");

// A deadline is compared with the monitor's TSC. Cases that compute it from RDTSC need "tsc-offset",
// which makes both the same counter.

const VECTOR: u32 = 0x63;
/// Divide configuration: by 1.
const BY_1: u32 = 0b1011;
/// Divide configuration: by 128.
const BY_128: u32 = 0b1010;

/// Interrupts delivered.
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// TSC at the latest interrupt.
static TAKEN_AT: AtomicU64 = AtomicU64::new(0);

fn count(_: &mut TrapFrame) {
    TAKEN_AT.store(rdtsc(), Ordering::Release);
    TAKEN.fetch_add(1, Ordering::AcqRel);
    apic::eoi();
}

fn taken() -> u64 {
    TAKEN.load(Ordering::Acquire)
}

fn prepare(lvt: u32) {
    TAKEN.store(0, Ordering::Release);
    trap::set_handler((VECTOR & 0xff) as u8, count);
    apic::enable();
    write(ApicRegister::TIMER_DIVIDE, BY_1);
    write(ApicRegister::LVT_TIMER, lvt | VECTOR);
    // Rule TDL-09: the write of the mode must precede a WRMSR of the deadline. A read of the register
    // orders them like a fence, which not every emulated ring 0 executes.
    read(ApicRegister::LVT_TIMER);
}

/// Enables interrupts until `n` were delivered; returns false if they were not within `ms` ms.
fn wait_for(n: u64, ms: u64) -> bool {
    insn::sti();
    let delivered = wait_until(ms, || taken() >= n);
    insn::cli();
    delivered
}

/// Enables interrupts for about `ms` milliseconds.
fn stay_open(ms: u64) {
    insn::sti();
    wait(ms);
    insn::cli();
}

fn deadline() -> u64 {
    msr::read(IA32_TSC_DEADLINE)
}

fn set_deadline(tsc: u64) {
    msr::write(IA32_TSC_DEADLINE, tsc);
}

case! {
    name: "one_shot", cpl: [0], rules: [], needs: ["interrupt"],
    about: "a one-shot count ends with one interrupt and stays at 0",
    fn body(_ctx) {
        prepare(0);
        write(ApicRegister::TIMER_INITIAL, 100_000);
        check!(wait_for(1, 1000), "interrupt delivered");
        check_eq!(read(ApicRegister::TIMER_CURRENT), 0, "current count");
        stay_open(10);
        check_eq!(taken(), 1, "count of interrupts");
        apic::disable();
    }
}

case! {
    name: "periodic", cpl: [0], rules: [], needs: ["interrupt"],
    about: "a periodic count restarts; an initial count of 0 stops it",
    fn body(_ctx) {
        prepare(LVT_TIMER_PERIODIC);
        write(ApicRegister::TIMER_INITIAL, 100_000);
        check!(wait_for(4, 2000), "four interrupts delivered");
        write(ApicRegister::TIMER_INITIAL, 0);
        stay_open(2);
        let stopped = taken();
        stay_open(20);
        check_eq!(taken(), stopped, "count of interrupts after the stop");
        apic::disable();
    }
}

case! {
    name: "masked", cpl: [0], rules: [], needs: ["interrupt"],
    about: "a masked timer counts down and raises no interrupt",
    fn body(_ctx) {
        prepare(LVT_MASKED);
        write(ApicRegister::TIMER_INITIAL, 20_000);
        insn::sti();
        let ended = wait_until(1000, || read(ApicRegister::TIMER_CURRENT) == 0);
        insn::cli();
        check!(ended, "current count reaches 0");
        check_eq!(taken(), 0, "count of interrupts");
        apic::disable();
    }
}

case! {
    name: "current_count", cpl: [0], rules: [], needs: [],
    about: "the current count falls from the initial count, and more slowly with a greater divisor",
    fn body(_ctx) {
        prepare(LVT_MASKED);
        write(ApicRegister::TIMER_INITIAL, u32::MAX);
        let first = read(ApicRegister::TIMER_CURRENT);
        wait(1);
        let by_1 = first - read(ApicRegister::TIMER_CURRENT);
        check!(by_1 > 0, "current count falls");
        check_eq!(read(ApicRegister::TIMER_INITIAL), u32::MAX, "initial count");
        write(ApicRegister::TIMER_DIVIDE, BY_128);
        write(ApicRegister::TIMER_INITIAL, u32::MAX);
        let first = read(ApicRegister::TIMER_CURRENT);
        check!(first > u32::MAX - by_1, "a new initial count restarts the timer");
        apic::disable();
    }
}

case! {
    name: "deadline_fires", cpl: [0], rules: ["TDL-01", "TDL-02", "TDL-09"],
    needs: ["tsc-deadline-exit", "tsc-offset", "interrupt"],
    about: "the interrupt is delivered at the deadline and not before; the MSR is then 0",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        prepare(LVT_TIMER_DEADLINE);
        check_eq!(deadline(), 0, "MSR at first");
        let at = rdtsc() + ticks(5);
        set_deadline(at);
        let armed = deadline();
        // A slow host may have let the deadline pass.
        if rdtsc() < at {
            check_eq!(armed, at, "MSR while armed");
        }
        check!(wait_for(1, 1000), "interrupt delivered");
        check!(TAKEN_AT.load(Ordering::Acquire) >= at, "not before the deadline");
        check_eq!(deadline(), 0, "MSR afterwards");
        stay_open(5);
        check_eq!(taken(), 1, "count of interrupts");
        apic::disable();
    }
}

case! {
    name: "deadline_in_the_past", cpl: [0], rules: ["TDL-03"],
    needs: ["tsc-deadline-exit", "interrupt"],
    about: "a deadline that has passed fires at once",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        prepare(LVT_TIMER_DEADLINE);
        set_deadline(1);
        check!(wait_for(1, 1000), "interrupt delivered");
        check_eq!(deadline(), 0, "MSR afterwards");
        apic::disable();
    }
}

/// Arms a deadline and calls `disarm`; returns whether an interrupt was delivered nevertheless.
///
/// It tries again if the host delayed the vCPU until the deadline had passed.
fn fires_after(disarm: impl Fn()) -> bool {
    for _ in 0..10 {
        prepare(LVT_TIMER_DEADLINE);
        let at = rdtsc() + ticks(10);
        set_deadline(at);
        disarm();
        if rdtsc() < at {
            stay_open(20);
            return taken() != 0;
        }
        stay_open(1);
    }
    true
}

case! {
    name: "deadline_disarmed", cpl: [0], rules: ["TDL-04"],
    needs: ["tsc-deadline-exit", "tsc-offset", "interrupt"],
    about: "a write of 0 disarms the timer",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        check!(!fires_after(|| set_deadline(0)), "no interrupt");
        apic::disable();
    }
}

case! {
    name: "deadline_replaced", cpl: [0], rules: ["TDL-04"],
    needs: ["tsc-deadline-exit", "tsc-offset", "interrupt"],
    about: "a second write replaces the first deadline",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        prepare(LVT_TIMER_DEADLINE);
        set_deadline(rdtsc() + ticks(100_000));
        let near = rdtsc() + ticks(5);
        set_deadline(near);
        check!(wait_for(1, 1000), "interrupt of the second deadline delivered");
        check!(TAKEN_AT.load(Ordering::Acquire) >= near, "not before the second deadline");
        check_eq!(deadline(), 0, "MSR afterwards");
        apic::disable();
    }
}

case! {
    name: "deadline_in_other_modes", cpl: [0], rules: ["TDL-05"], needs: ["tsc-deadline-exit"],
    about: "in one-shot and periodic mode writes are ignored and reads return 0",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        for mode in [0, LVT_TIMER_PERIODIC] {
            prepare(mode | LVT_MASKED);
            set_deadline(rdtsc() + ticks(1000));
            check_eq!(deadline(), 0, "MSR");
        }
        prepare(LVT_TIMER_DEADLINE | LVT_MASKED);
        check_eq!(deadline(), 0, "MSR in deadline mode");
        apic::disable();
    }
}

case! {
    name: "deadline_counts", cpl: [0], rules: ["TDL-06"], needs: ["tsc-deadline-exit"],
    about: "in deadline mode the initial count is ignored, and the current count is 0",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        prepare(LVT_TIMER_DEADLINE | LVT_MASKED);
        write(ApicRegister::TIMER_INITIAL, 1_000_000_000);
        check_eq!(read(ApicRegister::TIMER_CURRENT), 0, "current count");
        apic::disable();
    }
}

case! {
    name: "deadline_mode_change", cpl: [0], rules: ["TDL-07"],
    needs: ["tsc-deadline-exit", "tsc-offset", "interrupt"],
    about: "a change between deadline mode and another disarms the timer",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        let fires = fires_after(|| {
            write(ApicRegister::LVT_TIMER, VECTOR);
            write(ApicRegister::LVT_TIMER, LVT_TIMER_DEADLINE | VECTOR);
        });
        check!(!fires, "no interrupt");
        check_eq!(deadline(), 0, "MSR");
        apic::disable();
    }
}

case! {
    name: "deadline_masked", cpl: [0], rules: ["TDL-08"], needs: ["tsc-deadline-exit", "tsc-offset", "interrupt"],
    about: "a masked timer raises no interrupt; the MSR is still cleared at the deadline",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        prepare(LVT_TIMER_DEADLINE | LVT_MASKED);
        set_deadline(rdtsc() + ticks(2));
        stay_open(20);
        check_eq!(deadline(), 0, "MSR");
        check_eq!(taken(), 0, "count of interrupts");
        apic::disable();
    }
}

/// Arms a distant deadline, moves the TSC beyond it by `jump`, and expects the interrupt.
fn jump_past_deadline(jump: impl FnOnce(u64)) {
    const FAR: u64 = 1 << 46;
    prepare(LVT_TIMER_DEADLINE);
    set_deadline(rdtsc() + FAR);
    stay_open(2);
    check_eq!(taken(), 0, "count of interrupts before the jump");
    jump(2 * FAR);
    check!(wait_for(1, 1000), "interrupt delivered after the jump");
    check_eq!(deadline(), 0, "MSR afterwards");
    apic::disable();
    msr::write(IA32_TSC_ADJUST, 0);
}

case! {
    name: "deadline_and_adjust", cpl: [0], rules: ["ADJ-10"],
    needs: ["tsc-deadline-exit", "tsc-offset", "msr-exit", "interrupt"],
    about: "moving the TSC beyond the deadline by IA32_TSC_ADJUST fires the timer",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        need_feature!(ctx, TSC_ADJUST);
        jump_past_deadline(|far| msr::write(IA32_TSC_ADJUST, far));
    }
}

case! {
    name: "deadline_and_tsc_write", cpl: [0], rules: ["ADJ-10"],
    needs: ["tsc-deadline-exit", "tsc-offset", "msr-exit", "interrupt"],
    about: "moving the TSC beyond the deadline by WRMSR 10H fires the timer",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        need_feature!(ctx, TSC_ADJUST);
        jump_past_deadline(|far| msr::write(IA32_TIME_STAMP_COUNTER, rdtsc() + far));
    }
}

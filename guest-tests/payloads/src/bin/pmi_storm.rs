//! Counters that overflow at every instruction: the processor drowns, the others and the monitor do not.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, ICR_ASSERT, ICR_SELF, LVT_MASKED};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::trap;
use hindsight_guest::{apic, cpu, insn, msr, smp};
use hindsight_payloads::need_pmu;
use hindsight_payloads::pmu::{self, INT, LVT_NMI, ON};

payload!("pmi_storm");

/// The vector of the healthy processor's interrupt to itself.
const SELF: u8 = 0x62;
/// A vector below 16, which no local APIC delivers.
const ILLEGAL: u32 = 5;

static STOP: AtomicBool = AtomicBool::new(false);
static STORMS: AtomicU64 = AtomicU64::new(0);
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// The next overflow is that of the next instruction, which is one of this handler.
fn rearm(entry: u32) {
    msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1);
    apic::write(ApicRegister::LVT_PMC, entry);
    pmu::preset(0, 1);
}

fn on_storm(_: &mut TrapFrame) {
    STORMS.fetch_add(1, Ordering::AcqRel);
    if !STOP.load(Ordering::Acquire) {
        rearm(LVT_NMI);
    }
}

fn on_self(_: &mut TrapFrame) {
    // The other processor takes what is pending there when its interrupts are on again.
    if cpu::current().index == 0 {
        TAKEN.fetch_add(1, Ordering::AcqRel);
    }
    apic::eoi();
}

fn begin(entry: u32) {
    pmu::reset();
    apic::enable();
    pmu::select(0, 0xc0, 0, ON | INT);
    pmu::start(1);
    rearm(entry);
}

fn end() {
    pmu::reset();
    apic::write(ApicRegister::LVT_PMC, LVT_MASKED);
}

/// Executes one instruction between two interrupts, until the other processor requests the end.
fn drown(_: usize) {
    begin(LVT_NMI);
    while !STOP.load(Ordering::Acquire) {
        insn::pause();
    }
    end();
}

/// Overflows whose interrupt is never delivered: its vector is illegal, or interrupts are off.
fn unheard(_: usize) {
    while !STOP.load(Ordering::Acquire) {
        for entry in [ILLEGAL, u32::from(SELF)] {
            begin(entry);
            for _ in 0..100 {
                rearm(entry);
                STORMS.fetch_add(1, Ordering::AcqRel);
            }
            end();
        }
    }
}

/// Runs `work` on processor 1, while this one computes, takes interrupts, and checks that the storm
/// continues.
fn beside(work: smp::CpuWork) {
    require!(smp::start(2), "processor 1 answers INIT and SIPI");
    STOP.store(false, Ordering::Release);
    STORMS.store(0, Ordering::Release);
    TAKEN.store(0, Ordering::Release);
    trap::set_handler(2, on_storm);
    trap::set_handler(SELF, on_self);
    apic::enable();
    insn::sti();
    smp::run(1, work);
    for round in 1..=20 {
        let storms = STORMS.load(Ordering::Acquire);
        let sum = (0..2000_u64).fold(0, |sum, n| core::hint::black_box(sum + n));
        check_eq!(sum, 1_999_000, "a sum");
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(SELF));
        while TAKEN.load(Ordering::Acquire) < round || STORMS.load(Ordering::Acquire) < storms + 10
        {
            insn::pause();
        }
        check_eq!(
            TAKEN.load(Ordering::Acquire),
            round,
            "interrupts of this processor"
        );
    }
    STOP.store(true, Ordering::Release);
    smp::wait(1);
    insn::cli();
    check_eq!(pmu::status(), 0, "the other's overflows are not seen here");
}

case! {
    name: "drowned", cpl: [0], rules: ["OVF-05", "OVF-10"], needs: [], vcpus: 2, timeout_ms: 20000,
    about: "one processor takes an NMI at every instruction; the other computes and takes its own interrupts",
    fn body(ctx) {
        need_pmu!(ctx);
        beside(drown);
    }
}

case! {
    name: "unheard", cpl: [0], rules: ["OVF-05", "OVF-10", "OVF-13"], needs: [], vcpus: 2, timeout_ms: 20000,
    about: "overflows without end whose vector is illegal, or with interrupts off",
    fn body(ctx) {
        need_pmu!(ctx);
        beside(unheard);
        check_eq!(TAKEN.load(Ordering::Acquire), 20, "interrupts of this processor");
    }
}

//! The time-stamp counters of two processors.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::insn::rdtsc;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, LVT_MASKED, LVT_TIMER_DEADLINE};
use hindsight_guest::regs::msr::{
    IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST, IA32_TSC_AUX, IA32_TSC_DEADLINE,
};
use hindsight_guest::{apic, msr, smp};
use hindsight_payloads::clock;

payload!("tsc_smp");

const FAR: u64 = 1 << 44;

static OTHER: AtomicU64 = AtomicU64::new(0);

/// What the second processor's TSC shows.
fn other_tsc() -> u64 {
    smp::run_all(2, |_| OTHER.store(rdtsc(), Ordering::Release));
    OTHER.load(Ordering::Acquire)
}

/// Checks that the second processor's TSC lies between two readings of this one's.
fn check_equal(message: &str) {
    for _ in 0..10 {
        let before = rdtsc();
        let other = other_tsc();
        let after = rdtsc();
        check!(before <= other && other <= after, message);
    }
}

case! {
    name: "equal_after_reset", cpl: [0], rules: ["TSC-12", "TSC-05"], needs: [], vcpus: 2, timeout_ms: 5000,
    about: "the TSCs of two processors agree, also for one that started later",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        check_equal("the other TSC lies between two of ours");
    }
}

case! {
    name: "write_is_local", cpl: [0], rules: ["TSC-11"], needs: ["msr-exit", "tsc-offset"], vcpus: 2,
    timeout_ms: 5000,
    about: "a write to the TSC moves that of the writer only",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        require!(smp::start(2), "the second CPU started");
        let before = rdtsc();
        smp::run_all(2, |_| {
            msr::write(IA32_TIME_STAMP_COUNTER, rdtsc() + FAR);
        });
        let elapsed = rdtsc().wrapping_sub(before);
        check!(elapsed < clock::ticks(4000), "our TSC goes on");
        let ahead = other_tsc().wrapping_sub(rdtsc());
        check!(ahead > FAR / 2 && ahead <= FAR, "the other TSC moved");
        smp::run_all(2, |_| msr::write(IA32_TSC_ADJUST, 0));
    }
}

case! {
    name: "adjust_synchronizes", cpl: [0], rules: ["ADJ-06"], needs: ["msr-exit", "tsc-offset"], vcpus: 2,
    timeout_ms: 5000,
    about: "the same IA32_TSC_ADJUST on both makes their TSCs agree",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        require!(smp::start(2), "the second CPU started");
        smp::run_all(2, |_| msr::write(IA32_TIME_STAMP_COUNTER, FAR));
        smp::run_all(2, |_| msr::write(IA32_TSC_ADJUST, FAR));
        msr::write(IA32_TSC_ADJUST, FAR);
        check_equal("with the same adjustment");
        smp::run_all(2, |_| msr::write(IA32_TSC_ADJUST, 0));
        msr::write(IA32_TSC_ADJUST, 0);
        check_equal("with no adjustment");
    }
}

case! {
    name: "aux_is_local", cpl: [0], rules: ["TAX-05"], needs: ["msr-exit"], vcpus: 2, timeout_ms: 5000,
    about: "each processor has its own IA32_TSC_AUX",
    fn body(ctx) {
        need_feature!(ctx, RDTSCP);
        require!(smp::start(2), "the second CPU started");
        msr::write(IA32_TSC_AUX, 5);
        smp::run_all(2, |_| {
            OTHER.store(msr::read(IA32_TSC_AUX), Ordering::Release);
            msr::write(IA32_TSC_AUX, 7);
        });
        check_eq!(OTHER.load(Ordering::Acquire), 0, "the other's value at reset");
        check_eq!(msr::read(IA32_TSC_AUX), 5, "our value");
        smp::run_all(2, |_| {
            OTHER.store(msr::read(IA32_TSC_AUX), Ordering::Release);
            msr::write(IA32_TSC_AUX, 0);
        });
        check_eq!(OTHER.load(Ordering::Acquire), 7, "the other's value");
        msr::write(IA32_TSC_AUX, 0);
    }
}

/// What the second processor found, each in its place.
static FOUND: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// Calls `values` on the second processor, and returns its result.
fn ask(values: fn() -> [u64; 4]) -> [u64; 4] {
    static FUNCTION: AtomicU64 = AtomicU64::new(0);
    FUNCTION.store(values as usize as u64, Ordering::Release);
    smp::run_all(2, |_| {
        // SAFETY: only this function stores here, and it stores a function of this type.
        let values = unsafe {
            core::mem::transmute::<u64, fn() -> [u64; 4]>(FUNCTION.load(Ordering::Acquire))
        };
        for (cell, value) in FOUND.iter().zip(values()) {
            cell.store(value, Ordering::Release);
        }
    });
    [0, 1, 2, 3].map(|n: usize| FOUND[n].load(Ordering::Acquire))
}

case! {
    name: "init_keeps_time", cpl: [0], rules: ["TSC-02", "ADJ-01", "TAX-05", "RST-10"],
    needs: ["msr-exit", "tsc-offset"], vcpus: 2, timeout_ms: 5000,
    about: "INIT changes neither the TSC nor IA32_TSC_ADJUST nor IA32_TSC_AUX",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        need_feature!(ctx, RDTSCP);
        require!(smp::start(2), "the second CPU started");
        ask(|| {
            msr::write(IA32_TSC_ADJUST, FAR);
            msr::write(IA32_TSC_AUX, 7);
            [0; 4]
        });
        require!(smp::restart(1), "the second CPU started again");
        let [adjust, aux, ..] = ask(|| [msr::read(IA32_TSC_ADJUST), msr::read(IA32_TSC_AUX), 0, 0]);
        check_eq!((adjust, aux), (FAR, 7), "IA32_TSC_ADJUST and IA32_TSC_AUX");
        let (before, other, after) = (rdtsc(), other_tsc(), rdtsc());
        check!(before + FAR <= other && other <= after + FAR, "the TSC is still ahead by the same");
        ask(|| {
            msr::write(IA32_TSC_ADJUST, 0);
            msr::write(IA32_TSC_AUX, 0);
            [0; 4]
        });
    }
}

case! {
    name: "init_disarms", cpl: [0], rules: ["TDL-10", "RST-11"], needs: ["tsc-deadline-exit", "msr-exit"],
    vcpus: 2,
    timeout_ms: 5000,
    about: "INIT clears the deadline, and masks the timer's and the counters' entries of the APIC",
    fn body(ctx) {
        need_feature!(ctx, TSC_DEADLINE);
        require!(smp::start(2), "the second CPU started");
        let [armed, ..] = ask(|| {
            apic::write(ApicRegister::LVT_TIMER, LVT_TIMER_DEADLINE | LVT_MASKED);
            apic::write(ApicRegister::LVT_PMC, 0x33);
            apic::read(ApicRegister::LVT_TIMER);
            msr::write(IA32_TSC_DEADLINE, rdtsc() + FAR);
            [msr::read(IA32_TSC_DEADLINE), 0, 0, 0]
        });
        check!(armed != 0, "the deadline was armed");
        require!(smp::restart(1), "the second CPU started again");
        let found = ask(|| {
            let entries = [ApicRegister::LVT_TIMER, ApicRegister::LVT_PMC].map(|r| u64::from(apic::read(r)));
            apic::write(ApicRegister::LVT_TIMER, LVT_TIMER_DEADLINE | LVT_MASKED);
            apic::read(ApicRegister::LVT_TIMER);
            [entries[0], entries[1], msr::read(IA32_TSC_DEADLINE), 0]
        });
        check_eq!(found, [0x1_0000, 0x1_0000, 0, 0], "both entries and the deadline");
        ask(|| {
            apic::write(ApicRegister::LVT_TIMER, LVT_MASKED);
            [0; 4]
        });
    }
}

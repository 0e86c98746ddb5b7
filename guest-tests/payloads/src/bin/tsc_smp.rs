//! The time-stamp counters of two processors.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::insn::rdtsc;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::{IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST, IA32_TSC_AUX};
use hindsight_guest::{msr, smp};
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
fn check_equal(what: &str) {
    for _ in 0..10 {
        let before = rdtsc();
        let other = other_tsc();
        let after = rdtsc();
        check!(before <= other && other <= after, what);
    }
}

case! {
    name: "equal_after_reset", cpl: [0], rules: ["TSC-12", "TSC-05"], needs: [], vcpus: 2, timeout_ms: 5000,
    about: "the TSCs of two processors agree, also for one that started later",
    fn body(_ctx) {
        require!(smp::start(2), "the second processor starts");
        check_equal("the other TSC lies between two of ours");
    }
}

case! {
    name: "write_is_local", cpl: [0], rules: ["TSC-11"], needs: ["msr-exit", "tsc-offset"], vcpus: 2,
    timeout_ms: 5000,
    about: "a write to the TSC moves that of the writer only",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        require!(smp::start(2), "the second processor starts");
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
        require!(smp::start(2), "the second processor starts");
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
        require!(smp::start(2), "the second processor starts");
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

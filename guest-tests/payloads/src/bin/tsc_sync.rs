//! TSC synchronisation: processors whose counters differ measure by how much, and correct it by
//! IA32_TSC_ADJUST, as an operating system does after a firmware that left them apart.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::insn::{self, pause};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::{IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST};
use hindsight_guest::{msr, smp};
use hindsight_payloads::clock;

payload!("tsc_sync");

/// Number of processors to synchronize.
const CPUS: usize = 4;
/// Exchanges for each measurement: the shortest decides.
const EXCHANGES: u32 = 50;

/// The number of the first processor's current question.
///
/// The next two statics are the number of the last question that was answered, and the answer: the
/// other processor's TSC.
static QUESTION: AtomicU64 = AtomicU64::new(0);
static ANSWERED: AtomicU64 = AtomicU64::new(0);
static ANSWER: AtomicU64 = AtomicU64::new(0);
/// The number of the question after which the other processor ends.
const LAST: u64 = u64::MAX;

/// Reads the TSC after all earlier instructions have completed.
fn rdtsc() -> u64 {
    insn::lfence();
    insn::rdtsc()
}

/// Answers each question with the TSC, until the last one.
fn answer(_index: usize) {
    let mut answered = 0;
    while answered != LAST {
        let question = QUESTION.load(Ordering::Acquire);
        if question == answered {
            pause();
            continue;
        }
        answered = question;
        ANSWER.store(rdtsc(), Ordering::Release);
        ANSWERED.store(question, Ordering::Release);
    }
}

/// Returns how far processor `index` is ahead of this one, and the maximum error, in ticks.
fn measure(index: usize) -> (i64, u64) {
    QUESTION.store(0, Ordering::Release);
    ANSWERED.store(0, Ordering::Release);
    smp::run(index, answer);
    let mut best = (0, u64::MAX);
    for question in (1..=u64::from(EXCHANGES)).chain([LAST]) {
        let asked = rdtsc();
        QUESTION.store(question, Ordering::Release);
        while ANSWERED.load(Ordering::Acquire) != question {
            pause();
        }
        let other = ANSWER.load(Ordering::Acquire);
        let took = rdtsc().wrapping_sub(asked);
        if took < best.1 {
            let middle = asked.wrapping_add(took / 2);
            best = (other.wrapping_sub(middle).cast_signed(), took);
        }
    }
    smp::wait(index);
    (best.0, best.1.div_ceil(2))
}

/// Adds to this processor's TSC an offset that differs from that of the others.
fn set_apart(index: usize) {
    let step = (1_u64 << 40)
        .wrapping_mul(index as u64 * 3)
        .wrapping_sub(1 << 41);
    msr::write(IA32_TIME_STAMP_COUNTER, rdtsc().wrapping_add(step));
}

static CORRECTION: AtomicU64 = AtomicU64::new(0);

/// Moves the processor's counter by the correction.
fn correct(_index: usize) {
    let adjust = msr::read(IA32_TSC_ADJUST);
    msr::write(
        IA32_TSC_ADJUST,
        adjust.wrapping_add(CORRECTION.load(Ordering::Acquire)),
    );
}

case! {
    name: "measured_and_corrected", cpl: [0],
    rules: ["ADJ-02", "ADJ-03", "ADJ-05", "ADJ-06", "ADJ-07", "TSC-11", "TSC-12"],
    needs: ["msr-exit", "tsc-offset"], vcpus: 4, timeout_ms: 20000,
    about: "four processors that were set apart measure their differences and agree again",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        require!(smp::start(CPUS), "the processors start");
        for index in 1..CPUS {
            let (ahead, error) = measure(index);
            check!(ahead.unsigned_abs() <= error, "they agree at first");
        }
        smp::run_all(CPUS, set_apart);
        for index in 1..CPUS {
            let (ahead, error) = measure(index);
            check!(ahead.unsigned_abs() > 1 << 39, "they are apart");
            check!(error < clock::ticks(4000), "the measurement is good enough");
            CORRECTION.store(0_u64.wrapping_sub(ahead.cast_unsigned()), Ordering::Release);
            smp::run(index, correct);
            smp::wait(index);
            let (ahead, after) = measure(index);
            check!(ahead.unsigned_abs() <= error + after, "they agree again");
        }
        // What was corrected is what was written: the counters under the adjustments never moved.
        for index in 1..CPUS {
            smp::run(index, |_| CORRECTION.store(rdtsc().wrapping_sub(msr::read(IA32_TSC_ADJUST)), Ordering::Release));
            let before = rdtsc();
            smp::wait(index);
            let raw = CORRECTION.load(Ordering::Acquire).wrapping_sub(before).cast_signed();
            check!(raw.unsigned_abs() < clock::ticks(4000), "the raw counters agree");
        }
        smp::run_all(CPUS, |_| msr::write(IA32_TSC_ADJUST, 0));
    }
}

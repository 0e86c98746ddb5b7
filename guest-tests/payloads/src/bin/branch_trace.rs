//! A profiler in the guest.
//!
//! BTS traces a small program, an NMI drains the buffer, and the histogram is compared with the
//! program's own counts.

#![no_std]
#![no_main]

use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::ApicRegister as Apic;
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::show::{TextSink, decimal};
use hindsight_guest::trap;
use hindsight_guest::{apic, msr, serial};
use hindsight_payloads::branch::{BTINT, BTS, BTS_OFF_OS, TR};
use hindsight_payloads::ds::{DsPages, RECORD_BYTES};
use hindsight_payloads::need_bts;
use hindsight_payloads::pmu::LVT_NMI;

payload!("branch_trace");

// The program computes greatest common divisors, counts set bits, and counts steps of the Collatz
// sequence. Each function counts its own calls.

static GCD_CALLS: AtomicU64 = AtomicU64::new(0);
static ONES_CALLS: AtomicU64 = AtomicU64::new(0);
static COLLATZ_CALLS: AtomicU64 = AtomicU64::new(0);
static PROGRAM_CALLS: AtomicU64 = AtomicU64::new(0);

/// Only one CPU runs, so no locked instruction is needed.
fn count(calls: &AtomicU64) {
    calls.store(calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

#[inline(never)]
extern "C" fn gcd(a: u64, b: u64) -> u64 {
    count(&GCD_CALLS);
    if b == 0 { a } else { black_box(gcd(b, a % b)) }
}

#[inline(never)]
extern "C" fn ones(mut n: u64, _unused: u64) -> u64 {
    count(&ONES_CALLS);
    let mut ones = 0;
    while n != 0 {
        n &= n - 1;
        ones += 1;
    }
    ones
}

#[inline(never)]
extern "C" fn collatz(n: u64, _unused: u64) -> u64 {
    count(&COLLATZ_CALLS);
    match n {
        1 => 0,
        _ if n.is_multiple_of(2) => 1 + black_box(collatz(n / 2, 0)),
        _ => 1 + black_box(collatz(3 * n + 1, 0)),
    }
}

#[inline(never)]
extern "C" fn program(rounds: u64, _unused: u64) -> u64 {
    count(&PROGRAM_CALLS);
    let mut sum = 0;
    for n in 1..=rounds {
        sum += black_box(gcd(n * 7, 60)) + black_box(ones(n, 0)) + black_box(collatz(n, 0));
    }
    sum
}

type TracedFn = extern "C" fn(u64, u64) -> u64;

/// The functions of the program, in the order of the histogram.
const FUNCTIONS: [(&str, TracedFn, &AtomicU64); 4] = [
    ("gcd", gcd, &GCD_CALLS),
    ("ones", ones, &ONES_CALLS),
    ("collatz", collatz, &COLLATZ_CALLS),
    ("program", program, &PROGRAM_CALLS),
];

const ROUNDS: u64 = 60;
/// The result of [`program`] for [`ROUNDS`], which another program computed.
const ANSWER: u64 = 1993;

static PAGES: DsPages = DsPages::new();
/// Records that the buffer can hold.
const RECORDS: u64 = 300;
/// Records after which the NMI is requested.
const THRESHOLD: u64 = 100;

/// Sums over the drained records.
struct BranchProfile {
    /// Branches to each function's entry.
    calls: [u64; FUNCTIONS.len()],
    /// Branches in each function.
    branches: [u64; FUNCTIONS.len()],
    drains: u64,
    /// The address at which execution continued after the last record; 0 before the first.
    at: u64,
    /// Records that execution could not reach from the record before.
    gaps: u64,
}

static mut PROFILE: BranchProfile = BranchProfile::new();

impl BranchProfile {
    const fn new() -> Self {
        Self {
            calls: [0; FUNCTIONS.len()],
            branches: [0; FUNCTIONS.len()],
            drains: 0,
            at: 0,
            gaps: 0,
        }
    }

    /// Adds the records from the base up to the index, and empties the buffer.
    fn drain(&mut self) {
        self.drains += 1;
        let area = PAGES.area();
        let mut at = area.base;
        while at + RECORD_BYTES <= area.index {
            let record = PAGES.record(at);
            self.add(record.from, record.to);
            at += RECORD_BYTES;
        }
        PAGES.set_area(hindsight_payloads::ds::DsArea {
            index: area.base,
            ..area
        });
    }

    fn add(&mut self, from: u64, to: u64) {
        if let Some(n) = containing(from) {
            self.branches[n] += 1;
            if containing(self.at).is_some_and(|before| before != n || from < self.at) {
                self.gaps += 1;
            }
        }
        // The IRET of the handler is no call, although it may return to the entry of a function.
        let caller = traced as *const () as u64;
        if containing(from).is_some() || (caller..caller + 256).contains(&from) {
            for ((_, function, _), calls) in FUNCTIONS.iter().zip(&mut self.calls) {
                *calls += u64::from(to == *function as *const () as u64);
            }
        }
        // An interrupt returns to the interrupted instruction.
        let leaves = containing(from).is_some() && containing(to).is_none();
        self.at = if leaves { from } else { to };
    }
}

/// The function that contains `address`: the last one that begins at or below it, if it is near.
fn containing(address: u64) -> Option<usize> {
    let starts = FUNCTIONS.map(|(_, function, _)| function as *const () as u64);
    let (n, start) = (0..)
        .zip(starts)
        .filter(|&(_, start)| start <= address)
        .max_by_key(|&(_, start)| start)?;
    (address - start < 256).then_some(n)
}

/// Handles the NMI: drains the buffer with BTS disabled, and unmasks the LVT entry again.
fn nmi(_frame: &mut TrapFrame) {
    let debugctl = msr::read(IA32_DEBUGCTL);
    msr::write(IA32_DEBUGCTL, 0);
    profile().drain();
    apic::write(Apic::LVT_PMC, LVT_NMI);
    msr::write(IA32_DEBUGCTL, debugctl);
}

fn profile() -> &'static mut BranchProfile {
    let profile = &raw mut PROFILE;
    // SAFETY: one CPU runs, and the NMI is delivered only while the program runs, which does not use
    // the profile.
    unsafe { &mut *profile }
}

/// Calls the program. The records name this function as its caller.
#[inline(never)]
fn traced(answer: &mut u64) {
    *answer = black_box(program(ROUNDS, 0));
}

fn print_histogram(profile: &BranchProfile) {
    let out = &mut serial::Com1;
    for ((name, ..), (&calls, &branches)) in FUNCTIONS
        .iter()
        .zip(profile.calls.iter().zip(&profile.branches))
    {
        out.put("| ");
        out.put(name);
        (name.len()..8).for_each(|_| out.put(" "));
        (0..branches.div_ceil(50)).for_each(|_| out.put("#"));
        out.put(" ");
        decimal(branches, out);
        out.put(" branches, ");
        decimal(calls, out);
        out.put(" calls\n");
    }
}

case! {
    name: "profiler", cpl: [0, 3],
    rules: ["BTS-07", "BTS-08", "BTS-11", "BTS-25", "DS-14", "DS-15", "DS-16", "BTS-27"],
    needs: [], timeout_ms: 10000,
    about: "a trace that an NMI handler drains has every call exactly once and no gap",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_NMI);
        trap::set_handler(2, nmi);
        let area = PAGES.arm(RECORDS);
        PAGES.set_area(hindsight_payloads::ds::DsArea { threshold: area.base + THRESHOLD * RECORD_BYTES, ..area });
        let mut answer = 0;
        let debugctl = TR | BTS | BTINT | if ctx.cpl == 3 { BTS_OFF_OS } else { 0 };
        msr::write(IA32_DEBUGCTL, debugctl);
        let fault = ctx.run(|| traced(&mut answer));
        msr::write(IA32_DEBUGCTL, 0);
        check!(fault.is_none(), "no exception");
        let profile = profile();
        profile.drain();
        print_histogram(profile);
        check_eq!(answer, ANSWER, "result of the program");
        for ((name, _, calls), found) in FUNCTIONS.iter().zip(profile.calls) {
            check_eq!((*name, found), (*name, calls.load(Ordering::Relaxed)), "calls of the function");
        }
        let branches: u64 = profile.branches.iter().sum();
        check!(branches > 10 * THRESHOLD, "branches, many times the threshold");
        check!(profile.drains > branches / RECORDS, "count of drains");
        check_eq!(profile.gaps, 0, "gaps in the trace");
        hindsight_guest::report::measurement("branches", branches);
        hindsight_guest::report::measurement("drains", profile.drains);
    }
}

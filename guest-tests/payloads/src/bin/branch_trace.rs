//! A profiler in the guest: BTS traces a small program, an NMI drains the buffer, and the histogram is
//! compared with what the program itself counted.

#![no_std]
#![no_main]

use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::ApicRegister as Apic;
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::show::{Sink, decimal};
use hindsight_guest::trap::{self, Frame};
use hindsight_guest::{apic, msr, serial};
use hindsight_payloads::branch::{BTINT, BTS, BTS_OFF_OS, TR};
use hindsight_payloads::ds::{RECORD_BYTES, Store};
use hindsight_payloads::need_bts;

payload!("branch_trace");

// The program: greatest common divisors, ones of binary numbers, and steps of Collatz's sequence. Each
// function counts its own calls.

static GCD_CALLS: AtomicU64 = AtomicU64::new(0);
static ONES_CALLS: AtomicU64 = AtomicU64::new(0);
static COLLATZ_CALLS: AtomicU64 = AtomicU64::new(0);
static PROGRAM_CALLS: AtomicU64 = AtomicU64::new(0);

/// One processor runs: no need for a locked instruction.
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

type Function = extern "C" fn(u64, u64) -> u64;

/// The functions, as the histogram shows them.
const FUNCTIONS: [(&str, Function, &AtomicU64); 4] = [
    ("gcd", gcd, &GCD_CALLS),
    ("ones", ones, &ONES_CALLS),
    ("collatz", collatz, &COLLATZ_CALLS),
    ("program", program, &PROGRAM_CALLS),
];

const ROUNDS: u64 = 60;
/// What [`program`] answers for [`ROUNDS`]: found by a program elsewhere.
const ANSWER: u64 = 1993;

static STORE: Store = Store::new();
/// Records in the buffer, and after how many of them the NMI comes.
const RECORDS: u64 = 300;
const THRESHOLD: u64 = 100;

/// What the drained records add up to.
struct Profile {
    /// Branches to each function's entry.
    calls: [u64; FUNCTIONS.len()],
    /// Branches that start in it.
    branches: [u64; FUNCTIONS.len()],
    drains: u64,
    /// Where the record before went, 0 before the first.
    at: u64,
    /// Records that do not start where the one before could have led.
    gaps: u64,
}

static mut PROFILE: Profile = Profile::new();

impl Profile {
    const fn new() -> Self {
        Self {
            calls: [0; FUNCTIONS.len()],
            branches: [0; FUNCTIONS.len()],
            drains: 0,
            at: 0,
            gaps: 0,
        }
    }

    /// Takes the records from the base up to the index, and empties the buffer.
    fn drain(&mut self) {
        self.drains += 1;
        let area = STORE.area();
        let mut place = area.base;
        while place + RECORD_BYTES <= area.index {
            let record = STORE.record(place);
            self.take(record.from, record.to);
            place += RECORD_BYTES;
        }
        STORE.set_area(hindsight_payloads::ds::Area {
            index: area.base,
            ..area
        });
    }

    fn take(&mut self, from: u64, to: u64) {
        if let Some(n) = containing(from) {
            self.branches[n] += 1;
            if containing(self.at).is_some_and(|before| before != n || from < self.at) {
                self.gaps += 1;
            }
        }
        // Not the IRET of the handler, which may go to a first instruction too.
        let caller = traced as *const () as u64;
        if containing(from).is_some() || (caller..caller + 256).contains(&from) {
            for ((_, function, _), calls) in FUNCTIONS.iter().zip(&mut self.calls) {
                *calls += u64::from(to == *function as *const () as u64);
            }
        }
        // An interrupt comes back to where it was.
        let leaves = containing(from).is_some() && containing(to).is_none();
        self.at = if leaves { from } else { to };
    }
}

/// The function whose code `address` is in: the last that begins at or below it, if that is near.
fn containing(address: u64) -> Option<usize> {
    let starts = FUNCTIONS.map(|(_, function, _)| function as *const () as u64);
    let (n, start) = (0..)
        .zip(starts)
        .filter(|&(_, start)| start <= address)
        .max_by_key(|&(_, start)| start)?;
    (address - start < 256).then_some(n)
}

/// The NMI: stops the trace, drains, opens the LVT entry again, and goes on.
fn nmi(_frame: &mut Frame) {
    let debugctl = msr::read(IA32_DEBUGCTL);
    msr::write(IA32_DEBUGCTL, 0);
    profile().drain();
    apic::write(Apic::LVT_PMC, LVT_NMI);
    msr::write(IA32_DEBUGCTL, debugctl);
}

fn profile() -> &'static mut Profile {
    let profile = &raw mut PROFILE;
    // SAFETY: one processor runs; the NMI comes only while the program runs, which does not use it.
    unsafe { &mut *profile }
}

/// LVT: delivery mode NMI.
const LVT_NMI: u32 = 0b100 << 8;

/// Calls the program; what it returns to.
#[inline(never)]
fn traced(answer: &mut u64) {
    *answer = black_box(program(ROUNDS, 0));
}

fn show_histogram(profile: &Profile) {
    let out = &mut serial::Serial;
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
    name: "profiler", cpl: [0, 3], rules: ["BTS-07", "BTS-08", "BTS-11", "BTS-25", "DS-14", "DS-15", "DS-16", "BTS-27"],
    needs: [], timeout_ms: 10000,
    about: "drained by NMI, the trace has every call exactly once, and no gap",
    fn body(ctx) {
        need_bts!(ctx);
        apic::enable();
        apic::write(Apic::LVT_PMC, LVT_NMI);
        trap::set_handler(2, nmi);
        let area = STORE.arm(RECORDS);
        STORE.set_area(hindsight_payloads::ds::Area { threshold: area.base + THRESHOLD * RECORD_BYTES, ..area });
        let mut answer = 0;
        let debugctl = TR | BTS | BTINT | if ctx.cpl == 3 { BTS_OFF_OS } else { 0 };
        msr::write(IA32_DEBUGCTL, debugctl);
        let fault = ctx.run(|| traced(&mut answer));
        msr::write(IA32_DEBUGCTL, 0);
        check!(fault.is_none(), "no exception");
        let profile = profile();
        profile.drain();
        show_histogram(profile);
        check_eq!(answer, ANSWER, "the program's answer");
        for ((name, _, calls), found) in FUNCTIONS.iter().zip(profile.calls) {
            check_eq!((*name, found), (*name, calls.load(Ordering::Relaxed)), "calls of a function");
        }
        let branches: u64 = profile.branches.iter().sum();
        check!(branches > 10 * THRESHOLD, "many times the threshold");
        check!(profile.drains > branches / RECORDS, "so many drains");
        check_eq!(profile.gaps, 0, "gaps in the trace");
        hindsight_guest::run::note("branches", branches);
        hindsight_guest::run::note("drains", profile.drains);
    }
}

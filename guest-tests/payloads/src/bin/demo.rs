//! The guest of `hindsight demo`: computes, takes exceptions, touches MSRs, is interrupted, and
//! keeps a log of it in memory, for the monitor to draw.
//!
//! The log and the picture are found by their symbols, `hindsight_demo_log` and
//! `hindsight_demo_picture`; `vmm/src/demo/log.rs` reads them. Writing to memory costs no exit, so
//! that what is shown is not the showing. Each phase begins with one OUT to the test device, by
//! which the monitor aligns the guest's time with its own. Where the processor records branches,
//! the guest traces itself by BTS, into `hindsight_demo_branches`, and asks its LBR stack how it
//! came to a fault.
//!
//! With a command line this is a payload like any other, of one case.

#![no_std]
#![no_main]

use core::arch::asm;
use core::cell::UnsafeCell;
use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic::{self, write};
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::info::StartInfo;
use hindsight_guest::insn::{self, rdtsc};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, LVT_TIMER_PERIODIC};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::trap;
use hindsight_guest::{catch, exit, msr, port, run};
use hindsight_payloads::branch::{BTINT, BTS, BTS_OFF_OS, LBR, TR};
use hindsight_payloads::clock::{crystal_hz, ticks};
use hindsight_payloads::ds::{self, RECORD_BYTES};
use hindsight_payloads::{access, lbr};

entry!(start);

fn start(info: StartInfo) -> ! {
    if info.has_command_line() {
        run::run("demo", info);
    }
    run::init(info);
    story();
    exit::exit(0);
}

// The log.

const MAGIC: u64 = u64::from_le_bytes(*b"HSDEMO01");
const RECORDS: usize = 1024;
/// The test device's latch: a write there stamps a phase.
const MARK_PORT: u16 = 0xe0;

/// A phase begins: name, level.
const PHASE: u64 = 1;
/// An exception was caught: vector, error code, RIP, CS, CR2.
const EXCEPTION: u64 = 2;
/// The timer's interrupt was taken: RIP, CS.
const TICK: u64 = 3;
/// Something took this many ticks of the TSC: name, ticks.
const COST: u64 = 4;
/// Something was computed: name, value.
const RESULT: u64 = 5;
/// An entry of the LBR stack, oldest first: from, to.
const BRANCH: u64 = 6;
/// What the branches led to: vector, RIP.
const FAULT: u64 = 7;

/// A record: kind, TSC, then what the kind says. A name is an address and a length.
type Record = [u64; 8];

#[repr(C)]
struct Log {
    magic: u64,
    /// Number of records, including those that did not fit.
    count: u64,
    records: [Record; RECORDS],
}

const WIDTH: usize = 44;
const HEIGHT: usize = 28;

#[repr(C)]
struct Picture {
    magic: u64,
    width: u64,
    height: u64,
    /// Iterations that mean "never escapes".
    limit: u64,
    /// Samples added up in each pixel.
    samples: u64,
    sums: [u32; WIDTH * HEIGHT],
}

#[repr(transparent)]
struct Shared<T>(UnsafeCell<T>);

// SAFETY: one processor; the interrupt handler writes only while the interrupted code does not.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    #[expect(clippy::mut_from_ref, reason = "one processor, one user at a time")]
    fn get(&self) -> &mut T {
        // SAFETY: as for Sync.
        unsafe { &mut *self.0.get() }
    }
}

#[unsafe(export_name = "hindsight_demo_log")]
static LOG: Shared<Log> = Shared(UnsafeCell::new(Log {
    magic: 0,
    count: 0,
    records: [[0; 8]; RECORDS],
}));

#[unsafe(export_name = "hindsight_demo_picture")]
static PICTURE: Shared<Picture> = Shared(UnsafeCell::new(Picture {
    magic: 0,
    width: 0,
    height: 0,
    limit: 0,
    samples: 0,
    sums: [0; WIDTH * HEIGHT],
}));

fn log(kind: u64, values: [u64; 5]) {
    let log = LOG.get();
    if let Some(record) = usize::try_from(log.count)
        .ok()
        .and_then(|at| log.records.get_mut(at))
    {
        let [a, b, c, d, e] = values;
        *record = [kind, rdtsc(), a, b, c, d, e, 0];
    }
    log.count += 1;
}

fn phase(name: &'static str, cpl: u64) {
    log(PHASE, [name.as_ptr() as u64, name.len() as u64, cpl, 0, 0]);
    port::outl(MARK_PORT, (LOG.get().count & 0xffff_ffff) as u32);
}

fn result(name: &'static str, value: u64) {
    log(
        RESULT,
        [name.as_ptr() as u64, name.len() as u64, value, 0, 0],
    );
}

// What is computed. Each is a separate function, so that a profile can distinguish them.

const SIEVE: usize = 500;
static COMPOSITE: Shared<[bool; SIEVE]> = Shared(UnsafeCell::new([false; SIEVE]));

/// How many primes there are below [`SIEVE`].
#[inline(never)]
fn sieve() -> u64 {
    let composite = COMPOSITE.get();
    composite.fill(false);
    let mut primes = 0;
    for n in 2..SIEVE {
        if !composite[n] {
            primes += 1;
            composite[n..].iter_mut().step_by(n).for_each(|c| *c = true);
        }
    }
    primes
}

/// Fraction bits of the fixed-point numbers.
const Q: u32 = 28;
const LIMIT: u32 = 220;
/// Samples of a pixel, as offsets in sixteenths of a pixel.
const OFFSETS: [(i64, i64); 16] = [
    (8, 8),
    (2, 5),
    (13, 11),
    (6, 14),
    (11, 2),
    (1, 10),
    (14, 6),
    (5, 1),
    (9, 13),
    (3, 3),
    (12, 8),
    (7, 10),
    (10, 5),
    (4, 12),
    (15, 15),
    (0, 0),
];
/// How long the picture may take, in milliseconds, once it has been drawn once.
const DRAW_MS: u64 = 16;
/// Maximum number of samples of a pixel.
const SAMPLES: usize = 128;

/// Iterations of z^2 + c until it escapes.
#[inline(never)]
fn escape(cx: i64, cy: i64) -> u32 {
    let (mut x, mut y) = (0_i64, 0_i64);
    for n in 0..LIMIT {
        let (xx, yy) = ((x * x) >> Q, (y * y) >> Q);
        if xx + yy > 4 << Q {
            return n;
        }
        y = ((x * y) >> (Q - 1)) + cy;
        x = xx - yy + cx;
    }
    LIMIT
}

/// One sample of each pixel of a row.
#[inline(never)]
fn draw_row(row: usize, (dx, dy): (i64, i64)) {
    // 3.2 wide and 2.2 high, about (-0.65, 0), in sixteenths of a pixel.
    let step_x = (32 << Q) / 10 / (16 * WIDTH as i64);
    let step_y = (22 << Q) / 10 / (16 * HEIGHT as i64);
    let cy = (row as i64 * 16 + dy) * step_y - (11 << Q) / 10;
    let sums = &mut PICTURE.get().sums[row * WIDTH..][..WIDTH];
    for (sum, column) in sums.iter_mut().zip(0..) {
        *sum += escape((column * 16 + dx) * step_x - (225 << Q) / 100, cy);
    }
}

/// Draws the set repeatedly, with more detail each time, until `limit`.
#[inline(never)]
fn mandelbrot(limit: u64) {
    let start = rdtsc();
    for offset in OFFSETS.into_iter().cycle().take(SAMPLES) {
        (0..HEIGHT).for_each(|row| draw_row(row, offset));
        PICTURE.get().samples += 1;
        if rdtsc().wrapping_sub(start) > limit {
            return;
        }
    }
}

/// The number below `limit` that takes most Collatz steps.
#[inline(never)]
fn collatz(limit: u64) -> u64 {
    let mut best = (0, 0);
    for first in 1..limit {
        let (mut n, mut steps) = (first, 0_u64);
        while n != 1 {
            n = if n & 1 == 0 { n >> 1 } else { 3 * n + 1 };
            steps += 1;
        }
        if steps > best.0 {
            best = (steps, first);
        }
    }
    best.1
}

const NUMBERS: usize = 30_000;
/// How many numbers are sorted while branches are traced.
const NUMBERS_TRACED: usize = 150;
static NUMBERS_TO_SORT: Shared<[u32; NUMBERS]> = Shared(UnsafeCell::new([0; NUMBERS]));

#[inline(never)]
fn sift_down(heap: &mut [u32], mut at: usize) {
    loop {
        let mut child = 2 * at + 1;
        if child >= heap.len() {
            return;
        }
        if child + 1 < heap.len() && heap[child] < heap[child + 1] {
            child += 1;
        }
        if heap[at] >= heap[child] {
            return;
        }
        heap.swap(at, child);
        at = child;
    }
}

/// Sorts `count` numbers that a generator gives, and says how many are in order then: all.
#[inline(never)]
fn heap_sort(count: usize) -> u64 {
    let numbers = &mut NUMBERS_TO_SORT.get()[..count];
    let mut seed = 2463534242_u32;
    for number in numbers.iter_mut() {
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        *number = seed;
    }
    for at in (0..count / 2).rev() {
        sift_down(numbers, at);
    }
    for end in (1..count).rev() {
        numbers.swap(0, end);
        sift_down(&mut numbers[..end], 0);
    }
    1 + numbers.windows(2).filter(|pair| pair[0] <= pair[1]).count() as u64
}

fn cost(name: &'static str, ticks: u64) {
    log(COST, [name.as_ptr() as u64, name.len() as u64, ticks, 0, 0]);
}

fn timed_sieve() -> (u64, u64) {
    let start = rdtsc();
    let primes = sieve();
    (primes, rdtsc().wrapping_sub(start))
}

/// Times the sieve at CPL 0 and at CPL 3: the difference shows an emulated CPL 0.
fn primes() {
    phase("primes, ring 0", 0);
    let (primes, ticks) = timed_sieve();
    result("primes below 500, by ring 0", primes);
    cost("sieve, ring 0", ticks);
    phase("primes, ring 3", 3);
    let mut found = (0, 0);
    user(|| {
        timed_sieve();
        found = timed_sieve();
    });
    result("primes below 500, by ring 3", found.0);
    cost("sieve, ring 3", found.1);
}

fn compute() {
    let picture = PICTURE.get();
    picture.magic = MAGIC;
    (picture.width, picture.height) = (WIDTH as u64, HEIGHT as u64);
    picture.limit = u64::from(LIMIT);
    let limit = ticks(DRAW_MS);
    phase("mandelbrot", 3);
    interruptible(|| mandelbrot(limit));
    phase("collatz", 3);
    let mut longest = 0;
    interruptible(|| longest = collatz(50_000));
    result("best Collatz start", longest);
    phase("heap sort", 3);
    let mut sorted = 0;
    interruptible(|| sorted = heap_sort(NUMBERS));
    result("numbers sorted", sorted);
    apic::disable();
}

// Interrupts.

const VECTOR: u8 = 0x40;

/// Maximum number of interrupts of one [`start_timer`]: the log can hold them. The limit ends the
/// run even on a host where an interrupt takes longer than the timer's period.
const TICKS_MAX: u64 = 150;
static TICKS_LEFT: AtomicU64 = AtomicU64::new(0);

fn tick(frame: &mut TrapFrame) {
    log(TICK, [frame.rip, frame.cs, 0, 0, 0]);
    if TICKS_LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
        write(ApicRegister::TIMER_INITIAL, 0);
    }
    apic::eoi();
}

/// Makes the timer interrupt `hz` times a second.
fn start_timer(hz: u64) {
    TICKS_LEFT.store(TICKS_MAX, Ordering::Relaxed);
    const BY_1: u32 = 0b1011;
    let count = crystal_hz().unwrap_or(25_000_000) / hz;
    trap::set_handler(VECTOR, tick);
    apic::enable();
    write(ApicRegister::TIMER_DIVIDE, BY_1);
    write(
        ApicRegister::LVT_TIMER,
        LVT_TIMER_PERIODIC | u32::from(VECTOR),
    );
    write(ApicRegister::TIMER_INITIAL, (count & 0xffff_ffff) as u32);
}

/// Runs `f` at CPL 3 with the timer's interrupts on.
fn interruptible(f: impl FnOnce()) {
    start_timer(2000);
    insn::sti();
    user(f);
    insn::cli();
    write(ApicRegister::TIMER_INITIAL, 0);
}

fn idle() {
    phase("idle, HLT", 0);
    start_timer(500);
    (0..3).for_each(|_| insn::sti_hlt());
    insn::cli();
    apic::disable();
}

// Exceptions.

#[inline(never)]
fn undefined_instruction() {
    insn::ud2();
}

#[inline(never)]
fn divide_by_zero() {
    // SAFETY: registers only; it faults.
    unsafe { asm!("div {:e}", in(reg) 0, inout("eax") 1 => _, inout("edx") 0 => _) };
}

#[inline(never)]
fn read_absent_page() {
    access::load(0x1_4000_0123);
}

#[inline(never)]
fn write_absent_page() {
    access::store(0x1_4000_0456, 1);
}

#[inline(never)]
fn read_non_canonical() {
    access::load(0x8000_0000_0000_0000);
}

#[inline(never)]
fn read_msr() {
    msr::read(reg::IA32_TIME_STAMP_COUNTER);
}

fn take(level: fn(fn()) -> Option<CaughtException>, f: fn()) {
    if let Some(e) = level(f) {
        log(
            EXCEPTION,
            [u64::from(e.vector), e.error, e.rip, e.cs, e.cr2],
        );
    }
}

fn exceptions() {
    phase("exceptions, ring 0", 0);
    for f in [
        undefined_instruction,
        divide_by_zero,
        read_absent_page,
        read_non_canonical,
    ] {
        take(catch::catch, f);
    }
    phase("exceptions, ring 3", 3);
    for f in [
        undefined_instruction,
        divide_by_zero,
        write_absent_page,
        read_msr,
    ] {
        take(user, f);
    }
}

// Its own branches.

const BRANCHES: usize = 1 << 14;

#[repr(C)]
struct Branches {
    magic: u64,
    count: u64,
    records: [Record24; BRANCHES],
}

/// A BTS record: from, to, flags.
type Record24 = [u64; 3];

#[unsafe(export_name = "hindsight_demo_branches")]
static TRACE: Shared<Branches> = Shared(UnsafeCell::new(Branches {
    magic: 0,
    count: 0,
    records: [[0; 3]; BRANCHES],
}));

static AREA: Shared<[u64; 16]> = Shared(UnsafeCell::new([0; 16]));

#[inline(never)]
fn small_program() {
    black_box(sieve());
    black_box(collatz(30));
    black_box(heap_sort(NUMBERS_TRACED));
}

/// Runs a small program at CPL 3 and keeps each of its branches.
fn branch_trace() {
    if !ds::present() {
        return;
    }
    phase("branch trace, ring 3", 3);
    let trace = TRACE.get();
    let base = trace.records.as_ptr() as u64;
    let maximum = base + BRANCHES as u64 * RECORD_BYTES;
    AREA.get()[..4].copy_from_slice(&[base, base, maximum, maximum]);
    msr::write(reg::IA32_DS_AREA, AREA.get().as_ptr() as u64);
    // A full buffer drops further records. The interrupt that it would request is masked.
    msr::write(reg::IA32_DEBUGCTL, TR | BTS | BTINT | BTS_OFF_OS);
    user(small_program);
    msr::write(reg::IA32_DEBUGCTL, 0);
    trace.count = (AREA.get()[1] - base) / RECORD_BYTES;
    trace.magic = MAGIC;
    result("branches traced", trace.count);
}

#[inline(never)]
fn total(prices: &[u64]) -> u64 {
    let mut total = 0;
    for price in prices {
        total += black_box(price);
    }
    total
}

/// The average, by an instruction that faults when there are no prices.
#[inline(never)]
fn average(prices: &[u64]) -> u64 {
    let mut quotient = total(prices);
    // SAFETY: registers only; it faults for an empty list.
    unsafe {
        asm!("div {}", in(reg) prices.len(), inout("rax") quotient, inout("rdx") 0_u64 => _);
    }
    quotient
}

#[inline(never)]
fn week() {
    for day in [&[3, 5, 4][..], &[7, 9][..], &[][..]] {
        black_box(average(black_box(day)));
    }
}

/// Entries of the LBR stack that are logged.
const LAST: usize = 12;

/// Runs into a fault at CPL 3 and reads from the LBR stack how.
fn last_branches() {
    if !lbr::present() {
        return;
    }
    /// MSR_LBR_SELECT: not what ends at CPL 0.
    const CPL_EQ_0: u64 = 1;
    phase("LBR, ring 3", 3);
    lbr::reset();
    msr::write(reg::MSR_LBR_SELECT, CPL_EQ_0);
    msr::write(reg::IA32_DEBUGCTL, LBR);
    let fault = user(week);
    msr::write(reg::IA32_DEBUGCTL, 0);
    let stack = lbr::LbrStack::read();
    for (from, to) in (0..LAST).rev().map(|age| stack.entry(age)) {
        log(BRANCH, [from, to, 0, 0, 0]);
    }
    if let Some(e) = fault {
        log(FAULT, [u64::from(e.vector), e.rip, 0, 0, 0]);
    }
}

// MSR accesses: the monitor records these and their results itself.

fn msrs() {
    /// One that no processor of this model has without its LBR.
    const LASTBRANCH_0_FROM_IP: u32 = 0x680;
    phase("MSRs", 0);
    let read = |index| {
        let _ = msr::read_safe(index);
    };
    let write = |index, value| {
        let _ = msr::write_safe(index, value);
    };
    read(reg::IA32_TIME_STAMP_COUNTER);
    write(reg::IA32_TSC_ADJUST, 0x1_0000_0000);
    read(reg::IA32_TIME_STAMP_COUNTER);
    write(reg::IA32_TSC_ADJUST, 0);
    read(reg::IA32_MISC_ENABLE);
    read(reg::IA32_APIC_BASE);
    write(reg::IA32_APIC_BASE, 0xfee0_0901);
    write(reg::IA32_FMASK, 1 << 32 | 0x200);
    write(reg::IA32_DEBUGCTL, 1 << 2);
    read(reg::IA32_PERF_CAPABILITIES);
    read(LASTBRANCH_0_FROM_IP);
}

// What things cost, as the guest sees it.

const ROUNDS: usize = 9;

fn stopwatch(name: &'static str, f: fn()) {
    for _ in 0..ROUNDS {
        let start = rdtsc();
        f();
        cost(name, rdtsc().wrapping_sub(start));
    }
}

fn costs() {
    phase("stopwatch", 0);
    stopwatch("port write", || port::outb(0x80, 0));
    stopwatch("port read", || {
        port::inb(0xe8);
    });
    stopwatch("RDMSR", || {
        msr::read(reg::IA32_DEBUGCTL);
    });
    stopwatch("WRMSR", || msr::write(reg::IA32_DEBUGCTL, 0));
    stopwatch("APIC read", || {
        apic::id();
    });
    stopwatch("CPUID", || {
        insn::cpuid(0, 0);
    });
}

fn story() {
    LOG.get().magic = MAGIC;
    primes();
    compute();
    exceptions();
    branch_trace();
    last_branches();
    msrs();
    idle();
    costs();
    phase("end", 0);
}

/// How many records of `kind` there are whose third word is `word`, or anything.
fn logged(kind: u64, word: Option<u64>) -> usize {
    let log = LOG.get();
    log.records
        .iter()
        .filter(|record| record[0] == kind && word.is_none_or(|word| record[2] == word))
        .count()
}

case! {
    name: "story", cpl: [0], rules: [],
    needs: ["exceptions", "iretq-cpl3", "msr-exit", "interrupt", "hlt-exit"],
    timeout_ms: 20000,
    about: "the guest of the demo does what the demo says",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "made for our own machine");
        }
        story();
        check!(LOG.get().count <= RECORDS as u64, "the log has room for all");
        check_eq!(logged(EXCEPTION, None), 8, "exceptions");
        for (vector, count) in [(0, 2), (6, 2), (13, 2), (14, 2)] {
            check_eq!(logged(EXCEPTION, Some(vector)), count, "exceptions of a vector");
        }
        check!(logged(TICK, None) >= 3, "timer interrupts");
        let traced = usize::from(ds::present());
        check_eq!(logged(RESULT, None), 4 + traced, "results");
        let told = if lbr::present() { (LAST, 1) } else { (0, 0) };
        check_eq!((logged(BRANCH, None), logged(FAULT, Some(0))), told, "LBR entries, the fault after them");
        check_eq!(sieve(), 95, "primes below 500");
        check_eq!(collatz(30), 27, "the longest Collatz chain");
    }
}

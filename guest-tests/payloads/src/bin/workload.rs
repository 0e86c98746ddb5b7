//! The workload of `ci/bench`: integer code as programs have it. Quicksort, CRC-32, a sieve and a
//! recursive Fibonacci, about one taken branch in six instructions, with no exit but at the end.
//!
//! The ticks of the TSC that the timed run took are left on the debug console: on an emulator whose
//! TSC counts instructions (QEMU with `-icount shift=0`) that is how many it has.
//!
//! With `trace=bts` it works one middling round under the branch trace store and leaves the records on the
//! debug console, 16 bytes each: from and to. With `trace=lbr` it leaves what its LBR stack holds in the end,
//! oldest first, and with `trace=none` nothing, for a judge that watches from outside: `ci/branch-judge`.
//!
//! `arm=` on the command line says what is armed while it works: `lbr` records branches, `bts` stores them
//! in a circular buffer, `watch` has a data breakpoint on memory that it does not touch, `count` counts
//! instructions, `branches` conditional branches, `pebs` takes a sample each 10 000 instructions, `misses` counts
//! misses of the last cache in a single round, `rdt` has the lines and the traffic of one round monitored. `arm=toggle` does
//! something else: it arms and disarms the LBR round an empty function, [`TOGGLES`] times; and so do `arm=stores`,
//! ten stores, [`GROUPS`] times, and `arm=regions`, each ten of them a transaction. `arm=pmi` takes
//! [`INTERRUPTS`] interrupts of a counter, whose handler makes it overflow again.
//!
//! With an empty command line, or `arm=`, it works [`ROUNDS`] rounds and leaves by the exit port: 0 when the
//! checksum is [`EXPECTED`], 1 else. With a command line it asserts the checksum of
//! one small round, for hosts that are slow at CPL 0.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::hint::black_box;
use core::sync::atomic::{AtomicU32, Ordering};

use hindsight_guest::info::{self, StartInfo};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::ApicRegister;
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr7, Length};
use hindsight_guest::regs::msr::{
    IA32_DEBUGCTL, IA32_DS_AREA, IA32_PEBS_ENABLE, IA32_PERF_GLOBAL_STATUS_RESET, IA32_PQR_ASSOC,
};
use hindsight_guest::regs::pmu::pebs;
use hindsight_guest::{apic, cpu, exit, insn, msr, port, run};
use hindsight_guest::{exception::TrapFrame, trap};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::branch::{BTINT, BTS, LBR, TR};
use hindsight_payloads::ds::{DsArea, RECORD_BYTES};
use hindsight_payloads::lbr;
use hindsight_payloads::pmu::{self, PebsArea};

entry!(start);

/// Port of the debug console.
const DEBUG_CONSOLE: u16 = 0xe9;
/// Rounds of the timed run.
const ROUNDS: u32 = 20;
/// Checksum of one round.
const EXPECTED: u32 = 0x5c4d_7702;
/// Checksum of a small round.
const EXPECTED_SMALL: u32 = 0xe4e5_91f9;
/// How often the sorted keys go into the checksum.
const CHECKSUMS: u32 = 3;
const NUMBERS: usize = 1 << 16;
const SIEVE: usize = 1 << 18;
/// Array elements of a small round.
const NUMBERS_SMALL: usize = 256;
const SIEVE_SMALL: usize = 1024;

/// Pairs of WRMSR of `arm=toggle`.
const TOGGLES: u32 = 200_000;
/// Interrupts of `arm=pmi`.
const INTERRUPTS: u32 = 100_000;
/// Groups of ten stores of `arm=stores` and `arm=regions`.
const GROUPS: u32 = 200_000;
/// Instructions between two samples of `arm=pebs`, less one.
const PERIOD: u64 = 9_999;
/// Address and size in bytes of the samples of `arm=pebs`.
const SAMPLES: u64 = 32 << 20;
const SAMPLES_BYTES: u64 = 16 << 20;
/// Records of the BTS buffer.
const RECORDS: usize = 1024;

/// The DS area, and the buffer after it.
#[repr(C, align(4096))]
struct Trace {
    area: DsArea,
    records: [[u64; 3]; RECORDS],
}

static mut TRACE: Trace = Trace {
    area: DsArea {
        base: 0,
        index: 0,
        maximum: 0,
        threshold: 0,
        pebs: [0; 12],
    },
    records: [[0; 3]; RECORDS],
};
static UNTOUCHED: ScratchPage = ScratchPage::new();

static mut KEYS: [u32; NUMBERS] = [0; NUMBERS];
static mut COMPOSITE: [u8; SIEVE] = [0; SIEVE];

fn start(info: StartInfo) -> ! {
    info::copy_command_line(info);
    if let Some(how) = info::option("trace") {
        trace(how);
    }
    let armed = info::option("arm");
    if info.has_command_line() && armed.is_none() {
        run::run("workload", info);
    }
    match armed {
        Some("lbr") => msr::write(IA32_DEBUGCTL, DebugCtl::LBR.bits()),
        Some("bts") => store_branches(),
        Some("watch") => {
            insn::write_dr0(UNTOUCHED.address());
            insn::write_dr7(
                Dr7::RESET
                    .with_breakpoint(BreakpointIndex(0), Condition::ReadWrite, Length::Eight)
                    .0,
            );
        }
        Some("count") => pmu::select(0, 0xc0, 0, pmu::ON | pmu::INT),
        Some("branches") => pmu::select(0, 0xc4, 1, pmu::ON | pmu::INT),
        Some("pebs") => sample(),
        Some("misses") => pmu::select(0, 0x2e, 0x41, pmu::ON | pmu::INT),
        Some("rdt") => msr::write(IA32_PQR_ASSOC, 1),
        _ => {}
    }
    let before = insn::rdtsc();
    let good = match armed {
        Some("toggle") => {
            (0..TOGGLES).for_each(|_| toggle());
            true
        }
        Some("stores") => {
            stores();
            true
        }
        Some("regions") => regions() < GROUPS / 100,
        Some("pmi") => take_interrupts(),
        _ => {
            let once = matches!(armed, Some("misses" | "rdt"));
            let rounds = if once { 1 } else { ROUNDS };
            (0..rounds).all(|_| round(NUMBERS, SIEVE, 27) == EXPECTED)
        }
    };
    let ticks = insn::rdtsc().wrapping_sub(before);
    // Sixteen hexadecimal digits.
    for shift in (0..64).step_by(4).rev() {
        let digit = usize::try_from(ticks >> shift & 0xf).unwrap_or(0);
        port::outb(DEBUG_CONSOLE, b"0123456789abcdef"[digit]);
    }
    exit::exit(u32::from(!good));
}

/// A circular BTS buffer of [`RECORDS`].
fn store_branches() {
    let trace = &raw mut TRACE;
    // SAFETY: one processor runs, and nothing else uses it.
    unsafe {
        let base = (&raw const (*trace).records) as u64;
        (*trace).area.base = base;
        (*trace).area.index = base;
        (*trace).area.maximum = base + 24 * RECORDS as u64;
        msr::write(IA32_DS_AREA, (&raw const (*trace).area) as u64);
    }
    msr::write(IA32_DEBUGCTL, (DebugCtl::TR | DebugCtl::BTS).bits());
}

/// PEBS each [`PERIOD`] instructions, into memory that nothing else uses.
fn sample() {
    let area = PebsArea::new(pmu::RECORDS, pmu::RECORDS, [PERIOD.wrapping_neg(); 4]);
    area.put(pebs::INDEX, SAMPLES);
    area.put(pebs::MAXIMUM, SAMPLES + SAMPLES_BYTES);
    area.put(pebs::THRESHOLD, SAMPLES + SAMPLES_BYTES);
    pmu::preset(0, PERIOD);
    msr::write(IA32_PEBS_ENABLE, 1);
    pmu::select(0, 0xc0, 0, pmu::ON);
}

/// Ten stores to lines of their own, [`GROUPS`] times.
fn stores() {
    // SAFETY: only the page is written.
    unsafe {
        asm!(
            "2:",
            ".set hs_at, 0", ".rept 10", "mov [rdi + hs_at], ecx", ".set hs_at, hs_at + 64", ".endr",
            "dec ecx",
            "jnz 2b",
            in("rdi") UNTOUCHED.address(),
            inout("ecx") GROUPS => _,
        );
    }
}

/// The same in transactions of ten. Returns how many transactions were aborted.
fn regions() -> u32 {
    let mut aborted = 0;
    // SAFETY: as above.
    unsafe {
        asm!(
            "2:",
            "xbegin 4f",
            ".set hs_at, 0", ".rept 10", "mov [rdi + hs_at], ecx", ".set hs_at, hs_at + 64", ".endr",
            "xend",
            "3:",
            "dec ecx",
            "jnz 2b",
            "jmp 5f",
            "4:",
            "inc r8d",
            "jmp 3b",
            "5:",
            in("rdi") UNTOUCHED.address(),
            inout("ecx") GROUPS => _,
            inout("r8d") aborted,
            out("eax") _,
        );
    }
    aborted
}

fn toggle() {
    msr::write(IA32_DEBUGCTL, DebugCtl::LBR.bits());
    empty();
    msr::write(IA32_DEBUGCTL, 0);
}

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// Overflow, interrupt, and all that must be done for the next one: the counter overflows in its own handler.
fn take_interrupts() -> bool {
    cpu::init_first();
    apic::enable();
    trap::set_handler(2, on_overflow);
    pmu::select(0, 0xc0, 0, pmu::ON | pmu::INT);
    rearm();
    pmu::start(1);
    while TAKEN.load(Ordering::Acquire) < INTERRUPTS {
        insn::pause();
    }
    TAKEN.load(Ordering::Acquire) == INTERRUPTS
}

fn on_overflow(_: &mut TrapFrame) {
    if TAKEN.fetch_add(1, Ordering::AcqRel) + 1 < INTERRUPTS {
        rearm();
    }
}

fn rearm() {
    msr::write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    apic::write(ApicRegister::LVT_PMC, pmu::LVT_NMI);
    pmu::preset(0, 1);
}

#[inline(never)]
fn empty() {
    black_box(());
}

// The call that is traced is the first branch of the trace, and the return from it the last.
global_asm!(
    ".pushsection .text.workload, \"ax\"",
    ".global workload_traced, workload_call, workload_return",
    "workload_traced:",
    "push rbx",
    "mov ebx, esi",
    "mov ecx, {debugctl}",
    "xor edx, edx",
    "mov eax, ebx",
    "test ebx, ebx",
    "jz workload_call",
    "wrmsr",
    "workload_call:",
    "call rdi",
    "workload_return:",
    "mov ecx, {debugctl}",
    "xor edx, edx",
    "xor eax, eax",
    "test ebx, ebx",
    "jz 2f",
    "wrmsr",
    "2:",
    "pop rbx",
    "ret",
    ".popsection",
    debugctl = const IA32_DEBUGCTL,
);

unsafe extern "C" {
    /// Calls `work` with IA32_DEBUGCTL = `debugctl`, or without touching it for 0.
    fn workload_traced(work: extern "C" fn(), debugctl: u64);
}

/// Checksum of the traced round.
const EXPECTED_TRACED: u32 = 0x390a_8be5;
static SUM: AtomicU32 = AtomicU32::new(0);

extern "C" fn middling_round() {
    SUM.store(round(1024, 4096, 15), Ordering::Relaxed);
}

/// Where the trace goes: memory above the image.
const TRACE_AREA: u64 = 0x100_0000;
const TRACE_RECORDS: u64 = 1 << 20;

fn trace(how: &str) -> ! {
    let base = TRACE_AREA + 4096;
    let maximum = base + TRACE_RECORDS * RECORD_BYTES;
    let area = TRACE_AREA as *mut DsArea;
    // SAFETY: nothing else uses the memory from there on; 64 MiB hold it all.
    unsafe {
        area.write_volatile(DsArea {
            base,
            index: base,
            maximum,
            threshold: maximum,
            pebs: [0; 12],
        });
    }
    let debugctl = match how {
        "bts" => {
            msr::write(IA32_DS_AREA, TRACE_AREA);
            TR | BTS | BTINT
        }
        "lbr" => LBR,
        "btm" => TR,
        _ => 0,
    };
    // SAFETY: the assembly keeps the C rules.
    unsafe { workload_traced(middling_round, debugctl) };
    if debugctl == LBR {
        let stack = lbr::LbrStack::read();
        for (from, to) in (0..lbr::ENTRIES).rev().map(|age| stack.entry(age)) {
            put(&[from, to]);
        }
    }
    // SAFETY: as above.
    let end = unsafe { area.read_volatile() }.index;
    let mut at = base;
    while at < end {
        // From and to, without the flags.
        // SAFETY: the record was stored there.
        put(unsafe { &*(at as *const [u64; 2]) });
        at += RECORD_BYTES;
    }
    exit::exit(u32::from(SUM.load(Ordering::Relaxed) != EXPECTED_TRACED));
}

/// Leaves 16 bytes on the debug console.
fn put(record: &[u64; 2]) {
    // SAFETY: RSI and RCX name the record, and are not used after it.
    unsafe {
        asm!("rep outsb", inout("rsi") record => _, inout("rcx") 16_u64 => _, in("dx") DEBUG_CONSOLE);
    }
}

case! {
    name: "workload", cpl: [0], rules: [], needs: [],
    about: "quicksort, CRC-32, sieve and recursion give the right checksum",
    fn body(_ctx) {
        let sum = round(NUMBERS_SMALL, SIEVE_SMALL, 10);
        check_eq!(sum, EXPECTED_SMALL, "the checksum");
    }
}

/// The checksum of all four programs: `numbers` keys, primes below `limit`, the `n`th Fibonacci number.
fn round(numbers: usize, limit: usize, n: u32) -> u32 {
    let (keys, composite) = (&raw mut KEYS, &raw mut COMPOSITE);
    // SAFETY: one processor runs, and nothing else uses the arrays.
    let (keys, composite) = unsafe { (&mut *keys, &mut *composite) };
    let (keys, composite) = (&mut keys[..numbers], &mut composite[..limit]);
    let mut seed = 0x1234_5678_u32;
    for key in keys.iter_mut() {
        // Marsaglia's xorshift.
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        *key = seed;
    }
    quicksort(keys);
    let mut sum = !0;
    for _ in 0..CHECKSUMS {
        sum = keys.iter().fold(sum, |crc, &key| crc32(crc, key));
    }
    sum = crc32(sum, sieve(composite));
    !crc32(sum, fibonacci(black_box(n)))
}

fn quicksort(keys: &mut [u32]) {
    let Some(last) = keys.len().checked_sub(1).filter(|&last| last > 0) else {
        return;
    };
    keys.swap(last / 2, last);
    let pivot = keys[last];
    let mut small = 0;
    for at in 0..last {
        if keys[at] < pivot {
            keys.swap(at, small);
            small += 1;
        }
    }
    keys.swap(small, last);
    let (left, right) = keys.split_at_mut(small);
    quicksort(left);
    quicksort(&mut right[1..]);
}

/// CRC-32 (IEEE 802.3) of the bytes of a word, lowest first, by a table.
fn crc32(mut crc: u32, word: u32) -> u32 {
    for byte in word.to_le_bytes() {
        crc = crc >> 8 ^ TABLE[usize::from(crc.to_le_bytes()[0] ^ byte)];
    }
    crc
}

static TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut at = 0;
    while at < table.len() {
        #[expect(clippy::cast_possible_truncation, reason = "at most 255")]
        let mut crc = at as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 0 {
                crc >> 1
            } else {
                crc >> 1 ^ 0xedb8_8320
            };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
}

/// How many primes there are below the length.
fn sieve(composite: &mut [u8]) -> u32 {
    composite.fill(0);
    let mut primes = 0;
    for number in 2..composite.len() {
        if composite[number] == 0 {
            primes += 1;
            let mut multiple = number * number;
            while multiple < composite.len() {
                composite[multiple] = 1;
                multiple += number;
            }
        }
    }
    primes
}

#[inline(never)]
fn fibonacci(n: u32) -> u32 {
    if n < 2 {
        n
    } else {
        fibonacci(n - 1) + fibonacci(n - 2)
    }
}

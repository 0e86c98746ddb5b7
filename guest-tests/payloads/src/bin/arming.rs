//! Random sequences of arming and disarming: breakpoints, TF, BTF, LBR and counters, at CPL 0 and
//! 3.
//!
//! A sequence is a list of random steps. Some write a debug register or an MSR, others run a
//! snippet at CPL 0 or 3, with TF or without. The handler of #DB and #BP takes random steps too.
//! Every event and all state that software can read goes into a hash, so that two engines that
//! differ anywhere give different lines. `cargo xtask arming` compares engines.
//!
//! With `sequences=N` on the command line it prints a line for each sequence, `sequence K HASH
//! events=E`, from `first=K` on, else from 0. With `events=1` it also prints every event.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use hindsight_guest::catch::{catch, user};
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::info::{self, StartInfo};
use hindsight_guest::prelude::{case, check_eq, entry};
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::msr::{IA32_DEBUGCTL, MSR_LASTBRANCH_TOS};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::show::{TextBuffer, TextSink, decimal, hex};
use hindsight_guest::{exit, insn, msr, run, serial, trap};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{self, SnippetFn, SnippetLabel, at, start};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::pmu;
use hindsight_payloads::{clear_tf, need_lbr, need_pmu, snippet};

entry!(main);

/// Steps of a sequence.
const STEPS: u64 = 16;
/// Number of events of a run after which the handler disarms TF and the breakpoints.
const RUN_EVENTS_MAX: u64 = 300;
/// The port that the snippets use, which no device decodes.
const PORT: u64 = 0x9a0;

/// Instructions that set the flags of RSI in RFLAGS. RSI has TF or no flag.
macro_rules! set_flags {
    () => {
        "pushfq\nor qword ptr [rsp], rsi\npopfq"
    };
}

// RDI points to the data.
snippet! { moves [moves_load moves_store moves_end]
    set_flags!(), "moves_load: mov rax, [rdi]", "inc rax", "moves_store: mov [rdi + 8], rax",
    "lock xadd [rdi + 16], rax", "movzx eax, word ptr [rdi + 6]", "push rax", "moves_end: pop rax",
    clear_tf!(), "ret"
}
snippet! { branches [branches_loop branches_call branches_leaf]
    set_flags!(), "mov ecx, 3", "branches_loop: dec ecx", "jnz branches_loop",
    "branches_call: call branches_leaf", "jmp 3f", "branches_leaf: nop", "ret", "3: nop",
    clear_tf!(), "ret"
}
snippet! { strings [strings_copy strings_end]
    set_flags!(), "mov ecx, 4", "lea rsi, [rdi + 64]", "strings_copy: rep movsb", "strings_end: nop",
    clear_tf!(), "ret"
}
snippet! { shadows [shadows_register shadows_int3 shadows_memory]
    "mov eax, ss", "mov [rdi + 32], eax", set_flags!(), "mov ss, eax", "shadows_register: nop",
    "shadows_memory: mov ss, word ptr [rdi + 32]", "nop", "mov ss, eax", "shadows_int3: int3",
    clear_tf!(), "ret"
}
snippet! { traps [traps_int1 traps_cpuid traps_end]
    "push rbx", set_flags!(), "traps_int1: .byte 0xf1", "xor eax, eax", "traps_cpuid: cpuid", "rdtsc",
    "traps_end: xor eax, eax", "xor ecx, ecx", "xor edx, edx", clear_tf!(), "pop rbx", "ret"
}
// For CPL 0 alone.
snippet! { ports [ports_out ports_string]
    set_flags!(), "mov edx, 0x9a0", "xor eax, eax", "ports_out: out dx, al", "in al, dx", "mov ecx, 2", "mov rsi, rdi",
    "ports_string: rep outsb", clear_tf!(), "ret"
}

const SNIPPETS: [SnippetFn; 6] = [moves, branches, strings, shadows, traps, ports];
/// How many of [`SNIPPETS`] can run at CPL 3.
const SNIPPETS_FOR_USERS: u64 = 5;
const LABELS: [SnippetLabel; 16] = [
    moves_load,
    moves_store,
    moves_end,
    branches_loop,
    branches_call,
    branches_leaf,
    strings_copy,
    strings_end,
    shadows_register,
    shadows_int3,
    shadows_memory,
    traps_int1,
    traps_cpuid,
    traps_end,
    ports_out,
    ports_string,
];

static DATA: ScratchPage = ScratchPage::new();

/// State of the random numbers.
static SEED: AtomicU64 = AtomicU64::new(0);
/// Hash of the sequence so far.
static HASH: AtomicU64 = AtomicU64::new(0);
/// Events of the sequence, and of the current run.
static EVENTS: AtomicU64 = AtomicU64::new(0);
static RUN_EVENTS: AtomicU64 = AtomicU64::new(0);
/// Whether every event is printed.
static PRINT: AtomicBool = AtomicBool::new(false);

fn main(info: StartInfo) -> ! {
    info::copy_command_line(info);
    let Some(count) = info::option("sequences").and_then(number) else {
        run::run("arming", info);
    };
    run::init(info);
    PRINT.store(info::option("events") == Some("1"), Relaxed);
    let first = info::option("first").and_then(number).unwrap_or(0);
    for index in first..first + count {
        print_sequence(index, sequence(index));
    }
    exit::exit(0);
}

case! {
    name: "random_sequences", cpl: [0], rules: [], needs: [], timeout_ms: 20000,
    about: "a random sequence of arming and disarming has the same events each time",
    fn body(ctx) {
        need_lbr!(ctx);
        need_pmu!(ctx);
        for index in 0..4 {
            check_eq!(sequence(index), sequence(index), "hash of the events and the state");
        }
    }
}

fn number(text: &str) -> Option<u64> {
    text.parse().ok()
}

/// The next of the random numbers (SplitMix64).
fn random() -> u64 {
    let seed = SEED.load(Relaxed).wrapping_add(0x9e37_79b9_7f4a_7c15);
    SEED.store(seed, Relaxed);
    let mixed = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

fn random_below(limit: u64) -> u64 {
    random() % limit
}

/// Whether an event of probability 1 in `odds` happens.
fn one_in(odds: u64) -> bool {
    random_below(odds) == 0
}

fn one_of<T: Copy>(items: &[T]) -> T {
    items[usize::try_from(random_below(items.len() as u64)).unwrap_or(0)]
}

/// Adds values to the hash (FNV-1a, a word at a time).
fn log(values: &[u64]) {
    let mut hash = HASH.load(Relaxed);
    for value in values {
        hash = (hash ^ value).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 32;
    }
    HASH.store(hash, Relaxed);
}

/// Runs a sequence, which its index determines, and returns its hash.
fn sequence(index: u64) -> u64 {
    SEED.store(index.wrapping_mul(0xd134_2543_de82_ef95), Relaxed);
    HASH.store(0xcbf2_9ce4_8422_2325, Relaxed);
    EVENTS.store(0, Relaxed);
    reset();
    insn::write_cr4(insn::read_cr4() | Cr4::DE.bits());
    trap::set_handler(1, on_event);
    trap::set_handler(3, on_event);
    for _ in 0..STEPS {
        match random_below(10) {
            0 => arm_breakpoint(),
            1 => disarm_breakpoint(),
            2 => set_debugctl(),
            3 => program_counter(),
            4 => detect_access(),
            _ => run_snippet(),
        }
        log_state();
    }
    log_branches();
    reset();
    trap::clear_handler(1);
    trap::clear_handler(3);
    insn::write_cr4(insn::read_cr4() & !Cr4::DE.bits());
    HASH.load(Relaxed)
}

/// Disarms all facilities, and resets the counters, the LBR stack and the data page.
fn reset() {
    debug::disarm();
    insn::write_dr6(Dr6::RESET);
    (0..4).for_each(|n| insn::write_dr(n, 0));
    pmu::reset();
    lbr::reset();
    let data = DATA.address() as *mut u8;
    // SAFETY: the page belongs to the payload, and no snippet runs now.
    unsafe { data.write_bytes(0x5a, 4096) };
}

fn arm_breakpoint() {
    let slot = u8::try_from(random_below(4)).unwrap_or(0);
    let length = one_of(&[Length::One, Length::Two, Length::Four, Length::Eight]);
    let data = DATA.address() + random_below(72);
    let (address, condition, length) = match random_below(8) {
        0 => (PORT, Condition::Io, length),
        1 | 2 => (data, Condition::Write, length),
        3 | 4 => (data, Condition::ReadWrite, length),
        _ => (at(one_of(&LABELS)), Condition::Execute, Length::One),
    };
    debug::arm_also(slot, address, condition, length);
}

fn disarm_breakpoint() {
    let enables = 3 << (2 * random_below(4));
    insn::write_dr7(insn::read_dr7() & !enables);
}

fn set_debugctl() {
    let bits = random() & (DebugCtl::LBR | DebugCtl::BTF).bits();
    msr::write(IA32_DEBUGCTL, bits);
}

/// Programs counter 0 or 1 to count instructions or branches, or stops it.
fn program_counter() {
    let counter = u32::try_from(random_below(2)).unwrap_or(0);
    let event = one_of(&[0xc0, 0xc4]);
    let bits = one_of(&[0, pmu::ON, pmu::OS, pmu::USR]);
    pmu::select(counter, event, 0, bits);
    pmu::start(random() & 3);
}

/// Sets DR7.GD and reads a debug register.
fn detect_access() {
    begin_run();
    insn::write_dr7(insn::read_dr7() | Dr7::GD);
    log(&[insn::read_dr6()]);
}

fn begin_run() {
    RUN_EVENTS.store(0, Relaxed);
}

fn run_snippet() {
    begin_run();
    let data = DATA.address();
    let flags = if one_in(2) { Rflags::TF.bits() } else { 0 };
    let caught = if one_in(2) {
        let code = one_of(&SNIPPETS);
        catch(|| debug::call(code, data, flags))
    } else {
        let index = usize::try_from(random_below(SNIPPETS_FOR_USERS)).unwrap_or(0);
        let code = SNIPPETS[index];
        user(|| debug::call(code, data, flags))
    };
    let (vector, error) = caught.map_or((0, 0), |caught| caught.code());
    let rip = caught.map_or(0, |caught| caught.rip);
    log(&[vector.into(), error, rip]);
}

/// Logs a #DB or #BP, and takes a random step.
fn on_event(frame: &mut TrapFrame) {
    let (dr6, dr7) = (insn::read_dr6(), insn::read_dr7());
    let debugctl = msr::read(IA32_DEBUGCTL);
    let registers = [frame.rax, frame.rcx, frame.rsi, frame.rdi, frame.rsp];
    // CPUID and RDTSC leave values in RAX, RCX and RDX that depend on the machine.
    let registers = if in_traps(frame.rip) {
        [0; 5]
    } else {
        registers
    };
    log(&[
        frame.vector,
        frame.rip,
        frame.cs,
        frame.rflags,
        dr6,
        dr7,
        debugctl,
    ]);
    log(&registers);
    EVENTS.fetch_add(1, Relaxed);
    if PRINT.load(Relaxed) {
        print_event(frame, dr6, dr7, debugctl);
    }
    if dr6 & Dr6::BREAKPOINTS != 0 && !one_in(8) {
        frame.rflags |= Rflags::RF.bits();
    }
    if !one_in(4) {
        insn::write_dr6(Dr6::RESET);
    }
    match random_below(12) {
        0 => disarm_breakpoint(),
        1 => set_debugctl(),
        2 => frame.rflags ^= Rflags::TF.bits(),
        3 => program_counter(),
        4 => arm_breakpoint(),
        _ => {}
    }
    if RUN_EVENTS.fetch_add(1, Relaxed) >= RUN_EVENTS_MAX {
        frame.rflags &= !Rflags::TF.bits();
        debug::disarm();
    }
}

/// Whether an address is in the snippet `traps`.
///
/// The snippet executes CPUID and RDTSC, and clears EAX, ECX and EDX before it ends.
fn in_traps(rip: u64) -> bool {
    (start(traps)..start(ports)).contains(&rip)
}

/// Adds all state that software can read to the log.
fn log_state() {
    log(&[
        insn::read_dr0(),
        insn::read_dr1(),
        insn::read_dr2(),
        insn::read_dr3(),
        insn::read_dr6(),
        insn::read_dr7(),
        msr::read(IA32_DEBUGCTL),
        msr::read(MSR_LASTBRANCH_TOS),
        pmu::get(0),
        pmu::get(1),
        pmu::status(),
    ]);
    if PRINT.load(Relaxed) {
        let mut text = TextBuffer::<256>::new();
        text.put("state hash=");
        hex(HASH.load(Relaxed), &mut text);
        text.put("\n");
        serial::write(text.as_str());
    }
}

fn log_branches() {
    msr::write(IA32_DEBUGCTL, 0);
    let stack = LbrStack::read();
    log(&stack.from);
    log(&stack.to);
    let ler = lbr::ler();
    log(&[ler.0, ler.1]);
}

fn print_event(frame: &TrapFrame, dr6: u64, dr7: u64, debugctl: u64) {
    let mut text = TextBuffer::<256>::new();
    text.put("event");
    for (name, value) in [
        (" vector=", frame.vector),
        (" rip=", frame.rip),
        (" cs=", frame.cs),
        (" rflags=", frame.rflags),
        (" dr6=", dr6),
        (" dr7=", dr7),
        (" debugctl=", debugctl),
    ] {
        text.put(name);
        hex(value, &mut text);
    }
    text.put("\n");
    serial::write(text.as_str());
}

fn print_sequence(index: u64, hash: u64) {
    let mut text = TextBuffer::<128>::new();
    text.put("sequence ");
    decimal(index, &mut text);
    text.put(" ");
    hex(hash, &mut text);
    text.put(" events=");
    decimal(EVENTS.load(Relaxed), &mut text);
    text.put("\n");
    serial::write(text.as_str());
}

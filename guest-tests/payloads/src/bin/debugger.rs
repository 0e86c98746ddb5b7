//! A debugger inside the guest.
//!
//! Code at CPL 0 finds a bug in a program at CPL 3 by a watchpoint, a breakpoint and single steps, as
//! `gdb` does. The program has a table of accounts with a checksum behind it, and one of its functions
//! writes one entry too many, over the checksum.

#![no_std]
#![no_main]

use core::arch::global_asm;
use core::cell::UnsafeCell;

use hindsight_guest::catch::user;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::dr::{Condition, Dr6, Length};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, trap};
use hindsight_payloads::debug::{self, SnippetLabel, at, conditions};

payload!("debugger");

/// The program's data: eight accounts and their sum.
#[repr(C, align(64))]
struct Bank {
    accounts: [u32; 8],
    sum: u32,
}

struct SingleCpu<T>(UnsafeCell<T>);

// SAFETY: one CPU uses it, and the debugger only while the program is stopped.
unsafe impl<T> Sync for SingleCpu<T> {}

static BANK: SingleCpu<Bank> = SingleCpu(UnsafeCell::new(Bank {
    accounts: [0; 8],
    sum: 0,
}));

// The program. RDI points to the bank.
global_asm!(
    ".pushsection .text.program, \"ax\"",
    ".global program, deposit, deposit_store, update_sum, update_sum_store, clear_all, clear_all_store, clear_all_next",
    "program:",
    "mov esi, 3", // account 3 gets 100
    "mov edx, 100",
    "call deposit",
    "call update_sum",
    "call clear_all",
    "mov esi, 5",
    "mov edx, 250",
    "call deposit",
    "ret",
    // RSI is the account, EDX the amount.
    "deposit:",
    "deposit_store:",
    "add [rdi + 4 * rsi], edx",
    "ret",
    "update_sum:",
    "xor eax, eax",
    "xor ecx, ecx",
    "2: add eax, [rdi + 4 * rcx]",
    "inc ecx",
    "cmp ecx, 8",
    "jb 2b",
    "update_sum_store:",
    "mov [rdi + 32], eax",
    "ret",
    // The bug: nine accounts are cleared.
    "clear_all:",
    "xor ecx, ecx",
    "3:",
    "clear_all_store:",
    "mov dword ptr [rdi + 4 * rcx], 0",
    "clear_all_next:",
    "inc ecx",
    "cmp ecx, 8",
    "jbe 3b",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    fn program(bank: *mut Bank);
    fn deposit();
    fn deposit_store();
    fn update_sum();
    fn update_sum_store();
    fn clear_all();
    fn clear_all_store();
    fn clear_all_next();
}

fn run_program() {
    // SAFETY: the program accesses only the bank.
    let fault = user(|| unsafe { program(BANK.0.get()) });
    check!(fault.is_none(), "no exception in the program");
}

fn sum_address() -> u64 {
    // SAFETY: it computes an address inside the static and accesses nothing.
    unsafe { &raw const (*BANK.0.get()).sum as u64 }
}

fn bank_sum() -> u32 {
    // SAFETY: the program is stopped or has ended.
    unsafe { (&raw const (*BANK.0.get()).sum).read_volatile() }
}

/// What the debugger recorded at a stop.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct RecordedStop {
    rip: u64,
    conditions: u64,
    /// The program's sum at the stop before this one.
    old: u32,
    /// The program's sum at this stop.
    new: u32,
    /// RCX.
    index: u64,
}

/// The debugger's state.
struct GuestDebugger {
    stops: [RecordedStop; 32],
    count: usize,
    value: u32,
    /// Single steps before the program continues without TF.
    steps: u32,
}

static DEBUGGER: SingleCpu<GuestDebugger> = SingleCpu(UnsafeCell::new(GuestDebugger {
    stops: [RecordedStop {
        rip: 0,
        conditions: 0,
        old: 0,
        new: 0,
        index: 0,
    }; 32],
    count: 0,
    value: 0,
    steps: 0,
}));

fn debugger() -> &'static mut GuestDebugger {
    // SAFETY: handler and case run on one CPU and never at the same time; neither keeps the reference
    // while the other one runs.
    unsafe { &mut *DEBUGGER.0.get() }
}

/// Handles #DB: records a stop and resumes with RF, and with TF while steps are left.
fn on_debug_exception(frame: &mut TrapFrame) {
    let conditions = conditions(insn::read_dr6());
    insn::write_dr6(Dr6::RESET);
    let d = debugger();
    let new = bank_sum();
    if let Some(stop) = d.stops.get_mut(d.count) {
        *stop = RecordedStop {
            rip: frame.rip,
            conditions,
            old: d.value,
            new,
            index: frame.rcx,
        };
    }
    d.count += 1;
    d.value = new;
    frame.rflags |= Rflags::RF.bits();
    if d.steps > 0 {
        d.steps -= 1;
        frame.rflags |= Rflags::TF.bits();
    } else {
        frame.rflags &= !Rflags::TF.bits();
    }
}

/// Runs the program from its initial state with the breakpoints of `arm`, and returns the stops.
fn debug_program(steps: u32, arm: impl FnOnce()) -> &'static [RecordedStop] {
    // SAFETY: the program does not run now.
    unsafe {
        BANK.0.get().write_volatile(Bank {
            accounts: [0; 8],
            sum: 0,
        })
    };
    let d = debugger();
    (d.count, d.value, d.steps) = (0, 0, steps);
    trap::set_handler(1, on_debug_exception);
    arm();
    run_program();
    trap::clear_handler(1);
    debug::disarm();
    let d = debugger();
    &d.stops[..d.count.min(d.stops.len())]
}

fn rips<const N: usize>(stops: &[RecordedStop]) -> [u64; N] {
    core::array::from_fn(|n| stops.get(n).map_or(0, |stop| stop.rip))
}

fn addresses<const N: usize>(labels: [SnippetLabel; N]) -> [u64; N] {
    labels.map(at)
}

/// Bytes of the store that writes the sum.
const STORE_SUM_LENGTH: u64 = 3;

case! {
    name: "watchpoint_finds_the_writer", cpl: [0], rules: ["WP-01", "WP-18", "DR-27", "D6-10"],
    needs: ["guestbp-data", "iretq-cpl3"],
    about: "a watchpoint on the sum stops behind its two writers, with the old and the new value",
    fn body(_ctx) {
        let stops = debug_program(0, || debug::arm(0, sum_address(), Condition::Write, Length::Four));
        require_eq!(stops.len(), 2, "count of stops");
        check_eq!(stops[0].rip, at(update_sum_store) + STORE_SUM_LENGTH, "RIP behind the correct writer");
        check_eq!((stops[0].old, stops[0].new), (0, 100), "values of the correct writer");
        check_eq!(stops[1].rip, at(clear_all_next), "RIP behind the bug");
        check_eq!((stops[1].old, stops[1].new), (100, 0), "values of the bug");
        check_eq!(stops[1].index, 8, "index, which is one too high");
    }
}

case! {
    name: "breakpoint_and_steps", cpl: [0], rules: ["DB-01", "DB-03", "TF-01", "RF-08", "DR-27"],
    needs: ["guestbp-exec-cpl3", "tf-cpl3", "iretq-cpl3"],
    about: "a breakpoint on the function with the bug, and five single steps from there",
    fn body(_ctx) {
        let stops = debug_program(5, || debug::arm_at(1, clear_all));
        require_eq!(stops.len(), 6, "count of stops");
        let first = (stops[0].rip, stops[0].conditions);
        check_eq!(first, (at(clear_all), Dr6::B1.bits()), "RIP and conditions of the breakpoint");
        check!(stops[1..].iter().all(|stop| stop.conditions == debug::BS), "BS at the five steps");
        let next = at(clear_all_next);
        // XOR, the store, INC (2 bytes), CMP (3), JBE back to the store.
        let expected = [at(clear_all_store), next, next + 2, next + 5, at(clear_all_store)];
        check_eq!(rips::<5>(&stops[1..]), expected, "RIPs of the steps");
    }
}

case! {
    name: "all_at_once", cpl: [0], rules: ["DB-12", "DR-19", "DR-27", "WP-02"],
    needs: ["guestbp-data", "guestbp-exec-cpl3", "iretq-cpl3"],
    about: "three breakpoints and a watchpoint trace the program's calls and the writers of the sum",
    fn body(_ctx) {
        let stops = debug_program(0, || {
            debug::arm_at(0, deposit);
            debug::arm_also(1, at(update_sum), Condition::Execute, Length::One);
            debug::arm_also(2, at(clear_all), Condition::Execute, Length::One);
            debug::arm_also(3, sum_address(), Condition::Write, Length::Four);
        });
        let sum_written = at(update_sum_store) + STORE_SUM_LENGTH;
        let [first, second, third, last] = addresses([deposit, update_sum, clear_all, deposit]);
        let expected = [first, second, sum_written, third, at(clear_all_next), last];
        check_eq!(rips::<6>(stops), expected, "RIPs of the stops");
        check_eq!(stops.len(), 6, "count of stops");
        check_eq!(at(deposit), at(deposit_store), "labels of one instruction");
    }
}

//! Call-stack mode of the LBR stack, and an unwinder that uses it.

#![no_std]
#![no_main]

use core::hint::black_box;

use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::{
    IA32_DEBUGCTL, IA32_PERF_GLOBAL_STATUS_RESET, IA32_PERF_GLOBAL_STATUS_SET, MSR_LASTBRANCH_TOS,
    MSR_LBR_SELECT,
};
use hindsight_payloads::branch::{BranchSequence, LBR, TakenBranch, run_sequence};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::{need_lbr, sequence};

payload!("call_stack");

/// EN_CALLSTACK with JCC, NEAR_IND_JMP, NEAR_REL_JMP and FAR_BRANCH.
const CALL_STACK: u64 = 0x3c4;
/// EN_CALLSTACK alone.
const ENABLE: u64 = 0x200;
const CPL_EQ_0: u64 = 1 << 0;
const CPL_NEQ_0: u64 = 1 << 1;

/// Runs the sequence with this MSR_LBR_SELECT, from an empty stack.
fn record_with(level: u8, sequence: &BranchSequence, select: u64) -> Option<LbrStack> {
    lbr::reset();
    msr::write(MSR_LBR_SELECT, select);
    run_sequence(level, sequence, LBR)?;
    Some(LbrStack::read())
}

/// Checks that the stack holds exactly the records of the sequence.
fn check_calls(level: u8, sequence: &BranchSequence, select: u64) {
    if let Some(stack) = record_with(level, sequence, select) {
        lbr::check_records(&stack, sequence.records());
    }
}

sequence! {
    /// Calls A, which calls B by register and then C through memory; the sequence ends in C.
    calls_a_b_c:
        "20: call 30f",
        "ud2",
        "30: lea rax, [rip + 40f]",
        "31: call rax",
        "32: lea rax, [rip + 50f]", "push rax",
        "33: call qword ptr [rsp]",
        "ud2",
        "40: ret",
        "50: nop",
    => ["20b", "30b", "REL_CALL"], ["33b", "50b", "IND_CALL"],
}

case! {
    name: "calls_push_and_returns_pop", cpl: [0, 3], rules: ["LSEL-10", "LSEL-11", "LSEL-12", "LSEL-17"], needs: [],
    about: "after calls of A and B, a return and a call of C, the stack holds C over A",
    fn body(ctx) {
        need_lbr!(ctx);
        check_calls(ctx.cpl, calls_a_b_c(), CALL_STACK);
    }
}

case! {
    name: "level_filters", cpl: [0, 3], rules: ["LSEL-10"], needs: [],
    about: "the filter of the other level has no effect, that of the own level records nothing",
    fn body(ctx) {
        need_lbr!(ctx);
        let (own, other) = if ctx.cpl == 0 { (CPL_EQ_0, CPL_NEQ_0) } else { (CPL_NEQ_0, CPL_EQ_0) };
        check_calls(ctx.cpl, calls_a_b_c(), CALL_STACK | other);
        let stack = record_with(ctx.cpl, calls_a_b_c(), CALL_STACK | own);
        check!(stack == Some(LbrStack::EMPTY), "LBR stack empty with the filter of the own level");
    }
}

sequence! {
    /// Three calls and their returns.
    balanced:
        "20: call 30f",
        "21: jmp 70f",
        "30: call 40f", "ret",
        "40: call 50f", "ret 0",
        "50: ret",
        "70: nop",
    =>
}

case! {
    name: "popped_entries_are_zero", cpl: [0, 3], rules: ["LSEL-12", "LSEL-13", "OP-33"], needs: [],
    about: "after as many returns as calls TOS and all entries are zero",
    fn body(ctx) {
        need_lbr!(ctx);
        let stack = require_some!(record_with(ctx.cpl, balanced(), CALL_STACK), "no unhandled exception");
        check!(stack == LbrStack::EMPTY, "LBR stack empty");
    }
}

sequence! {
    /// A return without a call.
    bare_return:
        "lea rax, [rip + 21f]", "push rax",
        "20: ret",
        "21: nop",
    =>
}

case! {
    name: "return_from_an_empty_stack", cpl: [0, 3], rules: ["LSEL-14"], needs: [],
    about: "a return from an empty stack decrements TOS and changes nothing else",
    fn body(ctx) {
        need_lbr!(ctx);
        let stack = require_some!(record_with(ctx.cpl, bare_return(), CALL_STACK), "no unhandled exception");
        check_eq!(stack.tos, 31, "TOS");
        check!(LbrStack { tos: 0, ..stack } == LbrStack::EMPTY, "entries unchanged");
    }
}

sequence! {
    /// A call of the next instruction inside a function.
    call_next:
        "20: call 21f", "ud2",
        "21: call 22f",
        "22: pop rax",
        // An indirect call of the next instruction, which has no displacement of 0.
        "lea rax, [rip + 24f]",
        "23: call rax",
        "24: nop",
    => ["20b", "21b", "REL_CALL"], ["23b", "24b", "IND_CALL"],
}

case! {
    name: "call_of_the_next_instruction", cpl: [0, 3], rules: ["LSEL-15", "OP-32"], needs: [],
    about: "a relative call with displacement 0 is not pushed; an indirect call of the next instruction is",
    fn body(ctx) {
        need_lbr!(ctx);
        check_calls(ctx.cpl, call_next(), CALL_STACK);
    }
}

sequence! {
    /// A call of a function with branches of all kinds but near calls and near returns.
    others_inside:
        "20: call 21f", "ud2",
        "21: xor eax, eax",
        "jz 22f", "ud2",
        "22: jmp 23f", "ud2",
        "23: lea rax, [rip + 24f]", "jmp rax", "ud2",
        "24: int 0x82", "int3", "ud2",
        "mov ecx, 3", "25: loop 25b",
        "sub rsp, 16", "mov word ptr [rsp + 4], cs", "lea rax, [rip + 26f]", "mov [rsp], eax",
        "lcall fword ptr [rsp]",
        "jmp 27f",
        "26: retf",
        "27: mov rax, rsp", "mov ecx, ss", "push rcx", "push rax", "pushfq", "mov ecx, cs", "push rcx",
        "lea rcx, [rip + 28f]", "push rcx",
        "iretq",
        "28: nop",
    => ["20b", "21b", "REL_CALL"],
}

case! {
    name: "other_branches", cpl: [0, 3], rules: ["LSEL-16"], needs: [],
    about: "jumps, conditional and far branches, interrupts and exceptions do not change the LBR stack",
    fn body(ctx) {
        need_lbr!(ctx);
        check_calls(ctx.cpl, others_inside(), CALL_STACK);
    }
}

sequence! {
    /// 40 nested calls.
    deep:
        "mov ecx, 41",
        "20: dec ecx", "jz 29f",
        "21: call 20b",
        "22: ret",
        "29: nop",
    => ["21b", "20b", "REL_CALL"],
}

sequence! {
    /// 40 nested calls and 10 returns.
    deep_and_back:
        "mov ecx, 41", "mov edx, 11",
        "20: dec ecx", "jz 22f",
        "21: call 20b",
        "22: dec edx", "jz 29f", "ret",
        "29: nop",
    => ["21b", "20b", "REL_CALL"],
}

case! {
    name: "more_calls_than_entries", cpl: [0, 3], rules: ["LSEL-19", "LSEL-11", "LSEL-12"], needs: [],
    about: "40 calls overwrite the oldest entries; returns decrement TOS modulo 32",
    fn body(ctx) {
        need_lbr!(ctx);
        let stack = require_some!(record_with(ctx.cpl, deep(), CALL_STACK), "no unhandled exception");
        check_eq!(stack.tos, 40 % 32, "TOS after 40 calls");
        for age in 0..lbr::ENTRIES {
            check_eq!(stack.entry(age), deep().records()[0].pair(), "entry");
        }
        let stack = require_some!(record_with(ctx.cpl, deep_and_back(), CALL_STACK), "no unhandled exception");
        check_eq!(stack.tos, 30, "TOS after 10 returns");
        for age in 0..22 {
            check_eq!(stack.entry(age), deep_and_back().records()[0].pair(), "entry that was not popped");
        }
        for age in 22..32 {
            check_eq!(stack.entry(age), (0, 0), "popped entry");
        }
    }
}

sequence! {
    /// Jumps and calls, for EN_CALLSTACK alone.
    mixed:
        "20: jmp 21f", "ud2",
        "21: call 30f",
        "22: jmp 23f", "ud2",
        "23: call 31f", "ud2",
        "30: ret",
        "31: nop",
    => ["20b", "21b", "REL_JMP"], ["22b", "23b", "REL_JMP"], ["23b", "31b", "REL_CALL"],
}

case! {
    name: "undefined_combination", cpl: [0, 3], rules: ["LSEL-10", "OP-15"], needs: [],
    about: "with EN_CALLSTACK alone calls push, returns pop, and other branches are recorded (OP-15)",
    fn body(ctx) {
        need_lbr!(ctx);
        let stack = require_some!(record_with(ctx.cpl, mixed(), ENABLE), "no unhandled exception");
        lbr::check_records(&stack, mixed().all(ctx.cpl).items());
    }
}

sequence! {
    /// Calls between which IA32_PERF_GLOBAL_STATUS_SET and _RESET freeze and unfreeze the stack.
    frozen_between:
        "20: call 21f", "ud2",
        "21: mov ecx, 0x391", "xor eax, eax", "mov edx, 0x04000000", "wrmsr",
        "22: call 23f", "ud2",
        "23: mov ecx, 0x390", "wrmsr",
        "24: call 25f", "ud2",
        "25: nop",
    => ["20b", "21b", "REL_CALL"], ["24b", "25b", "REL_CALL"],
}

case! {
    name: "freeze", cpl: [0], rules: ["LSEL-18"], needs: [],
    about: "a frozen stack records exactly the calls before and after the freeze",
    fn body(ctx) {
        need_lbr!(ctx);
        if hindsight_guest::insn::cpuid(0xa, 0).eax & 0xff < 4 {
            skip!(ctx, "CPUID leaf 0AH reports no version 4, which has LBR_FRZ");
        }
        let msrs = (IA32_PERF_GLOBAL_STATUS_SET, IA32_PERF_GLOBAL_STATUS_RESET);
        check_eq!(msrs, (0x391, 0x390), "MSR numbers in the sequence");
        check_calls(0, frozen_between(), CALL_STACK);
    }
}

// The unwinder: a recursive descent over an expression. At its deepest point `probe` reads the
// chain of callers from the LBR stack, without frame pointers or unwind tables.

/// Maximum number of calls of a chain.
const DEPTH: usize = 16;

/// The calls that led to `probe`, from the innermost on.
struct CallChain {
    calls: [TakenBranch; DEPTH],
    count: usize,
}

static mut CHAIN: CallChain = CallChain {
    calls: [TakenBranch::new(0, 0, 0); DEPTH],
    count: 0,
};

/// Clears LBR and stores the calls that led to the caller.
#[inline(never)]
extern "C" fn probe() {
    msr::write(IA32_DEBUGCTL, 0);
    let tos = msr::read(MSR_LASTBRANCH_TOS);
    let stack = LbrStack::read();
    check_eq!(stack.tos, tos, "TOS");
    let chain = &raw mut CHAIN;
    // SAFETY: one CPU runs, and no handler uses the chain.
    let chain = unsafe { &mut *chain };
    chain.count = 0;
    // The WRMSR may be in a function of its own: begin with the entry after the call of this one.
    let own = probe as *const () as u64;
    let begin = (0..lbr::ENTRIES).find(|&age| stack.entry(age).1 == own);
    for age in begin.map_or(0, |age| age + 1).. {
        let (from, to) = stack.entry(age);
        if from == 0 || chain.count == DEPTH {
            break;
        }
        chain.calls[chain.count] = TakenBranch::new(from, to, 0);
        chain.count += 1;
    }
}

/// The input of the parser: digits, `+`, `*`, parentheses, and `?`, which calls [`probe`].
struct Input {
    bytes: &'static [u8],
    at: usize,
}

impl Input {
    fn next(&mut self) -> u8 {
        self.at += 1;
        self.bytes.get(self.at - 1).copied().unwrap_or(0)
    }
}

#[inline(never)]
extern "C" fn sum(input: &mut Input) -> u32 {
    let mut value = product(input);
    while input.bytes.get(input.at) == Some(&b'+') {
        input.at += 1;
        value += black_box(product(input));
    }
    black_box(value)
}

#[inline(never)]
extern "C" fn product(input: &mut Input) -> u32 {
    let mut value = atom(input);
    while input.bytes.get(input.at) == Some(&b'*') {
        input.at += 1;
        value *= black_box(atom(input));
    }
    black_box(value)
}

#[inline(never)]
extern "C" fn atom(input: &mut Input) -> u32 {
    match input.next() {
        b'(' => {
            let value = sum(input);
            input.next();
            black_box(value)
        }
        b'?' => {
            probe();
            black_box(7)
        }
        digit => black_box(u32::from(digit.wrapping_sub(b'0'))),
    }
}

/// The expression. Before the `?`, functions were called and returned at every level.
const EXPRESSION: &[u8] = b"1+2*(3+4*5+(6*2+?)*2)+1";

case! {
    name: "unwinder", cpl: [0], rules: ["LSEL-11", "LSEL-12", "LSEL-17"], needs: [],
    about: "at a deep point of a recursive program the LBR stack holds exactly the chain of callers",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::reset();
        msr::write(MSR_LBR_SELECT, CALL_STACK | CPL_NEQ_0);
        let mut input = Input { bytes: EXPRESSION, at: 0 };
        let parse: extern "C" fn(&mut Input) -> u32 = black_box(sum);
        msr::write(IA32_DEBUGCTL, LBR);
        let value = parse(&mut input);
        msr::write(IA32_DEBUGCTL, 0);
        check_eq!(value, 1 + 2 * (3 + 20 + (12 + 7) * 2) + 1, "value of the expression");
        let chain = &raw const CHAIN;
        // SAFETY: `probe` has returned, so nothing writes the chain.
        let chain = unsafe { &*chain };
        let address = |f: extern "C" fn(&mut Input) -> u32| f as *const () as u64;
        let (sum, product, atom) = (address(sum), address(product), address(atom));
        let functions = [sum, product, atom];
        let called: [u64; DEPTH] = chain.calls.map(|call| call.to);
        // From the innermost on: three times atom, product, sum.
        let expected = [atom, product, sum, atom, product, sum, atom, product, sum, 0, 0, 0, 0, 0, 0, 0];
        check_eq!(chain.count, 9, "count of callers");
        check_eq!(called, expected, "functions called");
        for pair in chain.calls[..chain.count.min(DEPTH)].windows(2) {
            // The call site of a function lies in its caller, whose entry is the next one.
            let caller = pair[1].to;
            let next = functions.iter().copied().filter(|&function| function > caller).min();
            let end = next.unwrap_or(caller + 512);
            check!((caller..end).contains(&pair[0].from), "call site in the caller");
        }
    }
}

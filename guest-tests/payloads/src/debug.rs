//! Debug exceptions: exact instruction sequences, breakpoints on them, and what was reported.

use hindsight_guest::case::Ctx;
use hindsight_guest::catch::{self, Exception};
use hindsight_guest::insn;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length, BreakpointIndex};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::trap::Log;

/// #DB, as a bit of a set of vectors.
pub const DB: u32 = 1 << 1;
/// #BP, as a bit of a set of vectors.
pub const BP: u32 = 1 << 3;

/// DR6.BS alone.
pub const BS: u64 = Dr6::BS.bits();
/// DR6.BD alone.
pub const BD: u64 = Dr6::BD.bits();

/// A sequence of instructions that [`snippet!`](crate::snippet!) made; it is given two values in RDI and RSI.
pub type Code = unsafe extern "C" fn(u64, u64) -> u64;
/// A label inside a sequence.
pub type Label = unsafe extern "C" fn();

/// Writes instructions that are called as `extern "C" fn(u64, u64) -> u64`, with labels to compare addresses
/// with. The instructions end with RET and keep what a C function keeps.
#[macro_export]
macro_rules! snippet {
    ($name:ident [$($label:ident)*] $($line:expr),+ $(,)?) => {
        core::arch::global_asm!(
            ".pushsection .text.snippet, \"ax\"",
            concat!(".global ", stringify!($name)),
            $(concat!(".global ", stringify!($label)),)*
            concat!(stringify!($name), ":"),
            $($line,)+
            ".popsection",
        );
        unsafe extern "C" {
            fn $name(first: u64, second: u64) -> u64;
            $(fn $label();)*
        }
    };
}

/// Instructions that set TF: the next one is the first to be stepped.
#[macro_export]
macro_rules! set_tf {
    () => {
        "pushfq\nor qword ptr [rsp], 0x100\npopfq"
    };
}

/// Instructions that clear TF. They are three steps; the last event's RIP is after them.
#[macro_export]
macro_rules! clear_tf {
    () => {
        "pushfq\nand qword ptr [rsp], -257\npopfq"
    };
}

/// How many steps [`clear_tf!`](crate::clear_tf!) takes.
pub const CLEAR_TF_STEPS: usize = 3;

/// The address of a label.
pub fn at(label: Label) -> u64 {
    label as *const () as u64
}

/// The address of the first instruction of a sequence.
pub fn start(code: Code) -> u64 {
    code as *const () as u64
}

/// The conditions in DR6: all but the bits that always read as one.
pub fn conditions(dr6: u64) -> u64 {
    dr6 & (Dr6::all().bits() & !Dr6::RTM.bits())
}

/// Arms breakpoint `slot` alone, and makes DR6 ready.
pub fn arm(slot: u8, address: u64, condition: Condition, length: Length) {
    insn::write_dr7(Dr7::RESET.0);
    insn::write_dr6(Dr6::RESET);
    also(slot, address, condition, length);
}

/// Arms breakpoint `slot` besides those that are armed.
pub fn also(slot: u8, address: u64, condition: Condition, length: Length) {
    insn::write_dr(slot, address);
    insn::write_dr7(Dr7(insn::read_dr7()).with_breakpoint(BreakpointIndex(slot), condition, length).0);
}

/// Arms instruction breakpoint `slot` alone.
pub fn arm_at(slot: u8, label: Label) {
    arm(slot, at(label), Condition::Execute, Length::One);
}

/// Disarms all breakpoints.
pub fn disarm() {
    insn::write_dr7(Dr7::RESET.0);
}

/// Runs a sequence at the level of this run, and returns the exception that ended it, if one did.
pub fn run(ctx: &Ctx, code: Code, first: u64, second: u64) -> Option<Exception> {
    ctx.run(|| call(code, first, second))
}

/// Calls a sequence.
pub fn call(code: Code, first: u64, second: u64) {
    // SAFETY: sequences keep the C rules.
    unsafe { code(first, second) };
}

/// Runs a sequence at the level of this run, and returns the #DBs that it met. Each is resumed, an instruction
/// breakpoint with RF set. Breakpoints are disarmed afterwards.
pub fn events(ctx: &Ctx, code: Code, first: u64, second: u64) -> &'static Log {
    let log = catch::logged(DB, || {
        run(ctx, code, first, second);
    });
    disarm();
    log
}

/// RIP and conditions of event `n`, or zeros if there were fewer.
pub fn event(log: &Log, n: usize) -> (u64, u64) {
    log.events()
        .get(n)
        .map_or((0, 0), |e| (e.rip, conditions(e.dr6)))
}

/// Whether RF is set in the image of event `n`.
pub fn rf(log: &Log, n: usize) -> bool {
    log.events().get(n).is_some_and(pushed_rf)
}

/// Whether RF is set in the image of an exception.
pub fn pushed_rf(exception: &Exception) -> bool {
    exception.rflags & Rflags::RF.bits() != 0
}

/// Checks that the log holds exactly the given events: RIP and conditions of each.
#[macro_export]
macro_rules! check_events {
    ($log:expr, [$($event:expr),* $(,)?], $what:expr $(,)?) => {{
        let log: &hindsight_guest::trap::Log = $log;
        let expected: &[(u64, u64)] = &[$($event),*];
        hindsight_guest::check_eq!(log.count(), expected.len(), concat!($what, ": how many #DBs"));
        for (n, expected) in expected.iter().enumerate() {
            hindsight_guest::check_eq!($crate::debug::event(log, n), *expected, concat!($what, ": RIP and conditions"));
        }
    }};
}

/// As [`check_events!`](crate::check_events!), for a sequence that then clears TF by
/// [`clear_tf!`](crate::clear_tf!).
#[macro_export]
macro_rules! check_steps {
    ($log:expr, [$($event:expr),* $(,)?], $what:expr $(,)?) => {{
        let log: &hindsight_guest::trap::Log = $log;
        let expected: &[(u64, u64)] = &[$($event),*];
        let count = expected.len() + $crate::debug::CLEAR_TF_STEPS;
        hindsight_guest::check_eq!(log.count(), count, concat!($what, ": how many #DBs"));
        for (n, expected) in expected.iter().enumerate() {
            hindsight_guest::check_eq!($crate::debug::event(log, n), *expected, concat!($what, ": RIP and conditions"));
        }
    }};
}

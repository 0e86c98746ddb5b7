//! Debug exceptions: exact instruction sequences, breakpoints on them, and the #DBs they raise.

use hindsight_guest::case::Ctx;
use hindsight_guest::catch;
use hindsight_guest::exception::{CaughtException, ExceptionLog};
use hindsight_guest::insn;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::regs::vector::Vector;

/// #DB as a bit of a set of vectors.
pub const DB: u32 = 1 << Vector::DB.0;
/// #BP as a bit of a set of vectors.
pub const BP: u32 = 1 << Vector::BP.0;

/// DR6.BS alone.
pub const BS: u64 = Dr6::BS.bits();
/// DR6.BD alone.
pub const BD: u64 = Dr6::BD.bits();

/// A sequence of instructions that [`snippet!`](crate::snippet!) defines; RDI and RSI are arguments.
pub type SnippetFn = unsafe extern "C" fn(u64, u64) -> u64;
/// A label inside a sequence.
pub type SnippetLabel = unsafe extern "C" fn();

/// Defines an `extern "C" fn(u64, u64) -> u64` of exact instructions, with labels.
///
/// The instructions end with RET and preserve the registers that a C function preserves.
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

/// Instructions that set TF: the next one is the first that raises a single-step #DB.
#[macro_export]
macro_rules! set_tf {
    () => {
        "pushfq\nor qword ptr [rsp], 0x100\npopfq"
    };
}

/// Instructions that clear TF; they raise three single-step #DBs, the last one behind them.
#[macro_export]
macro_rules! clear_tf {
    () => {
        "pushfq\nand qword ptr [rsp], -257\npopfq"
    };
}

/// Single-step #DBs of [`clear_tf!`](crate::clear_tf!).
pub const CLEAR_TF_STEPS: usize = 3;

/// The address of a label.
pub fn at(label: SnippetLabel) -> u64 {
    label as *const () as u64
}

/// The address of the first instruction of a sequence.
pub fn start(code: SnippetFn) -> u64 {
    code as *const () as u64
}

/// The conditions in DR6: all bits except those that always read as one.
pub fn conditions(dr6: u64) -> u64 {
    dr6 & (Dr6::all().bits() & !Dr6::RTM.bits())
}

/// Arms breakpoint `index` and no other, and resets DR6.
pub fn arm(index: u8, address: u64, condition: Condition, length: Length) {
    insn::write_dr7(Dr7::RESET.0);
    insn::write_dr6(Dr6::RESET);
    arm_also(index, address, condition, length);
}

/// Arms breakpoint `index`; those that are armed stay armed.
pub fn arm_also(index: u8, address: u64, condition: Condition, length: Length) {
    insn::write_dr(index, address);
    insn::write_dr7(
        Dr7(insn::read_dr7())
            .with_breakpoint(BreakpointIndex(index), condition, length)
            .0,
    );
}

/// Arms an instruction breakpoint `index` and no other.
pub fn arm_at(index: u8, label: SnippetLabel) {
    arm(index, at(label), Condition::Execute, Length::One);
}

/// Disarms all breakpoints.
pub fn disarm() {
    insn::write_dr7(Dr7::RESET.0);
}

/// Runs a sequence at the level of this run and returns the exception that ended it, if one did.
pub fn run(ctx: &Ctx, code: SnippetFn, first: u64, second: u64) -> Option<CaughtException> {
    ctx.run(|| call(code, first, second))
}

/// Calls a sequence.
pub fn call(code: SnippetFn, first: u64, second: u64) {
    // SAFETY: `snippet!` defines only sequences that follow the C calling convention.
    unsafe { code(first, second) };
}

/// Runs a sequence at the level of this run and returns its #DBs; then disarms all breakpoints.
///
/// Every #DB is resumed, after an instruction breakpoint with RF set.
pub fn events(ctx: &Ctx, code: SnippetFn, first: u64, second: u64) -> &'static ExceptionLog {
    let log = catch::logged(DB, || {
        run(ctx, code, first, second);
    });
    disarm();
    log
}

/// RIP and conditions of event `n`, or zeros if there are fewer events.
pub fn event(log: &ExceptionLog, n: usize) -> (u64, u64) {
    log.events()
        .get(n)
        .map_or((0, 0), |e| (e.rip, conditions(e.dr6)))
}

/// Whether RF is set in the RFLAGS that event `n` saved.
pub fn event_saved_rf(log: &ExceptionLog, n: usize) -> bool {
    log.events().get(n).is_some_and(saved_rf)
}

/// Whether RF is set in the RFLAGS that an exception saved.
pub fn saved_rf(exception: &CaughtException) -> bool {
    exception.rflags & Rflags::RF.bits() != 0
}

/// Checks that the log holds exactly these events, each given by RIP and conditions.
#[macro_export]
macro_rules! check_events {
    ($log:expr, [$($event:expr),* $(,)?], $message:expr $(,)?) => {{
        let log: &hindsight_guest::exception::ExceptionLog = $log;
        let expected: &[(u64, u64)] = &[$($event),*];
        hindsight_guest::check_eq!(log.count(), expected.len(), concat!($message, ": count of #DBs"));
        for (n, expected) in expected.iter().enumerate() {
            hindsight_guest::check_eq!($crate::debug::event(log, n), *expected, concat!($message, ": RIP and conditions"));
        }
    }};
}

/// Like [`check_events!`](crate::check_events!), for a sequence that ends with
/// [`clear_tf!`](crate::clear_tf!).
#[macro_export]
macro_rules! check_steps {
    ($log:expr, [$($event:expr),* $(,)?], $message:expr $(,)?) => {{
        let log: &hindsight_guest::exception::ExceptionLog = $log;
        let expected: &[(u64, u64)] = &[$($event),*];
        let count = expected.len() + $crate::debug::CLEAR_TF_STEPS;
        hindsight_guest::check_eq!(log.count(), count, concat!($message, ": count of #DBs"));
        for (n, expected) in expected.iter().enumerate() {
            hindsight_guest::check_eq!($crate::debug::event(log, n), *expected, concat!($message, ": RIP and conditions"));
        }
    }};
}

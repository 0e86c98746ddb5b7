//! The common handler of all exceptions and interrupts.
//!
//! The first of these that applies handles an event: a handler set for the vector; the return of
//! [`crate::catch::user`]; a fixup of the instruction; the log, if the vector is logged; the
//! innermost catch. If none applies, the payload ends with a `fail` line.

use core::sync::atomic::{AtomicUsize, Ordering};

use hindsight_regs::dr::{BreakpointIndex, Condition, Dr6, Dr7};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

use crate::exception::{CaughtException, TrapFrame};
use crate::show::{TextSink, decimal, hex};
use crate::{apic, catch, cpu, exit, insn, report, serial};

/// A handler of one vector. It sends the EOI of interrupts itself (`apic::eoi`, `pic::eoi`).
pub type TrapHandler = fn(&mut TrapFrame);

static HANDLERS: [AtomicUsize; 256] = [const { AtomicUsize::new(0) }; 256];
static HANDLERS_SET: AtomicUsize = AtomicUsize::new(0);

/// Makes `handler` handle every event of `vector`, on every CPU.
pub fn set_handler(vector: u8, handler: TrapHandler) {
    HANDLERS[usize::from(vector)].store(handler as usize, Ordering::Release);
    HANDLERS_SET.store(1, Ordering::Release);
}

/// Removes the handler of `vector`.
pub fn clear_handler(vector: u8) {
    HANDLERS[usize::from(vector)].store(0, Ordering::Release);
}

/// Removes all handlers, after a case.
pub(crate) fn clear_handlers() {
    if HANDLERS_SET.swap(0, Ordering::AcqRel) != 0 {
        for handler in &HANDLERS {
            handler.store(0, Ordering::Release);
        }
    }
}

fn handler_of(vector: u64) -> Option<TrapHandler> {
    let address = HANDLERS
        .get(usize::try_from(vector).ok()?)?
        .load(Ordering::Acquire);
    // SAFETY: only `set_handler` stores a value other than 0, and it stores a function of this
    // type.
    (address != 0).then(|| unsafe { core::mem::transmute::<usize, TrapHandler>(address) })
}

unsafe extern "C" {
    static hindsight_fixups_start: [u64; 2];
    static hindsight_fixups_end: [u64; 2];
}

fn fixup_of(rip: u64) -> Option<u64> {
    let mut pair = &raw const hindsight_fixups_start;
    while pair < &raw const hindsight_fixups_end {
        // SAFETY: the linker script puts only pairs of addresses between the two symbols.
        let [at, target] = unsafe { *pair };
        if at == rip {
            return Some(target);
        }
        // SAFETY: at most one past the last pair.
        pair = unsafe { pair.add(1) };
    }
    None
}

#[unsafe(no_mangle)]
extern "C" fn hindsight_trap(frame: &mut TrapFrame) {
    if let Some(handler) = handler_of(frame.vector) {
        handler(frame);
        return;
    }
    if frame.vector == u64::from(apic::WAKE_VECTOR) {
        apic::eoi();
        return;
    }
    if frame.vector < 32 && (catch::finish_user(frame) || take_exception(frame)) {
        return;
    }
    unexpected(frame);
}

fn take_exception(frame: &mut TrapFrame) -> bool {
    let exception = CaughtException::of(frame);
    if let Some(target) = fixup_of(frame.rip) {
        cpu::current().exception = exception;
        frame.rip = target;
        return true;
    }
    let cpu = cpu::current();
    if cpu.logged & (1 << frame.vector) != 0 {
        cpu.log.push(exception);
        resume(frame, &exception);
        return true;
    }
    catch::land(frame, exception)
}

/// Resumes a logged exception. For #DB it clears DR6, and sets RF after an instruction breakpoint.
fn resume(frame: &mut TrapFrame, exception: &CaughtException) {
    if frame.vector != Vector::DB.0.into() {
        return;
    }
    let dr7 = Dr7(insn::read_dr7());
    let hit = |n: u8| exception.dr6 & (1 << n) != 0;
    let execute = |n| {
        dr7.is_enabled(BreakpointIndex(n))
            && dr7.condition(BreakpointIndex(n)) == Condition::Execute
    };
    if (0..4).any(|n| hit(n) && execute(n)) {
        frame.rflags |= Rflags::RF.bits();
    }
    insn::write_dr6(Dr6::RESET);
}

fn unexpected(frame: &TrapFrame) -> ! {
    serial::locked(|| {
        let out = &mut serial::Com1;
        report::start_failure_line(out);
        out.put("- unexpected event vector=");
        decimal(frame.vector, out);
        for (name, value) in [
            (" error=", frame.error),
            (" rip=", frame.rip),
            (" cs=", frame.cs),
            (" rflags=", frame.rflags),
            (" rsp=", frame.rsp),
            (" cr2=", insn::read_cr2()),
        ] {
            out.put(name);
            hex(value, out);
        }
        out.put("\n");
    });
    exit::exit(1);
}

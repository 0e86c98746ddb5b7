//! Where every exception and interrupt arrives.
//!
//! In order: a handler set for the vector; the return of [`crate::catch::user`]; an instruction with
//! a fixup; a vector that is being logged; the innermost catch. What none of them takes ends the
//! payload with a message.

use core::sync::atomic::{AtomicUsize, Ordering};

use hindsight_regs::dr::{Condition, Dr6, Dr7, BreakpointIndex};
use hindsight_regs::rflags::Rflags;

use crate::catch::{self, Exception};
use crate::show::{Sink, decimal, hex};
use crate::{apic, cpu, exit, insn, run, serial};

/// The registers at an event, as the entry stub and the processor pushed them. A handler may change
/// them; the return loads them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the fields are registers")]
pub struct Frame {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub rdx: u64,
    pub rcx: u64,
    pub rax: u64,
    pub vector: u64,
    pub error: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

/// A handler of one vector. It ends interrupts itself (`apic::eoi`, `pic::eoi`).
pub type Handler = fn(&mut Frame);

static HANDLERS: [AtomicUsize; 256] = [const { AtomicUsize::new(0) }; 256];
static HANDLERS_SET: AtomicUsize = AtomicUsize::new(0);

/// Makes `handler` take every event of `vector`, on every processor.
pub fn set_handler(vector: u8, handler: Handler) {
    HANDLERS[usize::from(vector)].store(handler as usize, Ordering::Release);
    HANDLERS_SET.store(1, Ordering::Release);
}

/// Removes the handler of `vector`.
pub fn clear_handler(vector: u8) {
    HANDLERS[usize::from(vector)].store(0, Ordering::Release);
}

/// Removes all handlers. The runner does so after each case.
pub(crate) fn clear_handlers() {
    if HANDLERS_SET.swap(0, Ordering::AcqRel) != 0 {
        for handler in &HANDLERS {
            handler.store(0, Ordering::Release);
        }
    }
}

fn handler_of(vector: u64) -> Option<Handler> {
    let address = HANDLERS
        .get(usize::try_from(vector).ok()?)?
        .load(Ordering::Acquire);
    // SAFETY: only `set_handler` stores here, and it stores a function of this type.
    (address != 0).then(|| unsafe { core::mem::transmute::<usize, Handler>(address) })
}

/// The most events a [`Log`] keeps; later ones are counted.
pub const LOG_EVENTS: usize = 64;

/// Events that were resumed, in order.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    events: [Exception; LOG_EVENTS],
    count: usize,
}

impl Log {
    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    /// How many events there were, also those beyond [`LOG_EVENTS`].
    pub fn count(&self) -> usize {
        self.count
    }

    /// The events that were kept.
    pub fn events(&self) -> &[Exception] {
        &self.events[..self.count.min(LOG_EVENTS)]
    }

    fn push(&mut self, exception: Exception) {
        if let Some(place) = self.events.get_mut(self.count) {
            *place = exception;
        }
        self.count += 1;
    }
}

unsafe extern "C" {
    static hindsight_fixups_start: [u64; 2];
    static hindsight_fixups_end: [u64; 2];
}

fn fixup_of(rip: u64) -> Option<u64> {
    let mut pair = &raw const hindsight_fixups_start;
    while pair < &raw const hindsight_fixups_end {
        // SAFETY: between the two symbols the linker script placed pairs of addresses.
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
extern "C" fn hindsight_trap(frame: &mut Frame) {
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

fn take_exception(frame: &mut Frame) -> bool {
    let exception = Exception::of(frame);
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

/// Goes on after a logged event: a #DB of an instruction breakpoint sets RF, and DR6 is made ready
/// for the next.
fn resume(frame: &mut Frame, exception: &Exception) {
    if frame.vector != 1 {
        return;
    }
    let dr7 = Dr7(insn::read_dr7());
    let hit = |n: u8| exception.dr6 & (1 << n) != 0;
    let execute =
        |n| dr7.is_enabled(BreakpointIndex(n)) && dr7.condition(BreakpointIndex(n)) == Condition::Execute;
    if (0..4).any(|n| hit(n) && execute(n)) {
        frame.rflags |= Rflags::RF.bits();
    }
    insn::write_dr6(Dr6::RESET);
}

fn unexpected(frame: &Frame) -> ! {
    serial::locked(|| {
        let out = &mut serial::Serial;
        run::start_failure_line(out);
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

//! Capture of exceptions, and code at CPL 3.

use core::arch::global_asm;

use hindsight_regs::rflags::Rflags;

use crate::boot::{KERNEL_CODE, KERNEL_DATA, USER_CODE, USER_DATA};
use crate::show::{Show, Sink, decimal, hex};
use crate::trap::{Frame, Log};
use crate::{cpu, insn};

/// An exception, with the state the processor showed for it.
#[derive(Clone, Copy, Debug)]
pub struct Exception {
    /// Vector, 0 to 31.
    pub vector: u8,
    /// Error code; 0 for vectors without one.
    pub error: u64,
    /// Saved RIP.
    pub rip: u64,
    /// Saved CS.
    pub cs: u64,
    /// Saved RFLAGS.
    pub rflags: u64,
    /// CR2; meaningful for #PF only.
    pub cr2: u64,
    /// DR6; read for #DB only, else 0.
    pub dr6: u64,
    /// All saved registers.
    pub frame: Frame,
}

impl Exception {
    pub(crate) fn of(frame: &Frame) -> Self {
        Self {
            vector: (frame.vector & 0xff) as u8,
            error: frame.error,
            rip: frame.rip,
            cs: frame.cs,
            rflags: frame.rflags,
            cr2: if frame.vector == 14 {
                insn::read_cr2()
            } else {
                0
            },
            dr6: if frame.vector == 1 {
                insn::read_dr6()
            } else {
                0
            },
            frame: *frame,
        }
    }

    /// Privilege level of the interrupted code.
    pub fn cpl(&self) -> u8 {
        (self.cs & 3) as u8
    }

    /// Vector and error code, the two that most checks compare.
    pub fn code(&self) -> (u8, u64) {
        (self.vector, self.error)
    }
}

impl Show for Exception {
    fn show(&self, out: &mut dyn Sink) {
        out.put("vector:");
        decimal(u64::from(self.vector), out);
        for (name, value) in [(",error:", self.error), (",rip:", self.rip)] {
            out.put(name);
            hex(value, out);
        }
        if self.vector == 1 {
            out.put(",dr6:");
            hex(self.dr6, out);
        }
        if self.vector == 14 {
            out.put(",cr2:");
            hex(self.cr2, out);
        }
    }
}

/// A place to return to when an exception is caught.
#[derive(Debug)]
pub(crate) struct Slot {
    /// The stack of `hindsight_enter`, set there.
    rsp: u64,
    /// IF and the system flags to return with.
    rflags: u64,
    outer: *mut Slot,
}

global_asm!(
    ".pushsection .text.hindsight.catch, \"ax\"",
    // extern "C" fn(call, data, &mut slot.rsp) -> 0, or 1 after an exception
    ".global hindsight_enter_kernel, hindsight_enter_user",
    "hindsight_enter_kernel:",
    "push rbp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "sub rsp, 8",
    "mov [rdx], rsp",
    "mov rax, rdi",
    "mov rdi, rsi",
    "call rax",
    "xor eax, eax",
    "jmp hindsight_land",
    // The same with two more arguments: stack and flags of CPL 3.
    "hindsight_enter_user:",
    "push rbp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "sub rsp, 8",
    "mov [rdx], rsp",
    "lea rax, [rip + hindsight_user_start]",
    "push {user_data}",
    "push rcx",
    "push r8",
    "push {user_code}",
    "push rax",
    "mov rax, rdi",
    "mov rdi, rsi",
    "iretq",
    "hindsight_user_start:",
    "call rax",
    // #UD from exactly here is the return: software interrupts and SYSCALL do not work at CPL 3 on
    // every host.
    ".global hindsight_user_return",
    "hindsight_user_return:",
    "ud2",
    // The trap handler returns here, with RAX set and RSP from the slot.
    ".global hindsight_land",
    "hindsight_land:",
    "add rsp, 8",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "ret",
    ".popsection",
    user_data = const USER_DATA,
    user_code = const USER_CODE,
);

type Call = extern "C" fn(*mut u8);

unsafe extern "C" {
    fn hindsight_enter_kernel(call: Call, data: *mut u8, rsp: *mut u64) -> u64;
    fn hindsight_enter_user(
        call: Call,
        data: *mut u8,
        rsp: *mut u64,
        user_rsp: u64,
        rflags: u64,
    ) -> u64;
    fn hindsight_user_return();
    fn hindsight_land();
}

extern "C" fn call_once<F: FnOnce()>(data: *mut u8) {
    // SAFETY: `data` points to the caller's Option<F>, and nothing else uses it meanwhile.
    if let Some(f) = unsafe { (*data.cast::<Option<F>>()).take() } {
        f();
    }
}

fn with_slot(enter: impl FnOnce(*mut u64) -> u64) -> Option<Exception> {
    let cpu = cpu::current();
    let kept = Rflags::IF | Rflags::FIXED;
    let mut slot = Slot {
        rsp: 0,
        rflags: insn::rflags() & kept.bits(),
        outer: cpu.slot,
    };
    let slot = &raw mut slot;
    cpu.slot = slot;
    // SAFETY: the slot lives until this function returns, and is taken off the list before that.
    let caught = enter(unsafe { &raw mut (*slot).rsp });
    let cpu = cpu::current();
    // SAFETY: as above.
    cpu.slot = unsafe { (*slot).outer };
    (caught != 0).then_some(cpu.exception)
}

/// Runs `f` and returns the exception that ended it, if one did. `f` is then abandoned: what it
/// holds is not dropped. Only at CPL 0.
pub fn catch<F: FnOnce()>(f: F) -> Option<Exception> {
    let mut f = Some(f);
    let data = (&raw mut f).cast::<u8>();
    // SAFETY: `call_once` is given the closure it is made for; the assembly keeps the C rules.
    with_slot(|rsp| unsafe { hindsight_enter_kernel(call_once::<F>, data, rsp) })
}

/// Runs `f` at CPL 3, with interrupts as they are, and returns the exception that ended it, if one
/// did. All memory is open to CPL 3 unless the payload closed it; `f` must not use ports or
/// privileged registers, except to see them refused.
pub fn user<F: FnOnce()>(f: F) -> Option<Exception> {
    let flags = Rflags::FIXED.bits() | insn::rflags() & Rflags::IF.bits();
    user_with_flags(flags, f)
}

/// As [`user`], entering with the given RFLAGS.
pub fn user_with_flags<F: FnOnce()>(rflags: u64, f: F) -> Option<Exception> {
    let mut f = Some(f);
    let data = (&raw mut f).cast::<u8>();
    let stack = cpu::user_stack_top();
    // SAFETY: as for `catch`; the stack is the processor's own and not otherwise in use.
    with_slot(|rsp| unsafe { hindsight_enter_user(call_once::<F>, data, rsp, stack, rflags) })
}

/// Whether `frame` is the end of a [`user`] call; if so it is made to return from it.
pub(crate) fn finish_user(frame: &mut Frame) -> bool {
    let ended = frame.vector == 6
        && frame.cs & 3 == 3
        && frame.rip == hindsight_user_return as *const () as u64;
    ended && land_with(frame, 0)
}

/// Makes `frame` return to the innermost catch; false if there is none.
pub(crate) fn land(frame: &mut Frame, exception: Exception) -> bool {
    if !land_with(frame, 1) {
        return false;
    }
    cpu::current().exception = exception;
    true
}

fn land_with(frame: &mut Frame, result: u64) -> bool {
    // SAFETY: a slot that is on the list is alive.
    let Some(slot) = (unsafe { cpu::current().slot.as_ref() }) else {
        return false;
    };
    frame.rax = result;
    frame.rip = hindsight_land as *const () as u64;
    frame.cs = u64::from(KERNEL_CODE);
    frame.ss = u64::from(KERNEL_DATA);
    frame.rsp = slot.rsp;
    frame.rflags = slot.rflags;
    true
}

/// Runs `f` while exceptions of the vectors in `vectors` (one bit each) are logged and resumed, and
/// returns the log. Meant for traps, and for instruction breakpoints, which are resumed with RF set.
pub fn logged(vectors: u32, f: impl FnOnce()) -> &'static Log {
    let cpu = cpu::current();
    cpu.log.clear();
    let before = core::mem::replace(&mut cpu.logged, vectors);
    f();
    let cpu = cpu::current();
    cpu.logged = before;
    &cpu.log
}

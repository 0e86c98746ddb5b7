//! Capture of exceptions, and code at CPL 3.

use core::arch::global_asm;

use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

use crate::cpu::{self, CatchFrame};
use crate::exception::{CaughtException, ExceptionLog, TrapFrame};
use crate::gdt::{KERNEL_CODE, KERNEL_DATA, USER_CODE, USER_DATA};
use crate::insn;

global_asm!(
    ".pushsection .text.hindsight.catch, \"ax\"",
    // extern "C" fn(call, data, &mut frame.rsp) -> 0, or 1 after an exception
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
    // #UD at this address is the return to CPL 0, because software interrupts and SYSCALL do not work
    // at CPL 3 on every host.
    ".global hindsight_user_return",
    "hindsight_user_return:",
    "ud2",
    // The trap handler returns here, with RAX set and RSP from the catch frame.
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
    // SAFETY: `catch` and `user_with_flags` pass a pointer to their Option<F>, which they do not
    // use during the call.
    if let Some(f) = unsafe { (*data.cast::<Option<F>>()).take() } {
        f();
    }
}

fn with_catch_frame(enter: impl FnOnce(*mut u64) -> u64) -> Option<CaughtException> {
    let cpu = cpu::current();
    let preserved = Rflags::IF | Rflags::FIXED;
    let mut frame = CatchFrame {
        rsp: 0,
        rflags: insn::rflags() & preserved.bits(),
        outer: cpu.catch_frame,
    };
    let frame = &raw mut frame;
    cpu.catch_frame = frame;
    // SAFETY: the frame lives until this function returns, and leaves the list before that.
    let caught = enter(unsafe { &raw mut (*frame).rsp });
    let cpu = cpu::current();
    // SAFETY: as above.
    cpu.catch_frame = unsafe { (*frame).outer };
    (caught != 0).then_some(cpu.exception)
}

/// Runs `f` at CPL 0 and returns the exception that ended it, if one did.
///
/// An exception abandons `f`: what it holds is not dropped. The caller is at CPL 0.
pub fn catch<F: FnOnce()>(f: F) -> Option<CaughtException> {
    let mut f = Some(f);
    let data = (&raw mut f).cast::<u8>();
    // SAFETY: `data` points to the closure type that `call_once` expects, and the assembly
    // preserves the registers that the C calling convention names.
    with_catch_frame(|rsp| unsafe { hindsight_enter_kernel(call_once::<F>, data, rsp) })
}

/// Runs `f` at CPL 3 and returns the exception that ended it, if one did.
///
/// IF stays as it is. CPL 3 may access all memory, unless the payload changed the page tables. Port
/// accesses and privileged instructions raise #GP there.
pub fn user<F: FnOnce()>(f: F) -> Option<CaughtException> {
    let flags = Rflags::FIXED.bits() | insn::rflags() & Rflags::IF.bits();
    user_with_flags(flags, f)
}

/// Like [`user`], with these RFLAGS at the start of `f`.
pub fn user_with_flags<F: FnOnce()>(rflags: u64, f: F) -> Option<CaughtException> {
    let mut f = Some(f);
    let data = (&raw mut f).cast::<u8>();
    let stack = cpu::user_stack_top();
    // SAFETY: as for `catch`; the stack is this CPU's own, and nothing else uses it at CPL 0.
    with_catch_frame(|rsp| unsafe {
        hindsight_enter_user(call_once::<F>, data, rsp, stack, rflags)
    })
}

/// If `frame` is the end of a [`user`] call, makes it return from that call; else returns false.
pub(crate) fn finish_user(frame: &mut TrapFrame) -> bool {
    let ended = frame.vector == Vector::UD.0.into()
        && frame.cs & 3 == 3
        && frame.rip == hindsight_user_return as *const () as u64;
    ended && land_with(frame, 0)
}

/// Makes `frame` return to the innermost catch; returns false if there is none.
pub(crate) fn land(frame: &mut TrapFrame, exception: CaughtException) -> bool {
    if !land_with(frame, 1) {
        return false;
    }
    cpu::current().exception = exception;
    true
}

fn land_with(frame: &mut TrapFrame, result: u64) -> bool {
    // SAFETY: `with_catch_frame` keeps a frame alive as long as it is on the list.
    let Some(catch) = (unsafe { cpu::current().catch_frame.as_ref() }) else {
        return false;
    };
    frame.rax = result;
    frame.rip = hindsight_land as *const () as u64;
    frame.cs = u64::from(KERNEL_CODE);
    frame.ss = u64::from(KERNEL_DATA);
    frame.rsp = catch.rsp;
    frame.rflags = catch.rflags;
    true
}

/// Runs `f` while exceptions of `vectors` (one bit each) are logged and resumed; returns the log.
///
/// It is for traps, and for instruction breakpoints, which are resumed with RF set.
pub fn logged(vectors: u32, f: impl FnOnce()) -> &'static ExceptionLog {
    let cpu = cpu::current();
    cpu.log.clear();
    let before = core::mem::replace(&mut cpu.logged, vectors);
    f();
    let cpu = cpu::current();
    cpu.logged = before;
    &cpu.log
}

//! SYSCALL and SYSENTER from CPL 3, with an entry that returns at once.

use core::arch::global_asm;

use hindsight_guest::gdt::{KERNEL_CODE, USER_CODE32};
use hindsight_guest::msr;
use hindsight_guest::regs::cr::Efer;
use hindsight_guest::regs::msr::{IA32_EFER, IA32_FMASK, IA32_LSTAR, IA32_STAR};

global_asm!(
    ".pushsection .text.syscall, \"ax\"",
    ".global syscall_entry, syscall_return, syscall_second",
    // It copies R11 to R9 as SYSCALL left it, and adds the flags in R10 to R11 for SYSRET.
    "syscall_entry:",
    "mov r9, r11",
    "syscall_second:",
    "or r11, r10",
    "syscall_return:",
    "sysretq",
    ".popsection",
);

unsafe extern "C" {
    fn syscall_entry();
    fn syscall_second();
    fn syscall_return();
}

/// The address at which SYSCALL enters.
pub fn entry() -> u64 {
    syscall_entry as *const () as u64
}

/// The address of the second instruction after SYSCALL.
pub fn second() -> u64 {
    syscall_second as *const () as u64
}

/// The address of the SYSRET.
pub fn sysret() -> u64 {
    syscall_return as *const () as u64
}

/// Runs `f` with SYSCALL set up: it enters at [`entry`] with the flags of `mask` cleared.
///
/// SYSRET then returns with the flags of R10 added, and R9 holds the R11 that SYSCALL wrote.
pub fn with(mask: u64, f: impl FnOnce()) {
    let old = [IA32_EFER, IA32_STAR, IA32_LSTAR, IA32_FMASK].map(|index| (index, msr::read(index)));
    msr::write(IA32_EFER, msr::read(IA32_EFER) | Efer::SCE.bits());
    msr::write(
        IA32_STAR,
        u64::from(KERNEL_CODE) << 32 | u64::from(USER_CODE32 | 3) << 48,
    );
    msr::write(IA32_LSTAR, entry());
    msr::write(IA32_FMASK, mask);
    f();
    for (index, value) in old {
        msr::write(index, value);
    }
}

//! SYSCALL and SYSENTER from CPL 3, with an entry that returns at once.

use core::arch::global_asm;

use hindsight_guest::gdt::{KERNEL_CODE, USER_CODE32};
use hindsight_guest::msr;
use hindsight_guest::regs::msr::IA32_EFER;

/// IA32_STAR.
pub const IA32_STAR: u32 = 0xc000_0081;
/// IA32_LSTAR.
pub const IA32_LSTAR: u32 = 0xc000_0082;
/// IA32_FMASK.
pub const IA32_FMASK: u32 = 0xc000_0084;
/// EFER.SCE.
const SCE: u64 = 1;

global_asm!(
    ".pushsection .text.syscall, \"ax\"",
    ".global syscall_entry, syscall_return, syscall_second",
    // It keeps R11 as SYSCALL left it in R9, and adds the flags that R10 holds for SYSRET.
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

/// Where SYSCALL enters.
pub fn entry() -> u64 {
    syscall_entry as *const () as u64
}

/// The second instruction there.
pub fn second() -> u64 {
    syscall_second as *const () as u64
}

/// The address of the SYSRET.
pub fn sysret() -> u64 {
    syscall_return as *const () as u64
}

/// Runs `f` with SYSCALL set up: it enters at [`entry`] with the flags of `mask` cleared. SYSRET then goes back
/// with the flags of R10 added, and the R11 that SYSCALL left in R9.
pub fn with(mask: u64, f: impl FnOnce()) {
    let old = [IA32_EFER, IA32_STAR, IA32_LSTAR, IA32_FMASK].map(|index| (index, msr::read(index)));
    msr::write(IA32_EFER, msr::read(IA32_EFER) | SCE);
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

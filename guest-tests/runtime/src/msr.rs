//! Model-specific registers.

use core::arch::asm;

use crate::cpu;

/// Vector and error code of a refused access.
pub type Fault = (u8, u64);

/// #GP(0), what every refused access raises.
pub const GP: Fault = (13, 0);

/// RDMSR. An exception ends the case.
pub fn read(index: u32) -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reading an MSR touches no memory.
    unsafe {
        asm!("rdmsr", in("ecx") index, out("rax") low, out("rdx") high, options(nostack, preserves_flags));
    }
    high << 32 | low
}

/// WRMSR. An exception ends the case.
pub fn write(index: u32, value: u64) {
    // SAFETY: the payload owns the machine; what the MSR does is the caller's business.
    unsafe {
        asm!("wrmsr", in("ecx") index, in("rax") value, in("rdx") value >> 32, options(nostack, preserves_flags));
    }
}

/// RDMSR that tells of an exception. At CPL 3 use [`crate::catch::user`] instead.
#[inline(never)]
pub fn read_safe(index: u32) -> Result<u64, Fault> {
    let (low, high, fault): (u64, u64, u64);
    // SAFETY: as for `read`; the fixup sends a fault to label 3, with no register changed.
    unsafe {
        asm!(
            "xor r8d, r8d",
            "2: rdmsr",
            "jmp 4f",
            "3: mov r8d, 1",
            "4:",
            ".pushsection .hindsight.fixups, \"a\"",
            ".quad 2b, 3b",
            ".popsection",
            in("ecx") index, out("rax") low, out("rdx") high, out("r8") fault,
            options(nostack),
        );
    }
    if fault == 0 {
        Ok(high << 32 | low)
    } else {
        Err(cpu::current().exception.code())
    }
}

/// WRMSR that tells of an exception. At CPL 3 use [`crate::catch::user`] instead.
#[inline(never)]
pub fn write_safe(index: u32, value: u64) -> Result<(), Fault> {
    let fault: u64;
    // SAFETY: as for `write`; the fixup sends a fault to label 3, with no register changed.
    unsafe {
        asm!(
            "xor r8d, r8d",
            "2: wrmsr",
            "jmp 4f",
            "3: mov r8d, 1",
            "4:",
            ".pushsection .hindsight.fixups, \"a\"",
            ".quad 2b, 3b",
            ".popsection",
            in("ecx") index, in("rax") value, in("rdx") value >> 32, out("r8") fault,
            options(nostack),
        );
    }
    if fault == 0 {
        Ok(())
    } else {
        Err(cpu::current().exception.code())
    }
}

//! Model-specific registers.

use core::arch::asm;

use hindsight_regs::vector::Vector;

use crate::cpu;

pub use crate::insn::{rdmsr as read, wrmsr as write};

/// Vector and error code of the exception that an access raised.
pub type MsrFault = (u8, u64);

/// #GP(0), which every access raises that is not allowed.
pub const GP: MsrFault = (Vector::GP.0, 0);

/// RDMSR that returns an exception as an error. Only at CPL 0; at CPL 3 use [`crate::catch::user`].
#[inline(never)]
pub fn read_safe(index: u32) -> Result<u64, MsrFault> {
    let (low, high, fault): (u64, u64, u64);
    // SAFETY: reading an MSR touches no memory. After a fault, the fixup continues at label 3 with
    // all registers unchanged.
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

/// WRMSR that returns an exception as an error. Only at CPL 0; at CPL 3 use [`crate::catch::user`].
#[inline(never)]
pub fn write_safe(index: u32, value: u64) -> Result<(), MsrFault> {
    let fault: u64;
    // SAFETY: the payload owns the machine. After a fault, the fixup continues at label 3 with all
    // registers unchanged.
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

//! Input and output on ports.

use core::arch::asm;

/// Reads one byte.
pub fn inb(port: u16) -> u8 {
    let value;
    // SAFETY: the instruction touches no memory.
    unsafe {
        asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags))
    };
    value
}

/// Reads two bytes.
pub fn inw(port: u16) -> u16 {
    let value;
    // SAFETY: the instruction touches no memory.
    unsafe {
        asm!("in ax, dx", in("dx") port, out("ax") value, options(nomem, nostack, preserves_flags))
    };
    value
}

/// Reads four bytes.
pub fn inl(port: u16) -> u32 {
    let value;
    // SAFETY: the instruction touches no memory.
    unsafe {
        asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack, preserves_flags))
    };
    value
}

/// Writes one byte.
pub fn outb(port: u16, value: u8) {
    // SAFETY: the instruction touches no memory. A device may, if the caller programmed it so.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nostack, preserves_flags)) };
}

/// Writes two bytes.
pub fn outw(port: u16, value: u16) {
    // SAFETY: the instruction touches no memory. A device may, if the caller programmed it so.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nostack, preserves_flags)) };
}

/// Writes four bytes.
pub fn outl(port: u16, value: u32) {
    // SAFETY: the instruction touches no memory. A device may, if the caller programmed it so.
    unsafe {
        asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack, preserves_flags))
    };
}

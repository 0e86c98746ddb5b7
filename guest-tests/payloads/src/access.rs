//! Single memory accesses to addresses that may fault.

use core::arch::asm;

/// Loads one byte.
pub fn load(address: u64) -> u8 {
    let value;
    // SAFETY: a load changes no memory. If it faults, the caller catches the exception.
    unsafe { asm!("mov {}, [{}]", out(reg_byte) value, in(reg) address, options(nostack)) };
    value
}

/// Stores one byte.
pub fn store(address: u64, value: u8) {
    // SAFETY: the caller names memory that nothing else uses, or an address that faults.
    unsafe { asm!("mov [{}], {}", in(reg) address, in(reg_byte) value, options(nostack)) };
}

/// Loads one byte through the stack segment.
pub fn load_stack(address: u64) -> u8 {
    let value;
    // SAFETY: as for `load`.
    unsafe { asm!("mov {}, ss:[{}]", out(reg_byte) value, in(reg) address, options(nostack)) };
    value
}

/// Calls `address`, which is a C function or faults.
pub fn call(address: u64) {
    // SAFETY: the caller names a C function, or an address that faults.
    unsafe { asm!("call {}", in(reg) address, clobber_abi("C")) };
}

/// A page of memory that a case may use.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct ScratchPage(core::cell::UnsafeCell<[u8; 4096]>);

// SAFETY: payloads access it only through its address, by volatile accesses or assembly.
unsafe impl Sync for ScratchPage {}

impl ScratchPage {
    /// A page of zeros.
    pub const fn new() -> Self {
        Self(core::cell::UnsafeCell::new([0; 4096]))
    }

    /// The address of the page.
    pub fn address(&self) -> u64 {
        self.0.get() as u64
    }
}

impl Default for ScratchPage {
    fn default() -> Self {
        Self::new()
    }
}

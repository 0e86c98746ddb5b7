//! The I/O APIC at its usual address; it has 24 pins.

const SELECT: *mut u32 = 0xfec0_0000 as *mut u32;
const WINDOW: *mut u32 = 0xfec0_0010 as *mut u32;

/// Register 0: ID.
pub const ID: u8 = 0x00;
/// Register 1: version and number of the last pin.
pub const VERSION: u8 = 0x01;

/// Redirection entry: masked.
pub const MASKED: u64 = 1 << 16;
/// Redirection entry: level triggered.
pub const LEVEL: u64 = 1 << 15;
/// Redirection entry: remote IRR, set from a level-triggered interrupt until its EOI.
pub const REMOTE_IRR: u64 = 1 << 14;
/// Redirection entry: active low.
pub const ACTIVE_LOW: u64 = 1 << 13;

/// Reads a register.
pub fn read(register: u8) -> u32 {
    // SAFETY: the page is mapped and holds only device registers, so no Rust object is accessed.
    unsafe {
        SELECT.write_volatile(u32::from(register));
        WINDOW.read_volatile()
    }
}

/// Writes a register.
pub fn write(register: u8, value: u32) {
    // SAFETY: as for `read`.
    unsafe {
        SELECT.write_volatile(u32::from(register));
        WINDOW.write_volatile(value);
    }
}

/// Reads the redirection entry of `pin`.
pub fn entry(pin: u8) -> u64 {
    let low = read(0x10 + 2 * pin);
    let high = read(0x11 + 2 * pin);
    u64::from(high) << 32 | u64::from(low)
}

/// Writes the redirection entry of `pin`; the destination is in bits 63:56.
pub fn set_entry(pin: u8, entry: u64) {
    write(0x11 + 2 * pin, (entry >> 32) as u32);
    write(0x10 + 2 * pin, (entry & 0xffff_ffff) as u32);
}

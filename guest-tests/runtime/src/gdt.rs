//! The GDT: selectors, and descriptors that a case may add.
//!
//! [`crate::boot`] lays the table out; each CPU adds its TSS descriptor when it starts.

/// Maximum number of CPUs that a payload can use.
pub const MAX_CPUS: usize = 64;

/// Selector of the 64-bit code segment of CPL 0.
pub const KERNEL_CODE: u16 = 0x08;
/// Selector of the data segment of CPL 0.
pub const KERNEL_DATA: u16 = 0x10;
/// Selector of the 32-bit code segment of CPL 3, without its RPL.
pub const USER_CODE32: u16 = 0x18;
/// Selector of the data segment of CPL 3, with its RPL.
pub const USER_DATA: u16 = 0x23;
/// Selector of the 64-bit code segment of CPL 3, with its RPL.
pub const USER_CODE: u16 = 0x2b;
/// Selector of the 32-bit code segment of CPL 0.
pub const KERNEL_CODE32: u16 = 0x30;
/// Selector of a data segment that is not present.
pub const ABSENT_DATA: u16 = 0x38;
/// Selector of the TSS of CPU 0; that of the next CPU is 16 higher.
pub const FIRST_TSS: u16 = 0x40;

/// Descriptors before those of the TSSs, which take two entries each.
const FIRST_TSS_INDEX: usize = FIRST_TSS as usize / 8;
/// Descriptors of the whole table.
const ENTRIES: usize = FIRST_TSS_INDEX + 2 * MAX_CPUS;
/// Limit of the GDT.
pub(crate) const LIMIT: usize = 8 * ENTRIES - 1;

unsafe extern "C" {
    static mut hindsight_gdt: [u64; ENTRIES];
}

/// Writes the descriptor of the TSS at `base` for CPU `index`, and returns its selector.
///
/// # Safety
/// `index` is below [`MAX_CPUS`], and only this CPU loads the selector.
pub(crate) unsafe fn set_tss(index: usize, base: u64, limit: u16) -> u16 {
    let low = u64::from(limit) | (base & 0xff_ffff) << 16 | 0x89 << 40 | (base >> 24 & 0xff) << 56;
    let gdt = (&raw mut hindsight_gdt).cast::<u64>();
    // SAFETY: the caller keeps the index inside the table.
    unsafe {
        gdt.add(FIRST_TSS_INDEX + 2 * index).write_volatile(low);
        gdt.add(FIRST_TSS_INDEX + 2 * index + 1)
            .write_volatile(base >> 32);
    }
    #[expect(clippy::cast_possible_truncation, reason = "index is below MAX_CPUS")]
    let selector = FIRST_TSS + 16 * index as u16;
    selector
}

/// Puts `descriptor` into the GDT and returns its selector; `slot` is taken modulo 8.
///
/// It replaces part of the TSS descriptors of the last CPUs, so it is for machines with at most 60
/// of them.
pub fn set_spare_descriptor(slot: usize, descriptor: u64) -> u16 {
    let index = 2 * MAX_CPUS + slot % 8;
    // SAFETY: the index is inside the table. No CPU uses the entry, because machines that run such
    // a payload have few CPUs.
    unsafe {
        (&raw mut hindsight_gdt)
            .cast::<u64>()
            .add(index)
            .write_volatile(descriptor);
    }
    u16::try_from(index * 8).unwrap_or(0)
}

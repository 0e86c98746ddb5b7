//! The page tables of the payload.
//!
//! At first they map 4 GiB one to one in 2 MiB pages, all of them writable, executable and
//! accessible at CPL 3.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::insn;

/// Present.
pub const P: u64 = 1 << 0;
/// Writable.
pub const RW: u64 = 1 << 1;
/// Accessible at CPL 3.
pub const US: u64 = 1 << 2;
/// Cache disable.
pub const PCD: u64 = 1 << 4;
/// Accessed.
pub const A: u64 = 1 << 5;
/// Dirty.
pub const D: u64 = 1 << 6;
/// In a page directory: a 2 MiB page.
pub const PS: u64 = 1 << 7;
/// Execute disable.
pub const NX: u64 = 1 << 63;

/// The bits of an entry that hold a 4 KiB page's address.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Bytes of a page.
pub const PAGE: u64 = 4096;

const TABLES: usize = 32;

#[repr(C, align(4096))]
struct TablePool(UnsafeCell<[[u64; 512]; TABLES]>);

// SAFETY: the counter gives each table to one call of `new_table`.
unsafe impl Sync for TablePool {}

static POOL: TablePool = TablePool(UnsafeCell::new([[0; 512]; TABLES]));
static USED: AtomicUsize = AtomicUsize::new(0);

fn new_table() -> *mut u64 {
    let n = USED.fetch_add(1, Ordering::Relaxed);
    assert!(n < TABLES, "no page table is free");
    // SAFETY: the index is inside the pool.
    unsafe { POOL.0.get().cast::<[u64; 512]>().add(n).cast() }
}

/// The address of the page-table entry of the 4 KiB page of `address`.
///
/// It splits larger pages and makes missing tables. Bits 63 to 48 of the address are ignored.
pub fn entry(address: u64) -> *mut u64 {
    let mut table = (insn::read_cr3() & ADDRESS) as *mut u64;
    for shift in [39, 30, 21] {
        // SAFETY: the index is below 512, and tables are mapped one to one.
        let slot = unsafe { table.add(index(address, shift)) };
        table = next_table(slot, shift);
    }
    // SAFETY: as above.
    unsafe { table.add(index(address, 12)) }
}

fn index(address: u64, shift: u32) -> usize {
    usize::try_from(address >> shift & 511).unwrap_or(0)
}

fn next_table(slot: *mut u64, shift: u32) -> *mut u64 {
    // SAFETY: `entry` passes the address of an entry of a table.
    let entry = unsafe { slot.read_volatile() };
    if entry & P != 0 && entry & PS == 0 {
        return (entry & ADDRESS) as *mut u64;
    }
    let table = new_table();
    if entry & P != 0 {
        let step = 1_u64 << (shift - 9);
        let flags = if shift == 21 { entry & !PS } else { entry };
        for n in 0..512 {
            // SAFETY: the index is inside the new table.
            unsafe { table.add(n).write(flags + n as u64 * step) };
        }
    }
    // SAFETY: as above. The compiler does not move a volatile store before the stores to the table
    // that it makes reachable.
    unsafe { slot.write_volatile(table as u64 | P | RW | US) };
    table
}

/// Maps the page of `address` to the physical page `frame` with `flags`; returns the old entry.
pub fn map(address: u64, frame: u64, flags: u64) -> u64 {
    replace(address, frame & ADDRESS | flags)
}

/// Makes the page of `address` not present and returns the old entry.
pub fn unmap(address: u64) -> u64 {
    replace(address, 0)
}

/// Sets and clears flags of the page of `address` and returns the old entry.
pub fn change(address: u64, set: u64, clear: u64) -> u64 {
    // SAFETY: `entry` returns the address of an entry of a mapped table.
    let old = unsafe { entry(address).read_volatile() };
    replace(address, old & !clear | set)
}

/// Restores an entry that another function of this module returned.
pub fn restore(address: u64, old: u64) {
    replace(address, old);
}

fn replace(address: u64, new: u64) -> u64 {
    let slot = entry(address);
    // SAFETY: `entry` returns the address of an entry of a mapped table.
    let old = unsafe {
        let old = slot.read_volatile();
        slot.write_volatile(new);
        old
    };
    insn::invlpg(address);
    old
}

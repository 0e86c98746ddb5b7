//! The layout of the data that generated code reads and writes.

use std::mem::offset_of;

/// Entries of the TLB of generated code: one for each value of a byte.
pub(crate) const TLB_ENTRIES: usize = 256;
/// Entries of a jump cache, a power of two.
pub(crate) const JUMPS: usize = 1024;
/// Most blocks whose runs are counted.
pub(crate) const RUN_COUNTERS: usize = 1 << 16;

/// The tag of an unused entry of a TLB: a page that belongs to another entry, so that no address,
/// canonical or not, matches it.
pub(crate) const fn unused_tag(index: usize) -> u64 {
    (index as u64 ^ 1) << 12
}

/// The rights with which code accesses memory. Each kind of code has its TLB and its jump cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Rights {
    /// CPL 0 to 2, with SMAP in force.
    Supervisor = 0,
    /// CPL 3.
    User = 1,
}

/// State that is exchanged with generated code.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Context {
    /// Cycles of the slice that no block has been charged for yet.
    pub(crate) budget: i64,
    /// Guest registers that have no host register: R9, R10 and R11.
    pub(crate) spilled: [u64; 3],
    /// How the arithmetic flags follow from the fields after it: see [`crate::flags`].
    pub(crate) flag_record: u32,
    /// Number of the exit that was taken.
    pub(crate) exit: u32,
    pub(crate) flag_a: u64,
    pub(crate) flag_b: u64,
    pub(crate) flag_step: u64,
    /// One byte each: a carry, and CF where it was set apart.
    pub(crate) flag_carry: u64,
    pub(crate) flag_cf: u64,
    /// The host's flags, as LAHF and SETO give them.
    pub(crate) saved_flags: u64,
    /// RIP that an indirect branch leads to.
    pub(crate) rip: u64,
    /// Bases of FS and GS.
    pub(crate) segment_base: [u64; 2],
    /// The first argument of the callback, which is called when the TLB lacks an address.
    pub(crate) callback_data: u64,
    /// Address at which code is entered.
    pub(crate) target: u64,
    /// Addresses of the next free entry of the branch buffer, and of the entry at which the buffer
    /// must be processed.
    pub(crate) branch_next: u64,
    pub(crate) branch_due: u64,
    /// Retired instructions at the end of the slice if all of its budget is used, modulo 2^32.
    pub(crate) end_stamp: u64,
    /// The [`VectorLevel`](crate::VectorLevel) up to which the host's registers hold the guest's.
    pub(crate) vectors_loaded: u32,
    /// The level that the guest may use.
    pub(crate) vectors_allowed: u32,
    /// The guest's MXCSR, unless its vector registers are loaded.
    pub(crate) mxcsr: u32,
    /// The host's MXCSR.
    pub(crate) host_mxcsr: u32,
    /// Address of the guest's vector registers: 32 of 64 bytes, and the opmask registers behind them.
    pub(crate) vectors: u64,
}

/// The TLB of one kind of code.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct TlbArrays {
    pub(crate) read_tag: [u64; TLB_ENTRIES],
    pub(crate) read_host: [u64; TLB_ENTRIES],
    pub(crate) write_tag: [u64; TLB_ENTRIES],
    pub(crate) write_host: [u64; TLB_ENTRIES],
}

/// An entry of a jump cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct JumpEntry {
    /// RIP; in an unused entry an address that belongs to another one.
    pub(crate) tag: u64,
    /// Address of the code.
    pub(crate) entry: u64,
    /// Instructions that entering it charges.
    pub(crate) charge: u64,
    pub(crate) unused: u64,
}

/// Binary logarithm of the size of an entry of a jump cache.
pub(crate) const JUMP_SHIFT: u8 = 5;
const _: () = assert!(size_of::<JumpEntry>() == 1 << JUMP_SHIFT);

/// All data.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Data {
    pub(crate) context: Context,
    pub(crate) tlb: [TlbArrays; 2],
    pub(crate) jumps: [[JumpEntry; JUMPS]; 2],
    /// How often blocks were entered from generated code.
    pub(crate) runs: [u64; RUN_COUNTERS],
}

/// Bytes of the data, in whole pages.
pub(crate) const DATA_BYTES: usize = size_of::<Data>().next_multiple_of(4096);

/// Offset of the TLB of a kind of code.
pub(crate) const fn tlb_offset(rights: Rights) -> usize {
    offset_of!(Data, tlb) + rights as usize * size_of::<TlbArrays>()
}

/// Offset of the jump cache of a kind of code.
pub(crate) const fn jumps_offset(rights: Rights) -> usize {
    offset_of!(Data, jumps) + rights as usize * size_of::<[JumpEntry; JUMPS]>()
}

/// Offset of a run counter.
pub(crate) const fn run_offset(slot: u32) -> usize {
    offset_of!(Data, runs) + slot as usize * size_of::<u64>()
}

//! Layout of the data that translated code reads and writes.

use crate::flag_stubs::{KIND_BYTES, STEP_BYTES};
use std::mem::offset_of;

/// Entries of a TLB. Code indexes it by one byte of the page number.
pub(crate) const TLB_ENTRIES: usize = 256;
/// Entries of a jump cache, a power of two.
pub(crate) const JUMPS: usize = 1 << JUMP_BITS;
/// Binary logarithm of the number of entries of a jump cache.
pub(crate) const JUMP_BITS: u8 = 12;
/// Number of run counters, each for one block.
pub(crate) const RUN_COUNTERS: usize = 1 << 16;

/// Binary logarithm of the size of a cache line in bytes.
pub(crate) const LINE_SHIFT: u32 = 6;
/// Size of a cache line in bytes.
pub(crate) const LINE: u64 = 1 << LINE_SHIFT;
/// Number of entries of a [`CacheLineTable`]: sets of a first-level cache.
pub(crate) const LINES: usize = 64;

/// Returns the tag that marks an entry of a [`CacheLineTable`] as unused.
///
/// It is the address of a line that belongs to another entry.
pub(crate) const fn unused_line(index: usize) -> u64 {
    (index as u64 ^ 1) << LINE_SHIFT
}

/// Returns the tag that marks an entry of a TLB as unused.
///
/// It is the address of a page that belongs to another entry, so that no linear address, canonical
/// or not, matches it.
pub(crate) const fn unused_tag(index: usize) -> u64 {
    (index as u64 ^ 1) << 12
}

/// The rights with which translated code accesses memory.
///
/// Code with either rights has its own TLB and jump cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Rights {
    /// CPL 0 to 2, with SMAP in force.
    Supervisor = 0,
    /// CPL 3.
    User = 1,
}

/// State that the translator exchanges with translated code.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Context {
    /// The rest of the budget: cycles of the slice that no block has taken yet.
    pub(crate) budget: i64,
    /// Guest registers that are kept in memory: R9, R10 and R11.
    pub(crate) spilled: [u64; 3],
    /// How the following fields determine the arithmetic flags: see [`crate::flags`].
    pub(crate) flag_record: u32,
    /// Number of the exit that was taken.
    pub(crate) exit: u32,
    pub(crate) flag_a: u64,
    pub(crate) flag_b: u64,
    pub(crate) flag_step: u64,
    /// One byte each: a carry, and CF if a bit test has set CF alone.
    pub(crate) flag_carry: u64,
    pub(crate) flag_cf: u64,
    /// The host's flags as LAHF and SETO AL leave them in AX.
    pub(crate) saved_flags: u64,
    /// The guest's arithmetic flags when the code was entered, in the same form.
    pub(crate) caller_flags: u64,
    /// Target of an indirect branch.
    pub(crate) rip: u64,
    /// Bases of FS and GS.
    pub(crate) segment_base: [u64; 2],
    /// First argument of the callback, which is called on a TLB miss.
    pub(crate) callback_data: u64,
    /// Address of the code to enter; within a unit, scratch memory.
    pub(crate) target: u64,
    /// Addresses of the next free record of branches, and of the one at which the caller must
    /// process them.
    pub(crate) record_next: u64,
    pub(crate) record_due: u64,
    /// Retired instructions, modulo 2^32, once the whole budget of the slice is used.
    pub(crate) end_stamp: u64,
    /// The [`VectorLevel`](crate::VectorLevel) of the loaded guest registers.
    pub(crate) vectors_loaded: u32,
    /// The highest level that translated code may load.
    pub(crate) vectors_allowed: u32,
    /// The guest's MXCSR; out of date while its vector registers are loaded.
    pub(crate) mxcsr: u32,
    /// The host's MXCSR.
    pub(crate) host_mxcsr: u32,
    /// Whether the guest's x87 state is loaded, or must not be: see [`crate::x87`].
    pub(crate) x87: u32,
    /// Address of the guest's x87 state, as XSAVE stores it.
    pub(crate) x87_area: u64,
    /// The guest's x87 instruction pointer, while its x87 state is loaded.
    pub(crate) fip: u64,
    /// Address of the guest's vector registers.
    ///
    /// 32 registers of 64 bytes, followed by the opmask registers.
    pub(crate) vectors: u64,
    /// The cache line of code that was fetched last.
    pub(crate) fetch_line: u64,
    /// Instructions that load and that store, since the code was entered.
    pub(crate) loads: u64,
    pub(crate) stores: u64,
}

/// The TLB for code with one kind of [`Rights`].
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct TlbArrays {
    pub(crate) read_tag: [u64; TLB_ENTRIES],
    pub(crate) read_host: [u64; TLB_ENTRIES],
    pub(crate) write_tag: [u64; TLB_ENTRIES],
    pub(crate) write_host: [u64; TLB_ENTRIES],
}

/// For each set of the first-level cache for data, the line whose loads change nothing there, and
/// the line whose stores change nothing.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct CacheLineTable {
    pub(crate) read_tag: [u64; LINES],
    pub(crate) read_host: [u64; LINES],
    pub(crate) write_tag: [u64; LINES],
    pub(crate) write_host: [u64; LINES],
}

/// A record of the branches of a path: see [`crate::paths`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct PathRecord {
    /// The rest of the budget at the end of the path, modulo 2^32.
    pub(crate) budget: u32,
    /// Number of the path.
    pub(crate) path: u32,
    /// Target of an indirect branch that ends the path.
    pub(crate) target: u64,
}

/// Records after which the caller must process them: few enough for the L1 cache.
pub(crate) const PATH_RECORDS: usize = 1024;

/// An entry of a jump cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct JumpEntry {
    /// RIP; in an unused entry, an address that maps to another entry.
    pub(crate) tag: u64,
    /// Address of the unit's code.
    pub(crate) entry: u64,
    /// Instructions that entering the unit subtracts from the budget.
    pub(crate) charge: u64,
    /// 1 if the code is in a global page, else 0.
    pub(crate) global: u64,
}

/// Binary logarithm of the size of an entry of a jump cache.
pub(crate) const JUMP_SHIFT: u8 = 5;
const _: () = assert!(size_of::<JumpEntry>() == 1 << JUMP_SHIFT);

/// Returns the jump cache index of a RIP.
pub(crate) fn jump_index(rip: u64) -> usize {
    usize::try_from((rip ^ rip >> JUMP_BITS) & (JUMPS as u64 - 1)).unwrap_or(0)
}

/// All data of one translator.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Data {
    pub(crate) context: Context,
    pub(crate) tlb: [TlbArrays; 2],
    pub(crate) jumps: [[JumpEntry; JUMPS]; 2],
    pub(crate) lines: [CacheLineTable; 2],
    /// For each set of the first-level cache for code, the line whose fetches change nothing.
    pub(crate) code_lines: [u64; LINES],
    /// The last one is for the path of an exit within a unit.
    pub(crate) path_records: [PathRecord; PATH_RECORDS + 1],
    /// Addresses of code that [`crate::flag_stubs`] calls.
    pub(crate) flag_kinds: [u64; KIND_BYTES],
    pub(crate) flag_steps: [u64; STEP_BYTES],
    /// The run counters: how often translated code entered each block.
    pub(crate) runs: [u64; RUN_COUNTERS],
}

/// Size of the data in bytes, rounded up to whole pages.
pub(crate) const DATA_BYTES: usize = size_of::<Data>().next_multiple_of(4096);

/// Returns the offset of the TLB for these rights.
pub(crate) const fn tlb_offset(rights: Rights) -> usize {
    offset_of!(Data, tlb) + rights as usize * size_of::<TlbArrays>()
}

/// Returns the offset of the jump cache for these rights.
pub(crate) const fn jumps_offset(rights: Rights) -> usize {
    offset_of!(Data, jumps) + rights as usize * size_of::<[JumpEntry; JUMPS]>()
}

/// Returns the offset of the line table for these rights.
pub(crate) const fn lines_offset(rights: Rights) -> usize {
    offset_of!(Data, lines) + rights as usize * size_of::<CacheLineTable>()
}

/// Returns the index in a [`CacheLineTable`] of a line: its address divided by 64.
pub(crate) fn line_index(line: u64) -> usize {
    usize::try_from(line % LINES as u64).unwrap_or(0)
}

/// Returns the offset of the entry for a line of code.
pub(crate) fn code_line_offset(line: u64) -> usize {
    offset_of!(Data, code_lines) + line_index(line) * size_of::<u64>()
}

/// Returns the offset of a run counter.
pub(crate) const fn run_offset(counter: u32) -> usize {
    offset_of!(Data, runs) + counter as usize * size_of::<u64>()
}

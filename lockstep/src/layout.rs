//! Where things are: the same linear addresses on the host and in the guest.
//!
//! The region is below 2 GiB, so that every address fits the 32-bit displacement of an instruction
//! and works in compatibility mode too.

/// Linear address of the region.
pub const FIRST: u32 = 0x4000_0000;
/// The region is aligned to this.
pub const STRIDE: u32 = 0x0100_0000;

/// Offset of the data that instructions work on: two pages with nothing mapped around them.
pub const DATA: u32 = 0x1_0000;
/// Its length.
pub const DATA_LEN: u32 = 0x2000;
/// A page of data that must not be written.
pub const READ_ONLY: u32 = 0x1_8000;
/// What the slots load their registers from.
pub const PARAMS: u32 = 0x2_0000;
/// Its length.
pub const PARAMS_LEN: u32 = 0x1_0000;
/// Where the slots note their results.
pub const LOG: u32 = 0x4_0000;
/// Its length.
pub const LOG_LEN: u32 = 0x2_0000;
/// The code, executable and not writable.
pub const CODE: u32 = 0x8_0000;
/// Its length.
pub const CODE_LEN: u32 = 0x1_0000;
/// Where the code goes on at its end: not the same on both sides.
pub const CELLS: u32 = 0xa_0000;
/// Native only: the stack of the signal handler.
pub const SIGNAL_STACK: u32 = 0xb_0000;
/// Its length.
pub const SIGNAL_STACK_LEN: u32 = 0x1_0000;

/// In [`CELLS`]: where to go at the end.
pub const RESUME: u32 = CELLS;
/// In [`CELLS`]: the stack pointer to go there with.
pub const SAVED_RSP: u32 = CELLS + 8;

/// Slots in a batch, at most.
pub const SLOTS: usize = 64;

/// In [`LOG`]: a [`FAULT_LEN`] record for each slot: vector + 1, error code, CR2, RIP.
pub const FAULTS: u32 = LOG;
/// Length of a record.
pub const FAULT_LEN: u32 = 32;
/// In [`LOG`]: the slot that runs.
pub const CURRENT: u32 = LOG + 0x800;
/// In [`LOG`]: RAX while flags are noted.
pub const SCRATCH: u32 = LOG + 0x808;
/// In [`LOG`]: the far pointer to compatibility mode.
pub const FAR: u32 = LOG + 0x820;
/// In [`LOG`]: general registers, flags and MXCSR at the end.
pub const FINAL: u32 = LOG + 0x840;
/// In [`LOG`]: vector registers at the end, 64 bytes each.
pub const FINAL_VECTORS: u32 = LOG + 0x1000;
/// In [`LOG`]: opmask registers at the end.
pub const FINAL_OPMASKS: u32 = FINAL_VECTORS + 0x800;
/// In [`LOG`]: the results of the slots.
pub const RESULTS: u32 = LOG + 0x2000;

/// In [`PARAMS`]: for each slot, where it goes on after an exception.
pub const POST: u32 = PARAMS;
/// In [`PARAMS`]: general registers, flags and MXCSR to start with.
pub const START: u32 = PARAMS + 0x200;
/// In [`PARAMS`]: vector registers to start with, 64 bytes each.
pub const START_VECTORS: u32 = PARAMS + 0x400;
/// In [`PARAMS`]: opmask registers to start with.
pub const START_OPMASKS: u32 = START_VECTORS + 0x800;
/// In [`PARAMS`]: an XSAVE area in which nothing is in use.
pub const ZEROS: u32 = START_VECTORS + 0x840;
/// In [`PARAMS`]: the values of the slots.
pub const VALUES: u32 = PARAMS + 0x1000;

/// Bytes of a region that the guest has.
pub const GUEST_LEN: u32 = 0xb_0000;

/// Base of GS where it is used.
pub const GS_BASE: u64 = 0x40;

/// In [`LOG`]: for each slot of system code, stack pointer, flags, CS and SS at its end.
pub const ENDS: u32 = LOG + 0x1000;

//! Layout of a region: the same linear addresses on the host and in the guest.
//!
//! The region is below 2 GiB, so that every address fits the 32-bit displacement of an instruction
//! and works in compatibility mode too.

/// Linear address of the region.
pub(crate) const REGION_BASE: u32 = 0x4000_0000;
/// Alignment of the region.
pub(crate) const REGION_ALIGN: u32 = 0x0100_0000;

/// Offset of the data that instructions work on: two pages with nothing mapped around them.
pub(crate) const DATA: u32 = 0x1_0000;
/// Length of [`DATA`].
pub(crate) const DATA_LEN: u32 = 0x2000;
/// Offset of a read-only page of data.
pub(crate) const READ_ONLY: u32 = 0x1_8000;
/// Offset of the parameters, from which the slots load their registers.
pub(crate) const PARAMS: u32 = 0x2_0000;
/// Length of [`PARAMS`].
pub(crate) const PARAMS_LEN: u32 = 0x1_0000;
/// Offset of the log, to which the slots store their results.
pub(crate) const LOG: u32 = 0x4_0000;
/// Length of [`LOG`].
pub(crate) const LOG_LEN: u32 = 0x2_0000;
/// Offset of the code, executable and not writable.
pub(crate) const CODE: u32 = 0x8_0000;
/// Length of [`CODE`].
pub(crate) const CODE_LEN: u32 = 0x1_0000;
/// Offset of the cells through which the code leaves: their contents differ between host and guest.
pub(crate) const CELLS: u32 = 0xa_0000;
/// Offset of the signal handler's stack; on the host only.
///
/// It is out of reach of a stack pointer that an instruction takes as its base, with whatever
/// displacement: the kernel ends a process that faults with its stack pointer in this stack.
pub(crate) const SIGNAL_STACK: usize = 1 << 40;
/// Length of [`SIGNAL_STACK`].
pub(crate) const SIGNAL_STACK_LEN: u32 = 0x1_0000;

/// In [`CELLS`]: the address to which the code jumps at its end.
pub(crate) const RESUME: u32 = CELLS;
/// In [`CELLS`]: the stack pointer at that jump.
pub(crate) const SAVED_RSP: u32 = CELLS + 8;
/// In [`CELLS`]: 1 while the host runs the batch; on the host only.
pub(crate) const RUNNING: u32 = CELLS + 16;

/// Maximum number of slots of a batch.
pub(crate) const SLOTS: usize = 64;

/// In [`LOG`]: for each slot a record of [`FAULT_LEN`] bytes: vector + 1, error code, CR2, RIP.
pub(crate) const FAULTS: u32 = LOG;
/// Length of an exception record.
pub(crate) const FAULT_LEN: u32 = 32;
/// In [`LOG`]: the number of the slot that runs.
pub(crate) const CURRENT: u32 = LOG + 0x800;
/// In [`LOG`]: RAX while flags are stored.
pub(crate) const SCRATCH: u32 = LOG + 0x808;
/// In [`LOG`]: the far pointer to compatibility mode.
pub(crate) const FAR: u32 = LOG + 0x820;
/// In [`LOG`]: general registers, flags and MXCSR at the end.
pub(crate) const FINAL: u32 = LOG + 0x840;
/// In [`LOG`]: vector registers at the end, 64 bytes each.
pub(crate) const FINAL_VECTORS: u32 = LOG + 0x1000;
/// In [`LOG`]: opmask registers at the end.
pub(crate) const FINAL_OPMASKS: u32 = FINAL_VECTORS + 0x800;
/// In [`LOG`]: the results of the slots.
pub(crate) const RESULTS: u32 = LOG + 0x2000;
/// In [`LOG`]: for each slot of a system batch, stack pointer, flags, CS and SS at its end.
pub(crate) const ENDS: u32 = LOG + 0x1000;

/// In [`PARAMS`]: for each slot, the address that follows its instruction.
pub(crate) const POST: u32 = PARAMS;
/// In [`PARAMS`]: general registers, flags and MXCSR to start with.
pub(crate) const START: u32 = PARAMS + 0x200;
/// In [`PARAMS`]: vector registers to start with, 64 bytes each.
pub(crate) const START_VECTORS: u32 = PARAMS + 0x400;
/// In [`PARAMS`]: opmask registers to start with.
pub(crate) const START_OPMASKS: u32 = START_VECTORS + 0x800;
/// In [`PARAMS`]: an XSAVE area in which nothing is in use.
pub(crate) const ZEROS: u32 = START_VECTORS + 0x840;
/// In [`PARAMS`]: the cells from which the slots load.
pub(crate) const VALUES: u32 = PARAMS + 0x1000;

/// Bytes of a region that the guest has.
pub(crate) const GUEST_LEN: u32 = 0xb_0000;

/// Base of GS in the class that uses it.
pub(crate) const GS_BASE: u64 = 0x40;
